"""Every operation by its public name, as found in `ag`; numpy's dtypes under torch's names, too.

`operations.pyi` beside this file has their signatures for type checkers and editors; `make stubs`
writes it from the tables.
"""

from __future__ import annotations

from aiograd.autograd.ops import NAMES
from aiograd.autograd.ops.torch_names import DTYPES

globals().update(NAMES)
globals().update(DTYPES)
__all__ = [*NAMES, *DTYPES]
