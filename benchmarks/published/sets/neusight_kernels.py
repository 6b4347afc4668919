"""NeuSight's runs on one GPU from its tables of kernels alone: no operation of the networks was timed.

Inputs are forward times of products, norms, softmax and pointwise kernels in fp32, and the networks' configurations.
Profiles are made as those that come with the tool (:mod:`shipped_profiles`), without traces: backward products take the
time of forward ones of equal extents, what no table has a roofline of the data sheet, and a kind that a GPU's table
lacks is borrowed of another's. Nobody measured the hosts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import msgspec
from public.toolkit import run
from sets import neusight
from sets.neusight import Answer, read_answer, traces
from sets.runs import Predicted, PublishedSet, Run
from shipped.devices import DEVICES
from shipped.tables import Device
from shipped_profiles import all_regressors, build

from calibrate.profile.profile import read_profile, write_profile
from paradl_bench.network.graph import ModelGraph, read_network

NEEDS = (Path("neusight-train", "kernels"),)
CAUSES = (
    "Products take longer in the tables than one by one in the networks' traces on the same GPUs, but for the V100.",
    "No table has a backward pass, dropout or an embedding.",
)
FOLDERS = {
    "a100-pcie": "NVIDIA_A100_80GB_PCIe",
    "h100-sxm": "NVIDIA_H100_80GB_HBM3",
    "l4": "NVIDIA_L4",
    "v100": "Tesla_V100-PCIE-32GB",
}


def devices() -> list[Device]:
    """The four GPUs of the tables, without their traces and sweeps; each may borrow of all others."""
    known = {device.name: device for device in DEVICES}
    first = known["a100-pcie"]
    known["l4"] = dataclasses.replace(first, name="l4", sheet="l4", device_name="NVIDIA L4")
    tables = (dataclasses.replace(first.kernels[0], files=("neusight-train/kernels/*.csv",)),)
    return [
        dataclasses.replace(
            known[name],
            kernels=tables,
            sweeps=(),
            ranks=1,
            ranks_per_node=1,
            borrows={"fp32": tuple(other for other in FOLDERS if other != name)},
        )
        for name in FOLDERS
    ]


def written(
    data: Path, tables: Sequence[Device], wanted: Sequence[Device], models: set[str], work: Path
) -> dict[str, Path]:
    """Profiles of the wanted devices by their folders of traces, with these networks and regressors of all tables."""
    work.mkdir(parents=True)
    regressors = all_regressors(data, tables)
    networks = _networks(models, work)
    found = {}
    for each in wanted:
        path = build(each, regressors[each.name], data, work)
        write_profile(path, msgspec.structs.replace(read_profile(path), network=networks))
        found[FOLDERS[each.name]] = path
    return found


def simulated(profile: Path, trace: Path) -> Predicted:
    """Forward and backward of a run, whose network and batch its name says."""
    model, _, _, batch = trace.stem.split("-")
    about = ("--from-profile", str(profile), "--model", f"sets.networks:{model}", "--strategy", "serial")
    told = json.loads(run("predict", *about, "--batch", batch, "--json"))[0]
    update_s = told["phases_s"]["WU"]
    low, high = (edge - update_s for edge in told["interval_s"])
    return Predicted("simulate", told["iteration_s"] - update_s, (low, high))


def predictions(data: Path, work: Path) -> dict[Path, tuple[Predicted, ...]]:
    """Of every run by its trace, of which the name alone is read, and products' FLOPs by the simplest prediction."""
    made = devices()
    profiles = written(data, made, made, {trace.stem.split("-")[0] for trace in traces(data)}, work)
    return {
        trace: (simulated(profiles[trace.parent.name], trace), neusight.by_flops(trace).predicted())
        for trace in traces(data)
    }


def _networks(models: set[str], work: Path) -> dict[str, ModelGraph]:
    found = {}
    for model in sorted(models):
        path = work / f"{model}-network.json"
        run("paradl_bench", "describe", f"sets.networks:{model}", "-o", str(path))
        network = read_network(path)
        found[network.name] = network
    return found


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """The set of all runs; answers are read once predictions stand."""
    found = predictions(data, work)
    answers: list[Answer] = [read_answer(trace) for trace in found]
    runs = tuple(
        Run(answer.name, answer.forward_s + answer.backward_s, each)
        for answer, each in zip(answers, found.values(), strict=True)
    )
    inputs = "tables of forward kernels alone"
    return (PublishedSet("NeuSight, one GPU, from kernels alone", neusight.CITED, inputs, CAUSES, runs, wanted=0.09),)
