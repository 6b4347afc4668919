"""Values that ranks tell each other beside what is measured, in MessagePack, read as a type: nothing in it can run.

torch's own exchanges of objects unpickle what another process sent, which runs whatever code that process likes.
"""

from __future__ import annotations

import pickle  # nosec B403  # only to refuse what torch would unpickle
from typing import Any

import msgspec
import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d

from paradl_bench.core.errors import WorkError

Group = dist.ProcessGroup | None


def share_value(value: object, of: Any, group: Group, device: str | torch.device) -> Any:
    """The value of a group's rank 0, on every rank.

    Raises:
        WorkError: what arrived is not of that type.
    """
    # JSON has no infinity and no NaN, which a time or a loss may be.
    content = msgspec.msgpack.encode(value) if dist.get_rank(group) == 0 else b""
    size = torch.tensor([len(content)], device=device)
    dist.broadcast(size, group=group, group_src=0)
    message = _message(content, int(size), device)
    dist.broadcast(message, group=group, group_src=0)
    return _read(message, of)


def gather_values(value: object, of: Any, group: Group, device: str | torch.device) -> list[Any]:
    """Every rank's value, in the order of ranks, on every rank.

    Raises:
        WorkError: as of :func:`share_value`.
    """
    content = msgspec.msgpack.encode(value)
    sizes = [torch.zeros(1, dtype=torch.int64, device=device) for _ in range(dist.get_world_size(group))]
    dist.all_gather(sizes, torch.tensor([len(content)], device=device), group)
    longest = max(map(int, sizes))
    messages = [_message(b"", longest, device) for _ in sizes]
    dist.all_gather(messages, _message(content, longest, device), group)
    return [_read(message[: int(size)], of) for message, size in zip(messages, sizes, strict=True)]


def _message(content: bytes, size: int, device: str | torch.device) -> torch.Tensor:
    """Bytes as a tensor of a size, with zeros behind them."""
    return torch.frombuffer(bytearray(content.ljust(size, b"\0")), dtype=torch.uint8).to(device)


def _read(message: torch.Tensor, of: Any) -> Any:
    try:
        return msgspec.msgpack.decode(message.cpu().numpy().tobytes(), type=of)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        raise WorkError(f"a rank sent what is no {of}: {error}") from error


class _NoObjects(pickle.Unpickler):
    """Reads the numbers, texts and lists of a pickle; a class or function, by which it could run code, is refused."""

    def find_class(self, module: str, name: str) -> Any:
        raise WorkError(f"another rank sent torch {module}.{name}, and this program unpickles plain values alone")


def unpickle_plain_values_alone() -> None:
    """Have torch's own exchanges of objects among ranks, of which this program uses none, run no code."""
    vars(distributed_c10d)["_unpickler"] = _NoObjects
