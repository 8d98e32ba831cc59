"""The owner's answers to those who use its values.

    rref.fetch     the value            rref.type      its type        rref.created   is it there?
    rref.has       an attribute?        rref.backward  start a backward pass from it

All of them wait until the value is there, and raise what its function raised. Whether the asker
may use the value is for the protocol to say.
"""

from __future__ import annotations

import asyncio
import struct
from collections.abc import Awaitable, Callable
from typing import TYPE_CHECKING, Any

from aiograd.errors import NotAllowed, ProtocolError, RRefError
from aiograd.rpc.callee.exposure import exposed_method
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.control import Control
from aiograd.rref.records import Owned, again, unpack_fork

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

BackwardHook = Callable[[Any, int | None, bool], Awaitable[None] | None]
"""hook(value, context id, retain_graph), on the owner's loop."""


class Serving:
    """What others may ask about the values of one worker."""

    def __init__(self, agent: Agent, control: Control) -> None:
        self._agent = agent
        self._control = control
        self.backward_hook: BackwardHook | None = None  # set by the autograd layer
        self.context_guard: Callable[[PeerInfo, int], None] | None = None  # so is this; may refuse
        for name in ("fetch", "type", "created", "has", "backward"):
            agent.services[f"rref.{name}"] = getattr(self, f"_on_{name}")

    def found(self, sender: PeerInfo, fork: bytes) -> Owned:
        """What a user may use by this fork, ready or not."""
        try:
            ref_id, fork_id, known = unpack_fork(fork)
        except (struct.error, TypeError):
            raise ProtocolError("a fork of another form", sender.name) from None
        party = self._control.party(sender)
        if self._agent.restricts(sender):
            self._control.partners.may_use(party, ref_id, fork_id)
        return self._control.protocol.look_up(party, ref_id, fork_id, known)

    def later(
        self, owned: Owned, look: Callable[[Owned], Any] = lambda owned: owned.value
    ) -> asyncio.Future[Any]:
        """A future of the value, or of something about it; without a deadline of its own.

        If there is no value, `look` is not asked: the error is the answer.
        """
        future: asyncio.Future[Any] = self._agent.loop.create_future()

        def ready() -> None:
            if future.done():
                return
            if owned.error is not None:  # not raised: its traceback would hold this future
                future.set_exception(again(owned.error, owned.trace))
                return
            try:
                future.set_result(look(owned))
            except Exception as error:  # of a property of the value, say
                future.set_exception(error.with_traceback(None))

        if owned.ready:
            ready()
        else:
            owned.waiters[future] = ready
            future.add_done_callback(lambda _: owned.waiters.pop(future, None))  # cancelled
        return future

    async def backward(self, value: Any, context_id: int | None, retain_graph: bool) -> None:
        """Start a backward pass from a value of this worker."""
        if self.backward_hook is None:
            raise RRefError("no autograd is attached to this worker", self._agent.name)
        if (pending := self.backward_hook(value, context_id, retain_graph)) is not None:
            await pending

    # ── the services ────────────────────────────────────────────────────────────────────────

    def _on_fetch(self, sender: PeerInfo, fork: bytes) -> Any:
        owned = self.found(sender, fork)
        return owned.result() if owned.ready else self.later(owned)

    def _on_type(self, sender: PeerInfo, fork: bytes) -> Any:
        if self._agent.restricts(sender):  # types are code
            raise NotAllowed("a partner may fetch a value, not look at its type", self._agent.name)
        return self.later(self.found(sender, fork), lambda owned: type(owned.value))

    def _on_created(self, sender: PeerInfo, fork: bytes) -> Any:
        return self.later(self.found(sender, fork), lambda owned: None)

    def _on_has(self, sender: PeerInfo, fork: bytes, name: str) -> Any:
        if self._agent.trusts(sender):
            return self.later(self.found(sender, fork), lambda owned: hasattr(owned.value, name))
        return self.later(
            self.found(sender, fork), lambda owned: exposed_method(owned.value, name) is not None
        )

    async def _on_backward(
        self, sender: PeerInfo, fork: bytes, context_id: int, retain_graph: bool
    ) -> None:
        owned = self.found(sender, fork)
        if self.context_guard is not None:
            self.context_guard(sender, context_id)
        await self.backward(await self.later(owned), context_id, retain_graph)
