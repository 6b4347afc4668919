"""What an operation reads where its output is cut by tokens; what mixes tokens is refused. Torch-free."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import msgspec

from paradl_bench.network.graph import RETURNS_INPUT, Layer
from paradl_bench.strategies.tensor.cuts import CannotCut, Cut, cuts_of_inputs

Shape = tuple[int, ...]
Cuts = tuple[Cut | None, ...]


def cuts_by_token(layer: Layer, cut: Cut, parameters: Mapping[str, Shape]) -> Cuts:
    """Per tensor that the layer reads, the dim that is cut; None for what it reads whole.

    Args:
        parameters: shapes of the network's, by name.

    Raises:
        CannotCut: it mixes tokens.
    """
    if layer.attributes.get(RETURNS_INPUT):
        return (cut,) * len(layer.input_shapes)
    if layer.kind == "attention":
        return _attention(layer, cut)
    if layer.kind in ("matmul", "mm") and layer.parameters:
        return _by_matrix(layer, cut, parameters)
    rule = _RULES.get(layer.kind) or _BY_FUNCTION.get(str(layer.attributes.get("function")))
    if rule is not None:
        return rule(layer, cut)
    return _whole_pieces(layer, cuts_of_inputs(layer, cut))


def _whole_pieces(layer: Layer, inputs: Cuts) -> Cuts:
    if any(needed is not None and needed.sections != 1 for needed in inputs):
        raise CannotCut(f"{layer.name} ({layer.attributes.get('function', layer.kind)}), which parts it")
    return inputs


def _attention(layer: Layer, cut: Cut) -> Cuts:
    """Queries by token; keys and values of all tokens; of a mask the rows."""
    if layer.attributes["function"] != "scaled_dot_product_attention" or cut.dim != -2:
        raise CannotCut(f"{layer.name} ({layer.kind}), along another dim than its queries")
    masks = [None if len(shape) < 2 or shape[-2] == 1 else cut for shape in layer.input_shapes[3:]]
    return (cut, None, None, *masks)


def _by_matrix(layer: Layer, cut: Cut, parameters: Mapping[str, Shape]) -> Cuts:
    shapes = [parameters.get(name) for name in layer.parameters]
    features = layer.input_shapes[0][-1], layer.output_shape[-1]
    if len(layer.input_shapes) != 1 or shapes != [features]:
        raise CannotCut(f"{layer.name} ({layer.kind}), a product with all of it")
    return _by_features(layer, cut)


def _by_features(layer: Layer, cut: Cut) -> Cuts:
    if cut.dim == -1 or len(layer.input_shapes) != 1:
        raise CannotCut(f"{layer.name} ({layer.kind}), a product over it")
    return (cut,)


def _addmm(layer: Layer, cut: Cut) -> Cuts:
    if layer.attributes["weights"] != "sum-second":
        raise CannotCut(f"{layer.name} ({layer.kind}), whose weights come first")
    return _by_features(layer, cut)


def _norm(layer: Layer, cut: Cut) -> Cuts:
    size = layer.attributes["size"]
    if layer.attributes["function"] not in ("layer_norm", "rms_norm") or not isinstance(size, tuple):
        raise CannotCut(f"{layer.name} ({layer.attributes['function']}), whose statistics go over it")
    if -cut.dim <= len(size):
        raise CannotCut(f"{layer.name} ({layer.attributes['function']}), whose statistics go over it")
    return (cut,)


def _embedding(layer: Layer, cut: Cut) -> Cuts:
    if cut.dim == -1 or len(layer.input_shapes) != 1:
        raise CannotCut(f"{layer.name} ({layer.kind}), along its features")
    return (Cut(cut.dim + 1),)


def _reduction(layer: Layer, cut: Cut) -> Cuts:
    """Along dims behind the one that is cut; dims of the call count the batch, shapes leave it out."""
    given, dims = layer.attributes["dim"], len(layer.input_shapes[0])
    named = given if isinstance(given, tuple) else (given,)
    # Without a name, or along the first dim, it is over all samples.
    over = {-dims - 1 if not isinstance(dim, int) else dim if dim < 0 else dim - dims - 1 for dim in named}
    needed = cut if layer.attributes["keepdim"] else Cut(cut.dim - len(over))
    if any(dim <= needed.dim for dim in over):
        raise CannotCut(f"{layer.name} ({layer.attributes['function']}), which sums over it")
    return (needed,)


def _view(layer: Layer, cut: Cut) -> Cuts:
    """As of any cut; one dim may be taken out behind the one that is cut too."""
    dims = layer.attributes.get("dims")
    if layer.attributes["function"] in ("unbind", "select") and isinstance(dims, tuple) and dims[0] >= cut.dim:
        return (Cut(cut.dim - 1),)
    return _whole_pieces(layer, cuts_of_inputs(layer, cut))


def _along_another(layer: Layer, cut: Cut) -> Cuts:
    """What works along one dim, and leaves it or takes it out: largest numbers, gathers, sums up to each place."""
    along, function, dims = _dim_along(layer), layer.attributes.get("function"), len(layer.output_shape)
    if along is None:
        raise CannotCut(f"{layer.name} ({function}), along which dim is not known")
    taken_out = len(layer.input_shapes[0]) - dims
    if taken_out not in (0, 1) or layer.parameters:
        raise CannotCut(f"{layer.name} ({function}), which needs all of it")
    needed = Cut(cut.dim - 1) if taken_out and cut.dim <= along else cut
    if needed.dim == along:
        raise CannotCut(f"{layer.name} ({function}), which works along it")
    for shape in layer.input_shapes:
        if len(shape) < -needed.dim or shape[needed.dim] != layer.output_shape[cut.dim]:
            raise CannotCut(f"{layer.name} ({function}), whose operands do not line up")
    return (needed,) * len(layer.input_shapes)


def _dim_along(layer: Layer) -> int | None:
    """Older networks tell it by the one dim that differs."""
    if layer.along is not msgspec.UNSET:
        return layer.along
    shape = layer.input_shapes[0]
    pairs = zip(reversed(shape), reversed(layer.output_shape), strict=False)
    differing = [at for at, (one, other) in enumerate(pairs, 1) if one != other]
    return -differing[0] if len(differing) == 1 and len(shape) == len(layer.output_shape) else None


def _more_behind(layer: Layer, cut: Cut) -> Cuts:
    """A further dim behind the others, of what each number stands for."""
    if cut.dim == -1 or len(layer.input_shapes) != 1 or layer.input_shapes[0] != layer.output_shape[:-1]:
        raise CannotCut(f"{layer.name} ({layer.attributes.get('function')}), which needs all of it")
    return (Cut(cut.dim + 1),)


def _pairs_behind(layer: Layer, cut: Cut) -> Cuts:
    """One number of the two that lie along the last dim."""
    return (Cut(cut.dim - 1),)


def _by_element(layer: Layer, cut: Cut) -> Cuts:
    """Sums with a parameter, which is broadcast or read by token; conversions; copies into a tensor."""
    if layer.attributes.get("function") == "setitem":
        raise CannotCut(f"{layer.name} (setitem), which writes to a part of it")
    return cuts_of_inputs(msgspec.structs.replace(layer, kind="elementwise", parameters=()), cut)


_RULES: dict[str, Callable[[Layer, Cut], Cuts]] = {
    "linear": _by_features,
    "addmm": _addmm,
    "norm": _norm,
    "embedding": _embedding,
    "reduction": _reduction,
    "view": _view,
    "elementwise": _by_element,
    "assign": _by_element,
}
_BY_FUNCTION: dict[str, Callable[[Layer, Cut], Cuts]] = {
    **dict.fromkeys(("argsort", "cumsum", "gather", "max", "min", "scatter", "sort", "topk"), _along_another),
    **dict.fromkeys(("bitwise_not", "bool", "int", "invert", "long", "type"), _by_element),
    **dict.fromkeys(("one_hot", "view_as_real"), _more_behind),
    "view_as_complex": _pairs_behind,
}
