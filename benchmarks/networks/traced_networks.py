"""Trace the models whose networks come with the tool, so that predicting from a profile needs no torch.

    python benchmarks/networks/traced_networks.py

These are language models, and the networks of the ParaDL paper with a few others of images. DeepSeek's are left out:
they are as large as all others together, and are traced when they are asked for.
"""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))

import msgspec  # noqa: E402

from paradl_bench.core.files.storage import write_bytes_atomically  # noqa: E402
from paradl_bench.measure.tracing.tracing import trace_network  # noqa: E402
from paradl_bench.network.models.catalog import load_model  # noqa: E402
from paradl_bench.network.models.language_sizes import UNTIED, language_model_names  # noqa: E402
from paradl_bench.network.models.traced_networks import network_file  # noqa: E402

OF_IMAGES = ("resnet18", "resnet50", "resnet152", "vgg16", "vit_b_16", "cosmoflow")


def main() -> None:
    """Trace each, and write it."""
    of_text = (name for name in language_model_names() if not name.endswith(UNTIED) and not name.startswith("deepseek"))
    for name in (*of_text, *OF_IMAGES):
        network = trace_network(load_model(name, device="meta"))
        content = gzip.compress(msgspec.json.encode(network), 9, mtime=0)
        write_bytes_atomically(network_file(name), content)
        print(f"{name}: {len(network.layers)} operations, {len(content)} bytes")


if __name__ == "__main__":
    main()
