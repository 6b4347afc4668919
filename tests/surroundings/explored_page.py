"""The page of ``predict explore``, served for tests."""

from __future__ import annotations

import http.client
import json
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
from profile_factory import make_network, make_profile, model_times, ring_fit

from calibrate.profile.profile import write_profile
from predict.validation.report.explore.explorer import Explorer
from predict.validation.report.explore.server import application, listening

TOKEN = "a-token-of-these-tests"
START = {"model": "chain", "ranks": 4, "batch": 16, "memory": ""}
SEARCH = {"model": "chain", "ranks": 4, "batch": 16}


class Served(NamedTuple):
    """A page that is served."""

    port: int
    profile: Path

    def ask(
        self, what: str, content: object = None, *, token: str = TOKEN, headers: dict[str, str] | None = None
    ) -> tuple[int, bytes]:
        """Status and body; a POST where there is content."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=60)
        body = content if content is None or isinstance(content, bytes) else json.dumps(content).encode()
        connection.request("GET" if body is None else "POST", f"/{token}/{what}", body, headers or {})
        answer = connection.getresponse()
        return answer.status, answer.read()


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    import uvicorn

    path = tmp_path_factory.mktemp("explore") / "<img src=x onerror=alert(1)>.json"
    write_profile(
        path, make_profile(model_times=model_times(make_network(), common_sd=0.02), communication=(ring_fit(),))
    )
    at = listening(0)
    port = at.getsockname()[1]
    app = application(Explorer([path]), TOKEN, port, START)
    server = uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]})
    thread.start()
    while not server.started:
        time.sleep(0.01)
    yield Served(port, path)
    server.should_exit = True
    thread.join()
