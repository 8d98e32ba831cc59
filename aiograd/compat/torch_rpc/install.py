"""`install`: the drop-in in the place of torch's own modules, for unmodified programs.

Replaces the modules in `sys.modules` and in their packages, and the names that modules took from
them before, by identity. Modules of torch that RPC does not need stay as they are.
"""

from __future__ import annotations

import importlib
import sys
import warnings
from types import ModuleType
from typing import Any

import torch
import torch.distributed.autograd
import torch.distributed.rpc
import torch.futures

__all__ = ["install"]

# torch's module → ours
_MODULES = {
    "torch.distributed.rpc": "aiograd.compat.torch_rpc",
    "torch.distributed.rpc.api": "aiograd.compat.torch_rpc.api",
    "torch.distributed.autograd": "aiograd.compat.torch_rpc.autograd",
    "torch.distributed.optim.optimizer": "aiograd.compat.torch_rpc.optim",
}
_FUNCTIONS = ("wait_all", "collect_all")  # of torch.futures
_installed = False


def install() -> None:
    """Put the drop-in in the place of torch.distributed.rpc, .autograd and what is built on them.

    Call it before `init_rpc`. Modules that were imported before get the new names, too.
    """
    global _installed
    if _installed:
        return
    _installed = True
    replaced: dict[int, tuple[Any, Any]] = {}
    for theirs, ours in _MODULES.items():
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch compiles optimisers, and warns of doing so
            old, new = importlib.import_module(theirs), importlib.import_module(ours)
        _pair(old, new, replaced)
    futures = importlib.import_module("aiograd.compat.torch_rpc.futures")
    for name in _FUNCTIONS:
        old, new = getattr(torch.futures, name), getattr(futures, name)
        replaced[id(old)] = (old, new)
    _complete()
    for name in list(sys.modules):
        module = sys.modules[name]
        # torch's modules in C++ stay whole: `aiograd.torch.engine` uses one.
        if name.startswith(("aiograd.", "torch._C")) or not isinstance(module, ModuleType):
            continue
        _rebind(vars(module), replaced)
    for theirs, ours in _MODULES.items():
        _forward(sys.modules[theirs], sys.modules[ours])
        sys.modules[theirs] = sys.modules[ours]


def _pair(old: ModuleType, new: ModuleType, replaced: dict[int, tuple[Any, Any]]) -> None:
    """Note the module and each of its names that ours has, too."""
    replaced[id(old)] = (old, new)
    for name, value in vars(old).items():
        found = getattr(new, name, None)
        # Only what was written to take its place: our modules import other things of that name.
        ours = str(getattr(found, "__module__", "")).startswith("aiograd.compat.")
        if ours and found is not value and callable(value):
            replaced[id(value)] = (value, found)


def _forward(old: ModuleType, new: ModuleType) -> None:
    """Let an attribute that is set in torch's module, by who still has it, be set in ours."""

    class Forwarding(ModuleType):
        def __setattr__(self, name: str, value: Any) -> None:
            super().__setattr__(name, value)
            setattr(new, name, value)

    old.__class__ = Forwarding


def _rebind(names: dict[str, Any], replaced: dict[int, tuple[Any, Any]]) -> None:
    for name, value in list(names.items()):
        found = replaced.get(id(value))
        if found is not None and found[0] is value:
            names[name] = found[1]


def _complete() -> None:
    """Give our modules the rest of torch's names, so that nothing that is imported is missing."""
    for theirs, ours in _MODULES.items():
        old, new = vars(sys.modules[theirs]), vars(sys.modules[ours])
        for name, value in old.items():
            new.setdefault(name, value)
