"""Three workers that know the protocol and nothing else."""

from __future__ import annotations

import pytest

from aiograd.rref.refcount.protocol import Protocol
from tests.support.refcount import party


@pytest.fixture
def a() -> Protocol:
    return Protocol(party(0))


@pytest.fixture
def b() -> Protocol:
    return Protocol(party(1))


@pytest.fixture
def c() -> Protocol:
    return Protocol(party(2))
