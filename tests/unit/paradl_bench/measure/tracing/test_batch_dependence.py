"""Models whose operations depend on the batch, or that change it: refused in one line, before a rank starts."""

from __future__ import annotations

import random

import pytest

torch = pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from torch import nn

from paradl_bench.core.errors import UserError
from paradl_bench.measure.tracing.batch_dependence import refuse_changed_input
from paradl_bench.measure.tracing.tracing import trace_network
from paradl_bench.measure.training.request import TrainingRequest
from paradl_bench.measure.training.run import check_limits
from paradl_bench.network.models.catalog import load_model
from paradl_bench.plan.strategy import parse_strategy


class Linear(nn.Module):
    input_shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(6, 4)

    def forward(self, x):
        return self.fc(x)


class BySample(Linear):
    def forward(self, x):
        return torch.stack([self.fc(row).tanh() for row in x])


class BySplit(Linear):
    """The operation is the same, but not how many tensors it returns."""

    def forward(self, x):
        return self.fc(torch.cat(x.split(1)))


class ByCount(Linear):
    def forward(self, x):
        return self.fc(x * 2 if len(x) > 1000 else x)


class ByValue(Linear):
    """Traced on a CPU, for its values."""

    def forward(self, x):
        x = x.abs() if float(x.mean()) > -100 else x
        return torch.stack([self.fc(row) for row in x]) if self.loops else self.fc(x)

    loops = False


class ByValueAndSample(ByValue):
    loops = True


class Caching(Linear):
    """Makes a table in its first forward alone."""

    table = None

    def forward(self, x):
        if self.table is None:
            self.table = torch.ones(6, device=x.device) * 2
        return self.fc(x * self.table)


class Drawing(Linear):
    """Leaves a layer out at times, by numbers that torch and Python draw."""

    def forward(self, x):
        for _ in range(20):
            if random.random() < 0.5:
                x = x * 2
            if torch.rand([], device="cpu").item() < 0.5:
                x = x + 1
        return self.fc(x)


class Unpredictable(Linear):
    """What it runs has nothing to do with the number of samples."""

    calls = 0

    def forward(self, x):
        type(self).calls += 1
        for _ in range(type(self).calls % 5):
            x = x * 2
        return self.fc(x)


class FewSamples(Linear):
    """The loss has more targets."""

    def forward(self, x):
        return self.fc(x)[:3]


class Mistaken(Linear):
    def forward(self, x):
        return self.fc(x.no_such_attribute)


class Text(Linear):
    def forward(self, x):
        return "text"


class InPlace(Linear):
    def forward(self, x):
        return self.fc(x.mul_(2))


class InPlaceOnPart(Linear):
    def forward(self, x):
        x[:, 0].add_(1)
        return self.fc(x)


class InPlaceOnCopy(Linear):
    def forward(self, x):
        return self.fc(x.clone().mul_(2))


def name_of(module) -> str:
    return f"{__name__}:{module.__name__}"


@pytest.mark.parametrize(
    ("module", "message"),
    [
        (BySample, r"it calls unbind \(2 tensors\) for a batch of 2 samples, and unbind \(3 tensors\)"),
        (BySplit, r"at operation 1: it calls split \(2 tensors\) .* and split \(3 tensors\) .* without a loop"),
        (ByCount, r"at operation 1: it calls fc.linear for a batch of 2 samples, and mul for a batch of 10007 samples"),
        (ByValueAndSample, r"it calls unbind \(7 tensors\) .*, and unbind \(14 tensors\) for a batch of 14 samples"),
    ],
)
def test_operations_that_depend_on_the_batch_are_refused(module, message: str) -> None:
    with pytest.raises(UserError, match=message) as raised:
        trace_network(load_model(name_of(module)))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("module", [ByValue, Caching, Drawing, Unpredictable])
def test_what_has_other_causes_than_the_batch_is_traced(module) -> None:
    assert trace_network(load_model(name_of(module))).layers


@pytest.mark.parametrize(
    ("module", "message"),
    [(FewSamples, "ValueError: Expected input batch_size"), (Mistaken, "AttributeError.*no_such")],
)
def test_a_mistake_in_forward_is_a_line(module, message: str) -> None:
    with pytest.raises(UserError, match=f"does not run on an input of 6: {message}") as raised:
        trace_network(load_model(name_of(module)))
    assert "\n" not in str(raised.value)


def test_an_output_refused_by_the_loss_keeps_its_message() -> None:
    with pytest.raises(UserError, match=r"^the model's output is a str"):
        trace_network(load_model(name_of(Text)))


@pytest.mark.parametrize(("module", "layer"), [(InPlace, "mul"), (InPlaceOnPart, "add")])
@pytest.mark.parametrize("strategy", ["serial", "d2"])
def test_a_model_that_changes_its_input_is_refused(module, layer: str, strategy: str) -> None:
    request = TrainingRequest(
        model=name_of(module), input_shape=None, strategy=parse_strategy(strategy), batch=4, device="cpu"
    )
    with pytest.raises(UserError, match=f"{layer} changes the model's input in place.* x.clone()"):
        check_limits(request)


def test_in_place_work_on_a_copy_of_the_input_passes() -> None:
    refuse_changed_input(trace_network(load_model(name_of(InPlaceOnCopy))))


class NormOfOneValue(nn.Sequential):
    input_shape = (6,)

    def __init__(self) -> None:
        super().__init__(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Linear(4, 3))


class Squeezed(nn.Module):
    input_shape = (6,)

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(6, 6), nn.Linear(6, 3)

    def forward(self, x):
        return self.second(self.first(x).unsqueeze(1)).squeeze().flip(1)


def request_on(module, strategy: str, batch: int) -> TrainingRequest:
    return TrainingRequest(
        model=name_of(module), input_shape=None, strategy=parse_strategy(strategy), batch=batch, device="cpu"
    )


@pytest.mark.parametrize("module", [NormOfOneValue, Squeezed])
@pytest.mark.parametrize("strategy", ["d2", "p2"])
def test_a_model_that_fails_on_one_sample_is_refused(module, strategy: str) -> None:
    with pytest.raises(
        UserError, match=f"does not train on a single sample.*{strategy} on batch 2 has one sample at a time"
    ):
        check_limits(request_on(module, strategy, 2))
    check_limits(request_on(module, strategy, 4))
