"""Modules that live on another worker."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import RRefError


class Words(ag.nn.Module):
    """Gives back what it gets, and one parameter."""

    def __init__(self, first: float = 1.0) -> None:
        super().__init__()
        self.param1 = ag.nn.Parameter(ag.tensor([first]))

    def forward(self, tensor: Any, number: Any, word: str = "default") -> tuple[str, Any, Any]:
        return word, number, tensor


class Scale(ag.nn.Module):
    def __init__(self, factor: float) -> None:
        super().__init__()
        self.factor = ag.nn.Parameter(ag.tensor([factor, factor]))

    def forward(self, x: ag.Tensor) -> ag.Tensor:
        return x * self.factor


class NotAModule:
    pass


async def test_rm_bad_module(workers):
    async with workers(2):
        for cls in (NotAModule, dict):
            module = ag.nn.RemoteModule("worker1", cls)
            for _ in range(2):
                with pytest.raises(ValueError, match=cls.__name__):
                    await module.forward()
            with pytest.raises(ValueError, match=cls.__name__):
                await module


async def test_rm_forward(workers):
    tensor = ag.ones(1)
    async with workers(2):
        module = ag.nn.RemoteModule("worker1", Words, args=(1.0,))
        for run in (module, module.forward, module.forward_async):
            word, number, received = await run(tensor, 2, "3")
            assert (word, number, received.tolist()) == ("3", 2, [1.0])
            assert (await run(tensor, number=2))[0] == "default"
            assert (await run(word="w", tensor=tensor, number=2))[0] == "w"
        future = module.forward_async(tensor, 2)
        assert isinstance(future, ag.Future)
        await future
        assert await module is module


async def test_rm_forward_carries_gradients(workers):
    x = ag.tensor([1.0, 2.0], requires_grad=True)
    async with workers(2):
        module = ag.nn.RemoteModule("worker1", Scale, kwargs={"factor": 3.0})
        (factor,) = await module.remote_parameters()
        async with ag.context() as ctx:
            await ctx.backward((await module(x)).sum())
            assert ctx.gradients[x].tolist() == [3.0, 3.0]
            found = await ag.rpc_async("worker1", gradient_of, args=(factor, ctx.id))
            assert found.tolist() == [1.0, 2.0]


def gradient_of(rref: ag.RRef, context_id: int) -> ag.Tensor:
    return ag.get_gradients(context_id)[rref.local_value()]


def is_training(rref: ag.RRef) -> bool:
    return rref.local_value().training


async def test_rm_parameters(workers):
    async with workers(2):
        module = ag.nn.RemoteModule("worker1", Words, args=(4.0,))
        parameters = await module.remote_parameters()
        assert len(parameters) == 1
        assert isinstance(parameters[0], ag.RRef)
        assert parameters[0].owner_name() == "worker1"
        assert (await parameters[0].to_here()).tolist() == [4.0]
        again = await module.remote_parameters()
        assert again[0] is not parameters[0]


async def test_rm_parameters_and_the_reference_to_the_module_itself(workers):
    async with workers(2):
        module = ag.nn.RemoteModule("worker1", Words, args=(4.0,))
        assert module.get_module_rref() is module.module_rref
        copy = await module.module_rref.to_here()
        assert isinstance(copy, Words)
        assert copy.param1.tolist() == [4.0]
        await module.eval()
        assert not await ag.rpc_async("worker1", is_training, args=(module.module_rref,))
        await module.train()
        assert await ag.rpc_async("worker1", is_training, args=(module.module_rref,))
        await module.train(False)
        assert not await ag.rpc_async("worker1", is_training, args=(module.module_rref,))


LOCAL_ONLY = (
    "register_buffer register_parameter add_module apply to type half float double bfloat16 cpu "
    "cuda register_backward_hook register_forward_pre_hook register_forward_hook state_dict "
    "load_state_dict parameters named_parameters buffers named_buffers children named_children "
    "modules named_modules requires_grad_ zero_grad share_memory extra_repr"
).split()


async def test_rm_unsupported(workers):
    async with workers(2):
        module = await ag.nn.RemoteModule("worker1", Words)
        for name in LOCAL_ONLY:
            with pytest.raises(ValueError, match=rf"{name}\(\) is not supported"):
                getattr(module, name)()
        with pytest.raises(ValueError, match="remote_parameters"):
            module.parameters()
        with pytest.raises(AttributeError, match="no_such_thing"):
            module.no_such_thing  # noqa: B018


async def use_elsewhere(module: ag.nn.RemoteModule, x: ag.Tensor) -> tuple[list[str], Any]:
    return sorted(vars(module)), await module.forward(x, 1, "here")


async def test_rm_send(workers):
    async with workers(3):
        module = ag.nn.RemoteModule("worker1", Words)
        module.added_later = "stays here"
        for to in ("worker2", "worker1"):
            arrived, (word, number, tensor) = await ag.rpc_async(
                to, use_elsewhere, args=(module, ag.ones(2))
            )
            assert arrived == ["module_rref", "on"]
            assert (word, number, tensor.tolist()) == ("here", 1, [1.0, 1.0])
        assert module.added_later == "stays here"


async def build_and_use(rref: ag.RRef, x: ag.Tensor) -> Any:
    module = ag.nn.RemoteModule.init_from_module_rref("worker1", rref)
    return await module.forward(x)


async def test_rm_from_rref(workers):
    x = ag.tensor([1.0, 2.0])
    async with workers(3):
        module = ag.nn.RemoteModule("worker1", Scale, args=(3.0,))
        expected = await module(x)
        found = await ag.rpc_async("worker2", build_and_use, args=(module.module_rref, x))
        np.testing.assert_array_equal(found.numpy(), expected.numpy())
        with pytest.raises(ValueError, match="worker1"):
            ag.nn.RemoteModule.init_from_module_rref("worker2", module.module_rref)


async def test_rm_no_plain_pickle(workers):
    async with workers(2):
        module = ag.nn.RemoteModule("worker1", Words)
        with pytest.raises(RRefError, match="inside a call"):
            pickle.dumps(module)
