"""Hooks that can be taken away again."""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from aiograd.autograd.graph import Hook, Node

if TYPE_CHECKING:
    from aiograd.autograd.tensor import Tensor

_numbers = itertools.count()


class HookHandle:
    """Takes a hook away again."""

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    @classmethod
    def on_dict(cls, hooks: dict[int, Any], hook: Any) -> HookHandle:
        key = next(_numbers)
        hooks[key] = hook
        return cls(lambda: hooks.pop(key, None))

    @classmethod
    def on_list(cls, node: Node, hook: Hook) -> HookHandle:
        if node.hooks is None:
            node.hooks = []
        hooks = node.hooks
        entry = _Once(hook)  # the same function may be registered twice
        hooks.append(entry)

        def remove() -> None:
            if entry in hooks:
                hooks.remove(entry)

        return cls(remove)

    def remove(self) -> None:
        """Take the hook away; a second time does nothing."""
        if self._remove is not None:
            self._remove()
            self._remove = None


class _Once:
    __slots__ = ("hook",)

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor) -> Tensor | None:
        return self.hook(grad)
