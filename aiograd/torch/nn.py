"""Modules of torch on other workers: `ag.nn.RemoteModule` over `torch.nn.Module`s.

Everything is as for our own modules (`aiograd.nn.remote`), but for files: by the name of a file,
safetensors, npz as our modules write it, or torch's own format, of which only tensors are read.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, TypeVar

import numpy as np
import torch

from aiograd import nn
from aiograd.nn import files
from aiograd.nn.module import HasForward
from aiograd.nn.remote import KINDS
from aiograd.rpc.api import Kwargs
from aiograd.rpc.directory import To

__all__ = ["RemoteModule"]

M_co = TypeVar("M_co", bound=HasForward[..., Any], covariant=True)


class RemoteModule(nn.RemoteModule[M_co]):
    """A module of torch on another worker, called as if it were here.

    `cls(*args, **kwargs)` is made on worker `to`; everything else is as for `ag.nn.RemoteModule`:

        layer = await ag.torch.RemoteModule("worker1", torch.nn.Linear, args=(4, 2))
        async with ag.context() as ctx:
            y = await layer(x)
            await ctx.backward(y.sum())

    `await layer.remote_parameters()` gives what `ag.torch.DistributedOptimizer` takes.
    `await layer.save("layer.safetensors")` and `load` let the owner write and read its state.
    """

    def __init__(
        self,
        to: To,
        cls: Callable[..., M_co],
        args: tuple[Any, ...] = (),
        kwargs: Kwargs = None,
    ) -> None:
        if isinstance(cls, type) and not issubclass(cls, torch.nn.Module):
            raise TypeError(
                f"ag.torch.RemoteModule takes a class of torch.nn, not {cls.__qualname__}; for "
                "modules of ag.nn there is ag.nn.RemoteModule"
            )
        super().__init__(to, cls, args, kwargs)


class TorchModules:
    """Modules of torch, for `ag.nn.remote`."""

    module_class = torch.nn.Module

    def save(self, path: files.Path, module: torch.nn.Module) -> None:
        """Write the state of a module: safetensors, npz, or torch's own format, by the name."""
        name = str(path)
        if name.endswith(".npz"):
            files.save(path, {key: _array(key, v) for key, v in module.state_dict().items()})
            return
        with files.replacing(path) as partial:
            if name.endswith(".safetensors"):
                _safetensors().save_model(module, partial)
            else:
                torch.save(module.state_dict(), partial)

    def load(self, path: files.Path, module: torch.nn.Module) -> None:
        """Read the state of a module from such a file."""
        name = str(path)
        if name.endswith(".safetensors"):
            _safetensors().load_model(module, path)
            return
        state: Mapping[str, torch.Tensor]
        if name.endswith(".npz"):
            found = files.load(path).items()
            state = {key: torch.from_numpy(np.array(tensor.data)) for key, tensor in found}
        else:
            state = torch.load(path, weights_only=True)
        module.load_state_dict(state)


KINDS.append(TorchModules())


def _array(name: str, tensor: Any) -> np.ndarray:
    try:
        array: np.ndarray = tensor.detach().numpy()
    except (AttributeError, RuntimeError, TypeError) as error:
        what = getattr(tensor, "dtype", type(tensor).__name__)
        raise TypeError(
            f"{name} is a {what}, which npz cannot hold; use a name that ends in .safetensors"
        ) from error
    return array


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError as error:
        raise ImportError(
            "files that end in .safetensors need the safetensors package: "
            "pip install 'aiograd[io]'; names that end in .pt are written by torch"
        ) from error
    return safetensors.torch
