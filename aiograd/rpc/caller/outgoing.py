"""How a call leaves: the ways from a function and its arguments to the caller's side of a link.

    Agent.call ─┬─▶ a row with others      small and plain, no baggage     (`Caller.begin_batched`)
                ├─▶ `begin_quickly`        plain arguments, arrays, tensors
                └─▶ `begin_call`           whatever else may travel
    `open_stream` ─▶ `begin_call`

Who is called, until when and with what baggage is known before. What cannot leave raises here, in
the caller's own thread, and whatever travellers did for it is undone.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Mapping
from pickle import PickleBuffer
from typing import TYPE_CHECKING, Any

from aiograd.errors import SerializationError
from aiograd.rpc.callee.functions import Shipment
from aiograd.rpc.caller.streams import Stream
from aiograd.rpc.envelope import check_size, keep_in_front, labelled, pack
from aiograd.rpc.extension import Departure, run_undo
from aiograd.rpc.future import Future, prepare
from aiograd.rpc.link.link import Link
from aiograd.rpc.observe.tracing import trace
from aiograd.rpc.scope import DEADLINE
from aiograd.wire.codec import Payload
from aiograd.wire.fastcodec import encode_call
from aiograd.wire.framing import SMALL
from aiograd.wire.messages import CALL, KEEP, OP, STREAM

if TYPE_CHECKING:
    from aiograd.rpc.agent import Agent


def begin_quickly(
    agent: Agent,
    link: Link,
    future: Future[Any],
    flags: int,
    seconds: float,
    deadline: float,
    shipment: Shipment,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    carried: Any,
    keep: Any,
) -> bool:
    """A call with plain arguments, arrays and tensors alone; False if there is more to it."""
    departure = None if carried is None else Departure(link.peer, future._kind, carried)
    lent: list[PickleBuffer] = []
    data = encode_call(args, kwargs, agent.travellers.boxes, departure, lent)
    if data is None or (lent and keep is not None):
        return False
    if departure is not None:
        more, data = labelled(agent, data, departure)
        flags |= more
        future._undo = departure.undo
    if keep is not None:
        data = keep_in_front(keep, data)
        flags |= KEEP
    if lent or len(data) > SMALL:
        payload = Payload(data, lent)
        try:
            check_size(payload, "call", link.max_message)
        except SerializationError:
            run_undo(future._undo)
            raise
        hand_over(agent, link, future, CALL, flags, deadline, shipment, payload, False)
        return True
    begin = link.caller.begin_small
    if threading.get_ident() == agent.thread:
        begin(future, CALL, flags, seconds, deadline, shipment, data)
    else:
        agent.from_thread(begin, future, CALL, flags, seconds, deadline, shipment, data)
    return True


def begin_call(
    agent: Agent,
    link: Link,
    future: Future[Any],
    func: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    deadline: float,
    shipment: Shipment,
    carried: Any,
    keep: Any,
    flags: int,
) -> None:
    """Any call: travellers, baggage, a function that goes inside, a result that stays."""
    embedded = shipment.data is None
    departure = Departure(link.peer, future._kind, carried)
    value = (func, args, kwargs) if embedded else (args, kwargs)
    extra = None if keep is None else {"keep": keep}
    if future._trace is not None:
        extra = future._trace.ask(extra)
    more, payload = pack(agent, value, departure, "call", link.max_message, extra)
    future._undo = departure.undo
    flags |= more | (shipment.flags & OP)
    hand_over(agent, link, future, CALL, flags, deadline, shipment, payload, embedded)


def hand_over(agent: Agent, link: Link, future: Future[Any], *rest: Any) -> None:
    """Begin a call or request on the loop, from wherever this is."""
    if threading.get_ident() == agent.thread:
        link.caller.begin(future, *rest)
    else:
        agent.from_thread(link.caller.begin, future, *rest)


def open_stream(
    agent: Agent,
    to: Any,
    func: Any,
    args: Any = (),
    kwargs: dict[str, Any] | None = None,
    *,
    timeout: float | None = None,
) -> Stream:
    """Call a generator function; iterate over what comes. On the loop only.

    `timeout` is for the whole stream; without one, each item may take `Options.timeout`."""
    agent.here()
    link = agent.link(to)
    ship = agent.shipper.named if link.restricted else agent.shipper.of
    shipment = ship(func, link.peer)
    patience = None
    if timeout is None and DEADLINE.get() == math.inf:
        patience, timeout = agent.options.timeout, math.inf
    seconds, deadline = agent.deadline(timeout)
    carried = agent.baggage.current() if agent.baggage is not None else None
    future = prepare(Future(loop=agent.loop), shipment.name)
    future._seconds = seconds
    future._trace = trace(agent, link.peer, "stream")
    stream = Stream(future, link, None if patience == math.inf else patience)
    args = as_tuple(args)
    begin_call(agent, link, future, func, args, kwargs, deadline, shipment, carried, None, STREAM)
    return stream


def as_tuple(args: Any) -> tuple[Any, ...]:
    """Arguments by position, as a user gave them."""
    if not isinstance(args, list | tuple):
        raise TypeError(f"args is a tuple, not {type(args).__name__}")
    return tuple(args)


def as_dict(kwargs: Any) -> dict[str, Any]:
    """Arguments by name, as a user gave them."""
    if not isinstance(kwargs, Mapping):
        raise TypeError(f"kwargs is a dict, not {type(kwargs).__name__}")
    return dict(kwargs)
