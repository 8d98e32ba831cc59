"""Linear algebra: inverses, determinants, decompositions, norms; on stacks of matrices too.

These are numpy's functions of `np.linalg`, and found as `ag.linalg.<name>` as well. Rules are made
of operations that have rules themselves, so higher derivatives exist; where a decomposition is not
unique (signs, phases, equal singular values), its gradient is right for functions that do not
depend on the choice, as in torch.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

from aiograd.autograd.array import Array, Values
from aiograd.autograd.grad_mode import recording
from aiograd.autograd.op import Op, op
from aiograd.autograd.ops.products import matmul
from aiograd.autograd.ops.reduce import kept
from aiograd.autograd.ops.table import as_tensor, composite, conj, numpy_op
from aiograd.autograd.tensor import Tensor, wrap

la = np.linalg


def turned(a: Array) -> Any:
    """Return the conjugate transpose of the last two axes."""
    return np.swapaxes(conj(a), -1, -2)


def _columns(v: Array) -> Any:
    """Return scale factors for the columns of a matrix."""
    return v[..., None, :]


# ── inverses and determinants ───────────────────────────────────────────────────────────────────


def _solve_left(g: Array, y: Array, a: Array, b: Array) -> Any:
    """From A y = b: dy = -A⁻¹ dA y."""
    inner = la.solve(turned(a), g)
    if b.ndim == 1:
        return -inner[..., :, None] * conj(y)[..., None, :]
    return -np.matmul(inner, turned(y))


# d(A⁻¹) = -A⁻¹ dA A⁻¹
inv: Op = numpy_op(la.inv, lambda g, y, a: -np.matmul(np.matmul(turned(y), g), turned(y)))
det: Op = numpy_op(la.det, lambda g, y, a: _det(g, y, a))
solve: Op = numpy_op(la.solve, _solve_left, lambda g, y, a, b: la.solve(turned(a), g))


def _det(g: Array, y: Array, a: Array) -> Any:
    """Through the inverse; for singular matrices through the singular values."""
    if np.all(y != 0):
        return (g * conj(y))[..., None, None] * turned(la.inv(a))
    # The slope of a determinant is the matrix of cofactors, which a singular matrix has too. It is
    # the product of all other singular values between the singular vectors.
    u, s, vh = svd(a, full_matrices=False)
    phase = la.det(matmul(u, vh))
    others = np.prod(_without_self(s), axis=-1)
    return matmul(u * _columns(others), vh) * (g * conj(phase))[..., None, None]


def _without_self(s: Any) -> Any:
    """Return for every value a row of all values, with a one in its own position."""
    eye = np.eye(s.shape[-1], dtype=bool)
    return np.where(eye, 1, s[..., None, :])


def _slogdet_forward(a: Array) -> tuple[Any, Any]:
    """Return both results as arrays: numpy gives scalars for one matrix."""
    sign, logabsdet = la.slogdet(a)
    return np.asarray(sign), np.asarray(logabsdet)


def _slogdet(gs: Sequence[Any], ys: Sequence[Any], a: Array) -> Any:
    """The slope of log|det| is the inverse, transposed."""
    inverse = turned(la.inv(a))
    total = gs[1][..., None, None] * inverse
    if ys[0].dtype.kind == "c":  # the phase turns too
        turn = np.imag(conj(gs[0]) * ys[0])
        total = total - 1j * turn[..., None, None] * inverse
    return [total]


# numpy's results have names too, and other classes on every version.
class Slogdet(NamedTuple):
    """Sign and logarithm of the absolute value of a determinant."""

    sign: Tensor
    logabsdet: Tensor


_slogdet_op: Op = op("slogdet", _slogdet_forward, joint=_slogdet)


@composite(la.slogdet)
def slogdet(a: Values) -> Slogdet:
    """Give sign and logarithm of the determinant."""
    return Slogdet(*_slogdet_op(a))


# ── decompositions ──────────────────────────────────────────────────────────────────────────────


def _half_lower(a: Array) -> Any:
    """Return the lower triangle with half the diagonal."""
    size = a.shape[-1]
    return np.tril(a) * (1 - 0.5 * np.eye(size)).astype(a.dtype)


def _cholesky(g: Array, y: Array, a: Array, upper: bool = False) -> Any:
    """From A = L Lᴴ; the gradient is Hermitian, as the argument is."""
    lower, g = (turned(y), turned(g)) if upper else (y, g)
    inner = _half_lower(np.matmul(turned(lower), np.tril(g)))
    # L⁻ᴴ inner L⁻¹, by two solves: an explicit inverse would lose digits.
    half = la.solve(turned(lower), turned(la.solve(turned(lower), turned(inner))))
    return (half + turned(half)) / 2


cholesky: Op = numpy_op(la.cholesky, _cholesky)


def _gaps(values: Any) -> Any:
    """Return 1 / (values[j] - values[i]), zero on the diagonal."""
    eye = np.eye(values.shape[-1], dtype=bool)
    differences = values[..., None, :] - values[..., :, None]
    return np.where(eye, 0, 1 / np.where(eye, 1, differences))


def _eigh(gs: Sequence[Any], ys: Sequence[Any], a: Array, UPLO: str = "L") -> Any:  # noqa: N803  numpy's name
    """Eigenvalues move along their vectors, vectors turn by the gaps between the values."""
    gw, gv = gs
    w, v = ys
    inner = np.matmul(turned(v), gv) * _gaps(w)
    total = np.matmul(np.matmul(v, inner), turned(v)) + np.matmul(v * _columns(gw), turned(v))
    # Only the Hermitian part of a change keeps the matrix Hermitian; numpy reads one triangle.
    return [(total + turned(total)) / 2]


class Eigh(NamedTuple):
    """Eigenvalues, ascending, and eigenvectors as columns."""

    eigenvalues: Tensor
    eigenvectors: Tensor


_eigh_op: Op = op("eigh", lambda a, UPLO="L": tuple(la.eigh(a, UPLO)), joint=_eigh)  # noqa: N803


@composite(la.eigh)
def eigh(a: Values, UPLO: str = "L") -> Eigh:  # noqa: N803
    """Give eigenvalues and eigenvectors of a Hermitian matrix."""
    return Eigh(*_eigh_op(a, UPLO=UPLO))


@composite(la.eigvalsh)
def eigvalsh(a: Values, UPLO: str = "L") -> Any:  # noqa: N803
    """Give the eigenvalues of a Hermitian matrix."""
    return eigh(a, UPLO).eigenvalues


def _svd(gs: Sequence[Any], ys: Sequence[Any], a: Array) -> Any:
    """The rotations of U and V, the change of S, and what lies outside of the reduced U or V."""
    gu, gs_, gvh = gs
    u, s, vh = ys
    v, gv = turned(vh), turned(gvh)
    # U and V are the eigenvectors of A Aᴴ and Aᴴ A, whose eigenvalues are the squares.
    squares = _gaps(s * s)
    gram_u, gram_v = np.matmul(turned(u), gu), np.matmul(turned(v), gv)
    skew_u = squares * (gram_u - turned(gram_u))
    skew_v = squares * (gram_v - turned(gram_v))
    middle = skew_u * _columns(s) + s[..., :, None] * skew_v
    eye = np.eye(s.shape[-1], dtype=s.dtype)
    middle = middle + gs_[..., None, :] * eye
    if a.dtype.kind == "c":  # the phases of u and v are bound to each other
        spin = np.imag(np.diagonal(gram_u, 0, -2, -1)) / s
        middle = middle + 1j * spin[..., None, :] * eye
    total = np.matmul(np.matmul(u, middle), vh)
    rows, columns = a.shape[-2:]
    inverse = _columns(1 / s)
    if rows > columns:  # what lies outside the columns of u
        outside = gu * inverse
        total = total + np.matmul(outside - np.matmul(u, np.matmul(turned(u), outside)), vh)
    elif columns > rows:
        outside = gv * inverse
        total = total + np.matmul(u, turned(outside - np.matmul(v, np.matmul(vh, outside))))
    return [total]


class Svd(NamedTuple):
    """Singular vectors and values: `a = U @ diag(S) @ Vh`."""

    U: Tensor
    S: Tensor
    Vh: Tensor


_svd_op: Op = op("svd", lambda a: tuple(la.svd(a, full_matrices=False)), joint=_svd)


@composite(la.svd)
def svd(a: Values, full_matrices: bool = True, compute_uv: bool = True) -> Any:
    """Give the singular value decomposition.

    Only the reduced one has a unique gradient: pass `full_matrices=False` to differentiate.
    """
    a = as_tensor(a)
    if not compute_uv:
        # The same decomposition: the gradient of the values needs the vectors.
        return _svd_op(a)[1]
    # The vectors beyond the reduced ones are arbitrary; without a gradient numpy may choose.
    if full_matrices and a.shape[-1] != a.shape[-2]:
        if a.requires_grad and recording.get():
            raise TypeError("svd() has a gradient rule for full_matrices=False only")
        return Svd(*[wrap(part) for part in la.svd(a.raw)])
    return Svd(*_svd_op(a))


def _qr(gs: Sequence[Any], ys: Sequence[Any], a: Array) -> Any:
    """Of a wide matrix the right part of R follows from Q alone."""
    gq, gr = gs
    q, r = ys
    rows, columns = a.shape[-2:]
    if rows < columns:  # R = [R1 R2]: the second part only passes through Q
        r1, r2 = r[..., :rows], r[..., rows:]
        gr1, gr2 = gr[..., :rows], gr[..., rows:]
        a2 = np.matmul(q, r2)
        first = _qr_square(gq + np.matmul(a2, turned(gr2)), gr1, q, r1)
        return [np.concatenate([first, np.matmul(q, gr2)], axis=-1)]
    return [_qr_square(gq, gr, q, r)]


def _qr_square(gq: Any, gr: Any, q: Any, r: Any) -> Any:
    """From A = Q R: Qᴴ dQ is skew, so that one triangle determines it."""
    m = np.matmul(r, turned(gr)) - np.matmul(turned(gq), q)
    lower = np.tril(m, -1)
    diagonal = np.real(np.diagonal(m, 0, -2, -1))[..., None, :] * np.eye(m.shape[-1])
    middle = lower + turned(lower) + diagonal.astype(m.dtype)
    inner = gq + np.matmul(q, middle)
    return turned(la.solve(r, turned(inner)))


class Qr(NamedTuple):
    """An orthonormal matrix and an upper triangle."""

    Q: Tensor
    R: Tensor


_qr_op: Op = op("qr", lambda a: tuple(la.qr(a)), joint=_qr)


@composite(la.qr)
def qr(a: Values, mode: str = "reduced") -> Qr:
    """Give the reduced QR decomposition."""
    # The complete Q has arbitrary columns, which have no gradient.
    if mode != "reduced":
        raise TypeError("qr() has a gradient rule for mode='reduced' only")
    return Qr(*_qr_op(a))


def _pinv(g: Array, y: Array, a: Array, rcond: Any = None, hermitian: bool = False) -> Any:
    """The gradient of an inverse, and the parts outside of row and column space."""
    rows, columns = a.shape[-2:]
    yh, gh = turned(y), turned(g)
    total = -np.matmul(np.matmul(yh, g), yh)
    # Projections onto what is outside of column and row space.
    left = np.eye(rows, dtype=a.dtype) - np.matmul(a, y)
    right = np.eye(columns, dtype=a.dtype) - np.matmul(y, a)
    total = total + np.matmul(np.matmul(left, gh), np.matmul(y, yh))
    return total + np.matmul(np.matmul(yh, y), np.matmul(gh, right))


pinv: Op = numpy_op(la.pinv, _pinv)


# ── powers and chains ───────────────────────────────────────────────────────────────────────────


@composite(la.matrix_power)
def matrix_power(a: Values, n: int) -> Any:
    """Multiply a square matrix with itself n times."""
    a = as_tensor(a)
    if a.ndim < 2 or a.shape[-1] != a.shape[-2]:
        raise ValueError(f"matrix_power() takes square matrices, not {a.shape}")
    if n < 0:
        a, n = inv(a), -n
    result = as_tensor(np.broadcast_to(np.eye(a.shape[-1], dtype=a.dtype), a.shape))
    # By repeated squaring: log n products, and as many nodes on the tape.
    while n:
        if n % 2:
            result = matmul(result, a)
        n //= 2
        a = matmul(a, a) if n else a
    return result


@composite(la.multi_dot)
def multi_dot(arrays: Any) -> Any:
    """Multiply a chain of matrices in the cheapest order."""
    chain = [as_tensor(a) for a in arrays]
    if len(chain) < 2:
        raise ValueError("multi_dot() takes at least two arrays")
    sizes = [1 if chain[0].ndim == 1 else chain[0].shape[0]]
    sizes += [a.shape[0] for a in chain[1:]]
    sizes.append(1 if chain[-1].ndim == 1 else chain[-1].shape[1])
    return _multiply(chain, _cheapest(sizes), 0, len(chain) - 1)


def _cheapest(sizes: list[int]) -> dict[tuple[int, int], int]:
    """Return where to cut every part of a chain, by the number of multiplications."""
    n = len(sizes) - 1
    # The matrix-chain recurrence: every part from its cheapest cut.
    cost = {(i, i): 0 for i in range(n)}
    cut: dict[tuple[int, int], int] = {}
    for length in range(1, n):
        for i in range(n - length):
            j = i + length
            options = [
                (cost[i, k] + cost[k + 1, j] + sizes[i] * sizes[k + 1] * sizes[j + 1], k)
                for k in range(i, j)
            ]
            cost[i, j], cut[i, j] = min(options)
    return cut


def _multiply(chain: list[Any], cut: dict[tuple[int, int], int], i: int, j: int) -> Any:
    """Multiply part i … j of a chain, cut where it is cheapest."""
    if i == j:
        return chain[i]
    k = cut[i, j]
    return matmul(_multiply(chain, cut, i, k), _multiply(chain, cut, k + 1, j))


# ── norms ───────────────────────────────────────────────────────────────────────────────────────


def _two_norm(g: Array, y: Array, a: Array, axis: Any = None, keepdims: bool = False) -> Any:
    """The direction of the vector; zero at zero, where there is none."""
    y = kept(y, axis, keepdims, a.ndim)
    return kept(g, axis, keepdims, a.ndim) * (a / np.where(y == 0, 1, y))


def _two_norm_forward(a: Array, axis: Any = None, keepdims: Any = False) -> Any:
    """Squares, sum and root as one operation: one node instead of four."""
    squares = np.real(a * np.conjugate(a)) if np.iscomplexobj(a) else a * a
    return np.sqrt(np.add.reduce(squares, axis=axis, keepdims=keepdims))


_two_norm_op: Op = op("norm", _two_norm_forward, _two_norm)


# Only newer versions of numpy have it.
@composite(getattr(la, "vector_norm", None))
def vector_norm(x: Values, *, axis: Any = None, keepdims: bool = False, ord: float = 2) -> Any:
    """Give the length of vectors, of any order."""
    x = as_tensor(x)
    # Integers would overflow in the squares.
    if x.dtype.kind not in "fc":
        x = x.astype(np.float64)
    if ord == 2:
        return _two_norm_op(x, axis=axis, keepdims=keepdims)
    size = np.abs(x)
    if ord in (np.inf, -np.inf):
        return (np.max if ord > 0 else np.min)(size, axis=axis, keepdims=keepdims)
    if ord == 0:
        return (size != 0).astype(x.dtype).sum(axis=axis, keepdims=keepdims)
    if ord == 1:
        return size.sum(axis=axis, keepdims=keepdims)
    if ord < 1:
        # The slope at an entry that is zero would be infinite; it is taken as zero. The inner
        # `where` keeps the infinity out of the gradient, the outer one puts the value right.
        zero = size.raw == 0
        powers = np.where(zero, 0.0 if ord > 0 else np.inf, np.where(zero, 1, size) ** ord)
    else:
        powers = size**ord
    total = powers.sum(axis=axis, keepdims=keepdims)
    # A vector of zeros has slope zero, not nan.
    return np.where(total == 0, 0, np.where(total == 0, 1, total) ** (1 / ord))


@composite(getattr(la, "matrix_norm", None))
def matrix_norm(x: Values, *, keepdims: bool = False, ord: Any = "fro") -> Any:
    """Give a norm of the matrices in the last two axes."""
    x = as_tensor(x)
    if ord == "fro":
        return vector_norm(x, axis=(-2, -1), keepdims=keepdims)
    if ord in (1, -1, np.inf, -np.inf):
        # Of columns for 1, of rows for infinity.
        sums = np.abs(x).sum(axis=-2 if abs(ord) == 1 else -1)
        result = (np.max if ord > 0 else np.min)(sums, axis=-1)
    elif ord in (2, -2, "nuc"):
        values = svd(x, compute_uv=False)
        result = values.sum(axis=-1) if ord == "nuc" else values[..., 0 if ord == 2 else -1]
    else:
        raise ValueError(f"there is no matrix norm of order {ord!r}")
    return result[..., None, None] if keepdims else result


@composite(la.norm)
def norm(x: Values, ord: Any = None, axis: Any = None, keepdims: bool = False) -> Any:
    """Give the norm of vectors or matrices."""
    x = as_tensor(x)
    # numpy's default is the 2-norm of all elements, for any number of axes.
    if ord is None:
        return vector_norm(x, axis=axis, keepdims=keepdims)
    if axis is None:
        axis = tuple(range(x.ndim))
    axes = (axis,) if isinstance(axis, int) else tuple(axis)
    if len(axes) == 1:
        return vector_norm(x, axis=axes[0], keepdims=keepdims, ord=ord)
    if len(axes) != 2:
        raise ValueError("a norm of this order is one of vectors or matrices")
    result = matrix_norm(np.moveaxis(x, axes, (-2, -1)), ord=ord, keepdims=keepdims)
    return np.moveaxis(result, (-2, -1), axes) if keepdims else result
