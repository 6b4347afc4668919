"""Readers on cores that ranks compute on: a host that computes on its CPU has no others.

In the steady state an iteration takes the ranks of a host min(R, C) T of its C cores' time. T is an iteration of a rank
that reads nothing; where ranks are more than cores it holds their turns. Readers take r, what one process takes to read
for all of them. Cores give no more than C seconds a second, so

    iteration >= (min(R, C) T + r) / C

where they share. Reading ahead then lasts as long as that. Ours; S-SGD's DAG has devices of their own for compute.
"""

from __future__ import annotations

import numpy as np

from calibrate.profile.profile import Profile
from predict.costs.input.input_closed_form import Seconds
from predict.costs.input.input_terms import InputTerms
from predict.costs.sourced import Remark
from predict.costs.spread.assembly import assemble


def reading_seconds(read_s: Seconds, rest_s: Seconds, process_s: Seconds, ranks: int, cores: int) -> Seconds:
    """Seconds that reading ahead lasts; of numbers, or of arrays entry by entry.

    Args:
        read_s: with cores of its own. rest_s: an iteration of a rank without its input.
        process_s: that one process takes to read for all ranks; 0 where readers share no cores.
    """
    least_s = (min(ranks, cores) * rest_s + process_s) / cores
    lasts = (least_s > np.maximum(read_s, rest_s)) & (np.asarray(process_s) > 0)
    return np.where(lasts, least_s, read_s)


def on_shared_cores(terms: InputTerms, profile: Profile, rest_s: float, ranks: int) -> InputTerms:
    """The terms of readers that share their host's cores with so many ranks; as they are where that costs nothing.

    Args:
        rest_s: an iteration of a rank without its input.
    """
    if not (profile.environments and terms.process_s and terms.fetch.ahead):
        return terms
    cores = profile.environments[0].device_count
    read_s = float(terms.costs.seconds[0])
    least_s = float(reading_seconds(read_s, rest_s, terms.process_s, ranks, cores))
    if least_s == read_s:
        return terms
    by = least_s / read_s
    reading, copying = terms.parts
    modes = tuple((name, seconds * by) for name, seconds in reading.modes)
    parts = [reading._replace(cost=reading.cost._replace(seconds=least_s), modes=modes), copying]
    text = f"{ranks} ranks and their loaders share {cores} cores, so reading takes {1e3 * least_s:.4g} ms"
    return terms._replace(costs=assemble(parts, 0.0), parts=parts, remarks=(*terms.remarks, Remark(text, False)))
