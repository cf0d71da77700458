"""Traces plain functions into the text of a score and mask program, which the library reads (docs/programs.md)."""

from __future__ import annotations

import math
import numbers
from collections.abc import Callable
from typing import Any, Literal, NoReturn, cast

import numpy as np

Kind = Literal["bool", "int", "float"]
INPUTS = ("score", "b", "h", "q", "k", "offset")
_ORDER: dict[Kind, int] = {"bool": 0, "int": 1, "float": 2}
_MOST_PRODUCTS = 8  # powers up to here are products


def _refuse(what: str, instead: str) -> NoReturn:
    raise TypeError(f"{what} cannot stand in a score or mask program, which is traced: {instead}")


class Value:
    """A value of a program that is being traced: what operators and functions of it mean is written down as text.

    Takes Python's operators, NumPy's functions of the same names and those of `polyhead.programs`.
    """

    __slots__ = ("kind", "text", "tracer")
    __hash__ = None  # type: ignore[assignment]  # == makes a value

    def __init__(self, tracer: Tracer, text: str, kind: Kind):
        self.tracer = tracer
        self.text = text  # a name, a number or an element: stands anywhere without parentheses
        self.kind: Kind = kind

    def __repr__(self) -> str:
        return f"<{self.kind} {self.text} of a score or mask program>"

    def __add__(self, other: Any) -> Value:
        return _arithmetic("+", self, other)

    def __radd__(self, other: Any) -> Value:
        return _arithmetic("+", other, self)

    def __sub__(self, other: Any) -> Value:
        return _arithmetic("-", self, other)

    def __rsub__(self, other: Any) -> Value:
        return _arithmetic("-", other, self)

    def __mul__(self, other: Any) -> Value:
        return _arithmetic("*", self, other)

    def __rmul__(self, other: Any) -> Value:
        return _arithmetic("*", other, self)

    def __truediv__(self, other: Any) -> Value:
        return _infix("/", self, other, "float")

    def __rtruediv__(self, other: Any) -> Value:
        return _infix("/", other, self, "float")

    def __floordiv__(self, other: Any) -> Value:
        return _floor_div(self, other)

    def __rfloordiv__(self, other: Any) -> Value:
        return _floor_div(other, self)

    def __mod__(self, other: Any) -> Value:
        return _floor_mod(self, other)

    def __rmod__(self, other: Any) -> Value:
        return _floor_mod(other, self)

    def __pow__(self, other: Any) -> Value:
        return power(self, other)

    def __rpow__(self, other: Any) -> Value:
        return power(other, self)

    def __lshift__(self, other: Any) -> Value:
        return _infix("<<", self, other, "int")

    def __rlshift__(self, other: Any) -> Value:
        return _infix("<<", other, self, "int")

    def __rshift__(self, other: Any) -> Value:
        return _infix(">>", self, other, "int")

    def __rrshift__(self, other: Any) -> Value:
        return _infix(">>", other, self, "int")

    def __and__(self, other: Any) -> Value:
        return _bitwise("&", self, other)

    __rand__ = __and__

    def __or__(self, other: Any) -> Value:
        return _bitwise("|", self, other)

    __ror__ = __or__

    def __xor__(self, other: Any) -> Value:
        return _bitwise("^", self, other)

    __rxor__ = __xor__

    def __lt__(self, other: Any) -> Value:
        return _infix("<", self, other, "bool")

    def __le__(self, other: Any) -> Value:
        return _infix("<=", self, other, "bool")

    def __gt__(self, other: Any) -> Value:
        return _infix(">", self, other, "bool")

    def __ge__(self, other: Any) -> Value:
        return _infix(">=", self, other, "bool")

    def __eq__(self, other: object) -> Value:  # type: ignore[override]
        return _infix("==", self, other, "bool")

    def __ne__(self, other: object) -> Value:  # type: ignore[override]
        return _infix("!=", self, other, "bool")

    def __neg__(self) -> Value:
        return self.tracer.add(f"-{self.text}", _widest("int", self))

    def __pos__(self) -> Value:
        return self

    def __invert__(self) -> Value:
        return self.tracer.add(f"~{self.text}", self.kind)

    def __abs__(self) -> Value:
        return absolute(self)

    def astype(self, dtype: Any) -> Value:
        """As a float, an int (towards 0) or a bool (whether it is not 0), whichever kind of dtype is named."""
        kind = kind_of(getattr(dtype, "__name__", dtype))
        if kind is None:
            raise TypeError(f"astype takes a kind of float, int or bool in a program, got {dtype!r}")
        if kind == self.kind:
            return self
        return self != 0 if kind == "bool" else self.tracer.add(f"{kind}({self.text})", kind)

    def __bool__(self) -> bool:
        _refuse(
            "a question to a value (if, and, or, not, min, max, a < b < c)",
            "use numpy.where(condition, a, b), & | ~, numpy.minimum and numpy.maximum",
        )

    def __index__(self) -> int:
        _refuse("an array that the function closes over, indexed by a value,", "pass it in captured, as a parameter")

    def __float__(self) -> float:
        _refuse("float() of a value, or a function of math,", "use .astype(float), and functions of numpy")

    def __int__(self) -> int:
        _refuse("int() of a value", "use .astype(int)")

    def __iter__(self) -> NoReturn:
        _refuse("a loop over a value", "it is one number")

    def __array__(self, *_: Any, **__: Any) -> NoReturn:
        _refuse("an array made of values", "each is one number")

    def __array_ufunc__(self, ufunc: Any, method: str, *operands: Any, **options: Any) -> Any:
        function = _UFUNCS.get(ufunc.__name__)
        if function is None or method != "__call__" or options:
            _refuse(f"numpy.{ufunc.__name__}", "the functions are " + ", ".join(sorted(_UFUNCS)) + ", where, clip")
        return function(*operands)

    def __array_function__(self, function: Any, _types: Any, operands: Any, options: Any) -> Any:
        if function.__name__ == "where" and len(operands) == 3 and not options:
            return where(*operands)
        if function.__name__ == "clip" and len(operands) == 3 and not options:
            return clamp(*operands)
        _refuse(f"numpy.{function.__name__}", "the functions are " + ", ".join(sorted(_UFUNCS)) + ", where, clip")


class CapturedTensor:
    """A tensor that a program reads, one element at a time: ``table[h, q - k]``."""

    __slots__ = ("_before", "kind", "name", "ndim", "tracer")

    def __init__(self, tracer: Tracer, name: str, kind: Kind, ndim: int, before: tuple[Any, ...] = ()):
        self.tracer = tracer
        self.name = name
        self.kind: Kind = kind
        self.ndim = ndim
        self._before = before  # indices given already: table[h][q]

    def __getitem__(self, index: Any) -> Any:
        given = self._before + (index if isinstance(index, tuple) else (index,))
        for each in given:
            if not isinstance(each, (Value, numbers.Integral)) or (isinstance(each, Value) and each.kind == "float"):
                raise TypeError(f"{self.name} is indexed by {each!r} in a program, takes integers: {self.name}[h, q - k]")
        if len(given) > self.ndim:
            raise IndexError(f"{self.name} has {self.ndim} dimensions, is indexed by {len(given)} values")
        if len(given) < self.ndim:
            return CapturedTensor(self.tracer, self.name, self.kind, self.ndim, given)
        return self.tracer.element(self, given)

    def __iter__(self) -> NoReturn:
        _refuse(f"a loop over {self.name}", f"take elements of it: {self.name}[h]")


class Tracer:
    """Writes down one program. Attributes score, b, h, q, k, offset: its inputs."""

    def __init__(self) -> None:
        self._declarations: list[str] = []
        self._statements: list[str] = []
        self._known: dict[str, Value] = {}  # by its expression: a thing computed twice is one value
        self.score = Value(self, "score", "float")
        self.b, self.h, self.q, self.k, self.offset = (Value(self, name, "int") for name in INPUTS[1:])

    def capture(self, name: str, kind: Kind, ndim: int) -> Any:
        """The tensor of this name; of 0 dimensions: its value."""
        self._declarations.append(f"{name}: {kind}")
        return CapturedTensor(self, name, kind, ndim) if ndim > 0 else Value(self, f"{name}[]", kind)

    def element(self, tensor: CapturedTensor, index: tuple[Any, ...]) -> Value:
        return self.add(f"{tensor.name}[{', '.join(map(text_of, index))}]", tensor.kind)

    def add(self, expression: str, kind: Kind) -> Value:
        known = self._known.get(expression)
        if known is None:
            known = self._known[expression] = Value(self, f"_{len(self._statements) + 1}", kind)
            self._statements.append(f"{known.text} = {expression}")
        return known

    def text(self, *, score: Any = None, mask: Any = None) -> str:
        """The program whose results are these values, numbers or, as text, expressions."""
        lines = self._declarations + self._statements
        for name, result in (("score", score), ("mask", mask)):
            if result is not None:
                lines.append(f"{name} = {result if isinstance(result, str) else text_of(result)}")
        return "; ".join(lines)


def kind_of(dtype: Any) -> Kind | None:
    """Of a dtype of NumPy, torch, ... that a program may read; None of others."""
    name = str(dtype).rpartition(".")[2]
    if name.startswith(("float", "bfloat", "double", "half")):
        return "float"
    return "int" if name in ("int", "int32", "int64", "long") else "bool" if name in ("bool", "bool_") else None


def text_of(value: Any) -> str:
    if isinstance(value, Value):
        return value.text
    if hasattr(value, "item") and not isinstance(value, (bool, int, float)):  # a number of NumPy
        value = value.item()
    if not isinstance(value, numbers.Real):
        raise TypeError(f"{value!r} has type {type(value).__name__}, a program takes its own values and real numbers")
    if isinstance(value, (bool, numbers.Integral)):
        return repr(value if isinstance(value, bool) else int(value)) if value >= 0 else f"({int(value)})"
    number = float(value)
    return f"({number!r})" if number < 0 else repr(number)


def kind_of_value(value: Any) -> Kind:
    if isinstance(value, Value):
        return value.kind
    if hasattr(value, "item"):
        value = value.item()
    return "bool" if isinstance(value, bool) else "int" if isinstance(value, numbers.Integral) else "float"


def _widest(least: Kind, *values: Any) -> Kind:
    return max((least, *map(kind_of_value, values)), key=_ORDER.__getitem__)


def _tracer_of(*values: Any) -> Tracer | None:
    return next((value.tracer for value in values if isinstance(value, Value)), None)


def _infix(sign: str, a: Any, b: Any, kind: Kind) -> Value:
    tracer = cast("Tracer", _tracer_of(a, b))
    return tracer.add(f"{text_of(a)} {sign} {text_of(b)}", kind)


def _arithmetic(sign: str, a: Any, b: Any) -> Value:
    return _infix(sign, a, b, _widest("int", a, b))


def _bitwise(sign: str, a: Any, b: Any) -> Value:
    return _infix(sign, a, b, _widest("bool", a, b))


def _floor_div(a: Any, b: Any) -> Value:
    if _widest("int", a, b) == "int":
        return _infix("//", a, b, "int")
    return cast("Value", floor(_infix("/", a, b, "float")))


def _floor_mod(a: Any, b: Any) -> Value:
    return _infix("%", a, b, "int") if _widest("int", a, b) == "int" else a - _floor_div(a, b) * b


def _call(word: str, least: Kind, *values: Any) -> Any:
    tracer = _tracer_of(*values)
    if tracer is None:  # numbers and arrays: what the word means, outside of a program
        return _ON_ARRAYS[word](*values)
    kind = "float" if least == "float" else _widest(least, *values[word == "where" :])
    return tracer.add(f"{word}({', '.join(map(text_of, values))})", kind)


def where(condition: Any, a: Any, b: Any) -> Any:
    """a where condition is true, else b; the gradient goes to what was taken."""
    return _call("where", "bool", condition, a, b)


def minimum(a: Any, b: Any) -> Any:
    """The smaller one."""
    return _call("min", "int", a, b)


def maximum(a: Any, b: Any) -> Any:
    """The larger one."""
    return _call("max", "int", a, b)


def clamp(x: Any, low: Any, high: Any) -> Any:
    """x, at least low and at most high."""
    return minimum(maximum(x, low), high)


def absolute(x: Any) -> Any:
    """x without its sign; its derivative at 0 is 0."""
    return _call("abs", "int", x)


def power(base: Any, exponent: Any) -> Any:
    """base to the power of exponent: an int if both are and exponent is a number from 1 to 8, else a float."""
    if isinstance(exponent, numbers.Integral) and 1 <= exponent <= _MOST_PRODUCTS:
        product = base
        for bit in bin(exponent)[3:]:
            product = product * product
            product = product * base if bit == "1" else product
        return product
    return base**exponent if _tracer_of(base, exponent) is None else _infix("**", base, exponent, "float")


def floor(x: Any) -> Any:
    """Rounded down; a float without a gradient."""
    return _call("floor", "float", x)


def ceil(x: Any) -> Any:
    """Rounded up; a float without a gradient."""
    return _call("ceil", "float", x)


def exp(x: Any) -> Any:
    """e to the power of x."""
    return _call("exp", "float", x)


def log(x: Any) -> Any:
    """Natural logarithm."""
    return _call("log", "float", x)


def tanh(x: Any) -> Any:
    """Hyperbolic tangent."""
    return _call("tanh", "float", x)


def sigmoid(x: Any) -> Any:
    """1 / (1 + exp(-x))."""
    return _call("sigmoid", "float", x)


def erf(x: Any) -> Any:
    """Error function."""
    return _call("erf", "float", x)


def sqrt(x: Any) -> Any:
    """Square root."""
    return _call("sqrt", "float", x)


def rsqrt(x: Any) -> Any:
    """1 / sqrt(x)."""
    return _call("rsqrt", "float", x)


def sin(x: Any) -> Any:
    """Sine, of radians."""
    return _call("sin", "float", x)


def cos(x: Any) -> Any:
    """Cosine, of radians."""
    return _call("cos", "float", x)


def _truth(value: Any) -> Any:
    return value if kind_of_value(value) == "bool" else value != 0


_ON_ARRAYS: dict[str, Callable[..., Any]] = {
    "where": np.where,
    "min": np.minimum,
    "max": np.maximum,
    "abs": np.abs,
    "floor": np.floor,
    "ceil": np.ceil,
    "exp": np.exp,
    "log": np.log,
    "tanh": np.tanh,
    "sigmoid": lambda x: 0.5 + 0.5 * np.tanh(0.5 * np.asarray(x)),
    "erf": np.vectorize(math.erf),
    "sqrt": np.sqrt,
    "rsqrt": lambda x: 1 / np.sqrt(x),
    "sin": np.sin,
    "cos": np.cos,
}

_UFUNCS: dict[str, Callable[..., Any]] = {
    "add": lambda a, b: _arithmetic("+", a, b),
    "subtract": lambda a, b: _arithmetic("-", a, b),
    "multiply": lambda a, b: _arithmetic("*", a, b),
    "divide": lambda a, b: _infix("/", a, b, "float"),
    "floor_divide": _floor_div,
    "remainder": _floor_mod,
    "power": power,
    "square": lambda x: x * x,
    "negative": lambda x: -x,
    "absolute": absolute,
    "fabs": lambda x: absolute(x.astype(float)),
    "minimum": minimum,
    "maximum": maximum,
    "floor": floor,
    "ceil": ceil,
    "exp": exp,
    "log": log,
    "tanh": tanh,
    "sqrt": sqrt,
    "sin": sin,
    "cos": cos,
    "less": lambda a, b: _infix("<", a, b, "bool"),
    "less_equal": lambda a, b: _infix("<=", a, b, "bool"),
    "greater": lambda a, b: _infix(">", a, b, "bool"),
    "greater_equal": lambda a, b: _infix(">=", a, b, "bool"),
    "equal": lambda a, b: _infix("==", a, b, "bool"),
    "not_equal": lambda a, b: _infix("!=", a, b, "bool"),
    "logical_and": lambda a, b: _bitwise("&", _truth(a), _truth(b)),
    "logical_or": lambda a, b: _bitwise("|", _truth(a), _truth(b)),
    "logical_xor": lambda a, b: _bitwise("^", _truth(a), _truth(b)),
    "logical_not": lambda x: ~_truth(x),
    "bitwise_and": lambda a, b: _bitwise("&", a, b),
    "bitwise_or": lambda a, b: _bitwise("|", a, b),
    "bitwise_xor": lambda a, b: _bitwise("^", a, b),
    "invert": lambda x: ~x,
    "left_shift": lambda a, b: _infix("<<", a, b, "int"),
    "right_shift": lambda a, b: _infix(">>", a, b, "int"),
}
