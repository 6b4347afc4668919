"""ParaDL's measured runs of VGG16 (technical report, Table VIII) against the closed forms.

The data hold the whole model's seconds per sample, shared over layers by FLOPs, and alpha and beta of every level: no
time of a shard, no sweep. So nothing but the paper's own row can be evaluated, and only where the batch is known: 32 in
all for filter and channel. What the mini-batches of the hybrids were the data do not say.
"""

from __future__ import annotations

import json
import math
import re
from pathlib import Path

from public.pairs import Pair
from public.toolkit import run

SOURCE = "ParaDL VGG16"
SAMPLES, BATCH = 1_280_000, 32
SECONDS_PER_SAMPLE = 0.008245589
STRATEGIES = {"filter": "f", "channel": "c"}
LEVELS = (("node", 4, 9e-6, 2e-11), ("leaf", 68, 3.031e-5, 8e-11), ("rack", 136, 3.049e-5, 8e-11),
          ("system", 4096, 3.098e-5, 8e-11))  # fmt: skip
_ROW = re.compile(r"\| VGG16 \| ([a-z+]+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \| (\d+) \|")


def measured(readme: str) -> list[tuple[str, int, float]]:
    """(strategy, GPUs, seconds an epoch) of every row of the table."""
    return [(strategy, int(gpus), float(total)) for strategy, gpus, _, _, total, _ in _ROW.findall(readme)]


def net_file() -> str:
    """VGG16 on 3x226x226 in the format of the paper's tool."""
    lines = ["Dataset|ImageNet", f"Input|{SAMPLES}x3x226x226", "Model|vgg16"]
    seconds, channels, extent, number = SECONDS_PER_SAMPLE, 3, 226, 0
    for filters, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            number += 1
            x, y = f"{channels}x{extent}x{extent}", f"{filters}x{extent}x{extent}"
            lines.append(f"CONV_{number}|{x}|{channels}x{filters}x3x3|{y}|{seconds}")
            seconds, channels = 0.0, filters
        after = math.ceil(extent / 2)
        lines.append(f"MPOOL_{number}|{y}|0x0x2x2|{filters}x{after}x{after}|0")
        extent = after
    x, kernel = f"{channels}x{extent}x{extent}", f"{extent}x{extent}"
    for number, width in enumerate((4096, 4096, 1000), start=1):
        lines.append(f"FC_{number}|{x}|{channels}x{width}x{kernel}|{width}x1x1|0")
        channels, x, kernel = width, f"{width}x1x1", "1x1"
    return "\n".join(lines) + "\n"


def pairs(data: Path, folder: Path) -> list[Pair]:
    """Rows of filter and channel.

    Raises:
        RuntimeError: a command failed.
    """
    profile, cluster = _profile(folder), folder / "cluster.yaml"
    levels = [
        f"  - {{name: {name}, ranks: {ranks}, alpha_s: {alpha:.6f}, beta_s_per_byte: {1e12 * beta:.1f}e-12}}"
        for name, ranks, alpha, beta in LEVELS
    ]
    cluster.write_text("\n".join(["name: theirs", "levels:", *levels]) + "\n")
    found = []
    readme = (data / "paradl-projections" / "README.md").read_text()
    for kind, gpus, seconds in measured(readme):
        if kind in STRATEGIES:
            about = ("--from-profile", str(profile), "--model", "vgg16", "--cluster", str(cluster))
            told = run("predict", *about, "--strategy", f"{STRATEGIES[kind]}{gpus}", "--batch", str(BATCH), "--split",
                       "CONV*", "--evaluator", "paradl", "--dataset-samples", str(SAMPLES), "--json")  # fmt: skip
            point = json.loads(told)[0]
            epoch_s = point["epoch_s"]
            low, high = (epoch_s * end / point["iteration_s"] for end in point["interval_s"])
            found.append(
                Pair(
                    source=SOURCE,
                    what=f"VGG16, {kind}, {BATCH} in all, {gpus} GPUs",
                    ranks=gpus,
                    evaluator="paradl",
                    chosen=True,
                    unit="epoch",
                    predicted_s=epoch_s,
                    low_s=min(low, epoch_s),
                    high_s=max(high, epoch_s),
                    perfect_s=SAMPLES * SECONDS_PER_SAMPLE / gpus,
                    measured_s=seconds,
                )
            )
    return found


def _profile(folder: Path) -> Path:
    net, made, profile = folder / "vgg16.net", folder / "vgg16", folder / "vgg16-profile.json"
    net.write_text(net_file())
    run("paradl_bench", "import", "paradl-net", str(net), "--batch", str(BATCH), "-o", str(made))
    # The file has one time of forward and backward, which predictions need apart; the closed forms add them up again.
    samples = made / "layers.jsonl"
    lines = []
    for line in samples.read_text().splitlines():
        record = json.loads(line)
        for phase, share in (("FW", 1 / 3), ("BW", 2 / 3)):
            lines.append(json.dumps({**record, "phase": phase, "samples_s": [share * s for s in record["samples_s"]]}))
    samples.write_text("\n".join(lines) + "\n")
    run("calibrate", "fit", str(made), "-o", str(profile))
    return profile
