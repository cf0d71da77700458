"""Masks of packed queries whose keys do not lie end to end: in slots of a cache, or with gaps."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from polyhead.torch._mask import BlockDiagonal, check_at_least
from polyhead.torch._seqlens import _GappySeqInfo, _PaddedSeqLenInfo, _SeqLenInfo


@dataclasses.dataclass(eq=False)
class _KeysApart(BlockDiagonal):
    """q_seqinfo's sequences lie end to end, k_seqinfo's begin at seqstart and have seqlen keys."""

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _GappySeqInfo

    def options(self) -> dict[str, Any]:
        # Packed sequences lie end to end, these do not: between two sequences stands one that has the rows between them
        # as its keys and no queries. So nothing is copied.
        cu_seqlens_q = torch.cat([self.q_seqinfo.seqstart[:1], self.q_seqinfo.seqstart[1:].repeat_interleave(2)])
        starts = self.k_seqinfo.seqstart
        ends = starts[:-1] + self.k_seqinfo.seqlen
        cu_seqlens_k = torch.cat([torch.stack([starts[:-1], ends], dim=1).flatten(), starts[-1:]])
        if self.k_seqinfo.seqstart_py[0] > 0:  # the rows before the first
            cu_seqlens_q, cu_seqlens_k = (torch.nn.functional.pad(x, (1, 0)) for x in (cu_seqlens_q, cu_seqlens_k))
        return {**self._band(), "cu_seqlens_q": cu_seqlens_q, "cu_seqlens_k": cu_seqlens_k}


@dataclasses.dataclass(eq=False)
class BlockDiagonalPaddedKeysMask(_KeysApart):
    """Packed queries, and keys in slots of one size, of which each sequence fills the beginning: a cache.

    Queries [1, sum of Mq_i, ...], keys [1, number of sequences * kv_padding, ...]; what lies behind a sequence's keys
    in its slot is never looked at.
    """

    k_seqinfo: _PaddedSeqLenInfo

    def _band(self):
        return {}

    def uniform_slots(self) -> int:
        # Decoding: one query each. `attention` splits long keys over threads for a batch, not for packed queries.
        same_queries = self.q_seqinfo.min_seqlen == self.q_seqinfo.max_seqlen
        return len(self.k_seqinfo.seqlen_py) if same_queries else 0

    def slot_options(self) -> dict[str, Any]:
        """What options gives, with the slots as the batch."""
        return {**self._band(), "seqlens_k": self.k_seqinfo.seqlen}

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        causal_diagonal: Any = None,
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalPaddedKeysMask:
        """From the lengths of the sequences.

        Parameters
        ----------
        q_seqlen, kv_seqlen : sequence of int
            Queries and keys of each sequence.
        kv_padding : int
            Size of a slot, not below any of kv_seqlen.
        causal_diagonal
            Taken for the sake of old callers, and unused.
        device : torch.device, optional
            As of `BlockDiagonalMask.from_seqlens`.
        """
        return cls(**_slots(q_seqlen, kv_padding, kv_seqlen, device))

    def make_local_attention(self, window_left: int, window_right: int) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """From each sequence's bottom right, window_left keys before the query's place, it, and window_right after."""
        return BlockDiagonalLocalAttentionPaddedKeysMask(self.q_seqinfo, self.k_seqinfo, window_left, window_right)


def _slots(q_seqlen, kv_padding, kv_seqlen, device=None):
    queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
    keys = _PaddedSeqLenInfo.from_seqlens_padded(kv_seqlen, kv_padding, device=device)
    keys.check_count("kv_seqlen", queries)
    return {"q_seqinfo": queries, "k_seqinfo": keys}


@dataclasses.dataclass(eq=False)
class BlockDiagonalCausalWithOffsetPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalPaddedKeysMask`, each sequence causal from its bottom right: its last query sees all its keys."""

    causal_diagonal: object = None  # as of from_seqlens

    def _band(self):
        return {"causal": True, "align": "bottom_right"}


@dataclasses.dataclass(eq=False)
class BlockDiagonalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalPaddedKeysMask` in a window: from the bottom right, window_left + 1 + window_right keys."""

    window_left: int
    window_right: int

    def __post_init__(self):
        check_at_least("window_left", self.window_left, 0)
        check_at_least("window_right", self.window_right, 0)

    def _band(self):
        return {"window": (self.window_left, self.window_right), "align": "bottom_right"}

    @classmethod
    def from_seqlens_local(
        cls,
        q_seqlen: Sequence[int],
        kv_padding: int,
        kv_seqlen: Sequence[int],
        window_left: int,
        window_right: int,
    ) -> BlockDiagonalLocalAttentionPaddedKeysMask:
        """From the lengths of the sequences, as `BlockDiagonalPaddedKeysMask.from_seqlens`, and the window's sides."""
        return cls(**_slots(q_seqlen, kv_padding, kv_seqlen), window_left=window_left, window_right=window_right)


@dataclasses.dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionPaddedKeysMask(BlockDiagonalPaddedKeysMask):
    """`BlockDiagonalCausalWithOffsetPaddedKeysMask` in a window of _window_size keys."""

    _window_size: int

    def __post_init__(self):
        check_at_least("window_size", self._window_size, 1)

    def _band(self):
        return {"causal": True, "window": (self._window_size - 1, 0), "align": "bottom_right"}

    @classmethod
    def from_seqlens_local(
        cls, q_seqlen: Sequence[int], kv_padding: int, kv_seqlen: Sequence[int], window_size: int
    ) -> BlockDiagonalCausalLocalAttentionPaddedKeysMask:
        """From the lengths of the sequences, as `BlockDiagonalPaddedKeysMask.from_seqlens`, and the window's size."""
        return cls(**_slots(q_seqlen, kv_padding, kv_seqlen), _window_size=window_size)


@dataclasses.dataclass(eq=False)
class BlockDiagonalGappyKeysMask(_KeysApart):
    """Packed queries, and keys of each sequence anywhere in one row of the batch, one sequence after the other.

    Queries [1, sum of Mq_i, ...], keys [1, kv_seqstarts[-1], ...]; what lies between the sequences' keys is never looked
    at.
    """

    k_seqinfo: _GappySeqInfo

    def _band(self):
        return {}

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqstarts: Sequence[int],
        kv_seqlen: Sequence[int],
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalGappyKeysMask:
        """From the lengths of the sequences.

        Parameters
        ----------
        q_seqlen, kv_seqlen : sequence of int
            Queries and keys of each sequence.
        kv_seqstarts : sequence of int
            Where the keys of each sequence start, ascending, and last the number of all rows.
        device : torch.device, optional
            As of `BlockDiagonalMask.from_seqlens`.
        """
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        keys = _GappySeqInfo.from_seqlens_gappy(kv_seqstarts, kv_seqlen, device=device)
        keys.check_count("kv_seqlen", queries)
        return cls(q_seqinfo=queries, k_seqinfo=keys)


@dataclasses.dataclass(eq=False)
class BlockDiagonalCausalWithOffsetGappyKeysMask(BlockDiagonalGappyKeysMask):
    """`BlockDiagonalGappyKeysMask`, each sequence causal from its bottom right: its last query sees all its keys."""

    def _band(self):
        return {"causal": True, "align": "bottom_right"}
