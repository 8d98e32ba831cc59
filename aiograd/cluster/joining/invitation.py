"""`Invitation`: everything that a process needs to join a running cluster.

    invitation = worker.invitation()        on a member
    invitation.save("job.invitation")       mode 0600; or pickle it for another engine
    await ag.join(invitation)               in another process, on this host or another one

A saved invitation and the rendezvous file of rank 0 have one format, so `ag.join("file:path")` and
`Invitation.load` read both.
"""

from __future__ import annotations

import os
import platform
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from aiograd.cluster.joining.rendezvous import read_private_json, write_private_json
from aiograd.errors import RpcError
from aiograd.wire.handshake import VERSION
from aiograd.wire.secrets import Secret

__all__ = ["Invitation", "check_versions", "own_versions"]


@dataclass(frozen=True, slots=True, kw_only=True)
class Invitation:
    """Where a cluster is, and what a newcomer must know and have; `worker.invitation()` makes one.

    `addresses` are those of the coordinator first, then of some other members: any of them leads to
    the coordinator of that time. Local ones are of use at `locality` only. Its text shows no
    secret; a pickle and a saved file do carry it, so hand them to nobody whom you would not let run
    code.

        >>> async with ag.LocalCluster(1) as cluster:
        ...     invitation = cluster.driver.invitation()
        ...     async with await ag.join(invitation, "guest") as guest:
        ...         print(await ag.rpc_async("guest", abs, args=(-1,)), invitation.secret)
        1 <secret>
    """

    addresses: tuple[str, ...]
    cluster: str = ""  # id of the cluster, in hex
    secret: Secret | None = field(default=None, repr=False)  # None: each member has its own
    versions: Mapping[str, str] = field(default_factory=lambda: own_versions())
    tls: str = "none"  # "certificates", "secret" or "none"
    host: str = ""  # the name of the host that wrote it
    locality: str = ""  # where its Unix sockets and loopback addresses can be reached

    def save(self, path: str | os.PathLike[str]) -> None:
        """Write it to a file that only this user can read, by a rename; RpcError if it fails."""
        data = {
            "addresses": self.addresses,
            "secret": self.secret.hex() if self.secret is not None else None,
            "refusal": None,
            "cluster": self.cluster,
            "versions": dict(self.versions),
            "tls": self.tls,
            "host": self.host,
            "locality": self.locality,
        }
        write_private_json(os.fspath(path), data, "the invitation")

    @classmethod
    def load(cls, path: str | os.PathLike[str]) -> Invitation:
        """Read what `save`, or rank 0 at "file:path", wrote; RpcError, AuthError if it is none."""
        where = os.fspath(path)
        try:
            data = read_private_json(where, "the invitation")
            return cls(
                addresses=tuple(map(str, data["addresses"])),
                secret=Secret.fromhex(data["secret"]) if data["secret"] else None,
                cluster=str(data.get("cluster", "")),
                versions={str(k): str(v) for k, v in data.get("versions", {}).items()},
                tls=str(data.get("tls", "none")),
                host=str(data.get("host", "")),
                locality=str(data.get("locality", "")),
            )
        except FileNotFoundError:
            raise RpcError(f"there is no invitation {where}") from None
        except (ValueError, KeyError, TypeError, AttributeError):
            raise RpcError(f"{where} is there, but is no invitation: use another file") from None


def own_versions() -> dict[str, str]:
    """Return what has to fit between two workers that send each other pickles."""
    # Not imported: the package imports this module.
    return {
        "aiograd": str(getattr(sys.modules.get("aiograd"), "__version__", "")),
        "wire": str(VERSION),
        "python": platform.python_version(),
        "numpy": np.__version__,
    }


# How many parts of a version have to be equal. Functions travel as the byte code of one minor
# version of Python; arrays as numpy pickles them, which it changed once, with 2.0.
_EQUAL_PARTS = {"aiograd": 2, "python": 2, "numpy": 1}


def check_versions(
    theirs: Mapping[str, Any], who: str, ours: Mapping[str, str] | None = None
) -> str | None:
    """Say which version of `who` does not fit ours, and the cure; None if all do."""
    ours = own_versions() if ours is None else ours
    for package, parts in _EQUAL_PARTS.items():
        mine, other = ours.get(package, ""), str(theirs.get(package, ""))
        if mine and other and mine.split(".")[:parts] != other.split(".")[:parts]:
            wanted = ".".join(mine.split(".")[:parts])
            return (
                f"{who} has {package} {other}, this cluster {package} {mine}: "
                f"run it with {package} {wanted}"
            )
    return None
