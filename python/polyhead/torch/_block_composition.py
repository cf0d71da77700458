"""The blocks out of torch's operations around `polyhead.torch.attention`, each of which torch can differentiate.

For what the fused operators do not give: second derivatives, gradients through returned weights, torch.func; and for
attention with keys of its own, rotary positions or a program between the projections and the output
(_multihead_attention.py).
"""

import torch
import torch.nn.functional as F

from polyhead.torch import _ops
from polyhead.torch._attention import attention
from polyhead.torch._block_ops import ACTIVATIONS, NORMS, AttentionBlock, FeedForwardBlock, swapped

_ACTIVATION_FUNCTIONS = {
    ACTIVATIONS["relu"]: F.relu,
    ACTIVATIONS["gelu"]: F.gelu,
    ACTIVATIONS["gelu_tanh"]: lambda x: F.gelu(x, approximate="tanh"),
    ACTIVATIONS["silu"]: F.silu,
    ACTIVATIONS[None]: lambda x: x,
}
_OUTPUT_DROPOUT_OFFSET = 1  # the other dropout's is 0, so that one seed may serve both; the same is in blocks.h
RETURNED_WEIGHTS = (False, True, "mean")  # by return_weights


def project(query, key, value, a: AttentionBlock, whole=False):
    """q [B, Sq, H, D], k [B, Sk, G, D] and v [B, Sk, G, Dv] of tokens [B, S, size].

    whole: in_proj_weight may be of a class that gives linear's product, but no rows of its own.
    """
    heads = (a.num_heads, a.num_heads_kv, a.num_heads_kv)
    if a.in_proj_weight is not None:
        head_dim = a.in_proj_weight.shape[0] // sum(heads)
        if whole and query is key is value:
            rows = F.linear(query, a.in_proj_weight, a.in_proj_bias).unflatten(-1, (-1, head_dim))
            return rows.split(heads, -2)
        weights = a.in_proj_weight.split([head_dim * count for count in heads])
    else:
        weights = (a.q_proj_weight, a.k_proj_weight, a.v_proj_weight)
    biases = (None,) * 3
    if a.in_proj_bias is not None:
        biases = a.in_proj_bias.split([weight.shape[0] for weight in weights])
    return [
        F.linear(x, weight, bias).unflatten(-1, (count, weight.shape[0] // count))
        for x, weight, bias, count in zip((query, key, value), weights, biases, heads)
    ]


def attend(q, k, v, a: AttentionBlock, program=None):
    """out [B, Sq, out_size], after the out projection, and the returned weights or None.

    program: score, mask and captured of `attention`.
    """
    results = attention(
        q, k, v, attn_bias=a.attn_bias, attn_mask=a.attn_mask, causal=a.causal,
        align="top_left" if a.causal else None, scale=a.scale, dropout_p=a.dropout_p,
        dropout_seed=a.dropout_seed if a.dropout_p else None, return_weights=RETURNED_WEIGHTS[a.return_weights],
        **(program or {}),
    )  # fmt: skip
    out, weights = results if a.return_weights else (results, None)
    out = out.flatten(2)
    return (out if a.out_proj_weight is None else F.linear(out, a.out_proj_weight, a.out_proj_bias)), weights


def attention_block(*arguments, program=None):
    """(out, attn_weights) of the operator attention_block_forward."""
    a = AttentionBlock(*arguments)
    x = swapped(a.query, a.batch_first)
    query = norm(x, a) if a.norm_first else x
    key = query if a.key is None else swapped(a.key, a.batch_first)
    value = key if a.value is None else swapped(a.value, a.batch_first)
    out, weights = attend(*project(query, key, value, a), a, program)
    out = _dropped(out, a.output_dropout_p, a.output_dropout_seed, _OUTPUT_DROPOUT_OFFSET)
    if a.residual:
        out = out + x
    if not a.norm_first:
        out = norm(out, a)
    return swapped(out, a.batch_first), weights


def feed_forward_block(*arguments):
    """(out,) of the operator feed_forward_block_forward."""
    a = FeedForwardBlock(*arguments)
    inner = F.linear(norm(a.x, a) if a.norm_first else a.x, a.weight1, a.bias1)
    inner = _dropped(_ACTIVATION_FUNCTIONS[a.activation](inner), a.inner_dropout_p, a.inner_dropout_seed, 0)
    out = _dropped(F.linear(inner, a.weight2, a.bias2), a.output_dropout_p, a.output_dropout_seed, _OUTPUT_DROPOUT_OFFSET)
    if a.residual:
        out = out + a.x
    return ((out if a.norm_first else norm(out, a)),)


def norm(x, a):
    if not a.norm_kind:
        return x
    wide = x if x.dtype == torch.float64 else x.float()
    weight, bias = (None if each is None else each.to(wide.dtype) for each in (a.norm_weight, a.norm_bias))
    if a.norm_kind == NORMS["layer"]:
        return F.layer_norm(wide, x.shape[-1:], weight, bias, a.norm_eps).to(x.dtype)
    normed = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + a.norm_eps)
    if weight is not None:
        normed = normed * weight
    return (normed if bias is None else normed + bias).to(x.dtype)


def _dropped(x, dropout_p, seed, offset):
    """Dropout of tokens [B, S, size] as the blocks draw it."""
    if not dropout_p:
        return x
    batch, seqlen, size = x.shape
    kept = _ops.dropout_mask(seed, dropout_p, offset, batch, 1, seqlen, size).squeeze(1)
    factor = 1 / (1 - dropout_p) if dropout_p < 1 else 0.0
    return torch.where(kept, x * factor, 0.0)
