"""Small operations of torch run on the loop of the callee, others in a thread."""

from __future__ import annotations

import threading

import pytest
import torch

import aiograd as ag
from aiograd.rpc.callee.functions import LIGHT
from aiograd.torch.light import is_light


@pytest.mark.parametrize(
    ("args", "light"),
    [
        ((torch.ones(3, 3), torch.ones(3, 3)), True),
        ((torch.ones(3, 3), 2.0), True),
        ((torch.ones(4096),), True),
        ((torch.ones(4097),), False),
        ((torch.ones(2000, 1), torch.ones(1, 2000)), False),  # the result is large
        (([torch.ones(3)],), False),
        ((torch.ones(3), "text"), False),
    ],
)
def test_small_arguments_are_light(args, light):
    assert is_light(args) is light


async def test_a_light_function_runs_on_the_loop_and_another_in_a_thread(monkeypatch):
    here = threading.get_ident()
    async with ag.LocalCluster(1, processes=False):
        assert await ag.rpc_async("worker0", threading.get_ident) != here
        monkeypatch.setitem(LIGHT, threading.get_ident, lambda args: True)
        assert [await ag.rpc_async("worker0", threading.get_ident) for _ in range(3)] == [here] * 3
        assert await ag.remote("worker0", threading.get_ident) == here
        monkeypatch.setitem(LIGHT, threading.get_ident, lambda args: False)
        assert await ag.rpc_async("worker0", threading.get_ident) != here


async def test_operations_give_the_same_wherever_they_run():
    async with ag.LocalCluster(1, processes=False):
        for size in (3, 100):
            x = torch.randn(size, size)
            for function in (torch.add, torch.mm, torch.Tensor.mul):
                found = await ag.rpc_async("worker0", function, args=(x, x))
                assert torch.equal(found, function(x, x))
            found = await ag.rpc_async("worker0", torch.sum, args=(x,), kwargs={"dim": 0})
            assert torch.equal(found, x.sum(dim=0))
        with pytest.raises(RuntimeError, match="size"):
            await ag.rpc_async("worker0", torch.add, args=(torch.ones(2), torch.ones(3)))
