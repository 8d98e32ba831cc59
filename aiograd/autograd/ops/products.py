"""Products of vectors, matrices and higher arrays."""

from __future__ import annotations

import string
from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op
from aiograd.autograd.ops.shape import moveaxis, ravel
from aiograd.autograd.ops.table import alias, as_tensor, composite, conj, new_op, numpy_op
from aiograd.autograd.ops.zero_stride import all_rows, product

# ── matmul ──────────────────────────────────────────────────────────────────────────────────────


def _turned(a: Array) -> Any:
    """Return the conjugate transpose of the last two axes."""
    # `.T` costs less than `swapaxes`, and most are plain matrices.
    return conj(a).T if a.ndim == 2 else np.swapaxes(conj(a), -1, -2)


def _matmul_left(g: Array, y: Array, a: Array, b: Array) -> Any:
    """The gradient times the other factor, transposed; vectors as numpy's matmul takes them."""
    # The common case first: no branch on shapes before it.
    if a.ndim == b.ndim == 2:
        return product(g, conj(b).T)
    if b.ndim == 1:
        return g * conj(b) if a.ndim == 1 else g[..., None] * conj(b)
    if a.ndim == 1:
        return np.matmul(conj(b), g[..., None])[..., 0]
    return product(g, _turned(b))


def _matmul_right(g: Array, y: Array, a: Array, b: Array) -> Any:
    """The other factor, transposed, times the gradient."""
    if a.ndim == b.ndim == 2:
        return product(conj(a).T, g)
    if a.ndim == 1:
        return g * conj(a) if b.ndim == 1 else conj(a)[:, None] * g[..., None, :]
    if b.ndim == 1:
        return np.matmul(_turned(a), g[..., None])[..., 0]
    # A batch times one matrix, as in a layer: one product over the rows of all samples, instead of
    # a product per sample and the sum over them.
    if b.ndim == 2 and a.ndim > 2:
        a, g = all_rows(a, g)
    return product(_turned(a), g)


matmul: Op = numpy_op(np.matmul, _matmul_left, _matmul_right)


def _bmm(a: Array, b: Array) -> Any:
    """As matmul, for two stacks of matrices only, as torch has it.

    >>> ag.bmm(ag.ones(2, 3, 4), ag.ones(2, 4, 5)).shape
    (2, 3, 5)
    """
    if np.ndim(a) != 3 or np.ndim(b) != 3:
        raise ValueError(f"bmm() takes two stacks of matrices, not {np.shape(a)} and {np.shape(b)}")
    return np.matmul(a, b)


bmm: Op = new_op("bmm", _bmm, _matmul_left, _matmul_right)
alias("mm", matmul)


# ── the older products, by matmul ───────────────────────────────────────────────────────────────


@composite(np.dot)
def dot(a: Values, b: Values) -> Any:
    """Multiply: matrices, vectors or numbers; along the last axis of a and the last but one of b."""
    a, b = as_tensor(a), as_tensor(b)
    if a.ndim == 0 or b.ndim == 0:
        return a * b
    if b.ndim == 1 or (a.ndim <= 2 and b.ndim == 2):
        return matmul(a, b)
    return tensordot(a, b, (-1, -2))


@composite(np.vdot)
def vdot(a: Values, b: Values) -> Any:
    """Multiply two flattened arrays, the first one conjugated."""
    return matmul(conj(ravel(a)), ravel(b))


@composite(np.inner)
def inner(a: Values, b: Values) -> Any:
    """Sum products along the last axes."""
    a, b = as_tensor(a), as_tensor(b)
    return a * b if a.ndim == 0 or b.ndim == 0 else tensordot(a, b, (-1, -1))


@composite(np.outer)
def outer(a: Values, b: Values) -> Any:
    """Multiply every element of one with every element of the other."""
    return ravel(a)[:, None] * ravel(b)[None, :]


@composite(np.tensordot)
def tensordot(a: Values, b: Values, axes: Any = 2) -> Any:
    """Sum products over the given axes of both."""
    a, b = as_tensor(a), as_tensor(b)
    if isinstance(axes, int | np.integer):
        ours, theirs = list(range(a.ndim - axes, a.ndim)), list(range(axes))
    else:
        ours, theirs = ([x] if isinstance(x, int) else list(x) for x in axes)
    ours, theirs = [i % a.ndim for i in ours], [i % b.ndim for i in theirs]
    if [a.shape[i] for i in ours] != [b.shape[i] for i in theirs]:
        raise ValueError(f"shapes {a.shape} and {b.shape} do not match along axes {axes}")
    rows = [i for i in range(a.ndim) if i not in ours]
    columns = [i for i in range(b.ndim) if i not in theirs]
    shape = [a.shape[i] for i in rows] + [b.shape[i] for i in columns]
    length = int(np.prod([a.shape[i] for i in ours], dtype=np.int64))
    # One matrix product, with the summed axes last on the left and first on the right.
    left = a.transpose(rows + ours).reshape(_size(a, rows), length)
    right = b.transpose(theirs + columns).reshape(length, _size(b, columns))
    return matmul(left, right).reshape(tuple(shape))


def _size(a: Array, axes: Sequence[int]) -> int:
    """Return the number of elements along these axes."""
    return int(np.prod([a.shape[i] for i in axes], dtype=np.int64))


@composite(np.kron)
def kron(a: Values, b: Values) -> Any:
    """Put a scaled copy of b in place of every element of a."""
    a, b = as_tensor(a), as_tensor(b)
    ndim = max(a.ndim, b.ndim)
    ours = (1,) * (ndim - a.ndim) + a.shape
    theirs = (1,) * (ndim - b.ndim) + b.shape
    left = a.reshape([n for size in ours for n in (size, 1)])
    right = b.reshape([n for size in theirs for n in (1, size)])
    return (left * right).reshape([m * n for m, n in zip(ours, theirs, strict=True)])


@composite(np.cross)
def cross(
    a: Values, b: Values, axisa: int = -1, axisb: int = -1, axisc: int = -1, axis: int | None = None
) -> Any:
    """Give the vector that stands upright on two others."""
    if axis is not None:
        axisa = axisb = axisc = axis
    a, b = moveaxis(as_tensor(a), axisa, -1), moveaxis(as_tensor(b), axisb, -1)
    if a.shape[-1] != 3 or b.shape[-1] != 3:
        raise ValueError("cross() takes vectors of three elements")
    (a0, a1, a2), (b0, b1, b2) = ([v[..., i] for i in range(3)] for v in (a, b))
    parts = [a1 * b2 - a2 * b1, a2 * b0 - a0 * b2, a0 * b1 - a1 * b0]
    return np.stack(parts, axis=axisc)


# Only newer versions of numpy have it.
@composite(getattr(np, "vecdot", None))
def vecdot(x1: Values, x2: Values, *, axis: int = -1) -> Any:
    """Sum products along one axis, the first factor conjugated."""
    return (conj(as_tensor(x1)) * as_tensor(x2)).sum(axis=axis)


# ── einsum ──────────────────────────────────────────────────────────────────────────────────────


def _einsum_arguments(*args: Any, optimize: Any = None, out: Any = None) -> Any:
    """Turn the call into operands and subscripts that name every axis."""
    if not args or not isinstance(args[0], str):
        raise TypeError("einsum() on Tensors takes its subscripts as a string, e.g. 'ij,jk->ik'")
    subscripts, *operands = args
    operands = [as_tensor(operand) for operand in operands]
    # The rule computes with the letters, so none may be left out.
    spelled = _spell_out(subscripts, [operand.ndim for operand in operands])
    return operands, {"subscripts": spelled} | ({} if out is None else {"out": out})


def _spell_out(subscripts: str, ndims: Sequence[int]) -> str:
    """Name the axes behind `...`, and the result if it is left out."""
    inputs, arrow, output = subscripts.replace(" ", "").partition("->")
    terms = inputs.split(",")
    if len(terms) != len(ndims):
        raise ValueError(f"{subscripts!r} speaks of {len(terms)} arrays, but got {len(ndims)}")
    used = set(subscripts)
    free = [letter for letter in string.ascii_letters if letter not in used]
    longest = 0
    for i, (term, ndim) in enumerate(zip(terms, ndims, strict=True)):
        if "..." in term:
            extra = ndim - len(term) + 3
            longest = max(longest, extra)
            # Reversed, so that the last axes behind the dots have the same letter in every operand:
            # they are aligned from the right when they are broadcast.
            terms[i] = term.replace("...", "".join(free[:extra][::-1]))
    rest = "".join(free[:longest][::-1])
    if not arrow:
        once = sorted(x for x in set(inputs) - set(",.") if inputs.count(x) == 1)
        output = "..." + "".join(once)
    return ",".join(terms) + "->" + output.replace("...", rest)


def _einsum_forward(*operands: Any, subscripts: str) -> Any:
    """Compute by BLAS where the arrays are large enough."""
    # Finding the order of products takes longer than multiplying small arrays.
    large = len(operands) > 1 and sum([operand.size for operand in operands]) > 2048
    return np.einsum(subscripts, *operands, optimize=large)


def _einsum(g: Array, y: Array, i: int, *operands: Any, subscripts: str) -> Any:
    """Sum the gradient with all other operands onto the axes of this one."""
    inputs, _, output = subscripts.partition("->")
    terms = inputs.split(",")
    own, operand = terms[i], operands[i]
    others = [(t, conj(o)) for j, (t, o) in enumerate(zip(terms, operands, strict=True)) if j != i]
    known = set(output).union(*[set(term) for term, _ in others])
    free = iter([letter for letter in string.ascii_letters if letter not in subscripts])
    wanted = ""
    for letter, size in zip(own, operand.shape, strict=True):
        if letter in wanted:
            # A repeated letter reads a diagonal. numpy cannot write one, so the second axis gets a
            # letter of its own and is tied to the first by the identity.
            twin = next(free)
            others.append((letter + twin, np.eye(size, dtype=g.dtype)))
            wanted += twin
            continue
        if letter not in known:
            # Only this operand has the axis: it was summed over, so the gradient is the same along
            # it.
            others.append((letter, np.ones(size, g.dtype)))
        wanted += letter
    asked = ",".join([output, *[term for term, _ in others]]) + "->" + wanted
    return einsum.of(g, *[value for _, value in others], subscripts=asked)


einsum: Op = numpy_op(np.einsum, forward=_einsum_forward, each=_einsum, arrange=_einsum_arguments)
