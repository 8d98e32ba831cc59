"""New tensors: from data, filled with a value, counted, or random.

Names are numpy's and torch's. Numbers are float64 unless a dtype is given, as everywhere in numpy.
A `generator` is a numpy Generator or a seed; without one `random` decides (`ag.manual_seed`).
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.handed_out import watched_source
from aiograd.autograd.random import Generator, generator_or_default
from aiograd.autograd.tensor import Tensor, check_numbers, wrap


def tensor(data: Values, requires_grad: bool = False, dtype: Any = None) -> Tensor:
    """Copy data (an array, numbers, nested lists, another Tensor) into a new tensor.

    >>> ag.tensor([[1, 2], [3, 4]], dtype=ag.float32).shape
    (2, 2)
    """
    if isinstance(data, Tensor):
        data = data.raw
    elif isinstance(data, list | tuple):
        data = _values(data)
    return Tensor(data, requires_grad, dtype)


def _values(data: Values) -> Any:
    """Return nested lists with Tensors in them as nested lists of arrays."""
    if isinstance(data, list | tuple):
        return [_values(item) for item in data]
    # For reading: nothing is handed out that would have to be watched.
    return data._dense() if isinstance(data, Tensor) else data


def from_numpy(array: np.ndarray[Any, Any], requires_grad: bool = False) -> Tensor:
    """Make a tensor over the memory of an array: a change of one is seen by the other.

    >>> array = np.zeros(2)
    >>> t = ag.from_numpy(array)
    >>> array[0] = 5
    >>> t
    tensor([5., 0.])

    A write to the array that a graph would have to know of makes that graph's backward pass a
    GradError; the limits are in `autograd/handed_out.py`.
    """
    if not isinstance(array, np.ndarray):
        raise TypeError(f"from_numpy() takes an ndarray, not {type(array).__name__}")
    check_numbers(array.dtype, "an array")
    # A view, and not the array: a subclass (a matrix, a masked array) has its own arithmetic. The
    # memory is shared either way.
    result = _made(array.view(np.ndarray), requires_grad)
    # Others may hold the array and write to it, while a graph needs it. A read-only one cannot
    # change.
    if array.flags.writeable:
        result._cell = watched_source(result.raw)
    return result


def _made(array: Array, requires_grad: bool) -> Tensor:
    result = wrap(array)
    if requires_grad:
        result.requires_grad = True
    return result


def _shape(numbers: tuple[Any, ...]) -> Any:
    """Shapes come as numbers or as one tuple."""
    # Not by `isinstance(…, tuple)`: a list or an array of numbers is a shape, too.
    if len(numbers) == 1 and not isinstance(numbers[0], int | np.integer):
        return tuple(numbers[0])
    return numbers


def zeros(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor of zeros.

    >>> ag.zeros(2)
    tensor([0., 0.])
    >>> ag.zeros((2, 3)).shape
    (2, 3)
    """
    return _made(np.zeros(_shape(shape), dtype or np.float64), requires_grad)


def ones(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor of ones.

    >>> ag.ones(2, requires_grad=True)
    tensor([1., 1.], requires_grad=True)
    """
    return _made(np.ones(_shape(shape), dtype or np.float64), requires_grad)


def empty(*shape: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor without setting its elements.

    >>> ag.empty(2, 3).shape
    (2, 3)
    """
    return _made(np.empty(_shape(shape), dtype or np.float64), requires_grad)


def full(shape: Any, fill_value: Values, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make a tensor with one value everywhere.

    >>> ag.full((2,), 7.0)
    tensor([7., 7.])
    """
    size = (shape,) if isinstance(shape, int | np.integer) else tuple(shape)
    # The value alone: a new tensor is a leaf.
    value = fill_value.raw if isinstance(fill_value, Tensor) else fill_value
    return _made(np.full(size, value, dtype), requires_grad)


def eye(
    n: int, m: int | None = None, k: int = 0, *, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """Make a matrix with ones on a diagonal.

    >>> ag.eye(2).tolist()
    [[1.0, 0.0], [0.0, 1.0]]
    """
    return _made(np.eye(n, m, k, dtype=dtype or np.float64), requires_grad)


def arange(*limits: Any, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Count from start (0) to stop, without it, in steps (1).

    >>> ag.arange(3).tolist(), ag.arange(1, 2, 0.5).tolist()
    ([0, 1, 2], [1.0, 1.5])
    """
    return _made(np.arange(*limits, dtype=dtype), requires_grad)


def linspace(
    start: Any, stop: Any, num: int = 50, *, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """Go from start to stop, both included, in even steps.

    >>> ag.linspace(0, 1, 3)
    tensor([0. , 0.5, 1. ])
    """
    return _made(np.linspace(start, stop, num, dtype=dtype), requires_grad)


# ── random ──────────────────────────────────────────────────────────────────────────────────────


def rand(
    *shape: Any,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Generator | int | None = None,
) -> Tensor:
    """Draw evenly between 0 and 1.

    >>> ag.rand(2, 3, generator=0).shape
    (2, 3)
    """
    # Drawn as float64 and rounded, so that a seed gives the same numbers in every dtype.
    drawn = generator_or_default(generator).random(_shape(shape))
    return _made(np.asarray(drawn, dtype or np.float64), requires_grad)


def randn(
    *shape: Any,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Generator | int | None = None,
) -> Tensor:
    """Draw from the normal distribution with mean 0 and variance 1.

    >>> ag.randn(64, 784, dtype=ag.float32).shape
    (64, 784)
    """
    # As in `rand`: drawn as float64, and rounded.
    drawn = generator_or_default(generator).standard_normal(_shape(shape))
    return _made(np.asarray(drawn, dtype or np.float64), requires_grad)


def randint(
    low: int,
    high: Any = None,
    *shape: Any,
    size: Any = None,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Generator | int | None = None,
) -> Tensor:
    """Draw whole numbers from low (0) up to high, without it: `randint(0, 10, (2, 3))`.

    >>> ag.randint(0, 10, (2, 3)).shape
    (2, 3)
    """
    if high is not None and not isinstance(high, int | np.integer):
        low, high, shape = 0, low, (high,)  # randint(10, (2, 3)), as torch has it
    if size is not None:
        shape = (size,)
    drawn = generator_or_default(generator).integers(low, high, _shape(shape))
    return _made(np.asarray(drawn, dtype or np.int64), requires_grad)


# ── like another ────────────────────────────────────────────────────────────────────────────────


def _like(other: Any, dtype: Any) -> tuple[tuple[int, ...], Any]:
    # Only shape and dtype are read, so a sparse tensor stays as it is.
    array = other if isinstance(other, Tensor) else np.asarray(other)
    return tuple(array.shape), dtype or array.dtype


def zeros_like(other: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make zeros of another tensor's shape and dtype.

    >>> ag.zeros_like(ag.ones(2))
    tensor([0., 0.])
    """
    return _made(np.zeros(*_like(other, dtype)), requires_grad)


def ones_like(other: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make ones of another tensor's shape and dtype.

    >>> ag.ones_like(ag.zeros(2))
    tensor([1., 1.])
    """
    return _made(np.ones(*_like(other, dtype)), requires_grad)


def empty_like(other: Any, *, dtype: Any = None, requires_grad: bool = False) -> Tensor:
    """Make an uninitialised tensor of another one's shape and dtype.

    >>> ag.empty_like(ag.ones(2, 3)).shape
    (2, 3)
    """
    return _made(np.empty(*_like(other, dtype)), requires_grad)


def full_like(
    other: Any, fill_value: Values, *, dtype: Any = None, requires_grad: bool = False
) -> Tensor:
    """Make a tensor of another one's shape and dtype, with one value everywhere.

    >>> ag.full_like(ag.ones(2), 7)
    tensor([7., 7.])
    """
    shape, dtype = _like(other, dtype)
    return full(shape, fill_value, dtype, requires_grad)


def rand_like(
    other: Any,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Generator | int | None = None,
) -> Tensor:
    """Draw evenly between 0 and 1, in another tensor's shape and dtype.

    >>> ag.rand_like(ag.ones(2, 3)).shape
    (2, 3)
    """
    shape, dtype = _like(other, dtype)
    return rand(shape, dtype=dtype, requires_grad=requires_grad, generator=generator)


def randn_like(
    other: Any,
    *,
    dtype: Any = None,
    requires_grad: bool = False,
    generator: Generator | int | None = None,
) -> Tensor:
    """Draw from the normal distribution, in another tensor's shape and dtype.

    >>> ag.randn_like(ag.ones(2, 3)).shape
    (2, 3)
    """
    shape, dtype = _like(other, dtype)
    return randn(shape, dtype=dtype, requires_grad=requires_grad, generator=generator)


def randint_like(
    other: Any,
    low: int,
    high: int | None = None,
    *,
    dtype: Any = None,
    generator: Generator | int | None = None,
) -> Tensor:
    """Draw whole numbers, in another tensor's shape and dtype.

    >>> ag.randint_like(ag.ones(2, 3), 10).shape
    (2, 3)
    """
    shape, dtype = _like(other, dtype)
    return randint(low, high, size=shape, dtype=dtype, generator=generator)
