"""Where one worker listens, and what it tells others: decided from its plan and this host.

    rank 0, "host:port"    there; a name that means loopback here, or nothing yet, is not asked:
                           then all addresses of this host, since others will dial that name
    others, "host:port"    the address from which the kernel reaches the coordinator
    "file:path"            a Unix socket; TCP as well if the path is on a network file system or
                           the options speak of a network
    everybody              a Unix socket beside TCP, for peers on the same host

`Options.listen`, `advertise` and `ports` come first. Neither loopback nor 0.0.0.0 is ever told to
another host: `interfaces.told_addresses` replaces the one, `dialer` leaves the other out for peers
that do not share it, and the coordinator refuses a newcomer from another host that has told nothing
else.
"""

from __future__ import annotations

import asyncio
import contextlib
import errno
import ipaddress
import os
import random
import socket
import threading
from collections.abc import Awaitable, Callable, Sequence

from aiograd.cluster.joining.rendezvous import Rendezvous
from aiograd.errors import RpcError
from aiograd.rpc.agent import Agent
from aiograd.rpc.options import Options
from aiograd.rpc.transport.interfaces import (
    ListenSpec,
    check_advertised,
    host_name,
    interfaces,
    is_routable,
    join_address,
    parse_listen,
    routable,
    route_to,
    told_addresses,
)
from aiograd.rpc.transport.network import is_local, is_loopback, split_tcp

__all__ = ["Resolve", "crosses_hosts", "listen", "listen_host", "rendezvous_host", "tell_with"]

# From a host name to its numeric addresses; it waits for DNS as long as the start may take.
Resolve = Callable[[str], Awaitable[list[str]]]

# File systems that several hosts share. A `file:` rendezvous on one of them is for several hosts.
_SHARED = ("nfs", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb", "glusterfs", "panfs", "afs")
_SHARED_EXACTLY = {"9p", "virtiofs", "orangefs", "pvfs2", "wekafs", "fuse.sshfs", "fuse.juicefs"}


def tell_with(options: Options) -> Callable[[str], tuple[str, ...]]:
    """Return the function from what listens to what others are told."""
    advertise = check_advertised(options.advertise) if options.advertise is not None else None
    return lambda listened: told_addresses(listened, advertise, interfaces())


async def listen(agent: Agent, addresses: Sequence[str], ports: tuple[int, int] | None) -> None:
    """Let an agent listen at all of them; a TCP address with port 0 at a port of the range."""
    try:
        for address in addresses:
            if ports is not None and _has_any_port(address):
                await _listen_within(agent, address, ports)
            else:
                await agent.listener.listen(address)
    except BaseException:
        await agent.close()
        raise
    await agent.start()


def _has_any_port(address: str) -> bool:
    return address.startswith("tcp:") and split_tcp(address)[1] == 0


async def _listen_within(agent: Agent, address: str, ports: tuple[int, int]) -> None:
    host, _ = split_tcp(address)
    first, last = ports
    # In random order: many workers of one host start at once, and would all try the same ones.
    for port in random.sample(range(first, last + 1), last - first + 1):
        try:
            await agent.listener.listen(join_address(host, port))
            return
        except OSError as error:
            if error.errno != errno.EADDRINUSE:
                raise
    raise RpcError(
        f"no port of {first} to {last} is free at {host} on {host_name()}: widen Options(ports=...)"
    )


# ── choosing ────────────────────────────────────────────────────────────────────────────────────


def crosses_hosts(rendezvous: Rendezvous, options: Options, told: Sequence[str] = ()) -> bool:
    """Whether workers of other hosts may come: then a Unix socket alone is not enough.

    `told` are addresses of the coordinator that are known already.
    """
    if told:
        return any(not is_local(address) for address in told)
    if rendezvous.kind != "file":
        return not rendezvous.local
    asked = options.listen or options.advertise or options.ports or options.tls
    return bool(asked) or options.allow_plaintext or _is_shared(rendezvous.location)


def _is_shared(path: str) -> bool:
    """Whether a path is on a file system that several hosts mount."""
    kind = file_system(path)
    return kind.startswith(_SHARED) or kind in _SHARED_EXACTLY


def file_system(path: str) -> str:
    """Return the kind of the file system of a path, such as "ext4"; "" if it cannot be told."""
    folder = os.path.realpath(os.path.dirname(os.path.abspath(path)))
    best, kind = -1, ""
    try:
        with open("/proc/self/mounts") as mounts:
            for line in mounts:
                _, point, name, *_ = line.split(" ")
                point = point.encode().decode("unicode_escape")  # a blank is written as \040
                inside = folder == point or folder.startswith(point.rstrip("/") + "/")
                if inside and len(point) >= best:
                    best, kind = len(point), name
    except (OSError, ValueError):
        return ""
    return kind


async def listen_host(options: Options, coordinator: str, resolve: Resolve) -> tuple[str, int]:
    """Return host and port for TCP of a worker that is not at the rendezvous.

    `coordinator` is the address that it will dial, "" if it is the coordinator itself.
    """
    if options.listen is not None:
        return _given(parse_listen(options.listen))
    if not coordinator:
        return "0.0.0.0", 0
    host, port = split_tcp(coordinator)
    if is_loopback(host):
        return "127.0.0.1", 0
    for address in await resolve(host):
        own = route_to(address, port)
        if own is not None and is_routable(own):
            return own, 0
    # The name of the coordinator means loopback here: it is on this host, and others are not. Or
    # the host file is wrong, and then dialling says so.
    return _default_host(host)


def _default_host(name: str) -> tuple[str, int]:
    found = routable(interfaces())
    if not found:
        raise RpcError(
            f"{host_name()} has no address that another host could dial (only loopback), but "
            f"{name} is meant for several hosts: connect it to a network, or give "
            "Options(listen=..., advertise=...)"
        )
    return str(found[0].address), 0


def _given(spec: ListenSpec) -> tuple[str, int]:
    found = interfaces()
    fit = spec.candidates(found)
    if not fit:
        wanted = f"interface {spec.interface}" if spec.interface else f"address in {spec.network}"
        own = ", ".join(f"{each.address} ({each.name})" for each in found)
        raise RpcError(f"{host_name()} has no {wanted}; it has {own}: mend Options(listen=...)")
    # IPv4 first, as everywhere else; an interface may have both.
    fit.sort(key=lambda address: ":" in address)
    return fit[0], spec.port


async def rendezvous_host(options: Options, location: str, resolve: Resolve) -> tuple[str, int]:
    """Return host and port at which rank 0 listens for a rendezvous "host:port"."""
    name, port = split_tcp(f"tcp:{location}")
    if options.listen is not None:
        host, own = _given(parse_listen(options.listen))
        return host, own or port
    if is_loopback(name):
        return name, port  # on purpose: for this host alone
    own_addresses = {str(each.address) for each in interfaces()}
    try:
        address = ipaddress.ip_address(name)
    except ValueError:
        pass
    else:
        if not address.is_unspecified and str(address) not in own_addresses:
            listed = ", ".join(sorted(each for each in own_addresses if is_routable(each)))
            raise RpcError(
                f"rank 0 cannot listen at {location}: {name} is not an address of "
                f"{host_name()}, which has {listed or 'only loopback'}; start rank 0 on that host, "
                "or give Options(listen=..., advertise=...)"
            )
        return name, port
    # Others will dial that name, so this host must be meant. Its own resolver may not know yet
    # (a service of Kubernetes), or map it to loopback (/etc/hosts of Debian), or to an address
    # that is translated on the way.
    for found in await resolve(name):
        if found in own_addresses and is_routable(found):
            return found, port
    return "0.0.0.0", port


async def resolve_once(name: str) -> list[str]:
    """Ask DNS once; gives no address if the name is not known."""
    loop = asyncio.get_running_loop()
    answer: asyncio.Future[list[str]] = loop.create_future()

    def ask() -> None:
        found: list[str] = []
        with contextlib.suppress(OSError):
            entries = socket.getaddrinfo(name, None, type=socket.SOCK_STREAM)
            found = [str(address[0]).partition("%")[0] for *_, address in entries]
        with contextlib.suppress(RuntimeError):  # the loop was closed meanwhile
            loop.call_soon_threadsafe(set_answer, list(dict.fromkeys(found)))

    def set_answer(found: list[str]) -> None:
        if not answer.done():
            answer.set_result(found)

    # A daemon, not the executor of the loop: a resolver that gets no answer blocks for many
    # seconds, and a process that is told to end must not wait for it.
    threading.Thread(target=ask, name=f"dns-{name}", daemon=True).start()
    return await answer
