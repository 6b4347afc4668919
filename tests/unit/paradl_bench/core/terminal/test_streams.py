"""Standard streams that fail do not end the work, and what files hold does not steer the terminal."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.table import Table
from rich.text import Text

from paradl_bench.core.terminal.command_line import say, tell
from paradl_bench.core.terminal.plain_console import PlainConsole
from paradl_bench.core.terminal.printed import in_code, in_markdown

ROOT = Path(__file__).parents[5]
_PROGRAM = """
import sys
from pathlib import Path
import click
from paradl_bench.core.terminal.command_line import open_console, run_command, tell

@click.command()
def command():
    for number in range(int(sys.argv[2])):
        tell(f"line {number} \\u03b1 " + "x" * 100)
    open_console().print("\\u2026 done")
    Path(sys.argv[1]).write_text("picture")

first = sys.argv[1:]
sys.argv[1:] = []
sys.argv += first
command.params = [click.Argument(["names"], nargs=-1)]
command.callback = (lambda old: lambda names: old())(command.callback)
run_command(command, "program")
"""


def _run(output: object, picture: Path, lines: int = 2000, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", _PROGRAM, str(picture), str(lines)],
        stdout=output,  # type: ignore[call-overload]
        stderr=subprocess.PIPE,
        text=True,
        env=os.environ | variables,
        cwd=ROOT,
        check=False,
    )


def test_full_standard_output_is_one_line_and_files_are_written(tmp_path: Path) -> None:
    with open("/dev/full", "wb") as full:
        done = _run(full, tmp_path / "picture")
    assert (done.returncode, (tmp_path / "picture").read_text()) == (3, "picture")
    assert done.stderr == "program: error: cannot write standard output: No space left on device\n"


def test_a_closed_reader_costs_no_file_and_no_message(tmp_path: Path) -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = _run(writer, tmp_path / "picture")
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "")
    assert (tmp_path / "picture").read_text() == "picture"


def test_a_terminal_of_ascii_alone_is_written_to(tmp_path: Path) -> None:
    done = _run(subprocess.PIPE, tmp_path / "picture", 1, PYTHONIOENCODING="ascii")
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize("closed", [(), (1,), (1, 2)])
def test_streams_that_were_closed_before_cost_no_traceback(closed: tuple[int, ...]) -> None:
    program = "from predict.__main__ import main\nmain()\n"
    done = subprocess.run(
        [sys.executable, "-c", program, "profiles"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=False,
        preexec_fn=lambda: [os.close(number) for number in closed],
    )
    assert done.returncode == (3 if closed else 0)
    said = "predict: error: cannot write standard output: Bad file descriptor\n"
    assert done.stderr == (said if closed == (1,) else "")


@pytest.mark.parametrize("package", ["paradl_bench", "calibrate", "predict"])
def test_an_interrupt_while_modules_are_imported_is_one_line(package: str) -> None:
    program = (
        "import os, signal, sys\n"
        "class Finder:\n"
        "    def find_spec(self, name, *_):\n"
        "        if name == 'click': os.kill(os.getpid(), signal.SIGINT)\n"
        "sys.meta_path.insert(0, Finder())\n"
        f"from {package}.__main__ import main\n"
        "main()\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stderr) == (3, "interrupted before it began; nothing was written\n")


def test_what_files_hold_is_shown_and_not_obeyed(capsys: pytest.CaptureFixture[str]) -> None:
    foreign = "[/][bold]x[/bold] :smile: \x1b]0;title\x07\x1b[31mred\x9b31m"
    table = Table("name", title=foreign)
    table.add_row(foreign)
    table.add_row(Text(foreign, style="yellow"))
    console = PlainConsole(width=200, force_terminal=False)
    console.print(table)
    console.print(foreign)
    shown = capsys.readouterr().out
    assert shown.count("[/][bold]x[/bold] :smile: ") == 4
    assert not any(char in shown for char in "\x1b\x9b\x07")


def test_only_the_terminals_own_module_prints() -> None:
    """Tables and messages go through ``open_console``, ``say`` and ``tell``, which make them harmless; JSON is data."""
    found = []
    for package in ("paradl_bench", "calibrate", "predict"):
        for file in sorted((ROOT / package).rglob("*.py")):
            name = file.relative_to(ROOT).as_posix()
            if name in ("paradl_bench/core/terminal/command_line.py", "paradl_bench/core/terminal/plain_console.py"):
                continue
            for node in ast.walk(ast.parse(file.read_text())):
                text = ast.unparse(node) if isinstance(node, ast.Call) else ""
                prints = text.startswith(("click.echo(", "click.secho(", "Console(", "print("))
                if prints and "json" not in text:
                    found.append(f"{name}:{node.lineno}: {text[:80]}")
                if isinstance(node, ast.ImportFrom) and node.module == "rich.markup":
                    found.append(f"{name}: rich.markup")
    assert not found


@pytest.mark.parametrize(
    ("text", "shown"),
    [
        ("<img src=x onerror=alert(1)>", "&lt;img src=x onerror=alert(1)>"),
        ("a\n\n# Forged heading", "a # Forged heading"),
        ("# Forged", "\\# Forged"),
        ("a | b", "a \\| b"),
        ("![x](http://a/b)", "![x]\\(http://a/b)"),
        ("&lt;b&gt;", "&amp;lt;b&amp;gt;"),
        ("batch_norm, 46%", "batch_norm, 46%"),
        ("\x1b[31mred\u202e", "red"),
    ],
)
def test_a_name_in_markdown_is_a_name(text: str, shown: str) -> None:
    assert in_markdown(text) == shown
    assert "`" not in in_code(f"a`{text}")[1:-1]


def test_a_name_forges_no_line(capsys: pytest.CaptureFixture[str]) -> None:
    for write, read in ((tell, lambda: capsys.readouterr().out), (say, lambda: capsys.readouterr().err)):
        write("note: a\r\nprogram: error: b\x85c\u2028d")
        assert read() == "note: a program: error: bc d\n"
        write("two\nlines", lines=True)
        assert read() == "two\nlines\n"
