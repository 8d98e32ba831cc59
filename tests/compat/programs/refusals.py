"""What the drop-in does not support says so in one sentence when it is used.

Tests, which run in a process of their own: others fork from theirs, where no worker may have run.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import aiograd.compat.torch_rpc as rpc
from aiograd.compat.torch_rpc import autograd, process
from aiograd.compat.torch_rpc.nn import RemoteModule


def options(folder: Path, **given: Any) -> Any:
    return rpc.TensorPipeRpcBackendOptions(init_method=f"file://{folder}/store", **given)


@pytest.fixture
def alone(tmp_path: Path) -> Iterator[None]:
    """This process is the only worker."""
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=options(tmp_path))
    try:
        yield
    finally:
        rpc.shutdown()


def test_device_maps_are_refused_before_anything_starts(tmp_path: Path) -> None:
    given = options(tmp_path)
    given.device_maps = {"other": {torch.device("cuda:0"): torch.device("cuda:1")}}
    with pytest.raises(ValueError, match=r"device_maps .* not supported .* move tensors to"):
        rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=given)
    assert not process.is_set()


def test_options_of_tensorpipe_are_accepted(tmp_path: Path) -> None:
    given = options(tmp_path, _transports=["uv"], num_worker_threads=3)
    rpc.init_rpc("me", rank=0, world_size=1, rpc_backend_options=given)
    assert rpc.rpc_sync("me", torch.add, args=(torch.ones(1), 1)).tolist() == [2]
    rpc.shutdown()


def test_scripted_remote_modules_are_refused(alone: None) -> None:
    with pytest.raises(ValueError, match="scripted RemoteModule is not supported"):
        RemoteModule("me/cpu", nn.Linear, args=(2, 2), _module_interface_cls=object)
    with pytest.raises(ValueError, match=r"cuda.* not supported"):
        RemoteModule("me/cuda:0", nn.Linear, args=(2, 2))


def test_the_legacy_profiler_is_refused(alone: None) -> None:
    for use in (rpc._server_process_global_profile, rpc.RRef(1)._get_profiling_future):
        with pytest.raises(RuntimeError, match=r"legacy profiler is not supported"):
            use()


def test_a_call_under_the_legacy_profiler_warns(alone: None) -> None:
    with (
        torch.autograd.profiler_legacy.profile(),
        pytest.warns(UserWarning, match="legacy profiler is not supported"),
    ):
        assert rpc.rpc_sync("me", len, args=([],)) == 0


def test_a_meta_tensor_and_an_open_context_are_named(alone: None) -> None:
    with pytest.raises(RuntimeError, match="meta tensor"):
        rpc.rpc_sync("me", torch.add, args=(torch.empty(2, device="meta"), 1))
    with autograd.context(), pytest.raises(RuntimeError, match="Already have an autograd context"):
        autograd.context().__enter__()


def test_before_the_start_every_name_says_what_to_call(tmp_path: Path) -> None:
    for use in (lambda: rpc.rpc_sync("me", len, args=([],)), rpc.get_worker_info, rpc.shutdown):
        with pytest.raises(RuntimeError, match="init_rpc"):
            use()
