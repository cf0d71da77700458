"""The table of blocks of a BlockMask, and what it adds to the mask_mod: mostly nothing."""

import weakref

import torch

from polyhead import _bind

_MOST_COPIED = 1 << 22  # elements of tensors that are kept to see whether they change


class _Sources:
    """Tensors and what they held, to be asked whether they still hold it."""

    def __init__(self, tensors):
        self._copies = [tensor.detach().clone() for tensor in tensors]

    def hold(self, tensors):
        return len(tensors) == len(self._copies) and all(
            copy.dtype == tensor.dtype and torch.equal(copy, tensor) for copy, tensor in zip(self._copies, tensors)
        )


class _Known:
    """Of one BlockMask: its table, and for which mask it says nothing new."""

    def __init__(self, block_mask, tensors):
        self.shape = _shape(block_mask)
        self.lists = _Sources(tensors)
        self.table = _table(block_mask)
        self.implied = False
        self.question = self.captured = None  # of which `implied` is the answer


_known: weakref.WeakKeyDictionary = weakref.WeakKeyDictionary()


def table_beside(block_mask, mask, query, key):
    """int32 [B or 1, H or 1, blocks of queries, of keys]: 0 hidden, 1 as mask_mod says, 2 seen. None: mask_mod alone says so.

    mask: mask_mod as a `Traced` program. query [B, H, Sq, D] and key [B, G, Sk, D] tell the sizes.
    """
    lists = _lists(block_mask)
    known = _known.get(block_mask)
    if known is None or known.shape != _shape(block_mask) or not known.lists.hold(lists):
        known = _Known(block_mask, lists)
        if sum(each.numel() for each in lists) <= _MOST_COPIED:
            _known[block_mask] = known
    if known.table is None or mask.text is None:
        return known.table
    question = (mask.text, mask.names, tuple(query.shape[:3]), key.shape[2])
    if known.question != question or not known.captured.hold(mask.tensors):
        known.question = None
        if sum(each.numel() for each in mask.tensors) > _MOST_COPIED:
            return known.table
        known.implied = _is_implied(known.table, block_mask.BLOCK_SIZE, mask, query, key)
        known.captured = _Sources(mask.tensors)
        known.question = question
    return None if known.implied else known.table


def _is_implied(table, block_size, mask, query, key):
    captured = {name: tensor.detach() for name, tensor in zip(mask.names, mask.tensors)}
    return _bind.implies_blocks(*query.shape[:3], key.shape[2], mask.text, captured, *block_size, table)


def within(table, block_size, mask, b, h, q, k):
    """The mask of both, of traced values."""
    block = table[
        b if table.shape[0] > 1 else 0, h if table.shape[1] > 1 else 0, q // block_size[0], k // block_size[1]
    ]
    return (block == 2) | ((block == 1) & block.tracing.scalar(mask))


def _shape(block_mask):
    return (*block_mask.seq_lengths, *block_mask.BLOCK_SIZE)


def _lists(block_mask):
    lists = [block_mask.kv_num_blocks, block_mask.kv_indices]
    if block_mask.full_kv_indices is not None:
        lists += [block_mask.full_kv_num_blocks, block_mask.full_kv_indices]
    return lists


def _table(block_mask):
    num_keys = -(-block_mask.seq_lengths[1] // block_mask.BLOCK_SIZE[1])
    table = _listed(block_mask.kv_num_blocks, block_mask.kv_indices, num_keys)
    if block_mask.full_kv_indices is not None:
        table += 2 * _listed(block_mask.full_kv_num_blocks, block_mask.full_kv_indices, num_keys)
    return None if bool((table == 1).all()) else table


def _listed(num_blocks, indices, num_keys):
    """int32, 1 where the first num_blocks[..., i] of indices[..., i, :] name a block of keys."""
    num_blocks, indices = (x.view(*[1] * (dims - x.dim()), *x.shape) for x, dims in ((num_blocks, 3), (indices, 4)))
    listed = torch.arange(indices.shape[-1]) < num_blocks.unsqueeze(-1)
    table = torch.zeros(*indices.shape[:-1], num_keys + 1, dtype=torch.int32)
    table.scatter_(-1, torch.where(listed, indices, num_keys).long(), 1)
    return table[..., :num_keys]
