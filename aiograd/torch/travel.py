"""How torch tensors travel: as their memory, and behind one node per message where a graph crosses.

A tensor that needs grad, sent in a context, leaves a port on the tape and arrives as an output of
a `Received` node. Outside of a context it arrives as an independent leaf. A `Parameter` is one
where it arrives, too, unless a graph crosses: then it is a tensor of that graph, and its gradient
comes back.
"""

from __future__ import annotations

import sys
from functools import partial
from types import FrameType
from typing import Any, Final

import torch
from torch.utils.hooks import unserializable_hook

from aiograd._frames import warn
from aiograd.autograd.backward import cut_text
from aiograd.dist.boundary import Crossing, crossed
from aiograd.dist.nodes import RecvNode
from aiograd.dist.travellers import EDGE, LEAF, LOOPS, NO_GRAD, ON_EDGE, join_edge
from aiograd.errors import GraphCutWarning, ProtocolError, SerializationError
from aiograd.rpc.extension import BOX, FINISH, Arrival, Departure
from aiograd.rpc.future import CallInfo
from aiograd.torch.memory import DTYPES, NAMES, put_together, take_apart
from aiograd.torch.nodes import Port, receive
from aiograd.wire.safecodec import GROWN

_Parameter: Final = torch.nn.Parameter
_PENDING: Final = "torch"  # the key of a message's tensors that wait for their node


class TensorTraveller:
    """Takes torch tensors from worker to worker, in two forms under one set of rules.

    The general form (`depart`, `arrive`) is for any tensor, and for restricted peers: it checks
    what arrives. The array form (`open`, `close`, `finish`) is the fast path of `wire.fastcodec`,
    for contiguous tensors of the dtypes that numpy has: with 256 calls of 3x3 tensors under way, a
    call takes 6 instead of 17 µs of the caller (`benchmarks/peers`, rpc.builtin_add3x3.tput.256 of
    aiograd-torch). `rpc.envelope.Route` chooses it, for peers that have torch loaded.
    """

    tag = "torch.tensor"

    def __init__(self, library: Any) -> None:
        self._library = library
        self._box = (torch.Tensor, self)

    def depart(self, tensor: torch.Tensor, departure: Departure) -> Any:
        """Take a tensor apart: note, class, dtype if a hook changed it, attributes, memory."""
        kind = tensor.__class__
        if kind is not torch.Tensor and kind is not _Parameter:
            raise SerializationError(
                f"a {kind.__module__}.{kind.__qualname__}",
                "subclasses of torch.Tensor do not travel; send a plain tensor made from it",
            )
        plain = departure.plain if departure is not None else False
        if departure is not None:
            departure.scratch[BOX] = self._box
        note, dtype, value = NO_GRAD, None, tensor
        if tensor.requires_grad:
            note = LEAF
            carried = None if departure is None else departure.carried
            if carried is not None:
                note = self._join(tensor, departure)
                if carried.hooks:
                    crossing = Crossing(carried.id, departure.to.name, "forward")
                    value = crossed(carried.hooks, crossing, tensor.detach())
                    dtype = None if value.dtype is tensor.dtype else NAMES[tensor.dtype]
        # Attributes of a restricted peer's tensor could be anything, and it gets none of ours.
        state = None if plain else tensor.__dict__ or None
        return note, kind is _Parameter, dtype, state, take_apart(value, plain)

    def _join(self, tensor: torch.Tensor, departure: Departure) -> int:
        """Let a tensor join the edge of its message; its note."""
        carried, port = departure.carried, Port(tensor)
        note = join_edge(port, departure)
        if port.closes_loop(carried.id, departure.to.incarnation):
            scratch = departure.scratch
            scratch[LOOPS] = scratch.get(LOOPS, 0) | 1 << (note - ON_EDGE >> 1)
            note += 1
        carried.foreign = self._library
        return note

    def open(self, tensor: torch.Tensor, departure: Departure | None) -> tuple[Any, int] | None:
        """Return a tensor's array and note; None if it needs the general form."""
        if tensor.__dict__:  # attributes go with it
            return None
        try:
            if not tensor.requires_grad:
                return tensor.numpy(), NO_GRAD
            array = tensor.detach().numpy()
        except (RuntimeError, TypeError):  # no memory here, no dtype of numpy's, sparse, conjugated
            return None
        if departure is None or departure.carried is None:
            return array, LEAF
        # A hook may change the dtype, which only the general form can say. Asked before the tensor
        # joins the edge, because the general form lets it join again.
        if departure.carried.hooks:
            return None
        return array, self._join(tensor, departure)

    def close(self, array: Any, note: int, arrival: Arrival | CallInfo | None) -> torch.Tensor:
        """Return the tensor that `open` took apart. Only trusted peers send this form."""
        # torch's kernels rely on aligned elements.
        tensor: torch.Tensor = torch.from_numpy(array if array.flags.aligned else array.copy())
        if note == NO_GRAD:
            return tensor
        end = None if note < ON_EDGE or arrival is None else arrival.scratch.get(EDGE)
        if end is None:
            tensor.requires_grad_()
            if arrival is not None:
                _warn_when_cut(tensor, arrival.origin())
            return tensor
        _behind(arrival, end, note - ON_EDGE >> 1, tensor, bool(note & 1))  # type: ignore[arg-type]
        return tensor

    def finish(self, arrival: Any) -> None:
        """Put the tensors of a message behind their node."""
        if arrival is not None:
            behind = arrival.scratch.get(FINISH)
            if behind is not None:
                behind()

    def arrive(self, data: Any, arrival: Arrival) -> torch.Tensor:
        """Put a tensor together; ProtocolError if a peer sent something else."""
        note, is_parameter, dtype, state, memory = data
        restricted = arrival is not None and arrival.restricted
        if arrival is not None:
            arrival.scratch[BOX] = self._box
        if restricted:
            _check(note, is_parameter, dtype, state, memory)
        tensor = put_together(memory, restricted)
        if dtype is not None:  # a boundary hook sent it in another dtype
            if restricted and tensor.is_complex() != DTYPES[dtype].is_complex:
                raise ProtocolError(f"a {tensor.dtype} tensor cannot become {dtype}")
            tensor = tensor.to(DTYPES[dtype])
        if restricted and memory[0] == "dense":
            # Gaps between elements, and a wider dtype, count for the partner, too.
            grown = tensor.untyped_storage().nbytes() - len(memory[4])
            arrival.scratch[GROWN] = arrival.scratch.get(GROWN, 0) + max(grown, 0)
        if note != NO_GRAD and not (tensor.is_floating_point() or tensor.is_complex()):
            raise ProtocolError(f"a {tensor.dtype} tensor cannot require grad")
        end: RecvNode | None = None if arrival is None else arrival.scratch.get(EDGE)
        # No end if the context was released meanwhile.
        if note >= ON_EDGE and end is not None:
            place = note - ON_EDGE >> 1
            if place >= end.outputs:
                raise ProtocolError(
                    f"tensor {place} of an edge with {end.outputs}", arrival.sender.name
                )
            _behind(arrival, end, place, tensor, bool(note & 1))
        elif is_parameter:
            tensor = _Parameter(tensor, requires_grad=note != NO_GRAD)
        elif note != NO_GRAD:
            tensor.requires_grad_()
            if arrival is not None:
                _warn_when_cut(tensor, arrival.origin())
        if state is not None:
            tensor.__dict__.update(state)
        return tensor


def _warn_when_cut(tensor: torch.Tensor, origin: object | None) -> None:
    """Warn when a gradient ends in a result that came without its graph; arguments have no origin.

    Of an argument, the gradient is computed right where it is wanted.
    """
    if origin is None:
        return

    def told(gradient: torch.Tensor) -> None:
        # A pass of a context shows the gradient of this very leaf to who asks for it.
        frame: FrameType | None = sys._getframe(1)
        while frame is not None and frame.f_globals.get("__name__") != "aiograd.torch.stages":
            frame = frame.f_back
        if frame is None:
            warn(cut_text(origin, "result.detach().requires_grad_()"), GraphCutWarning)

    tensor.register_hook(unserializable_hook(told))


def _behind(
    arrival: Arrival, end: RecvNode, place: int, tensor: torch.Tensor, closes_loop: bool
) -> None:
    """Let a tensor get its node with all others of its message, when all of them are decoded."""
    # Both ends must agree which tensors close loops: the receiver learns it here.
    if closes_loop:
        end.loops |= 1 << place
    pending = arrival.scratch.get(_PENDING)
    if pending is None:
        places: list[int] = []
        tensors: list[torch.Tensor] = []
        pending = arrival.scratch[_PENDING] = (places, tensors)
        arrival.scratch[FINISH] = partial(receive, end, places, tensors)
    pending[0].append(place)
    pending[1].append(tensor)


def _check(note: Any, is_parameter: Any, dtype: Any, state: Any, memory: Any) -> None:
    fits = (
        type(note) is int
        and note >= 0
        and type(is_parameter) is bool
        and (dtype is None or (type(dtype) is str and dtype in DTYPES))
        and state is None
        and type(memory) is tuple
        and len(memory) > 0
    )
    if not fits:
        raise ProtocolError("a torch tensor of another form")
    if dtype is not None and not (DTYPES[dtype].is_floating_point or DTYPES[dtype].is_complex):
        raise ProtocolError(f"a tensor cannot become {dtype}")
