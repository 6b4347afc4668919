"""Every number of the golden commands, so that two commits can be compared on one machine to the last bit.

    python benchmarks/correctness/golden.py -o before.json
    python benchmarks/correctness/golden.py -o after.json --against before.json  exit code 1 where a number moved
    python benchmarks/correctness/golden.py --commit                             what tests/data/golden.json keeps

The commands are predictions by every evaluator, axis, nesting, schedule and setting, searches, timelines, validations
of committed runs, and fits of committed sweeps. The test of the few that are kept allows for other machines' rounding.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from pathlib import Path

sys.path.extend([str(Path(__file__).parents[2] / "tests" / folder) for folder in ("cases", "on_ranks")])

from golden_numbers import GOLDEN, kept, moved, record

from paradl_bench.core.files.storage import write_text_atomically

_SHOWN = 100


def main() -> int:
    """Record, and compare; the status is 1 where a number moved."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("-o", "--output", type=Path, help="every number, as JSON")
    parser.add_argument("--against", type=Path, help="what another commit recorded on this machine")
    parser.add_argument("--commit", action="store_true", help=f"write {GOLDEN.name}")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as directory:
        found = record(Path(directory))
    print(f"{len(found)} commands, {sum(map(len, found.values()))} numbers")
    if options.output:
        write_text_atomically(options.output, json.dumps(found, indent=0) + "\n")
    if options.commit:
        write_text_atomically(GOLDEN, json.dumps(kept(found), indent=0) + "\n")
    if options.against is None:
        return 0
    differ = moved(json.loads(options.against.read_text()), found)
    print(*differ[:_SHOWN], sep="\n")
    print(f"{len(differ)} numbers moved")
    return int(bool(differ))


if __name__ == "__main__":
    sys.exit(main())
