from aiograd.rpc.budget import Budget
from aiograd.rpc.limits import Limits


def test_memory_is_given_until_none_is_left_and_again_when_it_came_back():
    limits = Limits()
    budget = Budget(100, limits)
    assert budget.reserve(60)
    assert budget.reserve(40)
    assert limits["inbound_budget"] == 0
    assert not budget.reserve(1)
    assert limits["inbound_budget"] == 1
    assert budget.used == 100  # what was refused took nothing
    budget.release(60)
    assert budget.reserve(60)
