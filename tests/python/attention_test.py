"""polyhead.attention against the formula in float64: every option, alone and mixed at random, in every dtype."""

import ml_dtypes
import numpy as np
import pytest

import formula
import polyhead

# Largest error of out over sum_k P_k |V_k|: two roundings of the output's dtype, and for the 16-bit ones that of P.
DTYPES = {
    np.dtype(np.float64): 1e-12,
    np.dtype(np.float32): 4e-6,
    np.dtype(np.float16): 2**-9,
    np.dtype(ml_dtypes.bfloat16): 2**-6.5,
}
SUMS = {np.dtype(np.float64): 1e-11}  # of logsumexp and column sums; else 2e-5: float32


def assert_same(got, exact, bound, dtype):
    got = np.asarray(got).astype(np.float64)
    assert got.shape == exact.shape
    assert np.isfinite(got).all()
    worst = np.max(np.abs(got - exact) - DTYPES[dtype] * bound, initial=-np.inf)
    assert worst <= 1e-7, f"{worst} over the bound"


def assert_sums(got, exact, dtype):
    assert got.dtype == (np.float64 if dtype == np.float64 else np.float32)
    tolerance = SUMS.get(dtype, 2e-5)
    np.testing.assert_allclose(got, exact, rtol=tolerance, atol=tolerance)


def operands(rng, dtype, batch=2, sq=5, sk=7, heads=4, heads_kv=2, dim=8, dim_v=6):
    shapes = (batch, sq, heads, dim), (batch, sk, heads_kv, dim), (batch, sk, heads_kv, dim_v)
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def check(query, key, value, kernel=None, **options):
    """Runs with everything returned; compares all of it."""
    dtype = query.dtype
    options = formula.in_sums_of(dtype, options)
    exact = formula.attention(query, key, value, **options)
    softmax = options.get("normalizer") != "none"  # else there is no logsumexp
    out, *logsumexp, weights, column_sums = polyhead.attention(
        query, key, value, **options, return_logsumexp=softmax, return_weights=True, return_column_sums=True, kernel=kernel
    )
    assert out.dtype == weights.dtype == dtype
    assert_same(out, exact.out, exact.bound, dtype)
    assert_same(weights, exact.weights, exact.size, dtype)
    assert len(logsumexp) == softmax
    if softmax:
        assert_sums(*logsumexp, exact.logsumexp, dtype)
    assert_sums(column_sums, exact.column_sums, dtype)
    # Each result alone; the usual case first.
    alone = polyhead.attention(query, key, value, **options, kernel=kernel)
    assert alone.tobytes() == out.tobytes()  # what else is returned changes no bit
    if softmax:
        again, logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True, kernel=kernel)
        assert again.tobytes() == out.tobytes()
        assert_sums(logsumexp, exact.logsumexp, dtype)
    _, mean = polyhead.attention(query, key, value, **options, return_weights="mean", kernel=kernel)
    assert_same(mean, exact.weights.mean(axis=1), exact.size.mean(axis=1), dtype)
    _, column_sums = polyhead.attention(query, key, value, **options, return_column_sums=True, kernel=kernel)
    assert_sums(column_sums, exact.column_sums, dtype)


OPTIONS = {
    "plain": {},
    "scale": {"scale": 0.3},
    "scale_zero": {"scale": 0},
    "scale_negative": {"scale": np.float32(-0.5)},
    "softcap": {"softcap": 1.5},
    "causal_top_left": {"causal": True, "align": "top_left"},
    "causal_bottom_right": {"causal": True, "align": "bottom_right"},
    "causal_offset": {"causal": True, "query_offset": 1},
    "causal_offset_negative": {"causal": True, "query_offset": -2},
    "causal_offsets": {"causal": True, "query_offset": np.array([-3, 4], np.int32)},
    "window": {"window": (2, 1), "align": "bottom_right"},
    "window_left": {"window": [1, -1], "query_offset": np.int64(1)},
    "window_right": {"window": (-1, 0), "align": "top_left"},
    "window_open": {"window": (-1, -1)},
    "window_sinks": {"window": (1, 0), "sink_keys": np.int64(2), "align": "bottom_right"},
    "window_causal": {"window": (3, 3), "causal": True, "align": "bottom_right"},
    "mask_at_end": {"attn_mask": np.arange(40).reshape(2, 1, 5, 4) % 3 > 0, "mask_at_end": True, "seqlens_k": np.array([2, 6])},
    "mask_at_end_row": {"attn_mask": np.array([True, False, False]), "mask_at_end": np.True_},
    "mask_at_end_of_none": {"attn_mask": np.zeros((4, 5, 0), bool), "mask_at_end": True},
    "mask_at_end_of_one": {"attn_mask": np.array(False), "mask_at_end": True, "causal": True, "align": "bottom_right"},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0], np.float32), "align": "bottom_right"},
    "alibi_batch": {"alibi_slopes": np.arange(8, dtype=np.float32).reshape(2, 4) / 8, "align": "top_left"},
    "sinks": {"sink_logits": np.array([0.5, -np.inf, 2, 0], np.float32), "causal": True, "query_offset": -2},
    "sinks_seqlens": {"sink_logits": np.zeros(4, np.float32), "seqlens_q": np.array([5, 2]), "seqlens_k": np.array([0, 6])},
    "none": {"normalizer": "none", "causal": True, "query_offset": -2, "dropout_p": 0.3, "dropout_seed": 7},
    "none_seqlens": {"normalizer": "none", "softcap": 1.5, "seqlens_q": np.array([5, 2]), "seqlens_k": np.array([0, 6])},
    "seqlens_k": {"seqlens_k": np.array([3, 7], np.int32)},
    "seqlens": {"seqlens_q": np.array([5, 0]), "seqlens_k": np.array([0, 6])},
    "seqlens_causal": {
        "seqlens_q": np.array([2, 5], np.int32),
        "seqlens_k": np.array([6, 4]),
        "causal": True,
        "align": "bottom_right",
    },
    "dropout": {"dropout_p": 0.3, "dropout_seed": 7},
    "dropout_offset": {"dropout_p": 0.5, "dropout_seed": 2**64 - 1, "dropout_offset": 2**32 - 1},
    "dropout_all": {"dropout_p": 1, "dropout_seed": 0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_option(options, dtype):
    check(*operands(np.random.default_rng(1), dtype), **options)


SHAPES_4D = [(2, 4, 5, 7), (1, 4, 5, 7), (2, 1, 5, 7), (2, 4, 1, 7), (2, 4, 5, 1), (1, 1, 1, 1)]
SHAPES = [*SHAPES_4D, (4, 5, 7), (1, 5, 7), (5, 7), (5, 1), (7,), (1,), ()]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bias_and_mask_broadcast(shape):
    rng = np.random.default_rng(2)
    query, key, value = operands(rng, np.float32)
    mask = np.asarray(rng.random(shape) < 0.7)
    bias = np.asarray(rng.standard_normal(shape), np.float32)
    check(query, key, value, attn_mask=mask)
    check(query, key, value, attn_bias=bias)
    check(query, key, value, attn_bias=bias.astype(np.float16), attn_mask=mask)


@pytest.mark.parametrize("bias_dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dtypes(dtype, bias_dtype):
    rng = np.random.default_rng(3)
    bias = rng.standard_normal((4, 5, 7)).astype(bias_dtype)
    bias[:, :, 2] = -np.inf
    check(*operands(rng, dtype), attn_bias=bias)


def test_bias_float64_with_float64():
    rng = np.random.default_rng(4)
    check(*operands(rng, np.float64), attn_bias=rng.standard_normal((5, 7)))


KERNEL_OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right", "softcap": 2.0},
    "dropout": {"dropout_p": 0.2, "dropout_seed": 11, "dropout_offset": 3},
    "weights": {"return_weights": True},
    "column_sums": {"return_column_sums": True, "window": (4, 4), "align": "top_left"},
}


@pytest.mark.parametrize("kernel", polyhead.kernels())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", KERNEL_OPTIONS.values(), ids=KERNEL_OPTIONS.keys())
def test_each_kernel_computes_or_says_why_not(options, dtype, kernel):
    rng = np.random.default_rng(5)
    arrays = operands(rng, dtype, sq=33, sk=70, heads=4, heads_kv=1, dim=40, dim_v=24)
    explanation = polyhead.explain(*arrays, kernel=kernel, **options)
    reason = explanation.reasons[kernel]
    assert explanation.kernel == ("" if reason else kernel)
    if reason:
        with pytest.raises(polyhead.Error) as error:
            polyhead.attention(*arrays, kernel=kernel, **options)
        assert kernel in str(error.value) and reason in str(error.value)
        return
    exact = formula.attention(*arrays, **{k: v for k, v in options.items() if not k.startswith("return")})
    got = polyhead.attention(*arrays, kernel=kernel, **options)
    assert_same(got[0] if isinstance(got, tuple) else got, exact.out, exact.bound, dtype)
    if "return_weights" in options:
        assert_same(got[1], exact.weights, exact.weights, dtype)
    if "return_column_sums" in options:
        assert_sums(got[1], exact.column_sums, dtype)


def random_options(rng, batch, heads, sq, sk):
    def chance(p):
        return rng.random() < p

    options = {}
    if chance(0.4):
        options["causal"] = True
    if chance(0.4):
        options["window"] = tuple(int(x) for x in rng.integers(-1, 6, 2))
    if chance(0.3):
        options["alibi_slopes"] = rng.random((batch, heads) if chance(0.5) else heads).astype(np.float32)
    if chance(0.3):
        options["softcap"] = float(rng.uniform(0.5, 5))
    if chance(0.4):
        options["scale"] = float(rng.normal())
    if chance(0.4):
        options["attn_mask"] = rng.random([n if chance(0.6) else 1 for n in (batch, heads, sq, sk)]) < 0.8
        if chance(0.3):
            end = int(rng.integers(0, sk + 1))
            options["attn_mask"] = np.broadcast_to(options["attn_mask"], (*options["attn_mask"].shape[:3], sk))[..., :end]
            options["mask_at_end"] = True
    if chance(0.4):
        shape = [n if chance(0.6) else 1 for n in (batch, heads, sq, sk)][int(rng.integers(0, 4)) :]
        options["attn_bias"] = rng.standard_normal(shape).astype(np.float32)
    if chance(0.3):
        options["seqlens_q"] = rng.integers(0, sq + 1, batch)
    if chance(0.4):
        options["seqlens_k"] = rng.integers(0, sk + 1, batch).astype(np.int32)
    if chance(0.3):
        options |= {"dropout_p": float(rng.random()), "dropout_seed": int(rng.integers(0, 2**62))}
    which = int(rng.integers(0, 4))
    if which < 2:
        options["align"] = ("top_left", "bottom_right")[which]
    else:
        options["query_offset"] = int(rng.integers(-4, 5)) if which == 2 else rng.integers(-4, 5, batch)
    return options


@pytest.mark.parametrize("seed", range(100))
def test_random_options(seed):
    rng = np.random.default_rng([6, seed])
    dtype = list(DTYPES)[seed % len(DTYPES)]
    batch, sq, sk, heads_kv, group = (int(x) for x in rng.integers((1, 1, 1, 1, 1), (4, 20, 40, 4, 4)))
    heads, (dim, dim_v) = heads_kv * group, (int(x) for x in rng.integers(1, 70, 2))
    arrays = operands(rng, dtype, batch, sq, sk, heads, heads_kv, dim, dim_v)
    check(*arrays, **random_options(rng, batch, heads, sq, sk))


PACKED = {
    "plain": {},
    "causal": {"causal": True, "align": "bottom_right"},
    "window": {"window": (2, 2), "align": "top_left"},
    "window_sinks": {"window": (1, 0), "sink_keys": 2, "align": "bottom_right"},
    "offsets": {"causal": True, "query_offset": np.array([2, 0, -1, 3])},
    "alibi": {"alibi_slopes": np.ones((4, 4), np.float32) / 4, "align": "top_left"},
    "sinks": {"sink_logits": np.array([0.5, -1, 2, 0], np.float32)},
    "none": {"normalizer": "none"},
    "dropout": {"dropout_p": 0.4, "dropout_seed": 3},
    "softcap": {"softcap": 0.7, "scale": 1.5},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED.keys())
def test_packed(options, dtype):
    rng = np.random.default_rng(8)
    options = formula.in_sums_of(dtype, options)
    query = rng.standard_normal((14, 4, 8)).astype(dtype)
    key, value = (rng.standard_normal((16, 2, dim)).astype(dtype) for dim in (8, 6))
    cu_q, cu_k = np.array([0, 3, 3, 9, 12], np.int32), np.array([0, 5, 8, 8, 16])
    exact = formula.packed_attention(query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)
    softmax = "normalizer" not in options  # else there is no logsumexp
    results = polyhead.attention(
        query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, return_logsumexp=softmax, **options
    )
    out, logsumexp = results if softmax else (results, exact.logsumexp)
    assert_same(out, exact.out, exact.bound, dtype)
    assert_sums(logsumexp.astype(np.float64 if dtype == np.float64 else np.float32), exact.logsumexp, dtype)
    assert not out[12:].astype(bool).any() and (logsumexp[:, 12:] == -np.inf).all()  # rows behind the last sequence


@pytest.mark.parametrize("zero", ["batch", "sq", "sk", "heads", "dim", "dim_v"])
def test_empty_sizes(zero):
    sizes = {"batch": 2, "sq": 3, "sk": 4, "heads": 2, "dim": 8, "dim_v": 8, zero: 0}
    sizes["heads_kv"] = sizes["heads"]
    query, key, value = operands(np.random.default_rng(9), np.float32, **sizes)
    out, logsumexp, weights, column_sums = polyhead.attention(
        query, key, value, return_logsumexp=True, return_weights=True, return_column_sums=True
    )
    exact = formula.attention(query, key, value)
    np.testing.assert_allclose(out, exact.out, atol=1e-6)
    np.testing.assert_allclose(logsumexp, exact.logsumexp, atol=1e-6)
    np.testing.assert_allclose(weights, exact.weights, atol=1e-6)
    np.testing.assert_allclose(column_sums, exact.column_sums, atol=1e-6)


def test_hidden_data_changes_no_bit_and_visible_nan_shows():
    rng = np.random.default_rng(10)
    query, key, value = operands(rng, np.float32)
    lengths = {"seqlens_k": np.array([4, 7]), "seqlens_q": np.array([3, 5])}
    clean = polyhead.attention(query, key, value, **lengths)
    key[0, 4:], value[0, 4:], query[0, 3:] = np.nan, np.inf, np.nan
    assert polyhead.attention(query, key, value, **lengths).tobytes() == clean.tobytes()
    value[1, 2, 0, 3] = np.nan  # key/value head 0: query heads 0 and 1
    seen = np.isnan(polyhead.attention(query, key, value, **lengths))
    assert seen[1, :, :2, 3].all() and seen.sum() == 5 * 2


def test_weights_where_a_sum_is_all_that_a_maximum_allows():
    """A step's weights sum to 1024 times the first one, above which a row's maximum is raised: both passes must agree."""
    q, k, v = np.zeros((3, 1, 32, 1, 32))
    q[..., :3] = 1
    k[0, 12, 0, :3] = 39.25, -81 / 2048, -(2.0**-13)
    k[0, 13:16, 0, 0] = -1024
    v[:] = 1
    scores = np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(32)
    exact = np.exp(scores - scores.max(-1, keepdims=True))
    exact /= exact.sum(-1, keepdims=True)
    for dtype in (np.float32, ml_dtypes.bfloat16):
        operands = [x.astype(dtype) for x in (q, k, v)]  # all of them exact in bfloat16
        _, weights = polyhead.attention(*operands, return_weights=True)
        assert np.abs(weights.astype(np.float64) - exact).max() < DTYPES[np.dtype(dtype)]


def test_dropout_mask_is_the_documented_formula():
    shape = (2, 3, 5, 19)
    for p, seed, offset in [(0.25, 2**40 + 5, 9), (0.1, 2**64 - 1, 2**32 - 1), (0.999, 0, 0), (1e-5, 3, 0)]:
        kept = polyhead.dropout_mask(shape, p, seed, offset)
        assert kept.dtype == bool and kept.shape == shape
        assert (kept == formula.dropout_mask(shape, p, seed, offset)).all()
    assert (polyhead.dropout_mask(shape, 0.5, 7) == formula.dropout_mask(shape, 0.5, 7, 0)).all()
    assert polyhead.dropout_mask(shape, 0, 1).all() and not polyhead.dropout_mask(shape, 1.0, 1).any()
    assert polyhead.dropout_mask((2, 0, 5, 3), 0.5, 1).shape == (2, 0, 5, 3)


@pytest.mark.parametrize("p", [0.1, 0.25, 0.5, 0.9])
def test_dropout_keeps_its_share_everywhere_and_draws_anew(p):
    def within_5_sigma(drawn, share, count):
        return np.all(np.abs(drawn - share) < 5 * np.sqrt(share * (1 - share) / count))

    first = polyhead.dropout_mask((2, 3, 300, 400), p, 3)
    share = 1 - np.floor(p * 65536 + 0.5) / 65536
    for axes in [(0, 1, 2, 3), (2, 3), (0, 1, 2), (0, 1, 3)]:
        count = np.prod([first.shape[axis] for axis in axes])
        assert within_5_sigma(first.mean(axis=axes), share, count)
    same = share**2 + (1 - share) ** 2  # of two independent masks
    others = [polyhead.dropout_mask(first.shape, p, seed, offset) for seed, offset in [(4, 0), (3, 1), (3 + 2**32, 0)]]
    others += [np.roll(first, shift, axis) for axis, shift in enumerate((1, 1, 1, 8))]
    assert all(within_5_sigma((first == other).mean(), same, first.size / 2) for other in others)
