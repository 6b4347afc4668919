"""Proof that the processes behind a group's connections are the ranks of this run.

gloo takes whoever connects first with the number that it waits for, and any user of the host can connect. So each rank
challenges every other one, over the connection that data will take, and checks the answer against the run's key.
"""

from __future__ import annotations

import hmac
import secrets
from typing import TYPE_CHECKING, Any

from paradl_bench.core.errors import WorkError

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

_CHALLENGE_BYTES = 16
# The key of the run that this process has joined; none before it joins, and where it has left.
_keys: list[bytes] = []


def use_run_key(key: bytes | None) -> None:
    """Set the key that proofs are made with from now on; None when the run is left."""
    _keys[:] = [] if key is None else [key]


def prove_ranks(group: ProcessGroup) -> None:
    """Have all ranks of a gloo group prove themselves to each other; a collective. Other backends are left alone.

    Raises:
        WorkError: a process that does not know the run's key holds the place of a rank.
    """
    import torch.distributed as dist

    # What torch gives to a process that is not in the group is a number.
    if not _keys or not isinstance(group, dist.ProcessGroup) or dist.get_backend(group) != "gloo":
        return
    rank, size = dist.get_rank(group), dist.get_world_size(group)
    asked = [secrets.token_bytes(_CHALLENGE_BYTES) for _ in range(size)]
    received = _all_to_all(group, asked)
    answers = _all_to_all(group, [_answer(rank, peer, received[peer]) for peer in range(size)])
    for peer, answer in enumerate(answers):
        if not hmac.compare_digest(answer, _answer(peer, rank, asked[peer])):
            raise WorkError(
                f"a process outside of this run answered instead of rank {dist.get_global_rank(group, peer)}"
            )


def _answer(prover: int, verifier: int, challenge: bytes) -> bytes:
    return hmac.digest(_keys[0], b"paradl rank %d to %d " % (prover, verifier) + challenge, "sha256")


def _all_to_all(group: ProcessGroup, messages: list[bytes]) -> list[bytes]:
    """What every rank sent to this one, for what this one sends to each; all are equally long."""
    import torch

    sent = torch.frombuffer(bytearray(b"".join(messages)), dtype=torch.uint8)
    received = torch.empty_like(sent)
    # gloo sends each part over the connection to the rank that it is for. The backend is called itself: whoever records
    # what a strategy issues is not to see it.
    backend: Any = group._get_backend(torch.device("cpu"))
    backend.alltoall_base(received, sent, [], []).wait()
    content, size = bytes(received.tolist()), len(messages[0])
    return [content[at : at + size] for at in range(0, len(content), size)]
