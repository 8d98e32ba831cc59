"""Arithmetic and functions that work element by element."""

from __future__ import annotations

import numpy as np

from aiograd.autograd.ops.table import numpy_op


def conj(x):  # type: ignore[no-untyped-def]
    """The complex conjugate; real arrays pass as they are."""
    return np.conj(x) if getattr(x, "dtype", None) is not None and x.dtype.kind == "c" else x


# fmt: off
#                     numpy        d/da                                d/db
add      = numpy_op(np.add,      lambda g, y, a, b: g,               lambda g, y, a, b: g)
subtract = numpy_op(np.subtract, lambda g, y, a, b: g,               lambda g, y, a, b: -g)
multiply = numpy_op(np.multiply, lambda g, y, a, b: g * conj(b),     lambda g, y, a, b: g * conj(a))
divide   = numpy_op(np.divide,   lambda g, y, a, b: g / conj(b),     lambda g, y, a, b: -g * conj(a / b / b))
exp      = numpy_op(np.exp,      lambda g, y, a: g * conj(y))
tanh     = numpy_op(np.tanh,     lambda g, y, a: g * conj(1 - y * y))
# fmt: on
