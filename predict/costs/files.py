"""What a prediction is made from: profile, network and cluster files, and the choices that follow from them."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path

import msgspec

from calibrate.profile.profile import LayerTime, ModelTime, Profile
from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.files.documents import foreign_document, validation_text
from paradl_bench.core.files.yaml_file import read_yaml
from paradl_bench.network.graph import ModelGraph, read_network
from paradl_bench.network.kinds.check import check_layers
from paradl_bench.network.models.configurations import names_configuration
from paradl_bench.network.models.language_sizes import size_of
from paradl_bench.network.models.traced_networks import traced_models, traced_network
from paradl_bench.records.cluster import ClusterFile
from paradl_bench.records.kernel_settings import flag_of


def read_cluster(path: str | os.PathLike[str]) -> ClusterFile:
    """A cluster file (YAML); a UserError of one that is unreadable, or of a wrong field, named by its path."""
    raw = read_yaml(Path(path), "cluster file")
    try:
        cluster = msgspec.convert(raw, ClusterFile, strict=False)
        # Half a surrogate pair is text to YAML, and no file can hold it.
        msgspec.json.encode(cluster)
    except (msgspec.ValidationError, UnicodeEncodeError, RecursionError) as error:
        foreign = foreign_document(raw, "cluster")
        raise UserError(
            f"cluster {path}: {f'it is {foreign}' if foreign else validation_text(error, ClusterFile)}"
        ) from None
    return cluster


def choose_network(
    profile: Profile, model: str, path: Path | None, profile_path: Path, sequence: int | None = None
) -> ModelGraph:
    """The network of a model: from a file, else as profiled, else as it comes with the tool or is traced now.

    Args:
        sequence: tokens of a sample; None for as many as the profile's network has, or the configuration says.

    Raises:
        UserError: neither profile nor configurations hold the model (names those that the profile holds), the file
            describes another one, a layer is not as its kind needs it, or the configuration is none.
    """
    place = f"profile {profile_path}"
    # All of them: what the others' layers took is looked at too.
    for name, held in profile.network.items():
        check_layers(held, f"{place}, network {name!r}")
    if path is not None:
        if sequence is not None:
            raise UserError(
                "--sequence and --network exclude each other: the network file says how many tokens a sample has; leave"
                " --sequence out"
            )
        network = read_network(path)
        if network.name != model:
            raise UserError(f"network {path} describes {network.name!r}, not {model!r}: give --model {network.name}")
        check_layers(network, f"network {path}")
        return network
    known = profile.network.get(model)
    # Layers that were imported have no shapes.
    if known is not None and sequence in (None, *known.input_shape[-1:]):
        return known
    if names_configuration(model) or size_of(model) is not None:
        shipped = traced_network(model)
        of_length = shipped is not None and sequence in (None, *shipped.input_shape[-1:])
        return shipped if shipped is not None and of_length else _traced(model, sequence)
    if known is not None:
        samples = f"samples of {known.input_shape[-1]}" if known.input_shape else "samples of unknown shape"
        raise UserError(
            f"--sequence {sequence}: {place} holds {model} with {samples}; for another length give a config.json"
            f" as the model, or --network FILE from: paradl-bench describe {model} --sequence {sequence} -o FILE"
        )
    shipped = traced_network(model)
    if shipped is None:
        known_models = [*profile.network, *traced_models()]
        unknown = unknown_choice("model", model, known_models, listed_by="paradl-bench models")
        # Who has measured may want to measure this one too.
        add = "" if profile.published else f"; add it: paradl-bench layers {model} --batch N -o DIR, then calibrate fit"
        those = "" if profile.published else f"; {place} holds {', '.join(sorted(profile.network)) or 'no model'}"
        raise UserError(f"{unknown}{those}{add}; or give --network FILE from: paradl-bench describe {model} -o FILE")
    if sequence is not None:
        raise UserError(f"--sequence {sequence}: {model} does not read tokens: leave it out")
    return shipped


def _traced(model: str, sequence: int | None) -> ModelGraph:
    """The network of a model that a configuration describes. Nothing else that predicts loads torch."""
    try:
        from paradl_bench.measure.tracing.tracing import trace_network
        from paradl_bench.network.models.catalog import load_model
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        raise UserError(
            f"model {model!r} is built by torch, which is not installed: pip install 'paradl[bench,transformers]', or"
            " give --network, which paradl-bench describe writes"
        ) from None
    return trace_network(load_model(model, None if sequence is None else (sequence,), device="meta"))


def of_kernel_settings(profile: Profile, label: str) -> Profile:
    """The profile with those times alone that were measured with the settings of a label.

    Regressors are of kernels without any.

    Raises:
        UserError: it holds iterations, and none with these.
    """
    times: tuple[LayerTime | ModelTime, ...] = (*profile.layer_times, *profile.model_times, *profile.shard_times)
    if all(time.kernel_settings == label for time in times):
        return profile if not label else msgspec.structs.replace(profile, kernel_models=())
    times_of = {
        name: tuple(time for time in getattr(profile, name) if time.kernel_settings == label)
        for name in ("layer_times", "model_times", "shard_times")
    }
    if profile.model_times and not times_of["model_times"]:
        flags = "".join(f"{flag_of(name)} " for name in label.split("+") if name)
        what = f"with {flags}".rstrip() if flags else "without kernel settings"
        raise UserError(
            f"the profile holds no iterations {what}; measure some: paradl-bench layers MODEL --batch N {flags}-o DIR"
        )
    return msgspec.structs.replace(profile, **times_of, **({"kernel_models": ()} if label else {}))


def choose_measured(what: str, given: str | None, measured: Iterable[str], default: str) -> str:
    """What was given, else the only one that was measured, else the default where that was measured.

    Raises:
        UserError: several were measured and the default is none of them.
    """
    choices = sorted(set(measured))
    if given is not None:
        return given
    if len(choices) == 1:
        return choices[0]
    if choices and default not in choices:
        raise UserError(f"the profile holds several {what}s ({', '.join(choices)}): say which by --{what}")
    return default
