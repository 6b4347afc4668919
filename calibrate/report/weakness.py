"""A weakness of a profile, and those of measurements that were not made at all."""

from __future__ import annotations

import shlex
from collections.abc import Collection, Iterable, Iterator
from typing import Literal

import msgspec

from calibrate.profile.profile import Profile
from paradl_bench.core.files.storage import file_name
from paradl_bench.core.units import spell_bandwidth
from paradl_bench.ranks.rank_place import BACKENDS
from paradl_bench.records.cluster import NODE, RACK
from paradl_bench.records.emulation import EmulatedNodes, emulated_nodes, simulated_messages

WeaknessKind = Literal["missing", "inaccurate", "untested"]


class Weakness(msgspec.Struct, frozen=True, kw_only=True):
    """Where a profile is weak.

    Attributes:
        kind: ``missing`` (a prediction fails without, or assumes), ``inaccurate`` by ``size`` (relative), or
            ``untested``.
        command: what would help, ready to be run but for words in capitals.
    """

    kind: WeaknessKind
    text: str
    command: str
    size: float | None = None


def sweep_command(profile: Profile, library: str, ranks: int, level: str) -> str:
    """The command that sweeps collectives; on several hosts ranks are started by srun, or on emulated nodes again."""
    emulated = _emulated(profile)
    if emulated is not None:
        on_node = ranks if level == NODE else _dividing(ranks, max(nodes.ranks_per_node for nodes in emulated))
        nodes = ranks // on_node
        in_rack = nodes
        if level not in (NODE, RACK):
            in_rack = _dividing(nodes, max(nodes.nodes_per_rack for nodes in emulated) or 1)
        return _sweep_on_nodes(emulated[0], nodes, on_node, in_rack)
    if level == NODE:
        return f"paradl-bench collectives --ranks {ranks} --backend {shlex.quote(library)}"
    on_node = _dividing(ranks, profile.cluster.ranks_per_node)
    placed = f"--ntasks {ranks}" + (f" --ntasks-per-node {on_node}" if on_node > 1 else "")
    return f"srun {placed} paradl-bench collectives --launcher srun --backend {shlex.quote(library)}"


def _dividing(count: int, most: int) -> int:
    """How many are put together: as many as were, where that makes several equal parts; else each is by itself."""
    return 1 if count <= most or count % most else most


def _emulated(profile: Profile) -> tuple[EmulatedNodes, ...] | None:
    """Nodes of every sweep of an emulated cluster; None where nodes were real."""
    sweeps = tuple(nodes for env in profile.environments if (nodes := emulated_nodes(env.emulated)) is not None)
    return sweeps or None


def _sweep_on_nodes(like: EmulatedNodes, nodes: int, on_node: int, in_rack: int = 1) -> str:
    rates, count = spell_bandwidth(like.link_bytes_per_s), f"{nodes}"
    if like.racks is not None:
        rates += f",{spell_bandwidth(like.racks.uplink_bytes_per_s)}"
        count = f"{nodes // in_rack}x{in_rack}"
    return f"paradl-bench collectives --nodes {count} --ranks-per-node {on_node} --link-bandwidth {rates}"


def simulated_libraries(profile: Profile) -> frozenset[str]:
    """Libraries whose messages a simulator computed: of them no sweep on a machine makes a profile better.

    A profile does not say from which measurement a fit is: of real and simulated ones merged by force, those libraries
    count as real through which collectives can be measured.
    """
    sweeps = [
        simulated_messages(profile.environments[source.environment].emulated) is not None
        for source in profile.sources
        if source.kind == "collectives"
    ]
    if not any(sweeps):
        return frozenset()
    libraries = frozenset(fit.library for fit in profile.communication)
    return libraries if all(sweeps) else libraries - set(BACKENDS)


def without_libraries(profile: Profile, libraries: Collection[str]) -> Profile:
    """The profile without what it holds of some libraries' collectives."""
    kept = {
        field: tuple(entry for entry in getattr(profile, field) if entry.library not in libraries)
        for field in ("communication", "contexts")
    }
    return msgspec.structs.replace(profile, **kept)


def only_simulated(profile: Profile, libraries: Iterable[str]) -> Iterator[Weakness]:
    """Of each library, that nothing of it was measured."""
    by = {how.kind for env in profile.environments if (how := simulated_messages(env.emulated)) is not None}
    for library in sorted(libraries):
        yield Weakness(
            kind="untested",
            text=f"{library} was simulated ({'; '.join(sorted(by))}), not measured: no machine is known to behave so",
            command="paradl-bench collectives --ranks 2 --backend gloo -o collectives-gloo-2",
        )


def never_measured(profile: Profile) -> Iterator[Weakness]:
    """Kinds of measurements that a profile lacks, and what is assumed without them."""
    if profile.communication:
        yield from _never_together(profile, profile.communication[0].library)
    on_device = f"--device {profile.devices[0].kind if profile.devices else 'cpu'}"
    lacking: dict[str, str] = {}
    if profile.devices and not any(device.rates for device in profile.devices):
        by_kernels = any(device.rates_from == "reached by kernels" for device in profile.devices)
        what = "kernels" if by_kernels else "layers"
        text = f"peak and bandwidth of the device are only what {what} reached, and rooflines use them"
        lacking[text] = f"paradl-bench doctor --measure {on_device} -o doctor"
    if not profile.kernel_models:
        text = "no kernels were measured: layers without a measurement are scaled from a similar layer"
        lacking[text] = f"paradl-bench kernels {on_device} -o kernels"
    if not profile.input_side:
        text = "reading, decoding and copying of inputs were not measured; iterations are predicted without them"
        lacking[text] = f"paradl-bench io synthetic {on_device} -o io"
    for text, command in lacking.items():
        yield Weakness(kind="untested", text=text, command=command)


def _never_together(profile: Profile, library: str) -> Iterator[Weakness]:
    """What surrounds collectives in runs and was not measured."""
    contexts = {entry.context for entry in profile.contexts}
    if "after-compute" not in contexts:
        yield Weakness(
            kind="missing",
            text="collectives after compute were not measured; those between layers are priced as in a loop",
            command=f"{sweep_command(profile, library, 2, NODE)} --contexts after-compute"
            f" -o {file_name(f'collectives-after-compute-{library}')}",
        )
    if "groups" in contexts:
        return
    # Two groups of two; under srun --ntasks counts the ranks of both.
    enough = max((device.devices_per_host for device in profile.devices), default=4) >= 4
    emulated = _emulated(profile)
    if emulated is not None:
        sweep = _sweep_on_nodes(emulated[0], 2, 2)
    else:
        sweep = sweep_command(profile, library, 2 if enough else 4, NODE if enough else "system")
    yield Weakness(
        kind="missing",
        text="groups at once were not measured; groups between nodes are taken to share a node's links, others none",
        command=f"{sweep} --contexts groups=2 -o {file_name(f'collectives-groups-{library}')}",
    )
