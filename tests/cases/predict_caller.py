"""``predict`` as a user calls it, in the process of the tests."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from profile_factory import make_profile

from calibrate.profile.profile import write_profile
from paradl_bench.core.terminal.command_line import run_command
from predict.cli import group


class Result:
    """What a call printed and its exit code."""

    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err

    def json(self) -> list[dict[str, object]]:
        assert self.code == 0, self.err
        found: list[dict[str, object]] = json.loads(self.out)
        return found


class Caller:
    """Calls ``predict`` in this process with a profile."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> None:
        self.folder, self._monkeypatch, self._capfd = folder, monkeypatch, capfd
        self.profile = folder / "profile.json"
        write_profile(self.profile, make_profile())

    def bare(self, *arguments: str) -> Result:
        self._monkeypatch.setattr(sys, "argv", ["predict", *arguments])
        with pytest.raises(SystemExit) as caught:
            run_command(group, "predict")
        out, err = self._capfd.readouterr()
        assert isinstance(caught.value.code, int)
        return Result(caught.value.code, out, err)

    def __call__(self, *arguments: str, model: str = "chain") -> Result:
        return self.bare("--from-profile", str(self.profile), "--model", model, *arguments)
