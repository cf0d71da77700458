"""torch's scaled_dot_product_attention, with its shapes and its meaning, over `polyhead.torch.attention`."""

import math

import torch
from torch import Tensor
from torch.compiler import is_dynamo_compiling

from polyhead import Error
from polyhead.torch import _autograd, _strides
from polyhead.torch._attention import attention
from polyhead.torch._options import ALIGNS

_TOP_LEFT = ALIGNS.index("top_left")
_is_autocast_enabled = torch._C._is_any_autocast_enabled


def scaled_dot_product_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """softmax(scale * query @ key^T + attn_mask) @ value without storing the scores, called as torch's function is.

    Parameters
    ----------
    query, key, value : torch.Tensor
        [..., H, Sq, D], [..., H, Sk, D] and [..., H, Sk, Dv]; with two dimensions [S, D]. Leading dimensions broadcast.
        Any strides, one dtype: float32, bfloat16, float16 or float64.
    attn_mask : torch.Tensor, optional
        Broadcasts to [..., H, Sq, Sk]. bool: True = may look. Any float dtype: added to the scores, with gradients.
    dropout_p : float
        0 to 1. The seed comes from torch's default generator.
    is_causal : bool
        Query i sees key j only if j <= i (top left); with attn_mask besides, both must allow it.
    scale : float, optional
        Default ``1 / sqrt(D)``.
    enable_gqa : bool
        key and value may have fewer heads, which divide query's.

    Returns
    -------
    torch.Tensor
        [..., H, Sq, Dv], with the strides that torch's own function gives.

    Raises
    ------
    polyhead.Error
        Sizes, dtypes or values that make no sense, named in one sentence. It is a ValueError and a RuntimeError.
    TypeError
        An argument of the wrong kind.

    Notes
    -----
    A query that sees no key gets 0; what is hidden from it changes no bit.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> query = torch.rand(1, 2, 5, 8)  # two heads, five tokens
    >>> polyhead.torch.scaled_dot_product_attention(query, query, query, is_causal=True).shape
    torch.Size([1, 2, 5, 8])
    """
    if (
        attn_mask is None
        and not dropout_p
        and not (is_dynamo_compiling() or _is_autocast_enabled())
        and _autograd.is_plain()
    ):
        out = plain(query, key, value, is_causal, scale, enable_gqa)
        if out is not None:
            return out
    check_tensors(query, key, value, attn_mask)
    like_query, lead = _strides.are_querys(query, key, value, attn_mask, dropout_p), None
    if not _is_plain(query, key, value, enable_gqa):
        num_dims = max(query.dim(), key.dim(), value.dim())
        lead, query, key, value = _plain(query, key, value, enable_gqa)
        attn_mask = _batched_mask(attn_mask, lead)
    bias = None
    if attn_mask is not None and attn_mask.dtype != torch.bool:
        bias, attn_mask = attn_mask, None
        if bias.dtype == torch.float64 and query.dtype != torch.float64:
            bias = bias.float()
    out = attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_bias=bias,
        attn_mask=attn_mask,
        causal=is_causal,
        align="top_left" if is_causal else None,
        scale=scale,
        dropout_p=dropout_p,
    ).transpose(1, 2)
    if not like_query:
        out = out.reshape(-1).view(out.shape)  # contiguous() would leave odd strides where a size is 1
    elif not _has_strides_of(out, query):
        out = torch.empty_like(query).copy_(out)
    if lead is None:
        return out
    return out.reshape(*lead, *out.shape[1:]) if num_dims > 2 else out[0, 0]


def plain(query, key, value, is_causal, scale, enable_gqa):
    """Out of [B, H, S, D] tensors that nothing traces or transforms; None where a call takes more than this."""
    if not type(query) is type(key) is type(value) is Tensor or not query.dim() == key.dim() == 4:
        return None
    if not (query.is_cpu or query.is_cuda):
        return None
    layout = 2 if enable_gqa else 1  # the operator counts the heads: shapes cost Python 0.2 us each
    try:
        return _autograd.plain_forward(query, key, value, is_causal, scale, _TOP_LEFT if is_causal else 0, layout)
    except (ValueError, NotImplementedError):
        return None


def check_tensors(query, key, value, attn_mask) -> None:
    """Raises what would not be said by name further down, or would take torch's own kernels beyond their arrays."""
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, torch.Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")
        if tensor.dim() < 2:
            raise Error(f"{name} has {tensor.dim()} dimensions, must have at least 2: [..., H, S, D]")
        if tensor.dtype != query.dtype:
            raise Error(f"{name} is {tensor.dtype}, must be {query.dtype} as query")
        if tensor.device != query.device:
            raise Error(f"{name} is on {tensor.device}, must be on {query.device} as query")
    if key.shape[-1] != query.shape[-1]:
        raise Error(f"key's head_dim is {key.shape[-1]}, must be {query.shape[-1]} as query's")
    if value.shape[-2] != key.shape[-2]:
        raise Error(f"value has {value.shape[-2]} rows, must have {key.shape[-2]} as key")
    num_heads = query.shape[-3] if query.dim() > 2 else 1
    for name, tensor in (("key", key), ("value", value)):
        if tensor.dim() > 2 and tensor.shape[-3] == 0 and num_heads != 0:
            raise Error(f"{name} has 0 heads, must divide query's {num_heads}")
    if attn_mask is not None:
        if not isinstance(attn_mask, torch.Tensor):
            raise TypeError(f"attn_mask is a {type(attn_mask).__name__}, must be a torch.Tensor")
        if attn_mask.dtype != torch.bool and not attn_mask.dtype.is_floating_point:
            raise Error(f"attn_mask is {attn_mask.dtype}, must be bool or a float type")
        if attn_mask.device != query.device:
            raise Error(f"attn_mask is on {attn_mask.device}, must be on {query.device} as query")


def _has_strides_of(out, query) -> bool:
    if torch._C._functorch.is_batchedtensor(out):  # strides of a mapped tensor are nobody's
        return True
    if type(query) is not torch.Tensor and not all(type(stride) is int for stride in (*out.stride(), *query.stride())):
        return False  # traced: a graph may not know its sizes yet
    return out.stride() == query.stride()


def _is_plain(query, key, value, enable_gqa: bool) -> bool:
    """Whether all are [B, H, S, D] with nothing to broadcast."""
    if query.dim() != 4 or key.dim() != 4 or value.dim() != 4:
        return False
    (batch, num_heads), (batch_k, heads_k), (batch_v, heads_v) = query.shape[:2], key.shape[:2], value.shape[:2]
    if batch != batch_k or batch != batch_v or heads_k != heads_v:
        return False
    return num_heads == heads_k or (enable_gqa and heads_k != 0 and num_heads % heads_k == 0)


def _plain(query, key, value, enable_gqa: bool):
    """The leading dimensions in common, and the tensors as [B, H, S, D]: views if the batch has one dimension."""
    num_heads, heads_k, heads_v = (x.shape[-3] if x.dim() > 2 else 1 for x in (query, key, value))
    try:
        lead = torch.broadcast_shapes(*(x.shape[:-3] for x in (query, key, value)))
        if not enable_gqa:
            (num_heads,) = torch.broadcast_shapes((num_heads,), (heads_k,), (heads_v,))
    except RuntimeError:
        shapes = ", ".join(f"{name} {list(x.shape)}" for name, x in zip(("query", "key", "value"), (query, key, value)))
        hint = "" if enable_gqa else "; fewer heads of key and value need enable_gqa=True"
        raise Error(f"leading dimensions must broadcast: {shapes}{hint}") from None
    for name, heads in (("key", heads_k), ("value", heads_v)):
        if heads and num_heads % heads:
            raise Error(f"{name} has {heads} heads, must divide query's {num_heads}")
    if heads_k != heads_v:  # what `attention` has no name for
        key, value = (_repeated(x, num_heads) for x in (key, value))
    return lead, _batched(_repeated(query, num_heads), lead), _batched(key, lead), _batched(value, lead)


def _repeated(x, num_heads: int):
    """[..., h, S, D] with each head num_heads / h times."""
    if x.dim() == 2:
        return x.expand(num_heads, *x.shape)
    heads = x.shape[-3]
    if heads == num_heads:
        return x
    if heads == 1:
        return x.expand(*x.shape[:-3], num_heads, *x.shape[-2:])
    return x.repeat_interleave(num_heads // heads, -3)


def _batched(x, lead):
    """[..., H, S, D] as [B, H, S, D], B all of lead."""
    if x.dim() == 2:
        x = x.unsqueeze(0)
    x = x.expand(*lead, *x.shape[-3:])
    return x if len(lead) == 1 else x.reshape(math.prod(lead), *x.shape[-3:])


def _batched_mask(attn_mask, lead):
    """A mask that broadcasts to [*lead, H, Sq, Sk] as one that broadcasts to [B, H, Sq, Sk]."""
    if attn_mask is None or len(lead) < 2 or attn_mask.dim() < 4:
        return attn_mask
    try:
        return attn_mask.expand(*lead, *attn_mask.shape[-3:]).reshape(math.prod(lead), *attn_mask.shape[-3:])
    except RuntimeError:
        raise Error(f"attn_mask {list(attn_mask.shape)} must broadcast to {[*lead, 'H', 'Sq', 'Sk']}") from None
