"""flash_attn_with_kvcache: one step of decoding, or a few, on a cache of keys and values."""

import functools

import torch
from torch import Tensor

from polyhead import Error, KvCache
from polyhead.torch._attention import attention
from polyhead.torch._flash_attn import OPEN, _options
from polyhead.torch._rope import turned
from polyhead.torch._varlen import indices_within, integers, pages_within


@torch.no_grad()
def flash_attn_with_kvcache(
    q: Tensor,
    k_cache: Tensor,
    v_cache: Tensor,
    k: Tensor | None = None,
    v: Tensor | None = None,
    rotary_cos: Tensor | None = None,
    rotary_sin: Tensor | None = None,
    cache_seqlens: int | Tensor | None = None,
    cache_batch_idx: Tensor | None = None,
    cache_leftpad: Tensor | None = None,
    block_table: Tensor | None = None,
    softmax_scale: float | None = None,
    causal: bool = False,
    window_size: tuple[int, int] = OPEN,
    softcap: float = 0.0,
    rotary_interleaved: bool = True,
    alibi_slopes: Tensor | None = None,
    num_splits: int = 0,
    return_softmax_lse: bool = False,
) -> Tensor | tuple[Tensor, Tensor]:
    """flash_attn.flash_attn_with_kvcache on polyhead: writes new keys and values into the cache, then attends to it.

    Parameters
    ----------
    q : Tensor [B, Sq, H, D]
    k_cache, v_cache : Tensor [cache_batch, capacity, G, D]
        With block_table [num_pages, page_size, G, D], of any page size. Written in place where k and v are given.
    k, v : Tensor [B, new, G, D], optional
        Written to rows cache_seqlens[b] .. cache_seqlens[b] + new - 1 of each sequence.
    rotary_cos, rotary_sin : Tensor [positions, R / 2], optional
        Turn the first R elements of k and q, computed in float32: k's at cache_seqlens[b] (less cache_leftpad[b]) and
        what follows; q's likewise with causal or a window, else all at cache_seqlens[b]. They need k and v.
    cache_seqlens : int or Tensor of int32 or int64 [B], optional
        How many rows of the cache are filled before the call. Default: all; k and v need it.
    cache_batch_idx : Tensor of int32 or int64 [B], optional
        Which sequence of the cache each of the batch is; default the b-th.
    cache_leftpad : Tensor of int32 or int64 [B], optional
        The first row of each sequence that counts.
    block_table : Tensor of int32 or int64 [B, pages], optional
        Which pages hold each sequence. Not together with the two before.
    softmax_scale, causal, window_size, softcap, alibi_slopes : optional
        As of `flash_attn_func`, Sk being the filled rows, the new ones among them.
    rotary_interleaved : bool
        True: elements 2 p and 2 p + 1 are a pair. False: p and p + R / 2.
    num_splits : int
        Changes nothing: results do not depend on how the work is cut.
    return_softmax_lse : bool

    Returns
    -------
    out : Tensor [B, Sq, H, D]
    softmax_lse : Tensor of float32 [B, H, Sq], if return_softmax_lse

    Raises
    ------
    polyhead.Error
        Shapes that disagree, lengths outside of the cache, two sequences that would write one row; the cache is as it was.

    Notes
    -----
    There are no gradients, as in flash-attn.

    On a GPU the host looks at no number that lies there: lengths and positions outside of the cache and of the tables are cut
    off, rows outside are neither written nor read, and of two sequences that write one row either may win.

    Examples
    --------
    >>> import torch
    >>> from polyhead.torch import flash_attn_with_kvcache
    >>> k_cache, v_cache = torch.zeros(2, 100, 4, 16), torch.zeros(2, 100, 4, 16)
    >>> q, k, v = torch.rand(3, 2, 1, 4, 16)  # one token of two sequences
    >>> flash_attn_with_kvcache(q, k_cache, v_cache, k, v, cache_seqlens=7, causal=True).shape
    torch.Size([2, 1, 4, 16])
    >>> bool((k_cache[:, 7] == k[:, 0]).all())
    True
    """
    if block_table is not None and (cache_batch_idx is not None or cache_leftpad is not None):
        raise Error("block_table is given with cache_batch_idx or cache_leftpad, take one")
    if k_cache.shape[:2] != v_cache.shape[:2]:
        raise Error(f"v_cache is {tuple(v_cache.shape)}, must begin with {tuple(k_cache.shape[:2])} as k_cache")
    batch, table, written = len(q), None, None  # table [B, pages]: where in the cache each sequence lies; None: the b-th
    if cache_batch_idx is not None:
        check = integers if q.is_cuda else functools.partial(indices_within, count=len(k_cache))
        table = check(cache_batch_idx, name="cache_batch_idx")[:, None]
    capacity = k_cache.shape[1] * (1 if block_table is None else block_table.shape[-1])
    filled = _lengths(cache_seqlens, "cache_seqlens", batch, capacity, q.device)
    if block_table is not None:
        ends = (filled + (0 if k is None else k.shape[1])).clamp(max=capacity)
        if q.is_cuda:
            table = integers(block_table, "block_table")
        else:
            table = pages_within(block_table, k_cache, ends, "cache_seqlens")
    first = _lengths(0 if cache_leftpad is None else cache_leftpad, "cache_leftpad", batch, capacity, q.device)
    if k is not None or v is not None:
        if k is None or v is None or cache_seqlens is None:
            raise Error("k, v and cache_seqlens must be given together: rows to write, and where")
        if rotary_cos is not None:
            local = causal or tuple(window_size) != OPEN
            turn = _Rotation(rotary_cos, rotary_sin, rotary_interleaved, filled - first)
            q, k = turn(q, "q", local), turn(k, "k", True)
        kind = _RowsOfDevice if q.is_cuda else _Rows
        written = kind(k_cache, v_cache, k, v, filled, capacity, table)
        filled = filled + k.shape[1]
    elif rotary_cos is not None:
        raise Error("rotary_cos is given without k and v, which it is for")
    keys, values = (cache[:batch] if table is None else cache for cache in (k_cache, v_cache))
    mask = None
    if cache_leftpad is not None:
        mask = (torch.arange(capacity, device=first.device) >= first[:, None])[:, None, None, :]
    options = _options(0.0, softmax_scale, causal, window_size, softcap, alibi_slopes)
    try:
        return attention(
            q, keys, values, **options, attn_mask=mask, seqlens_k=filled, page_table=table,
            return_logsumexp=return_softmax_lse,
        )  # fmt: skip
    except Exception:
        if written is not None:
            written.take_back()
        raise


def _lengths(given, name, batch, capacity, device):
    """int64 [B], each 0 to capacity. Those on a GPU are cut off: nobody waits for them."""
    lengths = integers(torch.as_tensor(capacity if given is None else given), name)
    if lengths.dim() == 0:
        lengths = lengths.expand(batch)
    if lengths.shape != (batch,):
        raise Error(f"{name} has shape {tuple(lengths.shape)}, must be ({batch},): q has a batch of {batch}")
    if lengths.is_cuda:
        return lengths.clamp(0, capacity).to(device)
    if batch and not 0 <= int(lengths.min()) <= int(lengths.max()) <= capacity:
        raise Error(f"{name} is {lengths.tolist()}, must be 0 to {capacity}, the rows that a sequence has in the cache")
    return lengths.to(device)


class _Rows:
    """Rows of the caches that hold k and v [B, new, G, D] now, behind the filled rows of their sequences."""

    def __init__(self, k_cache, v_cache, k, v, filled, capacity, table):
        _check_new(k_cache, v_cache, k, v, len(filled))
        rows = filled[:, None] + torch.arange(k.shape[1], device=filled.device)
        if rows.numel() and int(rows.max()) >= capacity:
            raise Error(
                f"cache_seqlens is {filled.tolist()} before {k.shape[1]} new rows, which pass the cache's {capacity}"
            )
        size = k_cache.shape[1]
        sequences = torch.arange(len(filled), device=filled.device)[:, None]
        blocks = sequences if table is None else table.gather(1, rows // size)
        rows = rows % size
        if len(torch.unique(blocks * size + rows)) != rows.numel():
            raise Error("two sequences would write one row of the cache: their pages or places are the same")
        self._places, self._caches = (blocks, rows), (k_cache, v_cache)
        self._before = [cache[self._places] for cache in self._caches]
        for cache, new in zip(self._caches, (k, v)):
            cache[self._places] = new

    def take_back(self):
        for cache, before in zip(self._caches, self._before):
            cache[self._places] = before


def _check_new(k_cache, v_cache, k, v, batch):
    for name, cache, new in (("k", k_cache, k), ("v", v_cache, v)):
        expected = (batch, k.shape[1], *cache.shape[2:])
        if new.shape != expected or new.dtype != cache.dtype:
            raise Error(f"{name} is {tuple(new.shape)} of {new.dtype}, must be {expected} of {cache.dtype} for {name}_cache")


class _RowsOfDevice:
    """The same on a GPU, where nobody looks at lengths and tables: what lies outside of the cache is not written."""

    def __init__(self, k_cache, v_cache, k, v, filled, capacity, table):
        _check_new(k_cache, v_cache, k, v, len(filled))
        self._cache, size = KvCache(k_cache, v_cache), k_cache.shape[1]
        rows = filled[:, None] + torch.arange(k.shape[1], device=filled.device)
        inside = rows < capacity
        rows = rows.clamp(max=max(capacity - 1, 0))
        blocks = torch.arange(len(filled), device=filled.device)[:, None].expand(rows.shape)
        if table is not None and table.shape[1]:
            blocks = table.gather(1, rows // size)
        inside = inside & (blocks >= 0) & (blocks < len(k_cache))
        self._slots = torch.where(inside, blocks * size + rows % size, -1).flatten()
        places = blocks.clamp(0, max(len(k_cache) - 1, 0)), rows % size
        self._before = [cache[places] if len(k_cache) else new for cache, new in ((k_cache, k), (v_cache, v))]
        self._write(k, v)

    def _write(self, *new):
        self._cache.append(*(each.detach().flatten(0, 1) for each in new), slots=self._slots)

    def take_back(self):
        self._write(*self._before)


class _Rotation:
    """Turns [B, S, heads, D] by tables of cos and sin, from position first[b] on."""

    def __init__(self, cos, sin, interleaved, first):
        if sin is None or cos.dim() != 2 or cos.shape != sin.shape:
            sizes = tuple(cos.shape), None if sin is None else tuple(sin.shape)
            raise Error(f"rotary_cos and rotary_sin have shapes {sizes[0]} and {sizes[1]}, must be [positions, R / 2]")
        self.cos, self.sin, self.interleaved, self.first = cos.float(), sin.float(), interleaved, first

    def __call__(self, x, name, advances):
        positions = self.first[:, None] + (torch.arange(x.shape[1], device=x.device) if advances else 0)
        if positions.is_cuda:
            positions = positions.clamp(0, max(len(self.cos) - 1, 0))
        elif positions.numel() and not 0 <= int(positions.min()) <= int(positions.max()) < len(self.cos):
            raise Error(
                f"rotary_cos has {len(self.cos)} positions, {name} stands at {int(positions.min())} to "
                f"{int(positions.max())}"
            )
        cos, sin = (table[positions][:, :, None, :] for table in (self.cos, self.sin))
        pairs = self.cos.shape[1]
        if 2 * pairs > x.shape[-1]:
            raise Error(f"rotary_cos turns {2 * pairs} elements, {name} has head_dim {x.shape[-1]}")
        rotary, rest = x[..., : 2 * pairs], x[..., 2 * pairs :]
        return torch.cat([turned(rotary.float(), cos, sin, self.interleaved).to(x.dtype), rest], -1)
