"""The operators of blocks under autograd and autocast: what the modules call."""

import torch
from torch.autograd import Function
from torch.autograd.graph import saved_tensors_hooks
from torch.compiler import is_compiling
from torch.nn import Parameter

from polyhead.torch import _block_composition, _ops
from polyhead.torch._attention import _named
from polyhead.torch._autograd import _BelowAutograd, _transforms_active, differentiates, is_plain
from polyhead.torch._block_ops import NUM_DIFFERENTIABLE, NUM_TENSORS, AttentionBlock, FeedForwardBlock
from polyhead.torch._composition import without_autocast

_CACHED_FROM = 2**17  # elements of a matrix: casting fewer takes less than finding them in autocast's cache


class _Block(Function):
    """(tensors, numbers) of an operator -> its results. Subclasses say which: block, forward_op, backward_op, composed.

    The results that have gradients are those that `composed` gives: all but the last, reserve.
    """

    @classmethod
    def compute(cls, ctx, arguments):
        count = NUM_TENSORS[cls.block]
        with _BelowAutograd():
            results = cls.forward_op(*arguments[:-1], True)
        ctx.save_for_backward(*arguments[:count], results[-1])
        ctx.numbers = arguments[count:]
        ctx.mark_non_differentiable(results[-1])
        ctx.set_materialize_grads(False)
        return results

    @classmethod
    def gradients(cls, ctx, grads):
        """By every argument."""
        *tensors, reserve = ctx.saved_tensors
        count = NUM_DIFFERENTIABLE[cls.block]
        needed = ctx.needs_input_grad[:count]
        rest = (None,) * (len(cls.block._fields) - count)
        grad_out, *others = grads[:-1]
        if all(grad is None for grad in (grad_out, *others)):
            return (None,) * count + rest
        if torch.is_grad_enabled() or any(grad is not None for grad in others):
            return _composed_gradients(cls.composed, (*tensors, *ctx.numbers), needed, (grad_out, *others)) + rest
        needs = sum(1 << bit for bit, need in enumerate(needed) if need)
        with _BelowAutograd():
            return (*cls.backward_op(grad_out, reserve, needs, *tensors, *ctx.numbers[:-1]), *rest)


def _composed_gradients(composed, arguments, needed, grads):
    """Those of the same formulas in torch's operations: differentiable themselves, and by returned weights."""
    wanted = [i for i, need in enumerate(needed) if need]

    def results(*sources):
        replaced = list(arguments)
        for i, source in zip(wanted, sources):
            replaced[i] = source
        return tuple(each for each, grad in zip(composed(*replaced), grads) if grad is not None)

    with without_autocast():
        _, vjp = torch.func.vjp(results, *(arguments[i] for i in wanted))
        shares = dict(zip(wanted, vjp(tuple(grad for grad in grads if grad is not None))))
    return tuple(shares.get(i) for i in range(len(needed)))


class _AttentionBlock(_Block):
    block = AttentionBlock
    forward_op = _ops.attention_block_forward
    backward_op = _ops.attention_block_backward
    composed = staticmethod(_block_composition.attention_block)

    @staticmethod
    def forward(ctx, *arguments):
        return _AttentionBlock.compute(ctx, arguments)

    @staticmethod
    def backward(ctx, *grads):
        return _AttentionBlock.gradients(ctx, grads)


class _FeedForwardBlock(_Block):
    block = FeedForwardBlock
    forward_op = _ops.feed_forward_block_forward
    backward_op = _ops.feed_forward_block_backward
    composed = staticmethod(_block_composition.feed_forward_block)

    @staticmethod
    def forward(ctx, *arguments):
        return _FeedForwardBlock.compute(ctx, arguments)

    @staticmethod
    def backward(ctx, *grads):
        return _FeedForwardBlock.gradients(ctx, grads)


def _under_autograd(function):
    def run(*arguments):
        if _transforms_active():  # torch.func's: nothing is kept, so there is no reserve
            return (*function.composed(*arguments), None)
        if differentiates(*arguments[: NUM_DIFFERENTIABLE[function.block]]):
            return function.apply(*arguments)
        with _BelowAutograd():
            return function.forward_op(*arguments)

    return run


def _cached_cast(weight):
    """A matrix as autocast has it in its cache: cast once in a region, by the first who asks, and kept until its end.

    Python has no function for that, but what mm saves for its backward is that very tensor.
    """
    dtype = torch.get_autocast_dtype(weight.device.type)
    with torch.inference_mode(False), torch.enable_grad(), saved_tensors_hooks(_as_it_is, _as_it_is):
        nothing = torch.empty((0, weight.shape[0]), dtype=dtype, device=weight.device, requires_grad=True)
        return torch.mm(nothing, weight).grad_fn._saved_mat2


def _as_it_is(tensor):
    return tensor


def _is_cached(tensor):
    """Whether torch keeps its cast, and that is worth the way there."""
    return (
        type(tensor) is Parameter
        and tensor.dtype == torch.float32
        and tensor.requires_grad
        and tensor.dim() == 2
        and tensor.numel() >= _CACHED_FROM
    )


def _cast(arguments):
    """For autocast: tokens, weights and biases. A norm's weights and what is added to scores stay as they are."""
    count = arguments._fields.index("norm_weight")
    operands = list(arguments[:count])
    if is_plain():
        operands = [_cached_cast(each) if _is_cached(each) else each for each in operands]
    return *_ops.cast_for_autocast(*operands), *arguments[count:]


def _under_autocast(run, arguments):
    """What `run` gives in autocast, whose dtypes are torch's: products and attention have autocast's; norm and residual
    are torch's operations on the tokens as they came, so that float32 ones stay float32 from block to block.
    """
    a, x = arguments, arguments[0]
    one_dtype = x.dtype in (torch.float64, torch.get_autocast_dtype(x.device.type))
    if one_dtype or not (a.norm_kind or a.residual):
        return run(*_cast(a))
    tokens = _block_composition.norm(x, a) if a.norm_first else x
    inner = {a._fields[0]: tokens, "norm_weight": None, "norm_bias": None, "norm_kind": 0, "norm_first": False}
    out, *others = run(*_cast(a._replace(**inner, residual=False)))
    if a.residual:
        out = out + x
    return out if a.norm_first else _block_composition.norm(out, a), *others


def _autocast_kernel(block, operator):
    def below_autocast(*arguments):
        with _ops.below_autocast():
            return operator(*arguments)

    return lambda *arguments: _under_autocast(below_autocast, block(*arguments))


_attention_block = _under_autograd(_AttentionBlock)
_feed_forward_block = _under_autograd(_FeedForwardBlock)
_ops.implement_autograd("attention_block_forward", _attention_block)
_ops.implement_autograd("feed_forward_block_forward", _feed_forward_block)
_ops.implement_autocast("attention_block_forward", _autocast_kernel(AttentionBlock, _ops.attention_block_forward))
_ops.implement_autocast(
    "feed_forward_block_forward", _autocast_kernel(FeedForwardBlock, _ops.feed_forward_block_forward)
)


def _run(operator, function, arguments):
    if is_compiling():  # a graph holds the operator
        return operator(*arguments)
    try:
        if torch._C._is_any_autocast_enabled() and torch.is_autocast_enabled(arguments[0].device.type):
            return _under_autocast(function, arguments)
        return function(*arguments)
    except ValueError as error:
        raise _named(error) from None


def attention_block(arguments: AttentionBlock):
    """(out, attn_weights or None)."""
    return _run(_ops.attention_block_forward, _attention_block, arguments)[:2]


def feed_forward_block(arguments: FeedForwardBlock):
    return _run(_ops.feed_forward_block_forward, _feed_forward_block, arguments)[0]
