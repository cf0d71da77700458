"""The formulas of attention and its gradients in torch's own operations, each of which torch can differentiate.

For what the kernels do not give: second derivatives, and gradients through returned weights. O(Sq Sk) memory.
Scores are [B, H, Sq, Sk]; packed sequences are one batch element whose queries see the keys of their own sequence.
"""

import torch

from polyhead.torch import _ops, _program_formula
from polyhead.torch._options import DIFFERENTIABLE, PLAIN_DIFFERENTIABLE, AllOptions, captures_of


def _is_float64(tensor):
    return tensor.dtype == torch.float64


def _heads_first(tensor, num_heads):
    """[B, S, G, D] (packed [S, G, D]) as [B, num_heads, S, D] of the dtype of sums."""
    tensor = tensor if _is_float64(tensor) else tensor.float()
    if tensor.dim() == 3:
        tensor = tensor.unsqueeze(0)
    tensor = tensor.transpose(1, 2)
    group = num_heads // tensor.shape[1] if tensor.shape[1] else 1
    return tensor.repeat_interleave(group, 1) if group > 1 else tensor


def _tokens_first(grad, like):
    """The gradient [B, H, S, D] in the shape and dtype of `like`, [B, S, G, D]: summed over the heads of a group."""
    num_heads_kv = like.shape[-2]
    if grad.shape[1] != num_heads_kv:
        grad = grad.unflatten(1, (num_heads_kv, -1)).sum(2)
    grad = grad.transpose(1, 2)
    return (grad.squeeze(0) if like.dim() == 3 else grad).to(like.dtype)


def _rows(cu_seqlens, total):
    """Of each packed row: its sequence (the number of sequences, if none), its place there; and the lengths."""
    cu_seqlens = cu_seqlens.long()
    row = torch.arange(total, device=cu_seqlens.device)
    sequence = torch.searchsorted(cu_seqlens, row, right=True) - 1
    lengths = torch.cat([cu_seqlens.diff(), cu_seqlens.new_zeros(1)])
    return sequence, row - cu_seqlens[sequence], lengths


class _Places:
    """Of every score: whether it is visible, and its signed distance i + offset - j from the diagonal."""

    def __init__(self, query, key, o):
        self.num_heads = query.shape[-2]
        self.rows = None  # packed: sequence and place of each query, of each key
        if o.packed:
            self._place_packed(query, key, o)
        else:
            self._place(query, key, o)
        if o.causal:
            self.visible = self.visible & (self.distance >= 0)
        if o.window_left >= 0:
            self.visible = self.visible & ((self.distance <= o.window_left) | (self.inputs["k"] < o.sink_keys))
        if o.window_right >= 0:
            self.visible = self.visible & (self.distance >= -o.window_right)
        if o.attn_mask is not None:
            self.visible = self.visible & (self._shown_at_end(o.attn_mask) if o.mask_at_end else o.attn_mask)
        if o.attn_bias is not None:
            self.visible = self.visible & (o.attn_bias != float("-inf"))

    def _offset(self, o, seqlens_q, seqlens_k, per_sequence):
        if o.query_offsets is not None:
            return per_sequence(o.query_offsets)
        if o.query_offset is not None:
            return o.query_offset
        return seqlens_k - seqlens_q if o.align == 2 else 0

    def _place(self, query, key, o):
        i = torch.arange(query.shape[1], device=query.device).view(1, 1, -1, 1)
        j = torch.arange(key.shape[1], device=query.device).view(1, 1, 1, -1)
        seqlens_q = query.shape[1] if o.seqlens_q is None else o.seqlens_q.view(-1, 1, 1, 1)
        seqlens_k = key.shape[1] if o.seqlens_k is None else o.seqlens_k.view(-1, 1, 1, 1)
        offset = self._offset(o, seqlens_q, seqlens_k, lambda each: each.view(-1, 1, 1, 1))
        self.seqlens_k = seqlens_k
        self.visible = (i < seqlens_q) & (j < seqlens_k)
        self.distance = i + offset - j
        batch = torch.arange(query.shape[0], device=query.device).view(-1, 1, 1, 1)
        self.inputs = {"b": batch, "q": i, "k": j, "offset": offset}

    def _shown_at_end(self, mask):
        """A mask of each sequence's last keys as one of all keys."""
        mask = mask.reshape(*[1] * (4 - mask.dim()), *mask.shape)
        with_one_before = torch.nn.functional.pad(mask, (1, 0), value=True)
        column = self.inputs["k"] - (self.seqlens_k - mask.shape[-1]) + 1
        return with_one_before.take_along_dim(column.clamp(0, mask.shape[-1]), -1)

    def _place_packed(self, query, key, o):
        sequence_q, i, lengths_q = _rows(o.cu_seqlens_q, query.shape[0])
        sequence_k, j, lengths_k = _rows(o.cu_seqlens_k, key.shape[0])
        batch = o.cu_seqlens_q.shape[0] - 1
        self.rows = (sequence_q.clamp(max=batch - 1), i, sequence_k, j)
        offset = self._offset(
            o, lengths_q[sequence_q], lengths_k[sequence_q], lambda each: each[sequence_q.clamp(max=batch - 1)]
        )
        self.visible = (sequence_q.view(1, 1, -1, 1) == sequence_k.view(1, 1, 1, -1)) & (
            sequence_q < batch
        ).view(1, 1, -1, 1)
        self.distance = (i + offset).view(1, 1, -1, 1) - j.view(1, 1, 1, -1)
        of_rows = {"b": self.rows[0], "q": i, "offset": i.new_zeros(i.shape) + offset}
        self.inputs = {name: each.view(1, 1, -1, 1) for name, each in of_rows.items()} | {"k": j.view(1, 1, 1, -1)}

    def program_inputs(self):
        """What a program may read besides the score, each as broadcasts to [B, H, Sq, Sk]."""
        heads = torch.arange(self.num_heads, device=self.visible.device)
        return self.inputs | {"h": heads.view(1, -1, 1, 1)}

    def slopes_of_rows(self, slopes):
        """[H] or [B, H] as [B, H, 1, 1]; packed [1, H, total_q, 1]."""
        if self.rows is None or slopes.dim() == 1:
            return slopes.view(-1, self.num_heads, 1, 1)
        return slopes[self.rows[0]].T.view(1, self.num_heads, -1, 1)

    def slopes_of_rows_backward(self, grad, slopes):
        """The slopes' gradient, given that of each row: [B, H, Sq]."""
        if self.rows is None or slopes.dim() == 1:
            return grad.sum(2).sum_to_size(slopes.shape).to(slopes.dtype)
        zeros = grad.new_zeros(slopes.shape)
        return zeros.index_add(0, self.rows[0], grad[0].T).to(slopes.dtype)

    def kept(self, query, key, o):
        """What dropout does to P: a factor 0 or 1 / (1 - p)."""
        if o.packed:
            sequence, i, _, j = self.rows
            batch, longest_q, longest_k = o.cu_seqlens_q.shape[0] - 1, query.shape[0], key.shape[0]
            mask = _ops.dropout_mask(
                o.dropout_seed, o.dropout_p, o.dropout_offset, batch, self.num_heads, longest_q, longest_k,
                o.dropout_origin,
            )  # fmt: skip
            mask = mask.to(query.device)[sequence.view(-1, 1), :, i.view(-1, 1), j.view(1, -1)].permute(2, 0, 1).unsqueeze(0)
        else:
            batch, seqlen_q, seqlen_k = query.shape[0], query.shape[1], key.shape[1]
            mask = _ops.dropout_mask(
                o.dropout_seed, o.dropout_p, o.dropout_offset, batch, self.num_heads, seqlen_q, seqlen_k,
                o.dropout_origin,
            )  # fmt: skip
        factor = 1 / (1 - o.dropout_p) if o.dropout_p < 1 else 0.0
        return mask.to(query.device, torch.float64 if _is_float64(query) else torch.float32) * factor


def _scale(query, o):
    if o.scale is not None:
        return o.scale
    return query.shape[-1] ** -0.5 if query.shape[-1] else 1.0


def without_autocast():
    """For formulas of tensors that have their dtypes by now: products within are not to be cast once more."""
    return torch.autocast("cuda" if torch.is_autocast_enabled("cuda") else "cpu", enabled=False)


class _Scores:
    """S and P = exp(S - logsumexp), or P = S without a softmax, and what their gradients need of the way there."""

    def __init__(self, query, key, logsumexp, attn_bias, alibi_slopes, captures, o):
        self.places = places = _Places(query, key, o)
        softmax = o.normalizer == 0
        by_row = torch.zeros((), device=query.device)
        if softmax:
            by_row = (logsumexp.unsqueeze(0) if logsumexp.dim() == 2 else logsumexp).unsqueeze(3)  # [B, H, Sq, 1]
        self.visible = places.visible & (by_row != -float("inf"))
        self.program = None
        if o.program is not None:
            sums_dtype = torch.float64 if _is_float64(query) else torch.float32
            self.program = _program_formula.Formula(o.program, places.program_inputs(), sums_dtype)
            self.visible = self.visible & self.program.mask(captures)
        self.query = self.of_queries(_heads_first(query, places.num_heads))
        self.key = self.of_keys(_heads_first(key, places.num_heads))
        self.scale = _scale(query, o)
        scores = self.scale * (self.query @ self.key.transpose(2, 3))
        self.softcap_slope = None
        if o.softcap:
            capped = torch.tanh(scores / o.softcap)
            scores, self.softcap_slope = o.softcap * capped, 1 - capped * capped
        if attn_bias is not None:
            scores = scores + attn_bias.to(scores.dtype)
        if alibi_slopes is not None:
            scores = scores - places.slopes_of_rows(alibi_slopes.to(scores.dtype)) * places.distance.abs()
        if self.program is not None:
            self.before_program = torch.where(self.visible, scores, 0.0)
            scores = self.program.score(self.before_program, captures)
            self.visible = self.visible & (scores != -float("inf"))
        if softmax:
            self.weights = torch.exp(torch.where(self.visible, scores - by_row, -float("inf")))
        else:
            self.weights = torch.where(self.visible, scores, 0.0)

    def of_queries(self, x):
        """[B, H, Sq, D] with 0 in queries that see no key: what padding holds would pass products as 0 * NaN."""
        return torch.where(self.visible.any(3).unsqueeze(3), x, 0.0)

    def of_keys(self, x):
        """[B, H, Sk, D] with 0 in keys that no query sees."""
        return torch.where(self.visible.any(2).unsqueeze(3), x, 0.0)


def weights(query, key, logsumexp, options):
    """P after dropout, [B, H, Sq, Sk] in query's dtype, differentiable by query, key, logsumexp and the options."""
    o = AllOptions(*options)
    with without_autocast():
        scores = _Scores(query, key, logsumexp, o.attn_bias, o.alibi_slopes, captures_of(options), o)
    result = scores.weights
    if o.dropout_p:
        result = result * scores.places.kept(query, key, o)
    return result.to(query.dtype)


def attention_backward(
    grad_out, grad_logsumexp, query, key, value, out, logsumexp, attn_bias, alibi_slopes, sink_logits, captures, needs,
    options,
):  # fmt: skip
    """As the operator of this name, with attn_bias, alibi_slopes, sink_logits and captures beside the options."""
    o = AllOptions(*options)
    scores = _Scores(query, key, logsumexp, attn_bias, alibi_slopes, captures, o)
    num_heads = scores.places.num_heads
    grad_out_heads = scores.of_queries(_heads_first(grad_out, num_heads))
    # delta = rowsum(grad_out * out) - grad_logsumexp
    delta = (grad_out_heads * scores.of_queries(_heads_first(out, num_heads))).sum(-1, keepdim=True)
    if grad_logsumexp is not None:
        by_row = grad_logsumexp.unsqueeze(0) if grad_logsumexp.dim() == 2 else grad_logsumexp
        delta = delta - by_row.unsqueeze(-1)
    grad_weights = grad_out_heads @ scores.of_keys(_heads_first(value, num_heads)).transpose(2, 3)
    dropped = scores.weights
    if o.dropout_p:
        kept = scores.places.kept(query, key, o)
        dropped, grad_weights = dropped * kept, grad_weights * kept
    # dS = P * (dP - delta), without a softmax dP: nothing at hidden places, whatever the rest holds there
    grad_scores = grad_weights if o.normalizer else scores.weights * (grad_weights - delta)
    grad_scores = torch.where(scores.visible, grad_scores, 0.0)
    grads = [None] * len(DIFFERENTIABLE)
    if needs & 4:
        grads[2] = _tokens_first(dropped.transpose(2, 3) @ grad_out_heads, value)
    if scores.program is not None:
        grad_scores, grad_captures = scores.program.gradients(scores.before_program, captures, grad_scores)
        for bit, grad in enumerate(grad_captures, len(PLAIN_DIFFERENTIABLE)):
            grads[bit] = grad if needs >> bit & 1 else None
    if needs & 8:
        grads[3] = grad_scores.sum_to_size(attn_bias.shape).to(attn_bias.dtype)
    if needs & 16:
        by_row = -(grad_scores * scores.places.distance.abs()).sum(3)
        grads[4] = scores.places.slopes_of_rows_backward(by_row, alibi_slopes)
    if needs & 32:
        grads[5] = _sinks_gradient(sink_logits, grad_out, grad_logsumexp, out, logsumexp, num_heads)
    if scores.softcap_slope is not None:
        grad_scores = grad_scores * scores.softcap_slope
    if needs & 1:
        grads[0] = _tokens_first(scores.scale * (grad_scores @ scores.key), query)
    if needs & 2:
        grads[1] = _tokens_first(scores.scale * (grad_scores.transpose(2, 3) @ scores.query), key)
    return tuple(grads)


def _sinks_gradient(sink_logits, grad_out, grad_logsumexp, out, logsumexp, num_heads):
    """sum of exp(sink - L) (dL - dO . O), over all rows but padding's, whose L is -inf."""
    grad_out, out = (_heads_first(x, num_heads) for x in (grad_out, out))
    seen = (out != 0).any(3)  # what grad_out holds elsewhere meets no value
    delta = torch.where(seen, (torch.where(seen.unsqueeze(3), grad_out, 0.0) * out).sum(3), 0.0)
    by_row, grad_by_row = (
        each.unsqueeze(0) if each is not None and each.dim() == 2 else each for each in (logsumexp, grad_logsumexp)
    )
    there = by_row != -float("inf")
    share = torch.exp(torch.where(there, sink_logits.view(1, -1, 1) - torch.where(there, by_row, 0.0), -float("inf")))
    grad = -delta if grad_by_row is None else torch.where(there, grad_by_row, 0.0) - delta
    return (share * grad).sum((0, 2)).to(sink_logits.dtype)


def merge(outs, logsumexps):
    """As the operator merge_forward."""
    parts = torch.stack(logsumexps)
    seen = parts > -float("inf")
    any_seen = seen.any(0)
    # Hidden places are replaced before exp and log, or their derivative would be NaN.
    logsumexp = torch.logsumexp(torch.where(any_seen, parts, 0.0), 0)
    shares = torch.exp(torch.where(seen, parts - logsumexp, -float("inf"))).to(parts.dtype)
    by_row = [each.transpose(-1, -2).unsqueeze(-1) for each in (shares, seen)]
    out = (by_row[0] * torch.where(by_row[1], torch.stack([each.to(parts.dtype) for each in outs]), 0.0)).sum(0)
    return out.to(outs[0].dtype), torch.where(any_seen, logsumexp, -float("inf"))
