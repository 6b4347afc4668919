"""The quickstart's commands: each is one that its program takes, and reads what those before it wrote."""

from __future__ import annotations

from pathlib import Path

import click
import pytest

import calibrate.cli
import paradl_bench.cli
import predict.cli
from paradl_bench.commands.quickstart import ROUNDS, Step, run_quickstart, steps
from paradl_bench.core.errors import UserError

GROUPS = {"paradl_bench": paradl_bench.cli.group, "calibrate": calibrate.cli.group, "predict": predict.cli.group}
WHERE = Path("somewhere")


def options_of(step: Step) -> dict[str, object]:
    """What the command line says, parsed as the program parses it, and not run."""
    group, arguments = GROUPS[step.module], list(step.arguments)
    assert isinstance(group, click.Group)
    context = click.Context(group)
    command = group.get_command(context, arguments[0])
    if command is None:
        return group.make_context(step.module, arguments).params
    return command.make_context(arguments[0], arguments[1:], parent=context).params


def test_every_step_is_a_command_line_that_its_program_takes() -> None:
    for step in steps(WHERE):
        assert options_of(step), step.command_line


def test_steps_read_what_earlier_ones_wrote() -> None:
    written: set[str] = set()
    for step in steps(WHERE):
        read = [word for word in step.arguments if word.startswith(f"{WHERE}/")]
        if "-o" in step.arguments:
            output = step.arguments[step.arguments.index("-o") + 1]
            read.remove(output)
            assert output not in written, step.command_line
            written.add(output)
        assert set(read) <= written - {output} if "-o" in step.arguments else set(read) <= written
    measured = {name for name in written if not name.endswith((".json", "/report", ".html"))}
    used = {word for step in steps(WHERE) if step.arguments[0] in ("fit", "validate") for word in step.arguments}
    assert measured <= used


def test_what_is_measured_is_measured_in_rounds_that_stand_apart() -> None:
    kinds = [
        tuple(word for word in step.arguments if word.isalnum() or "," in word)[:4]
        for step in steps(WHERE)
        if step.arguments[0] in ("layers", "collectives")
    ]
    a_round = len(kinds) // ROUNDS
    assert [len(set(kinds[start : start + a_round])) for start in range(0, len(kinds), a_round)] == [a_round] * ROUNDS
    # Sweeps of unlike rounds have orders of their own.
    seeds = [step.arguments[step.arguments.index("--seed") + 1] for step in steps(WHERE) if "--seed" in step.arguments]
    assert len(set(seeds)) == ROUNDS


def test_a_file_in_the_place_of_the_directory_is_refused(tmp_path: Path) -> None:
    (tmp_path / "taken").write_text("mine")
    with pytest.raises(UserError, match="takes a directory"):
        run_quickstart(tmp_path / "taken")
    assert (tmp_path / "taken").read_text() == "mine"
