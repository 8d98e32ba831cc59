"""Torch tensors as arguments and results: in one process, between processes, without a context."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from collections import Counter
from typing import Any

import numpy as np
import pytest
import torch

import aiograd as ag
from aiograd.cluster import local
from aiograd.cluster.config import THREAD_VARIABLES
from aiograd.cluster.processes import forkserver
from aiograd.dist import foreign
from aiograd.errors import SerializationError
from aiograd.wire.codec import Travellers
from tests.torch import without_torch
from tests.torch.without_torch import is_loaded, seen, watch

PACKAGE_LOADED = "import sys; print('torch' in sys.modules, 'aiograd.torch' in sys.modules)"


def echo(value: Any) -> Any:
    return value


def facts(value: torch.Tensor) -> tuple[Any, ...]:
    return (
        type(value).__name__,
        value.requires_grad,
        value.is_leaf,
        value.stride(),
        value.sum().item(),
    )


def test_importing_aiograd_does_not_import_torch():
    program = "import aiograd; " + PACKAGE_LOADED
    found = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert found.stdout.split() == ["False", "False"]


@pytest.mark.parametrize(("cores", "threads"), [(2, 1), (7, 3)])
async def test_torch_computes_on_a_workers_part_of_the_cores(monkeypatch, cores, threads):
    for name in THREAD_VARIABLES:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(local, "_cores", lambda: cores)  # one of them is for the driver
    async with ag.LocalCluster(2, processes=True) as cluster:
        for worker in cluster:
            assert await worker.call(torch.get_num_threads) == threads
            assert (await worker.call(product, 400)).item() == 400


def product(size: int) -> torch.Tensor:
    return (torch.ones(size, size) @ torch.ones(size, size))[0, 0]


async def test_tensors_arrive_as_independent_leaves_outside_of_a_context():
    async with ag.LocalCluster(1, processes=False):
        x = torch.rand(3, 4).t().requires_grad_()
        assert await ag.rpc_async("worker0", facts, args=(x,)) == (
            *("Tensor", True, True, (1, 4)),
            x.sum().item(),
        )
        back = await ag.rpc_async("worker0", echo, args=({"a": [x, x], "n": torch.ones(2)},))
        assert torch.equal(back["a"][0], x)
        assert back["a"][0] is back["a"][1]
        assert not back["n"].requires_grad
        parameter = torch.nn.Parameter(torch.rand(2))
        assert (await ag.rpc_async("worker0", facts, args=(parameter,)))[:3] == (
            *("Parameter", True, True),
        )


async def test_modules_and_optimisers_arrive_whole_with_ties_kept():
    async with ag.LocalCluster(1, processes=False):
        model = torch.nn.Sequential(torch.nn.Linear(3, 3), torch.nn.ReLU(), torch.nn.Linear(3, 3))
        model[2].weight = model[0].weight
        optimiser = torch.optim.Adam(model.parameters())
        model(torch.ones(3)).sum().backward()
        optimiser.step()
        copy, other = await ag.rpc_async("worker0", echo, args=((model, optimiser),))
        assert copy[2].weight is copy[0].weight
        assert torch.equal(copy(torch.ones(3)), model(torch.ones(3)))
        assert other.param_groups[0]["params"][0] is copy[0].weight
        assert other.state[copy[0].weight]["step"] == 1


@pytest.mark.deadline(60)
async def test_worker_processes_take_large_tensors_by_shared_memory():
    async with ag.LocalCluster(2, processes=True):
        x = torch.rand(1024, 1024, dtype=torch.float32)
        for tensor in (x, x.t(), x.to(torch.bfloat16), x[::2]):
            found = await ag.rpc_async("worker1", echo, args=(tensor,))
            assert torch.equal(found, tensor)
            assert found.stride() == tensor.stride()
            found.add_(1)  # it is ours


@pytest.mark.deadline(60)
@pytest.mark.parametrize("workers", [1, 2])
async def test_a_fork_server_of_a_driver_with_torch_loads_it_once(workers: int):
    async with ag.LocalCluster(workers, processes=True):
        for number in range(workers):
            assert await ag.rpc_async(f"worker{number}", is_loaded)


async def ask(function: Any) -> tuple[list[str], str]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(forkserver, "PRELOAD", {})  # as from a driver that loads torch later
        async with ag.LocalCluster(1, processes=True):
            assert await ag.rpc_async("worker0", watch)
            await function()
            return await ag.rpc_async("worker0", seen)


@pytest.mark.deadline(60)
async def test_a_callee_imports_torch_off_its_loop():
    async def call() -> None:
        found = await asyncio.gather(
            *[ag.rpc_async("worker0", without_torch.echo, args=(torch.ones(3),)) for _ in range(3)]
        )
        assert all(torch.equal(each, torch.ones(3)) for each in found)

    threads, loop = await ask(call)
    assert len(threads) == 1
    assert loop not in threads


@pytest.mark.deadline(60)
async def test_a_caller_imports_torch_off_its_loop():
    async def call() -> None:
        # A reference, because the worker must not load this module, and torch with it.
        reference = ag.RRef(torch.ones(3))
        assert await ag.rpc_async("worker0", without_torch.fetch, args=(reference,)) == "Tensor"

    threads, loop = await ask(call)
    assert len(threads) == 1
    assert loop not in threads


async def test_a_worker_without_torch_says_so():
    travellers = Travellers()
    known = foreign.KNOWN[0]._replace(module="aiograd.no_such_module")
    travellers.promise(known.tag, known.class_name, lambda: foreign._load(known))
    with pytest.raises(SerializationError, match=r"aiograd\[torch\]"):
        travellers.tagged(known.tag)


async def test_what_has_no_memory_here_is_refused_by_name():
    async with ag.LocalCluster(1, processes=False):
        with pytest.raises(SerializationError, match="meta tensor"):
            await ag.rpc_async("worker0", echo, args=(torch.empty(2, device="meta"),))

        class Mine(torch.Tensor):
            pass

        with pytest.raises(SerializationError, match="Mine"):
            await ag.rpc_async("worker0", echo, args=(torch.ones(2).as_subclass(Mine),))


def needs_grad(x):
    return x * 2


@pytest.mark.parametrize("times", [1, 3], ids=["general", "fast"])
async def test_a_local_pass_that_ends_in_a_result_without_its_graph_warns(times, tmp_path):
    async with ag.LocalCluster(1, processes=False):
        w = torch.ones(2, requires_grad=True)
        for _ in range(times):
            y = await ag.rpc_async("worker0", needs_grad, args=(w,))
        with pytest.warns(ag.GraphCutWarning, match=r"needs_grad.*outside of a context"):
            y.sum().backward()
        async with ag.context() as ctx:
            await ctx.backward((y * 2).sum())  # shows the gradient of this very leaf
            assert ctx.gradients[y].tolist() == [2.0, 2.0]
        torch.save(y, tmp_path / "y.pt")  # says nothing of our hook
        own = y.detach().requires_grad_()
        own.sum().backward()
        sent = await ag.rpc_async("worker0", learns_here, args=(w,))
        assert sent.tolist() == [3.0, 3.0]


def learns_here(x):
    (x * 3).sum().backward()  # the gradient of an argument is wanted right here
    return x.grad


# ── the fast path ───────────────────────────────────────────────────────────────────────────────


@pytest.fixture
def general(monkeypatch) -> Counter[str]:
    """Count the tensors that take the general form."""
    taken: Counter[str] = Counter()
    traveller = ag.torch.TORCH.traveller
    depart, arrive = traveller.depart, traveller.arrive

    def departs(tensor, departure):
        taken["departed"] += 1
        return depart(tensor, departure)

    def arrives(data, arrival):
        taken["arrived"] += 1
        return arrive(data, arrival)

    monkeypatch.setattr(traveller, "depart", departs)
    monkeypatch.setattr(traveller, "arrive", arrives)
    return taken


def same(*values):
    return values


def plain(value):
    return value


async def test_tensors_take_the_fast_path_when_both_sides_have_sent_one(general):
    async with ag.LocalCluster(1, processes=False):
        x = torch.arange(6.0).reshape(2, 3)
        assert torch.equal(await ag.rpc_async("worker0", plain, args=(x,)), x)
        assert general == {"departed": 2, "arrived": 2}
        for _ in range(3):
            assert torch.equal(await ag.rpc_async("worker0", plain, args=(x,)), x)
        assert torch.equal(await ag.remote("worker0", plain, args=(x,)), x)
        assert general == {"departed": 2, "arrived": 2}


async def test_a_callee_that_sends_no_tensor_gets_the_general_form(general):
    async with ag.LocalCluster(1, processes=False):
        for number in range(1, 4):
            assert await ag.rpc_async("worker0", len, args=(torch.ones(5),)) == 5
            assert general == {"departed": number, "arrived": number}


@pytest.mark.parametrize(
    ("tensor", "fast"),
    [
        *[(torch.ones(2, 3).to(d), True) for d in (torch.float64, torch.int8, torch.bool)],
        (torch.ones(2, 3, dtype=torch.complex64), True),
        (torch.tensor(3.0), True),
        (torch.ones(0, 3), True),
        (torch.ones(300, 300), True),  # its memory is lent
        (torch.ones(2, 3, requires_grad=True), True),
        (torch.ones(2, 3, dtype=torch.bfloat16), False),
        (torch.ones(2, 3).t(), False),
        (torch.ones(2, 3).to_sparse(), False),
        (torch.ones(2, 3, dtype=torch.complex64).conj(), False),
        (torch.nn.Parameter(torch.ones(2)), False),
    ],
    ids=lambda value: f"{value.dtype} {tuple(value.shape)}" if torch.is_tensor(value) else "",
)
async def test_what_the_fast_path_cannot_take_goes_by_the_general_one(general, tensor, fast):
    async with ag.LocalCluster(1, processes=False):
        await ag.rpc_async("worker0", plain, args=(torch.ones(1),))
        before = general["departed"]
        arrived = await ag.rpc_async("worker0", plain, args=(tensor,))
        assert (general["departed"] == before) is fast
        assert type(arrived) is type(tensor)
        assert (arrived.dtype, arrived.layout) == (tensor.dtype, tensor.layout)
        assert arrived.requires_grad == tensor.requires_grad
        assert arrived.is_leaf
        assert torch.equal(arrived.to_dense(), tensor.to_dense())
        if tensor.layout is torch.strided:
            assert arrived.stride() == tensor.stride()
        if fast and tensor.numel():
            before = tensor.detach().clone()
            arrived.detach().zero_()  # it belongs to the receiver
            assert torch.equal(tensor.detach(), before)


async def test_attributes_and_identity_survive(general):
    async with ag.LocalCluster(1, processes=False):
        x, marked = torch.ones(2), torch.ones(2)
        marked.note = "kept"
        await ag.rpc_async("worker0", plain, args=(x,))
        assert (await ag.rpc_async("worker0", plain, args=(marked,))).note == "kept"
        a, b, c, d, e = await ag.rpc_async("worker0", same, args=(x, x, ag.ones(2), np.ones(2), 3))
        assert a is b
        assert (type(c), type(d), e) == (ag.Tensor, np.ndarray, 3)


async def test_edges_and_hooks_on_the_fast_path(general):
    async with ag.LocalCluster(1, processes=False):
        await ag.rpc_async("worker0", plain, args=(torch.ones(1),))
        before = general["departed"]
        x, w, y = [torch.full((2,), v, requires_grad=True) for v in (2.0, 3.0, 5.0)]
        mine = ag.ones(2, requires_grad=True)
        async with ag.context() as ctx:
            products = await ag.rpc_async("worker0", multiply, args=(x, mine, w, x))
            await ctx.backward(products[0].sum(), products[1].sum())
            assert ctx.gradients[x].tolist() == [3.0, 3.0]
            assert ctx.gradients[w].tolist() == [2.0, 2.0]
            assert ctx.gradients[mine].tolist() == [2.0, 2.0]
        assert general["departed"] == before + 1  # a tuple of results takes the general path
        async with ag.context() as ctx:
            z = await ag.rpc_async("worker0", torch.mul, args=(x, y))
            assert not z.is_leaf
            await ctx.backward(z.sum())
            assert ctx.gradients[x].tolist() == [5.0, 5.0]
        assert general["departed"] == before + 1


def multiply(x, mine, w, again):
    assert x is again
    return x * w, mine * 2
