"""The contenders of backward (the gradients alone, forward outside of the timed call) and of forward+backward.

As in rivals.py each gets the layout that it likes best. torch is timed twice: "torch" through autograd, as everybody
trains, which falls to the unfused formula for dropout and for a bias that needs a gradient; "torch fused" calls the
fused kernel's own operator, without autograd, where the kernel takes the problem. onnxruntime has no backward.
"""

import polyhead as ours
from rivals import Contender, Refusal, as_torch, jax_options, polyhead_arguments, swap, torch_options

import numpy as np
from problem import BACKWARD, BOTH, Operands, Problem

UNFUSED_ARRAYS = 4  # of scores' size, which unfused attention holds at once: S or dS, P, dP, and dropout's


def check_memory(p: Problem) -> None:
    """A Refusal where the scores of unfused attention would not fit."""
    with open("/proc/meminfo") as file:
        available = int(next(line for line in file if line.startswith("MemAvailable")).split()[1]) * 1024
    needed = UNFUSED_ARRAYS * p.scores_bytes
    if needed > 0.7 * available:
        raise Refusal(f"stores the scores: {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are free")


def _outputs(p: Problem, direction: str, gradients: list[np.ndarray], out=None) -> list[np.ndarray]:
    """[B, S, H, D] arrays and the bias's, for comparison."""
    found = [] if direction == BACKWARD else [out]
    found += gradients[:3]
    return [swap(a).astype(np.float32) for a in found] + [a.astype(np.float32) for a in gradients[3:]]


# --- polyhead --------------------------------------------------------------------------------------------------------


def _polyhead(p: Problem, x: Operands, direction: str, arrays: list[np.ndarray]) -> Contender:
    q, k, v, grad_out = arrays
    options = polyhead_arguments(p, x)

    def forward():
        return ours.attention(q, k, v, return_logsumexp=True, **options)

    def backward(out, logsumexp):
        return ours.attention_backward(grad_out, q, k, v, out, logsumexp, needs=p.needs, **options)

    if direction == BACKWARD:
        saved = forward()
        return Contender(lambda: backward(*saved), lambda grads: _outputs(p, direction, list(grads.values())))

    def both():
        out, logsumexp = forward()
        return out, backward(out, logsumexp)

    return Contender(both, lambda given: _outputs(p, direction, list(given[1].values()), given[0]))


def polyhead(p: Problem, x: Operands, direction: str) -> Contender:
    return _polyhead(p, x, direction, [swap(t) for t in (x.query, x.key, x.value, x.grad_out)])


def polyhead_bshd(p: Problem, x: Operands, direction: str) -> Contender:
    arrays = [np.ascontiguousarray(swap(t)) for t in (x.query, x.key, x.value, x.grad_out)]
    return _polyhead(p, x, direction, arrays)


# --- torch -----------------------------------------------------------------------------------------------------------


def _torch_outputs(p: Problem, direction: str, gradients, out=None) -> list[np.ndarray]:
    tensors = list(gradients) if direction == BACKWARD else [out, *gradients]
    return [t.detach().float().numpy() for t in tensors]


def torch(p: Problem, x: Operands, direction: str) -> Contender:
    import torch
    from torch.nn.functional import scaled_dot_product_attention

    if p.dropout_p > 0 or p.bias_dims:
        check_memory(p)
    options = torch_options(p, x)
    inputs = [as_torch(t).requires_grad_() for t in (x.query, x.key, x.value)]
    if p.bias_dims:
        inputs.append(options["attn_mask"].requires_grad_())
    grad_out = as_torch(x.grad_out)

    def forward():
        return scaled_dot_product_attention(*inputs[:3], **options)

    if direction == BACKWARD:
        out = forward()
        return Contender(
            lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True),
            lambda grads: _torch_outputs(p, direction, grads),
        )

    def both():
        out = forward()
        return out, torch.autograd.grad(out, inputs, grad_out)

    return Contender(both, lambda given: _torch_outputs(p, direction, given[1], given[0]))


def torch_fused(p: Problem, x: Operands, direction: str) -> Contender:
    import torch

    if p.dropout_p > 0 or p.bias_dims:
        raise Refusal(f"has no {'dropout' if p.dropout_p > 0 else 'gradient of a bias'}")
    if p.num_heads != p.num_heads_kv or p.head_dim != p.head_dim_v:
        raise Refusal("wants equal heads and head dims")
    options = torch_options(p, x)
    q, k, v, grad_out = (as_torch(t) for t in (x.query, x.key, x.value, x.grad_out))
    attend = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu
    gradients_of = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward
    causal, mask = options.get("is_causal", False), options.get("attn_mask")
    if mask is not None:  # the operator adds it to the scores
        mask = torch.zeros(mask.shape, dtype=q.dtype).masked_fill_(~mask, float("-inf"))

    def forward():
        return attend(q, k, v, 0.0, causal, attn_mask=mask)

    def backward(out, logsumexp):
        return gradients_of(grad_out, q, k, v, out, logsumexp, 0.0, causal, attn_mask=mask)

    if direction == BACKWARD:
        saved = forward()
        return Contender(lambda: backward(*saved), lambda grads: _torch_outputs(p, direction, grads))

    def both():
        out, logsumexp = forward()
        return out, backward(out, logsumexp)

    return Contender(both, lambda given: _torch_outputs(p, direction, given[1], given[0]))


# --- jax -------------------------------------------------------------------------------------------------------------


def jax(p: Problem, x: Operands, direction: str) -> Contender:
    import jax
    import jax.numpy as jnp

    check_memory(p)
    options, arrays = jax_options(p, x)
    inputs = [jnp.asarray(np.ascontiguousarray(swap(t))) for t in (x.query, x.key, x.value)]
    if "bias" in arrays:
        inputs.append(arrays.pop("bias"))
    grad_out = jnp.asarray(np.ascontiguousarray(swap(x.grad_out)))

    def attend(q, k, v, bias=None):
        return jax.nn.dot_product_attention(q, k, v, bias=bias, **arrays, **options)

    @jax.jit
    def forward(inputs):
        return jax.vjp(attend, *inputs)

    if direction == BACKWARD:
        _, pullback = forward(inputs)
        backward = jax.jit(lambda pullback, grad_out: pullback(grad_out))
        return Contender(
            lambda: jax.block_until_ready(backward(pullback, grad_out)),
            lambda grads: _outputs(p, direction, [np.asarray(a) for a in grads]),
        )
    assert direction == BOTH

    @jax.jit
    def both(inputs, grad_out):
        out, pullback = jax.vjp(attend, *inputs)
        return out, pullback(grad_out)

    return Contender(
        lambda: jax.block_until_ready(both(inputs, grad_out)),
        lambda given: _outputs(p, direction, [np.asarray(a) for a in given[1]], np.asarray(given[0])),
    )
