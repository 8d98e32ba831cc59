"""Torch tensors to and from restricted peers: plain data only, checked before memory is touched."""

from __future__ import annotations

import numpy as np
import pytest
import torch

import aiograd as ag
from aiograd.errors import ProtocolError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Arrival
from aiograd.torch import TORCH
from tests.security.conftest import lookups, workers_by_mode

__all__ = ["lookups"]  # a fixture

WEIGHT = torch.full((3, 2), 0.5, dtype=torch.float64, requires_grad=True)
MODES = [("restricted", "restricted"), ("trusted", "restricted"), ("restricted", "trusted")]


@ag.expose
def project(x):
    return x @ WEIGHT


@ag.expose
def gradient_of_weight(context_id):
    return ag.get_gradients(context_id)[WEIGHT]


@ag.expose
def send_back(x):
    return x


@pytest.mark.parametrize("modes", MODES, ids="-".join)
async def test_tensors_and_gradients_cross_without_a_single_lookup(modes, lookups):
    async with workers_by_mode(*modes):
        large = torch.rand(200, 200).t()
        for tensor in (
            large,
            large.to(torch.bfloat16),
            torch.eye(3).to_sparse(),
            large[0].expand(2, 200),
        ):
            found = await ag.rpc_async("worker1", send_back, args=(tensor,))
            assert torch.equal(found.to_dense(), tensor.to_dense())
        x = torch.arange(6.0, dtype=torch.float64).reshape(2, 3).requires_grad_()
        async with ag.context() as ctx:
            h = x * 2
            y = await ag.rpc_async("worker1", project, args=(h,))
            await ctx.backward((y * y).sum() + (h * h).sum())
            there = await ag.rpc_async("worker1", gradient_of_weight, args=(ctx.id,))
            h = x * 2
            total = ((h @ WEIGHT) ** 2).sum() + (h * h).sum()
            expected = torch.autograd.grad(total, [x, WEIGHT])
            torch.testing.assert_close(ctx.gradients[x], expected[0])
            torch.testing.assert_close(there, expected[1])
    assert lookups == []


GOOD = ("dense", "float32", (4,), None, np.zeros(16, np.uint8))
BAD = {
    "a note that is no number": ("1", False, None, None, GOOD),
    "a negative note": (-1, False, None, None, GOOD),
    "attributes": (0, False, None, {"__class__": 1}, GOOD),
    "an unknown dtype": (0, False, "object", None, GOOD),
    "a dtype without gradients": (1, False, "int8", None, GOOD),
    "memory that is no tuple": (0, False, None, None, [1]),
    "too few fields": (0, False),
    "integers that need grad": (1, False, None, None, ("dense", "int32", (4,), None, GOOD[4])),
}


@pytest.mark.parametrize("data", BAD.values(), ids=BAD)
def test_what_does_not_fit_is_refused(data):
    arrival = Arrival(PeerInfo("stranger", 1, b"s" * 16), "call", True)
    with pytest.raises((ProtocolError, ValueError)):
        TORCH.traveller.arrive(data, arrival)
