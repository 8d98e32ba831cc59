"""The tape: nodes that know how to turn the gradient of their output into those of their inputs.

    x (leaf) ──▶ Accumulate ◀── OpNode "mul" ◀── OpNode "sum" ◀── loss.grad_fn

Every edge is a plain reference to the node behind an input (None where no gradient is wanted),
and every node has one output gradient. An operation with several outputs puts one `Part`
between itself and each of them, so the reverse pass (`sweep.py`) never has to know. The nodes of
operations are in `op/nodes.py`; the distributed engine adds its own kinds (Send, Recv) by
subclassing `Node` and `Joint`. A `HookHandle` removes a hook from a node or a leaf.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any

from aiograd.autograd.array import Gradient
from aiograd.errors import GradError

if TYPE_CHECKING:
    from aiograd.autograd.tensor import Tensor


Hook = Callable[["Tensor"], "Tensor | None"]


class Node:
    """One step of the tape; `shape` and `dtype` are those of its output, and so of its gradient."""

    # There is one node per recorded operation, so nodes have no `__dict__`, and no `__init__` here:
    # each kind of node fills the fields by itself. Checkpoints hold nodes weakly to learn which
    # ones outlive a graph.
    __slots__ = ("__weakref__", "dtype", "hooks", "parents", "shape")

    parents: tuple[Node | None, ...]
    shape: tuple[int, ...]
    dtype: Any
    hooks: list[Hook] | None  # run on the summed gradient before it is passed on

    @property
    def name(self) -> str:
        """The name of this step in error messages and pictures."""
        return type(self).__name__

    @property
    def next_nodes(self) -> tuple[tuple[Node, int], ...]:
        """The nodes this one passes gradients to, each with the number of that node's output."""
        return tuple(_seen_from_outside(parent) for parent in self.parents if parent is not None)

    def run(self, grad: Gradient, create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """Give the gradient of every parent (None: none).

        Arrays in, arrays out; with `create_graph` Tensors in, Tensors out, and everything is
        recorded. Unless `retain`, free what was saved for the backward pass.
        """
        raise AssertionError(f"{self.name} does not pass gradients on")

    def __repr__(self) -> str:
        return f"<{self.name}>"


def _seen_from_outside(node: Node) -> tuple[Node, int]:
    # A `Part` is our way to say "output number i"; users see pairs, as in torch.
    return (node.joint, node.index) if isinstance(node, Part) else (node, 0)


class Accumulate(Node):
    """The end of the tape at a leaf: what arrives here is the leaf's gradient."""

    __slots__ = ("variable",)

    parents: tuple[Node | None, ...]
    hooks: list[Hook] | None
    shape: tuple[int, ...]
    dtype: Any

    name: str = "AccumulateGrad"

    def __init__(self, variable: Tensor) -> None:
        # The graph keeps its leaves alive: a pass may start after their last name is gone. A leaf
        # refers back to this node only weakly, so that the two are no cycle.
        self.variable: Tensor = variable
        self.parents = ()
        self.shape = variable.raw.shape
        self.dtype = variable.raw.dtype
        self.hooks = None


class Joint(Node):
    """A node with several outputs: its gradient is a list, one slot per `Part`."""

    __slots__ = ("outputs",)

    outputs: int

    def run(self, grad: list[Gradient], create_graph: bool, retain: bool) -> Sequence[Gradient]:
        """Give the gradient of every parent; a slot of `grad` is None where none came."""
        raise AssertionError(f"{self.name} does not pass gradients on")


class Part(Node):
    """Output number `index` of a `Joint`."""

    # The few operations with several outputs pay for them with one more node per output. With edges
    # that are pairs (node, output), as torch has them, every step of every pass would pay.
    __slots__ = ("index", "joint")

    parents: tuple[Node | None, ...]
    hooks: list[Hook] | None
    shape: tuple[int, ...]
    dtype: Any

    joint: Joint
    index: int

    def __init__(self, joint: Joint, index: int, shape: tuple[int, ...], dtype: Any) -> None:
        self.joint, self.index = joint, index
        self.parents = (joint,)
        self.shape, self.dtype, self.hooks = shape, dtype, None


def modified(name: str) -> GradError:
    """Make the error for a saved tensor that was written to before the backward pass read it."""
    return GradError(
        f"a tensor that the backward pass of {name} needs was changed in place after it was used; "
        "write into a copy instead",
        "modified",
    )


def freed(name: str) -> GradError:
    """Make the error for a second pass through values that the first one has freed."""
    return GradError(
        f"the values that {name} saved for the backward pass were already freed by an earlier "
        "pass; give the earlier pass retain_graph=True to run a second one",
        "freed",
    )


_numbers = itertools.count()


class HookHandle:
    """Removes a registered hook."""

    # The number of the latest hook: while it stays the same, no node has got one. No number comes
    # twice; a count could show an old value again when several threads add to it.
    registered: int = -1

    def __init__(self, remove: Callable[[], None]) -> None:
        self._remove: Callable[[], None] | None = remove

    @classmethod
    def on_dict(cls, hooks: dict[int, Any], hook: Any) -> HookHandle:
        """Register a hook in a dict, under a number of its own.

        A leaf has such a dict, and not hooks on its node: the node exists only while a graph uses
        the leaf.
        """
        key = next(_numbers)
        hooks[key] = hook
        HookHandle.registered = key  # after it can be found
        return cls(lambda: hooks.pop(key, None))

    @classmethod
    def on_list(cls, node: Node, hook: Hook) -> HookHandle:
        """Register a hook on a node, which lives as long as the tensor it made."""
        if node.hooks is None:
            node.hooks = []
        hooks = node.hooks
        # The same function may be registered twice, and `list.remove` would find the wrong one of
        # two equal entries.
        entry = _Once(hook)
        hooks.append(entry)
        HookHandle.registered = next(_numbers)

        def remove() -> None:
            """Remove this entry if it is still there."""
            if entry in hooks:
                hooks.remove(entry)

        return cls(remove)

    def remove(self) -> None:
        """Remove the hook; a second call does nothing."""
        if self._remove is not None:
            self._remove()
            self._remove = None


class _Once:
    __slots__ = ("hook",)

    def __init__(self, hook: Hook) -> None:
        self.hook = hook

    def __call__(self, grad: Tensor) -> Tensor | None:
        return self.hook(grad)
