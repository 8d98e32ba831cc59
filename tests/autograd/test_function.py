"""Functions with a backward of their own."""

from __future__ import annotations

import gc
import weakref
from typing import Any

import numpy as np
import pytest

import aiograd as ag
from aiograd.errors import GradError


class Cube(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        ctx.save_for_backward(x)
        return x * x * x

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (x,) = ctx.saved_tensors
        return 3 * x * x * grad


class Exp(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        y = ag.exp(x)
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        (y,) = ctx.saved_tensors
        return grad * y


def leaf(*values: float) -> Any:
    return ag.tensor(list(values), requires_grad=True)


def test_backward_is_called_with_the_gradient_of_the_output() -> None:
    x = leaf(1.0, 2.0)
    (Cube.apply(x) * np.array([1.0, 10.0])).sum().backward()
    np.testing.assert_allclose(x.grad.numpy(), [3.0, 120.0])


def test_the_node_has_the_name_of_the_class() -> None:
    y = Cube.apply(leaf(1.0))
    assert y.grad_fn.name == "Cube"
    assert [node.name for node, _ in y.grad_fn.next_nodes] == ["AccumulateGrad"]


def test_nothing_is_recorded_without_a_gradient_to_give() -> None:
    assert Cube.apply(ag.tensor([1.0])).grad_fn is None
    with ag.no_grad():
        assert Cube.apply(leaf(1.0)).grad_fn is None


def test_forward_records_nothing_by_itself() -> None:
    seen = []

    class Look(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            seen.append((x * 2).requires_grad)
            return x * 2

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 2

    Look.apply(leaf(1.0))
    assert seen == [False]


def test_derivatives_of_any_order_follow_from_inputs_and_outputs_that_were_saved() -> None:
    x = leaf(0.5, 2.0)
    for function, second in ((Cube, lambda v: 6 * v), (Exp, np.exp)):
        (first,) = ag.autograd.grad(function.apply(x).sum(), x, create_graph=True)
        (again,) = ag.autograd.grad(first.sum(), x)
        np.testing.assert_allclose(again.numpy(), second(x.numpy()))


def test_arguments_may_be_anything_and_get_no_gradient() -> None:
    class Scale(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, factor: float, mode: str, options: dict[str, int]) -> Any:
            ctx.factor = factor
            assert (mode, options) == ("fast", {"a": 1})
            assert ctx.needs_input_grad == (True, False, False, False)
            return x * factor

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * ctx.factor, None, None, None

    x = leaf(1.0)
    Scale.apply(x, 5.0, "fast", {"a": 1}).sum().backward()
    assert x.grad.tolist() == [5.0]


class SumAndProduct(ag.Function):
    @staticmethod
    def forward(ctx: Any, a: Any, b: Any) -> Any:
        ctx.save_for_backward(a, b)
        return a + b, a * b

    @staticmethod
    def backward(ctx: Any, g_sum: Any, g_product: Any) -> Any:
        a, b = ctx.saved_tensors
        return g_sum + g_product * b, g_sum + g_product * a


def test_several_outputs_each_get_their_gradient() -> None:
    a, b = leaf(2.0), leaf(3.0)
    total, product = SumAndProduct.apply(a, b)
    assert total.grad_fn is product.grad_fn
    (10 * total + product).sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([13.0], [12.0])


def test_an_unused_output_comes_back_as_zeros() -> None:
    a, b = leaf(2.0), leaf(3.0)
    _, product = SumAndProduct.apply(a, b)
    product.sum().backward()
    assert (a.grad.tolist(), b.grad.tolist()) == ([3.0], [2.0])


def test_an_unused_output_comes_back_as_none_where_asked_for() -> None:
    seen = []

    class Two(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.set_materialize_grads(False)
            return x + 1, x + 2

        @staticmethod
        def backward(ctx: Any, first: Any, second: Any) -> Any:
            seen.append((first, second))
            return second

    x = leaf(1.0)
    Two.apply(x)[1].sum().backward()
    assert seen[0][0] is None
    assert x.grad.tolist() == [1.0]


def test_outputs_marked_constant_and_integers_carry_no_gradient() -> None:
    class Sorted(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            order, size = ag.tensor(np.argsort(x.numpy())), x * x
            ctx.mark_non_differentiable(size)
            ctx.order = order.numpy()
            return ag.tensor(x.numpy()[ctx.order]), order, size, "note"

        @staticmethod
        def backward(ctx: Any, grad: Any, of_order: Any, of_size: Any, of_note: Any) -> Any:
            assert of_size.tolist() == [0.0, 0.0]
            assert of_note is None
            back = np.empty(2)
            back[ctx.order] = grad.numpy()
            return ag.tensor(back)

    x = leaf(5.0, 1.0)
    y, order, size, note = Sorted.apply(x)
    assert (order.requires_grad, size.requires_grad, note) == (False, False, "note")
    (y * np.array([1.0, 10.0])).sum().backward()
    assert x.grad.tolist() == [10.0, 1.0]


def test_a_forward_that_returns_its_input_still_gets_its_own_node() -> None:
    class Double(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad * 2

    x = leaf(1.0)
    y = Double.apply(x)
    assert y is not x
    assert x.is_leaf
    assert y.grad_fn.name == "Double"
    y.sum().backward()
    assert x.grad.tolist() == [2.0]


def test_none_means_no_gradient() -> None:
    class Blocked(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any, y: Any) -> Any:
            return x + y

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return None, grad

    x, y = leaf(1.0), leaf(1.0)
    Blocked.apply(x, y).sum().backward()
    assert x.grad is None
    assert y.grad.tolist() == [1.0]


def test_saved_tensors_are_freed_by_a_pass_unless_it_retains() -> None:
    x = leaf(2.0)
    y = Cube.apply(x)
    y.backward(retain_graph=True)
    y.backward()
    assert x.grad.tolist() == [24.0]
    with pytest.raises(GradError, match="Cube") as caught:
        y.backward()
    assert caught.value.reason == "freed"


@pytest.mark.parametrize("function", [Cube, Exp])
def test_a_write_to_what_was_saved_is_noticed(function: Any) -> None:
    x = leaf(2.0)
    y = function.apply(x)
    with ag.no_grad():
        (x if function is Cube else y)[...] = 5.0
    with pytest.raises(GradError, match=function.__name__) as caught:
        y.sum().backward()
    assert caught.value.reason == "modified"


def test_a_saved_output_makes_no_cycle() -> None:
    gc.collect()
    gc.disable()
    try:
        y = Exp.apply(leaf(1.0))
        node = weakref.ref(y.grad_fn)
        del y
        assert node() is None
    finally:
        gc.enable()


@pytest.mark.parametrize(
    ("given", "reason"),
    [((1.0, 1.0), "count"), ((), "count"), (np.ones(3), "shape"), (np.ones(()), "shape")],
)
def test_a_wrong_gradient_is_an_error_that_names_the_class(given: Any, reason: str) -> None:
    class Wrong(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return given

    with pytest.raises(GradError, match="Wrong") as caught:
        Wrong.apply(leaf(1.0, 2.0)).sum().backward()
    assert caught.value.reason == reason


def test_more_nones_than_arguments_are_fine() -> None:
    class Generous(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            return grad, None, None

    x = leaf(1.0)
    Generous.apply(x).sum().backward()
    assert x.grad.tolist() == [1.0]


def test_an_error_in_backward_keeps_its_type_and_says_where_it_was() -> None:
    class Failing(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x * 1

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            raise ZeroDivisionError("on purpose")

    with pytest.raises(ZeroDivisionError, match="on purpose") as caught:
        Failing.apply(leaf(1.0)).sum().backward()
    assert any("Failing" in note for note in caught.value.__notes__)


def test_once_differentiable_works_once() -> None:
    class Once(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(x)
            return x * x

        @staticmethod
        @ag.once_differentiable
        def backward(ctx: Any, grad: Any) -> Any:
            (x,) = ctx.saved_tensors
            return grad.numpy() * 2 * x.numpy()

    x = leaf(3.0)
    Once.apply(x).sum().backward()
    assert x.grad.tolist() == [6.0]
    (first,) = ag.autograd.grad(Once.apply(x).sum(), x, create_graph=True)
    assert first.tolist() == [6.0]
    with pytest.raises(GradError, match="Once") as caught:
        first.sum().backward()
    assert caught.value.reason == "once"


def test_misuse_is_explained() -> None:
    with pytest.raises(TypeError, match=r"Cube\.apply"):
        Cube()

    class SavesNumbers(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.save_for_backward(3.0)

    with pytest.raises(TypeError, match="SavesNumbers"):
        SavesNumbers.apply(leaf(1.0))

    class Dirty(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            ctx.mark_dirty(x)

    with pytest.raises(GradError, match="Dirty"):
        Dirty.apply(leaf(1.0))


def test_a_gradient_that_is_passed_through_is_stored_without_a_copy() -> None:
    seen = []

    class Through(ag.Function):
        @staticmethod
        def forward(ctx: Any, x: Any) -> Any:
            return x

        @staticmethod
        def backward(ctx: Any, grad: Any) -> Any:
            seen.append(grad.data.__array_interface__["data"][0])
            return grad

    x = leaf(1.0, 2.0)
    (Through.apply(x) * 3).sum().backward()
    assert x.grad.data.__array_interface__["data"][0] == seen[0]


class Same(ag.Function):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.data

    @staticmethod
    def backward(ctx: Any, grad: Any) -> Any:
        return grad


class First(Same):
    @staticmethod
    def forward(ctx: Any, x: Any) -> Any:
        return x.data[:1]


same = ag.op("same", lambda a: a, lambda g, y, a: g)
same_of_two = ag.op("same", lambda a, b: a, lambda g, y, a, b: g, lambda g, y, a, b: None)
same_of_three = ag.op("same", lambda a, b, c: a, lambda g, *_: g, None, None)
windows = np.lib.stride_tricks.sliding_window_view


@pytest.mark.parametrize(
    "view",
    [
        Same.apply,
        First.apply,
        same,
        lambda a: same_of_two(a, ag.ones(2)),
        lambda a: same_of_three(a, 1.0, 2.0),
        lambda a: windows(a, 2),
    ],
)
def test_a_write_is_noticed_by_whatever_shows_the_same_memory(view: Any):
    x = leaf(1.0, 2.0)
    base = x * 1.0
    shown = view(base)
    loss = (shown * shown).sum()
    with ag.no_grad():
        base[...] = 9.0
    with pytest.raises(GradError) as caught:
        loss.backward()
    assert caught.value.reason == "modified"
