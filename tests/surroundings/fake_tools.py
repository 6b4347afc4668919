"""Programs that print what nccl-tests, OSU and IMB print, for tests of what runs them; written where a test wants them.

``FAKE_MODE``: ``fail`` ends half way with exit code 7, ``fail late`` IMB behind its last row, ``kill`` by a signal
behind colours and a bell, ``hang`` prints two sizes and sleeps, ``wrong`` has a wrong result, ``silent`` prints
nothing, ``refuse`` ends at once, ``json`` can write a report, ``alone`` knows no MPI; ``unsplit`` one that the
variable for groups did not reach.
"""

from __future__ import annotations

import sys
from pathlib import Path

_NCCL = r"""
import json, os, sys, time
mode = os.environ.get("FAKE_MODE", "")
arguments = sys.argv[1:]
if "--help" in arguments:
    print("USAGE: [-b,--minbytes] " + ("[-J,--output_file <file>]" if mode == "json" else ""))
    sys.exit(1)
options = dict(zip(arguments[::2], arguments[1::2]))
started = int(options["-g"]) * int(os.environ.get("FAKE_RANKS", "1") if mode != "alone" else 1)
groups = int(os.environ.get("NCCL_TESTS_SPLIT", "MOD 1").split()[1]) if mode != "unsplit" else 1
ranks = started // groups
name = os.path.basename(sys.argv[0])
print("# nccl-tests version 2.17.6 nccl-headers=22807 nccl-library=22807")
print(f"# Collective test starting: {name}")
print("# nThread 1 nGpus 1 minBytes 1 maxBytes 2 step: 2(factor) warmup iters: 5 iters: 20 agg iters: 1 validation: 1")
print("# Using devices")
for rank in range(started):
    place = f"{rank // groups:2d} Group {rank % groups:2d}"
    print(f"#  Rank {place} Pid 1 on fakehost device {rank:2d} [0000:00:00] Fake GPU")
print("#  size  count  type  redop  root" + "  time  algbw  busbw  #wrong" * 2)
parted = "gather" in name or "scatter" in name
to_root = name.startswith("reduce_perf")
one = to_root or "send" in name or "broad" in name
factor = 1 if one else (ranks - 1) / ranks * (1 if parted else 2)
redop, root = ("none", -1) if "gather" in name else ("none", 0) if "broad" in name else ("sum", 0 if to_root else -1)
size, results, printed = int(options["-b"]), [], 0
while size <= int(options["-e"]):
    if printed == 2 and mode == "fail":
        print("fakehost: Test NCCL failure all_reduce.cu:99 'remote process exited or there was a network error'")
        sys.exit(7)
    if printed == 2 and mode == "kill":
        print("\x1b]0;title\x07\x1b[31mfakehost: out of memory\x1b[0m\x07", flush=True)
        os.kill(os.getpid(), 9)
    if printed == 2 and mode == "hang":
        sys.stdout.flush()
        time.sleep(600)
    us = round(20 + groups * size / 1000, 2)
    alg = size / us / 1e3
    count = size // 4 // (ranks if parted else 1)
    wrong = 3 if mode == "wrong" and printed == 1 else 0
    half = f"{us:8.2f} {alg:7.2f} {alg * factor:7.2f} {wrong:6d}"
    if mode != "silent":
        print(f"{size:12d} {count:12d} float {redop} {root} {half} {half}")
    way = dict(time=us, alg_bw=alg, bus_bw=alg * factor, nwrong=0.0)
    row = dict(size=size, count=count, type="float", redop=redop, root=str(root))
    results.append(row | dict(out_of_place=way, in_place=way))
    printed += 1
    size *= int(options["-f"])
if "-J" in options:
    device = dict(rank=0, group=0, pid=1, hostname="fakehost", device=0, device_info="Fake GPU")
    config = dict(nthreads=1, ngpus=ranks, iterations=20, aggregated_iterations=1, validation=1, devices=[device])
    with open(options["-J"], "w") as stream:
        json.dump(dict(version=3, args=sys.argv, env=[], nccl_version=22807, config=config, results=results), stream)
print("# Out of bounds values : 0 OK")
"""

_OSU = r"""
import os, sys
options = dict(zip(sys.argv[1::2], sys.argv[2::2]))
pair = sys.argv[0].endswith("latency")
# Point to point ends at options of collectives, as version 7.4 does.
if os.environ.get("FAKE_MODE") == "refuse" or pair and {"-M", "-f"} & set(sys.argv):
    print("Invalid option [-M]")
    sys.exit(1)
first, last = map(int, options["-m"].split(":"))
name = os.path.basename(sys.argv[0])
title = {"osu_allreduce": "Allreduce", "osu_bcast": "Broadcast", "osu_reduce_scatter": "Reduce_scatter"}.get(name, "")
print(f"\n# OSU MPI {title} Latency Test v7.4".replace("  ", " "))
print("# Datatype: MPI_CHAR.")
full = "-f" in sys.argv
print("# Size       Avg Latency(us)" + ("   Min Latency(us)   Max Latency(us)  Iterations" if full else ""))
while first <= last:
    us = 2 + first / 500
    print(f"{first:<10}{us:18.2f}" + (f"{us * 0.9:18.2f}{us * 1.1:18.2f}{1000:12d}" if full else ""))
    first *= 2
"""

_IMB = r"""
import sys
options = dict(zip(sys.argv[2::2], sys.argv[3::2]))
benchmark, ranks, sizes = sys.argv[1], options["-npmin"], open(options["-msglen"]).read().split()
groups = int(__import__("os").environ["FAKE_RANKS"]) // int(ranks) if "-multi" in options else 1
print("#    Intel(R) MPI Benchmarks 2021.7, MPI-1 part")
print(f"# Benchmarking {benchmark}" if groups == 1 else f"# Benchmarking Multi-{benchmark}")
several = f"# ( {groups} groups of {ranks} processes each running simultaneous ) "
print(f"# #processes = {ranks}" if groups == 1 else several)
pair = benchmark == "PingPong"
print("#bytes #repetitions " + ("t[usec] Mbytes/sec" if pair else "t_min[usec] t_max[usec] t_avg[usec]"))
def rows():
    for size in sizes:
        us = 3 + groups * int(size) / 400
        print(size, 1000, *([f"{us:.2f}", "1.00"] if pair else [f"{us * 0.9:.2f}", f"{us:.2f}", f"{us * 0.95:.2f}"]))
rows()
if groups > 1 and not pair:
    print(f"# Benchmarking {benchmark}\n# #processes = {groups * int(ranks)}")
    print("#bytes #repetitions t_min[usec] t_max[usec] t_avg[usec]")
    rows()
if __import__("os").environ.get("FAKE_MODE") == "fail late":
    sys.exit(7)
"""

# mpirun -np R [arguments] program ...: starts it once, as the first rank, which is the one that prints.
_MPIRUN = r"""
import os, subprocess, sys
ranks = sys.argv[2]
rest = [argument for argument in sys.argv[3:]]
while rest[0].startswith("-"):
    print("launcher got", rest.pop(0))
sys.stdout.flush()
sys.exit(subprocess.run(rest, env=os.environ | {"FAKE_RANKS": ranks}).returncode)
"""

_PROGRAMS = {
    **dict.fromkeys(
        (
            *("all_reduce_perf", "all_gather_perf", "reduce_scatter_perf", "broadcast_perf", "reduce_perf"),
            "sendrecv_perf",
        ),
        _NCCL,
    ),
    **dict.fromkeys(("osu_allreduce", "osu_bcast", "osu_reduce_scatter", "osu_latency"), _OSU),
    "IMB-MPI1": _IMB,
    "mpirun": _MPIRUN,
    "srun": _MPIRUN,
}


def write_programs(folder: Path) -> Path:
    """Write them all into a new folder, which is returned."""
    folder.mkdir()
    for name, source in _PROGRAMS.items():
        path = folder / name
        path.write_text(f"#!{sys.executable}\n{source}")
        path.chmod(0o755)
    return folder
