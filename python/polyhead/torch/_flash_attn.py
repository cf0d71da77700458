"""FlashAttention's functions (flash-attn 2) by their names and arguments, on the CPU and in every dtype."""

import torch
from torch import Tensor

import polyhead
from polyhead import Error
from polyhead.torch._attention import attention
from polyhead.torch._autograd import differentiates
from polyhead.torch._options import seed_tensor
from polyhead.torch._varlen import pages_within, used_rows

OPEN = (-1, -1)


def _attend(q, k, v, options, return_attn_probs, **lengths):
    """What flash_attn_*func return; options as _options gives them."""
    if not return_attn_probs:
        return attention(q, k, v, **options, **lengths)
    if options["dropout_p"] and lengths:
        raise Error("return_attn_probs is True with dropout_p above 0, must be False for packed sequences")
    if options["dropout_p"]:
        options["dropout_seed"] = seed_tensor(options["dropout_p"], None)
    out, logsumexp = attention(q, k, v, **options, **lengths, return_logsumexp=True)
    return out, logsumexp, _signed_weights(q, k, v, options) if options["dropout_p"] else None


@torch.no_grad()
def _signed_weights(q, k, v, options):
    """P before dropout, [B, H, Sq, Sk]; negative where dropout drops it."""
    p, seed = options["dropout_p"], int(options["dropout_seed"]) % 2**64
    _, weights = attention(q, k, v, **options | {"dropout_p": 0.0, "dropout_seed": None}, return_weights=True)
    kept = torch.from_numpy(polyhead.dropout_mask(tuple(weights.shape), p, seed)).to(weights.device)
    return torch.where(kept, weights, -weights)


def _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes):
    placed = causal or tuple(window_size) != OPEN or alibi_slopes is not None
    return {
        "dropout_p": dropout_p,
        "scale": softmax_scale,
        "causal": causal,
        "window": window_size,
        "align": "bottom_right" if placed else None,
        "softcap": softcap,
        "alibi_slopes": alibi_slopes,
    }


def flash_attn_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """flash_attn.flash_attn_func on polyhead: the same arguments, in the same places, with the same meaning.

    Parameters
    ----------
    q, k, v : Tensor
        [B, Sq, H, D], [B, Sk, G, D], [B, Sk, G, Dv], any strides, float32 and float64 too; G divides H.
    dropout_p : float
        With polyhead's random bits, not flash-attn's; the seed is drawn from torch's default generator.
    softmax_scale : float, optional
        Default 1 / sqrt(D).
    causal : bool
        Query i sees the keys j <= i + Sk - Sq.
    window_size : (int, int)
        (left, right): the keys i + Sk - Sq - left <= j <= i + Sk - Sq + right; -1: open.
    softcap : float
        0: off.
    alibi_slopes : Tensor of float32 [H] or [B, H], optional
        Adds -slope * abs(i + Sk - Sq - j).
    deterministic : bool
        Changes nothing: results always are.
    return_attn_probs : bool
        Return logsumexp and probabilities too.

    Returns
    -------
    out : Tensor [B, Sq, H, Dv]
    softmax_lse : Tensor of float32 [B, H, Sq], if return_attn_probs
        -inf for a query that sees no key (whose out is 0); flash-attn has +inf there.
    S_dmask : Tensor [B, H, Sq, Sk] or None, if return_attn_probs
        Softmax's probabilities, negative where they were dropped; None without dropout, as in flash-attn.

    Raises
    ------
    polyhead.Error
        Shapes and dtypes that disagree; the message names the argument as `attention` does (q is query).

    Examples
    --------
    >>> import torch
    >>> from polyhead.torch import flash_attn_func
    >>> q, k, v = torch.ones(1, 5, 8, 16), torch.ones(1, 9, 2, 16), torch.ones(1, 9, 2, 16)
    >>> flash_attn_func(q, k, v, causal=True).shape
    torch.Size([1, 5, 8, 16])
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, options, return_attn_probs)


def flash_attn_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """`flash_attn_func` of keys and values in one tensor: kv [B, Sk, 2, G, D]. They are read where they are."""
    k, v = _parts(kv, "kv", 2, 5)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, options, return_attn_probs)


def flash_attn_qkvpacked_func(
    qkv: Tensor,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, Tensor | None]:
    """`flash_attn_func` of one tensor: qkv [B, S, 3, H, D]. Its parts are read where they are."""
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(*_parts(qkv, "qkv", 3, 5), options, return_attn_probs)


def flash_attn_varlen_func(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
    block_table: Tensor | None = None,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """flash_attn.flash_attn_varlen_func on polyhead: sequences end to end.

    Parameters
    ----------
    q, k, v : Tensor
        [total_q, H, D], [total_k, G, D], [total_k, G, Dv].
    cu_seqlens_q, cu_seqlens_k : Tensor of int32 or int64 [B + 1]
        Where the sequences begin and, last, where they end.
    max_seqlen_q, max_seqlen_k : int
        Not needed here, and not looked at.
    dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes, deterministic : optional
        As of `flash_attn_func`, Sq and Sk being each sequence's own.
    return_attn_probs : bool
        Return logsumexp [H, total_q] and None too; not together with dropout.
    block_table : Tensor of int32 or int64 [B, pages], optional
        Keys and values lie in pages: k and v are [num_pages, page_size, G, D], of any page size; sequence b has
        cu_seqlens_k[b + 1] - cu_seqlens_k[b] keys, in the pages block_table[b]; what stands there behind them is not
        looked at. Keys are read where they lie, but copied where gradients are recorded.

    Returns
    -------
    out : Tensor [total_q, H, Dv]; with return_attn_probs (out, softmax_lse, None)

    Raises
    ------
    polyhead.Error
        As `flash_attn_func`.
    """
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    lengths = {"cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}
    if block_table is not None:
        seqlens_k = cu_seqlens_k.diff()
        table = pages_within(block_table, k, seqlens_k, "cu_seqlens_k")
        if differentiates(q, k, v, alibi_slopes):
            slots = torch.arange(len(table) + 1, device=table.device) * table.shape[1] * k.shape[1]
            k, v = (pool[table].flatten(0, 2) for pool in (k, v))
            k, v, lengths["cu_seqlens_k"] = used_rows(k, v, slots, seqlens_k, "cu_seqlens_k")
        else:
            lengths = {"cu_seqlens_q": cu_seqlens_q, "seqlens_k": seqlens_k, "page_table": table}
    return _attend(q, k, v, options, return_attn_probs, **lengths)


def flash_attn_varlen_kvpacked_func(
    q: Tensor,
    kv: Tensor,
    cu_seqlens_q: Tensor,
    cu_seqlens_k: Tensor,
    max_seqlen_q: int,
    max_seqlen_k: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_varlen_func` of keys and values in one tensor: kv [total_k, 2, G, D]."""
    k, v = _parts(kv, "kv", 2, 4)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, options, return_attn_probs, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k)


def flash_attn_varlen_qkvpacked_func(
    qkv: Tensor,
    cu_seqlens: Tensor,
    max_seqlen: int,
    dropout_p: float = 0.0,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    deterministic: bool = False,
    return_attn_probs: bool = False,
) -> Tensor | tuple[Tensor, Tensor, None]:
    """`flash_attn_varlen_func` of one tensor: qkv [total, 3, H, D]."""
    q, k, v = _parts(qkv, "qkv", 3, 4)
    options = _options(dropout_p, softmax_scale, causal, window_size, softcap, alibi_slopes)
    return _attend(q, k, v, options, return_attn_probs, cu_seqlens_q=cu_seqlens, cu_seqlens_k=cu_seqlens)


def _parts(packed, name, count, ndim):
    if packed.dim() != ndim or packed.shape[-3] != count:
        raise Error(f"{name} has shape {tuple(packed.shape)}, must have {ndim} dims, the last but two of size {count}")
    return packed.unbind(-3)
