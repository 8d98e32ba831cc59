"""What cannot work is refused with the tensor, the worker and the cure; nothing else is lost."""

from __future__ import annotations

import subprocess
import sys
from types import SimpleNamespace
from typing import Any

import pytest
import torch

import aiograd as ag
from aiograd.errors import BackwardFailed, GradError, SerializationError
from aiograd.torch.memory import take_apart
from tests.torch import functions as there
from tests.torch.functions import LEAVES, leaf


@pytest.fixture(autouse=True)
def leaves():
    LEAVES.update(u=leaf(4, seed=1))
    yield
    LEAVES.clear()


@pytest.fixture
async def cluster():
    async with ag.LocalCluster(2, processes=False) as started:
        yield started


def call(function: Any, *args: Any) -> Any:
    return ag.rpc_async("worker1", function, args=args)


async def goes_on(x: torch.Tensor) -> None:
    """A pass after the refusal gives the right gradient."""
    async with ag.context() as ctx:
        await ctx.backward((await call(there.times, x)).sum())
        torch.testing.assert_close(ctx.gradients[x], LEAVES["u"].detach())


def test_a_cuda_tensor_is_refused_with_the_cure():
    # A torch without CUDA cannot make one: this has all that is looked at.
    tensor: Any = SimpleNamespace(device=torch.device("cuda", 0), shape=(2, 3))
    with pytest.raises(SerializationError, match=r"cuda tensor of shape \(2, 3\).*device map.*cpu"):
        take_apart(tensor)


@pytest.mark.parametrize(
    ("make", "text"),
    [
        (lambda: torch.empty(2, 3, device="meta"), r"meta tensor of shape \(2, 3\).*real one"),
        (lambda: torch.ones(2).as_subclass(Mine), "Mine.*plain tensor"),
        (lambda: {"deep": [torch.empty(1, device="meta")]}, "meta"),
    ],
    ids=["meta", "subclass", "nested"],
)
async def test_what_cannot_travel_is_refused_there_and_back(cluster, make, text):
    with pytest.raises(SerializationError, match=text):
        await call(there.identity, make())
    with pytest.raises(SerializationError, match=text):
        await call(made_there, make)
    await goes_on(leaf(4))


class Mine(torch.Tensor):
    pass


def made_there(make: Any) -> Any:
    return make()


async def test_compiled_autograd_is_refused_inside_a_pass(cluster):
    compiled = pytest.importorskip("torch._dynamo.compiled_autograd")
    x = leaf(4)
    async with ag.context() as ctx:
        y = (x * x).sum()
        with (
            compiled._enable(lambda graph: graph),
            pytest.raises(GradError, match=r"compiled autograd.*switch it off") as caught,
        ):
            await ctx.backward(y)
        assert caught.value.reason == "compiled"
    await goes_on(x)


async def test_a_local_backward_through_a_received_tensor_raises_and_the_pass_still_works(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        y = await call(there.times, x)
        for run in (lambda: y.sum().backward(), lambda: torch.autograd.grad(y.sum(), [x])):
            with pytest.raises((GradError, RuntimeError), match=r"ctx\.backward|not have been"):
                run()
        assert x.grad is None
        await ctx.backward(y.sum())
        torch.testing.assert_close(ctx.gradients[x], LEAVES["u"].detach())


async def test_a_write_to_what_backward_needs_names_the_worker_and_the_next_pass_is_right(cluster):
    x = leaf(4)
    async with ag.context() as ctx:
        with pytest.raises(BackwardFailed, match=r"inplace operation.*into a copy") as caught:
            await ctx.backward((await call(there.spoils, x)).sum())
        assert caught.value.worker == "worker1"
    await goes_on(x)


MISSING = """
import torch
del torch._C._storage_Use_Count  # as a torch of another version may not have it
try:
    import aiograd.torch
except ImportError as error:
    print(error)
"""


def test_a_torch_of_another_version_says_what_is_missing_and_what_is_known_to_work():
    done = subprocess.run([sys.executable, "-c", MISSING], capture_output=True, text=True)
    assert torch.__version__ in done.stdout, done.stderr[-2000:]
    assert "_storage_Use_Count" in done.stdout
    assert "torch 2.13" in done.stdout
