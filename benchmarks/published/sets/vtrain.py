"""vTrain: GPT on two to eight A100 of one node, from Perlmutter's fp16 operators and vTrain's all-reduce tables.

Each layer, and each part of one that a tensor-parallel rank runs, takes what regressors of Perlmutter's tables say of
its shape. Activations are computed again: backward of a block has its forward and its all-reduces once more. A sum that
adds up gradients, and dropout of the scores, take what a sum of as many elements does. Dropout behind a projection is
fused with the sum that follows it. Gradients of two bytes are all-reduced behind backward. Weights are updated at the
bandwidth of memory.

What a host takes to dispatch an operation is fitted to five runs, named by their settings alone (:func:`fitted_to`):
for each, the dispatch that gives its measured time; the median, and how far the five lie apart. They are not judged.
"""

from __future__ import annotations

import csv
import statistics
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import msgspec
import numpy as np
from public.toolkit import run
from sets.measured_layers import Place, Timed, write_layers
from sets.runs import Predicted, PublishedSet, Run, orders
from shipped.regressors import Regressors, fitted

from calibrate.fitting.kernels.kernel_trial import timed_shapes
from calibrate.profile.profile import Dispatch, read_profile, write_profile
from paradl_bench.core.statistics import Floats
from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import ImportOptions, load_file
from paradl_bench.network.graph import Layer, ModelGraph, read_network
from paradl_bench.network.kernel import KernelSamples, KernelShape, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape
from paradl_bench.plan.axis_planner import AxisPlace
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.plan.tasks import Collective
from paradl_bench.records.devices.sheet import device_sheet
from paradl_bench.strategies.tensor.plan import PLANNER
from predict.api.loaded_profile import load_profile
from predict.costs.compute.host_dispatch import UNMEASURED

RUNS = Path("vtrain-a100", "ground_truth_single_half.csv")
OPERATORS = Path("transformer-operators", "Perlmutter", "operator")
LINKS = Path("transformer-operators", "Perlmutter", "nccl")
NEEDS = (RUNS, OPERATORS, LINKS)
CITED = "VIA-Research/vTrain @ f8dda847, MIT; DebarghaG/estimate-train-time @ 1ac4d5e4, MIT"
PLACE = Place("NVIDIA A100-SXM4-80GB", 80_000_000_000, "vtrain")
TABLES = ("linear1", "linear2", "linear3", "linear4", "linear_final", "baddbmm", "bmm", "layernorm", "gelu", "res_add")
GPU = "NVIDIAA100-SXM4-80GB"
MICRO_BATCHES, DEGREES = (1, 2, 4, 8), (2, 4, 8)
SHARE_OF_PEAK = 0.5
SHEET = "a100-sxm-80gb"
OF_HOST = {"d2t1p1", "d1t2p1", "d1t1p2", "d1t4p1", "d1t8p1"}
"""Degrees of the runs that dispatch is fitted to, one each."""
CAUSES = ("No table has dropout, copies that make a tensor contiguous, or what a host takes for a collective.",)
MAPPING = """tool: published tables
about: times as they are published
device: "{gpu}"
dtype: DTYPE
names: {NVIDIAA100-SXM4-80GB: NVIDIA A100-SXM4-80GB}
tables:
"""
SOFTMAX = """  - {files: "{gpu}_ScaledUpperTriangMaskedSoftmax_fp16.csv", kind: softmax, settings: {function: softmax},
     times: {FW: "`F_dur(us)`", BW: "`B_dur(us)`"}, unit: us, sizes: {batch: b * h / mp * l, width: l, inner: 1}}
"""
ALL_REDUCE = """  - {files: "{gpu}_all_reduce.csv", collective: all_reduce, times: {call: seconds}, unit: s,
     sizes: {message_bytes: bytes, ranks: ranks, ranks_per_node: ranks}}
"""


class Case(NamedTuple):
    """A run as it was set up, without what was measured of it."""

    gpus: int
    batch: int
    micro_batch: int
    hidden: int
    heads: int
    layers: int
    sequence: int
    tensor: int
    data: int
    stages: int

    @property
    def degrees(self) -> str:
        """Data, tensor, pipeline."""
        return f"d{self.data}t{self.tensor}p{self.stages}"

    @property
    def kind(self) -> str:
        """Of runs alike: width and axes."""
        return f"h{self.hidden}: {' and '.join(axis for axis, degree in self.by_axis.items() if degree > 1)}"

    @property
    def by_axis(self) -> dict[str, int]:
        """Degrees by the names of their axes."""
        return {"data": self.data, "tensor": self.tensor, "pipeline": self.stages}

    @property
    def micro_batches(self) -> int:
        """Of a replica."""
        return self.batch // (self.data * self.micro_batch)

    @property
    def name(self) -> str:
        """All that tells it from others."""
        return f"h{self.hidden} L{self.layers} {self.degrees}, {self.micro_batches} x {self.micro_batch}"

    @property
    def model(self) -> str:
        """How its network is made."""
        return f"sets.networks:gpt_{self.hidden}_{self.layers}"


def cases(data: Path) -> list[Case]:
    """All runs."""
    return [Case(*map(int, row[:10])) for row in _rows(data)]


def read_answers(data: Path) -> dict[Case, float]:
    """Seconds of an iteration that were measured: never read by what predicts, but for the five of the host."""
    return {Case(*map(int, row[:10])): float(row[10]) * 1e-3 for row in _rows(data)}


def _rows(data: Path) -> list[list[str]]:
    with open(data / RUNS, newline="", encoding="utf-8-sig") as stream:
        return list(csv.reader(stream))[1:]


def fitted_to(found: Sequence[Case]) -> list[Case]:
    """Runs for the host, one of each of five degrees: the narrow network of most blocks, by single samples, fewest."""
    narrow = [case for case in found if (case.hidden, case.micro_batch, case.layers) == (1024, 1, 24)]
    groups = {each: [case for case in narrow if case.degrees == each] for each in sorted(OF_HOST)}
    return [min(group, key=lambda case: case.batch) for group in groups.values() if group]


class Prices:
    """Seconds of layers on a micro-batch, by regressors of the tables.

    Args:
        losses: microseconds a token, and of none, forward and backward.
    """

    def __init__(self, regressors: Regressors, losses: Mapping[str, Floats]) -> None:
        self._regressors, self._losses = regressors, losses
        self._known: dict[tuple[str, str, int], float] = {}

    def seconds(self, layer: Layer, stage: KernelStage, batch: int) -> float:
        """Of a layer's forward or backward, without what is computed again."""
        key = layer.operation, stage, batch
        if key not in self._known:
            self._known[key] = self._find(layer, stage, batch)
        return self._known[key]

    def _find(self, layer: Layer, stage: KernelStage, batch: int) -> float:
        if layer.kind == "loss":
            tokens = batch * 1024
            return float(np.polyval(self._losses[stage], tokens)) * 1e-6
        if layer.kind == "dropout" or (layer.kind == "elementwise" and not layer.batchless):
            return self._sum_s(batch * layer.output_elements)
        shape = kernel_shape(layer, stage, batch, "fp16")
        return 0.0 if shape is None or layer.batchless else self._regressed_s(shape)

    def _regressed_s(self, shape: KernelShape) -> float:
        key = shape.kind, shape.stage, tuple(sorted(shape.settings.items())), "fp16"
        one = self._regressors[key]
        return float(np.exp(one.logs(timed_shapes([shape], [1.0], "fp16"))[0]))

    def _sum_s(self, elements: int) -> float:
        sizes = {"batch": 1, "elements": elements, "smaller_elements": elements, "tensors": 2, "in_place": 0}
        (key,) = (key for key in self._regressors if key[0] == "elementwise")
        like = self._regressors[key].timed.shapes[0]
        flops, moved = elements, 6 * elements
        return self._regressed_s(msgspec.structs.replace(like, sizes=sizes, flops=flops, bytes=moved))


def prices(data: Path, work: Path) -> Prices:
    """Regressors of Perlmutter's tables in fp16, and lines through its losses."""
    (work / "softmax.yaml").write_text(MAPPING.replace("DTYPE", "fp16") + SOFTMAX)
    folder = data / OPERATORS
    records: list[KernelSamples] = []
    for table in (*TABLES, "embedding"):
        records += _records(folder / f"{GPU}_{table}_fp16.csv", "transformer-operators")
    records += _records(folder / f"{GPU}_ScaledUpperTriangMaskedSoftmax_fp16.csv", str(work / "softmax.yaml"))
    with open(folder / f"{GPU}_parallel_cross_entropy_128_fp16.csv", newline="") as stream:
        rows = [row for row in csv.DictReader(stream) if float(row["mp"]) == 1]
    tokens = [float(row["b"]) * float(row["l"]) for row in rows]
    columns = {"FW": "F_dur(us)", "BW": "B_dur(us)"}
    losses = {stage: np.polyfit(tokens, [float(row[name]) for row in rows], 1) for stage, name in columns.items()}
    return Prices(fitted(records, ""), losses)


def _records(path: Path, mapping: str) -> list[KernelSamples]:
    options = ImportOptions(device_name=PLACE.device_name, mapping=mapping)
    return importers()["operators"].read(load_file(path), options).kernels


def timed_layers(network: ModelGraph, found: Prices, batch: int, all_reduces: Mapping[int, Floats]) -> list[Timed]:
    """Whole layers, and those of ranks of each tensor-parallel degree.

    Args:
        all_reduces: by ranks, bytes and seconds.
    """
    timed = [_timed(layer, "", found, batch, 0.0) for layer in network.layers]
    settings = PlanSettings(batch=1, dtype="bf16", device="cuda")
    for ranks in DEGREES:
        sizes_s = all_reduces[ranks]
        for each in PLANNER.shard(
            network, AxisPlace(parse_strategy(f"t{ranks}").axes[0], 0, 0, 1), settings
        ).shards.values():
            if each.shard:
                sent = [batch * call.message_bytes for call in each.after_fw if isinstance(call, Collective)]
                again_s = float(np.interp(sent, *sizes_s).sum())
                timed.append(_timed(each.layer, each.shard, found, batch, again_s))
    return timed


def _timed(layer: Layer, shard: str, found: Prices, batch: int, again_s: float) -> Timed:
    forward_s, backward_s = found.seconds(layer, "FW", batch), found.seconds(layer, "BW", batch)
    in_block = layer.name.startswith("blocks.")
    return Timed(layer, forward_s, backward_s + (forward_s + again_s if in_block else 0.0), shard)


def all_reduce_tables(data: Path) -> dict[int, Floats]:
    """By ranks, bytes and seconds of vTrain's calls out of place."""
    found = {}
    for ranks in DEGREES:
        path = data / "vtrain-a100" / f"a100__AR_GPU{ranks}_1M_1024M_LUT.csv"
        table = np.loadtxt(path, delimiter=",", skiprows=1, usecols=(0, 3))
        found[ranks] = table.T * [[1], [1e-9]]
    return found


def profile(data: Path, work: Path) -> Path:
    """One profile of all eight networks at all micro-batches."""
    work.mkdir(parents=True)
    found, tables = prices(data, work), all_reduce_tables(data)
    folders = [*_links(data, work)]
    for model in sorted({case.model for case in cases(data)}):
        name = model.rpartition(":")[2]
        run("paradl_bench", "describe", model, "-o", str(work / f"{name}.json"))
        network = read_network(work / f"{name}.json")
        for batch in MICRO_BATCHES:
            folder = work / f"{name}-{batch}"
            timed = timed_layers(network, found, batch, tables)
            write_layers(folder, data / OPERATORS / f"{GPU}_linear1_fp16.csv", network, timed, PLACE, "bf16", batch)
            folders.append(folder)
    run("calibrate", "fit", *map(str, folders), "--force", "-o", str(work / "profile.json"))
    whole = read_profile(work / "profile.json")
    # The weight update goes at the bandwidth of memory.
    rate = device_sheet(SHEET).memory_bandwidth_bytes_per_s
    device = msgspec.structs.replace(whole.devices[0], memory_bandwidth_bytes_per_s=rate)
    write_profile(work / "profile.json", msgspec.structs.replace(whole, devices=(device,)))
    return work / "profile.json"


def _links(data: Path, work: Path) -> Iterator[Path]:
    """All-reduces, and point to point."""
    (work / "links.yaml").write_text(MAPPING.replace("DTYPE", "fp32") + ALL_REDUCE)
    # Their tables name a column twice, out of place and in place.
    tables = all_reduce_tables(data)
    # Twice as many bytes from row to row: a fit to all 1,024 sizes takes minutes.
    rows = [
        f"{table[0, size - 1]:.0f},{ranks},{table[1, size - 1]}"
        for ranks, table in tables.items()
        for size in 2 ** np.arange(11)
    ]
    (work / f"{GPU}_all_reduce.csv").write_text("\n".join(["bytes,ranks,seconds", *rows]))
    told = {
        "all-reduce": (str(work / "links.yaml"), [work / f"{GPU}_all_reduce.csv"]),
        "p2p": ("transformer-operators", [data / LINKS / f"{GPU}_p2p_fp16_1_2.csv"]),
    }
    for name, (mapping, files) in told.items():
        about = ("--mapping", mapping, "--device-name", PLACE.device_name, "-o", str(work / name))
        run("paradl_bench", "import", "operators", *map(str, files), *about)
        yield work / name


NO_RUN = msgspec.structs.replace(UNMEASURED, backward_s=UNMEASURED.backward_s + UNMEASURED.forward_s)
"""Of a host that nobody measured, where backward computes forward again."""


class Predictor:
    """Predictions from one profile with a host's dispatch."""

    def __init__(self, path: Path, dispatch: Dispatch) -> None:
        whole = read_profile(path)
        device = msgspec.structs.replace(whole.devices[0], dispatch=dispatch)
        path = path.with_name("with-host.json")
        write_profile(path, msgspec.structs.replace(whole, devices=(device,)))
        self._profile = load_profile(path)

    def predicted(self, case: Case, by: str) -> Predicted:
        """Seconds of an iteration."""
        options: dict[str, object] = {"dtype": "bf16", "optimizer": "adam", "backend": "nccl", "bucket_cap_mb": 1e6}
        strategy = "".join(f"{axis}{degree}" for axis, degree in self._axes(case) if degree > 1)
        if case.stages > 1:
            cuts = [f"blocks.{case.layers * stage // case.stages}.norm_1" for stage in range(1, case.stages)]
            # With fewer micro-batches than stages the two schedules are one.
            schedule = "1f1b" if case.micro_batches >= case.stages else "gpipe"
            options |= {"schedule": schedule, "micro_batches": case.micro_batches, "stages": ",".join(cuts)}
        else:
            options["accumulate"] = case.micro_batches
        found = self._profile.predict(case.model, strategy, batch=case.batch, **options).predictions[0]
        return Predicted(by, found.iteration_s, found.time.interval_s)

    @staticmethod
    def _axes(case: Case) -> tuple[tuple[str, int], ...]:
        return ("d", case.data), ("p", case.stages), ("t", case.tensor)


def fit_dispatch(path: Path, runs: Mapping[Case, float]) -> Dispatch:
    """The dispatch that gives each run its measured time: their median, and the deviation of one of them."""
    found = [_dispatch_of(path, case, measured_s) for case, measured_s in runs.items()]
    middle = statistics.median(found)
    spread = float(np.std(found, ddof=1)) / middle
    return _dispatch(middle, spread, tuple(case.name for case in runs))


def _dispatch(seconds: float, relative_sd: float = 0.0, runs: tuple[str, ...] = ("trial",)) -> Dispatch:
    # Backward computes forward again.
    return Dispatch(forward_s=seconds, backward_s=2 * seconds, relative_sd=relative_sd, runs=runs)


def _dispatch_of(path: Path, case: Case, measured_s: float) -> float:
    low, high = 0.0, 200e-6
    for _ in range(10):
        middle = (low + high) / 2
        found_s = Predictor(path, _dispatch(middle)).predicted(case, "").value
        low, high = (low, middle) if found_s > measured_s else (middle, high)
    return (low + high) / 2


def by_flops(network: ModelGraph, case: Case) -> Predicted:
    """FLOPs with forward of blocks twice, over a constant share of the GPUs' peaks."""
    flops = case.batch * (2 * network.fw_flops + network.bw_flops)
    peak = device_sheet(SHEET).peak("bf16")
    return Predicted("FLOPs", flops / (SHARE_OF_PEAK * peak * case.gpus))


def alike(runs: Sequence[tuple[Case, Run]]) -> list[list[tuple[Mapping[str, int], Run]]]:
    """Sets of runs that differ by degrees alone, with these."""
    groups: dict[tuple[int, ...], list[tuple[Mapping[str, int], Run]]] = {}
    for case, each in runs:
        settings = case.gpus, case.batch, case.micro_batch, case.hidden, case.layers
        groups.setdefault(settings, []).append((case.by_axis, each))
    return [group for group in groups.values() if len(group) > 1]


def published(data: Path, work: Path) -> tuple[PublishedSet, ...]:
    """All runs but the five: with their host's dispatch, with a host that nobody measured, and by FLOPs."""
    path = profile(data, work)
    chosen = fitted_to(cases(data))
    answers = read_answers(data)
    dispatch = fit_dispatch(path, {case: answers[case] for case in chosen})
    with_host, without = Predictor(path, dispatch), Predictor(path, NO_RUN)
    runs, others = [], []
    for case in cases(data):
        if case in chosen:
            continue
        network = read_network(work / f"{case.model.rpartition(':')[2]}.json")
        first = (with_host.predicted(case, "simulate, five runs' host"), by_flops(network, case))
        runs.append((case, Run(case.name, answers[case], first, group=case.kind)))
        second = (without.predicted(case, "simulate, no run"), by_flops(network, case))
        others.append(Run(case.name, answers[case], second, group=case.kind))
    told = f"Dispatch: {dispatch.forward_s * 1e6:.1f} us an operation, deviation {dispatch.relative_sd:.1%}, from "
    causes = (told + "; ".join(dispatch.runs) + ".", *orders(alike(runs)), *CAUSES)
    inputs = "operators of Perlmutter, and all-reduce tables of vTrain"
    return (
        PublishedSet(
            "vTrain, two to eight A100",
            CITED,
            f"{inputs}; host from five runs",
            causes,
            tuple(each for _, each in runs),
            wanted=0.08,
        ),
        PublishedSet("vTrain, host not measured", CITED, inputs, (), tuple(others)),
    )
