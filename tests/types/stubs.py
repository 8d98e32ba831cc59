"""Write the stubs of all operations and of Tensor's methods, from the tables: `make stubs`.

Type checkers do not run the tables, so `operations.pyi`, `linalg.pyi`, `fft.pyi` and `methods.pyi`
tell them what will be there. Names, parameters and defaults are those of `inspect.signature`;
annotations come from the function, else from the name of the parameter (`NAMED`) or from its
default. A new operation needs nothing here, unless its result is no Tensor and it does not say so.
`tests/types/test_stubs.py` fails if a stub is not what this would write.
"""

from __future__ import annotations

import inspect
import re
import subprocess
import sys
import textwrap
from collections.abc import Callable, Iterable
from inspect import Parameter, Signature
from pathlib import Path
from typing import Any

import numpy as np

import aiograd as ag
from aiograd.autograd import MAKERS
from aiograd.autograd.names.methods import Methods
from aiograd.autograd.op import Op
from aiograd.autograd.ops import NAMES, namespace
from aiograd.autograd.ops.torch_names import DTYPES

BLOCK = "# The makers and operations, written by `make stubs`."
FOLDER = Path(ag.__file__).parent / "autograd" / "names"
HEADER = f"# Written by `make stubs` with numpy {np.__version__.rsplit('.', 1)[0]}; do not edit.\n"
IMPORTS = """
from __future__ import annotations

import builtins
from collections.abc import Iterator, Sequence
from typing import Any, Literal, SupportsIndex, TypeAlias, overload

import numpy as np
import numpy.typing as npt

from aiograd.autograd.ops.linalg import Eigh, Qr, Slogdet, Svd
from aiograd.autograd.tensor import Tensor

_Values: TypeAlias = Tensor | npt.ArrayLike
_Axis: TypeAlias = SupportsIndex | tuple[SupportsIndex, ...] | None
_Shape: TypeAlias = SupportsIndex | Sequence[SupportsIndex]
"""

# What parameters of these names are, wherever the function does not say it.
NAMED = dict.fromkeys(
    "a b x y x1 x2 z v m f A arr ary array val input weight target condition values indices index_"
    " offsets per_sample_weights fill_value q choices xi".split(),
    "_Values",
) | {
    "arrays": "Sequence[_Values] | _Values", "tup": "Sequence[_Values]", "arys": "_Values",
    "axis": "_Axis", "axes": "Any", "keepdims": "bool", "dtype": "npt.DTypeLike | None",
    "out": "Tensor | np.ndarray[Any, Any] | None", "shape": "_Shape", "copy": "bool",
    "bias": "_Values | None", "running_mean": "Any", "running_var": "Any",
    "weights": "_Values | None", "a_min": "_Values | None", "a_max": "_Values | None",
    "min": "_Values | None", "max": "_Values | None", "prepend": "_Values | None",
    "append": "_Values | None", "n": "int | None", "norm": "str | None", "k": "int", "UPLO": "str",
    "decimals": "int", "ddof": "float", "repeats": "Any", "reps": "Any", "kind": "Any",
    "generator": "np.random.Generator | int | None", "posinf": "float | None",
    "neginf": "float | None", "stable": "bool | None", "correction": "float | None",
}  # fmt: skip
OPTIONAL = {"weight", "offsets", "per_sample_weights", "x"}  # where None is the default

# Results that are no Tensor, and signatures that one line cannot give.
SEVERAL = "tuple[Tensor, ...]"
RESULTS = dict.fromkeys(
    "broadcast_arrays meshgrid split array_split hsplit vsplit dsplit unstack".split(), SEVERAL
) | {"gradient": "Any"}
ONE_OR_SEVERAL = """@overload
def {name}(ary: _Values, /) -> Tensor: ...
@overload
def {name}(*arys: _Values) -> Any: ...
"""
# The axis has no default, so that there is one form for each of its names.
EITHER_NAME = """@overload
def unsqueeze({first}axis: _Axis) -> Tensor: ...
@overload
def unsqueeze({first}*, dim: _Axis) -> Tensor: ...
"""
SPECIAL = {
    "unsqueeze": EITHER_NAME.format(first="a: _Values, "),
    "where": """@overload
def where(condition: _Values) -> tuple[Tensor, ...]: ...
@overload
def where(condition: _Values, x: _Values, y: _Values, /) -> Tensor: ...
""",
    "svd": """@overload
def svd(a: _Values, full_matrices: bool = True, compute_uv: Literal[True] = True) -> Svd: ...
@overload
def svd(a: _Values, full_matrices: bool = True, *, compute_uv: Literal[False]) -> Tensor: ...
""",
} | {name: ONE_OR_SEVERAL.format(name=name) for name in ("atleast_1d", "atleast_2d", "atleast_3d")}

STARS: dict[Any, str] = {Parameter.VAR_POSITIONAL: "*", Parameter.VAR_KEYWORD: "**"}
BUILTINS = re.compile(r"(?<![\w.])(bool|int|float|str|list|dict|tuple|object)(?![\w(])")


def annotation(parameter: Parameter) -> str:
    """Return the type of a parameter: as it says, else by its name, else by its default."""
    own = parameter.annotation
    text = "Any" if own is Parameter.empty else own if isinstance(own, str) else own.__name__
    text = "Any" if text in ("Array", "Values") else text  # the name says whether it may be None
    torch = {"dim": "axis", "keepdim": "keepdims", "dims": "axis"}.get(parameter.name)
    if torch is not None:
        return NAMED[torch]
    if text != "Any":
        return {"Axis": "_Axis"}.get(text, text)
    default = parameter.default
    if parameter.name in NAMED:
        found = NAMED[parameter.name]
        optional = default is None and "None" not in found and found != "Any"
        return f"{found} | None" if optional else found
    # A function that says Any means more than the type of its default.
    if own is Parameter.empty and isinstance(default, bool | int | float | str):
        return type(default).__name__
    return "Any"


def default(parameter: Parameter) -> str:
    """Return ` = value` for a parameter that has a default."""
    value = parameter.default
    if value is Parameter.empty:
        return ""
    plain = value is None or isinstance(value, bool | int | float | str)
    return f" = {value!r}" if plain and repr(value) not in ("inf", "nan") else " = ..."


def parameters(signature: Signature) -> list[str]:
    """Return the parameters as they are written in a definition."""
    written: list[str] = []
    before: Any = None
    for parameter in signature.parameters.values():
        kind = parameter.kind
        if before is Parameter.POSITIONAL_ONLY and kind is not before:
            written.append("/")
        by_name = kind is Parameter.KEYWORD_ONLY
        if by_name and before not in (Parameter.KEYWORD_ONLY, Parameter.VAR_POSITIONAL):
            written.append("*")
        stars = STARS.get(kind, "")
        written.append(f"{stars}{parameter.name}: {annotation(parameter)}{default(parameter)}")
        before = kind
    return [*written, "/"] if before is Parameter.POSITIONAL_ONLY else written


def result(name: str, function: Any) -> str:
    """Return the type of what an operation gives."""
    if isinstance(function, Op):
        return RESULTS.get(name, "Tensor")
    said = inspect.signature(function).return_annotation
    if isinstance(said, str) and said != "Any":
        return said
    return RESULTS.get(name, "Tensor")


def summary(function: Any) -> str:
    """Return the first sentence of a docstring, which an editor shows."""
    text = inspect.cleandoc(function.__doc__ or "")
    # Of a ufunc the first paragraph is its signature.
    found = [part for part in text.split("\n\n") if part and not re.match(r"\w+\(.*\)", part)]
    first = " ".join(found[0].split()) if found else ""
    return first.replace("\\", "/") if len(first) < 90 else ""


def definition(name: str, function: Any, given: Iterable[str], gives: str) -> str:
    """Return a definition without a body."""
    head = f"def {name}({', '.join(given)}) -> {gives}:"
    text = summary(function)
    return f'{head}\n    """{text}"""\n' if text else f"{head} ...\n"


def functions(named: dict[str, Callable[..., Any]]) -> str:
    """Return the definitions of functions, by name."""
    parts = []
    for name, function in sorted(named.items()):
        if name in SPECIAL:
            parts.append(SPECIAL[name])
            continue
        given = parameters(inspect.signature(function))
        parts.append(definition(name, function, given, result(name, function)))
    return "\n".join(parts)


def module(named: dict[str, Callable[..., Any]], more: str = "", names: Iterable[str] = ()) -> str:
    """Return the stub of a module of functions."""
    listed = ", ".join(f'"{name}"' for name in sorted([*named, *names]))
    text = f"{HEADER}{IMPORTS}\n__all__ = [{listed}]\n\n{more}\n{functions(named)}"
    # A function may have the name of a builtin type or alias.
    return BUILTINS.sub(r"builtins.\1", text)


BINARY = "add sub mul truediv floordiv mod pow matmul and or xor lshift rshift".split()
OWN = {
    "__getitem__": "def __getitem__(self, index: Any, /) -> Tensor: ...",
    "__iter__": "def __iter__(self) -> Iterator[Tensor]: ...",
    "__array_function__": (
        "def __array_function__(self, func: Any, types: Any, args: Any, kwargs: Any) -> Any: ..."
    ),
    "__array_ufunc__": (
        "def __array_ufunc__(self, ufunc: Any, method: str, *inputs: Any, **kwargs: Any) -> Any:\n"
        "    ..."
    ),
    "__divmod__": "def __divmod__(self, other: _Values, /) -> tuple[Tensor, Tensor]: ...",
    "__rdivmod__": "def __rdivmod__(self, other: _Values, /) -> tuple[Tensor, Tensor]: ...",
}


def method(name: str, found: Any) -> str:
    """Return the definition of a method, operator or property of Tensor."""
    if isinstance(found, property):
        return f"@property\ndef {name}(self) -> Tensor: ...\n"
    if name in OWN:
        return OWN[name] + "\n"
    if name == "unsqueeze":
        return EITHER_NAME.format(first="self, ")
    if name in ("__eq__", "__ne__"):  # elementwise, where Python's own gives a bool
        ignore = "  # type: ignore[override]  # pyright: ignore[reportIncompatibleMethodOverride]"
        return f"def {name}(self, other: object, /) -> Tensor: ...{ignore}\n"
    if name.startswith("__"):
        one = len(inspect.signature(found).parameters) == 1
        return f"def {name}(self{'' if one else ', other: _Values, /'}) -> Tensor: ...\n"
    signature = inspect.signature(found)
    _, *given = parameters(signature)
    wrapped = inspect.unwrap(found)
    gives = result(name, getattr(wrapped, "made", wrapped))
    return definition(name, found, ["self", *given], gives)


def methods() -> str:
    """Return the stub of the class of methods."""
    attached = {k: v for k, v in vars(Methods).items() if callable(v) or isinstance(v, property)}
    body = "\n".join(method(name, found) for name, found in sorted(attached.items()))
    indented = "".join(f"    {line}\n" if line else "\n" for line in body.split("\n"))
    text = f"{HEADER}{IMPORTS}\nclass Methods:\n{indented}"
    return BUILTINS.sub(r"builtins.\1", text)


def stubs() -> dict[Path, str]:
    """Return all stubs, formatted."""
    dtypes = "".join(f"{name} = np.{name}\n" for name in sorted(DTYPES))
    written = {
        "operations.pyi": module(NAMES, dtypes, DTYPES),
        "linalg.pyi": module(namespace(np.linalg)),
        "fft.pyi": module(namespace(np.fft)),
        "methods.pyi": methods(),
    }
    path, text = listed_names()
    return {path: text} | {
        FOLDER / name: formatted(t, FOLDER / name) for name, t in written.items()
    }


def listed_names() -> tuple[Path, str]:
    """Return `aiograd/__init__.py` with all operations and makers in its `__all__`."""
    # Written out: checkers read no other form, and hide what is not listed.
    path = Path(ag.__file__)
    head, _, _ = path.read_text().partition(BLOCK)
    names = ", ".join(f'"{name}"' for name in sorted([*MAKERS, *NAMES, *DTYPES]))
    lines = "".join(f"    {line}\n" for line in textwrap.wrap(names, 95))
    return path, f"{head.rstrip()}\n\n{BLOCK}\n# fmt: off\n__all__ += [\n{lines}]\n# fmt: on\n"


def formatted(text: str, path: Path) -> str:
    """Return a stub without unused imports, as ruff formats it."""
    for arguments in (["check", "-q", "--fix", "--select", "F401,I"], ["format", "-q"]):
        command = [sys.executable, "-m", "ruff", *arguments, "--stdin-filename", str(path), "-"]
        done = subprocess.run(command, input=text, capture_output=True, text=True, check=True)
        text = done.stdout
    return text


if __name__ == "__main__":
    for path, text in stubs().items():
        path.write_text(text)
