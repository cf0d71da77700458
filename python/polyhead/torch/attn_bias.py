"""Masks without a matrix, named and built as in xFormers: the attn_bias of `memory_efficient_attention`.

    mask = BlockDiagonalMask.from_seqlens([3, 5]).make_causal()  # sequences of 3 and 5 tokens, packed into one row of 8
    out = memory_efficient_attention(query, key, value, attn_bias=mask)  # query, key, value: [1, 8, H, K]

`options` tells what a mask means to `polyhead.torch.attention`: causal, window, align, and cu_seqlens of the packed
kinds. No mask becomes a matrix to compute with; `materialize` makes the one that tests compare to.

Where query i stands among the keys: at key i ("top left"), or so that the last query stands at the last key ("bottom
right"). The two differ when there are not as many queries as keys. A query that sees no key gets 0.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from polyhead import Error
from polyhead.torch._mask import AttentionBias, BlockDiagonal, check_at_least
from polyhead.torch._seqlens import _SeqLenInfo
from polyhead.torch._slot_masks import (
    BlockDiagonalCausalLocalAttentionPaddedKeysMask, BlockDiagonalCausalWithOffsetGappyKeysMask,
    BlockDiagonalCausalWithOffsetPaddedKeysMask, BlockDiagonalGappyKeysMask, BlockDiagonalLocalAttentionPaddedKeysMask,
    BlockDiagonalPaddedKeysMask,
)  # fmt: skip

__all__ = [
    "AttentionBias", "LowerTriangularMask", "LowerTriangularMaskWithTensorBias", "LowerTriangularFromBottomRightMask",
    "LowerTriangularFromBottomRightLocalAttentionMask", "LocalAttentionFromBottomRightMask", "BlockDiagonalMask",
    "BlockDiagonalCausalMask", "BlockDiagonalCausalFromBottomRightMask", "BlockDiagonalCausalLocalAttentionMask",
    "BlockDiagonalCausalLocalAttentionFromBottomRightMask", "BlockDiagonalPaddedKeysMask",
    "BlockDiagonalCausalWithOffsetPaddedKeysMask", "BlockDiagonalLocalAttentionPaddedKeysMask",
    "BlockDiagonalCausalLocalAttentionPaddedKeysMask", "BlockDiagonalGappyKeysMask",
    "BlockDiagonalCausalWithOffsetGappyKeysMask",
]  # fmt: skip


class LowerTriangularMask(AttentionBias):
    """Causal from the top left: query i sees the keys j <= i."""

    def __init__(self, device: torch.device | str | None = None) -> None:
        """device is taken for the sake of old callers, and unused."""

    def _band(self):
        return {"causal": True, "align": "top_left"}

    def add_bias(self, bias: torch.Tensor) -> LowerTriangularMaskWithTensorBias:
        """This mask and a bias tensor: a `LowerTriangularMaskWithTensorBias`."""
        return LowerTriangularMaskWithTensorBias(bias)


class LowerTriangularMaskWithTensorBias(LowerTriangularMask):
    """`LowerTriangularMask`, and a tensor that is added to the scores.

    Parameters
    ----------
    bias : torch.Tensor
        As a tensor given as attn_bias; may require a gradient.
    """

    def __init__(self, bias: torch.Tensor) -> None:
        self._bias = bias

    def options(self) -> dict[str, Any]:
        return {**self._band(), "attn_bias": self._bias}

    def to(self, device: torch.device | str) -> AttentionBias:
        return LowerTriangularMaskWithTensorBias(self._bias.to(device))

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        return super().materialize(shape, dtype, device) + self._bias.to(device)


class LowerTriangularFromBottomRightMask(AttentionBias):
    """Causal from the bottom right: the last query sees all keys, each one before it one less."""

    def _band(self):
        return {"causal": True, "align": "bottom_right"}

    def make_local_attention(self, window_size: int) -> LowerTriangularFromBottomRightLocalAttentionMask:
        """This mask, of each query's visible keys only the last window_size."""
        return LowerTriangularFromBottomRightLocalAttentionMask(window_size)


@dataclasses.dataclass
class LowerTriangularFromBottomRightLocalAttentionMask(LowerTriangularFromBottomRightMask):
    """Causal from the bottom right, in a window of _window_size keys: the query's own place and those before it."""

    _window_size: int

    def __post_init__(self):
        check_at_least("window_size", self._window_size, 1)

    def _band(self):
        return {"causal": True, "window": (self._window_size - 1, 0), "align": "bottom_right"}


@dataclasses.dataclass
class LocalAttentionFromBottomRightMask(AttentionBias):
    """From the bottom right, window_left keys before the query's own place, that one, and window_right after it."""

    window_left: int
    window_right: int

    def __post_init__(self):
        check_at_least("window_left", self.window_left, 0)
        check_at_least("window_right", self.window_right, 0)

    def _band(self):
        return {"window": (self.window_left, self.window_right), "align": "bottom_right"}


def _block_lengths(mask):
    """(queries, keys) of each block."""
    for (q_start, q_end), (k_start, k_end) in zip(mask.q_seqinfo.intervals(), mask.k_seqinfo.intervals()):
        yield q_end - q_start, k_end - k_start


def _check_no_fewer_keys(mask):
    for number, (queries, keys) in enumerate(_block_lengths(mask)):
        if keys < queries:
            raise Error(f"block {number} has {keys} keys, needs at least as many as its {queries} queries")


@dataclasses.dataclass(eq=False)
class BlockDiagonalMask(BlockDiagonal):
    """Sequences of different lengths, one after the other in one row of the batch, each seeing only itself.

    Parameters
    ----------
    q_seqinfo, k_seqinfo
        Where the sequences lie among the queries and keys; `from_seqlens` and `from_tensor_list` make them.
    _batch_sizes : sequence of int, optional
        How many sequences of one length each tensor of `split` holds; default 1 each.

    Examples
    --------
    >>> import torch
    >>> from polyhead.torch import BlockDiagonalMask, memory_efficient_attention
    >>> sentences = [torch.rand(1, 3, 2, 8), torch.rand(1, 5, 2, 8)]  # two heads of 8
    >>> mask, tokens = BlockDiagonalMask.from_tensor_list(sentences)
    >>> out = memory_efficient_attention(tokens, tokens, tokens, attn_bias=mask)
    >>> [tuple(sentence.shape) for sentence in mask.split(out)]
    [(1, 3, 2, 8), (1, 5, 2, 8)]
    """

    q_seqinfo: _SeqLenInfo
    k_seqinfo: _SeqLenInfo
    _batch_sizes: object = None

    def _band(self):
        return {}

    def options(self) -> dict[str, Any]:
        return {**self._band(), "cu_seqlens_q": self.q_seqinfo.seqstart, "cu_seqlens_k": self.k_seqinfo.seqstart}

    @classmethod
    def from_seqlens(
        cls,
        q_seqlen: Sequence[int],
        kv_seqlen: Sequence[int] | None = None,
        *,
        device: torch.device | str | None = None,
    ) -> BlockDiagonalMask:
        """From the lengths of the sequences.

        Parameters
        ----------
        q_seqlen, kv_seqlen : sequence of int
            Queries and keys of each sequence; the same if kv_seqlen is not given.
        device : torch.device, optional
            Where the starts are kept; default torch's. `memory_efficient_attention` moves them to the query's.
        """
        queries = _SeqLenInfo.from_seqlens(q_seqlen, device=device)
        keys = queries if kv_seqlen is None else _SeqLenInfo.from_seqlens(kv_seqlen, device=device)
        keys.check_count("kv_seqlen", queries)
        return cls(q_seqinfo=queries, k_seqinfo=queries if keys.seqstart_py == queries.seqstart_py else keys)

    @classmethod
    def from_tensor_list(cls, tensors: Sequence[torch.Tensor]) -> tuple[BlockDiagonalMask, torch.Tensor]:
        """The mask, and the tensors [B_i, M_i, ...] packed into one of [1, sum of B_i M_i, ...]."""
        mask = cls.from_seqlens([x.shape[1] for x in tensors for _ in range(x.shape[0])], device=tensors[0].device)
        return dataclasses.replace(mask, _batch_sizes=[x.shape[0] for x in tensors]), _pack(tensors)

    @classmethod
    def from_tensor_lists_qkv(
        cls,
        tensors_q: Sequence[torch.Tensor],
        tensors_k: Sequence[torch.Tensor],
        tensors_v: Sequence[torch.Tensor] | None = None,
    ) -> tuple[BlockDiagonalMask, torch.Tensor, torch.Tensor, torch.Tensor | None]:
        """The mask, and the packed queries, keys and values (None without tensors_v)."""
        for name, tensors in (("tensors_k", tensors_k), ("tensors_v", tensors_v)):
            like = tensors_q if name == "tensors_k" else tensors_k
            dims = 1 if name == "tensors_k" else 2
            if tensors is not None and [x.shape[:dims] for x in tensors] != [x.shape[:dims] for x in like]:
                raise Error(f"{name} has {len(tensors)} tensors whose first {dims} sizes are not those of the others")
        mask = cls.from_seqlens(
            [x.shape[1] for x in tensors_q for _ in range(x.shape[0])],
            [x.shape[1] for x in tensors_k for _ in range(x.shape[0])],
            device=tensors_q[0].device,
        )
        mask = dataclasses.replace(mask, _batch_sizes=[x.shape[0] for x in tensors_q])
        return mask, _pack(tensors_q), _pack(tensors_k), None if tensors_v is None else _pack(tensors_v)

    def split_queries(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """[1, all queries, ...] into the list of [B_i, Mq_i, ...]."""
        return self.q_seqinfo.split(tensor, self._batch_sizes)

    def split_kv(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """[1, all keys, ...] into the list of [B_i, Mk_i, ...]."""
        return self.k_seqinfo.split(tensor, self._batch_sizes)

    def split(self, tensor: torch.Tensor) -> list[torch.Tensor]:
        """Undoes `from_tensor_list`."""
        if self.q_seqinfo.seqstart_py != self.k_seqinfo.seqstart_py:
            raise Error("split needs as many keys as queries in each sequence: take split_queries or split_kv")
        return self.split_queries(tensor)

    def make_causal(self) -> BlockDiagonalCausalMask:
        """Each sequence causal from its top left."""
        return BlockDiagonalCausalMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_causal_from_bottomright(self) -> BlockDiagonalCausalFromBottomRightMask:
        """Each sequence causal from its bottom right."""
        return BlockDiagonalCausalFromBottomRightMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes)

    def make_local_attention(self, window_size: int) -> BlockDiagonalCausalLocalAttentionMask:
        """Each sequence causal from its top left, in a window of window_size keys."""
        return BlockDiagonalCausalLocalAttentionMask(self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size)

    def make_local_attention_from_bottomright(
        self, window_size: int
    ) -> BlockDiagonalCausalLocalAttentionFromBottomRightMask:
        """Each sequence causal from its bottom right, in a window of window_size keys."""
        return BlockDiagonalCausalLocalAttentionFromBottomRightMask(
            self.q_seqinfo, self.k_seqinfo, self._batch_sizes, window_size
        )


def _pack(tensors):
    return torch.cat([x.flatten(0, 1) for x in tensors]).unsqueeze(0)


@dataclasses.dataclass(eq=False)
class BlockDiagonalCausalMask(BlockDiagonalMask):
    """`BlockDiagonalMask`, each sequence causal from its top left."""

    def _band(self):
        return {"causal": True, "align": "top_left"}


@dataclasses.dataclass(eq=False)
class BlockDiagonalCausalFromBottomRightMask(BlockDiagonalMask):
    """`BlockDiagonalMask`, each sequence causal from its bottom right. No sequence has fewer keys than queries."""

    def __post_init__(self):
        _check_no_fewer_keys(self)

    def _band(self):
        return {"causal": True, "align": "bottom_right"}


@dataclasses.dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionMask(BlockDiagonalCausalMask):
    """`BlockDiagonalCausalMask` in a window of _window_size keys; every query sees at least one."""

    _window_size: int = 0

    def __post_init__(self):
        check_at_least("window_size", self._window_size, 1)
        for number, (queries, keys) in enumerate(_block_lengths(self)):
            if queries >= keys + self._window_size:
                raise Error(f"block {number} has {queries} queries: the last sees none of its {keys} keys through a "
                            f"window_size of {self._window_size}")  # fmt: skip

    def _band(self):
        return {"causal": True, "window": (self._window_size - 1, 0), "align": "top_left"}


@dataclasses.dataclass(eq=False)
class BlockDiagonalCausalLocalAttentionFromBottomRightMask(BlockDiagonalCausalFromBottomRightMask):
    """`BlockDiagonalCausalFromBottomRightMask` in a window of _window_size keys."""

    _window_size: int = 0

    def __post_init__(self):
        super().__post_init__()
        check_at_least("window_size", self._window_size, 1)

    def _band(self):
        return {"causal": True, "window": (self._window_size - 1, 0), "align": "bottom_right"}
