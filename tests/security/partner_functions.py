"""What workers of these tests offer to partners, and what they do not."""

from __future__ import annotations

import asyncio

import numpy as np

import aiograd as ag

WEIGHT = ag.tensor(np.full((3, 2), 0.5), requires_grad=True)


@ag.expose
def add(x, y=1):
    return x + y


@ag.expose
def echo(*args, **kwargs):
    return [list(args), kwargs]


@ag.expose
def project(x):
    return x @ WEIGHT


@ag.expose
async def pick(weight, rows):
    return ag.nn.functional.embedding(rows, weight, sparse=True)


@ag.expose
def gradient_of_weight(context_id):
    return ag.get_gradients(context_id)[WEIGHT].numpy()


@ag.expose
def make(value):
    return value


@ag.expose
def read(rref):
    return rref.local_value()


@ag.expose
def lend(value):
    return ag.RRef(value)


@ag.expose
async def count(n):
    for i in range(n):
        yield i


@ag.expose
def fail(kind):
    if kind == "value":
        raise ValueError("a value", 3)
    if kind == "own":
        raise Secretive("reason")
    if kind == "ours":
        raise ag.errors.Overloaded("worker1", "too much")
    if kind == "half":
        raise ValueError("half a character: \udcff")
    raise KeyError(object())


class Secretive(Exception):
    pass


def hidden():
    return "never"


class Shelf:
    @staticmethod
    @ag.expose
    def static(x):
        return x * 2

    @ag.expose
    def method(self):
        return "method"

    @staticmethod
    @ag.expose
    def _private(x):
        return x


@ag.expose
def _private():
    return "never"


@ag.expose
async def forever():
    await asyncio.get_running_loop().create_future()


@ag.expose
def block(size):
    return bytes(size)
