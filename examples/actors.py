"""The actors of 06_actor_learner.py, and how far they get ahead while the learner pauses."""

import asyncio
import resource

import numpy as np
from cart_pole import play


class Actor:
    """Lives on a worker: plays with the newest weights it was given."""

    def __init__(self, seed):
        self.rng, self.played = np.random.default_rng(seed), 0

    def use(self, version, weights):
        self.version, self.weights = version, weights

    def episode(self):
        self.played += 1
        return self.version, play(self.weights, self.rng)

    def report(self):
        return self.played, resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


async def rest(crew, seconds):
    """Read no stream for a while; return how many episodes actors get ahead, and MB they grow."""
    before = [await member.actor.rpc_async().report() for member in crew]
    await asyncio.sleep(seconds)  # without back-pressure they would play on
    after = [await member.actor.rpc_async().report() for member in crew]
    ahead = max(played - member.taken for member, (played, _) in zip(crew, after, strict=True))
    grown = sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
    return ahead, grown / 1024
