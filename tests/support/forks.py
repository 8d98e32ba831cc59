"""Run something in a fork of the test's process."""

from __future__ import annotations

import os
import warnings
from collections.abc import Callable


def in_forked_child(use: Callable[[], object]) -> str:
    """Return what `use()` raises in a forked child, as "Type: text", or "nothing"."""
    read, write = os.pipe()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # newer Pythons warn of forks where threads are
        child = os.fork()
    if child == 0:
        try:
            use()
            said = "nothing"
        except BaseException as error:
            said = f"{type(error).__name__}: {error}"
        os.write(write, said.encode())
        os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        said = pipe.read()
    os.waitpid(child, 0)
    return said
