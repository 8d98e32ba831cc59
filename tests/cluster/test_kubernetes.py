"""Pods of an indexed Job, as far as their processes can tell: names, hosts, a service that is late.

Each pod is a network namespace with a host name and `/etc/hosts` of its own, as kubelet writes it:
the full name of the pod, with the service as its domain, first.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import re
import secrets
import shutil
import signal
import sys
import textwrap
from collections.abc import AsyncIterator
from pathlib import Path

import pytest

from tests.support.hosts import ROOT, Host, network, possible

pytestmark = [
    pytest.mark.skipif(
        not possible() or shutil.which("unshare") is None,
        reason="making network namespaces takes root, `ip` and `unshare`",
    ),
    pytest.mark.deadline(90),
    pytest.mark.asyncio(loop_factories=["asyncio"]),
]

DOMAIN = "workers.ns.svc.cluster.local"
# The program of the page, as written.
(TRAIN,) = re.findall(r"```python\n(.*?)```", (ROOT / "docs/kubernetes.md").read_text(), re.DOTALL)


class Pod:
    """One process on a host of its own, under a name of its own."""

    def __init__(self, process: asyncio.subprocess.Process) -> None:
        self.process = process

    async def outcome(self) -> tuple[int | None, str, str]:
        output, errors = await self.process.communicate()
        return self.process.returncode, output.decode(), errors.decode()


@contextlib.asynccontextmanager
async def pod(host: Host, index: int, program: str, **environment: str) -> AsyncIterator[Pod]:
    """Start a program in the pod of this index; the end of the block kills it."""
    own = f"train-{index}"
    # As long as the service does not exist, a pod knows itself alone.
    host.know(f"127.0.0.1 localhost\n{host.address} {own}.{DOMAIN} {own}\n")
    words = ["sh", "-c", f'hostname {own}; exec "$@"', "-", sys.executable, "-c"]
    process = await asyncio.create_subprocess_exec(
        *host.exec("unshare", "--uts", *words, textwrap.dedent(program)),
        cwd="/",
        env={
            "PATH": os.environ["PATH"],
            "PYTHONPATH": str(ROOT),
            "HOME": "/",
            "HOSTNAME": own,
            "JOB_COMPLETION_INDEX": str(index),
            **environment,
        },
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.PIPE,
        start_new_session=True,
    )
    try:
        yield Pod(process)
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        await process.wait()


def begin_service(host: Host, others: list[Host]) -> None:
    """Let the names of the other pods be known on a host, as the service does when it exists."""
    lines = [f"{each.address} train-{i}.{DOMAIN}\n" for i, each in enumerate(others)]
    host.know((host.etc / "hosts").read_text() + "".join(lines))


@pytest.fixture
def secret(tmp_path: Path) -> str:
    """Mount a secret as kubelet does: a link to a link to a folder, mode 0440."""
    (tmp_path / "..2026_11_18").mkdir(mode=0o755)
    (tmp_path / "..data").symlink_to("..2026_11_18")
    (tmp_path / "secret").symlink_to("..data/secret")
    (tmp_path / "..2026_11_18" / "secret").write_text(secrets.token_hex(32))
    (tmp_path / "..2026_11_18" / "secret").chmod(0o400)
    return str(tmp_path / "secret")


async def test_pods_find_rank_0_by_their_own_name_when_the_service_is_there(secret):
    settings = {"AIOGRAD_WORLD_SIZE": "2", "AIOGRAD_SECRET_FILE": secret}
    async with (
        network(2) as hosts,
        pod(hosts[0], 0, TRAIN, **settings) as first,
        pod(hosts[1], 1, TRAIN, **settings) as second,
    ):
        # DNS is late: the pod says for whom it waits, 5 s after it began to.
        assert second.process.stderr is not None
        line = await second.process.stderr.readline()
        assert f"waits for DNS to know train-0.{DOMAIN}".encode() in line
        begin_service(hosts[1], hosts)
        outcomes = [await each.outcome() for each in (first, second)]
    for i, (code, output, errors) in enumerate(outcomes):
        assert (code, output) == (0, f"worker{i} {{'worker0': 0, 'worker1': 1}}\n"), errors


async def test_a_world_size_that_is_missing_ends_the_pod_at_once(secret):
    async with network(1) as hosts, pod(hosts[0], 0, TRAIN, AIOGRAD_SECRET_FILE=secret) as only:
        code, output, errors = await only.outcome()
    assert (code, output) == (1, "")
    assert "set AIOGRAD_WORLD_SIZE to its spec.completions" in errors


async def test_a_pod_that_is_told_to_end_while_it_waits_for_the_service_obeys(secret):
    settings = {"AIOGRAD_WORLD_SIZE": "2", "AIOGRAD_SECRET_FILE": secret}
    worker = """
        import sys
        from aiograd.__main__ import main
        sys.exit(main(["worker", "--join", "train-0.workers:29500", "--name", "late"]))
    """
    async with network(1) as hosts, pod(hosts[0], 1, worker, **settings) as late:
        assert late.process.stderr is not None
        line = await late.process.stderr.readline()
        assert line == b"late waits for rank 0 at train-0.workers:29500\n"
        late.process.send_signal(signal.SIGTERM)
        code, _, errors = await late.outcome()
    assert (code, errors) == (128 + signal.SIGTERM, "")
