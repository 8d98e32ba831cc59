"""Torch graphs as the tape sees them: where gradients enter, where they end, and what lies between.

    Port         a place in a torch graph: parent of a SendNode, root of a pass
    Received     the torch node in front of the tensors of one message; stands for a RecvNode
    Leaf         a torch leaf, a sink of the tape
    TorchNode    any other torch node, for pictures and for finding a context; a pass never runs it

A pass replaces ports by stages (`stages.py`); nothing here computes.
"""

from __future__ import annotations

import weakref
from typing import Any, Final

import torch
from torch.autograd.graph import Node as GraphNode
from torch.autograd.graph import get_gradient_edge
from torch.utils.hooks import RemovableHandle

from aiograd.autograd.graph import Accumulate, Joint, Node, Part
from aiograd.dist.nodes import RecvNode
from aiograd.errors import GradError

Place = tuple[Any, int]  # a torch node, and the number of its output
ACCUMULATE: Final = torch._C._functions.AccumulateGrad


class Received(torch.autograd.Function):  # type: ignore[misc]
    """Makes received tensors outputs of one node, which refuses to be run.

    The very tensors, no views of them: those could not be changed in place. Not leaves, either: a
    local `backward()` would end there without a word.
    """

    @staticmethod
    def forward(ctx: Any, anchor: torch.Tensor, message: tuple[Any, ...]) -> tuple[Any, ...]:
        """Take the tensors, which are hidden in a tuple: the anchor alone makes them need grad."""
        ctx.end, ctx.places, tensors = message
        ctx.hooked = False  # whether one of them has had a hook
        ctx.tensors = [weakref.ref(tensor) for tensor in tensors]
        ctx.set_materialize_grads(False)
        return tuple(tensors)

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        """Refuse: the graph goes on at another worker."""
        raise GradError(
            "this graph reaches a tensor that was received from another worker; "
            "use `await ctx.backward(...)` of its context instead of a local backward",
            "received",
        )


ANCHOR: Final = torch.zeros((), requires_grad=True)
# Without what `Function.apply` does for tensors of functorch, which the anchor is not: a fifth of
# the time.
_receive: Final = super(torch.autograd.Function, Received).apply


def receive(end: RecvNode, places: list[int], tensors: list[torch.Tensor]) -> None:
    """Put the tensors of one message behind one node; `places` says which of the edge they are."""
    message = (end, tuple(places), tensors)
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled():
        _receive(ANCHOR, message)
        return
    # Whatever the thread has switched off: whether they need grad was decided by the sender.
    with torch.inference_mode(False), torch.enable_grad():
        _receive(ANCHOR, message)


with torch.enable_grad():
    _sample = _receive(ANCHOR, (None, (0,), [torch.zeros(1)]))
RECEIVED: Final = type(_sample[0].grad_fn)
del _sample
_register_hooks: Final = RECEIVED._register_hook_dict


def _note_hooks(node: Any, tensor: torch.Tensor) -> None:
    """Note that a received tensor gets a hook, which may outlive the tensor; torch calls this."""
    node.hooked = True
    _register_hooks(node, tensor)


RECEIVED._register_hook_dict = _note_hooks


def is_observed(node: Any, number: int) -> bool:
    """Tell whether a hook or `retain_grad` wants to see the gradient of a received tensor."""
    if node.hooked:
        return True
    tensor = node.tensors[number]()
    return tensor is not None and tensor.retains_grad


def place_of(tensor: torch.Tensor) -> tuple[Place, Any]:
    """Return the place of a tensor in its graph, and a token that keeps the graph alive.

    They keep the graph, and not the memory of the tensor. It is what torch's `get_gradient_edge`
    does, without its context managers, which take as long as all the rest of a call.
    """
    node = tensor.grad_fn
    if tensor.layout is torch.strided and torch.is_grad_enabled():
        if node is None:
            view = tensor.view_as(tensor).grad_fn
            if view is not None:
                return (view.next_functions[0][0], 0), None
        else:
            is_python = isinstance(node, torch._C._FunctionBase)
            return (node, tensor.output_nr), tensor.view_as(tensor).grad_fn if is_python else None
    if tensor.layout is torch.strided:
        edge = get_gradient_edge(tensor)
        return (edge.node, edge.output_nr), edge.ownership_token
    # torch's own function makes a view, and there are none of sparse tensors.
    with torch.enable_grad():
        token = tensor.clone().grad_fn
    if node is None:
        assert token is not None
        leaf = token.next_functions[0][0]
        assert leaf is not None
        return (leaf, 0), None
    return (node, tensor.output_nr), token


class TorchNode(Joint):
    """A torch node, as it is shown in pictures and walked through. Equal if the torch node is."""

    __slots__ = ("node",)

    def __init__(self, node: GraphNode) -> None:
        self.node = node
        self.outputs = 1
        metadata = getattr(node, "_input_metadata", None)
        self.shape = tuple(metadata[0].shape) if metadata else ()
        self.dtype, self.hooks = None, None

    @property
    def name(self) -> str:
        """The name of the torch node, such as "MulBackward0"."""
        return str(self.node.name())

    @property
    def parents(self) -> tuple[Node | None, ...]:  # type: ignore[override]
        """What lies behind it."""
        return tuple([None if n is None else shown(n) for n, _ in self.node.next_functions])

    def __eq__(self, other: object) -> bool:
        return isinstance(other, TorchNode) and other.node is self.node

    def __hash__(self) -> int:
        return hash(self.node)


class Leaf(Accumulate):
    """A torch leaf as a sink: what arrives here is its gradient, in memory of its own."""

    __slots__ = ("_node_hooks", "hooked", "observed")
    work = 0.0  # nothing is computed here

    def __init__(self, variable: torch.Tensor) -> None:
        self.variable = variable
        self.parents, self.hooks = (), None
        self.shape, self.dtype = tuple(variable.shape), None
        # When the stages were made: whether the tensor has hooks, and whether its node has.
        self.hooked, self.observed = bool(variable._backward_hooks), False
        self._node_hooks: tuple[Any, ...] = ()

    def observe(self, node: GraphNode) -> bool:
        """Note whether code in Python has put hooks on the leaf's node."""
        if not node_hooks.possible:
            return False
        found = []
        for register in (node.register_prehook, node.register_hook):
            # torch shows the hooks of a node only to who adds one.
            handle = register(_no_hook)
            found.append(handle.hooks_dict_ref())
            handle.remove()
        self._node_hooks = tuple(found)
        self.observed = any(found)
        return self.observed

    def fits(self) -> bool:
        """Tell whether it has hooks where it had some when the stages were made."""
        variable: Any = self.variable
        if bool(variable._backward_hooks) != self.hooked:
            return False
        if not self._node_hooks:
            return not node_hooks.possible  # nobody has looked for hooks
        return any(self._node_hooks) == self.observed

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Leaf) and other.variable is self.variable

    def __hash__(self) -> int:
        return hash(self.variable)


def _no_hook(*_: Any) -> None:
    pass


class _NodeHooks:
    """Whether code of the user's has ever put a hook on a torch node, in this process.

    To look at the node of a leaf takes six microseconds, twice as long as the rest of condensing
    it, and few programs have such hooks. So this looks on when one is registered.
    """

    def __init__(self) -> None:
        # Hooks that were registered before this was imported may be on nodes.
        self.possible = RemovableHandle.next_id > 0
        self._register = torch.autograd.Function._register_hook
        torch.autograd.Function._register_hook = staticmethod(self._note)

    def _note(self, hooks: Any, hook: Any) -> Any:
        if not str(getattr(hook, "__module__", "")).startswith("aiograd.torch."):
            self.possible = True
        return self._register(hooks, hook)


node_hooks: Final = _NodeHooks()


def shown(node: Any) -> Node:
    """Return what stands for a torch node outside of passes."""
    if node.__class__ is ACCUMULATE:
        return Leaf(node.variable)
    if node.__class__ is RECEIVED:
        end: Node = node.end
        return end
    return TorchNode(node)


class Port(Part):
    """A place in a torch graph. Equal if the place is, so that a repeated pass is recognised."""

    __slots__ = ("_token", "place")

    def __init__(self, tensor: torch.Tensor) -> None:
        self.place, self._token = place_of(tensor)
        node, number = self.place
        self.index = node.places[number] if node.__class__ is RECEIVED else number
        self.shape, self.dtype, self.hooks = tuple(tensor.shape), tensor.dtype, None

    # Made when asked for: few programs look at them, and every tensor that is sent has a port.
    @property
    def joint(self) -> Any:  # type: ignore[override]
        """What made the tensor, for people."""
        return shown(self.place[0])

    @property
    def parents(self) -> tuple[Node | None, ...]:  # type: ignore[override]
        """What lies behind it."""
        return (self.joint,)

    def closes_loop(self, context_id: int, incarnation: bytes) -> bool:
        """Tell whether a tensor came from that very incarnation in this context; see `loops`."""
        node = self.place[0]
        if node.__class__ is not RECEIVED:
            return False
        end = node.end
        return bool(
            end.incarnation == incarnation
            and end.context_id == context_id
            and not end.loops >> self.index & 1
        )

    @property
    def observed(self) -> bool:
        """Whether something here wants to see the gradient of a received tensor."""
        return is_observed(*self.place)

    def __eq__(self, other: object) -> bool:
        # Nodes of torch are equal if they are the same.
        return isinstance(other, Port) and other.place == self.place

    def __hash__(self) -> int:
        return hash(self.place)
