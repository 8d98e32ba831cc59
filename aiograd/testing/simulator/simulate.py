"""`simulate`: run a program of your own under the simulator.

    async def program(world):
        rref = ag.remote("worker1", load)
        world.crash("worker1")
        with pytest.raises(ag.errors.OwnerLost):
            await rref

    def test_a_lost_owner_is_noticed():
        ag.testing.simulate(program, seed=7, workers=2)

The program runs on a driver beside `workers` simulated workers, in simulated time: an hour passes
in seconds. Calls, streams, references and gradients are the library's own code. Not simulated: what
the cluster layer adds (barriers, scaling), real sockets, and threads that the program starts.
"""

from __future__ import annotations

import asyncio
import gc
import inspect
import random
from collections.abc import Awaitable, Callable, Sequence
from typing import Final, TypeVar

from aiograd.rpc.options import Options
from aiograd.testing.simulator.loop import SimulationError
from aiograd.testing.simulator.plan import PROFILES
from aiograd.testing.simulator.run import dispose, isolated
from aiograd.testing.simulator.schedule import Fault, Player
from aiograd.testing.simulator.world import World

T = TypeVar("T")
DRIVER: Final = "driver"
# Not drawn for the driver: its program could not go on. A list of faults may contain them.
_FATAL: Final = frozenset({"crash", "vanish", "restart", "replace", "pause", "slow"})


class SimulationFailed(AssertionError):
    """The program left an error behind that no code retrieved, or the library logged one."""


def simulate(
    program: Callable[..., Awaitable[T]],
    *,
    seed: int = 0,
    workers: int = 2,
    faults: str | Sequence[Fault] | None = None,
    options: Options | None = None,
    limit: float = 3600.0,
) -> T:
    """Run `program` on simulated workers `worker0 …` and return its result.

    `program` may take one argument: the world, with `crash(name)`, `restart(name)`,
    `pause(name, seconds)` and `slow(name, cost, seconds)`. `faults` is the name of a profile, whose
    faults are drawn from the seed ("lazy", "wire", "cuts", "deaths", "timely", "swizzle", "mail",
    "everything"), or a list of `Fault` objects. The same seed gives the same run.

        >>> def run():
        ...     async def program(world):
        ...         rref = ag.remote("worker1", list, args=("ab",))
        ...         await rref
        ...         world.crash("worker1")
        ...         try:
        ...             await rref
        ...         except ag.errors.OwnerLost:
        ...             return "noticed"
        ...     return ag.testing.simulate(program, seed=7)
        >>> await asyncio.to_thread(run)  # it runs a loop of its own
        'noticed'

    Errors of the program are raised with the seed and the last events as notes. Raise
    `SimulationError` if the program has not ended after `limit` simulated seconds, and
    `SimulationFailed` if it leaves an error behind that no code retrieved.
    """
    names = [f"worker{i}" for i in range(workers)]
    planned = _faults(faults, names, seed)
    with isolated() as errors:
        world = World(seed, options=options)
        player = Player(world, planned)
        # Set in any case, unlike in `run`: the trace then shows every message by its kind.
        world.on_send = lambda node, kind, to: player.message(node.name, kind)
        main = world.loop.create_task(
            _main(world, player, names, program, limit), context=world.context
        )
        try:
            result: T = world.loop.run_until_complete(main)
            return result
        except BaseException as error:
            error.add_note(f"simulated with seed {seed}; the last events were:")
            error.add_note("\n".join(world.trace.lines()))
            raise
        finally:
            # A failed task that the program dropped says so when it is freed. From Python 3.13 it
            # is part of a cycle with its traceback, and the collector is off during a run.
            gc.collect()
            # Read before everything is freed: what is freed may log errors, too.
            troubles = [*world.loop.troubles, *errors.messages]
            dispose(world)
            if troubles:
                raise SimulationFailed(f"seed {seed}: {troubles[0]}")


async def _main(
    world: World,
    player: Player,
    names: list[str],
    program: Callable[..., Awaitable[T]],
    limit: float,
) -> T:
    await world.start([*names, DRIVER])
    faults = world.loop.create_task(player.play(), context=world.context)
    takes_world = bool(inspect.signature(program).parameters)
    task = world.nodes[DRIVER].spawn(_call(program, world if takes_world else None))
    done, _ = await asyncio.wait([task], timeout=limit)
    faults.cancel()
    if not done:
        raise SimulationError(f"the program has not ended after {limit:g} simulated seconds")
    result: T = task.result()
    await world.stop()
    return result


async def _call(program: Callable[..., Awaitable[T]], world: World | None) -> T:
    return await (program() if world is None else program(world))


def _faults(faults: str | Sequence[Fault] | None, names: list[str], seed: int) -> list[Fault]:
    if faults is None:
        return []
    if not isinstance(faults, str):
        return list(faults)
    if faults not in PROFILES:
        raise ValueError(f"faults is one of {', '.join(PROFILES)}, not {faults!r}")
    drawn = PROFILES[faults](random.Random(f"{seed} faults"), [*names, DRIVER])
    return [fault for fault in drawn if fault.a != DRIVER or fault.kind not in _FATAL]
