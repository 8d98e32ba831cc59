"""Tensors in files: numpy's npz, or safetensors where the name ends so. Never pickles.

A file appears under its name only when it is complete: it is written beside it and then renamed, so
that a crash leaves the old one.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from aiograd.autograd.tensor import Tensor

Path = str | os.PathLike[str]


def save(path: Path, tensors: Mapping[str, Any]) -> None:
    """Write named tensors, e.g. `model.state_dict()`, to a file that `load` and numpy can read.

    >>> ag.save("model.npz", ag.nn.Linear(2, 1).state_dict())
    >>> sorted(ag.load("model.npz"))
    ['bias', 'weight']
    """
    # torch has the arguments in the other order.
    if isinstance(path, Mapping) or not isinstance(tensors, Mapping):
        raise TypeError("save takes a path and then a mapping from names to tensors")
    arrays = {str(name): _array(str(name), value) for name, value in tensors.items()}
    with replacing(path) as partial:
        if os.fspath(path).endswith(".safetensors"):
            # safetensors writes the memory as it lies, without regard to strides.
            contiguous = {name: np.asarray(array, order="C") for name, array in arrays.items()}
            _safetensors().save_file(contiguous, partial)
        else:
            _write_npz(partial, arrays)


@contextlib.contextmanager
def replacing(path: Path) -> Iterator[str]:
    """Give the name of a file to write, which takes the place of `path` when it is complete."""
    path = os.fspath(path)
    # In the same folder, since a rename is only atomic within one file system; with our process in
    # its name, since several workers may save at once.
    partial = f"{path}.{os.getpid()}.partial"
    try:
        yield partial
        os.replace(partial, path)
    # An interrupt too must not leave half a file behind.
    except BaseException:
        if os.path.exists(partial):
            os.unlink(partial)
        raise


def load(path: Path) -> dict[str, Tensor]:
    """Read named tensors from a file that `save`, numpy or safetensors wrote.

    >>> model = ag.nn.Linear(2, 1)
    >>> ag.save("model.npz", model.state_dict())
    >>> model.load_state_dict(ag.load("model.npz")).missing_keys
    []
    """
    path = os.fspath(path)
    if path.endswith(".safetensors"):
        arrays = _safetensors().load_file(path)
        return {name: Tensor(array) for name, array in arrays.items()}
    # A pickle in a file from elsewhere could run any code.
    with np.load(path, allow_pickle=False) as file:
        return {name: Tensor(file[name]) for name in file.files}


def _array(name: str, value: Any) -> Any:
    """Return a value as a plain array; raise TypeError, with its name, if it is none."""
    if isinstance(value, Tensor) and value.is_sparse:
        raise TypeError(f"{name} is sparse; save its indices and values, or to_dense()")
    array = np.asarray(value.raw if isinstance(value, Tensor) else value)
    if array.dtype == object:
        raise TypeError(f"{name} is no array of numbers but a {type(value).__name__}")
    return array


def _write_npz(path: str, arrays: Mapping[str, Any]) -> None:
    # numpy's own savez takes names as keyword arguments, where "file" would clash.
    with zipfile.ZipFile(path, "w", zipfile.ZIP_STORED, allowZip64=True) as archive:
        for name, array in arrays.items():
            with archive.open(f"{name}.npy", "w", force_zip64=True) as entry:
                np.lib.format.write_array(entry, array, allow_pickle=False)


def _safetensors() -> Any:
    """Import the optional package; say how to get it if it is missing."""
    try:
        import safetensors.numpy
    except ImportError as error:
        raise ImportError(
            "files that end in .safetensors need the safetensors package: "
            "pip install 'aiograd[io]'; any other name is written as npz"
        ) from error
    return safetensors.numpy
