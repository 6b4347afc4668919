"""``flops``: FLOPs over the device's peak, and bytes over the bandwidth of the links: the baseline of DistSim's paper.

Section 2.3 and figure 3 of the paper hold this analytical model against measured iterations. Tasks lie on their streams
as in ``simulate``, so that the two differ by the seconds of tasks alone.
"""

from __future__ import annotations

import dataclasses

from paradl_bench.core.errors import UserError
from paradl_bench.plan.tasks import Communication
from predict.costs.compute.unmeasured_costs import TAKEN_AS_NONE
from predict.costs.cost_model import CostModel
from predict.costs.hardware.what_if_device import Peak
from predict.costs.priced import PricedPlan
from predict.costs.sourced import Remark, Remarks
from predict.simulation.prepared import price, workload_of
from predict.workload import Configuration, Evaluator, PreparedEvaluation


def prepare(costs: CostModel, point: Configuration) -> PreparedEvaluation:
    """The simulation of FLOPs and bytes."""
    by_flops = _by_flops(costs)
    peak = costs.device.peak(costs.place(point.strategy, point.local_batch).ranks_on_host)
    priced = price(by_flops, point)
    remarks = Remarks()
    remarks.add(*costs.missing_layers, Remark(_said(priced, peak), True))
    remarks.add(*(Remark(note, False) for note in priced.plan.notes))
    certain = dataclasses.replace(priced.costs, modes=(), independent_sd_s=0 * priced.costs.independent_sd_s)
    return workload_of(by_flops, point, dataclasses.replace(priced, costs=certain, remarks=remarks))


def _by_flops(costs: CostModel) -> CostModel:
    """Costs by FLOPs and bytes; a UserError where no peak is known, or the network has no FLOPs."""
    if lacking := _lacks(costs):
        raise UserError(lacking)
    return costs.by_flops()


def _lacks(costs: CostModel) -> str:
    peak = costs.device.peak(1)
    if peak.flops is None:
        return f"--evaluator flops needs the peak FLOP/s of a rank: {peak.basis}; or give --cluster with peak_flops"
    if not any(layer.fw_flops for layer in costs.network.layers):
        return f"--evaluator flops needs the FLOPs of layers, and {costs.network.name} was imported as times only"
    return ""


def _said(priced: PricedPlan, peak: Peak) -> str:
    """What the seconds are made of, and that nothing tells how far they are off."""
    communicates = any(isinstance(work, Communication) for work in priced.plan.works)
    over = ", bytes over the bandwidth that the fits of large messages or the cluster file give" if communicates else ""
    return (
        f"flops takes FLOPs of forward and backward over {peak.flops:.3g} FLOP/s a rank ({peak.basis}){over}; "
        f"of all else that takes time {TAKEN_AS_NONE}, and nothing tells an interval"
    )


EVALUATOR = Evaluator(name="flops", prepare=prepare, lacks=_lacks, estimated_by=_by_flops)
