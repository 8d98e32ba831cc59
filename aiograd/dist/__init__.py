"""Gradients across workers: where the tape meets the calls.

    api         the public verbs: `backward` by context or id, `grad`
    context     one worker's part of one distributed computation, and its gradients
    registry    all contexts of a worker: opening, finding, releasing, losing peers
    nodes       the two ends of an edge: where a tensor left a worker, and where it arrived
    travellers  how tensors and contexts travel with calls
    boundary    hooks on arrays that leave a worker: clip, blur, watch, shrink
    access      what a restricted peer may say about contexts
    inspect     who waits for whom, in words
    graph       the distributed graph as a picture
    channel     everything this package asks of an agent
    foreign     tensors of other libraries, whose graphs are theirs
    lost_peers  the incarnations a worker has lost
    released    ids of released contexts of partners
    backward/   how a pass runs; see its own map

Imports go downwards: `nodes`, `boundary`, `lost_peers`, `channel` and the pure modules of `backward`
know nothing of contexts; `context` knows those; the engine, `registry`, `access` and `travellers` know
`context` and each other only by protocols. `attach` is the one place that joins them.
"""

from __future__ import annotations

from typing import Any

from aiograd.autograd.coo import Coo
from aiograd.autograd.tensor import Tensor
from aiograd.dist import foreign
from aiograd.dist.access import CooTraveller
from aiograd.dist.backward.engine import Engine
from aiograd.dist.inspect import waits
from aiograd.dist.registry import ContextRegistry
from aiograd.dist.travellers import ContextBaggage, TensorTraveller
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.registry import RRefs

__all__ = ["attach"]


def attach(agent: Agent) -> ContextRegistry:
    """Plug distributed autograd into an agent, after the references."""
    registry = ContextRegistry(agent)
    channel, access = registry.channel, registry.access
    engine = registry.engine = Engine(channel, registry, registry.lost_peers)
    access.passes = engine.passes
    agent.parts[ContextRegistry] = registry

    tensors = TensorTraveller()
    agent.travellers.add(Tensor, tensors)
    agent.use_boxes((Tensor, tensors, None, None))
    foreign.attach(agent.travellers)
    agent.plain_travellers.add(Coo, CooTraveller())
    agent.baggage = ContextBaggage(registry, engine.reports, access)

    def waits_asked(sender: PeerInfo, context_id: int) -> tuple[list[str], list[str]]:
        """Answer what this worker's passes of a context wait for."""
        # With which workers others work does not concern a restricted peer.
        only = sender.name if channel.restricts(sender) else None
        return waits(engine.passes, channel, context_id, only)

    def graph_asked(sender: PeerInfo, context_id: int) -> dict[str, Any]:
        """Answer with this worker's part of a picture."""
        from aiograd.dist.graph import describe, nothing  # loads `viz`, which few programs need

        context = registry.find(context_id)
        if channel.restricts(sender):
            # Operations, shapes and names of parameters are the model, which a partner must not
            # learn. It draws the ends of its own edges itself.
            return nothing(channel.name)
        return nothing(channel.name) if context is None else describe(context)

    agent.services |= {
        "gradients": access.guard_gradients(engine.arrived),
        "gradients.failed": access.guard_failed(engine.abort.failure_reported),
        "gradients.abort": access.guard_abort(engine.abort.abort_received),
        "gradients.outcomes": access.guard_outcomes(engine.reports.received),
        "gradients.waits": access.guard(waits_asked),
        "context.release": access.guard_release(registry.release_received),
        "context.lost": registry.loss_received,
        "context.known": access.guard_known(registry.known),
        "context.graph": access.guard(graph_asked),
    }
    agent.post_refused["gradients"] = engine.abort.refused
    agent.post_refused["gradients.outcomes"] = engine.reports.refused
    if RRefs in agent.parts:
        agent.parts[RRefs].backward_hook = engine.from_value
        agent.parts[RRefs].value_services.context_guard = access.takes_part
    agent.lost.append(registry.peer_lost)
    agent.returned.append(registry.peer_returned)
    agent.watched.append(registry.watched)
    return registry
