"""How the processes of a program find each other: through torch's store.

    rank r   "member/r" ◀── name, host, user     read all: are names unique, is there one host
    rank 0   "rendezvous" ◀── where its aiograd worker listens
    rank r   read "rendezvous", join there

Programs start a process group on the same MASTER_PORT, where torch's store listens already, so
aiograd cannot listen there itself. No secret goes through the store, which anyone who reaches its
port can read: on one host aiograd uses the private secret of this user, and between hosts a secret
file that `AIOGRAD_SECRET_FILE` names.
"""

from __future__ import annotations

import json
import os
import socket
import tempfile
from typing import Any, NamedTuple

__all__ = ["Meeting", "meet"]


class Meeting(NamedTuple):
    """What a process has to know to join: everyone's name by rank, and where rank 0 listens."""

    names: list[str] | None  # None in a group that others may join later
    rendezvous: str


def meet(store: Any, name: str, rank: int, world_size: int | None, host: str) -> Meeting:
    """Exchange names through the store; `host` is how other hosts reach this one.

    RuntimeError on every rank if two of them have the same name.
    """
    kind = "open" if world_size is None else "static"
    if store.compare_set("kind", "", kind).decode() != kind:
        raise RuntimeError(
            "RPC group mixes statically and dynamically initialized members which is not supported."
        )
    if world_size is None:
        return Meeting(None, _publish_open(store, rank, host))
    store.set(f"member/{rank}", json.dumps([name, _host_id()]))
    members = [json.loads(store.get(f"member/{each}").decode()) for each in range(world_size)]
    names = [each[0] for each in members]
    for other in range(world_size):
        if names.count(names[other]) > 1:
            ranks = [each for each in range(world_size) if names[each] == names[other]]
            raise RuntimeError(
                f"RPC worker name {names[other]} is not unique. "
                f"Workers {ranks[0]} and {ranks[1]} share the same name."
            )
    if rank == 0:
        one_host = len({each[1] for each in members}) == 1
        store.set("rendezvous", _local_rendezvous() if one_host else _free_port(host))
    return Meeting(names, store.get("rendezvous").decode())


def _publish_open(store: Any, rank: int, host: str) -> str:
    """Give the rendezvous of a group without a fixed size; it stays in the store for late ranks."""
    if rank == 0:
        local = host in ("localhost", "127.0.0.1", "::1", "")
        store.set("rendezvous", _local_rendezvous() if local else _free_port(host))
    return str(store.get("rendezvous").decode())


def _host_id() -> str:
    """Tell hosts, and users on one host, apart: only they share private files and Unix sockets."""
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:
        boot = ""
    # Two containers share a boot id and no files: their names and mount namespaces differ.
    try:
        mounts = os.readlink("/proc/self/ns/mnt")
    except OSError:
        mounts = ""
    return f"{socket.gethostname()} {boot} {mounts} {os.getuid()}"


def _local_rendezvous() -> str:
    # The socket is bound by rank 0's worker; the folder, mode 0700, is what others cannot enter.
    folder = tempfile.mkdtemp(prefix="aiograd-")
    return f"unix:{folder}/rendezvous"


def _free_port(host: str) -> str:
    # Bound and closed: another process could take the port before the worker does, which then
    # fails with "cannot listen". The store's own port is no choice, and the worker must be told
    # before it starts, because its start waits for all ranks.
    with socket.socket() as probe:
        probe.bind(("", 0))
        return f"{host}:{probe.getsockname()[1]}"
