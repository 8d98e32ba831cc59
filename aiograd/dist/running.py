"""A pass under way on this worker: its state machine, and what the shell needs to know of it."""

from __future__ import annotations

import asyncio
from typing import Any

from aiograd.dist.context import Context
from aiograd.dist.passes import Pass
from aiograd.dist.roots import is_heavy


class Running:
    """A pass and what the shell needs to know of it."""

    __slots__ = ("context", "done", "draining", "floor", "heavy", "inbox", "play")

    def __init__(
        self, context: Context, play: Pass, floor: int, done: asyncio.Future[None] | None
    ) -> None:
        self.context, self.play = context, play
        self.floor = floor  # passes of this originator below this number had ended when it began
        self.done = done  # at the originator: ends with the pass
        self.draining = False  # a thread is computing
        self.inbox: list[tuple[Any, ...]] = []  # messages that came meanwhile
        self.heavy = is_heavy(play.sweep)
