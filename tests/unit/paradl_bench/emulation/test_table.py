"""A table of sleeps is of the run that it is given to, or refused with the command that writes the right one."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest
from profile_factory import make_network

from paradl_bench.core.errors import UserError
from paradl_bench.core.files.storage import encode_pretty
from paradl_bench.emulation import table
from paradl_bench.emulation.table import TableRequest, made_by_registered, options_of, table_of
from paradl_bench.plan.settings import plan_settings
from paradl_bench.plan.strategy import parse_strategy
from paradl_bench.records.training.ghost_record import GhostRole, GhostSpread, GhostTable

CHAIN = make_network()
ROLE = GhostRole(layers={"fc1": {"FW": 1.0}}, between={}, update_s=1.0)
TABLE = GhostTable(
    profile="p.json",
    profile_sha256="",
    network_digest=CHAIN.digest,
    strategy="d2",
    batch=8,
    options=options_of(plan_settings(batch=8)),
    roles=(ROLE,),
    role_of_rank=(0, 0),
    spread=GhostSpread(tied_quantiles=(-0.1, 0.1), samples=9),
)


def asked(
    tmp_path: Path, content: object = TABLE, strategy: str = "d2", *, spread: bool = False, **more: Any
) -> TableRequest:
    path = tmp_path / "table.json"
    path.write_bytes(encode_pretty(content))
    settings = plan_settings(**{"batch": 8, **more})
    return TableRequest(str(path), CHAIN, parse_strategy(strategy), settings, "fp32", "gloo", spread)


def refused(request: TableRequest) -> str:
    with pytest.raises(UserError) as caught:
        table_of(request, made_by_registered)
    return str(caught.value)


def test_a_run_takes_its_table_and_its_spread(tmp_path: Path) -> None:
    assert table_of(asked(tmp_path, spread=True), made_by_registered) == TABLE
    assert table_of(asked(tmp_path), made_by_registered) == msgspec.structs.replace(TABLE, spread=None)


@pytest.mark.parametrize(
    ("strategy", "more", "said"),
    [
        ("d4", {}, "strategy d2, not d4; ranks 2, not 4. Make this run's: predict ghost --from-profile p.json"),
        ("d2", {"batch": 16}, "batch 8, not 16. Make this run's: predict ghost"),
        ("d2", {"optimizer": "adam"}, "optimizer sgd, not adam"),
        ("d2", {"accumulate": 2}, "accumulate by default, not 2"),
        (
            "d2",
            {"split": ("fc1", "fc2")},
            "--batch 8 --optimizer sgd --split fc1,fc2 -o",
        ),
    ],
)
def test_a_table_of_another_run_is_refused_with_the_command(
    strategy: str, more: dict[str, Any], said: str, tmp_path: Path
) -> None:
    request = asked(tmp_path, strategy=strategy, **more)
    text = refused(request)
    assert text.startswith(f"--emulate {request.file}: the table is of ")
    assert said in text
    assert text.endswith(f"-o {request.file} --force")


def test_what_the_run_lacks_is_named(tmp_path: Path) -> None:
    assert "another network than chain" in refused(asked(tmp_path, msgspec.structs.replace(TABLE, network_digest="")))
    level = msgspec.structs.replace(TABLE, spread=None)
    assert "sleeps that do not spread. Make" in refused(asked(tmp_path, level, spread=True))
    assert "table of sleeps: " in refused(asked(tmp_path, {"role_of_rank": [0]}))


def test_a_profile_without_a_maker_is_refused_with_the_command(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table, "entry_points", lambda group: ())
    request = asked(tmp_path, {})
    text = refused(request)
    assert f"predict ghost --from-profile {request.file} --model chain --strategy d2 --batch 8" in text
    assert text.endswith("-o table.json")
