"""The contenders, forward: each takes a problem and its operands and gives a call to time, or says why it cannot.

Every contender gets the operands in the layout it likes best, made before the clock starts: torch and onnxruntime's
Attention [B, H, S, D], onnxruntime's MultiHeadAttention [B, S, H*D], jax [B, S, H, D]. polyhead gets the very memory
that torch gets, as [B, S, H, D] views with strides; "polyhead bshd" is the same in contiguous [B, S, H, D].
"""

from dataclasses import dataclass
from typing import Callable

import numpy as np
import polyhead as ours

from problem import Operands, Problem


@dataclass
class Contender:
    call: Callable[[], object]  # what is timed
    outputs: Callable[[object], list[np.ndarray]]  # what it gave, in float32: [B, H, S, D]; gradients in order of needs


class Refusal(Exception):
    """Why a contender cannot compute a problem, as one clause."""


def swap(array: np.ndarray) -> np.ndarray:
    """[B, H, S, D] as [B, S, H, D], or back."""
    return array.transpose(0, 2, 1, 3)


# --- polyhead --------------------------------------------------------------------------------------------------------


def polyhead_arguments(p: Problem, x: Operands) -> dict:
    """The options of polyhead.attention and attention_backward for this problem."""
    options = {"causal": p.causal, "window": p.window, "align": p.align, "attn_mask": x.mask, "attn_bias": x.bias}
    if p.lengths:
        options["seqlens_k"] = x.lengths
    if p.dropout_p > 0:
        options.update(dropout_p=p.dropout_p, dropout_seed=1)
    return options


def polyhead(p: Problem, x: Operands) -> Contender:
    q, k, v = swap(x.query), swap(x.key), swap(x.value)
    options = polyhead_arguments(p, x)
    return Contender(lambda: ours.attention(q, k, v, **options), lambda out: [swap(out).astype(np.float32)])


def polyhead_bshd(p: Problem, x: Operands) -> Contender:
    q, k, v = (np.ascontiguousarray(swap(t)) for t in (x.query, x.key, x.value))
    options = polyhead_arguments(p, x)
    return Contender(lambda: ours.attention(q, k, v, **options), lambda out: [swap(out).astype(np.float32)])


# --- torch -----------------------------------------------------------------------------------------------------------


def as_torch(array: np.ndarray):
    """The same memory as a torch tensor."""
    import torch

    if array.dtype.name == "bfloat16":
        return torch.from_numpy(array.view(np.uint16)).view(torch.bfloat16)
    return torch.from_numpy(array)


def torch_options(p: Problem, x: Operands) -> dict:
    """Of scaled_dot_product_attention, as arrays and plain values."""
    options = {"dropout_p": p.dropout_p, "enable_gqa": p.num_heads != p.num_heads_kv}
    mask = x.dense_mask(p)
    if mask is None and p.causal:
        if p.offset != 0:
            first, end = p.key_limits()
            mask = np.arange(p.seqlen_k)[None, :] < end[:, None]
        elif x.bias is not None:
            raise Refusal("takes no bias beside is_causal")
        else:
            options["is_causal"] = True
    if mask is not None and x.bias is not None:
        raise Refusal("takes a mask or a bias, not both")
    if x.bias is not None:
        options["attn_mask"] = as_torch(x.bias)
    if mask is not None:
        options["attn_mask"] = as_torch(mask)
    return options


def torch(p: Problem, x: Operands) -> Contender:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    q, k, v = as_torch(x.query), as_torch(x.key), as_torch(x.value)
    options = torch_options(p, x)

    def call():
        with torch.inference_mode():
            return scaled_dot_product_attention(q, k, v, **options)

    return Contender(call, lambda out: [out.float().numpy()])


# --- jax -------------------------------------------------------------------------------------------------------------


def jax_options(p: Problem, x: Operands) -> tuple[dict, dict]:
    """Of jax.nn.dot_product_attention: plain values, and arrays."""
    import jax.numpy as jnp

    if p.dropout_p > 0:
        raise Refusal("has no dropout")
    if p.causal and p.offset != 0:
        raise Refusal("is_causal is top-left only")
    arrays = {"bias": x.bias, "mask": x.mask, "key_value_seq_lengths": x.lengths if p.lengths else None}
    arrays = {name: jnp.asarray(a) for name, a in arrays.items() if a is not None}
    return {"is_causal": p.causal, "local_window_size": p.window}, arrays


def jax(p: Problem, x: Operands) -> Contender:
    import jax
    import jax.numpy as jnp

    options, arrays = jax_options(p, x)
    q, k, v = (jnp.asarray(np.ascontiguousarray(swap(t))) for t in (x.query, x.key, x.value))

    @jax.jit
    def attend(q, k, v, arrays):
        return jax.nn.dot_product_attention(q, k, v, **arrays, **options)

    return Contender(
        lambda: attend(q, k, v, arrays).block_until_ready(), lambda out: [swap(np.asarray(out)).astype(np.float32)]
    )
