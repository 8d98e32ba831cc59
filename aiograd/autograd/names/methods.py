"""`Methods`: what can be done with a Tensor, attached by the tables in `ops/`.

Tensor inherits from it. `methods.pyi` beside this file tells type checkers and editors what will be
there; `make stubs` writes it from the tables.
"""

from __future__ import annotations


class Methods:
    """Operators and methods of Tensor, one for each operation that ndarray or torch has as one."""

    __slots__ = ()
