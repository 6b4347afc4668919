"""Ranks hold stages of the network, which micro-batches pass through."""

from __future__ import annotations

from typing import ClassVar

from paradl_bench.core.bounds import MOST_MICRO_BATCHES, MicroBatches
from paradl_bench.plan.axes.kind import AxisKind, Trait
from paradl_bench.plan.axes.options import AxisOptions, Shown
from paradl_bench.plan.schedules.catalog import schedule_name
from paradl_bench.plan.settings import PlanSettings


class PipelineOptions(AxisOptions, frozen=True, kw_only=True):
    """How stages are cut and take turns.

    Attributes:
        micro_batches: None for as many as the pipeline has ranks.
        schedule: by name.
        stages: the first layer of every stage but the first; empty for a cut that balances FLOPs.
        cut_by: what ``stages`` balance where they were found and not given, in words.
    """

    micro_batches: MicroBatches | None = None
    schedule: str = "gpipe"
    stages: tuple[str, ...] = ()
    cut_by: str = ""

    shown: ClassVar[tuple[Shown, ...]] = (
        Shown(
            name="micro_batches",
            value=int,
            least=1,
            most=MOST_MICRO_BATCHES,
            searched="tries all there are",
            help="Micro-batches of a pipeline. Default: one for each rank of the pipeline.",
        ),
        Shown(
            name="schedule",
            default="gpipe",
            searched="tries all there are",
            help="Schedule of a pipeline: gpipe, 1f1b, interleaved, zb, zbv or dualpipev, or torch's name of it.",
            read=lambda name: {"schedule": schedule_name(name)},
        ),
        Shown(
            name="stages",
            metavar="LAYER[,LAYER...]",
            searched="cuts pipelines so that FLOPs balance",
            help="Where a pipeline is cut: the first layer of each stage after the first stage. Default: the cut that"
            " balances FLOPs.",
            read=lambda text: {"stages": tuple(text.split(",")) if text else ()},
        ),
    )

    def __post_init__(self) -> None:
        if self.micro_batches is not None and not 1 <= self.micro_batches <= MOST_MICRO_BATCHES:
            raise ValueError(f"micro_batches has to be from 1 to {MOST_MICRO_BATCHES}, not {self.micro_batches}")

    def settled(self, degree: int) -> dict[str, str]:
        """Micro-batches, schedule and stages; these have to be the same, whatever found them."""
        return {
            "micro_batches": str(self.micro_batches or degree),
            "schedule": self.schedule,
            "stages": ",".join(self.stages) or "balanced",
        }


def micro_batches(settings: PlanSettings, ranks: int) -> int:
    """Into how many micro-batches a rank's samples are split: as many as the pipeline has ranks, unless given."""
    return settings.of(PipelineOptions).micro_batches or ranks


def cut_by(settings: PlanSettings) -> str:
    """What decided the cut into stages, in words."""
    return settings.of(PipelineOptions).cut_by or ("--stages" if settings.of(PipelineOptions).stages else "FLOPs")


AXIS = AxisKind(
    name="pipeline",
    letter="p",
    package=__package__,
    order=4,
    distsim="P",
    options=(PipelineOptions,),
    traits=frozenset({Trait.STAGES, Trait.SENDS_AS_COMPUTED}),
    cut_less="give other --stages",
)
