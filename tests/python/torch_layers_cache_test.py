"""polyhead.torch's layers whose keys and values live in a cache: what they give of all tokens at once, without one."""

import doctest
import sys

import numpy as np
import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from polyhead.torch import CacheStep, MultiheadAttention, Rope, TransformerEncoderLayer

E, H, G, S, N = 16, 4, 2, 7, 2
LENGTHS = np.array([7, 5])
CUTS = [np.array([0, 0]), np.array([4, 3]), np.array([5, 4]), LENGTHS]  # prompts, then a token or two a call


def tokens(dtype=torch.float32):
    return torch.randn(N, S, E, generator=torch.Generator().manual_seed(1)).to(dtype)


def by_steps(call, x, attn, **options):
    """Out of `call`, a function of tokens and CacheStep, of the tokens of each sequence in several calls: [N, S, ...]."""
    cache, table = attn.new_cache(8, 2, **options), polyhead.PageTable(8, 2)
    sequences = [table.add() for _ in LENGTHS]
    outs = None
    for before, after in zip(CUTS, CUTS[1:]):
        new = table.extend(sequences, after - before)
        places = before[:, None] + np.arange(new.slots.shape[1])
        part = x.gather(1, torch.from_numpy(places.clip(max=S - 1))[..., None].expand(-1, -1, E))
        turn = {"positions": new.positions} if attn.rope is not None else {}
        out = call(part, CacheStep(cache, **new.arguments(), **turn))
        outs = torch.zeros(N, S, *out.shape[2:], dtype=out.dtype) if outs is None else outs
        for b in range(N):
            outs[b, before[b] : after[b]] = out[b, : after[b] - before[b]]
    return outs


def compare(got, whole, close):
    for b, length in enumerate(LENGTHS):
        torch.testing.assert_close(got[b, :length], whole[b, :length], rtol=close, atol=close)


CAUSAL = torch.ones(S, S, dtype=torch.bool).triu(1)


@pytest.mark.parametrize("options", [
    {}, {"num_heads_kv": G}, {"rope": Rope()}, {"rope": Rope(500.0, interleaved=True), "num_heads_kv": 1, "head_dim": 8},
    {"bias": False, "kdim": E, "vdim": E, "batch_first": False},
], ids=str)  # fmt: skip
@pytest.mark.parametrize("stored, dtype, close", [
    (None, torch.float32, 1e-5), (None, torch.bfloat16, 2e-2), ("int8", torch.float32, 2e-2), ("float8_e4m3", torch.bfloat16, 6e-2),
])  # fmt: skip
@torch.no_grad()
def test_attention(options, stored, dtype, close):
    torch.manual_seed(2)
    layer = MultiheadAttention(E, H, **({"batch_first": True} | options)).to(dtype).eval()
    x = tokens(dtype)
    turned = (lambda t: t) if layer.batch_first else lambda t: t.transpose(0, 1)
    whole, _ = layer(*[turned(x)] * 3, need_weights=False, attn_mask=CAUSAL, is_causal=True)
    got = by_steps(
        lambda x, step: turned(layer(*[turned(x)] * 3, need_weights=False, is_causal=True, cache=step)[0]), x, layer,
        key_dtype=stored,
    )  # fmt: skip
    assert got.dtype == dtype
    compare(got, turned(whole), close)


@torch.no_grad()
def test_weights_masks_and_sinks():
    torch.manual_seed(3)
    layer = MultiheadAttention(E, H, batch_first=True).eval()
    x, sinks = tokens(), torch.randn(H)
    bias = torch.randn(S, S).masked_fill(CAUSAL, -torch.inf)
    whole, weights = layer(x, x, x, attn_mask=bias, average_attn_weights=False, sink_logits=sinks)
    cache, table = layer.new_cache(8, 4), polyhead.PageTable(8, 4)
    new = table.extend([table.add(), table.add()], [S, S])
    longer = torch.nn.functional.pad(bias, (0, 1), value=1e9)  # a page more than there are keys: hidden by the lengths
    out, got = layer(
        x, x, x, attn_mask=longer, average_attn_weights=False, sink_logits=sinks, cache=CacheStep(cache, **new.arguments())
    )
    torch.testing.assert_close(out, whole, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(got[..., :S], weights, rtol=1e-5, atol=1e-6)
    assert not got[..., S:].any()


@torch.no_grad()
def test_another_sequence():
    """Its keys are stored once; what is given for them later is not looked at."""
    torch.manual_seed(4)
    layer = MultiheadAttention(E, H, kdim=6, vdim=10, batch_first=True).eval()
    x, key, value = tokens(), torch.randn(N, 5, 6), torch.randn(N, 5, 10)
    lengths = torch.tensor([5, 3])
    hidden = torch.arange(5) >= lengths[:, None]
    whole, _ = layer(x, key, value, key_padding_mask=hidden, need_weights=False)
    cache, table = layer.new_cache(6, 2), polyhead.PageTable(6, 2)
    new = table.extend([table.add(), table.add()], lengths.numpy())
    step = CacheStep(cache, new.page_table, new.seqlens_k, new.slots)
    outs = [layer(x[:, :3], key, value, need_weights=False, cache=step)[0]]
    step = step._replace(slots=None)
    outs.append(layer(x[:, 3:], key * torch.nan, value[:, :1].expand(-1, 5, -1), need_weights=False, cache=step)[0])
    torch.testing.assert_close(torch.cat(outs, 1), whole, rtol=1e-5, atol=1e-5)


@torch.no_grad()
def test_unbatched_and_hooks():
    torch.manual_seed(5)
    layer = MultiheadAttention(E, H).eval()
    x = tokens()[0]
    whole = layer(x, x, x, attn_mask=CAUSAL, need_weights=False)[0]
    seen = []
    layer.out_proj.register_forward_hook(lambda module, inputs, output: seen.append(output.shape))
    cache, table = layer.new_cache(4, 2), polyhead.PageTable(4, 2)
    sequence, outs = table.add(), []
    for n in range(S):
        step = CacheStep(cache, **table.extend([sequence], [1]).arguments())
        outs.append(layer(*[x[n : n + 1]] * 3, need_weights=False, cache=step)[0])
    torch.testing.assert_close(torch.cat(outs), whole, rtol=1e-5, atol=1e-5)
    assert seen == [(1, 1, E)] * S


@pytest.mark.parametrize("norm_first", [False, True])
@pytest.mark.parametrize("part", ["plain", "rope", "hook", "program"])
@torch.no_grad()
def test_encoder_layer(norm_first, part):
    """Fused, and in parts where somebody looks at a sub-module or sinks are given."""
    torch.manual_seed(6)
    layer = TransformerEncoderLayer(E, H, 24, activation="gelu", batch_first=True, norm_first=norm_first, bias=False).eval()
    torch.nn.init.normal_(layer.norm1.weight)
    if part == "rope":
        layer.self_attn.rope = Rope()
    seen = []
    if part == "hook":
        layer.norm1.register_forward_hook(lambda *_: seen.append(1))
    options = {"sink_logits": torch.randn(H)} if part == "program" else {}
    x = tokens()
    whole = layer(x, src_mask=CAUSAL, is_causal=True, **options)
    seen.clear()
    got = by_steps(lambda x, step: layer(x, is_causal=True, cache=step, **options), x, layer.self_attn)
    compare(got, whole, 1e-5)
    assert len(seen) == (len(CUTS) - 1 if part == "hook" else 0)


def test_compiled_graphs_break_there():
    torch.manual_seed(7)
    layer = TransformerEncoderLayer(E, H, 24, batch_first=True).eval()
    cache, table = layer.self_attn.new_cache(8, 4), polyhead.PageTable(8, 4)
    step = CacheStep(cache, **table.extend([table.add(), table.add()], [S, S]).arguments())
    with torch.no_grad():
        want = layer(tokens(), is_causal=True, cache=step)
        got = torch.compile(layer, backend="aot_eager")(tokens(), is_causal=True, cache=step)
    torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-5)


def test_what_is_refused():
    layer = MultiheadAttention(E, H, rope=Rope(), batch_first=True).eval()
    cache = layer.new_cache(4, 4, key_dtype="int8")
    x = tokens()
    good = dict(
        cache=cache, page_table=torch.tensor([[0, 1], [2, 3]]), seqlens_k=torch.tensor([S, S]),
        slots=torch.stack([torch.arange(S), 8 + torch.arange(S)]), positions=torch.arange(S).expand(N, -1),
    )  # fmt: skip
    plain, training = MultiheadAttention(E, H, batch_first=True).eval(), MultiheadAttention(E, H, dropout=0.5, rope=Rope())
    zeros, nowhere = MultiheadAttention(E, H, add_zero_attn=True), torch.full((N, S), 16)
    for module, options, step, message in (
        (layer, {}, {"slots": nowhere}, r"slots\[0, 0\] is 16, must be -1 to 15"),
        (layer, {}, {"page_table": torch.tensor([[0, 4], [2, 3]])}, r"page_table\[0, 1\] is 4, must be 0 to num_pages - 1 = 3"),
        (layer, {}, {"seqlens_k": torch.tensor([9, S])}, r"seqlens_k\[0\] is 9, must be 0 to seqlen_k 8"),
        (layer, {}, {"positions": None}, "positions is missing: rope turns by them"),
        (layer, {}, {"positions": torch.arange(S)}, r"positions is \[7\], must be \[2, 7\]"),
        (layer, {}, {"cos": torch.ones(S, 2)}, "cos or sin is given, but the layer has rope"),
        (layer, {}, {"cache": plain.new_cache(4, 4)}, "cache has rotary_dim 0 and interleaved False, must have 4 and False"),
        (plain, {}, {"cache": plain.new_cache(4, 4)}, "positions is given, but rotary_dim is 0"),
        (layer, {"key_padding_mask": torch.zeros(N, S)}, {}, "key_padding_mask is given with cache, must not be"),
        (layer, {"mask": "mask = q > k"}, {}, "mask is given with cache, must not be"),
        (layer, {"attn_mask": torch.zeros(S, S)}, {}, r"attn_mask is \[7, 7\], must be \[7, 8\] or \[8, 7, 8\]"),
        (training, {}, {}, r"cache is given in training with dropout 0.5: take eval\(\)"),
        (zeros, {}, {}, "cache is given, but the layer has add_bias_kv or add_zero_attn"),
    ):
        with torch.no_grad(), pytest.raises(polyhead.Error, match=message):
            module(x, x, x, need_weights=False, cache=CacheStep(**(good | step)), **options)
    with pytest.raises(polyhead.Error, match="cache is given where gradients are recorded"):
        layer(x, x, x, cache=CacheStep(**good))
    with torch.no_grad(), pytest.raises(TypeError, match="cache has type KvCache, must be a polyhead.torch.CacheStep"):
        layer(x, x, x, cache=cache)
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16), pytest.raises(polyhead.Error, match="under autocast"):
        layer(x, x, x, cache=CacheStep(**good))
    with pytest.raises(polyhead.Error, match="key_dtype is 'int5', must be one of"):
        layer.new_cache(4, 4, key_dtype="int5")
    assert not cache.key.any() and not cache.key_scales.any()


def test_docstrings():
    assert doctest.testmod(sys.modules["polyhead.torch._cache_step"]).failed == 0
