"""The handshake: two workers prove to each other that they know the secret they share.

    client                                             server
    HELLO_C  version, nonce, sealed identity      ──▶
                                                  ◀──  HELLO_S  version, nonce, sealed identity
    PROOF_C  terms, offer, HMAC                   ──▶
                                                  ◀──  PROOF_S  terms, status, latest dial, bytes
                                                                received, HMAC

Fixed layouts, no pickle, no JSON: no byte of an unauthenticated peer reaches a deserializer. Both
nonces stop replay, the role labels stop reflection, and the proofs cover both hellos (version,
names, limits) and what comes with them, so that nobody can change it on the way. The terms are
whether this side speaks plain data only with the other one, whose name it knows by then, and
whether it wants a tag on what follows, and which one (`session_keys`); `session` says what an offer
is, and where a session goes on.

An identity (name, rank, incarnation, cluster, limits) is encrypted with a key of the secret and the
nonces, and has a tag: nobody without the secret learns who is here. HELLO_S covers HELLO_C, so a
server has proven the secret before the client proves anything. A server that cannot open HELLO_C
answers with a hello under a random key, and closes the connection: a stranger hears the same,
whatever it claimed. Where each name has a secret of its own, a side tries those it has, and the
name inside must be the one that the secret belongs to.

A cluster has a random id, made by its coordinator. A worker that has not joined one yet says zeros,
and takes over the id of the first worker that it dials. The proofs and the keys of the connection
are made with a key of the secret *and* the id: a handshake of one cluster proves nothing in
another one, though the two may have one secret.

A pure state machine: messages in, messages out. Timeouts and sockets: `rpc.link.handshaking`.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final, NamedTuple

from aiograd.errors import AuthError, ProtocolError
from aiograd.wire.names import is_name
from aiograd.wire.records import Protection
from aiograd.wire.secrets import Keyring, Secret
from aiograd.wire.session import Offer

# Of everything on the wire; raised with every change of a layout or a meaning. Workers of different
# versions refuse each other, so no message needs a version of its own.
VERSION: Final = 11
NO_CLUSTER: Final = bytes(16)  # of a worker that has not joined one
_MAGIC: Final = b"aiograd\0"
# Magic and version come first in every version of the wire.
_PREFIX: Final = struct.Struct("<8sH")
_IDENTITY: Final = struct.Struct("<B127si16s16sQI")
_NONCE: Final = 32
_TAG: Final = 16
_HELLO: Final = struct.Struct(f"<{_PREFIX.size}s{_NONCE}s{_IDENTITY.size}s{_TAG}s")
# The offer; or status, number of the server's latest dial, bytes received and 0.
_CLAIM: Final = struct.Struct("<BIQI")
_PROOF: Final = struct.Struct(f"<{_CLAIM.size}s32s")
HELLO_SIZE: Final = _HELLO.size
IDENTITY_SIZE: Final = _IDENTITY.size
PROOF_SIZE: Final = _PROOF.size
# The terms: bits of the claim's first byte, so that the proof covers them without a field more.
_RESTRICTED: Final = 0x80
_SEALED: Final = 0x40
_PROTECTION: Final = 0x30  # a number of `wire.records.Protection`
_SHIFT: Final = 4


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a handshake: its name, rank, incarnation, cluster and limits."""

    name: str
    rank: int
    incarnation: bytes
    cluster: bytes = NO_CLUSTER
    max_message: int = 1 << 30
    max_inflight: int = 1024
    version: int = VERSION
    restricted: bool = False  # it speaks plain data only with us; known when it is proven

    def pack(self) -> bytes:
        """Return what a hello says in secret, in a fixed layout."""
        name = self.name.encode()
        return _IDENTITY.pack(
            len(name),
            name,
            self.rank,
            self.incarnation,
            self.cluster,
            self.max_message,
            self.max_inflight,
        )

    @classmethod
    def unpack(cls, data: bytes) -> Identity:
        """Return the identity that `pack` wrote; ProtocolError if it is malformed."""
        length, name, rank, incarnation, cluster, message, inflight = _IDENTITY.unpack(data)
        try:
            text = name[:length].decode()
        except UnicodeDecodeError:
            raise ProtocolError("the other side has no readable name") from None
        # Nothing is proven yet, and even a member writes what it likes.
        if length > len(name) or not is_name(text):
            raise ProtocolError(f"the other side has a name that no worker can have: {text!a}")
        return cls(text, rank, incarnation, cluster, message, inflight)


# Eight bytes that follow from the name, then eight random ones.
_STAMP: Final = 8


def make_incarnation(name: str, token: bytes) -> bytes:
    """Return the incarnation of one start of a worker, from its name and 16 random bytes."""
    return _stamp(name, token[_STAMP:16]) + token[_STAMP:16]


def is_incarnation_of(incarnation: bytes, name: str) -> bool:
    """Whether a worker of this name can have this incarnation.

    Incarnations tell whose references, contexts and sessions something is, and all members know
    those of all others. Because they follow from names, and a name is proven, no worker can come
    with an incarnation, or a beginning of one, that is or was another worker's.
    """
    return len(incarnation) == 16 and incarnation[:_STAMP] == _stamp(name, incarnation[_STAMP:])


def _stamp(name: str, token: bytes) -> bytes:
    # Of the name and a fixed number of bytes: no two different pairs give the same text.
    return hashlib.blake2b(token + name.encode(), digest_size=_STAMP, person=b"aiograd").digest()


def derive_key(secret: bytes, cluster: bytes) -> Secret:
    """Return HKDF-SHA256 of the secret, so that it signs nothing itself."""
    # The cluster is the salt: a secret that two clusters share gives them different keys, and a
    # handshake of one proves nothing in the other.
    extracted = Secret(hmac.digest(cluster, secret, hashlib.sha256))
    return Secret(hmac.digest(extracted, b"aiograd handshake 1\x01", hashlib.sha256))


class HelloKeys(NamedTuple):
    """The keys of the hellos under one secret: they are used before the cluster is known."""

    cipher: Secret
    mac: Secret

    @classmethod
    def derive(cls, secret: bytes) -> HelloKeys:
        """Derive them: HKDF-SHA256 with a label for each."""
        root = Secret(hmac.digest(b"aiograd hello", secret, hashlib.sha256))
        cipher, mac = (hmac.digest(root, label, hashlib.sha256) for label in (b"c\x01", b"m\x01"))
        return cls(Secret(cipher), Secret(mac))

    def seal(self, head: bytes, nonce: bytes, context: bytes, body: bytes) -> bytes:
        """Return a hello: `body` encrypted, and a tag over everything and the context."""
        hidden = self._hide(nonce, context, body)
        return _HELLO.pack(head, nonce, hidden, self._tag(head + nonce + hidden, context))

    def open(self, hello: bytes, context: bytes) -> bytes | None:
        """Return the body of a hello; None if it was not sealed with these keys and context."""
        head, nonce, hidden, tag = _HELLO.unpack(hello)
        # In constant time: else the time of a refusal would tell how many bytes were right.
        if not hmac.compare_digest(tag, self._tag(head + nonce + hidden, context)):
            return None
        return self._hide(nonce, context, hidden)

    def _hide(self, nonce: bytes, context: bytes, body: bytes) -> bytes:
        # A stream that no other hello has: nonces are random, and the context has the role.
        stream = hashlib.shake_256(self.cipher + nonce + context).digest(len(body))
        mixed = int.from_bytes(body, "little") ^ int.from_bytes(stream, "little")
        return mixed.to_bytes(len(body), "little")

    def _tag(self, text: bytes, context: bytes) -> bytes:
        return hmac.digest(self.mac, text + context, hashlib.sha256)[:_TAG]


class Handshake:
    """One side of the handshake. `needed` is the size of the next message, 0 when it is over.

    `secret`: the one of all workers, or a keyring. A client says by `choice` which secret of it the
    server has to know. `token` makes random bytes.
    """

    proven: bool
    needed: int
    received: int
    status: int
    latest: int

    def __init__(
        self,
        us: Identity,
        secret: bytes | Keyring,
        nonce: bytes,
        *,
        client: bool,
        restricts: Callable[[str], bool] = lambda name: False,
        offer: Callable[[Identity], Offer] | None = None,
        choice: Secret | None = None,
        token: Callable[[int], bytes] = os.urandom,
    ) -> None:
        self._us = us
        self._restricts = restricts  # whether we speak plain data only with a worker of this name
        self._keyring = keyring = secret if isinstance(secret, Keyring) else Keyring(secret)
        self._client = client
        self._nonce, self._token = nonce, token
        # Which secret both sides have to know; the server's is the one that opens the hello.
        self._secret = choice if choice is not None else keyring.candidates()[0]
        self._key = Secret()  # of the proofs; known when both hellos are
        self._claims: dict[bytes, bytes] = {}  # what both sides proved, by role
        self.sealed: bool = False  # one side wants a tag on what follows; known at the end
        # The best way to do so that both sides have; known at the end.
        self.protection: Protection = Protection.HASHES
        self._binding = b""  # what ties the proof to the channel below: the TLS certificates
        self._ours = b""
        self._theirs = b""
        self._version = us.version  # of the other side
        self._expects = "hello"
        self.needed = HELLO_SIZE
        self.expected = ""  # the name that the other side should have, for error texts
        self.peer: Identity | None = None  # only believable once `proven`
        self.refused: AuthError | None = None  # why, by a server that answers nevertheless
        self.proven = False
        self._make_offer = offer  # asked once the client knows its peer
        self.offer: Offer = Offer()  # what the client wants
        self.status = 0  # what the server decided; known on both sides at the end
        self.received = 0  # bytes of the session that the other side has
        self.latest = 0  # the number of the server's latest dial; known to the client at the end

    def bind(self, binding: bytes) -> None:
        """Tie the proofs to the channel below. Call it before the first message."""
        self._binding = binding

    def seal(self, protection: Protection) -> None:
        """Want a tag on everything that follows. Call it before the first message.

        `protection`: the best that this side has. The best that both have is used.
        """
        self.sealed, self.protection = True, protection

    def session_keys(self) -> tuple[bytes, bytes]:
        """Return the keys of this connection for what we send, and for what the other side sends.

        They follow from the secret and everything that both sides have said, nonces included: no
        other connection has them, and nobody who only passed these messages on.
        """
        assert self.proven
        claims = self._claims[b"client"] + self._claims[b"server"]
        ours, theirs = (
            Secret(self._mac(b"frames of the " + role, claims)) for role in (b"client", b"server")
        )
        return (ours, theirs) if self._client else (theirs, ours)

    def start(self) -> bytes:
        """Return what to send before anything was received."""
        if not self._client:
            return b""
        self._ours = self._hello(HelloKeys.derive(self._secret), b"client" + self._binding)
        return self._ours

    def is_foreign(self, beginning: bytes) -> bool:
        """Whether this is no beginning of a hello of our version: nothing more is waited for."""
        ours = self._prefix()
        return self._expects == "hello" and not ours.startswith(beginning[: len(ours)])

    def receive(self, message: bytes) -> bytes:
        """Take one whole message; return what to send. AuthError if the proof is wrong."""
        if self._expects == "hello":
            return self._receive_hello(message)
        if self._expects == "proof":
            return self._receive_proof(message)
        raise ProtocolError("the handshake is over")

    def admit(self, status: int, received: int = 0, latest: int = 0) -> bytes:
        """Return PROOF_S, the server's answer to an authenticated client."""
        # Separate from `receive`, because the link decides: whether there is a session to go on
        # with is known there, and only for a proven name.
        assert self.proven
        assert not self._client
        self.status = status
        return self._proof(b"server", status, latest, received, 0)

    def _receive_hello(self, message: bytes) -> bytes:
        self._theirs = message
        magic, self._version = _PREFIX.unpack_from(message)
        if magic != _MAGIC:
            raise ProtocolError("the other side does not speak aiograd")
        self._expects, self.needed = "proof", PROOF_SIZE
        if self.mismatch is not None:
            # The server still names its version, so that both sides can tell the two.
            self._expects, self.needed = "nothing", 0
            return b"" if self._client else self._prefix().ljust(HELLO_SIZE, b"\0")
        if self._client:
            return self._receive_hello_of_server(message)
        return self._receive_hello_of_client(message)

    def _receive_hello_of_client(self, message: bytes) -> bytes:
        for secret, keys in self._keyring.derived(HelloKeys.derive):
            body = keys.open(message, b"client" + self._binding)
            if body is not None:
                self._secret = secret
                self._meet(Identity.unpack(body))
                break
        else:
            self.refused = self.refusal("the other side does not know a secret of this worker")
        if self.refused is not None:
            # The same for all who are refused: it does not matter whom they claimed to be.
            keys = HelloKeys.derive(self._token(32))
            self._expects, self.needed = "nothing", 0
        self._ours = self._hello(keys, b"server" + message + self._binding)
        return self._ours

    def _receive_hello_of_server(self, message: bytes) -> bytes:
        keys = HelloKeys.derive(self._secret)
        body = keys.open(message, b"server" + self._ours + self._binding)
        if body is None:
            raise self.refusal("the other side does not know the secret they would share")
        self._meet(Identity.unpack(body))
        if self.refused is not None:
            raise self.refused
        assert self.peer is not None
        if self._make_offer is not None:
            self.offer = self._make_offer(self.peer)
        return self._proof(b"client", *self.offer)

    def _meet(self, peer: Identity) -> None:
        """Take in who the other side claims to be, and refuse one that cannot be that."""
        self.peer = peer
        known = self._keyring.secret_for(peer.name)
        if known is None or not hmac.compare_digest(known, self._secret):
            self.refused = self.refusal("the other side does not know the secret of its name")
            return
        ours, theirs = self._us.cluster, peer.cluster
        if NO_CLUSTER not in (ours, theirs) and ours != theirs:
            self.refused = self.refusal("the other side belongs to another cluster")
        self._key = derive_key(self._secret, theirs if ours == NO_CLUSTER else ours)

    def _prefix(self) -> bytes:
        return _PREFIX.pack(_MAGIC, self._us.version)

    def _hello(self, keys: HelloKeys, context: bytes) -> bytes:
        return keys.seal(self._prefix(), self._nonce, context, self._us.pack())

    @property
    def mismatch(self) -> ProtocolError | None:
        """The error if both sides speak different versions."""
        if self._version == self._us.version:
            return None
        text = f"peer speaks {self._version}, we speak {self._us.version}"
        return ProtocolError(text, self.expected)

    def refusal(self, why: str) -> AuthError:
        """Return the error for a refused connection: both names, as far as known, and why."""
        name = self.peer.name if self.peer is not None else self.expected
        if not name and self._client:
            name = self._keyring.owner_of(self._secret)
        if not name:
            return AuthError(f"{self._us.name} cannot connect: {why}")
        return AuthError(f"{self._us.name} and {name} cannot connect: {why}", name)

    def _receive_proof(self, message: bytes) -> bytes:
        claim, mac = _PROOF.unpack(message)
        label = b"server" if self._client else b"client"
        # In constant time: else the time of a refusal would tell how many bytes were right.
        if not hmac.compare_digest(mac, self._mac(label, claim)):
            raise self.refusal("the other side does not know the secret they would share")
        self.proven, self._expects, self.needed = True, "nothing", 0
        word, number, self.received, session = _CLAIM.unpack(claim)
        assert self.peer is not None
        self.peer = replace(self.peer, restricted=bool(word & _RESTRICTED))
        self._claims[label] = claim
        # Either side may want it: only the one that listens knows its folder for certain.
        self.sealed = self.sealed or bool(word & _SEALED)
        theirs = (word & _PROTECTION) >> _SHIFT
        self.protection = Protection(min(self.protection, theirs))
        word &= ~(_RESTRICTED | _SEALED | _PROTECTION)
        # One layout for both directions: a server's answer has its latest dial where a client's
        # offer has its number.
        if self._client:
            self.status, self.latest = word, number
        else:
            self.offer = Offer(word, number, self.received, session)
        return b""

    def _proof(self, label: bytes, word: int, number: int, received: int, session: int) -> bytes:
        assert self.peer is not None
        if self._restricts(self.peer.name):
            word |= _RESTRICTED
        if self.sealed:
            word |= _SEALED
        word |= self.protection << _SHIFT
        claim = self._claims[label] = _CLAIM.pack(word, number, received, session)
        return _PROOF.pack(claim, self._mac(label, claim))

    def _mac(self, label: bytes, claim: bytes) -> bytes:
        # Client's hello first on both sides. All parts have fixed sizes (a binding is empty or two
        # digests at the end), so no two different handshakes give the same text.
        first, second = (self._ours, self._theirs) if self._client else (self._theirs, self._ours)
        text = b"".join((label, claim, first, second, self._binding))
        return hmac.digest(self._key, text, hashlib.sha256)
