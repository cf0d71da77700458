"""Where sequences lie in a packed tensor: what the packed masks of `polyhead.torch.attn_bias` are made of."""

import dataclasses
import itertools

import torch

from polyhead import Error


@dataclasses.dataclass(eq=False)
class _SeqLenInfo:
    """Sequences end to end: of lengths 2, 3 and 2, say, from rows 0, 2 and 5 to row 7.

    seqstart (int32, on a device) and seqstart_py (a list) are the starts and, last, the end: [0, 2, 5, 7].
    """

    seqstart: torch.Tensor
    max_seqlen: int
    min_seqlen: int
    seqstart_py: list

    @classmethod
    def from_seqlens(cls, seqlens, *, device=None):
        seqlens = _lengths(seqlens)
        starts = list(itertools.accumulate(seqlens, initial=0))
        return cls(_int32(starts, device), max(seqlens, default=-1), min(seqlens, default=-1), starts)

    def to(self, device):
        return dataclasses.replace(self, seqstart=self.seqstart.to(device))

    def intervals(self):
        """(first row, row behind the last) of each sequence."""
        return zip(self.seqstart_py, self.seqstart_py[1:])

    def check_count(self, name, others):
        count, expected = len(self.seqstart_py) - 1, len(others.seqstart_py) - 1
        if count != expected:
            raise Error(f"{name} has {count} lengths, must have {expected} like q_seqlen")

    def split(self, x, batch_sizes=None):
        """[1, all rows, ...] into tensors of batch_sizes[i] sequences of one length each: [B_i, M_i, ...]."""
        rows = self.seqstart_py[-1]
        if tuple(x.shape[:2]) != (1, rows):
            raise Error(f"tensor has shape {tuple(x.shape)}, must begin with (1, {rows})")
        firsts = list(itertools.accumulate(batch_sizes or [1] * (len(self.seqstart_py) - 1), initial=0))
        rows_of_each = [self.seqstart_py[b] - self.seqstart_py[a] for a, b in zip(firsts, firsts[1:])]
        parts = x[0].split(rows_of_each)
        return [
            part.reshape(b - a, part.shape[0] // (b - a) if b > a else 0, *part.shape[1:])
            for part, a, b in zip(parts, firsts, firsts[1:])
        ]


@dataclasses.dataclass(eq=False)
class _GappySeqInfo(_SeqLenInfo):
    """Sequences with gaps between them, of lengths seqlen (int32), seqlen_py (list), the first from row seqstart[0] on."""

    seqlen: torch.Tensor
    seqlen_py: list

    @classmethod
    def from_seqlens(cls, seqlens, *, device=None):
        raise Error("sequences with gaps need their starts: from_seqlens_gappy, or from_seqlens_padded")

    @classmethod
    def from_seqlens_gappy(cls, seqstarts, seqlens, *, device=None):
        seqlens, starts = _lengths(seqlens), _lengths(seqstarts)
        if len(starts) != len(seqlens) + 1:
            raise Error(f"kv_seqstarts has {len(starts)} numbers, must have {len(seqlens) + 1}: a start for each of "
                        "kv_seqlen, and the number of all rows")  # fmt: skip
        for number, (start, length, following) in enumerate(zip(starts, seqlens, starts[1:])):
            if start + length > following:
                raise Error(f"kv_seqlen[{number}] is {length}, must be at most {following - start}: the next sequence "
                            f"starts {following - start} rows behind this one")  # fmt: skip
        ends = max(seqlens, default=-1), min(seqlens, default=-1)
        return cls(_int32(starts, device), *ends, starts, _int32(seqlens, device), seqlens)

    def to(self, device):
        return dataclasses.replace(self, seqstart=self.seqstart.to(device), seqlen=self.seqlen.to(device))

    def intervals(self):
        return zip(self.seqstart_py, (start + length for start, length in zip(self.seqstart_py, self.seqlen_py)))

    def split(self, x, batch_sizes=None):
        raise NotImplementedError("keys with gaps between them have no split: index them")


@dataclasses.dataclass(eq=False)
class _PaddedSeqLenInfo(_GappySeqInfo):
    """Sequences in slots of padding rows, from each slot's first row on.

    seqstart are the starts of the slots, so lengths 2, 3 and 2 with a padding of 4 have [0, 4, 8, 12].
    """

    padding: int

    @classmethod
    def from_seqlens_padded(cls, seqlens, padding, *, device=None):
        seqlens = _lengths(seqlens)
        longest = max(seqlens, default=0)
        if longest > padding:
            raise Error(f"kv_padding is {padding}, must be at least {longest}, the longest of kv_seqlen")
        starts = [slot * padding for slot in range(len(seqlens) + 1)]
        return cls(
            _int32(starts, device), max(seqlens, default=-1), min(seqlens, default=-1), starts, _int32(seqlens, device),
            seqlens, padding,
        )  # fmt: skip


def _lengths(seqlens):
    seqlens = [int(length) for length in seqlens]
    if any(length < 0 for length in seqlens):
        raise Error(f"lengths are {seqlens}, must not be negative")
    return seqlens


def _int32(numbers, device):
    return torch.tensor(numbers, dtype=torch.int32, device=device)
