"""Two hosts, as far as the kernel is concerned: workers in two network namespaces meet over TLS.

Making namespaces takes root and the `ip` command; elsewhere there is nothing to collect here.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import secrets
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

ROOT = Path(__file__).parents[2]
MEMBER = Path(__file__).with_name("netns_member.py")


def ip(*words: str) -> bool:
    return subprocess.run(["ip", *words], capture_output=True).returncode == 0


@contextlib.contextmanager
def two_hosts() -> Iterator[tuple[str, str] | None]:
    """Two namespaces joined by a cable, 10.77.0.1 and 10.77.0.2; None where that cannot be."""
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
        yield names if made else None
    finally:
        for name in names:
            ip("netns", "del", name)
        ip("link", "del", f"{mark}0")


def possible() -> bool:
    if os.geteuid() != 0 or shutil.which("ip") is None:
        return False
    with two_hosts() as names:
        return names is not None


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    authority = trustme.CA()
    authority.cert_pem.write_to_path(tmp_path / "ca.pem")
    for name in ("worker0", "worker1"):
        leaf = authority.issue_cert(name)
        leaf.private_key_pem.write_to_path(tmp_path / f"{name}.key")
        for i, blob in enumerate(leaf.cert_chain_pems):
            blob.write_to_path(tmp_path / f"{name}.pem", append=i > 0)
    (tmp_path / "secret").touch(mode=0o600)
    (tmp_path / "secret").write_text(secrets.token_hex(32))
    return tmp_path


if possible():

    @pytest.mark.deadline(60)
    async def test_partners_on_two_hosts_train_over_tls(folder: Path) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with two_hosts() as names:
            assert names is not None
            members = [
                await asyncio.create_subprocess_exec(
                    *("ip", "netns", "exec", name, sys.executable, str(MEMBER)),
                    *(str(rank), "10.77.0.1:29777", str(folder)),
                    cwd=ROOT,
                    env=environment,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                for rank, name in enumerate(names)
            ]
            try:
                said = await asyncio.gather(*[member.communicate() for member in members])
            finally:
                for member in members:
                    if member.returncode is None:
                        member.kill()
                        await member.wait()
        for (out, err), member in zip(said, members, strict=True):
            assert member.returncode == 0, (out + err).decode()
        assert b"plaintext: refused" in said[0][0]
        assert b"gradient: 600.0" in said[0][0]
