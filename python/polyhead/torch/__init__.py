"""polyhead on torch tensors, with gradients: `attention`, `merge` and the blocks of a transformer as torch operators.

    import torch, polyhead.torch
    query = key = value = torch.rand(1, 384, 16, 64, requires_grad=True)
    polyhead.torch.attention(query, key, value).sum().backward()

Importing registers the operators `torch.ops.polyhead.*`, and adds their schemas to the key of torch's caches of compiled
graphs; nothing else of torch's own changes.
"""

import torch

if torch.__version__ < (2, 9):
    raise ImportError(f"torch is {torch.__version__}, polyhead.torch is tested with 2.13 and cannot work before 2.9")

from polyhead.torch import attn_bias
from polyhead.torch._attention import attention, attention_backward, merge
from polyhead.torch._cache_step import CacheStep
from polyhead.torch._convert import Swap, Swaps, convert, revert
from polyhead.torch._encoder_layer import TransformerEncoderLayer
from polyhead.torch._export_training import export_training
from polyhead.torch._flash_attn import (
    flash_attn_func, flash_attn_kvpacked_func, flash_attn_qkvpacked_func, flash_attn_varlen_func,
    flash_attn_varlen_kvpacked_func, flash_attn_varlen_qkvpacked_func,
)  # fmt: skip
from polyhead.torch._flex_attention import flex_attention
from polyhead.torch._flash_kvcache import flash_attn_with_kvcache
from polyhead.torch._fused_multi_head_attention import FusedMultiHeadAttention
from polyhead.torch._graph_fuse import ModuleFusion, fuse
from polyhead.torch._memory_efficient import (
    memory_efficient_attention, memory_efficient_attention_backward, memory_efficient_attention_forward,
    memory_efficient_attention_forward_requires_grad, memory_efficient_attention_partial, merge_attentions,
)  # fmt: skip
from polyhead.torch._multihead_attention import MultiheadAttention
from polyhead.torch._ops import implementation
from polyhead.torch._report import Record, Report, report
from polyhead.torch._rope import Rope
from polyhead.torch._sdpa import scaled_dot_product_attention
from polyhead.torch._switch import disable, enable, enabled
from polyhead.torch._transformers import register_transformers
from polyhead.torch.attn_bias import *  # noqa: F403


def __getattr__(name):
    if name == "Cache":  # not before it is asked for: it imports transformers
        from polyhead.torch._cache import Cache

        return Cache
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__all__ = [
    "CacheStep", "FusedMultiHeadAttention", "ModuleFusion", "MultiheadAttention", "Record", "Report", "Rope", "Swap", "Swaps",
    "TransformerEncoderLayer", "attention",
    "attention_backward", "attn_bias", "convert", "disable", "enable", "enabled", "export_training",
    "flash_attn_func",
    "flash_attn_kvpacked_func", "flash_attn_qkvpacked_func", "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func", "flash_attn_varlen_qkvpacked_func", "flash_attn_with_kvcache", "flex_attention",
    "fuse", "implementation",
    "memory_efficient_attention", "memory_efficient_attention_backward", "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad", "memory_efficient_attention_partial", "merge",
    "merge_attentions", "register_transformers", "report", "revert", "scaled_dot_product_attention", *attn_bias.__all__,
]  # fmt: skip
