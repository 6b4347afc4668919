"""ZeRO stages 2 and 3 by torch's ``fully_shard`` (FSDP2), unit by unit as planned."""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.fsdp._fully_shard._fsdp_api import AllGather, Comm, ReduceScatter
from torch.distributed.fsdp._fully_shard._fsdp_common import FSDPMeshInfo, ShardPlacementResult
from torch.distributed.fsdp._fully_shard._fsdp_init import _get_mesh_info
from torch.distributed.fsdp._fully_shard._fsdp_param_group import FSDPParamGroup
from torch.distributed.tensor import Shard

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import ModelGraph
from paradl_bench.strategies.data.zero.sharing import cut_dim
from paradl_bench.strategies.data.zero.units import Unit, units_of
from paradl_bench.strategies.running.axis_runners import Sharers
from paradl_bench.strategies.running.group_functions import Group, Reduce
from paradl_bench.strategies.running.sharded_module import marks_of
from paradl_bench.strategies.running.unit_hooks import hide_hooks


def shard_parameters(
    module: torch.nn.Module,
    network: ModelGraph,
    stage: int,
    device: torch.device,
    sharers: Sharers,
    *,
    in_stages: bool = False,
    reduce_dtype: str = "own",
) -> None:
    """Replace the module's parameters by this rank's shards of them; hooks then gather and reduce them.

    Collectives are stamped where they are called, if anything is. Where the backend knows no average (gloo), gradients
    are summed and then divided.

    Args:
        stage: 3 frees the parameters of a unit after its forward, 2 keeps them for backward.
        in_stages: whether units stay gathered until :func:`kept_through_stages` reduces their gradients.
        reduce_dtype: that bf16 gradients are reduced in, their own or fp32.

    Raises:
        UserError: a unit whose module is no function of its own, as of a ``ModuleDict``; a parameter that is in
            two units, since one module stands under two names or two modules hold it.
    """
    meshes, place = _meshes(module, sharers, device)
    marks = {name: marks_of(parameter) for name, parameter in module.named_parameters()}
    # What is gathered for the whole model's own parameters, the last unit, would be gathered again at once.
    for unit in units_of(network):
        try:
            part = module.get_submodule(unit.name)
            check_holders(module, part)
            freed = stage == 3 and part is not module and not in_stages
            policy = _precision(part, unit, reduce_dtype)
            fully_shard(part, mesh=meshes[0], reshard_after_forward=freed, mp_policy=policy, shard_placement_fn=place)
        except ValueError as error:
            what = unit.name or "what is in no other unit"
            raise UserError(f"model {network.name}: ZeRO stage {stage} cannot shard {what}: {error}") from error
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.set_force_sum_reduction_for_comms(device.type != "cuda")
            for group in fully_shard.state(part)._fsdp_param_groups:  # type: ignore[attr-defined]
                _have_communicate(group, sharers)
        hide_hooks(part)
    _mark_parameters(module, units_of(network), marks)
    # DTensor's cache of operations keeps the mesh for good; the group has to be gone when the rank leaves.
    for mesh in meshes:
        getattr(mesh, "_pg_registry", {}).clear()


def _precision(part: torch.nn.Module, unit: Unit, reduce_dtype: str) -> MixedPrecisionPolicy:
    """Gathers in the dtype of the unit's parameters; shards keep the module's.

    What goes into a unit stays as it is: the plan has no such conversions.
    """
    gathered = {parameter.dtype for parameter in unit.parameters}
    is_lowered = gathered == {"bf16"} and all(parameter.dtype == torch.float32 for parameter in part.parameters())
    if not is_lowered:
        return MixedPrecisionPolicy(cast_forward_inputs=False)
    reduced = torch.float32 if reduce_dtype == "fp32" else None
    return MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=reduced, cast_forward_inputs=False)


def kept_through_stages(module: torch.nn.Module) -> Reduce:
    """Have backward leave gradients where it adds them up, and units gathered; returns what ends both.

    As ``torch.distributed.pipelining`` does with a stage that is sharded so: ``backward_maybe_with_nosync`` and
    ``perform_reduce_grad`` of its stage.py (torch 2.13).
    """
    assert isinstance(module, FSDPModule)
    _let_backward_reduce(module, reduces=False)

    def reduce() -> None:
        _let_backward_reduce(module, reduces=True)
        state = fully_shard.state(module)  # type: ignore[attr-defined]
        with torch.no_grad():
            for module_state in state._state_ctx.all_states:
                for group in module_state._fsdp_param_groups:
                    group.post_backward()
            state._root_post_backward_final_callback()
        _let_backward_reduce(module, reduces=False)

    return reduce


def _let_backward_reduce(module: FSDPModule, *, reduces: bool) -> None:
    module.set_is_last_backward(reduces)
    module.set_reshard_after_backward(reduces)
    module.set_requires_gradient_sync(reduces)


def _meshes(
    module: torch.nn.Module, sharers: Sharers, device: torch.device
) -> tuple[list[DeviceMesh], Callable[[torch.nn.Parameter], ShardPlacementResult] | None]:
    """The meshes that parameters lie on, that of most first, and which one each lies on; None where it is the same."""
    everywhere = _mesh_of(sharers.everyone, sharers.replicas, device)
    if not sharers.apart:
        return [everywhere], None
    alike = _mesh_of(sharers.alike, sharers.replicas, device)
    of_everyone, of_alike = _get_mesh_info(everywhere), _get_mesh_info(alike)
    assert isinstance(of_everyone, FSDPMeshInfo)
    assert isinstance(of_alike, FSDPMeshInfo)
    apart = {id(module.get_parameter(name)) for name in sharers.apart}

    def place(parameter: torch.nn.Parameter) -> ShardPlacementResult:
        if id(parameter) not in apart:
            return ShardPlacementResult(None, of_everyone)
        return ShardPlacementResult(Shard(cut_dim(parameter.shape, sharers.alike.size, apart=True)), of_alike)

    return [everywhere, alike], place


def _have_communicate(parameters: FSDPParamGroup, sharers: Sharers) -> None:
    """Have a group of parameters communicate over the groups of this process, which stamp it."""
    assert isinstance(parameters.mesh_info, FSDPMeshInfo)
    groups = {group.process_group.group_name: group for group in (sharers.everyone, sharers.alike)}
    group = groups[parameters.mesh_info.shard_process_group.group_name]
    scatter = _ReduceScatter(group, has_replicas=sharers.replicas is not None)
    parameters._all_gather_comm, parameters._reduce_scatter_comm = _AllGather(group), scatter
    if sharers.replicas is not None:
        parameters._all_reduce_hook = scatter.all_reduced
    _tell_of_copies(parameters, group)


def _tell_of_copies(parameters: FSDPParamGroup, group: Group) -> None:
    """Have a group of parameters tell when what it gathered is copied to where layers read it."""
    wait_for_unshard = parameters.wait_for_unshard

    def told() -> None:
        if parameters._all_gather_result is None:
            wait_for_unshard()
            return
        with group.spans.working():
            wait_for_unshard()

    parameters.wait_for_unshard = told  # type: ignore[method-assign]


def _mesh_of(group: Group, replicas: Group | None, device: torch.device) -> DeviceMesh:
    """Ranks that share parameters out, as the rows of a mesh where others hold the same shards.

    Its dims are called as the groups: of two meshes that are equal, DTensor's cache of operations would go on with the
    first, and with groups that ended.
    """
    if replicas is None:
        names: tuple[str, ...] = (f"shards {group.process_group.group_name}",)
        return DeviceMesh.from_group(group.process_group, device.type, mesh_dim_names=names)
    here = dist.get_rank()
    inner, outer = (dist.get_process_group_ranks(of.process_group) for of in (group, replicas))
    # The mesh is regular: whoever is as far from this rank along one group is as far along every other.
    ranks = torch.tensor(outer)[:, None] + torch.tensor(inner)[None, :] - here
    groups = [replicas.process_group, group.process_group]
    names = tuple(f"{what} {of.group_name}" for what, of in zip(("replicas", "shards"), groups, strict=True))
    return DeviceMesh.from_group(groups, device.type, mesh=ranks, mesh_dim_names=names)


def _mark_parameters(module: torch.nn.Module, units: Sequence[Unit], marks: Mapping[str, Mapping[str, Any]]) -> None:
    """Have parameters marked as they were: their shards, and what is gathered of them, whenever it is made anew."""
    for unit in units:
        marked = {parameter.name: marks[parameter.name] for parameter in unit.parameters if marks[parameter.name]}
        if marked:
            part = module.get_submodule(unit.name)
            again = functools.partial(_mark_again, unit.name, marked)
            again(part)
            part.register_forward_pre_hook(again)


def _mark_again(unit: str, marked: Mapping[str, Mapping[str, Any]], part: torch.nn.Module, *_: Any) -> None:
    for name, marks in marked.items():
        vars(part.get_parameter(name[len(unit) :].removeprefix("."))).update(marks)


def check_holders(module: torch.nn.Module, part: torch.nn.Module) -> None:
    """Hold that no module outside of a unit's has a parameter of it: torch takes one in one group of modules alone.

    Raises:
        ValueError: another module has one.
    """
    inside = set(part.modules())
    name_by_id = {id(parameter): name for name, parameter in part.named_parameters()}
    for name, other in module.named_modules():
        shared = name_by_id.keys() & {id(parameter) for parameter in other.parameters(recurse=False)}
        if shared and other not in inside:
            raise ValueError(
                f"its {name_by_id[min(shared)]} is held by {name} too, which torch would shard a second time;"
                " give that a parameter of its own, or none, or take z1 or d"
            )


class _Buffers(Comm):
    """Collectives of a group on memory of the allocator's: what ``fully_shard``'s two interfaces have in common."""

    def __init__(self, group: Group) -> None:
        self._group = group

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """As ``fully_shard``'s own, which then copies into it."""
        self._group.spans.work()
        return torch.empty(size, dtype=dtype, device=device)


class _AllGather(_Buffers, AllGather):
    def __call__(
        self, output_tensor: torch.Tensor, input_tensor: torch.Tensor, group: dist.ProcessGroup, async_op: bool = False
    ) -> None:
        """Called on the stream of gathers."""
        self._group.all_gather(output_tensor, input_tensor)


class _ReduceScatter(_Buffers, ReduceScatter):
    """Also knows when an all-reduce among replicas may begin, which torch calls by itself behind it."""

    def __init__(self, group: Group, *, has_replicas: bool) -> None:
        super().__init__(group)
        self._has_replicas = has_replicas
        self._scattered: Any = None
        self._allocated = 0

    def allocate(self, size: Sequence[int | torch.SymInt], *, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
        """Of one rank, the second tensor is what an all-reduce among replicas begins behind."""
        allocated = super().allocate(size, dtype=dtype, device=device)
        self._allocated += 1
        if self._group.size == 1 and self._has_replicas and self._allocated % 2 == 0:
            self._scattered = self._group.spans.begin("all_reduce")
        return allocated

    def __call__(
        self,
        output_tensor: torch.Tensor,
        input_tensor: torch.Tensor,
        group: dist.ProcessGroup,
        op: dist.ReduceOp | dist.ReduceOp.RedOpType,
        async_op: bool = False,
    ) -> None:
        """Called on the stream of reductions."""
        self._group.reduce_scatter(output_tensor, input_tensor, op)
        if self._has_replicas:
            self._scattered = self._group.spans.begin("all_reduce")

    def all_reduced(self, reduced: torch.Tensor) -> None:
        """Called on the stream of all-reduces, behind one."""
        self._group.spans.end("all_reduce", self._scattered)
