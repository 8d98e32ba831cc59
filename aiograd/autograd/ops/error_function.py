"""The error function on arrays, which numpy lacks.

Rational approximations on four intervals, accurate to double precision (the coefficients are those of
Sun's freely distributable math library).
"""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.polynomial.polynomial import polyval

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


def erf_array(x: Any) -> Any:
    """The error function of every element."""
    x = np.asarray(x)
    dtype = x.dtype if x.dtype.kind == "f" else np.dtype(np.float64)
    flat = np.atleast_1d(x).astype(np.float64)
    size = np.abs(flat)
    result = np.ones_like(flat)  # beyond 6 it is 1 to the last bit
    result[np.isnan(flat)] = np.nan
    for low, high, formula in _INTERVALS:
        here = (size >= low) & (size < high)
        if here.any():
            result[here] = formula(size[here])
    return np.copysign(result, flat).astype(dtype).reshape(x.shape)


def _small(x: Any) -> Any:
    z = x * x
    return x + x * (polyval(z, _SMALL_P) / polyval(z, _SMALL_Q))


def _middle(x: Any) -> Any:
    s = x - 1
    return _MIDDLE + polyval(s, _MIDDLE_P) / polyval(s, _MIDDLE_Q)


def _tail(x: Any, p: tuple[float, ...], q: tuple[float, ...]) -> Any:
    s = 1 / (x * x)
    return 1 - np.exp(-x * x - 0.5625 + polyval(s, p) / polyval(s, q)) / x


_INTERVALS: tuple[tuple[float, float, Any], ...] = (
    (0.0, 0.84375, _small),
    (0.84375, 1.25, _middle),
    (1.25, 1 / 0.35, lambda x: _tail(x, _LARGE_P, _LARGE_Q)),
    (1 / 0.35, 6.0, lambda x: _tail(x, _HUGE_P, _HUGE_Q)),
)
