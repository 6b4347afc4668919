"""Scripts for sbatch: golden texts, shellcheck, quoting, what each job asks for, and site files with mistakes."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
from pathlib import Path
from typing import Any

import click
import msgspec
import pytest
from slurm_scripts import CASES, EXAMPLES, scripts

from paradl_bench.cli import group
from paradl_bench.core.errors import UserError
from paradl_bench.slurm.chain import chain_of
from paradl_bench.slurm.estimate import Estimate, Work
from paradl_bench.slurm.jobs.request import CalibrationRequest
from paradl_bench.slurm.jobs.script import Folders, script_of
from paradl_bench.slurm.jobs.site import Site, TimeLimits, read_site

IDS = [folder.name for folder in CASES]
REQUEST = CalibrationRequest(
    models=("resnet18",),
    nodes=(1, 2),
    strategies=("serial", "data"),
    batch=4,
    operations="all_reduce",
    sizes="1K:1M:4",
)
OURS = Folders(output=Path("/scratch/out"), work=Path("/work"))


def jobs_of(site: Site, request: CalibrationRequest = REQUEST) -> dict[str, str]:
    jobs = chain_of(Estimate(request=request, site=site, works=None))
    return {job.name: script_of(job, site, OURS) for job in jobs}


@pytest.mark.parametrize("folder", CASES, ids=IDS)
def test_the_texts_are_what_the_generator_writes(folder: Path) -> None:
    found = {path.name: path.read_text() for path in folder.glob("*.sbatch")}
    written = scripts(folder)
    assert sorted(found) == sorted(written)
    for name, text in written.items():
        assert found[name] == text, f"{folder / name} differs; tests/surroundings/slurm_scripts.py writes it anew"


@pytest.mark.skipif(
    shutil.which("shellcheck") is None and os.environ.get("PARADL_TEST_SLURM") != "required",
    reason="shellcheck is not installed",
)
@pytest.mark.parametrize("folder", CASES, ids=IDS)
def test_shellcheck_finds_nothing(folder: Path) -> None:
    paths = sorted(map(str, folder.glob("*.sbatch")))
    assert paths
    done = subprocess.run(
        ["shellcheck", "--severity=style", *paths], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stdout


@pytest.mark.parametrize("value", ["$(touch pwned)", "'; touch pwned; '", "`touch pwned`", '"; touch pwned #'])
def test_nothing_of_a_site_file_is_run_but_its_setup(tmp_path: Path, value: str) -> None:
    site = Site(
        device="cpu", ranks_per_node=2, modules=(value,), variables={"OWN": value}, interface=value, cluster=value
    )
    text = jobs_of(site)["report"]
    script = tmp_path / "job"
    work = str(tmp_path)
    text = text.replace("/scratch/out", f"{tmp_path}/out").replace("WORK=/work", f"WORK={work}")
    script.write_text(text)
    seen = tmp_path / "seen"
    programs = tmp_path / "bin"
    programs.mkdir()
    recorded = f'printf "%s\\n" "$OWN" "$GLOO_SOCKET_IFNAME" "$PARADL_CLUSTER" > {seen}'
    for name, body in (("srun", recorded), ("scontrol", "echo node1"), ("module", f'echo "$@" > {tmp_path}/modules')):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    variables = {
        "PATH": f"{programs}:{os.environ['PATH']}",
        "SLURM_JOB_ID": "1",
        "SLURM_JOB_NAME": "x",
        "SLURM_JOB_NODELIST": "node1",
        "SLURM_JOB_NUM_NODES": "1",
    }
    done = subprocess.run(
        ["bash", str(script)], env=variables, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    assert seen.read_text().splitlines() == [value, value, value]
    assert (tmp_path / "modules").read_text().strip() == f"load {value}"
    assert not list(tmp_path.rglob("pwned"))
    noted = json.loads((tmp_path / "out/state/summary.md.json").read_text())
    assert (noted["exit_code"], noted["nodes"], noted["job"]) == (0, 1, "1")


def test_a_failed_command_does_not_stop_the_next_ones(tmp_path: Path) -> None:
    site = Site(device="cpu", ranks_per_node=2)
    text = jobs_of(site)["layers"].replace("/scratch/out", f"{tmp_path}/out").replace("WORK=/work", f"WORK={tmp_path}")
    (tmp_path / "job").write_text(text)
    programs = tmp_path / "bin"
    programs.mkdir()
    failing = 'case " $* " in *" --ntasks=1 "*) exit 3;; esac'
    for name, body in (("srun", failing), ("scontrol", "echo node1")):
        (programs / name).write_text(f"#!/bin/bash\n{body}\n")
        (programs / name).chmod(0o755)
    variables = {"PATH": f"{programs}:{os.environ['PATH']}", "SLURM_JOB_ID": "7", "SLURM_JOB_NAME": "x"}
    variables |= {"SLURM_JOB_NODELIST": "node1", "SLURM_JOB_NUM_NODES": "1"}
    done = subprocess.run(
        ["bash", str(tmp_path / "job")], env=variables, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 3
    codes = {
        path.stem: json.loads(path.read_text())["exit_code"] for path in sorted((tmp_path / "out/state").glob("*.json"))
    }
    assert codes == {"nodes-layers": 3, "layers-resnet18-r1": 3, "layers-resnet18-r2": 0}


def test_dependencies_and_what_each_job_asks_for() -> None:
    site = read_site(EXAMPLES / "site-gpu.yaml")
    texts = jobs_of(site)
    assert list(texts) == [
        *("layers", "sweep-1", "sweep-2", "runs-1", "runs-2"),
        *("calibrate", "predict", "validate", "report"),
    ]
    layers, runs = texts["layers"], texts["runs-2"]
    assert "#SBATCH --gpus-per-node=h200:1\n" in layers
    assert "--exclusive" not in layers
    assert "#SBATCH --gpus-per-node=h200:4\n" in runs
    assert "#SBATCH --array=0-0%4\n" in runs
    assert "#SBATCH --partition=standard\n" in texts["calibrate"]
    assert "--gpus" not in texts["calibrate"]
    assert "--dependency=afterok:ID,afterany:ID:ID " in texts["validate"]
    assert "srun --nodes=2 --ntasks=8 --ntasks-per-node=4 --cpus-per-task=8" in runs
    assert "--tool nccl-tests --tool-path /opt/nccl-tests/build --launcher srun" in texts["sweep-2"]
    assert "--strategy d8 --batch 32 " in runs


def test_what_is_computed_in_is_that_of_layers_and_runs() -> None:
    site = Site(device="cuda", gpus_per_node=4)
    asked = msgspec.structs.replace(REQUEST, dtype="bf16", kernel_settings="channels_last+compile")
    texts = jobs_of(site, asked)
    words = "--dtype bf16 --channels-last --compile"
    found = {name: text.count(words) for name, text in texts.items() if words in text}
    assert found == {"layers": 1, "runs-1": 2, "runs-2": 1}
    # Sweeps are of fp32, as gradients are that are exchanged.
    assert not any("--dtype" in text for text in jobs_of(site).values())
    for name, line in (("layers", "layers"), ("runs-2", "train")):
        words_of = texts[name].replace("\\\n", " ").partition(f" {line} ")[2].partition('-o "$OUTPUT"')[0].split()
        command = group.get_command(click.Context(group), line)
        assert command is not None
        command.make_context(line, [*words_of, "-o", "x"])


@pytest.mark.parametrize(
    ("site", "changed", "message"),
    [
        ({"device": "cuda", "gpus_per_node": 4}, {"dtype": "bf16", "strategies": ("filter",)}, "bf16 with filter"),
        ({"device": "cuda", "gpus_per_node": 4}, {"kernel_settings": "compile", "strategies": ("p4",)}, "--compile"),
        ({"device": "cpu", "ranks_per_node": 4}, {"kernel_settings": "tf32"}, "--tf32 is a mode of GPUs"),
    ],
)
def test_what_a_rank_would_refuse_is_refused_before_an_allocation(
    site: dict[str, Any], changed: dict[str, Any], message: str
) -> None:
    with pytest.raises(UserError, match=message):
        jobs_of(Site(**site), msgspec.structs.replace(REQUEST, **changed))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("device: cpu\nranks_per_node: 2\npartitionn: x\n", "unknown field `partitionn`: did you mean partition"),
        ("device: cpu\nranks_per_node: 2\ntime_limits: {layer: 1h}\n", r"at `\$\.time_limits`: did you mean layers\?"),
        ("device: cpu\n", "ranks_per_node is missing"),
        ("device: cuda\n", "gpus_per_node is missing"),
        ("device: cpu\nranks_per_node: two\n", r"Expected `int`, got `str` - at `\$.ranks_per_node`"),
        ("device: tpu\nranks_per_node: 2\n", "'tpu' - at `.*device`: .*choices are cpu, cuda"),
        ("device: cpu\nbackend: gloop\n", "'gloop' - at `.*backend`: did you mean gloo"),
        ("device: cpu\nranks_per_node: 2\npartition: a b\n", "partition: 'a b' has a blank"),
        ("device: cpu\nranks_per_node: 2\nsbatch_options: [mail]\n", "'mail' does not begin with -"),
        ("device: cpu\nranks_per_node: 2\nmodules: ['a\n\n b']\n", "line break"),
        ("device: cpu\nranks_per_node: 2\nvariables: {'A B': 1}\n", "'A B' is no name of a variable"),
        ("device: cpu\nranks_per_node: 2\ntime_limits: {run: soon}\n", "'soon' is no time"),
        ("device: cpu\nranks_per_node: 2\nhang_s: 1680\n", "hang_s: 1680 s have to pass before the warning, .* 1680 s"),
        ("device: cpu\nranks_per_node: 2\nhang_s: -1\n", "Expected `int` >= 0 - at `\\$.hang_s`"),
        ("device: cpu\nranks_per_node: 2\nwarning_s: 4000\n", "not inside the shortest time limit"),
        (
            "device: cpu\nranks_per_node: 2\ncontainer: {runtime: docker, image: x}\n",
            "'docker' - at `.*container.runtime`: choices are ap",
        ),
        ("- a\n", "Expected `object`, got `array`"),
        ("a: [\n", "is no valid YAML"),
    ],
)
def test_a_mistake_in_a_site_file_is_named(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "site.yaml"
    path.write_text(text)
    with pytest.raises(UserError, match=message):
        read_site(path)


def test_hangs_end_before_the_time_limit_and_doctor_runs_first(tmp_path: Path) -> None:
    limits = TimeLimits(run="5m", sweep="8m")
    texts = jobs_of(Site(device="cpu", ranks_per_node=4, time_limits=limits))
    # Half of what is left until the warning, two minutes before the limit.
    assert all("--hang-timeout 90 -o " in texts[name] for name in ("runs-1", "runs-2"))
    assert texts["sweep-2"].count("--hang-timeout 180 -o ") == 2
    assert "--hang-timeout 300 -o " in texts["layers"]
    for name, measured in (("layers", "layers resnet18"), ("sweep-1", "collectives --ranks")):
        assert f'"$OUTPUT"/nodes/{name} --launcher srun' in texts[name]
        assert texts[name].index("doctor --hang-timeout") < texts[name].index(measured)
    sweep = " ".join(texts["sweep-2"].replace("\\\n", "").split())
    on_each = "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=1 --kill-on-bad-exit=1 --cpu-bind=none"
    command = 'doctor --hang-timeout 180 -o "$OUTPUT"/nodes/sweep-2 --launcher'
    assert f"{on_each} python -m paradl_bench {command} srun" in sweep
    assert sweep.index("doctor") < sweep.index("collectives --ranks")
    by_torchrun = jobs_of(Site(device="cpu", ranks_per_node=4, launcher="torchrun"))["sweep-2"]
    assert "--nproc-per-node=1" in by_torchrun
    assert "nodes/sweep-2 --launcher torchrun" in by_torchrun
    # What doctor finds is no measurement to fit.
    assert "nodes/" not in texts["calibrate"]


def test_a_hang_timeout_allows_for_iterations_of_a_large_model() -> None:
    site = Site(device="cpu", ranks_per_node=2, time_limits=TimeLimits(run="1h", layers="10m"))
    # 4 samples of 2.5 TFLOP at 20 GFLOP/s are 500 s an iteration; half of ten minutes less two is 240 s.
    works = {"resnet18": Work(flops=2.5e12, gradient_bytes=1e6)}
    jobs = chain_of(Estimate(request=REQUEST, site=site, works=works))
    texts = {job.name: script_of(job, site, OURS) for job in jobs}
    assert "--hang-timeout 1740 " in texts["runs-1"]
    assert "--hang-timeout 240 " in texts["layers"]
    smaller = Estimate(request=REQUEST, site=site, works={"resnet18": Work(flops=4e11, gradient_bytes=1e6)})
    assert "--hang-timeout 400 " in {j.name: script_of(j, site, OURS) for j in chain_of(smaller)}["runs-1"]
    stated = msgspec.structs.replace(site, hang_s=77)
    assert all("--hang-timeout 77 " in text for name, text in jobs_of(stated).items() if name[:4] in ("runs", "laye"))
