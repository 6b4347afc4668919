"""Every strategy on ghost layers over emulated nodes, predicted from a calibration of that very cluster.

    make emulate        or        python benchmarks/emulation.py -o DIR [--models M,...] [--ranks-per-node R,...]
                                  python benchmarks/emulation.py -o DIR --table

A cluster has so many ranks a node, and links of one rate. On each, collectives are swept inside of a node, over nodes,
and in groups at once, as on a real cluster; copies of gradients are measured on this host; a profile is fitted from
both. The seconds that layers sleep are synthetic: those of a device of a V100's rates, half of its peak and three
quarters of its bandwidth (15.7 TFLOP/s in fp32 and 900 GB/s, NVIDIA's data sheet of the V100 SXM2), by flops and bytes
of every layer. Then every configuration trains on ghosts, all of a layout by the same ranks, which are started once,
and is held against its prediction. ``table.md`` and ``table.json`` have a row each, and how strategies rank at every
size.

What is complete is not run again; remove a directory to have it measured anew. No run is begun after ``--minutes``: the
same command goes on with those that are left. ``--table`` measures nothing, and has the rows of what is complete, also
while the suite runs. Needs the right to make network namespaces.
"""

from __future__ import annotations

import argparse
import gc
import math
import sys
import time
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

import msgspec
from repetitions import run

from calibrate.profile import Device, LayerTime, ModelTime, Profile, read_profile, write_profile
from paradl_bench.emulate_nodes.cluster import emulated_cluster
from paradl_bench.emulate_nodes.layout import NodeLayout
from paradl_bench.measure.launcher import launch_ranks
from paradl_bench.measure.process_groups import RankContext, join_ranks
from paradl_bench.measure.tracing import trace_network
from paradl_bench.measure.training import measure_training
from paradl_bench.measure.training_request import TrainingRequest
from paradl_bench.models.catalog import load_model
from paradl_bench.spec.measurement import is_complete
from paradl_bench.spec.network import Layer, Network
from paradl_bench.spec.slow_rank import parse_slow_rank
from paradl_bench.spec.statistics import Summary
from paradl_bench.spec.storage import encode_pretty, write_bytes_atomically
from paradl_bench.spec.strategy import parse_strategy
from predict.validation import validate_runs

MODELS = {"resnet50": (3, 64, 64), "emulated_networks:small_vgg": (3, 32, 32)}
BATCH = 16
"""Global, at every size: strategies of a size are ranked."""
BRIEF = frozenset({"emulated_networks:small_vgg"})
"""Models that train by a strategy of each kind alone."""
NODES_OF = {4: (1, 2, 4), 2: (2, 4)}
"""By ranks on a node: how many nodes."""
CLUSTERS = (4,)
"""Those of them that are emulated unless others are asked for: 4, 8 and 16 ranks."""
MINUTES = 28.0
LINK_BYTES_PER_S = 125e6
"""Of each node's link, a tenth or less of what ranks of a node send each other on a host of a few cores."""
SERIAL_S = 2.0
"""What a serial iteration sleeps: layers are dilated to it, so that the framework is small beside a share of it."""
ITERATIONS, WARMUP = 6, 3
"""Few: sleeps do not spread, and what messages do is seen over configurations, not over repetitions."""
OPERATIONS, SIZES = "all_reduce,all_gather,broadcast,send_recv", "4K:32M:20"
AT_ONCE = "all_reduce,broadcast"
"""What replicas of shared layers, and segments of buckets, do at once over nodes."""
_FOUND = ("stages", "cut_by")
"""Options that every pipeline's run records and nobody asked for."""
FLOPS, BYTES_PER_S, CALL_S = 0.5 * 15.7e12, 0.75 * 900e9, 5e-6
"""Rates of the synthetic device, and what every operation takes at least."""


class Case(msgspec.Struct, frozen=True, kw_only=True):
    """A run of the suite.

    Attributes:
        directory: that it is measured into. profile: whose seconds layers sleep.
    """

    model: str
    input_shape: tuple[int, ...]
    strategy: str
    directory: str
    profile: str
    layout: NodeLayout
    batch: int = BATCH
    schedule: str = "gpipe"
    micro_batches: int | None = None
    bucket_cap_mb: float | None = None
    exchange: str = "flat"
    slow_rank: str = ""
    dilate: float
    iterations: int

    @property
    def request(self) -> TrainingRequest:
        """What is trained."""
        return TrainingRequest(
            model=self.model,
            input_shape=self.input_shape,
            strategy=parse_strategy(self.strategy),
            batch=self.batch,
            device="cpu",
            schedule=self.schedule,
            micro_batches=self.micro_batches,
            bucket_cap_mb=self.bucket_cap_mb,
            exchange=self.exchange,
            ranks_per_node=None if self.exchange == "flat" else self.layout.ranks_per_node,
            layout=self.layout,
            iterations=self.iterations,
            warmup=WARMUP,
            emulate=self.profile,
            dilate=self.dilate,
            slow_rank=parse_slow_rank(self.slow_rank) if self.slow_rank else None,
        )

    @property
    def complete(self) -> bool:
        """Whether it was measured to its end."""
        return is_complete(Path(self.directory))


def configurations(layout: NodeLayout, *, brief: bool = False) -> list[tuple[str, dict[str, object]]]:
    """Strategies of so many ranks, and their settings.

    Args:
        brief: one of each kind.
    """
    ranks, half = layout.ranks, layout.ranks // 2
    one_forward = {"schedule": "1f1b", "micro_batches": 2 * ranks}
    if brief:
        if ranks > 8:
            return [(f"d{ranks}", {}), (f"d{layout.nodes}f{layout.ranks_per_node}", {})]
        return [(f"d{ranks}", {}), (f"p{ranks}", one_forward), (f"d2f{half}", {}), (f"d2s{half}", {})]
    if ranks > 8:
        nodes, inside = layout.nodes, layout.ranks_per_node
        return [
            (f"d{ranks}", {}),
            (f"d{ranks}", {"exchange": "segmented"}),
            *((f"d{nodes}{axis}{inside}", {}) for axis in "fcsp"),
        ]
    found: list[tuple[str, dict[str, object]]] = [
        (f"d{ranks}", {}),
        (f"d{ranks}", {"bucket_cap_mb": 4.0}),
        (f"f{ranks}", {}),
        (f"c{ranks}", {}),
        (f"s2x{half}", {}),
        (f"p{ranks}", {}),
        (f"p{ranks}", one_forward),
        (f"d2f{half}", {}),
        (f"d2c{half}", {}),
        (f"d2s{half}", {}),
        (f"d2p{half}", {}),
        (f"d{ranks}", {"slow_rank": f"1.5@{ranks - 1}"}),
        (f"p{ranks}", {**one_forward, "slow_rank": "1.5@1"}),
    ]
    if layout.nodes > 1:
        found += [(f"d{ranks}", {"exchange": kind}) for kind in ("leader", "segmented")]
    return found


def cases_of(base: Path, model: str, layout: NodeLayout) -> list[Case]:
    """Runs of one model on one layout, below ``base``."""
    found = []
    of_model = {"model": model, "input_shape": MODELS[model], "layout": layout, "iterations": ITERATIONS}
    of_model["dilate"] = round(SERIAL_S / sum(phase_seconds(traced(model)).values()), 3)
    for strategy, settings in configurations(layout, brief=model in BRIEF):
        words = "-".join([strategy, *(f"{name}={value}" for name, value in settings.items())])
        directory = base / f"{layout}" / f"{model.rpartition(':')[2]}-{words}"
        files = {"directory": str(directory), "profile": str(base / "profile.json")}
        of_case = {**of_model, "strategy": strategy, **settings, **files}
        found.append(msgspec.convert(of_case, Case, from_attributes=True))
    return found


@cache
def traced(model: str) -> Network:
    """A model of the suite."""
    return trace_network(load_model(model, MODELS[model]))


def sweeps(layouts: Sequence[NodeLayout]) -> dict[str, str]:
    """By name, the options of the sweeps of collectives that calibrate a cluster."""
    on_node = layouts[0].ranks_per_node
    over = [layout.nodes for layout in layouts if layout.nodes > 1]
    inside = {f"inside-{ranks}": f"--nodes 1 --ranks-per-node {ranks}" for ranks in sorted({2, on_node})}
    across = {f"across-{nodes}": f"--nodes {nodes} --ranks-per-node {on_node}" for nodes in over}
    within = {"at-once-1": f"--nodes 1 --ranks-per-node {on_node} --concurrent 2"} if on_node > 2 else {}
    groups = {
        f"at-once-{nodes}": f"--nodes {nodes} --ranks-per-node {on_node} --concurrent {on_node}" for nodes in over
    }
    alone = {name: f"{options} --ops {OPERATIONS}" for name, options in {**inside, **across}.items()}
    # Of more than 8 ranks all exchange gradients alone, and a sweep takes longer the more there are.
    for layout in layouts:
        if layout.ranks > 8:
            alone[f"across-{layout.nodes}"] = f"{across[f'across-{layout.nodes}']} --ops {AT_ONCE}"
    return {**alone, **{name: f"{options} --ops {AT_ONCE}" for name, options in {**within, **groups}.items()}}


def calibrate(base: Path, layouts: Sequence[NodeLayout], models: Iterable[str]) -> Path:
    """The profile of a cluster: its collectives as measured, layers as the synthetic device has them."""
    common = f"--link-bandwidth {8 * LINK_BYTES_PER_S / 1e6:g}Mbit/s --sizes {SIZES} --blocks 3"
    measured = []
    for name, options in sweeps(layouts).items():
        measured.append(base / name)
        words = ["collectives", *options.split(), *common.split(), "-o", str(base / name)]
        run("paradl_bench", words)
    # Of these layers copies of gradients are taken, which ghosts' ranks make for real, those of a node at once.
    host = f"layers resnet18 --input-shape 3x32x32 --batch 2 --ranks-on-host {layouts[0].ranks_per_node}"
    run("paradl_bench", [*host.split(), "--isolated", "none", "--blocks", "2", "-o", str(base / "host")])
    fitted, profile = base / "measured.json", base / "profile.json"
    if not fitted.exists():
        run("calibrate", ["fit", *map(str, measured), str(base / "host"), "--force", "-o", str(fitted)])
    networks = [traced(model) for model in models]
    write_profile(profile, with_synthetic_layers(read_profile(fitted), networks))
    return profile


def with_synthetic_layers(profile: Profile, networks: Sequence[Network]) -> Profile:
    """The profile with the seconds of these networks' layers on the synthetic device, and none of what was measured."""
    layers = {layer.operation: (layer, network) for network in networks for layer in network.layers}
    device = Device(
        name="synthetic: half of a V100's peak, three quarters of its bandwidth",
        kind="cpu",
        memory_bytes=16 * 1024**3,
        devices_per_host=profile.cluster.ranks_per_node,
        peak_flops=FLOPS,
        memory_bandwidth_bytes_per_s=BYTES_PER_S,
    )
    return msgspec.structs.replace(
        profile,
        devices=(device,),
        network={network.name: network for network in networks},
        layer_times=tuple(
            LayerTime(
                operation=operation,
                phase=phase,
                mode="in_situ",
                batch=batch,
                dtype="fp32",
                ranks_on_host=1,
                time=_exactly(synthetic_seconds(layer, network, phase, batch)),
                block_relative_sd=0.0,
            )
            for operation, (layer, network) in layers.items()
            for phase in ("FW", "BW")
            for batch in (1, 2, 4, 8, 16)
        ),
        model_times=tuple(_model_time(network) for network in networks),
    )


def synthetic_seconds(layer: Layer, network: Network, phase: str, batch: int) -> float:
    """What a layer takes: its call, and its flops or bytes, whichever takes longer; backward moves twice as many."""
    held = {parameter.name: parameter.bytes for parameter in network.parameters}
    moved = layer.fw_bytes * batch + sum(held.get(name, 0) for name in layer.parameters)
    if phase == "FW":
        return CALL_S + max(layer.fw_flops * batch / FLOPS, moved / BYTES_PER_S)
    flops = (layer.bw_input_flops + layer.bw_weight_flops) * batch
    return CALL_S + max(flops / FLOPS, 2 * moved / BYTES_PER_S)


def _exactly(seconds: float) -> Summary:
    return Summary(median_s=seconds, typical_s=seconds, iqr_s=0.0, minimum_s=seconds, samples=1)


def phase_seconds(network: Network) -> dict[str, float]:
    """Seconds of a serial iteration on the whole batch, by phase."""
    of_layers = {
        phase: sum(synthetic_seconds(layer, network, phase, BATCH) for layer in network.layers)
        for phase in ("FW", "BW")
    }
    # Parameters and gradients are read, parameters written.
    return {**of_layers, "WU": 3 * sum(parameter.bytes for parameter in network.parameters) / BYTES_PER_S}


def _model_time(network: Network) -> ModelTime:
    seconds = phase_seconds(network)
    return ModelTime(
        model=network.name,
        batch=BATCH,
        dtype="fp32",
        optimizer="sgd",
        ranks_on_host=1,
        fw=_exactly(seconds["FW"]),
        bw=_exactly(seconds["BW"]),
        wu=_exactly(seconds["WU"]),
        iteration=_exactly(sum(seconds.values())),
        fw_between=_exactly(0.0),
        bw_between=_exactly(0.0),
        remainder_relative=0.0,
        remainder_interval=(0.0, 0.0),
        noise_floor_relative=0.0,
        common_relative_sd=0.0,
        iteration_relative_quantiles=(1.0, 1.0),
    )


def train(cases: Sequence[Case], until: float) -> None:
    """Train what is not complete, all of one layout by ranks that are started once.

    Args:
        until: on the host's monotonic clock; no run is begun later.
    """
    missing = [case for case in cases if not case.complete]
    if not missing or time.monotonic() > until:
        return
    layout = missing[0].layout
    for case in missing:
        case.request.check()
    print(f"{len(missing)} runs on {layout} ranks", flush=True)
    told = [msgspec.json.encode(missing).decode(), "--until", repr(until)]
    command = [sys.executable, str(Path(__file__).resolve()), "--as-rank", *told]
    with emulated_cluster(layout) as cluster:
        launch_ranks(command, ranks=layout.ranks, device="cpu", timeout_s=3600, hang_timeout_s=600, cluster=cluster)


def train_as_rank(cases: Sequence[Case], context: RankContext, until: float) -> None:
    """Train one after the other, together with the other ranks."""
    for case in cases:
        begin = time.monotonic()
        if context.share(begin) > until:
            return
        measure_training(case.request, context, Path(case.directory), ("benchmarks/emulation.py",))
        # Modules hold each other in circles, and their buckets and groups with them.
        gc.collect()
        if context.rank == 0:
            print(f"{time.monotonic() - begin:.1f} s for {Path(case.directory).name}", flush=True)


class Row(msgspec.Struct, frozen=True, kw_only=True):
    """A configuration in the table.

    Attributes:
        layout: nodes x ranks on each. error: (predicted - measured) / measured. holds: whether the interval does.
        noise_floor: run-to-run spread of the measurement, relative to it.
    """

    model: str
    layout: str
    strategy: str
    options: str
    predicted_s: float
    measured_s: float
    error: float
    holds: bool
    noise_floor: float
    explained_by: str
    issued_equals_plan: bool | None


def rows_of(profile: Path, cases: Sequence[Case]) -> list[Row]:
    """Every run beside its prediction by the simulation."""
    complete = {case.directory: case for case in cases if case.complete}
    if not complete:
        return []
    # By force: layers and collectives were not measured in one environment.
    report = validate_runs(profile, [Path(directory) for directory in complete], cluster_path=None, force=True)
    return [
        Row(
            model=pair.model,
            layout=str(complete[pair.run].layout),
            strategy=pair.strategy,
            options=" ".join(
                [f"{name}={text}" for name, text in pair.options.items() if name not in _FOUND]
                + ([] if pair.bucket_cap_bytes == 25 * 1024**2 else [f"bucket={pair.bucket_cap_bytes / 1024**2:g}MiB"])
                + ([f"slow_rank={complete[pair.run].slow_rank}"] if complete[pair.run].slow_rank else [])
            ),
            predicted_s=pair.predicted_s,
            measured_s=pair.measured_median_s,
            error=pair.error,
            holds=pair.covered,
            noise_floor=pair.noise_floor,
            explained_by=pair.explained_by,
            issued_equals_plan=pair.issued_equals_plan,
        )
        for pair in report.pairs
        if pair.evaluator == "simulate"
    ]


def table(rows: Sequence[Row]) -> str:
    """The rows in Markdown, and below how strategies rank at every size."""
    lines = [
        "| model | nodes x ranks | strategy | options | predicted s | measured s | error | in interval | as planned |",
        "|---|---|---|---|---|---|---|---|---|",
        *(
            f"| {row.model} | {row.layout} | {row.strategy} | {row.options} | {row.predicted_s:.4g} |"
            f" {row.measured_s:.4g} | {row.error:+.1%} | {'yes' if row.holds else 'no'} |"
            f" {'yes' if row.issued_equals_plan else 'no'} |"
            for row in rows
        ),
        "",
        f"mean accuracy {1 - _mean(abs(row.error) for row in rows):.1%},"
        f" intervals hold {_mean(row.holds for row in rows):.0%} of {len(rows)}",
        "",
        "| model | nodes x ranks | best predicted | best measured | regret |",
        "|---|---|---|---|---|",
        *(_ranking(group) for group in _sizes(rows)),
    ]
    return "\n".join(lines) + "\n"


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return sum(found) / len(found)


def _sizes(rows: Sequence[Row]) -> list[list[Row]]:
    groups: dict[tuple[str, str], list[Row]] = {}
    for row in rows:
        groups.setdefault((row.model, row.layout), []).append(row)
    return list(groups.values())


def _ranking(rows: Sequence[Row]) -> str:
    """Which was predicted best and which was; regret is what the first takes longer than the second."""
    predicted, measured = min(rows, key=lambda row: row.predicted_s), min(rows, key=lambda row: row.measured_s)
    names = [f"{row.strategy} {row.options}".strip() for row in (predicted, measured)]
    regret = predicted.measured_s / measured.measured_s - 1
    return f"| {rows[0].model} | {rows[0].layout} | {names[0]} | {names[1]} | {regret:.1%} |"


def run_suite(
    output: Path, models: Sequence[str], clusters: Iterable[int], *, minutes: float = math.inf, measure: bool = True
) -> list[Row]:
    """Calibrate, train and compare on every cluster, and write the table.

    Args:
        minutes: after which no run is begun. measure: false takes what is complete.
    """
    until = time.monotonic() + 60 * minutes
    rows: list[Row] = []
    for on_node in clusters:
        base = output / f"{on_node}-a-node"
        layouts = [
            NodeLayout(nodes=nodes, ranks_per_node=on_node, link_bytes_per_s=LINK_BYTES_PER_S)
            for nodes in NODES_OF[on_node]
        ]
        profile = base / "profile.json"
        if measure and not profile.exists():
            calibrate(base, layouts, MODELS)
        cases = [case for layout in layouts for model in models for case in cases_of(base, model, layout)]
        known: list[Row] = []
        for layout in layouts:
            if measure:
                train([case for case in cases if case.layout == layout], until)
            known = rows_of(profile, cases) if profile.exists() else []
            # What is known is written before the next layout.
            _write(output, [*rows, *known])
        rows += known
        if left := sum(not case.complete for case in cases):
            print(f"{left} of {len(cases)} runs on {on_node} ranks a node are left: the same command goes on with them")
    return rows


def _write(output: Path, rows: Sequence[Row]) -> None:
    if rows:
        write_bytes_atomically(output / "table.json", encode_pretty(rows))
        write_bytes_atomically(output / "table.md", table(rows).encode())


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path)
    parser.add_argument("--models", default=",".join(MODELS), help="of resnet50 and emulated_networks:small_vgg")
    parser.add_argument("--ranks-per-node", default=",".join(map(str, CLUSTERS)), help="clusters: 4, 2, or both")
    parser.add_argument("--minutes", type=float, default=MINUTES, help="after which no run is begun")
    parser.add_argument("--table", action="store_true", help="measure nothing: the table of what is complete")
    parser.add_argument("--as-rank", help=argparse.SUPPRESS)
    parser.add_argument("--until", type=float, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.as_rank:
        with join_ranks("gloo", "cpu", timeout_s=3600) as context:
            train_as_rank(msgspec.json.decode(options.as_rank, type=list[Case]), context, options.until)
        return
    if options.output is None:
        parser.error("-o DIR: where measurements and the table go")
    models, clusters = options.models.split(","), options.ranks_per_node.split(",")
    if not set(models) <= set(MODELS) or not set(clusters) <= set(map(str, NODES_OF)):
        parser.error(f"--models takes {', '.join(MODELS)}; --ranks-per-node {', '.join(map(str, NODES_OF))}")
    options.output.mkdir(parents=True, exist_ok=True)
    rows = run_suite(
        options.output.resolve(), models, map(int, clusters), minutes=options.minutes, measure=not options.table
    )
    print(table(rows) if rows else f"nothing in {options.output} is complete yet")


if __name__ == "__main__":
    main()
