"""The secret by which ranks of one launch know each other, and values that only who knows it can read or write.

Ranks of this program's own launcher inherit one that is made for them. Others get ``PARADL_SECRET``, or share the
user's own file, which every node of a cluster with shared homes can read.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import secrets
from pathlib import Path

from paradl_bench.core.errors import UserError, WorkError
from paradl_bench.core.files.storage import open_own

SECRET = "PARADL_SECRET"  # nosec B105  # the name
"""Variable that holds the secret, the same for all ranks of a launch."""
_SHORTEST = 16
_NONCE_BYTES = 16
_TAG_BYTES = 32
_BLOCK_BYTES = 32
_LONGEST_FILE = 4096


def new_secret() -> str:
    """A secret for one launch."""
    return secrets.token_hex(32)


def launch_secret() -> bytes:
    """The secret of this launch: from the environment, else from the user's file, which is made where there is none.

    Raises:
        UserError: it is too short, or the file is not the user's alone, or can't be made.
    """
    given = os.environ.get(SECRET)
    if given is None:
        return _of_user()
    if len(given) < _SHORTEST:
        raise UserError(f"{SECRET} has {len(given)} characters: give at least {_SHORTEST} random ones")
    return given.encode()


def secret_file() -> Path:
    """Where the user's own secret is kept."""
    state = os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state"
    return Path(state) / "paradl" / "secret"


def _of_user() -> bytes:
    try:
        path = secret_file()
        if not path.is_symlink() and not path.exists():
            _make(path)
        return _read(path)
    except (OSError, RuntimeError) as error:
        raise UserError(
            f"no secret for these ranks ({error}): export {SECRET}=$(openssl rand -hex 32) before they start"
        ) from error


def _make(path: Path) -> None:
    """Make the file, whole or not at all; of ranks that do so at once one succeeds."""
    path.parent.mkdir(parents=True, exist_ok=True, mode=0o700)
    temporary = path.with_name(f".{secrets.token_hex(8)}.tmp")
    try:
        descriptor = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, new_secret().encode())
        finally:
            os.close(descriptor)
        # Not renamed: what another rank has made by now is kept. For a moment the file has two names; a rank that
        # reads it then finds it whole.
        with contextlib.suppress(FileExistsError):
            os.link(temporary, path)
    finally:
        with contextlib.suppress(OSError):
            temporary.unlink()


def _read(path: Path) -> bytes:
    descriptor = open_own(path, os.O_RDONLY)
    try:
        status = os.fstat(descriptor)
        if status.st_uid != os.geteuid() or status.st_mode & 0o077:
            raise UserError(f"{path} has to be a file of yours that nobody else can read: chmod 600, or remove it")
        content = os.read(descriptor, _LONGEST_FILE)
    finally:
        os.close(descriptor)
    if len(content) < _SHORTEST:
        raise UserError(f"{path} holds no secret: remove it, and the next run makes another")
    return content


def sealed(secret: bytes, name: str, value: bytes) -> bytes:
    """A value that only who knows the secret can read, and that counts for nothing under another name."""
    nonce = secrets.token_bytes(_NONCE_BYTES)
    hidden = _masked(secret, nonce, value)
    return nonce + hidden + _tag(secret, name, nonce + hidden)


def opened(secret: bytes, name: str, content: bytes) -> bytes:
    """The value that was sealed under a name.

    Raises:
        WorkError: whoever wrote it did not know the secret.
    """
    body, tag = content[:-_TAG_BYTES], content[-_TAG_BYTES:]
    if len(body) < _NONCE_BYTES or not hmac.compare_digest(tag, _tag(secret, name, body)):
        raise WorkError(
            "a process that is not of this run wrote where its ranks meet, or they have different secrets: export the"
            f" same {SECRET} for all of them"
        )
    return _masked(secret, body[:_NONCE_BYTES], body[_NONCE_BYTES:])


def _tag(secret: bytes, name: str, body: bytes) -> bytes:
    label = name.encode()
    return hmac.digest(secret, b"paradl tag %d " % len(label) + label + body, "sha256")


def _masked(secret: bytes, nonce: bytes, value: bytes) -> bytes:
    """The value combined with a stream that the secret and the nonce make; twice gives it back."""
    blocks = range(-(-len(value) // _BLOCK_BYTES))
    stream = b"".join(hmac.digest(secret, b"paradl mask %d " % block + nonce, "sha256") for block in blocks)
    return bytes(a ^ b for a, b in zip(value, stream, strict=False))
