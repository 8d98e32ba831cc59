"""The operations of `np.linalg`, as `ag.linalg`; `make stubs` writes their signatures."""

from __future__ import annotations

import numpy as np

from aiograd.autograd.ops import namespace

_NAMES = namespace(np.linalg)
globals().update(_NAMES)
__all__ = list(_NAMES)
