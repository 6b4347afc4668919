"""Plan of serial training: forward, backward and weight update on one device."""

from __future__ import annotations

from paradl_bench.spec.network import Network
from paradl_bench.spec.plan import Limit, Phase, Plan, PlanSettings, RoleBuilder, Stream
from paradl_bench.spec.strategy import Strategy
from paradl_bench.strategies.compute import NetworkCompute, weight_update


class SerialPlanner:
    """Plans one device without any exchange; the input pipeline is not modelled."""

    name = "serial"

    def plan(self, network: Network, strategy: Strategy, settings: PlanSettings) -> Plan:
        """The tasks of one iteration on the whole mini-batch."""
        builder = RoleBuilder()
        compute = NetworkCompute(builder, network)
        compute.add_forward()
        last = tuple(task for _, task in compute.add_backward())[-1:]
        builder.add(weight_update(network, settings), Phase.WU, Stream.COMPUTE, last)
        return Plan(
            strategy=strategy,
            network=network.name,
            local_batch=settings.batch,
            roles=(builder.build("device", 1),),
            works=tuple(builder.works),
        )

    def limits(self, network: Network, settings: PlanSettings) -> tuple[Limit, ...]:
        """One device, by definition."""
        return (Limit(axis="serial", ranks=1, reason="serial runs on one device"),)


PLANNER = SerialPlanner()
