"""From a request and a site to the jobs of a calibration.

Layers on one node, sweeps inside a node and for every number of nodes across, runs as one array a number of nodes;
what was measured is fitted when layers and sweeps ended well, and compared with whatever runs there are. The report
comes last, however the others ended, and says what is missing.
"""

from __future__ import annotations

import re
from collections.abc import Iterable

from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.slurm.estimate import Estimate
from paradl_bench.slurm.jobs.job import Below, Job, Task, Word
from paradl_bench.slurm.jobs.request import HALOS, CalibrationRequest, Configuration
from paradl_bench.slurm.jobs.site import Site, Use

PROFILE = "profile.json"
REPORT = "report"
PAGE = f"{REPORT}/report.html"
SUMMARY = "summary.md"
_FURTHER = 8
"""Predictions go on, in powers of two, to so many times the ranks that were measured."""
_BY_TOOL = "sweeps/nccl-tests"
NODES = "nodes"


def chain_of(estimate: Estimate) -> tuple[Job, ...]:
    """The jobs, in an order in which each comes behind those that it waits for.

    Raises:
        UserError: a strategy does not fit the nodes, the dtype or the settings of kernels, or the device has no such.
    """
    request, site = estimate.request, estimate.site
    request.check_numerics(site)
    configurations = request.configurations(site.on_node)
    layers = _layers_job(estimate, configurations)
    waits = any(configuration.waits_beside_exchange for configuration in configurations)
    sweeps = tuple(_sweep_jobs(estimate, waits_beside_exchange=waits))
    runs = tuple(_run_jobs(estimate, configurations))
    calibrate = _calibrate_job((layers, *sweeps))
    before = (layers, *sweeps, *runs, calibrate, _predict_job(request, configurations), _validate_job(runs))
    return (*before, _report_job(before))


def path_of(model: str) -> str:
    """A model's name as part of a path."""
    return re.sub(r"[^A-Za-z0-9_.-]", "_", model)


def _layers_job(estimate: Estimate, configurations: Iterable[Configuration]) -> Job:
    request, site = estimate.request, estimate.site
    shards = dict.fromkeys(
        str(axis)
        for configuration in configurations
        for axis in parse_strategy(configuration.strategy).axes
        if axis.has(Trait.SHARDS_LAYERS) and axis.degree > 1
    )
    # Cores of one node share its memory; GPUs have their own, and a node full of them is dear.
    counts = dict.fromkeys((1, site.on_node)) if site.device == "cpu" else {1: None}
    last = max(counts)
    tasks = [_doctor(estimate, "layers", "layers", 1)]
    for model in request.models:
        for ranks in counts:
            parts = ("--shards", ",".join(shards)) if shards and ranks == last else ()
            words = (model, "--batch", str(request.batch), *request.sample, "--ranks-on-host", str(ranks))
            settings = ("--device", site.device, "--optimizer", request.optimizer, "--blocks", str(request.blocks))
            limit = _hang_limit(site, "layers", estimate.iteration_s(model, request.batch))
            name = f"layers/{path_of(model)}-r{ranks}"
            tasks.append(
                Task(
                    name=name,
                    words=("layers", *words, *settings, *request.numerics, *parts, *limit, "-o", Below(name)),
                    ranks=ranks,
                    estimate_s=estimate.layers_s(model, ranks, len(shards) if parts else 0),
                )
            )
    of_parts = f", and of what one rank of {', '.join(shards)} runs of each" if shards else ""
    return Job(
        name="layers",
        use="layers",
        title=f"Layer times of {', '.join(request.models)} at batch {request.batch}",
        adds=f"times of every layer{of_parts}, on {' and on '.join(map(str, counts))} ranks of a node: without them no"
        " prediction; their closure is the floor of every interval",
        tasks=tuple(tasks),
        ranks_per_node=last,
        gpus=1 if site.device == "cuda" else 0,
    )


def _hang_limit(site: Site, use: Use, iteration_s: float | None = None) -> tuple[str, str]:
    return "--hang-timeout", str(site.hang_timeout_s(use, iteration_s))


def _sweep_jobs(estimate: Estimate, *, waits_beside_exchange: bool) -> Iterable[Job]:
    request, site = estimate.request, estimate.site
    # On GPUs, where all-reduces run on a stream of their own, it has to be asked for by hand.
    in_flight = waits_beside_exchange and site.device == "cpu"
    counts = [nodes for nodes in dict.fromkeys((1, *request.nodes)) if nodes * site.on_node > 1]
    operations = request.operations.replace(",", ", ")
    # nccl-tests have no program for halos.
    by_tool = ",".join(name for name in request.operations.split(",") if site.nccl_tests and name != HALOS)
    for nodes in counts:
        ranks = nodes * site.on_node
        inside = nodes == 1
        tasks = [_doctor(estimate, f"sweep-{nodes}", "sweep", nodes)]
        tasks.append(_torch_sweep(estimate, nodes, first=nodes == counts[0], in_flight=in_flight))
        if by_tool:
            tasks.append(_nccl_sweep(estimate, nodes, by_tool))
        level = "level node" if inside else f"level system, {nodes} nodes"
        slowed = "; how compute and communication slow each other" if nodes == counts[0] else ""
        slowed += "; the time of layers' communication beside the gradient exchange" if in_flight else ""
        where = "inside a node" if inside else "between nodes"
        beside_tool = "; what the nccl-tests programs reach, for comparison" if by_tool else ""
        unlike = "" if inside else "; how the nodes differ"
        yield Job(
            name=f"sweep-{nodes}",
            use="sweep",
            title=f"Sweep of collectives on {ranks} ranks, {nodes} {'node' if inside else 'nodes'}",
            adds=f"alpha and beta of {operations} over {request.sizes} ({level}, {ranks} ranks){slowed}; what a"
            f" collective takes after compute{unlike}: without it predictions of communication {where} fail, or stand"
            f" on other rank counts{beside_tool}",
            tasks=tuple(tasks),
            nodes=nodes,
            ranks_per_node=site.on_node,
            gpus=site.gpus_per_node,
        )


def _doctor(estimate: Estimate, job: str, use: Use, nodes: int) -> Task:
    """First on the nodes of a job: what they are, and what they differ in, may explain what is found there."""
    name = f"{NODES}/{job}"
    return Task(
        name=name,
        words=("doctor", *_hang_limit(estimate.site, use), "-o", Below(name)),
        nodes=nodes,
        ranks=nodes,
        replaces=True,
        estimate_s=estimate.start.seconds,
    )


def _sweep_words(request: CalibrationRequest, ranks: int, operations: str) -> tuple[str, ...]:
    about = ("--ops", operations, "--sizes", request.sizes)
    return ("collectives", "--ranks", str(ranks), *about, "--blocks", str(request.blocks))


def _torch_sweep(estimate: Estimate, nodes: int, *, first: bool, in_flight: bool) -> Task:
    request, site = estimate.request, estimate.site
    ranks, name = nodes * site.on_node, f"sweeps/{site.library}-{nodes}"
    # Compute is alike on one node and on many: its interference is measured once, where it costs least. gloo stops a
    # GPU's host while it runs.
    together = first and (site.device == "cpu" or site.library == "nccl")
    contexts = ["after-compute"] + ["with-compute"] * together + ["with-all-reduce"] * in_flight
    words = _sweep_words(request, ranks, request.operations)
    settings = ("--backend", site.library, "--device", site.device, "--point-seconds", f"{request.point_s:g}")
    return Task(
        name=name,
        words=(*words, *settings, "--contexts", ",".join(contexts), *_hang_limit(site, "sweep"), "-o", Below(name)),
        nodes=nodes,
        ranks=ranks,
        estimate_s=estimate.sweep_s(kinds=1 + len(contexts)),
    )


def _nccl_sweep(estimate: Estimate, nodes: int, operations: str) -> Task:
    site = estimate.site
    ranks, name = nodes * site.on_node, f"{_BY_TOOL}-{nodes}"
    tool = ("--tool", "nccl-tests", "--tool-path", site.nccl_tests, "--launcher", "srun")
    placed = ("--launcher-arg=--nodes", f"--launcher-arg={nodes}")
    return Task(
        name=name,
        words=(*_sweep_words(estimate.request, ranks, operations), *tool, *placed, "-o", Below(name)),
        nodes=nodes,
        starts_own=True,
        estimate_s=estimate.sweep_s(kinds=1),
    )


def _run_jobs(estimate: Estimate, configurations: tuple[Configuration, ...]) -> Iterable[Job]:
    on_node, gpus = estimate.site.on_node, estimate.site.gpus_per_node
    for nodes in dict.fromkeys(run.nodes for run in configurations):
        chosen = [run for run in configurations if run.nodes == nodes]
        tasks = tuple(_run(estimate, model, run) for model in estimate.request.models for run in chosen)
        most_ranks = max(run.ranks for run in chosen)
        strategies = ", ".join(run.strategy for run in chosen)
        yield Job(
            name=f"runs-{nodes}",
            use="run",
            title=f"Real runs on {nodes} {'node' if nodes == 1 else 'nodes'}: {strategies}",
            adds=f"measured iterations and memory of {strategies}: nothing is fitted to them; without them the accuracy"
            " of predictions is unknown there",
            tasks=tasks,
            nodes=nodes,
            ranks_per_node=min(on_node, most_ranks),
            gpus=min(gpus, most_ranks),
            array=True,
        )


def _run(estimate: Estimate, model: str, run: Configuration) -> Task:
    request, site = estimate.request, estimate.site
    name = f"runs/{path_of(model)}-{run.strategy}"
    settings = ("--device", site.device, "--backend", site.library, "--optimizer", request.optimizer, *request.numerics)
    counted = ("--iterations", str(request.iterations), "--warmup", str(request.warmup))
    limit = _hang_limit(site, "run", estimate.iteration_s(model, run.batch / run.ranks))
    words = (model, "--strategy", run.strategy, "--batch", str(run.batch), *request.sample)
    return Task(
        name=name,
        words=("train", *words, *settings, *counted, *limit, "-o", Below(name)),
        nodes=run.nodes,
        ranks=run.ranks,
        estimate_s=estimate.run_s(model, run),
    )


def _calibrate_job(measuring: tuple[Job, ...]) -> Job:
    measured = [task.name for job in measuring for task in job.tasks if task.is_measurement]
    by_tool = [name for name in measured if name.startswith(_BY_TOOL)]
    tasks = [
        _fit(PROFILE, [name for name in measured if name not in by_tool]),
        Task(name="calibrate-show", module="calibrate", words=("show", Below(PROFILE)), writes=False),
    ]
    if by_tool:
        # Another program in another environment: predictions are of what training calls, which is torch's.
        tasks.append(_fit("profile-nccl-tests.json", by_tool))
    return Job(
        name="calibrate",
        use="analysis",
        title="Fit what was measured to one profile",
        adds="the profile; its weaknesses, each with the command that would help, are shown in the log",
        tasks=tuple(tasks),
        after_ok=tuple(job.name for job in measuring),
    )


def _fit(profile: str, directories: Iterable[str]) -> Task:
    words: tuple[Word, ...] = ("fit", *(Below(name) for name in directories), "-o", Below(profile))
    return Task(name=profile, module="calibrate", words=words, replaces=True)


def _predict_job(request: CalibrationRequest, configurations: tuple[Configuration, ...]) -> Job:
    tasks = []
    ranks = max((run.ranks for run in configurations), default=1)
    # By mini-batch: all strategies that share one are one command.
    batches = dict.fromkeys(run.batch for run in configurations)
    for model in request.models:
        for batch in batches:
            strategies = ",".join(run.strategy for run in configurations if run.batch == batch)
            words = ("--strategy", strategies, "--batch", str(batch))
            tasks.append(_prediction(f"{path_of(model)}-b{batch}", model, words))
        counts = [ranks * 2**power for power in range(_FURTHER.bit_length()) if ranks > 1]
        if counts:
            listed = ",".join(map(str, counts))
            first_batch, replicas = str(request.batch * ranks), kinds_with(Trait.DIVIDES_BATCH)[0].name
            scaled = ("--strategy", replicas, "--ranks", listed, "--scaling", "weak", "--batch", first_batch)
            tasks.append(_prediction(f"{path_of(model)}-scaling", model, scaled))
    return Job(
        name="predict",
        use="analysis",
        title=f"Predict what was run, and data parallelism on up to {_FURTHER} times the ranks",
        adds="predictions with their intervals, and which part of each is measured",
        tasks=tuple(tasks),
        after_ok=("calibrate",),
    )


def _prediction(name: str, model: str, words: tuple[str, ...]) -> Task:
    path = f"predictions/{name}.json"
    return Task(
        name=path,
        module="predict",
        words=("--from-profile", Below(PROFILE), "--model", model, *words, "-o", Below(path)),
        replaces=True,
    )


def _validate_job(runs: tuple[Job, ...]) -> Job:
    words = ("validate", "--from-profile", Below(PROFILE), "-o", Below(REPORT), "--html", Below(PAGE))
    measured = tuple(task.name for job in runs for task in job.tasks)
    return Job(
        name="validate",
        use="analysis",
        title="Compare the predictions with the runs",
        adds="accuracy of every strategy, and the phase that explains each outlier",
        tasks=(Task(name=REPORT, module="predict", words=words, those_of=measured, replaces=True),),
        after_ok=("calibrate",),
        after_any=tuple(job.name for job in runs),
    )


def _report_job(before: tuple[Job, ...]) -> Job:
    words = ("slurm-status", Below(""), "--exit-code", "-o", Below(SUMMARY), "--force")
    return Job(
        name="report",
        use="analysis",
        title="Summarise what was measured, what is missing, and how to go on",
        adds="the summary, even if other jobs failed",
        tasks=(Task(name=SUMMARY, words=words, replaces=True),),
        after_any=tuple(job.name for job in before),
    )
