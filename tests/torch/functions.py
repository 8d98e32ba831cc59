"""What workers of the tests do with torch tensors. They share this process, and so these leaves."""

from __future__ import annotations

from collections import Counter
from typing import Any

import torch

import aiograd as ag

DTYPE = torch.float64
LEAVES: dict[str, torch.Tensor] = {}
RUNS: Counter[str] = Counter()


def leaf(*shape: int, seed: int = 0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(*shape, generator=generator, dtype=DTYPE).requires_grad_()


def fill(module: torch.nn.Module, seed: int = 0) -> None:
    """Give a module first values of its own: makers share torch's generator, and run at once."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=DTYPE) / 2)


def times(x: torch.Tensor, name: str = "u") -> torch.Tensor:
    return x * LEAVES[name]


def sine(x: torch.Tensor) -> torch.Tensor:
    RUNS["sine"] += 1
    return (x * LEAVES["u"]).sin()


def two(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    made = x * LEAVES["u"]
    return made.sin(), made.cos()


def embed(places: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.embedding(places, LEAVES["table"], sparse=True) * scale


def identity(x: Any) -> Any:
    return x


KEPT: list[torch.Tensor] = []  # what `passed_on` has passed on


async def passed_on(x: torch.Tensor, to: str) -> torch.Tensor:
    made = await ag.rpc_async(to, times, args=(x,))
    KEPT.append(made)
    return made


class Fails(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        return x * 1

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> torch.Tensor:
        raise ValueError("on purpose")


def fails(x: torch.Tensor) -> torch.Tensor:
    return Fails.apply(x)


def spoils(x: torch.Tensor) -> torch.Tensor:
    made = x * 2
    result = made.exp()
    result.mul_(2)  # what exp has saved
    return result


def both(x: torch.Tensor, y: ag.Tensor) -> tuple[torch.Tensor, ag.Tensor]:
    return x * LEAVES["u"], y * 3


async def gradient_of(name: str) -> torch.Tensor | None:
    found = ag.get_gradients(ag.current_context()).get(LEAVES[name])
    return None if found is None else found.detach()


async def make(value: Any) -> Any:
    return value
