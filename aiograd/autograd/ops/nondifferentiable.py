"""Operations whose results are truth values, positions or whole numbers: they have no gradient.

They give Tensors that do not require grad. `NOT_DIFFERENTIABLE` are further numpy functions that
simply look at the values; any other function without a gradient rule refuses a Tensor that
requires grad.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.autograd.ops.table import NUMPY, alias, numpy_op

_UFUNCS = (
    np.equal, np.not_equal, np.less, np.less_equal, np.greater, np.greater_equal,
    np.logical_and, np.logical_or, np.logical_xor, np.logical_not,
    np.isnan, np.isinf, np.isfinite, np.signbit,
    np.bitwise_and, np.bitwise_or, np.bitwise_xor, np.invert, np.left_shift, np.right_shift,
)  # fmt: skip
_FUNCTIONS = (
    np.argmax, np.argmin, np.argsort, np.nanargmax, np.nanargmin, np.all, np.any,
    np.count_nonzero, np.searchsorted, np.isclose, np.iscomplex, np.isreal,
)  # fmt: skip


# With rules of None they are operations like others: found by name, as methods and operators, and
# by other workers.
DISCRETE = {
    function.__name__: numpy_op(function, *[None] * function.nin) for function in _UFUNCS
} | {
    function.__name__: numpy_op(
        function, *[None] * (2 if function in (np.searchsorted, np.isclose) else 1)
    )
    for function in _FUNCTIONS
}

# These have no counterpart in `ag`. Listed one by one: a function of numpy that is not here and has
# no rule is refused, so that a new one can never lose a gradient silently.
NOT_DIFFERENTIABLE: frozenset[Any] = frozenset({
    np.shape, np.ndim, np.size, np.result_type, np.can_cast, np.common_type, np.min_scalar_type,
    np.iscomplexobj, np.isrealobj, np.isscalar, np.may_share_memory, np.shares_memory,
    np.array_equal, np.array_equiv, np.allclose, np.nonzero, np.flatnonzero, np.argwhere,
    np.argpartition, np.lexsort, np.digitize, np.unravel_index, np.ravel_multi_index,
    np.zeros_like, np.ones_like, np.empty_like, np.isneginf, np.isposinf, np.isin,
    np.array2string, np.array_repr, np.array_str, np.linalg.matrix_rank,
    np.save, np.savez, np.savetxt,
})  # fmt: skip

for _name, _function in {"eq": np.equal, "ne": np.not_equal}.items():
    alias(_name, NUMPY[_function])
