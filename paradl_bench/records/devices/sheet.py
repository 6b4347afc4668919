"""Device sheets: what a maker says of a GPU. Nobody reaches these numbers; ratios of two sheets are what is used."""

from __future__ import annotations

from functools import cache
from pathlib import Path

import msgspec

from paradl_bench.core.bounds import PositiveEstimatedBytes, PositiveRate, Ranks
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.files.storage import read_json

_FOLDER = "sheets"
_WITHOUT_SOURCE = ("name", "device_names", "note", "sources")


class DeviceSheet(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """One GPU.

    Attributes:
        device_names: as its driver calls it, and so a measurement of it.
        peak_flops: FLOP/s by dtype, without sparsity; ``tf32`` is of fp32 products that round to it.
        memory_bytes: of which a driver keeps a part.
        device_link_bytes_per_s: to other GPUs of the node (NVLink, Infinity Fabric), one way, all links together; None
            without such links.
        host_link_bytes_per_s: to the host (PCI Express, or NVLink-C2C), one way.
        usual_nic_bytes_per_s: of the network adapters of usual nodes, one way, for each GPU.
        note: what else is to be known of it.
        sources: for each other field with a number, where it is from.
    """

    name: str
    device_names: tuple[str, ...]
    peak_flops: dict[str, PositiveRate]
    memory_bytes: PositiveEstimatedBytes
    memory_bandwidth_bytes_per_s: PositiveRate
    l2_cache_bytes: PositiveEstimatedBytes
    multiprocessors: Ranks
    device_link_bytes_per_s: PositiveRate | None = None
    host_link_bytes_per_s: PositiveRate
    usual_nic_bytes_per_s: PositiveRate | None = None
    note: str = ""
    sources: dict[str, str]

    def __post_init__(self) -> None:
        given = {name for name in self.__struct_fields__ if getattr(self, name) is not None}
        if set(self.sources) != given.difference(_WITHOUT_SOURCE):
            raise ValueError(f"device {self.name!r} needs a source for each of its numbers, and for nothing else")

    def peak(self, dtype: str, *, tf32: bool = False) -> float:
        """FLOP/s in a dtype.

        Raises:
            UserError: the maker states none.
        """
        used = "tf32" if tf32 and dtype == "fp32" else dtype
        if used not in self.peak_flops:
            raise UserError(f"{self.name} has no peak in {used}; it has {', '.join(self.peak_flops)}")
        return self.peak_flops[used]


@cache
def device_sheets() -> dict[str, DeviceSheet]:
    """Every sheet by its name, in order."""
    folder = Path(__file__).parent / _FOLDER
    sheets = [read_json(path, DeviceSheet) for path in sorted(folder.glob("*.json"))]
    return {sheet.name: sheet for sheet in sheets}


def device_sheet(name: str) -> DeviceSheet:
    """The sheet of a device; a UserError of an unknown name, which tells those that are known."""
    if name not in device_sheets():
        raise unknown_choice("device", name, list(device_sheets()))
    return device_sheets()[name]


def sheet_of_measured(device_name: str) -> DeviceSheet | None:
    """The sheet of a device as its driver calls it; None of one that the catalogue lacks."""
    return next((sheet for sheet in device_sheets().values() if device_name in sheet.device_names), None)
