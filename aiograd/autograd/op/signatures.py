"""The signature of an operation, for `help()` and editors: numpy's, as far as a gradient knows it.

    inspect.signature(ag.sum)   (a, axis=None, dtype=None, out=None, keepdims=False, *, dim=None, …)

A parameter of numpy's that no gradient rule knows (`where=`) is left out; those behind it are given
by name then, because their positions would be others than numpy's. Torch's spellings come last.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Collection
from inspect import Parameter, Signature
from typing import Any, Final

import numpy as np

from aiograd.autograd.op.spelling import with_torch_spelling

_NO_VALUE: Final = getattr(np, "_NoValue", inspect.Parameter.empty)  # numpy's "not given"


def describe(name: str, source: Any, known: Collection[str] | None, arrays: int) -> Signature:
    """Return the signature of an operation that takes what `source` takes.

    `known` are the parameters of its gradient rules (None for any), `arrays` is how many arguments
    come before them.
    """
    # A ufunc need not have a signature that `inspect` can read.
    if isinstance(source, np.ufunc):
        return _of_ufunc(source)
    found: list[Parameter] = []
    dropped = False
    for place, parameter in enumerate(inspect.signature(source).parameters.values()):
        kind = parameter.kind
        if kind is Parameter.VAR_KEYWORD or not (
            place < arrays
            or known is None
            or parameter.name in known
            or parameter.name == "out"
            or kind is Parameter.VAR_POSITIONAL
        ):
            dropped = True
            continue
        # Behind what was left out, a position would mean another parameter than in numpy.
        if dropped and kind is Parameter.POSITIONAL_OR_KEYWORD:
            kind = Parameter.KEYWORD_ONLY
        found.append(parameter.replace(kind=kind, default=_default(parameter)))
    found.sort(key=lambda parameter: parameter.kind)  # stable: only moves what became by name
    return with_torch_spelling(name, Signature(found))


def _of_ufunc(function: np.ufunc) -> Signature:
    # numpy's documentation names them so; they are given by position.
    names = ["x"] if function.nin == 1 else [f"x{i + 1}" for i in range(function.nin)]
    parameters = [Parameter(name, Parameter.POSITIONAL_ONLY) for name in names]
    parameters.append(Parameter("out", Parameter.POSITIONAL_OR_KEYWORD, default=None))
    parameters.append(Parameter("dtype", Parameter.KEYWORD_ONLY, default=None))
    return Signature(parameters)


def _default(parameter: Parameter) -> Any:
    # numpy's own "not given" would show as `<no value>`.
    if parameter.default is _NO_VALUE and parameter.default is not Parameter.empty:
        return False if parameter.name == "keepdims" else None
    return parameter.default


class LazySignature:
    """`__signature__` of objects with a method `describe`, made when somebody asks for it."""

    def __get__(self, instance: Any, owner: Any = None) -> Signature:
        if instance is None:  # the class is described by its constructor
            raise AttributeError("__signature__")
        made: Callable[[], Signature] = instance.describe
        return made()


class MethodOf:
    """An operation as a method, for `inspect`: its first parameter is `self`."""

    __signature__: LazySignature = LazySignature()

    def __init__(self, made: Callable[..., Any]) -> None:
        self.made: Callable[..., Any] = made

    def describe(self) -> Signature:
        """Return the signature of the method."""
        # Made when somebody asks: of three hundred signatures few are ever read.
        own = inspect.signature(self.made)
        first, *rest = own.parameters.values()
        me = first.replace(name="self", annotation=Parameter.empty)
        return own.replace(parameters=[me, *rest])
