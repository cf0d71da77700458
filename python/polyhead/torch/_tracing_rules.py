"""What torch's operations are in a score and mask program: for each, by its name, polyhead's own functions of values."""

import math

import torch

from polyhead import _program
from polyhead._program import kind_of_value, where


class CannotSay(TypeError):
    """What a traced function asks for has no place in a program."""


_KINDS = {
    **dict.fromkeys((torch.float16, torch.bfloat16, torch.float32, torch.float64), "float"),
    **dict.fromkeys((torch.int8, torch.int16, torch.uint8, torch.int32, torch.int64), "int"),
    torch.bool: "bool",
}


def kind_of(dtype):
    """Of a program; None of dtypes that it has not."""
    return _KINDS.get(dtype)


def _unary(function):
    return lambda t, input: function(t.value(input))


def _binary(function):
    return lambda t, input, other: function(t.value(input), t.value(other))


def _with_alpha(function):
    def rule(t, input, other, *, alpha=1):
        other = t.value(other)
        return function(t.value(input), other if alpha == 1 else other * alpha)

    return rule


def _is(value, constant):
    return isinstance(value, bool) and value is constant or getattr(value, "text", None) == str(constant)


def _and(a, b):
    return b if _is(a, True) else a if _is(b, True) else a & b


def _or(a, b):
    return b if _is(a, False) else a if _is(b, False) else a | b


def _truth(x):
    return x if kind_of_value(x) == "bool" else x != 0


def _as(kind):
    return _unary(lambda x: x.astype(kind))


def _trunc(x):
    return x if x.kind != "float" else where(x < 0, _program.ceil(x), _program.floor(x))


def _trunc_div(a, b):
    if "float" in (kind_of_value(a), kind_of_value(b)):
        return _trunc(a / b)
    return where((a < 0) != (b < 0), -(-a // b), a // b)


def _div(t, input, other, *, rounding_mode=None):
    a, b = t.value(input), t.value(other)
    if rounding_mode == "floor":
        return a // b
    return _trunc_div(a, b) if rounding_mode == "trunc" else a / b


def _to(t, input, *args, dtype=None, **placement):
    """To a dtype, or that of another tensor; devices and layouts say nothing here."""
    for each in args:
        if isinstance(each, torch.dtype):
            dtype = each
        elif hasattr(each, "dtype"):
            dtype = each.dtype
    kind = t.value(input).kind if dtype is None else kind_of(dtype)
    if kind is None:
        raise CannotSay(f"{t.what} converts to {dtype}, a program knows floats, integers and bool")
    return t.value(input).astype(kind)


def _where(t, condition, input=None, other=None):
    if input is None or other is None:
        raise CannotSay(f"{t.what} calls torch.where(condition) alone, a program takes where(condition, a, b)")
    return where(t.value(condition), t.value(input), t.value(other))


def _clamp(t, input, min=None, max=None):
    """At a bound the gradient is the input's, as torch's; programs' own min and max would share it."""
    x = t.value(input)
    for bound, smaller in ((min, True), (max, False)):
        if bound is None:
            continue
        bound = t.value(bound)
        if "float" not in (x.kind, kind_of_value(bound)):
            x = _program.maximum(x, bound) if smaller else _program.minimum(x, bound)
        else:
            x = where(x < bound if smaller else x > bound, bound, x)
    return x


def _pow(t, input, exponent):
    return _program.power(t.value(input), t.value(exponent))


def _sign(x):
    return where(x > 0, 1, where(x < 0, -1, 0)) * (1.0 if x.kind == "float" else 1)


def _softplus(t, input, beta=1.0, threshold=20.0):
    x = t.value(input) * beta
    return where(x > threshold, t.value(input), _program.log(1 + _program.exp(x)) / beta)


def _gelu(t, input, *, approximate="none"):
    x = t.value(input)
    if approximate == "tanh":
        return 0.5 * x * (1 + _program.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))
    return 0.5 * x * (1 + _program.erf(x * math.sqrt(0.5)))


def _constant(number):
    def rule(t, input, *size, dtype=None, **placement):
        if any(each not in ((), [], torch.Size([])) for each in (*size, placement.pop("size", ()))):
            raise CannotSay(f"{t.what} makes a tensor of size {size}, a program computes with single numbers")
        kind = t.value(input).kind if dtype is None else kind_of(dtype)
        return t.scalar({"float": float, "int": int, "bool": bool}[kind](number))

    return rule


def _full(t, input, *given, fill_value=None, dtype=None, **placement):
    """new_full(size, value), full_like(value), new_tensor(value)."""
    number = given[-1] if fill_value is None else fill_value
    value = t.value(number)
    if not hasattr(value, "astype"):
        value = t.scalar(value)
    return value if dtype is None else value.astype(kind_of(dtype))


def _unchanged(t, input):
    return t.value(input)


_LN2, _LN10 = math.log(2), math.log(10)

RULES = {
    "add": _with_alpha(lambda a, b: a + b),
    "sub": _with_alpha(lambda a, b: a - b),
    "rsub": _with_alpha(lambda a, b: b - a),
    "mul": _binary(lambda a, b: a * b),
    "div": _div,
    "truediv": _binary(lambda a, b: a / b),
    "floordiv": _binary(lambda a, b: a // b),
    "mod": _binary(lambda a, b: a % b),
    "fmod": _binary(lambda a, b: a - _trunc_div(a, b) * b),
    "pow": _pow,
    "neg": _unary(lambda x: -x),
    "pos": _unchanged,
    "abs": _unary(_program.absolute),
    "sign": _unary(_sign),
    "square": _unary(lambda x: x * x),
    "reciprocal": _unary(lambda x: 1.0 / x),
    "minimum": _binary(_program.minimum),
    "maximum": _binary(_program.maximum),
    "min": _binary(_program.minimum),
    "max": _binary(_program.maximum),
    "clamp": _clamp,
    "clamp_min": lambda t, input, min: _clamp(t, input, min=min),
    "clamp_max": lambda t, input, max: _clamp(t, input, max=max),
    "relu": lambda t, input, inplace=False: where(t.value(input) > 0, t.value(input), 0),
    "floor": _unary(lambda x: x if x.kind != "float" else _program.floor(x)),
    "ceil": _unary(lambda x: x if x.kind != "float" else _program.ceil(x)),
    "trunc": _unary(_trunc),
    "exp": _unary(_program.exp),
    "exp2": _unary(lambda x: _program.exp(x * _LN2)),
    "expm1": _unary(lambda x: _program.exp(x) - 1),
    "log": _unary(_program.log),
    "log2": _unary(lambda x: _program.log(x) * (1 / _LN2)),
    "log10": _unary(lambda x: _program.log(x) * (1 / _LN10)),
    "log1p": _unary(lambda x: _program.log(1 + x)),
    "softplus": _softplus,
    "tanh": _unary(_program.tanh),
    "sigmoid": _unary(_program.sigmoid),
    "silu": lambda t, input, inplace=False: t.value(input) * _program.sigmoid(t.value(input)),
    "gelu": _gelu,
    "leaky_relu": lambda t, input, negative_slope=0.01, inplace=False: (
        where(t.value(input) > 0, t.value(input), t.value(input) * negative_slope)
    ),
    "erf": _unary(_program.erf),
    "sqrt": _unary(_program.sqrt),
    "rsqrt": _unary(_program.rsqrt),
    "sin": _unary(_program.sin),
    "cos": _unary(_program.cos),
    "tan": _unary(lambda x: _program.sin(x) / _program.cos(x)),
    "lt": _binary(lambda a, b: a < b),
    "le": _binary(lambda a, b: a <= b),
    "gt": _binary(lambda a, b: a > b),
    "ge": _binary(lambda a, b: a >= b),
    "eq": _binary(lambda a, b: a == b),
    "ne": _binary(lambda a, b: a != b),
    "isnan": _unary(lambda x: x != x),
    "isinf": _unary(lambda x: _program.absolute(x) == math.inf),
    "isneginf": _unary(lambda x: x == -math.inf),
    "isposinf": _unary(lambda x: x == math.inf),
    "isfinite": _unary(lambda x: _program.absolute(x) < math.inf),
    "and": _binary(_and),
    "or": _binary(_or),
    "xor": _binary(lambda a, b: a ^ b),
    "invert": _unary(lambda x: ~x),
    "lshift": _binary(lambda a, b: a << b),
    "rshift": _binary(lambda a, b: a >> b),
    "logical_and": _binary(lambda a, b: _and(_truth(a), _truth(b))),
    "logical_or": _binary(lambda a, b: _or(_truth(a), _truth(b))),
    "logical_xor": _binary(lambda a, b: _truth(a) != _truth(b)),
    "logical_not": _unary(lambda x: ~_truth(x)),
    "where": _where,
    "masked_fill": lambda t, input, mask, value: where(t.value(mask), t.value(value), t.value(input)),
    "to": _to,
    "type": _to,
    "type_as": _to,
    **{name: _as("float") for name in ("float", "double", "half", "bfloat16")},
    **{name: _as("int") for name in ("int", "long", "short")},
    "bool": _as("bool"),
    **dict.fromkeys(("clone", "contiguous", "squeeze", "cpu"), _unchanged),
    **dict.fromkeys(("new_zeros", "zeros_like"), _constant(0)),
    **dict.fromkeys(("new_ones", "ones_like"), _constant(1)),
    **dict.fromkeys(("new_full", "full_like", "new_tensor"), _full),
}
for _name, _other in {
    "subtract": "sub", "multiply": "mul", "true_divide": "truediv", "divide": "div",
    "floor_divide": "floordiv", "remainder": "mod", "negative": "neg", "absolute": "abs", "sgn": "sign",
    "fix": "trunc", "clip": "clamp", "special_expit": "sigmoid", "expit": "sigmoid", "less": "lt", "less_equal": "le",
    "greater": "gt", "greater_equal": "ge", "not_equal": "ne", "bitwise_and": "and", "bitwise_or": "or",
    "bitwise_xor": "xor", "bitwise_not": "invert", "bitwise_left_shift": "lshift", "bitwise_right_shift": "rshift",
}.items():  # fmt: skip
    RULES[_name] = RULES[_other]
