"""Gradients of the operators: the functions here are what those do under autograd, and what eager code calls."""

import torch
from torch import Tensor
from torch._functorch.autograd_function import enable_single_level_autograd_function
from torch.autograd import Function, forward_ad

from polyhead.torch import _composition, _ops
from polyhead.torch._options import (
    DIFFERENTIABLE, NUM_SHARED, OPTIONS_OF_GRADIENTS, PLAIN_DIFFERENTIABLE, PROGRAM, Options, captures_of, for_backward,
    of_backward,
)  # fmt: skip

_BelowAutograd = torch._C._AutoDispatchBelowAutograd
_FRONT_OF_TRANSFORMS = torch._C.DispatchKey.FuncTorchDynamicLayerFrontMode
_PLAIN = len(PLAIN_DIFFERENTIABLE)


def _transforms_active():
    """Whether torch.func's transforms have yet to see this call; within one of their own autograd kernels they have."""
    if not torch._C._are_functorch_transforms_active():
        return False
    return not torch._C._dispatch_tls_is_dispatch_key_excluded(_FRONT_OF_TRANSFORMS)


def _mapping():
    """Whether this is within torch.vmap's own kernels: the operators have rules for what it maps."""
    if not torch._C._are_functorch_transforms_active() or _transforms_active():
        return False
    return torch._C._functorch.peek_interpreter_stack().key() == torch._C._functorch.TransformType.Vmap


def differentiates(*tensors):
    if forward_ad._current_level >= 0:  # a tangent is refused by name, not lost
        return True
    return torch.is_grad_enabled() and any(each is not None and each.requires_grad for each in tensors)


def _added(options):
    """attn_bias, alibi_slopes and sink_logits."""
    return tuple(options[position] if len(options) > position else None for position in OPTIONS_OF_GRADIENTS)


class _Saved:
    """Stands in ctx.options for a tensor that save_for_backward holds."""


def _keep(ctx, tensors, options):
    if len(options) > OPTIONS_OF_GRADIENTS[0]:
        tensors += tuple(each for each in options if isinstance(each, Tensor))
        options = tuple(_Saved if isinstance(each, Tensor) else each for each in options)
    ctx.save_for_backward(*tensors)
    ctx.options = options
    ctx.set_materialize_grads(False)


def _kept(ctx, count):
    """The first `count` saved tensors, and the options."""
    saved = ctx.saved_tensors
    if len(saved) == count:
        return saved, ctx.options
    rest = iter(saved[count:])
    return saved[:count], tuple(next(rest) if each is _Saved else each for each in ctx.options)


class _Forward:
    """(query, key, value, attn_bias, alibi_slopes, sink_logits, options, *captures) -> the results of attention_forward.

    Those between value and options, and captures, which options holds too, are arguments of their own because they have
    gradients.
    """

    @staticmethod
    def backward(ctx, grad_out, grad_logsumexp, *_):
        if grad_out is None and grad_logsumexp is None:
            return (None,) * len(ctx.needs_input_grad)
        (query, key, value, out, logsumexp), options = _kept(ctx, 5)
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        needed = (*ctx.needs_input_grad[:_PLAIN], *ctx.needs_input_grad[_PLAIN + 1 :])
        needs = sum(each << bit for bit, each in enumerate(needed))
        grads = attention_backward(
            grad_out, grad_logsumexp, query, key, value, out, logsumexp, needs, *for_backward(options)
        )
        return (*grads[:_PLAIN], None, *grads[_PLAIN : len(needed)])


def _finish_forward(ctx, query, key, value, options, results):
    out, logsumexp, weights, column_sums = results
    _keep(ctx, (query, key, value, out, logsumexp), options)
    no_logsumexp = logsumexp if logsumexp.dim() < 2 else None  # without a softmax there is none
    constant = [each for each in (no_logsumexp, weights, column_sums) if each is not None]
    if constant:
        ctx.mark_non_differentiable(*constant)


class _AttentionForward(_Forward, Function):
    @staticmethod
    def forward(ctx, query, key, value, attn_bias, alibi_slopes, sink_logits, options, *captures):
        with _BelowAutograd():
            results = _ops.forward_of(options)(query, key, value, *options)
        _finish_forward(ctx, query, key, value, options, results)
        return results


class _TransformedForward(_Forward, Function):
    """The same for torch.func's transforms, which want forward without ctx."""

    generate_vmap_rule = True

    @staticmethod
    def forward(query, key, value, attn_bias, alibi_slopes, sink_logits, options, *captures):
        return _ops.forward_of(options)(query, key, value, *options)

    @staticmethod
    def setup_context(ctx, inputs, output):
        query, key, value, *_ = inputs
        options = inputs[_PLAIN]
        _finish_forward(ctx, query, key, value, options, output)


def _applying(function):
    """Its apply, also within the autograd that torch.func.grad runs, whose own part of Function.apply is done then."""
    below_transforms = super(Function, function).apply

    def applied(*arguments):
        if not torch._C._are_functorch_transforms_active():
            return function.apply(*arguments)
        with enable_single_level_autograd_function():
            return below_transforms(*arguments)

    return applied


_apply_forward = _applying(_AttentionForward)


def attention_forward(query, key, value, *options):
    added = _added(options)
    operator, captures = _ops.attention_forward, ()
    if len(options) > PROGRAM:
        operator, captures = _ops.forward_of(options), captures_of(options)
    if _transforms_active():
        return _TransformedForward.apply(query, key, value, *added, options, *captures)
    if _mapping():
        return operator(query, key, value, *options)
    if differentiates(query, key, value, *added, *captures):
        return _apply_forward(query, key, value, *added, options, *captures)
    with _BelowAutograd():
        return operator(query, key, value, *options)


class _PlainForward(Function):
    """(query, key, value, causal, scale, align, layout) -> out: as _AttentionForward, with little to unpack."""

    @staticmethod
    def forward(ctx, query, key, value, *options):
        out, logsumexp = _ops.forward_below_autograd(query, key, value, *options)
        ctx.save_for_backward(query, key, value, out, logsumexp)
        ctx.options = options
        return out

    @staticmethod
    def backward(ctx, grad_out):
        query, key, value, out, logsumexp = ctx.saved_tensors
        query_needs, key_needs, value_needs, *_ = ctx.needs_input_grad
        needs = query_needs + 2 * key_needs + 4 * value_needs
        if torch.is_grad_enabled():  # logsumexp has to be differentiable, which it is not here
            *options, layout = ctx.options
            options = plain_options(*options)
            if layout:
                grad_out, query, key, value = (x.transpose(1, 2) for x in (grad_out, query, key, value))
            with _composition.without_autocast():
                out, logsumexp, *_ = attention_forward(query, key, value, *options)
            tensors = (grad_out, None, query, key, value, out, logsumexp)
            grads = attention_backward(*tensors, needs, *options[:NUM_SHARED])[:3]
            if layout:
                grads = tuple(None if grad is None else grad.transpose(1, 2) for grad in grads)
        else:
            grads = _ops.backward_below_autograd(
                grad_out, query, key, value, out, logsumexp, needs, *ctx.options
            )
        return (*grads, None, None, None, None)


def plain_options(causal, scale, align):
    return Options(causal, scale, align=align)


_apply_plain = super(Function, _PlainForward).apply


def plain_forward(query, key, value, causal, scale, align, layout=0):
    """Out of tensors that nothing transforms or traces, with these options alone: where overhead would be felt.

    layout: of LAYOUTS. Where the tensors are [B, H, S, D], out has the strides that torch's own function gives.
    """
    if (query.requires_grad or key.requires_grad or value.requires_grad) and torch.is_grad_enabled():
        return _apply_plain(query, key, value, causal, scale, align, layout)
    return _ops.forward_inference(query, key, value, causal, scale, align, layout)


def is_plain():
    """Whether no transform (torch.func) is at work and no forward-mode derivative."""
    return not torch._C._are_functorch_transforms_active() and forward_ad._current_level < 0


class _Backward:
    """(grad_out, grad_logsumexp, query, key, value, out, logsumexp, attn_bias, alibi_slopes, sink_logits, needs, options,
    *captures) -> the results of attention_backward. Its own gradients are those of the same formulas in torch's operations, O(Sq Sk).
    """

    TENSORS = 10  # before needs and options

    @staticmethod
    def backward(ctx, *grad_grads):
        plain, options = _kept(ctx, _Backward.TENSORS)
        options = of_backward(options)
        tensors = (*plain, None, None, *captures_of(options))
        wanted = [i for i, needed in enumerate(ctx.needs_input_grad) if needed]
        given = [grad_grads[bit] for bit in range(len(DIFFERENTIABLE)) if ctx.needs >> bit & 1]

        def gradients(*sources):
            arguments = list(tensors)
            for i, source in zip(wanted, sources):
                arguments[i] = source
            plain, captures = arguments[: _Backward.TENSORS], arguments[_Backward.TENSORS + 2 :]
            grads = _composition.attention_backward(*plain, captures, ctx.needs, options)
            return tuple(each for each in grads if each is not None)

        results = [None] * len(ctx.needs_input_grad)
        with _composition.without_autocast():
            grads, vjp = torch.func.vjp(gradients, *(tensors[i] for i in wanted))
            shares = vjp(tuple(torch.zeros_like(grad) if by is None else by for grad, by in zip(grads, given)))
        for i, share in zip(wanted, shares):
            results[i] = share
        return tuple(results)


def _run_backward(inputs):
    needs, options = inputs[_Backward.TENSORS : _Backward.TENSORS + 2]
    return _ops.backward_of(options)(*inputs[:7], needs, *options)


def _finish_backward(ctx, inputs):
    tensors, (needs, options) = inputs[: _Backward.TENSORS], inputs[_Backward.TENSORS : _Backward.TENSORS + 2]
    _keep(ctx, tensors, options)
    ctx.needs = needs


class _AttentionBackward(_Backward, Function):
    @staticmethod
    def forward(ctx, *inputs):
        with _BelowAutograd():
            grads = _run_backward(inputs)
        _finish_backward(ctx, inputs)
        return grads


class _TransformedBackward(_Backward, Function):
    generate_vmap_rule = True

    @staticmethod
    def forward(*inputs):
        return _run_backward(inputs)

    @staticmethod
    def setup_context(ctx, inputs, output):
        _finish_backward(ctx, inputs)


_apply_backward = _applying(_AttentionBackward)


def attention_backward(grad_out, grad_logsumexp, query, key, value, out, logsumexp, needs, *options):
    tensors = (grad_out, grad_logsumexp, query, key, value, out, logsumexp)
    inputs = (*tensors, *_added(options))
    captures = options[NUM_SHARED + 1 :]
    if _transforms_active():
        return _TransformedBackward.apply(*inputs, needs, options, *captures)
    if _mapping():
        return _ops.backward_of(options)(*tensors, needs, *options)
    if differentiates(*inputs, *captures):
        return _apply_backward(*inputs, needs, options, *captures)
    with _BelowAutograd():
        return _ops.backward_of(options)(*tensors, needs, *options)


class _Merge(Function):
    """(number of parts, *outs, *logsumexps) -> (out, logsumexp)."""

    @staticmethod
    def forward(ctx, count, *parts):
        with _BelowAutograd():
            merged = _ops.merge_forward(list(parts[:count]), list(parts[count:]))
        ctx.save_for_backward(*parts, *merged)
        ctx.set_materialize_grads(False)
        return merged

    @staticmethod
    def backward(ctx, grad_out, grad_logsumexp):
        *parts, out, logsumexp = ctx.saved_tensors
        count = len(parts) // 2
        if grad_out is None:
            grad_out = out.new_zeros(()).expand(out.shape)
        if torch.is_grad_enabled():  # for second derivatives
            _, vjp = torch.func.vjp(lambda *all: _composition.merge(all[:count], all[count:]), *parts)
            return (None, *vjp((grad_out, torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp)))
        with _BelowAutograd():
            grads = _ops.merge_backward(grad_out, grad_logsumexp, parts[:count], parts[count:], out, logsumexp)
        return (None, *grads[0], *grads[1])


_apply_merge = _applying(_Merge)


def merge_forward(outs, logsumexps):
    if _transforms_active():
        return _composition.merge(outs, logsumexps)
    if differentiates(*outs, *logsumexps):
        return _apply_merge(len(outs), *outs, *logsumexps)
    with _BelowAutograd():
        return _ops.merge_forward(outs, logsumexps)


# What the operators do where they are called themselves: in graphs, above all.
for _overload in ("", ".program"):
    _ops.implement_autograd(f"attention_forward{_overload}", attention_forward)
    _ops.implement_autograd(f"attention_backward{_overload}", attention_backward)
_ops.implement_autograd("merge_forward", merge_forward)


def _merge_backward_on_cuda(grad_out, grad_logsumexp, outs, logsumexps, out, logsumexp):
    count = len(outs)
    _, vjp = torch.func.vjp(lambda *parts: _composition.merge(parts[:count], parts[count:]), *outs, *logsumexps)
    grads = vjp((grad_out, torch.zeros_like(logsumexp) if grad_logsumexp is None else grad_logsumexp))
    return list(grads[:count]), list(grads[count:])


# Parts are merged in torch's own operations there.
_ops.implement_cuda("merge_forward", _composition.merge)
_ops.implement_cuda("merge_backward", _merge_backward_on_cuda)
