"""What a partner may say about references: only what concerns its own.

Ids of references can be guessed, so over a restricted connection knowing one proves nothing. A
partner may use, give back and confirm a fork that is registered to it, create values under ids of
its own, and get references from their owner only: passing on somebody else's is refused on both
ends, because the owner could not tell it from a forgery.

Checks without I/O: `Control` and `RRefs` ask before they let the protocol act.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rref.refcount.records import BY_OWNER, Held, Owned, Party, RefId

if TYPE_CHECKING:
    from aiograd.rref.refcount.protocol import Protocol

_ID = (int, int, int)
_FORK = (str, int, bytes, tuple, tuple, int)


class Partners:
    """Checks for one worker what its partners say."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._me = protocol.me

    # ── as an owner ─────────────────────────────────────────────────────────────────────────

    def may_use(self, who: Party, ref_id: RefId, fork: RefId) -> None:
        """Its own fork, or a value whose creation it has asked for itself."""
        owned = self._protocol.owning.owners.get(ref_id)
        if owned is not None and owned.forks.get(fork) == who.incarnation:
            return
        if ref_id[1] != who.stamp:
            raise self._refusal(who)

    def may_give_back(self, who: Party, releases: Iterable[tuple[RefId, RefId, int]]) -> None:
        """Its own forks; one that is gone already may come again."""
        for ref_id, fork, _ in releases:
            owned = self._protocol.owning.owners.get(ref_id)
            holder = owned.forks.get(fork) if owned is not None else None
            if holder is None and (owned is None or fork[1] in (who.stamp, self._me.stamp)):
                continue
            if holder != who.incarnation:
                raise self._refusal(who)

    def may_claim(self, who: Party, forks: Iterable[tuple[RefId, RefId, int]]) -> None:
        """A fork that it got from another user; we cannot know that it did."""
        for ref_id, fork, _ in forks:
            self.may_use(who, ref_id, fork)

    def may_confirm(self, who: Party, forks: Iterable[RefId]) -> None:
        """Forks that were sent to it."""
        ours = set(self._protocol.watch.held_by(who.incarnation))
        if any(fork in self._protocol.watch and fork not in ours for fork in forks):
            raise self._refusal(who)

    # ── on the way ──────────────────────────────────────────────────────────────────────────

    def may_send(self, ref: Owned | Held, to: Party) -> None:
        """A reference of ours, or one that goes home."""
        if isinstance(ref, Held) and ref.owner.incarnation != to.incarnation:
            raise NotAllowed(
                f"only its owner {ref.owner.name} can give this reference to {to.name}: "
                "between partners references are not passed on",
                to.name,
            )

    def may_bring(self, who: Party, data: Any) -> None:
        """A reference of its own, or one of ours that it holds."""
        _check_form(data)
        name, _, incarnation, ref_id, fork, known = data
        if fork[1] != who.stamp:
            raise self._refusal(who)
        if known == BY_OWNER:
            if incarnation != who.incarnation:
                raise self._refusal(who)
            return
        if incarnation != self._me.incarnation:
            raise NotAllowed(f"{who.name} passed a reference to a value of {name[:80]}", who.name)
        owned = self._protocol.owning.owners.get(ref_id)
        held = owned is not None and who.incarnation in owned.forks.values()
        if not held and ref_id[1] != who.stamp:
            raise self._refusal(who)

    def _refusal(self, who: Party) -> NotAllowed:
        return NotAllowed(
            f"{who.name} was not given this reference by {self._me.name}, or has given it back",
            self._me.name,
        )


def _check_form(data: Any) -> None:
    def fits(value: Any, form: tuple[type, ...]) -> bool:
        return type(value) is tuple and tuple(map(type, value)) == form

    if not (fits(data, _FORK) and fits(data[3], _ID) and fits(data[4], _ID)):
        raise ProtocolError("a reference of another form")
