"""Carry messages of the reference-count protocol between two workers by hand."""

from __future__ import annotations

from aiograd.errors import RRefExpired
from aiograd.rpc.directory import PeerInfo
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import (
    UNKNOWN_SITE,
    OwnerRecord,
    UserRecord,
)
from aiograd.rref.refcount.user import Batch


def party(rank: int, start: int = 0) -> PeerInfo:
    return PeerInfo(f"worker{rank}", rank, bytes([rank + 1, start]) + bytes(14))


def batch_to(worker: Protocol, to: Protocol) -> Batch:
    """The only thing that `worker` has to tell anybody."""
    (batch,) = worker.user_table.take()
    assert batch.to.incarnation == to.me.incarnation
    return batch


def created(creator: Protocol, owner: Protocol, value: object = "value") -> UserRecord:
    """A reference whose creation went through."""
    held = creator.create(owner.me)
    owner.owner_table.expect(creator.me.incarnation, held.id, held.fork, UNKNOWN_SITE)
    owner.owner_table.settle(held.id, value)
    creator.user_table.answered(held)
    return held


def tell_forks(user: Protocol, owner: Protocol) -> list[bool]:
    """Carry one fork request there and its answer back."""
    batch = batch_to(user, owner)
    number, low = user.user_table.number(owner.me)
    answer = owner.requested(
        user.me, number, low, [(held.id, held.fork, held.claim) for held in batch.forks]
    )
    user.user_table.close(owner.me, number)
    for held, counts in zip(batch.forks, answer, strict=True):
        user.user_table.answered(held, None if counts else RRefExpired("expired"))
    return answer


def tell_accepts(user: Protocol, parent: Protocol) -> None:
    parent.accepted(batch_to(user, parent).accepts)


def tell_releases(user: Protocol, owner: Protocol) -> int:
    """Carry releases there; return how many there were."""
    releases = batch_to(user, owner).releases
    owner.released([(held.id, held.fork, held.never_created) for held in releases])
    for held in releases:
        user.user_table.released(held)
    return len(releases)


def arrived_held(worker: Protocol, data: object, sender: Protocol) -> UserRecord:
    ref = worker.arrive(data, sender.me)  # type: ignore[arg-type]
    assert isinstance(ref, UserRecord)
    return ref


def arrived_owned(worker: Protocol, data: object, sender: Protocol) -> OwnerRecord:
    ref = worker.arrive(data, sender.me)  # type: ignore[arg-type]
    assert isinstance(ref, OwnerRecord)
    return ref
