"""Which workers run on this host: one small file for each, so that commands find their cluster.

    $XDG_RUNTIME_DIR/aiograd, else /tmp/aiograd-UID, else ~/.aiograd-UID        mode 0700
        w-INCARNATION.json     a worker: name, process, addresses; locked while it lives
        b-INCARNATION.json     where its event loop is blocked, while it is (`blocked`)

A file is locked by its worker until it ends, however it ends; one that nobody locks is removed by
the next process that looks, and the folder goes with the last file. The record of a coordinator has
the secret of its cluster if the library generated it: only the user that the cluster belongs to can
read this folder. A secret that a user gave is never written here.
"""

from __future__ import annotations

import contextlib
import json
import os
import stat
import tempfile
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any, Final

from aiograd.rpc.affinity import close_in_children

WORKER, BLOCKED = "w-", "b-"
_LARGEST: Final = 1 << 20  # bytes of a file that is read


@dataclass(frozen=True, slots=True)
class RunRecord:
    """One worker of this host."""

    name: str
    rank: int
    incarnation: str
    cluster: str  # the incarnation of its coordinator
    pid: int
    addresses: tuple[str, ...] = ()
    coordinator: bool = False
    secret: str | None = None  # in hexadecimal; only if the library generated it
    secret_file: str | None = None
    rendezvous: str | None = None
    program: str = ""
    started: float = 0.0  # seconds since 1970
    aiograd: str = ""


def folder(environment: Mapping[str, str] | None = None) -> Path | None:
    """Return the folder, made if there is none; None if no private one can be had."""
    environment = os.environ if environment is None else environment
    if not hasattr(os, "getuid"):  # Windows
        return None
    user, candidates = os.getuid(), []
    runtime = environment.get("XDG_RUNTIME_DIR")
    if runtime and os.path.isdir(runtime):
        candidates.append(Path(runtime, "aiograd"))
    candidates += [Path(tempfile.gettempdir(), f"aiograd-{user}")]
    with contextlib.suppress(RuntimeError):  # no home
        candidates.append(Path.home() / f".aiograd-{user}")
    for path in candidates:
        with contextlib.suppress(OSError):
            with contextlib.suppress(FileExistsError):
                path.mkdir(mode=0o700)
            # Another user may have made it, or a link of this name, to read or to plant records.
            found = path.lstat()
            if stat.S_ISDIR(found.st_mode) and found.st_uid == user and not found.st_mode & 0o077:
                return path
    return None


class Registration:
    """The file of one worker, from its start to `close`."""

    def __init__(self, record: RunRecord) -> None:
        self._lock = -1
        self._path: Path | None = None
        # Twice: another worker, the last one until now, may remove the folder in between.
        if not self._write(record):
            self._write(record)

    def _write(self, record: RunRecord) -> bool:
        """Write and lock the file; False if the folder has gone meanwhile."""
        where = folder()
        if where is None:
            return True
        path = where / f"{WORKER}{record.incarnation}.json"
        new = path.with_suffix(".new")
        try:
            self._lock = os.open(new, os.O_CREAT | os.O_EXCL | os.O_RDWR | os.O_CLOEXEC, 0o600)
            close_in_children(self)  # a fork that keeps it would keep the record
            # Locked before it has its name: a record that nobody locks is removed.
            if not _lock(self._lock, exclusive=True):
                os.unlink(new)
                self._close()
                return True
            os.write(self._lock, json.dumps(asdict(record)).encode())
            os.rename(new, path)
            self._path = path
        except FileNotFoundError:
            return False
        except OSError:  # a full disk is no reason not to start
            pass
        return True

    def descriptors(self) -> list[int]:
        """List the descriptor that a fork of this process has to close."""
        return [] if self._lock < 0 else [self._lock]

    def close(self) -> None:
        """Remove the file."""
        path, self._path = self._path, None
        if path is not None:
            with contextlib.suppress(OSError):
                path.unlink()
            _tidy(path.parent)
        self._close()

    def _close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1


def records() -> list[RunRecord]:
    """Return all workers of this user on this host, the oldest first; remove those of dead ones."""
    where = folder()
    found = [] if where is None else list(_read(where))
    return sorted(found, key=lambda record: record.started)


def remove_records(pid: int) -> None:
    """Remove the files of a process that is about to exit without closing its workers."""
    where = folder()
    if where is None:
        return
    for record in _read(where):
        if record.pid == pid:
            for kind in (WORKER, BLOCKED):
                (where / f"{kind}{record.incarnation}.json").unlink(missing_ok=True)
    _tidy(where)


def remove_dead_records() -> None:
    """Remove the files of workers that were killed."""
    where = folder()
    if where is not None:
        _tidy(where)


def _tidy(where: Path) -> None:
    """Remove the files of workers that were killed, and the folder if nothing is left in it."""
    for _ in _read(where):
        pass
    with contextlib.suppress(OSError):  # there is something left
        where.rmdir()


def _read(where: Path) -> Iterator[RunRecord]:
    known = {field.name for field in fields(RunRecord)}
    try:
        paths = sorted(where.glob(f"{WORKER}*.json"))
    except OSError:  # the last worker has removed the folder just now
        return
    for path in paths:
        with contextlib.suppress(OSError, ValueError, TypeError):
            descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _lock(descriptor, exclusive=False):  # its worker has ended
                    path.unlink()
                    incarnation = path.stem.removeprefix(WORKER)
                    (where / f"{BLOCKED}{incarnation}.json").unlink(missing_ok=True)
                    continue
                data = json.loads(os.read(descriptor, _LARGEST))
            finally:
                os.close(descriptor)
            given = {key: value for key, value in data.items() if key in known}
            given["addresses"] = tuple(given.get("addresses", ()))
            yield RunRecord(**given)


def write_note(incarnation: str, note: Mapping[str, Any] | None) -> None:
    """Leave a note on a worker's loop that is blocked, for others to read; None: remove it."""
    where = folder()
    if where is None:
        return
    path = where / f"{BLOCKED}{incarnation}.json"
    with contextlib.suppress(OSError):
        if note is None:
            path.unlink(missing_ok=True)
            return
        # Renamed into place: a reader never sees half of it.
        new = path.with_suffix(".new")
        descriptor = os.open(new, os.O_CREAT | os.O_TRUNC | os.O_WRONLY | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "w") as file:
            json.dump(note, file)
        os.rename(new, path)


def read_note(incarnation: str) -> dict[str, Any] | None:
    """Return the note on a worker of this host, if its loop is blocked."""
    where = folder()
    if where is None or not incarnation.isalnum():
        return None
    try:
        data = json.loads((where / f"{BLOCKED}{incarnation}.json").read_text())
    except (OSError, ValueError):
        return None
    return data if isinstance(data, dict) else None


def _lock(descriptor: int, *, exclusive: bool) -> bool:
    try:
        import fcntl
    except ImportError:  # Windows, which has no such folder
        return False
    try:
        kind = fcntl.LOCK_EX if exclusive else fcntl.LOCK_SH
        fcntl.flock(descriptor, kind | fcntl.LOCK_NB)
    except OSError:
        return False
    return True
