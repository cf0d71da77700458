"""xFormers' memory_efficient_attention and its family: the same arguments and layouts, over `polyhead.torch.attention`.

Layouts: [B, M, K], [B, M, H, K] ("BMHK") and [B, M, G, H, K] ("BMGHK": G groups of H heads). Where xFormers needs key
and value expanded over H, one head for the group is enough here: [B, M, G, 1, K].
"""

from collections.abc import Sequence

import torch
from torch import Tensor

from polyhead import Error
from polyhead.torch._attention import attention, attention_backward, merge
from polyhead.torch._xformers_masks import from_xformers
from polyhead.torch.attn_bias import AttentionBias

__all__ = [
    "memory_efficient_attention", "memory_efficient_attention_backward", "memory_efficient_attention_forward",
    "memory_efficient_attention_forward_requires_grad", "memory_efficient_attention_partial", "merge_attentions",
]  # fmt: skip


def memory_efficient_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """softmax(scale * query @ key^T + attn_bias) @ value without storing the scores, called as in xFormers.

    Parameters
    ----------
    query, key, value : torch.Tensor
        [B, Mq, H, K], [B, Mk, H, K] and [B, Mk, H, Kv]; or all three [B, M, K], or all three [B, M, G, H, K]. Any
        strides; one dtype: float32, bfloat16, float16 or float64. key and value may have fewer heads, as in
        `attention`; of BMGHK one in place of H.
    attn_bias : torch.Tensor or mask of `polyhead.torch.attn_bias` or of xFormers, optional
        A tensor is added to the scores and may require a gradient. It broadcasts to [B, H, Mq, Mk], to [B, Mq, Mk] if
        query is [B, Mq, K], to [B, G, H, Mq, Mk] if query is BMGHK.
    p : float
        Dropout of the weights. The seed comes from torch's default generator.
    scale : float, optional
        Default ``1 / sqrt(K)``.
    op
        Taken and unused: there is nothing to choose.
    output_dtype : torch.dtype, optional
        Default that of query. A wider one is computed in, a narrower one rounded to.

    Returns
    -------
    torch.Tensor
        [B, Mq, H, Kv], or in the layout of query.

    Raises
    ------
    polyhead.Error
        Sizes, dtypes or values that make no sense, named in one sentence. It is a ValueError.
    TypeError
        An argument of the wrong kind.

    Notes
    -----
    A query that sees no key gets 0. Gradients flow to query, key, value and a tensor in attn_bias.

    Examples
    --------
    >>> import torch
    >>> from polyhead.torch import LowerTriangularMask, memory_efficient_attention
    >>> query = key = value = torch.rand(1, 5, 2, 8)  # five tokens, two heads of 8
    >>> memory_efficient_attention(query, key, value, attn_bias=LowerTriangularMask()).shape
    torch.Size([1, 5, 2, 8])
    """
    return _attend(query, key, value, attn_bias, p, scale, output_dtype)


@torch.no_grad()
def memory_efficient_attention_forward(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> Tensor:
    """`memory_efficient_attention` without gradients: the result never requires one."""
    return _attend(query, key, value, attn_bias, p, scale, output_dtype)


@torch.no_grad()
def memory_efficient_attention_forward_requires_grad(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """What `memory_efficient_attention_backward` needs: for autograd functions of your own.

    Parameters
    ----------
    query, key, value, attn_bias, scale, op, output_dtype
        As of `memory_efficient_attention`.
    p : float
        0: the mask of dropout would be lost between the calls.

    Returns
    -------
    out : torch.Tensor
        As of `memory_efficient_attention`, not part of autograd's graph.
    lse : torch.Tensor
        Logsumexp of the scores, natural: [B, H, Mq], float32 (float64 if query is); [B, 1, Mq] if query is [B, Mq, K],
        [B, G, H, Mq] if it is BMGHK, [1, H, sum of Mq_i] with a packed mask. -inf for a query that sees no key.
    """
    _refuse_dropout(p)
    return _attend(query, key, value, attn_bias, p, scale, output_dtype, return_logsumexp=True)


@torch.no_grad()
def memory_efficient_attention_backward(
    grad: Tensor,
    output: Tensor,
    lse: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients by query, key and value, given those by the output.

    Parameters
    ----------
    grad : torch.Tensor
        Of the shape of output.
    output, lse : torch.Tensor
        As `memory_efficient_attention_forward_requires_grad` returned them; or `merge_attentions`: then the gradients
        are the share of the keys given here.
    query, key, value, attn_bias, p, scale, op
        As given there. p is 0; a tensor in attn_bias gets no gradient here.

    Returns
    -------
    dq, dk, dv : torch.Tensor
        Of the shapes and dtypes of query, key and value.
    """
    _refuse_dropout(p)
    _check(query, key, value, p)
    layout, options = _layout(attn_bias, query, key)
    for name, x in (("grad", grad), ("output", output)):
        if not isinstance(x, torch.Tensor) or x.shape != query.shape[:-1] + value.shape[-1:]:
            given = tuple(x.shape) if isinstance(x, torch.Tensor) else type(x).__name__
            raise Error(f"{name} has shape {given}, must have {tuple(query.shape[:-1] + value.shape[-1:])}")
    computed_in = torch.promote_types(query.dtype, output.dtype)
    tensors = (layout.arrange(x).to(computed_in) for x in (grad, query, key, value, output))
    grads = attention_backward(*tensors, layout.arrange_lse(lse), scale=scale, **options)
    inputs = (query, key, value)
    return tuple(layout.restore(grads[name], x).to(x.dtype) for name, x in zip(("query", "key", "value"), inputs))


def memory_efficient_attention_partial(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_bias: Tensor | AttentionBias | None = None,
    p: float = 0.0,
    scale: float | None = None,
    *,
    op: object = None,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor]:
    """Attention over some of the keys, to be joined with that over the others by `merge_attentions`.

    Parameters
    ----------
    query, key, value, attn_bias, scale, op
        As of `memory_efficient_attention`.
    p : float
        0.
    output_dtype : torch.dtype, optional
        Default that of query, as of xFormers' flash operators. With torch.float32 parts of 16 bits are not rounded
        before they are joined.

    Returns
    -------
    out, lse : torch.Tensor
        As of `memory_efficient_attention_forward_requires_grad`. Unlike xFormers', they carry gradients.

    Examples
    --------
    >>> import torch
    >>> from polyhead.torch import memory_efficient_attention_partial, merge_attentions
    >>> query, key, value = torch.rand(3, 1, 6, 2, 8)
    >>> first = memory_efficient_attention_partial(query, key[:, :4], value[:, :4])
    >>> second = memory_efficient_attention_partial(query, key[:, 4:], value[:, 4:])
    >>> out, lse = merge_attentions([first[0], second[0]], [first[1], second[1]])
    >>> out.shape, lse.shape
    (torch.Size([1, 6, 2, 8]), torch.Size([1, 2, 6]))
    """
    _refuse_dropout(p)
    return _attend(query, key, value, attn_bias, p, scale, output_dtype, return_logsumexp=True)


def merge_attentions(
    attn_split: Sequence[Tensor] | Tensor,
    lse_split: Sequence[Tensor] | Tensor,
    write_lse: bool = True,
    output_dtype: torch.dtype | None = None,
) -> tuple[Tensor, Tensor | None]:
    """The attention over all keys, out of its parts over some keys each: see `polyhead.merge`.

    Parameters
    ----------
    attn_split : sequence of torch.Tensor, or one tensor
        out of each part, [B, M, H, K] (or [B, M, K], or [B, M, G, H, K]); in one tensor stacked along dimension 0.
    lse_split : sequence of torch.Tensor, or one tensor
        lse of each part, [B, H, M] (or [B, 1, M], or [B, G, H, M]); likewise.
    write_lse : bool
        Return the logsumexp over all keys too.
    output_dtype : torch.dtype, optional
        Of out; default that of the parts.

    Returns
    -------
    out : torch.Tensor
        Of the shape of a part's.
    lse : torch.Tensor or None
        Of the shape of a part's; None if write_lse is False.

    Notes
    -----
    Gradients flow to all parts, from out and from lse.
    """
    outs, lses = _parts("attn_split", attn_split), _parts("lse_split", lse_split)
    if len(outs) != len(lses):
        raise Error(f"lse_split has {len(lses)} parts, must have {len(outs)} like attn_split")
    for out, lse in zip(outs, lses):
        if out.dim() not in (3, 4, 5) or lse.dim() != max(out.dim() - 1, 3):
            raise Error(
                f"lse_split has a part of shape {tuple(lse.shape)}, where attn_split's has {tuple(out.shape)}: must be "
                "[B, H, M] for [B, M, H, K], [B, 1, M] for [B, M, K] or [B, G, H, M] for [B, M, G, H, K]"
            )
    out, lse = merge([_PLAIN.arrange(out) for out in outs], [_PLAIN.arrange_lse(lse) for lse in lses])
    out = _PLAIN.restore(out, outs[0]).to(output_dtype or out.dtype)
    return out, lse.reshape(lses[0].shape) if write_lse else None


def _parts(name, parts):
    parts = list(parts.unbind(0)) if isinstance(parts, torch.Tensor) else list(parts)
    for part in parts:
        if not isinstance(part, torch.Tensor):
            raise TypeError(f"{name} holds a {type(part).__name__}, must hold torch.Tensor")
    if not parts:
        raise Error(f"{name} is empty, must have at least one part")
    return parts


def _attend(query, key, value, attn_bias, p, scale, output_dtype, return_logsumexp=False):
    _check(query, key, value, p)
    layout, options = _layout(attn_bias, query, key)
    if not (torch.is_grad_enabled() and (key.requires_grad or value.requires_grad)):
        key, value = _shared_heads(key, value)
    computed_in = torch.promote_types(query.dtype, output_dtype or query.dtype)
    tensors = (layout.arrange(x).to(computed_in) for x in (query, key, value))
    result = attention(*tensors, scale=scale, dropout_p=p, return_logsumexp=return_logsumexp, **options)
    out, lse = result if return_logsumexp else (result, None)
    out = layout.restore(out, query)
    if output_dtype is not None:
        out = out.to(output_dtype)
    return (out, layout.restore_lse(lse, query)) if return_logsumexp else out


def _check(query, key, value, p):
    for name, x in (("query", query), ("key", key), ("value", value)):
        if not isinstance(x, torch.Tensor):
            raise TypeError(f"{name} is a {type(x).__name__}, must be a torch.Tensor")
        if x.dim() not in (3, 4, 5) or x.dim() != query.dim():
            needs = "3, 4 or 5: [B, M, K], [B, M, H, K], [B, M, G, H, K]" if x is query else f"{query.dim()} like query"
            raise Error(f"{name} has {x.dim()} dimensions, must have {needs}")
        if x.dtype != query.dtype:
            raise Error(f"{name} is {x.dtype}, must be {query.dtype} like query")
        if x.device != query.device:
            raise Error(f"{name} is on {x.device}, must be on {query.device} like query")
    if value.shape[:-1] != key.shape[:-1]:
        raise Error(f"value has shape {tuple(value.shape)}, must begin with {tuple(key.shape[:-1])} like key")
    if query.dim() == 5 and (key.shape[2] != query.shape[2] or key.shape[3] not in (1, query.shape[3])):
        groups, heads = query.shape[2:4]
        raise Error(f"key has shape {tuple(key.shape)}, must have {groups} groups of {heads} heads like query, or of 1")
    if not 0 <= p <= 1:
        raise Error(f"p is {p}, must be in 0 .. 1")


def _refuse_dropout(p):
    if p != 0:
        raise NotImplementedError(f"p is {p}, must be 0 here: dropout is in memory_efficient_attention")


class _Layout:
    """Between the layouts above, of which packed ones have B = 1, and those of `attention`.

    packed: [1, M, ...] is [M, heads, K] there. slots (a number, 0 for none): [1, slots * M, ...] is a batch of slots.
    """

    def __init__(self, packed=False, slots=0):
        self.packed = packed
        self.slots = slots

    def arrange(self, x):
        if x.dim() == 3:
            x = x.unsqueeze(2)
        elif x.dim() == 5:
            x = x.flatten(2, 3)
        if self.slots:
            return x[0].unflatten(0, (self.slots, x.shape[1] // self.slots))
        return x[0] if self.packed else x

    def restore(self, x, like):
        """Undoes `arrange`, into the layout of like."""
        if self.packed or self.slots:
            x = (x.flatten(0, 1) if self.slots else x).unsqueeze(0)
        if like.dim() == 3:
            return x.squeeze(2)
        return x.unflatten(2, like.shape[2:4]) if like.dim() == 5 else x

    def arrange_lse(self, lse):
        """[B, H, M] or [B, G, H, M] as `attention` gives it: [B, heads, M], packed [heads, M]."""
        lse = lse.flatten(1, 2) if lse.dim() == 4 else lse
        if self.slots:
            return lse[0].unflatten(1, (self.slots, lse.shape[2] // self.slots)).transpose(0, 1)
        return lse[0] if self.packed else lse

    def restore_lse(self, lse, query):
        if self.packed or self.slots:
            lse = (lse.transpose(0, 1).flatten(1, 2) if self.slots else lse).unsqueeze(0)
        return lse.unflatten(1, query.shape[2:4]) if query.dim() == 5 else lse


_PLAIN = _Layout()


def _layout(attn_bias, query, key):
    """Where the tensors of a call lie, and attn_bias as options of `attention`."""
    if attn_bias is None:
        return _PLAIN, {}
    if isinstance(attn_bias, torch.Tensor):
        return _PLAIN, {"attn_bias": _arrange_bias(attn_bias, query)}
    attn_bias = from_xformers(attn_bias)
    if not isinstance(attn_bias, AttentionBias):
        kind = f"the class {attn_bias.__name__}" if isinstance(attn_bias, type) else f"a {type(attn_bias).__name__}"
        raise TypeError(f"attn_bias is {kind}, must be a torch.Tensor or a mask of polyhead.torch.attn_bias"
                        " or of xFormers")
    attn_bias = attn_bias.to(query.device)
    if hasattr(attn_bias, "q_seqinfo"):
        for name, x, seqinfo in (("query", query, attn_bias.q_seqinfo), ("key", key, attn_bias.k_seqinfo)):
            rows = seqinfo.seqstart_py[-1]
            if tuple(x.shape[:2]) != (1, rows):
                needs = f"(1, {rows}): all sequences of attn_bias"
                raise Error(f"{name} has shape {tuple(x.shape)}, must begin with {needs}")
        if slots := attn_bias.uniform_slots():
            return _Layout(slots=slots), attn_bias.slot_options()
        return _Layout(packed=True), attn_bias.options()
    options = attn_bias.options()
    if "attn_bias" in options:
        options["attn_bias"] = _arrange_bias(options["attn_bias"], query)
    return _PLAIN, options


def _arrange_bias(bias, query):
    """A bias that broadcasts to query's layout of the scores, as one that broadcasts to [B, heads, Mq, Mk]."""
    if bias.dim() > query.dim():
        raise Error(f"attn_bias has {bias.dim()} dimensions, takes at most {query.dim()} with a query of {query.dim()}")
    if query.dim() == 3:
        return bias.unsqueeze(1) if bias.dim() == 3 else bias
    if query.dim() == 5 and bias.dim() > 2:
        bias = bias.unsqueeze(0) if bias.dim() == 3 else bias
        groups, heads = query.shape[2:4]
        if bias.shape[-4] not in (1, groups) or bias.shape[-3] not in (1, heads):
            raise Error(f"attn_bias has shape {tuple(bias.shape)}, must broadcast to [B, {groups}, {heads}, Mq, Mk]")
        if bias.shape[-4:-2] != (1, 1):
            bias = bias.expand(*bias.shape[:-4], groups, heads, *bias.shape[-2:])
        return bias.flatten(-4, -3)
    return bias


def _shared_heads(key, value):
    """Key and value with heads that are all the same memory (`expand`) taken once: for calls without gradients, which
    are due to each of them."""
    heads = key.dim() - 2
    shared = heads > 1 and key.shape[heads] > 1 and key.stride(heads) == 0 and value.stride(heads) == 0
    return (key.narrow(heads, 0, 1), value.narrow(heads, 0, 1)) if shared else (key, value)
