"""Small programs for crash points: every shape of a graph over workers, in all of its variants.

A program is a tree of `Part`s. Each part multiplies a parameter of its worker with what its
children give, so every worker has a gradient to show, and a wrong one shows everywhere. Numbers are
small integers in floats, so that sums in any order are exactly equal.

    chain3      a → b → c → d         fan2, fan3   a → b, c, d        shared   a has b make a value,
    bounce      a → b → c → b         tree         a → b → c, d                c and d fetch it
    back, loop  … → a                 diamond      a → b, c → d
    self        a → a → b, a → b → b  mixed        a → b → c and a → d
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from functools import cache
from typing import Any, Final

import numpy as np

from aiograd.autograd.backward import grad as local_grad
from aiograd.autograd.tensor import Tensor
from aiograd.rpc.api import rpc_async
from aiograd.rref import remote
from aiograd.testing.simulator.ledger import CallId, enter
from aiograd.testing.simulator.workload.gradients import heavy, leaf, parameter

SECONDS: Final = 1.5  # that a heavy gradient takes: more than a loss takes to be noticed
NUMBERS: Final = {"a": 0, "b": 1, "c": 2, "d": 3}


@dataclass(frozen=True)
class Part:
    """What one worker computes: its parameter, times x, times what its children give."""

    worker: str
    children: tuple[Part, ...] = ()
    x: bool = False  # whether the originator's x is a factor
    heavy: bool = False
    kept: Part | None = None  # made by another worker, kept there, fetched by all children

    def walk(self) -> Iterator[Part]:
        """Yield this part and all below it."""
        yield self
        for child in (*self.children, *((self.kept,) if self.kept else ())):
            yield from child.walk()

    @property
    def needs_x(self) -> bool:
        """Whether the originator's x has to be sent with the call."""
        return any(part.x for part in self.walk())


def part(worker: str, *children: Part, x: bool = False, kept: Part | None = None) -> Part:
    """Make a part with its children as arguments, so that shapes read as trees."""
    return Part(worker, children, x, kept=kept)


@dataclass(frozen=True)
class Program:
    """One program: what is computed where, and which passes follow."""

    name: str
    root: Part
    passes: tuple[str, ...] = ("backward",)
    leader: str = "a"  # passes are started by "a", or by the root's worker: "call", "rref"
    waste: str = ""  # a worker whose result is not used
    cold: bool = False  # no worker is connected to another when it begins

    @property
    def workers(self) -> list[str]:
        """All workers that take part."""
        return sorted({part.worker for part in self.root.walk()} | {"a", *self.waste})

    def pairs(self) -> list[tuple[str, str]]:
        """List the pairs (caller, callee) of workers that are not the same."""
        found = {("a", self.waste)} if self.waste else set()
        for each in self.root.walk():
            found |= {(each.worker, child.worker) for child in each.children}
            if each.kept is not None:
                found.add((each.worker, each.kept.worker))
                found |= {(child.worker, each.kept.worker) for child in each.children}
        if self.leader != "a":
            found.add(("a", self.root.worker))
        return sorted(pair for pair in found if pair[0] != pair[1])


# ── running ─────────────────────────────────────────────────────────────────────────────────────


async def compute(id: CallId, part: Part, xs: list[Tensor], kept: Any = None) -> Tensor:
    """Compute a part here, and its children on their workers."""
    enter(id)
    result = parameter(NUMBERS[part.worker])
    if part.x:
        result = result * xs[0]
    if kept is not None:
        result = result * await kept
    given = None
    if part.kept is not None:
        args = ((*id, 9), part.kept, xs if part.kept.needs_x else [])
        given = remote(part.kept.worker, compute, args)
    calls = [
        rpc_async(child.worker, compute, ((*id, i), child, xs if child.needs_x else [], given))
        for i, child in enumerate(part.children)
    ]
    if len(calls) == 1:
        result = result * await calls[0]
    else:
        for value in await asyncio.gather(*calls):
            result = result * value
    return heavy(result, SECONDS) if part.heavy else result


async def loss_of(id: CallId, part: Part, xs: list[Tensor]) -> Tensor:
    """Compute a part and sum it up, on the worker of the part."""
    loss: Tensor = (await compute(id, part, xs)).sum()
    return loss


# ── the oracle ──────────────────────────────────────────────────────────────────────────────────

Key = tuple[str, str]  # ("b", "w") is the parameter of b; ("a", "x") the originator's x
Contribution = dict[Key, np.ndarray]


def _local(part: Part, leaves: dict[Key, Tensor], kept: Tensor | None = None) -> Tensor:
    key = (part.worker, "w")
    result = leaves.setdefault(key, leaf(NUMBERS[part.worker]))
    if part.x:
        result = result * leaves.setdefault(("a", "x"), leaf(4))
    if kept is not None:
        result = result * kept
    given = None if part.kept is None else _local(part.kept, leaves)
    for child in part.children:
        result = result * _local(child, leaves, given)
    return result


@cache
def contribution(program: Program, kind: str) -> Contribution:
    """Compute what one pass of this kind adds to the gradients of every worker."""
    leaves: dict[Key, Tensor] = {}
    loss = _local(program.root, leaves).sum()
    if kind == "grad":
        return {}
    if kind == "second":
        (first,) = local_grad(loss, [leaves[program.root.worker, "w"]], create_graph=True)
        assert first is not None
        loss = (first * first).sum()
    loss.backward()
    times = 2 if kind == "pair" else 1
    return {
        key: np.asarray(found.grad) * times
        for key, found in leaves.items()
        if found.grad is not None
    }


@cache
def derivative(program: Program) -> np.ndarray:
    """Compute the derivative of the loss by the parameter of the worker that starts passes."""
    leaves: dict[Key, Tensor] = {}
    loss = _local(program.root, leaves).sum()
    (found,) = local_grad(loss, [leaves[program.root.worker, "w"]])
    return np.asarray(found)


# ── all of them ─────────────────────────────────────────────────────────────────────────────────


def _shapes() -> dict[str, Part]:
    b, c, d = part("b"), part("c"), part("d")
    x_b, x_c, x_d = part("b", x=True), part("c", x=True), part("d", x=True)
    return {
        "single": part("a", x_b),
        "chain2": part("a", part("b", c)),
        "chain2x": part("a", part("b", x_c, x=True)),
        "chain3": part("a", part("b", part("c", d))),
        "chain3x": part("a", part("b", part("c", x_d))),
        "back": part("a", part("b", part("a"))),
        "loop": part("a", part("b", part("c", part("a", x=True)))),
        "bounce": part("a", part("b", part("c", b))),
        "selfa": part("a", part("a", x_b)),
        "selfb": part("a", part("b", part("b"), c)),
        "fan2": part("a", b, c),
        "fan3x": part("a", x_b, x_c, x_d),
        "diamond": part("a", part("b", d), part("c", d)),
        "diamondx": part("a", part("b", x_d), part("c", x_d), x=True),
        "triangle": part("a", part("b", x_c), c),
        "tree": part("a", part("b", c, d)),
        "mixed": part("a", part("b", c), x_d),
        "shared": part("a", c, d, kept=b),
        "sharedx": part("a", part("c", d, kept=x_b)),
    }


def _heavy(part: Part, chosen: Callable[[Part], bool]) -> Part:
    """Copy a tree, with gradients that take time where `chosen` says so."""
    return replace(
        part,
        heavy=chosen(part),
        children=tuple(_heavy(child, chosen) for child in part.children),
        kept=None if part.kept is None else _heavy(part.kept, chosen),
    )


def _variants(shape: str, root: Part) -> Iterator[Program]:
    """Yield all variants of one shape: kinds of passes, heavy parts, and who leads them."""

    def made(name: str, root: Part = root, **facts: Any) -> Program:
        """Make one variant."""
        return Program(f"{shape}/{name}", root, **{"leader": "a", **facts})

    first = root.children[0]
    heavy_first = _heavy(root, lambda part: part is first)
    yield made("once")
    yield made("cold", cold=True)
    yield made("waste", waste="d")
    yield made("twice", passes=("retain", "backward"))
    yield made("create", passes=("create", "backward"))
    yield made("grad", passes=("grad", "backward"))
    yield made("second", passes=("second",))
    yield made("pair", passes=("pair", "backward"))
    yield made("heavy-root", _heavy(root, lambda part: part is root))
    yield made("heavy-first", heavy_first)
    yield made("heavy-last", _heavy(root, lambda part: not part.children))
    yield made("heavy-twice", heavy_first, passes=("retain", "backward"))
    yield made("led", first, leader="call")
    yield made("led-heavy", _heavy(first, lambda part: True), leader="call")
    yield made("rref", first, leader="rref")


PROGRAMS: Final[dict[str, Program]] = {
    program.name: program for shape, root in _shapes().items() for program in _variants(shape, root)
}
