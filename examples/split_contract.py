"""What the parties of 05_split_learning.py have agreed on: the only functions they may call.

Each party fills in its own `Party`; the others know nothing but the names of the functions below.
"""

import numpy as np

import aiograd as ag

CLIP, NOISE = 3.0, 0.1  # how long an embedding may be, and how much noise hides what made it


class Party:
    """A feature owner: its columns of the table, its part of the model, its optimiser."""

    here = None  # this process's party, if it is one

    def __init__(self, columns, seed):
        self.rng = np.random.default_rng(seed)
        self.columns = columns
        self.net = ag.nn.Sequential(
            ag.nn.Linear(columns.shape[1], 8, generator=self.rng),
            ag.nn.Tanh(),
            ag.nn.Linear(8, 4, generator=self.rng),
        )
        self.optimizer = ag.optim.Adam(self.net.parameters(), lr=0.02)

    def embed(self, rows, noisy=True):
        h = self.net(self.columns[rows])
        if not noisy:
            return h
        length = ag.sqrt((h * h).sum(axis=1, keepdims=True) + 1e-12)
        h = h * ag.minimum(1.0, CLIP / length)
        return h + NOISE * self.rng.standard_normal(h.shape)


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
    return Party.here.embed(rows)


@ag.expose
def learn(ctx_id):
    """Step with the gradients that came back; they stay here, and so do the weights."""
    Party.here.optimizer.step(ag.get_gradients(ctx_id))
