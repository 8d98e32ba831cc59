"""Actors stream episodes of cart-pole to a learner; back-pressure sets their pace."""

import asyncio
import time

import numpy as np
from actors import Actor, rest
from cart_pole import loss_of, new_policy

import aiograd as ag

ACTORS, EPISODES, GOAL, LIMIT = 8, 4, 195, 200  # episodes per actor and update; the mean to reach


async def episodes(actor):
    """Runs on the actor's worker: endless, but back-pressure keeps it close to its reader."""
    while True:
        yield await asyncio.to_thread(actor.local_value().episode)


class Crew:
    """The learner's side of one actor: its reference and its stream."""

    def __init__(self, cluster, name, seed, say):
        self.cluster, self.name, self.seed, self.say = cluster, name, seed, say
        self.hire()

    def hire(self):
        self.actor = ag.remote(self.name, Actor, args=(self.seed,))
        self.stream, self.taken = None, 0

    async def take(self, version, weights):
        """Give the actor new weights and take episodes from it; a dead one is replaced."""
        try:
            await self.actor.rpc_async().use(version, [w.numpy() for w in weights])
            self.stream = self.stream or ag.rpc_stream(self.name, episodes, args=(self.actor,))
            taken = [await anext(self.stream) for _ in range(EPISODES)]
            self.taken += EPISODES
            return taken
        except ag.errors.WorkerLost as error:
            self.say(f"             {type(error).__name__}: {error}; hiring another one")
            await self.cluster.restart(self.name)
            self.hire()
            return []


async def main():
    start, weights = time.perf_counter(), new_policy(np.random.default_rng(1))
    optimizer = ag.optim.Adam(weights, lr=0.05)
    async with ag.LocalCluster(ACTORS) as cluster:
        bar = ag.progress(range(1, LIMIT + 1), "updates, at most")
        crew = [Crew(cluster, worker.name, seed, bar.say) for seed, worker in enumerate(cluster)]
        for version in bar:
            taken = await asyncio.gather(*[member.take(version, weights) for member in crew])
            versions, batch = zip(*[episode for some in taken for episode in some], strict=True)
            reward = np.mean([len(states) for states, _, _ in batch])
            if version % 5 == 1 or reward >= GOAL:
                age = version - np.mean(versions)
                bar.say(f"update {version:3d}   mean reward {reward:6.1f}   weights {age:.1f} old")
            if reward >= GOAL:
                break
            optimizer.zero_grad()
            loss_of(weights, batch).backward()
            optimizer.step()
            if version == 4:
                await asyncio.gather(cluster.kill("worker1"), cluster.kill("worker5"))
        print(f"solved in {time.perf_counter() - start:.1f} s" if reward >= GOAL else "not solved")

        ahead, grown = await rest(crew, seconds=2)
        print(f"at rest none is more than {ahead} episodes ahead, all have grown by {grown:.1f} MB")
        await asyncio.gather(*[member.stream.aclose() for member in crew])


if __name__ == "__main__":
    asyncio.run(main())
