"""What fuzzing starts from: files that the parsers and loaders read well, and some that cost a careless reader dear."""

from __future__ import annotations

import gzip
import json
from pathlib import Path
from typing import Any

from parser_targets import DATA, STRINGS
from regressor_targets import regressor_seeds

from paradl_bench.measure.kernels.request import DESIGN_FILE
from paradl_bench.network.kernel import KERNELS_FILE
from paradl_bench.records import input_record, measurement, roofline_record
from paradl_bench.records.contexts import context
from paradl_bench.records.hosts import host_load, host_record
from paradl_bench.records.training import compile_record, training_record
from paradl_bench.records.training.training_record import RUN_NAME
from paradl_bench.slurm.jobs.plan import PLAN, SUBMITTED

_SEEDS = {
    "nccl-tests": ("nccl-tests*", "rccl*"),
    "rccl-tests": ("rccl*", "nccl-tests-2.17.log"),
    "osu": ("osu*",),
    "imb": ("imb*",),
    "kineto": ("kineto*",),
    "ssgd-trace": ("ssgd*",),
    "pipedream": ("pipedream*",),
    "paradl-net": ("*.net", "*.plat"),
    "operators": ("operators.csv", "operators.json"),
}
_RECORD_SEEDS = {
    host_load.LOAD_FILE: b'{"seconds":2.5,"cores":2,"other_cores":0.5,"stolen_cores":0.1,"throttled_cores":0.0,'
    b'"while_measuring":true}\n',
    compile_record.COMPILED_FILE: b'{"rank":0,"model":"resnet18","batch":8,"what":"layers","compile_s":2.5,'
    b'"graphs":30}\n',
    measurement.TRACE_FILE: b'{"source":"a.json","rank":0,"ranks":4,"iterations":2,"optimizer_s":0.1,"span_s":1.0,'
    b'"compute_s":0.5,"communication_s":0.4,"copy_s":0.1,"overlap_s":0.2,"idle_s":0.1}\n',
    context.CONTEXTS_FILE: b'{"library":"gloo","operation":"all_reduce","level":"system","ranks":2,'
    b'"message_bytes":1024,"dtype":"fp32","block":1,"context":"after-compute","neighbour":"layers","one_clock":false,'
    b'"idle_end_s":[[0.1],[0.1]],"start_s":[[0.0],[0.0]],"end_s":[[0.3],[0.3]],"neighbour_s":[[0.1],[0.1]],'
    b'"host_start_s":[[5.0],[5.1]],"first_rank":2,"attempt":1}\n'
    b'{"library":"gloo","operation":"send_recv","level":"node","ranks":2,"message_bytes":1024,"dtype":"fp32",'
    b'"block":0,"context":"with-all-reduce","neighbour":"ghosts","neighbour_bytes":26214400,"calls":2,'
    b'"neighbour_level":"system","one_clock":true,"idle_start_s":[[0.0,0.0],[0.1,0.1]],'
    b'"idle_end_s":[[0.3,0.3],[0.3,0.3]],"start_s":[[0.0,0.0],[0.1,0.1]],"end_s":[[0.4,0.3],[0.4,0.3]],'
    b'"begun":[[true,true],[true,false]],"outlived":[[true,false],[true,false]],"neighbour_s":[[0.9],[0.9]]}\n'
    b'{"library":"nccl","operation":"all_reduce","level":"node","ranks":2,"message_bytes":64,"dtype":"fp32","block":0,'
    b'"context":"with-compute","neighbour":"conv2d","one_clock":true,"idle_end_s":[[0.1,0.2]],'
    b'"start_s":[[0.0,0.0]],"end_s":[[0.3,0.3]],"neighbour_s":[[0.2,0.2]],"neighbour_idle_s":[[0.1,0.1]]}\n',
    roofline_record.RATES_FILE: b'{"resource":"compute","kernel":"matmul","sizes":{"n":512},"dtype":"fp32","work":1e9,'
    b'"working_set_bytes":3145728,"ranks_on_host":2,"rank":1,"block":0,"samples_s":[0.01,0.02]}\n',
    input_record.FILES_FILE: b'{"block":0,"condition":"cold","bytes":[1000,2000],"pixels":[50176,50176],'
    b'"read_s":[0.001,0.002],"decode_s":[0.003,0.004],"transform_s":[0.001,0.001]}\n',
    input_record.BATCHES_FILE: b'{"block":0,"stage":"copy","batch":8,"bytes":4816896,"samples_s":[0.001,0.002],'
    b'"how":"pinned","model":"","calls_per_sample":2}\n',
    input_record.LOADER_FILE: b'{"block":0,"workers":2,"batch":8,"start":"fork","first_s":0.5,"gaps_s":[0.01,0.02]}\n',
    input_record.UNREADABLE_FILE: b'{"path":"a.jpg","why":"no image"}\n',
    host_record.HOSTS_FILE: b'{"rank":1,"host":"n2","core":0,"clock_offset_s":1.5,"clock_error_s":1e-5,'
    b'"wall_offset_s":-0.5,"clock_at_s":1e5,"attempt":1}\n',
    measurement.DROPPED_FILE: b'{"file":"a.log","line":3,"text":"N/A","why":"no number"}\n',
    KERNELS_FILE: b'{"shape":{"kind":"conv","stage":"FW","sizes":{"batch":8,"in":3},"settings":{"a":"b"},"flops":1e9,'
    b'"bytes":1e6},"dtype":"fp32","block":0,"samples_s":[0.1,0.2],"calls_per_sample":2}\n',
}


def seeds(name: str) -> list[bytes]:
    """Files that a target reads well, to start from."""
    if name in _SEEDS:
        return [path.read_bytes() for pattern in _SEEDS[name] for path in sorted((DATA / "imports").glob(pattern))]
    if name in STRINGS:
        return [word.encode() for word in STRINGS[name][1].split()]
    if name == "mpi4py":
        head = b'{"hosts":["a","a"],"device_name":"cpu","versions":{"mpi":"x"}}\n'
        return [head + (DATA / "collectives-v1" / measurement.COLLECTIVES_FILE).read_bytes()[:20000]]
    if name == "profile.json":
        return [_shortened(path.read_bytes()) for path in sorted(DATA.glob("profile-v*.json"))]
    if name == "network.json":
        return [path.read_bytes() for path in sorted(DATA.glob("*-v1/network-*.json"))]
    if name in _DOCUMENTS:
        return [_DOCUMENTS[name]]
    if name.startswith("regressors"):
        return regressor_seeds()[name]
    if name in ("measurements", "runs"):
        folders = ["training-v1"] if name == "runs" else ["collectives-v1", "layers-v1"]
        found = [_as_one_text(DATA / folder) for folder in folders]
        return [*found, *map(_emulated, found)] if name == "runs" else found
    if name == RUN_NAME:
        real = [path.read_bytes() for path in sorted(DATA.glob(f"*-v1/{name}"))]
        return [*real, *map(_emulated, real)]
    held = [path.read_bytes()[:20000] for path in sorted(DATA.glob(f"*-v1/{name}"))]
    return held or [_RECORD_SEEDS[name]]


_CLUSTER = b"""# two levels
name: abci
memory_bytes_per_rank: 16e9
levels:
  - {name: node, ranks: 4, alpha_s: 1.0e-5, beta_s_per_byte: 1.0e-10}
  - {name: rack, ranks: 136, contention: 1}
  - name: &a system
    ranks: 4096
    contention: 3
"""
_DOCUMENTS = {
    "cluster.yaml": _CLUSTER,
    "mapping.yaml": (DATA / "imports" / "operators.yaml").read_bytes(),
    "site.yaml": (DATA.parents[1] / "slurm" / "site-cpu.yaml").read_bytes(),
    "launch.args": b"# ranks: 8\n--tensor-model-parallel-size 2 --pipeline-model-parallel-size=2 --micro-batch-size 2\n"
    b"--global-batch-size 64 --bf16 --use-distributed-optimizer --ddp-bucket-size 4e6 activation-checkpoint:full\n",
    "launch.toml": b"[training]\nlocal_batch_size = 2\n[parallelism]\ndata_parallel_shard_degree = -1\n"
    b'tensor_parallel_degree = 2\npipeline_parallel_schedule = "1F1B"\n[activation_checkpoint]\nmode = "full"\n',
    "launch.json": b'{"train_batch_size":32,"train_micro_batch_size_per_gpu":2,"zero_optimization":{"stage":1,'
    b'"reduce_bucket_size":5e8,"offload_optimizer":{"device":"cpu"}},"bf16":{"enabled":true},"optimizer":{"type":"A"}}',
    "launch.yaml": b"distributed_type: FSDP\nnum_processes: 8\nmixed_precision: bf16\nfsdp_config:\n"
    b"  fsdp_version: 2\n  fsdp_reshard_after_forward: true\nparallelism_config:\n"
    b"  parallelism_config_tp_size: 2\n",
    DESIGN_FILE: b'{"kernels":[{"kind":"linear","sizes":{"batch":8,"in_features":32,"out_features":16,"bias":1},'
    b'"settings":{"function":"linear"},"dtype":"fp32","origin":"range","estimate_s":1e-5}],'
    b'"limits":{"kernel_s":0.1,"memory_bytes":1e9},"speeds":{"fp32":{"flops_per_s":1e11,"bytes_per_s":1e10}},'
    b'"passed_over":{"linear":{"too long":2}}}',
    PLAN: b'{"schema_version":1,"request":{"models":["vgg11"],"nodes":[1,2],"strategies":["d"],"batch":8,'
    b'"operations":"all_reduce","sizes":"1K:1M:4"},"command_line":["paradl-bench","slurm"],"work":"/home/a",'
    b'"basis":"none","jobs":[{"name":"layers","use":"layers","title":"t","adds":"a","array":false,"array_limit":0,'
    b'"nodes":1,"limit_s":3600,"after_ok":[],"after_any":["x"],"sha256":"0","tasks":[{"name":"layers/vgg11",'
    b'"mark":"m","nodes":1,"writes":true,"measurement":true,"estimate_s":60.5}]}]}',
    SUBMITTED: b'{"layers":{"job_id":12,"tasks":[0,1],"submitted_utc":"2026-11-22T00:00:00Z"}}',
}


def _shortened(content: bytes) -> bytes:
    """A profile with one or two entries of each sort: what is changed is then likely to matter, and reading is fast."""
    document: dict[str, Any] = json.loads(content)
    for key, value in document.items():
        if isinstance(value, list) and key not in ("environments", "sources", "command_line"):
            document[key] = value[:2]
    return json.dumps(document).encode()


_GHOST = (
    b'"ghost":{"profile":"p.json","profile_sha256":"0","dilate":2.5,"slept_s":{"FW":0.1,"BW":0.2},"framework_s":'
    b'{"FW":0.01},"oversleep_s":{"FW":-0.001},"without_compute_s":0.05,"host_s":0.02,"host_iteration_s":[0.02,0.03],'
    b'"slow_rank":{"factor":1.5,"rank":1},"drawn":{"seed":0,"samples":30}}'
)


def _emulated(run: bytes) -> bytes:
    """A run's record, or a folder of one as one text, as of ghosts."""
    head, mark, own = run.rpartition(b">>> run.json\n")
    return head + mark + own.replace(b'"model":', _GHOST + b',"model":', 1)


def _as_one_text(folder: Path) -> bytes:
    text = b""
    for path in sorted(folder.glob("*.json*")):
        content = path.read_bytes()
        if path.name == training_record.TRAINING_FILE:
            content = longer(content)
        whole = content if path.suffix == ".json" else content[: content.rfind(b"\n", 0, 3000) + 1]
        text += b">>> " + path.name.encode() + b"\n" + whole.strip() + b"\n"
    return text


def longer(training: bytes) -> bytes:
    """A run of as many iterations as a validation needs."""
    records = [json.loads(line) for line in training.splitlines()]
    for record in records:
        record.update({key: value * 3 for key, value in record.items() if isinstance(value, list)})
    return b"".join(json.dumps(record).encode() + b"\n" for record in records)


def bombs() -> dict[str, bytes]:
    """Inputs that cost a careless reader its memory, its stack or its time."""
    return {
        "gzip": gzip.compress(b"0" * (4 << 20), 9),
        "gzip in gzip": gzip.compress(gzip.compress(b" " * (4 << 20), 9), 9),
        "lists": b"[" * 50_000,
        "objects": b'{"a":' * 50_000,
        "whole lists": b"[" * 50_000 + b"]" * 50_000,
        "one line": b"1 " * 50_000,
        "one word": b"9" * 200_000,
        "one name": b"x" * 200_000,
        "quotes": b'"' * 100_000,
        "comments": b"#" * 200_000,
        "commas": b"," * 50_000,
        "exponent": b'{"schema_version": 1e999999999}',
        "zeros": b"\x00" * 200_000,
        "laughs": b"a: &a [x,x,x,x,x,x,x,x,x]\n"
        + b"".join(b"%c: &%c [%s]\n" % (98 + i, 98 + i, b",".join([b"*%c" % (97 + i)] * 9)) for i in range(9)),
    }
