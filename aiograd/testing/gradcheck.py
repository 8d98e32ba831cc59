"""Compare gradients with finite differences, in one process or through calls to workers.

The check itself is a generator: it yields requests for evaluations and derivatives, and is sent the
results. So the same code serves plain functions and awaitable ones:

    assert gradcheck(ag.tanh, (x,))
    assert await gradcheck(lambda x: ag.rpc_async("worker1", ag.tanh, args=(x,)), (x,))

Complex numbers count as pairs of real ones: a function need not be holomorphic.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Awaitable, Callable, Generator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from aiograd.autograd.backward import grad as local_grad
from aiograd.autograd.tensor import Tensor, wrap
from aiograd.errors import GradError, NoContext, WorkerClosed

Function = Callable[..., Any]
Steps = Generator["_Call | _Grad", Any, Any]
Evaluate = Callable[[Sequence[Any]], Steps]


@dataclass
class _Call:
    """Request: evaluate the function at these inputs."""

    inputs: Sequence[Any]


@dataclass
class _Grad:
    """Request: differentiate these outputs by these inputs."""

    outputs: Sequence[Tensor]
    inputs: Sequence[Tensor]
    grad_outputs: Sequence[Tensor]
    create_graph: bool


@dataclass
class _Limits:
    eps: float
    atol: float
    rtol: float


def gradcheck(
    func: Function,
    inputs: Any,
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
    derivative: Function | None = None,
) -> Any:
    """Check the gradient of `func` by every input that requires grad.

    Inputs should be double precision, and not lie on a kink. Return True, or raise `GradError`
    (return False with `raise_exception=False`). If `func` is awaitable, so is the result; its calls
    are made in the context that is open, else in one of their own.
    `derivative` replaces `ag.autograd.grad`, or `ag.grad` if `func` is awaitable.

        >>> x = ag.randn(3, requires_grad=True)
        >>> ag.testing.gradcheck(lambda x: ag.tanh(x) * x, [x])
        True
        >>> async def remote(x):
        ...     return await ag.rpc_async("worker1", ag.tanh, args=(x,))
        >>> await ag.testing.gradcheck(remote, [x])
        True
    """
    given = _inputs(inputs)
    steps = _check(_evaluate, given, _Limits(eps, atol, rtol))
    return _run(steps, func, raise_exception, derivative)


def gradgradcheck(
    func: Function,
    inputs: Any,
    grad_outputs: Any = None,
    *,
    eps: float = 1e-6,
    atol: float = 1e-5,
    rtol: float = 1e-3,
    raise_exception: bool = True,
    derivative: Function | None = None,
) -> Any:
    """Check the gradient of the gradient of `func`, by its inputs and by the incoming gradient.

    `grad_outputs` are the incoming gradients, random ones by default. All else is as `gradcheck`.

        >>> x = ag.randn(3, requires_grad=True)
        >>> ag.testing.gradgradcheck(lambda x: (ag.tanh(x) * x).sum(), [x])
        True
    """
    given = _inputs(inputs)
    steps = _check_second(given, grad_outputs, _Limits(eps, atol, rtol))
    return _run(steps, func, raise_exception, derivative)


def _inputs(inputs: Any) -> list[Any]:
    given = [inputs] if isinstance(inputs, Tensor) else list(inputs)
    if not any(_checked(value) for value in given):
        raise ValueError("gradcheck needs an input that requires grad")
    return given


def _checked(value: Any) -> bool:
    return isinstance(value, Tensor) and value.requires_grad


# ── carrying out the steps ──────────────────────────────────────────────────────────────────────


def _run(
    steps: Steps, func: Function, raise_exception: bool, derivative: Function | None
) -> bool | Awaitable[bool]:
    # Only the first result shows whether the function is awaitable: a lambda that returns a future
    # is no coroutine function.
    request = next(steps)
    assert isinstance(request, _Call)
    first = func(*request.inputs)
    if inspect.isawaitable(first):
        derivative = derivative or _distributed_grad()
        return _run_async(steps, request, first, func, raise_exception, derivative)
    answer = first
    try:
        while True:
            request = steps.send(answer)
            answer = (
                func(*request.inputs)
                if isinstance(request, _Call)
                else _differentiate(derivative or local_grad, request)
            )
    except StopIteration:
        return True
    except GradError as error:
        # Other reasons are errors of the function itself, not the result of the check.
        if error.reason != "gradcheck" or raise_exception:
            raise
        return False


async def _run_async(
    steps: Steps,
    request: _Call,
    first: Any,
    func: Function,
    raise_exception: bool,
    derivative: Function,
) -> bool:
    answer = await first
    context = _missing_context()
    if context is None:
        return await _go_on(steps, answer, func, raise_exception, derivative)
    async with context:
        # The first evaluation again: its result was recorded in no context.
        answer = await func(*request.inputs)
        return await _go_on(steps, answer, func, raise_exception, derivative)


async def _go_on(
    steps: Steps, answer: Any, func: Function, raise_exception: bool, derivative: Function
) -> bool:
    try:
        while True:
            request = steps.send(answer)
            if isinstance(request, _Call):
                answer = await func(*request.inputs)
            else:
                answer = _differentiate(derivative, request)
                answer = await answer if inspect.isawaitable(answer) else answer
    except StopIteration:
        return True
    except GradError as error:
        if error.reason != "gradcheck" or raise_exception:
            raise
        return False


def _missing_context() -> Any:
    """Return a context to make the calls in, if none is open; None if there is no worker."""
    # Imported here: local gradient checks need nothing of the distributed layers.
    from aiograd.dist.registry import context, current_context

    try:
        current_context()
    except NoContext:
        with contextlib.suppress(WorkerClosed):
            return context()
    return None


def _distributed_grad() -> Function:
    from aiograd.dist.api import grad

    return grad


def _differentiate(derivative: Function, request: _Grad) -> Any:
    return derivative(
        request.outputs,
        request.inputs,
        request.grad_outputs,
        retain_graph=True,
        create_graph=request.create_graph,
        allow_unused=True,
    )


# ── the check ───────────────────────────────────────────────────────────────────────────────────


def _evaluate(inputs: Sequence[Any]) -> Steps:
    outputs = yield _Call(inputs)
    found = outputs if isinstance(outputs, list | tuple) else [outputs]
    floating = [y for y in found if isinstance(y, Tensor) and y.dtype.kind in "fc"]
    if not floating:
        raise ValueError("gradcheck needs a function that returns floating point Tensors")
    return floating


def _check(evaluate: Evaluate, inputs: Sequence[Any], limits: _Limits) -> Steps:
    # One recorded evaluation for all rows; graphs are retained between them.
    leaves = _copies(inputs)
    outputs = yield from evaluate(leaves)
    expected = yield from _differences(evaluate, inputs, limits.eps)
    for number, output in enumerate(outputs):
        rows = yield from _rows(output, leaves)
        for position, found in rows.items():
            _compare(found, expected[number, position], number, position, limits)


def _check_second(inputs: Sequence[Any], grad_outputs: Any, limits: _Limits) -> Steps:
    outputs = yield from _evaluate(_copies(inputs))
    # Random directions, always the same ones: with ones, errors of opposite signs would cancel.
    rng = np.random.default_rng(0)
    if grad_outputs is None:
        directions = [_random_like(y, rng) for y in outputs]
    else:
        directions = [grad_outputs] if isinstance(grad_outputs, Tensor) else list(grad_outputs)
    count = len(inputs)

    def first_derivative(values: Sequence[Any]) -> Steps:
        """The gradient of `func` as a function itself, of its inputs and the incoming gradient."""
        xs, weights = values[:count], values[count:]
        ys = yield from _evaluate(xs)
        wanted = [x for x in xs if _checked(x)]
        # An output that depends on no input has no graph, and a derivative of zero.
        pairs = [(y, v) for y, v in zip(ys, weights, strict=True) if y.requires_grad]
        grads: Sequence[Any] = [None] * len(wanted)
        if pairs:
            grads = yield _Grad([y for y, _ in pairs], wanted, [v for _, v in pairs], True)
        return [
            wrap(np.zeros(x.shape, x.dtype)) if g is None else g
            for x, g in zip(wanted, grads, strict=True)
        ]

    yield from _check(first_derivative, [*inputs, *directions], limits)


def _random_like(y: Tensor, rng: np.random.Generator) -> Tensor:
    value = rng.standard_normal(y.shape)
    if y.dtype.kind == "c":
        value = value + 1j * rng.standard_normal(y.shape)
    return Tensor(np.asarray(value, y.dtype), requires_grad=True)


def _copies(inputs: Sequence[Any]) -> list[Any]:
    # Leaves of their own: the user's tensors get neither a gradient nor another value.
    return [Tensor(x.raw, requires_grad=True) if _checked(x) else x for x in inputs]


def _differences(evaluate: Evaluate, inputs: Sequence[Any], eps: float) -> Steps:
    """Map (output, input) to the derivative by central differences, one column per real number."""
    columns: dict[tuple[int, int], list[Any]] = {}
    for position, value in enumerate(inputs):
        if not _checked(value):
            continue
        for place in np.ndindex(value.shape):
            # A complex number is moved along both of its axes.
            for step in (eps, eps * 1j) if value.dtype.kind == "c" else (eps,):
                sides = []
                for sign in (1, -1):
                    moved = _copies(inputs)
                    moved[position].raw[place] += sign * step
                    ys = yield from evaluate(moved)
                    sides.append([_as_real(y.raw) for y in ys])
                for number, (above, below) in enumerate(zip(*sides, strict=True)):
                    column = (above - below) / (2 * eps)
                    columns.setdefault((number, position), []).append(column)
    return {key: np.stack(found, axis=-1) for key, found in columns.items()}


def _rows(output: Tensor, leaves: Sequence[Any]) -> Steps:
    """Map inputs to the derivative of one output as recorded, one row per real number."""
    wanted = {i: leaf for i, leaf in enumerate(leaves) if _checked(leaf)}
    rows: dict[int, list[Any]] = {i: [] for i in wanted}
    units = (1, 1j) if output.dtype.kind == "c" else (1,)
    for place in np.ndindex(output.shape):
        for unit in units:
            direction = np.zeros(output.shape, output.dtype)
            direction[place] = unit
            grads: Sequence[Any] = [None] * len(wanted)
            if output.requires_grad:
                grads = yield _Grad([output], list(wanted.values()), [wrap(direction)], False)
            for (i, leaf), g in zip(wanted.items(), grads, strict=True):
                # An input that an output does not use has a derivative of zero, too.
                zeros = np.zeros(leaf.shape, leaf.dtype)
                rows[i].append(_as_real(zeros if g is None else _fitting(g, leaf)))
    return {i: np.stack(found) for i, found in rows.items() if found}


def _fitting(g: Tensor, leaf: Tensor) -> Any:
    # Values could agree after broadcasting; a gradient of another shape is still wrong.
    if g.shape != leaf.shape or g.dtype != leaf.dtype:
        raise GradError(
            f"a gradient of {g.shape}, {g.dtype} for an input of {leaf.shape}, {leaf.dtype}",
            "gradcheck",
        )
    return g.numpy()


def _as_real(array: Any) -> Any:
    flat = np.asarray(array).reshape(-1)
    if flat.dtype.kind == "c":
        flat = np.stack([flat.real, flat.imag], axis=-1).reshape(-1)
    return flat.astype(np.float64)


def _compare(found: Any, expected: Any, number: int, position: int, limits: _Limits) -> None:
    # A NaN on both sides is agreement: the function is not defined there.
    if np.allclose(found, expected, rtol=limits.rtol, atol=limits.atol, equal_nan=True):
        return
    worst = float(np.nanmax(np.abs(found - expected)))
    raise GradError(
        f"the gradient of output {number} by input {position} is wrong by up to {worst:.3g}:\n"
        f"recorded:\n{found}\nby differences:\n{expected}",
        "gradcheck",
    )
