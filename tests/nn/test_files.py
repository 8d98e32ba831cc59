"""Tensors in files."""

from __future__ import annotations

import builtins
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

import aiograd as ag


@pytest.mark.parametrize("name", ["model.npz", "model", "model.safetensors"])
def test_a_model_is_saved_and_loaded(tmp_path: Path, name: str) -> None:
    net = ag.nn.Sequential(ag.nn.Linear(3, 4, dtype=np.float32), ag.nn.BatchNorm1d(4))
    ag.save(tmp_path / name, net.state_dict())
    assert [path.name for path in tmp_path.iterdir()] == [name]
    state = ag.load(tmp_path / name)
    twin = ag.nn.Sequential(ag.nn.Linear(3, 4, dtype=np.float32), ag.nn.BatchNorm1d(4))
    twin.load_state_dict(state)
    for key, tensor in net.state_dict().items():
        assert state[key].dtype == tensor.dtype
        np.testing.assert_array_equal(twin.state_dict()[key].numpy(), tensor.numpy())


def test_numpy_reads_the_file_and_any_name_is_allowed(tmp_path: Path) -> None:
    path = str(tmp_path / "arrays.npz")
    ag.save(path, {"file": np.arange(3), "a/b": ag.ones(2), "allow_pickle": 1.5})
    with np.load(path) as found:
        assert sorted(found.files) == ["a/b", "allow_pickle", "file"]
        assert found["file"].tolist() == [0, 1, 2]
    assert ag.load(path)["allow_pickle"].item() == 1.5


def test_a_failed_save_leaves_the_old_file(tmp_path: Path) -> None:
    path = tmp_path / "state.npz"
    ag.save(path, {"a": np.ones(2)})
    with pytest.raises(TypeError, match="b is no array"):
        ag.save(path, {"a": np.zeros(2), "b": object()})
    with pytest.raises(TypeError, match="sparse"):
        ag.save(path, {"t": ag.sparse.coo_tensor([[0]], [1.0], (3,))})
    with pytest.raises(TypeError, match="path"):
        ag.save({"a": np.ones(2)}, path)  # type: ignore[arg-type]
    assert ag.load(path)["a"].tolist() == [1.0, 1.0]
    assert [entry.name for entry in tmp_path.iterdir()] == ["state.npz"]


def test_a_write_that_breaks_off_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: Any, **__: Any) -> None:
        raise OSError("no space left")

    monkeypatch.setattr(np.lib.format, "write_array", full)
    with pytest.raises(OSError, match="space"):
        ag.save(tmp_path / "state.npz", {"a": np.ones(2)})
    assert not list(tmp_path.iterdir())


def test_no_pickle_is_ever_loaded(tmp_path: Path) -> None:
    path = tmp_path / "evil.npz"
    with open(path, "wb") as file:
        np.savez(file, a=np.array([object()], dtype=object))
    with pytest.raises(ValueError, match="pickle"):
        ag.load(path)


def test_missing_safetensors_is_explained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = builtins.__import__

    def refuse(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *args, **kwargs)

    for name in [name for name in sys.modules if name.startswith("safetensors")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setattr(builtins, "__import__", refuse)
    with pytest.raises(ImportError, match=r"aiograd\[io\]"):
        ag.save(tmp_path / "model.safetensors", {"a": np.ones(2)})
