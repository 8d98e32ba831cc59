"""Why a backward pass has not ended: what each participant waits for, in words.

No worker knows all of a pass. `explain` asks the workers it exchanged messages with, then those that
they name, and so on. A worker that does not answer is part of the explanation.
"""

from __future__ import annotations

from aiograd.dist.backward.active import PassTable
from aiograd.dist.channel import Channel

_ASK_WAIT = 2.0  # seconds for each worker that is asked; it may be the one that hangs


async def explain(passes: PassTable, channel: Channel, context_id: int) -> str:
    """Describe what all passes of a context wait for, on all workers."""
    asked, waiting = {channel.name}, set()
    lines, peers = waits(passes, channel, context_id)
    waiting.update(peers)
    while waiting := waiting - asked:
        name = waiting.pop()
        asked.add(name)
        try:
            more, peers = await channel.ask(name, "gradients.waits", context_id, timeout=_ASK_WAIT)
        except Exception as error:  # of any kind: an explanation must not fail for what it explains
            more, peers = [f"{name} does not answer: {error}"], []
        lines += more
        waiting.update(peers)
    return "\n".join(lines) or "no backward pass is under way"


def waits(
    passes: PassTable, channel: Channel, context_id: int, only: str | None = None
) -> tuple[list[str], list[str]]:
    """Describe what this worker's passes of a context wait for; return also the peers to ask.

    `only`: the one peer that may be named.
    """
    states = [active.state for active in passes.of(context_id)]
    if only is not None:
        owed = sum(send.peer == only for state in states for send in state.awaited.values())
        others = any(send.peer != only for state in states for send in state.awaited.values())
        lines = [f"{channel.name} waits for {owed} edges of {only}"] if owed else []
        return lines + [f"{channel.name} waits for others"] * others, []
    lines = [
        f"pass {state.number & 0xFFFFF}: {state.waits_for()}"
        for state in states
        # A complete part waits for nothing, but an originator waits for the end of all others.
        if not state.complete or state.originator.incarnation == channel.incarnation
    ]
    names = {name for state in states for name in (state.informed | state.heard).values()}
    return lines, sorted(names)
