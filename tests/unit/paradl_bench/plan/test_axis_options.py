"""Options of axes in a plan's settings: what was not given is the default, and equal settings compare equal."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from paradl_bench.core.errors import UserError
from paradl_bench.plan.axes import registry
from paradl_bench.plan.axes.kind import AxisKind, Prefix
from paradl_bench.plan.axes.options import AxisOptions
from paradl_bench.plan.axes.registry import axis_kinds, option_types, read_options
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.strategies.exchange.options import ExchangeOptions
from paradl_bench.strategies.pipeline.axis import PipelineOptions
from paradl_bench.strategies.splitting.options import SplitOptions


class SameField(AxisOptions, frozen=True, kw_only=True):
    schedule: str = "mine"


def test_options_that_are_the_default_are_not_kept() -> None:
    plain = PlanSettings(batch=8)
    given = PlanSettings(batch=8, axes=(PipelineOptions(), ExchangeOptions(exchange="flat")))
    assert given == plain
    assert hash(given) == hash(plain)
    assert given.of(PipelineOptions) == PipelineOptions()


def test_the_order_in_which_options_come_does_not_matter() -> None:
    one, other = SplitOptions(split=("fc",)), PipelineOptions(micro_batches=4)
    assert PlanSettings(batch=8, axes=(one, other)) == PlanSettings(batch=8, axes=(other, one))


def test_a_change_leaves_other_options_as_they_are() -> None:
    settings = plan_settings(batch=8, micro_batches=4, split=("fc",), accumulate=2)
    changed = settings.changed(PipelineOptions, schedule="zb")
    assert changed.options == {"accumulate": "2", "split": "fc", "micro_batches": "4", "schedule": "zb"}
    assert changed.changed(PipelineOptions, schedule="gpipe") == settings


def test_flat_names_are_those_of_files() -> None:
    settings = plan_settings(batch=8, exchange="leader", ranks_per_node=2, spatial_until="fc")
    assert plan_settings(batch=8, **settings.fields) == settings
    with pytest.raises(TypeError, match="tree"):
        plan_settings(batch=8, tree=1)


def test_every_option_shown_reaches_its_struct() -> None:
    for kind in option_types():
        assert {shown.name for shown in kind.shown}
        assert len({shown.flag for shown in kind.shown}) == len(kind.shown)
    axes, rest = read_options({"schedule": "zb", "micro_batches": None, "model": "resnet18"})
    assert rest == {"model": "resnet18"}
    assert PlanSettings(batch=8, axes=axes).options == {"schedule": "zb"}


@pytest.fixture
def found(monkeypatch: pytest.MonkeyPatch) -> Iterator[dict[str, AxisKind]]:
    """Kinds as the registry is to find them."""
    kinds = dict(axis_kinds())
    monkeypatch.setattr(registry, "discover", lambda *_, **__: kinds)
    registry.axis_kinds.cache_clear()
    registry.option_types.cache_clear()
    yield kinds
    monkeypatch.undo()
    registry.axis_kinds.cache_clear()
    registry.option_types.cache_clear()


def test_two_axes_of_one_letter_are_refused(found: dict[str, AxisKind]) -> None:
    found["mine"] = AxisKind(name="mine", letter="m", package="mine", prefix=Prefix(letter="d", most=2, what="mark"))
    with pytest.raises(UserError, match="two axes have the same letter"):
        axis_kinds()


def test_two_structs_with_a_field_of_one_name_are_refused(found: dict[str, AxisKind]) -> None:
    found["mine"] = AxisKind(name="mine", letter="m", package="mine", options=(SameField,))
    with pytest.raises(UserError, match="two structs of options have a field 'schedule'"):
        option_types()
