"""Runs of torch's C++ engine over a part of a graph; the one user of torch's private calls.

plain      from some edges to captured ones, all of which are ends of the graph
bordered   from some edges up to *exits*, nodes behind which the graph goes on
leaves     the nodes of leaves alone, with their hooks

The engine cannot be told to stop at an exit. A capture there runs the tensor hooks of the exit on a
part of its gradient; if the exit leads to another one (a shared weight, a residual connection), the
exit itself runs on that part. So a bordered run has one root more, the *sentinel*, a node that
raises. The engine takes ready nodes by their sequence number, the highest first:

    nodes of the part  2 and more   ─▶   sentinel  1   ─▶   exits  0

When the sentinel's turn comes, every node of the part has run, and no exit has. What the part gave
to its exits was taken by post hooks on the nodes that made it. `tests/torch/test_engine.py` asserts
the order and fails if a new torch changes it.
"""

from __future__ import annotations

import contextlib
import sys
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, Final, NamedTuple

import torch
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torch.autograd.variable import Variable

from aiograd.errors import GradError
from aiograd.torch.nodes import ANCHOR, Place

try:
    _run: Final[Callable[..., Sequence[Any]]] = Variable._execution_engine.run_backward
    _storage_holders: Final[Callable[[int], int]] = torch._C._storage_Use_Count
    _set_number: Final = torch._C._FunctionBase._set_sequence_nr
except AttributeError as error:
    raise ImportError(
        f"torch {torch.__version__} does not have what aiograd needs of its engine ({error}); "
        "it is known to work with torch 2.13"
    ) from error
# Sequence numbers belong to the graph, not to a run: two bordered runs must not share it.
_numbers: Final = threading.RLock()
_EXIT, _SENTINEL, _LOWEST = 0, 1, 2


class _Stop(Exception):
    """Raised by the sentinel: the part has run."""


class _Sentinel(torch.autograd.Function):  # type: ignore[misc]
    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor) -> Any:
        return anchor.view_as(anchor)

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        raise _Stop


with torch.enable_grad():
    _sentinel = _Sentinel.apply(ANCHOR)  # keeps its node alive
_set_number(_sentinel.grad_fn, _SENTINEL)
_SENTINEL_EDGE: Final = get_gradient_edge(_sentinel)
_ANCHOR_EDGE: Final = get_gradient_edge(ANCHOR)
_ZERO: Final = torch.zeros(())


def plus(old: Any, new: Any) -> Any:
    """Add two gradients. torch adds a sparse tensor to a dense one, and not the other way round."""
    if old.layout is not torch.strided and new.layout is torch.strided:
        return new + old
    return old + new


def run_plain(
    starts: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    ends: Sequence[GradientEdge],
    retain: bool,
    create_graph: bool,
) -> Sequence[torch.Tensor | None]:
    """Return the gradients of the ends; None where none arrived."""
    _refuse_compiled()
    return _run(
        tuple(starts),
        tuple(gradients),
        retain,
        create_graph,
        tuple(ends),
        allow_unreachable=True,
        accumulate_grad=False,
    )


class Border(NamedTuple):
    """Where a part of a graph ends."""

    exits: Sequence[Place]
    # The nodes next to exits, each with the numbers of its edges that lead there.
    makers: Mapping[Any, Sequence[tuple[int, Place]]]
    low: Sequence[Any]  # nodes of the part whose sequence number is too low
    captures: Sequence[Place]  # inner places whose gradients are asked for


def run_bordered(
    border: Border,
    starts: Sequence[GradientEdge],
    gradients: Sequence[torch.Tensor],
    retain: bool,
    create_graph: bool,
) -> dict[Place, torch.Tensor]:
    """Return what a part of a graph gives to its exits, and the gradients at its captures."""
    exits, makers, low, captures = border
    _refuse_compiled()
    taken: dict[Place, torch.Tensor] = {}
    thread = threading.get_ident()
    ends = (_ANCHOR_EDGE, *[GradientEdge(*place) for place in exits])
    # In one thread, and so with one queue: the order of the numbers then is the order of the run.
    with _numbers, torch.autograd.set_multithreading_enabled(False), _quiet_sentinel():
        handles = [
            maker.register_hook(_taker(wanted, taken, thread)) for maker, wanted in makers.items()
        ]
        handles += [place[0].register_prehook(_watcher(place, taken, thread)) for place in captures]
        numbers = {node: node._sequence_nr() for node, _ in exits}
        try:
            for node in numbers:
                node._set_sequence_nr(_EXIT)
            for node in low:
                node._set_sequence_nr(_LOWEST)
            _run(
                (*starts, _SENTINEL_EDGE),
                (*gradients, _ZERO),
                retain,
                create_graph,
                ends,
                allow_unreachable=True,
                accumulate_grad=False,
            )
        except _Stop:
            pass
        else:
            raise AssertionError("torch's engine has passed the sentinel")
        finally:
            for node, number in numbers.items():
                node._set_sequence_nr(number)
            for handle in handles:
                handle.remove()
    return taken


def run_hooks(
    places: Sequence[Place], gradients: Sequence[torch.Tensor], create_graph: bool
) -> Sequence[torch.Tensor | None]:
    """Return gradients after the tensor hooks of their places; no node runs."""
    edges = [GradientEdge(*place) for place in places]
    return run_plain(edges, gradients, edges, True, create_graph)


# ── nodes of leaves ─────────────────────────────────────────────────────────────────────────────


class _Feed(torch.autograd.Function):  # type: ignore[misc]
    """A root whose gradients for its inputs, the leaves, are known."""

    @staticmethod
    def forward(ctx: Any, gradients: Sequence[torch.Tensor], *leaves: torch.Tensor) -> Any:
        ctx.gradients = gradients
        return torch.zeros(())

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return None, *ctx.gradients


def run_leaves(
    leaves: Sequence[torch.Tensor], gradients: Sequence[torch.Tensor]
) -> list[torch.Tensor]:
    """Return what the hooks of the leaves' AccumulateGrad nodes make of gradients.

    torch's distributed engine does it, in a context of its own that no worker shares: it runs these
    hooks and keeps the gradients in the context, where DistributedDataParallel finds and averages
    them. The ordinary engine would write to `.grad`.
    """
    engine = _distributed_engine()
    context = engine._new_context()._context_id()
    try:
        with torch.inference_mode(False), torch.enable_grad():
            root = _Feed.apply(gradients, *leaves)
        engine.backward(context, [root], False)
        found = {id(leaf): gradient for leaf, gradient in engine.get_gradients(context).items()}
    except RuntimeError as error:
        if "python_error" in str(error):  # torch does not say which
            raise GradError("a hook of an AccumulateGrad node raised", "hook") from error
        raise
    finally:
        engine._release_context(context)
    return [found[id(leaf)] for leaf in leaves]


def _distributed_engine() -> Any:
    if not hasattr(torch._C, "_distributed_autograd") and hasattr(torch._C, "_dist_autograd_init"):
        torch._C._dist_autograd_init()  # as `import torch.distributed.autograd` does it
    engine = getattr(torch._C, "_distributed_autograd", None)
    if engine is None:
        raise GradError(
            "this torch was built without torch.distributed.autograd, which runs hooks on "
            "AccumulateGrad nodes; put the hooks on tensors instead",
            "hook",
        )
    # Once per process; torch's own RPC may have done it with its rank.
    with contextlib.suppress(RuntimeError):
        engine._init(0)
    return engine


def may_have_reducers() -> bool:
    """Tell whether leaves may have hooks that Python cannot see: those of a reducer in C++.

    DistributedDataParallel needs a process group; torch does not tell which leaves it observes.
    """
    return bool(torch.distributed.is_available() and torch.distributed.is_initialized())


def _taker(
    wanted: Sequence[tuple[int, Place]], taken: dict[Place, torch.Tensor], thread: int
) -> Callable[[Any, Any], None]:
    def take(grad_inputs: Any, grad_outputs: Any) -> None:
        # Another thread may run the same node for a pass of its own.
        if threading.get_ident() != thread:
            return
        for index, place in wanted:
            gradient = grad_inputs[index]
            if gradient is not None:
                old = taken.get(place)
                taken[place] = gradient if old is None else plus(old, gradient)

    return take


def _watcher(place: Place, taken: dict[Place, torch.Tensor], thread: int) -> Callable[[Any], None]:
    def watch(grad_outputs: Any) -> None:
        gradient = grad_outputs[place[1]]
        if gradient is not None and threading.get_ident() == thread:
            taken[place] = gradient

    return watch


@contextlib.contextmanager
def _quiet_sentinel() -> Iterator[None]:
    """Anomaly mode would warn that the sentinel raised; it keeps its warnings about other nodes."""
    if not torch.is_anomaly_enabled():
        yield
        return
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="Error detected in _Sentinel")
        yield


def _refuse_compiled() -> None:
    compiled = sys.modules.get("torch._dynamo.compiled_autograd")
    if compiled is not None and getattr(compiled, "compiled_autograd_enabled", False):
        raise GradError(
            "compiled autograd cannot run a part of a graph; "
            "switch it off where a pass of a context runs",
            "compiled",
        )


# ── whose memory it is ──────────────────────────────────────────────────────────────────────────


def is_alone(found: Sequence[Any], place: int) -> bool:
    """Tell whether nothing else holds a gradient that a run has just given, nor its memory.

    Of a sparse one, that nothing else holds the tensor: torch does not show who holds its parts.
    """
    return _holders(found, place) == (_ALONE if _is_dense(found[place]) else _ALONE_SPARSE)


def _is_dense(gradient: torch.Tensor) -> bool:
    return bool(gradient.layout is torch.strided)


def _holders(found: Sequence[Any], place: int) -> tuple[int, int, int]:
    """Count the holders of a gradient's storage, and of the tensor in C++ and in Python.

    By its place in a sequence: a name or a loop of the caller's would be one more.
    """
    gradient = found[place]
    return (
        _storage_holders(gradient.untyped_storage()._cdata) if _is_dense(gradient) else 0,
        gradient._use_count(),
        sys.getrefcount(gradient),
    )


def _probe(sparse: bool) -> tuple[int, int, int]:
    """Count the holders of a gradient that a run has just made."""
    leaf = torch.zeros(1, 1, requires_grad=True)
    zero = torch.zeros(1, dtype=torch.int64)
    made = torch.nn.functional.embedding(zero, leaf, sparse=True) if sparse else leaf * 2
    edges, ends = [get_gradient_edge(made)], [get_gradient_edge(leaf)]
    return _holders(list(run_plain(edges, [torch.ones(1, 1)], ends, False, False)), 0)


# Measured, since it differs between versions of Python and torch.
with torch.enable_grad():
    _ALONE: Final = _probe(sparse=False)
    _ALONE_SPARSE: Final = _probe(sparse=True)
