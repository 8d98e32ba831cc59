"""Functions with a backward written by hand: `class F(ag.Function)`, then `F.apply(...)`.

    class Exp(ag.Function):
        @staticmethod
        def forward(ctx, x):
            y = ag.exp(x)
            ctx.save_for_backward(y)
            return y

        @staticmethod
        def backward(ctx, grad):
            (y,) = ctx.saved_tensors
            return grad * y

An `ag.op` is a row of formulas on arrays and the better choice where formulas are enough. A
Function sees Tensors, may take any other arguments, give several results, and keep what it likes in
between. How gradients are summed, shaped and passed on is left to `sweep.py`.

Names and rules are torch's (`save_for_backward`, `mark_non_differentiable`, `once_differentiable`),
so that functions written for it need little change.
"""

from __future__ import annotations

import functools
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.array import Gradient
from aiograd.autograd.grad_mode import is_grad_enabled, no_grad
from aiograd.autograd.graph import Hook, Joint, Node, Part, freed, modified
from aiograd.autograd.op import parent_of, result_of, unaliased
from aiograd.autograd.op.nodes import wrong_count
from aiograd.autograd.tensor import Tensor, is_sparse_array, wrap
from aiograd.errors import GradError


class FunctionContext:
    """What forward leaves for backward. Any attribute can be set; tensors are better saved."""

    def __init__(self, name: str, needs_input_grad: tuple[bool, ...]) -> None:
        self.name = name
        # One flag per argument of forward.
        self.needs_input_grad = needs_input_grad
        self._to_save: tuple[Tensor | None, ...] = ()
        self._saved: tuple[_Saved | None, ...] | None = ()  # None once freed
        self._constant: tuple[Tensor, ...] = ()
        self._materialize = True
        # A weak reference once recorded: the node holds this context, and saved outputs need the
        # node to be made again with their graph.
        self._graph_owner: Callable[[], FunctionNode | None] = _nobody

    def save_for_backward(self, *tensors: Tensor | None) -> None:
        """Keep inputs, outputs or values in between; a later write to one of them is noticed."""
        # Anything else would have no version, and a write to it would go unnoticed.
        for tensor in tensors:
            if tensor is not None and not isinstance(tensor, Tensor):
                raise TypeError(
                    f"{self.name}: save_for_backward takes Tensors, not {type(tensor).__name__}; "
                    "set anything else as an attribute of ctx"
                )
        self._to_save = tensors

    @property
    def saved_tensors(self) -> tuple[Tensor | None, ...]:
        """The saved tensors, as long as the graph has not been freed."""
        if self._saved is None:
            raise freed(self.name)
        if not self._saved and self._to_save:  # forward reads what it has just saved
            return self._to_save
        node = self._graph_owner()
        return tuple([None if s is None else s.restore(self.name, node) for s in self._saved])

    def mark_non_differentiable(self, *tensors: Tensor) -> None:
        """Say that no gradient flows through these outputs; backward gets zeros for them."""
        self._constant = tensors

    def set_materialize_grads(self, value: bool) -> None:
        """With False, backward gets None instead of zeros for an output that nobody used."""
        self._materialize = bool(value)

    def mark_dirty(self, *_: Tensor) -> None:
        """Refused: an input that forward writes to cannot be followed."""
        raise GradError(
            f"{self.name}: writing into an input is not recorded; return a new tensor", "inplace"
        )


def _nobody() -> None:
    return None


class _Saved:
    """A tensor at the version it was saved in.

    An input is kept as it is, with its graph. Of an output only the data is kept: the output holds
    the node, which holds this, and the three would be a cycle.
    """

    __slots__ = ("cell", "data", "output", "tensor", "version")

    def __init__(self, tensor: Tensor, outputs: Sequence[Any]) -> None:
        if tensor._cell is None:
            tensor._cell = [0]
        self.cell = tensor._cell
        self.version = tensor._cell[0]
        self.output = next((i for i, out in enumerate(outputs) if out is tensor), None)
        self.data = tensor.raw
        self.tensor = tensor if self.output is None else None

    def restore(self, name: str, node: FunctionNode | None) -> Tensor:
        """Return the tensor for backward; raise if it was written to since it was saved."""
        if self.cell[0] != self.version:
            raise modified(name)
        if self.tensor is not None:
            return self.tensor
        tensor = wrap(self.data)
        tensor._cell = self.cell
        if node is not None and self.output in node.differentiable:
            tensor._node = Part(node, self.output, self.data.shape, self.data.dtype)
        return tensor


class FunctionNode(Joint):
    """One recorded call of a Function; every output is a `Part` of it."""

    __slots__ = ("context", "differentiable", "function", "metas")

    parents: tuple[Node | None, ...]
    hooks: list[Hook] | None
    outputs: int
    shape: tuple[int, ...]
    dtype: Any

    function: type[Function]
    context: FunctionContext

    def __init__(
        self,
        function: type[Function],
        context: FunctionContext,
        parents: tuple[Node | None, ...],
        results: Sequence[Any],
        constant: frozenset[int],
    ) -> None:
        self.function, self.context, self.parents = function, context, parents
        self.metas: tuple[tuple[tuple[int, ...], Any] | None, ...] = tuple(
            [(out.shape, out.dtype) if isinstance(out, Tensor) else None for out in results]
        )
        self.differentiable: frozenset[int] = frozenset(
            i
            for i, out in enumerate(results)
            if isinstance(out, Tensor) and out.dtype.kind in "fc" and i not in constant
        )
        self.outputs = len(results)
        self.shape, self.dtype, self.hooks = (), None, None
        # Set last, when `differentiable` is known: `_Saved.restore` reads it.
        context._graph_owner = weakref.ref(self)

    @property
    def name(self) -> str:
        """The name of the Function's class."""
        return self.function.__name__

    def run(self, grad: list[Gradient], create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """See `Node.run`: call the user's backward with Tensors, whatever came in."""
        context = self.context
        grads = [self._incoming(g, meta) for g, meta in zip(grad, self.metas, strict=True)]
        try:
            given = self.function.backward(context, *grads)
        # Users' code, perhaps on another worker: the traceback alone does not say which Function.
        except Exception as error:
            error.add_note(f"raised by the backward of {self.name}")
            raise
        # Other attributes of the context are the user's; they live as long as the graph.
        if not retain and context._saved:
            context._saved = None
        return self._check(given if isinstance(given, tuple | list) else (given,))

    def _incoming(self, grad: Gradient, meta: tuple[tuple[int, ...], Any] | None) -> Any:
        """Return the gradient of one output as backward shall see it."""
        if grad is not None:
            return grad if isinstance(grad, Tensor) else wrap(grad)
        if meta is None or not self.context._materialize:
            return None
        return wrap(np.zeros(*meta))

    def _check(self, given: Sequence[Any]) -> Sequence[Any]:
        """Return one gradient per input; raise if backward gave another number."""
        expected = len(self.parents)
        # torch accepts trailing Nones, for arguments with defaults that were not given.
        if len(given) > expected and all(g is None for g in given[expected:]):
            given = given[:expected]
        if len(given) != expected:
            raise wrong_count(self.name, len(given), expected)
        # What backward computed for inputs that want no gradient is dropped.
        return [
            None if parent is None else g for g, parent in zip(given, self.parents, strict=True)
        ]


class Function:
    """Base of functions with a backward of their own; call them with `F.apply(...)`.

    Arguments are positional and may be anything; gradients go to those that are Tensors. backward
    gets one gradient per result, which it must not write to, since others may hold the same, and
    returns one per argument (None: no gradient).

        >>> class Cube(ag.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         ctx.save_for_backward(x)
        ...         return x**3
        ...     @staticmethod
        ...     def backward(ctx, g):
        ...         (x,) = ctx.saved_tensors
        ...         return g * 3 * x**2
        >>> x = ag.tensor(2.0, requires_grad=True)
        >>> Cube.apply(x).backward()
        >>> float(x.grad)
        12.0
    """

    def __init__(self) -> None:
        raise TypeError(f"a Function is not instantiated; call {type(self).__name__}.apply(...)")

    forward: Callable[..., Any]
    backward: Callable[..., Any]

    @classmethod
    def apply(cls, *args: Any) -> Any:
        """Run forward and record the call."""
        recorded = is_grad_enabled()
        parents = tuple([parent_of(arg) if recorded else None for arg in args])
        context = FunctionContext(cls.__name__, tuple([p is not None for p in parents]))
        # Forward is one step of the tape, whatever operations it is made of.
        with no_grad():
            returned = cls.forward(context, *args)
        several = isinstance(returned, tuple)
        outputs = returned if several else (returned,)
        results = [_own(out, args) for out in outputs]
        if any(context.needs_input_grad):
            constant = frozenset(
                # Compared by identity with what forward returned; `results` may be copies.
                i
                for i, out in enumerate(outputs)
                if any(out is c for c in context._constant)
            )
            cls._record(context, parents, results, constant)
        return tuple(results) if several else results[0]

    @classmethod
    def _record(
        cls,
        context: FunctionContext,
        parents: tuple[Node | None, ...],
        results: list[Any],
        constant: frozenset[int],
    ) -> None:
        node = FunctionNode(cls, context, parents, results, constant)
        # After the results exist: a saved output is known by its number among them.
        context._saved = tuple(
            [None if tensor is None else _Saved(tensor, results) for tensor in context._to_save]
        )
        # The tensors themselves would keep the graph of a dropped result alive.
        context._to_save = context._constant = ()
        for index in node.differentiable:
            result = results[index]
            result._node = Part(node, index, result.shape, result.dtype)


def _own(output: Any, args: Sequence[Any]) -> Any:
    """Return an output as a tensor of its own, so that giving it a node changes nothing else."""
    if isinstance(output, np.ndarray | np.generic) or is_sparse_array(output):
        return result_of(unaliased(output, args), args)
    if not isinstance(output, Tensor):
        return output
    # Forward returned an argument, or a tensor from elsewhere: that one must keep its own node.
    if output.requires_grad or any(output is arg for arg in args):
        return output.detach()
    return output


def once_differentiable(backward: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a Function's backward that cannot be differentiated again.

    It may compute with plain arrays. A second derivative through it is a GradError.

        >>> class Double(ag.Function):
        ...     @staticmethod
        ...     def forward(ctx, x):
        ...         return x * 2
        ...     @staticmethod
        ...     @ag.once_differentiable
        ...     def backward(ctx, g):
        ...         return g.numpy() * 2
        >>> x = ag.tensor(1.0, requires_grad=True)
        >>> Double.apply(x).backward()
        >>> float(x.grad)
        2.0
    """

    @functools.wraps(backward)
    def guarded(ctx: FunctionContext, *grads: Any) -> Any:
        # With create_graph backward would be recorded; its plain arrays could not be.
        with no_grad():
            given = backward(ctx, *grads)
        node = ctx._graph_owner()
        # First order only: nobody can differentiate the result, so it needs no guard.
        if not is_grad_enabled() or node is None:
            return given
        if isinstance(given, tuple | list):
            return tuple(_only_once(g, node) for g in given)
        return _only_once(given, node)

    return guarded


def _only_once(grad: Gradient, node: FunctionNode) -> Any:
    """Return a gradient whose own derivative is an error."""
    if grad is None:
        return None
    data = grad.raw if isinstance(grad, Tensor) else np.asarray(grad)
    return wrap(data, _Once(node, data)) if data.dtype.kind in "fc" else grad


class _Once(Node):
    """The end of what can be differentiated: running it is the error."""

    __slots__ = ("function",)

    def __init__(self, node: FunctionNode, output: Any) -> None:
        self.function = node.name
        # Without them the node would be a sink, and a second derivative silently zero.
        self.parents = node.parents
        self.shape, self.dtype, self.hooks = output.shape, output.dtype, None

    @property
    def name(self) -> str:
        """The name under which the error will appear."""
        return f"{self.function}Backward"

    def run(self, grad: Gradient, create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """Raise: this gradient was computed outside of the tape."""
        raise GradError(
            f"the backward of {self.function} is marked @once_differentiable and cannot be "
            "differentiated again",
            "once",
        )
