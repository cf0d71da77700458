"""Shapes and dtypes of the operators' results, without computing: for torch.compile, export and the meta device."""

import torch

from polyhead import Error
from polyhead.torch._options import DIFFERENTIABLE, NUM_SHARED, PLAIN_DIFFERENTIABLE, AllOptions, of_backward
from polyhead.torch._strides import new_out

_NOT_BESIDE_QUERY = ("dropout_seed", "dropout_origin")  # are on the CPU always


def _check_devices(like, **tensors):
    """A call that mixes devices may come here, where nothing is computed: of the meta device and the CPU, say."""
    for name, tensor in tensors.items():
        if isinstance(tensor, torch.Tensor) and tensor.device != like.device and name not in _NOT_BESIDE_QUERY:
            raise Error(f"{name} is on {tensor.device}, must be on {like.device} as the rest")


def _sums_dtype(query):
    return torch.float64 if query.dtype == torch.float64 else torch.float32


def _check(query, key, value, o, **others):
    """Only what asks nothing of sizes: those may be known at run time alone, where the kernel checks them."""
    dims = 3 if o.packed else 4
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if tensor.dim() != dims:
            raise Error(f"{name} has {tensor.dim()} dimensions, must have {dims}")
        if tensor.dtype != query.dtype:
            raise Error(f"{name} is {tensor.dtype}, must be {query.dtype} as query")
    _check_devices(query, key=key, value=value, **o._asdict(), **others)


def attention_forward(query, key, value, *options):
    o = AllOptions(*options)
    _check(query, key, value, o)
    sums = _sums_dtype(query)
    out_dtype = torch.float32 if o.out_float32 else query.dtype
    out = query.new_empty((*query.shape[:-1], value.shape[-1]), dtype=out_dtype)
    if o.packed:
        return out, _logsumexp(o, query, (query.shape[1], query.shape[0])), None, None
    batch, seqlen_q, num_heads, _ = query.shape
    seqlen_k = key.shape[1]
    weights = column_sums = None
    if o.return_weights == 1:
        weights = query.new_empty((batch, num_heads, seqlen_q, seqlen_k))
    elif o.return_weights == 2:
        weights = query.new_empty((batch, seqlen_q, seqlen_k))
    if o.return_column_sums:
        column_sums = query.new_empty((batch, num_heads, seqlen_k), dtype=sums)
    return out, _logsumexp(o, query, (batch, num_heads, seqlen_q)), weights, column_sums


def _logsumexp(o, query, shape):
    if o.normalizer:
        return query.new_empty(0, dtype=torch.float32)  # there is none
    return query.new_empty(shape, dtype=_sums_dtype(query))


def attention_backward(grad_out, grad_logsumexp, query, key, value, out, logsumexp, needs, *options):
    o = of_backward(options)
    _check(
        query, key, value, o, grad_out=grad_out, grad_logsumexp=grad_logsumexp, out=out, logsumexp=logsumexp
    )  # fmt: skip
    names = DIFFERENTIABLE if len(options) > NUM_SHARED else PLAIN_DIFFERENTIABLE
    inputs = (query, key, value, *(getattr(o, name) for name in names[3:]))
    return tuple(each.new_empty(each.shape) if needs >> bit & 1 else None for bit, each in enumerate(inputs))


attention_forward_program, attention_backward_program = attention_forward, attention_backward


def attention_forward_cached(query, key, value, *options):
    *options, page_table, _, _ = options
    o = AllOptions(*options)
    if value.dtype == torch.uint8:  # pairs of int4
        value = value.new_empty((*value.shape[:-1], 2 * value.shape[-1]))
    key, value = (x.new_empty(x.shape, dtype=query.dtype) for x in (key, value))
    if page_table is None:
        return attention_forward(query, key, value, *options)
    sequences = key.new_empty((page_table.shape[0], page_table.shape[1] * key.shape[1], *key.shape[2:]))
    values = value.new_empty((*sequences.shape[:-1], value.shape[-1]))
    if not o.packed:
        return attention_forward(query, sequences, values, *options)
    return attention_forward(query, sequences.flatten(0, 1), values.flatten(0, 1), *options)


def attention_forward_below_autograd(query, key, value, causal, scale, align, layout):
    if not layout:
        return attention_forward(query, key, value)[:2]
    _, logsumexp, _, _ = attention_forward(*(x.transpose(1, 2) for x in (query, key, value)))
    return new_out(query, key, value), logsumexp


def attention_forward_inference(query, key, value, causal, scale, align, layout):
    return attention_forward_below_autograd(query, key, value, causal, scale, align, layout)[0]


def attention_backward_below_autograd(
    grad_out, query, key, value, out, logsumexp, needs, causal, scale, align, layout
):  # fmt: skip
    if not layout:
        return attention_backward(grad_out, None, query, key, value, out, logsumexp, needs)[:3]
    grad_out, query, key, value, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = attention_backward(grad_out, None, query, key, value, out, logsumexp, needs)[:3]
    return tuple(None if grad is None else grad.transpose(1, 2) for grad in grads)


def _check_parts(outs, logsumexps):
    for name, parts in (("outs", outs), ("logsumexps", logsumexps)):
        _check_devices(outs[0], **{f"{name}[{i}]": each for i, each in enumerate(parts)})


def merge_forward(outs, logsumexps):
    _check_parts(outs, logsumexps)
    return outs[0].new_empty(outs[0].shape), logsumexps[0].new_empty(logsumexps[0].shape)


def merge_backward(grad_out, grad_logsumexp, outs, logsumexps, out, logsumexp):
    _check_parts(outs, logsumexps)
    _check_devices(outs[0], grad_out=grad_out, grad_logsumexp=grad_logsumexp, out=out, logsumexp=logsumexp)
    return [each.new_empty(each.shape) for each in outs], [each.new_empty(each.shape) for each in logsumexps]


def dropout_mask(seed, dropout_p, dropout_offset, batch, num_heads, seqlen_q, seqlen_k, dropout_origin=None):
    return seed.new_empty((batch, num_heads, seqlen_q, seqlen_k), dtype=torch.bool)
