"""Each rule moves a parameter as torch 2.13 does (recorded; `make oracle` compares live).

One table for all rules, and the check of their settings.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

import aiograd as ag

START = [1.0, -3.0]
GRADS = [[0.5, -2.0], [-0.25, -1.0], [1.5, 0.125]]
RULES: list[tuple[str, dict[str, Any], list[float]]] = [
    ("SGD", {"lr": 0.1}, [0.825, -2.7125]),
    (
        "SGD",
        {"lr": 0.1, "momentum": 0.9, "dampening": 0.1, "weight_decay": 0.01},
        [0.76708493869, -2.28306752557],
    ),
    ("SGD", {"lr": 0.05, "momentum": 1, "weight_decay": 1, "nesterov": True}, [0.3885, -1.2975]),
    ("SGD", {"lr": 0.1, "momentum": 0.5, "maximize": True}, [1.2, -3.4875]),
    ("Adam", {"lr": 0.05}, [0.903158121458, -2.869202761093]),
    ("Adam", {"lr": 0.05, "amsgrad": True, "weight_decay": 0.1}, [0.890626189615, -2.863942728748]),
    ("AdamW", {"lr": 0.05}, [0.901715517258, -2.864778302708]),
    (
        "AdamW",
        {"lr": 0.05, "amsgrad": True, "betas": (0.8, 0.95)},
        [0.902718795004, -2.868659463001],
    ),
    ("Adagrad", {"lr": 0.1}, [0.851017102435, -2.860860096179]),
    (
        "Adagrad",
        {"lr": 0.1, "lr_decay": 0.1, "weight_decay": 0.1, "initial_accumulator_value": 0.2},
        [0.863472875746, -2.852988002766],
    ),
    ("RMSprop", {"lr": 0.05}, [0.255472645046, -2.303653345398]),
    (
        "RMSprop",
        {"lr": 0.05, "centered": True, "momentum": 0.9, "weight_decay": 0.1},
        [-0.524555497128, -1.167860033287],
    ),
    ("Adadelta", {"lr": 0.7, "weight_decay": 0.1}, [0.995607434441, -2.995935208447]),
    ("Adamax", {"lr": 0.05, "weight_decay": 0.1}, [0.91063455334, -2.885782112569]),
    ("Rprop", {"lr": 0.05}, [0.925, -2.89]),
    ("Rprop", {"lr": 0.05, "etas": (0.3, 1.5), "step_sizes": (0.001, 0.2)}, [0.935, -2.875]),
]


@pytest.mark.parametrize(("name", "options", "expected"), RULES)
def test_three_steps_end_where_torch_ends(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    param = ag.tensor(START, requires_grad=True)
    optimizer = getattr(ag.optim, name)([param], **options)
    for grad in GRADS:
        param.grad = ag.tensor(grad)
        optimizer.step()
        assert param.grad.tolist() == grad  # the gradient itself is left alone
    np.testing.assert_allclose(param.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize("dtype", ["float64", "complex128"])
@pytest.mark.parametrize(("name", "options", "_"), RULES)
def test_a_single_number_moves_as_one_in_a_row(
    name: str, options: dict[str, Any], _: list[float], dtype: str
) -> None:
    ends = []
    for shape in ((), (1,)):
        param = ag.tensor(np.full(shape, START[0], dtype), requires_grad=True)
        optimizer = getattr(ag.optim, name)([param], **options)
        for grad in GRADS:
            param.grad = ag.tensor(np.full(shape, grad[0], dtype))
            optimizer.step()
        assert param.shape == shape
        ends.append(param.item())
    assert ends[0] == ends[1] != START[0]


@pytest.mark.parametrize(("name", "options", "expected"), RULES)
def test_gradients_can_be_given_instead(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    param, idle = ag.tensor(START, requires_grad=True), ag.tensor(START, requires_grad=True)
    optimizer = getattr(ag.optim, name)([param, idle], **options)
    for grad in GRADS:
        optimizer.step({param: ag.tensor(grad)})
    np.testing.assert_allclose(param.numpy(), expected, rtol=1e-10)
    assert param.grad is None
    assert idle.tolist() == START


@pytest.mark.parametrize(("name", "options", "expected"), RULES)
def test_a_saved_state_continues_where_it_was(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    param = ag.tensor(START, requires_grad=True)
    optimizer = getattr(ag.optim, name)([param], **options)
    for grad in GRADS:
        optimizer.step({param: ag.tensor(grad)})
        saved = optimizer.state_dict()
        param = ag.tensor(param.numpy(), requires_grad=True)
        optimizer = getattr(ag.optim, name)([param], lr=123.0)
        optimizer.load_state_dict(saved)
    np.testing.assert_allclose(param.numpy(), expected, rtol=1e-10)


@pytest.mark.parametrize(("name", "options", "expected"), RULES)
def test_a_sparse_gradient_moves_its_rows_as_a_dense_one(
    name: str, options: dict[str, Any], expected: list[float]
) -> None:
    moved = []
    for sparse in (True, False):
        param = ag.tensor(np.arange(12.0).reshape(6, 2), requires_grad=True)
        optimizer = getattr(ag.optim, name)([param], **options)
        for rows in ([1, 4, 1], [0, 4]):
            optimizer.zero_grad()
            picked = ag.nn.functional.embedding(np.array(rows), param, sparse=sparse)
            (picked * picked).sum().backward()
            assert param.grad.is_sparse == sparse
            optimizer.step()
        moved.append(param.numpy())
    np.testing.assert_allclose(*moved, rtol=1e-12)


@pytest.mark.parametrize("name", ["SGD", "Adagrad"])
def test_rows_without_a_gradient_are_not_touched(name: str) -> None:
    param = ag.tensor(np.full((5, 2), np.nan), requires_grad=True)
    param.data[[1, 3]] = 1.0
    optimizer = getattr(ag.optim, name)([param], lr=0.5)
    ag.nn.functional.embedding(np.array([1, 3, 1]), param, sparse=True).sum().backward()
    optimizer.step()
    assert np.isfinite(param.numpy()[[1, 3]]).all()
    assert np.isnan(param.numpy()[[0, 2, 4]]).all()


def test_single_precision_stays_single() -> None:
    for name, options, _ in RULES:
        param = ag.tensor(np.array(START, np.float32), requires_grad=True)
        optimizer = getattr(ag.optim, name)([param], **{**options, "lr": np.float64(0.1)})
        memory = param.numpy()
        optimizer.step({param: ag.tensor(np.array([1.0, 2.0], np.float32))})
        assert np.shares_memory(param.numpy(), memory)
        kinds = {v.dtype for v in optimizer.state[param].values() if isinstance(v, np.ndarray)}
        assert kinds <= {np.dtype(np.float32)}, name


def test_a_complex_parameter_that_is_not_contiguous_is_updated_too() -> None:
    base = np.ones((2, 3), complex)
    param = ag.from_numpy(base.T, requires_grad=True)
    ag.optim.SGD([param], lr=1.0).step({param: ag.tensor(np.full((3, 2), 2j))})
    np.testing.assert_array_equal(base, np.full((2, 3), 1 - 2j))


@pytest.mark.parametrize(
    ("name", "options"),
    [
        ("SGD", {"lr": -1}),
        ("SGD", {"momentum": -1}),
        ("SGD", {"weight_decay": -1}),
        ("SGD", {"nesterov": True}),
        ("Adam", {"betas": (1.0, 0.5)}),
        ("Adam", {"eps": -1}),
        ("Adagrad", {"lr_decay": -1}),
        ("RMSprop", {"alpha": -1}),
        ("Adadelta", {"rho": 2}),
        ("Rprop", {"etas": (1.5, 1.2)}),
    ],
)
def test_settings_that_make_no_sense_are_refused(name: str, options: dict[str, Any]) -> None:
    with pytest.raises(ValueError):  # noqa: PT011  each has its own words
        getattr(ag.optim, name)([ag.zeros(1, requires_grad=True)], **options)
