"""The errors of a failed backward pass: each is also what its cause was."""

from __future__ import annotations

from aiograd.errors import BackwardFailed, GradError, PassRefused


def failure_of(worker: str, op: str, error: BaseException) -> BackwardFailed:
    """The error that a failed pass raises, with its cause chained."""
    why = f"{type(error).__name__}: {error}"
    if isinstance(error, BackwardFailed):
        return error
    failure: BackwardFailed
    if isinstance(error, GradError):
        failure = PassRefused(worker, op, why, error.reason)
    else:
        failure = BackwardFailed(worker, op, why)
    failure.__cause__ = error
    return failure
