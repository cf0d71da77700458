"""Multi-head attention: one meaning on every kernel, results that do not depend on the number of threads.

    import numpy as np, polyhead
    query = key = value = np.random.rand(1, 384, 16, 64).astype(np.float32)
    out = polyhead.attention(query, key, value)

`attention` computes, `attention_backward` its gradients; `merge` joins results whose keys were split over calls, and
`merge_backward` their gradients. `explain` says with which kernel and why not with another, `kernels` lists them,
`dropout_mask` tells what dropout keeps, `set_num_threads` sets the number of threads. `MultiHeadAttention` is the layer,
with projections around attention; `AttentionBlock` and `FeedForwardBlock` are the two of a transformer. `polyhead.torch`,
`polyhead.onnx` and `polyhead.weights` are imported by name. `python -m polyhead info` describes this build and this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, SupportsFloat, SupportsIndex

from polyhead import _bind
from polyhead._bind import Error, __version__
from polyhead._blocks import AttentionBlock, FeedForwardBlock
from polyhead._cuda_arrays import DeviceArray
from polyhead._dropout import DropoutOrigin, dropout_mask
from polyhead._explanation import Explanation
from polyhead._kv_cache import KvCache
from polyhead._merge import merge, merge_backward
from polyhead._multi_head_attention import LayerCaches, MultiHeadAttention
from polyhead._page_table import NewTokens, PageTable
from polyhead._program_call import program_arguments
from polyhead._typing import Array, ArrayT

__all__ = [
    "Array", "AttentionBlock", "DeviceArray", "DropoutOrigin", "Error", "Explanation", "FeedForwardBlock", "KvCache",
    "LayerCaches", "MultiHeadAttention", "NewTokens", "PageTable", "__version__", "attention", "attention_backward",
    "dropout_mask", "explain", "get_num_threads", "kernels", "merge", "merge_backward", "set_num_threads",
]  # fmt: skip


def attention(
    query: ArrayT,
    key: Array,
    value: Array,
    *,
    attn_bias: Array | None = None,
    attn_mask: Array | None = None,
    mask_at_end: bool = False,
    causal: bool = False,
    window: Iterable[int] | None = None,
    sink_keys: SupportsIndex = 0,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: SupportsIndex | Array | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat = 0.0,
    alibi_slopes: Array | None = None,
    sink_logits: Array | None = None,
    normalizer: Literal["softmax", "none"] = "softmax",
    score: Callable[..., Any] | str | None = None,
    mask: Callable[..., Any] | str | None = None,
    captured: Mapping[str, Array] | None = None,
    dropout_p: SupportsFloat = 0.0,
    dropout_seed: SupportsIndex | None = None,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Iterable[int] | None = None,
    seqlens_q: Array | None = None,
    seqlens_k: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    page_table: Array | None = None,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    return_logsumexp: bool = False,
    return_weights: bool | Literal["mean"] = False,
    return_column_sums: bool = False,
    out_dtype: Any = None,
    out: ArrayT | None = None,
    kernel: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    stream: SupportsIndex | None = None,
) -> ArrayT | Any:
    """softmax(scale * query @ key^T + attn_bias) @ value, without storing the scores.

    In this order: scores ``S = scale * query @ key^T``; ``S = softcap * tanh(S / softcap)`` if softcap > 0;
    ``S += attn_bias - slope * |i + offset - j|``; ``S = score(S)`` if given; ``S = -inf`` where hidden; ``L = log sum_j exp(S)``,
    with ``exp(sink_logits[h])`` in the sum if given; ``P = exp(S - L)``; ``out = dropout(P) @ value``. With normalizer "none" there
    is no L: ``P = S``, and 0 where hidden.

    Sizes: B batch, Sq / Sk sequence lengths, H query heads, G key/value heads (G divides H; query head h reads
    h // (H // G)), D head_dim of query and key, Dv head_dim of value.

    Parameters
    ----------
    query, key, value : array
        [B, Sq, H, D], [B, Sk, G, D] and [B, Sk, G, Dv]; packed, with cu_seqlens: [total_q, H, D], [total_k, G, D] and
        [total_k, G, Dv]. float32, bfloat16, float16 or float64, all three the same. NumPy arrays (bfloat16 by
        ml_dtypes) or any in CPU memory with ``__dlpack__`` (torch, jax, ...); read in place, any strides, 0 and
        negative ones too. Or all arrays on one CUDA device, where the build has CUDA kernels (docs/install.md): torch's,
        CuPy's, Numba's, any with ``__dlpack__`` or ``__cuda_array_interface__``. No gradient flows: a torch tensor that
        requires one is taken by its values; the gradients are in `attention_backward`.
    attn_bias : array, optional
        Added to the scores; broadcasts to [B, H, Sq, Sk] as in NumPy. float32, bfloat16 or float16, whatever query is
        (float64 too where query is). -inf hides a key.
    attn_mask : array of bool, optional
        True = may look. Broadcasts likewise. Both may be given.
    mask_at_end : bool
        attn_mask tells of the last keys of each sequence alone: its last dimension is any n from 0 to Sk, and column c is
        key ``length - n + c``; it hides no key before. What a tree of drafted tokens sees of itself, at the end of a cache.
    causal : bool
        Query i sees key j only if ``j <= i + offset``.
    window : (int, int), optional
        (left, right): query i sees ``i + offset - left <= j <= i + offset + right``. -1 = open.
    sink_keys : int
        Keys j < sink_keys are seen whatever left says: the beginning of a text that the window slides over (StreamingLLM,
        arXiv:2309.17453). What causal, right, lengths and masks hide stays hidden. 0 = none.
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
    sink_logits : float32 array [H] (float64 if query is), optional
        One more logit of each row of a head, which takes a share of the weights and has no value: the rows of weights sum
        to less than 1, logsumexp counts it (gpt-oss, transformers' ``s_aux``; of 0: "softmax off by one"). -inf: none.
    normalizer : {"softmax", "none"}
        What makes the weights of a row out of its scores. "none": nothing, a weight is the score itself, or 0 where hidden.
        With score it is what that gives, as in sigmoid attention, ``score=lambda score: sigmoid(score - math.log(n))``;
        without, attention is linear in the scores. There is no logsumexp then, and no sink.
    score : function or str, optional
        What becomes of each score: ``lambda score, h, q, k, slope: score - slope[h] * abs(q - k)``, or the same as text,
        ``"score - slope[h] * abs(q - k)"``. Parameters by name: score, b (batch), h (query head), q (query), k (key),
        offset (query i stands at key i + offset), and those in captured; others keep their defaults. The function is
        traced at each call: Python's operators, NumPy's functions and those of `polyhead.programs` (docs/programs.md).
        A score of -inf hides its key.
    mask : function or str, optional
        True = may look: ``lambda q, k, doc: doc[q] == doc[k]``. It knows no score.
    captured : dict of str to array, optional
        The tensors that score and mask read by these names, an element at a time: 8 at most, of 0 to 4 dimensions,
        floats, int32, int64 or bool. Text writes the value of one of 0 dimensions as ``name[]``.
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
    page_table : int32 or int64 array [B, P], optional
        Key and value are a pool of pages then, [num_pages, page_size, G, D] and [num_pages, page_size, G, Dv], of which
        sequence b has the pages ``page_table[b]``, in order: Sk is P * page_size. Needs seqlens_k; what no length reaches
        is never read. Sequences may share pages. With packed queries: cu_seqlens_q and seqlens_k. The results have the
        bits of the same keys one after the other. No gradients.
    key_scales, value_scales : float32 array, optional
        Keys, values or both may be stored as int8, float8_e4m3fn, float8_e5m2 (ml_dtypes', torch's) or uint8: pairs of int4,
        [..., D / 2], of which number 2 i stands in the low four bits. Each number is multiplied by the scale of its group:
        [B, Sk, G, groups] (packed, paged: likewise), groups 1 or D divided by a multiple of 16; float16 of pairs of int4. No
        gradients.
    return_logsumexp : bool
        `attention_backward` and `merge` need it.
    return_weights : bool or "mean"
        P after dropout, or its mean over heads. Costs O(Sq Sk) memory. Not when packed.
    return_column_sums : bool
        Sums over the queries of P before dropout. Not when packed.
    out_dtype : dtype or str, optional
        Of out: query's (default), or float32 beside bfloat16 and float16, the sums as they are before rounding. For
        parts that are merged: they would round at each step.
    out : array, optional
        A NumPy array, torch tensor or array with ``__cuda_array_interface__`` that out is written to, of its shape and
        dtype (in float32 beside bfloat16 and float16: as out_dtype), any strides whose elements lie apart; it is what is
        returned as out. It must not overlap an input.
    kernel : str, optional
        One of `kernels()`, instead of the best that can compute this.
    device : {"cpu", "cuda"}, optional
        Where it is computed and where the arrays lie; default: where query lies. A device that no kernel of this build
        serves is an error.
    stream : int, optional
        Of a CUDA device: the handle of the stream that the work is put on, 0 for CUDA's default stream. Default: the
        current stream of query's package (torch, CuPy), else CUDA's default stream. Inputs are waited for on the device,
        nobody waits for the results: they are there in the order of that stream. The CPU has none.

    Returns
    -------
    out : array
        [B, Sq, H, Dv], packed [total_q, H, Dv]; in out_dtype, kind of array of query, contiguous. On a CUDA device it is
        made by torch, CuPy or Numba, if query is theirs; else it is a `DeviceArray`.
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
    Out is returned alone, or a tuple of what was asked for, in the order above. A query that sees no key, or lies in
    padding, gets out 0, logsumexp -inf (no padding: its sink, if there is one) and weights 0; what is hidden from it changes no bit, NaN included. Sums run in
    float32 (float64 if query is). The bits of the results depend neither on the number of threads nor on the rest of the
    batch.

    Other Python threads run meanwhile. Memory besides the results: a workspace (see `explain`), kept by each thread up
    to 64 MiB; on a CUDA device it comes from where the results come from, for as long as the call runs there. Plans are
    remembered, so the second call of the same sizes is the fast one.

    Algorithm: Dao 2023, arXiv:2307.08691. Definition: src/reference/attention.cc.

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> query = np.ones((1, 2, 4, 8), np.float32)  # two tokens, four heads of 8
    >>> out, logsumexp = polyhead.attention(query, query, query, causal=True, return_logsumexp=True)
    >>> out.shape, logsumexp.shape
    ((1, 2, 4, 8), (1, 4, 2))

    A cache in pages of 16 keys; the sequences share page 3:

    >>> cache = np.ones((8, 16, 4, 8), np.float32)
    >>> token, pages = np.ones((2, 1, 4, 8), np.float32), np.array([[3, 0], [3, 5]])
    >>> polyhead.attention(token, cache, cache, page_table=pages, seqlens_k=np.array([20, 31])).shape
    (2, 1, 4, 8)

    Its keys as int8, with a scale for each token and head:

    >>> scales = np.full((8, 16, 4, 1), 0.01, np.float32)
    >>> options = {"page_table": pages, "seqlens_k": np.array([20, 31]), "key_scales": scales}
    >>> polyhead.attention(token, (cache * 100).astype(np.int8), cache, **options).shape
    (2, 1, 4, 8)

    Documents side by side, whose scores fall with the distance:

    >>> doc, slope = np.array([0, 1]), np.array([0.5, 0.25, 0.125, 0.0625], np.float32)
    >>> out = polyhead.attention(
    ...     query, query, query,
    ...     score=lambda score, h, q, k, slope: score - slope[h] * abs(q - k),
    ...     mask=lambda q, k, doc: doc[q] == doc[k],
    ...     captured={"doc": doc, "slope": slope},
    ... )
    """
    return _bind.attention(
        query, key, value, attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes,
        dropout_p, dropout_seed, dropout_offset, dropout_origin, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k,
        kernel, device, stream, *program_arguments(score, mask, captured), sink_logits, normalizer, sink_keys,
        mask_at_end, return_logsumexp, return_weights, return_column_sums, out_dtype, out, page_table, key_scales, value_scales,
    )  # fmt: skip


def attention_backward(
    grad_out: Array,
    query: Array,
    key: Array,
    value: Array,
    out: Array | None,
    logsumexp: Array | None,
    *,
    attn_bias: Array | None = None,
    attn_mask: Array | None = None,
    mask_at_end: bool = False,
    causal: bool = False,
    window: Iterable[int] | None = None,
    sink_keys: SupportsIndex = 0,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: SupportsIndex | Array | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat = 0.0,
    alibi_slopes: Array | None = None,
    sink_logits: Array | None = None,
    normalizer: Literal["softmax", "none"] = "softmax",
    score: Callable[..., Any] | str | None = None,
    mask: Callable[..., Any] | str | None = None,
    captured: Mapping[str, Array] | None = None,
    dropout_p: SupportsFloat = 0.0,
    dropout_seed: SupportsIndex | None = None,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Iterable[int] | None = None,
    seqlens_q: Array | None = None,
    seqlens_k: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    kernel: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    stream: SupportsIndex | None = None,
    grad_logsumexp: Array | None = None,
    needs: Iterable[str] = ("query", "key", "value"),
    into: dict[str, Any] | None = None,
    accumulate: bool = False,
    grad_dtype: Any = None,
) -> dict[str, Any]:
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
        the keys given here. With normalizer "none" neither is needed: out may be None, logsumexp must be.
    attn_bias, attn_mask, mask_at_end, causal, window, sink_keys, align, query_offset, scale, softcap : optional
    alibi_slopes, sink_logits, normalizer, score, mask, captured : optional
    dropout_p, dropout_seed, dropout_offset, dropout_origin : optional
    seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, kernel, device, stream : optional
        As given to `attention`. Returned weights and column sums have no gradient.
    grad_logsumexp : array, optional
        The loss's gradient by logsumexp, of its shape and dtype; default 0.
    needs : sequence of str
        Which gradients: out of "query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits" and the names of captured
        floats. Others are not computed.
    into : dict of str to array, optional
        NumPy arrays, torch tensors or arrays with ``__cuda_array_interface__`` to write the gradients of these names into,
        of the shape of the input and the dtype of the gradient.
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
        kernel, device, stream, *program_arguments(score, mask, captured), sink_logits, normalizer, sink_keys,
        mask_at_end, grad_out, out, logsumexp, grad_logsumexp, needs, into, accumulate, grad_dtype,
    )  # fmt: skip


def explain(
    query: Array,
    key: Array,
    value: Array,
    *,
    attn_bias: Array | None = None,
    attn_mask: Array | None = None,
    mask_at_end: bool = False,
    causal: bool = False,
    window: Iterable[int] | None = None,
    sink_keys: SupportsIndex = 0,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: SupportsIndex | Array | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat = 0.0,
    alibi_slopes: Array | None = None,
    sink_logits: Array | None = None,
    normalizer: Literal["softmax", "none"] = "softmax",
    score: Callable[..., Any] | str | None = None,
    mask: Callable[..., Any] | str | None = None,
    captured: Mapping[str, Array] | None = None,
    dropout_p: SupportsFloat = 0.0,
    dropout_seed: SupportsIndex | None = None,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Iterable[int] | None = None,
    seqlens_q: Array | None = None,
    seqlens_k: Array | None = None,
    cu_seqlens_q: Array | None = None,
    cu_seqlens_k: Array | None = None,
    page_table: Array | None = None,
    key_scales: Array | None = None,
    value_scales: Array | None = None,
    return_logsumexp: bool = False,
    return_weights: bool | Literal["mean"] = False,
    return_column_sums: bool = False,
    out_dtype: Any = None,
    out: ArrayT | None = None,
    kernel: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    stream: SupportsIndex | None = None,
) -> Explanation:
    """Which kernel `attention` and `attention_backward` would take here, and why not the others. Computes nothing.

    Parameters
    ----------
    query, key, value, ... : as of `attention`
        Only sizes, dtypes and options count; with score or mask, what captured, lengths and offsets hold too.

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
        kernel, device, stream, *program_arguments(score, mask, captured), sink_logits, normalizer, sink_keys,
        mask_at_end, return_logsumexp, return_weights, return_column_sums, out_dtype, out, page_table, key_scales, value_scales,
    ))  # fmt: skip


def set_num_threads(num_threads: SupportsIndex) -> None:
    """Sets how many threads compute the calls that begin from now on, on arrays of NumPy and DLPack.

    Before it is called there are POLYHEAD_THREADS of them, else as many as this process may use CPUs. Results do not
    depend on it. Calls through `polyhead.torch` run on torch's threads: ``torch.set_num_threads``.

    Parameters
    ----------
    num_threads : int
        1 to 1024, the caller's included. For each number asked for, a pool is kept, whose threads sleep when idle.

    Raises
    ------
    polyhead.Error, TypeError
        Another number, or none.
    """
    _bind.set_num_threads(num_threads)


def get_num_threads() -> int:
    """How many threads compute a call on arrays of NumPy and DLPack, the caller's included.

    Returns
    -------
    int
    """
    return _bind.num_threads()


def kernels() -> list[str]:
    """Names of the kernels usable on this machine, best first, "reference" last.

    Returns
    -------
    list of str
    """
    return _bind.kernels()
