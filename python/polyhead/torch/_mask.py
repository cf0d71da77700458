"""What the masks of `polyhead.torch.attn_bias` have in common."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import torch

from polyhead import Error


def band(seqlen_q, seqlen_k, offset, causal, window, device):
    """Bool [seqlen_q, seqlen_k]: what causal and window let query i, which stands at key i + offset, see."""
    stands_at = torch.arange(seqlen_q, device=device)[:, None] + offset
    key = torch.arange(seqlen_k, device=device)
    left, right = window
    seen = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=device)
    if causal:
        seen &= key <= stands_at
    if left >= 0:
        seen &= key >= stands_at - left
    if right >= 0:
        seen &= key <= stands_at + right
    return seen


def visible(seqlen_q, seqlen_k, device, causal=False, window=(-1, -1), align="top_left"):
    """The band of the options of these names."""
    offset = seqlen_k - seqlen_q if align == "bottom_right" else 0
    return band(seqlen_q, seqlen_k, offset, causal, window, device)


def dense(seen, shape, dtype):
    """0 where seen, -inf elsewhere, broadcast to shape."""
    return torch.zeros_like(seen, dtype=dtype).masked_fill(~seen, float("-inf")).expand(shape)


def check_at_least(name, size, smallest):
    if size < smallest:
        raise Error(f"{name} is {size}, must be at least {smallest}")


class AttentionBias:
    """A mask that `memory_efficient_attention` takes as attn_bias, besides a tensor."""

    def _band(self):
        """causal, window and align of `attention`: for all queries and keys, or for those of each block."""
        raise NotImplementedError(f"{type(self).__name__} does not say what it hides")

    def options(self) -> dict[str, Any]:
        """The options of `polyhead.torch.attention` that compute this mask, as a dict."""
        return self._band()

    def to(self, device: torch.device | str) -> AttentionBias:
        """The same mask, with what tensors it has on this device."""
        return self

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        """The mask as a tensor to add to the scores: 0 or -inf (plus the bias, if it has one). For tests: O(Mq Mk).

        Parameters
        ----------
        shape : sequence of int
            [..., Mq, Mk]; Mq and Mk those of the packed tensors for the packed kinds.
        dtype : torch.dtype
        device : torch.device or str

        Returns
        -------
        torch.Tensor
            Of this shape; not to be written to.
        """
        return dense(visible(*shape[-2:], device, **self._band()), shape, dtype)


class BlockDiagonal(AttentionBias):
    """Queries of block i see keys of block i; q_seqinfo and k_seqinfo say where the blocks lie."""

    def uniform_slots(self) -> int:
        """How many blocks there are, if queries and keys are also tensors [blocks, M, ...] of equal blocks; else 0."""
        return 0

    def to(self, device: torch.device | str) -> AttentionBias:
        if self.q_seqinfo.seqstart.device == torch.device(device):
            return self
        queries = self.q_seqinfo.to(device)
        keys = queries if self.k_seqinfo is self.q_seqinfo else self.k_seqinfo.to(device)
        return dataclasses.replace(self, q_seqinfo=queries, k_seqinfo=keys)

    def materialize(
        self, shape: Sequence[int], dtype: torch.dtype = torch.float32, device: torch.device | str = "cpu"
    ) -> torch.Tensor:
        rows = self.q_seqinfo.seqstart_py[-1], self.k_seqinfo.seqstart_py[-1]
        if tuple(shape[-2:]) != rows:
            raise Error(f"shape ends in {tuple(shape[-2:])}, must end in {rows}: all queries and keys of the mask")
        seen = torch.zeros(rows, dtype=torch.bool, device=device)
        for (q_start, q_end), (k_start, k_end) in zip(self.q_seqinfo.intervals(), self.k_seqinfo.intervals()):
            block = visible(q_end - q_start, k_end - k_start, device, **self._band())
            seen[q_start:q_end, k_start:k_end] = block
        return dense(seen, shape, dtype)
