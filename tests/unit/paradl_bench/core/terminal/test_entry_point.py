"""How a program ends that frees nothing: its other handlers run, its output is whole, its exit code its own."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[5]

PROGRAM = """
import atexit, sys
from paradl_bench.core.terminal.entry_point import entry_point

class Held:
    def __del__(self):
        print("freed", flush=True)

def run():
    global held
    held = Held()
    atexit.register(print, "cleaned up", flush=True)
    sys.exit({code})

entry_point(lambda: run, frees={frees})()
"""


@pytest.mark.parametrize("code", [0, 2])
@pytest.mark.parametrize(("frees", "said"), [(True, ["cleaned up", "freed"]), (False, ["cleaned up"])])
def test_what_is_held_is_freed_only_when_asked(code: int, frees: bool, said: list[str]) -> None:
    program = PROGRAM.format(code=code, frees=frees)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert (done.returncode, done.stdout.splitlines(), done.stderr) == (code, said, "")


def test_a_defect_that_ends_it_keeps_its_traceback() -> None:
    program = PROGRAM.format(code="1 / 0", frees=False)
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT, check=False)
    assert done.returncode == 1
    assert "ZeroDivisionError" in done.stderr
