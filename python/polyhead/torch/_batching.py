"""torch.vmap of the operators: the mapped dimension becomes part of the batch, or the calls are made one by one."""

import torch

from polyhead.torch._options import NUM_SHARED, OPTIONS_OF_GRADIENTS, PROGRAM, AllOptions, of_backward


def _one_by_one(operator, info, in_dims, arguments):
    calls = [
        operator(*(a if dim is None else a.select(dim, i) for a, dim in zip(arguments, in_dims)))
        for i in range(info.batch_size)
    ]
    results = tuple(None if parts[0] is None else torch.stack(parts) for parts in zip(*calls))
    return results, tuple(None if each is None else 0 for each in results)


def _stacked(tensor, dim, size):
    """[size, ...], repeated where it is not mapped."""
    return tensor.unsqueeze(0).expand(size, *tensor.shape) if dim is None else tensor.movedim(dim, 0)


def _folded(tensor, dim, size):
    """[B, ...] of each call as [size * B, ...]."""
    return None if tensor is None else _stacked(tensor, dim, size).flatten(0, 1)


def _folded_scores(tensor, dim, size, batch):
    """attn_bias or attn_mask: broadcast over the batch it stays as it is, where it is not mapped."""
    if tensor is None:
        return None
    dims = tensor.dim() - (dim is not None)
    if dim is None and (dims < 4 or tensor.shape[0] == 1):
        return tensor
    stacked = _stacked(tensor, dim, size)
    stacked = stacked.reshape(size, *[1] * (4 - dims), *stacked.shape[1:])
    return stacked.expand(size, batch, *stacked.shape[2:]).flatten(0, 1)


def _folded_slopes(tensor, dim, size, batch):
    if tensor is None or (dim is None and tensor.dim() == 1):
        return tensor
    stacked = _stacked(tensor, dim, size)
    if stacked.dim() == 2:
        stacked = stacked.unsqueeze(1)
    return stacked.expand(size, batch, stacked.shape[-1]).flatten(0, 1)


def _maps_sinks(option_dims):
    """Sinks are those of heads alone: they cannot become part of the batch."""
    place = OPTIONS_OF_GRADIENTS[-1]
    return len(option_dims) > place and option_dims[place] is not None


def _folded_options(options, in_dims, size, batch):
    o, dims = AllOptions(*options), AllOptions(*in_dims, *[None] * (len(AllOptions._fields) - len(in_dims)))
    return o._replace(
        attn_bias=_folded_scores(o.attn_bias, dims.attn_bias, size, batch),
        attn_mask=_folded_scores(o.attn_mask, dims.attn_mask, size, batch),
        alibi_slopes=_folded_slopes(o.alibi_slopes, dims.alibi_slopes, size, batch),
        query_offsets=_folded(o.query_offsets, dims.query_offsets, size),
        seqlens_q=_folded(o.seqlens_q, dims.seqlens_q, size),
        seqlens_k=_folded(o.seqlens_k, dims.seqlens_k, size),
    )[: len(options)]


def _unfolded(results, size):
    """Each [size * B, ...] as [size, B, ...]."""
    results = tuple(None if each is None else each.unflatten(0, (size, each.shape[0] // size)) for each in results)
    return results, tuple(None if each is None else 0 for each in results)


def attention_forward(info, in_dims, query, key, value, *options):
    o = AllOptions(*options)
    overloads = torch.ops.polyhead.attention_forward
    operator = overloads.program if len(options) > PROGRAM else overloads.default
    if o.packed or o.dropout_p or o.program or _maps_sinks(in_dims[3:]):  # dropout's mask, a program: functions of the place in the batch
        return _one_by_one(operator, info, in_dims, (query, key, value, *options))
    size = info.batch_size
    operands = [_folded(each, dim, size) for each, dim in zip((query, key, value), in_dims)]
    batch = operands[0].shape[0] // size
    return _unfolded(operator(*operands, *_folded_options(options, in_dims[3:], size, batch)), size)


def attention_backward(info, in_dims, *arguments):
    (*_, needs), options = arguments[:8], arguments[8:]
    o = of_backward(options)
    overloads = torch.ops.polyhead.attention_backward
    operator = overloads.program if len(options) > NUM_SHARED else overloads.default
    if o.packed or o.dropout_p or o.program or needs >> 3 or _maps_sinks(in_dims[8:]):  # a bias's gradient is summed over the batch
        return _one_by_one(operator, info, in_dims, arguments)
    size = info.batch_size
    operands = [_folded(each, dim, size) for each, dim in zip(arguments[:7], in_dims)]
    batch = operands[0].shape[0] // size
    return _unfolded(operator(*operands, needs, *_folded_options(options, in_dims[8:], size, batch)), size)
