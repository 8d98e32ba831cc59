"""Where the workers of a cluster meet, and the secret they show each other there.

    "host:port"   rank 0 listens there
    "unix:path"   rank 0 listens on that Unix socket
    "file:path"   rank 0 listens anywhere and writes its address into that file, for others to read

A secret that nobody gave is made where that is safe: into the file (which only this user can read),
or, when everything stays on this host, into a private file of this user. Listening and dialling are
the transport's business.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from aiograd.errors import AuthError, RpcError
from aiograd.rpc.transport.network import is_loopback, split_tcp
from aiograd.wire.secrets import SHORTEST, Secret

__all__ = ["Place", "Sign", "Verdict", "find_secret", "parse_place", "read_secret_file"]

LATE: Final = 10.0  # seconds in which ranks of one start come, one after the other


@dataclass(frozen=True, slots=True)
class Place:
    """A rendezvous, taken apart."""

    kind: str  # "tcp", "unix", "memory" or "file"
    text: str  # "host:port", a path or a name

    @property
    def address(self) -> str:
        """The transport's word for it; a file has to be read first."""
        return f"{self.kind}:{self.text}"

    @property
    def local(self) -> bool:
        """Whether it can be reached from this host only."""
        if self.kind == "tcp":
            return is_loopback(split_tcp(self.address)[0])
        return self.kind in ("unix", "memory")


def parse_place(text: str) -> Place:
    """Read a rendezvous; a malformed one is a ValueError that shows the forms."""
    if not isinstance(text, str):
        raise TypeError(f"rendezvous should be a string, not {type(text).__name__}")
    kind, colon, rest = text.partition(":")
    if kind in ("unix", "file", "memory") and colon:
        if not rest:
            raise ValueError(f"rendezvous {text!r} names no path")
        return Place(kind, rest)
    place = Place("tcp", text.removeprefix("tcp:").removeprefix("//"))
    try:
        _, port = split_tcp(place.address)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise ValueError(
            f"cannot read the rendezvous {text!r}: "
            'it should be "host:port", "unix:path" or "file:path"'
        )
    return place


# ── a file as a meeting place ───────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Verdict:
    """Why a start was refused, for ranks that come when rank 0 has gone."""

    why: str
    at: float  # wall time
    told: tuple[int, ...] = ()  # ranks that were there and know it

    def is_for(self, rank: int | None, now: float) -> bool:
        """Whether it is about the start that this rank takes part in, as far as can be known.

        Not if it is old: the next start begins where this file is. And not if the rank was told
        once already: then it comes again, for the next start. Told twice, it is a duplicate.
        """
        return abs(now - self.at) <= LATE and self.told.count(-1 if rank is None else rank) != 1


@dataclass(frozen=True, slots=True)
class Sign:
    """What rank 0 writes into the file: where it listens, and the secret if it made one.

    Or, with a verdict, that it listens no more because the start was refused.
    """

    addresses: tuple[str, ...]
    secret: Secret | None = None
    verdict: Verdict | None = None

    def write(self, path: str) -> None:
        """Put it there in one step, so that nobody reads half of it; only this user may read it."""
        secret = self.secret.hex() if self.secret else None
        verdict = asdict(self.verdict) if self.verdict else None
        data = {"addresses": self.addresses, "secret": secret, "verdict": verdict}
        text = json.dumps(data)
        try:
            _write_private(Path(path), text.encode(), os.replace)
        except OSError as error:  # for example, another user's file is there
            raise RpcError(f"cannot write the rendezvous file {path}: {error.strerror}") from error

    @classmethod
    def read(cls, path: str) -> Sign | None:
        """Read it; None while it is not there. AuthError if it may be another user's.

        Whoever writes this file decides whom its readers trust, and so whose code they run.
        """
        try:
            data = json.loads(_read_private(path, "the rendezvous file", follow=False))
            secret = Secret.fromhex(data["secret"]) if data["secret"] else None
            return cls(tuple(data["addresses"]), secret, _verdict(data.get("verdict")))
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise RpcError(f"{path} is there, but no worker wrote it: use another file") from None


def _verdict(data: Any) -> Verdict | None:
    if data is None:
        return None
    return Verdict(str(data["why"]), float(data["at"]), tuple(map(int, data["told"])))


def _write_private(path: Path, data: bytes, put: Callable[[str, Path], None]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        put(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


# ── files that decide whom to trust ─────────────────────────────────────────────────────────────


def _read_private(path: str, what: str, *, follow: bool) -> bytes:
    """Read a file that nobody but this user, or root, can have written; AuthError if not.

    The open descriptor is checked, not the path: the path may mean another file a moment later.
    `follow`: whether the path may be a symbolic link. OSError if it cannot be opened.
    """
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK  # a pipe would wait for a writer
    try:
        descriptor = os.open(path, flags if follow else flags | os.O_NOFOLLOW)
    except OSError as error:
        if error.errno in (errno.ELOOP, errno.EMLINK) and os.path.islink(path):
            raise AuthError(f"{what} {path} is no regular file but a symbolic link") from None
        if isinstance(error, PermissionError):
            raise AuthError(f"this user may not read {what} {path}") from None
        raise
    try:
        found, user = os.fstat(descriptor), os.geteuid()
        if not stat.S_ISREG(found.st_mode):
            raise AuthError(f"{what} {path} is no regular file")
        if (why := exposure(found.st_mode, found.st_uid, user)) is not None:
            raise AuthError(f"{what} {path} {why}")
        folder = os.stat(os.path.dirname(os.path.realpath(path)))
        private = _is_private_group(folder.st_gid, user)
        why = replaceable(folder.st_mode, folder.st_uid, user, private_group=private)
        if why is not None:
            raise AuthError(f"{what} {path} is in a folder that {why}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def exposure(mode: int, owner: int, user: int) -> str | None:
    """Say what is wrong with a secret file of this mode and owner, if anything is.

    One of root's may be read by a group: that is how orchestrators hand secrets to other users.
    """
    if owner not in (user, 0):
        return f"belongs to another user ({owner}), who knows it and can change it"
    if mode & (0o077 if owner == user else 0o037):
        shown = f"{stat.S_IMODE(mode):04o}"
        return f"can be read or changed by others (mode {shown}): `chmod 600` it, or make another"
    return None


def replaceable(mode: int, owner: int, user: int, *, private_group: bool) -> str | None:
    """Say why others could replace a file of ours in a folder of this mode and owner, if they can.

    In a sticky folder, as /tmp is, they cannot. `private_group`: nobody else is in its group.
    """
    if owner not in (user, 0):
        return f"belongs to another user ({owner}), who can replace it"
    others = 0o002 if private_group else 0o022
    if mode & others and not mode & stat.S_ISVTX:
        shown = f"{stat.S_IMODE(mode):04o}"
        return f"others can write to (mode {shown}), so they can replace it: use a private folder"
    return None


def _is_private_group(group: int, user: int) -> bool:
    """Whether a group has this user as its only member, as where every user has one of its own."""
    import grp  # not on every platform
    import pwd

    try:
        account, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:
        return False
    return account.pw_gid == group and not set(found.gr_mem) - {account.pw_name}


# ── the secret ──────────────────────────────────────────────────────────────────────────────────


def read_secret_file(path: str) -> Secret:
    """Read a secret file: raw bytes, surrounding whitespace stripped; private to this user."""
    try:
        # Links are followed: orchestrators mount secrets as links into a folder of root's.
        secret = Secret(_read_private(path, "the secret file", follow=True).strip())
    except AuthError:
        raise
    except OSError as error:
        raise AuthError(f"cannot read the secret file {path}: {error.strerror}") from error
    if len(secret) < SHORTEST:
        raise AuthError(f"the secret in {path} has {len(secret)} bytes; {SHORTEST} are the least")
    return secret


def find_secret(
    place: Place,
    *,
    secret: bytes | Mapping[str, bytes] | None,
    secret_file: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None,
    environment: MutableMapping[str, str],
    token: Callable[[int], bytes],
) -> bytes | Mapping[str, bytes] | None:
    """Find the secret, or those by name; None when a file rendezvous is to carry a new one.

    A secret in the environment is taken out of it: children and error reports need not have it.
    """
    given = _taken_from(environment)
    if secret is not None:
        return secret
    if isinstance(secret_file, Mapping):
        return {name: read_secret_file(os.fspath(path)) for name, path in secret_file.items()}
    if secret_file is not None:
        return read_secret_file(os.fspath(secret_file))
    if given is not None:
        if len(given) < SHORTEST:
            raise AuthError(f"AIOGRAD_SECRET is too short; {SHORTEST} characters are the least")
        return given
    if place.kind == "file":
        return None
    if place.local:
        return user_secret(Path(tempfile.gettempdir()), os.getuid(), token)
    raise AuthError(
        f"meeting at {place.text} crosses the network and needs a secret that all workers share: "
        "pass Options(secret_file=...) or set AIOGRAD_SECRET_FILE (made by `openssl rand -hex 32`)"
    )


def _taken_from(environment: MutableMapping[str, str]) -> Secret | None:
    given = environment.pop("AIOGRAD_SECRET", None)
    return None if given is None else Secret(given.strip().encode())


def user_secret(parent: Path, user: int, token: Callable[[int], bytes]) -> Secret:
    """Give the secret of this user on this host; the first worker makes it.

    It keeps other users of the host out, and is for meetings that nobody else can reach.
    """
    folder = parent / f"aiograd-{user}"
    with contextlib.suppress(FileExistsError):
        folder.mkdir(mode=0o700)
    found = folder.lstat()
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise AuthError(f"{folder} is not private to this user; remove it, or pass a secret")
    path = folder / "secret"
    if not path.exists():
        # link() fails where rename() would replace: of two that come first, one wins for both.
        with contextlib.suppress(FileExistsError):
            _write_private(path, token(32).hex().encode(), os.link)
    return read_secret_file(str(path))
