"""A table spread over workers is one table."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag

ROWS, WIDTH = 23, 4
BAGS = np.random.default_rng(1).integers(0, ROWS, (6, 5))
RUNS = (BAGS.reshape(-1), np.array([0, 0, 7, 7, 20, 29]))  # some of them empty


async def whole(table: ag.nn.ShardedEmbeddingBag) -> np.ndarray:
    """All rows, in the order of their ids."""
    parts = [(await param).numpy() for param in await table.remote_parameters()]
    rows = np.empty((ROWS, WIDTH))
    for number, part in enumerate(parts):
        rows[number :: len(parts)] = part
    return rows


def rows_of_gradient(shard: ag.RRef, ctx_id: int) -> tuple[list[int], np.ndarray]:
    gradient = ag.get_gradients(ctx_id)[shard.local_value().weight]
    assert gradient.is_sparse
    places = np.unique(gradient.data.coalesce().indices[0]).tolist()
    return places, ag.sparse.to_dense(gradient).numpy()


@pytest.mark.parametrize("mode", ["sum", "mean"])
@pytest.mark.parametrize("ids", [(BAGS,), RUNS], ids=["matrix", "runs"])
async def test_values_and_gradients_are_those_of_one_table(cluster, mode: str, ids: Any):
    async with cluster(3):
        names = ["worker0", "worker1", "worker2"]
        table = await ag.nn.ShardedEmbeddingBag(names, ROWS, WIDTH, mode)
        local = ag.nn.EmbeddingBag(ROWS, WIDTH, mode)
        local.weight.data[...] = await whole(table)
        scale = np.arange(6.0)[:, None]
        expected = local(*ids)
        (expected * scale).sum().backward()
        async with ag.context() as ctx:
            found = await table(*ids)
            np.testing.assert_allclose(found.numpy(), expected.numpy(), rtol=1e-12)
            await ctx.backward((found * scale).sum())
            for number, shard in enumerate(table.shards):
                args = (shard.module_rref, ctx.id)
                places, dense = await ag.rpc_async(shard.on, rows_of_gradient, args=args)
                np.testing.assert_allclose(dense, local.weight.grad.numpy()[number::3], atol=1e-12)
                used = np.unique(ids[0])
                assert places == (used[used % 3 == number] // 3).tolist()


async def total_of(table: ag.nn.ShardedEmbeddingBag) -> float:
    return float((await table(BAGS)).sum())


async def test_it_can_be_sent_and_is_the_same_table_there(cluster):
    async with cluster(3):
        table = ag.nn.ShardedEmbeddingBag(["worker0", "worker1"], ROWS, WIDTH)
        assert await ag.rpc_async("worker2", total_of, args=(table,)) == await total_of(table)
        assert repr(table) == "<ShardedEmbeddingBag(23, 4) on worker0, worker1>"


async def test_what_was_saved_is_there_again_to_the_last_bit(cluster, tmp_path):
    async with cluster(2):
        names = ["worker0", "worker1"]
        rng = np.random.default_rng(5)
        table = await ag.nn.ShardedEmbeddingBag(names, ROWS, WIDTH, generator=rng)
        before = await whole(table)
        await table.save(tmp_path)
        assert sorted(p.name for p in tmp_path.iterdir()) == ["shard0of2.npz", "shard1of2.npz"]
        other = await ag.nn.ShardedEmbeddingBag(names, ROWS, WIDTH)
        assert not np.array_equal(await whole(other), before)
        await other.load(tmp_path)
        np.testing.assert_array_equal(await whole(other), before)
        same = await ag.nn.ShardedEmbeddingBag(
            names, ROWS, WIDTH, generator=np.random.default_rng(5)
        )
        np.testing.assert_array_equal(await whole(same), before)
        single = await ag.nn.ShardedEmbeddingBag(names[:1], ROWS, WIDTH)
        with pytest.raises(FileNotFoundError):
            await single.load(tmp_path)


async def test_what_makes_no_sense_is_refused(cluster):
    async with cluster(1):
        with pytest.raises(ValueError, match="mode"):
            ag.nn.ShardedEmbeddingBag(["worker0"], ROWS, WIDTH, "max")
        with pytest.raises(ValueError, match="spread"):
            ag.nn.ShardedEmbeddingBag([], ROWS, WIDTH)
        table = await ag.nn.ShardedEmbeddingBag(["worker0"], ROWS, WIDTH)
        for wrong in ([[ROWS]], [[-1]]):
            with pytest.raises(IndexError, match="between 0 and 22"):
                await table(wrong)
        with pytest.raises(ValueError, match="matrix"):
            await table([1, 2])
        assert (await table(np.zeros((0, 3), int))).shape == (0, WIDTH)
