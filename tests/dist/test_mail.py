"""Messages of a pass come back from their flat form as they were."""

from __future__ import annotations

import numpy as np
import pytest

from aiograd.dist.mail import MANY, flatten, unflatten

A, B = np.ones((3, 3)), np.arange(4.0)


@pytest.mark.parametrize(
    ("answers", "expected", "invitation"),
    [
        ([], None, None),
        ([(7, None)], [1, 2, 3], ("worker0", 12, True, False, True)),
        ([(7, [A]), (8, None), (9, [None, B, A])], [], ("a:b-c", -1, False, False, False)),
    ],
)
def test_what_was_flattened_comes_back(answers, expected, invitation):
    words, edges, invited, *arrays = flatten(answers, expected, invitation)
    assert unflatten(words, edges, invited, arrays) == (answers, expected, invitation)


@pytest.mark.parametrize("gradients", [[np.zeros(100_000)], [A] * (MANY + 1), ["no array"]])
def test_what_is_large_or_strange_takes_the_general_road(gradients):
    assert flatten([(1, gradients)], None, None) is None
