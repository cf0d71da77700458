"""Traces functions of torch tensors, as FlexAttention takes them, into score and mask programs (docs/programs.md).

A function is called with `Scalar`s, which stand for one score, head, query, ... each. What torch is asked to do with them
is written down by polyhead's tracer; what it does with tensors alone it does, with autograd, and a tensor that is indexed
by a `Scalar` becomes a capture.
"""

import functools
import inspect
import re
from typing import Any, NamedTuple, Optional

import torch
from torch import Tensor
from torch._ops import OpOverload, OpOverloadPacket
from torch.overrides import TorchFunctionMode, resolve_name
from torch.utils._pytree import tree_iter

from polyhead import Error
from polyhead._program import INPUTS, Tracer, Value, kind_of_value, text_of
from polyhead._program_call import call_by_names
from polyhead.torch._options import MOST_CAPTURES
from polyhead.torch._tracing_rules import RULES, CannotSay, kind_of

MOST_INDICES = 4  # ProgramStep::kMostOperands
_NAME = re.compile(r"[A-Za-z_]\w*")
_KNOWN_OPERATORS = ("approx::tanh",)  # attention-gym's softcap: a faster tanh on GPUs, torch's here
_DTYPES = {"int": torch.int64, "bool": torch.bool}


class Traced(NamedTuple):
    """A program, and the tensors that it captures, in its order."""

    text: Optional[str] = None  # none: nothing to do
    names: tuple[str, ...] = ()
    tensors: tuple[Tensor, ...] = ()

    def slots(self):
        """As `Options` takes them: the text and its captures."""
        if len(self.tensors) > MOST_CAPTURES:
            raise CannotSay(
                f"score and mask read {len(self.tensors)} tensors ({', '.join(self.names)}), a program reads "
                f"{MOST_CAPTURES} at most"
            )
        return () if self.text is None else (self.text, *self.tensors, *[None] * (MOST_CAPTURES - len(self.tensors)))


class Scalar(Value):
    """A value that a traced function of torch tensors takes for a tensor without dimensions."""

    __slots__ = ()
    __hash__ = object.__hash__  # type: ignore[assignment]

    requires_grad = is_leaf = is_nested = False
    device = torch.device("cpu")
    shape = torch.Size([])
    ndim = 0

    @property
    def tracing(self):
        return self.tracer.tracing

    @property
    def dtype(self):
        return _DTYPES.get(self.kind, self.tracing.dtype)

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        scalar = next(each for each in tree_iter((args, kwargs)) if isinstance(each, Scalar))
        return scalar.tracing.called(function, args, kwargs or {})

    def __getattr__(self, name):
        if name.startswith("__") or not hasattr(Tensor, name):
            raise AttributeError(f"a tensor in a traced {self.tracing.what} has no attribute {name}")
        return functools.partial(self._method, name)

    def _method(self, name, *args, **kwargs):
        return self.tracing.apply(name, f"torch.Tensor.{name}", (self, *args), kwargs)

    def dim(self):
        return 0

    def numel(self):
        return 1

    def size(self):
        return self.shape

    def is_floating_point(self):
        return self.dtype.is_floating_point

    def _not_a_number(self, how, instead):
        raise CannotSay(f"{self.tracing.what} {how}, which the traced program does not know yet: {instead}")

    def __bool__(self):
        self._not_a_number("decides by a value (if, and, or, not, min, max)", "use torch.where, &, |, ~, torch.minimum")

    def __index__(self):
        self._not_a_number("uses a value as a Python integer", "only tensors are indexed by values")

    def __int__(self):
        self._not_a_number("calls int() of a value", "use .to(torch.int64)")

    def __float__(self):
        self._not_a_number("calls float() of a value", "use .to(torch.float32), and functions of torch")

    def __iter__(self):
        self._not_a_number("loops over a value", "it is one number")

    def __len__(self):
        self._not_a_number("asks for the length of a value", "it is one number")

    def __getitem__(self, index):
        if index in ((), ..., None) and index is not None:
            return self
        self._not_a_number(f"indexes a value by {index!r}", "it is one number")


def _operator(name, reflected=False):
    if reflected:
        return lambda self, other: self.tracing.apply(name, f"torch.{name}", (other, self), {})
    return lambda self, *other: self.tracing.apply(name, f"torch.{name}", (self, *other), {})


for _name in (
    "add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift",
):  # fmt: skip
    setattr(Scalar, f"__{_name}__", _operator(_name))
    setattr(Scalar, f"__r{_name}__", _operator(_name, reflected=True))
for _name in ("lt", "le", "gt", "ge", "eq", "ne", "neg", "pos", "abs", "invert"):
    setattr(Scalar, f"__{_name}__", _operator(_name))


class _Tracer(Tracer):
    """Whose values are `Scalar`s."""

    def __init__(self, tracing):
        super().__init__()
        self.tracing = tracing

    def add(self, expression, kind):
        return self.tracing.scalar(super().add(expression, kind))

    def pruned(self, score, mask, declared):
        """The text without what neither result needs, and the names in it; `declared` are there in any case."""
        lines = super().text(score=score, mask=mask).split("; ")
        names = {*declared}
        for at in reversed(range(len(lines))):
            name = _NAME.match(lines[at]).group()
            if name in names or name in ("score", "mask"):
                names.update(_NAME.findall(lines[at]))
            else:
                lines[at] = None
        return "; ".join(filter(None, lines)), names


class _Rows:
    """A tensor of which some indices are given: table[h], still to be indexed by q."""

    def __init__(self, tracing, tensor, indices):
        self.tracing, self.tensor, self.indices = tracing, tensor, indices

    @classmethod
    def __torch_function__(cls, function, types, args=(), kwargs=None):
        rows = next(each for each in tree_iter((args, kwargs)) if isinstance(each, _Rows))
        raise CannotSay(
            f"{rows.tracing.what} calls {resolve_name(function)} on a row of a tensor {list(rows.tensor.shape)}, a program "
            "reads elements"
        )

    def _computes(self, *others):
        raise CannotSay(
            f"{self.tracing.what} computes with a row of a tensor {list(self.tensor.shape)}, a program with single numbers"
        )

    __add__ = __sub__ = __mul__ = __truediv__ = __matmul__ = __pow__ = __neg__ = _computes
    __radd__ = __rsub__ = __rmul__ = __rtruediv__ = __rmatmul__ = _computes

    def __getattr__(self, name):
        raise CannotSay(
            f"{self.tracing.what} takes .{name} of a row of a tensor {list(self.tensor.shape)}, a program reads elements"
        )

    def __getitem__(self, index):
        return self.tracing.element(self.tensor, self.indices, index)


class _Mode(TorchFunctionMode):
    def __init__(self, tracing):
        super().__init__()
        self._tracing = tracing

    def __torch_function__(self, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        if any(isinstance(each, (Value, _Rows)) for each in tree_iter((args, kwargs))):
            return self._tracing.called(function, args, kwargs)
        if function.__name__ in _READS_NUMBERS and args[0].requires_grad:
            raise CannotSay(
                f"{self._tracing.what} calls {resolve_name(function)} of a tensor that requires a gradient, which would be lost"
            )
        result = function(*args, **kwargs)
        if function.__name__ in _MAKES_NUMBERS and isinstance(result, Tensor) and result.dim() == 0:
            self._tracing.computes |= any(isinstance(each, Tensor) for each in tree_iter((args, kwargs)))
            return self._tracing.scalar(result.item())  # as in torch.tensor(3)
        self._tracing.computes |= function.__name__ not in _TELLS_SHAPES
        return result


_READS_NUMBERS = ("item", "__float__", "__int__", "tolist")
_TELLS_SHAPES = ("__get__", "dim", "numel", "size")
_MAKES_NUMBERS = ("tensor", "scalar_tensor", "as_tensor", "zeros", "ones", "full")


class Tracing:
    """One program under way. `what` names the function that is traced now."""

    def __init__(self, dtype, captured=None):
        self.tracer, self.dtype, self.what = _Tracer(self), dtype, "score"
        self._names, self._tensors = [], []
        self._captures = {}  # by the tensor's id
        for name, tensor in (captured or {}).items():
            self._capture(tensor, name)
        self._given = tuple(self._names)
        self.computes = False  # whether a function has asked torch for something of tensors: the trace is of this call alone

    def inputs(self, *names):
        return [self.scalar(getattr(self.tracer, name)) for name in names]

    def scalar(self, value):
        """A value or a number as traced functions take it."""
        if not isinstance(value, Value):
            return Scalar(self.tracer, text_of(value), kind_of_value(value))
        return Scalar(self.tracer, value.text, value.kind)

    def trace(self, what, function, *arguments):
        """What the function returns for these arguments: a value, or a number."""
        self.what = what
        with _Mode(self):
            result = function(*arguments)
        if isinstance(result, _Rows):
            raise CannotSay(f"{what} returns a row of a tensor {list(result.tensor.shape)}, must return one number")
        if not isinstance(result, (Value, Tensor, bool, int, float)):
            raise TypeError(f"{what} returns {type(result).__name__}, must return a tensor")
        return self.value(result)

    def program(self, score=None, mask=None) -> Traced:
        """The program of these values, numbers or texts."""
        score = None if getattr(score, "text", None) == "score" else score
        mask = None if mask is True or getattr(mask, "text", None) == "True" else mask
        if score is None and mask is None:
            return Traced()
        if isinstance(score, str) or isinstance(mask, str):
            text, read = self.tracer.text(score=score, mask=mask), self._names
        else:
            text, read = self.tracer.pruned(score, mask, self._given)
        kept = [i for i, name in enumerate(self._names) if name in read]
        return Traced(text, tuple(self._names[i] for i in kept), tuple(self._tensors[i] for i in kept))

    def value(self, x):
        """An operand as the tracer takes it."""
        if isinstance(x, Value):
            return Value(self.tracer, x.text, x.kind)  # whose operators are polyhead's own
        if isinstance(x, Tensor):
            if x.dim() != 0:
                raise CannotSay(
                    f"{self.what} computes with a tensor {list(x.shape)}, a program with single numbers: index it"
                )
            return self._capture(x)
        if isinstance(x, _Rows):
            raise CannotSay(f"{self.what} computes with a row of a tensor {list(x.tensor.shape)}: index it")
        if isinstance(x, (bool, int, float)):
            return x
        raise CannotSay(f"{self.what} computes with a {type(x).__name__}, a program with tensors and numbers")

    def called(self, function, args, kwargs):
        """What torch is asked to do, by one of its functions or an operator."""
        operator = function._overloadpacket if isinstance(function, OpOverload) else function
        name, full_name = function.__name__, resolve_name(function)
        if isinstance(operator, OpOverloadPacket):
            full_name, name = operator._qualified_op_name, operator.__name__
            if not full_name.startswith("aten::") and full_name not in _KNOWN_OPERATORS:  # may mean anything
                raise CannotSay(f"{self.what} calls {full_name}, which no score or mask program can say")
        return self.apply(name, full_name, args, kwargs)

    def apply(self, name, full_name, args, kwargs):
        name = name.strip("_") if name.startswith("__") else name
        if name == "getitem":
            tensor, index = args
            return tensor[index] if isinstance(tensor, (Scalar, _Rows)) else self.element(tensor, (), index)
        if full_name == "torch.Tensor.where" and len(args) == 3:  # x.where(condition, other)
            args = (args[1], args[0], args[2])
        rule = RULES.get(name)
        if rule is None:
            if name.startswith("r") and name[1:] in _REFLECTED:
                rule, args = RULES[name[1:]], args[::-1]
            else:
                raise CannotSay(f"{self.what} calls {full_name}, which no score or mask program can say")
        try:
            _signature(rule).bind(self, *args, **kwargs)
        except TypeError:
            given = ", ".join([*("..." for _ in args), *kwargs])
            raise CannotSay(f"{self.what} calls {full_name}({given}), which no score or mask program can say") from None
        return self.scalar(rule(self, *args, **kwargs))

    def element(self, tensor, before, index):
        """tensor[before][index]: an element, or, with fewer indices than it has dims, a row."""
        index = list(index) if isinstance(index, tuple) else [index]
        if Ellipsis in [each for each in index if each is Ellipsis]:
            at = next(i for i, each in enumerate(index) if each is Ellipsis)
            index[at : at + 1] = [slice(None)] * (tensor.dim() - len(before) - len(index) + 1)
        if len(before) + len(index) > tensor.dim():
            raise IndexError(
                f"{self.what} gives {len(before) + len(index)} indices to a tensor of {tensor.dim()} dimensions"
            )
        indices = (*before, *(self._index(each, tensor) for each in index))
        if len(indices) < tensor.dim():
            return _Rows(self, tensor, indices)
        tensor, indices = _without_constants(tensor, indices)
        captured = self._capture(tensor)
        places = tuple(each if type(each) is not bool else int(each) for each in indices)
        return self.scalar(captured[places] if places else captured)

    def _index(self, each, tensor):
        if isinstance(each, (slice, type(None), list)) or (isinstance(each, Tensor) and each.dim() > 0):
            raise CannotSay(
                f"{self.what} indexes a tensor {list(tensor.shape)} by {each!r} beside values, a program reads elements"
            )
        value = self.value(each)
        if kind_of_value(value) != "int":
            raise CannotSay(
                f"{self.what} indexes a tensor {list(tensor.shape)} by a {kind_of_value(value)}, takes integers"
            )
        return value

    def _capture(self, tensor, name=None):
        known = self._captures.get(id(tensor))
        if known is not None:
            return known[1]
        name = name or f"tensor{len(self._names)}"
        while name in self._names:
            name += "_"
        given = self._as_programs_take(tensor, name)
        if given.dim() > MOST_INDICES:
            raise CannotSay(f"{self.what} reads a tensor {list(given.shape)}, a program those of {MOST_INDICES} dims at most")
        captured = self.tracer.capture(name, kind_of(given.dtype), given.dim())
        self._names.append(name)
        self._tensors.append(given)
        self._captures[id(tensor)] = (tensor, captured)  # it must live as long as its id stands for it
        return captured

    def _as_programs_take(self, tensor, name):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"captured[{name!r}] has type {type(tensor).__name__}, must be a torch.Tensor")
        if tensor.dtype in (torch.int8, torch.int16, torch.uint8):
            return tensor.to(torch.int32)
        if tensor.dtype == torch.float64 and self.dtype != torch.float64:
            return tensor.to(torch.float32)
        if kind_of(tensor.dtype) is None:
            raise Error(f"{name} is {tensor.dtype}, a program reads floats, integers and bool")
        return tensor


_signature = functools.lru_cache(maxsize=None)(inspect.signature)
_REFLECTED = ("add", "sub", "mul", "truediv", "div", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift")


def _without_constants(tensor, indices):
    """The same element, by fewer indices where there would be too many."""
    for dim in reversed(range(len(indices))):
        if isinstance(indices[dim], int):
            size = tensor.shape[dim]
            if not -size <= indices[dim] < size:
                raise IndexError(f"index {indices[dim]} is out of range for dimension {dim} of size {size}")
            if len(indices) > MOST_INDICES:
                tensor = tensor.select(dim, indices[dim])
                indices = indices[:dim] + indices[dim + 1 :]
            elif indices[dim] < 0:
                indices = (*indices[:dim], indices[dim] + size, *indices[dim + 1 :])
    return tensor, indices


def program_of(score, mask, captured, dtype) -> Traced:
    """Of `attention`'s arguments of these names."""
    if score is None and mask is None:
        if captured:
            raise Error("captured is given without score or mask, which could read it")
        return Traced()
    functions = callable(score) or callable(mask)
    return (_of_functions if functions else _of_texts)(score, mask, captured, dtype)


def _of_texts(score, mask, captured, dtype):
    tracing = Tracing(dtype, captured)
    for what, given in (("score", score), ("mask", mask)):
        if given is not None and not isinstance(given, str):
            raise TypeError(f"{what} has type {type(given).__name__}, must be a function or an expression as text")
    return tracing.program(score, mask)


@torch.compiler.disable  # a graph holds the operator; what leads there is run where the graph is entered
def _of_functions(score, mask, captured, dtype):
    tracing = Tracing(dtype, captured)
    results = {"score": score, "mask": mask}
    for what, given in results.items():
        if callable(given):
            names = INPUTS if what == "score" else [name for name in INPUTS if name != "score"]
            inputs = dict(zip(names, tracing.inputs(*names)))
            results[what] = tracing.trace(what, call_by_names, what, given, inputs, captured or {})
        elif given is not None and not isinstance(given, str):
            raise TypeError(f"{what} has type {type(given).__name__}, must be a function or an expression as text")
    return tracing.program(**results)
