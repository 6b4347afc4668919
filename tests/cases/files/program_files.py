"""Files of programs that train, written for a strategy."""

from __future__ import annotations

from pathlib import Path

from paradl_bench.importers.training_programs.launch import MIB, Launch
from paradl_bench.importers.training_programs.program import export_launch, programs
from paradl_bench.plan.strategy import parse_strategy

MEGATRON, TITAN, TOML, DEEPSPEED, ACCELERATE = ("m.args", "t.args", "t.toml", "d.json", "a.yaml")
PROGRAMS = {
    MEGATRON: "megatron",
    TITAN: "torchtitan",
    TOML: "torchtitan",
    DEEPSPEED: "deepspeed",
    ACCELERATE: "accelerate",
}


def launch(strategy: str, batch: str = "96", dtype: str = "bf16", **options: str) -> Launch:
    return Launch(
        strategy=parse_strategy(strategy),
        batch=int(batch),
        sequence=512,
        dtype=dtype,
        optimizer="adam",
        bucket_cap_bytes=25 * MIB,
        options=options,
    )


def written(folder: Path, file: str, told: Launch) -> tuple[Path, tuple[str, ...]]:
    path = folder / file
    found = export_launch(told, programs()[PROGRAMS[file]], str(path), "predicted")
    path.write_bytes(found.content)
    return path, found.notes
