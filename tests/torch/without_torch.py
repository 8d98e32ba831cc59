"""Functions for workers that have not loaded torch: this module must not import it."""

from __future__ import annotations

import importlib.abc
import sys
import threading
from typing import Any

import aiograd as ag

SEEN: list[str] = []


class _Watch(importlib.abc.MetaPathFinder):
    def find_spec(self, name: str, path: Any, target: Any = None) -> None:
        if name == "aiograd.torch":
            SEEN.append(threading.current_thread().name)


def watch() -> bool:
    """Note the thread that will import torch; whether it is not loaded yet."""
    sys.meta_path.insert(0, _Watch())
    return "torch" not in sys.modules and "aiograd.torch" not in sys.modules


async def seen() -> tuple[list[str], str]:
    """The threads that imported it, and the one of the loop."""
    return SEEN, threading.current_thread().name


def is_loaded() -> bool:
    return "aiograd.torch" in sys.modules


def echo(value: Any) -> Any:
    return value


async def fetch(reference: ag.RRef[Any]) -> str:
    """Fetch a tensor from the driver."""
    return type(await reference.to_here()).__name__
