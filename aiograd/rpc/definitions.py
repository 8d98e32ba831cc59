"""What a peer means when it defines a function by its bytes or its name."""

from __future__ import annotations

import contextlib
import importlib
import pickle
from typing import TYPE_CHECKING, Final

from aiograd.errors import NotAllowed, ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.exposure import find_exposed, is_exposed
from aiograd.rpc.functions import BY_VALUE, EXPOSED, SERVICE, Target, function_name
from aiograd.wire.messages import OP

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent

_NAME: Final = 1024  # bytes of a function's name; thousands of them are kept


def resolve(agent: Agent, flags: int, data: bytes, peer: PeerInfo) -> Target:
    """What a peer's DEFINE means here; a pickle is opened only for peers that are trusted."""
    trusts = agent.trusts(peer)
    if flags & BY_VALUE:
        line, _, pickled = data.partition(b"\n")
        data, flags = (pickled, 0) if trusts else (line, EXPOSED)
    if flags & (SERVICE | OP | EXPOSED):
        name = _name(data, peer)
        if flags & SERVICE:
            return Target(None, name, name)
        if flags & OP:
            return _resolve_op(agent, name, trusts)
        return _resolve_exposed(agent, name, trusts)
    if not trusts:
        return agent.refused
    try:
        func = pickle.loads(data)
    except Exception as error:
        error.add_note(
            f"the function could not be found on {agent.name}: it travels by reference, "
            "so its module must be importable there and contain it"
        )
        return Target.broken("a function", error)
    return Target(func, function_name(func))


def _name(data: bytes, peer: PeerInfo) -> str:
    if len(data) > _NAME:
        raise ProtocolError(f"a function's name of {len(data)} bytes", peer.name)
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise ProtocolError("a function's name is not UTF-8", peer.name) from None


def _resolve_op(agent: Agent, name: str, trusts: bool) -> Target:
    op = agent.ops.get(name)
    if op is None or not (trusts or is_exposed(op)):
        why = f"there is no op {name[:80]!r} here" if op is None else f"{name} is not exposed here"
        return Target.broken(name, NotAllowed(why, agent.name))
    return Target(op, name, "op")


def _resolve_exposed(agent: Agent, name: str, trusts: bool) -> Target:
    if trusts:
        with contextlib.suppress(ImportError):
            importlib.import_module(name.partition(":")[0])
    func = find_exposed(name)
    if func is None:
        return Target.broken(name, NotAllowed(f"{name} is not exposed here", agent.name))
    return Target(func, function_name(func))
