"""Multi-head attention: one meaning on every kernel, results that do not depend on the number of threads.

    import numpy as np, polyhead
    query = key = value = np.random.rand(1, 384, 16, 64).astype(np.float32)
    out = polyhead.attention(query, key, value)

`attention` computes, `attention_backward` its gradients; `merge` joins results whose keys were split over calls, and
`merge_backward` their gradients. `explain` says with which kernel and why not with another, `kernels` lists them,
`dropout_mask` tells what dropout keeps. `MultiHeadAttention` is the layer, with projections around attention.
`python -m polyhead info` describes this build and this machine.
"""

from typing import NamedTuple

from polyhead import _bind
from polyhead._bind import Error, __version__
from polyhead._explanation import Explanation
from polyhead._multi_head_attention import MultiHeadAttention

__all__ = [
    "DropoutOrigin", "Error", "Explanation", "MultiHeadAttention", "__version__", "attention", "attention_backward",
    "dropout_mask", "explain", "kernels", "merge", "merge_backward",
]  # fmt: skip


class DropoutOrigin(NamedTuple):
    """Where a call stands in a larger one whose dropout mask it draws, as a shard over batch, heads, queries or keys does.

    Element (b, h, i, j) of the call has the bits of head index ``first_head + b * num_heads + h``, query
    ``first_query + i`` and key ``first_key + j`` of the whole. The defaults draw a mask of the call's own.

    Examples
    --------
    >>> import polyhead
    >>> whole = polyhead.dropout_mask((2, 4, 6, 32), 0.5, 1)
    >>> origin = polyhead.DropoutOrigin(first_head=1 * 4 + 2, num_heads=4, first_query=3, first_key=8)
    >>> shard = polyhead.dropout_mask((1, 2, 3, 24), 0.5, 1, dropout_origin=origin)
    >>> (shard == whole[1:, 2:, 3:, 8:]).all().item()
    True
    """

    first_head: int = 0
    num_heads: int = 0  #: query heads in all; 0: as many as the call has
    first_query: int = 0
    first_key: int = 0  #: a multiple of 8: eight keys share a counter


def attention(
    query,
    key,
    value,
    *,
    attn_bias=None,
    attn_mask=None,
    causal=False,
    window=None,
    align=None,
    query_offset=None,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    dropout_p=0.0,
    dropout_seed=None,
    dropout_offset=0,
    dropout_origin=None,
    seqlens_q=None,
    seqlens_k=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    return_logsumexp=False,
    return_weights=False,
    return_column_sums=False,
    out_dtype=None,
    kernel=None,
    device=None,
    stream=None,
):
    """softmax(scale * query @ key^T + attn_bias) @ value, without storing the scores.

    In this order: scores ``S = scale * query @ key^T``; ``S = softcap * tanh(S / softcap)`` if softcap > 0;
    ``S += attn_bias - slope * |i + offset - j|``; ``S = -inf`` where hidden; ``L = log sum_j exp(S)``;
    ``P = exp(S - L)``; ``out = dropout(P) @ value``.

    Sizes: B batch, Sq / Sk sequence lengths, H query heads, G key/value heads (G divides H; query head h reads
    h // (H // G)), D head_dim of query and key, Dv head_dim of value.

    Parameters
    ----------
    query, key, value : array
        [B, Sq, H, D], [B, Sk, G, D] and [B, Sk, G, Dv]; packed, with cu_seqlens: [total_q, H, D], [total_k, G, D] and
        [total_k, G, Dv]. float32, bfloat16, float16 or float64, all three the same. NumPy arrays (bfloat16 by
        ml_dtypes) or any in CPU memory with ``__dlpack__`` (torch, jax, ...); read in place, any strides, 0 and
        negative ones too. No gradient flows: a torch tensor that requires one is taken by its values; the gradients
        are in `attention_backward`.
    attn_bias : array, optional
        Added to the scores; broadcasts to [B, H, Sq, Sk] as in NumPy. float32, bfloat16 or float16, whatever query is
        (float64 too where query is). -inf hides a key.
    attn_mask : array of bool, optional
        True = may look. Broadcasts likewise. Both may be given.
    causal : bool
        Query i sees key j only if ``j <= i + offset``.
    window : (int, int), optional
        (left, right): query i sees ``i + offset - left <= j <= i + offset + right``. -1 = open.
    align : {"top_left", "bottom_right"}, optional
        Where query i stands among the keys: offset 0, or Sk - Sq of each sequence (decoding with a cache). Causal,
        window and ALiBi share this offset. Needed if one of them is used and Sq != Sk.
    query_offset : int or int array [B], optional
        The offset itself; excludes align.
    scale : float, optional
        Any finite number; default ``1 / sqrt(D)``.
    softcap : float
        0 = off.
    alibi_slopes : float32 array [H] or [B, H], optional
    dropout_p : float
        0 to 1. Weights are kept as `dropout_mask` tells and scaled by ``1 / (1 - dropout_p)``.
    dropout_seed, dropout_offset : int
        0 .. 2^64 - 1 (must be given if dropout_p > 0) and 0 .. 2^32 - 1.
    dropout_origin : DropoutOrigin, optional
        Of a shard, which draws the mask of the whole.
    seqlens_q, seqlens_k : int32 or int64 array [B], optional
        Rows behind these are padding. Not when packed.
    cu_seqlens_q, cu_seqlens_k : int32 or int64 array [B + 1], optional
        Packed: sequence b has the rows ``cu_seqlens[b]`` to ``cu_seqlens[b + 1] - 1``. Both or none; start at 0, never
        fall, end at or before the last row.
    return_logsumexp : bool
        `attention_backward` and `merge` need it.
    return_weights : bool or "mean"
        P after dropout, or its mean over heads. Costs O(Sq Sk) memory. Not when packed.
    return_column_sums : bool
        Sums over the queries of P before dropout. Not when packed.
    out_dtype : dtype or str, optional
        Of out: query's (default), or float32 beside bfloat16 and float16, the sums as they are before rounding. For
        parts that are merged: they would round at each step.
    kernel : str, optional
        One of `kernels()`, instead of the best that can compute this.
    device : {"cpu", "cuda"}, optional
        Where it is computed and where the arrays lie; default "cpu". A device that no kernel of this build serves is an
        error.
    stream : int, optional
        Of a GPU: the handle of the queue that the work is put on. The CPU has none.

    Returns
    -------
    out : array
        [B, Sq, H, Dv], packed [total_q, H, Dv]; in out_dtype, kind of array of query, contiguous.
    logsumexp : array, if asked for
        L, natural log: [B, H, Sq], packed [H, total_q]; float32 (float64 if query is).
    weights : array, if asked for
        [B, H, Sq, Sk], or [B, Sq, Sk] of "mean"; dtype of query.
    column_sums : array, if asked for
        [B, H, Sk]; float32 (float64 if query is).

    Raises
    ------
    polyhead.Error
        Sizes, types, strides or values that make no sense, named in one sentence; a kernel that cannot compute this.
    TypeError
        An argument that is no array, number, ... where one is needed.
    MemoryError

    Notes
    -----
    Out is returned alone, or a tuple of what was asked for, in the order above. A query that sees no key, or lies in padding, gets out 0,
    logsumexp -inf and weights 0; what is hidden from it changes no bit, NaN included. Sums run in float32 (float64 if
    query is). The bits of the results depend neither on the number of threads nor on the rest of the batch.

    Other Python threads run meanwhile. Memory besides the results: a workspace (see `explain`), kept by each thread up
    to 64 MiB. Plans are remembered, so the second call of the same sizes is the fast one.

    Algorithm: Dao 2023, arXiv:2307.08691. Definition: src/reference/attention.cc.

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> query = np.ones((1, 2, 4, 8), np.float32)  # two tokens, four heads of 8
    >>> out, logsumexp = polyhead.attention(query, query, query, causal=True, return_logsumexp=True)
    >>> out.shape, logsumexp.shape
    ((1, 2, 4, 8), (1, 4, 2))
    """
    return _bind.attention(
        query, key, value, attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes,
        dropout_p, dropout_seed, dropout_offset, dropout_origin, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k,
        kernel, device, stream, return_logsumexp, return_weights, return_column_sums, out_dtype,
    )  # fmt: skip


def attention_backward(
    grad_out,
    query,
    key,
    value,
    out,
    logsumexp,
    *,
    attn_bias=None,
    attn_mask=None,
    causal=False,
    window=None,
    align=None,
    query_offset=None,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    dropout_p=0.0,
    dropout_seed=None,
    dropout_offset=0,
    dropout_origin=None,
    seqlens_q=None,
    seqlens_k=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    kernel=None,
    device=None,
    stream=None,
    grad_logsumexp=None,
    needs=("query", "key", "value"),
    into=None,
    accumulate=False,
    grad_dtype=None,
):
    """Gradients of `attention`: of a loss by its inputs, given the loss's gradient by its output.

    The scores are computed again, a tile at a time; nothing of size Sq x Sk is stored, and dropout's mask is drawn
    again from the seed. The formulas, and the lines of `attention` that they come from, are in docs/math.md.

    Parameters
    ----------
    grad_out : array
        Of the shape and dtype of out; any strides (``numpy.broadcast_to`` and torch's ``expand`` are fine).
    query, key, value : array
        As given to `attention`.
    out, logsumexp : array
        As `attention` returned them (``return_logsumexp=True``; out in float32 too, whatever query is), or as `merge` did: then the gradients are the share of
        the keys given here.
    attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes : optional
    dropout_p, dropout_seed, dropout_offset, dropout_origin : optional
    seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, kernel, device, stream : optional
        As given to `attention`. Returned weights and column sums have no gradient.
    grad_logsumexp : array, optional
        The loss's gradient by logsumexp, of its shape and dtype; default 0.
    needs : sequence of str
        Which gradients: out of "query", "key", "value", "attn_bias", "alibi_slopes". Others are not computed.
    into : dict of str to array, optional
        NumPy arrays or torch tensors to write the gradients of these names into, of the shape of the input and the dtype of the gradient.
        Its keys are among needs; for the other needs new arrays are made.
    accumulate : bool
        Add to what the arrays of into hold, which then must be one for each of needs.
    grad_dtype : dtype or str, optional
        Of the gradients of query, key and value: query's (default), or float32 beside bfloat16 and float16, so that
        sums over calls (accumulate) are not rounded at each.

    Returns
    -------
    dict of str to array
        In the order of needs, each with its input's shape, dtype (or grad_dtype) and kind of array; the arrays of into
        where given.
        attn_bias's is summed over the dimensions that broadcast. A query that sees no key, a key that no query sees and
        a bias where nothing is visible get exactly 0, whatever they and grad_out hold there. Sums run in float32
        (float64 if query is); the bits do not depend on the number of threads.

    Raises
    ------
    polyhead.Error, TypeError, MemoryError
        As `attention`. On an error nothing in into has been touched.

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> query = np.ones((1, 2, 4, 8), np.float32)  # two tokens, four heads of 8
    >>> bias = np.zeros((4, 1, 2), np.float32)  # per head and key
    >>> out, logsumexp = polyhead.attention(query, query, query, attn_bias=bias, return_logsumexp=True)
    >>> grads = polyhead.attention_backward(
    ...     np.ones_like(out), query, query, query, out, logsumexp, attn_bias=bias, needs=("value", "attn_bias")
    ... )
    >>> {name: grad.shape for name, grad in grads.items()}
    {'value': (1, 2, 4, 8), 'attn_bias': (4, 1, 2)}
    """
    return _bind.attention_backward(
        query, key, value, attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes,
        dropout_p, dropout_seed, dropout_offset, dropout_origin, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k,
        kernel, device, stream, grad_out, out, logsumexp, grad_logsumexp, needs, into, accumulate, grad_dtype,
    )  # fmt: skip


def merge(outs, logsumexps):
    """The attention over all keys, out of its parts over some keys each.

    ``L = log sum_n exp(logsumexps[n])``, ``out = sum_n exp(logsumexps[n] - L) * outs[n]``: the keys may be split over
    calls, machines and time.

    Parameters
    ----------
    outs : sequence of array
        What `attention` returned for the same queries and a part of the keys each: [B, Sq, H, Dv], packed
        [total_q, H, Dv]; any strides, any mix of float32, bfloat16 and float16, or all float64.
    logsumexps : sequence of array
        Likewise: [B, H, Sq], packed [H, total_q].

    Returns
    -------
    out : array
        Shape, dtype and kind of array of outs[0].
    logsumexp : array
        float32 (float64 if outs are).

    Raises
    ------
    polyhead.Error, TypeError
        Shapes or dtypes that disagree, no part at all.

    Notes
    -----
    A row for which a part sees no key (logsumexp -inf) is as if that part were not there, whatever its out holds; where
    no part sees one, out is 0 and logsumexp -inf.

    To split the keys, say where the queries stand in each part: causal, window and ALiBi by ``query_offset`` less the
    first key of the part. Dropout draws its mask by the key's number within the call, so parts with dropout take seeds
    or offsets of their own.

    Gradients: with out and logsumexp of the whole, `attention_backward` on a part's keys gives these keys' gradients
    and the part's share of query's. Or go through the parts' own out and logsumexp: `merge_backward`.

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> query, key, value = np.random.rand(3, 1, 6, 2, 8).astype(np.float32)
    >>> whole = polyhead.attention(query, key, value)
    >>> first = polyhead.attention(query, key[:, :4], value[:, :4], return_logsumexp=True)
    >>> second = polyhead.attention(query, key[:, 4:], value[:, 4:], return_logsumexp=True)
    >>> out, logsumexp = polyhead.merge((first[0], second[0]), (first[1], second[1]))
    >>> np.allclose(out, whole, atol=1e-6)
    True
    """
    return _bind.merge(outs, logsumexps)


def merge_backward(grad_out, outs, logsumexps, out, logsumexp, grad_logsumexp=None):
    """Gradients of `merge`: of a loss by each part, given the loss's gradient by the whole.

    With ``w = exp(logsumexps[n] - logsumexp)``: ``w * grad_out`` by outs[n], and
    ``w * (sum over Dv of grad_out * (outs[n] - out) + grad_logsumexp)`` by logsumexps[n].

    Parameters
    ----------
    grad_out : array
        Of the shape of out; any strides.
    outs, logsumexps : sequence of array
        As given to `merge`.
    out, logsumexp : array
        As `merge` returned them.
    grad_logsumexp : array, optional
        Of the shape and dtype of logsumexp; default 0.

    Returns
    -------
    grad_outs, grad_logsumexps : list of array
        Those of each part, for `attention_backward` on that part. Rows for which the part sees no key get exactly 0.

    Raises
    ------
    polyhead.Error, TypeError
        Shapes or dtypes that disagree, no part at all.
    """
    return _bind.merge_backward(grad_out, outs, logsumexps, out, logsumexp, grad_logsumexp)


def explain(
    query,
    key,
    value,
    *,
    attn_bias=None,
    attn_mask=None,
    causal=False,
    window=None,
    align=None,
    query_offset=None,
    scale=None,
    softcap=0.0,
    alibi_slopes=None,
    dropout_p=0.0,
    dropout_seed=None,
    dropout_offset=0,
    dropout_origin=None,
    seqlens_q=None,
    seqlens_k=None,
    cu_seqlens_q=None,
    cu_seqlens_k=None,
    return_logsumexp=False,
    return_weights=False,
    return_column_sums=False,
    out_dtype=None,
    kernel=None,
    device=None,
    stream=None,
):
    """Which kernel `attention` and `attention_backward` would take here, and why not the others. Computes nothing.

    Parameters
    ----------
    query, key, value, ... : as of `attention`
        Only sizes, dtypes and options count, not what the arrays hold.

    Returns
    -------
    Explanation

    Raises
    ------
    polyhead.Error, TypeError
        As `attention`; but not for a kernel asked for by name that cannot: then ``.kernel`` is "".

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> query = np.ones((1, 2, 4, 8), np.float32)
    >>> polyhead.explain(query, query, query, kernel="reference").kernel
    'reference'
    """
    return Explanation(*_bind.explain(
        query, key, value, attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes,
        dropout_p, dropout_seed, dropout_offset, dropout_origin, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k,
        kernel, device, stream, return_logsumexp, return_weights, return_column_sums, out_dtype,
    ))  # fmt: skip


def kernels():
    """Names of the kernels usable on this machine, best first, "reference" last.

    Returns
    -------
    list of str
    """
    return _bind.kernels()


def dropout_mask(shape, dropout_p, dropout_seed, dropout_offset=0, dropout_origin=None):
    """Which weights dropout keeps: a pure function of its arguments, the same on every kernel and machine.

    Parameters
    ----------
    shape : (int, int, int, int)
        B, H, Sq, Sk as of `attention`; for packed sequences those of the sequence, taken from row b of the result.
    dropout_p : float
        0 to 1.
    dropout_seed : int
        0 .. 2^64 - 1.
    dropout_offset : int
        0 .. 2^32 - 1.
    dropout_origin : DropoutOrigin, optional
        Where the result stands in a larger mask, whose part it then is.

    Returns
    -------
    numpy.ndarray of bool, [B, H, Sq, Sk]
        True = kept (and scaled by ``1 / (1 - dropout_p)``).

    Raises
    ------
    polyhead.Error
        A value out of its range.

    Notes
    -----
    Element (b, h, i, j) is kept if its 16 random bits are >= floor(dropout_p * 65536 + 0.5). The bits come from
    Philox4x32-10 with key words (seed & 0xffffffff, seed >> 32) and counter words (b * H + h, i, j // 8, offset):
    j takes word (j % 8) // 2, its low half if j is even, else its high half.
    """
    return _bind.dropout_mask(shape, dropout_p, dropout_seed, dropout_offset, dropout_origin)
