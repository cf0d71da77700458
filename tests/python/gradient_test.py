"""polyhead.attention_backward against exact gradients in float64: options alone and mixed at random, each dtype."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import formula
import polyhead
from attention_test import DTYPES, KERNEL_OPTIONS, OPTIONS, PACKED, SHAPES, operands, random_options
from exact_gradients import SOURCES, by_autograd, by_differences, error_bounds, exact_gradients, of_packed
from optional import needs_torch

# Largest error over error_bounds(): roundings of the operands' dtype (of out, of P where it is 16 bits wide, of the
# gradient itself), and of the sums.
TOLERANCE = {
    np.dtype(np.float64): 3e-14,
    np.dtype(np.float32): 4e-6,
    np.dtype(np.float16): 2**-10,
    np.dtype(ml_dtypes.bfloat16): 2**-7,
}
SMALLEST = {np.dtype(np.float16): 2**-24}  # subnormals round to multiples of it
OF_DIFFERENCES = 1e-8  # the error of what is compared to


def assert_near(got, exact, bound, dtype, name, floor):
    got = np.asarray(got)
    assert got.shape == exact.shape == bound.shape
    allowed = TOLERANCE[dtype] * bound + SMALLEST.get(dtype, 1e-30) + floor
    worst = np.max(np.abs(got.astype(np.float64) - exact) / allowed, initial=0)
    assert worst <= 1, f"grad of {name}: {worst} times the error allowed"  # not for NaN either


def coarser(*dtypes):
    return max(map(np.dtype, dtypes), key=TOLERANCE.__getitem__)


def check(query, key, value, with_grad_logsumexp=True, kernel=None, by=by_autograd, **options):
    """All gradients that the options have."""
    dtype = query.dtype
    options = formula.in_sums_of(dtype, options)
    sources = {"query": query, "key": key, "value": value} | options
    sources = {name: sources[name] for name in SOURCES if sources.get(name) is not None}
    out = logsumexp = grad_logsumexp = None
    rng = np.random.default_rng(99)
    grad_out = rng.standard_normal((*query.shape[:-1], value.shape[-1])).astype(dtype)
    if options.get("normalizer") != "none":  # which needs nothing of what forward gave
        out, logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True, kernel=kernel)
        grad_logsumexp = rng.standard_normal(logsumexp.shape).astype(logsumexp.dtype) if with_grad_logsumexp else None
    got = polyhead.attention_backward(
        grad_out, query, key, value, out, logsumexp, **options, grad_logsumexp=grad_logsumexp, needs=list(sources),
        kernel=kernel,
    )  # fmt: skip
    assert list(got) == list(sources)
    everything = (query, key, value, grad_out, grad_logsumexp)
    if "cu_seqlens_q" in options:
        exact, bounds = (of_packed(f, *everything, **options) for f in (exact_gradients, error_bounds))
    else:
        exact, bounds = exact_gradients(*everything, by=by, **options), error_bounds(*everything, **options)
    floor = OF_DIFFERENCES if by is by_differences else 0
    for name, source in sources.items():
        assert got[name].dtype == source.dtype and got[name].flags.c_contiguous
        assert_near(got[name], exact[name], bounds[name], coarser(dtype, source.dtype), name, floor)


SMALLER = {  # for sq = 3, sk = 4
    "seqlens_q": lambda lengths: np.minimum(lengths, 3),
    "seqlens_k": lambda lengths: np.minimum(lengths, 3),
    "attn_mask": lambda mask: np.atleast_2d(mask)[..., :3, :4],
}
SMALL_OPTIONS = {
    name: {key: SMALLER.get(key, lambda option: option)(option) for key, option in options.items()}
    for name, options in OPTIONS.items()
}
SMALL_OPTIONS |= {
    f"bias_{shape}": {"attn_bias": np.cos(np.arange(np.prod(shape, dtype=int))).reshape(shape).astype(np.float32)}
    for shape in [(2, 4, 3, 4), (1, 4, 1, 4), (3, 1), (4,), ()]
}


@pytest.mark.parametrize("dtype", [np.float64, np.float32], ids=str)
@pytest.mark.parametrize("options", SMALL_OPTIONS.values(), ids=SMALL_OPTIONS.keys())
def test_against_differences(options, dtype):
    arrays = operands(np.random.default_rng(0), dtype, batch=2, sq=3, sk=4, dim=3, dim_v=2)
    check(*arrays, by=by_differences, **options)


# The rest is against autograd: differences of as many elements would take minutes.


@needs_torch
@pytest.mark.parametrize("with_grad_logsumexp", [False, True], ids=["", "grad_logsumexp"])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_option(options, dtype, with_grad_logsumexp):
    check(*operands(np.random.default_rng(1), dtype), with_grad_logsumexp, **options)


@needs_torch
@pytest.mark.parametrize("heads_kv", [1, 2, 4])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_groups_of_heads(dtype, heads_kv):
    arrays = operands(np.random.default_rng(2), dtype, sq=33, sk=40, heads=4, heads_kv=heads_kv, dim=16, dim_v=24)
    check(*arrays, causal=True, align="bottom_right")


BIAS_SHAPES = [*itertools.product((1, 2), (1, 4), (1, 5), (1, 7)), *(shape for shape in SHAPES if len(shape) < 4)]


@needs_torch
@pytest.mark.parametrize("shape", BIAS_SHAPES, ids=str)
def test_bias_is_summed_over_what_broadcasts(shape):
    rng = np.random.default_rng(3)
    query, key, value = operands(rng, np.float32)
    bias = np.asarray(rng.standard_normal(shape), np.float32)
    mask = np.asarray(rng.random(shape) < 0.7)
    check(query, key, value, attn_bias=bias)
    check(query, key, value, attn_bias=bias, attn_mask=mask, causal=True, align="bottom_right")
    bias[rng.random(shape) < 0.3] = -np.inf
    check(query, key, value, attn_bias=bias, softcap=1.5, dropout_p=0.2, dropout_seed=5)


@needs_torch
@pytest.mark.parametrize("bias_dtype", [np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_bias_dtypes(dtype, bias_dtype):
    rng = np.random.default_rng(4)
    bias = rng.standard_normal((4, 1, 7)).astype(bias_dtype)
    check(*operands(rng, dtype), attn_bias=bias)


@needs_torch
def test_bias_float64_with_float64():
    rng = np.random.default_rng(5)
    check(*operands(rng, np.float64), attn_bias=rng.standard_normal((5, 7)))


GRADIENT_KERNEL_OPTIONS = {
    "plain": {},
    "causal": KERNEL_OPTIONS["causal"],
    "dropout": {"dropout_p": 0.2, "dropout_seed": 11},
    "bias": {"attn_bias": np.linspace(-1, 1, 4 * 70).reshape(1, 4, 1, 70).astype(np.float32)},
    "alibi": {"alibi_slopes": np.array([0.5, 0.25, 0.1, 0], np.float32), "align": "top_left", "window": (9, 4), "sink_keys": 2},
    "sinks": {"sink_logits": np.array([0.5, -1, 2, 0], np.float32), "causal": True, "query_offset": -3},
    "mask_at_end": {"attn_mask": np.tri(33, 9, -20, dtype=bool), "mask_at_end": True},
    "none": {"normalizer": "none", "causal": True, "query_offset": -3},
}


@needs_torch
@pytest.mark.parametrize("kernel", polyhead.kernels())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", GRADIENT_KERNEL_OPTIONS.values(), ids=GRADIENT_KERNEL_OPTIONS.keys())
def test_each_kernel_computes_or_says_why_not(options, dtype, kernel):
    arrays = operands(np.random.default_rng(6), dtype, sq=33, sk=70, heads=4, heads_kv=1, dim=40, dim_v=24)
    options = formula.in_sums_of(dtype, options)
    reason = polyhead.explain(*arrays, kernel=kernel, **options).reasons[kernel]
    if not reason:
        check(*arrays, kernel=kernel, **options)
        return
    softmax = "normalizer" not in options
    results = polyhead.attention(*arrays, **options, return_logsumexp=softmax)
    out, logsumexp = results if softmax else (results, None)
    with pytest.raises(polyhead.Error) as error:
        polyhead.attention_backward(out, *arrays, out, logsumexp, kernel=kernel, **options)
    assert kernel in str(error.value) and reason in str(error.value)


@needs_torch
@pytest.mark.parametrize("seed", range(100))
def test_random_options(seed):
    rng = np.random.default_rng([7, seed])
    dtype = list(DTYPES)[seed % len(DTYPES)]
    batch, sq, sk, heads_kv, group = (int(x) for x in rng.integers((1, 1, 1, 1, 1), (4, 20, 40, 4, 4)))
    heads, (dim, dim_v) = heads_kv * group, (int(x) for x in rng.integers(1, 70, 2))
    arrays = operands(rng, dtype, batch, sq, sk, heads, heads_kv, dim, dim_v)
    check(*arrays, bool(rng.random() < 0.5), **random_options(rng, batch, heads, sq, sk))


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", PACKED.values(), ids=PACKED.keys())
def test_packed(options, dtype):
    rng = np.random.default_rng(8)
    options = formula.in_sums_of(dtype, options)
    query = rng.standard_normal((14, 4, 8)).astype(dtype)
    key, value = (rng.standard_normal((18, 2, dim)).astype(dtype) for dim in (8, 6))
    cu_q, cu_k = np.array([0, 3, 3, 9, 12], np.int32), np.array([0, 5, 8, 8, 16])  # two rows behind the end of each
    check(query, key, value, cu_seqlens_q=cu_q, cu_seqlens_k=cu_k, **options)


@needs_torch
@pytest.mark.parametrize("zero", ["batch", "sq", "sk", "heads", "dim", "dim_v"])
def test_empty_sizes(zero):
    sizes = {"batch": 2, "sq": 3, "sk": 4, "heads": 2, "dim": 8, "dim_v": 8, zero: 0}
    sizes["heads_kv"] = sizes["heads"]
    slopes = np.full(sizes["heads"], 0.5, np.float32)
    bias = np.zeros((1, sizes["sk"]), np.float32)
    arrays = operands(np.random.default_rng(9), np.float32, **sizes)
    check(*arrays, attn_bias=bias, alibi_slopes=slopes, align="top_left")


def test_what_is_hidden_gets_zero_and_changes_no_bit():
    rng = np.random.default_rng(10)
    query, key, value = operands(rng, np.float32)
    bias = rng.standard_normal((2, 1, 5, 7)).astype(np.float32)
    bias[0, 0, 1] = bias[1, 0, :, 6] = -np.inf
    options = {"seqlens_k": np.array([4, 7]), "seqlens_q": np.array([3, 5]), "attn_bias": bias, "needs": SOURCES[:4]}
    out, logsumexp = polyhead.attention(
        query, key, value, **{name: x for name, x in options.items() if name != "needs"}, return_logsumexp=True
    )
    grad_out = rng.standard_normal(out.shape).astype(np.float32)
    grad_logsumexp = rng.standard_normal(logsumexp.shape).astype(np.float32)
    clean = polyhead.attention_backward(
        grad_out, query, key, value, out, logsumexp, grad_logsumexp=grad_logsumexp, **options
    )
    hidden = {
        "query": [clean["query"][0, 3:], clean["query"][0, 1]],
        "key": [clean["key"][0, 4:], clean["key"][1, 6]],
        "value": [clean["value"][0, 4:], clean["value"][1, 6]],
        "attn_bias": [clean["attn_bias"][0, 0, 3:], clean["attn_bias"][0, 0, :, 4:]],
    }
    hidden["attn_bias"].append(clean["attn_bias"][bias == -np.inf])
    for name, parts in hidden.items():
        assert all((part == 0).all() for part in parts), name
        assert np.isfinite(clean[name]).all() and clean[name].any(), name

    key[0, 4:] = value[1, 6] = np.nan
    value[0, 4:] = key[1, 6] = np.inf
    query[0, 3:] = query[0, 1] = grad_out[0, 3:] = np.nan
    grad_out[0, 1] = np.inf
    grad_logsumexp[0, :, 3:] = grad_logsumexp[0, :, 1] = np.nan
    bias[0, 0, 3:] = bias[0, 0, :3, 4:] = np.nan
    bias[0, 0, 1] = -np.inf
    dirty = polyhead.attention_backward(
        grad_out, query, key, value, out, logsumexp, grad_logsumexp=grad_logsumexp, **options
    )
    for name in clean:
        assert dirty[name].tobytes() == clean[name].tobytes(), name


def test_visible_nan_shows_where_it_goes():
    query, key, value = operands(np.random.default_rng(11), np.float32)
    out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True)
    grad_out = np.ones_like(out)
    grad_out[1, 2, 3] = np.nan  # query 2 of head 3, which reads key/value head 1
    got = polyhead.attention_backward(grad_out, query, key, value, out, logsumexp)
    seen = {name: np.isnan(gradient) for name, gradient in got.items()}
    assert seen["query"][1, 2, 3].all() and seen["query"].sum() == query.shape[-1]
    for name in ("key", "value"):
        assert seen[name][1, :, 1].all() and seen[name].sum() == seen[name][1, :, 1].size


def test_dropout_drops_the_same_weights_in_both_directions():
    rng = np.random.default_rng(12)
    query, key, value = operands(rng, np.float32, batch=1, sq=40, sk=50, heads=2, heads_kv=2, dim_v=8)
    dropout = {"dropout_p": 0.5, "dropout_seed": 2**63 + 1, "dropout_offset": 77}
    out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True, **dropout)
    _, weights = polyhead.attention(query, key, value, return_weights=True, **dropout)
    # dV_j = sum_i dropped_P_ij dO_i: with dO = one row of ones after the other, the weights themselves.
    for i in (0, 17, 39):
        grad_out = np.zeros_like(out)
        grad_out[:, i] = 1
        grad = polyhead.attention_backward(grad_out, query, key, value, out, logsumexp, needs=("value",), **dropout)
        np.testing.assert_allclose(grad["value"][0, :, :, 0].T, weights[0, :, i], rtol=1e-5, atol=1e-7)
        dropped = ~polyhead.dropout_mask((1, 2, 40, 50), **dropout)[0, :, i]
        assert (grad["value"][0, :, :, 0].T[dropped] == 0).all()
