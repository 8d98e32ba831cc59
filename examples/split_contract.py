"""The contract of the parties of 05_split_learning.py: the model, and the exposed functions.

Each party fills in its own `Party`; the others know nothing but the names of the functions below.
"""

import numpy as np

import aiograd as ag

CLIP, NOISE = 3.0, 0.1  # how long an embedding may be, and how much noise hides what made it


class Party:
    """A feature owner: its columns of the table, its part of the model, its optimiser."""

    here = None  # this process's party, if it is one

    def __init__(self, columns, seed):
        self.rng, self.log = np.random.default_rng(seed), []
        self.columns = columns
        self.net = ag.nn.Sequential(
            ag.nn.Linear(columns.shape[1], 8, generator=self.rng),
            ag.nn.Tanh(),
            ag.nn.Linear(8, 4, generator=self.rng),
        )
        self.optimizer = ag.optim.Adam(self.net.parameters(), lr=0.02)

    def embed(self, rows, limit=1e6):
        h = self.net(self.columns[rows])
        return h * ag.minimum(1.0, limit / ag.sqrt((h * h).sum(axis=1, keepdims=True) + 1e-12))

    def cross(self, crossing, array):
        """Every array that leaves this party passes here: it is written down and blurred."""
        array = array + NOISE * self.rng.standard_normal(array.shape)
        self.log.append((crossing.peer, array))
        return array


def loss_of(head, embeddings, label):
    score = head(ag.concatenate(embeddings, axis=1))[:, 0]
    return ag.nn.functional.binary_cross_entropy_with_logits(score, label), score


def make_head():
    rng = np.random.default_rng(3)
    layers = ag.nn.Linear(8, 16, generator=rng), ag.nn.Tanh(), ag.nn.Linear(16, 1, generator=rng)
    return ag.nn.Sequential(*layers)


@ag.expose
def embed(rows):
    """What leaves a feature owner: four clipped, noisy numbers per row, never a column."""
    ag.current_context().on_crossing(Party.here.cross)
    return Party.here.embed(rows, CLIP)


@ag.expose
def learn(ctx_id):
    """Step with the gradients that came back; they stay here, and so do the weights."""
    Party.here.optimizer.step(ag.get_gradients(ctx_id))
