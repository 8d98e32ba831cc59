"""References of the drop-in, where their futures end at awkward times."""

from __future__ import annotations

from typing import Any

import pytest
from torch.futures import Future

from aiograd.compat.torch_rpc import rref
from aiograd.compat.torch_rpc.rref import RRef


def test_a_type_that_could_not_be_asked_for_raises_also_if_that_is_known_at_once(monkeypatch):
    failed: Any = Future()
    failed.set_exception(ValueError("on purpose"))
    monkeypatch.setattr(rref, "_call_async", lambda *args, **kwargs: failed)
    monkeypatch.setattr(RRef, "is_owner", lambda self: False)
    monkeypatch.setattr(RRef, "owner_name", lambda self: "owner")
    reference = object.__new__(RRef)
    reference._type = reference._rref = None
    for _ in range(2):  # it is asked for again: a failure is not remembered
        with pytest.raises(ValueError, match="on purpose"):
            reference._get_type()
    assert reference._get_type(blocking=False) is failed
