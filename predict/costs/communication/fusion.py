"""Which gradients share an all-reduce, as the command line says it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from paradl_bench.core.errors import UserError, unknown_choice
from paradl_bench.core.units import parse_duration, parse_size
from paradl_bench.strategies.data.fusion.rules import RULES, Fusion

_FUSING = ("osf", "simulate")
_FUSION_OPTIONS = {"fusion": "--fusion", "fusion_buffer": "--fusion-buffer", "fusion_timeout": "--fusion-timeout"}


def fusion_options(evaluator_name: str, options: Mapping[str, Any]) -> Fusion | None:
    """What the command line says of fusion; a buffer or a timeout alone asks for the rule ``buffer``.

    None where nothing is said, and the evaluator has a way of its own; a UserError of options for others.
    """
    given = {name: options[name] for name in _FUSION_OPTIONS if options.get(name) is not None}
    if given and evaluator_name not in _FUSING:
        raise UserError(
            f"{_FUSION_OPTIONS[next(iter(given))]} is for --evaluator {' and '.join(_FUSING)}; {evaluator_name}"
            " does not use it"
        )
    if not given and evaluator_name != "osf":
        return None
    of_buffer = [name for name in given if name != "fusion"]
    rule = given.get("fusion", "buffer" if of_buffer else "none")
    if rule not in RULES:
        raise unknown_choice("--fusion", rule, RULES)
    if of_buffer and rule != "buffer":
        raise UserError(f"{_FUSION_OPTIONS[of_buffer[0]]} is for --fusion buffer; --fusion {rule} has no buffer")
    if options.get("bucket_cap_mb") is not None and rule != "ddp":
        where = "" if given else " with --evaluator osf"
        raise UserError(f"--bucket-cap-mb is for --fusion ddp{where}; --fusion {rule} has no DDP buckets")
    default = Fusion()
    buffer, timeout = given.get("fusion_buffer"), given.get("fusion_timeout")
    return Fusion(
        rule=rule,
        buffer_bytes=default.buffer_bytes if buffer is None else parse_size(buffer, "--fusion-buffer"),
        timeout_s=default.timeout_s if timeout is None else parse_duration(timeout, "--fusion-timeout"),
    )
