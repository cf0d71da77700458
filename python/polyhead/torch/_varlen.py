"""torch.nn.attention.varlen on the CPU: aten's flash operators, which torch has for GPUs alone."""

import torch

from polyhead import Error
from polyhead.torch import _ops
from polyhead.torch._options import ALIGNS, Options

_BOTTOM_RIGHT = ALIGNS.index("bottom_right")


def flash_forward(
    query, key, value, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *, scale=None,
    window_size_left=None, window_size_right=None, seqused_k=None, alibi_slopes=None, block_table=None,
    num_splits=None,
):  # fmt: skip
    """aten::_flash_attention_forward of packed tensors [rows, H, D], or [B, S, H, D] without cum_seq.

    num_splits asks for nothing here: results do not depend on how the work is cut.
    """
    out, logsumexp = _forward(
        query, key, value, cum_seq_q, cum_seq_k, dropout_p, is_causal, return_debug_mask, scale, window_size_left,
        window_size_right, seqused_k, alibi_slopes, block_table,
    )  # fmt: skip
    seed, offset = query.new_empty(2, dtype=torch.uint64), query.new_empty((), dtype=torch.uint64)
    return out, logsumexp, seed, offset, query.new_empty(0)


def flash_forward_into(out, query, key, value, *arguments, **options):
    """aten::_flash_attention_forward_no_dropout_inplace: writes out, returns logsumexp."""
    result, logsumexp, *_ = flash_forward(query, key, value, *arguments, **options)
    out.copy_(result)
    return logsumexp


def flash_backward(
    grad_out, query, key, value, out, logsumexp, cum_seq_q, cum_seq_k, max_q, max_k, dropout_p, is_causal,
    rng_state, unused, *, scale=None, window_size_left=None, window_size_right=None,
):  # fmt: skip
    """aten::_flash_attention_backward."""
    _check_dropout(dropout_p)
    options = _options(is_causal, scale, window_size_left, window_size_right, None, cum_seq_q, cum_seq_k)
    grads = _ops.attention_backward(grad_out, None, query, key, value, out, logsumexp, 0b111, *options)
    return tuple(grads[:3])


def _forward(
    query, key, value, cum_seq_q, cum_seq_k, dropout_p, is_causal, return_debug_mask, scale, window_left,
    window_right, seqused_k, alibi_slopes, block_table,
):  # fmt: skip
    _check_dropout(dropout_p)
    if return_debug_mask:
        raise Error("return_debug_mask is True, must be False on the CPU")
    seqlens_k = None
    if block_table is not None:
        if seqused_k is None:
            raise Error("block_table is given without seqused_k, which tells the number of keys in the pages")
        table = pages_within(block_table, key, seqused_k, "seqused_k")
        options = _options(is_causal, scale, window_left, window_right, alibi_slopes, cum_seq_q, None, seqused_k)
        out, logsumexp, *_ = _ops.attention_forward_cached(query, key, value, *Options(*options), table, None, None)
        return out, logsumexp
    if seqused_k is not None and cum_seq_q is not None:
        slots = cum_seq_q if cum_seq_k is None else cum_seq_k
        key, value, cum_seq_k = used_rows(key, value, slots, seqused_k, "seqused_k")
    elif seqused_k is not None:
        seqlens_k = seqused_k
    options = _options(
        is_causal, scale, window_left, window_right, alibi_slopes, cum_seq_q, cum_seq_k, seqlens_k
    )  # fmt: skip
    out, logsumexp, *_ = _ops.attention_forward(query, key, value, *options)
    return out, logsumexp


def _check_dropout(dropout_p):
    if dropout_p != 0:
        raise Error(f"dropout_p is {dropout_p}, must be 0")


def _options(is_causal, scale, window_left, window_right, slopes, cum_seq_q, cum_seq_k, seqlens_k=None):
    """As `polyhead.torch._options.Options` has them."""
    if cum_seq_q is not None and cum_seq_k is None and seqlens_k is None:
        cum_seq_k = cum_seq_q
    left, right = (-1 if side is None else int(side) for side in (window_left, window_right))
    placed = is_causal or left >= 0 or right >= 0 or slopes is not None
    return (
        is_causal, scale, None, None, slopes, None, 0.0, 0, left, right, _BOTTOM_RIGHT if placed else 0, None, None,
        0.0, None, seqlens_k, cum_seq_q, cum_seq_k,
    )  # fmt: skip


def pages_within(block_table, pool, lengths, name):
    """The pages of each sequence [B, n], int64, each of pool [pages, page size, G, D]; 0 behind its length."""
    page_size, rows = pool.shape[1], block_table.shape[-1] * pool.shape[1]
    lengths = integers(lengths, name)
    if block_table.shape != (len(lengths), block_table.shape[-1]):
        raise Error(f"block_table has shape {tuple(block_table.shape)}, must be ({len(lengths)}, pages of a sequence)")
    if bool(((lengths < 0) | (lengths > rows)).any()):
        raise Error(f"{name} has the lengths {lengths.tolist()}, must be 0 to {rows}, the rows of a sequence's pages")
    begun = torch.arange(block_table.shape[-1], device=lengths.device) * page_size < lengths[:, None]
    indices_within(block_table[begun], "block_table", len(pool))
    return torch.where(begun, block_table.long(), 0)


def integers(given, name):
    """As int64."""
    if given.dtype not in (torch.int32, torch.int64):
        raise Error(f"{name} is {given.dtype}, must be int32 or int64")
    return given.long()


def indices_within(indices, name, count):
    """int64, each 0 to count - 1."""
    indices = integers(indices, name)
    if indices.numel():
        first, last = (int(x) for x in indices.aminmax())
        if first < 0 or last >= count:
            raise Error(f"{name} holds {first} to {last}, must be 0 to {count - 1}")
    return indices


def used_rows(key, value, slots, used, name):
    """The first used[b] keys from row slots[b] on, end to end, and where each sequence begins then."""
    slots, used = slots.long(), used.long()
    room = slots.diff()
    if used.shape != room.shape or bool(((used < 0) | (used > room)).any()):
        raise Error(f"{name} has the lengths {used.tolist()}, must be within {room.tolist()}, the rows of each sequence")
    cum_seq = torch.cat([used.new_zeros(1), used.cumsum(0)])
    rows = torch.arange(int(cum_seq[-1]), device=used.device) + torch.repeat_interleave(slots[:-1] - cum_seq[:-1], used)
    return key[rows], value[rows], cum_seq
