"""What two members do to each other while the network between them is away, and after that.

Functions for their processes. The network between two members is a proxy in the test's process.
"""

from __future__ import annotations

from dataclasses import replace

import aiograd as ag
from aiograd.rpc.agent import current_agent
from tests.failures.work import echo, linger

HELD: dict[str, ag.RRef] = {}  # references to values of the other one


async def reach_through(name: str, address: str) -> None:
    """Connect to a member at another address from now on."""
    directory = current_agent().directory
    directory.add(replace(directory.find(name), addresses=(address,)))


async def hold(name: str, value: int) -> int:
    """Create a value on the peer, keep the reference, and fetch it."""
    HELD[name] = ag.remote(name, echo, (value,))
    return int(await HELD[name])


async def use_held(name: str) -> str:
    """Return the value of the kept reference, or the name of the error."""
    try:
        return str(await HELD[name])
    except ag.errors.AiogradError as error:
        return type(error).__name__


async def call_and_wait(name: str) -> tuple[str, str, str]:
    """Call a function that does not end; return how the call ended."""
    try:
        await ag.rpc_async(name, linger, timeout=60)
    except ag.errors.WorkerLost as error:
        return type(error).__name__, error.worker, error.executed
    return "", "", ""


async def try_call(name: str) -> str:
    """Return "yes" if a call succeeds, else whether it ran."""
    try:
        await ag.rpc_async(name, echo, (1,), timeout=20)
    except ag.errors.WorkerLost as error:
        return error.executed
    return "yes"


async def who_is_there() -> list[tuple[str, bool]]:
    return [(worker.name, worker.suspect) for worker in ag.workers()]
