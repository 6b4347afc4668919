"""What besides dtype and shapes decides which kernels run: layout, compilation, modes of a GPU's libraries. Torch-free.

Times are keyed by the settings' label, so that unlike ones stand apart in a profile and are never added up together.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import msgspec

from paradl_bench.core.errors import UserError

_ON_A_GPU = ("tf32", "cudnn_benchmark")


class KernelSettings(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """The settings of one measurement.

    Attributes:
        channels_last: images and volumes, and the weights that are convolved with them, have their channels innermost.
        compile: torch.compile makes the kernels.
        cudnn_benchmark: cuDNN tries its algorithms on each shape and keeps the fastest.
        tf32: products and convolutions of fp32 round their operands to TensorFloat-32.
    """

    channels_last: bool = False
    compile: bool = False
    cudnn_benchmark: bool = False
    tf32: bool = False

    @property
    def label(self) -> str:
        """Names of those that are on (``channels_last+tf32``); empty where none is."""
        return "+".join(name for name in self.__struct_fields__ if getattr(self, name))

    def check(self, device: str) -> None:
        """Refuse what has no effect on a device.

        Raises:
            UserError: names the option.
        """
        for name in _ON_A_GPU:
            if device == "cpu" and getattr(self, name):
                raise UserError(f"{flag_of(name)} is a mode of GPUs: it has no effect with --device cpu")


NO_SETTINGS = KernelSettings()
"""No setting on."""


class KernelFlags(msgspec.Struct, frozen=True, kw_only=True):
    """Settings as options give them; None for what nobody gave."""

    channels_last: bool | None
    compile: bool | None
    tf32: bool | None
    cudnn_benchmark: bool | None

    @property
    def settings(self) -> KernelSettings:
        """What nobody gave is off."""
        return KernelSettings(**{name: bool(value) for name, value in msgspec.structs.asdict(self).items()})


def flag_of(name: str) -> str:
    """The option of a setting."""
    return f"--{name.replace('_', '-')}"


def flags_of_label(label: str) -> str:
    """The options that a label stands for (``--channels-last --tf32``); empty for none."""
    return " ".join(map(flag_of, label.split("+"))) if label else ""


def settings_of_label(label: str) -> KernelSettings:
    """The settings of a label.

    Raises:
        ValueError: a name that is none, one twice, or names in another order.
    """
    names = label.split("+") if label else []
    if unknown := [name for name in names if name not in KernelSettings.__struct_fields__]:
        known = ", ".join(KernelSettings.__struct_fields__)
        raise ValueError(f"kernel settings are of {known}, which {unknown[0]!r} is none of")
    settings = KernelSettings(**dict.fromkeys(names, True))
    if settings.label != label:
        raise ValueError(f"kernel settings {label!r} are written {settings.label!r}")
    return settings


def choose_label(given: Mapping[str, bool | None], measured: Iterable[str], model: str = "MODEL") -> str:
    """The label among those measured of a model that has what was given, on, off or None where nobody said.

    Raises:
        UserError: none of them has, or several do; the message lists them as options.
    """
    labels = sorted(set(measured))
    wanted = {name: value for name, value in given.items() if value is not None}
    if not labels:
        return KernelSettings(**wanted).label
    fitting = [
        label
        for label in labels
        if all(getattr(settings_of_label(label), name) == value for name, value in wanted.items())
    ]
    if len(fitting) == 1:
        return fitting[0]
    asked = " ".join(flag_of(name) if value else f"--no-{flag_of(name)[2:]}" for name, value in wanted.items())
    if not fitting:
        on = "".join(f"{flag_of(name)} " for name, value in wanted.items() if value)
        command = f"measure some: paradl-bench layers {model} --batch N {on}-o DIR, then calibrate fit"
        raise UserError(f"the profile holds no iterations with {asked}; it holds {_spelled(labels)}; {command}")
    raise UserError(f"the profile holds iterations {_spelled(fitting)}: say which by these options, or --no-...")


def _spelled(labels: Sequence[str]) -> str:
    words = (flags_of_label(label) or "without any setting" for label in labels)
    return ", ".join(f"with {word}" if word.startswith("--") else word for word in words)
