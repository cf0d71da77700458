"""The operators of a transformer's blocks: arguments, the shapes of their results, and their kernels over the binding."""

from typing import NamedTuple, Optional

import torch
from torch import Tensor

from polyhead import Error, _bind
from polyhead.torch import _report

NORMS = {None: 0, "layer": 1, "rms": 2}  # norm_kind
ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}  # activation


class AttentionBlock(NamedTuple):
    """The arguments of attention_block_forward: of out = query + dropout(layer(norm(query))), each part optional.

    Tokens are [batch, seqlen, size], or [seqlen, batch, size] without batch_first; weights as torch stores them.
    """

    query: Tensor
    key: Optional[Tensor] = None  # it is query
    value: Optional[Tensor] = None  # it is key
    in_proj_weight: Optional[Tensor] = None  # [(H + 2 G) * D, size]: rows of q, of k, of v; or the next three
    q_proj_weight: Optional[Tensor] = None
    k_proj_weight: Optional[Tensor] = None
    v_proj_weight: Optional[Tensor] = None
    in_proj_bias: Optional[Tensor] = None
    out_proj_weight: Optional[Tensor] = None
    out_proj_bias: Optional[Tensor] = None
    norm_weight: Optional[Tensor] = None
    norm_bias: Optional[Tensor] = None
    attn_bias: Optional[Tensor] = None
    attn_mask: Optional[Tensor] = None  # True = may look
    dropout_seed: Optional[Tensor] = None  # int64 scalars, the bits of a uint64
    output_dropout_seed: Optional[Tensor] = None
    num_heads: int = 1
    num_heads_kv: int = 1
    batch_first: bool = True
    causal: bool = False
    scale: Optional[float] = None
    dropout_p: float = 0.0
    output_dropout_p: float = 0.0
    return_weights: int = 0  # 1: per head, 2: their mean
    norm_kind: int = 0  # of NORMS
    norm_first: bool = False
    norm_eps: float = 1e-5
    residual: bool = False
    keep: bool = False  # what backward needs: reserve


class FeedForwardBlock(NamedTuple):
    """Of feed_forward_block_forward: out = x + dropout(dropout(activation(norm(x) W1^T + b1)) W2^T + b2)."""

    x: Tensor  # [batch, seqlen, size]
    weight1: Optional[Tensor] = None
    bias1: Optional[Tensor] = None
    weight2: Optional[Tensor] = None
    bias2: Optional[Tensor] = None
    norm_weight: Optional[Tensor] = None
    norm_bias: Optional[Tensor] = None
    inner_dropout_seed: Optional[Tensor] = None
    output_dropout_seed: Optional[Tensor] = None
    activation: int = 0  # of ACTIVATIONS
    inner_dropout_p: float = 0.0
    output_dropout_p: float = 0.0
    norm_kind: int = 0
    norm_first: bool = False
    norm_eps: float = 1e-5
    residual: bool = False
    keep: bool = False


# Of each: how many arguments are tensors, and how many of these, the first, have gradients: `needs` has a bit for each.
NUM_TENSORS = {AttentionBlock: 16, FeedForwardBlock: 9}
NUM_DIFFERENTIABLE = {AttentionBlock: 13, FeedForwardBlock: 7}


def swapped(tokens, batch_first):
    """[S, B, E] as [B, S, E], and back. Of other dimensions, which are refused later, as it is."""
    return tokens if batch_first or tokens is None or tokens.dim() != 3 else tokens.transpose(0, 1)


def head_dims(a: AttentionBlock):
    """The length of a head of q and k, and of v."""
    if a.in_proj_weight is not None:
        dim = a.in_proj_weight.shape[0] // (a.num_heads + 2 * a.num_heads_kv)
        return dim, dim
    if a.q_proj_weight is None or a.v_proj_weight is None:
        raise Error("in_proj_weight is not given, so q_proj_weight, k_proj_weight and v_proj_weight must be")
    return a.q_proj_weight.shape[0] // a.num_heads, a.v_proj_weight.shape[0] // a.num_heads_kv


def _reserve(x, elements, statistics):
    """As in python/src/blocks.cc: the words that hold so many elements of x's dtype and so many statistics."""
    num_bytes = elements * x.element_size() + statistics * (8 if x.dtype == torch.float64 else 4)
    return x.new_empty(((num_bytes + 7) // 8 + 128,), dtype=torch.int64)


def _attention_block_forward(*arguments):
    a = AttentionBlock(*arguments)
    query = swapped(a.query, a.batch_first)
    key = query if a.key is None else swapped(a.key, a.batch_first)
    batch, seqlen_q, _ = query.shape
    seqlen_k = key.shape[1]
    head_dim, head_dim_v = head_dims(a)
    heads_size = a.num_heads * head_dim_v
    out_size = heads_size if a.out_proj_weight is None else a.out_proj_weight.shape[0]
    shape = (batch, seqlen_q) if a.batch_first else (seqlen_q, batch)
    out, weights, reserve = query.new_empty((*shape, out_size)), None, None
    if a.return_weights:
        heads = (a.num_heads,) if a.return_weights == 1 else ()
        weights = query.new_empty((batch, *heads, seqlen_q, seqlen_k))
    if a.keep or a.dropout_p > 0 or a.output_dropout_p > 0:
        sum_size = out_size if a.norm_kind and not a.norm_first else 0
        of_query = a.num_heads * head_dim + heads_size + sum_size
        of_key = a.num_heads_kv * (head_dim + head_dim_v)
        statistics = batch * seqlen_q * (a.num_heads + (2 if a.norm_kind else 0))
        reserve = _reserve(query, batch * (seqlen_q * of_query + seqlen_k * of_key), statistics)
    return out, weights, reserve


def _feed_forward_block_forward(*arguments):
    a = FeedForwardBlock(*arguments)
    batch, seqlen, size = a.x.shape
    out, reserve = a.x.new_empty(a.x.shape), None
    if a.keep or a.inner_dropout_p > 0 or a.output_dropout_p > 0:
        elements = batch * seqlen * (a.weight1.shape[0] + (size if a.norm_kind and not a.norm_first else 0))
        reserve = _reserve(a.x, elements, batch * seqlen * (2 if a.norm_kind else 0))
    return out, reserve


def _is_stored_in_first(weight):
    """A matrix [out, in] that is a view of one [in, out]: so is its gradient, or every step would copy it."""
    return weight.dim() == 2 and 0 < weight.stride(0) < weight.stride(1)


def _gradients(inputs, needs):
    """New ones, of the inputs whose bits are set."""

    def new(bit, x):
        if x is None:
            raise Error(f"needs names input {bit}, which is not given")
        return x.new_empty(x.shape[::-1]).t() if _is_stored_in_first(x) else x.new_empty(x.shape)

    return tuple(new(bit, x) if needs >> bit & 1 else None for bit, x in enumerate(inputs))


def _attention_block_backward(grad_out, reserve, needs, *arguments):
    return _gradients(arguments[: NUM_DIFFERENTIABLE[AttentionBlock]], needs)


def _feed_forward_block_backward(grad_out, reserve, needs, *arguments):
    return _gradients(arguments[: NUM_DIFFERENTIABLE[FeedForwardBlock]], needs)


# By name: what tracing sees.
FAKES = {
    "attention_block_forward": _attention_block_forward,
    "attention_block_backward": _attention_block_backward,
    "feed_forward_block_forward": _feed_forward_block_forward,
    "feed_forward_block_backward": _feed_forward_block_backward,
}


def _seed(tensor, name):
    if tensor is None:
        return None
    if tensor.dtype != torch.int64 or tensor.dim():
        raise Error(f"{name} is {tensor.dtype} with {tensor.dim()} dimensions, must be an int64 scalar")
    return tensor.item() & (2**64 - 1)


def _attention_block_arguments(a):
    """As the binding takes them, without keep."""
    tokens = (swapped(each, a.batch_first) for each in a[:3])
    numbers = (a.num_heads, a.num_heads_kv, *a[a._fields.index("causal") : -1])
    seeds = _seed(a.dropout_seed, "dropout_seed"), _seed(a.output_dropout_seed, "output_dropout_seed")
    return *tokens, *a[3:14], *seeds, *numbers


def _count_attention_block(op, a, kernel):
    batch, seqlen_q, _ = swapped(a.query, a.batch_first).shape
    seqlen_k = seqlen_q if a.key is None else a.key.shape[1 if a.batch_first else 0]
    head_dim, head_dim_v = head_dims(a)
    query, key = (batch, seqlen_q, a.num_heads, head_dim), (batch, seqlen_k, a.num_heads_kv, head_dim)
    _report.count_sizes(op, query, key, (*key[:3], head_dim_v), a.query.dtype, kernel)


def _attention_block_forward_kernel(*arguments):
    a = AttentionBlock(*arguments)
    out, weights, reserve, kernel = _bind.attention_block(*_attention_block_arguments(a), a.keep)
    _count_attention_block("attention_block_forward", a, kernel)
    return swapped(out, a.batch_first).contiguous(), weights, reserve


def _like_inputs(grads, inputs):
    """In the memory order that _gradients tells."""
    return tuple(
        grad.t().contiguous().t() if grad is not None and _is_stored_in_first(x) else grad
        for grad, x in zip(grads, inputs)
    )


def _attention_block_backward_kernel(grad_out, reserve, needs, *arguments):
    a = AttentionBlock(*arguments)
    grad_out = swapped(grad_out, a.batch_first)
    grads, kernel = _bind.attention_block_backward(*_attention_block_arguments(a), grad_out, reserve, needs)
    if needs:
        _count_attention_block("attention_block_backward", a, kernel)
    tokens = (None if grad is None else swapped(grad, a.batch_first).contiguous() for grad in grads[:3])
    return _like_inputs((*tokens, *grads[3:]), arguments)


def _feed_forward_arguments(a):
    seeds = _seed(a.inner_dropout_seed, "inner_dropout_seed"), _seed(a.output_dropout_seed, "output_dropout_seed")
    return *a[:7], *seeds, *a[9:-1]


def _count_feed_forward(op, a, kernel):
    batch, seqlen, size = a.x.shape
    x = (batch, seqlen, 1, size)
    _report.count_sizes(op, x, x, (batch, seqlen, 1, a.weight1.shape[0]), a.x.dtype, kernel)


def _feed_forward_block_forward_kernel(*arguments):
    a = FeedForwardBlock(*arguments)
    out, reserve, kernel = _bind.feed_forward_block(*_feed_forward_arguments(a), a.keep)
    _count_feed_forward("feed_forward_block_forward", a, kernel)
    return out, reserve


def _feed_forward_block_backward_kernel(grad_out, reserve, needs, *arguments):
    a = FeedForwardBlock(*arguments)
    grads, kernel = _bind.feed_forward_block_backward(*_feed_forward_arguments(a), grad_out, reserve, needs)
    if needs:
        _count_feed_forward("feed_forward_block_backward", a, kernel)
    return _like_inputs(grads, arguments)


# By name: what computes where python/torch_ops is not there.
KERNELS = {
    "attention_block_forward": _attention_block_forward_kernel,
    "attention_block_backward": _attention_block_backward_kernel,
    "feed_forward_block_forward": _feed_forward_block_forward_kernel,
    "feed_forward_block_backward": _feed_forward_block_backward_kernel,
}
