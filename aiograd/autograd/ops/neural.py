"""What neural networks are made of: activations, normalisation, losses.

Convolution and pooling are in `convolution.py`, tables of rows in `embedding.py`. Formulas that
overflow or lose digits for large inputs are written so that they do not. Where torch refuses
complex numbers, so do we: the rules hold for real ones.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd._frames import warn
from aiograd.autograd.array import Array, Values
from aiograd.autograd.op import Op, op
from aiograd.autograd.ops.elementwise import erf, erf_array
from aiograd.autograd.ops.table import as_tensor, composite, conj, describe, new_op
from aiograd.autograd.random import generator_or_default
from aiograd.autograd.tensor import Tensor

_ndarray = np.ndarray

ROOT_HALF = float(np.sqrt(0.5))
ROOT_2_OVER_PI = float(np.sqrt(2 / np.pi))


def _refuse_complex(name: str, a: Array) -> None:
    """Raise TypeError for complex numbers."""
    if np.iscomplexobj(a):
        raise TypeError(f"{name}() takes real numbers, not complex ones")


# ── activations ─────────────────────────────────────────────────────────────────────────────────


def _relu_forward(a: Array) -> Any:
    if a.__class__ is _ndarray and a.size > 2048 and a.dtype.char == "f" and a.flags.c_contiguous:
        # numpy compares single floats with an array faster than with the number 0.
        y = np.zeros(a.shape, a.dtype)
        return np.maximum(a, y, out=y)
    return np.maximum(a, 0)


def _sigmoid_forward(a: Array) -> Any:
    if np.iscomplexobj(a):
        return 1 / (1 + np.exp(-a))
    # Never overflows, and keeps its digits far below zero, where 1 / (1 + exp(-a)) has none left.
    small = np.exp(-np.abs(a))
    upper = 1 / (1 + small)
    return np.where(np.asarray(a) >= 0, upper, small * upper)


def _gelu_forward(a: Array, approximate: str = "none") -> Any:
    _refuse_complex("gelu", a)
    if approximate == "tanh":
        # The approximation of Hendrycks and Gimpel, who introduced the function.
        return 0.5 * a * (1 + np.tanh(ROOT_2_OVER_PI * (a + 0.044715 * a**3)))
    if approximate != "none":
        raise ValueError(f"approximate must be 'none' or 'tanh', not {approximate!r}")
    return 0.5 * a * (1 + erf_array(a * ROOT_HALF))


def _gelu(g: Array, y: Array, a: Array, approximate: str = "none") -> Any:
    """Slope of the exact formula, or of the one by tanh that torch offers beside it."""
    if approximate == "tanh":
        t = np.tanh(ROOT_2_OVER_PI * (a + 0.044715 * a**3))
        slope = ROOT_2_OVER_PI * (1 + 3 * 0.044715 * a**2)
        return g * (0.5 * (1 + t) + 0.5 * a * (1 - t * t) * slope)
    density = np.exp(-0.5 * a * a) * (ROOT_2_OVER_PI / 2)
    return g * (0.5 * (1 + erf.of(a * ROOT_HALF)) + a * density)


def _silu(g: Array, y: Array, a: Array) -> Any:
    """Slope of a · σ(a), with the sigmoid computed again: saving it would double the memory."""
    s = sigmoid.of(a)
    return g * conj(s * (1 + a * (1 - s)))


def _leaky_relu(g: Array, y: Array, a: Array, negative_slope: float = 0.01) -> Any:
    """The given slope below zero, and at zero, as in torch."""
    return np.where(a > 0, g, g * negative_slope)


def _elu(g: Array, y: Array, a: Array, alpha: float = 1.0) -> Any:
    """The exponential below zero; of the smaller of a and 0, so that it cannot overflow."""
    return np.where(a > 0, g, g * (alpha * np.exp(np.minimum(a, 0))))


def _elu_forward(a: Array, alpha: float = 1.0) -> Any:
    _refuse_complex("elu", a)
    return np.where(a > 0, a, alpha * np.expm1(np.minimum(a, 0)))


# fmt: off
relu: Op       = new_op("relu",       _relu_forward,                         lambda g, y, a: g * (y > 0))
sigmoid: Op    = new_op("sigmoid",    _sigmoid_forward,                      lambda g, y, a: g * conj(y * (1 - y)))
silu: Op       = new_op("silu",       lambda a: a * _sigmoid_forward(a),     _silu)
gelu: Op       = new_op("gelu",       _gelu_forward,                         _gelu)
softplus: Op   = new_op("softplus",   lambda a: np.logaddexp(a, 0),          lambda g, y, a: g * sigmoid.of(a))
leaky_relu: Op = new_op("leaky_relu", lambda a, negative_slope=0.01: np.where(a > 0, a, a * negative_slope), _leaky_relu)
elu: Op        = new_op("elu",        _elu_forward,                          _elu)
# fmt: on


def _softmax_forward(a: Array, axis: int = -1) -> Any:
    _refuse_complex("softmax", a)
    # Shifted by the largest: no exponential overflows. The steps below work in this new array.
    shifted = a - np.maximum.reduce(a, axis=axis, keepdims=True)
    # In place: the forward pass allocates one array, not three.
    np.exp(shifted, out=shifted)
    shifted /= np.add.reduce(shifted, axis=axis, keepdims=True)
    return shifted


def _softmax(g: Array, y: Array, a: Array, axis: int = -1) -> Any:
    """The gradient minus its weighted mean, weighted."""
    weighted = g * y
    return weighted - y * weighted.sum(axis=axis, keepdims=True)


def _log_softmax_forward(a: Array, axis: int = -1) -> Any:
    _refuse_complex("log_softmax", a)
    shifted = a - np.maximum.reduce(a, axis=axis, keepdims=True)
    shifted -= np.log(np.add.reduce(np.exp(shifted), axis=axis, keepdims=True))
    return shifted


def _log_softmax(g: Array, y: Array, a: Array, axis: int = -1) -> Any:
    """The gradient minus its sum in shares of the softmax."""
    return g - np.exp(y) * g.sum(axis=axis, keepdims=True)


softmax: Op = new_op("softmax", _softmax_forward, _softmax)
log_softmax: Op = new_op("log_softmax", _log_softmax_forward, _log_softmax)


describe(
    {
        "relu": """Keep what is positive; zero below zero.

        >>> ag.relu(ag.tensor([-1.0, 2.0]))
        tensor([0., 2.])
    """,
        "sigmoid": """Squash to between 0 and 1.

        >>> ag.sigmoid(ag.tensor([0.0]))
        tensor([0.5])
    """,
        "silu": """Multiply by the own sigmoid.

        >>> ag.silu(ag.tensor([0.0]))
        tensor([0.])
    """,
        "gelu": """Weight by the normal distribution; `approximate="tanh"` is the fast formula.

        >>> ag.gelu(ag.tensor([0.0]))
        tensor([0.])
    """,
        "softplus": """Compute `log(1 + exp(a))`, a smooth ReLU.

        >>> round(float(ag.softplus(ag.tensor(0.0))), 4)
        0.6931
    """,
        "leaky_relu": """Keep what is positive; a small slope below zero.

        >>> ag.leaky_relu(ag.tensor([-1.0, 2.0]), negative_slope=0.5)
        tensor([-0.5,  2. ])
    """,
        "elu": """Keep what is positive; approach `-alpha` below zero.

        >>> ag.elu(ag.tensor([0.0, 2.0]))
        tensor([0., 2.])
    """,
        "softmax": """Make numbers along an axis positive, with a sum of 1.

        >>> ag.softmax(ag.zeros(1, 2), axis=-1)
        tensor([[0.5, 0.5]])
    """,
        "log_softmax": """Give the logarithm of the softmax, without overflow.

        >>> round(float(ag.log_softmax(ag.zeros(2))[0]), 4)
        -0.6931
    """,
    }
)


@composite()
def dropout(
    a: Values, p: float = 0.5, training: bool = True, generator: np.random.Generator | None = None
) -> Any:
    """Set a share `p` of the elements to zero and scale the others up.

    >>> ag.dropout(ag.ones(4), p=0.5, training=False)
    tensor([1., 1., 1., 1.])
    """
    if not 0 <= p <= 1:
        raise ValueError(f"p must lie between 0 and 1, not {p}")
    a = as_tensor(a)
    if not training or p == 0:
        return a
    if p == 1:
        # Not zeros: the result still requires grad, with a gradient of zero.
        return a * 0
    # Scaled up here, so that nothing needs scaling when the model is used.
    keep = generator_or_default(generator).random(a.shape) >= p
    return a * (keep.astype(a.dtype) / (1 - p))


# ── normalisation ───────────────────────────────────────────────────────────────────────────────


def _standardize_forward(a: Array, axis: Any, eps: float) -> Any:
    _refuse_complex("standardize", a)
    centred = a - a.mean(axis=axis, keepdims=True)
    spread = np.mean(centred * centred, axis=axis, keepdims=True)
    centred /= np.sqrt(spread + eps)
    return centred


def _standardize(g: Array, y: Array, a: Array, axis: Any = -1, eps: float = 1e-5) -> Any:
    """The part of the gradient that changes neither mean nor variance, scaled."""
    scale = 1 / np.sqrt(a.var(axis=axis, keepdims=True) + eps)
    mean = g.mean(axis=axis, keepdims=True)
    return (g - mean - y * (g * y).mean(axis=axis, keepdims=True)) * scale


# One operation for all normalisations. Made of means and squares it would be some ten nodes, each
# with an array of the input's size.
standardize: Op = op("standardize", _standardize_forward, _standardize)


@composite()
def layer_norm(
    a: Values, normalized_shape: Any, weight: Values = None, bias: Any = None, eps: float = 1e-5
) -> Any:
    """Bring the last axes of every sample to mean 0 and variance 1, then scale and shift.

    >>> ag.layer_norm(ag.tensor([1.0, 3.0]), (2,)).numpy().round(3).tolist()
    [-1.0, 1.0]
    """
    a = as_tensor(a)
    shape = (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
    # `standardize` would take any axes.
    if a.shape[a.ndim - len(shape) :] != shape:
        raise ValueError(f"the last axes of {a.shape} are not the normalized shape {shape}")
    y = standardize(a, axis=tuple(range(-len(shape), 0)), eps=eps)
    y = y if weight is None else y * weight
    return y if bias is None else y + bias


@composite()
def batch_norm(
    a: Values,
    running_mean: Any = None,
    running_var: Any = None,
    weight: Values = None,
    bias: Any = None,
    training: bool = False,
    momentum: float = 0.1,
    eps: float = 1e-5,
) -> Any:
    """Bring every channel (axis 1) to mean 0 and variance 1, then scale and shift.

    In training by the batch itself, noting its mean and variance in the running ones, in place.

        >>> ag.batch_norm(ag.tensor([[1.0], [3.0]]), training=True).numpy().round(3).tolist()
        [[-1.0], [1.0]]
    """
    a = as_tensor(a)
    axis = tuple(i for i in range(a.ndim) if i != 1)
    column = (1, -1) + (1,) * (a.ndim - 2)
    if training or running_mean is None or running_var is None:
        y = standardize(a, axis=axis, eps=eps)
        if training and running_mean is not None and running_var is not None:
            n = a.size // a.shape[1]
            _blend(running_mean, a.raw.mean(axis=axis), momentum)
            # The running variance is the unbiased one, that of the batch is not: as in torch.
            _blend(running_var, a.raw.var(axis=axis) * (n / max(n - 1, 1)), momentum)
    else:
        mean, var = as_tensor(running_mean), as_tensor(running_var)
        # Running statistics are constants: no gradient reaches them.
        scale = 1 / np.sqrt(var.raw + np.asarray(eps, var.dtype))
        y = (a - mean.raw.reshape(column)) * scale.reshape(column)
    y = y if weight is None else y * as_tensor(weight).reshape(column)
    return y if bias is None else y + as_tensor(bias).reshape(column)


def _blend(running: Any, value: Any, momentum: float) -> None:
    """Move running statistics towards those of a batch, in place."""
    array = running.raw if isinstance(running, Tensor) else running
    array *= 1 - momentum
    array += momentum * value
    if isinstance(running, Tensor):
        running._written()


# ── losses ──────────────────────────────────────────────────────────────────────────────────────


def _reduced(loss: Any, reduction: str) -> Any:
    """Reduce a loss per element as asked for."""
    if reduction == "none":
        return loss
    if reduction not in ("mean", "sum"):
        raise ValueError(f"reduction must be 'mean', 'sum' or 'none', not {reduction!r}")
    return loss.mean() if reduction == "mean" else loss.sum()


def _shared(loss: Any, weights: Any) -> Any:
    """Return the mean by weights; of nothing it is nan, with slope zero, as in torch."""
    return loss / weights if weights else loss * 0 + np.nan


@composite()
def mse_loss(input: Values, target: Values, reduction: str = "mean") -> Any:
    """Give the squared difference.

    >>> float(ag.mse_loss(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0])))
    2.0
    """
    difference = as_tensor(input) - target
    _check_broadcast(input, target, difference, "mse_loss")
    return _reduced(difference * difference, reduction)


@composite()
def l1_loss(input: Values, target: Values, reduction: str = "mean") -> Any:
    """Give the absolute difference.

    >>> float(ag.l1_loss(ag.tensor([1.0, 2.0]), ag.tensor([1.0, 4.0])))
    1.0
    """
    difference = as_tensor(input) - target
    _check_broadcast(input, target, difference, "l1_loss")
    return _reduced(np.absolute(difference), reduction)


def _check_broadcast(input: Array, target: Array, difference: Any, name: str) -> None:
    """Warn where a loss compares every element with many: (64, 1) and (64,) make (64, 64)."""
    shapes = np.shape(input), np.shape(target)
    # A single number is compared with all elements on purpose.
    if shapes[0] != shapes[1] and () not in shapes:
        warn(
            f"{name} compares a tensor of shape {shapes[0]} with a target of shape {shapes[1]}: "
            f"they broadcast to {difference.shape}, which is rarely what is meant. "
            "Give both the same shape, say with target.reshape(input.shape)",
            UserWarning,
        )


@composite()
def nll_loss(
    input: Values,
    target: Values,
    weight: Values = None,
    ignore_index: int = -100,
    reduction: str = "mean",
) -> Any:
    """Give minus the log probability of the right class; classes lie along axis 1 (or 0).

    >>> scores = ag.log_softmax(ag.zeros(1, 4))
    >>> round(float(ag.nll_loss(scores, [2])), 4)
    1.3863
    """
    input = as_tensor(input)
    classes = np.asarray(target.raw if isinstance(target, Tensor) else target)
    if classes.dtype.kind not in "iu":
        raise TypeError(f"classes must be integers, not {classes.dtype}")
    axis = 0 if input.ndim == 1 else 1
    kept = classes != ignore_index
    # An ignored class may be any number, -100 by default; it must not be used as an index.
    safe = np.where(kept, classes, 0)
    if ((safe < 0) | (safe >= input.shape[axis])).any():
        raise IndexError(f"a class lies outside 0 … {input.shape[axis] - 1}")
    picked = np.take_along_axis(input, np.expand_dims(safe, axis), axis=axis)
    share = kept.astype(input.dtype)
    if weight is not None:
        share = share * np.asarray(weight.raw if isinstance(weight, Tensor) else weight)[safe]
    loss = -np.squeeze(picked, axis=axis) * share
    if reduction == "mean":
        # The mean by class weights, not by rows, as in torch.
        return _shared(loss.sum(), share.sum())
    return _reduced(loss, reduction)


def _class_loss_forward(a: Array, classes: Any) -> Any:
    """Minus the log probability of the right class, one number per row."""
    logs = _log_softmax_forward(a, 1)
    return -logs[np.arange(len(classes)), classes]


def _class_loss_rule(g: Array, y: Array, a: Array, classes: Any) -> Any:
    """The softmax minus one at the right class: nothing but the logits is saved."""
    right = np.arange(a.shape[1]) == classes[:, None]
    return (softmax.of(a, axis=1) - right) * g[:, None]


# The usual loss of a classifier as one operation. Made of log_softmax and a selection it takes
# twice the arrays, and the gradient of the selection is a scatter into zeros.
_class_loss: Op = op("cross_entropy", _class_loss_forward, _class_loss_rule)


def _are_classes(given: Any, logits: Tensor, ignore_index: int) -> bool:
    """Whether this is the common case that one operation covers: a row per class, all valid."""
    return bool(
        logits.ndim == 2
        and given.dtype.kind in "iu"
        and given.shape == logits.shape[:1]
        and given.size
        and given.min() >= 0
        and given.max() < logits.shape[1]
        and not (0 <= ignore_index < logits.shape[1] and (given == ignore_index).any())
    )


@composite()
def cross_entropy(
    input: Values,
    target: Values,
    weight: Values = None,
    ignore_index: int = -100,
    reduction: str = "mean",
    label_smoothing: float = 0.0,
) -> Any:
    """Compare logits with classes (integers) or with probabilities of classes (floats).

    >>> round(float(ag.cross_entropy(ag.zeros(1, 4), [2])), 4)
    1.3863
    """
    input, given = as_tensor(input), as_tensor(target)
    if weight is None and not label_smoothing and _are_classes(given.raw, input, ignore_index):
        return _reduced(_class_loss(input, classes=given.raw), reduction)
    axis = 0 if input.ndim == 1 else 1
    logs = log_softmax(input, axis=axis)
    size = input.shape[axis]
    if given.dtype.kind in "iu":
        hard = nll_loss(logs, given, weight, ignore_index, reduction)
        if not label_smoothing:
            return hard
        kept = (given.raw != ignore_index).astype(input.dtype)
        smooth = -(logs * _class_column(weight, input.ndim, axis)).sum(axis=axis) * kept
        if reduction == "mean":
            weights = _weight_of(given.raw, weight, ignore_index, input.dtype)
            smooth = _shared(smooth.sum(), weights)
        else:
            smooth = _reduced(smooth, reduction)
        return hard * (1 - label_smoothing) + smooth * (label_smoothing / size)
    target = given * (1 - label_smoothing) + label_smoothing / size if label_smoothing else given
    loss = -(logs * target * _class_column(weight, input.ndim, axis)).sum(axis=axis)
    # Probabilities have no single class, so torch divides by the number of rows, weights or not.
    return loss.sum() / max(loss.raw.size, 1) if reduction == "mean" else _reduced(loss, reduction)


def _class_column(weight: Values, ndim: int, axis: int) -> Any:
    """Return class weights in a shape that broadcasts along the class axis."""
    if weight is None:
        return 1.0
    array = np.asarray(weight.raw if isinstance(weight, Tensor) else weight)
    return array.reshape([-1 if i == axis else 1 for i in range(ndim)])


def _weight_of(classes: Any, weight: Values, ignore_index: int, dtype: Any) -> Any:
    """Return the sum of the weights of all classes that are not ignored."""
    kept = classes != ignore_index
    if weight is None:
        return kept.sum(dtype=dtype)
    array = np.asarray(weight.raw if isinstance(weight, Tensor) else weight)
    return (array[np.where(kept, classes, 0)] * kept).sum()


def _bce_forward(a: Array, target: Array) -> Any:
    """log(1 + exp(-|a|)) and what is missing: never overflows."""
    _refuse_complex("binary_cross_entropy_with_logits", a)
    _refuse_complex("binary_cross_entropy_with_logits", target)
    return np.maximum(a, 0) - a * target + np.log1p(np.exp(-np.abs(a)))


_bce: Op = op(
    "binary_cross_entropy_with_logits",
    _bce_forward,
    lambda g, y, a, target: g * (sigmoid.of(a) - target),
    lambda g, y, a, target: -g * a,
)


@composite()
def binary_cross_entropy_with_logits(
    input: Values,
    target: Values,
    weight: Values = None,
    reduction: str = "mean",
    pos_weight: Any = None,
) -> Any:
    """Compare logits with probabilities between 0 and 1, safely for large logits.

    >>> float(ag.binary_cross_entropy_with_logits(ag.tensor([0.0]), ag.tensor([1.0]))).hex()[:6]
    '0x1.62'
    """
    input, target = as_tensor(input), as_tensor(target)
    # Broadcasting would quietly compare each with each.
    if input.shape != target.shape:
        raise ValueError(f"input {input.shape} and target {target.shape} differ in shape")
    if pos_weight is None:
        loss = _bce(input, target)
    else:
        # By softplus, which is stable as well; more nodes, for the rarer case.
        scale = (as_tensor(pos_weight) - 1) * target + 1
        loss = (1 - target) * input + scale * softplus(-input)
    return _reduced(loss if weight is None else loss * weight, reduction)
