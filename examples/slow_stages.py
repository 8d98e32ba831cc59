"""The slow stages of 07_pipeline.py, and a picture of when they were busy."""

import threading
import time

import numpy as np

import aiograd as ag

WIDTH = 32


class Stage(ag.nn.Module):
    """A layer on a machine that does one thing at a time, at its own pace."""

    def __init__(self, seed, pace):
        super().__init__()
        self.layer = ag.nn.Linear(WIDTH, WIDTH, generator=np.random.default_rng(seed))
        self.pace, self.machine, self.busy = pace, threading.Lock(), []

    def forward(self, x):
        with self.machine:
            start = time.time()
            time.sleep(self.pace)  # stands for work on another machine's processor
            self.busy.append((start, time.time()))
        return ag.tanh(self.layer(x))


def report(stage, ctx_id):
    """Runs at a stage: its gradients in this context, and when it was busy."""
    found, module = ag.get_gradients(ctx_id), stage.local_value()
    busy, module.busy = module.busy, []
    return [found[p].numpy() for p in module.parameters()], busy


def draw(busy):
    first = min(start for stage in busy for start, _ in stage)
    scale = 70 / (max(end for stage in busy for _, end in stage) - first)
    for number, stage in enumerate(busy):
        spans = [range(int((a - first) * scale), int((b - first) * scale)) for a, b in stage]
        line = "".join("█" if any(i in span for span in spans) else " " for i in range(70))
        print(f"  stage {number} |{line}|")
