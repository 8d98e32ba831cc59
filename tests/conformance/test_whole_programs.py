"""Whole programs: a batching parameter server, reinforcement learning."""

from __future__ import annotations

import asyncio

import numpy as np

import aiograd as ag

# ── a parameter server that updates once per batch of trainers ─────────────────────────────────


class BatchServer:
    """Keeps the model; answers all trainers of a batch with the model after their update."""

    def __init__(self, trainers: int) -> None:
        self.trainers = trainers
        self.weight = ag.zeros(3, requires_grad=True)
        self.optimizer = ag.optim.SGD([self.weight], lr=0.1)
        self.waiting: asyncio.Future[ag.Tensor] | None = None
        self.gradients: list[np.ndarray] = []

    def model(self) -> ag.Tensor:
        return self.weight.detach()

    async def update_and_fetch(self, gradient: np.ndarray) -> ag.Tensor:
        if self.waiting is None:
            self.waiting = asyncio.get_running_loop().create_future()
        batch = self.waiting
        self.gradients.append(gradient)
        if len(self.gradients) == self.trainers:
            self.weight.grad = ag.tensor(sum(self.gradients) / self.trainers)
            self.optimizer.step()
            self.gradients, self.waiting = [], None
            batch.set_result(ag.tensor(self.weight.numpy()))
        return await batch


TRUE = np.array([1.0, -2.0, 0.5])


async def train_batches(server: ag.RRef, seed: int, batches: int) -> list[list[float]]:
    """One trainer: its own data, the common model; gives back every model it saw."""
    rng = np.random.default_rng(seed)
    model = await server.rpc_async().model()
    seen = []
    for _ in range(batches):
        x = rng.standard_normal((32, 3))
        weight = ag.tensor(model.numpy(), requires_grad=True)
        ((ag.tensor(x) @ weight - x @ TRUE) ** 2).mean().backward()
        model = await server.rpc_async().update_and_fetch(weight.grad.numpy())
        seen.append(model.tolist())
    return seen


async def test_ex_batch_ps(workers):
    async with workers(3) as cluster:
        server = ag.RRef(BatchServer(3))
        seen = await asyncio.gather(
            *[worker.call(train_batches, server, worker.rank, 30) for worker in cluster]
        )
        assert seen[0] == seen[1] == seen[2]  # everybody got the same model after every batch
        assert len({tuple(model) for model in seen[0]}) == 30
        np.testing.assert_allclose(seen[0][-1], TRUE, atol=0.05)


# ── an agent that learns from several observers ─────────────────────────────────────────────────

STEPS, SOLVED = 10, 7.0


class Learner:
    """Chooses between two actions by a softmax of what it sees; learns after every round."""

    def __init__(self) -> None:
        self.policy = ag.tensor(np.zeros((2, 2)), requires_grad=True)
        self.optimizer = ag.optim.SGD([self.policy], lr=0.5)
        self.random = np.random.default_rng(0)
        self.chosen: dict[int, list[ag.Tensor]] = {}
        self.rewards: dict[int, list[float]] = {}
        self.running_reward = 0.0

    async def select_action(self, observer: int, state: np.ndarray) -> int:
        scores = ag.nn.functional.log_softmax(ag.tensor(state) @ self.policy, axis=0)
        action = int(self.random.random() < float(ag.exp(scores[1])))
        self.chosen.setdefault(observer, []).append(scores[action])
        return action

    async def report_reward(self, observer: int, reward: float) -> None:
        self.rewards.setdefault(observer, []).append(reward)

    def finish_round(self) -> None:
        episodes = [sum(rewards) for rewards in self.rewards.values()]
        self.running_reward = 0.3 * float(np.mean(episodes)) + 0.7 * self.running_reward
        terms = [
            score * (0.5 - reward)
            for observer, scores in self.chosen.items()
            for score, reward in zip(scores, self.rewards[observer], strict=True)
        ]
        self.policy.grad = None
        (sum(terms) * (1.0 / len(self.chosen))).backward()
        self.optimizer.step()
        self.chosen, self.rewards = {}, {}


async def observe(learner: ag.RRef, observer: int, number: int) -> None:
    """One episode: the right action is the one that the state points to."""
    rng = np.random.default_rng((observer, number))
    for _ in range(STEPS):
        right = int(rng.random() < 0.5)
        action = await learner.rpc_async().select_action(observer, np.eye(2)[right])
        await learner.rpc_async().report_reward(observer, float(action == right))


async def test_ex_rl(workers):
    async with workers(3) as cluster:
        learner = Learner()
        reference = ag.RRef(learner)
        for number in range(60):
            await asyncio.gather(
                *[worker.call(observe, reference, worker.rank, number) for worker in cluster]
            )
            learner.finish_round()
            assert learner.running_reward > 0
            if learner.running_reward > SOLVED:
                break
        assert learner.running_reward > SOLVED, f"{learner.running_reward} after {number} rounds"
