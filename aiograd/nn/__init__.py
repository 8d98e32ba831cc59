"""Models: modules, layers, losses, and their first values.

    module         Module and Parameter: a model as a tree
    containers     modules made of modules
    functional     neural operations as functions
    init           first values of parameters
    activations    layers without parameters
    layers         layers with parameters
    sequences      recurrent layers and attention
    losses         losses as modules
    files          save and load tensors
    remote         RemoteModule: a module on another worker
    sharded        ShardedEmbeddingBag: a table spread over workers
    pipeline       Pipeline: stages on several workers, fed with micro-batches

Only the last three know of workers (`rpc`, `rref`, `dist`); they are imported when asked for.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

from aiograd.nn import functional as functional
from aiograd.nn import init as init
from aiograd.nn.activations import (
    GELU,
    AvgPool2d,
    Dropout,
    Flatten,
    Identity,
    LeakyReLU,
    LogSoftmax,
    MaxPool2d,
    ReLU,
    Sigmoid,
    SiLU,
    Softmax,
    Softplus,
    Tanh,
)
from aiograd.nn.containers import ModuleDict, ModuleList, Sequential
from aiograd.nn.files import load, save
from aiograd.nn.layers import (
    BatchNorm1d,
    BatchNorm2d,
    Conv1d,
    Conv2d,
    Embedding,
    EmbeddingBag,
    LayerNorm,
    Linear,
)
from aiograd.nn.losses import BCEWithLogitsLoss, CrossEntropyLoss, L1Loss, MSELoss, NLLLoss
from aiograd.nn.module import Module, Parameter
from aiograd.nn.sequences import GRU, LSTM, MultiheadAttention

if TYPE_CHECKING:
    from aiograd.nn.pipeline import Pipeline
    from aiograd.nn.remote import RemoteModule
    from aiograd.nn.sharded import ShardedEmbeddingBag

__all__ = [
    "GELU",
    "GRU",
    "LSTM",
    "AvgPool2d",
    "BCEWithLogitsLoss",
    "BatchNorm1d",
    "BatchNorm2d",
    "Conv1d",
    "Conv2d",
    "CrossEntropyLoss",
    "Dropout",
    "Embedding",
    "EmbeddingBag",
    "Flatten",
    "Identity",
    "L1Loss",
    "LayerNorm",
    "LeakyReLU",
    "Linear",
    "LogSoftmax",
    "MSELoss",
    "MaxPool2d",
    "Module",
    "ModuleDict",
    "ModuleList",
    "MultiheadAttention",
    "NLLLoss",
    "Parameter",
    "Pipeline",
    "ReLU",
    "RemoteModule",
    "Sequential",
    "ShardedEmbeddingBag",
    "SiLU",
    "Sigmoid",
    "Softmax",
    "Softplus",
    "Tanh",
    "functional",
    "init",
    "load",
    "save",
]


# Models of one process need no workers, so what does is imported when asked for.
_LATER = {"RemoteModule": "remote", "Pipeline": "pipeline", "ShardedEmbeddingBag": "sharded"}


def __getattr__(name: str) -> Any:
    if name in _LATER:
        return getattr(importlib.import_module(f"aiograd.nn.{_LATER[name]}"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# So that completion in a shell finds what is imported later.
def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
