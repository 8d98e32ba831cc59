"""Actors stream episodes of cart-pole to a learner, as fast as it takes them and no faster."""

import asyncio
import resource
import time

import numpy as np
from cart_pole import loss_of, new_policy, play

import aiograd as ag

ACTORS, EPISODES, GOAL, LIMIT = 8, 4, 195, 200  # episodes per actor and update; the mean to reach


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


async def episodes(actor):
    """Runs on the actor's worker: goes on for ever, but never far ahead of its reader."""
    while True:
        yield await asyncio.to_thread(actor.local_value().episode)


class Crew:
    """The learner's side of one actor: its reference and its stream."""

    def __init__(self, cluster, name, seed):
        self.cluster, self.name, self.seed = cluster, name, seed
        self.hire()

    def hire(self):
        self.actor = ag.remote(self.name, Actor, args=(self.seed,))
        self.stream, self.taken = None, 0

    async def take(self, version, weights):
        """Give the actor new weights and take episodes from it; a dead one is replaced."""
        try:
            await self.actor.rpc_async().use(version, weights)
            self.stream = self.stream or ag.rpc_stream(self.name, episodes, args=(self.actor,))
            taken = [await anext(self.stream) for _ in range(EPISODES)]
            self.taken += EPISODES
            return taken
        except ag.errors.WorkerLost as error:
            print(f"             {type(error).__name__}: {error}; hiring another one")
            await self.cluster.restart(self.name)
            self.hire()
            return []


async def main():
    start, weights = time.perf_counter(), new_policy(np.random.default_rng(1))
    optimizer = ag.optim.Adam(weights, lr=0.05)
    async with ag.LocalCluster(ACTORS) as cluster:
        crew = [Crew(cluster, worker.name, seed) for seed, worker in enumerate(cluster)]
        for version in range(1, LIMIT + 1):
            now = [w.numpy() for w in weights]
            taken = await asyncio.gather(*[member.take(version, now) for member in crew])
            versions, batch = zip(*[episode for some in taken for episode in some], strict=True)
            reward = np.mean([len(states) for states, _, _ in batch])
            if version % 5 == 1 or reward >= GOAL:
                age = version - np.mean(versions)
                print(f"update {version:3d}   mean reward {reward:6.1f}   weights {age:.1f} old")
            if reward >= GOAL:
                break
            optimizer.zero_grad()
            loss_of(weights, batch).backward()
            optimizer.step()
            if version == 4:
                await asyncio.gather(cluster.kill("worker1"), cluster.kill("worker5"))
        print(f"solved in {time.perf_counter() - start:.1f} s" if reward >= GOAL else "not solved")

        before = [await member.actor.rpc_async().report() for member in crew]
        await asyncio.sleep(2)  # a slow learner; without back-pressure they would play on
        after = [await member.actor.rpc_async().report() for member in crew]
        ahead = max(played - member.taken for member, (played, _) in zip(crew, after, strict=True))
        grown = sum(b[1] - a[1] for a, b in zip(before, after, strict=True))
        print(f"the learner rests: no actor is more than {ahead} episodes ahead,", end=" ")
        print(f"and all of them together have grown by {grown / 1024:.1f} MB")
        for member in crew:
            await member.stream.aclose()


if __name__ == "__main__":
    asyncio.run(main())
