"""Cart and pole for 06_actor_learner.py: a few lines of mechanics, no library."""

import math

import numpy as np


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
