"""Models by name: torchvision's, our own, language models, a ``config.json``, and ``package.module:factory``."""

from __future__ import annotations

import copy
import importlib
import traceback
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.terminal.command_line import say
from paradl_bench.core.working_directory import importing_from_working_directory
from paradl_bench.network.models.configurations import names_configuration, read_configuration
from paradl_bench.network.models.language_models import build_language_model
from paradl_bench.network.models.language_sizes import UNTIED, language_model_names, size_of
from paradl_bench.network.models.token_tasks import TokenTask
from paradl_bench.network.models.torchvision_import import fit_torchvision, import_torchvision_models

if TYPE_CHECKING:
    import torch

# Inception's smallest input, CosmoFlow's; every other classification model takes ImageNet's 224.
_INPUT_SHAPES = {"inception_v3": (3, 299, 299), "cosmoflow": (4, 128, 128, 128)}
_DEFAULT_INPUT_SHAPE = (3, 224, 224)
CLASSES = 1000


@dataclass(slots=True)
class LoadedModel:
    """A model ready to be traced or trained.

    Attributes:
        module: in training mode, random weights.
        task: of a model that reads token ids; None for one that reads numbers and gives classes.
        shape_is_guessed: whether neither the user nor the model said the input's shape.
    """

    name: str
    module: torch.nn.Module
    input_shape: tuple[int, ...]
    task: TokenTask | None = None
    shape_is_guessed: bool = False

    @property
    def input_remedy(self) -> str:
        """What would be right where the model does not run on its input; nothing where that is not known."""
        import torch

        embeds = any(isinstance(module, torch.nn.Embedding) for module in self.module.modules())
        if embeds and self.task is None:
            return (
                "; it seems to read token ids: set its token_task, as NextToken(vocabulary=..., sequence=...) of"
                ' paradl_bench.network.models.token_tasks (docs/extending.md, "A model")'
            )
        if self.shape_is_guessed:
            return (
                "; its input is unknown: give --input-shape (channels first, as 1x28x28, or the features, as 32),"
                " or set input_shape on the model"
            )
        return ""

    def say_guess(self) -> None:
        """Say which shape of a sample is taken where nobody gave one: the wrong one may cost minutes."""
        if self.shape_is_guessed:
            say(f"{self.name}: no --input-shape: {'x'.join(map(str, self.input_shape))} is taken")

    @property
    def input_dtype(self) -> str:
        """Of what the model reads, as a network names it: token ids, or numbers."""
        return "int64" if self.task else "fp32"

    def fresh(self, device: str) -> LoadedModel:
        """Another one with the same weights, which has not run, on a device."""
        return load_model(self.name, self.input_shape, device=device)

    def make_batch(self, batch: int, seed: int) -> tuple[torch.Tensor, torch.Tensor]:
        """Synthetic inputs (batch, *input_shape) and targets.

        Numbers are fp32, standard normal, with class targets (batch,), int64; token ids and their targets (batch,
        tokens) are int64.
        """
        import torch

        generator = torch.Generator().manual_seed(seed)
        if self.task:
            return self.task.make_batch(batch, self.input_shape, generator)
        inputs = torch.randn((batch, *self.input_shape), generator=generator)
        return inputs, torch.randint(0, self.classes, (batch,), generator=generator)

    @property
    def classes(self) -> int:
        """Number of classes that the synthetic targets are drawn from: the last linear layer's outputs."""
        import torch

        widths = [m.out_features for m in self.module.modules() if isinstance(m, torch.nn.Linear)]
        return min(widths[-1], CLASSES) if widths else 2

    def loss(self, outputs: Any, targets: torch.Tensor) -> torch.Tensor:
        """Cross-entropy of the first output tensor, with what follows the class dimension averaged away.

        Of token models the mean over all targets; logits are (batch, tokens, vocabulary).
        """
        import torch

        logits = first_tensor(outputs)
        if self.task:
            return torch.nn.functional.cross_entropy(logits.flatten(0, 1), targets.flatten())
        if logits.dim() > 2:
            logits = logits.flatten(2).mean(2)
        return torch.nn.functional.cross_entropy(logits, targets)


def first_tensor(outputs: Any) -> torch.Tensor:
    """The first tensor of a model's output, which may be a tuple, a dict or an object with ``logits``."""
    import torch

    if isinstance(outputs, torch.Tensor):
        return outputs
    candidates: list[Any] = []
    if isinstance(outputs, dict):
        candidates = list(outputs.values())
    elif isinstance(outputs, (tuple, list)):
        candidates = list(outputs)
    elif hasattr(outputs, "logits"):
        candidates = [outputs.logits]
    for value in candidates:
        if isinstance(value, torch.Tensor):
            return value
    raise UserError(f"the model's output is a {type(outputs).__name__} that holds no tensor; return the logits first")


def model_names() -> list[str]:
    """Names of torchvision's classification models, of our own, and of transformers' language models."""
    models = import_torchvision_models()
    return sorted([*models.list_models(module=models), *_OWN, *language_model_names()])


def _cosmoflow(input_shape: tuple[int, ...] | None) -> torch.nn.Module:
    from paradl_bench.network.models.cosmoflow import CosmoFlow

    try:
        return CosmoFlow(input_shape or _INPUT_SHAPES["cosmoflow"])
    except ValueError as error:
        raise UserError(str(error)) from None


# Built for the shape of a sample, which sets the width of their first dense layer.
_OWN: dict[str, Callable[[tuple[int, ...] | None], torch.nn.Module]] = {"cosmoflow": _cosmoflow}


def load_model(name: str, input_shape: tuple[int, ...] | None = None, *, device: str = "cpu") -> LoadedModel:
    """Build a model with random weights (seed 0), in training mode.

    Args:
        name: one of :func:`model_names`, the path of a Hugging Face ``config.json``, or ``package.module:factory`` (a
            callable without required arguments that returns an nn.Module; with an ``input_shape`` attribute on either,
            that is the default; a module with a ``token_task`` reads token ids). A module may stand in a factory's
            place; copies of it are taken.
        input_shape: of one sample; ``(tokens,)`` for a model that reads token ids; None for the model's default.
        device: ``meta`` builds it without memory, for tracing; models that compute with values while they are built
            (RegNet) can't be, and come on the CPU.

    Raises:
        UserError: unknown name, a configuration that is none, a factory that can't be imported, called, or returns no
            module, transformers missing where it builds the model, or a shape that the model does not take.
    """
    import torch

    try:
        module, own_shape = _build(name, input_shape, device)
    except RuntimeError:
        if device != "meta":
            raise
        module, own_shape = _build(name, input_shape, "cpu")
    if not isinstance(module, torch.nn.Module):
        raise UserError(f"{name} returned a {type(module).__name__}; a factory returns an nn.Module")
    for parameter, value in module.named_parameters():
        if torch.nn.parameter.is_lazy(value):
            raise UserError(
                f"model {name!r}: {parameter} has no shape yet: call the model once on an input before the factory"
                " returns it"
            )
    task: TokenTask | None = getattr(module, "token_task", None)
    if task:
        try:
            shape = task.input_shape(input_shape or own_shape)
        except UserError as error:
            raise UserError(f"model {name!r}: {error}") from None
    else:
        shape = input_shape or own_shape or _INPUT_SHAPES.get(name, _DEFAULT_INPUT_SHAPE)
    guessed = ":" in name and not (input_shape or own_shape or task)
    return LoadedModel(name=name, module=module.train(), input_shape=tuple(shape), task=task, shape_is_guessed=guessed)


def _build(name: str, input_shape: tuple[int, ...] | None, device: str) -> tuple[Any, tuple[int, ...] | None]:
    """A module, and the shape of a sample that it asks for, if it does."""
    import torch

    with torch.device(device), torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        if names_configuration(name):
            family, settings = read_configuration(name)
            return build_language_model(family, **settings), None
        if ":" in name:
            return _from_factory(name, device)
        if name in _OWN:
            return _OWN[name](input_shape), None
        size = size_of(name)
        if size is not None:
            tied = False if name.endswith(UNTIED) else None
            return build_language_model(size.family, tied=tied, **size.settings), None
        return _from_torchvision(name), None


def _from_torchvision(name: str) -> torch.nn.Module:
    models = import_torchvision_models()
    names = model_names()
    if name not in names:
        file = Path(name)
        if any(mark in name for mark in "/.") or file.is_dir():
            if file.is_dir():
                raise UserError(f"model {name!r} is a folder: give the config.json in it, as {file / 'config.json'}")
            raise UserError(f"model {name!r}: write a model of your own as MODULE:FACTORY, as {file.stem}:build_model")
        raise unknown_choice("model", name, names, listed_by="paradl-bench models")
    # Auxiliary classifiers give several outputs and losses; the papers' networks are measured without them.
    arguments: dict[str, Any] = {"weights": None}
    if name in ("googlenet", "inception_v3"):
        arguments |= {"aux_logits": False, "init_weights": False}
    built: torch.nn.Module = models.get_model(name, **arguments)
    return built


@importing_from_working_directory()
def _from_factory(name: str, device: str) -> tuple[Any, tuple[int, ...] | None]:
    import torch

    module_name, _, attribute = name.partition(":")
    # Before the user's module imports what fails where torchvision alone would.
    fit_torchvision()
    try:
        # What a file makes where it is imported is made once, and serves all devices.
        with torch.device("cpu"):
            module = importlib.import_module(module_name)
    except ImportError as error:
        raise UserError(
            f"model {name!r}: cannot import {module_name!r} from here or from the environment ({error})"
        ) from None
    except Exception as error:
        raise _failed(name, f"importing {module_name}", error) from error
    factory = getattr(module, attribute, None)
    if isinstance(factory, torch.nn.Module):
        return _copied(name, factory, device), _own_shape(factory)
    if not callable(factory):
        choices = [
            key
            for key, value in vars(module).items()
            if callable(value) and not key.startswith("_") and getattr(value, "__module__", None) == module.__name__
        ]
        if not choices:
            raise UserError(f"model {name!r}: {module_name} defines no function or class that could build a model")
        raise unknown_choice(f"factory in {module_name}", attribute, choices)
    try:
        built = factory()
    except TypeError as error:
        raise UserError(
            f"model {name!r}: calling {attribute}() failed: {error}; it is called without arguments"
        ) from None
    except UserError:
        raise
    except Exception as error:
        # What cannot be built without memory is built anew on the CPU.
        if device == "meta" and isinstance(error, RuntimeError):
            raise
        raise _failed(name, f"{attribute}()", error) from error
    return built, _own_shape(built) or _own_shape(factory)


def _failed(name: str, what: str, error: Exception) -> UserError:
    """What a user's own code raised, and the innermost line of it."""
    innermost = traceback.extract_tb(error.__traceback__)[-1]
    where = f"{Path(innermost.filename).name}, line {innermost.lineno}"
    return UserError(f"model {name!r}: {what} failed: {type(error).__name__}: {error} ({where}); --debug says more")


def _own_shape(holder: Any) -> tuple[int, ...] | None:
    shape = getattr(holder, "input_shape", None)
    return tuple(shape) if shape else None


def _copied(name: str, module: torch.nn.Module, device: str) -> torch.nn.Module:
    """A module like one that is there, which stays as it is."""
    import torch

    tensors: dict[int, torch.Tensor] = {}
    if device == "meta":
        # Moved there, a parameter that stands in two places would become two.
        tensors |= {id(held): torch.empty_like(held, device=device) for held in module.buffers()}
        for held in module.parameters():
            like = torch.empty_like(held, device=device, requires_grad=False)
            tensors[id(held)] = torch.nn.Parameter(like, requires_grad=held.requires_grad)
    try:
        return copy.deepcopy(module, tensors).to(device)
    except (RuntimeError, TypeError) as error:
        raise UserError(f"model {name!r} cannot be copied ({error}): give a function that builds it") from None
