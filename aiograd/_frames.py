"""The line of user code that led here: for warnings, and for messages that name a call site."""

from __future__ import annotations

import sys
import warnings
from types import FrameType


def users_frame() -> FrameType:
    """Return the innermost frame that is not ours: the line to name when something is wrong."""
    frame = sys._getframe(1)
    while frame.f_back is not None and is_ours(frame):
        frame = frame.f_back
    return frame


def is_ours(frame: FrameType) -> bool:
    """Return whether a frame runs code of the library."""
    name: str = frame.f_globals.get("__name__", "")
    return name.startswith("aiograd.")


def warn(message: str, category: type[Warning]) -> None:
    """Warn at the line of user code that led here."""
    # `stacklevel` would have to be counted anew for each way to the warning.
    level, frame = 2, sys._getframe(1)
    while frame.f_back is not None and is_ours(frame):
        level, frame = level + 1, frame.f_back
    warnings.warn(message, category, stacklevel=level)
