"""Layers with parameters: linear maps, embeddings, convolutions, normalisations.

Parameters are float64 as everywhere in numpy; pass `dtype=` for another type, and `generator=` (a
numpy Generator) for the same first values every time. They start as in torch, and have its names,
so that state dicts of the same model fit.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any, ClassVar

import numpy as np

from aiograd.autograd.random import generator_or_default
from aiograd.autograd.tensor import Tensor
from aiograd.nn import functional, init
from aiograd.nn.module import Module, Parameter

Steps = int | tuple[int, ...]  # one number for every axis, or one for each
Generator = np.random.Generator


def empty_parameter(*shape: int, dtype: Any) -> Parameter:
    """Return a parameter that waits for its first values."""
    return Parameter(np.zeros(shape, dtype or np.float64))


def _first_values(weight: Parameter, bias: Parameter | None, generator: Generator | None) -> None:
    """Draw torch's first values: uniform within 1 / sqrt(inputs), for weights and biases alike."""
    generator = generator_or_default(generator)
    # torch's odd slope of √5 makes the bound of Kaiming 1 / sqrt(inputs).
    init.kaiming_uniform(weight, a=math.sqrt(5), generator=generator)
    if bias is not None:
        bound = 1 / math.sqrt(max(1, init.fans(weight)[0]))
        init.uniform(bias, -bound, bound, generator=generator)


def _check_groups(in_channels: int, out_channels: int, groups: int) -> None:
    # Else the shapes would only fail in `forward`, with a text about kernels.
    if in_channels % groups or out_channels % groups:
        raise ValueError("the numbers of channels must be multiples of groups")


class Linear(Module):
    """`x @ weight.T + bias`.

    >>> ag.nn.Linear(3, 2)(ag.ones(5, 3)).shape
    (5, 2)
    """

    in_features: int
    out_features: int

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = True,
        *,
        dtype: Any = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.weight: Parameter = empty_parameter(out_features, in_features, dtype=dtype)
        self.bias: Parameter | None = empty_parameter(out_features, dtype=dtype) if bias else None
        _first_values(self.weight, self.bias, generator)

    def forward(self, input: Any) -> Tensor:
        """Map the last axis; any axes in front are kept."""
        return functional.linear(input, self.weight, self.bias)

    def extra_repr(self) -> str:
        """Show the numbers of features in `repr`."""
        features = f"in_features={self.in_features}, out_features={self.out_features}"
        return f"{features}, bias={self.bias is not None}"


class Embedding(Module):
    """A table of `num_embeddings` rows, picked by number.

    With `sparse=True` the gradient holds only the rows that were used.

        >>> ag.nn.Embedding(10, 3)([[1, 2], [2, 9]]).shape
        (2, 2, 3)
    """

    num_embeddings: int
    embedding_dim: int
    padding_idx: int | None
    sparse: bool

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        padding_idx: int | None = None,
        sparse: bool = False,
        *,
        dtype: Any = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        # A sparse gradient has the rows that were used; optimisers and messages then handle these
        # alone.
        self.padding_idx, self.sparse = padding_idx, sparse
        self.weight: Parameter = empty_parameter(num_embeddings, embedding_dim, dtype=dtype)
        init.normal(self.weight, generator=generator)
        if padding_idx is not None:
            # It gets no gradient either, so it stays zero.
            self.weight.raw[padding_idx] = 0

    def forward(self, input: Any) -> Tensor:
        """Return the rows with these numbers: one axis more than the input has."""
        result: Tensor = functional.embedding(input, self.weight, self.padding_idx, self.sparse)
        return result

    def extra_repr(self) -> str:
        """Show the size of the table in `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}"


class EmbeddingBag(Module):
    """Sums, means or maxima of rows of a table, one per bag of row numbers.

    >>> ag.nn.EmbeddingBag(10, 3, mode="sum")([1, 2, 4, 5], offsets=[0, 1]).shape
    (2, 3)
    """

    num_embeddings: int
    embedding_dim: int
    sparse: bool
    padding_idx: int | None

    def __init__(
        self,
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        sparse: bool = False,
        padding_idx: int | None = None,
        *,
        dtype: Any = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        # Refused where the layer is made, not where it is used, perhaps on another worker.
        if mode not in ("sum", "mean", "max"):
            raise ValueError(f"mode must be 'sum', 'mean' or 'max', not {mode!r}")
        self.num_embeddings, self.embedding_dim = num_embeddings, embedding_dim
        self.mode, self.sparse, self.padding_idx = mode, sparse, padding_idx
        self.weight: Parameter = empty_parameter(num_embeddings, embedding_dim, dtype=dtype)
        init.normal(self.weight, generator=generator)
        if padding_idx is not None:
            self.weight.raw[padding_idx] = 0

    def forward(self, input: Any, offsets: Any = None, per_sample_weights: Any = None) -> Tensor:
        """Reduce the rows of each bag: a row of a matrix, or a run of a vector from an offset."""
        result: Tensor = functional.embedding_bag(
            input,
            self.weight,
            offsets,
            mode=self.mode,
            sparse=self.sparse,
            per_sample_weights=per_sample_weights,
            padding_idx=self.padding_idx,
        )
        return result

    def extra_repr(self) -> str:
        """Show the size of the table and the mode in `repr`."""
        return f"{self.num_embeddings}, {self.embedding_dim}, mode={self.mode!r}"


class _Convolution(Module):
    """What convolutions over one and two axes share: the kernels, and how they are slid."""

    _axes: ClassVar[int]

    in_channels: int
    out_channels: int
    kernel_size: tuple[int, ...]
    stride: Steps
    padding: Steps | str
    dilation: Steps
    groups: int

    def __init__(
        self,
        in_channels: int,
        out_channels: int,
        kernel_size: Steps,
        stride: Steps = 1,
        padding: Steps | str = 0,
        dilation: Steps = 1,
        groups: int = 1,
        bias: bool = True,
        *,
        dtype: Any = None,
        generator: Generator | None = None,
    ) -> None:
        super().__init__()
        _check_groups(in_channels, out_channels, groups)
        if isinstance(kernel_size, int):
            kernel_size = (kernel_size,) * self._axes
        kernel = tuple(kernel_size)
        self.in_channels, self.out_channels, self.kernel_size = in_channels, out_channels, kernel
        self.stride, self.padding = stride, padding
        self.dilation, self.groups = dilation, groups
        self.weight: Parameter = empty_parameter(
            out_channels, in_channels // groups, *kernel, dtype=dtype
        )
        self.bias: Parameter | None = empty_parameter(out_channels, dtype=dtype) if bias else None
        _first_values(self.weight, self.bias, generator)

    def forward(self, input: Any) -> Tensor:
        """Convolve a batch, or one sample without a batch."""
        convolve = functional.conv1d if self._axes == 1 else functional.conv2d
        result: Tensor = convolve(
            input, self.weight, self.bias, self.stride, self.padding, self.dilation, self.groups
        )
        return result

    def extra_repr(self) -> str:
        """Show channels and kernel in `repr`."""
        channels = f"{self.in_channels}, {self.out_channels}, kernel_size={self.kernel_size}"
        return f"{channels}, stride={self.stride}, padding={self.padding!r}"


class Conv1d(_Convolution):
    """Kernels slid over sequences of shape (batch, channels, length).

    >>> ag.nn.Conv1d(2, 8, kernel_size=3, padding=1)(ag.randn(4, 2, 10)).shape
    (4, 8, 10)
    """

    _axes = 1


class Conv2d(_Convolution):
    """Kernels slid over images of shape (batch, channels, height, width).

    >>> ag.nn.Conv2d(1, 8, kernel_size=3, padding=1)(ag.randn(4, 1, 28, 28)).shape
    (4, 8, 28, 28)
    """

    _axes = 2


class LayerNorm(Module):
    """Bring the last axes of every sample to mean 0 and variance 1, then scale and shift.

    >>> ag.nn.LayerNorm(8)(ag.randn(4, 8)).shape
    (4, 8)
    """

    def __init__(
        self,
        normalized_shape: int | Sequence[int],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.normalized_shape: tuple[int, ...] = (
            (normalized_shape,) if isinstance(normalized_shape, int) else tuple(normalized_shape)
        )
        self.eps = eps
        self.weight: Parameter | None = None
        self.bias: Parameter | None = None
        if elementwise_affine:
            # Begins as the identity: scale one, shift zero.
            self.weight = empty_parameter(*self.normalized_shape, dtype=dtype)
            init.ones(self.weight)
            self.bias = empty_parameter(*self.normalized_shape, dtype=dtype)

    def forward(self, input: Any) -> Tensor:
        """Normalise each sample by itself."""
        result: Tensor = functional.layer_norm(
            input, self.normalized_shape, self.weight, self.bias, self.eps
        )
        return result

    def extra_repr(self) -> str:
        """Show the normalised shape in `repr`."""
        return f"{self.normalized_shape}, eps={self.eps}"


class _BatchNorm(Module):
    """Bring every channel (axis 1) to mean 0 and variance 1 over the batch, then scale and shift.

    Outside of training the running mean and variance stand in for those of the batch.
    """

    num_features: int
    eps: float
    momentum: float

    # The only difference between the two classes.
    dims: tuple[int, ...]  # numbers of axes of an input

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = True,
        *,
        dtype: Any = None,
    ) -> None:
        super().__init__()
        self.num_features, self.eps, self.momentum = num_features, eps, momentum
        dtype = dtype or np.float64
        self.weight: Tensor | None = (
            init.ones(empty_parameter(num_features, dtype=dtype)) if affine else None
        )
        self.bias: Parameter | None = empty_parameter(num_features, dtype=dtype) if affine else None
        running = track_running_stats
        self.register_buffer(
            "running_mean", Tensor(np.zeros(num_features, dtype)) if running else None
        )
        self.register_buffer(
            "running_var", Tensor(np.ones(num_features, dtype)) if running else None
        )
        # Only counted; torch saves it, and state dicts shall fit.
        self.register_buffer("num_batches_tracked", Tensor(np.array(0)) if running else None)

    running_mean: Tensor | None
    running_var: Tensor | None
    num_batches_tracked: Tensor | None

    def forward(self, input: Any) -> Tensor:
        """Normalise; in training, also note mean and variance of the batch."""
        # A wrong number of axes would normalise the wrong one without a word.
        if len(np.shape(input)) not in self.dims or np.shape(input)[1] != self.num_features:
            raise ValueError(
                f"{type(self).__name__} takes {self.num_features} channels in axis 1 of "
                f"{' or '.join(map(str, self.dims))}, not a shape of {np.shape(input)}"
            )
        if self.training and self.num_batches_tracked is not None:
            # Written in place, through the tensor: a `state_dict` shares its memory.
            self.num_batches_tracked[...] = self.num_batches_tracked.raw + 1
        result: Tensor = functional.batch_norm(
            input,
            self.running_mean,
            self.running_var,
            self.weight,
            self.bias,
            self.training,
            self.momentum,
            self.eps,
        )
        return result

    def extra_repr(self) -> str:
        """Show channels and settings in `repr`."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}"


class BatchNorm1d(_BatchNorm):
    """Batch normalisation of (batch, channels) or (batch, channels, length).

    >>> ag.nn.BatchNorm1d(3)(ag.randn(5, 3)).shape
    (5, 3)
    """

    dims: tuple[int, ...] = (2, 3)


class BatchNorm2d(_BatchNorm):
    """Batch normalisation of (batch, channels, height, width).

    >>> ag.nn.BatchNorm2d(3)(ag.randn(5, 3, 4, 4)).shape
    (5, 3, 4, 4)
    """

    dims: tuple[int, ...] = (4,)
