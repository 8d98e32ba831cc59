"""What a Tensor is: its data, flags, writes and hooks."""

from __future__ import annotations

import copy
import gc
import pickle
import weakref

import numpy as np
import pytest

import aiograd.autograd as ag
from aiograd.errors import GradError


def leaf(*values: float) -> ag.Tensor:
    return ag.tensor(values or (1.0, 2.0, 3.0), requires_grad=True)


# ── making ──────────────────────────────────────────────────────────────────────────────────────


@pytest.mark.parametrize("data", [None, [None, 1.0], object(), [[1.0], [1.0, 2.0]]])
def test_what_is_no_array_of_numbers_is_refused(data: object):
    with pytest.raises((TypeError, ValueError)):
        ag.tensor(data)


@pytest.mark.parametrize("dtype", [np.int64, np.bool_, np.uint8])
def test_integers_and_truths_cannot_require_grad(dtype: type):
    with pytest.raises(GradError) as caught:
        ag.tensor([1, 0], dtype=dtype, requires_grad=True)
    assert caught.value.reason == "dtype"
    with pytest.raises(GradError):
        ag.tensor([1, 0], dtype=dtype).requires_grad_()


# ── values ──────────────────────────────────────────────────────────────────────────────────────


def test_values_come_out_without_recording():
    x = leaf(2.0)
    assert float(x) == 2.0
    assert x.item() == 2.0
    assert np.asarray(x) is not None
    assert type(np.asarray(x)) is np.ndarray
    assert np.shares_memory(x.numpy(), x.data)
    assert x.tolist() == [2.0]
    assert int(x) == 2
    assert complex(x) == 2
    assert bool(x)
    assert f"{x:.2f}" == "2.00"


def test_a_whole_number_can_be_an_index():
    assert [10, 20, 30][ag.tensor(1)] == 20
    with pytest.raises(TypeError):
        [10][ag.tensor(0.0)]


def test_comparison_is_elementwise_and_the_hash_is_identity():
    a, b = ag.tensor([1.0, 2.0]), ag.tensor([1.0, 3.0])
    assert (a == b).tolist() == [True, False]
    assert (a != b).tolist() == [False, True]
    assert (a < 2).tolist() == [True, False]
    assert len({a, b, a}) == 2
    assert (a == None) is False  # noqa: E711


def test_repr_shows_values_dtype_and_origin():
    x = leaf(1.0)
    assert repr(x) == "tensor([1.], requires_grad=True)"
    assert "grad_fn=<multiply>" in repr(x * 2)
    assert "float32" in repr(ag.ones(1, dtype=np.float32))


def test_in_asks_for_an_element_as_in_numpy():
    t = ag.tensor([[1.0, 2.0], [3.0, 4.0]], requires_grad=True)
    assert 3.0 in t
    assert 5.0 not in t
    assert ag.tensor([3.0, 0.0]) in t
    assert ag.ones(()) in t


def test_length_and_iteration_follow_the_first_axis():
    x = ag.tensor(np.arange(6.0).reshape(3, 2), requires_grad=True)
    assert len(x) == 3
    rows = list(x)
    assert [row.tolist() for row in rows] == [[0, 1], [2, 3], [4, 5]]
    (rows[0].sum() + rows[2].sum()).backward()
    assert x.grad.tolist() == [[1, 1], [0, 0], [1, 1]]
    with pytest.raises(TypeError):
        iter(ag.tensor(1.0))


def test_pickle_copies_value_and_flag_without_the_graph():
    x = leaf()
    y = pickle.loads(pickle.dumps(x * 2))
    assert y.is_leaf
    assert y.requires_grad
    assert y.tolist() == [2, 4, 6]
    assert not pickle.loads(pickle.dumps(ag.ones(2))).requires_grad


def test_deepcopy_of_a_leaf_keeps_its_gradient_and_refuses_results():
    x = leaf()
    (x * x).sum().backward()
    y = copy.deepcopy(x)
    assert y.grad.tolist() == x.grad.tolist()
    assert y.grad is not x.grad
    with pytest.raises(GradError):
        copy.deepcopy(x * 2)


# ── flags ───────────────────────────────────────────────────────────────────────────────────────


def test_requires_grad_can_be_set_on_leaves_and_only_kept_on_results():
    x = ag.ones(2)
    assert not x.requires_grad
    x.requires_grad = True
    y = x * 2
    assert y.requires_grad
    assert not y.is_leaf
    with pytest.raises(GradError):
        y.requires_grad = False
    x.requires_grad = False
    assert not (x * 2).requires_grad


def test_grad_is_assignable_and_must_fit():
    x = leaf()
    x.grad = np.ones(3)
    assert isinstance(x.grad, ag.Tensor)
    x.grad = None
    assert x.grad is None
    with pytest.raises(GradError) as caught:
        x.grad = np.ones(2)
    assert caught.value.reason == "shape"


def test_attributes_are_those_of_the_array():
    x = ag.zeros(2, 3)
    assert (x.shape, x.ndim, x.size, x.nbytes) == ((2, 3), 2, 6, 48)
    assert x.T.shape == (3, 2)
    assert x.mT.shape == (3, 2)
    assert not x.is_sparse


# ── writing ─────────────────────────────────────────────────────────────────────────────────────


def test_a_leaf_that_requires_grad_refuses_writes_while_recording():
    x = leaf()
    with pytest.raises(GradError) as caught:
        x[0] = 5.0
    assert caught.value.reason == "inplace"
    with pytest.raises(GradError) as caught:
        x += 1
    assert caught.value.reason == "inplace"
    with ag.no_grad():
        x[0] = 5.0
        x += 1
    assert x.tolist() == [6, 3, 4]


def test_writing_a_tensor_with_a_gradient_into_another_is_refused():
    target = ag.zeros(3)
    with pytest.raises(GradError) as caught:
        target[0] = leaf(1.0)[0]
    assert caught.value.reason == "inplace"


def test_writes_without_a_gradient_are_plain():
    x = ag.zeros(3)
    same = x
    x[1:] = ag.tensor([1.0, 2.0])
    x += 1
    x *= ag.tensor(2.0)
    x -= 1
    x /= 1
    assert same is x
    assert x.tolist() == [1.0, 3.0, 5.0]
    x.copy_(np.zeros(3))
    assert same.tolist() == [0, 0, 0]


@pytest.mark.parametrize("pack", [list, tuple])
def test_what_is_written_is_not_lost_to_the_graph_inside_a_list(pack):
    x, target = leaf(), ag.zeros(2)
    with pytest.raises(GradError) as caught:
        target[:] = pack([x[0], 1.0])
    assert caught.value.reason == "inplace"
    target += pack([x[0], 1.0])  # a new tensor
    target.sum().backward()
    assert x.grad[0].item() == 1
    with ag.no_grad():
        target[:] = pack([x[0], 1.0])
    assert target.tolist() == [x[0].item(), 1]


@pytest.mark.parametrize(("name", "arguments"), [("sort", ()), ("partition", (1,))])
def test_methods_that_sort_do_so_in_place_as_in_numpy(name, arguments):
    plain, array = ag.tensor([[3.0, 1.0, 2.0]]), np.array([[3.0, 1.0, 2.0]])
    assert getattr(plain, name)(*arguments) is None
    getattr(array, name)(*arguments)
    np.testing.assert_array_equal(plain.data, array)
    getattr(plain, name)(*arguments, axis=1)
    for tracked in (leaf(), leaf() * 2):
        with pytest.raises(GradError) as caught:
            getattr(tracked, name)(0)
        assert caught.value.reason == "inplace"
    factor = ag.tensor([3.0, 2.0, 1.0])
    y = leaf() * factor
    getattr(factor, name)(0)
    with pytest.raises(GradError) as caught:
        y.sum().backward()
    assert caught.value.reason == "modified"


def test_whole_numbers_are_shifted_and_divided_with_rest_as_in_numpy():
    a, b = np.array([5, 9]), np.array([1, 2])
    for compute in (
        lambda a, b: a << b, lambda a, b: a >> b, lambda a, b: a << 1, lambda a, b: 1 << b,
        lambda a, b: divmod(a, b)[0], lambda a, b: divmod(a, b)[1],
        lambda a, b: divmod(7, b)[0], lambda a, b: divmod(a, 2)[1],
    ):  # fmt: skip
        np.testing.assert_array_equal(compute(ag.tensor(a), ag.tensor(b)).data, compute(a, b))
    with pytest.raises(TypeError):
        divmod(ag.tensor(a), "x")


def test_in_place_operators_on_results_make_a_new_tensor():
    x = leaf()
    y = before = x * 2
    y += x
    assert y is not before
    assert before.tolist() == [2, 4, 6]
    y.sum().backward()
    assert x.grad.tolist() == [3, 3, 3]


def test_adding_a_gradient_to_a_plain_tensor_makes_a_new_one():
    total, x = ag.zeros(3), leaf()
    first = total
    total += x
    assert total is not first
    total.sum().backward()
    assert x.grad.tolist() == [1, 1, 1]


# ── hooks and memory ────────────────────────────────────────────────────────────────────────────


def test_hooks_see_the_summed_gradient_once_and_in_order():
    x = leaf()
    seen = []
    x.register_hook(lambda g: seen.append(("first", g.tolist())))
    x.register_hook(lambda g: seen.append(("second", g.tolist())))
    (x * 2 + x).sum().backward()
    assert seen == [("first", [3, 3, 3]), ("second", [3, 3, 3])]


def test_a_hook_may_replace_the_gradient_on_leaves_and_results():
    x = leaf()
    y = x * 2
    y.register_hook(lambda g: g * 10)
    x.register_hook(lambda g: g + 1)
    y.sum().backward()
    assert x.grad.tolist() == [21, 21, 21]


def test_a_hook_that_writes_to_its_gradient_changes_that_of_its_tensor_alone():
    def double(gradient):
        gradient *= 2.0

    x = leaf(1.0, 1.0)
    one, other = x * 1.0, x * 10.0
    other.register_hook(double)
    (one + other).backward(np.ones(2))  # one array for both
    assert x.grad.tolist() == [21.0, 21.0]


def test_a_hook_behind_a_sum_may_write_to_its_gradient():
    x = ag.tensor(np.ones((200, 200)), requires_grad=True)
    h = x * 1.0
    h.register_hook(lambda gradient: gradient.__setitem__((0, 0), 7.0))
    h.sum().backward()
    assert x.grad.numpy()[0, 0] == 7.0
    assert x.grad.numpy()[0, 1] == 1.0


@pytest.mark.parametrize("create_graph", [False, True])
def test_a_hook_may_write_to_the_gradient_of_a_single_number(create_graph: bool):
    x, y = (ag.tensor(2.0, requires_grad=True) for _ in range(2))
    x.register_hook(lambda g: g.copy_(7.0) and None)
    z = x + y
    z.register_hook(lambda g: g.copy_(3.0) and None)
    z.backward(create_graph=create_graph)
    assert (x.grad.item(), y.grad.item()) == (7.0, 3.0)


def test_a_hook_that_writes_to_a_sparse_gradient_changes_that_of_its_tensor_alone():
    x, y = (ag.sparse.coo_tensor([[0, 2]], [1.0, 2.0], (4,), requires_grad=True) for _ in range(2))
    given = ag.sparse.coo_tensor([[0, 2]], [1.0, 1.0], (4,))
    x.register_hook(lambda g: g.data.values.fill(7.0))
    (x + y).backward(given)
    assert x.grad.to_dense().tolist() == [7, 0, 7, 0]
    assert y.grad.to_dense().tolist() == given.to_dense().tolist() == [1, 0, 1, 0]


def test_a_removed_hook_is_not_called():
    x = leaf()
    seen = []
    handle, other = x.register_hook(seen.append), (x * 2).register_hook(seen.append)
    handle.remove()
    handle.remove()
    other.remove()
    x.sum().backward()
    assert seen == []


def test_a_hook_may_remove_itself():
    x, calls = leaf(), []
    y = x * 2

    def once(g: ag.Tensor) -> None:
        calls.append(g)
        handle.remove()

    handle = y.register_hook(once)
    y.register_hook(calls.append)
    y.sum().backward(retain_graph=True)
    y.sum().backward()
    assert len(calls) == 3


def test_a_hook_needs_a_tensor_that_requires_grad():
    with pytest.raises(GradError):
        ag.ones(2).register_hook(print)


def test_a_hook_of_the_wrong_shape_is_an_error():
    x = leaf()
    x.register_hook(lambda g: ag.ones(5))
    with pytest.raises(GradError) as caught:
        x.sum().backward()
    assert caught.value.reason == "shape"


def test_post_accumulate_hooks_run_after_grad_was_set():
    x = leaf()
    seen = []
    handle = x.register_post_accumulate_grad_hook(lambda t: seen.append((t is x, t.grad.tolist())))
    x.sum().backward()
    x.sum().backward()
    handle.remove()
    x.sum().backward()
    assert seen == [(True, [1, 1, 1]), (True, [2, 2, 2])]
    with pytest.raises(GradError):
        (x * 2).register_post_accumulate_grad_hook(print)


def test_a_graph_is_freed_with_its_last_tensor():
    x = leaf()
    y = ag.exp(x)
    node = weakref.ref(y.grad_fn)
    del y
    assert node() is None  # without the garbage collector: there are no cycles


def test_backward_leaves_no_cycles_behind():
    x = leaf()
    gc.collect()
    gc.disable()
    try:
        y = (ag.exp(x) * x).sum()
        node = weakref.ref(y.grad_fn)
        y.backward()
        del y
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("data", "what"),
    [
        ("abc", "str of text"),
        (["a", "b"], "list of text"),
        ([1, "a"], "list of text"),
        (b"abc", "bytes of bytes"),
        (object(), "object of objects"),
        (np.array(["2020-01-01"], "M8[D]"), "ndarray of dates"),
        (np.zeros(2, [("x", "f8")]), "ndarray of records"),
    ],
    ids=lambda each: each if isinstance(each, str) else type(each).__name__,
)
def test_what_is_no_number_is_no_tensor(data, what):
    with pytest.raises(TypeError, match=f"needs numbers; got {what}"):
        ag.tensor(data)
    if isinstance(data, np.ndarray):
        with pytest.raises(TypeError, match="needs numbers"):
            ag.from_numpy(data)
