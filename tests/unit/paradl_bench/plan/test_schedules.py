"""Pipeline schedules: torch's own order on every rank, and what holds for any schedule."""

from __future__ import annotations

import itertools

import pytest

from paradl_bench.core.errors import UserError
from paradl_bench.plan.schedules.catalog import schedule_name, schedule_of, schedules
from paradl_bench.plan.schedules.schedule import Action, Schedule

SHAPES = [(1, 1), (1, 4), (2, 2), (2, 3), (2, 4), (2, 8), (3, 3), (3, 7), (4, 4), (4, 8), (4, 10), (4, 3), (5, 11)]

PASSES = {False: {("FW", "BW")}, True: {("FW", "BW_input", "BW_weight"), ("FW", "BW")}}
"""What a stage does of a micro-batch, by whether the schedule parts backward."""

Done = tuple[str, int, int]
"""What was done on which stage of which micro-batch."""

every_schedule = pytest.mark.parametrize("schedule", schedules().values(), ids=lambda schedule: schedule.name)


def possible(schedule: Schedule) -> list[tuple[int, int]]:
    return [shape for shape in SHAPES if not schedule.refusal(*shape)]


@every_schedule
def test_every_micro_batch_passes_every_stage_of_the_rank_once(schedule: Schedule) -> None:
    for ranks, count in possible(schedule):
        for rank in range(ranks):
            stages = schedule.placement.stages_of(rank, ranks)
            wanted = {(stage, index): PASSES[schedule.splits_backward] for stage in stages for index in range(count)}
            passed: dict[tuple[int, int], tuple[str, ...]] = {}
            for action in schedule.order(rank, ranks, count):
                key = action.stage, action.micro_batch
                passed[key] = (*passed.get(key, ()), action.direction)
            assert passed.keys() == wanted.keys()
            assert all(passed[key] in wanted[key] for key in wanted)


@every_schedule
def test_ranks_that_wait_for_each_other_come_to_an_end(schedule: Schedule) -> None:
    """Every action finds what it waits for done, once ranks have run as far as they can."""
    for ranks, count in possible(schedule):
        queues = [list(schedule.order(rank, ranks, count)) for rank in range(ranks)]
        step: list[list[Done]] = [[] for _ in range(ranks)]
        done: set[Done] = set()
        moved = True
        while moved:
            moved = False
            for queue, made in zip(queues, step, strict=True):
                while queue and needed(queue[0], schedule.placement.stages(ranks)) <= done:
                    made.append(done_by(queue.pop(0)))
                    moved = True
                    if not (queue and queue[0].joins):
                        done.update(made)
                        made.clear()
        assert not any(queues)


def done_by(action: Action) -> Done:
    return "weights" if action.direction == "BW_weight" else action.way, action.stage, action.micro_batch


def needed(action: Action, stages: int) -> set[Done]:
    _, stage, micro_batch = found = done_by(action)
    if action.direction == "BW_weight":
        return {("BW", stage, micro_batch)}
    before = stage + (-1 if action.direction == "FW" else 1)
    waits = {(found[0], before, micro_batch)} if 0 <= before < stages else set()
    return waits | ({("FW", stage, micro_batch)} if action.direction != "FW" else set())


@every_schedule
def test_what_one_stage_sends_another_receives(schedule: Schedule) -> None:
    for ranks, count in possible(schedule):
        actions = [action for rank in range(ranks) for action in schedule.order(rank, ranks, count)]
        of = {action: schedule.neighbours(action, ranks) for action in actions}
        sent = {(a.way, a.stage, n.target, a.micro_batch) for a, n in of.items() if n.target is not None}
        received = {(a.way, n.source, a.stage, a.micro_batch) for a, n in of.items() if n.source is not None}
        assert sent == received
        places = schedule.placement.ranks_of_stages(ranks)
        assert len(sent) == 2 * count * sum(one != other for one, other in itertools.pairwise(places))


def test_1f1b_keeps_no_more_activations_than_stages_follow() -> None:
    for rank in range(4):
        kept = most = 0
        for action in schedule_of("1f1b").order(rank, 4, 16):
            kept += 1 if action.direction == "FW" else -1
            most = max(most, kept)
        assert most == 4 - rank


@pytest.mark.parametrize("count", [4, 16])
def test_zero_bubble_keeps_as_many_micro_batches_as_1f1b(count: int) -> None:
    for rank in range(4):
        kept = most = 0
        for action in schedule_of("zb").order(rank, 4, count):
            kept += {"FW": 1, "BW_input": 0, "BW_weight": -1}[action.direction]
            most = max(most, kept)
        assert most == 4


@pytest.mark.parametrize(
    ("name", "count", "wanted"), [("zbv", 7, 8), ("zbv", 16, 8), ("dualpipev", 8, 9), ("dualpipev", 16, 9)]
)
def test_pipelines_in_a_v_keep_as_much_on_every_rank(name: str, count: int, wanted: int) -> None:
    """2p micro-batches of a stage, and one more where a step begins with forward."""
    for rank in range(4):
        kept = most = 0
        for action in schedule_of(name).order(rank, 4, count):
            kept += {"FW": 1, "BW_input": 0}.get(action.direction, -1)
            most = max(most, kept)
        assert most == wanted


@pytest.mark.parametrize(
    ("name", "ranks", "count"), [("1f1b", 4, 3), ("interleaved", 4, 9), ("zb", 4, 9), ("dualpipev", 4, 7)]
)
def test_numbers_that_do_not_go_are_refused(name: str, ranks: int, count: int) -> None:
    with pytest.raises(UserError, match=f"--micro-batches {count} with --schedule {name}"):
        schedule_of(name).check(ranks, count)


def test_an_unknown_schedule_names_the_choices() -> None:
    with pytest.raises(UserError, match="gpipe"):
        schedule_of("zero-bubble")


@every_schedule
def test_torchs_name_is_taken_for_a_schedule(schedule: Schedule) -> None:
    assert schedule_name(schedule.torch_name) == schedule_name(schedule.name.upper()) == schedule.name
    assert schedule_name("zero-bubble") == "zero-bubble"


class Recording:
    """Stands in for torch's stage, and notes what torch's schedule has it do."""

    def __init__(self, index: int, places: tuple[int, ...], ranks: int) -> None:
        self.stage_index, self.num_stages = index, len(places)
        self.group_rank, self.group_size = places[index], ranks
        self.is_first, self.is_last = index == 0, index == len(places) - 1
        self.has_backward = True
        self.submod = None
        self.actions: list[Action] = []
        self.stage_index_to_group_rank = dict(enumerate(places))
        self.output_chunks: list[object] = []

    def forward_one_chunk(self, index: int, *_: object, **__: object) -> int:
        self.actions.append(Action("FW", self.stage_index, index))
        return index

    def backward_one_chunk(self, index: int, **_: object) -> None:
        self.actions.append(Action("BW", self.stage_index, index))

    def _nothing(self, *_: object, **__: object) -> list[object]:
        return []

    get_fwd_recv_ops = get_fwd_send_ops = get_bwd_recv_ops = get_bwd_send_ops = _nothing
    clear_runtime_states = perform_reduce_grad = _nothing


@pytest.mark.parametrize("name", ["gpipe", "1f1b"])
def test_one_stage_a_rank_runs_as_torch_runs_it(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from torch.distributed.pipelining.schedules import get_schedule_class

    schedule = schedule_of(name)
    for ranks, count in possible(schedule):
        for rank in range(ranks):
            stage = Recording(rank, schedule.placement.ranks_of_stages(ranks), ranks)
            running = get_schedule_class(schedule.torch_name)(stage, count)
            running._initialize_stage = lambda *_, **__: None
            running._step_microbatches([()] * count, [{}] * count, [0] * count, None)
            assert tuple(stage.actions) == schedule.order(rank, ranks, count), (ranks, count, rank)


@pytest.mark.parametrize("name", ["interleaved", "zb", "zbv", "dualpipev"])
def test_schedules_of_actions_are_torchs_own(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    from torch.distributed.pipelining.schedules import get_schedule_class

    schedule = schedule_of(name)
    names = {"FORWARD": "FW", "FULL_BACKWARD": "BW", "BACKWARD_INPUT": "BW_input", "BACKWARD_WEIGHT": "BW_weight"}
    for ranks, count in possible(schedule):
        for rank in range(ranks):
            own = schedule.placement.stages_of(rank, ranks)
            stages = [Recording(stage, schedule.placement.ranks_of_stages(ranks), ranks) for stage in own]
            running = get_schedule_class(schedule.torch_name)(stages, count)
            found = tuple(
                Action(names[part.computation_type.name], part.stage_index, part.microbatch_index, number > 0)
                for action in running.pipeline_order[rank]
                if action is not None
                for number, part in enumerate(action.sub_actions or (action,))
            )
            assert found == schedule.order(rank, ranks, count), (ranks, count, rank)
            assert all(stage.stage_index_to_group_rank[place] == rank for stage in stages for place in own)
