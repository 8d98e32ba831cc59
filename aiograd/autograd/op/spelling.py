"""Parameters as torch spells them: `dim`, `keepdim` and `dims` for `axis`, `keepdims` and `axes`.

They are looked at only after a call with numpy's names has failed, so numpy's names pay nothing.
Where torch's function of the same name means something else, its spelling is refused: a program
that is carried over stops there instead of computing other numbers.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import wraps
from inspect import Parameter, Signature, signature
from typing import Any, Final, TypeVar

F = TypeVar("F", bound=Callable[..., Any])

_NUMPYS: Final = {"dim": "axis", "keepdim": "keepdims", "dims": "axis"}
_USUAL: Final = {"dim": "axis", "keepdim": "keepdims"}
_SPELLINGS: Final = {
    "flip": {"dims": "axis"},
    "roll": {"dims": "axis"},
    "rot90": {"dims": "axes"},
    "tensordot": {"dims": "axes"},
    "transpose": {"dims": "axes"},
}
# Where the same spelling would give other numbers without a word: a program that is carried over
# must stop there.
_PAIR: Final = "in torch it gives values and positions; write axis= for the values alone"
_OTHER_MEANING: Final = {
    "max": _PAIR,
    "min": _PAIR,
    "median": _PAIR,
    "nanmedian": _PAIR,
    "sort": _PAIR,
    "std": "in torch it divides by n - 1; write axis=, and ddof=1 for the same numbers",
    "var": "in torch it divides by n - 1; write axis=, and ddof=1 for the same numbers",
    "split": "in torch it takes the size of a piece, here the number of pieces; write axis=",
}


def is_torch_spelling(kwargs: dict[str, Any]) -> bool:
    """Whether a parameter is spelt as in torch."""
    return not kwargs.keys().isdisjoint(_NUMPYS)


def numpy_spelling(name: str, kwargs: dict[str, Any]) -> dict[str, Any]:
    """Return parameters under numpy's names; TypeError where torch's mean something else."""
    found = {}
    # Per operation first: `dims` is `axis` of some, and `axes` of others.
    spellings = _NUMPYS | _SPELLINGS.get(name, {})
    for key, value in kwargs.items():
        if key in _NUMPYS and name in _OTHER_MEANING:
            raise TypeError(f"{name}() does not take {key}=: {_OTHER_MEANING[name]}")
        new = spellings.get(key, key)
        # Both spellings at once: one of them would be ignored.
        if new in found or (new != key and new in kwargs):
            raise TypeError(f"{name}() got two values for {new!r}")
        found[new] = value
    return found


def accepts_dim(function: F) -> F:
    """Let a plain function whose parameters torch spells differently be called either way."""
    own = signature(function)
    if "axis" not in own.parameters and function.__name__ not in _SPELLINGS:
        return function

    # Before the call: the function itself would raise for a parameter that it does not know.
    @wraps(function)
    def spelt(*args: Any, **kwargs: Any) -> Any:
        if is_torch_spelling(kwargs):
            kwargs = numpy_spelling(function.__name__, kwargs)
        return function(*args, **kwargs)

    spelt.__signature__ = with_torch_spelling(  # type: ignore[attr-defined]
        function.__name__, own
    )
    return spelt  # type: ignore[return-value]


def with_torch_spelling(name: str, own: Signature) -> Signature:
    """Return a signature with torch's spellings as further keywords, where they are optional."""
    more = []
    if name not in _OTHER_MEANING:
        for spelt, numpys in _SPELLINGS.get(name, _USUAL).items():
            parameter = own.parameters.get(numpys)
            # Without a default it would have to be given under numpy's name as well.
            if parameter is not None and parameter.default is not Parameter.empty:
                more.append(parameter.replace(name=spelt, kind=Parameter.KEYWORD_ONLY))
    if not more:
        return own
    parameters = list(own.parameters.values())
    # Keywords of any name come last.
    rest = [parameters.pop()] if parameters[-1].kind is Parameter.VAR_KEYWORD else []
    return own.replace(parameters=[*parameters, *more, *rest])
