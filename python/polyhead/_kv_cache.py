"""Keys and values that stay from call to call, in pages."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any, SupportsIndex

import numpy as np

from polyhead import _bind
from polyhead._typing import Array, ArrayT

#: What a cache may store a number as: the name, and the dtype of NumPy, or else of ml_dtypes.
_STORED: dict[str, type[np.generic] | str] = {
    "float32": np.float32,
    "bfloat16": "bfloat16",
    "float16": np.float16,
    "int8": np.int8,
    "float8_e4m3": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "int4": np.uint8,
}


def check_name(argument: str, name: str) -> None:
    """Raises unless there is a format of this name."""
    if name not in _STORED:
        raise _bind.Error(f"{argument} is {name!r}, must be one of {', '.join(_STORED)}")


def _dtype(argument: str, name: str) -> np.dtype[Any]:
    check_name(argument, name)
    dtype = _STORED[name]
    if isinstance(dtype, str):
        from polyhead._weight_files import needs  # what it imports is not for the start-up

        dtype = getattr(needs("ml_dtypes", f"{argument} is {name}"), dtype)
    return np.dtype(dtype)


def widths(side: str, name: str, dim: int, group: int) -> tuple[int, int]:
    """How many elements of its array and how many scales (0: it has none) hold `dim` numbers of a head in this format."""
    if group and (group < 0 or dim % group):
        raise _bind.Error(f"{side}_group is {group}, must be 0 or divide the head dim {dim}")
    if name == "int4" and dim % 2:
        raise _bind.Error(f"the head dim of {side} is {dim}, must be even where {side}_dtype is 'int4'")
    if name in ("int8", "float8_e4m3", "float8_e5m2", "int4"):
        return dim // 2 if name == "int4" else dim, dim // group if group else 1
    if group:
        raise _bind.Error(f"{side}_group is {group}, but {name} has no scales: leave it 0")
    return dim, 0


class KvCache:
    """A cache of keys and values: written token by token or many at once, with rotary positions on the way in.

    Slot ``s`` is row ``s % page_size`` of page ``s // page_size``. Where a page is as long as a sequence's capacity, page b
    is sequence b of a batch, and key and value are what `attention` takes as they are; else ``page_table`` tells it which
    pages are whose (`PageTable` keeps count).

    Parameters
    ----------
    key : array, [num_pages, page_size, G, D]
        The cache's memory, any strides: a NumPy array or torch tensor, which `append` and `copy` write, or one with
        ``__cuda_array_interface__``. float32, bfloat16 or float16; or with key_scales int8, float8_e4m3, float8_e5m2 or, as
        uint8 [..., D / 2], pairs of int4.
    value : array, [num_pages, page_size, G, Dv]
        Likewise.
    key_scales, value_scales : array, [num_pages, page_size, G, groups], optional
        What stored numbers are multiplied by: float32, of int4 float16. One for each head of a token, or for each of so
        many groups of its numbers, multiples of 16.
    rotary_dim : int
        How many of a head's first numbers turn by the position (arXiv:2104.09864), in key and query. Even; 0: none.
    interleaved : bool
        Numbers 2 p and 2 p + 1 are pair p. Default: p and p + rotary_dim / 2.
    hadamard : bool
        Key and query are multiplied by the orthogonal Hadamard matrix: scores stay what they are, and what is large in few
        of the numbers is spread over all, which rounding to int8 and int4 is glad of. D is a power of 2.

    Raises
    ------
    polyhead.Error, TypeError
        Shapes or dtypes that disagree; the sentence names the array.

    Notes
    -----
    It holds the arrays and no other state: arrays may be written by others, and calls on different slots may run at once,
    also beside attention that reads other slots. The C++ class is polyhead::KvCache.

    Where its arrays lie on a CUDA device, all that its methods are given lies there too, D and Dv are 1024 at most, and the work
    is put on the current stream of key's package. Nobody waits for it, so slots and positions are not checked: a slot
    outside of the cache counts as -1 (it is not copied, and `read` gives zeros), a position outside of cos as the nearest.

    Examples
    --------
    Two sequences, of 5 and 3 tokens so far, in pages of 4; then one more token each:

    >>> import numpy as np, polyhead
    >>> rng = np.random.default_rng(0)
    >>> cache = polyhead.KvCache.zeros(num_pages=8, page_size=4, num_heads_kv=2, head_dim=16, key_dtype="int8")
    >>> table = polyhead.PageTable(num_pages=8, page_size=4)
    >>> sequences = [table.add(), table.add()]
    >>> for sequence, length in zip(sequences, (5, 3)):
    ...     table.resize(sequence, length)
    ...     slots = [table.slot(sequence, token) for token in range(length)]
    ...     _ = cache.append(*rng.standard_normal((2, length, 2, 16), np.float32), slots=np.array(slots))
    >>> for sequence in sequences:
    ...     table.resize(sequence, table.length(sequence) + 1)
    >>> slots = np.array([table.slot(sequence, table.length(sequence) - 1) for sequence in sequences])
    >>> _ = cache.append(*rng.standard_normal((2, 2, 2, 16), np.float32), slots=slots)
    >>> query = rng.standard_normal((2, 1, 8, 16), np.float32)
    >>> lengths = np.array([table.length(sequence) for sequence in sequences])
    >>> polyhead.attention(query, **cache.arrays(), page_table=table.array(sequences), seqlens_k=lengths).shape
    (2, 1, 8, 16)
    """

    def __init__(
        self,
        key: Array,
        value: Array,
        key_scales: Array | None = None,
        value_scales: Array | None = None,
        *,
        rotary_dim: SupportsIndex = 0,
        interleaved: bool = False,
        hadamard: bool = False,
    ) -> None:
        self.key = key  #: [num_pages, page_size, G, D]
        self.value = value  #: [num_pages, page_size, G, Dv]
        self.key_scales = key_scales  #: [num_pages, page_size, G, groups], or None
        self.value_scales = value_scales  #: likewise
        self.rotary_dim, self.interleaved, self.hadamard = rotary_dim, interleaved, hadamard
        _bind.cache_check(*self._arguments())

    @classmethod
    def zeros(
        cls,
        num_pages: int,
        page_size: int,
        num_heads_kv: int,
        head_dim: int,
        head_dim_v: int | None = None,
        *,
        key_dtype: str = "float32",
        value_dtype: str | None = None,
        key_group: int = 0,
        value_group: int = 0,
        rotary_dim: SupportsIndex = 0,
        interleaved: bool = False,
        hadamard: bool = False,
    ) -> KvCache:
        """A cache in NumPy arrays of its own.

        Parameters
        ----------
        num_pages, page_size, num_heads_kv, head_dim, head_dim_v : int
            0 or more, page_size 1 or more; head_dim_v defaults to head_dim.
        key_dtype, value_dtype : str
            "float32", "bfloat16", "float16", "int8", "float8_e4m3", "float8_e5m2" or "int4"; value's defaults to key's.
            bfloat16 and float8 need the package ml_dtypes.
        key_group, value_group : int
            How many of a head's numbers share a scale: a multiple of 16 that divides its dim. 0: all.
        rotary_dim, interleaved, hadamard
            As of the class.

        Returns
        -------
        KvCache

        Raises
        ------
        polyhead.Error, TypeError
            Sizes that do not go together.
        """
        sides = (
            ("key", key_dtype, head_dim, key_group),
            ("value", value_dtype or key_dtype, head_dim if head_dim_v is None else head_dim_v, value_group),
        )
        turn: dict[str, Any] = {"rotary_dim": rotary_dim, "interleaved": interleaved, "hadamard": hadamard}
        return cls._made((num_pages, page_size, num_heads_kv), sides, None, **turn)

    @classmethod
    def _made(
        cls,
        tokens: tuple[int, int, int],
        sides: Iterable[tuple[str, str, int, int]],
        make: Callable[[tuple[int, ...], str], Any] | None,
        **turn: Any,
    ) -> KvCache:
        """Of sides (name, dtype, dim, group), in arrays that make(shape, name of a dtype of NumPy or ml_dtypes) gives; None:
        NumPy's, of zeros."""
        arrays: dict[str, Any] = {"key_scales": None, "value_scales": None}
        for side, name, dim, group in sides:
            check_name(f"{side}_dtype", name)
            if min(*tokens, dim) < 0:
                raise _bind.Error(f"the sizes of {side} are {(*tokens, dim)}, must not be negative")
            numbers, scales = widths(side, name, dim, group)
            if make is None:
                arrays[side] = np.zeros((*tokens, numbers), _dtype(f"{side}_dtype", name))
            else:
                stored = _STORED[name]
                arrays[side] = make((*tokens, numbers), stored if isinstance(stored, str) else np.dtype(stored).name)
            if scales:
                shape, dtype = (*tokens, scales), "float16" if name == "int4" else "float32"
                arrays[f"{side}_scales"] = np.zeros(shape, dtype) if make is None else make(shape, dtype)
        return cls(**arrays, **turn)

    def _arguments(self) -> tuple[Any, ...]:
        turn = self.rotary_dim, self.interleaved, self.hadamard
        return self.key, self.value, self.key_scales, self.value_scales, *turn

    def arrays(self) -> dict[str, Any]:
        """What `attention` is told of the cache.

        Returns
        -------
        dict
            key and value, and key_scales and value_scales where there are some.
        """
        names = ("key", "value", "key_scales", "value_scales")
        return {name: getattr(self, name) for name in names if getattr(self, name) is not None}

    def append(
        self,
        key: Array,
        value: Array,
        *,
        slots: Array,
        positions: Array | None = None,
        cos: Array | None = None,
        sin: Array | None = None,
        query: ArrayT | None = None,
    ) -> ArrayT | None:
        """Writes new tokens, and turns their queries.

        Keys and queries are turned in float32, multiplied by the Hadamard matrix, then rounded once. Tokens one by one give
        the bits of all at once, whatever the page size is.

        Parameters
        ----------
        key, value : array, [tokens, G, D] and [tokens, G, Dv]
            float32, bfloat16 or float16, any strides.
        slots : array of int, [tokens]
            Where each goes; -1: nowhere. No slot twice.
        positions : array of int, [tokens]
            Rows of cos and sin. Given if the cache has a rotary_dim, as these are.
        cos, sin : array, [positions, rotary_dim / 2]
            float32: the cosines and sines of the angles, so any scaling of positions is the caller's.
        query : array, [tokens, H, D], optional
            Turned as the keys are.

        Returns
        -------
        array or None
            The turned query, a new array of its shape and dtype, if it was given.

        Raises
        ------
        polyhead.Error, TypeError
            Bad input, out-of-range slots and positions among it; nothing has been written.
        """
        return _bind.cache_append(*self._arguments(), key, value, slots, positions, cos, sin, query)

    def copy(self, from_slots: Array, to_slots: Array) -> None:
        """Copies whole tokens, as they are stored. All are read before one is written, so they may overlap.

        For accepting a branch of a tree of drafts, and for what `PageTable.resize` says.

        Parameters
        ----------
        from_slots, to_slots : array of int, [n]
            No slot twice in to_slots.

        Raises
        ------
        polyhead.Error, TypeError
            Bad input; nothing has been written.
        """
        _bind.cache_copy(*self._arguments(), from_slots, to_slots)

    def read(self, slots: Array) -> tuple[Any, Any]:
        """The tokens at these slots as they are stored: turned, and rounded.

        Parameters
        ----------
        slots : array of int, [n]

        Returns
        -------
        key, value : array of float32, [n, G, D] and [n, G, Dv]
            Of the kind of the cache's.

        Raises
        ------
        polyhead.Error, TypeError
            Bad input.
        """
        return _bind.cache_read(*self._arguments(), slots)
