"""A table of embeddings that is too large for one worker, or that several shall serve.

trainer                          shard k of n
ids, bag by bag      ──▶         rows id // n of the ids with id % n == k, added up per bag
                     ◀──         one sum per bag
the sum of all sums              gradients of those rows, sparse, step where the rows are
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Generator, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.random import default_generator
from aiograd.autograd.tensor import Tensor
from aiograd.nn.layers import EmbeddingBag
from aiograd.nn.remote import RemoteModule
from aiograd.rref.rref import RRef


class ShardedEmbeddingBag:
    """`table = await ag.nn.ShardedEmbeddingBag(["a", "b"], 1_000_000, 64)`, `y = await table(ids)`.

    An `EmbeddingBag` whose rows are spread over the workers named. Ids and sums travel, rows never,
    and gradients are those of the rows that were used. It can be sent to other workers, which then
    use the same table.

        >>> bag = await ag.nn.ShardedEmbeddingBag(["worker0", "worker1"], 100, 8)
        >>> (await bag(np.array([[1, 2, 99], [0, 0, 5]]))).shape
        (2, 8)
    """

    num_embeddings: int
    embedding_dim: int

    def __init__(
        self,
        on: Sequence[Any],
        num_embeddings: int,
        embedding_dim: int,
        mode: str = "mean",
        *,
        dtype: Any = None,
        generator: np.random.Generator | None = None,
    ) -> None:
        if mode not in ("sum", "mean"):
            raise ValueError(f"mode must be 'sum' or 'mean', not {mode!r}")
        if not 0 < len(on) <= num_embeddings:
            raise ValueError(f"{num_embeddings} rows cannot be spread over {len(on)} workers")
        self.num_embeddings, self.embedding_dim, self.mode = num_embeddings, embedding_dim, mode
        # Independent streams from one generator: the same table for the same seed and number of
        # shards. Of `manual_seed` too, which their workers do not know.
        source = default_generator() if generator is None else generator
        seeds = [None] * len(on) if source is None else source.spawn(len(on))
        sizes = [len(range(k, num_embeddings, len(on))) for k in range(len(on))]
        # Shards only add up; means are taken here, over the bag as a whole. Sparse, so that a
        # gradient has the size of what was used.
        same = {"mode": "sum", "sparse": True, "dtype": dtype}
        self.shards: list[RemoteModule[EmbeddingBag]] = [
            RemoteModule(
                to, EmbeddingBag, args=(size, embedding_dim), kwargs={**same, "generator": seed}
            )
            for to, size, seed in zip(on, sizes, seeds, strict=True)
        ]

    def __await__(self) -> Generator[Any, None, ShardedEmbeddingBag]:
        yield from asyncio.gather(
            *[shard.module_rref.future() for shard in self.shards]
        ).__await__()
        return self

    async def __call__(self, input: Any, offsets: Any = None) -> Tensor:
        """Return sums or means: one per row of a matrix of ids, or per run from an offset."""
        ids, bags, count = _flat(np.asarray(input), offsets)
        if ids.size and not 0 <= ids.min() <= ids.max() < self.num_embeddings:
            raise IndexError(f"ids must be between 0 and {self.num_embeddings - 1}")
        parts = []
        for number, shard in enumerate(self.shards):
            mine = ids % len(self.shards) == number
            # Every shard gets every bag, with the ids that are its own, so that sums come back in
            # one shape.
            starts = np.searchsorted(bags[mine], np.arange(count))
            parts.append(shard(ids[mine] // len(self.shards), starts))
        # All shards at once: the calls were made above.
        first, *rest = await asyncio.gather(*parts)
        total: Tensor = sum(rest, first)
        if self.mode == "mean":
            sizes = np.maximum(np.bincount(bags, minlength=count), 1)
            total = total / sizes[:, None].astype(total.dtype)
        return total

    async def remote_parameters(self) -> list[RRef[Tensor]]:
        """Return an RRef to each shard's part of the table, for a DistributedOptimizer."""
        found = await asyncio.gather(*[shard.remote_parameters() for shard in self.shards])
        return [param for params in found for param in params]

    async def save(self, folder: str | os.PathLike[str]) -> None:
        """Let every shard write its part to a file in this folder, on its own machine."""
        await asyncio.gather(
            *[s.save(path) for s, path in zip(self.shards, self._files(folder), strict=True)]
        )

    async def load(self, folder: str | os.PathLike[str]) -> None:
        """Let every shard read what `save` of as many shards wrote."""
        await asyncio.gather(
            *[s.load(path) for s, path in zip(self.shards, self._files(folder), strict=True)]
        )

    def _files(self, folder: str | os.PathLike[str]) -> list[str]:
        count = len(self.shards)
        # The number of shards is in the name: rows are dealt out by it, so other files would not
        # fit.
        return [os.path.join(folder, f"shard{k}of{count}.npz") for k in range(count)]

    def __repr__(self) -> str:
        owners = ", ".join(shard.on for shard in self.shards)
        return f"<ShardedEmbeddingBag({self.num_embeddings}, {self.embedding_dim}) on {owners}>"


def _flat(ids: Any, offsets: Any) -> tuple[Any, Any, int]:
    """Return ids one after another, the bag of each, and the number of bags."""
    if ids.ndim == 2 and offsets is None:
        return ids.reshape(-1), np.repeat(np.arange(len(ids)), ids.shape[1]), len(ids)
    if ids.ndim != 1 or offsets is None:
        raise ValueError("give a matrix of ids, or a row of ids and the offsets of their bags")
    starts = np.asarray(offsets)
    return ids, np.searchsorted(starts, np.arange(len(ids)), side="right") - 1, len(starts)


__all__ = ["ShardedEmbeddingBag"]
