"""I11, outcome agreement: what a worker may answer when somebody reads the gradients of a context.

The originator of a backward pass decides its outcome, once. From then on no worker disagrees:

    the pass is     a participant may answer                        it never answers
    running         PassUndecided; sums of earlier passes           a number of this pass
                    if this pass has not reached it yet
    good            the exact sums, PassUndecided                   BackwardFailed, other numbers,
                                                                    no entry
    failed          BackwardFailed, PassUndecided, UnknownContext,  a number of this pass
                    no entry; sums of earlier passes if this
                    pass never reached it

Readings here are synchronous and local: they send nothing, so they may be taken at any moment.
"""

from __future__ import annotations

from enum import Enum
from typing import TYPE_CHECKING, Any

import numpy as np

from aiograd.autograd.tensor import Tensor
from aiograd.dist.registry import ContextRegistry
from aiograd.errors import AiogradError, BackwardFailed, PassUndecided, UnknownContext

if TYPE_CHECKING:
    from aiograd.testing.simulator.world import Node

Sums = dict[Tensor, Any]  # leaf of one worker → the gradient that it should show


class Outcome(Enum):
    """What the originator of a pass has said of it."""

    RUNNING = "running"
    GOOD = "good"
    FAILED = "failed"


def read(node: Node, context_id: int) -> dict[Tensor, Any] | AiogradError:
    """What this worker answers now when its gradients of a context are read there."""
    context = node.agent.parts[ContextRegistry].find(context_id)
    if context is None:
        return UnknownContext(context_id)
    try:
        found: dict[Tensor, Tensor] = node.agent.context.copy().run(lambda: context.gradients)
    except AiogradError as error:
        return error
    return {leaf: np.asarray(gradient) for leaf, gradient in found.items()}


def disagreement(
    answer: dict[Tensor, Any] | AiogradError,
    outcome: Outcome,
    sums: Sums,
    *,
    reached: bool = True,
    forgotten: bool = False,
) -> str:
    """What is wrong with an answer; "" if nothing is.

    `sums` are those of all passes that ended well. `reached`: the pass has come to this worker.
    `forgotten`: the worker may have given up the context, since it lost the one who opened it.
    """
    if isinstance(answer, AiogradError):
        return _wrong_error(answer, outcome, forgotten or not sums)
    if outcome is Outcome.GOOD:
        return "" if same(answer, sums) else f"shows {_text(answer)}, not {_text(sums)}"
    if not answer or (not reached and same(answer, sums)):
        return ""
    if same(answer, sums):
        return f"shows sums of earlier passes although it took part in one that is {outcome.value}"
    return f"shows {_text(answer)} of a pass that is {outcome.value}"


def _wrong_error(error: AiogradError, outcome: Outcome, forgotten: bool) -> str:
    if isinstance(error, PassUndecided):
        return ""
    if isinstance(error, UnknownContext):
        if outcome is not Outcome.GOOD or forgotten:
            return ""
    elif isinstance(error, BackwardFailed) and outcome is not Outcome.GOOD:
        return ""
    return f"raises {error!r:.120} for a pass that is {outcome.value}"


def same(answer: dict[Tensor, Any], sums: Sums) -> bool:
    return answer.keys() == sums.keys() and all(
        np.array_equal(answer[leaf], gradient) for leaf, gradient in sums.items()
    )


def _text(numbers: dict[Tensor, Any]) -> str:
    return f"{[np.asarray(number).ravel().tolist() for number in numbers.values()]!r:.80}"
