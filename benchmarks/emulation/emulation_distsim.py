"""The DistSim suite: BERT, GPT-2 and T5 by 1 to 4 ways of tensor (M), pipeline (P) and data (D) parallelism.

DistSim, section 5.1: 4, 8 and 16 devices on 1, 2 and 4 servers; figures 8 to 10 and Table 2. Ranks that share layers
lie side by side inside of a node, as in the paper.
"""

from __future__ import annotations

import sys
from itertools import product
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1] / "networks"))

from emulated_networks import SMALL
from emulated_profile import BUCKET_SIZES, CROSSED_SIZES, LAYER_SIZES, Sweep, asked, named
from emulation_cases import Configured, Suite

from paradl_bench.ranks.emulated_nodes.layout import NodeLayout

GRID, WAYS, GRID_RANKS = "emulated_networks:bert", (1, 2, 4), (4, 8)
"""The model that trains by every strategy of so many ranks, as a grid search tries them, and the ways of an axis."""

FEW = {4: ("2M2P1D", "1M2P2D"), 8: ("4M2P1D", "2M2P2D", "2M4P1D"), 16: ("2M2P4D", "4M2P2D", "2M4P2D")}
"""By ranks, what the other models train by, and on 16 ranks all of them."""

MICRO_BATCHES = 4
"""As in the paper's figure 10."""

_SHARED_SIZES = (*LAYER_SIZES, 4 * 1024**2)
"""Of activations: all samples on ranks that share layers alone have 4 MiB."""
_PAIR = 2


def configurations(layout: NodeLayout, model: str) -> list[Configured]:
    """Strategies of so many ranks, and their settings: in stages, 1F1B (the paper's Dapple)."""
    in_turns: dict[str, object] = {"schedule": "1f1b", "micro_batches": MICRO_BATCHES}
    names = grid(layout.ranks) if model == GRID and layout.ranks in GRID_RANKS else FEW[layout.ranks]
    return [(name, {} if "1P" in name else in_turns) for name in names]


def grid(ranks: int) -> tuple[str, ...]:
    """Every product of ways that takes so many ranks, data as many as are left (DistSim, section 6)."""
    ways = [(tensor, stages, ranks // (tensor * stages)) for tensor, stages in product(WAYS, WAYS)]
    return tuple(f"{m}M{p}P{d}D" for m, p, d in ways if m * p * d == ranks)


def sweeps_of(base: Path, layout: NodeLayout) -> list[Sweep]:
    """What calibrates a layout: activations, messages between stages, and buckets of gradients that share links.

    Groups of two and of four that share layers lie inside of nodes and call at once, alone and behind ghosts; those of
    one node also while gradients are reduced over all ranks.
    """
    lone = layout.nodes == 1
    shared = ("all_reduce", "send_recv")
    # Groups of one rank on each node; of two where there is one node.
    groups = layout.ranks // _PAIR if lone else layout.ranks_per_node
    found = {
        "stages": asked(layout, ("send_recv", "broadcast"), _SHARED_SIZES, waited=True),
        "buckets": asked(layout, ("all_reduce",), BUCKET_SIZES, waited=True),
        "pairs": asked(layout, shared, _SHARED_SIZES, side_by_side=_PAIR, waited=True),
        "beside": asked(layout, ("all_reduce",), LAYER_SIZES[:1], beside=True, blocks=1),
        "at-once": asked(layout, shared, (*_SHARED_SIZES, 8 * 1024**2), concurrent=groups),
    }
    if not lone:
        on_node = layout.ranks_per_node
        found["inside"] = asked(layout, shared, _SHARED_SIZES, side_by_side=on_node, waited=True)
        found["crossed"] = asked(layout, shared, CROSSED_SIZES, side_by_side=on_node, crossed=True)
        found["beside-inside"] = asked(
            layout, ("all_reduce",), LAYER_SIZES[:1], side_by_side=on_node, beside=True, blocks=1
        )
    return named(base, layout, found)


DISTSIM = Suite(
    models={f"emulated_networks:{name}": (SMALL.tokens,) for name in ("bert", "gpt2", "t5")},
    configurations=configurations,
    sweeps=sweeps_of,
)
