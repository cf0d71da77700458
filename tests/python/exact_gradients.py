"""Gradients of the contract's formula in float64: by torch's autograd through a composition of torch's own operators,
and by central differences of formula.attention."""

import numpy as np

import formula
import polyhead
from optional import torch

SOURCES = ("query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits")


def composed(
    query, key, value, *, attn_bias=None, attn_mask=None, mask_at_end=False, causal=False, window=None, sink_keys=0,
    align=None, query_offset=None, scale=None, softcap=0.0, alibi_slopes=None, dropout_p=0.0, dropout_seed=0, dropout_offset=0,
    seqlens_q=None, seqlens_k=None, first_batch=0, sink_logits=None, normalizer="softmax",
):  # fmt: skip
    """out, logsumexp; query, key, value, attn_bias, alibi_slopes and sink_logits are float64 tensors."""
    batch, sq, heads, dim = query.shape
    sk, heads_kv = key.shape[1:3]
    K, V = (x.repeat_interleave(heads // max(heads_kv, 1), dim=2) for x in (key, value))
    distance, visible = formula.positions(
        batch, sq, sk, causal, window, sink_keys, align, query_offset, seqlens_q, seqlens_k
    )
    visible = torch.from_numpy(visible)
    if scale is None:
        scale = dim**-0.5 if dim else 1.0
    S = float(scale) * torch.einsum("bihd,bjhd->bhij", query, K)
    if softcap > 0:
        S = softcap * torch.tanh(S / softcap)
    if alibi_slopes is not None:
        S = S - alibi_slopes.expand(batch, heads)[:, :, None, None] * torch.from_numpy(distance)
    if attn_bias is not None:
        visible = visible & (attn_bias != -np.inf)
        S = S + torch.where(attn_bias == -np.inf, 0.0, attn_bias)
    if attn_mask is not None:
        visible = visible & torch.from_numpy(np.array(formula.mask_of_all_keys(attn_mask, mask_at_end, batch, sk, seqlens_k)))
    visible = visible.expand(S.shape)
    if sink_logits is not None:  # one key more, whose value is 0; padding does not see it
        S = torch.cat([S, sink_logits.view(1, heads, 1, 1).expand(*S.shape[:3], 1)], -1)
        there = torch.ones(1, 1, sq, 1, dtype=torch.bool)
        if seqlens_q is not None:
            there = torch.arange(sq).view(1, 1, -1, 1) < torch.from_numpy(np.array(seqlens_q)).view(-1, 1, 1, 1)
        there = there & (sink_logits != -np.inf).view(1, heads, 1, 1)
        visible = torch.cat([visible, there.expand(*visible.shape[:3], 1)], -1)
    sees = visible.any(-1, keepdim=True)
    S = torch.where(sees, torch.where(visible, S, -np.inf), 0.0)  # torch's gradients of a row of -inf are NaN
    L = torch.where(sees[..., 0], torch.logsumexp(S, -1), -np.inf)
    P = torch.where(visible, torch.softmax(S, -1) if normalizer == "softmax" else S, 0.0)[..., :sk]
    if dropout_p > 0:
        shape = (first_batch + batch, heads, sq, sk)
        kept = polyhead.dropout_mask(shape, dropout_p, dropout_seed, dropout_offset)[first_batch:]
        P = torch.where(torch.from_numpy(kept), P, 0.0) * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0)
    return torch.einsum("bhij,bjhd->bihd", P, V), L


def by_autograd(sources, grad_out, grad_logsumexp, options):
    tensors = {name: torch.from_numpy(x).requires_grad_() for name, x in sources.items()}
    results = composed(**tensors, **options)
    by_results = tuple(torch.from_numpy(x) for x in (grad_out, grad_logsumexp))
    gradients = torch.autograd.grad(results, tuple(tensors.values()), by_results, materialize_grads=True)
    return {name: gradient.numpy() for name, gradient in zip(tensors, gradients)}


def by_differences(sources, grad_out, grad_logsumexp, options, step=1e-5):
    def loss():
        result = formula.attention(**sources, **options)
        L = np.where(np.isfinite(result.logsumexp), result.logsumexp, 0)
        return (result.out * grad_out).sum() + (L * grad_logsumexp).sum()

    gradients = {}
    for name, source in sources.items():
        gradients[name] = np.zeros_like(source)
        for at in np.ndindex(source.shape):
            x = source[at]
            if not np.isfinite(x):  # a bias of -inf hides, and stays
                continue
            source[at] = x + step
            above = loss()
            source[at] = x - step
            gradients[name][at] = (above - loss()) / (2 * step)
            source[at] = x
    return gradients


def exact_gradients(query, key, value, grad_out, grad_logsumexp=None, by=by_autograd, **options):
    """{name: float64 array} for each of SOURCES that is given."""
    arrays = {"query": query, "key": key, "value": value} | options
    sources = {name: np.array(arrays[name], np.float64) for name in SOURCES if arrays.get(name) is not None}
    options = {name: option for name, option in options.items() if name not in SOURCES}
    if grad_logsumexp is None:
        grad_logsumexp = np.zeros((query.shape[0], query.shape[2], query.shape[1]))
    return by(sources, grad_out.astype(np.float64), np.asarray(grad_logsumexp, np.float64), options)


def summed_to(x, shape):
    """`x` summed over what broadcasts from `shape` to x's."""
    shape = (1,) * (x.ndim - len(shape)) + shape
    return x.sum(axis=tuple(n for n in range(x.ndim) if shape[n] != x.shape[n]), keepdims=True)


def error_bounds(query, key, value, grad_out, grad_logsumexp=None, **options):
    """Each gradient's sums with every term positive, so that nothing cancels: what rounding errors are measured by."""
    Q, K, V, dO = (np.abs(x.astype(np.float64)) for x in (query, key, value, grad_out))
    group = query.shape[2] // max(key.shape[2], 1)
    K, V = (np.repeat(x, group, axis=2) for x in (K, V))
    scale = options.get("scale")
    scale = abs(scale) if scale is not None else query.shape[3] ** -0.5 if query.shape[3] else 1.0
    result = formula.attention(query, key, value, **options)
    P = formula.attention(query, key, value, **options | {"dropout_p": 0.0}).weights
    f = np.divide(result.weights, P, out=np.zeros_like(P), where=P != 0)
    D = np.einsum("bihd,bihd->bhi", dO, result.bound)
    if grad_logsumexp is not None:
        D = D + np.abs(grad_logsumexp)
    dS = f * np.einsum("bihd,bjhd->bhij", dO, V)
    if options.get("normalizer", "softmax") == "softmax":
        dS = P * (dS + D[..., None])
    bounds = {
        "query": scale * np.einsum("bhij,bjhd->bihd", dS, K),
        "key": scale * np.einsum("bhij,bihd->bjhd", dS, Q),
        "value": np.einsum("bhij,bihd->bjhd", result.size, dO),
    }
    for name in ("key", "value"):
        batch, sk, heads, dim = bounds[name].shape
        bounds[name] = bounds[name].reshape(batch, sk, heads // max(group, 1), max(group, 1), dim).sum(axis=3)
    if options.get("attn_bias") is not None:
        bounds["attn_bias"] = summed_to(dS, options["attn_bias"].shape).reshape(options["attn_bias"].shape)
    if options.get("alibi_slopes") is not None:
        where = (options.get(name) for name in ("align", "query_offset", "seqlens_q", "seqlens_k"))
        distance, _ = formula.positions(dS.shape[0], *dS.shape[2:], False, None, 0, *where)
        shape = options["alibi_slopes"].shape
        bounds["alibi_slopes"] = summed_to((dS * distance).sum(axis=(2, 3)), shape).reshape(shape)
    if options.get("sink_logits") is not None:
        sinks = np.asarray(options["sink_logits"], np.float64).reshape(1, -1, 1)
        there = np.isfinite(result.logsumexp)
        share = np.where(there, np.exp(sinks - np.where(there, result.logsumexp, 0)), 0)
        bounds["sink_logits"] = (share * D).sum(axis=(0, 2))
    return bounds


def of_packed(function, query, key, value, grad_out, grad_logsumexp, *, cu_seqlens_q, cu_seqlens_k, **options):
    """exact_gradients or error_bounds, sequence by sequence."""
    arrays = {"query": query, "key": key, "value": value}
    slopes = options.get("alibi_slopes")
    if slopes is not None:
        arrays["alibi_slopes"] = slopes
    if options.get("sink_logits") is not None:
        arrays["sink_logits"] = options["sink_logits"]
    results = {name: np.zeros(x.shape) for name, x in arrays.items()}
    if grad_logsumexp is None:
        grad_logsumexp = np.zeros((query.shape[1], query.shape[0]))
    for b, rows_q, rows_k, own in formula.packed_sequences(cu_seqlens_q, cu_seqlens_k, options):
        of_sequence = function(
            query[None, rows_q], key[None, rows_k], value[None, rows_k], grad_out[None, rows_q],
            grad_logsumexp[None, :, rows_q], first_batch=b, **own,
        )  # fmt: skip
        results["query"][rows_q] = of_sequence["query"][0]
        results["key"][rows_k] = of_sequence["key"][0]
        results["value"][rows_k] = of_sequence["value"][0]
        if slopes is not None:
            results["alibi_slopes"][b if slopes.ndim == 2 else ...] += of_sequence["alibi_slopes"]
        if "sink_logits" in arrays:
            results["sink_logits"] += of_sequence["sink_logits"]
    return results
