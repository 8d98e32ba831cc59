"""Options say no to nonsense, and never tell the secret."""

from __future__ import annotations

import dataclasses
import math
import pickle
from datetime import timedelta

import pytest

from aiograd.rpc.options import Options


def test_defaults_are_those_of_the_contract():
    options = Options()
    assert options.timeout == 60.0
    assert options.grace == 5.0
    assert (options.transport, options.loop, options.mode) == ("auto", "auto", "trusted")
    assert (options.heartbeat, options.silence, options.lease) == (1.0, 5.0, 10.0)
    assert options.max_message == 1 << 30
    assert options.max_inflight == 1024
    assert options.outbound_buffer == 64 << 20
    assert 0 < options.inbound_budget <= 2 << 30
    assert options.threads == 64
    assert not options.strict_leaks
    assert not options.allow_plaintext


def test_init_timeouts():
    assert Options(timeout=0.5).timeout == 0.5
    assert Options(timeout=math.inf).timeout == math.inf
    with pytest.raises(TypeError):
        Options(timeout=timedelta(seconds=1))
    for wrong in (0, -1, math.nan):
        with pytest.raises(ValueError, match="timeout"):
            Options(timeout=wrong)
    for wrong in ("1", None, True):
        with pytest.raises(TypeError, match="timeout"):
            Options(timeout=wrong)


def test_init_threads():
    assert Options(threads=27).threads == 27
    with pytest.raises(ValueError, match="threads"):
        Options(threads=0)
    with pytest.raises(TypeError, match="threads"):
        Options(threads=1.5)


@pytest.mark.parametrize("field", ["allow_plaintext", "strict_leaks"])
def test_yes_and_no_are_not_guessed_from_words(field):
    assert getattr(Options(**{field: True}), field) is True
    for wrong in ("no", "0", 1, None):
        with pytest.raises(TypeError, match=field):
            Options(**{field: wrong})


@pytest.mark.parametrize("field", ["transport", "loop", "mode"])
def test_only_known_words_are_taken(field):
    with pytest.raises(ValueError, match=field):
        Options(**{field: "carrier pigeon"})


def test_the_secret_is_never_shown_nor_pickled():
    options = Options(secret=b"very secret indeed")
    assert "secret indeed" not in repr(options)
    assert b"secret indeed" not in pickle.dumps(options)
    assert pickle.loads(pickle.dumps(options)).timeout == 60.0
    with pytest.raises(ValueError, match="16 bytes"):
        Options(secret=b"short")
    with pytest.raises(TypeError, match="bytes"):
        Options(secret="a text of enough characters")


def test_options_are_frozen():
    options = Options()
    with pytest.raises(dataclasses.FrozenInstanceError):
        options.timeout = 1.0
    assert dataclasses.replace(options, timeout=1.0).timeout == 1.0


@pytest.mark.parametrize(
    ("mode", "restriction"),
    [
        ("trusted", (False, ())),
        ("registered", (False, ())),
        ("restricted", (True, ())),
        ({"bank": "restricted", "*": "trusted"}, (False, ("bank",))),
        (
            {"b": "trusted", "a": "registered", "c": "restricted", "*": "restricted"},
            (True, ("a", "b")),
        ),
        ({"bank": "registered", "*": "trusted"}, (False, ())),
    ],
)
def test_others_are_told_with_whom_only_plain_data_is_exchanged(mode, restriction):
    assert Options(mode=mode).restriction == restriction


def test_modes_by_name_need_something_that_proves_names():
    modes = {"bank": "restricted", "*": "trusted"}
    with pytest.raises(ValueError, match="only that or a certificate proves a name"):
        Options(mode=modes, secret=b"s" * 32)
    with pytest.raises(ValueError, match="only that or a certificate proves a name"):
        Options(mode=modes, secret={"shop": b"s" * 32, "*": b"t" * 32})
    with pytest.raises(ValueError, match="only that or a certificate proves a name"):
        Options(mode=modes, secret_file="secret")
    assert Options(mode=modes, secret={"bank": b"s" * 32, "*": b"t" * 32}).mode == modes
    assert Options(mode=modes, secret_file={"bank": "secret"}).mode == modes
    # It may come from the environment; then the start of the worker decides.
    with pytest.raises(ValueError, match="only that or a certificate proves a name"):
        Options(mode=modes).check_proof_of_names(b"s" * 32)


@pytest.mark.parametrize("other", ["BANK1", "bankI", "bankl"])
def test_names_in_modes_and_secrets_must_not_look_alike(other):
    with pytest.raises(ValueError, match="look alike"):
        Options(mode={"bank1": "restricted", other: "trusted", "*": "trusted"})
    with pytest.raises(ValueError, match="look alike"):
        Options(secret={"bank1": b"s" * 32, other: b"t" * 32})
