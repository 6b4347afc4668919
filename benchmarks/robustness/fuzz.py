"""Fuzz readers of files, the commands that use what they hold, options and the environment.

    python benchmarks/robustness/fuzz.py --hours 2 -o fuzzing.json [--only kineto,osu] [--seed 0]
    python benchmarks/robustness/fuzz.py --runs 1000000 -o fuzzing.json

Nothing but the project's own errors may come out, in 2 s and 500 MB an input. Inputs are changed from small files of
every format, by their bytes or by the fields of their types; those that reach new lines are changed on. The work is cut
into chunks of one target and one seed. With -o every finished chunk is counted in a file: the same command goes on
where it was stopped, and more --runs or another --seed add up. A failing input is kept beside it and fuzzing goes on;
without -o the first failing input is printed. Exit code 1 if an input failed.

With --engine atheris (libFuzzer; pip install atheris) every target runs in a process of its own.
"""

from __future__ import annotations

import argparse
import hashlib
import itertools
import json
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[2]
sys.path.insert(0, str(ROOT))
sys.path[:0] = [str(ROOT / "tests" / folder) for folder in ("cases", "fuzzing", "on_ranks", "surroundings")]

from coverage_guided import Finding, Fuzzer, limit_memory  # noqa: E402
from fuzz_targets import change_of, is_slow, seeds, targets  # noqa: E402

_LONGEST_INPUT = 1 << 16
_CHUNK = 1000
_SLOW_CHUNK = 30
_TRACED_EVERY = 5


def _commit() -> str:
    told = subprocess.run(
        ["git", "-C", str(ROOT), "describe", "--always", "--dirty"], capture_output=True, text=True, check=False
    )
    return told.stdout.strip() or "unknown"


class Ledger:
    """What was fuzzed so far, in a JSON file, with the corpus and failing inputs in folders beside it."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self.held: dict[str, Any] = {"inputs": 0, "commits": {}, "targets": {}, "findings": []}
        self.commit = _commit()
        if path is not None and path.exists():
            self.held = json.loads(path.read_text())

    def done(self, name: str, seed: int) -> bool:
        """Whether a chunk was fuzzed before."""
        return str(seed) in self.held["targets"].get(name, {}).get("seeds", {})

    def count(self, name: str, seed: int, fuzzer: Fuzzer, runs: int, seconds: float) -> None:
        """Add a chunk."""
        nothing = {"inputs": 0, "seconds": 0.0, "lines": 0, "kept": 0, "seeds": {}}
        target = self.held["targets"].setdefault(name, nothing)
        target["inputs"] += runs
        target["seconds"] = round(target["seconds"] + seconds, 2)
        target["lines"] = max(target["lines"], len(fuzzer.lines.seen))
        target["kept"] = len(fuzzer.corpus)
        target["refused"] = target.get("refused", 0) + fuzzer.refused
        target["seeds"][str(seed)] = runs
        fuzzer.refused = 0
        self.held["commits"][self.commit] = self.held["commits"].get(self.commit, 0) + runs
        self.held["inputs"] = sum(each["inputs"] for each in self.held["targets"].values())

    def find(self, name: str, seed: int, finding: Finding) -> None:
        """Keep a failing input; one of a kind and place is kept, more are counted."""
        for known in self.held["findings"]:
            if (known["target"], known["place"]) == (name, finding.place):
                known["times"] += 1
                return
        digest = hashlib.sha256(finding.content).hexdigest()[:16]
        entry = {
            "target": name,
            "seed": seed,
            "commit": self.commit,
            "place": finding.place,
            "times": 1,
            "input": digest,
        }
        self.held["findings"].append({**entry, "text": str(finding)[:300]})
        print(f"FOUND {name}: {str(finding)[:600]}", flush=True)
        self._beside("findings", name, finding.content)

    def corpus(self, name: str) -> list[bytes]:
        """Inputs that earlier chunks kept."""
        folder = self._folder("corpus", name)
        return (
            [path.read_bytes() for path in sorted(folder.iterdir())] if folder is not None and folder.exists() else []
        )

    def keep(self, name: str, corpus: list[bytes]) -> None:
        """Keep inputs for later chunks."""
        for content in corpus:
            self._beside("corpus", name, content)

    def write(self) -> None:
        """Write the counts; atomically, since the run may be killed."""
        if self.path is not None:
            temporary = self.path.with_suffix(".tmp")
            temporary.write_text(json.dumps(self.held, indent=1) + "\n")
            temporary.replace(self.path)

    def _folder(self, what: str, name: str) -> Path | None:
        return None if self.path is None else self.path.with_suffix(f".{what}") / name

    def _beside(self, what: str, name: str, content: bytes) -> None:
        folder = self._folder(what, name)
        if folder is not None:
            folder.mkdir(parents=True, exist_ok=True)
            path = folder / hashlib.sha256(content).hexdigest()[:16]
            if not path.exists():
                path.write_bytes(content)


class Campaign:
    """Fuzzers of all targets, which keep their corpus from chunk to chunk."""

    def __init__(self, ledger: Ledger, seed: int) -> None:
        self.ledger = ledger
        self.seed = seed
        self.fuzzers: dict[str, Fuzzer] = {}

    def chunk(self, name: str, seed: int, runs: int) -> None:
        """Fuzz one target with one seed."""
        start = time.process_time()
        fuzzer = self.fuzzers.get(name)
        if fuzzer is None:
            fuzzer = self.fuzzers[name] = Fuzzer(targets()[name], [], random.Random(0), change=change_of(name))
            fuzzer.corpus = seeds(name) + self.ledger.corpus(name)
            for content in fuzzer.corpus:
                self._attempt(name, seed, lambda content=content: fuzzer.attempt(content, traced=True))
        known = len(fuzzer.corpus)
        fuzzer.generator = random.Random(f"{seed} {name}")
        for number in range(runs):
            self._attempt(name, seed, lambda traced=number % _TRACED_EVERY == 0: fuzzer.step(traced=traced))
        self.ledger.keep(name, fuzzer.corpus[known:])
        self.ledger.count(name, seed, fuzzer, runs, time.process_time() - start)

    def _attempt(self, name: str, seed: int, run: Any) -> None:
        try:
            run()
        except Finding as finding:
            if self.ledger.path is None:
                raise
            self.ledger.find(name, seed, finding)


def warm(names: list[str]) -> None:
    """Load what the targets import when they first need it: neither its time nor its memory is an input's."""
    for name in names:
        for content in seeds(name):
            targets()[name](content)


def fuzz_own(names: list[str], runs: int | None, hours: float | None, first_seed: int, ledger: Ledger) -> None:
    """Go round the targets, one chunk each, until each has its share or the time is over."""
    end = None if hours is None else time.monotonic() + 3600 * hours
    campaign = Campaign(ledger, first_seed)
    share = None if runs is None else -(-runs // len(names))
    given = dict.fromkeys(names, 0)
    for seed in itertools.count(first_seed):
        for name in names:
            left = sys.maxsize if share is None else share - given[name]
            count = min(_SLOW_CHUNK if is_slow(name) else _CHUNK, left)
            if end is not None and time.monotonic() > end:
                return
            if count > 0 and not ledger.done(name, seed):
                campaign.chunk(name, seed, count)
                ledger.write()
            given[name] += max(count, 0)
        if share is not None and min(given.values()) >= share:
            return


def tell(names: list[str], ledger: Ledger) -> None:
    """Print what was fuzzed, by target and in all."""
    for name in names:
        held = ledger.held["targets"].get(name)
        if held is None:
            continue
        rate = held["inputs"] / max(held["seconds"], 0.01)
        counts = f"{held['inputs']} inputs, {held['refused']} refused, {held['lines']} lines, {held['kept']} kept"
        print(f"{name}: {counts}, {rate:.0f}/s")
    print(f"{ledger.held['inputs']} inputs over {len(names)} targets, {len(ledger.held['findings'])} findings")


def fuzz_atheris(name: str, runs: int, seed: int) -> None:
    """Fuzz one target by atheris in a process of its own.

    Raises:
        subprocess.CalledProcessError: an input failed; atheris has printed it.
    """
    with tempfile.TemporaryDirectory() as folder:
        for number, content in enumerate(seeds(name)):
            (Path(folder) / str(number)).write_bytes(content)
        limits = [
            f"-runs={runs}",
            f"-seed={seed + 1}",
            f"-max_len={_LONGEST_INPUT}",
            "-timeout=20",
        ]
        arguments = [sys.executable, __file__, "--child", name, *limits, folder]
        subprocess.run(arguments, check=True)


def child(name: str, arguments: list[str]) -> None:
    """Run libFuzzer in this process."""
    import atheris

    # What was imported before has to be instrumented afterwards.
    target = targets()[name]

    def test(content: bytes) -> None:
        target(bytes(content))

    atheris.instrument_all()
    atheris.Setup([sys.argv[0], *arguments], test)
    atheris.Fuzz()


def main() -> None:
    """Share the runs over the targets."""
    if sys.argv[1:2] == ["--child"]:
        child(sys.argv[2], sys.argv[3:])
        return
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--runs", type=int, help="inputs over all targets; 100,000 where no --hours are given")
    parser.add_argument("--hours", type=float, help="to go on for")
    parser.add_argument("--only", default="", help="targets, parted by commas")
    parser.add_argument("--seed", type=int, default=0, help="of the first chunk; the next ones count on")
    parser.add_argument("--engine", choices=["own", "atheris"], default="own")
    parser.add_argument("-o", "--output", type=Path, help="count finished chunks in this JSON file, and go on from it")
    options = parser.parse_args()
    known = sorted(targets())
    names = options.only.split(",") if options.only else known
    for name in names:
        if name not in known:
            parser.error(f"--only: {name!r} is no target; there are {', '.join(known)}")
    runs = 100_000 if options.runs is None and options.hours is None else options.runs
    ledger = Ledger(options.output)
    try:
        if options.engine == "own":
            warm(names)
            limit_memory()
            fuzz_own(names, runs, options.hours, options.seed, ledger)
            tell(names, ledger)
        else:
            for name in names:
                fuzz_atheris(name, (runs or 100_000) // len(names), options.seed)
    except (AssertionError, subprocess.CalledProcessError) as error:
        print(error)
        sys.exit(1)
    sys.exit(1 if ledger.held["findings"] else 0)


if __name__ == "__main__":
    main()
