"""Access checks: a partner may act only on references of its own.

Ids of references can be guessed, so over a restricted connection knowing one proves nothing. A
partner may use, release and confirm a fork that is registered to it, create values under ids of
its own, and get references from their owner only: passing on a reference of a third worker is
refused on both ends, because the owner could not tell it from a forgery.

Checks without I/O: `Messenger`, `ValueServices` and `RRefs` ask before they let the protocol act.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import BY_OWNER, Fork, Record, RefId, UserRecord, stamp_of

# Exact types: `isinstance` takes True for an int, and a partner may send anything.
_ID = (int, int, int)
_FORK = (str, int, bytes, tuple, tuple, int)


class AccessChecks:
    """Checks what the partners of one worker send; every method raises NotAllowed or returns."""

    def __init__(self, protocol: Protocol) -> None:
        self._protocol = protocol
        self._me = protocol.me
        self._stamp = stamp_of(protocol.me.incarnation)

    # ── as an owner ─────────────────────────────────────────────────────────────────────────

    def may_use(self, partner: PeerInfo, ref_id: RefId, fork: RefId) -> None:
        """Check a use: of the partner's own fork, or of a value whose creation it asked for."""
        record = self._protocol.owner_table.records.get(ref_id)
        if record is not None and record.forks.get(fork) == partner.incarnation:
            return
        # Its own creation may be overtaken by a use, and is known by the id alone then.
        if ref_id[1] != stamp_of(partner.incarnation):
            raise self._refusal(partner)

    def may_release(self, partner: PeerInfo, releases: Iterable[Fork]) -> None:
        """Check releases: of the partner's own forks only."""
        theirs = stamp_of(partner.incarnation)
        for ref_id, fork, never_created in releases:
            record = self._protocol.owner_table.records.get(ref_id)
            holder = record.forks.get(fork) if record is not None else None
            if holder == partner.incarnation:
                continue
            # A release may come again when its fork is gone, and is ignored then: of a fork that
            # the partner made, or we for the partner. One before its creation is remembered, so it
            # must be of a creation of the partner's own: else it would end one of somebody else.
            again = fork[1] == theirs or (fork[1] == self._stamp and not never_created)
            if holder is not None or not again:
                raise self._refusal(partner)

    def may_claim(self, partner: PeerInfo, forks: Iterable[Fork]) -> None:
        """Check fork requests. The partner cannot prove that another user gave it the fork."""
        for ref_id, fork, _ in forks:
            self.may_use(partner, ref_id, fork)

    def may_confirm(self, partner: PeerInfo, forks: Iterable[RefId]) -> None:
        """Check acceptances: of forks that were sent to the partner."""
        theirs = set(self._protocol.audit.held_by(partner.incarnation))
        # Those not in the audit are copies of acceptances, which change nothing.
        if any(fork in self._protocol.audit and fork not in theirs for fork in forks):
            raise self._refusal(partner)

    def may_audit(self, partner: PeerInfo, forks: Iterable[RefId]) -> None:
        """Check an audit: of forks that the partner made, and so can have sent here."""
        stamp = stamp_of(partner.incarnation)
        if any(fork[1] != stamp for fork in forks):
            raise self._refusal(partner)

    # ── references in messages ──────────────────────────────────────────────────────────────

    def may_send(self, record: Record, to: PeerInfo) -> None:
        """Check a reference that we send: our own value, or one that returns to its owner."""
        if isinstance(record, UserRecord) and record.owner.incarnation != to.incarnation:
            raise NotAllowed(
                f"only its owner {record.owner.name} can give this reference to {to.name}: "
                "between partners references are not passed on",
                to.name,
            )

    def may_bring(self, partner: PeerInfo, data: Any) -> None:
        """Check a reference that arrives: the partner's own value, or one of ours that it holds.

        Raises ProtocolError if the data have another form.
        """
        _check_form(data, partner)
        name, _, incarnation, ref_id, fork, known = data
        # The sender makes the fork's id, whatever the reference is.
        if fork[1] != stamp_of(partner.incarnation):
            raise self._refusal(partner)
        if known == BY_OWNER:
            # Else it would speak in the name of another owner, and we would not ask that one.
            if incarnation != partner.incarnation:
                raise self._refusal(partner)
            return
        if incarnation != self._me.incarnation:
            raise NotAllowed(
                f"{partner.name} passed a reference to a value of {name[:80]}", partner.name
            )
        record = self._protocol.owner_table.records.get(ref_id)
        # Any fork of it will do: the message carries a new one, which is made from one it holds.
        held = record is not None and partner.incarnation in record.forks.values()
        if not held and ref_id[1] != stamp_of(partner.incarnation):
            raise self._refusal(partner)

    def _refusal(self, partner: PeerInfo) -> NotAllowed:
        return NotAllowed(
            f"{partner.name} was not given this reference by {self._me.name}, or has given it back",
            self._me.name,
        )


def _check_form(data: Any, sender: PeerInfo) -> None:
    def fits(value: Any, form: tuple[type, ...]) -> bool:
        return type(value) is tuple and tuple(map(type, value)) == form

    if not (fits(data, _FORK) and fits(data[3], _ID) and fits(data[4], _ID)):
        raise ProtocolError(
            "malformed reference in a message: expected (owner's name, rank, incarnation, "
            f"reference id, fork id, sharer), got {type(data).__name__}",
            sender.name,
        )
