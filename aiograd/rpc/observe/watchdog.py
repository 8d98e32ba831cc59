"""Tells who holds the event loop.

A loop that does not turn can say nothing itself, so a thread asks it for a sign of life, again and
again. When none comes for a second, the thread logs what the loop's thread is doing:

    asked ──answered──▶ pause ──▶ asked …
      └──1 s of silence──▶ log the stack ──answered──▶ log how long it took

One thread per worker, asleep but for four questions a second: a thread cannot be started by a loop
that is blocked already. What holds the interpreter's lock as well stops this thread, too, and is
seen when it lets go.
"""

from __future__ import annotations

import logging
import sys
import threading
import traceback
from typing import TYPE_CHECKING, Final

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

_log = logging.getLogger("aiograd")

BLOCKED: Final = 1.0  # seconds without a sign of life that are worth a line
PAUSE: Final = 0.25  # seconds between an answer and the next question
_DOUBT: Final = 0.1  # seconds: who was stopped as a whole process answers as soon as it goes on
_FRAMES: Final = 30  # innermost frames that are shown


class Watchdog:
    """Watches the loop of one worker, from `start` to `close`."""

    def __init__(self, agent: Agent) -> None:
        self._agent = agent
        self._sign = threading.Event()  # of life, or of the end
        self._ended = False

    def start(self) -> None:
        self._agent.runtime.start_thread(self._watch, f"aiograd-watchdog-{self._agent.name}")

    def close(self) -> None:
        self._ended = True
        self._sign.set()

    def _watch(self) -> None:
        while not self._ended:
            self._sign.clear()
            asked = self._agent.runtime.time()
            try:
                self._agent.loop.call_soon_threadsafe(self._sign.set)
            except RuntimeError:  # the loop is closed
                return
            if not (self._sign.wait(BLOCKED) or self._sign.wait(_DOUBT)):
                self._tell(asked)
            if not self._ended:
                self._sign.clear()
                self._sign.wait(PAUSE)

    def _tell(self, asked: float) -> None:
        agent = self._agent
        if self._ended or not agent.loop.is_running():
            return
        frame = sys._current_frames().get(agent.thread)
        stack = "".join(traceback.format_stack(frame)[-_FRAMES:]) if frame is not None else "?"
        del frame  # it would keep everything alive that the loop works on
        _log.warning(
            "%s: the event loop has been blocked for %.1f s; plain functions and "
            "`await asyncio.to_thread(...)` do not block it. It is here:\n%s",
            agent.name,
            agent.runtime.time() - asked,
            stack.rstrip(),
        )
        while not self._sign.wait(BLOCKED):
            if agent.loop.is_closed() or not agent.loop.is_running():
                return
        if not self._ended:
            blocked = agent.runtime.time() - asked
            _log.warning("%s: the event loop goes on after %.1f s", agent.name, blocked)
