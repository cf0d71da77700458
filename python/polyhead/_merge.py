"""Joining the results of calls whose keys were split."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from polyhead import _bind
from polyhead._typing import Array, ArrayT


def merge(outs: Iterable[ArrayT], logsumexps: Iterable[Array]) -> tuple[ArrayT, Any]:
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


def merge_backward(
    grad_out: Array,
    outs: Iterable[ArrayT],
    logsumexps: Iterable[Array],
    out: Array,
    logsumexp: Array,
    grad_logsumexp: Array | None = None,
) -> tuple[list[ArrayT], list[Any]]:
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
