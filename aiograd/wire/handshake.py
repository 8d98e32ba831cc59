"""The handshake: two workers prove to each other that they know the secret they share.

    client                                    server
    HELLO_C  version, nonce, identity    ──▶
                                         ◀──  HELLO_S  version, nonce, identity
    PROOF_C  terms, offer, HMAC          ──▶
                                         ◀──  PROOF_S  terms, status, latest dial, bytes
                                                       received, HMAC

Fixed layouts, no pickle, no JSON: no byte of an unauthenticated peer reaches a deserializer. Both
nonces stop replay, the role labels stop reflection, and the proofs cover both hellos (version,
names, limits) and what comes with them, so that nobody can change it on the way. The terms are
whether this side speaks plain data only with the other one, whose name it knows by then, and
whether it wants a tag on what follows, and which one (`session_keys`); `session` says what an offer
is, and where a session goes on. Where each name has a secret of its own, the proofs are made with
that of the name in the hello. A refusal is a closed connection and nothing else.

A pure state machine: messages in, messages out. Timeouts and sockets: `rpc.link.handshaking`.
"""

from __future__ import annotations

import hashlib
import hmac
import struct
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Final

from aiograd.errors import AuthError, ProtocolError
from aiograd.wire.names import is_name
from aiograd.wire.secrets import Secret
from aiograd.wire.session import Offer

# Of everything on the wire; raised with every change of a layout or a meaning. Workers of different
# versions refuse each other, so no message needs a version of its own.
VERSION: Final = 9
_MAGIC: Final = b"aiograd\0"
_HELLO: Final = struct.Struct("<8sH32s16sB127si16sQI")
# The offer; or status, number of the server's latest dial, bytes received and 0.
_CLAIM: Final = struct.Struct("<BIQI")
_PROOF: Final = struct.Struct(f"<{_CLAIM.size}s32s")
HELLO_SIZE: Final = _HELLO.size
PROOF_SIZE: Final = _PROOF.size
# The terms: bits of the claim's first byte, so that the proof covers them without a field more.
_RESTRICTED: Final = 0x80
_SEALED: Final = 0x40
_AEAD: Final = 0x20


@dataclass(frozen=True, slots=True)
class Identity:
    """One side of a handshake: its name, rank, incarnation, cluster and limits."""

    name: str
    rank: int
    incarnation: bytes
    cluster: bytes = bytes(16)
    max_message: int = 1 << 30
    max_inflight: int = 1024
    version: int = VERSION
    restricted: bool = False  # it speaks plain data only with us; known when it is proven

    def hello(self, nonce: bytes) -> bytes:
        """Return the HELLO message."""
        name = self.name.encode()
        return _HELLO.pack(
            _MAGIC,
            self.version,
            nonce,
            self.cluster,
            len(name),
            name,
            self.rank,
            self.incarnation,
            self.max_message,
            self.max_inflight,
        )

    @classmethod
    def from_hello(cls, data: bytes) -> Identity:
        """Return the identity that a HELLO claims; ProtocolError if it is malformed."""
        magic, version, _, cluster, length, name, rank, incarnation, message, inflight = (
            _HELLO.unpack(data)
        )
        if magic != _MAGIC or length > len(name):
            raise ProtocolError("the other side does not speak aiograd")
        try:
            text = name[:length].decode()
        except UnicodeDecodeError:
            raise ProtocolError("the other side has no readable name") from None
        # Checked before anything is proven, because it goes into logs by then.
        if not is_name(text):
            raise ProtocolError(f"the other side has a name that no worker can have: {text!a}")
        return cls(text, rank, incarnation, cluster, message, inflight, version)


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


class Handshake:
    """One side of the handshake. `needed` is the size of the next message, 0 when it is over."""

    proven: bool
    needed: int
    received: int
    status: int
    latest: int

    def __init__(
        self,
        us: Identity,
        secret: bytes | Callable[[str], bytes],
        nonce: bytes,
        *,
        client: bool,
        restricts: Callable[[str], bool] = lambda name: False,
        offer: Callable[[Identity], Offer] | None = None,
    ) -> None:
        self._us = us
        self._restricts = restricts  # whether we speak plain data only with a worker of this name
        # Which secret we share with whom; asked once, for the name that the other side claims.
        self._secret_for = secret if callable(secret) else lambda name: secret
        self._key = Secret()
        self._client = client
        self._claims: dict[bytes, bytes] = {}  # what both sides proved, by role
        self.sealed = False  # one side wants a tag on what follows; known at the end
        self.aead = False  # both sides have AES-GCM for that (`wire.records`); known at the end
        self._binding = b""  # what ties the proof to the channel below: the TLS certificates
        self._ours = us.hello(nonce)
        self._theirs = b""
        self._expects = "hello"
        self.needed = HELLO_SIZE
        self.peer: Identity | None = None  # only believable once `proven`
        self.proven = False
        self._make_offer = offer  # asked once the client knows its peer
        self.offer = Offer()  # what the client wants
        self.status = 0  # what the server decided; known on both sides at the end
        self.received = 0  # bytes of the session that the other side has
        self.latest = 0  # the number of the server's latest dial; known to the client at the end

    def bind(self, binding: bytes) -> None:
        """Tie the proofs to the channel below. Call it before the first message."""
        self._binding = binding

    def seal(self, *, aead: bool) -> None:
        """Want a tag on everything that follows. Call it before the first message.

        `aead`: whether this side has AES-GCM. It is used if both have it.
        """
        self.sealed, self.aead = True, aead

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
        return self._ours if self._client else b""

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
        # Claimed, not proven: until `proven` it is good for choosing a secret and for error texts.
        self.peer = peer = Identity.from_hello(message)
        self._expects, self.needed = "proof", PROOF_SIZE
        if peer.version != self._us.version:
            # The server still says who it is, so that both sides can name the two versions.
            self._expects, self.needed = "nothing", 0
            return b"" if self._client else self._ours
        self._key = derive_key(self._secret_for(peer.name), self._us.cluster)
        if self._client:
            if self._make_offer is not None:
                self.offer = self._make_offer(peer)
            return self._proof(b"client", *self.offer)
        return self._ours

    @property
    def mismatch(self) -> ProtocolError | None:
        """The error if both sides speak different versions."""
        if self.peer is None or self.peer.version == self._us.version:
            return None
        return ProtocolError(
            f"peer speaks {self.peer.version}, we speak {self._us.version}", self.peer.name
        )

    def refusal(self, why: str) -> AuthError:
        """Return the error for a refused connection: both names, and why."""
        if self.peer is None:
            return AuthError(f"{self._us.name} cannot connect: {why}")
        name = self.peer.name
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
        self.aead = self.aead and bool(word & _AEAD)
        word &= ~(_RESTRICTED | _SEALED | _AEAD)
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
        if self.aead:
            word |= _AEAD
        claim = self._claims[label] = _CLAIM.pack(word, number, received, session)
        return _PROOF.pack(claim, self._mac(label, claim))

    def _mac(self, label: bytes, claim: bytes) -> bytes:
        # Client's hello first on both sides. All parts have fixed sizes (a binding is empty or two
        # digests at the end), so no two different handshakes give the same text.
        first, second = (self._ours, self._theirs) if self._client else (self._theirs, self._ours)
        text = b"".join((label, claim, first, second, self._binding))
        return hmac.digest(self._key, text, hashlib.sha256)
