"""The server of ``predict explore``: this machine alone, by a token in the address, and no file but the page's own."""

from __future__ import annotations

import secrets
import socket
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import msgspec

from paradl_bench.core.errors import ParadlError, UserError
from paradl_bench.core.files.storage import read_whole
from predict.validation.report.explore.explorer import Explorer
from predict.validation.report.explore.page import FILES, page
from predict.validation.report.explore.state import Asked, decode

if TYPE_CHECKING:
    import uvicorn
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response

LOOPBACK = "127.0.0.1"
_TOKEN_BYTES = 24
_MOST_BYTES = 1 << 16
"""Of a request."""
_HEADERS = {
    # Charts set styles of their own; nothing else may come from anywhere but here.
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; connect-src"
    " 'self'; img-src data:; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
    "Cache-Control": "no-store",
}


def new_token() -> str:
    """What stands in the address, so that other users of this machine can't ask."""
    return secrets.token_urlsafe(_TOKEN_BYTES)


def listening(port: int) -> socket.socket:
    """A socket on the loopback; port 0 is a free one.

    Raises:
        UserError: the port is in use.
    """
    listener = socket.socket()
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((LOOPBACK, port))
        listener.listen()
    except OSError as error:
        listener.close()
        why = (error.strerror or str(error)).lower()
        raise UserError(f"--port {port} cannot be used ({why}); leave it out for a free one") from None
    return listener


@dataclass(frozen=True, slots=True, kw_only=True)
class _Gate:
    """Who is let in: whoever knows the token, at the loopback's names, from no other page."""

    token: str
    hosts: frozenset[str]

    def refusal(self, request: Request) -> Response | None:
        origin = request.headers.get("origin")
        at_home = request.headers.get("host") in self.hosts
        if not at_home or origin not in (None, *(f"http://{host}" for host in self.hosts)):
            return _told(403, {"error": "this page can be read from this machine only"})
        if not secrets.compare_digest(request.path_params["token"].encode(), self.token.encode()):
            return _told(404, {"error": "nothing is here"})
        return None


def application(explorer: Explorer, token: str, port: int, start: Mapping[str, Any]) -> Starlette:
    """What answers.

    Args:
        port: that it is reached at; requests by another name than the loopback's are refused.
        start: what the page's controls begin with.
    """
    from starlette.applications import Starlette
    from starlette.responses import Response
    from starlette.routing import Route

    gate = _Gate(token=token, hosts=frozenset(f"{name}:{port}" for name in (LOOPBACK, "localhost")))

    async def shown(request: Request) -> Response:
        refused = gate.refusal(request)
        return refused or Response(page(explorer.choices(), start), headers=_HEADERS, media_type="text/html")

    async def file(request: Request) -> Response:
        known = FILES.get(request.path_params["name"])
        refused = gate.refusal(request)
        if refused is not None or known is None:
            return refused or _told(404, {"error": "nothing is here"})
        kind = "text/css" if known.suffix == ".css" else "text/javascript"
        return Response(read_whole(known), headers=_HEADERS, media_type=kind)

    # One answer at a time: what is remembered is shared.
    lock = threading.Lock()
    answers = {"search": explorer.search, "row": explorer.row, "look": explorer.look}
    asked = [Route(f"/{{token}}/{name}", _answering(of, gate, lock), methods=["POST"]) for name, of in answers.items()]
    return Starlette(routes=[Route("/{token}/", shown), Route("/{token}/files/{name}", file), *asked])


def _answering(
    answer: Callable[[Asked], dict[str, Any]], gate: _Gate, lock: threading.Lock
) -> Callable[[Request], Any]:
    from starlette.concurrency import run_in_threadpool

    def answered(content: bytes) -> Response:
        try:
            with lock:
                return _told(200, answer(decode(content)))
        except ParadlError as error:
            return _told(400, {"error": str(error)})

    async def asked(request: Request) -> Response:
        refused = gate.refusal(request)
        if refused is not None:
            return refused
        content = b""
        async for part in request.stream():
            content += part
            if len(content) > _MOST_BYTES:
                return _told(413, {"error": "the request is too long"})
        return await run_in_threadpool(answered, content)

    return asked


def serve(app: Starlette, at: socket.socket) -> None:
    """Answer until interrupted."""
    _server(app).run(sockets=[at])


def serve_beside(app: Starlette, at: socket.socket) -> Callable[[], None]:
    """Answer in a thread of its own, until what is returned is called or this process ends."""
    server = _server(app)
    thread = threading.Thread(target=server.run, kwargs={"sockets": [at]}, daemon=True)
    thread.start()

    def stop() -> None:
        server.should_exit = True
        thread.join()

    return stop


def _server(app: Starlette) -> uvicorn.Server:
    import uvicorn

    return uvicorn.Server(uvicorn.Config(app, log_level="error", access_log=False, lifespan="off"))


def _told(status: int, said: Mapping[str, Any]) -> Response:
    from starlette.responses import Response

    content = msgspec.json.encode(said)
    return Response(content, status_code=status, headers=_HEADERS, media_type="application/json")
