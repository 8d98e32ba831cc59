"""The forms of membership messages: what is checked before anything of a message is used.

What follows from a roster reaches directory, links and collectives of every member. So everything
in it is checked before anything is changed, from any sender.
"""

from __future__ import annotations

from typing import Any, Final

from aiograd.cluster.membership.roster import RANKS, Update
from aiograd.errors import ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.wire.names import is_name

__all__ = ["check_electorate", "check_losses", "check_peer", "check_roster", "check_update"]

_ADDRESSES: Final = 16  # of one worker
_ADDRESS: Final = 1024  # characters
_LABELS: Final = 64  # of one worker


def check_peer(peer: Any, service: str, sender: PeerInfo) -> None:
    """ProtocolError unless this describes a worker as the library would."""
    fits = (
        type(peer) is PeerInfo
        and type(peer.name) is str
        and is_name(peer.name)
        and type(peer.rank) is int
        and 0 <= peer.rank < RANKS
        and is_incarnation(peer.incarnation)
        and _are_texts(peer.addresses, _ADDRESSES)
        and type(peer.restricted) is bool
        and _are_texts(peer.exceptions, RANKS)
        and _are_texts((peer.host, peer.locality), 2)
        and _are_texts(peer.labels, _LABELS)
        and all("=" in label for label in peer.labels)
    )
    if not fits:
        raise ProtocolError(f"{service}: malformed description of a worker", sender.name)


def is_incarnation(value: Any) -> bool:
    """Whether this has the form of an incarnation."""
    return type(value) is bytes and len(value) == 16


def check_roster(version: Any, peers: Any, service: str, sender: PeerInfo) -> None:
    """ProtocolError unless these are a version and workers."""
    if type(version) is not int or type(peers) not in (tuple, list):
        raise ProtocolError(f"{service}: malformed roster", sender.name)
    for peer in peers:
        check_peer(peer, service, sender)


def check_electorate(members: Any, service: str, sender: PeerInfo) -> None:
    """ProtocolError unless these are incarnations."""
    if type(members) not in (tuple, list) or not all(map(is_incarnation, members)):
        raise ProtocolError(f"{service}: malformed electorate", sender.name)


def check_losses(losses: Any, service: str, sender: PeerInfo) -> None:
    """ProtocolError unless these are workers with the reasons why they were lost."""
    if type(losses) not in (tuple, list):
        raise ProtocolError(f"{service}: malformed losses", sender.name)
    for entry in losses:
        if not (type(entry) is tuple and len(entry) == 2 and type(entry[1]) is str):
            raise ProtocolError(f"{service}: malformed loss", sender.name)
        check_peer(entry[0], service, sender)


def check_update(update: Any, sender: PeerInfo) -> None:
    """ProtocolError unless this is a change of the roster."""
    service = "cluster.change"
    if type(update) is not Update:
        raise ProtocolError(f"{service}: malformed update", sender.name)
    check_roster(update.version, update.joined, service, sender)
    check_roster(update.version, update.left, service, sender)
    check_losses(update.lost, service, sender)


def _are_texts(value: Any, most: int) -> bool:
    return (
        type(value) is tuple
        and len(value) <= most
        and all(type(text) is str and len(text) <= _ADDRESS for text in value)
    )
