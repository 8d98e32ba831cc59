"""Random programs with torch tensors: the same code over several workers, and in plain torch.

Every hook and every custom Function notes that it ran; hooks change the gradients they see. So a
node that runs twice, a hook on a part of a gradient, or one that does not run shows.
"""

from __future__ import annotations

import itertools
import random
from collections import Counter
from collections.abc import Callable
from typing import Any

import torch

import aiograd as ag

DTYPE = torch.float64
RUNNING: dict[int, Program] = {}  # workers of the tests share this process


class Noted(torch.autograd.Function):
    """Multiplies two tensors, adds them, and notes when it is played backwards."""

    @staticmethod
    def forward(ctx: Any, a: Any, b: Any, note: Callable[[], None]) -> Any:
        ctx.save_for_backward(a, b)
        ctx.note = note
        return a * b, a + b

    @staticmethod
    def backward(ctx: Any, g: Any, h: Any) -> Any:
        a, b = ctx.saved_tensors
        ctx.note()
        return g * b + h, g * a + h, None


class Program:
    """One program: which calls and operations it makes follows from its seed alone."""

    def __init__(self, seed: int, names: list[str], hooks: bool = True) -> None:
        self.seed, self.names, self.hooks = seed, names, hooks
        generator = torch.Generator().manual_seed(seed)
        self.leaves = {
            name: [
                (torch.randn(3, generator=generator, dtype=DTYPE) * 0.7).requires_grad_(),
                torch.randn((), generator=generator, dtype=DTYPE).requires_grad_(),
            ]
            for name in names
        }
        self.notes: Counter[str] = Counter()
        self.retained: list[torch.Tensor] = []
        if hooks:
            for name in names:
                leaf = self.leaves[name][0]
                leaf.register_hook(lambda g, name=name: self.note(f"leaf of {name}", g * 1.25))

    def note(self, what: str, value: Any = None) -> Any:
        self.notes[what] += 1
        return value

    async def run(self, call: Callable[..., Any]) -> list[torch.Tensor]:
        """Run the program from the first worker; its roots."""
        self.random, self.numbers, self.call = random.Random(self.seed), itertools.count(), call
        self.notes.clear()
        self.retained = []
        found = await self.body(self.names[0], 0, self.leaves[self.names[0]])
        return [(o * o).sum() for o in found if o.requires_grad and not o.is_leaf]

    async def body(self, here: str, depth: int, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a worker does with the tensors it was given."""
        draw, pool = self.random, list(given)
        for _ in range(draw.randrange(2, 7)):
            if draw.random() < 0.35 and depth < 3:
                to = draw.choice(self.names)
                args = draw.sample(pool, min(len(pool), draw.randrange(1, 3)))
                found = await self.call(self, here, to, depth + 1, args, draw.random() < 0.3)
                pool += [self.observe_received(each) for each in found]
            else:
                pool.append(self.operation(pool))
        return draw.sample(pool, min(len(pool), draw.randrange(1, 4)))

    def plain(self, given: list[torch.Tensor]) -> list[torch.Tensor]:
        """What a worker does in a thread, without calls."""
        pool = list(given)
        for _ in range(self.random.randrange(1, 4)):
            pool.append(self.operation(pool))
        return pool[-2:]

    def operation(self, pool: list[torch.Tensor]) -> torch.Tensor:
        draw = self.random
        a, b = draw.choice(pool), draw.choice(pool)
        number = next(self.numbers)
        kind = draw.randrange(7)
        if kind == 0:
            made = a * b
        elif kind == 1:
            made = a + b
        elif kind == 2:
            made = (a - b).sin()
        elif kind == 3:
            made = torch.stack(torch.broadcast_tensors(a, b)).prod(0)
        elif kind == 4:
            made = a.tanh()
        elif kind == 5:
            note = f"function {number}"
            one, two = Noted.apply(*torch.broadcast_tensors(a, b), lambda: self.note(note))
            made = one if draw.random() < 0.5 else one * two
        else:
            wide = torch.cat([a.expand(3), b.expand(3)])
            first, rest = wide.split([2, 4])
            made = rest[1:] * first.sum()
        if self.hooks and made.requires_grad and not made.is_leaf:
            self.observe(made, number)
        return made

    def observe_received(self, tensor: torch.Tensor) -> torch.Tensor:
        chance, number = self.random.random(), next(self.numbers)
        if self.hooks and tensor.requires_grad:
            if chance < 0.3:
                # Called with None, as torch does for the unused outputs of a node with several.
                tensor.register_hook(
                    lambda g: None if g is None else self.note(f"received {number}", g * 1.2)
                )
            elif chance < 0.5:
                tensor.retain_grad()
                self.retained.append(tensor)
        return tensor

    def observe(self, made: torch.Tensor, number: int) -> None:
        chance = self.random.random()
        if chance < 0.2:
            made.register_hook(lambda g: self.note(f"hook {number}", g * 1.5))
        elif chance < 0.35:
            made.retain_grad()
            self.retained.append(made)
        elif chance < 0.45:
            made.grad_fn.register_prehook(
                lambda grads: self.note(f"pre {number}", tuple(_times(g, 1.1) for g in grads))
            )
        elif chance < 0.55:
            made.grad_fn.register_hook(
                lambda grads, _: self.note(f"post {number}", tuple(_times(g, 0.9) for g in grads))
            )


def _times(gradient: Any, factor: float) -> Any:
    return None if gradient is None else gradient * factor


# ── over workers ────────────────────────────────────────────────────────────────────────────────


async def body(seed: int, here: str, depth: int, *given: torch.Tensor) -> list[torch.Tensor]:
    program = RUNNING[seed]
    return await program.body(here, depth, [*given, *program.leaves[here]])


def plain_body(seed: int, here: str, *given: torch.Tensor) -> list[torch.Tensor]:
    program = RUNNING[seed]
    return program.plain([*given, *program.leaves[here]])


async def remotely(
    program: Program, here: str, to: str, depth: int, args: list[torch.Tensor], in_thread: bool
) -> list[torch.Tensor]:
    if in_thread:
        return await ag.rpc_async(to, plain_body, args=(program.seed, to, *args))
    return await ag.rpc_async(to, body, args=(program.seed, to, depth, *args))


async def gradients_here(seed: int, here: str) -> list[torch.Tensor | None]:
    """The gradients of this worker's leaves in the current context."""
    found = ag.get_gradients(ag.current_context())
    return [
        None if leaf not in found else found[leaf].detach() for leaf in RUNNING[seed].leaves[here]
    ]


# ── in plain torch ──────────────────────────────────────────────────────────────────────────────


async def locally(
    program: Program, here: str, to: str, depth: int, args: list[torch.Tensor], in_thread: bool
) -> list[torch.Tensor]:
    # Views, so that a hook on what was received is no hook on what was sent.
    given = [t.view_as(t) for t in args] + program.leaves[to]
    found = program.plain(given) if in_thread else await program.body(to, depth, given)
    return [t.view_as(t) for t in found]


def assert_same(mine: torch.Tensor | None, theirs: torch.Tensor | None, what: str) -> None:
    """Equal numbers; None counts as zeros, which torch gives where a part of a result is unused."""
    if mine is None or theirs is None:
        for each in (mine, theirs):
            assert each is None or not each.abs().sum(), (what, mine, theirs)
    else:
        torch.testing.assert_close(mine, theirs, rtol=1e-8, atol=1e-9, msg=lambda m: f"{what}: {m}")
