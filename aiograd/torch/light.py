"""Operations of torch that run right where their call arrives, if their tensors are small.

A thread costs a call more than such an operation does: 3x3 additions, one after another, take half
the time without it (`benchmarks/peers`, rpc.builtin_add3x3.rtt of aiograd-torch).
"""

from __future__ import annotations

from typing import Any, Final

import torch

from aiograd.rpc.callee.functions import LIGHT

_ELEMENTS: Final = 4096  # of all arguments together: a few microseconds
_RESULT: Final = 1 << 16  # elements that a result may have, if arguments are broadcast

# Elementwise, reducing, multiplying: the time depends on the sizes of arguments and result alone.
_NAMES: Final = (
    "abs add addmm amax amin bmm ceil clamp clone cos cosh cumsum div dot eq erf exp expm1 floor "
    "flatten ge gt le log log1p log2 logsumexp lt matmul maximum mean minimum mm mul mv ne neg "
    "permute pow prod relu reshape round rsqrt rsub sigmoid sign sin sinh softmax sqrt square "
    "squeeze sub sum t tan tanh transpose true_divide unsqueeze where"
).split()


def is_light(args: tuple[Any, ...]) -> bool:
    """Tell whether one of these operations takes a few microseconds for these arguments."""
    total, largest = 0, 1
    for value in args:
        if value.__class__ is torch.Tensor:
            size = value.numel()
            total += size
            largest *= size
        elif value.__class__ not in (int, float, bool):
            return False
    return total <= _ELEMENTS and (largest <= _RESULT or len(args) == 1)


for _name in _NAMES:
    LIGHT[getattr(torch, _name)] = is_light
    if hasattr(torch.Tensor, _name):
        LIGHT[getattr(torch.Tensor, _name)] = is_light
