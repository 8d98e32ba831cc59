"""The same work for every library: sizes, data, timing, memory, and how results are printed."""

from __future__ import annotations

import gc
import itertools
import json
import os
import time
from collections.abc import Callable

for _variable in ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"):
    os.environ.setdefault(_variable, "1")  # one thread everywhere, so that ratios mean something

import numpy as np  # noqa: E402  it reads the variables above

CHAIN = 1000
BATCH, PIXELS, HIDDEN, CLASSES = 64, 784, 256, 10
SEQUENCES, LENGTH, WIDTH, LAYERS = 4, 128, 256, 4  # of the transformer
WIDE_BATCH, WIDE_HIDDEN = 4096, 1024  # of the memory measurement: large against everything else
SECONDS = float(os.environ.get("BENCH_SECONDS", "0.7"))

_rng = np.random.default_rng(0)


def _normal(*shape: int, scale: float = 1.0) -> np.ndarray:
    return (scale * _rng.standard_normal(shape)).astype(np.float32)


SMALL = np.ones((3, 3), np.float32)
X, Y = _normal(BATCH, PIXELS), np.eye(CLASSES, dtype=np.float32)[_rng.integers(0, CLASSES, BATCH)]
MLP = [_normal(PIXELS, HIDDEN, scale=0.05), np.zeros(HIDDEN, np.float32)]
MLP += [_normal(HIDDEN, CLASSES, scale=0.05), np.zeros(CLASSES, np.float32)]
TOKENS = _normal(SEQUENCES, LENGTH, WIDTH)
#: per layer: query, key, value, output, up, down
BLOCKS = [
    [_normal(WIDTH, WIDTH, scale=0.05) for _ in range(4)]
    + [_normal(WIDTH, 4 * WIDTH, scale=0.05), _normal(4 * WIDTH, WIDTH, scale=0.05)]
    for _ in range(LAYERS)
]


def wide_mlp() -> tuple[np.ndarray, np.ndarray, list[np.ndarray]]:
    """Inputs, one-hot targets and parameters of the network whose memory is measured."""
    labels = _rng.integers(0, CLASSES, WIDE_BATCH)
    sizes = [PIXELS, WIDE_HIDDEN, WIDE_HIDDEN, CLASSES]
    params = []
    for rows, columns in itertools.pairwise(sizes):
        params += [_normal(rows, columns, scale=0.05), np.zeros(columns, np.float32)]
    return _normal(WIDE_BATCH, PIXELS), np.eye(CLASSES, dtype=np.float32)[labels], params


def emit(peer: str, metric: str, value: float, unit: str) -> None:
    print(json.dumps({"peer": peer, "metric": metric, "value": value, "unit": unit}), flush=True)


def wanted(metric: str) -> bool:
    """False when BENCH_METRICS (comma-separated prefixes) leaves this one out."""
    prefixes = [p for p in os.environ.get("BENCH_METRICS", "").split(",") if p]
    return not prefixes or any(metric.startswith(p) for p in prefixes)


def best(step: Callable[[], object], seconds: float = SECONDS, warm: int = 3) -> float:
    """The shortest of many repetitions, in microseconds."""
    for _ in range(warm):
        step()
    shortest, end = float("inf"), time.perf_counter() + seconds
    repetitions = 0
    while repetitions < 3 or time.perf_counter() < end:
        start = time.perf_counter()
        step()
        shortest = min(shortest, time.perf_counter() - start)
        repetitions += 1
    return shortest * 1e6


def peak_memory(step: Callable[[], object]) -> float:
    """How far resident memory rises above its level while `step` runs, in bytes.

    The same measure for libraries with and without an allocator of their own. It wants
    MALLOC_MMAP_THRESHOLD_ small, so that freed arrays go back at once.
    """
    for _ in range(2):
        step()
    gc.collect()
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # the peak starts again from here
    before = _status("VmRSS")
    step()
    return float(_status("VmHWM") - before)


def _status(field: str) -> int:
    with open("/proc/self/status") as file:
        for line in file:
            if line.startswith(field + ":"):
                return int(line.split()[1]) * 1024
    raise RuntimeError(f"/proc/self/status has no {field}")


def measure(
    peer: str,
    chain: Callable[[], object],
    mlp: Callable[[], object],
    transformer: Callable[[], object] | None,
    memory: Callable[[], Callable[[], object]] | None,
) -> None:
    """Run the workloads that this peer implements and print the results."""
    if os.environ.get("BENCH_MEMORY") == "1":
        if memory is not None and wanted("local.mlp_peak_memory"):
            emit(peer, "local.mlp_peak_memory", peak_memory(memory()), "B")
        return
    if wanted("local.chain_fwd_bwd.per_op"):
        emit(peer, "local.chain_fwd_bwd.per_op", best(chain) / CHAIN, "us")
    if wanted("local.mlp_step"):
        emit(peer, "local.mlp_step", best(mlp, warm=10), "us")
    if transformer is not None and wanted("local.transformer_block"):
        emit(peer, "local.transformer_block", best(transformer, 3 * SECONDS), "us")
