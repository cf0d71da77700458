"""score, mask and captured of a call, made into the program's text and its tensors."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np

from polyhead import _bind
from polyhead._program import INPUTS, CapturedTensor, Tracer, kind_of


def call_by_names(what: str, function: Callable[..., Any], inputs: Mapping[str, Any], captured: Mapping[str, Any]) -> Any:
    """The result of calling `function` with the values of its parameters, by their names."""
    arguments: dict[str, Any] = {}
    for name, parameter in inspect.signature(function).parameters.items():
        if name in inputs:
            arguments[name] = inputs[name]
        elif name in captured:
            arguments[name] = captured[name]
        elif parameter.default is parameter.empty:
            raise _bind.Error(
                f"{what} takes a parameter {name}, which is neither one of {', '.join(inputs)} nor in captured"
            )
    try:
        result = function(**arguments)
    except IndexError as error:
        if "arrays used as indices" not in str(error):
            raise
        raise TypeError(
            f"{what} indexes an array that it closes over by a value: pass it in captured, as a parameter"
        ) from error
    if isinstance(result, CapturedTensor):
        raise TypeError(f"{what} returns {result.name}, must return a value: an element is {result.name}[h]")
    if result is None:
        raise TypeError(f"{what} returns None, must return a value")
    return result


def _dtype_and_ndim(array: Any) -> tuple[Any, int]:
    """(None, 0) of what is no array."""
    dtype = getattr(array, "dtype", None)
    if dtype is not None:
        return dtype, len(array.shape)
    interface = getattr(array, "__cuda_array_interface__", None)
    return (None, 0) if interface is None else (np.dtype(interface["typestr"]), len(interface["shape"]))


def program_arguments(
    score: Any, mask: Any, captured: Mapping[str, Any] | None
) -> tuple[str | None, dict[str, Any] | None]:
    """Of `polyhead.attention`'s score, mask and captured: the program's text, None without one, and its tensors."""
    if captured is not None and not isinstance(captured, Mapping):
        raise TypeError(f"captured has type {type(captured).__name__}, must be a dict of arrays by name")
    if score is None and mask is None:
        if captured:
            raise _bind.Error("captured is given without score or mask, which could read it")
        return None, None
    tracer = Tracer()
    tensors: dict[str, Any] = {}
    for name, array in (captured or {}).items():
        dtype, ndim = _dtype_and_ndim(array)
        kind = kind_of(dtype)
        if kind is None:
            came = f"type {type(array).__name__}" if dtype is None else f"dtype {dtype}"
            takes = "an array of float32, bfloat16, float16, float64, int32, int64 or bool"
            raise _bind.Error(f"captured[{name!r}] has {came}, must be {takes}")
        tensors[name] = tracer.capture(name, kind, ndim)
    inputs = {name: getattr(tracer, name) for name in INPUTS}
    results = {"score": score, "mask": mask}
    for what, given in results.items():
        if callable(given):
            own = inputs if what == "score" else {name: value for name, value in inputs.items() if name != "score"}
            results[what] = call_by_names(what, given, own, tensors)
        elif given is not None and not isinstance(given, str):
            raise TypeError(f"{what} has type {type(given).__name__}, must be a function or an expression as text")
    return tracer.text(**results), dict(captured or {})

