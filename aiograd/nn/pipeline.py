"""A model cut into stages on several workers, fed with micro-batches.

Stages work at the same time on different micro-batches. Two schedules:

- "gpipe": all micro-batches go forward, then all come back; every stage keeps all of them.
- "1f1b": each micro-batch comes back as soon as its loss is known, and only as many are under
  way as there are stages, so a stage never keeps more than that many graphs.

The same pipeline does inference: `y = await pipe(x)`.

Stages may be modules of torch, for torch tensors.
"""

from __future__ import annotations

import asyncio
import inspect
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from aiograd.autograd.checkpoint import checkpoint
from aiograd.autograd.ops.join import concatenate
from aiograd.autograd.tensor import Tensor
from aiograd.dist.context import Context
from aiograd.dist.foreign import library_of
from aiograd.dist.registry import current_context
from aiograd.nn.module import Module
from aiograd.nn.remote import RemoteModule, is_module, list_parameters
from aiograd.rpc.api import rpc_async
from aiograd.rref.rref import RRef

SCHEDULES = ("gpipe", "1f1b")


class Pipeline:
    """A model cut into stages on several workers, which work on several micro-batches at once.

    `stages` are RemoteModules, or RRefs to modules, in order; several may live on one worker. A
    batch is cut along its first axis into `microbatches` parts of nearly equal size, by default two
    for each stage; each stage works on one at a time, in order. Schedules of `train_step`:

        "1f1b"   a micro-batch goes back as soon as its loss is known, and only as many are under
                 way as there are stages: a stage keeps at most that many graphs. The default.
        "gpipe"  all micro-batches go forward, then all come back in one pass: a stage keeps all
                 graphs. Fewer messages, more memory.

    Both give the gradients of the mean loss of the whole batch. `recompute=True` keeps the inputs
    of a stage instead of its graph, and runs the stage again in the backward pass. Gradients go to
    the current context, or to the one that `train_step` is given:

        >>> workers = ["worker0", "worker1"]
        >>> stages = [ag.nn.RemoteModule(w, ag.nn.Linear, args=(4, 4)) for w in workers]
        >>> pipe = ag.nn.Pipeline(stages, schedule="1f1b", microbatches=4)
        >>> opt = await ag.optim.DistributedOptimizer(
        ...     ag.optim.SGD, await pipe.remote_parameters(), lr=0.1)
        >>> x, target = ag.ones(8, 4), ag.zeros(8, 4)
        >>> async with ag.context() as ctx:
        ...     loss = await pipe.train_step(x, target, ag.nn.functional.mse_loss)
        ...     await opt.step(ctx)
        >>> (await pipe(x)).shape  # without training
        (8, 4)
    """

    microbatches: int
    recompute: bool

    def __init__(
        self,
        stages: Sequence[RemoteModule[Any] | RRef[Any]],
        schedule: str = "1f1b",
        microbatches: int | None = None,
        *,
        recompute: bool = False,
    ) -> None:
        if schedule not in SCHEDULES:
            raise ValueError(f"schedule is one of {', '.join(SCHEDULES)}, not {schedule!r}")
        if not stages:
            raise ValueError("a pipeline needs at least one stage")
        count = 2 * len(stages) if microbatches is None else microbatches
        if not isinstance(count, int) or count < 1:
            raise ValueError(f"microbatches is a positive number, not {microbatches!r}")
        self.stages: list[RRef[Any]] = [_module_of(stage) for stage in stages]
        self.schedule, self.microbatches, self.recompute = schedule, count, recompute

    async def __call__(self, x: Any) -> Any:
        """Run the whole batch forward, micro-batches overlapping, and return the joined result."""
        lanes = self._lanes()
        parts = await _all_or_none([self._forward(part, lanes) for part in self._split(x)])
        library = library_of(parts[0])
        return concatenate(parts) if library is None else library.concatenate(parts)

    async def remote_parameters(self) -> list[RRef[Any]]:
        """Return an RRef to every parameter of every stage, for a DistributedOptimizer."""
        found = await _all_or_none(
            [rpc_async(stage.owner(), list_parameters, args=(stage, True)) for stage in self.stages]
        )
        return [parameter for each in found for parameter in each]

    async def train_step(
        self,
        x: Any,
        targets: Any,
        loss: Callable[[Any, Any], Any],
        context: Context | None = None,
    ) -> float:
        """Run a batch forward and backward by the schedule; return the mean loss.

        Gradients are then in `context`, or in the current one (NoContext if there is none), as if
        the mean loss of the whole batch had been played back at once. `loss(output, target)` gives
        the mean over its micro-batch; it may be a coroutine function. It runs here, on the outputs
        of the last stage. If one micro-batch fails, the others are cancelled, and its error raised.
        """
        ctx = context if context is not None else current_context()
        inputs, wanted = self._split(x), self._split(targets)
        rows = sum(len(part) for part in inputs)
        lanes = self._lanes()
        # The only difference in memory between the schedules: how many micro-batches have a graph.
        under_way = asyncio.Semaphore(len(self.stages) if self.schedule == "1f1b" else len(inputs))

        async def forward(part: Any, target: Any) -> Any:
            """Return the loss of one micro-batch as its share of the whole."""
            share = loss(await self._forward(part, lanes), target)
            share = await share if inspect.isawaitable(share) else share
            # Weighted by rows: the last micro-batch may be smaller, and the sum must be the mean of
            # the batch.
            return share * (len(part) / rows)

        # What x was made from is one graph for all micro-batches, and the first pass through it
        # would free it for the others. So micro-batches end at x, and one pass carries their
        # gradients on.
        in_front = _is_tensor(x) and x.grad_fn is not None
        fronts: list[Any] = []  # their gradients are those that arrived at x

        async def there_and_back(part: Any, target: Any) -> float:
            """Run one micro-batch forward and backward; for 1f1b."""
            async with under_way:
                given = part.detach().requires_grad_() if in_front else part
                share = await forward(given, target)
                await ctx.backward(share)
                gradient = ctx.take_gradient(given) if in_front else None
                if gradient is not None:
                    # A scalar whose gradient at x is the one that arrived: what `ctx.backward` can
                    # start from.
                    fronts.append((part * gradient.detach().conj()).sum())
                return float(share.item())

        pairs = list(zip(inputs, wanted, strict=True))
        if self.schedule == "1f1b":
            losses = await _all_or_none([there_and_back(*pair) for pair in pairs])
            if fronts:
                await ctx.backward(*fronts)
        else:
            shares = await _all_or_none([forward(*pair) for pair in pairs])
            # One pass from all losses: their graphs share the leaves, which are visited once.
            await ctx.backward(*shares)
            losses = [float(share.item()) for share in shares]
        return float(sum(losses))

    def _lanes(self) -> list[asyncio.Lock]:
        """Return a lock per stage: micro-batches of a batch pass it in order, one at a time."""
        return [asyncio.Lock() for _ in self.stages]

    async def _forward(self, value: Any, lanes: list[asyncio.Lock]) -> Any:
        for stage, lane in zip(self.stages, lanes, strict=True):
            # These locks are fair, so micro-batches keep their order from stage to stage.
            async with lane:
                value = await rpc_async(
                    stage.owner(), _run_stage, args=(stage, value, self.recompute)
                )
        return value

    def _split(self, batch: Any) -> list[Any]:
        """Cut a batch into micro-batches of nearly equal size; views, not copies."""
        if not _is_tensor(batch):
            batch = np.asarray(batch)
        rows = len(batch)
        if not rows:
            raise ValueError("a pipeline needs at least one row to work on; the batch is empty")
        count = min(self.microbatches, rows)
        edges = [rows * i // count for i in range(count + 1)]
        return [batch[a:b] for a, b in itertools.pairwise(edges)]

    def __repr__(self) -> str:
        places = " → ".join(stage.owner_name() for stage in self.stages)
        return f"<Pipeline {places}, {self.schedule}, {self.microbatches} micro-batches>"


async def _all_or_none(work: list[Any]) -> list[Any]:
    """Run everything at once; if one fails, cancel the others and raise its error."""
    tasks = [asyncio.ensure_future(each) for each in work]
    try:
        return await asyncio.gather(*tasks)
    except BaseException:
        for task in tasks:
            task.cancel()
        # Wait for the cancelled ones: a call must not outlive the batch and record into its
        # context.
        await asyncio.gather(*tasks, return_exceptions=True)
        raise


def _is_tensor(value: Any) -> bool:
    return isinstance(value, Tensor) or library_of(value) is not None


def _module_of(stage: RemoteModule[Any] | RRef[Any]) -> RRef[Any]:
    """Return the reference to a stage's module."""
    if isinstance(stage, RemoteModule):
        return stage.module_rref
    if isinstance(stage, RRef):
        return stage
    raise TypeError(f"a stage is a RemoteModule or an RRef to a module, not {type(stage).__name__}")


def _run_stage(stage: RRef[Any], value: Any, recompute: bool) -> Any:
    """Run a stage at its owner; with `recompute`, save its input instead of its graph."""
    module = stage.local_value()
    if not is_module(module):
        raise ValueError(f"a stage holds {type(module).__name__}, which is no nn.Module")
    if not recompute:
        return module(value)
    # Of another library's, the call itself: its hooks belong to it.
    return checkpoint(module.forward if isinstance(module, Module) else _called(module))(value)


def _called(module: Any) -> Callable[[Any], Any]:
    def call(value: Any) -> Any:
        return module(value)

    return call
