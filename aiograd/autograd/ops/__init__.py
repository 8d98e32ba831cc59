"""Every operation of the library, collected by name from the tables beside this file.

    zero_stride          products of arrays with strides of zero
    table                declares operations and enters them: by name, in numpy, on Tensor
    elementwise          arithmetic and functions, element by element
    shape                axes moved, merged, added
    index                picking elements out, sorting, repeating
    reduce               sums, extremes, products along axes
    join                 several arrays into one, and one into several
    products             matmul, einsum and other products
    statistics           means, quantiles, covariances, made of the above
    linalg               inverses, decompositions, norms
    fft                  Fourier transforms
    neural               activations, normalisation, losses
    convolution          convolution and pooling
    embedding            rows of a table by number
    nondifferentiable    comparisons, positions, truth values
    torch_names          the names that torch users know for some of these

Tables import `table` and those above them. Importing this package is what gives Tensor its
operators and methods. `NAMES` is what a user finds as `ag.<name>`: numpy's names with all their
aliases (`abs`, `absolute`), and torch's. `namespace` gives what is in `ag.linalg` and `ag.fft`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.autograd import numpy_protocol  # noqa: F401  each of these registers its own
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.op import OPS
from aiograd.autograd.ops import (  # noqa: F401
    convolution,
    elementwise,
    embedding,
    index,
    join,
    neural,
    nondifferentiable,
    products,
    reduce,
    shape,
    statistics,
    torch_names,
)
from aiograd.autograd.ops import fft as _spectral  # noqa: F401
from aiograd.autograd.ops import linalg as _matrices  # noqa: F401
from aiograd.autograd.ops.table import ALIASES, NUMPY, as_method


def namespace(module: Any) -> dict[str, Callable[..., Any]]:
    """Return what a module of numpy (`np.linalg`, `np.fft`) has and we have, by name."""
    # By numpy's own list of names, so that the namespaces cannot differ from it; `test` runs
    # numpy's tests.
    found = {name: NUMPY.get(getattr(module, name)) for name in module.__all__ if name != "test"}
    return {name: op for name, op in found.items() if op is not None}


def _names() -> dict[str, Callable[..., Any]]:
    spectral = namespace(np.fft)
    # `ag.fft` is the namespace; its functions are not found beside it.
    names = {name: op for name, op in OPS.items() if name not in spectral}
    # Not `dir(np)`: asking for some of those attributes loads whole packages.
    for name, function in vars(np).items():
        if callable(function) and not isinstance(function, type) and function in NUMPY:
            names[name] = NUMPY[function]
    return names | {name: OPS[own] for name, own in ALIASES.items()}


NAMES: dict[str, Callable[..., Any]] = _names()
for _name in ("conj", "clone"):  # ndarray's and torch's second names for methods
    setattr(Methods, _name, as_method(NAMES[_name]))
