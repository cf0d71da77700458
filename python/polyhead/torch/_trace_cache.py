"""Programs of functions that were traced before: tracing takes 0.1 to 0.5 ms, finding one again a tenth of that.

A trace is kept for a function only where all that it can depend on is known: its code says nothing but operations that
programs have, and what it closes over and reads of its module's globals are numbers, tensors, or functions of which that
is true as well. All this is looked at anew in each call, so that a changed variable is another key; of tensors the identity
counts, for what they hold is read when the program runs. Anything else is traced each time.
"""

import builtins
import collections
import dis
import functools
import math
import types
import weakref

import torch
from torch import Tensor

from polyhead.torch._tracing_rules import RULES

_MOST = 64  # programs
_NUMBERS = (bool, int, float, str, type(None), torch.dtype)
_TENSORS = (Tensor, torch.nn.Parameter)
_MODULES = {"torch": torch, "math": math, "F": torch.nn.functional}
# Names that code may use besides those of programs' operations: they read nothing that could change unseen.
_PURE_NAMES = frozenset(
    {"shape", "dtype", "device", "ndim", "dim", "numel", "size", "nn", "functional", "special", "inf", "pi", "e", "nan"}
    | {"tensor", "scalar_tensor", "new_zeros", "new_ones", "new_full", "new_tensor", "zeros", "ones", "full", "cpu"}
    | {name for name in dir(math) if not name.startswith("_")}
    | {name for name in dir(torch) if isinstance(getattr(torch, name), torch.dtype)}
)
_PURE_BUILTINS = frozenset({"abs", "min", "max", "float", "int", "bool", "len", "range", "enumerate", "zip", "tuple", "list"})
_WRITES = ("STORE_GLOBAL", "STORE_ATTR", "STORE_DEREF", "STORE_NAME", "DELETE_DEREF", "DELETE_GLOBAL", "DELETE_ATTR")
_ALIEN = ("IMPORT_NAME", "IMPORT_FROM", "STORE_SUBSCR", "DELETE_SUBSCR", "YIELD_VALUE", "GET_AWAITABLE", "SEND")


class _Unknown(Exception):
    """Something a trace might depend on, and no key can tell."""


@functools.lru_cache(maxsize=1024)
def _globals_of(code):
    """The globals that code reads, or None where it does what cannot be followed. Cells of its own may be written."""
    own, names = set(code.co_cellvars), []
    for instruction in dis.get_instructions(code):
        if instruction.opname in _ALIEN or (instruction.opname in _WRITES and instruction.argval not in own):
            return None
        if instruction.opname == "LOAD_GLOBAL":
            names.append(instruction.argval)
        elif instruction.opname in ("LOAD_ATTR", "LOAD_METHOD") and not _is_pure(instruction.argval):
            return None
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            inner = _globals_of(constant)
            if inner is None:
                return None
            names.extend(inner)
    return tuple(dict.fromkeys(names))


def _is_pure(name):
    return name in RULES or name in _PURE_NAMES


class _State:
    """The key of some functions and values, and the tensors in it, in order."""

    def __init__(self):
        self.tensors = []
        self._functions = []  # under way: functions may name each other

    def of(self, value):
        kind = type(value)
        if kind in _NUMBERS:
            return (kind, repr(value) if kind is float else value)  # 0.0 is not -0.0, and nan is itself
        if kind in _TENSORS:
            self.tensors.append(value)
            return ("tensor", id(value), value.dtype, tuple(value.shape), value.requires_grad)
        if kind is types.FunctionType:
            return self._of_function(value)
        if kind in (tuple, list):
            return (kind, *map(self.of, value))
        if kind is dict:
            return (dict, *((self.of(name), self.of(each)) for name, each in value.items()))
        if kind is functools.partial:
            return (kind, self.of(value.func), self.of(value.args), self.of(value.keywords))
        if kind is torch.Size:
            return tuple(value)
        raise _Unknown

    def _of_function(self, function):
        if function in self._functions:
            return ("again", self._functions.index(function))
        names = _globals_of(function.__code__)
        if names is None or function.__dict__:
            raise _Unknown
        self._functions.append(function)
        return (
            function.__code__,
            tuple(self._of_cell(cell) for cell in function.__closure__ or ()),
            self.of(function.__defaults__),
            self.of(function.__kwdefaults__),
            tuple(self._of_global(function, name) for name in names),
        )

    def _of_cell(self, cell):
        try:
            return self.of(cell.cell_contents)
        except ValueError:  # nothing in it yet
            raise _Unknown from None

    def _of_global(self, function, name):
        if name not in function.__globals__:
            if name in _PURE_BUILTINS and function.__globals__.get("__builtins__") in (builtins, vars(builtins)):
                return name
            raise _Unknown
        value = function.__globals__[name]
        if isinstance(value, types.ModuleType):
            if all(value is not module for module in _MODULES.values()):
                raise _Unknown
            return value
        if isinstance(value, types.BuiltinFunctionType) and _is_pure(value.__name__):
            return value
        return self.of(value)


_programs: collections.OrderedDict = collections.OrderedDict()


def traced(functions, make):
    """What make() gives for these functions and values: a tuple of `Traced`, and whether it may be kept.

    make: traces them, and nothing else that could change.
    """
    state = _State()
    try:
        key = state.of(functions)
    except _Unknown:
        key = None
    if key is None:
        return make()[0]
    known = _programs.get(key)
    if known is not None:
        programs, references = known
        if all(reference() is tensor for reference, tensor in zip(references, state.tensors)):
            return tuple(each._replace(tensors=tuple(state.tensors[i] for i in each.tensors)) for each in programs)
    results, may_be_kept = make()
    places = {id(tensor): i for i, tensor in enumerate(state.tensors)}
    if may_be_kept and all(id(tensor) in places for each in results for tensor in each.tensors):
        kept = tuple(each._replace(tensors=tuple(places[id(tensor)] for tensor in each.tensors)) for each in results)
        _programs[key] = kept, tuple(map(weakref.ref, state.tensors))
        while len(_programs) > _MOST:
            _programs.popitem(last=False)
    return results
