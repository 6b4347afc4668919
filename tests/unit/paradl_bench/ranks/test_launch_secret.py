"""The secret of a launch: where it comes from, and what is sealed with it."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.ranks.launch_secret import SECRET, launch_secret, opened, sealed, secret_file

KEY, OTHER = b"k" * 32, b"o" * 32


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.delenv(SECRET, raising=False)
    monkeypatch.delenv("XDG_STATE_HOME", raising=False)
    monkeypatch.setenv("HOME", str(tmp_path))
    return tmp_path


def test_the_environment_comes_first(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(SECRET, "sixteen letters!")
    assert launch_secret() == b"sixteen letters!"
    assert not list(home.iterdir())
    monkeypatch.setenv(SECRET, "short")
    with pytest.raises(UserError, match="PARADL_SECRET has 5 characters: give at least 16 random ones"):
        launch_secret()


def test_a_users_file_is_made_once_and_is_theirs_alone(home: Path) -> None:
    with ThreadPoolExecutor(8) as pool:
        found = set(pool.map(lambda _: launch_secret(), range(32)))
    assert found == {secret_file().read_bytes()}
    assert len(found.pop()) == 64
    assert secret_file().stat().st_mode & 0o777 == 0o600
    assert list(secret_file().parent.iterdir()) == [secret_file()]


def test_a_secret_file_with_two_names_is_read(home: Path) -> None:
    secret = launch_secret()
    (secret_file().parent / ".maker.tmp").hardlink_to(secret_file())
    assert launch_secret() == secret


def test_a_secret_file_readable_by_others_or_linked_is_refused(home: Path) -> None:
    launch_secret()
    path = secret_file()
    path.chmod(0o644)
    with pytest.raises(UserError, match="nobody else can read: chmod 600"):
        launch_secret()
    path.chmod(0o600)
    path.write_text("")
    with pytest.raises(UserError, match="holds no secret"):
        launch_secret()
    path.rename(home / "elsewhere")
    path.symlink_to(home / "elsewhere")
    with pytest.raises(UserError, match="is a link"):
        launch_secret()


def test_an_unwritable_secret_file_names_the_export_command(home: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (home / "file").write_text("")
    monkeypatch.setenv("XDG_STATE_HOME", str(home / "file"))
    with pytest.raises(UserError, match=r"export PARADL_SECRET=\$\(openssl rand -hex 32\)"):
        launch_secret()


@pytest.mark.parametrize("value", [b"", b"a", b"x" * 31, b"y" * 32, b"z" * 1000])
def test_what_is_sealed_opens_under_its_name_and_secret_alone(value: bytes) -> None:
    content = sealed(KEY, "rank/1", value)
    assert opened(KEY, "rank/1", content) == value
    assert content != sealed(KEY, "rank/1", value)
    assert len(value) < 16 or value not in content
    changed = bytes([content[0] ^ 1]) + content[1:]
    for secret, name, other in ((OTHER, "rank/1", content), (KEY, "rank/2", content), (KEY, "rank/1", changed)):
        with pytest.raises(WorkError, match="export the same PARADL_SECRET for all of them"):
            opened(secret, name, other)
    for broken in (b"", content[:-1], content[:40], value):
        with pytest.raises(WorkError, match="is not of this run"):
            opened(KEY, "rank/1", broken)
