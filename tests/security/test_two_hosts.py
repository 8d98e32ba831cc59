"""Workers on two hosts, as far as the kernel is concerned, meet over TLS."""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from pathlib import Path

import pytest
import trustme

from tests.support.namespaces import possible, two_hosts

ROOT = Path(__file__).parents[2]
MEMBER = Path(__file__).with_name("netns_member.py")


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
    @pytest.mark.parametrize("by", ["certificates", "secret"])
    async def test_partners_on_two_hosts_train_over_tls(folder: Path, by: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT)}
        with two_hosts() as hosts:
            assert hosts is not None
            members = [
                await asyncio.create_subprocess_exec(
                    *("ip", "netns", "exec", name, sys.executable, str(MEMBER)),
                    *(str(rank), "10.77.0.1:29777", str(folder), by),
                    cwd=ROOT,
                    env=environment,
                    stdout=asyncio.subprocess.PIPE,
                    stderr=asyncio.subprocess.PIPE,
                )
                for rank, name in enumerate(hosts.names)
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
        assert b"TLSv1.3" in said[0][0]
        assert b"gradient: 600.0" in said[0][0]
