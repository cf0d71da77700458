"""The switch and torch's flex_attention, which users and libraries import by name: one function object, whose code changes."""

import types

import torch
from torch.autograd import forward_ad
from torch.compiler import is_dynamo_compiling
from torch.nn.attention import flex_attention as module

from polyhead.torch import _report
from polyhead.torch._aten import FORWARD_AD, NESTED
from polyhead.torch._flex_attention import flex_attention
from polyhead.torch._submodules import count_called
from polyhead.torch._tracing_rules import CannotSay

_COMPILED = "within torch.compile"
_FUNCTION = module.flex_attention
_DEFAULTS = (_FUNCTION.__defaults__, _FUNCTION.__kwdefaults__)


def _leading_here(
    query, key, value, score_mod=None, block_mask=None, scale=None, enable_gqa=False, return_lse=False,
    kernel_options=None, *, return_aux=None,
):  # fmt: skip
    from polyhead.torch._flex_switch import ours_or_torchs  # its globals are those of torch's module

    return ours_or_torchs(
        query, key, value, score_mod, block_mask, scale, enable_gqa, return_lse, kernel_options, return_aux=return_aux
    )


class Installed:
    """torch's flex_attention leads to ours until end()."""

    torchs = None  # torch's own, while it does

    def __init__(self):
        self._code = _FUNCTION.__code__
        Installed.torchs = types.FunctionType(self._code, _FUNCTION.__globals__, _FUNCTION.__name__)
        Installed.torchs.__defaults__, Installed.torchs.__kwdefaults__ = _DEFAULTS
        _FUNCTION.__code__ = _leading_here.__code__

    def end(self):
        if _FUNCTION.__code__ is _leading_here.__code__:  # else it is somebody else's by now
            _FUNCTION.__code__ = self._code


def ours_or_torchs(query, key, value, *arguments, return_aux):
    if is_dynamo_compiling():
        count_called("flex_attention", query, _COMPILED)
        return Installed.torchs(query, key, value, *arguments, return_aux=return_aux)
    return _run(query, key, value, *arguments, return_aux=return_aux)


# torch.compile(flex_attention) itself runs these two as they are, and so our kernels; within another function that is
# compiled they are traced.
for _function in (_leading_here, ours_or_torchs):
    torch._dynamo.eval_frame.skip_code(_function.__code__)


@torch.compiler.disable
def _run(query, key, value, *arguments, return_aux):
    reason = _why_not(query, key, value, return_aux)
    if reason is None:
        try:
            return flex_attention(query, key, value, *arguments, return_aux=return_aux)
        except CannotSay as error:
            reason = str(error)
    shape = "nested" if query.is_nested else _report.sdpa_shape(query, key, value)
    _report.count_refused("flex_attention", shape, query.dtype, reason)
    return Installed.torchs(query, key, value, *arguments, return_aux=return_aux)


def _why_not(query, key, value, return_aux):
    if any(x.is_nested for x in (query, key, value)):
        return NESTED
    if query.device.type != "cpu":
        return f"on {query.device}"
    if return_aux is not None and return_aux.max_scores:
        return "max_scores is asked for"
    return FORWARD_AD if forward_ad._current_level >= 0 else None
