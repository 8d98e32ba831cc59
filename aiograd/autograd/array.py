"""What the tape computes with, as annotations name it.

    Array      an ndarray of numbers, in rules and nodes
    Values     what users may give for one: a Tensor, an array, a number, nested lists; `as_tensor`
               makes a Tensor of it. Editors see it as `Tensor | ArrayLike` (`names/`)
    Gradient   what flows back along an edge: an Array, a sparse `Coo`, a Tensor under
               `create_graph`, a list of these for a node with several outputs; None for none

A `Coo` and a Tensor have the attributes and operators of an Array, so rules take them for one.
"""

from __future__ import annotations

from typing import Any, TypeAlias

import numpy as np

Array: TypeAlias = np.ndarray[Any, np.dtype[Any]]
Values: TypeAlias = Any
Gradient: TypeAlias = Any
