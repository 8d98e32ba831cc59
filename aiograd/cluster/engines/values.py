"""References of other engines in our calls: they travel with their owner, or are refused.

A `ray.ObjectRef` that plain pickle copies has lost its owner: `ray.get` of it waits for ever. So
it travels as Ray's own pickler writes it, with the address of its owner; the receiver has to be in
the same Ray cluster. A Dask `Future` belongs to one client and is refused.
"""

from __future__ import annotations

from typing import Any

from aiograd.errors import SerializationError
from aiograd.rpc.agent import Agent

__all__ = ["attach"]


def attach(agent: Agent) -> None:
    """Let an agent take care of such references, if their libraries are used at all."""
    travellers = agent.travellers
    travellers.promise(RayReferences.tag, "ray.ObjectRef", lambda: _add_ray(agent, agent.name))
    travellers.promise(DaskFutures.tag, "distributed.client.Future", lambda: _add_dask(agent))


def _add_ray(agent: Agent, name: str) -> None:
    try:
        import ray
    except ImportError:
        raise SerializationError("a ray.ObjectRef", "Ray is not installed here", name) from None
    agent.travellers.add(ray.ObjectRef, RayReferences(name))


def _add_dask(agent: Agent) -> None:
    import distributed

    agent.travellers.add(distributed.Future, DaskFutures())


class RayReferences:
    """Sends `ray.ObjectRef`s by Ray's pickler, which keeps their owner."""

    tag = "ray.ObjectRef"

    def __init__(self, name: str) -> None:
        self._name = name

    def depart(self, value: Any, departure: Any) -> bytes:
        """Return the reference as Ray writes it; Ray keeps its value from then on."""
        import ray
        from ray import cloudpickle

        if not ray.is_initialized():
            raise TypeError("Ray was shut down here, and its references with it")
        return bytes(cloudpickle.dumps(value))

    def arrive(self, data: Any, arrival: Any) -> Any:
        """Return the reference; SerializationError outside of Ray."""
        import ray
        from ray import cloudpickle

        if not ray.is_initialized():
            why = "this worker is not in a Ray cluster: send the value itself"
            raise SerializationError("a ray.ObjectRef", why, self._name)
        return cloudpickle.loads(data)


class DaskFutures:
    """Refuses Dask's futures: each belongs to the client that made it."""

    tag = "distributed.Future"

    def depart(self, value: Any, departure: Any) -> Any:
        """Refuse it, with the cure."""
        raise TypeError(
            f"a Dask Future ({value.key}) belongs to its client; send its value "
            "(`await future`), or its key and let the callee ask Dask for it"
        )

    def arrive(self, data: Any, arrival: Any) -> Any:
        """Refuse it: no worker sends one."""
        raise SerializationError("a Dask Future", "it belongs to its client")
