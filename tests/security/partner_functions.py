"""Functions, classes and values that workers of these tests expose, and some that they do not."""

from __future__ import annotations

import asyncio
import threading

import numpy as np

import aiograd as ag
from aiograd.rpc.scope import current_guest

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


@ag.expose
class Account:
    """What partners may make, and call some methods of."""

    rate = 0.5

    def __init__(self, balance=0):
        self.balance = balance

    @ag.expose
    def deposit(self, amount, *, fee=0):
        self.balance += amount - fee
        return self.balance

    @ag.expose
    async def later(self, amount):
        await asyncio.sleep(0)
        return self.balance + amount

    @classmethod
    @ag.expose
    def named(cls):
        return cls.__name__

    @staticmethod
    @ag.expose
    def double(x):
        return 2 * x

    @ag.expose
    def opened(self):
        return ag.RRef([self.balance])

    @ag.expose
    def _inner(self):
        return "never"

    def hidden(self):
        return "never"


class Savings(Account):
    """Not exposed, and hides a method."""

    def deposit(self, amount, *, fee=0):
        return "never"


@ag.expose
def open_savings():
    return Savings(7)


@ag.expose
class Layer(ag.nn.Module):
    def __init__(self, n):
        super().__init__()
        self.weight = ag.nn.Parameter(np.full((n, n), 0.5))
        self.seen = 0

    def forward(self, x, scale=1.0):
        return x @ self.weight * scale


class OwnLayer(Layer):
    """A module that partners may run, and nothing else."""

    @ag.expose
    def forward(self, x, scale=1.0):
        return super().forward(x, scale)


class SecretLayer(Layer):
    pass


@ag.expose
def lend_layer(kind):
    return ag.RRef({"own": OwnLayer, "secret": SecretLayer}[kind](3))


@ag.expose
class Descent(ag.optim.SGD):
    pass


@ag.expose
def lend_optimizer(parameters):
    return ag.RRef(ag.optim.SGD([each.local_value() for each in parameters], lr=0.1))


def _guest():
    found = current_guest()
    return None if found is None else found.name


@ag.expose
def guest_in_thread(x):
    return _guest()


@ag.expose
async def guest_in_task(x):
    return _guest()


@ag.expose
@ag.inline
def guest_inline(x):
    return _guest()


@ag.expose
async def guest_in_stream(x):
    yield _guest()


WAITING = threading.Event()


@ag.expose
def wait(seconds):
    """Keep a thread until the test lets it go."""
    WAITING.wait(seconds)


@ag.expose
async def hold(value):
    """Keep an argument until the call is cancelled."""
    await asyncio.sleep(3600)
