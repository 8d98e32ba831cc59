"""What a gradient rule reads, found from its bytecode, and so what to save for it.

A rule is called as `rule(g, y, *args, **kwargs)`. Its bytecode shows whether it uses the result and
each argument at all, or only their shape, so that an operation saves nothing needlessly. The
alternative, a list of what to save beside each rule, would be a second truth that can be wrong.
Where the bytecode does not show it (builtins, `*args`, inner functions), everything is saved: safe,
and only memory.
"""

from __future__ import annotations

import dis
import inspect
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.array import Array

Rule = Callable[..., Any]

#: One per argument, None where no gradient is wanted; None instead of all: one rule for each.
Rules = Sequence[Any] | None

NOTHING, SHAPE, VALUE = 0, 1, 2  # how much of an argument a rule needs

# Attributes that `Meta` has too.
_SHAPELIKE = {"shape", "ndim", "dtype", "size"}


class Meta:
    """The shape and dtype of an array that a rule does not need itself."""

    __slots__ = ("dtype", "shape")

    def __init__(self, array: Array) -> None:
        if array.__class__ is not np.ndarray and not hasattr(array, "dtype"):
            array = np.asarray(array)
        self.shape: tuple[int, ...] = array.shape
        self.dtype: Any = array.dtype

    @property
    def ndim(self) -> int:
        """The number of axes."""
        return len(self.shape)

    @property
    def size(self) -> int:
        """The number of elements."""
        return int(np.prod(self.shape, dtype=np.int64))


class Plan:
    """What to keep of one way to use an operation, and the rules that will read it."""

    __slots__ = ("keeps_result", "rules", "shapes", "values")

    def __init__(self, keeps_result: bool, uses: Sequence[int], rules: Rules) -> None:
        self.keeps_result: bool = keeps_result
        self.values: tuple[int, ...] = tuple([i for i, use in enumerate(uses) if use == VALUE])
        self.shapes: tuple[int, ...] = tuple([i for i, use in enumerate(uses) if use == SHAPE])
        self.rules: Sequence[Any] | None = rules


def needs(rule: Rule | None) -> tuple[int, tuple[int, ...]]:
    """Return how much a rule reads of the result, and of each positional argument."""
    if rule is None:
        return NOTHING, ()
    names = _positional(rule)
    if names is None:
        # Not a Python function: save everything. No operation has 16 arguments with rules of their
        # own; a plan takes as many as there are.
        return VALUE, (VALUE,) * 16
    if rule.__code__.co_flags & inspect.CO_VARARGS:
        return _use(rule, names[1]), (VALUE,) * 16
    return _use(rule, names[1]), tuple(_use(rule, name) for name in names[2:])


def needs_variadic(rule: Rule) -> tuple[int, int]:
    """Return how much an `each` or `joint` rule reads of the result, and of all arguments."""
    names = _positional(rule)
    if names is None:
        return VALUE, VALUE
    code = rule.__code__
    rest = names[2:]
    if code.co_flags & inspect.CO_VARARGS:
        rest.append(code.co_varnames[code.co_argcount + code.co_kwonlyargcount])
    return _use(rule, names[1]), max((_use(rule, name) for name in rest), default=NOTHING)


def _positional(rule: Rule) -> list[str] | None:
    """Return the names of the positional parameters; None if they cannot be known."""
    if not inspect.isfunction(rule):
        return None
    code = rule.__code__
    names = list(code.co_varnames[: code.co_argcount])
    return names if len(names) >= 2 else None


def _use(rule: Rule, name: str) -> int:
    """Return how much of the parameter `name` the rule reads."""
    if name in rule.__code__.co_cellvars:
        return VALUE  # an inner function reads it, whose bytecode is not looked at
    use = NOTHING
    instructions = list(dis.get_instructions(rule))
    for here, after in zip(instructions, [*instructions[1:], None], strict=True):
        # Newer Pythons read two locals in one instruction, whose argument is a pair of names; what
        # follows it is applied to the second.
        read = here.argval if isinstance(here.argval, tuple) else (here.argval,)
        # Any access counts, an assignment too: a rule that binds the name anew keeps a value it may
        # not need, never the other way round.
        if "FAST" in here.opname and name in read:
            shapelike = (
                after is not None
                and after.opname == "LOAD_ATTR"
                and after.argval in _SHAPELIKE
                and read[-1] == name
                and read.count(name) == 1
            )
            use = max(use, SHAPE if shapelike else VALUE)
    return use


def keywords(rules: Sequence[Rule | None]) -> frozenset[str] | None:
    """Return the parameters that every rule knows; None if a rule takes any."""
    known: set[str] | None = None
    for rule in rules:
        if rule is None:
            continue
        if not inspect.isfunction(rule) or rule.__code__.co_flags & inspect.CO_VARKEYWORDS:
            continue
        code = rule.__code__
        # The names of arrays are among them, which does no harm: arrays are never passed by
        # keyword.
        names = set(code.co_varnames[2 : code.co_argcount + code.co_kwonlyargcount])
        known = names if known is None else known & names
    return None if known is None else frozenset(known)
