"""Whether calling a submodule computes torch's own formula of its parameters, and nothing else: then it is plain.

The layers hand the parameters of plain submodules to one operator. What is not plain they call, as torch.nn does:
adapters around a submodule, classes with a forward of their own, hooks, parameters of a class of their own (quantised,
distributed). torch.nn.utils.parametrize changes what a parameter is, not the formula, so what it made of a submodule is
plain.
"""

import torch
from torch import nn
from torch.compiler import is_dynamo_compiling, is_exporting
from torch.nn.modules import module as _global

from polyhead.torch import _report

# As they were when this was imported: whoever replaces them later is called.
_CALL = nn.Module.__call__
LINEAR, LAYER_NORM, DROPOUT = nn.Linear.forward, nn.LayerNorm.forward, nn.Dropout.forward
RELU, GELU, SILU = nn.ReLU.forward, nn.GELU.forward, nn.SiLU.forward
_IDENTITY = nn.Identity.forward


def why_not_plain(name: str, module, forward) -> str | None:
    """A clause that says why calling the module is not `forward` alone, but for `hooks_of_all`; None if it is."""
    kind = type(module)
    call = nn.Module.__call__ if is_exporting() else _CALL  # torch.export has one of its own in its place
    if getattr(kind, "forward", None) is not forward or kind.__call__ is not call:
        return f"{name} is {kind.__name__}"
    if module._forward_hooks or module._forward_pre_hooks or module._backward_hooks or module._backward_pre_hooks:
        return f"{name} has hooks"
    if "forward" in module.__dict__:
        return f"{name} has a forward of its own"
    return why_not_tensors(f"{name}.", module)


def why_not_tensors(prefix: str, module) -> str | None:
    """A clause, if a parameter of the module's own is of a class that may keep its numbers elsewhere."""
    if is_exporting():  # they are traced: of classes that stand for tensors
        return None
    for name, parameter in module._parameters.items():
        if parameter is not None and type(parameter) is not nn.Parameter and type(parameter) is not torch.Tensor:
            return f"{prefix}{name} is {type(parameter).__name__}"
    return None


def why_not_dropout(name: str, module) -> str | None:
    """As why_not_plain, of a dropout, or the identity in its place."""
    return why_not_plain(name, module, _IDENTITY if type(module) is nn.Identity else DROPOUT)


def dropout_p(module) -> float:
    """Of a plain dropout, or the identity in its place: what it drops now."""
    return float(module.p) if module.training and type(module) is not nn.Identity else 0.0


def hooks_of_all() -> str | None:
    """A clause, if there are hooks that torch calls for every module."""
    if (
        _global._global_forward_hooks or _global._global_forward_pre_hooks
        or _global._global_backward_hooks or _global._global_backward_pre_hooks
    ):  # fmt: skip
        return "there are hooks of all modules"
    return None


def count_called(op: str, tokens, reason: str) -> None:
    """Counts a layer's block of which `reason` tells what is called by itself; one of a graph when it is traced."""
    shape = "compiled" if is_dynamo_compiling() else "x".join(map(str, tokens.shape))
    _count(op, shape, tokens.dtype, reason)


_count = torch.compiler.assume_constant_result(_report.count_refused)
