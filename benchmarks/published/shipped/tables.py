"""Published tables as kernels and sweeps, by device; and what one kernel's time says of another's."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import msgspec

from paradl_bench.importers.catalog import importers
from paradl_bench.importers.importer import ImportOptions, NotOfFormat, load_file
from paradl_bench.network.kernel import KernelSamples, KernelStage
from paradl_bench.network.kinds.kernel_shape import kernel_shape, layer_of_sizes
from paradl_bench.network.kinds.kind import layer_kinds
from paradl_bench.records.samples import CollectiveSamples


@dataclass(frozen=True, slots=True, kw_only=True)
class Table:
    """Files of one publication.

    Attributes:
        name: of the publication. source, licence: of it.
        files: patterns below the data. reader: the importer. mapping: of an importer of operators.
        level: of sweeps that span nodes.
    """

    name: str
    source: str
    licence: str
    files: tuple[str, ...]
    reader: str = "operators"
    mapping: str | None = None
    level: str = "system"

    def paths(self, data: Path) -> list[Path]:
        """Its files; a FileNotFoundError where a pattern has none."""
        found = [sorted(data.glob(pattern)) for pattern in self.files]
        for pattern, paths in zip(self.files, found, strict=True):
            if not paths:
                raise FileNotFoundError(f"{data / pattern} is not here")
        return [path for paths in found for path in paths]


@dataclass(frozen=True, slots=True, kw_only=True)
class Device:
    """What a shipped profile is made of.

    Attributes:
        name: of the profile. sheet: of the device's data sheet. device_name: in tables of kernels.
        kernels, sweeps: its own tables. ranks_per_node, ranks: of the cluster that swept; 1 without one.
        borrows: by dtype, the devices whose kernels stand in for those that its tables lack, the first first.
        lacks: what no table has, in words.
    """

    name: str
    sheet: str
    device_name: str
    kernels: tuple[Table, ...]
    sweeps: tuple[Table, ...] = ()
    ranks_per_node: int = 1
    ranks: int = 1
    borrows: dict[str, tuple[str, ...]] = field(default_factory=dict)
    lacks: tuple[str, ...] = ()


def read_kernels(device: Device, table: Table, data: Path) -> list[KernelSamples]:
    """Kernels of a table on a device, fp16 ones as bf16 where autocast runs them in the lower dtype."""
    options = ImportOptions(device_name=device.device_name, mapping=table.mapping)
    found: list[KernelSamples] = []
    for path in table.paths(data):
        try:
            found += importers()[table.reader].read(load_file(path), options).kernels
        except NotOfFormat as error:
            if "holds no times of" not in str(error):
                raise
    return [each for record in found for each in _as_trained(record)]


def read_sweeps(table: Table, data: Path) -> list[CollectiveSamples]:
    """Calls of a table's sweeps."""
    options = ImportOptions(level=table.level, mapping=table.mapping)
    found: list[CollectiveSamples] = []
    for path in table.paths(data):
        found += importers()[table.reader].read(load_file(path), options).collectives
    return found


def _as_trained(record: KernelSamples) -> Iterable[KernelSamples]:
    """Peaks and bytes of fp16 and bf16 are alike; what autocast keeps in fp32 no fp16 time stands for."""
    if record.dtype != "fp16":
        return [record]
    kind = layer_kinds().get(record.shape.kind)
    if kind is None or kind.name == "embedding" or kind.autocast({**record.shape.settings}, "cuda") == "fp32":
        return []
    return [msgspec.structs.replace(record, dtype="bf16")]


def products_of(records: Sequence[KernelSamples]) -> list[KernelSamples]:
    """Forward products of linear layers as the products of equal extents that a backward pass makes.

    Of Y = X W, with X rows by depth and W depth by columns, the gradient of X multiplies (batch, out) by (out, in), and
    that of W (out, batch) by (batch, in). Adding up a bias' gradient weighs little: every second one counts as with it.
    """
    found = []
    forward = [each for each in records if (each.shape.kind, each.shape.stage) == ("linear", "FW")]
    for number, record in enumerate(forward):
        shape, bias = record.shape, number % 2
        rows, depth, columns = (shape.sizes[name] for name in ("batch", "in_features", "out_features"))
        of_input = {"batch": rows, "in_features": columns, "out_features": depth, "bias": bias}
        of_weight = {"batch": depth, "in_features": columns, "out_features": rows, "bias": bias}
        found += [*_relabelled(record, "linear", "BW_input", of_input)]
        found += [*_relabelled(record, "linear", "BW_weight", of_weight)]
    return found


def addmm_of(records: Sequence[KernelSamples]) -> list[KernelSamples]:
    """Linear layers as the product and sum in one that GPT-2 calls."""
    found: list[KernelSamples] = []
    for record in records:
        if record.shape.kind == "linear":
            sizes = {name: size for name, size in record.shape.sizes.items() if name != "bias"}
            found += _relabelled(record, "addmm", record.shape.stage, sizes)
    return found


def of_equal_bytes(records: Sequence[KernelSamples]) -> list[KernelSamples]:
    """Pointwise kernels of fp32 as those of bf16 on twice the elements: memory bounds both, and they move as much."""
    found: list[KernelSamples] = []
    for record in records:
        shape = record.shape
        if shape.kind in ("activation", "elementwise") and (shape.stage, record.dtype) == ("FW", "fp32"):
            doubled = {name: size * (1 + name.endswith("elements")) for name, size in shape.sizes.items()}
            lower = msgspec.structs.replace(record, dtype="bf16")
            found += _relabelled(lower, shape.kind, "FW", doubled, shape.settings)
    return found


def _relabelled(
    record: KernelSamples, kind: str, stage: KernelStage, sizes: dict[str, int], settings: dict[str, str] | None = None
) -> Iterable[KernelSamples]:
    made = layer_of_sizes(kind, sizes, settings or {"function": kind})
    shape = kernel_shape(made.layer, stage, made.batch, record.dtype)
    return [] if shape is None else [msgspec.structs.replace(record, shape=shape)]
