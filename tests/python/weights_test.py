"""polyhead.weights: every source's own forward, written down in NumPy, against ours with the loaded weights."""

import doctest
import inspect
import math
import pathlib

import ml_dtypes
import numpy as np
import pytest

import formula
import polyhead
from optional import jax, needs_jax, needs_torch, torch
from polyhead import weights

BATCH, SEQLEN, H, G, D = 2, 5, 4, 2, 6
E = 20  # size of an input
EO = 14  # of the output, where it is free
EK, EV = 9, 11  # of key and value, where they are free
DV = 8  # of a value's head, where it is free

RNG = np.random.default_rng(0)


def random(*shape):
    return RNG.standard_normal(shape) / math.sqrt(shape[0])


def heads(x, count):
    return x.reshape(BATCH, SEQLEN, count, -1)


def joined(x):
    return x.reshape(BATCH, SEQLEN, -1)


def rope(x, interleaved):
    """Rotary positions: pairs of neighbours (Meta), or of columns head_dim / 2 apart (Hugging Face)."""
    half = x.shape[-1] // 2
    angle = np.arange(SEQLEN)[:, None, None] * 100.0 ** -(np.arange(half) / half)
    a, b = (x[..., 0::2], x[..., 1::2]) if interleaved else (x[..., :half], x[..., half:])
    turned = a * np.cos(angle) - b * np.sin(angle), a * np.sin(angle) + b * np.cos(angle)
    return np.stack(turned, -1).reshape(x.shape) if interleaved else np.concatenate(turned, -1)


# Each function makes arrays and returns them with q, k, v and the output projection as that framework's code computes
# them: x is query, y key, z value; x alone where the framework packs the three.


def case_torch(x, y, z):
    a = {"in_proj_weight": random(3 * H * D, E), "in_proj_bias": random(3 * H * D),
         "out_proj.weight": random(E, H * D), "out_proj.bias": random(E)}  # fmt: skip
    q, k, v = np.split(x @ a["in_proj_weight"].T + a["in_proj_bias"], 3, -1)
    return a, heads(q, H), heads(k, H), heads(v, H), lambda o: joined(o) @ a["out_proj.weight"].T + a["out_proj.bias"]


def case_torch_kdim_vdim(x, y, z):
    a = {"q_proj_weight": random(H * D, E), "k_proj_weight": random(H * D, EK), "v_proj_weight": random(H * D, EV),
         "in_proj_bias": random(3 * H * D), "out_proj.weight": random(E, H * D),
         "out_proj.bias": random(E)}  # fmt: skip
    bq, bk, bv = np.split(a["in_proj_bias"], 3)
    q, k, v = x @ a["q_proj_weight"].T + bq, y @ a["k_proj_weight"].T + bk, z @ a["v_proj_weight"].T + bv
    return a, heads(q, H), heads(k, H), heads(v, H), lambda o: joined(o) @ a["out_proj.weight"].T + a["out_proj.bias"]


def einsum_dense(x, y, z, out, kv_heads, dim_v):
    a = {"query/kernel": random(E, H, D), "query/bias": random(H, D), "key/kernel": random(EK, kv_heads, D),
         "key/bias": random(kv_heads, D), "value/kernel": random(EV, kv_heads, dim_v),
         "value/bias": random(kv_heads, dim_v), f"{out}/kernel": random(H, dim_v, EO),
         f"{out}/bias": random(EO)}  # fmt: skip
    q, k, v = (
        np.einsum("bse,ehd->bshd", t, a[f"{name}/kernel"]) + a[f"{name}/bias"]
        for t, name in ((x, "query"), (y, "key"), (z, "value"))
    )
    return a, q, k, v, lambda o: np.einsum("bshd,hde->bse", o, a[f"{out}/kernel"]) + a[f"{out}/bias"]


def case_keras(x, y, z):
    return einsum_dense(x, y, z, "attention_output", G, DV)


def case_flax(x, y, z):
    return einsum_dense(x, y, z, "out", H, D)


def in_out(x, y, z, names, end, kv_heads=H, dim_v=D, bias=None):
    """Matrices [in, out] of their own."""
    q, k, v, o = (f"{name}{end}" for name in names)
    a = {q: random(E, H * D), k: random(EK, kv_heads * D), v: random(EV, kv_heads * dim_v), o: random(H * dim_v, EO)}
    if bias:
        a |= {f"{name}{bias}": random(a[f"{name}{end}"].shape[1]) for name in names}
    bq, bk, bv, bo = (a.get(f"{name}{bias}", 0) for name in names)
    return (
        a, heads(x @ a[q] + bq, H), heads(y @ a[k] + bk, kv_heads), heads(z @ a[v] + bv, kv_heads),
        lambda out: joined(out) @ a[o] + bo,
    )  # fmt: skip


def out_in(*arguments, **options):
    """Matrices [out, in] of their own: torch's Linear."""
    a, *others = in_out(*arguments, **options)
    return {name: np.ascontiguousarray(array.T) for name, array in a.items()}, *others


PROJ = "q_proj", "k_proj", "v_proj", "out_proj"


def case_bert_tf(x, y, z):
    return in_out(x, y, z, ("self/query", "self/key", "self/value", "output/dense"), "/kernel", bias="/bias")


def case_bert(x, y, z):
    return out_in(x, y, z, ("self.query", "self.key", "self.value", "output.dense"), ".weight", bias=".bias")


def case_llama(x, y, z):
    return out_in(x, y, z, ("q_proj", "k_proj", "v_proj", "o_proj"), ".weight", G, bias=".bias")


def case_llama_meta(x, y, z):
    a, q, k, v, out = out_in(x, y, z, ("wq", "wk", "wv", "wo"), ".weight", G)
    return a, rope(q, True), rope(k, True), v, out


def case_t5(x, y, z):
    a, q, k, v, out = out_in(x, y, z, "qkvo", ".weight")
    return a, q * math.sqrt(D), k, v, out  # what `exact` divides by


def case_paddle(x, y, z):
    return in_out(x, y, z, PROJ, ".weight", bias=".bias")


def case_flux(x, y, z):
    return in_out(x, y, z, PROJ, ".weight", H, DV, ".bias")


def case_flux_out_in(x, y, z):
    return out_in(x, y, z, PROJ, ".weight", H, DV, bias=".bias")


def case_gpt2(x, y, z):
    a = {"c_attn.weight": random(E, 3 * H * D), "c_attn.bias": random(3 * H * D), "c_proj.weight": random(H * D, E),
         "c_proj.bias": random(E)}  # fmt: skip
    q, k, v = np.split(x @ a["c_attn.weight"] + a["c_attn.bias"], 3, -1)
    return a, heads(q, H), heads(k, H), heads(v, H), lambda o: joined(o) @ a["c_proj.weight"] + a["c_proj.bias"]


def case_gpt_neox(x, y, z):
    a = {"query_key_value.weight": random(3 * H * D, E), "query_key_value.bias": random(3 * H * D),
         "dense.weight": random(E, H * D), "dense.bias": random(E)}  # fmt: skip
    qkv = heads(x @ a["query_key_value.weight"].T + a["query_key_value.bias"], H)  # [..., H, 3 * D]
    return a, *np.split(qkv, 3, -1), lambda o: joined(o) @ a["dense.weight"].T + a["dense.bias"]


def case_bloom(x, y, z):
    a, *_, out = case_gpt_neox(x, y, z)
    fused = (x @ a["query_key_value.weight"].T + a["query_key_value.bias"]).reshape(BATCH, SEQLEN, H, 3, D)
    return a, fused[..., 0, :], fused[..., 1, :], fused[..., 2, :], out


def case_timm(x, y, z):
    a = {"qkv.weight": random(3 * H * D, E), "qkv.bias": random(3 * H * D), "proj.weight": random(E, H * D),
         "proj.bias": random(E)}  # fmt: skip
    q, k, v = (x @ a["qkv.weight"].T + a["qkv.bias"]).reshape(BATCH, SEQLEN, 3, H, D).transpose(2, 0, 1, 3, 4)
    return a, q, k, v, lambda o: joined(o) @ a["proj.weight"].T + a["proj.bias"]


def case_flash_attention(x, y, z):
    a = {"Wqkv.weight": random((H + 2 * G) * D, E), "Wqkv.bias": random((H + 2 * G) * D),
         "out_proj.weight": random(E, H * D), "out_proj.bias": random(E)}  # fmt: skip
    qkv = x @ a["Wqkv.weight"].T + a["Wqkv.bias"]
    k, v = qkv[..., H * D :].reshape(BATCH, SEQLEN, 2, G, D).transpose(2, 0, 1, 3, 4)
    q = heads(qkv[..., : H * D], H)
    return a, q, k, v, lambda o: joined(o) @ a["out_proj.weight"].T + a["out_proj.bias"]


def case_flash_attention_cross(x, y, z):
    a = {"Wq.weight": random(H * D, E), "Wq.bias": random(H * D), "Wkv.weight": random(2 * G * D, EK),
         "Wkv.bias": random(2 * G * D), "out_proj.weight": random(EO, H * D), "out_proj.bias": random(EO)}  # fmt: skip
    k, v = (y @ a["Wkv.weight"].T + a["Wkv.bias"]).reshape(BATCH, SEQLEN, 2, G, D).transpose(2, 0, 1, 3, 4)
    q = heads(x @ a["Wq.weight"].T + a["Wq.bias"], H)
    return a, q, k, v, lambda o: joined(o) @ a["out_proj.weight"].T + a["out_proj.bias"]


def case_paddle_fused(x, y, z):
    a = {"qkv_weight": random(3, H, D, E), "qkv_bias": random(3, H, D), "linear_weight": random(H * D, E),
         "linear_bias": random(E)}  # fmt: skip
    q, k, v = np.einsum("bse,nhde->nbshd", x, a["qkv_weight"]) + a["qkv_bias"][:, None, None]
    return a, q, k, v, lambda o: joined(o) @ a["linear_weight"] + a["linear_bias"]


def case_paddle_fused_wb(x, y, z):
    a = {"qkv_weight": random(E, 3 * H * D), "qkv_bias": random(3 * H * D), "linear_weight": random(H * D, E),
         "linear_bias": random(E)}  # fmt: skip
    q, k, v = (x @ a["qkv_weight"] + a["qkv_bias"]).reshape(BATCH, SEQLEN, 3, H, D).transpose(2, 0, 1, 3, 4)
    return a, q, k, v, lambda o: joined(o) @ a["linear_weight"] + a["linear_bias"]


def case_onnx_attention(x, y, z):
    a = {"weights": random(E, 2 * H * D + H * DV), "bias": random(2 * H * D + H * DV)}
    q, k, v = np.split(x @ a["weights"] + a["bias"], [H * D, 2 * H * D], -1)
    return a, heads(q, H), heads(k, H), heads(v, H), joined


def case_cudnn(x, y, z):
    a = {"Q_WEIGHTS": random(H, D, E), "K_WEIGHTS": random(H, D, EK), "V_WEIGHTS": random(H, DV, EV),
         "O_WEIGHTS": random(H, EO, DV), "Q_BIASES": random(H, D, 1), "K_BIASES": random(H, D, 1),
         "V_BIASES": random(H, DV, 1), "O_BIASES": random(1, EO, 1)}  # fmt: skip
    a["Q_WEIGHTS"] = a["Q_WEIGHTS"].transpose(2, 0, 1).copy().transpose(1, 2, 0)  # strides as a device reported them
    q, k, v = (
        np.einsum("bse,hde->bshd", t, a[f"{kind}_WEIGHTS"]) + a[f"{kind}_BIASES"][..., 0]
        for t, kind in ((x, "Q"), (y, "K"), (z, "V"))
    )
    return a, q, k, v, lambda o: np.einsum("bshd,hed->bse", o, a["O_WEIGHTS"]) + a["O_BIASES"][0, :, 0]


def case_polyhead(x, y, z):
    a, *others = in_out(x, y, z, ("query", "key", "value", "out"), "_weight", G, DV, "_bias")
    return a, *others


CASES = {name.removeprefix("case_"): case for name, case in globals().items() if name.startswith("case_")}
PACKED = {"torch", "gpt2", "gpt_neox", "bloom", "timm", "flash_attention", "paddle_fused", "paddle_fused_wb",
          "onnx_attention"}  # fmt: skip
OPTIONS = {"cudnn": {"scale": 1 / math.sqrt(D)}, "onnx_attention": {"head_dim": D}}


def forward(layer, x, y, z, source):
    """Ours: projections by NumPy, the rest by polyhead.attention."""
    q, k, v = (
        t @ layer[f"{name}_weight"] + layer.get(f"{name}_bias", 0)
        for t, name in ((x, "query"), (y, "key"), (z, "value"))
    )
    q = heads(q, H)
    k = k.reshape(BATCH, SEQLEN, -1, q.shape[-1])
    v = heads(v, k.shape[2])
    if source == "llama_meta":
        q, k = rope(q, False), rope(k, False)
    out = joined(polyhead.attention(q, k, v, scale=layer["scale"]))
    return out @ layer["out_weight"] + layer.get("out_bias", 0) if "out_weight" in layer else out


def inputs_of(source):
    x = RNG.standard_normal((BATCH, SEQLEN, E))
    y, z = (x, x) if source in PACKED else (random(BATCH, SEQLEN, EK), random(BATCH, SEQLEN, EV))
    return x, y, y if source == "flash_attention_cross" else z


def test_every_source_has_a_case():
    assert sorted(weights.sources()) == sorted(CASES)


@pytest.mark.parametrize("source", CASES)
def test_forward_is_the_frameworks(source):
    x, y, z = inputs_of(source)
    arrays, q, k, v, out_projection = CASES[source](x, y, z)
    assert set(arrays) == set(weights.sources()[source].arrays)
    exact = out_projection(formula.attention(q, k, v).out)
    layer = weights.load(arrays, source, num_heads=H, **OPTIONS.get(source, {}))
    np.testing.assert_allclose(forward(layer, x, y, z, source), exact, rtol=1e-12, atol=1e-12)
    assert layer["scale"] == (1.0 if source == "t5" else pytest.approx(1 / math.sqrt(D)))


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16])
@pytest.mark.parametrize("source", CASES)
def test_round_trip_bit_for_bit(source, dtype):
    arrays = {f"layer.{name}": array.astype(dtype) for name, array in CASES[source](*inputs_of(source))[0].items()}
    given = arrays | {"other": np.zeros(3)}
    layer = weights.load(given, source, prefix="layer.", num_heads=H, **OPTIONS.get(source, {}))
    assert {array.dtype for name, array in layer.items() if name != "scale"} == {np.dtype(dtype)}
    back = weights.export(layer, source, num_heads=H, prefix="layer.")
    assert set(back) == set(arrays)
    for name, array in arrays.items():
        assert back[name].shape == array.shape and back[name].tobytes() == array.tobytes()


@pytest.mark.parametrize("target", ["torch_kdim_vdim", "keras", "bert", "paddle", "flux", "flash_attention_cross"])
def test_from_one_framework_to_another(target):
    x, _, _ = inputs_of("gpt2")
    arrays, *_ = CASES["gpt2"](x, x, x)
    layer = weights.load(arrays, "gpt2", num_heads=H)
    moved = weights.load(weights.export(layer, target, num_heads=H), target, num_heads=H)
    assert {name: np.asarray(a).tobytes() for name, a in moved.items()} == {
        name: np.asarray(a).tobytes() for name, a in layer.items()
    }


@needs_torch
def test_torch_tensors_stay_torch_tensors():
    mha = torch.nn.MultiheadAttention(8, 2, dtype=torch.bfloat16)
    layer = weights.load(mha.state_dict(), "torch", num_heads=2)
    assert isinstance(layer["query_weight"], torch.Tensor) and layer["query_weight"].dtype == torch.bfloat16
    assert torch.equal(layer["key_weight"], mha.in_proj_weight[8:16].T)
    back = weights.export(layer, "torch", num_heads=2)
    mha.load_state_dict(back, strict=True)
    assert all(torch.equal(back[name], array) for name, array in mha.state_dict().items())


@needs_jax
def test_nested_mappings_and_jax():
    arrays, *_ = CASES["flax"](*inputs_of("flax"))
    nested = {name: {} for name in ("query", "key", "value", "out")}
    for name, array in arrays.items():
        module, part = name.split("/")
        nested[module][part] = jax.numpy.asarray(array, "float32")
    layer = weights.load({"params": nested}, "flax", num_heads=H, prefix="params/")
    assert isinstance(layer["query_weight"], jax.Array)
    np.testing.assert_array_equal(layer["query_weight"], np.float32(arrays["query/kernel"].reshape(E, -1)))


def test_extras_are_handed_through():
    arrays, *_ = CASES["torch"](*inputs_of("torch"))
    arrays |= {"bias_k": random(1, 1, H * D), "bias_v": random(1, 1, H * D)}
    layer = weights.load(arrays, "torch", num_heads=H)
    assert layer["bias_k"] is arrays["bias_k"] and layer["bias_v"] is arrays["bias_v"]
    assert set(weights.export(layer, "torch", num_heads=H)) == set(arrays)
    with pytest.raises(polyhead.Error, match='weights has "bias_k", for which bert has no place'):
        weights.export(layer, "bert", num_heads=H)


def test_scale_of_the_models_own():
    arrays, *_ = CASES["llama"](*inputs_of("llama"))
    layer = weights.load(arrays, "llama", num_heads=H, scale=0.25)
    assert layer["scale"] == 0.25
    with pytest.raises(polyhead.Error, match="the scale is 0.25, that of llama is 0.408248: multiply the query weight"):
        weights.export(layer, "llama", num_heads=H)


CHECKPOINT, *_ = CASES["llama"](*inputs_of("llama"))
LAYER = {"query_weight": random(8, 8), "key_weight": random(8, 4), "value_weight": random(8, 4),
         "out_weight": random(8, 8)}  # fmt: skip
REFUSED = [
    (polyhead.Error, 'source is "llama3", must be one of polyhead, torch', lambda: load(source="llama3")),
    (polyhead.Error, r'array "k_proj.weight" of llama is missing; there are "q_proj.weight"',
     lambda: load("k_proj.weight")),
    (polyhead.Error, 'with prefix "x." there is one',
     lambda: load(arrays={f"x.{name}": array for name, array in CHECKPOINT.items()})),
    (polyhead.Error,
     r"q_proj.weight is \[24, 20\], expected \[num_heads \* head_dim, query_size\], where num_heads is 5",
     lambda: load(num_heads=5)),
    (polyhead.Error, r"k_proj.weight is \[9, 12\], expected \[12, 12\]",
     lambda: load(arrays=CHECKPOINT | {"k_proj.weight": CHECKPOINT["k_proj.weight"].T}, num_heads_kv=2)),
    (polyhead.Error, "k_proj.weight has dtype int8, must be float32",
     lambda: load(arrays=CHECKPOINT | {"k_proj.weight": np.zeros((12, 9), np.int8)})),
    (polyhead.Error, "v_proj.weight is int64, takes float32",
     lambda: load(arrays=CHECKPOINT | {"v_proj.weight": np.zeros((12, 11), int)})),
    (polyhead.Error, "num_heads is 0, must be at least 1", lambda: load(num_heads=0)),
    (polyhead.Error, "num_heads_kv is 3, must divide num_heads 4|expected", lambda: load(num_heads_kv=3)),
    (polyhead.Error, "head_dim is -1, must be at least 1", lambda: load(head_dim=-1)),
    (polyhead.Error, "cudnn has its caller's scale",
     lambda: weights.load(CASES["cudnn"](*inputs_of("cudnn"))[0], "cudnn", num_heads=H)),
    (TypeError, "arrays has type list, must be a mapping", lambda: load(arrays=[1])),
    (TypeError, "q_proj.weight has type list, must be an array",
     lambda: load(arrays=CHECKPOINT | {"q_proj.weight": [1.0]})),
    (TypeError, "num_heads has type float, must be an integer", lambda: load(num_heads=4.0)),
    (TypeError, "source has type NoneType, must be a str", lambda: load(source=None)),
    (TypeError, "prefix has type int, must be a str", lambda: load(prefix=1)),
    (TypeError, "scale has type str, must be a number", lambda: load(scale="1")),
    (polyhead.Error, r'source is "llama\\x00", must be a str: it holds a NUL', lambda: load(source="llama\0")),
    (polyhead.Error, r'prefix is "\\x00x", must be a str: it holds a NUL', lambda: load(prefix="\0x")),
    (polyhead.Error, '"k_proj.weight" of llama is missing',
     lambda: load("k_proj.weight", arrays=CHECKPOINT | {"k_proj.weight\0": CHECKPOINT["k_proj.weight"]})),
    (polyhead.Error, "gpt2 keeps num_heads_kv equal to num_heads, not 1 and 2",
     lambda: weights.export(LAYER, "gpt2", num_heads=2)),
    (polyhead.Error, "onnx_attention has no out weight",
     lambda: weights.export(LAYER | {n: random(8, 8) for n in LAYER}, "onnx_attention", num_heads=2)),
    (polyhead.Error, r"value_weight is \[7, 4\], expected|value_size is 7, must be query_size 8",
     lambda: weights.export(LAYER | {"value_weight": random(7, 4)}, "flash_attention", num_heads=2)),
    (polyhead.Error, "key_weight is float32, must be float64: Wqkv.weight holds several weights",
     lambda: weights.export(LAYER | {"key_weight": random(8, 4).astype("f")}, "flash_attention", num_heads=2)),
    (polyhead.Error, 'weights has "typo", for which torch has no place',
     lambda: weights.export(LAYER | {"typo": random(1)}, "torch", num_heads=2)),
]  # fmt: skip


def load(without=None, *, arrays=None, source="llama", num_heads=H, **options):
    arrays = CHECKPOINT if arrays is None else arrays
    if without:
        arrays = {name: array for name, array in arrays.items() if name != without}
    return weights.load(arrays, source, num_heads=num_heads, **options)


@pytest.mark.parametrize("kind, words, call", REFUSED, ids=[words for _, words, _ in REFUSED])
def test_refused(kind, words, call):
    with pytest.raises(kind, match=words):
        call()


def test_documentation():
    result = doctest.testmod(weights)
    assert result.attempted >= 12 and result.failed == 0
    for name in set(weights.__all__) - {"Source"}:
        function = getattr(weights, name)
        for argument in inspect.signature(function).parameters:
            assert f"{argument}" in function.__doc__
        assert "Returns\n" in function.__doc__ or name == "write"


def test_the_page_names_everything():
    page = (pathlib.Path(__file__).parents[2] / "docs" / "weights.md").read_text()
    for name, source in weights.sources().items():
        assert f"`{name}`" in page
        for array in [*source.arrays, *(extra for extra in source.extras if extra != "q_norm.bias")]:
            assert f"`{array}`" in page or array in ("k_norm.weight", "k_norm.bias")
