"""The errors of a failed backward pass: each is also what its cause was."""

from __future__ import annotations

from aiograd.errors import BackwardFailed, DeadlineExceeded, GradError


class PassTimedOut(BackwardFailed, DeadlineExceeded):
    """A backward pass that did not end within its time."""

    def __init__(self, worker: str, op: str = "", why: str = "", seconds: float = 0.0) -> None:
        Exception.__init__(self, worker, op, why, seconds)
        self.worker, self.op, self.why = worker, op, why
        self.function, self.seconds = "backward", seconds

    __str__ = BackwardFailed.__str__


class PassRefused(BackwardFailed, GradError):
    """A backward pass that cannot be played: freed, modified, or crossing contexts."""

    def __init__(self, worker: str, op: str = "", why: str = "", reason: str = "other") -> None:
        Exception.__init__(self, worker, op, why, reason)
        self.worker, self.op, self.why, self.reason = worker, op, why, reason

    __str__ = BackwardFailed.__str__


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
