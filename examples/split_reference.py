"""The table of 05_split_learning.py, and the same training with all of it in one place."""

import numpy as np
from split_contract import Party, loss_of, make_head

import aiograd as ag

ROWS, TRAIN = 3000, 2000  # the rows after TRAIN are for evaluation


def table():
    """Made up, the same everywhere; in real life each party has only its own columns."""
    rng = np.random.default_rng(0)
    columns = rng.standard_normal((ROWS, 10))
    hidden = np.tanh(columns[:, :5] @ rng.standard_normal((5, 3)))
    score = (hidden * np.tanh(columns[:, 5:] @ rng.standard_normal((5, 3)))).sum(axis=1)
    return columns[:, :5], columns[:, 5:], (score > 0).astype(float)


def train_pooled(first, second, label, steps):
    """The same model with all columns in one place and no noise, to compare."""
    parties, head = [Party(first, 1), Party(second, 2)], make_head()
    params = [p for model in (parties[0].net, parties[1].net, head) for p in model.parameters()]
    optimizer = ag.optim.Adam(params, lr=0.02)
    for _ in range(steps):
        optimizer.zero_grad()
        embeddings = [p.embed(slice(0, TRAIN)) for p in parties]
        loss_of(head, embeddings, label[:TRAIN])[0].backward()
        optimizer.step()
    _, score = loss_of(head, [p.embed(slice(TRAIN, None)) for p in parties], label[TRAIN:])
    return np.mean((score.numpy() > 0) == (label[TRAIN:] > 0.5))
