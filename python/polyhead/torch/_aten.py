"""What the switch puts in the place of torch's own CPU kernels; each takes and gives what torch's does.

Each factory gets torch's kernel, for the calls that are left to it, and returns ours.
"""

import functools

import torch
from torch.autograd import forward_ad

from polyhead import Error
from polyhead.torch import _ops, _report
from polyhead.torch._options import ALIGNS
from polyhead.torch._sdpa import check_tensors, plain, scaled_dot_product_attention

FLASH_IS_OFF = "flash attention is switched off (sdpa_kernel, torch.backends.cuda.enable_flash_sdp)"
FLOAT64 = "float64: torch's own kernel is the faster one"
FORWARD_AD = "forward-mode derivatives"
NESTED = "a nested tensor"
EXPORTED = "traced for export"

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_TOP_LEFT = ALIGNS.index("top_left")
_flash_is_on = torch._C._get_flash_sdp_enabled
_transforms_active = torch._C._are_functorch_transforms_active


def why_not(query):
    """Why a call is torch's; None if it is ours."""
    if not _flash_is_on():
        return FLASH_IS_OFF
    dtype = query.dtype
    if dtype not in _DTYPES:
        return FLOAT64 if dtype == torch.float64 else f"dtype {dtype}"
    return FORWARD_AD if forward_ad._current_level >= 0 else None


def sdpa(theirs):
    """aten::scaled_dot_product_attention, with and without autograd, and within torch.vmap."""

    def ours(query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, *, scale=None, enable_gqa=False):
        reason = why_not(query)
        if reason is None:
            if attn_mask is None and not dropout_p and not _transforms_active():
                out = plain(query, key, value, is_causal, scale, enable_gqa)
                if out is not None:
                    return out
            if type(query) is torch.Tensor or not torch.compiler.is_exporting():
                return scaled_dot_product_attention(
                    query, key, value, attn_mask, dropout_p, is_causal, scale, enable_gqa
                )
            reason = EXPORTED  # a program that may run where polyhead is not
        if reason is not FLASH_IS_OFF:  # sizes that do not fit would take torch's flash kernel beyond its arrays
            check_tensors(query, key, value, attn_mask)
        _refuse("scaled_dot_product_attention", query, key, value, reason)
        return theirs(query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa)

    return ours


def sdpa_of_nested(theirs):
    """The same of nested tensors, strided or jagged, which stay torch's."""

    @functools.wraps(theirs)
    def ours(query, *arguments, **options):
        _report.count_refused("scaled_dot_product_attention", "nested", query.dtype, why_not(query) or NESTED)
        return theirs(query, *arguments, **options)

    return ours


def sdpa_of_meta(theirs):
    """Where a tensor is on the meta device: torch would return memory as it is if only the mask were."""

    def ours(query, key, value, attn_mask=None, *arguments, **options):
        check_tensors(query, key, value, attn_mask)
        return theirs(query, key, value, attn_mask, *arguments, **options)

    return ours


def flash_forward(theirs):
    """aten::_scaled_dot_product_flash_attention_for_cpu: compiled graphs and vmap call it by this name."""

    def ours(query, key, value, dropout_p=0.0, is_causal=False, *, attn_mask=None, scale=None):
        if query.dtype not in _DTYPES:
            _refuse("_scaled_dot_product_flash_attention_for_cpu", query, key, value, why_not(query))
            return theirs(query, key, value, dropout_p, is_causal, attn_mask=attn_mask, scale=scale)
        check_tensors(query, key, value, attn_mask)
        if dropout_p != 0:
            raise Error(f"dropout_p is {dropout_p}, must be 0: this operator cannot hand the seed to its backward")
        out, logsumexp, *_ = _ops.attention_forward(
            *_bshd(query, key, value), *_options(is_causal, scale, attn_mask)
        )
        if attn_mask is not None or key.shape[2] == 0:  # a query that sees no key: torch has 0 here
            logsumexp.masked_fill_(logsumexp == -torch.inf, 0.0)
        return out.transpose(1, 2), logsumexp.transpose(1, 2).contiguous().transpose(1, 2)

    return ours


def flash_backward(theirs):
    """aten::_scaled_dot_product_flash_attention_for_cpu_backward."""

    def ours(grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, *, attn_mask=None, scale=None):
        if query.dtype not in _DTYPES:
            _refuse("_scaled_dot_product_flash_attention_for_cpu_backward", query, key, value, why_not(query))
            return theirs(
                grad_out, query, key, value, out, logsumexp, dropout_p, is_causal, attn_mask=attn_mask, scale=scale
            )
        check_tensors(query, key, value, attn_mask)
        grads = _ops.attention_backward(
            grad_out.transpose(1, 2), None, *_bshd(query, key, value, out), logsumexp, 0b111,
            *_options(is_causal, scale, attn_mask),
        )  # fmt: skip
        return tuple(grad.transpose(1, 2) for grad in grads[:3])

    return ours


def _refuse(op, query, key, value, reason):
    _report.count_refused(op, _report.sdpa_shape(query, key, value), query.dtype, reason)


def _bshd(*tensors):
    return (x.transpose(1, 2) for x in tensors)


def _options(is_causal, scale, attn_mask):
    """As `polyhead.torch._options.Options` has them."""
    bias = mask = None
    if attn_mask is not None:
        bias, mask = (None, attn_mask) if attn_mask.dtype == torch.bool else (attn_mask, None)
    return is_causal, scale, bias, mask, None, None, 0.0, 0, -1, -1, _TOP_LEFT if is_causal else 0
