"""Layers over sequences: recurrent ones and attention.

Arguments, parameter names, first values and results are torch's, so that state dicts of the same
model fit. Sequences are (length, batch, features), with `batch_first=True` (batch, length,
features), or one sequence without a batch.

A recurrent layer multiplies all steps of its input by the weights at once; only what depends on the
state before goes step by step, and is recorded as such: derivatives of any order follow.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import numpy as np

from aiograd.autograd.ops.elementwise import tanh, where
from aiograd.autograd.ops.join import concatenate, split, stack
from aiograd.autograd.ops.neural import dropout, sigmoid, softmax
from aiograd.autograd.ops.shape import swapaxes
from aiograd.autograd.ops.table import as_tensor
from aiograd.autograd.random import Generator, generator_or_default
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.nn import functional, init
from aiograd.nn.layers import Linear, empty_parameter
from aiograd.nn.module import Module, Parameter

State = tuple[Tensor, ...]  # (h,) of a GRU, (h, c) of an LSTM


class _Recurrent(Module):
    """What LSTM and GRU share: parameters per layer and direction, and the run over a sequence."""

    input_size: int
    hidden_size: int
    num_layers: int
    bias: bool
    batch_first: bool
    dropout: float
    bidirectional: bool

    # The differences between the classes.
    gates: int  # blocks of rows in a weight
    states: int  # tensors in a state
    step: Callable[[Tensor, Tensor, State], State]  # (input's part, state's part, state) → state

    def __init__(
        self,
        input_size: int,
        hidden_size: int,
        num_layers: int = 1,
        bias: bool = True,
        batch_first: bool = False,
        dropout: float = 0.0,
        bidirectional: bool = False,
        *,
        dtype: Any = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        if not 0 <= dropout <= 1:
            raise ValueError(f"dropout must lie between 0 and 1, not {dropout}")
        if num_layers < 1 or hidden_size < 1:
            raise ValueError("num_layers and hidden_size are at least 1")
        self.input_size, self.hidden_size, self.num_layers = input_size, hidden_size, num_layers
        self.bias, self.batch_first = bias, batch_first
        self.dropout, self.bidirectional = dropout, bidirectional
        # torch's bound, by the width of the state for all parameters, those of the input included.
        bound, source = 1 / math.sqrt(hidden_size), generator_or_default(generator)
        rows = self.gates * hidden_size
        for layer in range(num_layers):
            features = input_size if layer == 0 else hidden_size * len(self._directions)
            for end in self._directions:
                shapes: dict[str, tuple[int, ...]]
                shapes = {"weight_ih": (rows, features), "weight_hh": (rows, hidden_size)}
                if bias:
                    shapes |= {"bias_ih": (rows,), "bias_hh": (rows,)}
                # Drawn in the order of torch's names, so that one seed gives the same model from
                # run to run.
                for name, shape in shapes.items():
                    parameter = empty_parameter(*shape, dtype=dtype)
                    init.uniform(parameter, -bound, bound, generator=source)
                    self.register_parameter(f"{name}_l{layer}{end}", parameter)

    @property
    def _directions(self) -> tuple[str, ...]:
        return ("", "_reverse") if self.bidirectional else ("",)

    def _run(self, input: Any, given: State | None) -> tuple[Tensor, State]:
        """Return the outputs of the last layer, and the last states of all layers."""
        x = as_tensor(input)
        if x.ndim not in (2, 3) or x.shape[-1] != self.input_size:
            raise ValueError(
                f"{type(self).__name__} takes sequences of {self.input_size} features, "
                f"not a shape of {x.shape}"
            )
        lone = x.ndim == 2
        # Inside, time comes first: a step is then one index, and its rows lie together in memory.
        x = x[:, None] if lone else swapaxes(x, 0, 1) if self.batch_first else x
        # Without a step there would be no output to stack, and no last state.
        if not x.shape[0]:
            raise ValueError("a sequence has at least one step")
        first = self._first_states(given, x, lone)
        last: list[State] = []
        for layer in range(self.num_layers):
            # Between layers only, as in torch: neither the input nor the last output is thinned
            # out.
            if layer and self.dropout:
                x = dropout(x, self.dropout, self.training)
            ways = []
            for end in self._directions:
                # States are numbered layer by layer, and direction by direction within a layer.
                outputs, state = self._one_way(x, f"_l{layer}{end}", first[len(last)])
                ways.append(outputs)
                last.append(state)
            x = ways[0] if len(ways) == 1 else concatenate(ways, axis=-1)
        final = tuple([stack(list(each)) for each in zip(*last, strict=True)])
        if lone:
            return x[:, 0], tuple([each[:, 0] for each in final])
        return (swapaxes(x, 0, 1) if self.batch_first else x), final

    def _first_states(self, given: State | None, x: Tensor, lone: bool) -> list[State]:
        """Return the state that each layer and direction begins with."""
        count = self.num_layers * len(self._directions)
        shape = (count, x.shape[1], self.hidden_size)
        if given is None:
            # One array for all: it is read, and never written to.
            zero = wrap(np.zeros(shape[1:], x.dtype))
            return [(zero,) * self.states] * count
        whole = [as_tensor(each)[:, None] if lone else as_tensor(each) for each in given]
        if len(whole) != self.states or any(each.shape != shape for each in whole):
            shown = ", ".join(str(each.shape) for each in whole)
            raise ValueError(f"the first state has shape {shape} for this input, not {shown}")
        return [tuple([each[k] for each in whole]) for k in range(count)]

    def _one_way(self, x: Tensor, end: str, state: State) -> tuple[Tensor, State]:
        """Run one layer in one direction."""
        of: Callable[[str], Parameter] = lambda name: getattr(self, name + end)  # noqa: E731
        bias_ih, bias_hh = (of("bias_ih"), of("bias_hh")) if self.bias else (None, None)
        # All steps in one product. Step by step it would be as many small ones, each with its node.
        parts = functional.linear(x, of("weight_ih"), bias_ih)
        weight, reverse, outputs = of("weight_hh"), end.endswith("_reverse"), []
        steps = range(x.shape[0])
        for t in reversed(steps) if reverse else steps:
            state = type(self).step(parts[t], functional.linear(state[0], weight, bias_hh), state)
            outputs.append(state[0])
        # The outputs of the way back are put in the order of the input, next to those of the way
        # there.
        return stack(outputs[::-1] if reverse else outputs), state

    def extra_repr(self) -> str:
        """Show sizes and layers in `repr`."""
        sizes = f"{self.input_size}, {self.hidden_size}, num_layers={self.num_layers}"
        return f"{sizes}, bidirectional={self.bidirectional}"


class LSTM(_Recurrent):
    """Long short-term memory over a sequence: `output, (h, c) = lstm(x)`.

    >>> lstm = ag.nn.LSTM(3, 5, num_layers=2)
    >>> output, (h, c) = lstm(ag.randn(7, 4, 3))  # 7 steps, a batch of 4
    >>> output.shape, h.shape, c.shape
    ((7, 4, 5), (2, 4, 5), (2, 4, 5))
    """

    gates: int = 4
    states: int = 2

    @staticmethod
    def step(x: Tensor, h: Tensor, state: State) -> State:
        """Return the next (h, c): forget, write, show."""
        # torch's order of the gates, by which its state dicts are laid out.
        write, forget, value, show = split(x + h, 4, axis=-1)
        c = sigmoid(forget) * state[1] + sigmoid(write) * tanh(value)
        return sigmoid(show) * tanh(c), c

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, tuple[Tensor, Tensor]]:
        """Return the outputs of the last layer, and the last (h, c) of every layer."""
        output, (h, c) = self._run(input, None if hx is None else tuple(hx))
        return output, (h, c)


class GRU(_Recurrent):
    """Gated recurrent units over a sequence: `output, h = gru(x)`.

    >>> gru = ag.nn.GRU(3, 5, batch_first=True, bidirectional=True)
    >>> output, h = gru(ag.randn(4, 7, 3))
    >>> output.shape, h.shape
    ((4, 7, 10), (2, 4, 5))
    """

    gates: int = 3
    states: int = 1

    @staticmethod
    def step(x: Tensor, h: Tensor, state: State) -> State:
        """Return the next (h,): between the old one and a new value."""
        # The new value is reset before it is added, which is why the two parts come apart.
        reset_x, keep_x, new_x = split(x, 3, axis=-1)
        reset_h, keep_h, new_h = split(h, 3, axis=-1)
        keep = sigmoid(keep_x + keep_h)
        new = tanh(new_x + sigmoid(reset_x + reset_h) * new_h)
        # The same as keep · old + (1 − keep) · new, with one product less to record.
        return (new + keep * (state[0] - new),)

    def forward(self, input: Any, hx: Any = None) -> tuple[Tensor, Tensor]:
        """Return the outputs of the last layer, and the last h of every layer."""
        output, (h,) = self._run(input, None if hx is None else (hx,))
        return output, h


class MultiheadAttention(Module):
    """Attention of several heads: `output, weights = attention(query, key, value)`.

    >>> attention = ag.nn.MultiheadAttention(8, num_heads=2, batch_first=True)
    >>> x = ag.randn(4, 7, 8)
    >>> output, weights = attention(x, x, x)
    >>> output.shape, weights.shape
    ((4, 7, 8), (4, 7, 7))
    """

    embed_dim: int
    num_heads: int
    dropout: float
    batch_first: bool

    in_proj_weight: Parameter  # or three: q_proj_weight, k_proj_weight, v_proj_weight

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        *,
        dtype: Any = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        # Each head gets the same number of features.
        if num_heads < 1 or embed_dim % num_heads:
            raise ValueError(f"{embed_dim} features cannot be shared by {num_heads} heads")
        self.embed_dim, self.num_heads = embed_dim, num_heads
        self.dropout, self.batch_first = dropout, batch_first
        self.kdim: int = embed_dim if kdim is None else kdim
        self.vdim: int = embed_dim if vdim is None else vdim
        source = generator_or_default(generator)
        # One weight for all three while they have the same width, as in torch's state dicts.
        widths = {"q": embed_dim, "k": self.kdim, "v": self.vdim}
        self._joint = set(widths.values()) == {embed_dim}
        shapes = (
            {"in_proj_weight": (3 * embed_dim, embed_dim)}
            if self._joint
            else {f"{name}_proj_weight": (embed_dim, width) for name, width in widths.items()}
        )
        for name, shape in shapes.items():
            weight = init.xavier_uniform(empty_parameter(*shape, dtype=dtype), generator=source)
            setattr(self, name, weight)
        self.in_proj_bias: Parameter | None = (
            empty_parameter(3 * embed_dim, dtype=dtype) if bias else None
        )
        self.out_proj: Linear = Linear(embed_dim, embed_dim, bias, dtype=dtype, generator=source)
        # As in torch: the bias of the projections begins at zero, that of a plain Linear does not.
        if self.out_proj.bias is not None:
            init.zeros(self.out_proj.bias)

    def forward(
        self,
        query: Any,
        key: Any,
        value: Any,
        key_padding_mask: Any = None,
        need_weights: bool = True,
        attn_mask: Any = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
    ) -> tuple[Tensor, Tensor | None]:
        """Return what each query found, and the weights by which it looked (or None).

        Masks are torch's: True where a query may *not* look, or floats that are added to the
        scores. `key_padding_mask` is (batch, keys); `attn_mask` (queries, keys), or one for each
        sample and head. `is_causal` alone makes the mask of a sequence that looks back.
        """
        inputs = [as_tensor(each) for each in (query, key, value)]
        lone = inputs[0].ndim == 2
        if lone:
            inputs = [each[None] for each in inputs]
        elif not self.batch_first:
            inputs = [swapaxes(each, 0, 1) for each in inputs]
        q, k, v = [self._heads(x, w, b) for x, w, b in zip(inputs, *self._weights(), strict=True)]
        # The queries are scaled and not the scores, of which there are far more.
        scores = (q * (1 / math.sqrt(q.shape[-1]))) @ swapaxes(k, -1, -2)
        if is_causal and attn_mask is None:
            attn_mask = ~np.tri(q.shape[-2], k.shape[-2], dtype=bool)
        # One for each sample and head comes as (samples · heads, queries, keys).
        if attn_mask is not None:
            mask = as_tensor(attn_mask)
            scores = _masked(scores, mask.reshape(scores.shape) if mask.ndim == 3 else mask)
        if key_padding_mask is not None:
            mask = as_tensor(key_padding_mask)
            scores = _masked(scores, mask.reshape(-1, 1, 1, mask.shape[-1]))
        # A query whose mask allows nothing gives nan, as torch's does: there is no right answer.
        weights = softmax(scores, axis=-1)
        if self.dropout:
            weights = dropout(weights, self.dropout, self.training)
        found = swapaxes(weights @ v, 1, 2)
        output = self.out_proj(found.reshape(*found.shape[:2], self.embed_dim))
        if not self.batch_first and not lone:
            output = swapaxes(output, 0, 1)
        if average_attn_weights:
            weights = weights.mean(axis=1)
        if lone:
            output, weights = output[0], weights[0]
        return output, weights if need_weights else None

    def _weights(self) -> tuple[list[Any], list[Any]]:
        """Return the weights and the biases for queries, keys and values."""
        if self._joint:
            weights = list(split(self.in_proj_weight, 3))
        else:
            weights = [getattr(self, f"{name}_proj_weight") for name in "qkv"]
        bias = self.in_proj_bias
        return weights, [None] * 3 if bias is None else list(split(bias, 3))

    def _heads(self, x: Tensor, weight: Any, bias: Any) -> Tensor:
        """Return (batch, heads, length, features of a head)."""
        y = functional.linear(x, weight, bias)
        heads: Tensor = swapaxes(y.reshape(*y.shape[:2], self.num_heads, -1), 1, 2)
        return heads

    def extra_repr(self) -> str:
        """Show features and heads in `repr`."""
        return f"{self.embed_dim}, num_heads={self.num_heads}"


def _masked(scores: Any, mask: Tensor) -> Any:
    return where(mask, -np.inf, scores) if mask.dtype == bool else scores + mask
