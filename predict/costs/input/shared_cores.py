"""Readers on cores that ranks compute on: a host that computes on its CPU has no others.

In the steady state an iteration takes all ranks of a host R T of its cores' time, with T of one rank that reads
nothing, and its readers r, what one process takes to read for all of them. C cores give no more than C seconds a
second, so

    iteration >= (R T + r) / C

where they share. Reading ahead then lasts as long as that. Ours; S-SGD's DAG has devices of their own for compute.
"""

from __future__ import annotations

from calibrate.profile.profile import Profile
from predict.costs.input.input_terms import InputTerms
from predict.costs.sourced import Remark
from predict.costs.spread.assembly import assemble


def on_shared_cores(terms: InputTerms, profile: Profile, rest_s: float, ranks: int) -> InputTerms:
    """The terms of readers that share their host's cores with so many ranks; as they are where that costs nothing.

    Args:
        rest_s: an iteration of a rank without its input.
    """
    if not (profile.environments and terms.process_s and terms.fetch.ahead):
        return terms
    cores = profile.environments[0].device_count
    least_s = (ranks * rest_s + terms.process_s) / cores
    read_s = float(terms.costs.seconds[0])
    if least_s <= max(read_s, rest_s):
        return terms
    by = least_s / read_s
    reading, copying = terms.parts
    modes = tuple((name, seconds * by) for name, seconds in reading.modes)
    parts = [reading._replace(cost=reading.cost._replace(seconds=least_s), modes=modes), copying]
    text = f"{ranks} ranks and what reads for them share {cores} cores: reading lasts {1e3 * least_s:.4g} ms"
    return terms._replace(costs=assemble(parts, 0.0), parts=parts, remarks=(*terms.remarks, Remark(text, False)))
