"""The one rule for names of workers, in arguments as in handshakes.

Names go into logs, paths, addresses and certificates, and select modes and secrets. So they are
short, plain ASCII, and compared byte by byte.
"""

from __future__ import annotations

import re
from typing import Any, Final

# No dot, slash or space: a name is part of file names and log lines. 127 bytes fit the hello.
_NAME: Final = re.compile(r"[A-Za-z0-9_:-]{1,127}")


def is_name(text: str) -> bool:
    """Whether a worker can have this name."""
    # `fullmatch`: a pattern with `$` would also take a name that ends with a newline.
    return _NAME.fullmatch(text) is not None


def check_name(name: Any) -> str:
    """Return the name; TypeError or ValueError if no worker can have it."""
    if not isinstance(name, str):
        raise TypeError(f"a worker's name is a str, not {type(name).__name__}")
    if not is_name(name):
        raise ValueError(
            f"{name[:140]!r} is no name for a worker: 1 to 127 letters, digits, - _ and :"
        )
    return name
