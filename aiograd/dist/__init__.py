"""Gradients across workers: where the tape meets the calls."""

from __future__ import annotations

import functools

from aiograd.autograd.tensor import Tensor
from aiograd.dist import picture
from aiograd.dist.contexts import Contexts
from aiograd.dist.engine import Engine
from aiograd.dist.travel import ContextBaggage, TensorTraveller
from aiograd.rpc.agent import Agent
from aiograd.rref.owners import RRefs

__all__ = ["attach"]


def attach(agent: Agent) -> Contexts:
    """Plug distributed autograd into an agent, after the references."""
    contexts = Contexts(agent)
    engine = contexts.engine = Engine(contexts)
    agent.parts[Contexts] = contexts
    agent.travellers.add(Tensor, TensorTraveller())
    agent.baggage = ContextBaggage(contexts)
    agent.services["gradients"] = engine.arrived
    agent.services["gradients.failed"] = engine.endings.failure_reported
    agent.services["gradients.abort"] = engine.endings.abort_asked
    agent.services["gradients.waits"] = engine.waits
    agent.services["context.release"] = contexts.release_asked
    agent.services["context.known"] = contexts.known
    agent.services[picture.SERVICE] = functools.partial(picture.asked, contexts)
    if RRefs in agent.parts:
        agent.parts[RRefs].backward_hook = engine.from_value
    agent.lost.append(contexts.lost)
    return contexts
