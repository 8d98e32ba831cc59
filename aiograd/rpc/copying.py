"""Copies of large arrays, made by two cores: one alone cannot use all that memory gives.

The other core takes pieces as long as there are any, so whoever copies waits for one piece at most,
also where that core is busy with something else.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Final

import numpy as np

PARALLEL_FROM: Final = 8 << 20  # bytes; less is copied before a thread has woken up
_PIECE: Final = 1 << 20


class Copier:
    """Copies for one worker; has a thread from the first large copy on."""

    def __init__(self, cores: int | None = None) -> None:
        self._alone = (cores if cores is not None else os.cpu_count()) == 1
        self._helper: ThreadPoolExecutor | None = None

    def copy(self, to: np.ndarray, source: np.ndarray) -> None:
        """Copy bytes to as many others."""
        if source.nbytes < PARALLEL_FROM or self._alone:
            to[:] = source
            return
        if self._helper is None:
            self._helper = ThreadPoolExecutor(1, "aiograd-copy")
        starts = iter(range(0, source.nbytes, _PIECE))
        helping = self._helper.submit(_copy, to, source, starts)
        _copy(to, source, starts)
        if not helping.cancel():
            helping.result()

    def close(self) -> None:
        if self._helper is not None:
            self._helper.shutdown()
            self._helper = None


def _copy(to: np.ndarray, source: np.ndarray, starts: Iterator[int]) -> None:
    for start in starts:
        end = start + _PIECE
        to[start:end] = source[start:end]
