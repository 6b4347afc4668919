"""How tests of this folder start ranks."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from forked_ranks import RankServers


@pytest.fixture(scope="session")
def rank_servers() -> Iterator[RankServers]:
    servers = RankServers()
    yield servers
    servers.close()


@pytest.fixture(autouse=True)
def forked_ranks(request: pytest.FixtureRequest, rank_servers: RankServers) -> Iterator[None]:
    """Ranks that this process launches have imported torch already, unless the test is marked own_interpreters."""
    if request.node.get_closest_marker("own_interpreters"):
        yield
        return
    with rank_servers.in_use():
        yield
