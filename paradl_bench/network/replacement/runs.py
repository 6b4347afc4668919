"""Which layers a replacement takes out of a network: runs in which each layer reads the one before alone."""

from __future__ import annotations

from collections.abc import Sequence
from fnmatch import fnmatchcase
from typing import NamedTuple

from paradl_bench.core.errors import UserError
from paradl_bench.network.graph import Layer, ModelGraph
from paradl_bench.network.replacement.written import Replacement


class Run(NamedTuple):
    """Layers that are taken out together, in forward order, for what a replacement puts there."""

    replacement: Replacement
    layers: tuple[Layer, ...]

    @property
    def named(self) -> str:
        """For a person: the first layer and the last."""
        first, last = self.layers[0].name, self.layers[-1].name
        return first if first == last else f"{first} to {last}"


def find_runs(network: ModelGraph, replacements: Sequence[Replacement]) -> tuple[Run, ...]:
    """Runs of layers whose names match a pattern, as long as each layer reads nothing but the one before.

    Operations that read no other layer, as those that count a batch norm's batches, are in no run.

    Raises:
        UserError: a pattern matches no layer, two match one, or a layer cannot be taken out: a loss, one that reads
            several tensors, one that others read in the middle of a run.
    """
    owners = _owners(network, replacements)
    runs: list[list[Layer]] = []
    ending: dict[tuple[int, str], list[Layer]] = {}
    for layer in network.layers:
        if layer.name not in owners:
            continue
        owner = owners[layer.name]
        _check_layer(layer, replacements[owner])
        run = ending.pop((owner, layer.values_read[0][0]), None)
        if run is None:
            runs.append(run := [])
        run.append(layer)
        ending[owner, layer.name] = run
    matching_runs = tuple(Run(replacements[owners[run[0].name]], tuple(run)) for run in runs)
    if len(owners) == len(network.layers):
        raise UserError(f"--replace: no layer of {network.name} stays: name fewer of them")
    for matched in matching_runs:
        _check_inside(matched, network)
    return matching_runs


def _owners(network: ModelGraph, replacements: Sequence[Replacement]) -> dict[str, int]:
    """The replacement of each layer that is taken out, by its index."""
    owners: dict[str, int] = {}
    for index, replacement in enumerate(replacements):
        matched = [layer.name for layer in network.layers if fnmatchcase(layer.name, replacement.pattern)]
        if not matched:
            named = ", ".join(layer.name for layer in network.layers[-5:-1])
            raise UserError(
                f"--replace {replacement.text!r}: no layer of {network.name} is named like {replacement.pattern!r};"
                f" its last are {named}, and paradl-bench describe {network.name} lists all"
            )
        twice = next((name for name in matched if name in owners), None)
        if twice:
            other = replacements[owners[twice]].text
            raise UserError(f"--replace {replacement.text!r}: layer {twice} is replaced by --replace {other!r} already")
        reading = [layer.name for layer in network.layers if layer.name in matched and layer.values_read]
        if not reading:
            raise UserError(f"--replace {replacement.text!r}: layer {matched[0]} reads no other layer, and has to stay")
        owners |= dict.fromkeys(reading, index)
    return owners


def _check_layer(layer: Layer, replacement: Replacement) -> None:
    reason = None
    if layer.kind == "loss":
        reason = "is the loss"
    elif len(layer.values_read) != 1:
        reason = f"reads {len(layer.values_read)} tensors: only layers that read one can be"
    elif layer.batchless or layer.batchless_inputs:
        reason = "reads or returns a tensor without the batch"
    elif layer.repeats:
        reason = "runs again in backward, by torch.utils.checkpoint"
    elif layer.handled:
        reason = "returns what the model's own code looks into"
    if reason:
        raise UserError(f"--replace {replacement.text!r}: layer {layer.name} is not replaced, since it {reason}")


def _check_inside(run: Run, network: ModelGraph) -> None:
    """Refuse a run of which others read more than the first tensor of its last layer."""
    names = [layer.name for layer in run.layers]
    last = names[-1]
    for reader in network.layers:
        if reader.name in names:
            continue
        values = {*reader.values_read, *((name, 0) for name in reader.inputs)}
        read = next((name for name, number in values if name in names and (name, number) != (last, 0)), None)
        if read:
            raise UserError(
                f"--replace {run.replacement.text!r}: layer {reader.name} reads {read}, which stands inside of what is"
                f" replaced, {run.named}: name layers that nothing else reads"
            )
    returned = next((name for name in network.outputs if name in names[:-1]), None)
    if returned:
        raise UserError(f"--replace {run.replacement.text!r}: the model returns {returned}, inside of {run.named}")
