"""A strategy's training beside the serial model's, on one rank together with the others."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch

from paradl_bench.measure.execution.micro_steps import MicroSteps
from paradl_bench.measure.execution.optimizers import build_optimizer, make_optimizer
from paradl_bench.measure.proof.comparison import Tolerance, difference, largest
from paradl_bench.measure.proof.parts import AtOnce, norm_cuts, own_parts, place_of, whole
from paradl_bench.measure.proof.reference import Ranks, SerialReference, SerialStep
from paradl_bench.measure.proof.watching import Key, Passage, WatchedForward, tensors_of
from paradl_bench.network.graph import ModelGraph
from paradl_bench.network.models.catalog import LoadedModel
from paradl_bench.plan.axes.kind import Trait
from paradl_bench.plan.mesh import degree_of, group_axes
from paradl_bench.plan.settings import PlanSettings
from paradl_bench.plan.strategy import Strategy
from paradl_bench.strategies.nesting.parallel import ParallelModule
from paradl_bench.strategies.passes.norm_statistics import statistics_axes
from paradl_bench.strategies.running.parameters import StateGroups
from paradl_bench.strategies.running.sharded_module import as_it_stands
from paradl_bench.strategies.splitting.options import FilterOptions

_LEARNING_RATE, _MOMENTUM = 0.05, 0.9


class Difference(NamedTuple):
    """One thing that differs from serial on one rank.

    Attributes:
        what: in words. layer: that it belongs to; empty for what belongs to none.
        relative: the largest difference over the largest exact value.
    """

    order: int
    what: str
    layer: str
    relative: float
    rank: int


class Findings(NamedTuple):
    """What one comparison found on this rank.

    Attributes:
        differences: in no order. most: the largest relative difference of all that was compared.
        finite: whether the serial model's outputs are.
    """

    differences: list[Difference]
    most: float
    finite: bool = True


class Case(NamedTuple):
    """What is proved.

    Attributes:
        settings: with the mini-batch of the proof.
        at_once: what a forward of the serial model reads; None for its own replica's samples, or all replicas' where
            norms synchronise them.
        optimizer: by name, whose steps on the same gradients are compared.
    """

    network: ModelGraph
    strategy: Strategy
    settings: PlanSettings
    tolerance: Tolerance
    hold: bool = True
    at_once: AtOnce | None = None
    with_input: bool = True
    optimizer: str = "sgd"


class StrategyProof:
    """One rank's part of a proof.

    Args:
        build: makes the parallel module; a collective.

    Raises:
        UserError: as ``build``.
    """

    def __init__(
        self,
        case: Case,
        parallel: LoadedModel,
        serial: LoadedModel,
        ranks: Ranks,
        build: Callable[[LoadedModel], ParallelModule],
    ) -> None:
        self._case, self._ranks, self._loss = case, ranks, parallel.loss
        network, strategy, settings = case.network, case.strategy, case.settings
        self._module = parallel.module
        self._place = place_of(strategy, settings, ranks.rank)
        at_once: AtOnce = case.at_once or ("replicas" if synchronises(network, strategy, settings) else "own")
        self._own_loss = at_once == "own" or self._place.replicas == 1
        cuts = norm_cuts(network, strategy, settings, self._place, at_once)
        self._reference = SerialReference(serial, self._place, ranks, cuts=cuts, at_once=at_once, hold=case.hold)
        self._parts = own_parts(network, strategy, ranks.rank, settings)
        self._built = build(parallel)
        self._watched = WatchedForward(parallel.module, hold=case.hold)
        # Statistics apart leave no running ones, and replicas take the first one's before each forward.
        self._compares_buffers = not cuts and not (at_once == "own" and self._place.replica)
        self._averages = not self._built.groups and bool(group_axes(strategy, Trait.REPLICATES))
        self._optimizers: tuple[torch.optim.Optimizer, ...] | None = None

    @property
    def groups(self) -> tuple[Any, ...]:
        """Process groups to let go of, once nothing of this is reached any more."""
        return self._built.groups[1:]

    @property
    def dtypes(self) -> set[torch.dtype]:
        """Floating ones that the serial model's layers gave."""
        return self._reference.watched.dtypes

    def iterate(self, inputs: torch.Tensor, targets: torch.Tensor, seed: int | None = None) -> Findings:
        """Forward and backward of both on a global mini-batch; outputs, loss, gradients and buffers are compared.

        Args:
            seed: of what both draw; None where drawn numbers are held still.
        """
        if seed is not None:
            torch.manual_seed(seed)
        exact = self._reference.run(inputs, targets, with_input=self._asks_input(inputs))
        if not exact.finite:
            return Findings([], 0.0, finite=False)
        if seed is not None:
            torch.manual_seed(seed)
        loss, input_gradient = self._run_parallel(inputs, targets)
        comparison = _Comparison(self._case.tolerance, self._ranks.rank)
        self._compare_outputs(comparison, exact)
        if loss is not None and self._own_loss:
            comparison.compare("the loss", "", loss, exact.loss, 1.0)
        scale = self._largest_gradient(exact.input_gradient)
        if exact.input_gradient is not None and input_gradient is not None:
            comparison.compare("the gradient of the input", "", input_gradient, exact.input_gradient, scale)
        self._compare_parameters(comparison, scale)
        if self._compares_buffers:
            of_serial = dict(self._reference.module.named_buffers())
            for name, buffer in self._module.named_buffers():
                comparison.compare(f"buffer {name}", "", whole(buffer), of_serial[name], 1.0)
        return comparison.findings

    def update(self) -> Findings:
        """One optimizer step of both on the gradients that were compared; parameters are compared."""
        if self._optimizers is None:
            groups, parameters = self._built.state_groups, self._module.parameters()
            self._optimizers = (
                _optimizer(self._case.optimizer, parameters, groups),
                _optimizer(self._case.optimizer, self._reference.module.parameters()),
            )
        comparison = _Comparison(self._case.tolerance, self._ranks.rank)
        self._clip(comparison)
        self._take_gradients()
        for optimizer in self._optimizers:
            optimizer.step()
        exact = dict(self._reference.module.named_parameters())
        for name, parameter in self._module.named_parameters():
            held = exact[name][self._parts.get(name, ())]
            comparison.compare(f"parameter {name} after the weight update", "", whole(parameter), held, 1.0)
        return comparison.findings

    def _clip(self, comparison: _Comparison) -> None:
        """Limit the gradients of both, where the settings limit them: always to less than their norm."""
        if self._built.clipper is None:
            return
        parameters = list(self._reference.module.parameters())
        norm = torch.nn.utils.get_total_norm([parameter.grad for parameter in parameters if parameter.grad is not None])
        # A limit that nothing exceeds would hide a wrong norm.
        most = min(self._built.clipper.max_norm, float(norm) / 2) or 1.0
        torch.nn.utils.clip_grad_norm_(parameters, most)
        self._built.clipper.max_norm = most
        comparison.compare("the norm of the gradients", "", self._built.clipper.clip(), norm, 1.0)
        self._compare_parameters(comparison, self._largest_gradient(None))

    def _take_gradients(self) -> None:
        """Give the serial model this rank's gradients.

        An optimizer can turn the rounding of a gradient that is zero into a step: Adam's first is g / (abs(g) + 1e-8).
        """
        exact = dict(self._reference.module.named_parameters())
        for name, parameter in self._module.named_parameters():
            # A collective where ranks hold rows.
            gradient = None if parameter.grad is None else whole(parameter.grad)
            of_whole = exact[name].grad
            if gradient is not None and of_whole is not None:
                of_whole[self._parts.get(name, ())] = gradient

    def serial_varies(self, inputs: torch.Tensor, targets: torch.Tensor) -> bool:
        """Whether the serial model gives something else with other random numbers."""
        given = []
        buffers = [(buffer, buffer.clone()) for buffer in self._reference.module.buffers()]
        for seed in (1, 2):
            torch.manual_seed(seed)
            self._reference.run(inputs, targets, with_input=False)
            gradients = [p.grad for p in self._reference.module.parameters() if p.grad is not None]
            given.append([tensor.detach().clone() for tensor in (*self._reference.outputs, *gradients)])
        for buffer, before in buffers:
            buffer.copy_(before)
        return any(difference(one, other, self._case.tolerance, 1.0)[0] for one, other in zip(*given, strict=True))

    def locate(self, inputs: torch.Tensor, targets: torch.Tensor) -> list[Difference]:
        """Both once more, layer by layer: what differs on this rank, forward first, then in the order of backward."""
        with_input = self._asks_input(inputs)
        exact = self._reference.run(inputs, targets, with_input=with_input, note=True)
        self._run_parallel(inputs, targets, note=True)
        scale = self._largest_gradient(exact.input_gradient)
        comparison = _Comparison(self._case.tolerance, self._ranks.rank)
        layers = self._case.network.layers
        for step, passage, exact_passage in self._passages(exact.passages):
            for (index, place), output in passage.outputs.items():
                held = self._held(step, output, exact_passage.outputs.get((index, place)))
                if held is None or index >= len(layers):
                    continue
                name = layers[index].name
                comparison.compare(f"the output of {name}", name, output, held[0], 1.0, index)
                self._compare_gradient(comparison, step, passage, exact_passage, (index, place), scale)
        parameters = _Comparison(self._case.tolerance, self._ranks.rank)
        self._compare_parameters(parameters, scale)
        readers = {name: i for i, layer in enumerate(layers) for name in layer.parameters}
        located = list(comparison.findings.differences)
        for item in parameters.findings.differences:
            parameter = item.what.removeprefix(_GRADIENT)
            index = readers.get(parameter, 0)
            layer = layers[index].name if parameter in readers else ""
            located.append(item._replace(order=_backward(len(layers), index) + 1, layer=layer))
        return sorted(located)

    def _compare_gradient(
        self, comparison: _Comparison, step: int, passage: Passage, exact: Passage, key: Key, scale: float
    ) -> None:
        gradient = passage.gradients.get(key)
        if gradient is None:
            return
        held = self._held(step, gradient, exact.gradients.get(key), marks=passage.outputs[key])
        if held is None:
            return
        layers = self._case.network.layers
        name = layers[key[0]].name
        what = f"{_GRADIENT}the output of {name}"
        comparison.compare(what, name, gradient / held[1], held[0], scale, _backward(len(layers), key[0]))

    def _asks_input(self, inputs: torch.Tensor) -> bool:
        # Parts of gradients go to what training differentiates, and the input is none of that.
        parts = (
            self._case.settings.of(FilterOptions).filter_backward == "reduce-scatter"
            and degree_of(self._case.strategy, Trait.SPLITS_OUTPUTS) > 1
        )
        asked = self._case.with_input and inputs.is_floating_point()
        return asked and not parts and self._built.pipeline is None

    def _run_parallel(
        self, inputs: torch.Tensor, targets: torch.Tensor, *, note: bool = False
    ) -> tuple[torch.Tensor | None, torch.Tensor | None]:
        """Forward and backward as training does them; the loss where this rank knows it, and the input's gradient."""
        self._watched.forget()
        self._watched.noting = note
        self._module.zero_grad(set_to_none=True)
        samples, pipeline = self._place.own, self._built.pipeline
        if pipeline is not None:
            # Forward may work in place on its input, and the next step is to have the same.
            return self._mean_loss(pipeline.step(inputs[samples].clone(), targets[samples])), None
        leaf = inputs[samples].detach().clone().requires_grad_(self._asks_input(inputs))
        steps = MicroSteps(self._built, self._loss, leaf, targets[samples], self._place.steps)
        loss = self._mean_loss(steps.run(0, lambda: 0, [], lambda _: None))
        if self._averages:
            whole_ones = (parameter for name, parameter in self._module.named_parameters() if name not in self._parts)
            self._ranks.mean([parameter.grad for parameter in whole_ones if parameter.grad is not None])
        return loss, leaf.grad

    def _mean_loss(self, loss: torch.Tensor | None) -> torch.Tensor | None:
        """The loss, where this rank knows its share of it."""
        of_parts = self._built.loss
        return loss if loss is None or of_parts is None else of_parts.mean(loss)

    def _held(
        self, step: int, parallel: torch.Tensor, exact: torch.Tensor | None, marks: torch.Tensor | None = None
    ) -> tuple[torch.Tensor, float] | None:
        """This rank's part of the serial model's tensor, and how many times as large its gradient is here."""
        if exact is None:
            return None
        own_part = self._built.own_part
        scaled = (exact, 1.0) if own_part is None else own_part(parallel if marks is None else marks, exact)
        return None if scaled is None else (self._reference.own_rows(scaled[0], parallel.shape, step), scaled[1])

    def _compare_outputs(self, comparison: _Comparison, exact: SerialStep) -> None:
        # Where stages run in turns, only the last one's output is real.
        outputs = [tensors for tensors in map(tensors_of, self._watched.outputs) if not any(t.is_meta for t in tensors)]
        for step, given_tensors in enumerate(outputs):
            exact_tensors = tensors_of(exact.outputs[self._reference.forward_of(step)])
            for given, exact_tensor in zip(given_tensors, exact_tensors, strict=False):
                tensor = as_it_stands(given)
                held = self._held(step, tensor, exact_tensor)
                assert held is not None
                comparison.compare("the output", "", tensor, held[0], 1.0)

    def _compare_parameters(self, comparison: _Comparison, scale: float) -> None:
        exact = dict(self._reference.module.named_parameters())
        for name, parameter in self._module.named_parameters():
            # A collective where ranks hold rows, whatever is compared.
            gradient = None if parameter.grad is None else whole(parameter.grad)
            of_whole = exact[name].grad
            if of_whole is None:
                # What no loss reads gets zeros where ranks exchange gradients.
                of_whole = torch.zeros_like(exact[name])
            held = of_whole[self._parts.get(name, ())]
            comparison.compare(
                f"{_GRADIENT}{name}", "", torch.zeros_like(held) if gradient is None else gradient, held, scale
            )

    def _largest_gradient(self, of_input: torch.Tensor | None) -> float:
        gradients = [parameter.grad for parameter in self._reference.module.parameters()]
        return max((largest(gradient) for gradient in (*gradients, of_input) if gradient is not None), default=0.0)

    def _passages(self, exact: list[Passage]) -> Iterator[tuple[int, Passage, Passage]]:
        """Each forward here with its micro-batch and the serial model's forward on that.

        A rank's stages of a pipeline run in turns, each its micro-batches in order.
        """
        turns: dict[frozenset[Key], int] = {}
        for passage in self._watched.passages:
            stage = frozenset(passage.outputs)
            step = turns.get(stage, 0)
            turns[stage] = step + 1
            yield step, passage, exact[self._reference.forward_of(step)]


_GRADIENT = "the gradient of "


def _optimizer(
    name: str, parameters: Iterable[torch.nn.Parameter], groups: StateGroups | None = None
) -> torch.optim.Optimizer:
    if name != "sgd":
        return build_optimizer(name, parameters, groups)
    return make_optimizer(torch.optim.SGD, parameters, groups, lr=_LEARNING_RATE, momentum=_MOMENTUM)


def _backward(layers: int, index: int) -> int:
    """The place of a layer's gradients in the order of backward, behind all of forward."""
    return layers + 2 * (layers - index)


def synchronises(network: ModelGraph, strategy: Strategy, settings: PlanSettings) -> bool:
    """Whether batch norms take statistics over the samples of several replicas."""
    if settings.batch_norm != "sync":
        return False
    of_data = set(group_axes(strategy, Trait.DIVIDES_BATCH))
    axes = statistics_axes(network, strategy, settings)
    return any(of_data.intersection(of_norm) for of_norm in axes.values())


class _Comparison:
    """Collects what differs on one rank."""

    def __init__(self, tolerance: Tolerance, rank: int) -> None:
        self._tolerance, self._rank = tolerance, rank
        self._differences: list[Difference] = []
        self._most = 0.0

    @property
    def findings(self) -> Findings:
        return Findings(self._differences, self._most)

    def compare(
        self, what: str, layer: str, parallel: torch.Tensor, exact: torch.Tensor, scale: float, order: int = 0
    ) -> None:
        differs, relative = difference(parallel, exact, self._tolerance, scale)
        self._most = max(self._most, relative)
        if differs:
            self._differences.append(Difference(order, what, layer, relative, self._rank))
