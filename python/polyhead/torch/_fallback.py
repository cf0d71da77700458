"""The operators' CPU kernels in Python, over the binding: where the C++ ones (python/torch_ops) are not there."""

import torch

import polyhead
from polyhead import _bind
from polyhead.torch import _report
from polyhead.torch._options import (
    ALIGNS, DIFFERENTIABLE, NORMALIZERS, NUM_SHARED, PLAIN_DIFFERENTIABLE, PROGRAM, WEIGHTS, AllOptions, captures_of,
    of_backward,
)  # fmt: skip
from polyhead.torch._program_formula import captures_named
from polyhead.torch._strides import new_out


def _shared(query, key, value, o):
    window = None if (o.window_left, o.window_right) == (-1, -1) else (o.window_left, o.window_right)
    origin = None if o.dropout_origin is None else o.dropout_origin.tolist()
    seed = None if o.dropout_seed is None else o.dropout_seed.item() & (2**64 - 1)
    return (
        query, key, value, o.attn_bias, o.attn_mask, o.causal, window, ALIGNS[o.align],
        o.query_offset if o.query_offsets is None else o.query_offsets, o.scale, o.softcap, o.alibi_slopes,
        o.dropout_p, seed, o.dropout_offset, origin, o.seqlens_q, o.seqlens_k, o.cu_seqlens_q, o.cu_seqlens_k,
        o.kernel_name, None, None, o.program, dict(zip(_names(o), captures_of(o))), o.sink_logits,
        NORMALIZERS[o.normalizer], o.sink_keys, o.mask_at_end,
    )  # fmt: skip


def _names(o):
    """Of what the program captures, in its order."""
    return captures_named(o.program) if o.program is not None else ()


def attention_forward(query, key, value, *options, cache=(None, None, None)):
    o = AllOptions(*options)
    softmax = o.normalizer == 0
    results = _bind.attention(
        *_shared(query, key, value, o), softmax, WEIGHTS[o.return_weights], o.return_column_sums,
        "float32" if o.out_float32 else None, None, *cache,
    )  # fmt: skip
    results = results if isinstance(results, tuple) else (results,)
    out, logsumexp, *asked = results if softmax else (results[0], query.new_empty(0, dtype=torch.float32), *results[1:])
    _report.count_run("attention_forward", query, key, value, o.kernel_name)
    weights = asked.pop(0) if o.return_weights else None
    column_sums = asked.pop(0) if o.return_column_sums else None
    return out, logsumexp, weights, column_sums


def attention_backward(grad_out, grad_logsumexp, query, key, value, out, logsumexp, needs, *options):
    o = of_backward(options)
    by_bit = (*PLAIN_DIFFERENTIABLE, *_names(o))
    names = tuple(name for bit, name in enumerate(by_bit) if needs >> bit & 1)
    grads = _bind.attention_backward(
        *_shared(query, key, value, o), grad_out, out, logsumexp if o.normalizer == 0 else None, grad_logsumexp, names,
        None, False, None,
    )  # fmt: skip
    if names:
        _report.count_run("attention_backward", query, key, value, o.kernel_name)
    found = [grads.get(name) for name in by_bit]
    return (*found, *[None] * (len(DIFFERENTIABLE) - len(found))) if len(options) > NUM_SHARED else tuple(found)


attention_forward_program, attention_backward_program = attention_forward, attention_backward


def attention_forward_cached(query, key, value, *options):
    return attention_forward(query, key, value, *options[:-3], cache=options[-3:])


def attention_forward_below_autograd(query, key, value, causal, scale, align, layout):
    options = AllOptions(causal, scale, align=align)[:PROGRAM]
    if not layout:
        return attention_forward(query, key, value, *options)[:2]
    if layout == 1 and key.shape[1] != query.shape[1]:
        raise polyhead.Error(f"key has {key.shape[1]} heads, must have {query.shape[1]} as query")
    out, logsumexp, *_ = attention_forward(*(x.transpose(1, 2) for x in (query, key, value)), *options)
    return new_out(query, key, value).copy_(out.transpose(1, 2)), logsumexp


def attention_forward_inference(query, key, value, causal, scale, align, layout):
    return attention_forward_below_autograd(query, key, value, causal, scale, align, layout)[0]


def attention_backward_below_autograd(
    grad_out, query, key, value, out, logsumexp, needs, causal, scale, align, layout
):  # fmt: skip
    options = AllOptions(causal, scale, align=align)[:NUM_SHARED]
    if not layout:
        return attention_backward(grad_out, None, query, key, value, out, logsumexp, needs, *options)[:3]
    grad_out, query, key, value, out = (x.transpose(1, 2) for x in (grad_out, query, key, value, out))
    grads = attention_backward(grad_out, None, query, key, value, out, logsumexp, needs, *options)[:3]
    return tuple(None if grad is None else grad.transpose(1, 2) for grad in grads)


def merge_forward(outs, logsumexps):
    return _bind.merge(outs, logsumexps)


def merge_backward(grad_out, grad_logsumexp, outs, logsumexps, out, logsumexp):
    return _bind.merge_backward(grad_out, outs, logsumexps, out, logsumexp, grad_logsumexp)


def dropout_mask(seed, dropout_p, dropout_offset, batch, num_heads, seqlen_q, seqlen_k, dropout_origin=None):
    shape = (batch, num_heads, seqlen_q, seqlen_k)
    origin = None if dropout_origin is None else dropout_origin.tolist()
    mask = polyhead.dropout_mask(shape, dropout_p, seed.item() & (2**64 - 1), dropout_offset, origin)
    return torch.from_numpy(mask)
