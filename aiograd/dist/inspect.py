"""Why a backward pass has not ended: what each worker that takes part in it waits for, in words.

Nobody knows all of a pass, so who explains it asks the workers it has to do with, then those that
they name, and so on. One that does not answer is part of the explanation.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from aiograd.rpc.directory import PeerInfo

if TYPE_CHECKING:
    from aiograd.dist.context import Context
    from aiograd.dist.backward.engine import Engine

_PATIENCE = 2.0  # seconds for each worker that is asked


async def explain(engine: Engine, context: Context) -> str:
    """What all passes of a context wait for, everywhere."""
    me = engine.agent.info
    told, waiting = {me.name}, set()
    lines, peers = waits(engine, me, context.id)
    waiting.update(peers)
    while waiting := waiting - told:
        name = waiting.pop()
        told.add(name)
        try:
            more, peers = await engine.shell.ask(
                name, "gradients.waits", context.id, timeout=_PATIENCE
            )
        except Exception as error:
            more, peers = [f"{name} does not answer: {error}"], []
        lines += more
        waiting.update(peers)
    return "\n".join(lines) or "no backward pass is under way"


def waits(engine: Engine, sender: PeerInfo, context_id: int) -> tuple[list[str], list[str]]:
    """What our part of a context waits for, and whom to ask besides."""
    plays = [running.play for (id, _), running in engine.passes.items() if id == context_id]
    lines = [
        f"pass {play.number & 0xFFFFF}: {play.waits_for()}"
        for play in plays
        if not play.complete or play.originator.incarnation == engine.agent.incarnation
    ]
    names = {name for play in plays for name in (play.informed | play.heard).values()}
    return lines, sorted(names)
