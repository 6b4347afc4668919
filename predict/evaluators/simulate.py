"""``simulate``: the plan's tasks on their streams, with interference and the slowest rank's straggler factor.

How it goes is said in :mod:`predict.simulation.prepared`.
"""

from __future__ import annotations

from predict.simulation.prepared import prepare
from predict.workload import Evaluator

EVALUATOR = Evaluator(name="simulate", prepare=prepare, estimated_by=lambda costs: costs)
