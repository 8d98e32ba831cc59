"""The addresses of this host: where a worker may listen, and what others are told.

What listens is not what is told. A listener at `0.0.0.0` has no address that another host could
dial, and one at loopback can be dialled from this host only:

    Options.listen        listens at           told to other workers
    "10.0.0.7:0"          that address         that address, with the real port
    "10.0.0.0/8"          the own one in it    the same
    "eth1", "eth1:5000"   the one of eth1      the same
    "0.0.0.0:0"           all of this host     the address of the default route, then the others
    anything              …                    `Options.advertise`, if given

`locality()` tells whether two workers share loopback and the paths of Unix sockets: the boot id of
the kernel and the network namespace are the same. Neither host names nor paths would do: cloned
machines and containers have equal ones.
"""

from __future__ import annotations

import array
import contextlib
import functools
import hashlib
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final

__all__ = [
    "Interface",
    "ListenSpec",
    "check_advertised",
    "host_name",
    "interfaces",
    "locality",
    "parse_listen",
    "route_to",
    "told_addresses",
]

IPAddress = ipaddress.IPv4Address | ipaddress.IPv6Address

# Interfaces that lead to containers and virtual machines of this host. Every host has the same
# addresses there, so another host would dial itself.
_VIRTUAL: Final = re.compile(r"(docker|br-|virbr|veth|cni|flannel|cali|lxc|lxdbr|podman|vmnet)")
_INTERFACE: Final = re.compile(r"[A-Za-z][A-Za-z0-9_.@-]{0,14}")
# An address that no host has (RFC 5737): asking for the route to it tells which one is the default.
_ELSEWHERE: Final = "203.0.113.1"
_TOLD: Final = 4  # addresses that a listener at 0.0.0.0 tells


# ── Options.listen ──────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class ListenSpec:
    """A parsed `Options.listen`: exactly one of host, interface and network is given."""

    host: str = ""  # a name or an address without brackets; "0.0.0.0" and "::" are all addresses
    interface: str = ""
    network: str = ""  # such as "10.0.0.0/8"
    port: int = 0  # 0: any

    def candidates(self, found: Sequence[Interface]) -> list[str]:
        """Return the addresses of this host that fit, of the given interfaces."""
        if self.interface:
            return [str(each.address) for each in found if each.name == self.interface]
        if self.network:
            network = ipaddress.ip_network(self.network, strict=False)
            return [str(each.address) for each in found if each.address in network]
        return [self.host]


def parse_listen(text: Any) -> ListenSpec:
    """Parse `Options.listen`; TypeError or ValueError that shows the valid forms."""
    if not isinstance(text, str):
        raise TypeError(f"listen is a string, not {type(text).__name__}")
    with contextlib.suppress(ValueError):
        if "/" in text:
            return ListenSpec(network=str(ipaddress.ip_network(text, strict=False)))
    host, colon, digits = text.rpartition(":")
    if not colon and _INTERFACE.fullmatch(text):
        return ListenSpec(interface=text)
    if colon and digits.isdecimal() and int(digits) <= 65535 and "/" not in text:
        bare, port = host.strip("[]"), int(digits)
        with contextlib.suppress(ValueError):
            return ListenSpec(host=str(ipaddress.ip_address(bare)), port=port)
        # "eth1:5000" and "node1:5000" have one form: what is an interface of this host, is one.
        if any(each.name == bare for each in interfaces()):
            return ListenSpec(interface=bare, port=port)
        if bare and ":" not in bare:
            return ListenSpec(host=bare, port=port)
    raise ValueError(
        f'cannot read listen={text!r}: it is "host:port" (port 0 for any), an interface such as '
        '"eth1", or a network such as "10.0.0.0/8"'
    )


def check_advertised(text: Any) -> tuple[str, int]:
    """Return host and port of `Options.advertise`; ValueError if no other host could dial it."""
    if not isinstance(text, str):
        raise TypeError(f"advertise is a string, not {type(text).__name__}")
    host, _, digits = text.rpartition(":")
    host = host.strip("[]")
    if not host or not digits.isdecimal() or int(digits) > 65535:
        raise ValueError(
            f'cannot read advertise={text!r}: it is "name:port" (port 0 for where it listens)'
        )
    if not is_routable(host):
        raise ValueError(
            f"advertise={text!r} would be told to other hosts, and means themselves there: "
            "give an address or a name by which they reach this host"
        )
    return host, int(digits)


def is_routable(host: str) -> bool:
    """Whether an address can mean this host on another one; a name can."""
    if host == "localhost" or host.endswith(".localhost"):
        return False
    try:
        address = ipaddress.ip_address(host)
    except ValueError:
        return True
    return not (address.is_loopback or address.is_unspecified or address.is_multicast)


def told_addresses(
    listened: str, advertise: tuple[str, int] | None, found: Sequence[Interface]
) -> tuple[str, ...]:
    """Return what others are told of a listener at `listened` ("tcp:host:port" or another kind)."""
    scheme, _, rest = listened.partition(":")
    if scheme != "tcp":
        return (listened,)
    host, _, port = rest.rpartition(":")
    if advertise is not None:
        return (join_address(advertise[0], advertise[1] or int(port)),)
    try:
        address = ipaddress.ip_address(host.strip("[]"))
    except ValueError:
        return (listened,)
    if not address.is_unspecified:
        return (listened,)
    version = address.version
    own = [each.address for each in routable(found) if each.address.version == version]
    return tuple(join_address(str(each), int(port)) for each in own[:_TOLD])


def join_address(host: str, port: int) -> str:
    """Return "tcp:host:port", an IPv6 address in brackets."""
    return f"tcp:[{host}]:{port}" if ":" in host else f"tcp:{host}:{port}"


# ── this host ───────────────────────────────────────────────────────────────────────────────────


@dataclass(frozen=True, slots=True)
class Interface:
    """One address of one interface of this host."""

    name: str
    address: IPAddress


def interfaces() -> list[Interface]:
    """List the addresses of this host, loopback included; what cannot be asked for is missing."""
    found = _ipv4_interfaces() + _ipv6_interfaces()
    if found:
        return found
    # Where the kernel cannot be asked that way (not Linux): the names that this host has.
    with contextlib.suppress(OSError):
        for family, _, _, _, address in socket.getaddrinfo(socket.gethostname(), None):
            if family in (socket.AF_INET, socket.AF_INET6):
                text = str(address[0]).partition("%")[0]
                found.append(Interface("", ipaddress.ip_address(text)))
    if (default := route_to(_ELSEWHERE)) is not None:
        found.append(Interface("", ipaddress.ip_address(default)))
    return list(dict.fromkeys(found))


def routable(found: Sequence[Interface]) -> list[Interface]:
    """Order what other hosts may dial: that of the default route first, then the physical ones."""
    fit = [each for each in found if is_routable(str(each.address)) and not _is_scoped(each)]
    default = route_to(_ELSEWHERE)
    real = [each for each in fit if not _VIRTUAL.match(each.name)] or fit
    return sorted(real, key=lambda each: str(each.address) != default)


def _is_scoped(interface: Interface) -> bool:
    # fe80::… and 169.254.… mean another host on every link.
    return interface.address.is_link_local


def _ipv4_interfaces() -> list[Interface]:
    try:
        import fcntl
    except ImportError:  # Windows
        return []
    size, room = 40 if struct.calcsize("P") == 8 else 32, 256
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as asked:
        while True:
            buffer = array.array("B", bytes(size * room))
            request = struct.pack("iP", len(buffer), buffer.buffer_info()[0])
            try:
                reply = fcntl.ioctl(asked.fileno(), 0x8912, request)  # SIOCGIFCONF
            except OSError:
                return []
            filled = struct.unpack_from("i", reply)[0]
            if filled < len(buffer):  # else there may be more than fit
                break
            room *= 2
    data, found = buffer.tobytes(), []
    for start in range(0, filled, size):
        name = data[start : start + 16].split(b"\0", 1)[0].decode(errors="replace")
        address = ipaddress.IPv4Address(data[start + 20 : start + 24])
        found.append(Interface(name.partition(":")[0], address))  # "eth0:1" is an alias of eth0
    return found


def _ipv6_interfaces() -> list[Interface]:
    try:
        with open("/proc/net/if_inet6") as lines:
            rows = [line.split() for line in lines]
    except OSError:
        return []
    return [Interface(row[5], ipaddress.IPv6Address(bytes.fromhex(row[0]))) for row in rows]


def route_to(address: str, port: int = 9) -> str | None:
    """Return the own address from which the kernel reaches another; None if there is no route.

    `address` is numeric. No packet is sent.
    """
    family = socket.AF_INET6 if ":" in address else socket.AF_INET
    # Connecting a datagram socket makes the kernel choose the interface that routes there.
    with contextlib.suppress(OSError), socket.socket(family, socket.SOCK_DGRAM) as probe:
        probe.connect((address, port))
        return str(probe.getsockname()[0]).partition("%")[0]
    return None


def host_name() -> str:
    """Return the name of this host, for people."""
    return socket.gethostname()


def locality() -> str:
    """Return what two processes share exactly if they share loopback: kernel and namespace."""
    return _locality(_network_namespace())


def _network_namespace() -> str:
    # Of this thread: a program may move its threads into namespaces one by one.
    for path in ("/proc/thread-self/ns/net", "/proc/self/ns/net"):
        with contextlib.suppress(OSError):
            found = os.stat(path)
            return f"{found.st_dev}:{found.st_ino}"
    return ""


@functools.cache
def _locality(namespace: str) -> str:
    try:
        with open("/proc/sys/kernel/random/boot_id") as file:
            boot = file.read().strip()
    except OSError:  # not Linux: there are no namespaces either
        boot = f"{socket.gethostname()}:{_uuid_of_hardware()}"
    # A digest: members of other parties need not know the boot id.
    text = f"aiograd locality {boot} {namespace}"
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def _uuid_of_hardware() -> int:
    import uuid

    return uuid.getnode()
