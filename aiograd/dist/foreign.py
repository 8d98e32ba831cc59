"""Tensors of other libraries: what such a library must offer so that gradients cross calls through it.

A library records graphs of its own. Its tensors travel by its traveller; one that needs grad and is
sent in a context has a *port* on our tape, a node that stands for a place in the library's graph. For
each pass, the library condenses the graph behind the ports into ordinary nodes, and `Sweep` and `Pass`
do the rest. Nothing else here knows that the nodes compute with tensors that are not ours.

Libraries are loaded when they are first needed: `import aiograd` loads none.
"""

from __future__ import annotations

import importlib
import weakref
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, Final, NamedTuple, Protocol

from aiograd.autograd.backward import entries as own_entries
from aiograd.autograd.backward import input_node as own_input_node
from aiograd.autograd.checkpoint import FOREIGN as CHECKPOINTED
from aiograd.autograd.graph import Node
from aiograd.autograd.tensor import Tensor
from aiograd.dist.backward.codec import PACKERS, UNPACKERS, Packer
from aiograd.dist.backward.plan import Condensed
from aiograd.dist.nodes import SendNode
from aiograd.errors import GradError, SerializationError
from aiograd.rpc.extension import Traveller, Travellers
from aiograd.wire.fastcodec import SecondBox


class Library(Packer, Protocol):
    """A library of tensors that records graphs of its own."""

    @property
    def tensor_class(self) -> type:
        """The class of its tensors."""

    @property
    def traveller(self) -> Traveller:
        """How its tensors are sent."""

    @property
    def box(self) -> SecondBox | None:
        """How small and simple tensors are sent by the fast codec; None: not at all."""

    def entry(
        self, root: Any, gradient: Any, create_graph: bool, allow_leaf: bool
    ) -> tuple[Node, Any]:
        """Check the root of a pass; its port, and the gradient it starts with."""

    def input_node(self, tensor: Any) -> Node:
        """Return the port of a tensor that derivatives are asked for."""

    def condense(
        self,
        roots: Sequence[Node],
        sends: Mapping[int, SendNode],
        captures: Sequence[Node],
        keep: bool,
    ) -> Condensed:
        """Make nodes of ours of the graph behind all ports among roots and parents of sends.

        `keep`: the gradients of leaves are for the context, so that hooks of leaves' nodes run.
        """

    def add(self, old: Any, new: Any) -> Any:
        """Return the sum of two gradients, in memory of its own."""

    def copy(self, gradient: Any) -> Any:
        """Return a gradient in memory that nobody else holds."""

    def backward(self, tensor: Any, retain_graph: bool) -> None:
        """Run a local backward pass."""

    def grad(self, outputs: Any, inputs: Any, gradients: Any, **flags: Any) -> tuple[Any, ...]:
        """Return local derivatives."""

    def checkpoint(self, call: Callable[[], Any]) -> Any:
        """Run a function whose graph is recomputed in the backward pass."""

    def concatenate(self, tensors: Sequence[Any]) -> Any:
        """Join tensors along their first axis."""

    def show(self, tensor: Any) -> tuple[Any, Callable[[], bool]]:
        """Return what a boundary hook sees of a tensor, and whether the hook has written to it."""

    def norm(self, tensor: Any) -> float:
        """Return the norm of all elements."""

    def noise(self, tensor: Any, scale: float, generator: Any) -> Any:
        """Return the tensor with normal noise of numpy's generator added."""

    def cast(self, tensor: Any, dtype: str) -> Any | None:
        """Return a floating tensor in another dtype; None for others."""


class _Known(NamedTuple):
    tag: str  # of the traveller
    class_name: str  # of the tensors, with its module
    module: str  # of ours: registers the library when it is imported
    extra: str  # to install


KNOWN: Final = (_Known("torch.tensor", "torch.Tensor", "aiograd.torch", "torch"),)
_loaded: Final[list[Library]] = []
_workers: Final[weakref.WeakSet[Travellers]] = weakref.WeakSet()  # of this process


def register(library: Library) -> None:
    """Let every worker of this process send and differentiate the tensors of a library."""
    _loaded.append(library)
    CHECKPOINTED.append((library.tensor_class, library.checkpoint))
    PACKERS[library.tensor_class] = UNPACKERS[library.traveller.tag] = library
    for travellers in list(_workers):
        _add(travellers, library)


def _add(travellers: Travellers, library: Library) -> None:
    travellers.add(library.tensor_class, library.traveller)
    common = travellers.common_boxes
    if common is not None and library.box is not None:
        travellers.boxes = (common[0], common[1], library.tensor_class, library.box)


def attach(travellers: Travellers) -> None:
    """Let a worker send tensors of the libraries that are loaded, or will be."""
    _workers.add(travellers)
    for library in _loaded:
        _add(travellers, library)
    tags = {library.traveller.tag for library in _loaded}
    for known in KNOWN:
        if known.tag not in tags:
            travellers.promise(known.tag, known.class_name, partial(_load, known))


def _load(known: _Known) -> None:
    """Import what registers a library; SerializationError if it is not installed here."""
    try:
        importlib.import_module(known.module)
    except ImportError as error:
        raise SerializationError(
            f"a {known.class_name}",
            f"{error} on this worker; pip install 'aiograd[{known.extra}]' there",
        ) from error


def library_of(value: Any) -> Library | None:
    """Return the library of a tensor; None if it is no tensor, or one of ours."""
    if isinstance(value, Tensor):
        return None
    for library in _loaded:
        if isinstance(value, library.tensor_class):
            return library
    for base in type(value).__mro__:
        for known in KNOWN:
            if f"{base.__module__}.{base.__qualname__}" == known.class_name:
                _load(known)
                return library_of(value)
    return None


# ── roots and inputs ────────────────────────────────────────────────────────────────────────────


def as_list(tensors: Any) -> list[Any]:
    """Return one tensor or several as a list."""
    return list(tensors) if isinstance(tensors, list | tuple) else [tensors]


def entries(
    tensors: Any, gradients: Any = None, create_graph: bool = False, *, allow_leaf: bool = True
) -> list[tuple[Node, Any]]:
    """Check the roots of a pass, ours or a library's; see `autograd.backward.entries`."""
    roots = as_list(tensors)
    libraries = [library_of(root) for root in roots]
    if not any(libraries):
        return own_entries(tensors, gradients, create_graph, allow_leaf=allow_leaf)
    values = [None] * len(roots) if gradients is None else as_list(gradients)
    if len(values) != len(roots):
        raise GradError(f"{len(roots)} outputs but {len(values)} gradients", "shape")
    found: list[tuple[Node, Any]] = []
    for root, value, library in zip(roots, values, libraries, strict=True):
        if library is not None:
            found.append(library.entry(root, value, create_graph, allow_leaf))
        else:
            found += own_entries([root], [value], create_graph, allow_leaf=allow_leaf)
    return found


def input_node(tensor: Any) -> Node:
    """Return the node behind a tensor that derivatives are asked for."""
    library = library_of(tensor)
    return own_input_node(tensor) if library is None else library.input_node(tensor)
