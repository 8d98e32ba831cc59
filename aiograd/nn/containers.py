"""Modules made of modules."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from aiograd.nn.module import Module

L = TypeVar("L", bound="_Numbered")


class _Numbered(Module):
    """Parts under the names "0", "1", … (or given ones), in order."""

    def __len__(self) -> int:
        return len(list(self.children()))

    def __iter__(self) -> Iterator[Module]:
        return self.children()

    def __getitem__(self, index: int) -> Module:
        # Parts are attributes like any other (see `module.py`); there is no second list to keep
        # true.
        return list(self.children())[index]

    def append(self: L, module: Any) -> L:
        """Add a part at the end."""
        if not isinstance(module, Module):
            raise TypeError(f"{type(self).__name__} holds Modules, not {type(module).__name__}")
        # The number is the name, also in `state_dict`: "0.weight", as in torch.
        self.add_module(str(len(self)), module)
        return self

    def extend(self: L, modules: Iterable[Module]) -> L:
        """Add several parts at the end."""
        # One by one, through the check of `append`.
        for module in modules:
            self.append(module)
        return self


class Sequential(_Numbered):
    """One module after the other: `Sequential(a, b)(x) == b(a(x))`. A dict gives names.

    >>> model = ag.nn.Sequential(ag.nn.Linear(3, 4), ag.nn.Tanh(), ag.nn.Linear(4, 1))
    >>> model(ag.ones(5, 3)).shape
    (5, 1)
    """

    def __init__(self, *modules: Module | Mapping[str, Module]) -> None:
        super().__init__()
        if len(modules) == 1 and isinstance(modules[0], Mapping):
            for name, part in modules[0].items():
                self.add_module(name, part)
        else:
            for module in modules:
                self.append(module)

    def forward(self, input: Any) -> Any:
        """Return the result of the last module."""
        for module in self:
            input = module(input)
        return input


class ModuleList(_Numbered):
    """A list of modules whose parameters belong to the model.

    >>> layers = ag.nn.ModuleList([ag.nn.Linear(2, 2) for _ in range(3)])
    >>> len(list(layers.parameters()))
    6
    """

    def __init__(self, modules: Iterable[Module] = ()) -> None:
        super().__init__()
        self.extend(modules)


class ModuleDict(Module):
    """Modules by name whose parameters belong to the model.

    >>> heads = ag.nn.ModuleDict({"a": ag.nn.Linear(2, 1)})
    >>> heads["a"](ag.ones(2)).shape
    (1,)
    """

    def __init__(self, modules: Mapping[str, Module] | None = None) -> None:
        super().__init__()
        for name, module in (modules or {}).items():
            self[name] = module

    def __getitem__(self, name: str) -> Module:
        # Not `getattr`, which would find methods.
        found = vars(self).get(name)
        if not isinstance(found, Module):
            raise KeyError(name)
        return found

    def __setitem__(self, name: str, module: Module) -> None:
        # Parts are attributes: a part named "train" would hide the method.
        if hasattr(type(self), name):
            raise KeyError(f"{name!r} is the name of a method; choose another one")
        self.add_module(name, module)

    def __contains__(self, name: object) -> bool:
        return isinstance(vars(self).get(str(name)), Module)

    def __len__(self) -> int:
        return len(list(self.children()))

    def __iter__(self) -> Iterator[str]:
        return (name for name, _ in self.named_children())
