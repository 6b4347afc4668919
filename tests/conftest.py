"""Settings of the whole test suite."""

from __future__ import annotations

import os
import secrets
import signal

# Before torch is imported anywhere: tests that compute share the machine with others, and ranks take a core each.
os.environ.setdefault("OMP_NUM_THREADS", "1")
# Ranks that tests start as torchrun and srun do leave no secret in the user's home.
os.environ.setdefault("PARADL_SECRET", secrets.token_hex(32))

import pytest
from hypothesis import HealthCheck, settings

# No deadline: how long an example takes says nothing about whether it is right.
settings.register_profile("paradl", deadline=None, suppress_health_check=[HealthCheck.too_slow], print_blob=True)
settings.load_profile("paradl")

# A shell starts background jobs with SIGINT ignored, and so would be what the tests start and then interrupt.
signal.signal(signal.SIGINT, signal.default_int_handler)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the longest files: begun last, one would keep a worker busy while the other has nothing left."""

    def minutes(item: pytest.Item) -> float:
        marker = item.get_closest_marker("long")
        return float(marker.kwargs["minutes"]) if marker else 0.0

    items.sort(key=minutes, reverse=True)
