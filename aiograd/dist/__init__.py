"""Gradients across workers: where the tape meets the calls."""

from __future__ import annotations

import functools
from typing import Any

from aiograd.autograd.coo import Coo
from aiograd.autograd.tensor import Tensor
from aiograd.dist.registry import Contexts
from aiograd.dist.backward.engine import Engine
from aiograd.dist.inspect import waits
from aiograd.dist.access import CooTraveller
from aiograd.dist.travellers import ContextBaggage, TensorBox, TensorTraveller
from aiograd.rpc.agent import Agent
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.registry import RRefs

__all__ = ["attach"]


def attach(agent: Agent) -> Contexts:
    """Plug distributed autograd into an agent, after the references."""
    contexts = Contexts(agent)
    engine = contexts.engine = Engine(contexts)
    agent.parts[Contexts] = contexts
    agent.travellers.add(Tensor, TensorTraveller())
    agent.travellers.boxes = (Tensor, TensorBox())
    agent.baggage = ContextBaggage(contexts)
    partners = contexts.partners
    agent.services["gradients"] = partners.guard_gradients(engine.arrived)
    agent.services["gradients.flat"] = engine.arrived_flat
    agent.services["gradients.failed"] = partners.guard(engine.endings.failure_reported)
    agent.services["gradients.abort"] = partners.guard(engine.endings.abort_asked)
    agent.services["gradients.outcomes"] = partners.guard_outcomes(engine.outcomes_told)
    for service in ("gradients", "gradients.flat"):
        agent.post_refused[service] = engine.endings.refused
    agent.post_refused["gradients.outcomes"] = engine.outcomes_refused
    agent.services["gradients.waits"] = partners.guard(functools.partial(waits, engine))
    agent.services["context.release"] = partners.guard_release(contexts.release_asked)
    agent.services["context.lost"] = contexts.edges_lost
    agent.services["context.known"] = contexts.known
    agent.services["context.graph"] = partners.guard(functools.partial(_describe, contexts))
    agent.plain_travellers.add(Coo, CooTraveller())
    if RRefs in agent.parts:
        agent.parts[RRefs].backward_hook = engine.from_value
        agent.parts[RRefs].value_services.context_guard = partners.takes_part
    agent.lost.append(contexts.lost)
    agent.returned.append(contexts.returned)
    return contexts


def _describe(contexts: Contexts, sender: PeerInfo, context_id: int) -> dict[str, Any]:
    """A peer draws a picture; what draws it is only loaded then."""
    from aiograd.dist.graph import asked

    return asked(contexts, sender, context_id)
