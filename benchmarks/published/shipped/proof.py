"""A shipped profile held against published training iterations of its device, which nothing was fitted to.

NeuSight's runs on one GPU: GPT-2 large and BERT large in fp32, forward and backward. They ran attention as products and
a softmax; the tool traces it fused, and BERT with its head for masked tokens. So a part of an error is the network's.
"""

from __future__ import annotations

import json
import statistics
from pathlib import Path
from typing import NamedTuple

from public.toolkit import run
from sets.neusight import read_answer
from shipped.tables import Device

_FOLDERS = {
    "NVIDIA A100 80GB PCIe": "NVIDIA_A100_80GB_PCIe",
    "NVIDIA H100 80GB HBM3": "NVIDIA_H100_80GB_HBM3",
    "Tesla V100-PCIE-32GB": "Tesla_V100-PCIE-32GB",
}
_NETWORKS = {"gpt2_large-train-1024": "gpt2-large", "bert_large-train-512": "bert-large"}


class Held(NamedTuple):
    """A run: its name, the error of forward and backward together, and whether the interval holds it."""

    name: str
    error: float
    holds: bool


def held_against_runs(profile: Path, device: Device, data: Path) -> list[Held]:
    """Every run of the device whose network comes with the tool."""
    folder = data / "neusight-train" / _FOLDERS.get(device.device_name, "none")
    return [
        _held(profile, trace, model, trace.stem.rpartition("-")[2])
        for start, model in _NETWORKS.items()
        for trace in sorted(folder.glob(f"{start}-*.csv"))
        if trace.with_suffix(".json").exists()
    ]


def _held(profile: Path, trace: Path, model: str, batch: str) -> Held:
    about = ("--from-profile", str(profile), "--model", model, "--strategy", "serial", "--batch", batch, "--json")
    (told,) = json.loads(run("predict", *about))
    answer = read_answer(trace)
    measured_s, phases = answer.forward_s + answer.backward_s, told["phases_s"]
    low, high = (end - phases["WU"] for end in told["interval_s"])
    return Held(answer.name, (phases["FW"] + phases["BW"]) / measured_s - 1, low <= measured_s <= high)


def accuracy_line(runs: list[Held]) -> str:
    """What a profile says of its iterations."""
    if not runs:
        return "iterations: not proven"
    size = statistics.fmean(abs(each.error) for each in runs)
    inside = sum(each.holds for each in runs)
    return (
        f"iterations of one GPU in fp32: mean error {size:.0%} over {len(runs)} published runs of GPT-2 large and BERT"
        f" large, {inside} inside of the 90% interval; other dtypes and several GPUs: not proven"
    )
