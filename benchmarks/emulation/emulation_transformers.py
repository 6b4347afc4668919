"""The suite of transformers: GPT-2, a Llama and a Mixtral by every axis that trains them, and by nestings of these.

GPT-2 trains by every kind of strategy, and by every setting that changes what is sent: ZeRO's stages, parts of the
sequence between tensor parallel layers, the three exchanges of context parallelism, the schedules of pipelines. The
Llama trains by one of each kind, the Mixtral by what experts add. Ranks that share layers lie inside of a node.
"""

from __future__ import annotations

import sys
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "networks"))

from emulated_networks import SMALL
from emulated_profile import BUCKET_SIZES, CROSSED_SIZES, LAYER_SIZES, Sweep, asked, named
from emulation_cases import Configured, Suite

from paradl_bench.ranks.emulated_nodes.layout import NodeLayout

MICRO_BATCHES = 4
_SEQUENCE: dict[str, object] = {"sequence_parallel": "on"}
_BY_HEADS: dict[str, object] = {"context_exchange": "all-to-all"}
_RING: dict[str, object] = {"context_exchange": "ring"}


def _staged(schedule: str) -> dict[str, object]:
    return {"schedule": schedule, "micro_batches": MICRO_BATCHES}


_IN_TURNS = _staged("1f1b")

CONFIGURATIONS: dict[str, dict[int, list[Configured]]] = {
    "gpt2": {
        4: [
            *((name, {}) for name in ("d4", "z2d4", "z3d4", "t4", "x4")),
            ("t4", _SEQUENCE),
            ("x4", _BY_HEADS),
            ("x4", _RING),
            ("p4", _staged("gpipe")),
            ("p4", _IN_TURNS),
            ("p4", _staged("zb")),
            ("d2p2", _staged("interleaved")),
            ("d2p2", _IN_TURNS),
            ("d2t2", _SEQUENCE),
            ("d2x2", _RING),
            ("p2t2", _IN_TURNS),
        ],
        8: [
            *((name, {}) for name in ("d8", "z3d8", "d2z3d4", "d2t4", "d2x4", "z3d2x4")),
            ("d2t4", _SEQUENCE),
            ("d2x4", _BY_HEADS),
            ("d2x4", _RING),
            ("d2p4", _IN_TURNS),
            ("p2t4", _IN_TURNS),
            ("d2p2t2", _IN_TURNS),
        ],
        16: [
            *((name, {}) for name in ("d16", "z3d16", "d4z3d4", "d4t4")),
            ("d4t4", _SEQUENCE),
            ("d4x4", _BY_HEADS),
            ("d4x4", _RING),
            ("d4p4", _IN_TURNS),
            ("d2p2t4", _IN_TURNS),
        ],
    },
    "llama": {
        4: [("d4", {}), ("z3d4", {}), ("t4", _SEQUENCE), ("x4", _BY_HEADS), ("x4", _RING), ("p4", _IN_TURNS)],
        8: [("z3d8", {}), ("d2t4", _SEQUENCE), ("d2x4", _RING), ("p2t4", _IN_TURNS)],
        16: [("d4t4", _SEQUENCE), ("d4x4", _RING), ("d2p2t4", _IN_TURNS)],
    },
    "mixtral": {
        4: [("d4", {}), ("e4", {}), ("d2e2", {}), ("z3d4", {}), ("p4", _IN_TURNS)],
        8: [("d8", {}), ("d2e4", {}), ("z3d8", {})],
        16: [("d16", {}), ("d4e4", {}), ("z3d16", {})],
    },
}
"""By network and ranks, what it trains by."""

_SHARED_SIZES = (*LAYER_SIZES, 4 * 1024**2)
"""Of activations, which ranks that share layers sum: all samples have 4 MiB."""
_LARGEST_UNIT, _MOST_PARTS = 24 * 1024**2, 8
"""Of what ZeRO gathers and reduces, a block of the Mixtral: every rank sends its part of it, of eight experts' matrices
an eighth at least."""
_PAIR = 2


def configurations(layout: NodeLayout, model: str) -> list[Configured]:
    """Strategies of so many ranks, and their settings."""
    return CONFIGURATIONS[model.rpartition(":")[2]].get(layout.ranks, [])


def sweeps_of(base: Path, layout: NodeLayout) -> list[Sweep]:
    """What calibrates a layout: activations among two and four ranks of a node, buckets, units, and groups at once."""
    lone, on_node = layout.nodes == 1, layout.ranks_per_node
    shared = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "exchange", "send_recv")
    # Groups of one rank on each node; of two where there is one node.
    groups = layout.ranks // _PAIR if lone else on_node
    parts = (64 * 1024, 256 * 1024, _LARGEST_UNIT // min(layout.ranks, _MOST_PARTS))
    found = {
        "stages": asked(layout, ("send_recv", "broadcast"), _SHARED_SIZES, waited=True),
        "buckets": asked(layout, ("all_reduce",), BUCKET_SIZES, waited=True),
        "units": asked(layout, ("all_gather", "reduce_scatter"), parts, waited=True),
        "pairs": asked(layout, shared, _SHARED_SIZES, side_by_side=_PAIR, waited=True),
        "beside": asked(layout, ("all_reduce",), LAYER_SIZES[:1], beside=True, blocks=1),
        "at-once": asked(layout, ("all_reduce", "send_recv"), (*_SHARED_SIZES, 16 * 1024**2), concurrent=groups),
    }
    if lone:
        between = tuple(name for name in shared if name not in ("all_reduce", "send_recv"))
        found["layers"] = asked(layout, between, _SHARED_SIZES, waited=True)
    else:
        found["inside"] = asked(layout, shared, _SHARED_SIZES, side_by_side=on_node, waited=True)
        found["crossed"] = asked(layout, shared, CROSSED_SIZES, side_by_side=on_node, crossed=True)
        found["beside-inside"] = asked(
            layout, ("all_reduce",), LAYER_SIZES[:1], side_by_side=on_node, beside=True, blocks=1
        )
    return named(base, layout, found)


TRANSFORMERS = Suite(
    models={f"emulated_networks:{name}": (SMALL.tokens,) for name in CONFIGURATIONS},
    configurations=configurations,
    sweeps=sweeps_of,
)
"""Every axis that trains transformers."""
