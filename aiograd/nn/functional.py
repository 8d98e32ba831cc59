"""Neural operations as functions: the ones of `ag`, under the names torch users know."""

from __future__ import annotations

import math
from typing import Any

import numpy as np

from aiograd.autograd.names.operations import avg_pool2d as avg_pool2d
from aiograd.autograd.names.operations import batch_norm as batch_norm
from aiograd.autograd.names.operations import (
    binary_cross_entropy_with_logits as binary_cross_entropy_with_logits,
)
from aiograd.autograd.names.operations import conv1d as conv1d
from aiograd.autograd.names.operations import conv2d as conv2d
from aiograd.autograd.names.operations import cross_entropy as cross_entropy
from aiograd.autograd.names.operations import dropout as dropout
from aiograd.autograd.names.operations import elu as elu
from aiograd.autograd.names.operations import embedding as embedding
from aiograd.autograd.names.operations import embedding_bag as embedding_bag
from aiograd.autograd.names.operations import gelu as gelu
from aiograd.autograd.names.operations import l1_loss as l1_loss
from aiograd.autograd.names.operations import layer_norm as layer_norm
from aiograd.autograd.names.operations import leaky_relu as leaky_relu
from aiograd.autograd.names.operations import log_softmax as log_softmax
from aiograd.autograd.names.operations import max_pool2d as max_pool2d
from aiograd.autograd.names.operations import mse_loss as mse_loss
from aiograd.autograd.names.operations import nll_loss as nll_loss
from aiograd.autograd.names.operations import relu as relu
from aiograd.autograd.names.operations import sigmoid as sigmoid
from aiograd.autograd.names.operations import silu as silu
from aiograd.autograd.names.operations import softmax as softmax
from aiograd.autograd.names.operations import softplus as softplus
from aiograd.autograd.names.operations import tanh as tanh
from aiograd.autograd.op import op
from aiograd.autograd.ops.elementwise import where
from aiograd.autograd.ops.table import as_tensor, conj
from aiograd.autograd.ops.zero_stride import all_rows, product
from aiograd.autograd.tensor import Tensor


def _linear_forward(x: Any, weight: Any, bias: Any = None) -> Any:
    y = x @ weight.T
    if bias is None:
        return y
    # In place, unless the sum is of a wider type or the product is a scalar, which cannot be
    # written to.
    if y.dtype != np.result_type(y, bias) or not y.shape:
        return y + bias
    y += bias
    return y


def _weight_rule(g: Any, y: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """The gradient times the input, over the rows of all samples at once."""
    x, g = all_rows(x, g)
    return product(g.T, conj(x))


def _input_rule(g: Any, y: Any, x: Any, weight: Any, bias: Any = None) -> Any:
    """The gradient times the weight; `product` uses rows that are equal."""
    return product(g, conj(weight))


def _bias_rule(g: Any, y: Any, x: Any, weight: Any, bias: Any) -> Any:
    """The gradient itself, for a bias of any shape that broadcasts: the sweep sums it."""
    return g


# One operation instead of transpose, product and sum: one node, and the result is not saved twice.
# Two rows, because an operation has as many arguments as it has rules.
_linear = op("linear", _linear_forward, _input_rule, _weight_rule)
_linear_with_bias = op("linear", _linear_forward, _input_rule, _weight_rule, _bias_rule)


def linear(input: Any, weight: Any, bias: Any = None) -> Tensor:
    """Return `input @ weight.T + bias`, with the weight as (outputs, inputs)."""
    args = (as_tensor(input), as_tensor(weight))
    if args[0].shape[-1:] != args[1].shape[1:]:
        raise ValueError(f"input {args[0].shape} does not fit a weight of {args[1].shape}")
    result: Tensor = _linear(*args) if bias is None else _linear_with_bias(*args, as_tensor(bias))
    return result


def scaled_dot_product_attention(
    query: Any,
    key: Any,
    value: Any,
    attn_mask: Any = None,
    is_causal: bool = False,
    scale: float | None = None,
) -> Tensor:
    """Attend over the last two axes.

    A mask is True where a query may look, or added to the scores if it holds floats. A mask and
    `is_causal` cannot be combined.
    """
    q, k, v = as_tensor(query), as_tensor(key), as_tensor(value)
    # The query is scaled, not the scores: it is the smaller array.
    scores = (q * (1 / math.sqrt(q.shape[-1]) if scale is None else scale)) @ np.swapaxes(k, -1, -2)
    if is_causal:
        if attn_mask is not None:
            raise ValueError("give either attn_mask or is_causal")
        # Aligned at the first key, as in torch, where there are more keys than queries.
        attn_mask = np.tri(q.shape[-2], k.shape[-2], dtype=bool)
    if attn_mask is not None:
        mask = as_tensor(attn_mask)
        scores = where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    result: Tensor = softmax(scores, axis=-1) @ v
    return result
