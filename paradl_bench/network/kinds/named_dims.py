"""The dim that a call names, of functions whose kinds do not tell it, or tell it as it was given."""

from __future__ import annotations

from paradl_bench.network.kinds.kind import Call

_SIGNATURES = {
    "argsort": "input dim", "cumsum": "input dim", "gather": "input dim", "index_add": "input dim",
    "index_select": "input dim", "max": "input dim", "min": "input dim", "scatter": "input dim", "sort": "input dim",
    "topk": "input k dim",
}  # fmt: skip
_BY_DEFAULT = {"argsort": -1, "sort": -1, "topk": -1}


def named_dim(call: Call) -> int | None:
    """The dim of what is read first that a call works along, counted from the end; None where it names none."""
    signature = _SIGNATURES.get(call.function)
    if signature is None or not call.tensors:
        return None
    dim = call.bind(signature).get("dim", _BY_DEFAULT.get(call.function))
    if not isinstance(dim, int):
        return None
    return dim if dim < 0 else dim - len(call.tensors[0].shape)
