"""Every exception of aiograd, as one tree.

Each class is also the builtin a caller would naturally catch, carries its facts as attributes, and
says what happened, where, and what to do next. All of them pickle, so they can cross the wire.
"""

from __future__ import annotations

__all__ = [
    "AiogradError",
    "AuthError",
    "BackwardFailed",
    "ContextError",
    "DeadlineExceeded",
    "DuplicateName",
    "ForkedProcessError",
    "GradError",
    "GraphCutWarning",
    "InsecureTransport",
    "MalformedName",
    "MissingGradient",
    "NestedContext",
    "NoContext",
    "NotAllowed",
    "NotOwner",
    "Overloaded",
    "OwnerLost",
    "PassRefused",
    "PassTimedOut",
    "PassUndecided",
    "ProtocolError",
    "RRefError",
    "RRefExpired",
    "RRefLeak",
    "RRefReleased",
    "RemoteError",
    "RpcError",
    "SecurityError",
    "SerializationError",
    "StaleGradients",
    "UnknownContext",
    "UnknownWorker",
    "WorkerClosed",
    "WorkerLost",
    "WorkerUnresponsive",
    "WrongLoopError",
    "WrongThread",
]


class AiogradError(Exception):
    """The root of every error that aiograd itself raises."""


class GradError(AiogradError, RuntimeError):
    """A gradient was asked for that does not exist, or would be wrong.

    `reason` names the case in one word, for programs to branch on; messages may change:

    - roots and inputs: "no_roots", "not_tensor", "no_requires_grad", "not_scalar", "no_grad_fn",
      "unused", "shape", "dtype", "not_leaf"
    - `ctx.gradients`: "missing"
    - the graph: "freed", "modified", "inplace", "once", "count"
    - other workers: "received", "context", "stale"
    """

    def __init__(self, message: str, reason: str = "other") -> None:
        # All facts are in `args`: exceptions are pickled as class and `args`.
        super().__init__(message, reason)
        self.reason = reason

    def __str__(self) -> str:
        # The reason is among `args`, for pickling; it is not part of the text.
        return str(self.args[0])


class GraphCutWarning(UserWarning):
    """A local backward pass ended in a result that a call had brought without its graph.

    What the other worker computed it from gets no gradient. The message names the line of the call.

        >>> import warnings
        >>> w = ag.ones(2, requires_grad=True)
        >>> y = await ag.rpc_async("worker1", ag.exp, args=(w,))  # in no context: y is a new leaf
        >>> with warnings.catch_warnings(record=True) as caught:
        ...     warnings.simplefilter("always")
        ...     y.sum().backward()
        >>> caught[0].category.__name__, w.grad
        ('GraphCutWarning', None)
    """


# A KeyError too, as it is raised by looking a tensor up in `ctx.gradients`.
class MissingGradient(GradError, KeyError):
    """A tensor has no gradient in this context; the message says why."""

    def __init__(self, message: str, reason: str = "missing") -> None:
        super().__init__(message, reason)


class StaleGradients(GradError):
    """Others have stepped too often since this context saw the parameters; no parameter changed."""

    worker: str
    behind: int
    allowed: int

    def __init__(self, worker: str, behind: int, allowed: int) -> None:
        # Past GradError, whose arguments are a message and a reason: `args` must be those of this
        # class, or it could not be unpickled.
        AiogradError.__init__(self, worker, behind, allowed)
        self.worker, self.behind, self.allowed = worker, behind, allowed
        self.reason = "stale"

    def __str__(self) -> str:
        return (
            f"others have stepped {self.behind} times on {self.worker} since this context saw its "
            f"parameters, and {self.allowed} are allowed; compute the gradients in a new context"
        )


# ── calls ───────────────────────────────────────────────────────────────────────────────────────


# Each error below is also the builtin that code without aiograd would raise here, so that `except
# TimeoutError` and `except ConnectionError` around a call do what they say.
class RpcError(AiogradError):
    """A call could not be made or answered."""


class DeadlineExceeded(RpcError, TimeoutError):
    """The callee did not answer in time. You get WorkerLost instead if its connection broke."""

    worker: str
    function: str
    seconds: float

    def __init__(self, worker: str, function: str, seconds: float) -> None:
        super().__init__(worker, function, seconds)
        self.worker, self.function, self.seconds = worker, function, seconds

    def __str__(self) -> str:
        return (
            f"{self.worker} did not answer {self.function}() within {self.seconds:g} s; "
            "it may still be running there (pass timeout= to wait longer)"
        )


class WorkerLost(RpcError, ConnectionError):
    """The connection to a worker broke and did not come back.

    `executed` says whether the call may have run there: "no" or "unknown".
    """

    worker: str
    executed: str
    why: str

    def __init__(self, worker: str, executed: str = "unknown", why: str = "") -> None:
        # "unknown" unless it is proven that the call never reached the worker: a caller may only
        # repeat what did not run.
        super().__init__(worker, executed, why)
        self.worker, self.executed, self.why = worker, executed, why

    def __str__(self) -> str:
        ran = "the call did not run" if self.executed == "no" else "the call may have run"
        why = f" ({self.why})" if self.why else ""
        return f"lost worker {self.worker}{why}; {ran} there"


class OwnerLost(WorkerLost):
    """The worker that held an RRef's value is gone, and the value with it."""

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return f"{self.worker}, the owner of this RRef, is gone{why}, and the value with it"


class WorkerUnresponsive(WorkerLost):
    """The worker still has its connection, but has been silent for too long."""

    def __str__(self) -> str:
        why = f" for {self.why}" if self.why else ""
        return f"{self.worker} is connected but has been silent{why}; it may be stopped or blocked"


class WrongThread(RpcError, RuntimeError):
    """A blocking call was made on an event loop's thread, where it would stop everything."""


class WrongLoopError(RpcError, RuntimeError):
    """A worker was used on another event loop than the one it was started on."""

    worker: str
    ended: bool

    def __init__(self, worker: str, ended: bool = False) -> None:
        super().__init__(worker, ended)
        self.worker, self.ended = worker, ended

    def __str__(self) -> str:
        state = ", which has ended" if self.ended else ""
        return (
            f"worker {self.worker!r} lives on another event loop{state}: use it there, start a "
            "worker on this loop, or wait for it in a thread without a loop (ag.rpc_sync)"
        )


class ForkedProcessError(RpcError, RuntimeError):
    """A worker was used in a forked child of its process, which has only a copy of it."""

    def __init__(self, worker: str) -> None:
        super().__init__(worker)
        self.worker = worker

    def __str__(self) -> str:
        return (
            f"this process is a fork of the one that worker {self.worker!r} lives in, and has only "
            "a dead copy of it: start a worker here, or let the parent make the calls"
        )


class UnknownWorker(RpcError, LookupError):
    """No member of the cluster has this name or rank."""

    worker: str
    known: tuple[str, ...]

    def __init__(self, worker: str, known: tuple[str, ...] = ()) -> None:
        super().__init__(worker, known)
        # A cluster may have thousands of workers; the message shows some of them.
        self.worker, self.known = worker, tuple(known)

    def __str__(self) -> str:
        shown = ", ".join(self.known[:8]) + (", …" if len(self.known) > 8 else "")
        return f"there is no worker {self.worker!r} here" + (f"; known: {shown}" if shown else "")


# A lookup that cannot succeed, and a bad argument: both are caught.
class MalformedName(UnknownWorker, ValueError):
    """No worker can have this name."""


# The membership refuses a join with an RpcError; as an argument it is a ValueError, as every other
# name that cannot be.
class DuplicateName(RpcError, ValueError):
    """Two workers of one cluster would have the same name, or names that look alike."""


class WorkerClosed(RpcError):
    """This worker was shut down, or none was started."""

    def __init__(self, message: str = "", worker: str = "") -> None:
        super().__init__(message, worker)
        self.worker = worker

    def __str__(self) -> str:
        return self.args[0] or (
            "there is no worker here: start one with `async with ag.LocalCluster(...)`, "
            "`async with ag.Worker(...)` or `await ag.init_rpc(...)`"
        )


class Overloaded(RpcError):
    """A worker refused work because a limit was reached; the call did not run."""

    worker: str
    what: str

    def __init__(self, worker: str, what: str = "") -> None:
        super().__init__(worker, what)
        self.worker, self.what = worker, what

    def __str__(self) -> str:
        return f"{self.worker} refused the call: {self.what or 'too much work in flight'}"


# The last resort, where the exception's own class cannot be sent or rebuilt here.
class RemoteError(RpcError):
    """A remote exception that cannot travel as itself."""

    type_name: str
    message: str
    traceback_text: str
    worker: str

    def __init__(
        self, type_name: str, message: str = "", traceback_text: str = "", worker: str = ""
    ) -> None:
        super().__init__(type_name, message, traceback_text, worker)
        self.type_name, self.message = type_name, message
        self.traceback_text, self.worker = traceback_text, worker

    def __str__(self) -> str:
        where = f" on {self.worker}" if self.worker else ""
        return f"{self.type_name}{where}: {self.message}"


class SerializationError(RpcError, TypeError):
    """Something in a call or a result cannot travel; `path` says where it sits."""

    path: str
    what: str
    worker: str

    def __init__(self, path: str, what: str = "", worker: str = "") -> None:
        super().__init__(path, what, worker)
        self.path, self.what, self.worker = path, what, worker

    def __str__(self) -> str:
        where = f" (on {self.worker})" if self.worker else ""
        return f"{self.path} cannot travel{where}: {self.what}"


# ── security and protocol ───────────────────────────────────────────────────────────────────────


# A mixin that comes first among the bases: its `__str__` must win over that of OSError, which takes
# two `args` for an errno and its text.
class _NamesWorker(Exception):
    """A message and, where known, the worker it is about."""

    def __init__(self, message: str = "", worker: str = "") -> None:
        super().__init__(message, worker)
        self.worker = worker

    def __str__(self) -> str:
        return str(self.args[0])


class SecurityError(_NamesWorker, AiogradError, PermissionError):
    """Something was refused because it is not safe."""


class AuthError(SecurityError):
    """The two workers could not prove to each other that they share a secret."""


class NotAllowed(SecurityError):
    """The peer may not call this function, or may not touch this value."""


# An error and no warning: a secret and all data would cross the network in the clear.
class InsecureTransport(SecurityError):
    """Listening beyond this host without TLS; pass allow_plaintext=True if that is meant."""


class ProtocolError(_NamesWorker, AiogradError):
    """The other side broke the wire protocol."""


# ── references ──────────────────────────────────────────────────────────────────────────────────


class RRefError(_NamesWorker, AiogradError, RuntimeError):
    """An RRef cannot be used like this."""


class NotOwner(RRefError):
    """Only the owner has the value; elsewhere use `await rref` or a proxy."""

    def __init__(self, message: str = "", owner: str = "") -> None:
        super().__init__(message, owner)
        self.owner = owner


class RRefExpired(RRefError):
    """The owner gave the value up because this user was taken for dead."""


class RRefReleased(RRefError):
    """This reference was released."""


class RRefLeak(RRefError):
    """References were still alive at shutdown; the message lists where they were made."""


# ── contexts ────────────────────────────────────────────────────────────────────────────────────


class ContextError(AiogradError, RuntimeError):
    """A distributed autograd context cannot be used like this."""


class UnknownContext(ContextError):
    """There is no such context here: never made, already released, or of another worker."""

    context_id: int
    why: str

    def __init__(self, context_id: int, why: str = "") -> None:
        super().__init__(context_id, why)
        self.context_id, self.why = context_id, why

    def __str__(self) -> str:
        return f"there is no autograd context {self.context_id} here" + (
            f": {self.why}" if self.why else " (never made, or already released)"
        )


class NestedContext(ContextError):
    """A context was opened inside another one in the same task."""


class NoContext(ContextError):
    """No autograd context is current; wrap the code in `async with ag.context():`."""


class BackwardFailed(ContextError):
    """A backward pass was ended everywhere because one worker failed.

    The cause is chained; no gradient of the failed pass can be read on any worker.
    """

    worker: str
    op: str
    why: str

    def __init__(self, worker: str, op: str = "", why: str = "") -> None:
        super().__init__(worker, op, why)
        self.worker, self.op, self.why = worker, op, why

    def __str__(self) -> str:
        where = f" in {self.op}" if self.op else ""
        return f"the backward pass failed on {self.worker}{where}: {self.why}"


class PassUndecided(ContextError):
    """The outcome of a backward pass is not known on this worker yet, so no number is shown.

    The originator of a pass decides how it ended. A participant that has not received the outcome
    raises this instead of a gradient that may belong to a failed pass. Calls that the originator
    makes in the context bring the outcome with them.
    """

    context_id: int
    originator: str
    why: str

    def __init__(self, context_id: int, originator: str, why: str = "") -> None:
        super().__init__(context_id, originator, why)
        self.context_id, self.originator, self.why = context_id, originator, why

    def __str__(self) -> str:
        why = f" ({self.why})" if self.why else ""
        return (
            f"a backward pass of {self.originator} in context {self.context_id} has not been "
            f"decided as far as this worker knows{why}; read the gradients again later, or from a "
            f"call that {self.originator} makes in the context after the pass"
        )


# Both: code that handles failed passes and code that handles timeouts finds it.
class PassTimedOut(BackwardFailed, DeadlineExceeded):
    """A backward pass that did not end within its time."""

    worker: str
    op: str
    why: str
    function: str
    seconds: float

    def __init__(self, worker: str, op: str = "", why: str = "", seconds: float = 0.0) -> None:
        # Two bases with constructors of different arguments; neither is called, and both sets of
        # attributes are set here.
        Exception.__init__(self, worker, op, why, seconds)
        self.worker, self.op, self.why = worker, op, why
        self.function, self.seconds = "backward", seconds

    def __str__(self) -> str:
        return BackwardFailed.__str__(self)


# Also a GradError, with its reason, as the same mistake in a local pass would be.
class PassRefused(BackwardFailed, GradError):
    """A backward pass that cannot be played: freed, modified, or crossing contexts."""

    worker: str
    op: str
    why: str
    reason: str

    def __init__(self, worker: str, op: str = "", why: str = "", reason: str = "other") -> None:
        Exception.__init__(self, worker, op, why, reason)
        self.worker, self.op, self.why, self.reason = worker, op, why, reason

    def __str__(self) -> str:
        return BackwardFailed.__str__(self)
