"""Module: a model as a tree of parts, and Parameter: a tensor that belongs to one.

What an attribute is decides what it means: a `Parameter` is trained, a `Module` is a part of the
tree, and a tensor named by `register_buffer` is state that is saved but not trained. Everything
else is left alone. There is no bookkeeping beside the attributes, so modules pickle and copy like
any other object.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any, NamedTuple, ParamSpec, Protocol, TypeVar

import numpy as np

from aiograd.autograd.grad_mode import no_grad
from aiograd.autograd.graph import HookHandle
from aiograd.autograd.ops.torch_names import as_dtype
from aiograd.autograd.tensor import Tensor, is_sparse_array

M = TypeVar("M", bound="Module")
P = ParamSpec("P")
R_co = TypeVar("R_co", covariant=True)


class Parameter(Tensor):
    """A tensor that a Module trains.

    >>> ag.nn.Parameter([1.0]).requires_grad
    True
    """

    __slots__ = ()

    def __init__(self, data: Any, requires_grad: bool = True, dtype: Any = None) -> None:
        if isinstance(data, Tensor):
            data = data.raw
        if not is_sparse_array(data):
            data = np.asarray(data, dtype=dtype)
            # A parameter is there to be trained, and whole numbers have no gradient.
            if data.dtype.kind in "iub":
                data = data.astype(np.float64)
        super().__init__(data, requires_grad)

    def __repr__(self) -> str:
        return f"Parameter containing:\n{super().__repr__()}"


class HasForward(Protocol[P, R_co]):
    """What calling a module takes and returns: so that checkers see `forward` through it."""

    def forward(self, *args: P.args, **kwargs: P.kwargs) -> R_co:
        """Compute the result."""
        ...


class LoadedKeys(NamedTuple):
    """What did not match in `load_state_dict(strict=False)`."""

    missing_keys: list[str]
    unexpected_keys: list[str]


class Module:
    """Base of all models: assign Parameters and Modules as attributes, and write `forward`.

    >>> class Model(ag.nn.Module):
    ...     def __init__(self):
    ...         super().__init__()
    ...         self.inner = ag.nn.Linear(3, 4)
    ...         self.scale = ag.nn.Parameter(1.0)
    ...     def forward(self, x):
    ...         return self.inner(x) * self.scale
    >>> model = Model()
    >>> model(ag.ones(2, 3)).shape
    (2, 4)
    >>> [name for name, _ in model.named_parameters()]
    ['scale', 'inner.weight', 'inner.bias']
    """

    training: bool = True
    # Defaults of the class, replaced by a dict of the instance at the first registration: a
    # subclass may assign parts before it calls `super().__init__()`, and modules without hooks
    # carry none.
    _buffers: Mapping[str, bool] = {}  # names of buffers, and whether they are saved
    _forward_hooks: Mapping[int, Callable[..., Any]] = {}
    _forward_pre_hooks: Mapping[int, Callable[..., Any]] = {}

    def __init__(self) -> None:
        self.training = True

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Compute the result; every subclass has its own."""
        raise NotImplementedError(f"{type(self).__name__} has no forward()")

    def _call_hooked(self, *args: Any, **kwargs: Any) -> Any:
        if self._forward_pre_hooks:
            # A copy: a hook may remove itself.
            for hook in list(self._forward_pre_hooks.values()):
                changed = hook(self, args)
                if changed is not None:
                    # As in torch, a hook may return the only argument by itself.
                    args = changed if isinstance(changed, tuple) else (changed,)
        result = self.forward(*args, **kwargs)
        if self._forward_hooks:
            for hook in list(self._forward_hooks.values()):
                changed = hook(self, args, result)
                result = result if changed is None else changed
        return result

    # Typed apart from its body: a `self` that only has `forward` would have no hooks.
    if TYPE_CHECKING:

        def __call__(self: HasForward[P, R_co], *args: P.args, **kwargs: P.kwargs) -> R_co: ...
    else:
        __call__ = _call_hooked

    # ── parts ───────────────────────────────────────────────────────────────────────────────────

    def register_buffer(self, name: str, tensor: Tensor | None, persistent: bool = True) -> None:
        """Hold a tensor that is state but not trained, e.g. a running mean."""
        self._buffers = {**self._buffers, name: persistent}
        setattr(self, name, tensor)

    def register_parameter(self, name: str, param: Parameter | None) -> None:
        """Hold a parameter under a name; the same as assigning the attribute."""
        setattr(self, name, param)

    def add_module(self, name: str, module: Module | None) -> None:
        """Hold a part under a name; the same as assigning the attribute."""
        setattr(self, name, module)

    register_module = add_module

    def named_children(self) -> Iterator[tuple[str, Module]]:
        """The direct parts, with their names."""
        for name, value in vars(self).items():
            if isinstance(value, Module):
                yield name, value

    def children(self) -> Iterator[Module]:
        """The direct parts."""
        return (child for _, child in self.named_children())

    def named_modules(self, prefix: str = "") -> Iterator[tuple[str, Module]]:
        """This module and all parts below it, each once, with dotted names."""
        yield from self._walk(prefix, set())

    def _walk(self, prefix: str, seen: set[int]) -> Iterator[tuple[str, Module]]:
        """Yield this module and all parts that were not seen yet."""
        # A part may be shared between two others; it counts once, under its first name.
        if id(self) in seen:
            return
        seen.add(id(self))
        yield prefix, self
        for name, child in self.named_children():
            yield from child._walk(f"{prefix}.{name}" if prefix else name, seen)

    def modules(self) -> Iterator[Module]:
        """This module and all parts below it, each once."""
        return (module for _, module in self.named_modules())

    def get_submodule(self, name: str) -> Module:
        """The part with this dotted name."""
        found: Module = self
        for part in name.split(".") if name else ():
            inner = getattr(found, part, None)
            if not isinstance(inner, Module):
                raise AttributeError(f"{type(self).__name__} has no part {name!r}")
            found = inner
        return found

    # ── tensors ─────────────────────────────────────────────────────────────────────────────────

    def named_parameters(
        self, prefix: str = "", recurse: bool = True
    ) -> Iterator[tuple[str, Parameter]]:
        """All parameters, each once, with dotted names."""
        for name, value in self._tensors(prefix, recurse, lambda _, v: isinstance(v, Parameter)):
            assert isinstance(value, Parameter)
            yield name, value

    def parameters(self, recurse: bool = True) -> Iterator[Parameter]:
        """All parameters, each once."""
        return (param for _, param in self.named_parameters(recurse=recurse))

    def named_buffers(self, prefix: str = "", recurse: bool = True) -> Iterator[tuple[str, Tensor]]:
        """All buffers, each once, with dotted names."""
        for name, value in self._tensors(prefix, recurse, _is_buffer):
            if value is not None:
                yield name, value

    def buffers(self, recurse: bool = True) -> Iterator[Tensor]:
        """All buffers, each once."""
        return (buffer for _, buffer in self.named_buffers(recurse=recurse))

    def _tensors(
        self, prefix: str, recurse: bool, wanted: Callable[[Any, Any], bool]
    ) -> Iterator[tuple[str, Any]]:
        """Yield tensors of the tree with their dotted names, each once."""
        # By identity: two layers may share one parameter, and an optimiser must not step it twice.
        seen: set[int] = set()
        for path, module in self.named_modules(prefix) if recurse else [(prefix, self)]:
            for name, value in vars(module).items():
                if wanted((module, name), value) and id(value) not in seen:
                    seen.add(id(value))
                    yield (f"{path}.{name}" if path else name), value

    # ── saving and loading ──────────────────────────────────────────────────────────────────────

    def state_dict(self, prefix: str = "") -> dict[str, Tensor]:
        """Parameters and buffers by dotted name, detached; they share memory with the module."""
        return {name: value.detach() for name, value in self._state(prefix)}

    def _state(self, prefix: str = "") -> Iterator[tuple[str, Tensor]]:
        """Yield what is saved. Shared tensors come under each of their names, as in torch."""
        for name, value in vars(self).items():
            # Buffers that are not persistent are left out: their name maps to False.
            if isinstance(value, Parameter) or (self._buffers.get(name) and value is not None):
                yield prefix + name, value
        for name, child in self.named_children():
            yield from child._state(f"{prefix}{name}.")

    def load_state_dict(self, state_dict: Mapping[str, Any], strict: bool = True) -> LoadedKeys:
        """Copy values into parameters and buffers.

        Raises RuntimeError and changes nothing if shapes differ or, when strict, names do.
        """
        # All checks before the first write: a state that does not fit changes nothing.
        mine = dict(self._state())
        missing = [name for name in mine if name not in state_dict]
        unexpected = [name for name in state_dict if name not in mine]
        problems = []
        if strict and missing:
            problems.append(f"missing: {', '.join(missing)}")
        if strict and unexpected:
            problems.append(f"unexpected: {', '.join(unexpected)}")
        for name, tensor in mine.items():
            shape = np.asarray(state_dict.get(name, tensor)).shape
            if shape != tensor.shape:
                problems.append(f"{name} has shape {tensor.shape}, the saved one {shape}")
        if problems:
            raise RuntimeError(f"cannot load into {type(self).__name__}: {'; '.join(problems)}")
        with no_grad():
            for name, tensor in mine.items():
                if name in state_dict:
                    # In place: optimisers and references on other workers hold these very tensors.
                    tensor[...] = state_dict[name]
        return LoadedKeys(missing, unexpected)

    # ── modes ───────────────────────────────────────────────────────────────────────────────────

    def train(self: M, mode: bool = True) -> M:
        """Behave as in training (dropout, batch statistics), here and in all parts."""
        for module in self.modules():
            module.training = mode
        return self

    def eval(self: M) -> M:
        """Behave as in use."""
        return self.train(False)

    def requires_grad_(self: M, requires_grad: bool = True) -> M:
        """Train all parameters, or none."""
        for param in self.parameters():
            param.requires_grad = requires_grad
        return self

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Forget `.grad` of every parameter, or fill it with zeros."""
        for param in self.parameters():
            # None by default: an optimiser then skips the parameter, where zeros would still decay
            # its averages.
            if set_to_none or param.grad is None:
                param.grad = None
            else:
                param.grad = Tensor(np.zeros(param.shape, param.dtype))

    def apply(self: M, function: Callable[[Module], None]) -> M:
        """Call `function` on every part, children first, and on the module itself."""
        for child in self.children():
            child.apply(function)
        function(self)
        return self

    def astype(self: M, dtype: Any) -> M:
        """Convert all floating point parameters and buffers, in place."""
        for tensor in [*self.parameters(), *self.buffers()]:
            if tensor.dtype.kind in "fc":
                tensor.raw = tensor.raw.astype(dtype)
                # The node has the old dtype, and the versions belong to the old memory.
                tensor._accumulate = tensor._cell = None
                tensor._grad = None
        return self

    def to(self: M, dtype: Any) -> M:
        """Convert as `astype` does; "cpu" is where every array is, so nothing happens.

        >>> ag.nn.Linear(2, 3).to(ag.float32).weight.dtype
        dtype('float32')
        """
        wanted = as_dtype(dtype)
        return self if wanted is None else self.astype(wanted)

    def float(self: M) -> M:
        """Convert to float32."""
        return self.astype(np.float32)

    def double(self: M) -> M:
        """Convert to float64."""
        return self.astype(np.float64)

    # ── hooks and looks ─────────────────────────────────────────────────────────────────────────

    def register_forward_pre_hook(
        self, hook: Callable[[Module, tuple[Any, ...]], Any]
    ) -> HookHandle:
        """Call `hook(module, args)` before each forward; it may return other arguments."""
        # A new dict, because the first one belongs to the class.
        self._forward_pre_hooks = dict(self._forward_pre_hooks)
        return HookHandle.on_dict(self._forward_pre_hooks, hook)

    def register_forward_hook(
        self, hook: Callable[[Module, tuple[Any, ...], Any], Any]
    ) -> HookHandle:
        """Call `hook(module, args, result)` after each forward; it may return another result."""
        self._forward_hooks = dict(self._forward_hooks)
        return HookHandle.on_dict(self._forward_hooks, hook)

    def extra_repr(self) -> str:
        """The settings shown by `repr`."""
        return ""

    def __repr__(self) -> str:
        head, parts = self.extra_repr(), list(self.named_children())
        if not parts:
            return f"{type(self).__name__}({head})"
        lines = [head] if head else []
        lines += [f"({name}): {child!r}" for name, child in parts]
        body = "\n".join(lines).replace("\n", "\n  ")
        return f"{type(self).__name__}(\n  {body}\n)"


def _is_buffer(place: tuple[Module, str], value: Any) -> bool:
    module, name = place
    return name in module._buffers and value is not None
