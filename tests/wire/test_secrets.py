"""Which secret is shared with whom, and how little it tells of itself."""

from __future__ import annotations

import pickle

import pytest

from aiograd.errors import AuthError
from aiograd.wire.handshake import Handshake, Identity
from aiograd.wire.secrets import Keyring, Secret
from aiograd.wire.session import ACCEPTED

ME, REGISTRY = Identity("clinic", 1, b"c" * 16), Identity("registry", 0, b"s" * 16)
ONE, TWO, REST = b"1" * 16, b"2" * 32, b"*" * 32


def met(
    client: str,
    server: str,
    keys: dict[str, Keyring],
    *,
    claim: str | None = None,
) -> tuple[Handshake, Handshake]:
    """Let two workers greet each other, the client by the name it claims."""
    first = Identity(claim or client, 1, b"c" * 16)
    second = Identity(server, 2, b"s" * 16)
    sides = (
        Handshake(
            first, keys[client], b"1" * 32, client=True, choice=one_for(keys[client], server)
        ),
        Handshake(second, keys[server], b"2" * 32, client=False),
    )
    hello = sides[1].receive(sides[0].start())
    if sides[1].refused is not None:
        with pytest.raises(AuthError):  # the client learns it, too
            sides[0].receive(hello)
        raise sides[1].refused
    sides[1].receive(sides[0].receive(hello))
    sides[0].receive(sides[1].admit(ACCEPTED))
    return sides


def one_for(keyring: Keyring, name: str) -> Secret | None:
    """What a client tries with the worker of a name; a secret of another one if it has none."""
    return next(iter(keyring.candidates(name)), None)


# A registry that shares a secret with each of two parties, which share none with each other.
STAR = {
    "registry": Keyring({"clinic": ONE, "lab": TWO}),
    "clinic": Keyring({"registry": ONE}),
    "lab": Keyring({"registry": TWO}),
}


@pytest.mark.parametrize(
    ("client", "server"), [("clinic", "registry"), ("registry", "lab"), ("lab", "registry")]
)
def test_two_that_share_a_secret_meet(client, server):
    sides = met(client, server, STAR)
    assert [side.proven for side in sides] == [True, True]


@pytest.mark.parametrize(
    ("client", "server", "claim"),
    [
        ("clinic", "lab", None),  # who share nothing
        ("clinic", "registry", "lab"),  # one party as the other
        ("clinic", "lab", "registry"),  # one party as the registry
        ("clinic", "registry", "registry"),  # as the very one that it calls
        ("clinic", "registry", "bank"),  # as one that nobody knows
        ("registry", "clinic", "lab"),  # the registry as a party, to the other one
    ],
)
def test_nobody_is_somebody_else(client, server, claim):
    with pytest.raises(AuthError) as caught:
        met(client, server, STAR, claim=claim)
    assert caught.value.worker in ("", claim or client)  # a name only if its secret was known
    assert server in str(caught.value)


def test_the_client_does_not_believe_a_server_of_another_name():
    client = Handshake(
        Identity("clinic", 1, b"c" * 16),
        STAR["clinic"],
        b"1" * 32,
        client=True,
    )
    lab = Handshake(Identity("registry", 2, b"s" * 16), STAR["lab"], b"2" * 32, client=False)
    with pytest.raises(AuthError, match="clinic and registry"):
        client.receive(lab.receive(client.start()))
    assert not client.proven


def test_a_client_that_knows_no_name_yet_finds_the_server_with_one_of_its_secrets():
    keys = Keyring({"lab": TWO, "registry": ONE})
    found = []
    for choice in keys.candidates():
        client = Handshake(ME, keys, b"1" * 32, client=True, choice=choice)
        server = Handshake(REGISTRY, STAR["registry"], b"2" * 32, client=False)
        hello = server.receive(client.start())
        if server.refused is None:
            client.receive(hello)
            found.append((choice, client.peer and client.peer.name))
    assert found == [(ONE, "registry")]


def test_a_worker_is_not_led_to_itself():
    """Whoever carries its words back to its own door proves nothing, by its own name or another."""
    keys = STAR["registry"]
    with pytest.raises(AuthError):
        met("registry", "registry", {"registry": keys})


def test_a_rule_for_all_others_opens_no_named_door():
    keys = {
        "registry": Keyring({"clinic": ONE, "*": REST}),
        "guest": Keyring(REST),
        "clinic": Keyring({"registry": ONE}),
    }
    met("guest", "registry", keys)
    met("guest", "registry", keys, claim="any-name")
    met("clinic", "registry", keys)
    for client, claim in (("guest", "clinic"), ("clinic", "guest")):
        with pytest.raises(AuthError):
            met(client, "registry", keys, claim=claim)


def test_a_name_without_a_secret_fails_like_one_with_another():
    """The same work, the same error, and an answer under a random key."""
    told = []
    for claim in ("lab", "bank"):
        stranger = Handshake(Identity(claim, 1, b"c" * 16), b"x" * 32, b"1" * 32, client=True)
        server = Handshake(REGISTRY, STAR["registry"], b"2" * 32, client=False, token=bytes)
        hello = server.receive(stranger.start())
        told.append((len(hello), hello[:42], str(server.refused), server.proven, server.needed))
        with pytest.raises(AuthError):
            stranger.receive(hello)
    assert told[0] == told[1]


def test_a_worker_knows_which_secrets_to_try():
    keys = Keyring({"lab": TWO, "clinic": ONE, "*": REST, "bank": REST})
    assert keys.candidates() == (REST, TWO, ONE)
    assert keys.candidates("lab") == (TWO,)
    assert keys.candidates("anybody") == (REST,)
    assert Keyring({"lab": ONE}).candidates("anybody") == ()
    assert [keys.owner_of(each) for each in keys.candidates()] == ["", "lab", "clinic"]


def test_what_is_derived_from_secrets_is_derived_once():
    keys, asked = Keyring({"lab": TWO, "clinic": ONE}), []
    for _ in range(2):
        assert keys.derived(lambda secret: asked.append(secret) or len(asked)) == [
            (TWO, 1),
            (ONE, 2),
        ]


def test_a_keyring_knows_with_whom_it_shares():
    assert Keyring(ONE).shares("anybody")
    assert Keyring({"lab": ONE, "*": TWO}).shares("anybody")
    assert Keyring({"lab": ONE}).shares("lab")
    assert not Keyring({"lab": ONE}).shares("anybody")
    assert not Keyring({"lab": ONE}).shares("*")


@pytest.mark.parametrize("secrets", [b"short", {"lab": b"short"}, {"lab": ONE, "*": b""}])
def test_short_secrets_are_refused(secrets):
    with pytest.raises(ValueError, match="at least 16"):
        Keyring(secrets)


def test_a_keyring_shows_no_secret():
    keys = Keyring({"lab": b"hunter2-hunter2-hunter2", "*": b"hunter2-hunter2-hunter2"})
    assert "hunter2" not in repr(keys) + repr(vars(keys)) + repr(keys.candidates())
    assert repr(pickle.loads(pickle.dumps(Secret(ONE)))) == "<secret>"
