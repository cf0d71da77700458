"""polyhead's functions of the same names for torch tensors: `attention`, `attention_backward` and `merge`."""

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, Literal

import torch
from torch import Tensor
from torch.autograd import forward_ad
from torch.compiler import is_compiling, is_dynamo_compiling

from polyhead import DropoutOrigin, Error
from polyhead.torch import _autograd, _composition, _ops, _tracing
from polyhead.torch._options import (
    PLAIN_DIFFERENTIABLE, Options, align_number, asks_float32, for_backward, kernel_name, normalizer_number,
    offset_pair, origin_tensor, seed_tensor, weights_number, window_pair,
)  # fmt: skip
from polyhead.torch._stored import Stored, operands_of

_is_autocast_enabled = torch._C._is_any_autocast_enabled
_transforms_active = torch._C._are_functorch_transforms_active


def _tensors_only(**operands):
    for name, operand in operands.items():
        if not isinstance(operand, Tensor):
            raise TypeError(f"{name} has type {type(operand).__name__}, must be a torch.Tensor")


def _options(
    query, attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes, dropout_p,
    dropout_seed, dropout_offset, dropout_origin, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, kernel,
    sink_logits=None, normalizer="softmax", return_weights=False, return_column_sums=False, out_dtype=None,
    page_table=None, sink_keys=0, mask_at_end=False,
):  # fmt: skip
    if page_table is None and (cu_seqlens_q is None) != (cu_seqlens_k is None):
        given, missing = "qk" if cu_seqlens_k is None else "kq"
        raise Error(f"cu_seqlens_{given} is given without cu_seqlens_{missing}, packed operands need both")
    if query_offset is not None and align is not None:
        raise Error("query_offset and align are both given, take one: both say where the queries stand")
    window_left, window_right = window_pair(window)
    offset, offsets = offset_pair(query_offset, query, cu_seqlens_q)
    return Options(
        causal, scale, attn_bias, attn_mask, alibi_slopes, seed_tensor(dropout_p, dropout_seed), dropout_p,
        dropout_offset, window_left, window_right, align_number(align), offset, offsets, softcap, seqlens_q, seqlens_k,
        cu_seqlens_q, cu_seqlens_k, kernel_name(kernel), origin_tensor(dropout_origin), sink_logits,
        normalizer_number(normalizer), sink_keys, mask_at_end, weights_number(return_weights), return_column_sums,
        asks_float32(out_dtype, query),
    )  # fmt: skip


_NO_PROGRAM = _tracing.Traced()


def _program_of(score, mask, captured, dtype):
    return _NO_PROGRAM if score is mask is captured is None else _tracing.program_of(score, mask, captured, dtype)


def attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    *,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    mask_at_end: bool = False,
    causal: bool = False,
    window: Sequence[int] | None = None,
    sink_keys: int = 0,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    normalizer: Literal["softmax", "none"] = "softmax",
    score: Callable[..., Any] | str | None = None,
    mask: Callable[..., Any] | str | None = None,
    captured: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int = 0,
    dropout_origin: DropoutOrigin | Sequence[int] | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    page_table: Tensor | None = None,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    return_logsumexp: bool = False,
    return_weights: bool | Literal["mean"] = False,
    return_column_sums: bool = False,
    out_dtype: torch.dtype | None = None,
    kernel: str | None = None,
) -> Tensor | tuple[Tensor, ...]:
    """`polyhead.attention` of torch tensors on the CPU, differentiable; its arguments and results mean the same.

    Parameters
    ----------
    query, key, value : Tensor
        [B, Sq, H, D], [B, Sk, G, D] and [B, Sk, G, Dv]; packed, with cu_seqlens: [total_q, H, D], [total_k, G, D] and
        [total_k, G, Dv]. float32, bfloat16, float16 or float64, all three the same; any strides. Under autocast they
        are cast as torch casts them for its own attention.
    attn_bias : Tensor, optional
        Broadcasts to [B, H, Sq, Sk]; float32, bfloat16 or float16 (float64 too where query is). -inf hides a key.
    attn_mask : Tensor of bool, optional
        True = may look. Broadcasts likewise.
    mask_at_end, causal, window, sink_keys, align, scale, softcap, dropout_p, dropout_offset, dropout_origin, kernel : optional
        As of `polyhead.attention`.
    query_offset : int or Tensor, optional
        Integers [B], or one.
    alibi_slopes : Tensor of float32 [H] or [B, H], optional
    sink_logits : Tensor of floats [H], optional
        One more logit of each row of a head, as of `polyhead.attention`; taken as float32 (float64 if query is).
    normalizer : {"softmax", "none"}
        As of `polyhead.attention`: "none" takes the scores as they are, or what score gives, for weights.
    score, mask : function or str, optional
        As of `polyhead.attention`. Functions may use torch's operations on elements, and any on tensors as a whole; tensors
        that they close over count as captured.
    captured : dict of str to Tensor, optional
        Floats have gradients. float64 beside other inputs is taken as float32, small integers as int32.
    dropout_seed : int or Tensor, optional
        0 .. 2^64 - 1, or an int64 scalar of the same bits. Default: drawn from torch's default CPU generator, so that
        `torch.manual_seed` repeats a call and checkpointing repeats its mask.
    seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k : Tensor of int32 or int64, optional
        [B], [B], [B + 1], [B + 1].
    page_table : Tensor of int32 or int64 [B, P], optional
        As of `polyhead.attention`: key and value are a pool of pages. No gradients, and no score or mask.
    key_scales, value_scales : Tensor of float32 (float16 of pairs of int4), optional
        As of `polyhead.attention`, of torch.int8, torch.float8_e4m3fn, torch.float8_e5m2 or torch.uint8 (pairs of int4) keys
        and values. No gradients, and no score or mask.
    return_logsumexp, return_weights, return_column_sums : optional
        As of `polyhead.attention`.
    out_dtype : torch.dtype, optional
        Of out: query's (default), or torch.float32 beside bfloat16 and float16. Its gradient comes in as float32 then;
        those of query, key and value keep their dtypes, as autograd wants (`polyhead.attention_backward` takes torch
        tensors too, and has grad_dtype).

    Returns
    -------
    out : Tensor
        [B, Sq, H, Dv], packed [total_q, H, Dv]; contiguous.
    logsumexp, weights, column_sums : Tensor, if asked for
        Out alone, or a tuple in this order.

    Raises
    ------
    ValueError, RuntimeError, TypeError
        What `polyhead.attention` refuses; the sentence names the argument. polyhead.Error is both of the first two.

    Notes
    -----
    Gradients go to query, key, value, attn_bias (summed over what broadcasts), alibi_slopes, sink_logits and what score
    reads, from out and logsumexp, in O(N) memory. Through returned weights there are gradients too, in O(Sq Sk) memory as the weights themselves;
    column_sums has none. Second derivatives are computed in torch's operations, in O(Sq Sk) memory; these, and the
    gradients through weights, want finite numbers in keys that some queries see, though others do not: those of padding
    may hold anything. Forward-mode derivatives are refused.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> query = torch.ones(1, 2, 4, 8, requires_grad=True)  # two tokens, four heads of 8
    >>> out = polyhead.torch.attention(query, query, query, causal=True)
    >>> out.sum().backward()
    >>> out.shape, query.grad.shape
    (torch.Size([1, 2, 4, 8]), torch.Size([1, 2, 4, 8]))
    """
    nothing_else = (
        attn_bias is attn_mask is window is query_offset is alibi_slopes is sink_logits is dropout_seed is kernel is None
        and score is mask is captured is dropout_origin is out_dtype is key_scales is value_scales is None
        and seqlens_q is seqlens_k is cu_seqlens_q is cu_seqlens_k is page_table is None and normalizer == "softmax"
        and not (softcap or dropout_p or sink_keys or mask_at_end or return_weights or return_column_sums)
    )
    if (
        nothing_else
        and type(query) is type(key) is type(value) is Tensor
        and not (return_logsumexp or is_dynamo_compiling() or _is_autocast_enabled() or _transforms_active())
        and forward_ad._current_level < 0
    ):
        try:
            return _autograd.plain_forward(query, key, value, causal, scale, align_number(align))
        except ValueError as error:
            raise _named(error) from None
    _tensors_only(query=query, key=key, value=value)
    if _is_autocast_enabled() and torch.is_autocast_enabled(query.device.type):
        query, key, value = _ops.cast_for_autocast(query, key, value)
    if return_logsumexp and normalizer == "none":
        raise Error('return_logsumexp is True, but normalizer is "none": there is no logsumexp')
    program = _program_of(score, mask, captured, query.dtype)
    sink_logits = _in_sums_dtype(sink_logits, query)
    options = _options(
        query, attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes, dropout_p,
        dropout_seed, dropout_offset, dropout_origin, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, kernel,
        sink_logits, normalizer, return_weights, return_column_sums, out_dtype, page_table, sink_keys, mask_at_end,
    )  # fmt: skip
    cache = page_table, key_scales, value_scales
    query, key, value, cache = _read(query, key, value, program, (attn_bias, alibi_slopes, sink_logits), cache)
    inputs = (query, key, value, attn_bias, alibi_slopes, sink_logits, *program.tensors)
    cached = any(each is not None for each in cache)
    if not cached and return_weights and _autograd.differentiates(*inputs):
        return _with_differentiable_weights(query, key, value, options, program.slots(), return_logsumexp)
    if cached:
        out, logsumexp, weights, column_sums = _cached(inputs, options, program, *cache)
    else:
        options = (*options, *program.slots()) if program is not _NO_PROGRAM else options
        out, logsumexp, weights, column_sums = _forward(query, key, value, options)
    asked = ((return_logsumexp, logsumexp), (return_weights, weights), (return_column_sums, column_sums))
    return _with_results(out, asked)


def _read(query, key, value, program, added, cache):
    """query, key, value and cache; what `polyhead.torch.Cache` stores in fewer bytes is dense where that will not do."""
    if Stored not in (type(key), type(value)):
        return query, key, value, cache
    if program is not _NO_PROGRAM or _autograd.differentiates(query, *added):
        return query, *(x.dense() if isinstance(x, Stored) else x for x in (key, value)), cache
    query, key, value, *scales = operands_of(query, key, value)
    return query, key, value, (cache[0], *scales)


def _with_results(out, asked):
    results = [result for wanted, result in asked if wanted]
    return (out, *results) if results else out


def _in_sums_dtype(sink_logits, query):
    if sink_logits is None or not sink_logits.is_floating_point():
        return sink_logits
    return sink_logits.to(torch.float64 if query.dtype == torch.float64 else torch.float32)


def _forward(query, key, value, options):
    return _run(_ops.forward_of(options), _autograd.attention_forward, query, key, value, *options)


def _cached(inputs, options, program, *cache):
    given = {name: x for name, x in zip(("page_table", "key_scales", "value_scales"), cache) if x is not None}
    _tensors_only(**given)
    name = next(iter(given))
    if program is not _NO_PROGRAM:
        raise Error(f"score and mask cannot be given with {name}")
    if _autograd.differentiates(*inputs):
        kind = "paged keys" if name == "page_table" else "keys and values with scales"
        raise Error(f"{name} is given where gradients are recorded: {kind} have none, take torch.no_grad()")
    query, key, value, *_ = inputs
    return _run(_ops.attention_forward_cached, _ops.attention_forward_cached, query, key, value, *options, *cache)


def _run(operator, autograd, *arguments):
    if is_compiling():  # a graph holds the operator
        return operator(*arguments)
    try:  # its autograd part itself, without the way there through the dispatcher
        return autograd(*arguments)
    except ValueError as error:
        raise _named(error) from None


def _named(error):
    """A ValueError of C++, which cannot name our class, as that."""
    return Error(str(error)) if type(error) is ValueError else error


def _with_differentiable_weights(query, key, value, options, program, return_logsumexp):
    out, logsumexp, _, column_sums = _forward(query, key, value, (*options._replace(return_weights=0), *program))
    weights = _composition.weights(query, key, logsumexp, (*options, *program))
    if options.return_weights == 2:
        weights = weights.mean(1)
    asked = ((return_logsumexp, logsumexp), (True, weights), (options.return_column_sums, column_sums))
    return _with_results(out, asked)


def attention_backward(
    grad_out: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    out: Tensor | None,
    logsumexp: Tensor | None,
    *,
    attn_bias: Tensor | None = None,
    attn_mask: Tensor | None = None,
    mask_at_end: bool = False,
    causal: bool = False,
    window: Sequence[int] | None = None,
    sink_keys: int = 0,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: int | Tensor | None = None,
    scale: float | None = None,
    softcap: float = 0.0,
    alibi_slopes: Tensor | None = None,
    sink_logits: Tensor | None = None,
    normalizer: Literal["softmax", "none"] = "softmax",
    score: Callable[..., Any] | str | None = None,
    mask: Callable[..., Any] | str | None = None,
    captured: Mapping[str, Tensor] | None = None,
    dropout_p: float = 0.0,
    dropout_seed: int | Tensor | None = None,
    dropout_offset: int = 0,
    dropout_origin: DropoutOrigin | Sequence[int] | None = None,
    seqlens_q: Tensor | None = None,
    seqlens_k: Tensor | None = None,
    cu_seqlens_q: Tensor | None = None,
    cu_seqlens_k: Tensor | None = None,
    kernel: str | None = None,
    grad_logsumexp: Tensor | None = None,
    needs: Iterable[str] = ("query", "key", "value"),
) -> dict[str, Tensor]:
    """`polyhead.attention_backward` of torch tensors: for those who keep out and logsumexp themselves.

    Parameters
    ----------
    grad_out, query, key, value, out, logsumexp : Tensor
        As of `polyhead.attention_backward`; out and logsumexp may be merged ones, out and grad_out float32, and None with
        normalizer "none".
    attn_bias, attn_mask, mask_at_end, causal, window, sink_keys, align, query_offset, scale, softcap : optional
    alibi_slopes, sink_logits, normalizer, score, mask, captured : optional
    dropout_p, dropout_seed, dropout_offset, dropout_origin : optional
    seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, kernel : optional
        As given to `attention`; where dropout_p > 0, dropout_seed must be given.
    grad_logsumexp : Tensor, optional
    needs : sequence of str
        Which gradients: out of "query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits" and the names of
        captured floats. That of sink_logits is float32 (float64 if query is).

    Returns
    -------
    dict of str to Tensor
        In the order of needs, each of its input's shape and dtype, contiguous.

    Raises
    ------
    ValueError, RuntimeError, TypeError
        As `attention`.
    """
    if normalizer == "none" and isinstance(grad_out, Tensor):
        if logsumexp is not None:
            raise Error('logsumexp is given, but normalizer is "none": there is no logsumexp')
        out, logsumexp = grad_out if out is None else out, grad_out.new_empty(0, dtype=torch.float32)
    _tensors_only(grad_out=grad_out, query=query, key=key, value=value, out=out, logsumexp=logsumexp)
    if dropout_p and dropout_seed is None:
        raise Error(f"dropout_p is {dropout_p}, so dropout_seed must be given: that of attention")
    needs = tuple(needs)
    program = _program_of(score, mask, captured, query.dtype)
    sink_logits = _in_sums_dtype(sink_logits, query)
    plain = (query, key, value, attn_bias, alibi_slopes, sink_logits)
    inputs = dict(zip(PLAIN_DIFFERENTIABLE, plain, strict=True))
    inputs |= dict(zip(program.names, program.tensors))
    places = {name: bit for bit, name in enumerate((*PLAIN_DIFFERENTIABLE, *program.names))}
    for name in needs:
        if name not in inputs:
            raise Error(f'needs holds "{name}", must be out of {", ".join(places)}')
        if inputs[name] is None:
            raise Error(f'needs holds "{name}", but {name} is not given')
    options = _options(
        query, attn_bias, attn_mask, causal, window, align, query_offset, scale, softcap, alibi_slopes, dropout_p,
        dropout_seed, dropout_offset, dropout_origin, seqlens_q, seqlens_k, cu_seqlens_q, cu_seqlens_k, kernel, sink_logits,
        normalizer, sink_keys=sink_keys, mask_at_end=mask_at_end,
    )  # fmt: skip
    bits = sum(1 << places[name] for name in dict.fromkeys(needs))
    tensors = (grad_out, grad_logsumexp, query, key, value, out, logsumexp)
    options = for_backward((*options, *program.slots()))
    grads = _run(_ops.backward_of(options), _autograd.attention_backward, *tensors, bits, *options)
    return {name: grads[places[name]] for name in needs}


def merge(outs: Iterable[Tensor], logsumexps: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    """`polyhead.merge` of torch tensors: the attention over all keys, out of its parts over some keys each.

    Parameters
    ----------
    outs, logsumexps : sequence of Tensor
        What `attention` returned for the same queries and a part of the keys each.

    Returns
    -------
    out, logsumexp : Tensor
        Differentiable by each of outs and logsumexps (once).

    Raises
    ------
    ValueError, RuntimeError
        Shapes or dtypes that disagree, no part at all.
    """
    outs, logsumexps = list(outs), list(logsumexps)
    if not outs:
        raise Error("outs is empty, must hold the out of each part")
    _tensors_only(**{f"outs[{i}]": each for i, each in enumerate(outs)})
    _tensors_only(**{f"logsumexps[{i}]": each for i, each in enumerate(logsumexps)})
    return _run(_ops.merge_forward, _autograd.merge_forward, outs, logsumexps)
