"""Results that stay where they were made: the owner's side of `remote`.

The agent tells its *keeper* of every call whose result stays, when it begins and when it ends; the
token that came with the call says under which id, for whom, and which line of theirs asked for it.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from aiograd.errors import DeadlineExceeded, NotAllowed, Overloaded, RemoteError, RRefError
from aiograd.rref.records import ID_SIZE, Place, RefId, stamp_of, unpack_id

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent
    from aiograd.rpc.directory import PeerInfo
    from aiograd.rref.control import Control
    from aiograd.rref.places import Places

VALUES = 65_536  # kept at once by a worker before it takes no more from partners


class Keeping:
    """Keeps what others create on one worker."""

    def __init__(self, agent: Agent, control: Control, places: Places) -> None:
        self._agent, self._control, self._places = agent, control, places
        self._owning, self._me = control.protocol.owning, control.protocol.me

    def expect(self, sender: PeerInfo, token: Any) -> None:
        self._owning.expect(sender.incarnation, *self._announced(sender, token))

    def keep(self, sender: PeerInfo, token: Any, value: Any) -> None:
        self._owning.settle(unpack_id(token), value)
        self._control.changed()

    def fail(self, sender: PeerInfo, token: Any, error: BaseException) -> None:
        self._owning.settle(unpack_id(token), None, self._outcome(error))
        self._control.changed()

    def made(self, sender: PeerInfo, token: Any, value: Any) -> None:
        ref_id, fork, place = self._announced(sender, token)
        self._owning.made(sender.incarnation, ref_id, fork, place, value)

    def _announced(self, sender: PeerInfo, token: bytes) -> tuple[RefId, RefId, Place]:
        """What somebody creates here: the id, the creator's fork, and the line."""
        rank, stamp, number = ref_id = unpack_id(token)
        creator = self._control.party(sender)
        if stamp != stamp_of(sender.incarnation):
            raise NotAllowed("a value is created under an id of its creator", self._agent.name)
        if len(self._owning.owners) >= VALUES and self._agent.restricts(sender):
            self._agent.limits.reached("values")
            raise Overloaded(self._agent.name, f"{VALUES} values are kept for others already")
        # The creator's own fork: see `Protocol.create`, `create_here`.
        fork = ref_id if creator is self._me else (rank, stamp, number + 1)
        return ref_id, fork, self._places.read(token[ID_SIZE:])

    def _outcome(self, error: BaseException) -> Exception:
        """What users of a value get that could not be made."""
        name = self._agent.name
        abandoned = isinstance(error, DeadlineExceeded) and (error.worker, error.seconds) == (
            name,
            0,
        )
        if abandoned:
            return RRefError(f"RRef creation on {name} timed out, or was cancelled", name)
        if isinstance(error, Exception) and not isinstance(error, StopIteration):
            return error
        return RemoteError(type(error).__name__, str(error), worker=name)
