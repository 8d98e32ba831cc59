"""Private folders for Unix sockets, and what killed processes left of theirs.

A process holds a lock on a file in its folder for as long as it lives; the kernel releases it,
however the process ends. So the next process of the same user that makes a folder can tell which
ones nobody uses any more, and removes them:

    /tmp/aiograd-x1y2z3ab/   mode 0700
        lock                 locked by the owner
        w, meet, 0, 1 …      sockets
        secret               of `aiograd run`

Process ids would not do: containers that share a temporary folder have the same ones.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import socket
import stat
import tempfile
import time

from aiograd.rpc.affinity import close_in_children

__all__ = ["PrivateFolder", "is_listening", "remove_abandoned"]

# The path of a Unix socket has 107 bytes at most (sun_path); this leaves room for the file name.
MAX_FOLDER_PATH = 80
PREFIX = "aiograd-"
LOCK, SECRET = "lock", "secret"
MADE_WITHIN = 60.0  # seconds after which an empty folder is not about to be used
_NAME = re.compile(PREFIX + r"[a-z0-9_]{8}")  # as `mkdtemp` makes them


class PrivateFolder:
    """A folder that only this user can enter, with a short path, until `close`."""

    def __init__(self) -> None:
        self.path: str = tempfile.mkdtemp(prefix=PREFIX)  # mode 0700
        if len(self.path) > MAX_FOLDER_PATH:
            os.rmdir(self.path)
            self.path = tempfile.mkdtemp(prefix=PREFIX, dir="/tmp")
        # Under another name until it is locked: a file of this name that is not locked says that
        # the folder is abandoned.
        new = os.path.join(self.path, "new")
        self._lock = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR, 0o600)
        close_in_children(self)  # a fork that keeps it would keep the folder
        _try_lock(self._lock)
        os.rename(new, os.path.join(self.path, LOCK))
        remove_abandoned(os.path.dirname(self.path))

    def descriptors(self) -> list[int]:
        """List the descriptor that a fork of this process has to close."""
        return [self._lock]

    def close(self) -> None:
        """Remove the folder and all that is in it."""
        # The lock last: a process that is killed in between leaves a folder that others can judge.
        with contextlib.suppress(OSError):
            for name in set(os.listdir(self.path)) - {LOCK}:
                with contextlib.suppress(OSError):
                    os.unlink(os.path.join(self.path, name))
        shutil.rmtree(self.path, ignore_errors=True)
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def remove_abandoned(parent: str) -> None:
    """Remove the folders of this user in `parent` whose owner has ended; leave all others alone."""
    with contextlib.suppress(OSError, AttributeError), os.scandir(parent) as entries:
        for entry in entries:
            # Not by name alone: nothing but what a `PrivateFolder` holds is ever removed.
            if not _NAME.fullmatch(entry.name):
                continue
            found = entry.stat(follow_symlinks=False)
            if stat.S_ISDIR(found.st_mode) and found.st_uid == os.getuid():
                with contextlib.suppress(OSError):
                    _remove_if_abandoned(entry.path)


def _remove_if_abandoned(folder: str) -> None:
    path = os.path.join(folder, LOCK)
    try:
        # Without O_CREAT: a folder without a lock is not ours to judge,
        lock = os.open(path, os.O_RDWR | os.O_NOFOLLOW)
    except FileNotFoundError:
        # unless it is empty: its owner was killed as it made or removed it.
        if time.time() - os.stat(folder).st_mtime > MADE_WITHIN:
            os.rmdir(folder)
        return
    try:
        if not _try_lock(lock):
            return
        names = set(os.listdir(folder)) - {LOCK}
        sockets = [os.path.join(folder, name) for name in names - {SECRET}]
        if not all(stat.S_ISSOCK(os.lstat(each).st_mode) for each in sockets):
            return  # something that no worker made
        # Ranks may outlive the `aiograd run` that started them.
        if any(is_listening(each) for each in sockets):
            return
        for name in (*names, LOCK):
            os.unlink(os.path.join(folder, name))
        os.rmdir(folder)
    finally:
        os.close(lock)


def _try_lock(descriptor: int) -> bool:
    """Lock a file until its descriptor is closed or the process ends; False if another has it."""
    try:
        import fcntl
    except ImportError:  # Windows, which has no such folders
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:  # taken, or a file system without locks
        return False
    return True


def is_listening(path: str) -> bool:
    """Tell whether a process accepts connections at a Unix socket."""
    with socket.socket(socket.AF_UNIX) as probe:
        try:
            probe.connect(path)
        except OSError:
            return False
    return True
