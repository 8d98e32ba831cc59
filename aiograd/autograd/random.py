"""Where random numbers come from that no `generator=` was given for.

    manual_seed(7) ──▶ one generator for the process ──┐
    (never called) ──▶ fresh entropy for every draw ───┼──▶ makers, first values of layers, dropout
    inside a checkpoint ──▶ `Replayable`: equal runs ──┘

The generator belongs to the process, as numpy's and torch's do: workers of one process share it,
and each worker process has its own, which starts unseeded. numpy locks a generator while it draws,
so threads may share it; which thread draws first is then up to the scheduler.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import numpy as np

Generator = np.random.Generator

_seeded: Generator | None = None  # None: every draw has fresh entropy, also in forked children
_run: ContextVar[_Run | None] = ContextVar("aiograd_replay", default=None)


def manual_seed(seed: int | None) -> None:
    """Let this process draw the same random numbers every time.

    Makers (`ag.randn`), first values of layers and dropout draw from one generator from here on,
    unless they are given a `generator=` of their own. None goes back to fresh entropy. Other
    worker processes are not seeded; call it there, too, each with a seed of its own:

        >>> ag.manual_seed(7)
        >>> first = ag.randn(3)
        >>> ag.manual_seed(7)
        >>> bool((ag.randn(3) == first).all())
        True
        >>> for rank, name in enumerate(["worker0", "worker1"]):
        ...     await ag.rpc_async(name, ag.manual_seed, args=(7 + rank,))
        >>> ag.manual_seed(None)
    """
    global _seeded
    _seeded = None if seed is None else np.random.default_rng(seed)


def generator_or_default(generator: Generator | int | None) -> Generator:
    """Return the generator itself, one for a seed, or the one that draws by default."""
    # It goes on from draw to draw, and so do two layers that are given the same one.
    if isinstance(generator, Generator):
        return generator
    if generator is None and (default := default_generator()) is not None:
        return default
    # A seed gives the same numbers in every call, a Generator goes on.
    return np.random.default_rng(generator)


def default_generator() -> Generator | None:
    """Return what draws where no generator was given; None for fresh entropy."""
    run = _run.get()
    return _seeded if run is None else run.generator()


class Replayable:
    """Runs a block several times with the same random numbers: a checkpointed function."""

    __slots__ = ("seed",)

    def __init__(self) -> None:
        self.seed: int | None = None  # drawn when the block first asks for a number: few ever do

    @contextmanager
    def running(self) -> Iterator[None]:
        """Draw from a generator that starts from the same state in every run."""
        # By a ContextVar: other tasks and threads draw as before.
        token = _run.set(_Run(self, _run.get()))
        try:
            yield
        finally:
            _run.reset(token)


class _Run:
    """One run of such a block."""

    __slots__ = ("_generator", "_of", "_outer")

    def __init__(self, of: Replayable, outer: _Run | None) -> None:
        self._of, self._outer = of, outer
        self._generator: Generator | None = None

    def generator(self) -> Generator:
        """Return the generator of this run."""
        if self._generator is None:
            if self._of.seed is None:
                # From the generator around the block, so that `manual_seed` decides about it, too.
                outer = _seeded if self._outer is None else self._outer.generator()
                source = np.random.default_rng() if outer is None else outer
                self._of.seed = int(source.integers(1 << 62))
            self._generator = np.random.default_rng(self._of.seed)
        return self._generator
