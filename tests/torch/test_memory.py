"""A tensor taken apart and put together is the same tensor, without what lay beside it."""

from __future__ import annotations

import contextlib
import os
import pickle
import random
import warnings
from typing import Any

import numpy as np
import pytest
import torch

from aiograd.errors import ProtocolError, SerializationError
from aiograd.rpc.directory import PeerInfo
from aiograd.rpc.extension import Arrival
from aiograd.torch.memory import DTYPES, put_together, take_apart
from aiograd.torch.travel import TensorTraveller
from aiograd.wire.safecodec import GROWN

pytestmark = pytest.mark.filterwarnings(
    "ignore::UserWarning"
)  # torch's own, on sparse and quantised


def there_and_back(tensor: torch.Tensor, restricted: bool = False) -> torch.Tensor:
    data = pickle.loads(pickle.dumps(take_apart(tensor, restricted)))
    return put_together(data, restricted)


def raw(tensor: torch.Tensor) -> list[int]:
    return take_apart(tensor)[-1].tolist()


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("name", [name for name in DTYPES if not name.startswith(("q", "quint"))])
def test_every_dtype_keeps_its_bytes(name, restricted):
    tensor = torch.frombuffer(bytearray(range(64)), dtype=DTYPES[name])[1:]
    found = there_and_back(tensor, restricted)
    assert found.dtype is tensor.dtype
    assert raw(found) == raw(tensor)


def test_there_are_dtypes_to_test():
    assert len(DTYPES) >= 46


X = torch.arange(120.0).reshape(4, 5, 6)
SHAPES = {
    "scalar": torch.tensor(3.0),
    "empty": torch.empty(0, 3),
    "permuted": X.permute(2, 0, 1),
    "transposed": X[0].t(),
    "channels last": X[None].to(memory_format=torch.channels_last),
    "gaps": X[:, ::2],
    "narrow": torch.rand(5, 5).narrow(1, 2, 2),
    "row": X[1:2],
}


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("tensor", SHAPES.values(), ids=SHAPES)
def test_strides_are_kept(tensor, restricted):
    found = there_and_back(tensor, restricted)
    assert torch.equal(found, tensor)
    assert found.stride() == tensor.stride()


def test_an_expanded_tensor_sends_its_distinct_elements():
    tensor = X[0, 0].expand(1000, 6)
    assert take_apart(tensor)[-1].nbytes == 24
    found = there_and_back(tensor)
    assert torch.equal(found, tensor)
    assert found.stride() == (0, 1)
    assert there_and_back(tensor, True).is_contiguous()


def test_overlapping_windows_and_wide_gaps_arrive_contiguous():
    for tensor in (X.as_strided((4, 4), (1, 1)), torch.rand(100, 1000)[:, 0]):
        found = there_and_back(tensor)
        assert torch.equal(found, tensor)
        assert found.is_contiguous()


def test_a_view_does_not_take_its_storage_along():
    tensor = torch.zeros(1_000_000)[10:20]
    assert take_apart(tensor)[-1].nbytes == 40
    with_gaps = torch.zeros(10, 10)[:, :3]
    assert take_apart(with_gaps)[-1].nbytes == 120


def test_memory_is_borrowed_and_what_arrives_is_writable():
    tensor = torch.zeros(100)
    memory = take_apart(tensor)[-1]
    tensor[0] = 1.0
    assert memory.view(np.float32)[0] == 1.0
    found = there_and_back(tensor)
    found += 1
    assert found[0] == 2.0
    for each in (found, there_and_back(X.permute(2, 0, 1)), there_and_back(X[:, ::2])):
        assert not each._is_view()


def test_conjugates_and_negatives_are_resolved():
    conjugate = torch.randn(3, dtype=torch.complex64).conj()
    negative = torch.randn(3, dtype=torch.complex64).conj().imag
    assert negative.is_neg()
    for tensor in (conjugate, negative):
        assert torch.equal(there_and_back(tensor), tensor)


SPARSE = {
    "coo": lambda: torch.eye(4).to_sparse(),
    "uncoalesced": lambda: torch.sparse_coo_tensor([[0, 0]], [1.0, 2.0], (4,)),
    "hybrid": lambda: torch.sparse_coo_tensor([[2, 0]], torch.rand(2, 3), (4, 3)),
    "csr": lambda: torch.eye(4).to_sparse_csr(),
    "csc": lambda: torch.eye(4).to_sparse_csc(),
    "bsr": lambda: torch.eye(4).to_sparse_bsr((2, 2)),
    "bsc": lambda: torch.eye(4).to_sparse_bsc((2, 2)),
}


@pytest.mark.parametrize("restricted", [False, True])
@pytest.mark.parametrize("make", SPARSE.values(), ids=SPARSE)
def test_sparse_layouts_are_kept(make, restricted):
    tensor = make()
    found = there_and_back(tensor, restricted)
    assert found.layout is tensor.layout
    assert torch.equal(found.to_dense(), tensor.to_dense())
    if tensor.layout is torch.sparse_coo and not restricted:
        assert found.is_coalesced() == tensor.is_coalesced()


@pytest.mark.parametrize("restricted", [False, True])
def test_quantised_tensors_keep_their_numbers(restricted):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        scales, zeros = torch.tensor([0.1, 0.2]), torch.tensor([0, 3])
        tensors = [
            torch.quantize_per_tensor(torch.rand(2, 3), 0.1, 3, dtype)
            for dtype in (torch.qint8, torch.quint8, torch.qint32)
        ]
        tensors += [
            torch.quantize_per_channel(torch.rand(2, 3), scales, zeros, 0, torch.qint8),
            torch.quantize_per_channel(torch.rand(2, 3), scales, zeros * 1.0, 0, torch.quint4x2),
        ]
        for tensor in tensors:
            found = there_and_back(tensor, restricted)
            assert found.dtype is tensor.dtype
            assert found.qscheme() == tensor.qscheme()
            assert torch.equal(found.dequantize(), tensor.dequantize())


def test_a_meta_tensor_is_refused_with_its_shape():
    with pytest.raises(SerializationError, match="meta tensor of shape"):
        take_apart(torch.empty(3, device="meta"))


BYTES = np.zeros(16, np.uint8)
INDICES = ("dense", "int64", (1, 1), None, np.frombuffer(b"\x09" + bytes(7), np.uint8).copy())
VALUE = ("dense", "float32", (1,), None, np.zeros(4, np.uint8))
LIES: dict[str, Any] = {
    "more elements than bytes": ("dense", "float32", (5,), None, BYTES),
    "fewer elements than bytes": ("dense", "float32", (3,), None, BYTES),
    "a negative size": ("dense", "float32", (-1, -4), None, BYTES),
    "an endless size": ("dense", "float32", (1 << 60, 0), None, BYTES[:0]),
    "a stride beyond the memory": ("dense", "float32", (4,), (1 << 40,), BYTES),
    "a stride of zero": ("dense", "float32", (4,), (0,), BYTES),
    "a negative stride": ("dense", "float32", (4,), (-1,), BYTES),
    "overlapping elements": ("dense", "float32", (2, 2), (1, 1), BYTES),
    "too few strides": ("dense", "float32", (2, 2), (1,), BYTES),
    "floats as sizes": ("dense", "float32", (4.0,), None, BYTES),
    "an unknown dtype": ("dense", "float33", (4,), None, BYTES),
    "no bytes": ("dense", "float32", (4,), None, np.zeros(4, np.float32)),
    "an unknown kind": ("meta", (4,)),
    "too many fields": ("dense", "float32", (4,), None, BYTES, 1, 2),
    "an index beyond the shape": ("coo", (3,), True, INDICES, VALUE),
    "rows that do not add up": ("compressed", "torch.sparse_csr", (1, 1), VALUE, VALUE, VALUE),
    "an unknown layout": ("compressed", "torch.strided", (1,), VALUE, VALUE, VALUE),
    "quantised numbers without bytes": ("quantized", "qint8", (1 << 40,), BYTES, 0.1, 0),
    "a dtype that is not quantised": ("quantized", "float32", (4,), BYTES, 0.1, 0),
    "no such channel": ("channels", "qint8", (16,), BYTES, VALUE, VALUE, 4),
    "too few scales": ("channels", "qint8", (16,), BYTES, VALUE, VALUE, 0),
}


@pytest.mark.parametrize("data", LIES.values(), ids=LIES)
def test_what_a_restricted_peer_says_is_checked_before_memory_is_touched(data):
    with pytest.raises(ProtocolError):
        put_together(data, checked=True)


def test_gaps_and_wider_dtypes_of_a_restricted_peer_count_for_it():
    """A page of gaps for each of thousands of small tensors would be memory in nobody's name."""
    arrival = Arrival(PeerInfo("peer", 1, bytes(16)), "call", restricted=True)
    traveller = TensorTraveller(None)
    memory = ("dense", "float64", (2,), (500,), np.zeros(16, np.uint8))
    tensor = traveller.arrive((0, False, None, None, memory), arrival)
    assert arrival.scratch[GROWN] == tensor.untyped_storage().nbytes() - 16
    before = arrival.scratch[GROWN]
    memory = ("dense", "int8", (1000,), None, np.zeros(1000, np.uint8))
    traveller.arrive((0, False, "float64", None, memory), arrival)
    assert arrival.scratch[GROWN] - before == 7000
    with pytest.raises(ProtocolError):  # four pages for two elements
        put_together(("dense", "float64", (2,), (2000,), np.zeros(16, np.uint8)), checked=True)
    with pytest.raises(ProtocolError):
        traveller.arrive((0, False, "complex128", None, memory), arrival)


MUTANTS = int(os.environ.get("AIOGRAD_HOSTILE", "1500"))


@pytest.mark.deadline(60 + MUTANTS / 100)
def test_what_a_lying_peer_sends_is_refused_or_used_without_harm():
    """Sparse and quantised tensors with figures that are made up; kernels must not trust them."""
    rng = random.Random(1)
    made = [take_apart(make(), plain=True) for make in SPARSE.values()]
    made.append(take_apart(torch.quantize_per_tensor(torch.rand(4), 0.1, 3, torch.quint8), True))
    scales, zeros = torch.rand(2), torch.zeros(2, dtype=torch.int64)
    channels = torch.quantize_per_channel(torch.rand(2, 3), scales, zeros, 0, torch.qint8)
    made.append(take_apart(channels, True))
    made.append(take_apart(torch.rand(3, 4).t(), True))
    sound = 0
    for _ in range(MUTANTS):
        data = rng.choice(made)
        for _ in range(rng.randint(1, 3)):
            data = _changed(data, rng)
        try:
            tensor = put_together(data, checked=True)
        except ProtocolError:
            continue
        sound += 1
        if tensor.numel() > 10_000:  # a small part of a large sparse one
            continue
        with contextlib.suppress(RuntimeError):  # torch refuses to use it
            dense = tensor.dequantize() if tensor.is_quantized else tensor.to_dense()
            (dense + dense).sum().item()
            assert repr(tensor)
            tensor.clone()
    assert sound


def _changed(data: tuple[Any, ...], rng: random.Random) -> tuple[Any, ...]:
    """Change one figure, name or byte somewhere in the data of a tensor."""
    at = rng.randrange(len(data))
    old = data[at]
    new: Any
    if type(old) is tuple and old and type(old[0]) is str:
        new = _changed(old, rng)
    elif type(old) is tuple and old and rng.random() < 0.8:
        place = rng.randrange(len(old))
        new = (*old[:place], rng.choice([0, 1, 3, 6, 1 << 40, -1]), *old[place + 1 :])
    elif isinstance(old, np.ndarray):
        new = old.copy()
        if len(new) and rng.random() < 0.7:
            new[rng.randrange(len(new))] = rng.randrange(256)
        else:
            new = new[: rng.randrange(len(new) + 1)]
    elif at == 0 and rng.random() < 0.9:
        return data
    else:
        names = ["float64", "int64", "int8", "qint8", "quint4x2", "bool", "complex64", "bits8"]
        layouts = ["torch.sparse_csr", "torch.sparse_bsc"]
        new = rng.choice([None, True, -1, 0, 2, 1 << 62, 1.5, float("nan"), *names, *layouts])
    return (*data[:at], new, *data[at + 1 :])
