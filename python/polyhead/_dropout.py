"""Which weights dropout keeps."""

from __future__ import annotations

from collections.abc import Iterable
from typing import NamedTuple, SupportsFloat, SupportsIndex

import numpy as np

from polyhead import _bind


class DropoutOrigin(NamedTuple):
    """Where a call stands in a larger one whose dropout mask it draws, as a shard over batch, heads, queries or keys does.

    Element (b, h, i, j) of the call has the bits of head index ``first_head + b * num_heads + h``, query
    ``first_query + i`` and key ``first_key + j`` of the whole. The defaults draw a mask of the call's own.

    Examples
    --------
    >>> import polyhead
    >>> whole = polyhead.dropout_mask((2, 4, 6, 32), 0.5, 1)
    >>> origin = polyhead.DropoutOrigin(first_head=1 * 4 + 2, num_heads=4, first_query=3, first_key=8)
    >>> shard = polyhead.dropout_mask((1, 2, 3, 24), 0.5, 1, dropout_origin=origin)
    >>> (shard == whole[1:, 2:, 3:, 8:]).all().item()
    True
    """

    first_head: int = 0
    num_heads: int = 0  #: query heads in all; 0: as many as the call has
    first_query: int = 0
    first_key: int = 0  #: a multiple of 8: eight keys share a counter


def dropout_mask(
    shape: Iterable[int],
    dropout_p: SupportsFloat,
    dropout_seed: SupportsIndex,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Iterable[int] | None = None,
) -> np.ndarray:
    """Which weights dropout keeps: a pure function of its arguments, the same on every kernel and machine.

    Parameters
    ----------
    shape : (int, int, int, int)
        B, H, Sq, Sk as of `attention`; for packed sequences those of the sequence, taken from row b of the result.
    dropout_p : float
        0 to 1.
    dropout_seed : int
        0 .. 2^64 - 1.
    dropout_offset : int
        0 .. 2^32 - 1.
    dropout_origin : DropoutOrigin, optional
        Where the result stands in a larger mask, whose part it then is.

    Returns
    -------
    numpy.ndarray of bool, [B, H, Sq, Sk]
        True = kept (and scaled by ``1 / (1 - dropout_p)``).

    Raises
    ------
    polyhead.Error
        A value out of its range.

    Notes
    -----
    Element (b, h, i, j) is kept if its 16 random bits are >= floor(dropout_p * 65536 + 0.5). The bits come from
    Philox4x32-10 with key words (seed & 0xffffffff, seed >> 32) and counter words (b * H + h, i, j // 8, offset):
    j takes word (j % 8) // 2, its low half if j is even, else its high half.
    """
    return _bind.dropout_mask(shape, dropout_p, dropout_seed, dropout_offset, dropout_origin)
