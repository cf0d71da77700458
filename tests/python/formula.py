"""The contract as one NumPy formula in float64, with the arguments of `polyhead.attention`: what tests compare to."""

import inspect
from types import SimpleNamespace

import numpy as np


def philox4x32(counter, key):
    """Philox4x32-10 on arrays: four counter words, two key words -> four random words."""
    mask = np.uint64(0xFFFFFFFF)
    counter = [np.asarray(word, np.uint64) for word in counter]
    key = [np.uint64(word) for word in key]
    for _ in range(10):
        product0 = np.uint64(0xD2511F53) * counter[0]
        product1 = np.uint64(0xCD9E8D57) * counter[2]
        shift = np.uint64(32)
        counter = [
            (product1 >> shift) ^ counter[1] ^ key[0],
            product1 & mask,
            (product0 >> shift) ^ counter[3] ^ key[1],
            product0 & mask,
        ]
        key = [(key[0] + np.uint64(0x9E3779B9)) & mask, (key[1] + np.uint64(0xBB67AE85)) & mask]
    return counter


def dropout_mask(shape, p, seed, offset=0, first_batch=0):
    """[B, H, Sq, Sk], True = kept."""
    b, h, i, j = np.ogrid[tuple(slice(0, size) for size in shape)]
    counter = np.broadcast_arrays((b + first_batch) * shape[1] + h, i, j // 8, offset)
    words = np.stack(philox4x32(counter, (seed & 0xFFFFFFFF, seed >> 32)))
    at = np.broadcast_to(j % 8 // 2, words.shape[1:])[None]
    word = np.take_along_axis(words, at, 0)[0] if words.size else words[0]
    bits = np.where(j % 2 == 0, word & np.uint64(0xFFFF), word >> np.uint64(16))
    return bits >= np.floor(p * 65536 + 0.5)


def visible_by_position(q_len, k_len, sq, sk, offset, causal, window, sink_keys):
    i, j = np.ogrid[:sq, :sk]
    left, right = window or (-1, -1)
    visible = (i < q_len) & (j < k_len)
    if causal:
        visible = visible & (j <= i + offset)
    if left >= 0:
        visible = visible & ((j >= i + offset - left) | (j < sink_keys))
    if right >= 0:
        visible = visible & (j <= i + offset + right)
    return visible


def lengths_and_offsets(batch, sq, sk, align, query_offset, seqlens_q, seqlens_k):
    """Three of [B]: queries, keys, and where query 0 stands among the keys."""
    lens_q = np.full(batch, sq) if seqlens_q is None else np.asarray(seqlens_q)
    lens_k = np.full(batch, sk) if seqlens_k is None else np.asarray(seqlens_k)
    if query_offset is not None:
        return lens_q, lens_k, np.broadcast_to(query_offset, batch)
    return lens_q, lens_k, lens_k - lens_q if align == "bottom_right" else np.zeros(batch, int)


def mask_of_all_keys(attn_mask, mask_at_end, batch, sk, seqlens_k):
    """attn_mask as it broadcasts to [B, H, Sq, Sk]."""
    mask = np.asarray(attn_mask)
    if not mask_at_end:
        return mask
    mask = mask.reshape((1,) * (4 - mask.ndim) + mask.shape)
    whole = np.ones((batch, *mask.shape[1:3], sk), bool)
    for b, length in enumerate(np.full(batch, sk) if seqlens_k is None else seqlens_k):
        told = min(mask.shape[3], length)
        whole[b, ..., length - told : length] = mask[b % mask.shape[0], ..., mask.shape[3] - told :]
    return whole


def in_sums_of(dtype, options):
    """The options, with sink_logits in the dtype that they have beside inputs of this one."""
    if options.get("sink_logits") is None:
        return options
    return options | {"sink_logits": options["sink_logits"].astype(np.float64 if dtype == np.float64 else np.float32)}


def of_all_pairs(function, shape, offsets, captured, **inputs):
    """What a score or mask function gives for all pairs of [B, H, Sq, Sk] at once, on arrays."""
    values = dict(zip("bhqk", np.ogrid[tuple(slice(0, size) for size in shape)]))
    values |= inputs | (captured or {}) | {"offset": np.reshape(offsets, (-1, 1, 1, 1))}
    return function(**{name: values[name] for name in inspect.signature(function).parameters if name in values})


def positions(batch, sq, sk, causal, window, sink_keys, align, query_offset, seqlens_q, seqlens_k):
    """distance |i + offset - j| and what causal, window and lengths leave visible: both [B, 1, Sq, Sk]."""
    lens_q, lens_k, offsets = lengths_and_offsets(batch, sq, sk, align, query_offset, seqlens_q, seqlens_k)
    visible = [
        visible_by_position(lens_q[b], lens_k[b], sq, sk, offsets[b], causal, window, sink_keys) for b in range(batch)
    ]
    i, j = np.ogrid[:sq, :sk]
    distance = np.abs(i + np.reshape(offsets, (-1, 1, 1, 1)) - j)
    return distance, np.stack(visible or [np.zeros((sq, sk), bool)])[:batch, None]


def attention(
    query, key, value, *, attn_bias=None, attn_mask=None, mask_at_end=False, causal=False, window=None, sink_keys=0,
    align=None, query_offset=None, scale=None, softcap=0.0, alibi_slopes=None, dropout_p=0.0, dropout_seed=0, dropout_offset=0,
    seqlens_q=None, seqlens_k=None, first_batch=0, score=None, mask=None, captured=None, sink_logits=None,
    normalizer="softmax",
):  # fmt: skip
    """out [B, Sq, H, Dv], logsumexp [B, H, Sq], weights [B, H, Sq, Sk], column_sums [B, H, Sk], bound (see below)."""
    Q, K, V = (np.asarray(x).astype(np.float64) for x in (query, key, value))
    batch, sq, heads, dim = Q.shape
    sk, heads_kv = K.shape[1:3]
    K, V = (np.repeat(x, heads // heads_kv, axis=2) if heads_kv else x for x in (K, V))
    distance, visible = positions(batch, sq, sk, causal, window, sink_keys, align, query_offset, seqlens_q, seqlens_k)
    if scale is None:
        scale = 1 / np.sqrt(dim) if dim else 1.0
    S = scale * np.einsum("bihd,bjhd->bhij", Q, K)
    if softcap > 0:
        S = softcap * np.tanh(S / softcap)
    if alibi_slopes is not None:
        slopes = np.broadcast_to(np.asarray(alibi_slopes, np.float64), (batch, heads))
        S = S - slopes[:, :, None, None] * distance
    if attn_bias is not None:
        bias = np.asarray(attn_bias).astype(np.float64)
        S = S + bias
        visible = visible & (bias != -np.inf)
    if attn_mask is not None:
        visible = visible & mask_of_all_keys(attn_mask, mask_at_end, batch, sk, seqlens_k)
    if score is not None or mask is not None:
        offsets = lengths_and_offsets(batch, sq, sk, align, query_offset, seqlens_q, seqlens_k)[2]
    if mask is not None:
        visible = visible & of_all_pairs(mask, S.shape, offsets, captured)
    if score is not None:
        S = of_all_pairs(score, S.shape, offsets, captured, score=S)
        visible = visible & (S != -np.inf)
    visible = np.broadcast_to(visible, S.shape)
    S = np.where(visible, S, -np.inf)

    sinks = np.full((1, heads, 1, 1), -np.inf)
    if sink_logits is not None:
        sinks = np.asarray(sink_logits, np.float64).reshape(sinks.shape)
    if seqlens_q is not None:  # padding has none
        there = np.arange(sq).reshape(1, 1, -1, 1) < np.reshape(seqlens_q, (-1, 1, 1, 1))
        sinks = np.where(there, sinks, -np.inf)
    m = np.maximum(S.max(axis=-1, keepdims=True, initial=-np.inf), sinks)
    finite_m = np.where(np.isinf(m), 0, m)
    E = np.where(visible, np.exp(S - finite_m), 0)
    total = E.sum(axis=-1, keepdims=True) + np.exp(sinks - finite_m)
    P = E / np.where(total == 0, 1, total)
    with np.errstate(divide="ignore"):
        L = np.where(total == 0, -np.inf, m + np.log(total))[..., 0]
    size = P  # of weights: what their errors are measured against
    if normalizer == "none":
        P, L = np.where(visible, S, 0), np.zeros_like(L)
        terms = abs(scale) * np.einsum("bihd,bjhd->bhij", np.abs(Q), np.abs(K)) if score is None else 0
        size = np.where(visible, np.maximum(np.abs(P), terms), 0)
    column_sums = P.sum(axis=2)
    if dropout_p > 0:
        kept = dropout_mask(P.shape, dropout_p, dropout_seed, dropout_offset, first_batch)
        P, size = (np.where(kept, x, 0) / (1 - dropout_p) if dropout_p < 1 else np.zeros_like(x) for x in (P, size))
    return SimpleNamespace(
        out=np.einsum("bhij,bjhd->bihd", P, V),
        logsumexp=L,
        weights=P,
        column_sums=column_sums,
        size=size,
        bound=np.einsum("bhij,bjhd->bihd", size, np.abs(V)),  # of |out|: errors are measured against it
    )


def packed_sequences(cu_seqlens_q, cu_seqlens_k, options):
    """(b, its rows of queries, its rows of keys, its own options) of each sequence."""
    count = len(cu_seqlens_q) - 1
    for b in range(count):
        own = dict(options)
        if options.get("query_offset") is not None:
            own["query_offset"] = np.broadcast_to(options["query_offset"], count)[b]
        if options.get("alibi_slopes") is not None and options["alibi_slopes"].ndim == 2:
            own["alibi_slopes"] = options["alibi_slopes"][b]
        yield b, slice(*cu_seqlens_q[b : b + 2]), slice(*cu_seqlens_k[b : b + 2]), own


def packed_attention(query, key, value, *, cu_seqlens_q, cu_seqlens_k, **options):
    """out [total_q, H, Dv], logsumexp [H, total_q], bound."""
    total_q, heads = query.shape[:2]
    out = np.zeros((total_q, heads, value.shape[2]))
    bound = np.zeros_like(out)
    logsumexp = np.full((heads, total_q), -np.inf)
    for b, rows_q, rows_k, own in packed_sequences(cu_seqlens_q, cu_seqlens_k, options):
        exact = attention(query[None, rows_q], key[None, rows_k], value[None, rows_k], first_batch=b, **own)
        out[rows_q], bound[rows_q], logsumexp[:, rows_q] = exact.out[0], exact.bound[0], exact.logsumexp[0]
    return SimpleNamespace(out=out, logsumexp=logsumexp, bound=bound)
