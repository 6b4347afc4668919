"""What tracing sees of users' idioms, and what planning makes of it: refused, run whole, or planned as it is issued."""

from __future__ import annotations

from collections import Counter

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from torch import nn
from torch.utils.checkpoint import checkpoint

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.calls.recorder import planned_collectives
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.axes.registry import kinds_with
from paradl_bench.plan.compute import input_needs_gradient
from paradl_bench.plan.settings import PlanSettings, plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.strategies.nesting.catalog import planner_for
from paradl_bench.strategies.passes.recomputation import check_recomputation, segments_of
from paradl_bench.strategies.spatial.region import spatial_region

BATCH = 2


class Convolved(nn.Module):
    input_shape = (4, 8, 6)

    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.conv2 = nn.Conv2d(4, 6, 3, padding=1), nn.Conv2d(6, 6, 3, padding=1)
        self.register_buffer("rows", torch.ones(1, 1, 8, 1))
        self.fc = nn.Linear(6, 4)

    def head(self, x):
        return self.fc(x.mean((2, 3)))


class Frozen(Convolved):
    def __init__(self) -> None:
        super().__init__()
        self.conv1.requires_grad_(False)

    def forward(self, x):
        return self.head(self.conv2(self.conv1(x)))


class TwoOutputs(Convolved):
    """The loss reads the first."""

    def forward(self, x):
        x = self.conv1(x)
        y = self.conv2(x)
        return y.mean((2, 3)), {"features": [x]}, y


class Detached(Convolved):
    def forward(self, x):
        x = self.conv1(x)
        return self.head(x + self.conv2(x.detach()))


class Masked(Convolved):
    """A mask is read whole."""

    def forward(self, x):
        x = self.conv1(x)
        return self.head(x) + (x > 0).sum((1, 2, 3))[:, None]


class Handled(Convolved):
    def forward(self, x):
        x = self.conv2(self.conv1(x))
        return self.head(x * max(x.flatten().tolist())) if torch.equal(x, x) else x


class Mapped(Convolved):
    def forward(self, x):
        return self.head(self.conv2(self.conv1(x) * self.rows))


class Aliased(Convolved):
    """What is changed in place has been looked at before, by a view."""

    def forward(self, x):
        x = self.conv1(x)
        view = x.flatten(2)
        x.mul_(2)
        return self.head(self.conv2(x)) + view.mean(2)[:, :4]


class Repeating(Convolved):
    reentrant = False

    def forward(self, x):
        x = self.conv1(x)
        return self.head(checkpoint(lambda y: torch.tanh(self.conv2(y)), x, use_reentrant=self.reentrant))


class NormRepeating(Convolved):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(6)

    def forward(self, x):
        x = self.conv1(x)
        return self.head(checkpoint(lambda y: self.norm(self.conv2(y)), x, use_reentrant=False))


class Reentrant(Repeating):
    reentrant = True

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Parameter(torch.ones(3))


class TwiceReentrant(Repeating):
    """One layer in two checkpoints, whose backward adds to its gradient twice."""

    def forward(self, x):
        x = self.conv1(x)
        for _ in range(2):
            x = checkpoint(self.conv2, x, use_reentrant=True)
        return self.head(x)


class Changing(Convolved):
    def forward(self, x):
        with torch.no_grad():
            self.conv1.weight.clamp_(-1, 1)
        return self.head(self.conv2(self.conv1(x)))


class ChangingData(Convolved):
    def forward(self, x):
        self.conv1.weight.data.mul_(0.5)
        return self.head(self.conv2(self.conv1(x)))


class Viewed(nn.Module):
    """A linear layer of three dims returns a view."""

    input_shape = (5, 8)

    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(8, 8), nn.Linear(8, 4)

    def forward(self, x):
        x = self.fc1(x)
        x += 1
        return self.fc2(x).mean(1)


class Mapping(nn.Module):
    """Scores by position, which the loss averages by operations of its own."""

    input_shape = (4, 8, 6)

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Conv2d(4, 6, 3), nn.ReLU())
        self.more = nn.Sequential(*(nn.Sequential(nn.Conv2d(6, 6, 1), nn.Tanh()) for _ in range(12)))
        self.fc = nn.Linear(1, 1)

    def forward(self, x):
        return self.more(self.block(x))


def network_of(module):
    return trace_network(load_model(f"{__name__}:{module.__name__}"))


def planned(module, strategy: str, **options) -> Counter:
    """What is issued in an iteration and before: (when, operation, bytes)."""
    network, parsed = network_of(module), parse_strategy(strategy)
    plan = planner_for(parsed).plan(network, parsed, plan_settings(batch=BATCH * 2, **options))
    issued = planned_collectives(plan)
    return Counter({(item.when, item.operation, item.message_bytes): item.count for item in issued})


def ends(module) -> str:
    return spatial_region(network_of(module), (2,)).end


def test_frozen_parameters_are_broadcast_with_the_trained_ones() -> None:
    of_all = 4 * sum(tensor.numel() for tensor in Frozen().parameters())
    of_buffers = 4 * 8
    assert planned(Frozen, "d2")["setup", "broadcast", of_all + of_buffers] == 1
    network = network_of(Frozen)
    assert [tensor.name for tensor in network.held_parameters] == [name for name, _ in Frozen().named_parameters()]


def test_blocks_that_forward_returns_are_gathered_whoever_reads_them() -> None:
    block = 4 * BATCH * 2 * 6 * 4 * 6
    assert planned(TwoOutputs, "s2")["iteration", "all_gather", block] == 2


def test_no_gradient_is_made_or_communicated_behind_what_has_none() -> None:
    network = network_of(Detached)
    needs = dict(zip((layer.name for layer in network.layers), input_needs_gradient(network), strict=True))
    assert (needs["conv2"], needs["detach"], needs["add"], needs["fc"]) == (False, False, True, True)
    reduced = [key for key, count in planned(Detached, "f2").items() if key[1] == "all_reduce" and count]
    assert [key for key in reduced if key[2] == 4 * BATCH * 2 * 6 * 8 * 6] == []


def test_a_mask_is_gathered_by_the_byte() -> None:
    issued = planned(Masked, "s2")
    elements = BATCH * 2 * 6 * 4 * 6
    assert (issued["iteration", "all_gather", elements], issued["iteration", "all_gather", 4 * elements]) == (1, 1)


@pytest.mark.parametrize(
    ("module", "end"),
    [
        (Handled, "conv2: the model's code does more with what it returns than operations do"),
        (Mapped, "mul: elementwise reads rows by position"),
        (Aliased, "flatten: view changes the number of dims"),
    ],
)
def test_a_region_ends_before_what_is_not_by_position(module, end: str) -> None:
    assert ends(module) == end


def test_in_place_work_on_uncut_data_is_outside_the_region() -> None:
    network = network_of(Aliased)
    inside = {network.layers[index].name for index in spatial_region(network, (2,)).layers}
    assert inside == {"conv1"}


@pytest.mark.parametrize(
    ("module", "strategy", "message"),
    [
        (Repeating, "s2", "layer conv2 runs inside of the model's own torch.utils.checkpoint.*spatial.*--recompute"),
        (Repeating, "f2", "checkpoint, whose second forward is not filter parallel; leave that out, and give --recom"),
        (Reentrant, "c2", "checkpoint, whose second forward is not channel parallel"),
        (Reentrant, "z3d2", "checkpoint, whose backward would gather parameters once more.*use_reentrant=False"),
        (Reentrant, "d2", "parameter unused gets no gradient.*use_reentrant=False"),
        (TwiceReentrant, "d2", "several layers read parameter conv2.weight.*use_reentrant=False"),
        (TwiceReentrant, "z1d2", "several layers read parameter conv2.weight.*use_reentrant=False"),
        (Changing, "z2d2", "clamp changes parameter conv1.weight in forward.*z1d2 allows"),
        (ChangingData, "z3d2", "mul changes parameter conv1.weight in forward.*z1d2 allows"),
        (Viewed, "z3d2", "add changes in place what fc1 returns, a view.*or take z1d2"),
    ],
)
def test_what_cannot_run_is_refused_in_planning(module, strategy: str, message: str) -> None:
    with pytest.raises(UserError, match=message):
        planned(module, strategy)


def test_no_axis_that_parts_layers_takes_a_models_own_checkpoint() -> None:
    for kind in {*kinds_with(Trait.SHARDS_LAYERS), *kinds_with(Trait.STAGES)}:
        with pytest.raises(UserError, match=f"whose second forward is not {kind.name} parallel"):
            check_recomputation(network_of(Repeating), parse_strategy(f"{kind.letter}2"), PlanSettings(batch=2))


def test_a_norm_in_a_models_own_checkpoint_is_not_synchronised() -> None:
    network, strategy = network_of(NormRepeating), parse_strategy("d2")
    with pytest.raises(UserError, match=r"layer norm runs inside of .*whose second forward is not synchronised"):
        check_recomputation(network, strategy, PlanSettings(batch=2, batch_norm="sync"))
    check_recomputation(network, strategy, PlanSettings(batch=2))
    check_recomputation(network, parse_strategy("d1"), PlanSettings(batch=2, batch_norm="sync"))
    check_recomputation(network_of(Repeating), strategy, PlanSettings(batch=2, batch_norm="sync"))


def test_what_the_model_runs_again_is_no_segment_of_recomputation() -> None:
    settings = PlanSettings(batch=2, recompute=("conv2",))
    with pytest.raises(UserError, match="--recompute conv2: layer conv2 runs again already, by the model's own"):
        check_recomputation(network_of(Repeating), parse_strategy("d2"), settings)
    check_recomputation(network_of(Repeating), parse_strategy("d2"), PlanSettings(batch=2, recompute=("conv1",)))


def test_a_gradient_accumulated_twice_is_ready_with_the_second() -> None:
    order = network_of(TwiceReentrant).gradient_order
    assert sorted(order) == sorted(name for name, _ in TwiceReentrant().named_parameters())
    assert order[-4:-2] == ("conv2.weight", "conv2.bias")


def test_the_loss_is_no_segment_that_is_computed_again() -> None:
    network = network_of(Mapping)
    assert sum(layer.name.startswith("loss.") for layer in network.layers) > 1
    names = [segment.name for segment in segments_of(network, PlanSettings(batch=2, recompute=("all",)))]
    assert "more.0" in names
    assert "loss" not in names


@pytest.mark.parametrize(
    ("module", "strategy"), [(Repeating, "d2"), (Repeating, "z3d2"), (Changing, "d2"), (Viewed, "z2d2")]
)
def test_what_can_run_is_not_refused(module, strategy: str) -> None:
    assert planned(module, strategy)
