"""The handshake, without any socket."""

from __future__ import annotations

import hashlib
import itertools
from collections.abc import Callable
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from aiograd.errors import AuthError, ProtocolError
from aiograd.rpc import envelope
from aiograd.wire import handshake, messages
from aiograd.wire.framing import HEADER, MAGIC
from aiograd.wire.handshake import (
    HELLO_SIZE,
    PROOF_SIZE,
    VERSION,
    Handshake,
    Identity,
    is_incarnation_of,
    make_incarnation,
)
from aiograd.wire.records import Protection
from aiograd.wire.session import ACCEPTED, DUPLICATE, RESUME, Offer

SECRET = b"s" * 32
ALICE = Identity("alice", 0, b"a" * 16)
BOB = Identity("bob", 1, b"b" * 16, max_message=5, max_inflight=6)


def pair(client=ALICE, server=BOB, secrets=(SECRET, SECRET), bindings=(b"", b"")):
    made = (
        Handshake(client, secrets[0], b"1" * 32, client=True),
        Handshake(server, secrets[1], b"2" * 32, client=False),
    )
    for each, binding in zip(made, bindings, strict=True):
        each.bind(binding)
    return made


def run(client, server, status=ACCEPTED):
    hello_s = server.receive(client.start())
    proof_c = client.receive(hello_s)
    assert server.receive(proof_c) == b""
    assert client.receive(server.admit(status)) == b""


def test_both_sides_learn_who_the_other_is():
    client, server = pair()
    run(client, server)
    assert (client.peer, server.peer) == (BOB, ALICE)
    assert client.proven
    assert server.proven
    assert client.status == server.status == ACCEPTED
    assert client.needed == server.needed == 0


def test_the_server_can_say_that_there_is_another_connection():
    client, server = pair()
    run(client, server, DUPLICATE)
    assert client.status == DUPLICATE


def test_messages_are_small_and_of_fixed_size():
    client, server = pair()
    assert len(client.start()) == HELLO_SIZE <= 512
    hello = server.receive(client.start())
    assert len(hello) == HELLO_SIZE
    assert len(client.receive(hello)) == PROOF_SIZE <= 512


def test_each_side_says_how_much_it_has_to_read_next():
    client, server = pair()
    assert client.needed == server.needed == HELLO_SIZE
    client.receive(server.receive(client.start()))
    assert client.needed == server.needed == PROOF_SIZE


def refuse_each_other(client, server):
    """Both sides refuse: the server at the first hello, the client at the answer."""
    hello = server.receive(client.start())
    assert server.refused is not None
    assert len(hello) == HELLO_SIZE
    with pytest.raises(AuthError):
        client.receive(hello)
    with pytest.raises(ProtocolError, match="over"):
        server.receive(bytes(PROOF_SIZE))
    assert not server.proven
    assert not client.proven


def test_another_secret_is_refused():
    refuse_each_other(*pair(secrets=(SECRET, b"t" * 32)))


def test_a_client_proves_nothing_to_a_server_without_the_secret():
    """So nobody who only listens at the address gets a proof to guess a secret with."""
    client, server = pair(secrets=(SECRET, b"t" * 32))
    server.receive(client.start())
    forged = Handshake(BOB, b"t" * 32, b"2" * 32, client=False)._hello
    keys = handshake.HelloKeys.derive(b"t" * 32)
    with pytest.raises(AuthError):
        client.receive(forged(keys, b"server" + client.start()))


def test_nobody_without_the_secret_learns_who_is_here():
    client, server = pair()
    for hello, who in ((client.start(), ALICE), (server.receive(client.start()), BOB)):
        assert who.name.encode() not in hello
        assert who.incarnation not in hello
        assert who.incarnation[:4] not in hello
    # Nor do two hellos of one worker look alike.
    again = Handshake(ALICE, SECRET, b"3" * 32, client=True).start()
    assert sum(a == b for a, b in zip(again[42:], client.start()[42:], strict=True)) < 20


def test_a_hello_that_is_played_back_is_answered_with_nothing_that_can_be_read():
    client, server = pair()
    recorded = client.start()
    first = server.receive(recorded)
    again = Handshake(BOB, SECRET, b"3" * 32, client=False).receive(recorded)
    assert b"bob" not in again
    assert sum(a == b for a, b in zip(first[42:], again[42:], strict=True)) < 20


CLUSTER, OTHER = b"c" * 16, b"d" * 16


def in_cluster(who, cluster):
    return replace(who, cluster=cluster)


def test_another_cluster_is_refused():
    refuse_each_other(*pair(in_cluster(ALICE, CLUSTER), in_cluster(BOB, OTHER)))


@pytest.mark.parametrize("clusters", [(handshake.NO_CLUSTER, CLUSTER), (CLUSTER, CLUSTER)])
def test_a_newcomer_learns_the_cluster_that_it_joins(clusters):
    client, server = pair(*map(in_cluster, (ALICE, BOB), clusters))
    run(client, server)
    assert client.peer.cluster == CLUSTER


def test_the_cluster_is_in_the_keys():
    """A handshake that a member of one cluster made proves nothing in another one."""
    keys = set()
    for cluster in (handshake.NO_CLUSTER, CLUSTER, OTHER):
        client, server = pair(in_cluster(ALICE, cluster), in_cluster(BOB, cluster))
        run(client, server)
        assert client.session_keys() == server.session_keys()[::-1]
        keys.add(client.session_keys())
        keys.add(handshake.derive_key(SECRET, cluster))
    assert len(keys) == 6


def test_a_relay_with_another_certificate_is_refused():
    refuse_each_other(*pair(bindings=(b"their certificate", b"our certificate")))


def test_a_replayed_proof_is_refused():
    client, server = pair()
    proof = client.receive(server.receive(client.start()))
    server.receive(proof)
    fresh = Handshake(BOB, SECRET, b"3" * 32, client=False)
    fresh.receive(client.start())
    with pytest.raises(AuthError):
        fresh.receive(proof)


def test_a_reflected_hello_is_refused():
    client, _ = pair()
    mirror = client.start()
    with pytest.raises(AuthError):
        client.receive(mirror)


@pytest.mark.parametrize("byte", range(HELLO_SIZE))
def test_every_byte_of_the_hellos_is_signed(byte):
    client, server = pair()
    hello = bytearray(server.receive(client.start()))
    hello[byte] ^= 1
    try:
        client.receive(bytes(hello))
    except (ProtocolError, AuthError):
        pass
    else:
        assert client.mismatch is not None
    assert not client.proven
    client, server = pair()
    hello = bytearray(client.start())
    hello[byte] ^= 1
    try:
        server.receive(bytes(hello))
    except ProtocolError:
        pass
    else:
        assert server.refused is not None or server.mismatch is not None
    assert server.peer is None


@pytest.mark.parametrize("size", [10, 50, 218, HELLO_SIZE])
def test_a_hello_of_another_version_is_known_by_its_beginning(size):
    """Its size may be another one: nobody waits for bytes that will not come."""
    _, server = pair()
    other = Handshake(replace(ALICE, version=VERSION - 1), SECRET, b"1" * 32, client=True).start()
    assert server.is_foreign(other[:size])
    assert not server.is_foreign(other[:8])
    assert not server.is_foreign(pair()[0].start()[:size])
    assert server.is_foreign(b"GET / HTTP/1.1")


LAYOUTS = {  # by version; whoever changes the wire adds a line here, and raises VERSION with it
    2: "0f9067e8",
    3: "4428fb59",
    4: "cbcd4aeb",
    5: "2a2cb3c2",
    6: "a5e9e723",
    7: "4131e166",
    8: "4131e166",  # records with a MAC; incarnations that follow from names
    9: "acd341d6",  # records of AES-GCM, sealed identities, ids of clusters
    10: "5d915415",  # SLEEP
    11: "5d915415",  # records of AES-GCM where they are large; small ones with another MAC
}


def test_the_version_was_raised_with_the_layout():
    """Two workers that mean different things by the same bytes must not get to know each other."""
    numbers = {
        name: value
        for name, value in vars(messages).items()
        if name.isupper() and isinstance(value, int) and not name.startswith("_")
    }
    formats = [handshake._HELLO.format, handshake._CLAIM.format, handshake._PROOF.format]
    formats += [handshake._PREFIX.format, handshake._IDENTITY.format]
    formats += [
        HEADER.format,
        envelope._LABEL.format,
        envelope._LENGTH.format,
        envelope._TOKEN.format,
    ]
    text = repr((MAGIC, formats, sorted(numbers.items()), messages.FORMS))
    assert LAYOUTS[VERSION] == hashlib.sha256(text.encode()).hexdigest()[:8], text


def test_versions_that_differ_are_named_on_both_sides():
    client, server = pair(client=Identity("alice", 0, b"a" * 16, version=1))
    other = Handshake(Identity("bob", 1, b"b" * 16, version=2), SECRET, b"2" * 32, client=False)
    hello = other.receive(client.start())
    client.receive(hello)
    assert str(client.mismatch) == "peer speaks 2, we speak 1"
    assert str(other.mismatch) == "peer speaks 1, we speak 2"
    assert not client.proven
    assert not other.proven
    assert server.mismatch is None
    for each in (client, other):  # nothing more is read, or taken
        assert each.needed == 0
        with pytest.raises(ProtocolError, match="over"):
            each.receive(bytes(PROOF_SIZE))


@pytest.mark.parametrize("junk", [b"GET / HTTP/1.1\r\n", b"\x16\x03\x01", bytes(8)])
def test_strangers_do_not_get_past_the_first_message(junk):
    _, server = pair()
    with pytest.raises(ProtocolError):
        server.receive(junk.ljust(HELLO_SIZE, b"\0"))


NO_NAMES = [
    b"al\x1b[2Jice",
    b"al\nice",
    b"\xff\xfe",
    b"",
    b"a b",
    b"../alice",
    b"*",  # the rule for all others, where secrets and modes are given by name
    "ban\u212a".encode(),
]


@pytest.mark.parametrize("name", NO_NAMES)
def test_a_name_that_no_worker_can_have_is_refused_before_anything_is_proven(name):
    packed = ALICE.pack().replace(
        b"\5alice".ljust(20, b"\0"), bytes([len(name)]) + name.ljust(19, b"\0")
    )
    assert packed != ALICE.pack()
    keys = handshake.HelloKeys.derive(SECRET)
    prefix = pair()[0].start()[:10]
    with pytest.raises(ProtocolError, match="name"):
        pair()[1].receive(keys.seal(prefix, b"1" * 32, b"client", packed))


def test_a_name_may_fill_its_room_and_no_more():
    client, server = pair(client=Identity("n" * 127, 0, b"a" * 16))
    run(client, server)
    assert server.peer.name == "n" * 127
    packed = Identity("n" * 127, 0, b"a" * 16).pack()
    with pytest.raises(ProtocolError, match="name"):
        Identity.unpack(b"\x80" + packed[1:])


@settings(max_examples=300, deadline=None)
@given(
    st.binary(min_size=HELLO_SIZE, max_size=HELLO_SIZE),
    st.binary(min_size=PROOF_SIZE, max_size=PROOF_SIZE),
)
def test_no_random_bytes_are_ever_accepted(hello, proof):
    _, server = pair()
    try:
        server.receive(b"aiograd\0" + hello[8:])
        server.receive(proof)
    except (AuthError, ProtocolError):
        pass
    assert not server.proven


@pytest.mark.parametrize("modes", [(True, False), (False, True), (True, True), (False, False)])
def test_each_side_tells_its_terms_to_the_one_they_are_for(modes):
    client, server = with_terms(*modes)
    run(client, server)
    assert server.peer is not None
    assert client.peer is not None
    assert (server.peer.restricted, client.peer.restricted) == modes
    assert (client.status, server.status) == (ACCEPTED, ACCEPTED)


def test_the_terms_cannot_be_changed_on_the_way():
    client, server = with_terms(True, True)
    proof = client.receive(server.receive(client.start()))
    with pytest.raises(AuthError):
        server.receive(bytes([proof[0] ^ 0x80]) + proof[1:])
    client, server = with_terms(True, True)
    server.receive(client.receive(server.receive(client.start())))
    proof = server.admit(ACCEPTED)
    with pytest.raises(AuthError):
        client.receive(bytes([proof[0] ^ 0x80]) + proof[1:])


def with_terms(client_restricts: bool, server_restricts: bool) -> tuple[Handshake, Handshake]:
    """Two sides with a rule for each other, and another one for everybody else."""

    def rule(who: str, restricts: bool) -> Callable[[str], bool]:
        return lambda name: restricts if name == who else not restricts

    alice, bob = Identity("alice", 0, b"a" * 16), Identity("bob", 1, b"b" * 16)
    return (
        Handshake(alice, SECRET, b"1" * 32, client=True, restricts=rule("bob", client_restricts)),
        Handshake(bob, SECRET, b"2" * 32, client=False, restricts=rule("alice", server_restricts)),
    )


def test_each_side_learns_how_much_the_other_one_has():
    asked = []

    def offer(server):
        asked.append(server)
        return Offer(RESUME, 3, 1 << 40, 2)

    client = Handshake(ALICE, SECRET, b"1" * 32, client=True, offer=offer)
    _, server = pair()
    server.receive(client.receive(server.receive(client.start())))
    assert asked == [BOB]
    assert (server.offer, server.received) == (Offer(RESUME, 3, 1 << 40, 2), 1 << 40)
    client.receive(server.admit(ACCEPTED, 1 << 41, 7))
    assert (client.status, client.received, client.latest) == (ACCEPTED, 1 << 41, 7)


@pytest.mark.parametrize("byte", range(PROOF_SIZE))
def test_every_byte_of_the_proofs_is_signed(byte):
    """So nobody can change where a session goes on."""
    client, server = pair()
    proof = bytearray(client.receive(server.receive(client.start())))
    proof[byte] ^= 1
    with pytest.raises(AuthError):
        server.receive(bytes(proof))
    assert not server.proven
    client, server = pair()
    server.receive(client.receive(server.receive(client.start())))
    proof = bytearray(server.admit(ACCEPTED, 5))
    proof[byte] ^= 1
    with pytest.raises(AuthError):
        client.receive(bytes(proof))
    assert not client.proven


@pytest.mark.parametrize("best", [*itertools.product(Protection, Protection)], ids=str)
def test_the_best_protection_is_used_that_both_sides_have(best):
    client, server = pair()
    for each, protection in zip((client, server), best, strict=True):
        each.seal(protection)
    run(client, server)
    assert client.sealed
    assert server.sealed
    assert client.protection is server.protection is min(best)
    assert client.session_keys() == server.session_keys()[::-1]


def test_one_side_that_wants_tags_is_enough():
    client, server = pair()
    server.seal(Protection.AEAD)
    run(client, server)
    assert client.sealed
    assert server.sealed
    assert client.protection is server.protection is Protection.HASHES


def test_a_channel_bound_later_counts_as_much_as_one_bound_at_once():
    client, server = pair(bindings=(b"", b"certificates"))
    client.bind(b"certificates")
    run(client, server)
    client, server = pair(bindings=(b"", b"certificates"))
    client.bind(b"others")
    refuse_each_other(client, server)


def test_an_incarnation_follows_from_the_name():
    token = bytes(range(16))
    mine = make_incarnation("lab", token)
    assert is_incarnation_of(mine, "lab")
    assert mine != make_incarnation("lab", bytes(16))
    assert not is_incarnation_of(mine, "clinic")
    assert not is_incarnation_of(mine, "la")
    assert not is_incarnation_of(mine[:15], "lab")
    assert not is_incarnation_of(make_incarnation("clinic", token)[:8] + mine[8:], "lab")
