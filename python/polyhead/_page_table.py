"""Which page of a cache holds what."""

from __future__ import annotations

import operator
from collections.abc import Iterator, Sequence
from typing import NamedTuple

import numpy as np

from polyhead import _bind


class NewTokens(NamedTuple):
    """Where the next tokens of some sequences stand: what `PageTable.extend` returns. B sequences, n the most tokens of one."""

    page_table: np.ndarray  #: [B, P], as `PageTable.array` has it
    slots: np.ndarray  #: [B, n]: where each token goes; -1 behind a sequence's last
    positions: np.ndarray  #: [B, n]: how many tokens of its sequence stand before each
    seqlens_q: np.ndarray  #: [B]: how many are new
    seqlens_k: np.ndarray  #: [B]: how many there are then
    copies: tuple[np.ndarray, np.ndarray] | None  #: slots that `KvCache.copy` is to be told first, or None

    def arguments(self) -> dict[str, np.ndarray]:
        """What a layer on a cache is told of them. (Its positions are for caches that turn by them.)

        Returns
        -------
        dict
            page_table, slots, seqlens_q and seqlens_k.
        """
        return {name: getattr(self, name) for name in ("page_table", "slots", "seqlens_q", "seqlens_k")}


class PageTable:
    """Which page of a cache holds what: pages are handed out, shared, and taken back when nobody holds them.

    It touches no cache: what must be copied it tells. Not thread-safe.

    Parameters
    ----------
    num_pages, page_size : int
        0 or more; 1 or more.

    Examples
    --------
    A second sequence that shares its beginning with the first, until it is written to:

    >>> import polyhead
    >>> table = polyhead.PageTable(num_pages=4, page_size=4)
    >>> first = table.add()
    >>> table.resize(first, 6)
    >>> second = table.fork(first)
    >>> table.resize(second, 7)  # the last page's tokens are to be copied: KvCache.copy
    (array([4, 5]), array([8, 9]))
    >>> table.array([first, second])
    array([[0, 1],
           [0, 2]])

    Two tokens more of the one, one of the other, as layers want to be told:

    >>> new = table.extend([first, second], [2, 1])
    >>> new.slots, new.seqlens_k
    (array([[ 6,  7],
           [11, -1]]), array([8, 8]))
    """

    def __init__(self, num_pages: int, page_size: int) -> None:
        self._table = _bind.page_table(num_pages, page_size)
        self.page_size = page_size  #: tokens of a page

    @property
    def num_free(self) -> int:
        """Pages that nobody holds."""
        return self._table.num_free()

    def add(self) -> int:
        """A new sequence, of length 0.

        Returns
        -------
        int
            Its number.
        """
        return self._table.add()

    def fork(self, sequence: int) -> int:
        """A new sequence with the tokens of this one, in the same pages.

        Returns
        -------
        int
            Its number.

        Raises
        ------
        polyhead.Error
            There is no such sequence.
        """
        return self._table.fork(sequence)

    def remove(self, sequence: int) -> None:
        """Gives up a sequence and the pages that it alone held.

        Raises
        ------
        polyhead.Error
            There is no such sequence.
        """
        self._table.remove(sequence)

    def resize(self, sequence: int, length: int) -> tuple[np.ndarray, np.ndarray] | None:
        """Makes ``length`` tokens of a sequence: takes pages, or gives up those behind.

        Returns
        -------
        (from_slots, to_slots) or None
            Where the sequence's last page was shared and it has one of its own now: what is to be copied, by
            `KvCache.copy`, before more is written.

        Raises
        ------
        polyhead.Error
            Out of pages, or no such sequence: nothing has changed.
        """
        begun = self.length(sequence) % self.page_size
        source, target = self._table.resize(sequence, length)
        if source < 0:
            return None
        rows = np.arange(begun)
        return source * self.page_size + rows, target * self.page_size + rows

    def extend(self, sequences: Sequence[int], counts: Sequence[int] | np.ndarray) -> NewTokens:
        """Makes sequences longer, and tells where their new tokens stand.

        Parameters
        ----------
        sequences : sequence of int
            Each once.
        counts : sequence of int
            How many new tokens each has, 0 or more.

        Returns
        -------
        NewTokens

        Raises
        ------
        polyhead.Error
            Out of pages, or no such sequence: all have the lengths that they had.
        """
        counts = [operator.index(count) for count in counts]
        if len(counts) != len(sequences) or len(set(sequences)) != len(sequences):
            raise _bind.Error(f"sequences are {list(sequences)} and counts {counts}: each once, with its count")
        if min(counts, default=0) < 0:
            raise _bind.Error(f"counts are {counts}, must not be negative")
        before = [self.length(sequence) for sequence in sequences]
        for sequence, length in zip(sequences, before):
            if length < 0:
                raise _bind.Error(f"sequence is {sequence}, there is none of that number")
        needed = sum(self._new_pages(sequences, before, counts))
        if needed > self.num_free:
            raise _bind.Error(f"counts are {counts}, which need {needed} more pages, {self.num_free} are free")
        grown = [self.resize(*each) for each in zip(sequences, map(operator.add, before, counts))]
        copies = [copy for copy in grown if copy is not None]
        slots = np.full((len(counts), max(counts, default=0)), -1, np.int64)
        for row, sequence, length, count in zip(slots, sequences, before, counts):
            row[:count] = [self.slot(sequence, token) for token in range(length, length + count)]
        lengths, new = np.array(before, np.int64), np.array(counts, np.int64)
        return NewTokens(
            self.array(sequences), slots, lengths[:, None] + np.arange(slots.shape[1]), new, lengths + new,
            (np.concatenate([a for a, _ in copies]), np.concatenate([b for _, b in copies])) if copies else None,
        )  # fmt: skip

    def _new_pages(self, sequences: Sequence[int], before: list[int], counts: list[int]) -> Iterator[int]:
        """How many each takes, one after the other."""
        holders: dict[int, int] = {}  # of last pages, which who writes first leaves to the others
        for sequence, length, count in zip(sequences, before, counts):
            pages = self.pages(sequence)
            yield max(-(-(length + count) // self.page_size) - len(pages), 0)
            if count and length % self.page_size:
                last = pages[-1]
                held = holders.setdefault(last, self._table.num_holders(last))
                holders[last] -= held > 1
                yield int(held > 1)

    def length(self, sequence: int) -> int:
        """Tokens of a sequence; -1: there is none of that number.

        Returns
        -------
        int
        """
        return self._table.length(sequence)

    def pages(self, sequence: int) -> list[int]:
        """A sequence's pages, in order.

        Returns
        -------
        list of int
        """
        return self._table.pages(sequence)

    def slot(self, sequence: int, token: int) -> int:
        """Where a token lies; -1: nowhere.

        Returns
        -------
        int
        """
        return self._table.slot(sequence, token)

    def array(self, sequences: Sequence[int]) -> np.ndarray:
        """The ``page_table`` of a call of `attention` on these sequences.

        Returns
        -------
        numpy.ndarray of int64, [len(sequences), most pages of one]
            Behind a sequence's pages stand zeros, which nothing reads.
        """
        pages = [self.pages(sequence) for sequence in sequences]
        table = np.zeros((len(pages), max(map(len, pages), default=0)), np.int64)
        for row, each in zip(table, pages):
            row[: len(each)] = each
        return table
