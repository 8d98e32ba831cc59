"""The rendezvous address, the rendezvous file, and the secret that workers authenticate with.

    "host:port"   rank 0 listens there
    "unix:path"   rank 0 listens on that Unix socket
    "file:path"   rank 0 listens anywhere and writes its addresses into that file

If no secret is given, one is generated where that is safe: into the rendezvous file, which only
this user can read, or, if the rendezvous is local to this host, into a private file of this user.
This module reads and writes files and decides; `bootstrap.py` listens, dials and retries.
"""

from __future__ import annotations

import contextlib
import errno
import json
import os
import stat
import tempfile
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from aiograd.errors import AuthError, RpcError
from aiograd.rpc.transport.network import is_loopback, split_tcp
from aiograd.wire.secrets import SHORTEST, Secret

__all__ = [
    "Refusal",
    "Rendezvous",
    "RendezvousFile",
    "find_secret",
    "parse_rendezvous",
    "read_private_json",
    "read_secret_file",
    "write_private_json",
]

_LINKS: Final = 8  # symbolic links that lead to one secret file; more are a mistake
# Seconds within which the ranks of one start arrive. A refusal in the rendezvous file that is older
# belongs to a previous start, and must not end this one.
START_WINDOW: Final = 10.0


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """A parsed rendezvous: where rank 0 can be found."""

    kind: str  # "tcp", "unix", "memory" or "file"
    location: str  # "host:port", a path or a name

    @property
    def address(self) -> str:
        """Give the address for the transport; not meaningful for a file, which must be read."""
        return f"{self.kind}:{self.location}"

    @property
    def local(self) -> bool:
        """Tell whether it can be reached from this host only; False for a file, on any disk."""
        if self.kind == "tcp":
            return is_loopback(split_tcp(self.address)[0])
        return self.kind in ("unix", "memory")


def parse_rendezvous(text: str) -> Rendezvous:
    """Parse a rendezvous; a malformed one is a ValueError that shows the valid forms."""
    if not isinstance(text, str):
        raise TypeError(f"rendezvous should be a string, not {type(text).__name__}")
    kind, colon, rest = text.partition(":")
    if kind in ("unix", "file", "memory") and colon:
        if not rest:
            raise ValueError(f"rendezvous {text!r} names no path")
        return Rendezvous(kind, rest)
    # torch.distributed spells it "tcp://host:port".
    rendezvous = Rendezvous("tcp", text.removeprefix("tcp:").removeprefix("//"))
    try:
        _, port = split_tcp(rendezvous.address)
    except ValueError:
        port = -1
    if not 0 <= port <= 65535:
        raise ValueError(
            f"cannot read the rendezvous {text!r}: "
            'it should be "host:port", "unix:path" or "file:path"'
        )
    return rendezvous


# ── the rendezvous file ─────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Refusal:
    """Why a start was refused, for ranks that arrive after rank 0 has exited."""

    why: str
    at: float  # wall time
    informed: tuple[int, ...] = ()  # ranks that were connected and got the reason from rank 0

    def applies_to(self, rank: int | None, now: float) -> bool:
        """Guess whether it is about the start that this rank takes part in.

        Not if it is old: the next start uses the same file. Not if the rank was informed exactly
        once: then this process is that rank of the next start. If the rank was informed twice, the
        start had duplicates of it, and this may be one more.
        """
        # abs: the clocks of two hosts that share the file differ.
        recent = abs(now - self.at) <= START_WINDOW
        return recent and self.informed.count(-1 if rank is None else rank) != 1


@dataclass(frozen=True, slots=True)
class RendezvousFile:
    """The content of the file: the addresses of rank 0, and the secret if rank 0 generated one.

    With a `refusal`, rank 0 has stopped listening because the start was refused. `author` says who
    wrote it, for people who find the file of a run that has ended.
    """

    addresses: tuple[str, ...]
    secret: Secret | None = None
    refusal: Refusal | None = None
    locality: str = ""  # where its Unix sockets and loopback addresses can be reached
    author: str = ""

    def write(self, path: str) -> None:
        """Write the file atomically, readable by this user only; RpcError if that fails."""
        data = {
            "addresses": self.addresses,
            "secret": self.secret.hex() if self.secret else None,
            "refusal": asdict(self.refusal) if self.refusal else None,
            "locality": self.locality,
            "author": self.author,
        }
        write_private_json(path, data, "the rendezvous file")

    @classmethod
    def read(cls, path: str) -> RendezvousFile | None:
        """Read the file; None if there is none. AuthError if another user may have written it.

        The author of this file decides whom its readers trust, and so whose code they run.
        """
        try:
            # Without this check another local user could plant the file, become rank 0 with a
            # secret of its own, and run code in every process that reads it. Links are refused,
            # because nothing needs them here, unlike secret files.
            data = read_private_json(path, "the rendezvous file")
            secret = Secret.fromhex(data["secret"]) if data["secret"] else None
            facts = str(data.get("locality", "")), str(data.get("author", ""))
            refusal = _parse_refusal(data.get("refusal"))
            return cls(tuple(data["addresses"]), secret, refusal, *facts)
        except FileNotFoundError:
            return None
        except (ValueError, KeyError, TypeError):
            raise RpcError(f"{path} is there, but no worker wrote it: use another file") from None


def _parse_refusal(data: Any) -> Refusal | None:
    if data is None:
        return None
    return Refusal(str(data["why"]), float(data["at"]), tuple(map(int, data["informed"])))


# ── private files ───────────────────────────────────────────────────────────────────────────────


def write_private_json(path: str, data: Mapping[str, Any], what: str) -> None:
    """Write a file atomically, readable by this user only; RpcError if that fails."""
    try:
        # Renamed into place, so that who polls the file never reads half of it.
        _write_private(Path(path), json.dumps(data).encode(), os.replace)
    except OSError as error:  # for example, another user's file is there
        raise RpcError(f"cannot write {what} {path}: {error.strerror}") from error


def read_private_json(path: str, what: str) -> Any:
    """Read such a file; AuthError if another user may have written it, ValueError if malformed.

    FileNotFoundError if there is none.
    """
    try:
        return json.loads(_read_private(path, what, follow=False))
    except FileNotFoundError:
        raise
    except OSError as error:
        # On a network file system another host may replace the file while it is read: ESTALE.
        if error.errno == getattr(errno, "ESTALE", -1):
            raise FileNotFoundError(path) from error
        raise


def _write_private(path: Path, data: bytes, put: Callable[[str, Path], None]) -> None:
    """Write a temporary file of mode 0600 beside `path`, then `put` it in place."""
    descriptor, temporary = tempfile.mkstemp(prefix=path.name + ".", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(descriptor, "wb") as file:
            file.write(data)
            # Before the rename: on a network file system another host may otherwise see the new
            # name before the bytes.
            file.flush()
            os.fsync(file.fileno())
        put(temporary, path)
    finally:
        with contextlib.suppress(FileNotFoundError):
            os.unlink(temporary)


def _read_private(path: str, what: str, *, follow: bool) -> bytes:
    """Read a file that only this user, or root, can have written; AuthError otherwise.

    `follow`: whether the path may be a symbolic link. OSError if it cannot be opened.
    """
    descriptor = _open_trusted(path, what, _LINKS if follow else 0)
    try:
        # fstat of the open descriptor, not stat of the path: the path may name another file by now.
        found, user = os.fstat(descriptor), os.geteuid()
        if not stat.S_ISREG(found.st_mode):
            raise AuthError(f"{what} {path} is no regular file")
        if (why := exposed_permissions(found.st_mode, found.st_uid, user)) is not None:
            raise AuthError(f"{what} {path} {why}")
        # A private file in a folder that others can write to may still be replaced by theirs.
        folder = os.stat(os.path.dirname(os.path.realpath(path)))
        private = _is_private_group(folder.st_gid, user)
        why = replaceable_within(folder.st_mode, folder.st_uid, user, private_group=private)
        if why is not None:
            raise AuthError(f"{what} {path} is in a folder that {why}")
        with open(descriptor, "rb", closefd=False) as file:
            return file.read()
    finally:
        os.close(descriptor)


def _open_trusted(path: str, what: str, links: int) -> int:
    """Open a file for reading, over at most so many symbolic links of this user or of root."""
    # O_NONBLOCK: opening a named pipe would block until somebody writes to it. O_NOFOLLOW: each
    # link is looked at here, because its owner decides which file is read.
    flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOFOLLOW
    try:
        return os.open(path, flags)
    except OSError as error:
        if isinstance(error, PermissionError):
            raise AuthError(f"this user may not read {what} {path}") from None
        # BSD reports a refused link as EMLINK, Linux as ELOOP.
        if error.errno not in (errno.ELOOP, errno.EMLINK) or not os.path.islink(path):
            raise
    if not links:
        raise AuthError(f"{what} {path} is no regular file but a symbolic link")
    found, target = os.lstat(path), os.readlink(path)
    if found.st_uid not in (os.geteuid(), 0):
        raise AuthError(f"{what} {path} is a symbolic link of another user ({found.st_uid})")
    return _open_trusted(os.path.join(os.path.dirname(path), target), what, links - 1)


def exposed_permissions(mode: int, owner: int, user: int) -> str | None:
    """Say why a secret file of this mode and owner is not private to `user`; None if it is."""
    if owner not in (user, 0):
        return f"belongs to another user ({owner}), who knows it and can change it"
    # A file of root may be readable by a group: orchestrators hand secrets to other users that way.
    if mode & (0o077 if owner == user else 0o037):
        shown = f"{stat.S_IMODE(mode):04o}"
        return f"can be read or changed by others (mode {shown}): `chmod 600` it, or make another"
    return None


def replaceable_within(mode: int, owner: int, user: int, *, private_group: bool) -> str | None:
    """Say why others could replace a file in a folder of this mode and owner; None if they cannot.

    `private_group`: this user is the only member of the folder's group.
    """
    if owner not in (user, 0):
        return f"belongs to another user ({owner}), who can replace it"
    # Writable by the group is common where every user has a group of its own (umask 002).
    others = 0o002 if private_group else 0o022
    # In a sticky folder, such as /tmp, only the owner of a file can rename or remove it.
    if mode & others and not mode & stat.S_ISVTX:
        shown = f"{stat.S_IMODE(mode):04o}"
        return f"others can write to (mode {shown}), so they can replace it: use a private folder"
    return None


def _is_private_group(group: int, user: int) -> bool:
    """Tell whether this user is the only member of a group, as with one group per user."""
    import grp  # not on every platform
    import pwd

    try:
        account, found = pwd.getpwuid(user), grp.getgrgid(group)
    except KeyError:  # as in a container that runs under a number without an account
        return False
    return account.pw_gid == group and not set(found.gr_mem) - {account.pw_name}


# ── the secret ──────────────────────────────────────────────────────────────────────────────────


def read_secret_file(path: str) -> Secret:
    """Read a secret file, private to this user; surrounding whitespace is stripped."""
    try:
        # Links of ours and of root are followed: orchestrators mount secrets as such.
        secret = Secret(_read_private(path, "the secret file", follow=True).strip())
    except AuthError:
        raise
    except OSError as error:
        raise AuthError(f"cannot read the secret file {path}: {error.strerror}") from error
    if len(secret) < SHORTEST:
        raise AuthError(f"the secret in {path} has {len(secret)} bytes; {SHORTEST} are the least")
    return secret


def find_secret(
    rendezvous: Rendezvous,
    *,
    secret: bytes | Mapping[str, bytes] | None,
    secret_file: str | os.PathLike[str] | Mapping[str, str | os.PathLike[str]] | None,
    environment: MutableMapping[str, str],
    token: Callable[[int], bytes],
) -> bytes | Mapping[str, bytes] | None:
    """Find the secret, or one per peer name; None if the rendezvous file is to carry a new one.

    Removes AIOGRAD_SECRET from `environment`. `token` generates random bytes.
    """
    # Removed even if another one is used: children and error reports need not have it.
    given = environment.pop("AIOGRAD_SECRET", None)
    if secret is not None:
        return secret
    if isinstance(secret_file, Mapping):
        return {name: read_secret_file(os.fspath(path)) for name, path in secret_file.items()}
    if secret_file is not None:
        return read_secret_file(os.fspath(secret_file))
    if given is not None:
        found = Secret(given.strip().encode())
        if len(found) < SHORTEST:
            raise AuthError(f"AIOGRAD_SECRET is too short; {SHORTEST} characters are the least")
        return found
    if rendezvous.kind == "file":
        return None
    if rendezvous.local:
        folders = Path(tempfile.gettempdir()), Path.home()
        return user_secret(folders, os.getuid(), token)
    raise AuthError(
        f"a rendezvous at {rendezvous.location} crosses the network and needs a secret that all "
        "workers share: pass Options(secret_file=...) or set AIOGRAD_SECRET_FILE "
        "(made by `openssl rand -hex 32`)"
    )


def user_secret(parents: Sequence[Path], user: int, token: Callable[[int], bytes]) -> Secret:
    """Give the secret of this user on this host; the first worker generates it.

    It keeps other users of the host out of a rendezvous that other hosts cannot reach. It is in a
    private folder in the first of `parents` where nobody else has taken its name.
    """
    # The first one is usually /tmp, where another user may have made a folder, or a link, of this
    # name, which this user cannot remove. All workers of this user find the same, and go on to the
    # next: another user must not be able to keep them from starting.
    for parent in parents:
        folder = parent / (f"aiograd-{user}" if parent is parents[0] else f".aiograd-{user}")
        with contextlib.suppress(FileExistsError):
            folder.mkdir(mode=0o700)
        found = folder.lstat()
        if found.st_uid == user:
            break
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise AuthError(f"{folder} is not private to this user; remove it, or pass a secret")
    path = folder / "secret"
    if not path.exists():
        # link() fails where rename() would replace: if two workers race, both read the winner's.
        with contextlib.suppress(FileExistsError):
            _write_private(path, token(32).hex().encode(), os.link)
    return read_secret_file(str(path))
