"""How worker processes handle memory: they keep freed arrays, and look for cycles less often.

By default glibc maps fresh pages for every array above 128 KiB (M_MMAP_THRESHOLD) and unmaps them
when it is freed: the page faults of the next array then cost several times more than its
arithmetic. Other C libraries are left alone.
"""

from __future__ import annotations

import gc

import numpy as np

# Bytes; the limit of glibc's dynamic threshold (DEFAULT_MMAP_THRESHOLD_MAX). It does not adapt to
# larger blocks.
_LARGEST = 32 << 20
_DEFAULT_THRESHOLDS = (700, 2000)  # of Python 3.11 and 3.12, and of later ones


def keep_freed_memory() -> None:
    """Set the thresholds of malloc to 1 GiB; for processes of our own only."""
    import ctypes  # numpy has loaded it already

    trim_threshold, mmap_threshold = -1, -3  # M_TRIM_THRESHOLD, M_MMAP_THRESHOLD of malloc.h
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - other libraries ignore or misread these numbers
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 30)
    except (AttributeError, OSError):
        return


def collect_less_often() -> None:
    """Let the garbage collector run after 20,000 new objects instead of 700; for our processes.

    A tape and a table of references are large and without cycles, so every collection walks through
    them for nothing. RRef batches are 6 % faster (`benchmarks/peers`, rref.batch1000), and tapes of
    100,000 operations 1.6 times (`benchmarks/local`). A user's own setting is left alone."""
    if gc.get_threshold()[0] in _DEFAULT_THRESHOLDS:
        gc.set_threshold(20_000, 10, 10)


def free_one_large_array() -> None:
    """Let glibc's dynamic threshold adapt to large arrays; for a process of the user.

    Freeing a mapped block raises the threshold to its size, up to 32 MiB, unless the user has set
    it. Passes over 256 KB arrays took 96 page faults each in the driver, and take none after this.
    """
    # No page of this array is ever touched, so it costs no memory.
    np.empty(_LARGEST - (64 << 10), np.uint8)
