"""Attention for transformers' continuous batching: packed sequences, and keys in the pages of its cache."""

import functools
import inspect

import torch

from polyhead.torch._attention import attention
from polyhead.torch._flash_attn import flash_attn_func, flash_attn_varlen_func
from polyhead.torch._flash_kvcache import flash_attn_with_kvcache

NAME = "polyhead_flash"  # what has "flash" in its name gets no matrix of a mask, and lengths instead


def tell_transformers():
    """What transformers must know of NAME beside its attention."""
    _give_functions()
    _keep_pages()


def _give_functions():
    """It looks for the functions of what has "flash" in its name in packages: those of NAME are here."""
    from transformers import modeling_flash_attention_utils as utils

    theirs = utils._lazy_imports
    if getattr(theirs, "knows", None) == NAME:
        return

    @functools.wraps(theirs)
    def lazy_imports(implementation, *arguments, **options):
        if implementation != NAME:
            return theirs(implementation, *arguments, **options)
        return (
            flash_attn_func, flash_attn_varlen_func, flash_attn_with_kvcache, utils._pad_input, utils._unpad_input
        )  # fmt: skip

    lazy_imports.knows = NAME
    utils._lazy_imports = lazy_imports


def _keep_pages():
    """From transformers 5.24 on a model's modules ask its cache for keys before attention, which copies all of them.

    Of NAME the cache hands itself on instead, and attention reads the pages where they lie.
    """
    from transformers.generation.continuous_batching.cache import PagedAttentionCache

    theirs = PagedAttentionCache.update
    if getattr(theirs, "knows", None) == NAME or "kwargs" not in inspect.signature(theirs).parameters:
        return  # before 5.23 it is not asked like this

    @functools.wraps(theirs)
    def update(self, key_states, value_states, layer_idx, kwargs):
        if self.config._attn_implementation != NAME:
            return theirs(self, key_states, value_states, layer_idx, kwargs)
        kwargs["cache"] = self
        return key_states, value_states

    update.knows = NAME
    PagedAttentionCache.update = update


def paged(layer, query, key, value, cache, cu_seq_lens_q, cu_seq_lens_k, read_index, write_index, options):
    """Out [1, total_q, H, Dv] of new tokens [1, H or G, total_q, D], which are written into the cache.

    Indices are rows of the cache: where each new token goes, and where all tokens of each sequence lie; none of the
    latter where no sequence has a past. The dict of lengths and the lists have an entry for each kind of layer.
    """
    if not hasattr(cache, "layer_to_allocator"):
        raise NotImplementedError(f"cache is a {type(cache).__name__}, must be the one that generate_batch makes")
    allocator = cache.layer_to_allocator[layer]
    query, key, value = (x[0].transpose(0, 1) for x in (query, key, value))  # [total_q, ...]
    read_index, write_index = read_index[allocator.index], write_index[allocator.index]
    cu_seqlens_k = cu_seq_lens_k[allocator.layer_type]
    options = options | {"causal": True, "align": "bottom_right", "cu_seqlens_q": cu_seq_lens_q}
    if read_index.numel() and allocator.supports_block_table:
        allocator.update(key, value, layer, read_index[:0], write_index)  # writes: all is read where it lies
        key, value = allocator.get_cache_for_block_table(layer)  # [pages, page size, G, D]
        options["page_table"] = _page_table(read_index, cu_seqlens_k, key.shape[1])
        options["seqlens_k"] = cu_seqlens_k.diff()
    else:
        key, value = allocator.update(key, value, layer, read_index, write_index)
        options["cu_seqlens_k"] = cu_seqlens_k
    return attention(query, key, value, **options)[None]


def _page_table(read_index, cu_seqlens_k, page_size):
    """[B, most pages of a sequence]: that of its rows 0, page_size, ...; behind stand others, which nobody reads."""
    starts, longest = cu_seqlens_k[:-1].long(), int(cu_seqlens_k.diff().max())
    rows = starts[:, None] + torch.arange(0, longest, page_size)
    return read_index[rows.clamp(max=read_index.numel() - 1)] // page_size
