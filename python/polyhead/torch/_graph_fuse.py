"""Attention written out in torch modules, found as in ONNX graphs and replaced before autograd: `polyhead.torch.fuse`."""

from __future__ import annotations

import threading
from dataclasses import dataclass, field
from typing import Any

import torch

import polyhead
from polyhead.torch._attention import attention


@dataclass(frozen=True)
class Candidate:
    """A softmax that a module called, or what amounts to one, and what became of it."""

    place: str  #: the line that calls it, or the node's name in the graph
    is_attention: bool  #: False: nothing that looks like attention is around it
    fused: bool
    pattern: str  #: in words
    reason: str  #: of one that stays: the first condition that failed, with the name of the node where it did


@dataclass
class ModuleFusion:
    """What `polyhead.torch.fuse` returns: the report, and the way back. The report grows when the module is called for the
    first time, and with each graph that is made for other sizes or another mode.
    """

    model: torch.nn.Module
    candidates: list[Candidate] = field(default_factory=list)
    _lock: threading.Lock = field(default_factory=threading.Lock, repr=False)

    @property
    def num_fused(self) -> int:
        """How many candidates were fused."""
        return sum(candidate.fused for candidate in self.candidates)

    def __str__(self) -> str:
        lines = [
            f"{each.place}: fused ({each.pattern})" if each.fused else f"{each.place}: stays, {each.reason}"
            for each in self.candidates
        ]
        return "\n".join([*lines, f"{self.num_fused} fused"])

    def revert(self) -> None:
        """Lets the module run as it was written."""
        self.model._compiled_call_impl = None


def fuse(model: torch.nn.Module, *, backend: Any = "eager", unseen_rows: str = "keep") -> ModuleFusion:
    """Replaces attention that a module writes out (product, scale, mask, softmax, dropout, product) by polyhead's, in place.

    The module is traced by torch's Dynamo when it is called, so what it calls may be anything that ``torch.compile`` takes, and
    is traced again for other sizes or another mode. Attention is found by the rules of `polyhead.onnx.fuse` ahead of
    autograd, so training finds it too: no weights are kept for the backward. What is not understood stays as it is, with the
    reason. Parameters, hooks and ``state_dict`` are the module's own.

    Parameters
    ----------
    model : torch.nn.Module
        On the CPU. Its ``forward`` is compiled, as by ``model.compile()``.
    backend : str or callable
        Of ``torch.compile``: what runs the graph afterwards. "eager": torch, node by node; "inductor" fuses the rest too.
    unseen_rows : str
        As of `polyhead.onnx.fuse`: of a row that a mask hides as a whole by a finite number. "keep": such masks stay where
        they may hide a whole row; "zero": it gives 0.

    Returns
    -------
    ModuleFusion
        What became of each candidate, once the module has run; ``print(fusion)`` shows it.

    Raises
    ------
    polyhead.Error
        The package onnx is not installed, in whose words graphs are compared; unseen_rows is none of the two.
    """
    try:
        import onnx  # noqa: F401
    except ImportError as error:
        raise polyhead.Error("polyhead.torch.fuse needs the package onnx: pip install onnx") from error
    if unseen_rows not in ("keep", "zero"):
        raise polyhead.Error(f'unseen_rows is "{unseen_rows}", must be "keep" or "zero"')
    fusion = ModuleFusion(model)

    def compile_graph(graph, inputs):
        fused = _fused(graph, inputs, unseen_rows, fusion)
        return torch._dynamo.lookup_backend(backend)(fused, inputs)

    model.compile(backend=compile_graph, dynamic=False)
    return fusion


def _fused(graph, inputs, unseen_rows, fusion):
    """The graph in torch's core words, its attentions replaced."""
    from torch.fx.experimental.proxy_tensor import make_fx
    from torch.fx.traceback import preserve_node_meta

    from polyhead.torch._graph_nodes import replace_attention  # needs onnx

    with preserve_node_meta():  # the lines of the module's source
        plain = make_fx(torch.fx.Interpreter(graph).run, pre_dispatch=True)(*inputs)
    found, num_fused = replace_attention(plain, inputs, unseen_rows, _attend)
    with fusion._lock:
        for place, is_attention, is_fused, words, reason in found:
            fusion.candidates.append(Candidate(place, is_attention, is_fused, words, reason))
    return plain if num_fused else graph


def _attend(
    query, key, value, mask=None, *, scale=None, is_causal=0, softcap=0.0, left_window_size=-1, right_window_size=-1, q_num_heads=0,
    kv_num_heads=0, dropout_p=0.0, softmax_precision=0, mask_broadcasts=0,
):  # fmt: skip
    """polyhead.Attention of [B, H, S, D] or [B, S, H * D]; a mask of one column is for all keys."""

    def heads(x, count):
        return x.transpose(1, 2) if x.ndim == 4 else x.unflatten(2, (count, -1))

    given = {} if mask is None else {"attn_mask" if mask.dtype == torch.bool else "attn_bias": mask}
    out = attention(
        heads(query, q_num_heads), heads(key, kv_num_heads), heads(value, kv_num_heads), scale=scale, causal=bool(is_causal),
        softcap=softcap, window=(left_window_size, right_window_size), dropout_p=dropout_p, **given,
    )  # fmt: skip
    return out.transpose(1, 2) if query.ndim == 4 else out.flatten(2)
