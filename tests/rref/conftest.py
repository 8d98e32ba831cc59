"""Workers in one loop that know each other, with references attached to each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from tests.support.agents import running_workers


@pytest.fixture
def workers() -> Callable[..., Any]:
    """`async with workers(2) as w:`: `w[0]` holds the references of worker0, the current one."""
    return running_workers
