"""Mistakes that beginners make: each is one error that names what to write instead.

The rows are those that a newcomer met. Every one of them used to end in a message about the
library's insides, or in none.
"""

from __future__ import annotations

import importlib
import os
import signal
import sys
from pathlib import Path

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import DuplicateName, MissingGradient, RpcError, WorkerClosed, WorkerLost


def square(x):
    return x * x


def die(number: int) -> None:
    os.kill(os.getpid(), number)
    signal.pause()


# ── a forgotten await ───────────────────────────────────────────────────────────────────────────


async def test_an_attribute_of_a_result_that_was_not_awaited(cluster):
    async with cluster(1):
        call = ag.rpc_async("worker0", square, args=(ag.ones(3),))
        with pytest.raises(AttributeError) as caught:
            call.sum()
        assert str(caught.value) == (
            "'Future' object has no attribute 'sum': it stands for the answer of square(), "
            "which `await` gives; did you forget it?"
        )
        assert not hasattr(call, "__array__")  # numpy looks for it, and is told no more than that
        await call


@pytest.mark.parametrize("use", [list, tuple, lambda call: (*call,)])
async def test_iterating_over_a_result_that_was_not_awaited(cluster, use):
    async with cluster(1):
        call = ag.rpc_async("worker0", square, args=(np.ones(3),))
        with pytest.raises(TypeError, match=r"stands for the answer of square\(\).* `await`"):
            use(call)
        await call


async def test_remote_parameters_that_were_not_awaited(cluster):
    async with cluster(1):
        module = ag.nn.RemoteModule("worker0", ag.nn.Linear, args=(2, 2))
        parameters = module.remote_parameters()
        with pytest.raises(TypeError, match=r"did you forget `await`, as in `await m\.remote_par"):
            ag.optim.DistributedOptimizer(ag.optim.SGD, parameters, lr=0.1)
        with pytest.raises(TypeError, match="did you forget it"):
            iter(parameters)
        assert len(await parameters) == 2


# ── gradients ───────────────────────────────────────────────────────────────────────────────────


async def test_a_missing_gradient_says_why_and_does_not_show_the_tensor(cluster):
    async with cluster(1), ag.context() as ctx:
        w, other = ag.ones(3, requires_grad=True), ag.ones(4, 5, requires_grad=True)

        def why(key: object) -> str:
            with pytest.raises(KeyError) as caught:
                ctx.gradients[key]
            assert isinstance(caught.value, MissingGradient)
            assert caught.value.reason == "missing"
            return str(caught.value)

        y = await ag.rpc_async("worker0", square, args=(w,))
        # `ctx.backward(...)` without await is where this is met.
        assert why(w) == (
            "this tensor of shape (3,) has no gradient in this context: no backward pass has "
            "ended here; `await ctx.backward(loss)` first"
        )
        await ctx.backward(y.sum())
        assert ctx.gradients[w].tolist() == [2.0, 2.0, 2.0]
        assert "(4, 5)" in why(other)
        assert "no root of a backward pass depends on it" in why(other)
        assert "it is no leaf, but a result of mul" in why(w * 2)
        assert "it does not require grad" in why(ag.ones(3))
        assert why("w") == "gradients are looked up by Tensor, not by str"
        assert ctx.gradients.get(other) is None


# ── modules ─────────────────────────────────────────────────────────────────────────────────────


async def test_a_remote_module_of_an_instance(cluster):
    async with cluster(1):
        with pytest.raises(TypeError, match=r"not of an instance: RemoteModule\(to, Linear, args="):
            ag.nn.RemoteModule("worker0", ag.nn.Linear(2, 2))


async def test_the_state_of_a_remote_module_has_another_way(cluster):
    async with cluster(1):
        module = ag.nn.RemoteModule("worker0", ag.nn.Linear, args=(2, 2))
        with pytest.raises(ValueError, match=r"`await m\.module_rref\.rpc_async\(\)\.state_dict"):
            module.state_dict()
        assert set(await module.module_rref.rpc_async().state_dict()) == {"weight", "bias"}
        with pytest.raises(ValueError, match=r"at the owner: `await .*\.zero_grad\(\.\.\.\)`"):
            module.zero_grad()


# ── modules that only one side can import ───────────────────────────────────────────────────────


@pytest.fixture
def only_here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """A module that this process can import, and workers that are started before it cannot."""
    (tmp_path / "only_here.py").write_text(
        "class Thing:\n    pass\n\ndef work(x):\n    return x\n\ndef give():\n    return Thing()\n"
    )

    def load():
        monkeypatch.syspath_prepend(str(tmp_path))
        return importlib.import_module("only_here")

    yield load
    sys.modules.pop("only_here", None)


@pytest.mark.parametrize("what", ["function", "argument"])
async def test_something_that_a_worker_cannot_import(cluster, only_here, what):
    async with cluster(1, processes=True):
        module = only_here()
        call = (module.work, (1,)) if what == "function" else (square, (module.Thing(),))
        with pytest.raises(ModuleNotFoundError) as caught:
            await ag.rpc_async("worker0", *call)
        hint, origin = caught.value.__notes__
        thing = {"function": "the function only_here.work", "argument": "the arguments of square()"}
        assert thing[what] in hint
        assert "could not be found on worker0: it travels by reference" in hint
        assert "(there is no only_here)" in hint
        name = {"function": "work", "argument": "square"}[what]
        assert origin.startswith(f"raised by {name}() on worker0:")
        assert "could not be found" not in origin  # once


async def test_a_result_that_this_process_cannot_import(cluster, tmp_path):
    (tmp_path / "only_there.py").write_text("class Thing:\n    pass\n")

    def give(folder):
        sys.path.insert(0, folder)
        return __import__("only_there").Thing()

    async with cluster(1, processes=True):
        with pytest.raises(ModuleNotFoundError) as caught:
            await ag.rpc_async("worker0", give, args=(str(tmp_path),))
        hint = caught.value.__notes__[0]
        assert hint.startswith("something in the result of ")
        assert "give() could not be found on driver: it travels by reference" in hint


# ── dead workers ────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize(
    ("func", "argument", "how"),
    [
        (die, signal.SIGKILL, "killed by SIGKILL (out of memory?)"),
        (die, signal.SIGSEGV, "killed by SIGSEGV"),
        (os._exit, 7, "exit code 7"),
    ],
)
@pytest.mark.parametrize("workers", [1, 2], ids=["spawned", "forked"])
async def test_a_dead_worker_says_how_it_ended(cluster, func, argument, how, workers):
    async with cluster(workers, processes=True):
        with pytest.raises(WorkerLost) as caught:
            await ag.rpc_async("worker0", func, args=(int(argument),))
        assert caught.value.why == f"its process ended: {how}"
        if workers == 2:  # other workers are told as much

            async def other() -> str:
                try:
                    await ag.rpc_async("worker0", max, args=(1, 2))
                except WorkerLost as error:
                    return error.why
                return ""

            assert await ag.rpc_async("worker1", other) == f"its process ended: {how}"


async def test_a_worker_that_its_cluster_killed_was_not_out_of_memory(cluster):
    async with cluster(1, processes=True) as made:
        await made.kill("worker0")
        with pytest.raises(WorkerLost) as caught:
            await made["worker0"].call(max, 1, 2)
        assert caught.value.why == "its process ended: killed by SIGKILL"


# ── names, ranks and clusters ───────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("names", [["a", "a"], ["a", "A"], ["driver", "b"], ["", "b"], "ab", ["a"]])
def test_bad_names_are_one_type_of_error(names):
    with pytest.raises(ValueError, match="name"):
        ag.LocalCluster(2, names=names)


def test_duplicate_names_are_an_rpc_error_too():
    with pytest.raises(RpcError) as caught:
        ag.LocalCluster(2, names=["a", "a"])
    assert type(caught.value) is DuplicateName


@pytest.mark.parametrize(
    "use",
    [
        lambda cluster: cluster["worker0"],
        lambda cluster: cluster.workers,
        lambda cluster: list(cluster),
        lambda cluster: cluster.logs("worker0"),
        lambda cluster: cluster.driver,
    ],
)
def test_a_cluster_that_was_not_awaited(use):
    with pytest.raises(WorkerClosed, match=r"not started: write `cluster = await ag\.LocalCluster"):
        use(ag.LocalCluster(2))


def test_a_rank_that_does_not_fit_into_an_id():
    assert ag.Worker("a", rank=65_535, rendezvous="h:1").name == "a"
    with pytest.raises(ValueError, match="rank 65536 is too large: ranks are 0 to 65535"):
        ag.Worker("a", rank=65_536, rendezvous="h:1")
    with pytest.raises(ValueError, match="too large"):
        ag.Worker("a", rank=0, world_size=65_537, rendezvous="h:1")
