"""A module that lives on another worker and is called from here.

Creation is a `remote` call, so it returns at once and its errors show at the first use. Inside
a context gradients flow through `forward` as through any other call; the parameters' own
gradients stay on the owner.

Where the caller is a guest (see `Options.mode`), the class must be exposed. It may then make such
modules, run those to which it holds a reference, and get references to their parameters. Of other
modules it may run an exposed `forward`.

Modules of other libraries take part if their library has told how it keeps them in files (`KINDS`).
"""

from __future__ import annotations

import functools
import importlib
import os
import sys
from collections.abc import Callable, Generator
from typing import (
    Any,
    Final,
    Generic,
    NoReturn,
    ParamSpec,
    Protocol,
    Self,
    TypeVar,
    TypeVarTuple,
    overload,
)

from aiograd._html import GREEN, card, code, quiet
from aiograd.errors import NotAllowed
from aiograd.nn import files
from aiograd.nn.module import HasForward, Module, Parameter
from aiograd.rpc.agent import current_agent
from aiograd.rpc.api import Kwargs, expose, inline, rpc_async
from aiograd.rpc.callee.exposure import exposed_method, is_exposed
from aiograd.rpc.callee.functions import TASK, THREAD, Delegate, run_mode
from aiograd.rpc.directory import To
from aiograd.rpc.future import Future
from aiograd.rpc.options import check_timeout
from aiograd.rpc.scope import current_guest
from aiograd.rref.proxy import find_method
from aiograd.rref.rref import RRef, remote

_TRAVELS = ("on", "module_rref")  # what of a RemoteModule is sent to other workers

# What torch's RemoteModule refuses by name, with the same error class; anything else is an
# AttributeError.
_LOCAL_ONLY = (
    "add_module apply bfloat16 buffers children cpu cuda double extra_repr float get_buffer "
    "get_parameter get_submodule half load_state_dict modules named_buffers named_children "
    "named_modules named_parameters parameters register_backward_hook register_buffer "
    "register_forward_hook register_forward_pre_hook register_full_backward_hook register_module "
    "register_parameter requires_grad_ share_memory state_dict to type xpu zero_grad"
).split()


_INSTEAD = {
    "parameters": "use `await m.remote_parameters()`",
    "state_dict": "use `await m.module_rref.rpc_async().state_dict()`, or let the owner write it "
    "to a file: `await m.save(path)`",
    "load_state_dict": "use `await m.module_rref.rpc_async().load_state_dict(state)`, or let the "
    "owner read it from a file: `await m.load(path)`",
}

M = TypeVar("M", bound=HasForward[..., Any])
M_co = TypeVar("M_co", bound=HasForward[..., Any], covariant=True)
P = ParamSpec("P")
R = TypeVar("R")
Ts = TypeVarTuple("Ts")


class RemoteModule(Generic[M_co]):
    """A module on another worker, called as if it were here.

    `cls(*args, **kwargs)` is made on worker `to`. The constructor returns at once; `await m` waits
    for the module, and its first use raises what its making raised. Inside a context gradients flow
    through `await m(x)`; those of the parameters stay at their owner, where a
    `DistributedOptimizer` over `await m.remote_parameters()` uses them. `m.within(seconds)` is the
    same module with a timeout for its calls. Handles may be sent to other workers.

        >>> m = await ag.nn.RemoteModule("worker1", ag.nn.Linear, args=(4, 2))
        >>> x = ag.ones(3, 4, requires_grad=True)
        >>> async with ag.context() as ctx:
        ...     y = await m.within(5.0)(x)
        ...     await ctx.backward(y.sum())
        ...     ctx.gradients[x].shape
        (3, 4)
        >>> len(await m.remote_parameters())
        2
    """

    timeout: float | None = None  # for every call through this handle; see `within`

    # As in `rpc.api`: arguments by position are checked, unless `kwargs` is given, too.
    @overload
    def __init__(self, to: To, cls: Callable[[], M_co]) -> None: ...
    @overload
    def __init__(self, to: To, cls: Callable[[*Ts], M_co], args: tuple[*Ts]) -> None: ...
    @overload
    def __init__(
        self, to: To, cls: Callable[..., M_co], args: tuple[Any, ...] = (), *, kwargs: Kwargs
    ) -> None: ...
    @overload
    def __init__(
        self, to: To, cls: Callable[..., M_co], args: tuple[Any, ...], kwargs: Kwargs
    ) -> None: ...
    def __init__(
        self,
        to: To,
        cls: Callable[..., M_co],
        args: tuple[Any, ...] = (),
        kwargs: Kwargs = None,
    ) -> None:
        if is_module(cls):
            name = type(cls).__name__
            raise TypeError(
                f"a RemoteModule is made of a class and its arguments, not of an instance: "
                f"RemoteModule(to, {name}, args=(...)); the module is made over there"
            )
        self.module_rref: RRef[M_co] = remote(to, create_module, args=(cls, args, kwargs or {}))
        # The name and not `to`, which may be a rank or a handle that does not travel.
        self.on: str = self.module_rref.owner_name()

    @classmethod
    def init_from_module_rref(cls, to: To, module_rref: RRef[M]) -> RemoteModule[M]:
        """Make another handle for a module that exists already; `to` must be its owner."""
        made: RemoteModule[M] = cls.__new__(cls)  # type: ignore[arg-type]
        made.module_rref, made.on = module_rref, module_rref.owner_name()
        # A WorkerInfo, or a name; a rank is not checked.
        name = getattr(to, "name", to)
        if isinstance(name, str) and name != made.on:
            raise ValueError(f"the module lives on {made.on}, not on {name}")
        return made

    def within(self, seconds: float | None) -> Self:
        """Return the same module with a timeout for each call: `await m.within(2.0)(x)`.

        Not a keyword of the call: all keywords belong to the module's `forward`.
        """
        made: Self = _rebuild(type(self), self.__getstate__())
        made.timeout = None if seconds is None else check_timeout(seconds)
        return made

    def __await__(self) -> Generator[Any, None, Self]:
        # `await m` waits until the module exists, and raises what its constructor raised.
        yield from self.module_rref.future().__await__()
        return self

    # `self` is typed by what its module's `forward` takes and returns.
    def __call__(
        self: RemoteModule[HasForward[P, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        return self.forward_async(*args, **kwargs)

    def forward(
        self: RemoteModule[HasForward[P, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Run the module's forward on its owner: `y = await m.forward(x)`."""
        return self.forward_async(*args, **kwargs)

    def forward_async(
        self: RemoteModule[HasForward[P, R]], *args: P.args, **kwargs: P.kwargs
    ) -> Future[R]:
        """Run the module's forward on its owner, and return the future of its result.

        All arguments are those of `forward`; a timeout is given by `within`.
        """
        return self._begin("forward", *args, **kwargs)

    def remote_parameters(self, recurse: bool = True) -> Future[list[RRef[Parameter]]]:
        """Give an RRef to every parameter, for an optimiser: `await m.remote_parameters()`."""
        # A Future and no coroutine: one that is not awaited says so where it is used.
        arguments = (self.module_rref, recurse)
        return rpc_async(self.on, list_parameters, args=arguments, timeout=self.timeout)

    def get_module_rref(self) -> RRef[M_co]:
        """Return the reference to the module itself; torch's name for `module_rref`."""
        return self.module_rref

    async def train(self, mode: bool = True) -> Self:
        """Switch the module to training mode (or, with False, to evaluation)."""
        await self._begin("train", mode)
        return self

    async def eval(self) -> Self:
        """Switch the module to evaluation mode."""
        return await self.train(False)

    async def save(self, path: files.Path) -> None:
        """Let the owner write the module's state to a file on its machine (see `ag.save`)."""
        await self._begin("save", os.fspath(path))

    async def load(self, path: files.Path) -> None:
        """Let the owner read the module's state from a file on its machine."""
        await self._begin("load", os.fspath(path))

    def _begin(self, name: str, /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Start one of `_WORK` at the owner, as a call of a method: in turn if it is serial."""
        frame = sys._getframe(1)  # the call site, which is the first frame outside of this module
        while frame.f_back is not None and frame.f_globals is globals():
            frame = frame.f_back
        proxy = self.module_rref.rpc_async(self.timeout)
        return proxy.begin(name, args, kwargs, frame, work_on_module)

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in _TRAVELS}

    def __reduce__(self) -> Any:
        return _rebuild, (type(self), self.__getstate__())

    def __repr__(self) -> str:
        return f"<RemoteModule on {self.on}>"

    def _repr_html_(self) -> str:
        return card(GREEN, f"<b>RemoteModule</b> {quiet('on')} {code(self.on)}")

    # Only called for what is missing: the error says which methods exist on the owner alone.
    def __getattr__(self, name: str) -> NoReturn:
        if name in _LOCAL_ONLY:
            hint = _INSTEAD.get(name, "call it at the owner: `await m.module_rref.rpc_async().")
            hint += f"{name}(...)`" if name not in _INSTEAD else ""
            raise ValueError(f"{name}() is not supported on a RemoteModule; {hint}")
        raise AttributeError(f"a RemoteModule has no attribute {name!r}")


def _rebuild(cls: Any, state: dict[str, Any]) -> Any:
    made = cls.__new__(cls)
    made.__dict__.update(state)
    return made


# ── at the owner ────────────────────────────────────────────────────────────────────────────────


class ModuleKind(Protocol):
    """Modules of one library."""

    @property
    def module_class(self) -> type:
        """The base of its modules; they have `forward`, `parameters` and `train` as ours have."""

    def save(self, path: files.Path, module: Any) -> None:
        """Write the state of a module to a file."""

    def load(self, path: files.Path, module: Any) -> None:
        """Read the state of a module from a file that `save` wrote."""


class _OwnModules:
    module_class = Module

    def save(self, path: files.Path, module: Module) -> None:
        files.save(path, module.state_dict())

    def load(self, path: files.Path, module: Module) -> None:
        module.load_state_dict(files.load(path))


KINDS: Final[list[ModuleKind]] = [_OwnModules()]  # ours, and those of libraries that were used
# Bases of other libraries' modules, and the module of ours that adds their kind when imported.
_KNOWN: Final = {"torch.nn.modules.module.Module": "aiograd.torch.nn"}


def kind_of(value: Any) -> ModuleKind | None:
    """Return the library of a module; None if it is no module."""
    for kind in KINDS:
        if isinstance(value, kind.module_class):
            return kind
    for base in type(value).__mro__:
        ours = _KNOWN.get(f"{base.__module__}.{base.__qualname__}")
        if ours is not None and ours not in sys.modules:
            importlib.import_module(ours)
            return kind_of(value)
    return None


def is_module(value: Any) -> bool:
    """Tell whether something is a module, of ours or of another library that is loaded."""
    return kind_of(value) is not None


@expose
def create_module(cls: Callable[..., M], args: Any, kwargs: Any) -> M:
    """Make the module at its owner; ValueError if the class makes anything else."""
    # `expose` below opens this function to guests; the class it would call is a second question.
    if current_guest() is not None and not is_exposed(cls):
        raise _refusal(cls)
    module = cls(*args, **kwargs)
    if not is_module(module):
        raise ValueError(
            f"a RemoteModule needs a class of nn.Module, but {cls!r} made {type(module).__name__}"
        )
    return module


def _usable(module: Any, method: str = "") -> Any:
    """Return a module if the caller may use it, or this method of it."""
    if not is_module(module):
        raise ValueError(f"the RRef holds {type(module).__name__}, which is no nn.Module")
    if current_guest() is None or is_exposed(type(module)) or exposed_method(module, method):
        return module
    raise _refusal(type(module))


def _refusal(cls: Any) -> NotAllowed:
    """Make the error for a class that guests may not use here."""
    name = getattr(cls, "__name__", type(cls).__name__)
    return NotAllowed(f"the class {name} is not exposed here", current_agent().name)


@expose
def work_on_module(
    subject: Any, name: str, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> Delegate:
    """Return what shall be done with the module, at its owner."""
    target, _, turn = find_method(subject, name, "work_on_module", _work)
    return Delegate(target, tuple(args), kwargs, turn)


work_on_module.__aiograd_delegate__ = True  # type: ignore[attr-defined]


@expose
def list_parameters(rref: RRef[Any], recurse: bool) -> list[RRef[Parameter]]:
    """Return references to the parameters, at their owner."""
    return [RRef(parameter) for parameter in _usable(rref.local_value()).parameters(recurse)]


def _work(module: Any, name: str) -> Callable[..., Any]:
    """Return a function of `_WORK` for a module, if the caller may have it run."""
    # A guest must not choose files on this machine.
    if name not in _WORK or (name in ("save", "load") and current_guest() is not None):
        raise NotAllowed(f"{name!s:.80} of a module is not exposed here", current_agent().name)
    usable = _usable(module, "forward" if name == "forward" else "")
    if name == "forward" and (mode := run_mode(module.forward)) != THREAD:
        return functools.partial(_forward_later, usable) if mode == TASK else _inline(usable)
    return functools.partial(_WORK[name], usable)


def _forward(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return module(*args, **kwargs)


async def _forward_later(module: Any, /, *args: Any, **kwargs: Any) -> Any:
    return await module(*args, **kwargs)


def _inline(module: Any) -> Callable[..., Any]:
    """Return the call of a module whose `forward` is marked with `@ag.inline`."""
    work = functools.partial(_forward, module)
    return inline(work)


def _train(module: Any, mode: bool) -> None:
    module.train(mode)


def _save(module: Any, path: str) -> None:
    kind_of(module).save(path, module)  # type: ignore[union-attr]


def _load(module: Any, path: str) -> None:
    kind_of(module).load(path, module)  # type: ignore[union-attr]


_WORK: Final = {"forward": _forward, "train": _train, "save": _save, "load": _load}


__all__ = ["RemoteModule"]
