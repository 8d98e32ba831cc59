"""Operations are rows: a forward function on arrays and one gradient rule per argument.

    mul = op("mul", np.multiply, lambda g, y, a, b: g * conj(b), lambda g, y, a, b: g * conj(a))

In rules: `g` incoming gradient, `y` the result, `a`, `b` … the positional arguments; keyword
arguments follow under their names. Positional arguments are differentiable, keyword arguments
are not, and None instead of a rule says "no gradient on purpose". Rules are plain numpy
expressions. In an ordinary pass they run on arrays; with `create_graph` the same expressions
run on Tensors and are recorded, so derivatives of any order need nothing more. Broadcasting and
promotion are undone in one place (`sweep.conform`), so a rule is only maths.

Only what the rules read is saved for the backward pass: the bytecode of a rule tells which
arguments it uses, and whether it only wants their `.shape` or `.dtype` (`op/rules.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from inspect import Signature
from typing import Any

import numpy as np

from aiograd.autograd.grad_mode import recording
from aiograd.autograd.graph import Node
from aiograd.autograd.op.nodes import record, record_all, share_version
from aiograd.autograd.op.rules import (
    NOTHING,
    SHAPE,
    VALUE,
    Plan,
    Rule,
    keywords,
    needs,
    needs_variadic,
)
from aiograd.autograd.op.signatures import LazySignature, describe
from aiograd.autograd.op.spelling import is_torch_spelling, numpy_spelling
from aiograd.autograd.tensor import Tensor, wrap

#: Every operation of the library by name; calls to other workers name them.
OPS: dict[str, Callable[..., Any]] = {}


Arrange = Callable[..., tuple[Sequence[Any], dict[str, Any]]]


class Op:
    """A differentiable operation; call it on Tensors, arrays or numbers to get a Tensor."""

    __signature__: LazySignature = LazySignature()

    def __init__(
        self,
        name: str,
        forward: Callable[..., Any],
        rules: Sequence[Rule | None],
        *,
        each: Rule | None = None,
        joint: Rule | None = None,
        shapes_only: bool = False,
        arrange: Arrange | None = None,
    ) -> None:
        self.name = name
        # An instance looks like a function, to `functools`, to tracebacks of calls and to help().
        self.__name__ = self.__qualname__ = name
        self.__doc__ = forward.__doc__
        self.forward = forward
        self.rules: tuple[Rule | None, ...] = tuple(rules)
        self.each = each  # one rule for every argument: each(g, y, i, *args, **kwargs)
        # One rule for all arguments: joint(g, y, *args, **kwargs) returns a gradient for each. With
        # several outputs, g and y are sequences.
        self.joint = joint
        # `each` or `joint` only asks for the shapes of its arguments. It cannot be found from the
        # bytecode: the rule picks one of `*args` by its number, which looks like any other use.
        self.shapes_only = shapes_only
        self.arrange = arrange  # from the arguments users write to (arrays, parameters)
        # With exactly this many arguments there is nothing to arrange, unless parameters are given
        # and `strict` says that they need a look. The common call so skips a function call.
        self.arity = -1
        self.strict = True
        self.source: Any = arrange or forward  # whose parameters it takes
        self.op_name: str | None = None  # what other workers know it by; None for users' own
        self.plans: dict[tuple[bool, ...], Plan] = {}  # by which arguments want a gradient

    # What the rules read is found at the first use: disassembling all of them would slow every
    # import.

    @functools.cached_property
    def _keywords(self) -> frozenset[str] | None:
        return keywords((*self.rules, self.each, self.joint))

    @functools.cached_property
    def _needs(self) -> list[tuple[int, tuple[int, ...]]]:
        return [needs(rule) for rule in self.rules]

    @functools.cached_property
    def _variadic(self) -> tuple[int, int] | None:
        shared = self.each or self.joint
        return needs_variadic(shared) if shared else None

    @functools.cached_property
    def saves(self) -> bool:
        """Whether anything is saved for the backward pass that could be freed after it."""
        if self._variadic is not None:
            return VALUE in self._variadic
        return any(VALUE in (own, *args[: len(self.rules)]) for own, args in self._needs)

    def describe(self) -> Signature:
        """Return the signature, for `inspect` and `help()`."""
        # What an operation arranges itself, it knows; otherwise it is what its rules read.
        known = None if self.source is self.arrange else self._keywords
        return describe(self.name, self.source, known, max(len(self.rules), 1))

    def __repr__(self) -> str:
        return f"<op {self.name}{self.describe()}>"  # help() shows it above the text

    def __reduce__(self) -> Any:
        # An operation of the library travels by its name, one of a user's by its parts.
        if self.op_name is not None:
            return library_op, (self.op_name,)
        options = (self.each, self.joint, self.shapes_only, self.arrange)
        return _rebuild_op, (self.name, self.forward, self.rules, *options)

    def __call__(self, *given: Any, **kwargs: Any) -> Any:
        args: Sequence[Any] = given
        # A `try` costs nothing until it is needed: numpy's names pay nothing for torch's.
        try:
            if self.arrange is not None and (len(given) != self.arity or (kwargs and self.strict)):
                args, kwargs = self.arrange(*given, **kwargs)
            if kwargs:
                if kwargs.get("out") is not None:
                    if is_torch_spelling(kwargs):
                        return self(*args, **numpy_spelling(self.name, kwargs))
                    return self._write_to(kwargs.pop("out"), args, kwargs)
                # A parameter may be a Tensor, say the axis computed by another operation. Its value
                # is used, and if it asks for a gradient there is no rule for it: an error, not a
                # lost gradient.
                for value in kwargs.values():
                    if isinstance(value, Tensor):
                        kwargs = {key: self._parameter(key, kwargs[key]) for key in kwargs}
            return self.apply(args, kwargs)
        except TypeError:
            if not is_torch_spelling(kwargs):
                raise
        return self(*args, **numpy_spelling(self.name, kwargs))

    def apply(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute, and record the operation if an argument requires grad."""
        # One and two Tensors are most calls. They are written out, without the lists and the loop
        # of `_apply_any`; the three must do the same.
        if len(args) == 1 and isinstance(args[0], Tensor):
            arg = args[0]
            y = self.forward(arg.raw, **kwargs) if kwargs else self.forward(arg.raw)
            # See `unaliased`; the test here spares the call.
            if y is arg.raw:
                y = unaliased(y, args)
            node = arg._node
            if node is None and arg._leaf:
                node = arg.accumulator()
            if node is not None and y.__class__ is not tuple and recording.get():
                return record(self, args, y, kwargs, (node,))
            return self._results(args, y, kwargs, (node,))
        if len(args) == 2:
            one, other = args
            if isinstance(one, Tensor) and isinstance(other, Tensor):
                return self._apply_two(one, other, args, kwargs)
        return self._apply_any(args, kwargs)

    def _apply_two(
        self, one: Tensor, other: Tensor, args: Sequence[Any], kwargs: dict[str, Any]
    ) -> Any:
        data = one.raw, other.raw
        y = self.forward(*data, **kwargs) if kwargs else self.forward(*data)
        if y is one.raw or y is other.raw:
            y = unaliased(y, args)
        first, second = one._node, other._node
        if first is None and one._leaf:
            first = one.accumulator()
        if second is None and other._leaf:
            second = other.accumulator()
        if first is None and second is None:
            return self._results(args, y, kwargs, (None, None))
        if y.__class__ is not tuple and recording.get():
            return record(self, args, y, kwargs, (first, second))
        return self._results(args, y, kwargs, (first, second))

    def _apply_any(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        tracked = False
        raw: list[Any] = []
        parents: list[Node | None] = []
        for arg in args:
            if isinstance(arg, Tensor):
                raw.append(arg.raw)
                node = arg._node
                if node is None and arg._leaf:
                    node = arg.accumulator()
                if node is not None:
                    tracked = True
                parents.append(node)
            # A list may hold Tensors: stacked by a recorded operation, so that gradients reach
            # them.
            elif arg.__class__ is list or arg.__class__ is tuple:
                return self.apply([stacked(arg) for arg in args], kwargs)
            # numpy would make an array of objects of it and fail far from here.
            elif arg is None:
                raise TypeError(f"{self.name}() got None where an array belongs")
            else:
                raw.append(arg)
                parents.append(None)
        y = unaliased(self.forward(*raw, **kwargs), args)
        if tracked and y.__class__ is not tuple and recording.get():
            return record(self, args, y, kwargs, tuple(parents))
        return self._results(args, y, kwargs, tuple(parents))

    def _results(
        self, args: Sequence[Any], y: Any, kwargs: dict[str, Any], parents: tuple[Node | None, ...]
    ) -> Any:
        """Wrap one result that is not recorded, or several that may be."""
        if y.__class__ is not tuple:
            return result_of(y, args)
        results = tuple([result_of(unaliased(each, args), args) for each in y])
        if any(parents) and recording.get():
            record_all(self, args, results, kwargs, parents)
        return results

    def _parameter(self, name: str, value: Any) -> Any:
        """Return a parameter as a plain value."""
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad and recording.get():
            raise TypeError(f"{self.name}() has no gradient rule for {name}=")
        return value.raw

    def _write_to(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute, and store the result in `out`."""
        if isinstance(out, tuple) and len(out) == 1:
            out = out[0]
        result = self.apply(args, kwargs)
        if isinstance(out, Tensor):
            # `Tensor.__setitem__` refuses what cannot be recorded, and counts the write.
            out[...] = result
        elif result.requires_grad:
            raise TypeError(f"{self.name}() cannot record its result into out=, an ndarray")
        else:
            out[...] = result.raw
        return out

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """Apply to arrays giving an array, or to Tensors giving a Tensor; for use in rules.

        Takes what `forward` takes: arrays by position, parameters by name.
        """
        for arg in args:
            if isinstance(arg, Tensor):
                return self.apply(args, kwargs)
        return self.forward(*args, **kwargs)

    # ── what recording asks ─────────────────────────────────────────────────────────────────────

    def check_parameters(self, kwargs: dict[str, Any]) -> None:
        """Raise TypeError for parameters that a rule does not know."""
        if self._keywords is not None and not self._keywords.issuperset(kwargs):
            listed = ", ".join(f"{name}=" for name in sorted(set(kwargs) - self._keywords))
            raise TypeError(f"{self.name}() has no gradient rule for {listed}")

    def plan(self, wanted: tuple[bool, ...]) -> Plan:
        """Return what to save, given which arguments want a gradient, and cache it."""
        plan = self.plans[wanted] = self._make_plan(wanted)
        return plan

    def _make_plan(self, wanted: tuple[bool, ...]) -> Plan:
        if self._variadic is not None:
            # One rule for all arguments: what it reads does not depend on which are wanted.
            own, rest = self._variadic
            rest = min(rest, SHAPE) if self.shapes_only else rest
            return Plan(own == VALUE, [rest] * len(wanted), None)
        # More arrays than rules: silence would lose a gradient.
        if any(wanted[len(self.rules) :]):
            raise TypeError(
                f"{self.name}() has {len(self.rules)} gradient rules, but argument "
                f"{wanted.index(True, len(self.rules)) + 1} requires grad"
            )
        keeps_result, uses = False, [NOTHING] * len(wanted)
        rules: list[Rule | None] = [None] * len(wanted)
        for i, (rule, (own, args)) in enumerate(zip(self.rules, self._needs, strict=True)):
            # Only rules that will run count: `w * x` saves w only if x wants a gradient.
            if wanted[i : i + 1] == (True,):
                rules[i] = rule or _no_gradient
                keeps_result = keeps_result or own == VALUE
                for position, use in enumerate(args[: len(uses)]):
                    uses[position] = max(uses[position], use)
        return Plan(keeps_result, uses, tuple(rules))


def _no_gradient(*_: Any, **__: Any) -> None:
    """The rule of an argument that has none on purpose."""


def unaliased(y: Any, args: Sequence[Any]) -> Any:
    """Return a result; as a view, if it is the very array of an argument.

    `np.real` and `astype(copy=False)` may return what they were given. Two Tensors over one array
    would count writes apart, and a write to one would go unnoticed by a graph that saved the other.
    A view has a base by which `share_version` finds the tensor it belongs to.
    """
    if y.__class__ is np.ndarray:
        for arg in args:
            if isinstance(arg, Tensor) and arg.raw is y:
                return y.view()
    return y


def result_of(y: Any, args: Sequence[Any]) -> Tensor:
    """Wrap a result that is not recorded; a view counts writes with the argument it shows."""
    tensor = wrap(y)
    if tensor.raw.base is not None:
        share_version(tensor, args)
    return tensor


def stacked(arg: Any) -> Any:
    """Return a list of numbers as an array, one with Tensors in it as their recorded stack."""
    if not isinstance(arg, list | tuple):
        return arg
    if not _holds_tensor(arg):
        return np.asarray(arg)
    return OPS["stack"]([stacked(item) for item in arg])


def _holds_tensor(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return any(_holds_tensor(item) for item in arg)
    return isinstance(arg, Tensor)


def library_op(name: str) -> Any:
    """Return the operation of the library that has this name; pickles of operations call it."""
    return OPS[name]


def _rebuild_op(
    name: str, forward: Any, rules: Any, each: Any, joint: Any, shapes_only: bool, arrange: Any
) -> Op:
    return Op(
        name, forward, rules, each=each, joint=joint, shapes_only=shapes_only, arrange=arrange
    )


def parent_of(arg: Any) -> Node | None:
    """Return the node behind an argument, or None if no gradient is wanted for it."""
    if isinstance(arg, Tensor):
        node = arg._node
        if node is not None:
            return node
        if arg._leaf:
            return arg.accumulator()
    return None


def op(
    name: str,
    forward: Callable[..., Any],
    *rules: Rule | None,
    each: Rule | None = None,
    joint: Rule | None = None,
    shapes_only: bool = False,
    arrange: Arrange | None = None,
) -> Op:
    """Declare a new operation with one gradient rule per positional argument.

    `forward` works on arrays. A rule is called as `rule(g, y, *args, **kwargs)` and returns the
    gradient of its argument; None instead of a rule means that the argument has none. One rule may
    serve all arguments instead: `each(g, y, i, *args, **kwargs)` is called for every argument `i`,
    `joint(g, y, *args, **kwargs)` is called once and returns a gradient for each. Operations with
    several outputs need the latter, and get sequences as `g` and `y`. Example:

        >>> cube = ag.op("cube", lambda a: a**3, lambda g, y, a: g * 3 * a**2)
        >>> x = ag.tensor(2.0, requires_grad=True)
        >>> cube(x).backward()
        >>> float(x.grad)
        12.0
    """
    # Checked here: a wrong rule would only be noticed in a backward pass, perhaps on another
    # worker.
    if not callable(forward):
        raise TypeError(f"the forward function of {name!r} must be callable, not {forward!r}")
    for rule in (*rules, each, joint):
        if rule is not None and not callable(rule):
            raise TypeError(f"a gradient rule of {name!r} must be callable or None, not {rule!r}")
    if not rules and each is None and joint is None:
        raise TypeError(f"{name!r} needs a gradient rule per argument (None for no gradient)")
    return Op(
        name, forward, rules, each=each, joint=joint, shapes_only=shapes_only, arrange=arrange
    )
