# ruff: noqa: E501  a table of rows is read along the row
"""Sample inputs for every operation: what gradient checks and comparisons run on.

A sample is the arguments of one call. `Array` marks an input to differentiate by; everything else
is passed on as it is. Values keep clear of kinks, so that small differences mean something.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.autograd import Tensor


@dataclass
class Array:
    """An input that requires grad: shape, range of values, and kind."""

    shape: tuple[int, ...] = (2, 3)
    low: float = -2.03  # a crooked range: no element is a whole number
    high: float = 1.97
    kind: str = "d"  # numpy's letter: double or complex "D"
    prepare: Callable[[Any], Any] | None = None  # makes e.g. a positive definite matrix
    away_from: float | None = 0.0  # a kink that values keep a distance from
    through: Callable[[Any], Any] | None = None  # applied inside the call, and differentiated
    seed: int = 0

    def value(self) -> Any:
        rng = np.random.default_rng([self.seed, *self.shape])
        n = int(np.prod(self.shape))
        # evenly spread and shuffled: no two elements are equal, none sits on a kink
        spread = self.low + (self.high - self.low) * (np.arange(n) + 0.5) / max(n, 1)
        value = rng.permutation(spread).reshape(self.shape)
        if self.away_from is not None:
            value = value + np.where(np.abs(value - self.away_from) < 0.05, 0.11, 0.0)
        if self.kind == "D":
            other = rng.permutation(spread).reshape(self.shape)
            value = value + 1j * (other * 0.7 + 0.13)
        value = self.prepare(value) if self.prepare else value
        return np.asarray(value, self.kind)


@dataclass
class Sample:
    """One call of an operation."""

    args: tuple[Any, ...]
    kwargs: dict[str, Any] = field(default_factory=dict)
    second: bool = True  # whether the second derivative is checked too
    wrap: Callable[..., Any] | None = None  # picks what can be checked from several results

    def inputs(self) -> list[Tensor]:
        return [Tensor(array.value(), requires_grad=True) for array in self.arrays()]

    def arrays(self) -> list[Array]:
        found: list[Array] = []
        for arg in (*self.args, *self.kwargs.values()):
            found += _find(arg)
        return found

    def function(self, op: Callable[..., Any]) -> Callable[..., Any]:
        """The call as a function of its arrays alone."""

        def call(*values: Any) -> Any:
            rest = iter(
                [
                    array.through(value) if array.through else value
                    for array, value in zip(self.arrays(), values, strict=True)
                ]
            )
            args = [_fill(arg, rest) for arg in self.args]
            kwargs = {key: _fill(arg, rest) for key, arg in self.kwargs.items()}
            result = op(*args, **kwargs)
            return self.wrap(result) if self.wrap else result

        return call


def _find(arg: Any) -> list[Array]:
    if isinstance(arg, Array):
        return [arg]
    if isinstance(arg, list | tuple):
        return [array for item in arg for array in _find(item)]
    return []


def _fill(arg: Any, rest: Any) -> Any:
    if isinstance(arg, Array):
        return next(rest)
    if isinstance(arg, list | tuple):
        return type(arg)(_fill(item, rest) for item in arg)
    return arg


def s(*args: Any, second: bool = True, wrap: Any = None, **kwargs: Any) -> Sample:
    return Sample(args, kwargs, second, wrap)


def A(*shape: int, **options: Any) -> Array:  # noqa: N802  a mark in the table below
    return Array(shape, **options)


def Z(*shape: int, **options: Any) -> Array:  # noqa: N802
    return Array(shape, kind="D", **options)


def P(*shape: int, **options: Any) -> Array:  # noqa: N802  positive values
    return Array(shape, low=0.3, high=2.5, **options)


def U(*shape: int, **options: Any) -> Array:  # noqa: N802  between -1 and 1
    return Array(shape, low=-0.9, high=0.9, **options)


def _definite(a: Any) -> Any:
    h = a @ np.conj(np.swapaxes(a, -1, -2))
    return h + 2 * np.eye(a.shape[-1])


def _regular(a: Any) -> Any:
    return a + 3 * np.eye(a.shape[-2], a.shape[-1])


def _halfway(a: Any) -> Any:
    """Small differences must not leave the Hermitian matrices."""
    return (a + np.conj(np.swapaxes(a, -1, -2))) / 2


def _apart(a: Any) -> Any:
    return _halfway(a) + np.diag(np.arange(a.shape[-1]) * 3.0)


HERMITIAN = {"prepare": _apart, "through": _halfway}
DEFINITE = {"prepare": _definite, "through": _halfway}


def _spectrum(result: Any) -> Any:
    """Eigenvectors are unique up to a phase: check what does not depend on it."""
    w, v = result
    return w, np.absolute(v)


def _singular(result: Any) -> Any:
    u, values, vh = result
    first = u[..., :, :1] * vh[..., :1, :]  # the phases cancel
    return values, np.real(first), np.imag(first)


UNARY = [s(A(2, 3)), s(A()), s(A(3, 1, 2))]
BOTH = [*UNARY, s(Z(2, 2))]
BINARY = [s(A(2, 3), A(2, 3, seed=1)), s(A(2, 1, 3), A(4, 1, seed=1)), s(A(2), 1.5), s(2, A(2))]
BINARY_COMPLEX = [*BINARY, s(Z(2), Z(2, seed=1)), s(A(2), Z(2, 2)), s(Z(2), 1.5 - 2j)]
POSITIVE = [s(P(2, 3)), s(P())]
REDUCE = [
    s(A(2, 3)), s(A(2, 3), axis=0), s(A(2, 3), 1), s(A(2, 3, 2), axis=(0, -1)),
    s(A(2, 3), axis=-1, keepdims=True), s(A()), s(A(2, 3), axis=None, keepdims=True),
]  # fmt: skip
RUNNING = [s(A(2, 3)), s(A(2, 3), axis=1), s(A(4), 0), s(A(2, 2, 2), axis=-2)]
NONE = [s(A(2, 3))]  # no gradient: checked to give a Tensor that does not require grad
TWO = [s(A(2, 3), A(2, 3, seed=1))]
MANY = [s([A(2, 3), A(1, 3, seed=1)]), s([A(2)])]

# fmt: off
SAMPLES: dict[str, list[Sample]] = {
    # arithmetic
    "add": BINARY_COMPLEX, "subtract": BINARY_COMPLEX, "multiply": BINARY_COMPLEX,
    "divide": [s(A(2, 3), P(2, 3, seed=1)), s(A(2, 1, 3), P(4, 1)), s(A(2), 1.5), s(2, P(3)), s(Z(2), Z(2, seed=3)), s(A(2), 2 - 1j)],
    "power": [s(P(2, 3), A(2, 3)), s(A(3), 2), s(A(3), 3), s(A(3), 1), s(A(3), 0), s(P(3), -1.5), s(P(2, 1), A(1, 3)), s(2.0, A(2)), s(Z(2), 2), s(Z(2), Z(2, seed=2)), s(A(2), np.array([2, 3]))],
    "float_power": [s(P(2, 3), A(2, 3)), s(A(3), 2)],
    "remainder": [s(A(2, 3), P(2, 3)), s(A(3), 0.7)],
    "fmod": [s(A(2, 3), P(2, 3)), s(A(3), 0.7)],
    "floor_divide": [s(A(2, 3), P(2, 3))],
    "arctan2": [s(A(2, 3), P(2, 3)), s(A(2, 1), A(3))], "hypot": [s(A(2, 3), P(2, 3)), s(A(2, 1), P(3))],
    "logaddexp": BINARY[:2], "logaddexp2": BINARY[:2],
    "maximum": BINARY[:2], "minimum": BINARY[:2], "fmax": BINARY[:2], "fmin": BINARY[:2],
    "copysign": [s(A(2, 3), A(2, 3, seed=2))], "heaviside": [s(A(2, 3), A(2, 3, seed=1))],
    # one argument
    "negative": BOTH, "positive": BOTH, "square": BOTH, "sqrt": [*POSITIVE, s(Z(2, low=0.5))], "cbrt": POSITIVE,
    "reciprocal": [*POSITIVE, s(Z(2))], "exp": BOTH, "exp2": UNARY, "expm1": BOTH,
    "log": [*POSITIVE, s(Z(2))], "log2": [*POSITIVE, s(Z(2))], "log10": [*POSITIVE, s(Z(2))], "log1p": [*POSITIVE, s(Z(2, low=0.1))],
    "sin": BOTH, "cos": BOTH, "tan": [s(U(2, 3)), s(Z(2))], "sinh": BOTH, "cosh": BOTH, "tanh": BOTH,
    "arcsin": [s(U(2, 3)), s(Z(2, low=0.2, high=0.8))], "arccos": [s(U(2, 3)), s(Z(2, low=0.2, high=0.8))], "arctan": BOTH,
    "arcsinh": BOTH, "arccosh": [s(Array((2, 3), 1.2, 3)), s(Z(2, low=1.5))], "arctanh": [s(U(2, 3)), s(Z(2, low=0.2, high=0.8))],
    "sinc": [s(A(2, 3)), s(Z(2, 3))], "degrees": UNARY, "rad2deg": UNARY, "radians": UNARY, "deg2rad": UNARY,
    "absolute": BOTH, "fabs": UNARY, "sign": BOTH, "floor": UNARY, "ceil": UNARY, "trunc": UNARY, "rint": UNARY,
    "round": [s(A(2, 3)), s(A(2, 3), 1)],
    "conjugate": BOTH, "real": BOTH, "imag": BOTH, "angle": [s(A(2)), s(Z(2)), s(Z(2), deg=True)],
    "nan_to_num": [s(A(2, 3))],
    "where": [s(np.array([[True, False, True]]), A(2, 3), A(2, 1, seed=1)), s(np.array([True, False]), A(2), 0.0)],
    "clip": [s(A(2, 3), -1.2, 1.2), s(A(2, 3), None, 0.53), s(A(2, 3), A(3, low=-1.5, high=-1), A(1, low=0.97, high=1.1)), s(A(3), min=0.03)],
    "astype": [s(A(2, 3), np.float64), s(A(2), np.complex128)], "copy": BOTH,
    # reductions
    "sum": [*REDUCE, s(Z(2, 2), axis=0)], "mean": [*REDUCE, s(Z(2, 2), axis=0)], "prod": [*REDUCE, s(Z(2, 2), axis=0), s(A(3, 2, prepare=lambda a: np.where(a == a.max(), 0, a)), second=False), s(A(2, 3, prepare=lambda a: a * [[0, 1, 1], [1, 0, 0]]), axis=1)],
    "max": REDUCE, "min": REDUCE, "amax": REDUCE, "amin": REDUCE, "ptp": REDUCE[1:3],
    "var": [*REDUCE[:5], s(A(2, 3), ddof=1), s(Z(4))], "std": [*REDUCE[:5], s(A(2, 3), axis=1, ddof=1), s(Z(4))],
    "cumsum": [*RUNNING, s(Z(3))], "cumprod": [*RUNNING, s(Z(3)), s(A(4, prepare=lambda a: a * [1, 0, 1, 1]), axis=0), s(A(3, 2, prepare=lambda a: a * [[1, 0], [0, 1], [0, 1]]), 0)],
    "logsumexp": [*REDUCE[:6], s(A(2, 3, low=400, high=404)), s(Z(2, 3), axis=1)],
    "nansum": REDUCE[:3], "nanmean": REDUCE[:3],
    "average": [s(A(2, 3)), s(A(2, 3), axis=1, weights=P(3)), s(A(2, 3), weights=P(2, 3))],
    "quantile": [s(A(5), 0.3), s(A(2, 4), np.array([0.1, 0.7]), axis=1), s(A(2, 4), 0.5, axis=0, keepdims=True)],
    "percentile": [s(A(5), 30), s(A(2, 4), 70.0, axis=1)], "median": [s(A(5)), s(A(2, 4), axis=1), s(A(2, 4), axis=0, keepdims=True)],
    "trapezoid": [s(A(4)), s(A(2, 4), P(4), axis=1), s(A(3, 2), dx=0.5, axis=0)],
    "nanprod": REDUCE[:3], "nanmax": REDUCE[:3], "nanmin": REDUCE[:3], "nanvar": [*REDUCE[:5], s(A(2, 3), axis=1, ddof=1), s(Z(3))], "nanstd": REDUCE[:3],
    "cov": [s(A(2, 4)), s(A(4, 2), rowvar=False), s(A(4), bias=True), s(Z(2, 3))], "corrcoef": [s(A(2, 4)), s(A(4, 2), rowvar=False)],
    # shapes
    "reshape": [s(A(2, 3), (3, 2)), s(A(2, 3), -1), s(A(2, 3), (3, 2), order="F")], "ravel": [s(A(2, 3)), s(A(2, 3), order="F")],
    "squeeze": [s(A(2, 1, 3, 1)), s(A(2, 1, 3, 1), axis=1)], "expand_dims": [s(A(2, 3), 1), s(A(2), axis=(0, 2))],
    "broadcast_to": [s(A(2, 1), (3, 2, 4)), s(A(), (2,))], "broadcast_arrays": [s(A(2, 1), A(3, seed=1))],
    "atleast_1d": [s(A()), s(A(), A(2))], "atleast_2d": [s(A(3))], "atleast_3d": [s(A(2, 3))],
    "transpose": [s(A(2, 3)), s(A(2, 3, 2), (1, 2, 0)), s(A(2, 3, 2), axes=(-1, 0, 1)), s(Z(2, 2))],
    "swapaxes": [s(A(2, 3, 2), 0, 2), s(A(2, 3), -1, 0)], "moveaxis": [s(A(2, 3, 2), 0, -1), s(A(2, 3, 2), (0, 1), (1, 2))],
    "rollaxis": [s(A(2, 3, 2), 2), s(A(2, 3, 2), 0, 3)], "matrix_transpose": [s(A(2, 3, 2))],
    "flip": [s(A(2, 3)), s(A(2, 3), 1), s(A(2, 3), (0, 1))], "fliplr": NONE, "flipud": NONE, "rot90": [s(A(2, 3)), s(A(2, 3, 2), 3, (0, 2))],
    "roll": [s(A(2, 3), 1), s(A(2, 3), 2, axis=1), s(A(2, 3), (1, 1), axis=(0, 1))],
    "tril": [s(A(3, 3)), s(A(2, 3, 2), -1)], "triu": [s(A(3, 3)), s(A(2, 3), 1)],
    "diagonal": [s(A(3, 3)), s(A(2, 4), 1), s(A(4, 2), -1), s(A(2, 3, 2), 0, 0, 2), s(A(2, 3, 4), offset=1, axis1=-2, axis2=-1)],
    "diag": [s(A(3)), s(A(3), 1), s(A(3, 4), -1)], "diagflat": [s(A(2, 2))], "trace": [s(A(3, 3)), s(A(2, 3, 3), offset=1, axis1=1, axis2=2)],
    "pad": [s(A(2, 3), 1), s(A(2, 3), ((1, 0), (0, 2)), constant_values=3.0), s(A(3), 2, "reflect"), s(A(2, 3), 1, mode="edge"), s(A(3), 2, mode="wrap"), s(A(3), 2, mode="symmetric")],
    "diff": [s(A(4)), s(A(2, 4), 2), s(A(3, 2), axis=0), s(A(3), prepend=0.0, append=A(2))], "ediff1d": [s(A(2, 2))],
    "gradient": [s(A(4)), s(A(3, 2), 0.5), s(A(3, 2), 0.5, 2.0), s(A(3, 4), axis=1)],
    # indexing
    "delete": [s(A(4), 1), s(A(3, 2), [0, 2], axis=0)], "sliding_window_view": [s(A(5), 2), s(A(3, 4), (2, 3)), s(A(2, 4), 3, axis=1), s(A(6), (2, 2), axis=(0, 0))],
    "getitem": [s(A(3, 4), 1), s(A(3, 4), (slice(None), slice(1, None, 2))), s(A(3, 4), ([0, 2, 0], [1, 1, 1])), s(A(3, 4), (..., None, -1)), s(A(3), np.array([True, False, True])), s(A(3, 4), np.array([[0, 0], [2, 0]])), s(A(2, 3), (slice(None, None, -1), [0, 0]))],
    "take": [s(A(2, 3), [0, 5, 0]), s(A(2, 3), np.array([[0, 0], [2, 1]]), axis=1), s(A(2, 3), -1, axis=0), s(A(3), [4, -5], mode="wrap"), s(A(3), [4, -5], mode="clip")],
    "take_along_axis": [s(A(2, 3), np.array([[0, 0], [2, 1]]), axis=1), s(A(3), np.array([2, 2]), 0), s(A(2, 2), np.array([3, 3, 1]), None)],
    "compress": [s([True, False, True], A(3, 2), axis=0), s([0, 1], A(3))],
    "sort": [s(A(2, 3)), s(A(3, 2), axis=0), s(A(2, 3), axis=None)], "partition": [s(A(2, 4), 2), s(A(5), 1)],
    "repeat": [s(A(2, 3), 2), s(A(2, 3), 2, axis=1), s(A(2, 2), [1, 3], axis=0)], "tile": [s(A(2, 3), 2), s(A(2), (2, 3)), s(A(2, 1, 2), (2, 1))],
    # joining and splitting
    "concatenate": [*MANY, s([A(2, 1), A(2, 2)], axis=-1), s([A(2, 1), A(3)], axis=None), s([A(2), Z(2)])], "stack": [s([A(2, 3), A(2, 3, seed=1)]), s([A(2), A(2, seed=1)], axis=-1), s([A(2), np.ones(2)], 1)],
    "vstack": [s([A(3), A(2, 3)])], "hstack": [s([A(3), A(2)]), s([A(2, 1), A(2, 2)])], "dstack": [s([A(2, 2), A(2, 2, seed=1)])], "column_stack": [s([A(3), A(3, 2)])],
    "append": [s(A(2, 2), A(3)), s(A(1, 2), A(2, 2), axis=0)], "meshgrid": [s(A(2), A(3)), s(A(2), A(3), A(2, seed=4), indexing="ij"), s(A(2), A(3), A(2, seed=4))],
    "split": [s(A(4, 2), 2), s(A(2, 4), [1, 3], axis=1)], "array_split": [s(A(5), 2)], "hsplit": [s(A(2, 4), 2), s(A(4), 2)], "vsplit": [s(A(4, 2), 2)], "dsplit": [s(A(1, 2, 4), [1])],
    "unstack": [s(A(2, 3)), s(A(2, 3), axis=1)],
    # products
    "matmul": [s(A(2, 3), A(3, 2)), s(A(3), A(3, seed=1)), s(A(3), A(3, 2)), s(A(2, 3), A(3)), s(A(2, 2, 3), A(3, 2)), s(A(3), A(2, 3, 2)), s(A(2, 2, 3), A(3)), s(A(2, 1, 2, 3), A(2, 3, 1)), s(Z(2, 2), Z(2, 2, seed=1)), s(A(2, 2), Z(2)), s(A(2, 2, 2), Z(2, 2))],
    "bmm": [s(A(2, 2, 3), A(2, 3, 1))],
    "dot": [s(A(2, 3), A(3, 2)), s(A(3), A(3, seed=1)), s(A(2, 3), 2.0), s(A(2, 1, 3), A(2, 3, 2)), s(A(2, 2, 3), A(3))],
    "vdot": [s(A(2, 2), A(4)), s(Z(3), Z(3, seed=1))], "inner": [s(A(2, 3), A(4, 3)), s(A(3), 2.0)], "outer": [s(A(2), A(3)), s(A(2, 2), A(2))],
    "tensordot": [s(A(2, 3, 2), A(3, 2, 2)), s(A(2, 3), A(3, 2), 1), s(A(2, 3, 2), A(2, 3), ([0, 1], [0, 1])), s(A(2), A(3), 0)],
    "kron": [s(A(2, 2), A(2, 3)), s(A(2), A(2, 2))], "cross": [s(A(2, 3), A(3)), s(A(3, 2), A(3, 2, seed=1), axis=0)], "vecdot": [s(A(2, 3), A(3)), s(Z(3), Z(3, seed=2))],
    "einsum": [s("ij,jk->ik", A(2, 3), A(3, 2)), s("ii->i", A(3, 3)), s("ii", A(3, 3)), s("ij->", A(2, 3)), s("...ij,...j", A(2, 2, 3), A(3)), s("i,j,ij", A(2), A(3), A(2, 3)), s("bij,bjk->bik", A(2, 1, 2), A(2, 2, 3)), s("ij->ji", Z(2, 2)), s("ij,kj->ik", Z(2, 2), Z(2, 2, seed=3)), s("iij,j->i", A(2, 2, 3), A(3)), s("...i,...i->...", A(1, 3), A(2, 3))],
    "multi_dot": [s([A(2, 3), A(3, 1), A(1, 2)]), s([A(3), A(3, 2), A(2)])],
    # linear algebra
    "inv": [s(A(3, 3, prepare=_regular)), s(A(2, 2, 2, prepare=_regular)), s(Z(2, 2, prepare=_regular))],
    "det": [s(A(3, 3, prepare=_regular)), s(A(2, 2, 2, prepare=_regular)), s(Z(2, 2, prepare=_regular)), s(A(3, 3, prepare=lambda a: np.outer([1.0, 2, 3], [1.0, -1, 2]) + np.outer([1.0, 0, 1], [2.0, 1, 0])), second=False), s(Z(2, 2, prepare=lambda a: np.outer([1, 2j], [1 + 1j, 3])), second=False)],
    "slogdet": [s(A(3, 3, prepare=_regular)), s(A(2, 2, 2, prepare=_regular)), s(Z(2, 2, prepare=_regular))],
    "solve": [s(A(3, 3, prepare=_regular), A(3)), s(A(2, 2, prepare=_regular), A(2, 3)), s(A(2, 2, 2, prepare=_regular), A(2, 2, 1)), s(Z(2, 2, prepare=_regular), Z(2))],
    "cholesky": [s(A(3, 3, **DEFINITE)), s(A(2, 2, 2, **DEFINITE)), s(Z(2, 2, **DEFINITE)), s(A(2, 2, **DEFINITE), upper=True)],
    "eigh": [s(A(3, 3, **HERMITIAN), wrap=_spectrum), s(Z(2, 2, **HERMITIAN), wrap=_spectrum)], "eigvalsh": [s(A(3, 3, **HERMITIAN)), s(Z(2, 2, **HERMITIAN))],
    "svd": [s(A(3, 2), False, wrap=_singular), s(A(2, 3), False, wrap=_singular), s(A(2, 2, 3), compute_uv=False), s(Z(2, 2), wrap=_singular, second=False), s(Z(3, 2), False, wrap=_singular, second=False)],
    "qr": [s(A(3, 3, prepare=_regular)), s(A(3, 2, prepare=_regular)), s(A(2, 3, prepare=_regular)), s(Z(2, 2, prepare=_regular))],
    "pinv": [s(A(3, 2)), s(A(2, 3)), s(Z(2, 2, prepare=_regular))],
    "matrix_power": [s(A(2, 2), 3), s(A(2, 2), 0), s(A(2, 2, prepare=_regular), -2)],
    "norm": [s(A(2, 3)), s(A(2, 3), axis=1), s(A(2, 3), 1, axis=0), s(A(2, 3), np.inf), s(A(2, 3), 2), s(A(2, 3), "nuc"), s(A(2, 3, 2), "fro", axis=(0, 2)), s(A(3), 3, keepdims=True), s(Z(3)), s(A(2, 3), axis=1, keepdims=True)],
    "vector_norm": [s(A(2, 3)), s(A(2, 3), axis=1, ord=3), s(Z(3), ord=1), s(A(3), ord=np.inf)], "matrix_norm": [s(A(2, 3)), s(A(2, 2, 3), ord=1), s(A(2, 3), ord=2, keepdims=True)],
    # Fourier
    "fft": [s(Z(4)), s(A(4)), s(Z(2, 3), axis=0), s(Z(3), 5), s(Z(4), 2, norm="ortho")], "ifft": [s(Z(4)), s(Z(3), 2), s(Z(3), norm="forward")],
    "rfft": [s(A(4)), s(A(5)), s(A(2, 4), axis=0), s(A(4), 6), s(A(4), 3, norm="ortho")], "irfft": [s(Z(3)), s(Z(3), 5), s(Z(2, 3), axis=0), s(Z(3), 2, norm="ortho")],
    "rfft2": [s(A(2, 4))], "rfftn": [s(A(2, 2, 3)), s(A(3, 4), s=(2, 2))], "irfft2": [s(Z(2, 3))], "irfftn": [s(Z(2, 3)), s(Z(2, 3), s=(2, 3))],
    "fft2": [s(Z(2, 3))], "ifft2": [s(Z(2, 3))], "fftn": [s(Z(2, 2, 2)), s(A(2, 3), s=(2, 2), axes=(0, 1))], "ifftn": [s(Z(2, 3))], "fftshift": [s(A(2, 3)), s(A(5))], "ifftshift": [s(A(2, 3), axes=1)],
    # neural networks
    "relu": UNARY, "sigmoid": [*UNARY, s(Z(2, 3))], "silu": UNARY, "erf": UNARY, "gelu": [*UNARY, s(A(2, 3), approximate="tanh")], "softplus": UNARY,
    "leaky_relu": [s(A(2, 3)), s(A(2, 3), 0.3)], "elu": [s(A(2, 3)), s(A(3), alpha=0.5)],
    "softmax": [s(A(2, 3)), s(A(2, 3), axis=0)], "log_softmax": [s(A(2, 3)), s(A(2, 3, 2), axis=1)],
    "dropout": [s(A(2, 3), 0.5, training=False), s(A(3), 0.0)],
    "layer_norm": [s(A(2, 3), 3), s(A(2, 2, 3), (2, 3), A(2, 3), A(2, 3, seed=1))],
    "batch_norm": [s(A(4, 2), None, None, P(2), A(2), True), s(A(2, 2, 2, 1), training=True), s(A(3, 2), np.array([0.1, 0.2]), np.array([1.0, 2.0]), P(2), A(2))],
    "mse_loss": TWO, "l1_loss": [s(A(2, 3), A(2, 3, low=3, high=4)), s(A(3), A(3, low=3, high=4), reduction="none")],
    "nll_loss": [s(A(3, 4), np.array([0, 3, 3])), s(A(3, 4), np.array([0, -100, 3]), weight=np.array([1.0, 2, 3, 4])), s(A(2, 3, 2), np.array([[0, 1], [2, 2]]), reduction="none"), s(A(4), np.array(2))],
    "cross_entropy": [s(A(3, 4), np.array([0, 3, 3])), s(A(3, 4), np.array([0, -100, 3]), np.array([1.0, 2, 3, 4]), label_smoothing=0.1), s(A(2, 3), P(2, 3)), s(A(2, 3, 2), np.array([[0, 1], [2, 2]]), reduction="sum")],
    "binary_cross_entropy_with_logits": [s(A(2, 3), P(2, 3)), s(A(2, 3), np.full((2, 3), 0.3), pos_weight=np.array([1.0, 2, 3]), reduction="sum"), s(A(3), np.ones(3), weight=np.array([1.0, 2, 3]))],
    "embedding": [s(np.array([0, 2, 0]), A(3, 2)), s(np.array([[0, 2], [2, 2]]), A(3, 2), padding_idx=1), s(np.arange(40) % 3, A(3, 2))],
    "embedding_bag": [s(np.array([0, 2, 0, 1]), A(3, 2), np.array([0, 2, 2])), s(np.array([[0, 2], [1, 1]]), A(3, 2), mode="sum", per_sample_weights=A(2, 2, seed=4)), s(np.array([0, 2, 0, 1]), A(3, 2), np.array([0, 3, 4]), mode="max"), s(np.array([[0, 2], [1, 1]]), A(3, 2), mode="mean", padding_idx=1)],
    "conv1d": [s(A(1, 1, 5), A(1, 1, 2)), s(A(2, 2, 5), A(2, 1, 3), A(2), stride=2, padding=1, groups=2), s(A(2, 6), A(1, 2, 2), dilation=2, second=False), s(A(1, 1, 4), A(2, 1, 3), padding="same", second=False)],
    "conv2d": [s(A(1, 1, 3, 3), A(1, 1, 2, 2)), s(A(1, 2, 3, 3), A(2, 1, 2, 2), A(2), stride=2, padding=1, groups=2), s(A(1, 1, 4, 4), A(2, 1, 2, 2), dilation=2, second=False), s(A(1, 3, 2), A(1, 1, 3, 1), padding="same", second=False), s(Z(1, 1, 3, 3), Z(1, 1, 2, 2))],
    "max_pool2d": [s(A(1, 1, 4, 4), 2), s(A(1, 1, 3, 3), 2, stride=1, padding=1)], "avg_pool2d": [s(A(1, 2, 4, 2), 2), s(A(1, 1, 3, 3), 2, 1, 1, count_include_pad=False)],
    # no gradient
    **dict.fromkeys(("equal", "not_equal", "less", "less_equal", "greater", "greater_equal", "logical_and", "logical_or", "logical_xor", "isclose"), TWO),
    **dict.fromkeys(("logical_not", "isnan", "isinf", "isfinite", "signbit", "argmax", "argmin", "argsort", "nanargmax", "nanargmin", "all", "any", "count_nonzero", "iscomplex", "isreal"), NONE),
    **{name: [s(np.array([1, 2]), np.array([3, 1]))] for name in ("bitwise_and", "bitwise_or", "bitwise_xor", "left_shift", "right_shift")},
    "invert": [s(np.array([1, 2]))], "searchsorted": [s(np.array([0.0, 1.0]), A(3))],
}
# fmt: on
DISCRETE = {
    "equal",
    "not_equal",
    "less",
    "less_equal",
    "greater",
    "greater_equal",
    "logical_and",
    "logical_or",
    "logical_xor",
    "isclose",
    "logical_not",
    "isnan",
    "isinf",
    "isfinite",
    "signbit",
    "argmax",
    "argmin",
    "argsort",
    "nanargmax",
    "nanargmin",
    "all",
    "any",
    "count_nonzero",
    "iscomplex",
    "isreal",
    "bitwise_and",
    "bitwise_or",
    "bitwise_xor",
    "left_shift",
    "right_shift",
    "invert",
    "searchsorted",
}  # fmt: skip
