"""The messages of a pass in two forms: as they are, and flat.

Most gradient messages are one small array. Flat, everything else about them is numbers and short
text, so they take the quick road of `wire.flat`:

    "edge:bits,edge,…"   answers: a bit per tensor, 1 where an array follows; no bits: none
    "edge,edge,…"        the edges that answers are expected for
    "name floor bits"    the invitation: originator, floor, and the terms of the pass
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from aiograd.dist.passes import Answer
from aiograd.wire.flat import LIMIT

Invitation = tuple[str, int, bool, bool, bool]
MANY = 8  # arrays; beyond that the general road is as quick


def flatten(
    answers: Sequence[Answer], expected: list[int] | None, invitation: Invitation | None
) -> list[Any] | None:
    """Texts, then arrays; None if a gradient is not a small array of plain numbers."""
    arrays: list[Any] = []
    words = []
    for edge, gradients in answers:
        if gradients is None:
            words.append(str(edge))
            continue
        bits = ""
        for gradient in gradients:
            if gradient is None:
                bits += "0"
            elif gradient.__class__ is np.ndarray and gradient.nbytes <= LIMIT:
                bits += "1"
                arrays.append(gradient)
            else:
                return None
        words.append(f"{edge}:{bits}")
    if len(arrays) > MANY:
        return None
    edges = None if expected is None else ",".join(map(str, expected))
    invited = None
    if invitation is not None:
        name, floor, *terms = invitation
        invited = f"{name} {floor} " + "".join("1" if term else "0" for term in terms)
    return [",".join(words), edges, invited, *arrays]


def unflatten(
    words: str, edges: str | None, invited: str | None, arrays: Sequence[Any]
) -> tuple[list[Answer], list[int] | None, Invitation | None]:
    """The answers, expected edges and invitation that `flatten` was given."""
    left = iter(arrays)
    answers: list[Answer] = []
    for word in words.split(",") if words else ():
        edge, colon, bits = word.partition(":")
        gradients = [next(left) if bit == "1" else None for bit in bits] if colon else None
        answers.append((int(edge), gradients))
    expected = None if edges is None else [int(edge) for edge in edges.split(",") if edge]
    if invited is None:
        return answers, expected, None
    name, floor, terms = invited.split(" ")
    retain, create, keep = (term == "1" for term in terms)
    return answers, expected, (name, int(floor), retain, create, keep)
