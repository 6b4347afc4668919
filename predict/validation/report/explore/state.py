"""What a page of ``predict explore`` asks for: a search, factors on the hardware, and the row that is looked into."""

from __future__ import annotations

import shlex
from collections.abc import Mapping, Sequence
from typing import Annotated

import msgspec

from paradl_bench.core.bounds import MOST_RANKS
from paradl_bench.core.errors import UserError
from paradl_bench.core.units import LARGEST_FACTOR
from predict.what_if.quantities import DEVICE

_MOST_BATCH = 2**40
_RIGHT = {
    "ranks": f"a whole number from 1 to {MOST_RANKS:,}",
    "batch": f"a whole number from 1 to {_MOST_BATCH:,}",
    "memory": "a size, such as 80GiB",
}
"""What a person types, by the field's name."""
_Name = Annotated[str, msgspec.Meta(max_length=1000)]
_Factor = Annotated[float, msgspec.Meta(ge=1 / LARGEST_FACTOR, le=LARGEST_FACTOR)]
SLIDERS = ("bandwidth", "latency", "peak_flops", "memory_bandwidth")


class Searched(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What a search needs: options of ``predict search``.

    Attributes:
        profile: the number of one of the profiles that the command was given.
        memory: of a device, as 80GiB; empty for that of the cluster. dtype: empty for that of the profile.
    """

    profile: Annotated[int, msgspec.Meta(ge=0, le=1000)] = 0
    model: _Name
    ranks: Annotated[int, msgspec.Meta(ge=1, le=MOST_RANKS)]
    batch: Annotated[int, msgspec.Meta(ge=1, le=_MOST_BATCH)]
    memory: _Name = ""
    dtype: _Name = ""

    def options(self) -> dict[str, object]:
        """Keywords of ``predict search``; what is empty is left out."""
        given = {"memory": self.memory, "dtype": self.dtype}
        asked: dict[str, object] = {"model": self.model, "ranks": self.ranks, "batch": self.batch}
        return asked | {name: text for name, text in given.items() if text}


class Changed(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """What is changed of the hardware, as ``predict what-if --vary`` does: factors, and another device by its name."""

    device: _Name = ""
    bandwidth: _Factor = 1.0
    latency: _Factor = 1.0
    peak_flops: _Factor = 1.0
    memory_bandwidth: _Factor = 1.0

    def setting(self) -> dict[str, float | str]:
        """Those that change something, by the names of ``--vary``."""
        # A command shows 0.3, not 0.30000000000000004, and says what is predicted.
        factors = {name.replace("_", "-"): float(f"{getattr(self, name):.6g}") for name in SLIDERS}
        changed: dict[str, float | str] = {name: factor for name, factor in factors.items() if factor != 1.0}
        return changed | ({DEVICE: self.device} if self.device else {})


class Asked(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A row of a search, on changed hardware.

    Attributes:
        found_on: the hardware that the search is for. changed: that its rows are predicted on.
        row: from 0, in the order of the search.
        whole: whether to search all candidates, even if a search on other hardware can be followed.
    """

    search: Searched
    found_on: Changed = Changed()
    changed: Changed = Changed()
    row: Annotated[int, msgspec.Meta(ge=0, le=10_000)] = 0
    whole: bool = False


def decode(content: bytes) -> Asked:
    """What a page sent.

    Raises:
        UserError: it is no such request.
    """
    try:
        return msgspec.json.decode(content, type=Asked)
    except (msgspec.DecodeError, UnicodeDecodeError) as error:
        field = str(error).rpartition("`$.search.")[2].removesuffix("`")
        right = _RIGHT.get(field)
        raise UserError(f"{field}: give {right}" if right else f"bad request: {error}") from None


def commands(words: Sequence[str], changed: Changed) -> tuple[str, str]:
    """The command and the Python that predict the same.

    Args:
        words: of ``predict``, as the search says them: each option with its value.
    """
    given = dict(zip(words[1::2], words[2::2], strict=True))
    varied = [f"{name}={value}" for name, value in changed.setting().items()]
    if not varied:
        return shlex.join(words), _python("predict", given)
    grid = len(varied) > 1
    options = [*(word for text in varied for word in ("--vary", text)), *(["--grid"] if grid else [])]
    python = _python("what_if", given, {"vary": varied, **({"grid": True} if grid else {})})
    return shlex.join(["predict", "what-if", *words[1:], *options]), python


def _value(text: str) -> object:
    """A number where the text is one, as 1.5 is and 80GiB is not."""
    if text.isdecimal():
        return int(text)
    try:
        return float(text)
    except ValueError:
        return text


def _python(method: str, given: Mapping[str, str], more: Mapping[str, object] | None = None) -> str:
    keywords: dict[str, object] = {
        name.removeprefix("--").replace("-", "_"): _value(text) for name, text in given.items()
    }
    profile, model, strategy = (keywords.pop(name) for name in ("from_profile", "model", "strategy"))
    words = [
        repr(model),
        repr(strategy),
        *(f"{name}={value!r}" for name, value in (keywords | (dict(more or {}))).items()),
    ]
    return f"from predict import load_profile\n\nload_profile({profile!r}).{method}({', '.join(words)})"
