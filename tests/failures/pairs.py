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
    """From now on, dial a member at another address."""
    directory = current_agent().directory
    directory.add(replace(directory.find(name), addresses=(address,)))


async def hold(name: str, value: int) -> int:
    """Make a value on the other one, keep the reference, and use it."""
    HELD[name] = ag.remote(name, echo, (value,))
    return int(await HELD[name])


async def use_held(name: str) -> str:
    """What comes of using the reference: the value, or the error."""
    try:
        return str(await HELD[name])
    except ag.errors.AiogradError as error:
        return type(error).__name__


async def call_and_wait(name: str) -> tuple[str, str, str]:
    """Call a function that does not end; how the call ends."""
    try:
        await ag.rpc_async(name, linger, timeout=60)
    except ag.errors.WorkerLost as error:
        return type(error).__name__, error.worker, error.executed
    return "", "", ""


async def try_call(name: str) -> str:
    """What comes of a call: "yes", or whether it ran."""
    try:
        await ag.rpc_async(name, echo, (1,), timeout=20)
    except ag.errors.WorkerLost as error:
        return error.executed
    return "yes"


async def who_is_there() -> list[tuple[str, bool]]:
    return [(worker.name, worker.suspect) for worker in ag.workers()]
