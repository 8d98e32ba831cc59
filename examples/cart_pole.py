"""Cart and pole for 06_actor_learner.py: a few lines of mechanics, and a policy that learns."""

import math

import numpy as np

import aiograd as ag

STEPS = 200  # a pole that stands for so long is balanced


class CartPole:
    """A pole on a cart that is pushed left or right, 50 times a second, until it falls."""

    def __init__(self, rng):
        self.state = rng.uniform(-0.05, 0.05, 4)

    def standing(self):
        return abs(self.state[0]) < 2.4 and abs(self.state[2]) < 0.2095

    def push(self, right):
        x, v, angle, spin = self.state
        sin, cos = math.sin(angle), math.cos(angle)
        force = ((10 if right else -10) + 0.05 * spin**2 * sin) / 1.1
        turn = (9.8 * sin - cos * force) / (0.5 * (4 / 3 - 0.1 * cos**2 / 1.1))
        speed = force - 0.05 * turn * cos / 1.1
        self.state = np.array(
            [x + 0.02 * v, v + 0.02 * speed, angle + 0.02 * spin, spin + 0.02 * turn]
        )


def new_policy(rng):
    shapes = [(4, 16), (16,), (16,)]
    return [ag.tensor(rng.standard_normal(s) * 0.3, requires_grad=True) for s in shapes]


def play(weights, rng):
    """One episode: what was seen, what was done, and how likely that was."""
    world, (w1, b1, w2) = CartPole(rng), weights
    states, actions, chances = [], [], []
    while len(states) < STEPS and world.standing():
        right = 1 / (1 + math.exp(-float(np.tanh(world.state @ w1 + b1) @ w2)))
        action = rng.random() < right
        states.append(world.state)
        actions.append(1.0 if action else -1.0)
        chances.append(math.log(right if action else 1 - right))
        world.push(action)
    return np.array(states), np.array(actions), np.array(chances)


def loss_of(weights, batch):
    """The policy gradient's loss, corrected for the age of the weights that were played."""
    states, actions, chances = (np.concatenate(column) for column in zip(*batch, strict=True))
    left = np.concatenate([np.arange(len(e[0]), 0, -1) for e in batch])  # steps still to come
    worth = (1 - 0.98**left) / 0.02
    worth = (worth - worth.mean()) / worth.std()
    w1, b1, w2 = weights
    chance = -ag.log(1 + ag.exp(-actions * (ag.tanh(states @ w1 + b1) @ w2)))
    return -(ag.exp(chance - chances) * worth).mean()
