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
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, MutableMapping
from dataclasses import dataclass
from pathlib import Path

from aiograd.errors import AuthError, RpcError
from aiograd.rpc.transport import is_loopback, split_tcp
from aiograd.wire.secret import SHORTEST, Secret

__all__ = ["Place", "Sign", "find_secret", "parse_place", "read_secret_file"]


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
class Sign:
    """What rank 0 writes into the file: where it listens, and the secret if it made one."""

    addresses: tuple[str, ...]
    secret: Secret | None = None

    def write(self, path: str) -> None:
        """Put it there in one step, so that nobody reads half of it; only this user may read it."""
        secret = self.secret.hex() if self.secret else None
        text = json.dumps({"addresses": self.addresses, "secret": secret})
        _write_private(Path(path), text.encode(), os.replace)

    @classmethod
    def read(cls, path: str) -> Sign | None:
        """Read it; None while it is not there."""
        try:
            data = json.loads(Path(path).read_bytes())
            secret = Secret.fromhex(data["secret"]) if data["secret"] else None
            return cls(tuple(data["addresses"]), secret)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise RpcError(f"{path} is there, but no worker wrote it: use another file") from None


def _write_private(path: Path, data: bytes, put: Callable[[str, Path], None]) -> None:
    descriptor, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
        put(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


# ── the secret ──────────────────────────────────────────────────────────────────────────────────


def read_secret_file(path: str) -> Secret:
    """Read a secret file: raw bytes, surrounding whitespace stripped; private to this user."""
    try:
        with open(path, "rb") as file:
            found = os.fstat(file.fileno())
            secret = Secret(file.read().strip())
    except OSError as error:
        raise AuthError(f"cannot read the secret file {path}: {error.strerror}") from error
    if (why := exposure(found.st_mode, found.st_uid, os.geteuid())) is not None:
        raise AuthError(f"the secret file {path} {why}")
    if len(secret) < SHORTEST:
        raise AuthError(f"the secret in {path} has {len(secret)} bytes; {SHORTEST} are the least")
    return secret


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
