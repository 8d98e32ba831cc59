"""F3, F5: packets are dropped silently, for a moment or for good, while calls are under way.

Both loops at once, because the waiting is real: two workers on each of two hosts, one cable.
"""

from __future__ import annotations

import asyncio
import os
import secrets
import sys
from asyncio.subprocess import PIPE, Process
from pathlib import Path

import pytest

from tests.failures.work import now
from tests.support.namespaces import Hosts, possible, two_hosts

ROOT = Path(__file__).parents[2]
MEMBER = Path(__file__).with_name("partition_member.py")
LOOPS = ("asyncio", "uvloop")
SHORT = 1.5  # seconds


async def start(hosts: Hosts, rank: int, loop: str, secret: Path) -> Process:
    place = f"10.77.0.1:{29800 + LOOPS.index(loop)}"
    command = ["ip", "netns", "exec", hosts.names[rank], sys.executable, str(MEMBER)]
    return await asyncio.create_subprocess_exec(
        *(*command, str(rank), place, str(secret), loop),
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT)},
        stdin=PIPE,
        stdout=PIPE,
    )


async def heard(member: Process) -> list[str]:
    assert member.stdout is not None
    return (await member.stdout.readline()).decode().split()


if possible():

    @pytest.mark.deadline(90)
    @pytest.mark.asyncio(loop_factories=["asyncio"])
    async def test_f3_f5_a_short_cut_is_not_noticed_and_a_long_one_is_told_on_both_sides(
        figure, tmp_path
    ):
        secret = tmp_path / "secret"
        secret.touch(mode=0o600)
        secret.write_text(secrets.token_hex(32))
        with two_hosts() as hosts:
            assert hosts is not None
            members = {
                (loop, rank): await start(hosts, rank, loop, secret)
                for loop in LOOPS
                for rank in (0, 1)
            }
            try:
                for member in members.values():
                    assert await heard(member) == ["ready"]
                hosts.plug("down")
                await asyncio.sleep(SHORT)
                hosts.plug("up")
                restored = now()
                for (loop, _), member in members.items():
                    assert member.stdin is not None
                    member.stdin.write(b"check\n")
                    words = await heard(member)
                    assert words[0] == "went"
                    assert words[2:] == ["failed", "0"]
                    what = f"a cut of {SHORT:g} s: unnoticed, calls go on"
                    figure("F3", what, 2.0, now() - restored, loop=loop)
                hosts.plug("down")
                cut = now()
                for (loop, rank), member in members.items():
                    said, when, kind, worker, executed = await heard(member)
                    assert (said, kind, executed) == ("lost", "WorkerLost", "unknown")
                    assert worker == f"worker{1 - rank}"
                    what = "the network stays away: `WorkerLost` on both sides"
                    figure("F3", what, 6.0, float(when) - cut, loop=loop)
                    await member.wait()
            finally:
                for member in members.values():
                    if member.returncode is None:
                        member.kill()
                        await member.wait()
