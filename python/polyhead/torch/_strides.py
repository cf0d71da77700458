"""The strides of torch's own scaled_dot_product_attention, which ours keeps."""

import torch


def are_querys(query, key, value, attn_mask=None, dropout_p=0.0) -> bool:
    """Whether out has those of empty_like(query), as from torch's flash kernel; from its formula out is contiguous."""
    tensors = (query, key, value)
    if dropout_p or any(x.dim() != 4 or x.stride(-1) != 1 for x in tensors):
        return False
    if attn_mask is not None and (attn_mask.dim() not in (2, 4) or attn_mask.requires_grad):
        return False
    if any(type(size) is int and size == 0 for x in tensors for size in x.shape):  # others have 1 at least, we assume
        return False
    return query.shape[-1] == value.shape[-1] and query.shape[0] == key.shape[0] == value.shape[0]


def new_out(query, key, value):
    """A tensor for out of [B, H, S, D] tensors, not filled."""
    if are_querys(query, key, value):
        return torch.empty_like(query)
    return query.new_empty((*query.shape[:-1], value.shape[-1]))
