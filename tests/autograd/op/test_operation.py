"""Users' own operations, declared with `ag.op`."""

from __future__ import annotations

import pickle

import cloudpickle
import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.errors import GradError
from aiograd.testing import gradcheck, gradgradcheck


def leaf(*values: float) -> ag.Tensor:
    return ag.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


cube = ag.op("cube", lambda a: a**3, lambda g, y, a: g * 3 * a**2)
scaled = ag.op(
    "scaled",
    lambda a, b, factor=1.0: a * b * factor,
    lambda g, y, a, b, factor=1.0: g * b * factor,
    None,
)
both = ag.op(
    "both",
    lambda a: (np.sin(a), np.cos(a)),
    joint=lambda gs, ys, a: [gs[0] * ys[1] - gs[1] * ys[0]],
)
total = ag.op(
    "total", lambda *arrays: sum(arrays), each=lambda g, y, i, *arrays: g
)  # any number of arguments


def test_a_rule_per_argument_is_enough_for_every_order():
    assert gradcheck(cube, (leaf(),))
    assert gradgradcheck(cube, (leaf(),))
    assert cube(leaf()).grad_fn.name == "cube"


def test_keyword_arguments_reach_the_rule():
    x, w = leaf(), ag.tensor([1.0, 2.0, 3.0], requires_grad=True)
    scaled(x, w, factor=2.0).sum().backward()
    assert x.grad.tolist() == [2, 4, 6]
    assert w.grad is None  # None instead of a rule: no gradient on purpose


def test_several_outputs_have_one_joint_rule():
    x = leaf()
    assert gradcheck(both, (x,))
    assert gradgradcheck(both, (x,))
    first, _ = both(x)
    first.sum().backward()  # the other output is never used
    np.testing.assert_allclose(x.grad.data, np.cos(x.data))


def test_any_number_of_arguments():
    xs = [leaf(), leaf(), leaf()]
    total(*xs, np.ones(3)).sum().backward()
    assert all(x.grad.tolist() == [1, 1, 1] for x in xs)


def test_one_rule_called_once_may_serve_all_arguments():
    product = ag.op("product", lambda a, b: a * b, joint=lambda g, y, a, b: [g * b, g * a])
    assert gradcheck(product, (leaf(), leaf(4.0, 5.0, 6.0)))
    assert gradgradcheck(product, (leaf(), leaf(4.0, 5.0, 6.0)))
    bad = ag.op("one_short", lambda a, b: a * b, joint=lambda g, y, a, b: [g])
    with pytest.raises(GradError, match="one_short") as caught:
        bad(leaf(), leaf()).sum().backward()
    assert caught.value.reason == "count"


def test_arrays_and_lists_give_tensors():
    assert cube(np.ones(2)).tolist() == [1, 1]
    assert cube([1.0, 2.0]).tolist() == [1, 8]
    assert ag.add([1.0, 2.0], [3.0, 4.0]).tolist() == [4, 6]


def test_a_list_of_tensors_is_stacked_not_detached():
    x = ag.tensor(2.0, requires_grad=True)
    ag.exp([x, x * 0]).sum().backward()
    assert x.grad.item() == pytest.approx(np.exp(2.0))


def test_rules_are_checked_when_declared():
    with pytest.raises(TypeError, match="callable"):
        ag.op("bad", 3, lambda g, y, a: g)
    with pytest.raises(TypeError, match="rule"):
        ag.op("bad", np.sin, "rule")
    with pytest.raises(TypeError, match="rule"):
        ag.op("bad", np.sin)


def test_none_is_no_array():
    with pytest.raises(TypeError, match="None"):
        ag.add(ag.ones(2), None)
    with pytest.raises(TypeError):
        ag.ones(2) + None


def test_a_rule_that_gives_the_wrong_shape_is_named():
    bad = ag.op("bad_shape", lambda a: a * 2, lambda g, y, a: np.ones(5))
    with pytest.raises(GradError, match="bad_shape") as caught:
        bad(leaf()).sum().backward()
    assert caught.value.reason == "shape"


def test_a_joint_rule_that_gives_the_wrong_number_is_named():
    bad = ag.op("bad_count", lambda a, b: (a, b), joint=lambda gs, ys, a, b: [gs[0]])
    with pytest.raises(GradError, match="bad_count") as caught:
        bad(leaf(), leaf())[0].sum().backward()
    assert caught.value.reason == "count"


def test_an_argument_without_a_rule_that_requires_grad_is_refused():
    one_rule = ag.op("one_rule", lambda a, b: a * b, lambda g, y, a: g)
    assert one_rule(leaf(), 2.0).requires_grad
    with pytest.raises(TypeError, match="one_rule"):
        one_rule(leaf(), leaf())


def test_a_keyword_that_no_rule_knows_is_refused_at_the_call():
    x = leaf()
    with pytest.raises(TypeError, match="where="):
        ag.sum(x, where=np.array([True, False, True]))
    with pytest.raises(TypeError, match="shape"):
        ag.reshape(x, shape=ag.ones(1, requires_grad=True))


def test_an_error_in_a_rule_comes_out_as_it_is():
    def rule(g, y, a):
        raise ZeroDivisionError("mine")

    with pytest.raises(ZeroDivisionError, match="mine"):
        ag.op("raising", lambda a: a * 1, rule)(leaf()).sum().backward()


def test_user_operations_travel_by_value_and_the_librarys_by_name():
    again = cloudpickle.loads(cloudpickle.dumps(cube))
    x = leaf()
    again(x).sum().backward()
    assert x.grad.tolist() == [3, 12, 27]
    assert not isinstance(cube.op_name, str)
    assert ag.tanh.op_name == "tanh"
    assert pickle.loads(pickle.dumps(ag.tanh)) is ag.tanh
    assert pickle.loads(pickle.dumps(ag.concatenate)) is ag.concatenate


def test_every_public_operation_knows_its_name():
    for name, operation in ag.NAMES.items():
        assert ag.OPS[operation.op_name] is operation, name
        assert getattr(ag, name) is operation


def test_out_is_a_write():
    x, target = ag.tensor([1.0, 2.0]), ag.zeros(2)
    assert ag.add(x, 1, out=target) is target
    assert target.tolist() == [2, 3]
    array = np.zeros(2)
    assert np.add(x, 1, out=array) is array
    assert array.tolist() == [2, 3]
    with pytest.raises(GradError):
        ag.add(leaf(1.0, 2.0), 1, out=target)
    with pytest.raises(TypeError, match="out="):
        np.add(leaf(1.0, 2.0), 1, out=array)
