"""What a partner may do with references: only what concerns its own."""

from __future__ import annotations

from typing import Any

import pytest

from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rref.refcount.access import AccessChecks
from aiograd.rref.refcount.protocol import Protocol
from aiograd.rref.refcount.records import BY_CONFIRMED
from tests.support.refcount import arrived_held, created


def checks(worker: Protocol) -> AccessChecks:
    return AccessChecks(worker)


def test_a_fork_is_used_and_released_by_its_holder_only(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = arrived_held(b, a.depart(a.own("value"), b.me), a)
    checks(a).may_use(b.me, held.id, held.fork)
    checks(a).may_release(b.me, [(held.id, held.fork, 0)])
    for forbidden in (
        lambda: checks(a).may_use(c.me, held.id, held.fork),
        lambda: checks(a).may_claim(c.me, [(held.id, held.fork, 0)]),
        lambda: checks(a).may_release(c.me, [(held.id, held.fork, 0)]),
    ):
        with pytest.raises(NotAllowed, match="was not given this reference"):
            forbidden()


def test_a_creator_may_use_a_value_before_its_creation_arrived(a: Protocol, b: Protocol) -> None:
    early = b.create(a.me)
    assert checks(a).may_use(b.me, early.id, early.fork) is None


def test_a_release_that_arrives_again_is_no_offence(a: Protocol, b: Protocol) -> None:
    held = created(b, a)
    release = [(held.id, held.fork, 0)]
    a.released(release)
    assert checks(a).may_release(b.me, release) is None


def test_only_the_recipient_of_a_fork_confirms_it(a: Protocol, b: Protocol, c: Protocol) -> None:
    fork = a.depart(a.own("value"), b.me)[4]
    checks(a).may_confirm(b.me, [fork, (9, 9, 9)])
    with pytest.raises(NotAllowed):
        checks(a).may_confirm(c.me, [fork])


def test_a_reference_goes_to_its_owner_and_to_nobody_else(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    held = created(b, a)
    checks(b).may_send(held, a.me)
    checks(b).may_send(b.own("mine"), c.me)
    with pytest.raises(NotAllowed, match="only its owner worker0"):
        checks(b).may_send(held, c.me)


def test_a_partner_brings_its_own_values_and_ours_that_it_holds(
    a: Protocol, b: Protocol, c: Protocol
) -> None:
    checks(a).may_bring(b.me, b.depart(b.own("theirs"), a.me))
    checks(a).may_bring(b.me, b.depart(created(b, a), a.me))
    with pytest.raises(NotAllowed, match="value of worker2"):
        checks(a).may_bring(b.me, b.depart(created(b, c), a.me))
    with pytest.raises(NotAllowed):  # a fork that another worker made
        checks(a).may_bring(b.me, c.depart(c.own("stolen"), a.me))
    ours, fork = a.depart(a.own("secret"), c.me), b.new_id()
    with pytest.raises(NotAllowed):  # a value of ours that it does not hold
        checks(a).may_bring(b.me, (*ours[:4], fork, BY_CONFIRMED))


@pytest.mark.parametrize("data", [None, (), ("a", 0, b"", (1, 2), (1, 2, 3), 0), ["a"] * 6])
def test_a_malformed_reference_is_refused(a: Protocol, b: Protocol, data: Any) -> None:
    with pytest.raises(ProtocolError, match="malformed reference"):
        checks(a).may_bring(b.me, data)
