"""Attention sinks in Hugging Face transformers' "flex_attention", which refuses them on the CPU: the switch takes them."""

import sys

import torch
from torch.nn.attention.flex_attention import BlockMask

from polyhead.torch import _flex_attention

_NAME = "flex_attention"


class Installed:
    """transformers' function of this name leads to ours, where sinks are given on the CPU, until end()."""

    def __init__(self):
        self._interface = None
        if "transformers" not in sys.modules:
            return
        try:
            from transformers import AttentionInterface
        except ImportError:  # an old one, which has not this interface
            return
        if _NAME not in AttentionInterface():
            return
        self._interface, self._theirs = AttentionInterface, AttentionInterface()[_NAME]
        AttentionInterface.register(_NAME, self._forward)

    def end(self):
        if self._interface is not None and self._interface()[_NAME] == self._forward:
            self._interface.register(_NAME, self._theirs)

    def _forward(self, module, query, key, value, attention_mask, *arguments, s_aux=None, **options):
        if s_aux is None or query.device.type != "cpu" or options.get("dropout") or arguments:
            return self._theirs(module, query, key, value, attention_mask, *arguments, s_aux=s_aux, **options)
        return _forward(query, key, value, attention_mask, s_aux, **options)


def _forward(query, key, value, attention_mask, s_aux, scaling=None, softcap=None, position_bias=None, **_):
    """As transformers' flex_attention_forward: query [B, H, Sq, D]; returns out [B, Sq, H, Dv], and None."""
    blocks = attention_mask if isinstance(attention_mask, BlockMask) else None
    added = None if blocks is not None else attention_mask  # [B, 1, Sq, Sk or more]

    def score_mod(score, b, h, q, k):
        if softcap is not None:
            score = softcap * torch.tanh(score / softcap)
        if added is not None:
            score = score + added[b, 0, q, k]
        return score if position_bias is None else score + position_bias[b, h, q, k]

    changed = softcap is not None or added is not None or position_bias is not None
    out = _flex_attention.flex_attention_with_sinks(
        query, key, value, score_mod if changed else None, blocks, scaling, s_aux
    )
    return out.transpose(1, 2).contiguous(), None
