"""Operations are rows: a forward function on arrays and one gradient rule per argument.

    mul = op("mul", np.multiply, lambda g, y, a, b: g * conj(b), lambda g, y, a, b: g * conj(a))

In rules: `g` incoming gradient, `y` the result, `a`, `b` … the positional arguments; keyword
arguments follow under their names. Positional arguments are differentiable, keyword arguments
are not, and None instead of a rule says "no gradient on purpose". Rules are plain numpy
expressions. In an ordinary pass they run on arrays; with `create_graph` the same expressions
run on Tensors and are recorded, so derivatives of any order need nothing more. Broadcasting and
promotion are undone in one place (`sweep.conform`), so a rule is only maths.

Only what the rules read is kept for the backward pass: the code of a rule tells which arguments
it uses, and whether it only wants their `.shape` or `.dtype`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.graph import JointOpNode, Node, OpNode, Part, freed, modified
from aiograd.autograd.recording import recording
from aiograd.autograd.rules import (
    NOTHING,
    SHAPE,
    VALUE,
    Meta,
    Rule,
    keywords,
    needs,
    needs_variadic,
)
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.errors import GradError

_new = object.__new__

#: Every operation of the library by name; calls to other workers name them.
OPS: dict[str, Callable[..., Any]] = {}


Arrange = Callable[..., tuple[Sequence[Any], dict[str, Any]]]


class Op:
    """A differentiable operation; call it on Tensors, arrays or numbers to get a Tensor."""

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
        self.__name__ = self.__qualname__ = name
        self.__doc__ = forward.__doc__
        self.forward = forward
        self.rules = tuple(rules)
        self.each = each  # one rule for every argument: each(g, y, i, *args, **kwargs)
        self.joint = joint  # one rule for all arguments of an op with several outputs
        self.shapes_only = shapes_only  # `each` only asks for the shapes of its arguments
        self.arrange = arrange  # from the arguments users write to (arrays, parameters)
        self.arity = -1  # that many arguments and no others need not be arranged
        self.op_name: str | None = None  # what other workers know it by; None for users' own
        self._plans: dict[Any, tuple[bool, tuple[int, ...]]] = {}

    # What the rules read is found out at the first use: reading them all would slow every import.

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
        """Whether anything is kept for the backward pass that could be freed after it."""
        if self._variadic is not None:
            return VALUE in self._variadic
        return any(VALUE in (own, *args[: len(self.rules)]) for own, args in self._needs)

    def __repr__(self) -> str:
        return f"<op {self.name}>"

    def __reduce__(self) -> Any:
        if self.op_name is not None:
            return library_op, (self.op_name,)
        options = (self.each, self.joint, self.shapes_only, self.arrange)
        return _rebuild_op, (self.name, self.forward, self.rules, *options)

    def __call__(self, *given: Any, **kwargs: Any) -> Any:
        args: Sequence[Any] = given
        if self.arrange is not None and (kwargs or len(given) != self.arity):
            args, kwargs = self.arrange(*given, **kwargs)
        if kwargs:
            if kwargs.get("out") is not None:
                return self._write_to(kwargs.pop("out"), args, kwargs)
            for value in kwargs.values():
                if isinstance(value, Tensor):
                    kwargs = {key: self._parameter(key, kwargs[key]) for key in kwargs}
        return self.apply(args, kwargs)

    def apply(self, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        """Compute, and record it if anything asks for a gradient."""
        active = recording.get()
        tracked = False
        raw: list[Any] = []
        parents: list[Node | None] = []
        for arg in args:
            if isinstance(arg, Tensor):
                raw.append(arg.data)
                node = arg._node
                if node is None and arg._leaf and active:
                    node = arg.accumulator()
                if node is not None:
                    tracked = active
                parents.append(node)
            elif arg.__class__ is list or arg.__class__ is tuple:
                return self.apply([gathered(arg) for arg in args], kwargs)
            elif arg is None:
                raise TypeError(f"{self.name}() got None where an array belongs")
            else:
                raw.append(arg)
                parents.append(None)
        result = self.forward(*raw, **kwargs)
        if result.__class__ is tuple:
            return self._wrap_all(args, raw, result, kwargs, tracked)
        if tracked:
            return self.record(args, raw, result, kwargs, tuple(parents))
        tensor = wrap(result)
        if tensor.data.base is not None:
            share_version(tensor, args)
        return tensor

    def _parameter(self, name: str, value: Any) -> Any:
        if not isinstance(value, Tensor):
            return value
        if value.requires_grad and recording.get():
            raise TypeError(f"{self.name}() has no gradient rule for {name}=")
        return value.data

    def _write_to(self, out: Any, args: Sequence[Any], kwargs: dict[str, Any]) -> Any:
        if isinstance(out, tuple) and len(out) == 1:
            out = out[0]
        result = self.apply(args, kwargs)
        if isinstance(out, Tensor):
            out[...] = result
        elif result.requires_grad:
            raise TypeError(f"{self.name}() cannot record its result into out=, an ndarray")
        else:
            out[...] = result.data
        return out

    def of(self, *args: Any, **kwargs: Any) -> Any:
        """Apply to arrays giving an array, or to Tensors giving a Tensor; for use in rules.

        Takes what `forward` takes: arrays by position, parameters by name.
        """
        for arg in args:
            if isinstance(arg, Tensor):
                return self.apply(args, kwargs)
        return self.forward(*args, **kwargs)

    # ── recording ───────────────────────────────────────────────────────────────────────────────

    def record(
        self,
        args: Sequence[Any],
        raw: Sequence[Any],
        y: Any,
        kwargs: Any,
        parents: tuple[Node | None, ...],
    ) -> Tensor:
        """Wrap the result `y`, made from `args`, in a Tensor that remembers how it was made."""
        tensor = wrap(y)
        y = tensor.data
        dtype = y.dtype
        if dtype.kind not in "fc":
            return tensor  # comparisons, rounding to integers: nothing flows back
        if kwargs and self._keywords is not None and not self._keywords.issuperset(kwargs):
            raise self._no_rule_for(set(kwargs) - self._keywords)
        keep_y, uses = self._plan(parents)
        node = _new(OpNode)  # field by field: this is done once per operation
        node.op, node.parents, node.kwargs = self, parents, kwargs
        node.shape, node.dtype = y.shape, dtype
        node.hooks = node.cell = None
        saved, node.versions = self._save(args, raw, uses)
        if keep_y:
            tensor._cell = node.cell = [0]
            node.saved = (y, *saved)
        else:
            node.saved = (None, *saved)
        tensor._node = node
        if y.base is not None:
            share_version(tensor, args)
            if keep_y:
                node.cell = tensor._cell
        return tensor

    def _plan(self, parents: tuple[Node | None, ...]) -> tuple[bool, tuple[int, ...]]:
        """What to keep, given which arguments want a gradient."""
        if len(parents) == 2:
            active: Any = (parents[0] is not None, parents[1] is not None)
        else:
            active = tuple([parent is not None for parent in parents])
        plan = self._plans.get(active)
        if plan is None:
            plan = self._plans[active] = self._make_plan(active)
        return plan

    def _make_plan(self, active: tuple[bool, ...]) -> tuple[bool, tuple[int, ...]]:
        if self._variadic is not None:
            own, rest = self._variadic
            rest = min(rest, SHAPE) if self.shapes_only else rest
            return own == VALUE, (rest,) * len(active)
        if any(active[len(self.rules) :]):
            raise TypeError(
                f"{self.name}() has {len(self.rules)} gradient rules, but argument "
                f"{active.index(True, len(self.rules)) + 1} requires grad"
            )
        keep_y, uses = False, [NOTHING] * len(active)
        for wanted, (own, args) in zip(active, self._needs, strict=False):
            if wanted:
                keep_y = keep_y or own == VALUE
                for position, use in enumerate(args[: len(uses)]):
                    uses[position] = max(uses[position], use)
        return keep_y, tuple(uses)

    def _no_rule_for(self, names: set[str]) -> TypeError:
        listed = ", ".join(f"{name}=" for name in sorted(names))
        return TypeError(f"{self.name}() has no gradient rule for {listed}")

    def _save(
        self, args: Sequence[Any], raw: Sequence[Any], uses: tuple[int, ...]
    ) -> tuple[list[Any], tuple[int, ...] | None]:
        saved: list[Any] = []
        versions: list[int] | None = None
        for position, use in enumerate(uses):
            if use == NOTHING:
                saved.append(None)
            elif use == VALUE:
                arg = args[position]
                if isinstance(arg, Tensor):
                    if arg._leaf:
                        arg = arg.pinned()
                    cell = arg._cell
                    if cell is not None and cell[0]:
                        versions = versions or [0] * len(uses)
                        versions[position] = cell[0]
                saved.append(arg)
            else:
                saved.append(Meta(raw[position]))
        return saved, None if versions is None else tuple(versions)

    def _wrap_all(
        self,
        args: Sequence[Any],
        raw: Sequence[Any],
        results: tuple[Any, ...],
        kwargs: dict[str, Any],
        record: bool,
    ) -> tuple[Tensor, ...]:
        tensors = tuple([wrap(y) for y in results])
        if record:
            if kwargs and self._keywords is not None and not self._keywords.issuperset(kwargs):
                raise self._no_rule_for(set(kwargs) - self._keywords)
            parents = tuple([parent_of(arg) for arg in args])
            keep_y, uses = self._plan(parents)
            saved, versions = self._save(args, raw, uses)
            arrays = tuple([t.data for t in tensors])
            node = JointOpNode(
                self,
                parents,
                (arrays if keep_y else None, *saved),
                versions,
                kwargs,
                tuple([(y.shape, y.dtype) for y in arrays]),
            )
            for index, tensor in enumerate(tensors):
                if tensor.data.dtype.kind in "fc":
                    tensor._node = Part(node, index, tensor.data.shape, tensor.data.dtype)
                if keep_y:
                    tensor._cell = [0]
                    node.cells = (*node.cells, tensor._cell)
        for tensor in tensors:
            if tensor.data.base is not None:
                share_version(tensor, args)
        return tensors

    # ── the way back ────────────────────────────────────────────────────────────────────────────

    def gradients(self, node: OpNode, g: Any, create_graph: bool) -> Sequence[Any]:
        """Run the rules of the arguments that want a gradient."""
        saved = node.saved
        if saved is None:
            raise freed(self.name)
        values = self._restored(node, saved, create_graph) if self.saves else saved
        kwargs, parents, rules = node.kwargs, node.parents, self.rules
        if self.each is not None:
            each, (y, *args) = self.each, values
            return [
                None if parent is None else each(g, y, i, *args, **kwargs)
                for i, parent in enumerate(parents)
            ]
        if len(parents) == 1:  # then it is the one that wants a gradient
            rule = rules[0]
            if rule is None:
                return (None,)
            return (rule(g, *values, **kwargs) if kwargs else rule(g, *values),)
        found: list[Any] = []
        for parent, rule in zip(parents, rules, strict=False):
            if parent is None or rule is None:
                found.append(None)
            else:
                found.append(rule(g, *values, **kwargs) if kwargs else rule(g, *values))
        missing = len(parents) - len(found)  # arguments without a rule
        return found + [None] * missing if missing else found

    def _restored(self, node: OpNode, saved: tuple[Any, ...], create_graph: bool) -> list[Any]:
        """The saved result and arguments, after a look at their versions."""
        values = list(saved)
        y = saved[0]
        if y is not None:
            if node.cell is not None and node.cell[0]:
                raise modified(self.name)
            if create_graph:
                values[0] = wrap(y, node)
        versions = node.versions
        for position in range(1, len(saved)):
            arg = saved[position]
            if isinstance(arg, Tensor):
                cell = arg._cell
                if cell is not None and cell[0] != (versions[position - 1] if versions else 0):
                    raise modified(self.name)
                if not create_graph:
                    values[position] = arg.data
        return values

    def joint_gradients(self, node: JointOpNode, gs: list[Any], create_graph: bool) -> Any:
        """Run the one rule of an operation with several outputs."""
        ys, *args = self._restore(node, create_graph)
        filled = []
        for g, (shape, dtype) in zip(gs, node.metas, strict=True):
            if g is None and dtype.kind in "fc":
                g = np.zeros(shape, dtype)
                g = wrap(g) if create_graph else g
            filled.append(g)
        if create_graph and ys is not None:
            ys = tuple(
                wrap(y, Part(node, i, *node.metas[i]) if y.dtype.kind in "fc" else None)
                for i, y in enumerate(ys)
            )
        assert self.joint is not None
        found = self.joint(filled, ys, *args, **node.kwargs)
        if not isinstance(found, list | tuple):
            found = (found,)
        if len(found) != len(node.parents):
            raise wrong_count(self.name, len(found), len(node.parents))
        return found

    def _restore(self, node: JointOpNode, create_graph: bool) -> list[Any]:
        """The saved results and arguments, after a look at their versions."""
        if node.saved is None:
            raise freed(self.name)
        for cell in node.cells:
            if cell[0]:
                raise modified(self.name)
        ys, *args = node.saved
        versions = node.versions
        for position, arg in enumerate(args):
            if isinstance(arg, Tensor):
                written = arg._cell
                if written is not None and written[0] != (versions[position] if versions else 0):
                    raise modified(self.name)
                if not create_graph:
                    args[position] = arg.data
        return [ys, *args]


def gathered(arg: Any) -> Any:
    """A list of numbers as an array; a list with Tensors in it as their stack, recorded."""
    if not isinstance(arg, list | tuple):
        return arg
    if not _holds_tensor(arg):
        return np.asarray(arg)
    return OPS["stack"]([gathered(item) for item in arg])


def _holds_tensor(arg: Any) -> bool:
    if isinstance(arg, list | tuple):
        return any(_holds_tensor(item) for item in arg)
    return isinstance(arg, Tensor)


def library_op(name: str) -> Any:
    """The operation of the library that has this name."""
    return OPS[name]


def _rebuild_op(
    name: str, forward: Any, rules: Any, each: Any, joint: Any, shapes_only: bool, arrange: Any
) -> Op:
    return Op(
        name, forward, rules, each=each, joint=joint, shapes_only=shapes_only, arrange=arrange
    )


def parent_of(arg: Any) -> Node | None:
    """The node behind an argument, or None if no gradient is wanted for it."""
    if isinstance(arg, Tensor):
        node = arg._node
        if node is not None:
            return node
        if arg._leaf:
            return arg.accumulator()
    return None


def share_version(result: Tensor, args: Sequence[Any]) -> None:
    """Let a view count writes together with the tensor whose memory it shows."""
    base = result.data.base
    for arg in args:
        if isinstance(arg, Tensor) and (arg.data is base or arg.data.base is base):
            if arg._cell is None:
                arg._cell = [0] if result._cell is None else result._cell
            result._cell = arg._cell
            return


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
    gradient of its argument; None instead of a rule means that the argument has none. Example:

        cube = ag.op("cube", lambda a: a**3, lambda g, y, a: g * 3 * a**2)
    """
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


def wrong_count(name: str, given: int, expected: int) -> GradError:
    return GradError(
        f"the backward rule of {name} returned {given} gradients for {expected} inputs", "count"
    )
