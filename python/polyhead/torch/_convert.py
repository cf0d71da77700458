"""Modules of torch.nn made ours where they stand, and back."""

from typing import NamedTuple, Optional

import torch.nn.functional as F
from torch import nn
from torch.nn.utils import parametrize

from polyhead.torch._encoder_layer import TransformerEncoderLayer
from polyhead.torch._multihead_attention import MultiheadAttention

# torch's class -> ours, which has all its attributes and these besides.
_OURS = {
    nn.MultiheadAttention: (MultiheadAttention, lambda module: {"num_heads_kv": module.num_heads, "rope": None}),
    nn.TransformerEncoderLayer: (TransformerEncoderLayer, lambda module: {}),
}
_THEIRS = {ours: theirs for theirs, (ours, _) in _OURS.items()}


class Swap(NamedTuple):
    """What became of one module.

    Attributes
    ----------
    name : str
        As `torch.nn.Module.named_modules` has it; "" is the model itself.
    before, after : str
        Its class; the same if it was left alone.
    reason : str or None
        Why it was left alone; None: it was not.
    """

    name: str
    before: str
    after: str
    reason: Optional[str]


class Swaps(list):
    """A list of `Swap`, printed as a table."""

    def __repr__(self) -> str:
        if not self:
            return "polyhead.torch: no module of torch.nn's attention in this model"
        rows = [
            (swap.name or "(model)", f"{swap.before} -> {swap.after}" if swap.reason is None else swap.before,
             "" if swap.reason is None else f"left alone: {swap.reason}")
            for swap in self
        ]  # fmt: skip
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    __str__ = __repr__


def convert(model: nn.Module) -> Swaps:
    """Makes every torch.nn.MultiheadAttention and TransformerEncoderLayer of a model polyhead's, where it stands.

    The modules stay the objects that they are, with their parameters, hooks and mode; only their class changes. So
    optimizers, state_dicts and references to them stay good. Beside `enable`, which takes over all of the process: this
    is one model, and whole blocks at once, projections, norm and feed-forward network included.

    Parameters
    ----------
    model : torch.nn.Module
        May itself be such a module.

    Returns
    -------
    Swaps
        What was done to which module, and which were left alone and why: subclasses (their methods may differ), those
        whose own parameters are parametrized or that live on another device than the CPU. Print it.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> model = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 2), 1, enable_nested_tensor=False)
    >>> polyhead.torch.convert(model)
    layers.0            torch.nn.TransformerEncoderLayer -> polyhead.torch.TransformerEncoderLayer
    layers.0.self_attn  torch.nn.MultiheadAttention -> polyhead.torch.MultiheadAttention
    >>> _ = polyhead.torch.revert(model)
    >>> type(model.layers[0].self_attn)
    <class 'torch.nn.modules.activation.MultiheadAttention'>
    """
    swaps = Swaps()
    for name, module in model.named_modules():
        theirs = next((each for each in _OURS if isinstance(module, each)), None)
        if theirs is None:
            continue
        reason = _why_not(module, theirs)
        if reason is None and theirs is nn.TransformerEncoderLayer:
            attention = _why_not(module.self_attn, nn.MultiheadAttention)
            reason = attention and f"its self_attn: {attention}"
        if reason is not None:
            swaps.append(Swap(name, _name(type(module)), _name(type(module)), reason))
            continue
        ours, added = _OURS[theirs]
        for attribute, value in added(module).items():
            setattr(module, attribute, value)
        module.__class__ = ours
        swaps.append(Swap(name, _name(theirs), _name(ours), None))
    return swaps


def revert(model: nn.Module) -> Swaps:
    """Makes what `convert` made polyhead's torch's again; other modules of polyhead's are left alone.

    Parameters
    ----------
    model : torch.nn.Module

    Returns
    -------
    Swaps
        What was done to which module; and modules of ours that torch's class cannot be: with fewer key/value heads, a
        head_dim of their own, or rope.
    """
    swaps = Swaps()
    for name, module in model.named_modules():
        theirs = _THEIRS.get(type(module))
        if theirs is None:
            continue
        ours, added = _OURS[theirs]
        has = {key: (getattr(module, key), value) for key, value in added(module).items()}
        more = [f"{key} is {mine}" for key, (mine, torchs) in has.items() if mine != torchs]
        if theirs is nn.MultiheadAttention and module.num_heads * module.head_dim != module.embed_dim:
            more.append(f"head_dim is {module.head_dim}")
        if more:
            swaps.append(Swap(name, _name(ours), _name(ours), f"torch's has no such thing: {', '.join(more)}"))
            continue
        for attribute in added(module):
            delattr(module, attribute)
        module.__class__ = theirs
        if theirs is nn.TransformerEncoderLayer:
            _restore_activation_kind(module)
        swaps.append(Swap(name, _name(ours), _name(theirs), None))
    return swaps


def _why_not(module, theirs):
    if type(module) is not theirs:
        if parametrize.is_parametrized(module):
            return "its parameters are parametrized"
        return f"it is {_name(type(module))}, not {_name(theirs)} itself"
    device = next((each.device for each in module.parameters() if each.device.type != "cpu"), None)
    return None if device is None else f"it is on {device}, and layers are converted on the CPU alone"


def _restore_activation_kind(module):
    """What torch's layer keeps for its fast path: 1 for relu, 2 for gelu, else 0."""
    if not hasattr(module, "activation_relu_or_gelu"):
        activation = module.activation
        is_relu = activation is F.relu or isinstance(activation, nn.ReLU)
        is_gelu = activation is F.gelu or isinstance(activation, nn.GELU)
        module.activation_relu_or_gelu = 1 if is_relu else 2 if is_gelu else 0


def _name(kind):
    module = "torch.nn" if kind.__module__.startswith("torch.nn.modules.") else kind.__module__
    if module.startswith("polyhead.torch."):
        module = "polyhead.torch"
    return f"{module}.{kind.__qualname__}"
