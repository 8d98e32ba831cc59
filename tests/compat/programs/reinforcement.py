"""REINFORCE: observers play episodes and ask the agent's policy, by calls in both directions."""

import sys

import torch
import torch.distributed.rpc as rpc
import torch.multiprocessing as mp
from torch import nn, optim
from torch.distributions import Categorical

OBSERVERS, EPISODES, STEPS = 2, 30, 10


class Chase:
    """Says a number; the action that names its sign is rewarded."""

    def __init__(self, seed: int) -> None:
        self.generator = torch.Generator().manual_seed(seed)

    def reset(self):
        self.state = torch.randn(1, generator=self.generator)
        return self.state

    def step(self, action: int):
        reward = 1.0 if (self.state.item() > 0) == bool(action) else 0.0
        return self.reset(), reward


class Observer:
    def __init__(self) -> None:
        self.rank = rpc.get_worker_info().id
        self.env = Chase(self.rank)

    def run_episode(self, agent) -> None:
        state = self.env.reset()
        for _ in range(STEPS):
            action = agent.rpc_sync().select_action(self.rank, state)
            state, reward = self.env.step(action)
            agent.rpc_sync().report_reward(self.rank, reward)


class Agent:
    def __init__(self) -> None:
        torch.manual_seed(1)
        self.policy = nn.Sequential(nn.Linear(1, 8), nn.Tanh(), nn.Linear(8, 2), nn.Softmax(-1))
        self.optimizer = optim.Adam(self.policy.parameters(), lr=0.03)
        self.rref = rpc.RRef(self)
        names = [f"observer{rank}" for rank in range(1, OBSERVERS + 1)]
        self.observers = [rpc.remote(rpc.get_worker_info(name), Observer) for name in names]
        self.rewards = {rank: [] for rank in range(1, OBSERVERS + 1)}
        self.log_probs = {rank: [] for rank in range(1, OBSERVERS + 1)}

    def select_action(self, rank: int, state):
        chosen = Categorical(self.policy(state))
        action = chosen.sample()
        self.log_probs[rank].append(chosen.log_prob(action))
        return action.item()

    def report_reward(self, rank: int, reward: float) -> None:
        self.rewards[rank].append(reward)

    def run_episode(self) -> None:
        calls = [each.rpc_async(timeout=0).run_episode(self.rref) for each in self.observers]
        for call in calls:
            call.wait()

    def finish_episode(self) -> float:
        rewards = torch.tensor([r for rank in self.rewards for r in self.rewards[rank]])
        log_probs = torch.stack([p for rank in self.rewards for p in self.log_probs[rank]])
        assert len(rewards) == len(log_probs) == OBSERVERS * STEPS
        loss = -(log_probs * (rewards - rewards.mean())).sum()
        self.optimizer.zero_grad()
        loss.backward()
        self.optimizer.step()
        for rank in self.rewards:
            self.rewards[rank], self.log_probs[rank] = [], []
        return rewards.mean().item()


def run(rank: int, store: str) -> None:
    options = rpc.TensorPipeRpcBackendOptions(init_method=f"file://{store}")
    name = f"observer{rank}" if rank else "agent"
    rpc.init_rpc(name, rank=rank, world_size=OBSERVERS + 1, rpc_backend_options=options)
    if not rank:
        agent, found = Agent(), []
        for _ in range(EPISODES):
            agent.run_episode()
            found.append(agent.finish_episode())
        assert sum(found[-5:]) / 5 > 0.75, found
        print("learnt", flush=True)
    rpc.shutdown()


if __name__ == "__main__":
    mp.start_processes(run, args=(sys.argv[1],), nprocs=OBSERVERS + 1, start_method="fork")
