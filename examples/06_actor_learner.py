"""Actors stream episodes of cart-pole to a learner, as fast as it takes them and no faster."""

import asyncio
import math
import time

import numpy as np
from cart_pole import CartPole

import aiograd as ag

ACTORS, EPISODES, GOAL, LIMIT = 4, 8, 195, 200  # episodes per actor and update; the mean to reach


class Actor:
    """Lives on a worker: plays with the newest weights it was given."""

    def __init__(self, seed, weights):
        self.rng, self.weights, self.played = np.random.default_rng(seed), weights, 0

    def use(self, weights):
        self.weights = weights

    def count(self):
        return self.played

    def episode(self):
        """Balance a pole on a cart until it falls, at most 200 steps."""
        world, (w1, b1, w2) = CartPole(self.rng), self.weights
        states, actions, chances = [], [], []
        while len(states) < 200 and world.standing():
            right = 1 / (1 + math.exp(-float(np.tanh(world.state @ w1 + b1) @ w2)))
            action = self.rng.random() < right
            states.append(world.state)
            actions.append(1.0 if action else -1.0)
            chances.append(math.log(right if action else 1 - right))
            world.push(action)
        self.played += 1
        return np.array(states), np.array(actions), np.array(chances)


async def episodes(actor):
    """Runs on the actor's worker: goes on for ever, but never far ahead of its reader."""
    while True:
        yield await asyncio.to_thread(actor.local_value().episode)


def improve(optimizer, weights, batch):
    """One step of the policy gradient, corrected for the age of the weights that were played."""
    states, actions, chances = (np.concatenate(column) for column in zip(*batch, strict=True))
    left = np.concatenate([np.arange(len(e[0]), 0, -1) for e in batch])  # steps still to come
    worth = (1 - 0.98**left) / 0.02
    worth = (worth - worth.mean()) / worth.std()
    w1, b1, w2 = weights
    chance = -ag.log(1 + ag.exp(-actions * (ag.tanh(states @ w1 + b1) @ w2)))
    optimizer.zero_grad()
    (-(ag.exp(chance - chances) * worth).mean()).backward()
    optimizer.step()


class Team:
    """The learner's side of the actors: their references and streams."""

    def __init__(self, cluster):
        self.cluster, self.actors, self.streams = cluster, {}, {}

    def hire(self, name, seed, weights):
        self.actors[name] = ag.remote(name, Actor, args=(seed, weights))
        self.streams[name] = ag.rpc_stream(name, episodes, args=(self.actors[name],))

    async def take(self, name, weights):
        """Give an actor new weights and take episodes from it; a dead one is replaced."""
        try:
            await self.actors[name].rpc_async().use(weights)
            return [await anext(self.streams[name]) for _ in range(EPISODES)]
        except ag.errors.WorkerLost as error:
            print(f"             {type(error).__name__}: {error}; hiring another one")
            await self.cluster.restart(name)
            self.hire(name, 100, weights)
            return []


async def main():
    rng = np.random.default_rng(1)
    shapes = [(4, 16), (16,), (16,)]
    weights = [ag.tensor(rng.standard_normal(s) * 0.3, requires_grad=True) for s in shapes]
    optimizer = ag.optim.Adam(weights, lr=0.05)
    start = time.perf_counter()
    async with ag.LocalCluster(ACTORS) as cluster:
        team = Team(cluster)
        now = [w.numpy() for w in weights]
        for seed, worker in enumerate(cluster):
            team.hire(worker.name, seed, now)
        for update in range(1, LIMIT + 1):
            taken = await asyncio.gather(*[team.take(name, now) for name in team.streams])
            batch = [episode for some in taken for episode in some]
            reward = np.mean([len(episode[0]) for episode in batch])
            if update % 5 == 1 or reward >= GOAL:
                print(f"update {update:3d}   mean reward {reward:6.1f}")
            if reward >= GOAL:
                break
            improve(optimizer, weights, batch)
            now = [w.numpy() for w in weights]
            if update == 4:
                await cluster.kill("worker1")
        print(f"solved in {time.perf_counter() - start:.1f} s" if reward >= GOAL else "not solved")

        taken = update * EPISODES
        await asyncio.sleep(0.5)  # the learner rests; without back-pressure they would play on
        played = await team.actors["worker0"].rpc_async().count()
        print(f"worker0 has played {played} episodes, of which the learner took {taken}")
        for stream in team.streams.values():
            await stream.aclose()


if __name__ == "__main__":
    asyncio.run(main())
