"""How fast the host is at the moment: a kernel that never changes, timed around every sample of a sweep.

A core of a shared machine changes its speed by a half within a tenth of a second: with what another guest runs on the
core's other thread, with the clock that all cores together allow. Kernels next to each other in time slow down alike.
"""

from __future__ import annotations

import itertools

import torch

from paradl_bench.ranks.clocks import Clock

_SIZE = 128
_CALLS = 3


class HostPace:
    """Times a product of matrices that stay in the second-level cache, a quarter of a millisecond or so."""

    def __init__(self, clock: Clock) -> None:
        self.taken_s: list[float] = []
        self._clock = clock
        self._first, self._second, self._product = (torch.ones(_SIZE, _SIZE) for _ in range(3))

    def take(self) -> None:
        """Time it once more; a call before brings its matrices back into the cache."""
        torch.mm(self._first, self._second, out=self._product)
        begin = self._clock.stamp()
        for _ in range(_CALLS):
            torch.mm(self._first, self._second, out=self._product)
        self.taken_s.append(self._clock.seconds(begin, self._clock.stamp()))

    def around(self, samples: int, stages: int) -> list[tuple[float, ...]]:
        """By stage, of each sample the mean of what was taken right before and right after it.

        Stages of one sample follow each other, then those of the next one; one more was taken at the end.
        """
        taken = self.taken_s
        assert len(taken) == samples * stages + 1
        means = [(before + after) / 2 for before, after in itertools.pairwise(taken)]
        return [tuple(means[stage::stages]) for stage in range(stages)]
