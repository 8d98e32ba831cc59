"""`Runtime`: clock, randomness, threads and the network of a worker.

Everything else in `rpc` gets these from the `Runtime` it was given, so that the simulator
(`testing.simulator`) can run the very same code with its own.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Callable

from aiograd.rpc.runtime.threads import ThreadPool
from aiograd.rpc.transport.network import Network


class Runtime:
    """The real world.

    `spin` is how many seconds a loop may poll after traffic instead of sleeping, which halves
    latency between processes of one machine; `crowded` says that the loop shares its core.
    """

    spin: float
    crowded: bool

    def __init__(
        self, network: Network | None = None, spin: float = 0.0, crowded: bool = False
    ) -> None:
        self.network: Network = network if network is not None else Network()
        self.spin, self.crowded = spin, crowded
        # For jitter and choices, never for secrets: the simulator seeds it.
        self.random: random.Random = random.Random()

    def time(self) -> float:
        """Return seconds of a clock that never goes back."""
        return time.monotonic()

    # Two clocks: deadlines and heartbeats must not jump when the date is set.
    def wall_time(self) -> float:
        """Return seconds since 1970, to compare with what other processes have written."""
        return time.time()

    def give_way(self) -> None:
        """Yield the core to a process that waits for it; return at once if there is none."""
        if hasattr(os, "sched_yield"):  # not on every platform; polling then yields nothing
            os.sched_yield()

    def token_bytes(self, count: int) -> bytes:
        """Return random bytes that nobody can guess."""
        return os.urandom(count)

    def pool(self, loop: asyncio.AbstractEventLoop, limit: int, name: str) -> ThreadPool:
        """Make the pool that runs plain functions."""
        return ThreadPool(loop, self, limit, name)

    def start_thread(self, target: Callable[[], None], name: str) -> None:
        """Run `target` in a thread. RuntimeError or MemoryError if the system has none."""
        # Daemonic: a function that never returns must not keep the interpreter from ending.
        threading.Thread(target=target, name=name, daemon=True).start()
