"""The notes that a watchdog leaves in the run folder while the event loop of its worker is blocked.

A blocked loop can answer no question, so its watchdog thread, which looks four times a second,
writes down since when it is blocked, and the stack. `blocked` reads it, in any process of the user.
"""

from __future__ import annotations

import os
import time

from aiograd.observe.runfolder import write_note
from aiograd.rpc.observe.watchdog import Blockage


class Notes:
    """Writes the notes of one worker; called by its watchdog, in the watchdog's thread."""

    def __init__(self, incarnation: bytes) -> None:
        self._incarnation = incarnation.hex()

    def __call__(self, blockage: Blockage | None) -> None:
        """Write where the loop is blocked; None: it goes on."""
        if blockage is None:
            write_note(self._incarnation, None)
            return
        # Here: a worker that is never blocked never loads it.
        from aiograd.observe.stacks import as_line, as_text, frame_places, users_place

        seconds, frame = blockage
        places = frame_places(frame)
        note = {
            "pid": os.getpid(),
            "since": time.time() - seconds,
            "at": as_line(users_place(places)),
            "stack": as_text(places),
        }
        write_note(self._incarnation, note)
