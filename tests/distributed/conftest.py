"""How tests of this folder start ranks."""

from __future__ import annotations

import os
from collections.abc import Iterator

import pytest

pytest.importorskip("torch", reason="torch is not installed: pip install -e '.[bench,test]'")

from forked_ranks import RankServers
from shared_traces import shared_in


@pytest.fixture(scope="session", autouse=True)
def shared_traces(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    own = tmp_path_factory.getbasetemp()
    # Folders of workers lie in one of the run.
    with shared_in((own.parent if "PYTEST_XDIST_WORKER" in os.environ else own) / "traces"):
        yield


@pytest.fixture(scope="session")
def rank_servers() -> Iterator[RankServers]:
    servers = RankServers()
    yield servers
    servers.close()


@pytest.fixture(scope="module", autouse=True)
def forked_ranks(rank_servers: RankServers) -> Iterator[None]:
    """Ranks that a test, or a fixture of its module, launches have imported torch already."""
    with rank_servers.in_use():
        yield


@pytest.fixture(autouse=True)
def own_interpreters(request: pytest.FixtureRequest, rank_servers: RankServers) -> Iterator[None]:
    """The ranks of a test that is marked so are started as a user's are."""
    if not request.node.get_closest_marker("own_interpreters"):
        yield
        return
    with rank_servers.out_of_use():
        yield
