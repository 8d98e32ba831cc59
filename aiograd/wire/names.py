"""The one rule for names and ranks of workers, in arguments as in handshakes.

Names go into logs, paths, addresses and certificates, and select modes and secrets. So they are
short, plain ASCII, and compared byte by byte. Two names of one cluster also have to look different:
a person writes the mode or the certificate for one of them, and must not mean the other.
"""

from __future__ import annotations

import functools
import re
from typing import Any, Final

# No dot, slash or space: a name is part of file names and log lines. 127 bytes fit the hello.
_NAME: Final = re.compile(r"[A-Za-z0-9_:-]{1,127}")
# Characters that common fonts draw alike. Beyond ASCII there would be thousands of them.
_ALIKE: Final = str.maketrans("IO1o_", "l0l0-")


# Ids of contexts and edges are 64-bit numbers with the rank of their maker in the top 16 bits.
RANKS: Final = 1 << 16


def check_rank(rank: int) -> int:
    """Return the rank; ValueError if it does not fit into the ids that are made of it."""
    if rank >= RANKS:
        raise ValueError(f"rank {rank} is too large: ranks are 0 to {RANKS - 1}")
    return rank


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


def look_alike(first: str, second: str) -> bool:
    """Whether two names differ at most in case, or in characters that look alike.

    >>> look_alike("bank", "BANK"), look_alike("lab1", "labI"), look_alike("lab1", "lab2")
    (True, True, False)
    """
    lower, drawn = appearance(first)
    other_lower, other_drawn = appearance(second)
    return lower == other_lower or drawn == other_drawn


# Cached: a newcomer is compared with every member of its cluster.
@functools.lru_cache(4096)
def appearance(name: str) -> tuple[str, str]:
    """Return a name without its case, and with one character for those that look alike."""
    # Two forms, not one: with "I", "i" and "l" all equal, "i" and "l" could not meet either.
    return name.lower(), name.translate(_ALIKE)
