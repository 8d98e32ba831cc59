"""Arithmetic and functions that work element by element.

Slopes at kinks and ties are those of PyTorch, and so is the convention for complex numbers: the
gradient of a function f with derivative f' is `g * conj(f')`.

Rules use the result `y` where they can (`exp`, `sqrt`, `tanh`): it is computed already, and the
argument need not be saved. Where a formula would divide by zero at a point whose slope is defined,
the divisor is replaced first: `np.where` computes both of its choices, and in a second derivative 0
* inf would be nan.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.polynomial.polynomial import polyval

from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op, op
from aiograd.autograd.ops.table import (
    alias,
    as_tensor,
    composite,
    conj,
    describe,
    new_op,
    numpy_op,
    zeros_for,
)
from aiograd.autograd.tensor import Tensor, wrap

LOG2, LOG10 = float(np.log(2.0)), float(np.log(10.0))


def _power_base(g: Array, y: Array, a: Array, b: Array) -> Any:
    """Slope by the base; zero for the exponent zero, also at the base zero."""
    if isinstance(b, int | float):  # the usual case: a ** 2
        return zeros_for(g) if b == 0 else g * conj(a * 2 if b == 2 else b * a ** (b - 1))
    return g * conj(np.where(b == 0, 0, b * a ** np.where(b == 0, 1, b - 1)))


def _power_exponent(g: Array, y: Array, a: Array, b: Array) -> Any:
    """Slope by the exponent; zero at the base zero, where the logarithm is infinite."""
    return g * conj(y * np.log(np.where(a == 0, 1, a)))


def _absolute(g: Array, y: Array, a: Array) -> Any:
    """The sign, or the direction of a complex number; zero at zero."""
    if a.dtype.kind != "c":
        return g * np.sign(a)
    size = np.absolute(a)
    return g * (a / np.where(size == 0, 1, size))


def _sign(g: Array, y: Array, a: Array) -> Any:
    """Zero, but a complex sign turns with its argument."""
    if g.dtype.kind != "c":
        return zeros_for(g)
    size = np.absolute(a)
    return np.where(size == 0, 0, (g - np.real(conj(y) * g) * y) / np.where(size == 0, 1, size))


def _angle(g: Array, y: Array, a: Array) -> Any:
    """Slope of the angle: at right angles to the number, and zero at zero."""
    if a.dtype.kind != "c":
        return zeros_for(g)
    square = np.real(a * conj(a))
    return g * (1j * a / np.where(square == 0, 1, square))


def _sinc(g: Array, y: Array, a: Array) -> Any:
    """Slope of sin(πa)/(πa); zero at its top."""
    nonzero = np.where(a == 0, 1, a)
    slope = (np.cos(np.pi * nonzero) - np.sinc(nonzero)) / nonzero
    return g * np.where(a == 0, 0, conj(slope))


def _square(a: Array, b: Array) -> Any:
    """Return the squared length to divide by, never zero: an angle at zero has slope zero."""
    square = a * a + b * b
    return np.where(square == 0, 1, square)


def _no_slope(g: Array, y: Array, *args: Any, **kwargs: Any) -> Any:
    """The rule of steps: zero wherever there is a slope at all."""
    return zeros_for(g)


def _larger(g: Array, a: Array, b: Array) -> Any:
    """Return what the larger of two gets: the whole gradient, half of it at a tie."""
    return np.where(a > b, g, np.where(a == b, g / 2, 0))


# fmt: off
#                         numpy            d/da                                   d/db
add: Op          = numpy_op(np.add,          lambda g, y, a, b: g,                  lambda g, y, a, b: g)
subtract: Op     = numpy_op(np.subtract,     lambda g, y, a, b: g,                  lambda g, y, a, b: -g)
multiply: Op     = numpy_op(np.multiply,     lambda g, y, a, b: g * conj(b),        lambda g, y, a, b: g * conj(a))
divide: Op       = numpy_op(np.divide,       lambda g, y, a, b: g / conj(b),        lambda g, y, a, b: -g * conj(y / b))
power: Op        = numpy_op(np.power,        _power_base,                           _power_exponent)
remainder: Op    = numpy_op(np.remainder,    lambda g, y, a, b: g,                  lambda g, y, a, b: -g * np.floor(a / b))
fmod: Op         = numpy_op(np.fmod,         lambda g, y, a, b: g,                  lambda g, y, a, b: -g * np.trunc(a / b))
floor_divide: Op = numpy_op(np.floor_divide, _no_slope,                             _no_slope)
arctan2: Op      = numpy_op(np.arctan2,      lambda g, y, a, b: g * (b / _square(a, b)), lambda g, y, a, b: -g * (a / _square(a, b)))
hypot: Op        = numpy_op(np.hypot,        lambda g, y, a, b: g * (a / y),        lambda g, y, a, b: g * (b / y))
logaddexp: Op    = numpy_op(np.logaddexp,    lambda g, y, a, b: g * np.exp(a - y),  lambda g, y, a, b: g * np.exp(b - y))
logaddexp2: Op   = numpy_op(np.logaddexp2,   lambda g, y, a, b: g * np.exp2(a - y), lambda g, y, a, b: g * np.exp2(b - y))
maximum: Op      = numpy_op(np.maximum,      lambda g, y, a, b: _larger(g, a, b),   lambda g, y, a, b: _larger(g, b, a))
minimum: Op      = numpy_op(np.minimum,      lambda g, y, a, b: _larger(g, b, a),   lambda g, y, a, b: _larger(g, a, b))
# These two ignore a nan where they can, so a nan loses against any number. A tie goes to the first
# one.
fmax: Op         = numpy_op(np.fmax,         lambda g, y, a, b: np.where((a >= b) | np.isnan(b), g, 0), lambda g, y, a, b: np.where((a >= b) | np.isnan(b), 0, g))
fmin: Op         = numpy_op(np.fmin,         lambda g, y, a, b: np.where((a <= b) | np.isnan(b), g, 0), lambda g, y, a, b: np.where((a <= b) | np.isnan(b), 0, g))
copysign: Op     = numpy_op(np.copysign,     lambda g, y, a, b: g * np.where(a == 0, 0, np.copysign(1.0, a) * np.copysign(1.0, b)), _no_slope)
heaviside: Op    = numpy_op(np.heaviside,    _no_slope,                             lambda g, y, a, b: np.where(a == 0, g, 0))

negative: Op     = numpy_op(np.negative,     lambda g, y, a: -g)
positive: Op     = numpy_op(np.positive,     lambda g, y, a: g)
square: Op       = numpy_op(np.square,       lambda g, y, a: g * conj(2 * a))
sqrt: Op         = numpy_op(np.sqrt,         lambda g, y, a: g / conj(2 * y))
cbrt: Op         = numpy_op(np.cbrt,         lambda g, y, a: g / (3 * y * y))
reciprocal: Op   = numpy_op(np.reciprocal,   lambda g, y, a: -g * conj(y * y))
exp: Op          = numpy_op(np.exp,          lambda g, y, a: g * conj(y))
exp2: Op         = numpy_op(np.exp2,         lambda g, y, a: g * (conj(y) * LOG2))
expm1: Op        = numpy_op(np.expm1,        lambda g, y, a: g * conj(y + 1))
log: Op          = numpy_op(np.log,          lambda g, y, a: g / conj(a))
log2: Op         = numpy_op(np.log2,         lambda g, y, a: g / conj(a * LOG2))
log10: Op        = numpy_op(np.log10,        lambda g, y, a: g / conj(a * LOG10))
log1p: Op        = numpy_op(np.log1p,        lambda g, y, a: g / conj(a + 1))

sin: Op          = numpy_op(np.sin,          lambda g, y, a: g * conj(np.cos(a)))
cos: Op          = numpy_op(np.cos,          lambda g, y, a: -g * conj(np.sin(a)))
tan: Op          = numpy_op(np.tan,          lambda g, y, a: g * conj(1 + y * y))
arcsin: Op       = numpy_op(np.arcsin,       lambda g, y, a: g / conj(np.sqrt(1 - a * a)))
arccos: Op       = numpy_op(np.arccos,       lambda g, y, a: -g / conj(np.sqrt(1 - a * a)))
arctan: Op       = numpy_op(np.arctan,       lambda g, y, a: g / conj(1 + a * a))
sinh: Op         = numpy_op(np.sinh,         lambda g, y, a: g * conj(np.cosh(a)))
cosh: Op         = numpy_op(np.cosh,         lambda g, y, a: g * conj(np.sinh(a)))
tanh: Op         = numpy_op(np.tanh,         lambda g, y, a: g * conj(1 - y * y))
arcsinh: Op      = numpy_op(np.arcsinh,      lambda g, y, a: g / conj(np.sqrt(a * a + 1)))
# Two roots instead of that of a*a - 1: the product has the branch cut of arccosh itself.
arccosh: Op      = numpy_op(np.arccosh,      lambda g, y, a: g / conj(np.sqrt(a - 1) * np.sqrt(a + 1)))
arctanh: Op      = numpy_op(np.arctanh,      lambda g, y, a: g / conj(1 - a * a))
sinc: Op         = numpy_op(np.sinc,         _sinc)
degrees: Op      = numpy_op(np.degrees,      lambda g, y, a: np.degrees(g))
rad2deg: Op      = numpy_op(np.rad2deg,      lambda g, y, a: np.degrees(g))
radians: Op      = numpy_op(np.radians,      lambda g, y, a: np.radians(g))
deg2rad: Op      = numpy_op(np.deg2rad,      lambda g, y, a: np.radians(g))

absolute: Op     = numpy_op(np.absolute,     _absolute)
fabs: Op         = numpy_op(np.fabs,         lambda g, y, a: g * np.sign(a))
sign: Op         = numpy_op(np.sign,         _sign)
floor: Op        = numpy_op(np.floor,        _no_slope)
ceil: Op         = numpy_op(np.ceil,         _no_slope)
trunc: Op        = numpy_op(np.trunc,        _no_slope)
rint: Op         = numpy_op(np.rint,         _no_slope)
round_: Op       = numpy_op(np.round,        _no_slope)
conjugate: Op    = numpy_op(np.conjugate,    lambda g, y, a: conj(g))
angle: Op        = numpy_op(np.angle,        lambda g, y, a, deg=False: _angle(g * (180 / np.pi) if deg else g, y, a))
nan_to_num: Op   = numpy_op(np.nan_to_num,   lambda g, y, a, copy=True, nan=0.0, posinf=None, neginf=None: np.where(np.isfinite(a), g, 0))
# fmt: on


# ── parts of complex numbers ────────────────────────────────────────────────────────────────────

# `[...]` makes a view even where numpy gives the array itself, so that versions are shared.
real: Op = numpy_op(np.real, lambda g, y, a: g, forward=lambda val: np.real(val)[...])
imag: Op = numpy_op(np.imag, lambda g, y, a: g * 1j if a.dtype.kind == "c" else zeros_for(g))


# ── choosing ────────────────────────────────────────────────────────────────────────────────────

# The condition is an argument, so that it may be a Tensor, but has no gradient: None, not zeros.
_chosen: Op = op(
    "where",
    lambda condition, a, b: np.where(condition, a, b),
    None,
    lambda g, y, condition, a, b: np.where(condition, g, 0),
    lambda g, y, condition, a, b: np.where(condition, 0, g),
)


@composite(np.where)
def where(condition: Any, *choices: Any) -> Any:
    """Take elements of the first choice where the condition holds, else of the second.

    Without choices: the positions where the condition holds, one array per axis.
    """
    if choices:
        return _chosen(condition, *choices)
    return tuple(wrap(found) for found in np.nonzero(as_tensor(condition).raw))


def _clip_arguments(
    a: Array,
    a_min: Any = None,
    a_max: Any = None,
    *,
    min: Any = None,
    max: Any = None,
    out: Any = None,
) -> Any:
    """Take bounds under numpy's old and new names, as arrays only if one is a Tensor."""
    low = a_min if min is None else min
    high = a_max if max is None else max
    out = {} if out is None else {"out": out}
    # Plain bounds are parameters: no broadcasting to undo, and nothing to save but the array.
    if not isinstance(low, Tensor) and not isinstance(high, Tensor):
        return (a,), {"low": low, "high": high, **out}
    low = -np.inf if low is None else low
    return (a, low, np.inf if high is None else high), out


def _inside(g: Array, y: Array, a: Array, low: Any = None, high: Any = None) -> Any:
    """The gradient passes between the bounds, and on them."""
    if low is not None:
        g = np.where(a >= low, g, 0)
    return g if high is None else np.where(a <= high, g, 0)


clip: Op = numpy_op(
    np.clip,
    _inside,
    # Below the lower bound its gradient is that of the result, unless the bounds are crossed: then
    # the result is the upper one.
    lambda g, y, a, low=None, high=None: np.where((a < low) & (low < high), g, 0),
    lambda g, y, a, low=None, high=None: np.where((a > high) | (low > high), g, 0),
    forward=lambda a, low=None, high=None: np.clip(a, low, high),
    arrange=_clip_arguments,
)

# The rule need not convert: the sweep brings every gradient to the dtype of its argument.
astype: Op = new_op(
    "astype",
    lambda a, dtype, copy=True: np.asarray(a).astype(dtype, copy=copy)[...],
    lambda g, y, a, dtype=None, copy=True: g,
)
copy: Op = numpy_op(np.copy, lambda g, y, a, order="K": g)


@composite()
def float_power(x1: Values, x2: Values) -> Any:
    """Raise to a power, in at least double precision."""
    dtype = np.result_type(as_tensor(x1).dtype, as_tensor(x2).dtype, np.float64)
    return as_tensor(x1).astype(dtype) ** as_tensor(x2).astype(dtype)


# ── the error function ──────────────────────────────────────────────────────────────────────────

# numpy has none. Rational approximations on four intervals, accurate to double precision (the
# coefficients are those of Sun's freely distributable math library).
_SMALL_P = (
    1.28379167095512558561e-01, -3.25042107247001499370e-01, -2.84817495755985104766e-02,
    -5.77027029648944159157e-03, -2.37630166566501626084e-05,
)  # fmt: skip
_SMALL_Q = (
    1.0, 3.97917223959155352819e-01, 6.50222499887672944485e-02, 5.08130628187576562776e-03,
    1.32494738004321644526e-04, -3.96022827877536812320e-06,
)  # fmt: skip
_MIDDLE = 8.45062911510467529297e-01
_MIDDLE_P = (
    -2.36211856075265944077e-03, 4.14856118683748331666e-01, -3.72207876035701323847e-01,
    3.18346619901161753674e-01, -1.10894694282396677476e-01, 3.54783043256182359371e-02,
    -2.16637559486879084300e-03,
)  # fmt: skip
_MIDDLE_Q = (
    1.0, 1.06420880400844228286e-01, 5.40397917702171048937e-01, 7.18286544141962662868e-02,
    1.26171219808761642112e-01, 1.36370839120290507362e-02, 1.19844998467991074170e-02,
)  # fmt: skip
_LARGE_P = (
    -9.86494403484714822705e-03, -6.93858572707181764372e-01, -1.05586262253232909814e01,
    -6.23753324503260060396e01, -1.62396669462573470355e02, -1.84605092906711035994e02,
    -8.12874355063065934246e01, -9.81432934416914548592e00,
)  # fmt: skip
_LARGE_Q = (
    1.0, 1.96512716674392571292e01, 1.37657754143519042600e02, 4.34565877475229228821e02,
    6.45387271733267880336e02, 4.29008140027567833386e02, 1.08635005541779435134e02,
    6.57024977031928170135e00, -6.04244152148580987438e-02,
)  # fmt: skip
_HUGE_P = (
    -9.86494292470009928597e-03, -7.99283237680523006574e-01, -1.77579549177547519889e01,
    -1.60636384855821916062e02, -6.37566443368389627722e02, -1.02509513161107724954e03,
    -4.83519191608651397019e02,
)  # fmt: skip
_HUGE_Q = (
    1.0, 3.03380607434824582924e01, 3.25792512996573918826e02, 1.53672958608443695994e03,
    3.19985821950859553908e03, 2.55305040643316442583e03, 4.74528541206955367215e02,
    -2.24409524465858183362e01,
)  # fmt: skip


def erf_array(a: Array) -> Any:
    """Give the error function of every element; real numbers only, as in torch."""
    if np.iscomplexobj(a):
        raise TypeError("erf() takes real numbers, not complex ones")
    a = np.asarray(a)
    dtype = a.dtype if a.dtype.kind == "f" else np.dtype(np.float64)
    flat = np.atleast_1d(a).astype(np.float64)
    size = np.abs(flat)
    # Beyond 6 it is 1 to the last bit.
    result = np.ones_like(flat)
    result[np.isnan(flat)] = np.nan
    for low, high, formula in _INTERVALS:
        here = (size >= low) & (size < high)
        if here.any():
            result[here] = formula(size[here])
    return np.copysign(result, flat).astype(dtype).reshape(a.shape)


def _small(x: Array) -> Any:
    z = x * x
    # As a correction to x, which keeps all digits near zero.
    return x + x * (polyval(z, _SMALL_P) / polyval(z, _SMALL_Q))


def _middle(x: Array) -> Any:
    s = x - 1
    return _MIDDLE + polyval(s, _MIDDLE_P) / polyval(s, _MIDDLE_Q)


def _tail(x: Array, p: tuple[float, ...], q: tuple[float, ...]) -> Any:
    # Sun's library splits x so that the exponential keeps its last digits, for the sake of 1 - erf.
    # Subtracted from 1 they do not show.
    s = 1 / (x * x)
    return 1 - np.exp(-x * x - 0.5625 + polyval(s, p) / polyval(s, q)) / x


_INTERVALS: tuple[tuple[float, float, Any], ...] = (
    (0.0, 0.84375, _small),
    (0.84375, 1.25, _middle),
    (1.25, 1 / 0.35, lambda x: _tail(x, _LARGE_P, _LARGE_Q)),
    (1 / 0.35, 6.0, lambda x: _tail(x, _HUGE_P, _HUGE_Q)),
)

erf: Op = new_op("erf", erf_array, lambda g, y, a: g * (np.exp(-a * a) * (2 / np.pi**0.5)))


# Names that torch users know.
for _name, _op in {"mul": multiply, "sub": subtract, "div": divide, "neg": negative}.items():
    alias(_name, _op)
alias("clone", copy)

describe(
    {
        "erf": """Give the error function of the normal distribution.

        >>> float(ag.erf(ag.tensor(0.0)))
        0.0
    """,
        "astype": """Convert to another dtype; the gradient comes back in the old one.

        >>> ag.astype(ag.ones(2), ag.float32).dtype
        dtype('float32')
    """,
    }
)
