"""Which library of collectives a prediction is for, where nobody says."""

from __future__ import annotations

from calibrate.profile.profile import Profile
from paradl_bench.core.errors import UserError, unknown_choice

DEFAULT_BACKENDS = {"cuda": "nccl", "cpu": "gloo"}

_SWEPT_BACKENDS = (*DEFAULT_BACKENDS.values(), "mpi")


def choose_backend(profile: Profile, backend: str | None) -> str:
    """The backend that was asked for, a UserError if not measured; else the only one measured, or the device's."""
    measured = sorted({fit.library for fit in profile.communication})
    if backend is not None:
        if backend not in measured:
            unknown = unknown_choice("backend", backend, measured or ["none: the profile holds no collectives"])
            if backend not in _SWEPT_BACKENDS:
                raise unknown
            command = f"paradl-bench collectives --ranks N --backend {backend} -o DIR"
            raise UserError(f"{unknown}; measure its collectives: {command}, then calibrate fit")
        return backend
    by_device = DEFAULT_BACKENDS.get(profile.devices[0].kind, "gloo") if profile.devices else "gloo"
    return measured[0] if len(measured) == 1 else by_device
