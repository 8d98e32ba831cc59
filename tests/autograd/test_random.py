"""Random numbers without a generator: fresh, or the same after `manual_seed`."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np
import pytest

import aiograd as ag


@pytest.fixture(autouse=True)
def _unseeded() -> Iterator[None]:
    yield
    ag.manual_seed(None)


def drawn() -> list[np.ndarray]:
    layer, gru = ag.nn.Linear(3, 4), ag.nn.GRU(2, 3)
    made = [ag.rand(3), ag.randn(2, 2), ag.randint(0, 1000, (4,)), ag.randn_like(ag.zeros(2))]
    made += [layer.weight, layer.bias, gru.weight_ih_l0, ag.nn.Embedding(3, 2).weight]
    return [t.numpy() for t in [*made, ag.dropout(ag.ones(64))]]


def test_without_a_seed_numbers_are_fresh():
    assert any((a != b).any() for a, b in zip(drawn(), drawn(), strict=True))


def test_a_seed_makes_makers_layers_and_dropout_repeat():
    ag.manual_seed(7)
    first = drawn()
    assert (ag.rand(3).numpy() != first[0]).all()  # the generator goes on
    ag.manual_seed(7)
    for a, b in zip(first, drawn(), strict=True):
        np.testing.assert_array_equal(a, b)
    ag.manual_seed(8)
    assert (ag.rand(3).numpy() != first[0]).any()


def test_an_own_generator_is_not_touched_by_the_seed():
    ag.manual_seed(7)
    first = ag.randn(3, generator=np.random.default_rng(1)).numpy()
    following = ag.randn(3).numpy()
    ag.manual_seed(7)
    np.testing.assert_array_equal(ag.randn(3).numpy(), following)
    np.testing.assert_array_equal(ag.randn(3, generator=1).numpy(), first)


def test_none_goes_back_to_fresh_numbers():
    ag.manual_seed(7)
    first = ag.rand(3).numpy()
    ag.manual_seed(None)
    ag.rand(3)
    ag.manual_seed(7)
    np.testing.assert_array_equal(ag.rand(3).numpy(), first)


@pytest.mark.parametrize("seed", [None, 7])
def test_a_checkpointed_dropout_has_the_mask_of_its_first_run_in_backward(seed):
    ag.manual_seed(seed)
    x = ag.ones(1000, requires_grad=True)
    y = ag.checkpoint(lambda x: ag.dropout(x, 0.5))(x)
    ag.rand(5)  # what is drawn in between does not matter
    y.sum().backward()
    np.testing.assert_array_equal(x.grad.numpy(), y.numpy())
    assert 0 < (y.numpy() == 0).sum() < 1000


def test_two_calls_of_a_checkpoint_and_nested_ones_draw_different_numbers():
    def inner(x):
        return ag.dropout(x, 0.5)

    def outer(x):
        return ag.checkpoint(inner)(x) + 2 * ag.checkpoint(inner)(ag.dropout(x, 0.1))

    x = ag.ones(1000, requires_grad=True)
    first, second = ag.checkpoint(outer)(x), ag.checkpoint(outer)(x)
    assert (first.numpy() != second.numpy()).any()
    first.sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), first.numpy())


async def test_a_worker_process_has_a_generator_of_its_own():
    async with ag.LocalCluster(2):
        for name in ("worker0", "worker1"):
            await ag.rpc_async(name, ag.manual_seed, args=(7,))
        there = [await ag.rpc_async(name, ag.rand, args=(3,)) for name in ("worker0", "worker1")]
        np.testing.assert_array_equal(there[0].numpy(), there[1].numpy())
    ag.manual_seed(7)
    np.testing.assert_array_equal(ag.rand(3).numpy(), there[0].numpy())


async def test_a_table_in_shards_repeats_with_the_seed_of_its_maker():
    async with ag.LocalCluster(2, processes=False):
        tables = []
        for _ in range(2):
            ag.manual_seed(3)
            bag = await ag.nn.ShardedEmbeddingBag(["worker0", "worker1"], 6, 2)
            tables.append((await bag(np.arange(6)[:, None])).numpy())
        np.testing.assert_array_equal(*tables)
