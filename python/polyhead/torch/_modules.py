"""torch.nn.MultiheadAttention beyond scaled_dot_product_attention: returned weights, and the fast path of eval."""

import functools

import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensor
from torch._subclasses.functional_tensor import FunctionalTensor

from polyhead.torch import _report
from polyhead.torch._aten import EXPORTED, FLOAT64, why_not
from polyhead.torch._attention import attention


_PLAIN = (torch.Tensor, torch.nn.Parameter, FakeTensor, FunctionalTensor)  # the last two while torch.compile traces


def native_multi_head_attention(theirs):
    """aten::_native_multi_head_attention: what torch.nn calls in eval without gradients, dense and nested."""

    def ours(
        query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask=None,
        need_weights=True, average_attn_weights=True, mask_type=None,
    ):  # fmt: skip
        nested = query.is_nested
        reason = why_not(query)
        if reason is None and nested and (mask is not None or need_weights or not query.size(0)):
            reason = "a nested tensor with a mask, returned weights or no sequences"
        if reason is not None:
            shape = "nested" if nested else _shape(query.transpose(0, 1), key.transpose(0, 1), num_head)
            _report.count_refused("_native_multi_head_attention", shape, query.dtype, reason)
            return theirs(
                query, key, value, embed_dim, num_head, qkv_weight, qkv_bias, proj_weight, proj_bias, mask,
                need_weights, average_attn_weights, mask_type,
            )  # fmt: skip
        if nested:
            packed, cu_seqlens, lengths = _packed(query, key, value)
            heads = _projected(*packed, num_head, qkv_weight, qkv_bias)
            out = attention(*heads, cu_seqlens_q=cu_seqlens[0], cu_seqlens_k=cu_seqlens[1])
            out = F.linear(out.flatten(1), proj_weight, proj_bias)
            return torch._nested_tensor_from_tensor_list(out.split(lengths)), None
        if mask is not None:  # True or -inf hides
            mask = mask == 0
            if mask_type == 1:  # of keys, [B, S]
                mask = mask[:, None, None]
        returned = "mean" if need_weights and average_attn_weights else need_weights
        heads = _projected(query, key, value, num_head, qkv_weight, qkv_bias)
        results = attention(*heads, attn_mask=mask, return_weights=returned)
        out, weights = results if need_weights else (results, None)
        return F.linear(out.flatten(2), proj_weight, proj_bias), weights

    return ours


def _projected(query, key, value, num_heads, qkv_weight, qkv_bias):
    """[..., E] as [..., H, D], by rows q, k, v of qkv_weight: in one product if all three are the same tensor."""
    if query is key and key is value:
        return F.linear(query, qkv_weight, qkv_bias).unflatten(-1, (3, num_heads, -1)).unbind(-3)
    biases = (None, None, None) if qkv_bias is None else qkv_bias.chunk(3)
    return [
        F.linear(x, weight, bias).unflatten(-1, (num_heads, -1))
        for x, weight, bias in zip((query, key, value), qkv_weight.chunk(3), biases)
    ]


def _packed(query, key, value):
    """Nested tensors of sequences [S_b, E] end to end, so that padding costs nothing; cu_seqlens of query and of key;
    query's lengths.
    """
    sequences = [x.unbind() for x in ((query,) if query is key and key is value else (query, key, value))]
    lengths = [[len(x) for x in each] for each in sequences]
    cu_seqlens = [torch.tensor([0, *each], device="cpu").cumsum(0) for each in lengths[:2]]
    packed = [torch.cat(each) for each in sequences]
    return packed * (3 // len(packed)), cu_seqlens * (2 // len(cu_seqlens)), lengths[0]


def multi_head_attention_forward(theirs):
    """torch.nn.functional.multi_head_attention_forward, returning weights; without them it calls what we catch."""

    @functools.wraps(theirs)
    def ours(
        query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v, add_zero_attn,
        dropout_p, out_proj_weight, out_proj_bias, training=True, key_padding_mask=None, need_weights=True,
        attn_mask=None, use_separate_proj_weight=False, q_proj_weight=None, k_proj_weight=None, v_proj_weight=None,
        static_k=None, static_v=None, average_attn_weights=True, is_causal=False,
    ):  # fmt: skip
        if need_weights:
            reason = _why_not_weights(query, key, value, embed_dim_to_check, num_heads, attn_mask, key_padding_mask)
            if reason is None and (static_k is not None or static_v is not None):
                reason = "static_k or static_v"
            if reason is None and is_causal and attn_mask is None:
                reason = "is_causal without attn_mask"
        if not need_weights or reason is not None:
            if need_weights:
                shape = "nested" if query.is_nested else _shape(query, key, num_heads)
                _report.count_refused("multi_head_attention_forward", shape, query.dtype, reason)
            return theirs(
                query, key, value, embed_dim_to_check, num_heads, in_proj_weight, in_proj_bias, bias_k, bias_v,
                add_zero_attn, dropout_p, out_proj_weight, out_proj_bias, training, key_padding_mask, need_weights,
                attn_mask, use_separate_proj_weight, q_proj_weight, k_proj_weight, v_proj_weight, static_k, static_v,
                average_attn_weights, is_causal,
            )  # fmt: skip
        unbatched = query.dim() == 2
        if unbatched:
            query, key, value = (x.unsqueeze(1) for x in (query, key, value))
        if use_separate_proj_weight:
            proj_weights = (q_proj_weight, k_proj_weight, v_proj_weight)
        else:
            proj_weights = in_proj_weight.chunk(3)
        biases = (None, None, None) if in_proj_bias is None else in_proj_bias.chunk(3)
        query, key, value = map(F.linear, (query, key, value), proj_weights, biases)
        seqlen_q, batch, embed_dim = query.shape
        seqlen_k = key.shape[0]
        if bias_k is not None:
            key = torch.cat([key, bias_k.expand(1, batch, embed_dim)])
            value = torch.cat([value, bias_v.expand(1, batch, embed_dim)])
        if add_zero_attn:
            key, value = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (key, value))
        bias = _score_bias(attn_mask, key_padding_mask, num_heads, query, key.shape[0] - seqlen_k)
        heads = (num_heads, embed_dim // num_heads)
        out, weights = attention(
            *(x.unflatten(-1, heads).transpose(0, 1) for x in (query, key, value)),
            attn_bias=bias,
            dropout_p=dropout_p if training else 0.0,
            return_weights="mean" if average_attn_weights else True,
        )
        out = F.linear(out.transpose(0, 1).reshape(seqlen_q, batch, embed_dim), out_proj_weight, out_proj_bias)
        return (out.squeeze(1), weights.squeeze(0)) if unbatched else (out, weights)

    ours.__prepare_scriptable__ = lambda: theirs  # torch.jit.script compiles torch's own
    return ours


def _why_not_weights(query, key, value, embed_dim, num_heads, attn_mask, key_padding_mask):
    """Why multi_head_attention_forward is torch's; so are the calls for which it will raise an error of its own."""
    if query.is_nested or any(type(x) not in _PLAIN for x in (query, key, value)):
        return "a nested tensor or a subclass of Tensor"
    if query.device.type != "cpu":
        return f"device {query.device.type}"
    if torch.jit.is_tracing() or torch.compiler.is_exporting():
        return EXPORTED
    reason = why_not(query)
    if reason is not None and reason is not FLOAT64:
        return reason
    num_dims = query.dim()
    if num_dims not in (2, 3) or key.dim() != num_dims or value.dim() != num_dims or key.shape[:-1] != value.shape[:-1]:
        return "shapes of query, key and value"
    batch = 1 if num_dims == 2 else query.shape[1]
    if query.shape[-1] != embed_dim or embed_dim % num_heads or (num_dims == 3 and key.shape[1] != batch):
        return "shapes of query, key and value"
    if attn_mask is not None:
        scores = (query.shape[0], key.shape[0])
        if attn_mask.shape != scores and attn_mask.shape != (batch * num_heads, *scores):
            return "shape of attn_mask"
    if key_padding_mask is not None and key_padding_mask.shape != key.shape[:-1][::-1]:
        return "shape of key_padding_mask"
    for mask in (attn_mask, key_padding_mask):
        if mask is not None and mask.dtype != torch.bool and not mask.is_floating_point():
            return f"a mask of {mask.dtype}"
    return None


def _score_bias(attn_mask, key_padding_mask, num_heads, query, extra_keys):
    """Both masks (True hides; floats are added) as one bias that broadcasts to [B, H, Sq, Sk + extra_keys]."""
    batch = query.shape[1]
    bias = None
    if attn_mask is not None:
        bias = _as_bias(attn_mask, query.dtype)
        if bias.dim() == 3:
            bias = bias.reshape(batch, num_heads, *bias.shape[1:])
    if key_padding_mask is not None:
        padding = _as_bias(key_padding_mask, query.dtype).reshape(batch, 1, 1, key_padding_mask.shape[-1])
        bias = padding if bias is None else bias + padding
    return F.pad(bias, (0, extra_keys)) if bias is not None and extra_keys else bias


def _as_bias(mask, dtype):
    if mask.dtype != torch.bool:
        return mask
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill(mask, -torch.inf)


def _shape(query, key, num_heads) -> str:
    """As `polyhead.torch._report.Record.shape`, of [S, B, E] or [S, E] tensors."""
    batch = query.shape[1] if query.dim() > 2 else 1
    head_dim = query.shape[-1] // num_heads
    lengths = f"{query.shape[0]}" if query.shape[0] == key.shape[0] else f"{query.shape[0]}/{key.shape[0]}"
    return f"{batch}x{num_heads}x{lengths}x{head_dim}"
