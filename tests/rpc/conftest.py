"""Agents in one loop, over a memory network, that all know each other."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import trustme

from aiograd.cluster import TLS
from tests.support.agents import running_agents
from tests.support.certificates import issue


@pytest.fixture
def agents() -> Callable[..., Any]:
    """`async with agents(2) as (a, b):`: worker0, worker1, the first one current."""
    return running_agents


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture
def papers(authority: trustme.CA, tmp_path: Path) -> Callable[..., TLS]:
    """Issue certificates by the worker's name."""

    def made(name: str, ca: trustme.CA = authority, **settings: Any) -> TLS:
        # A folder each, because a name may get several certificates in one test.
        folder = tmp_path / f"{name}-{len(list(tmp_path.iterdir()))}"
        folder.mkdir()
        return issue(ca, folder, name, **settings)

    return made
