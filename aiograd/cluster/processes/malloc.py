"""What the C library does with the memory of arrays that are gone.

As it starts, glibc gives every array past 128 KiB a fresh mapping, and gives it back page by page:
the page faults of the next one then cost several times more than its arithmetic. Other C libraries
are left alone.
"""

from __future__ import annotations

import numpy as np

_LARGEST = 32 << 20  # bytes; glibc does not learn from larger ones


def keep_freed_memory() -> None:
    """In a process of our own: keep freed memory for the next array."""
    import ctypes  # numpy has loaded it already

    trim_threshold, mmap_threshold = -1, -3
    try:
        libc = ctypes.CDLL(None)
        libc.gnu_get_libc_version  # noqa: B018 - other libraries ignore or misread these numbers
        libc.mallopt(mmap_threshold, 1 << 30)
        libc.mallopt(trim_threshold, 1 << 30)
    except (AttributeError, OSError):
        return


def free_one_large_array() -> None:
    """In a process of the user's: let glibc learn that arrays come and go.

    It keeps as much as has once been freed at a time, up to 32 MiB; whoever has told it otherwise
    is obeyed. No page of this array is ever touched.
    """
    np.empty(_LARGEST - (64 << 10), np.uint8)
