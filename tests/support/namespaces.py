"""Two network namespaces joined by a virtual cable: two hosts, as far as the kernel is concerned.

Creating them takes root and the `ip` command; tests that need them are skipped without.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


@dataclass(frozen=True)
class Hosts:
    """Two namespaces, with the addresses 10.77.0.1 and 10.77.0.2."""

    names: tuple[str, str]
    cable: str

    def plug(self, state: str) -> None:
        """Set the link "down" or "up"; while it is down, packets are dropped silently."""
        assert ip("-n", self.names[0], "link", "set", self.cable, state)


@contextlib.contextmanager
def two_hosts() -> Iterator[Hosts | None]:
    """Create two namespaces and remove them at the end; yield None where that is not allowed."""
    mark = f"ag{os.getpid() % 10000}"
    names = (f"{mark}a", f"{mark}b")
    try:
        made = all(ip("netns", "add", name) for name in names)
        made = made and ip("link", "add", f"{mark}0", "type", "veth", "peer", "name", f"{mark}1")
        for i, name in enumerate(names):
            made = made and ip("link", "set", f"{mark}{i}", "netns", name)
            address = f"10.77.0.{i + 1}/24"
            made = made and ip("-n", name, "addr", "add", address, "dev", f"{mark}{i}")
            made = made and ip("-n", name, "link", "set", f"{mark}{i}", "up")
            made = made and ip("-n", name, "link", "set", "lo", "up")
        yield Hosts(names, f"{mark}0") if made else None
    finally:
        for name in names:
            ip("netns", "del", name)
        ip("link", "del", f"{mark}0")


def possible() -> bool:
    """Return whether this process may create network namespaces."""
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    with two_hosts() as hosts:
        return hosts is not None
