"""Layers whose keys and values live in a `polyhead.KvCache`: what a call is told of it, and how it is computed."""

from typing import NamedTuple

import torch

from polyhead import AttentionBlock, Error, KvCache, MultiHeadAttention
from polyhead._typing import Array
from polyhead.torch._rope import Rope, angles


class CacheStep(NamedTuple):
    """One call of a layer on a cache: `MultiheadAttention` and `TransformerEncoderLayer` take it, in inference alone.

    N sequences, L new tokens of each at most, S = P * page_size tokens that one has room for. Arrays are tensors or NumPy's;
    `polyhead.PageTable.extend` makes page_table, slots and the lengths of a step.

    Where the layer lies on a GPU all of them do, as tensors; nobody looks at the numbers there (`polyhead.KvCache`).

    Attributes
    ----------
    cache : polyhead.KvCache
        The layer's own: `MultiheadAttention.new_cache` makes one.
    page_table : array of int [N, P]
    seqlens_k : array of int [N]
        How many keys each sequence has, those of this call included.
    slots : array of int [N, L], optional
        Where the keys and values of this call go; -1: nowhere. Without it nothing is stored, and key and value are not looked
        at: what stands in the cache is attended to.
    seqlens_q : array of int [N], optional
        How many of the L tokens each sequence has. Default: all. The others' results mean nothing.
    positions : array of int [N, L], optional
        Given if the cache turns queries and keys by them: rows of cos and sin, or with rope in the layer any numbers.
    cos, sin : array of float32 [positions, rotary_dim / 2], optional
        Likewise, but for layers with rope, which have theirs.
    """

    cache: KvCache
    page_table: Array
    seqlens_k: Array
    slots: Array | None = None
    seqlens_q: Array | None = None
    positions: Array | None = None
    cos: Array | None = None
    sin: Array | None = None


def cache_of_layer(layer, num_pages, page_size, *, key_dtype=None, value_dtype=None, key_group=0, value_group=0, **turn):
    """A cache in tensors of its own, for what `layer` projects."""
    weight = layer.out_proj.weight
    given = key_dtype or str(weight.dtype).removeprefix("torch.")
    if layer.rope is not None:
        turn = {"rotary_dim": layer.head_dim, "interleaved": layer.rope.interleaved} | turn
    sides = (("key", given, layer.head_dim, key_group), ("value", value_dtype or given, layer.head_dim, value_group))

    def make(shape, dtype):
        return torch.zeros(shape, dtype=getattr(torch, dtype), device=weight.device)

    return KvCache._made((num_pages, page_size, layer.num_heads_kv), sides, make, **turn)


@torch.compiler.disable
def on_cache(layer, tokens, step, out_proj, *, norm=None, norm_first=False, key_and_value=None, **options):
    """Out [N, L, E] and weights or None, of tokens [N, L, E] by the weights of a `MultiheadAttention`.

    out_proj: its own, or None where the caller calls it. norm: the torch.nn.LayerNorm of a block with a residual.
    """
    weights = _weights_of(layer, out_proj, norm)
    if torch.is_grad_enabled() and any(each.requires_grad for each in (tokens, *weights.values())):
        raise Error("cache is given where gradients are recorded: keys and values in a cache have none, take torch.no_grad()")
    if torch.is_autocast_enabled(tokens.device.type):
        raise Error("cache is given under autocast: take a model whose parameters have the dtype that is wanted")
    weights = {name: each.detach() for name, each in weights.items()}
    heads = layer.num_heads, layer.num_heads_kv
    if norm is None:
        made = MultiHeadAttention._sharing(weights, *heads)
    else:
        made = AttentionBlock._sharing(
            weights, *heads, norm="layer", norm_first=norm_first, norm_eps=norm.eps, residual=True
        )
    made.normalizer = options.pop("normalizer")
    of_step = step._asdict()
    if layer.rope is not None:
        of_step |= _turns(step, layer.rope, layer.head_dim, tokens.shape[:2])
    stored = () if step.slots is None or key_and_value is None else (each.detach() for each in key_and_value)
    results = made.forward(tokens.detach(), *stored, **of_step, **options)
    return results if options["return_weights"] else (results, None)


def _weights_of(layer, out_proj, norm):
    """As `polyhead.MultiHeadAttention` names and lays them out, views of the parameters."""
    rows = [layer.num_heads * layer.head_dim, *[layer.num_heads_kv * layer.head_dim] * 2]
    if layer.in_proj_weight is not None:
        matrices = layer.in_proj_weight.split(rows)
    else:
        matrices = layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight
    names = ("query", "key", "value")
    weights = {f"{name}_weight": matrix.t() for name, matrix in zip(names, matrices)}
    if layer.in_proj_bias is not None:
        weights |= {f"{name}_bias": bias for name, bias in zip(names, layer.in_proj_bias.split(rows))}
    given = {"out_bias": None if out_proj is None else out_proj.bias}
    given |= {"norm_weight": None, "norm_bias": None} if norm is None else {"norm_weight": norm.weight, "norm_bias": norm.bias}
    if out_proj is not None:
        weights["out_weight"] = out_proj.weight.t()
    return weights | {name: each for name, each in given.items() if each is not None}


def _turns(step, rope: Rope, head_dim, shape):
    """positions, cos and sin of a layer with rope: a row for each token, that of its own position."""
    cache = step.cache
    turn = cache.rotary_dim, cache.interleaved
    if turn != (head_dim, rope.interleaved):
        raise Error(f"cache has rotary_dim {turn[0]} and interleaved {turn[1]}, must have {head_dim} and {rope.interleaved} as rope")
    if step.positions is None:
        raise Error("positions is missing: rope turns by them")
    if step.cos is not None or step.sin is not None:
        raise Error("cos or sin is given, but the layer has rope")
    positions = torch.as_tensor(step.positions)
    if positions.shape != shape:
        raise Error(f"positions is {list(positions.shape)}, must be {list(shape)}")
    angle = angles(rope, head_dim, positions.flatten())
    rows = torch.arange(positions.numel(), device=positions.device).view(shape)
    return {"positions": rows, "cos": angle.cos().float(), "sin": angle.sin().float()}
