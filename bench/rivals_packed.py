"""The contenders on one step of a server: sequences with different numbers of new queries, each behind keys that a cache holds.

A row is `packed HxD QUERIES/KEYS ...`: `packed 32/8x128 8*1/4096 512/512 --dtype bf16` is eight sequences that decode, each of
4,096 keys, beside a prompt of 512. Query i of a sequence stands on its key KEYS - QUERIES + i and sees none behind that.

  polyhead      one call on pages; and one call on keys end to end
  torch         scaled_dot_product_attention sequence by sequence; and, as transformers' continuous batching calls it, all keys
                gathered from the cache into one tensor, with a mask of all queries by all keys
  vllm          its CPU operator, one call on pages of 128
"""

import argparse
import re
from dataclasses import dataclass
from functools import partial
from typing import Callable

import numpy as np
import polyhead as ours
from problem import DTYPES
from rivals import Contender, Refusal, as_torch
from rivals_cache import VLLM_PAGE, vllm_operators


@dataclass(frozen=True)
class Packed:
    """A row. `line` parses back to it."""

    line: str
    sequences: tuple[tuple[int, int], ...]  # (queries, keys)
    num_heads: int
    num_heads_kv: int
    head_dim: int
    dtype: str = "f32"
    decode: bool = False  # nothing is said of the bandwidth

    def flops(self, direction: str) -> float:
        pairs = sum(q * k - q * (q - 1) / 2 for q, k in self.sequences)
        return 4.0 * self.head_dim * self.num_heads * pairs

    def starts(self, of_keys: bool) -> np.ndarray:
        return np.cumsum([0, *(pair[of_keys] for pair in self.sequences)]).astype(np.int32)

    @property
    def longest(self) -> int:
        return max(keys for _, keys in self.sequences)


def parse_packed(line: str) -> Packed:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("packed", choices=["packed"])
    parser.add_argument("size")
    parser.add_argument("sequences", nargs="*")
    parser.add_argument("--dtype", choices=("f32", "bf16"), default="f32")
    try:
        found = parser.parse_args(line.split())
        sizes, sequences = re.fullmatch(r"(\d+)(?:/(\d+))?x(\d+)", found.size), []
        pairs = [re.fullmatch(r"(?:(\d+)\*)?(\d+)/(\d+)", word) for word in found.sequences]
        if sizes is None or not pairs or not all(pair and int(pair[2]) <= int(pair[3]) for pair in pairs):
            raise ValueError("must be HxD, then QUERIES/KEYS of each sequence, at least as many keys")
        for pair in pairs:
            sequences += [(int(pair[2]), int(pair[3]))] * int(pair[1] or 1)
    except (ValueError, argparse.ArgumentError) as error:
        raise ValueError(f"problem '{line}': {error}") from None
    heads = int(sizes[1])
    return Packed(line, tuple(sequences), heads, int(sizes[2] or heads), int(sizes[3]), found.dtype)


class PackedOperands:
    """query [total_q, H, D], key and value [total_k, G, D]: the sequences end to end."""

    def __init__(self, p: Packed, seed: int = 1):
        rng = np.random.default_rng(seed)
        sizes = ((p.starts(False)[-1], p.num_heads), *[(p.starts(True)[-1], p.num_heads_kv)] * 2)
        self.query, self.key, self.value = (
            rng.standard_normal((*size, p.head_dim), dtype=np.float32).astype(DTYPES[p.dtype]) for size in sizes
        )


@dataclass
class Kept(Contender):
    kept_bytes: int


def _kept(p: Packed, call: Callable, outputs: Callable) -> Kept:
    elements = 2 * p.starts(True)[-1] * p.num_heads_kv * p.head_dim
    return Kept(call, outputs, int(elements) * DTYPES[p.dtype].itemsize)


def _places(p: Packed, page_size: int) -> tuple[np.ndarray, np.ndarray, int]:
    """A page table [B, P], pages in random order; the slot of each key, end to end; the number of pages."""
    pages = [-(-keys // page_size) for _, keys in p.sequences]
    numbers = np.random.default_rng(1).permutation(sum(pages))
    table, slots, first = np.zeros((len(pages), max(pages)), np.int32), [], 0
    for row, count, (_, keys) in zip(table, pages, p.sequences):
        row[:count] = numbers[first : first + count]
        slots.append((row[:count, None] * page_size + np.arange(page_size)).reshape(-1)[:keys])
        first += count
    return table, np.concatenate(slots), sum(pages)


def _lengths(p: Packed) -> np.ndarray:
    return np.array([keys for _, keys in p.sequences], np.int32)


def polyhead(p: Packed, x: PackedOperands, page_size: int = 16) -> Kept:
    table, slots, pages = _places(p, page_size)
    cache = ours.KvCache.zeros(pages, page_size, p.num_heads_kv, p.head_dim, key_dtype=DTYPES[p.dtype].name)
    cache.append(x.key, x.value, slots=slots)
    options = dict(causal=True, align="bottom_right", cu_seqlens_q=p.starts(False), page_table=table, seqlens_k=_lengths(p))
    call = partial(ours.attention, x.query, cache.key, cache.value, **options)
    return _kept(p, call, lambda out: [out.astype(np.float32)])


def polyhead_end_to_end(p: Packed, x: PackedOperands) -> Kept:
    options = dict(causal=True, align="bottom_right", cu_seqlens_q=p.starts(False), cu_seqlens_k=p.starts(True))
    call = partial(ours.attention, x.query, x.key, x.value, **options)
    return _kept(p, call, lambda out: [out.astype(np.float32)])


def torch_one_by_one(p: Packed, x: PackedOperands) -> Kept:
    import torch

    attend = torch.nn.functional.scaled_dot_product_attention
    calls, starts = [], (p.starts(False), p.starts(True))
    for n, (queries, keys) in enumerate(p.sequences):
        q, k, v = (
            as_torch(t)[starts[of_keys][n] : starts[of_keys][n + 1]].transpose(0, 1)[None].contiguous()
            for t, of_keys in ((x.query, 0), (x.key, 1), (x.value, 1))
        )
        mask = None if queries == 1 else torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
        options = {"is_causal": True} if queries == keys else {"attn_mask": mask}
        calls.append(partial(attend, q, k, v, enable_gqa=p.num_heads != p.num_heads_kv, **options))

    def call():
        with torch.inference_mode():
            return [each() for each in calls]

    return _kept(p, call, lambda outs: [torch.cat([o[0].transpose(0, 1) for o in outs]).float().numpy()])


def torch_gathered(p: Packed, x: PackedOperands) -> Kept:
    """sdpa_paged of transformers: rows of a cache that the batch shares, and a mask that says whose they are."""
    import torch

    _, slots, pages = _places(p, 16)
    rows = torch.from_numpy(slots.astype(np.int64))
    caches = []
    for t in (x.key, x.value):
        cache = torch.zeros(pages * 16, p.num_heads_kv, p.head_dim, dtype=as_torch(t).dtype)
        cache[rows] = as_torch(t)
        caches.append(cache)
    starts_q, starts_k = p.starts(False), p.starts(True)
    if starts_q[-1] * starts_k[-1] > 1 << 28:
        raise Refusal(f"its mask has {int(starts_q[-1]) * int(starts_k[-1]) >> 20} million elements")
    mask = torch.zeros(starts_q[-1], starts_k[-1], dtype=torch.bool)
    for n, (queries, keys) in enumerate(p.sequences):
        places = slice(starts_q[n], starts_q[n + 1]), slice(starts_k[n], starts_k[n + 1])
        mask[places] = torch.ones(queries, keys, dtype=torch.bool).tril(keys - queries)
    query = as_torch(x.query).transpose(0, 1)[None].contiguous()
    attend = torch.nn.functional.scaled_dot_product_attention

    def call():
        with torch.inference_mode():
            k, v = (cache.index_select(0, rows).transpose(0, 1)[None] for cache in caches)
            return attend(query, k, v, attn_mask=mask, enable_gqa=p.num_heads != p.num_heads_kv)

    return _kept(p, call, lambda out: [out[0].transpose(0, 1).float().numpy()])


def vllm(p: Packed, x: PackedOperands) -> Kept:
    import torch

    operators = vllm_operators()
    table, slots, pages = _places(p, VLLM_PAGE)
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[p.dtype]
    isa = "amx" if torch.cpu._is_amx_tile_supported() and p.dtype == "bf16" else "vec"
    memory = torch.zeros(pages, p.num_heads_kv, 2 * VLLM_PAGE, p.head_dim, dtype=dtype)
    caches = memory.chunk(2, dim=2)
    key, value, query = (as_torch(t) for t in (x.key, x.value, x.query))
    operators.cpu_attn_reshape_and_cache(key, value, *caches, torch.from_numpy(slots), isa, 1.0, 1.0, "auto")
    out, table = torch.empty_like(query), torch.from_numpy(table)
    starts, lengths = torch.from_numpy(p.starts(False)), torch.from_numpy(_lengths(p))
    sizes = (len(p.sequences), p.num_heads, p.num_heads_kv, p.head_dim, lengths, dtype, starts, True, -1, isa, True, None, "auto")
    plan = operators.get_scheduler_metadata(*sizes)
    scale = p.head_dim**-0.5

    def call():
        operators.cpu_attention_with_kv_cache(
            query, *caches, out, starts, lengths, scale, True, None, -1, table, 0.0, plan, None, None, 1.0, 1.0, "auto"
        )
        return out

    return _kept(p, call, lambda out: [out.float().numpy()])


def contenders(p: Packed, threads: int) -> dict[str, Callable[[Packed, PackedOperands], Kept]]:
    """The first is what outputs are compared with."""
    return {
        "polyhead": polyhead,
        "polyhead, pages of 128": partial(polyhead, page_size=128),
        "polyhead, end to end": polyhead_end_to_end,
        "torch, one by one": torch_one_by_one,
        "torch, gathered and masked": torch_gathered,
        "vllm": vllm,
    }
