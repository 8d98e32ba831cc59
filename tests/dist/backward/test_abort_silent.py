"""The abort of a pass with a silent participant makes no connections to members beside it."""

from __future__ import annotations

import asyncio

import pytest

import aiograd as ag
from aiograd.autograd.op import OPS
from aiograd.dist import attach as attach_autograd
from aiograd.errors import BackwardFailed
from aiograd.rref import attach as attach_references
from tests.support.agents import running_agents


async def failed_pass(a, silent) -> None:
    """Run a pass over `silent`, which stops to send when its forward part is done."""
    async with ag.context() as context:
        x = ag.ones(3, requires_grad=True)
        y = await ag.rpc_async(silent.name, ag.mul, args=(x, 2.0))
        link = silent.link(a.name)
        link.outbox.pause()
        try:
            with pytest.raises(BackwardFailed):
                await context.backward((y * 2.0).sum(), timeout=0.2)
        finally:
            link.outbox.resume()


def note_aborts(member, names) -> None:
    """Add the name of a worker whenever an abort reaches it."""
    service = member.services["gradients.abort"]

    def abort(sender, *args):
        names.append(member.name)
        return service(sender, *args)

    member.services["gradients.abort"] = abort


async def test_a_silent_participant_is_no_reason_to_connect_to_all_members():
    async with running_agents(4, ops=OPS) as members:
        parts = [
            attach(each) for each in members for attach in (attach_references, attach_autograd)
        ]
        a, silent, known, stranger = members
        assert await ag.rpc_async(known.name, abs, (-1,)) == 1
        aborted = []
        for member in (known, stranger):
            note_aborts(member, aborted)
        await failed_pass(a, silent)
        await asyncio.sleep(0)
        assert aborted == [known.name]  # connected, so it costs one message
        assert stranger.incarnation not in a.links.table
        for part in reversed(parts):
            await part.close()
