"""How frameworks overlap an iteration's input and its gradient exchange (S-SGD's DAG, Shi et al. 2018).

And what they hold (:mod:`~paradl_bench.strategies.frameworks.framework_memory`).
"""

from __future__ import annotations

from typing import NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import zero_stage
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.frameworks.framework_memory import LLM_FOUNDRY, MEGATRON, TORCH, FrameworkMemory


class Preset(NamedTuple):
    """How a framework overlaps, and what it holds.

    Attributes:
        reads_ahead, copies_ahead: whether a mini-batch is read, and copied to the device, while others are computed.
        wait_free: whether gradients are exchanged as they are there; else all of them behind backward.
        layerwise: whether each layer has an exchange of its own; else those of its library (DDP's buckets).
        memory: what it holds in the place of what torch does.
    """

    reads_ahead: bool
    copies_ahead: bool
    wait_free: bool
    layerwise: bool = True
    memory: FrameworkMemory = TORCH


PRESETS = {
    "naive": Preset(reads_ahead=False, copies_ahead=False, wait_free=False),
    "caffe-mpi": Preset(reads_ahead=True, copies_ahead=True, wait_free=True),
    "mxnet": Preset(reads_ahead=True, copies_ahead=False, wait_free=True),
    "tensorflow": Preset(reads_ahead=True, copies_ahead=False, wait_free=True),
    "cntk": Preset(reads_ahead=True, copies_ahead=False, wait_free=False),
    "pytorch": Preset(reads_ahead=True, copies_ahead=False, wait_free=True, layerwise=False),
    "megatron": Preset(reads_ahead=True, copies_ahead=False, wait_free=True, layerwise=False, memory=MEGATRON),
    "llm-foundry": Preset(reads_ahead=True, copies_ahead=False, wait_free=True, layerwise=False, memory=LLM_FOUNDRY),
}
"""The paper's four frameworks and the naive order; those from ``pytorch`` on (workers read ahead) are ours."""
DEFAULT_PRESET = "pytorch"


def preset_named(name: str) -> Preset:
    """The preset of a name; a UserError, which names the choices, if there is none."""
    if name not in PRESETS:
        raise UserError(f"--preset {name}: choices are {', '.join(PRESETS)}")
    return PRESETS[name]


def framework_of(settings: PlanSettings) -> FrameworkMemory:
    """What the settings' framework holds in the place of what torch does."""
    return preset_named(settings.preset).memory if settings.preset else TORCH


def scatters_gradients(strategy: Strategy, settings: PlanSettings) -> bool:
    """Whether each rank updates equal parts of all parameters: gradients are scattered, and parameters gathered.

    Where some ranks hold other parameters than others, no part is of all of them.
    """
    alike = not any(axis.has(Trait.CUTS_EXPERTS) for axis in strategy.axes)
    return alike and zero_stage(strategy) == 1 and framework_of(settings).splits_evenly
