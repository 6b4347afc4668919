from paradl_bench.plan.tasks import Ints
from predict.costs.sourced import Floats

INTERFACE: int

def run_events(
    lane_start: Ints,
    queue: Ints,
    waits_for: Ints,
    follower_start: Ints,
    followers: Ints,
    seconds: Floats,
    compute_slowdown: Floats,
    communication_slowdown: Floats,
    start_s: Floats,
    end_s: Floats,
    overlap_s: Floats,
    exposed_s: Floats,
    rows: int,
    lanes_per_role: int,
    compute: int,
    communication: int,
    awaited: int,
    /,
) -> int: ...
