from aiograd.errors import Overloaded
from aiograd.rpc.link.receive import Budget
from aiograd.rpc.observe.metrics import Limits


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


def test_a_refusal_names_the_worker_and_the_limit():
    limits = Limits()
    budget = Budget(100, limits)
    budget.reserve(60)
    error = budget.refusal("bank", "its arguments", 50, "inbound_budget")
    assert error.worker == "bank"
    assert str(error) == (
        "bank refused the call: no memory for its arguments, 50 bytes "
        "(inbound_budget: 60 of 100 are taken)"
    )
    assert "allocation" in str(budget.refusal("bank", "its arguments", 50, "allocation"))


def test_memory_that_the_system_did_not_give_is_counted_and_given_back():
    limits = Limits()
    budget = Budget(100, limits)
    budget.reserve(60)
    budget.unavailable(60)
    assert budget.used == 0
    assert limits["allocation"] == 1


def test_only_missing_memory_makes_a_message_that_cannot_be_decoded_a_refused_one():
    limits = Limits()
    budget = Budget(100, limits)
    other = ValueError("no")
    assert budget.undecodable("bank", "the result", other) is other
    assert limits["allocation"] == 0
    error = budget.undecodable("bank", "the result", MemoryError("640 K"))
    assert isinstance(error, Overloaded)
    assert error.worker == "bank"
    assert "640 K" in str(error)
    assert limits["allocation"] == 1
