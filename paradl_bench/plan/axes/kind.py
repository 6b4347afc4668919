"""What the ``axis.py`` of each strategy folder declares as ``AXIS``: the one interface of a kind of axis. Light.

An axis is asked what it does by its traits; only its own folder knows it by name.
"""

from __future__ import annotations

import importlib
import importlib.util
from dataclasses import dataclass
from enum import Enum
from functools import cache
from typing import TypeVar

from paradl_bench.plan.axes.options import AxisOptions

T = TypeVar("T")


class Trait(Enum):
    """What an axis does, as far as others have to know."""

    DIVIDES_BATCH = "ranks along it compute different samples"
    REPLICATES = "ranks hold the same parameters, see other samples or parts of them, and exchange gradients"
    STAGES = "layers are parted into stages that micro-batches pass through in turn"
    SHARDS_LAYERS = "ranks run parts of the same layers"
    CUTS_POSITIONS = "of a sharded layer ranks compute blocks of positions"
    SPLITS_OUTPUTS = "of a sharded layer ranks compute some outputs, which are gathered behind it"
    SPLITS_INPUTS = "of a sharded layer ranks read some inputs; what they make of them is summed"
    CUTS_FEATURES = "of a sharded layer ranks compute some heads or features, of all its tokens"
    CUTS_TOKENS = "of a sharded layer ranks compute some tokens, of whatever part of it they hold"
    CUTS_EXPERTS = "of a sharded layer ranks hold some experts, and run these on rows that others send them"
    SENDS_AS_COMPUTED = "activations go from rank to rank in the dtype that they were computed in, as planned"

    # Members are single, and asked for in every loop over axes; Enum's own hash is a call of Python.
    __hash__ = object.__hash__


IN_TURN = (Trait.CUTS_FEATURES, Trait.CUTS_TOKENS, Trait.CUTS_EXPERTS)
"""What axes that shard the same layers have one each of, in the order in which each shards what comes of the last."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prefix:
    """A number that may stand in front of an axis in strategy strings: ``z3d8``.

    Attributes:
        letter: in front of the number. most: the largest number, up to 9; 0 is as good as no prefix.
        what: it counts, for messages: ``ZeRO stage``.
    """

    letter: str
    most: int
    what: str


@dataclass(frozen=True, slots=True, kw_only=True)
class AxisKind:
    """A kind of axis.

    Attributes:
        name: as in ``d+f`` spelt out, and in messages: ``data``.
        letter: in strategy strings.
        package: the dotted folder, in which further modules are found by :meth:`beside`.
        order: in which kinds are listed and searched; those of equal order by name.
        dims: that an axis may cut at most, as ``s2x2`` does two.
        prefix: a number that may stand in front of the letter.
        distsim: the letter in strings as ``2M4P1D``; empty where these have none.
        traits: what it does.
        options: structs of its options; several kinds may list one.
        operations: of collectives, which have to be swept for it beside those of every strategy.
        cut_less: what a user may do to have it cut less of a model, for messages.
    """

    name: str
    letter: str
    package: str
    order: int = 100
    dims: int = 1
    prefix: Prefix | None = None
    distsim: str = ""
    traits: frozenset[Trait] = frozenset()
    options: tuple[type[AxisOptions], ...] = ()
    operations: tuple[str, ...] = ()
    cut_less: str = ""

    def has(self, trait: Trait) -> bool:
        """Whether the kind has a trait."""
        return trait in self.traits

    @property
    def example(self) -> str:
        """An axis of four ranks, as one is written."""
        return f"{self.letter}{'2x2' if self.dims > 1 else 4}"

    def beside(self, module: str, attribute: str, wanted: type[T]) -> T | None:
        """What a module in the axis' folder declares; None without such a module. It is imported here and not before.

        Raises:
            TypeError: it is not of the type asked for.
        """
        entry = _declared_in(f"{self.package}.{module}", attribute)
        if entry is None or isinstance(entry, wanted):
            return entry
        raise TypeError(f"{self.package}.{module}: {attribute} is no {wanted.__name__}")


@cache
def _declared_in(module: str, attribute: str) -> object | None:
    # A folder may lack the module; one whose import fails is broken, and that is never passed over.
    if importlib.util.find_spec(module) is None:
        return None
    return getattr(importlib.import_module(module), attribute, None)
