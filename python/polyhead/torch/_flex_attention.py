"""torch's flex_attention: its score_mod, mask_mod and BlockMask as they are, run by polyhead's kernels with gradients."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import flex_attention as theirs
from torch.nn.attention.flex_attention import AuxOutput, AuxRequest, BlockMask

from polyhead import Error
from polyhead.torch import _attention, _flex_blocks, _ops, _trace_cache
from polyhead.torch._options import Options
from polyhead.torch._tracing import Tracing

# A BlockMask with blocks of this size means nothing but its mask_mod.
_WHOLE = theirs._LARGE_SPARSE_BLOCK_SIZE


def flex_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    score_mod: Callable[..., Tensor] | None = None,
    block_mask: BlockMask | None = None,
    scale: float | None = None,
    enable_gqa: bool = False,
    return_lse: bool = False,
    kernel_options: dict[str, Any] | None = None,
    *,
    return_aux: AuxRequest | None = None,
) -> Tensor | tuple[Tensor, Tensor] | tuple[Tensor, AuxOutput]:
    """`torch.nn.attention.flex_attention.flex_attention` on the CPU, forward and backward, without compiling anything.

    Parameters
    ----------
    query, key, value : torch.Tensor
        [B, H, Sq, D], [B, G, Sk, D] and [B, G, Sk, Dv]; any strides; float32, bfloat16, float16 or float64. A batch of 1
        of key and value serves all of query's.
    score_mod : function, optional
        ``score_mod(score, b, h, q_idx, kv_idx)``, what becomes of a scaled score. Traced at each call: see Notes.
    block_mask : torch.nn.attention.flex_attention.BlockMask, optional
        Of ``create_block_mask``, ``BlockMask.from_kv_blocks``, with or without a mask_mod. Blocks that it does not list are
        hidden, of those that it lists as full all is seen, in the others what mask_mod says.
    scale : float, optional
        Default ``1 / sqrt(D)``.
    enable_gqa : bool
        key and value may have fewer heads, which divide query's. h counts query's.
    return_lse : bool
        As torch has it, in natural logarithm; torch prefers return_aux.
    kernel_options : dict, optional
        Is for torch's kernels; not read.
    return_aux : torch.nn.attention.flex_attention.AuxRequest, optional
        ``AuxRequest(lse=True)``; max_scores is refused.

    Returns
    -------
    out : torch.Tensor
        [B, H, Sq, Dv]; 0 where a query sees no key.
    lse or AuxOutput : if asked for
        Its lse is float32 (float64 with float64 inputs), [B, H, Sq], differentiable, and -inf where a query sees no key.

    Raises
    ------
    polyhead.Error
        Sizes or values that make no sense. It is a ValueError and a RuntimeError. Indices beyond a tensor too, where the
        pair is visible; negative ones, which torch counts from the end.
    TypeError
        What a function of the caller's asks for and no program says; names the operation.

    Notes
    -----
    Functions are called once, with stand-ins for score and indices: arithmetic, comparisons, torch.where, abs, exp, tanh
    and the like, conversions, elements of tensors and elements by elements. Tensors that they read, closures, parameters
    and modules' attributes, 8 at most, have gradients where they require them. A decision of Python's (``if``) about a
    stand-in cannot be traced.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> query, key, value = torch.rand(3, 1, 2, 5, 8)  # two heads, five tokens
    >>> slope = torch.tensor([0.5, 0.25], requires_grad=True)
    >>> out = polyhead.torch.flex_attention(query, key, value, lambda score, b, h, q, k: score - slope[h] * abs(q - k))
    >>> out.sum().backward()
    >>> slope.grad.shape
    torch.Size([2])
    """
    _check(query, key, value, block_mask, enable_gqa)
    wants_lse = _wants_lse(return_lse, return_aux)
    out, lse = _run(query, key, value, score_mod, block_mask, Options(scale=scale))
    if return_aux is not None:
        return out, AuxOutput(lse=lse if wants_lse else None)
    return (out, lse) if wants_lse else out


def flex_attention_with_sinks(query, key, value, score_mod, block_mask, scale, sink_logits):
    """The same with sinks [H] in the softmax, which torch's has not: out alone."""
    _check(query, key, value, block_mask, enable_gqa=True)
    options = Options(scale=scale, sink_logits=_attention._in_sums_dtype(sink_logits, query))
    return _run(query, key, value, score_mod, block_mask, options)[0]


def _run(query, key, value, score_mod, block_mask, options):
    like_query = query.dim() == 4 and query.stride(1) < query.stride(2)
    if torch.is_autocast_enabled("cpu"):
        query, key, value = _ops.cast_for_autocast(query, key, value)
    key, value = (x.to(query.dtype).expand(query.shape[0], -1, -1, -1) for x in (key, value))
    slots = _program_slots(score_mod, block_mask, query, key)
    operands = (x.transpose(1, 2) for x in (query, key, value))
    out, lse, *_ = _attention._forward(*operands, (*options, *slots))
    out = out.transpose(1, 2)
    return out if like_query else out.contiguous(), lse


def _wants_lse(return_lse, return_aux):
    if return_aux is None:
        return return_lse
    if return_lse:
        raise Error("return_lse and return_aux are both given, take return_aux=AuxRequest(lse=True)")
    if return_aux.max_scores:
        raise Error("return_aux asks for max_scores, which polyhead does not return")
    return return_aux.lse


def _check(query, key, value, block_mask, enable_gqa):
    for name, tensor in (("query", query), ("key", key), ("value", value)):
        if not isinstance(tensor, Tensor):
            raise TypeError(f"{name} is a {type(tensor).__name__}, must be a torch.Tensor")
        if tensor.is_nested:
            raise Error(f"{name} is a nested tensor, must be dense")
        if tensor.dim() != 4:
            raise Error(f"{name} has {tensor.dim()} dimensions, must have 4: [B, H, S, D]")
        if tensor.shape[0] not in (query.shape[0], 1):
            raise Error(f"{name} has a batch of {tensor.shape[0]}, must have {query.shape[0]} as query, or 1")
    if key.shape[1] != query.shape[1] and not enable_gqa:
        raise Error(f"key has {key.shape[1]} heads, must have {query.shape[1]} as query, or enable_gqa=True")
    if block_mask is None:
        return
    if not isinstance(block_mask, BlockMask):
        raise TypeError(f"block_mask is a {type(block_mask).__name__}, must be a BlockMask")
    if block_mask.mask_mod is getattr(theirs, "_sliced_mask_mod_error", _WHOLE):  # since torch 2.10
        raise Error("block_mask is a slice, which has no mask_mod: give it that of the whole one, moved to its queries")
    if tuple(block_mask.BLOCK_SIZE) == (_WHOLE, _WHOLE):
        return
    sizes = (query.shape[2], key.shape[2])
    if tuple(block_mask.seq_lengths) != sizes:
        raise Error(f"block_mask is for {block_mask.seq_lengths} queries and keys, must be for {sizes}")
    for dim, name in ((0, "batch"), (1, "heads")):
        size = block_mask.kv_indices.shape[dim] if block_mask.kv_indices.dim() == 4 else 1
        if size not in (1, query.shape[dim]):
            raise Error(f"block_mask has {name} of {size}, must have 1 or {query.shape[dim]} as query")


@torch.compiler.disable  # a graph holds the operator; what leads there is run where the graph is entered
def _program_slots(score_mod, block_mask, query, key):
    """The program of both, and its captures, as `Options` takes them."""
    mask_mod = block_mask and block_mask.mask_mod

    def trace(table=None):
        tracing = Tracing(query.dtype)
        score, b, h, q, k = tracing.inputs("score", "b", "h", "q", "k")
        new_score = mask = None
        if score_mod is not None:
            new_score = tracing.trace("score_mod", score_mod, score, b, h, q, k)
        if block_mask is not None:
            mask = tracing.trace("mask_mod", mask_mod, b, h, q, k)
        alone = tracing.program(None, mask)
        if table is not None:
            mask = tracing.trace("block_mask", _flex_blocks.within, table, block_mask.BLOCK_SIZE, mask, b, h, q, k)
        return (tracing.program(new_score, mask), alone), not tracing.computes

    whole, mask = _trace_cache.traced((score_mod, mask_mod, query.dtype), trace)
    if block_mask is not None and tuple(block_mask.BLOCK_SIZE) != (_WHOLE, _WHOLE):
        table = _flex_blocks.table_beside(block_mask, mask, query, key)
        if table is not None:
            whole = trace(table)[0][0]
    return whole.slots()
