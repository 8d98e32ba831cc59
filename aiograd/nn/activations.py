"""Layers without parameters: activations, pooling, dropout, reshaping.

Each is a function of `functional.py` with its settings, so that it can stand in a `Sequential`.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from aiograd.autograd.ops.table import as_tensor
from aiograd.autograd.tensor import Tensor
from aiograd.nn import functional
from aiograd.nn.module import Module

Pair = int | tuple[int, int]


class ReLU(Module):
    """Zero below zero.

    >>> ag.nn.ReLU()(ag.tensor([-1.0, 2.0]))
    tensor([0., 2.])
    """

    def forward(self, input: Any) -> Tensor:
        """Return the input where it is positive, zero elsewhere."""
        result: Tensor = functional.relu(input)
        return result


class GELU(Module):
    """Weighted by the normal distribution; `approximate="tanh"` is the fast formula.

    >>> ag.nn.GELU()(ag.tensor([0.0]))
    tensor([0.])
    """

    def __init__(self, approximate: str = "none") -> None:
        super().__init__()
        self.approximate = approximate

    def forward(self, input: Any) -> Tensor:
        """Return the input times the probability that a normal number is below it."""
        result: Tensor = functional.gelu(input, approximate=self.approximate)
        return result


class Sigmoid(Module):
    """Between 0 and 1.

    >>> ag.nn.Sigmoid()(ag.tensor([0.0]))
    tensor([0.5])
    """

    def forward(self, input: Any) -> Tensor:
        """Return 1 / (1 + exp(-input))."""
        result: Tensor = functional.sigmoid(input)
        return result


class Tanh(Module):
    """Between -1 and 1.

    >>> ag.nn.Tanh()(ag.tensor([0.0]))
    tensor([0.])
    """

    def forward(self, input: Any) -> Tensor:
        """Return the hyperbolic tangent."""
        result: Tensor = functional.tanh(input)
        return result


class SiLU(Module):
    """The input times its sigmoid.

    >>> ag.nn.SiLU()(ag.tensor([0.0]))
    tensor([0.])
    """

    def forward(self, input: Any) -> Tensor:
        """Return input * sigmoid(input)."""
        result: Tensor = functional.silu(input)
        return result


class LeakyReLU(Module):
    """A small slope below zero.

    >>> ag.nn.LeakyReLU(0.5)(ag.tensor([-1.0, 2.0]))
    tensor([-0.5,  2. ])
    """

    def __init__(self, negative_slope: float = 0.01) -> None:
        super().__init__()
        self.negative_slope = negative_slope

    def forward(self, input: Any) -> Tensor:
        """Return the input where it is positive, `negative_slope` times it elsewhere."""
        result: Tensor = functional.leaky_relu(input, negative_slope=self.negative_slope)
        return result


class Softplus(Module):
    """A smooth ReLU.

    >>> round(float(ag.nn.Softplus()(ag.tensor(0.0))), 4)
    0.6931
    """

    def forward(self, input: Any) -> Tensor:
        """Return log(1 + exp(input))."""
        result: Tensor = functional.softplus(input)
        return result


class Softmax(Module):
    """Positive numbers along an axis that sum to 1.

    >>> ag.nn.Softmax()(ag.zeros(1, 2))
    tensor([[0.5, 0.5]])
    """

    def __init__(self, axis: int = -1) -> None:
        super().__init__()
        self.axis = axis

    def forward(self, input: Any) -> Tensor:
        """Return exp(input) as shares of its sum along the axis."""
        result: Tensor = functional.softmax(input, axis=self.axis)
        return result

    def extra_repr(self) -> str:
        """Show the axis in `repr`."""
        return f"axis={self.axis}"


# Has the same setting; not the logarithm of its result, which would be -inf for small shares.
class LogSoftmax(Softmax):
    """The logarithm of the softmax.

    >>> round(float(ag.nn.LogSoftmax()(ag.zeros(1, 2))[0, 0]), 4)
    -0.6931
    """

    def forward(self, input: Any) -> Tensor:
        """Return the logarithm of the shares, without computing them."""
        result: Tensor = functional.log_softmax(input, axis=self.axis)
        return result


class MaxPool2d(Module):
    """The largest number of each window.

    >>> ag.nn.MaxPool2d(2)(ag.randn(1, 3, 8, 8)).shape
    (1, 3, 4, 4)
    """

    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int] | None
    padding: int | tuple[int, int]

    def __init__(self, kernel_size: Pair, stride: Pair | None = None, padding: Pair = 0) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding

    def forward(self, input: Any) -> Tensor:
        """Pool (batch, channels, height, width), or one image without a batch."""
        result: Tensor = functional.max_pool2d(input, self.kernel_size, self.stride, self.padding)
        return result

    def extra_repr(self) -> str:
        """Show the window in `repr`."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class AvgPool2d(Module):
    """The mean of each window.

    >>> ag.nn.AvgPool2d(2)(ag.randn(1, 3, 8, 8)).shape
    (1, 3, 4, 4)
    """

    kernel_size: int | tuple[int, int]
    stride: int | tuple[int, int] | None
    padding: int | tuple[int, int]

    def __init__(
        self,
        kernel_size: Pair,
        stride: Pair | None = None,
        padding: Pair = 0,
        count_include_pad: bool = True,
    ) -> None:
        super().__init__()
        self.kernel_size, self.stride, self.padding = kernel_size, stride, padding
        self.count_include_pad = count_include_pad

    def forward(self, input: Any) -> Tensor:
        """Pool (batch, channels, height, width), or one image without a batch."""
        result: Tensor = functional.avg_pool2d(
            input, self.kernel_size, self.stride, self.padding, self.count_include_pad
        )
        return result

    def extra_repr(self) -> str:
        """Show the window in `repr`."""
        return f"kernel_size={self.kernel_size}, stride={self.stride}, padding={self.padding}"


class Dropout(Module):
    """In training, zero each number with probability `p` and scale up the others.

    >>> ag.nn.Dropout(0.5).eval()(ag.ones(2))
    tensor([1., 1.])
    """

    p: float
    generator: np.random.Generator | None

    def __init__(self, p: float = 0.5, generator: np.random.Generator | None = None) -> None:
        super().__init__()
        # Here, and not only in `forward`: the model may run on another worker.
        if not 0 <= p <= 1:
            raise ValueError(f"p must lie between 0 and 1, not {p}")
        self.p, self.generator = p, generator

    def forward(self, input: Any) -> Tensor:
        """Drop some of the numbers in training, else return the input."""
        result: Tensor = functional.dropout(input, self.p, self.training, self.generator)
        return result

    def extra_repr(self) -> str:
        """Show the probability in `repr`."""
        return f"p={self.p}"


class Flatten(Module):
    """Merge the axes from `start_axis` to `end_axis` into one.

    >>> ag.nn.Flatten()(ag.ones(2, 3, 4)).shape
    (2, 12)
    """

    start_axis: int
    end_axis: int

    def __init__(self, start_axis: int = 1, end_axis: int = -1) -> None:
        super().__init__()
        self.start_axis, self.end_axis = start_axis, end_axis

    def forward(self, input: Any) -> Tensor:
        """Return the same numbers with some axes merged."""
        tensor = as_tensor(input)
        # Negative axes count from the end of each input, so they are resolved here.
        start, end = self.start_axis % tensor.ndim, self.end_axis % tensor.ndim
        result: Tensor = tensor.reshape(*tensor.shape[:start], -1, *tensor.shape[end + 1 :])
        return result


class Identity(Module):
    """The input itself.

    >>> ag.nn.Identity()(ag.ones(2))
    tensor([1., 1.])
    """

    def forward(self, input: Any) -> Any:
        """Return the input."""
        return input
