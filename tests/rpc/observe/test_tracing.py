"""Spans of the callee become spans of the caller."""

from __future__ import annotations

import itertools

from aiograd.rpc.observe.profile import Span
from aiograd.rpc.observe.tracing import adopt

CALL = Span("rpc_call#f(a -> b)", "call", "a", 10.0, 20.0, 7)


def test_spans_get_new_ids_and_the_key_of_the_call():
    run = Span("f", "run", "b", 12.0, 18.0, 1)
    scope = Span("inner", "scope", "b", 13.0, 14.0, 2, 1)
    numbers = itertools.count(8)
    found = adopt([run, scope], CALL, lambda: next(numbers))
    assert [each.key for each in found] == [f"{CALL.key}/f", f"{CALL.key}/inner"]
    assert [(each.id, each.parent) for each in found] == [(8, 7), (9, 8)]
    assert [(each.start, each.end) for each in found] == [(12.0, 18.0), (13.0, 14.0)]


def test_spans_of_another_clock_are_moved_into_the_call():
    run = Span("f", "run", "b", 1002.0, 1006.0, 1)
    scope = Span("inner", "scope", "b", 1003.0, 1004.0, 2, 1)
    found = adopt([run, scope], CALL, itertools.count(8).__next__)
    assert [(each.start, each.end) for each in found] == [(13.0, 17.0), (14.0, 15.0)]


def test_a_callee_without_spans_adds_none():
    assert adopt([], CALL, itertools.count(8).__next__) == []
