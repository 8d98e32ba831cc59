"""Modules of torch on other workers."""

from __future__ import annotations

import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch

import aiograd as ag
from tests.torch.functions import DTYPE, fill, leaf


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(2, processes=False) as started:
        yield started


class Block(torch.nn.Module):
    """A parameter, a tied one, a buffer, and what differs between the modes."""

    def __init__(self, size: int, dtype: torch.dtype = DTYPE) -> None:
        super().__init__()
        self.first = torch.nn.Linear(size, size, dtype=dtype)
        self.second = torch.nn.Linear(size, size, dtype=dtype)
        self.second.weight = self.first.weight
        self.norm = torch.nn.BatchNorm1d(size, dtype=dtype)
        fill(self)

    def forward(self, x: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        return self.second(self.norm(self.first(x)).tanh()) * scale


def remote(size: int = 3, **kwargs: Any) -> ag.torch.RemoteModule[Block]:
    return ag.torch.RemoteModule("worker1", Block, args=(size,), kwargs=kwargs)


async def test_a_module_elsewhere_has_the_gradients_of_one_here(cluster):
    m, here, x = remote(), Block(3), leaf(5, 3)
    async with ag.context() as ctx:
        y = await m(x, scale=2.0)
        await ctx.backward((y * y).sum())
        torch.testing.assert_close(y.detach(), (out := here(x, scale=2.0)).detach())
        expected = torch.autograd.grad((out * out).sum(), [x, *here.parameters()])
        torch.testing.assert_close(ctx.gradients[x], expected[0])
        found = await at(m, gradients)
        torch.testing.assert_close(found, list(expected[1:]))
    params = await m.remote_parameters()
    assert [p.owner_name() for p in params] == ["worker1"] * 5  # the tied one once


def at(m: Any, function: Any) -> Any:
    """Call a function with the module, at its owner."""
    return ag.rpc_async(m.on, on_value, args=(function, m.module_rref))


def on_value(function: Any, rref: ag.RRef) -> Any:
    return function(rref.local_value())


def gradients(module: Block) -> list[torch.Tensor]:
    found = ag.current_context().gradients
    return [found[p] for p in module.parameters()]


async def test_a_model_here_and_there_learns_with_an_optimiser_of_torch(cluster):
    m, x = remote(), leaf(8, 3).detach()
    opt = await ag.torch.DistributedOptimizer(torch.optim.Adam, await m.remote_parameters(), lr=0.1)
    losses = []
    for _ in range(8):
        async with ag.context() as ctx:
            loss = (await m(x)).square().mean()
            await ctx.backward(loss)
            await opt.step(ctx)
        losses.append(loss.item())
    here = Block(3)
    theirs = torch.optim.Adam(here.parameters(), lr=0.1)
    for mine in losses:
        theirs.zero_grad()
        loss = here(x).square().mean()
        loss.backward()
        theirs.step()
        assert mine == pytest.approx(loss.item())


async def test_modes_and_handles(cluster):
    m = await remote()
    await m.eval()
    assert not await at(m, is_training)
    assert await at(await m.train(), is_training)
    again = await ag.rpc_async("worker0", same, args=(m,))
    assert type(again) is ag.torch.RemoteModule
    assert again.within(3.0).timeout == 3.0
    assert type(again.within(3.0)) is ag.torch.RemoteModule
    assert (await again(leaf(2, 3))).shape == (2, 3)
    with pytest.raises(ValueError, match="remote_parameters"):
        m.parameters()


def is_training(module: Block) -> bool:
    return module.training


def same(value: Any) -> Any:
    return value


async def test_what_is_no_module_of_torch_is_refused_with_the_cure(cluster):
    with pytest.raises(TypeError, match=r"ag\.nn\.RemoteModule"):
        ag.torch.RemoteModule("worker1", ag.nn.Linear, args=(2, 2))
    with pytest.raises(TypeError, match="not of an instance"):
        ag.torch.RemoteModule("worker1", Block(2))
    with pytest.raises(ValueError, match=r"nn\.Module"):
        await ag.torch.RemoteModule("worker1", torch.ones, args=(2,))


async def test_a_module_made_by_a_plain_call_is_one_too(cluster):
    rref = ag.remote("worker1", torch.nn.Linear, args=(3, 2))
    m = ag.torch.RemoteModule.init_from_module_rref("worker1", rref)
    assert (await m(torch.ones(1, 3))).shape == (1, 2)
    same = ag.nn.RemoteModule("worker1", torch.nn.Linear, args=(3, 2))
    assert (await same(torch.ones(1, 3))).shape == (1, 2)


# ── state ───────────────────────────────────────────────────────────────────────────────────────


async def test_a_state_dict_comes_and_goes(cluster):
    m, here = remote(), Block(3)
    with torch.no_grad():
        here.first.weight.mul_(2)
        here.norm.running_mean.add_(1)
    await m.module_rref.rpc_async().load_state_dict(here.state_dict())
    found = await m.module_rref.rpc_async().state_dict()
    for name, tensor in here.state_dict().items():
        assert torch.equal(found[name], tensor), name


@pytest.mark.parametrize("name", ["block.safetensors", "block.npz", "block.pt"])
async def test_the_owner_writes_and_reads_its_state(cluster, tmp_path: Path, name: str):
    if name.endswith(".safetensors"):
        pytest.importorskip("safetensors")
    m, other = remote(), remote()
    await at(m, double)
    await m.save(tmp_path / name)
    assert os.listdir(tmp_path) == [name]
    await other.load(tmp_path / name)
    mine, read = [await each.module_rref.rpc_async().state_dict() for each in (m, other)]
    assert mine.keys() == read.keys()
    for key, tensor in mine.items():
        assert torch.equal(tensor, read[key]), key
    assert await at(other, is_tied)
    if name == "block.npz":
        assert ag.load(tmp_path / name)["first.weight"].shape == (3, 3)


def double(module: Block) -> None:
    with torch.no_grad():
        module.first.weight.mul_(2)


def is_tied(module: Block) -> bool:
    return module.first.weight is module.second.weight


async def test_a_dtype_that_a_format_cannot_hold_is_named(cluster, tmp_path: Path):
    m = remote(dtype=torch.bfloat16)
    with pytest.raises(TypeError, match=r"first\.weight is a torch\.bfloat16"):
        await m.save(tmp_path / "block.npz")
    assert not os.listdir(tmp_path)
    await m.save(tmp_path / "block.pt")
    await m.load(tmp_path / "block.pt")


async def test_a_pickle_in_a_file_is_not_run(cluster, tmp_path: Path):
    class Code:
        def __reduce__(self) -> Any:
            return Path.touch, (tmp_path / "run",)

    torch.save({"first.weight": Code()}, tmp_path / "bad.pt")
    with pytest.raises(pickle.UnpicklingError):
        await remote().load(tmp_path / "bad.pt")
    assert not (tmp_path / "run").exists()
