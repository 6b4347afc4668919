"""One case on one rank: what it issues against the plan, and its training in float64 against the serial model's."""

from __future__ import annotations

from typing import Any

import torch
from equality_program import norm_cuts, own_parts, take_statistics_apart, whole
from torch import nn
from torch.utils._pytree import tree_leaves

from paradl_bench.collectives.process_group import end_groups
from paradl_bench.measure.micro_steps import MicroSteps
from paradl_bench.measure.optimizers import share_out_optimizer
from paradl_bench.measure.process_groups import RankContext
from paradl_bench.measure.recorder import differences, planned_collectives
from paradl_bench.measure.trainer import Trainer
from paradl_bench.measure.training_request import TrainingRequest
from paradl_bench.models.catalog import load_model
from paradl_bench.spec.network import Network
from paradl_bench.strategies.catalog import planner_for
from paradl_bench.strategies.parallel import build_parallel
from paradl_bench.strategies.spatial.region import region_of
from random_modules.case import Case, draws_by_chance

Found = list[str]
"""What differs, in words; nothing where nothing does."""


def compare_with_plan(case: Case, network: Network, context: RankContext) -> Found:
    """Train as ``paradl-bench train`` does; every collective of construction and of the first iterations."""
    request = case.request(network)
    plan = planner_for(request.strategy).plan(network, request.strategy, request.settings)
    trainer = Trainer(load_model(case.model), request, context)
    trainer.try_alone(network)
    found = differences(trainer.prepare(network), planned_collectives(plan, context.rank))
    trainer.track_memory()
    trainer.run_chunk(0, 1)
    trainer.close()
    return found


class Equality:
    """The parallel model and the serial one, both in float64."""

    def __init__(self, case: Case, network: Network, context: RankContext) -> None:
        self.case, self.context, self.network = case, context, network
        self.request: TrainingRequest = case.request(network)
        self.model, self.serial = load_model(case.model), load_model(case.model)
        self.model.module.double()
        self.serial.module.double()
        norms = [m for m in self.serial.module.modules() if isinstance(m, nn.modules.batchnorm._BatchNorm)]
        self.local_norms = bool(norms) and self.request.batch_norm == "local"
        self.whole_batch = not norms
        self.spatial_cuts = self._take_positions_apart()
        settings, strategy = self.request.settings, self.request.strategy
        self.built = build_parallel(self.model.module, network, strategy, settings, context.device, self.model.loss)
        places = zip(strategy.axes, strategy.coordinates(context.rank), strict=True)
        self.replica = next((at for axis, at in places if axis.kind == "data"), 0)
        self.parts = own_parts(network, strategy, context.rank, settings.split)
        self.optimizers = [self._optimizer(), torch.optim.SGD(self.serial.module.parameters(), lr=0.05, momentum=0.9)]
        self.inputs, self.targets = self.model.make_batch(case.samples * case.replicas, seed=7)
        if not self.model.task:
            self.inputs = self.inputs.double()

    def _take_positions_apart(self) -> bool:
        """Let the serial model's batch norms see blocks of positions where the ranks' do; whether there are such."""
        axis = next((axis for axis in self.request.strategy.axes if axis.kind == "spatial"), None)
        if axis is None or not self.local_norms:
            return False
        settings = self.request.settings
        cuts = [cut for cut in norm_cuts(self.request.strategy, settings) if cut[0] >= 2]
        region = region_of(self.network, axis, settings)
        take_statistics_apart(self.serial.module, cuts, {self.network.layers[index].name for index in region.layers})
        return True

    def _optimizer(self) -> torch.optim.Optimizer:
        parameters, group = self.model.module.parameters(), self.built.optimizer_group
        if group is None:
            return torch.optim.SGD(parameters, lr=0.05, momentum=0.9)
        return share_out_optimizer(torch.optim.SGD, parameters, group, lr=0.05, momentum=0.9)

    def close(self) -> None:
        self.context.barrier()
        groups = self.built.groups[1:]
        del self.built, self.optimizers
        end_groups(groups)

    def run(self) -> Found:
        """Two iterations: outputs, gradients of inputs and parameters, then what the optimizer makes of them."""
        for iteration in range(2):
            found = self._iterate()
            found = [f"iteration {iteration}, {line}" for line in found]
            # Together: a rank that went on alone would wait for the others.
            if any(self.context.gather(found)):
                return found
        return []

    def _iterate(self) -> Found:
        for optimizer in self.optimizers:
            optimizer.zero_grad()
        exact = self._serial()
        found = self._parallel(exact)
        found += self._gradients()
        for optimizer in self.optimizers:
            optimizer.step()
        return found + self._state()

    def _groups(self) -> list[torch.Tensor]:
        """Samples that the exact model sees at once, one group after the other."""
        rows = torch.arange(len(self.inputs)).view(self.case.replicas, self.case.count, -1)
        if self.whole_batch:
            return [rows.flatten()]
        if self.local_norms:
            return list(rows.flatten(0, 1))
        return list(rows.transpose(0, 1).flatten(1))

    def _serial(self) -> dict[str, Any]:
        groups = self._groups()
        x = self.inputs.clone()
        if x.is_floating_point():
            x.requires_grad_()
        losses, outputs = [], []
        for rows in groups:
            found = self.serial.module(x[rows].clone())
            losses.append(self.serial.loss(found, self.targets[rows]) / len(groups))
            losses[-1].backward()
            outputs.append([leaf.detach() for leaf in tree_leaves(found) if isinstance(leaf, torch.Tensor)])
        order = torch.cat(groups).argsort()
        joined = [torch.cat(parts)[order] for parts in zip(*outputs, strict=True)]
        return {"loss": torch.stack(losses).sum().detach(), "outputs": joined, "input": x.grad}

    def _parallel(self, exact: dict[str, Any]) -> Found:
        own = slice(self.replica * self.case.samples, (self.replica + 1) * self.case.samples)
        inputs, targets = self.inputs[own].clone(), self.targets[own]
        if self.built.pipeline is not None:
            loss = self.built.pipeline.step(inputs, targets)
            known = loss is not None and self.case.replicas == 1
            return _difference("the loss", loss, exact["loss"]) if known else []
        if self.case.count > 1:
            rows: list[Any] = []
            steps = MicroSteps(self.built, self.model.loss, inputs, targets, self.case.count)
            loss = steps.run(0, lambda: 0, rows, lambda _: None)
            return _difference("the loss", loss, exact["loss"]) if self.case.replicas == 1 else []
        if inputs.is_floating_point():
            inputs.requires_grad_()
        outputs = self.built.module(inputs.clone())
        self.model.loss(outputs, targets).backward()
        leaves = [leaf for leaf in tree_leaves(outputs) if isinstance(leaf, torch.Tensor)]
        found = [] if len(leaves) == len(exact["outputs"]) else ["other outputs"]
        for index, (leaf, right) in enumerate(zip(leaves, exact["outputs"], strict=False)):
            found += _difference(f"output {index}", leaf, right[own])
        if exact["input"] is not None:
            found += _difference("the input's gradient", inputs.grad, exact["input"][own] * self.case.replicas)
        return found

    def _held(self) -> dict[str, nn.Parameter]:
        """Parameters that this rank holds a part of."""
        return {name: p for name, p in self.model.module.named_parameters() if p.device.type != "meta"}

    def _gradients(self) -> Found:
        found, exact = [], dict(self.serial.module.named_parameters())
        for name, parameter in self._held().items():
            of, right = self.parts.get(name, ()), exact[name].grad
            own = None if parameter.grad is None else whole(parameter.grad)
            if right is None:
                # DistributedDataParallel sends zeros for what no loss reads.
                found += [f"a gradient of {name}"] if own is not None and bool(own.any()) else []
            else:
                # Where whole zeros are right, none at all trains alike.
                missing = own is None and not bool(right[of].any())
                found += [] if missing else _difference(f"the gradient of {name}", own, right[of])
        return found

    def _state(self) -> Found:
        """Parameters behind the optimizer's step, and buffers where ranks and serial update them alike."""
        found, exact = [], dict(self.serial.module.named_parameters())
        for name, parameter in self._held().items():
            found += _difference(name, whole(parameter), exact[name][self.parts.get(name, ())])
        if self.spatial_cuts or (self.local_norms and self.case.replicas > 1):
            return found
        buffers = dict(self.serial.module.named_buffers())
        for name, buffer in self.model.module.named_buffers():
            if buffer.device.type != "meta":
                found += _difference(name, buffer, buffers[name])
        return found


def _difference(what: str, found: torch.Tensor | None, right: torch.Tensor) -> Found:
    if found is None:
        return [f"{what} is missing"]
    if found.shape != right.shape:
        return [f"{what} is {tuple(found.shape)}, serially {tuple(right.shape)}"]
    if torch.allclose(found, right, rtol=1e-9, atol=1e-11):
        return []
    apart = (found - right).abs().max() / right.abs().max().clamp(min=1e-30)
    return [f"{what} is off by {float(apart):.2g} of its largest"]


def compare(case: Case, network: Network, context: RankContext) -> dict[str, Found]:
    """What differs on this rank: ``plan`` and ``serial``."""
    plan = compare_with_plan(case, network, context)
    if draws_by_chance(case.description):
        return {"plan": plan, "serial": []}
    equality = Equality(case, network, context)
    found = equality.run()
    equality.close()
    return {"plan": plan, "serial": found}
