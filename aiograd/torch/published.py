"""Parameters whose memory is replaced: what reads one keeps the memory that it saw.

A step of an optimiser *publishes* new values: they become the memory of the parameter, and the old
memory stays as it was for its readers.

    graphs    keep the memory of their forward pass, if it ran in `pinned`
    kernels   that run in other threads read on: old memory outlives them

torch saves a parameter as the object, not as its memory, so that an old graph would see the new
values, and give wrong gradients without a word. `pinned` saves the memory instead: around every
function that is called on a worker with such parameters, and for good in the thread of its loop.
Code that builds graphs in threads of its own there needs `with ag.torch.pinned():` around it.
Publishing cannot count as a write, which torch would notice: torch compares the count before and
after it calls the hooks of `pinned`, in the middle of operations of other threads.

torch saves a tensor before it computes with it. So nothing is published while an operation that
has saved a parameter still runs: it would compute with other values than it saved.
"""

from __future__ import annotations

import contextlib
import functools
import sys
import threading
import time
import types
import weakref
from collections.abc import Callable, Generator, Iterator, Sequence
from typing import Any, Final

import torch
from torch.autograd.graph import saved_tensors_hooks

from aiograd.dist.registry import contexts

__all__ = ["pin_this_thread", "pinned", "publish", "register", "runs_pinned"]

_PAUSE: Final = 50e-6  # seconds between two looks at operations that still run


class _Memory:
    """The memory of a parameter from one publication to the next."""

    __slots__ = ("last", "tensor")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.tensor = parameter.detach()  # shares the count of writes to the parameter
        self.last: int | None = None  # that count when it was replaced; None: it is in use


class _Parameter:
    """A parameter whose memory is replaced."""

    __slots__ = ("memory", "reference")

    def __init__(self, parameter: torch.Tensor) -> None:
        self.reference = weakref.ref(parameter, functools.partial(_forget, id(parameter)))
        self.memory = _Memory(parameter)  # which it has now

    def current(self, parameter: torch.Tensor) -> _Memory:
        """Return the memory of the parameter, also if the user has replaced it by `.data = …`."""
        if self.memory.tensor.data_ptr() != parameter.data_ptr():
            self.memory = _Memory(parameter)
        return self.memory


class _Saved:
    """What a graph has saved of a parameter."""

    __slots__ = ("memory", "version")

    def __init__(self, memory: _Memory) -> None:
        self.memory, self.version = memory, memory.tensor._version


class _Operation:
    """An operation that has saved a parameter: the place in a thread's code where it was called."""

    __slots__ = ("frame", "instruction", "thread")

    def __init__(self, frame: types.FrameType) -> None:
        self.frame, self.instruction = frame, frame.f_lasti
        self.thread = threading.get_ident()

    def runs(self, frames: dict[int, types.FrameType]) -> bool:
        """Whether the thread has not come further since."""
        if self.frame.f_lasti != self.instruction:
            return False
        frame = frames.get(self.thread)
        while frame is not None and frame is not self.frame:
            frame = frame.f_back
        return frame is not None


# By identity: `==` of tensors compares elements.
_known: Final[dict[int, _Parameter]] = {}
# The last operation of each thread in `pinned` that has saved a parameter.
_operations: Final[dict[int, _Operation]] = {}
_lock: Final = threading.Lock()  # for both, and while memory is replaced
_running: Final[set[object]] = set()  # runs of functions in `pinned`
# Old memory, with the runs and contexts that may read it. A kernel in another thread does not own
# what it reads.
_old: Final[list[tuple[list[_Memory], set[object], list[Any]]]] = []


def register(parameter: torch.Tensor) -> None:
    """Let graphs that are built from now on, in `pinned`, keep the memory of a parameter."""
    if id(parameter) not in _known:
        _known[id(parameter)] = _Parameter(parameter)


def _forget(key: int, ended: Any) -> None:
    found = _known.get(key)
    if found is not None and found.reference is ended:  # else the id is that of another by now
        del _known[key]


def publish(stepped: Sequence[tuple[torch.Tensor, torch.Tensor]]) -> None:
    """Let the memory of each first tensor, a registered parameter, be that of the second one."""
    with _quiet():
        old = []
        for parameter, new in stepped:
            known = _known[id(parameter)]
            memory = known.current(parameter)
            memory.last = parameter._version
            old.append(memory)
            parameter.data = new.data
            known.memory = _Memory(parameter)
        # The newest is always kept: the owner's own code may compute outside of any call.
        _old[:-1] = [kept for kept in _old[:-1] if _is_read(*kept[1:])]
        _old.append((old, set(_running), contexts().all()))


@contextlib.contextmanager
def _quiet() -> Iterator[None]:
    """Hold the lock in a moment in which no operation runs that has saved a parameter."""
    while True:
        with _lock:
            frames = sys._current_frames()
            for thread, operation in list(_operations.items()):
                if not operation.runs(frames):
                    del _operations[thread]  # its frame holds what it has computed
            if not _operations:
                yield
                return
        # Without the lock: an operation may be about to save its second parameter.
        time.sleep(_PAUSE)


def _is_read(runs: set[object], opened: list[Any]) -> bool:
    return not runs.isdisjoint(_running) or any(not context.released for context in opened)


# ── graphs ──────────────────────────────────────────────────────────────────────────────────────


class pinned:  # noqa: N801  a context manager that reads as a verb
    """Let graphs that are built in this block, in this thread, keep the memory of parameters."""

    __slots__ = ("_hooks", "_outer", "_run", "_thread")

    def __enter__(self) -> None:
        self._hooks = None
        if not _known:  # nothing is ever replaced: torch's own way is cheaper
            return
        self._run, self._thread = object(), threading.get_ident()
        self._outer = _operations.get(self._thread)
        _running.add(self._run)
        self._hooks = saved_tensors_hooks(_pack, _unpack)
        self._hooks.__enter__()

    def __exit__(self, *error: object) -> None:
        if self._hooks is None:
            return
        self._hooks.__exit__()
        _running.discard(self._run)
        _operations.pop(self._thread, None)
        if self._outer is not None:
            _operations[self._thread] = self._outer


def _pack(tensor: torch.Tensor) -> Any:
    # A view of a parameter, such as the transposed weight of a linear layer, keeps its own memory.
    known = _known.get(id(tensor))
    if known is None or known.reference() is not tensor:
        return tensor, tensor._version
    with _lock:
        with contextlib.suppress(ValueError):  # no Python called it: a thread of torch's engine
            _operations[threading.get_ident()] = _Operation(sys._getframe(1))
        return _Saved(known.current(tensor))


def _unpack(saved: Any) -> torch.Tensor:
    """Return what was saved; torch leaves it to hooks to see that nobody has written into it."""
    if saved.__class__ is _Saved:
        tensor, version, now = saved.memory.tensor, saved.version, saved.memory.last
    else:
        (tensor, version), now = saved, None
    if now is None:
        now = tensor._version
    if now != version:
        raise RuntimeError(
            "one of the variables needed for gradient computation has been modified by an inplace "
            f"operation: a tensor of shape {list(tensor.shape)} is at version {now}; "
            f"expected version {version} instead"
        )
    return tensor


# ── functions ───────────────────────────────────────────────────────────────────────────────────


def runs_pinned(function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a function that runs in `pinned`; a coroutine of it does so step by step."""

    def run(*args: Any, **kwargs: Any) -> Any:
        with pinned():
            result = function(*args, **kwargs)
        return _in_steps(result) if isinstance(result, types.CoroutineType) else result

    return run


async def _in_steps(coroutine: Any) -> Any:
    return await _Steps(coroutine)


_hooked = threading.local()  # threads in which all graphs are pinned for good


def pin_this_thread() -> None:
    """Let all graphs that are built in this thread from now on keep the memory of parameters."""
    if not getattr(_hooked, "hooks", None):
        _hooked.hooks = saved_tensors_hooks(_pack, _unpack)
        _hooked.hooks.__enter__()


class _Steps:
    """Drives a coroutine in `pinned`, and leaves it while the coroutine waits: others run then."""

    def __init__(self, coroutine: Any) -> None:
        self._coroutine = coroutine

    def __await__(self) -> Generator[Any, Any, Any]:
        step, value = self._coroutine.send, None
        while True:
            try:
                with pinned():
                    awaited = step(value)
            except StopIteration as end:
                return end.value
            try:
                step, value = self._coroutine.send, (yield awaited)
            except GeneratorExit:
                self._coroutine.close()
                raise
            except BaseException as error:
                step, value = self._coroutine.throw, error
