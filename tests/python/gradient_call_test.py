"""How polyhead.attention_backward is called: needs, into, accumulate; arrays of every kind and stride; bad input."""

import itertools

import ml_dtypes
import numpy as np
import pytest

import polyhead
from arrays_test import KINDS, jax_with_float64, strided_views, to_jax, to_numpy, to_torch  # noqa: F401
from errors_test import bad, refused
from optional import jax, needs_jax, needs_torch, torch

SOURCES = ("query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits")


def problem(dtype=np.float32, seed=0, **options):
    """Positional and keyword arguments of attention_backward, all that have gradients given."""
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((2, 5, 4, 8)).astype(dtype)
    key = rng.standard_normal((2, 7, 2, 8)).astype(dtype)
    value = rng.standard_normal((2, 7, 2, 6)).astype(dtype)
    options = {
        "attn_bias": rng.standard_normal((4, 1, 7)).astype(np.float32),
        "alibi_slopes": rng.random(4).astype(np.float32),
        "sink_logits": rng.random(4).astype(np.float64 if dtype == np.float64 else np.float32),
        "causal": True,
        "align": "bottom_right",
    } | options
    out, logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True)
    grad_out = rng.standard_normal(out.shape).astype(dtype)
    return (grad_out, query, key, value, out, logsumexp), options


def same_bits(got, expected):
    assert list(got) == list(expected)
    for name in got:
        assert to_numpy(got[name]).tobytes() == to_numpy(expected[name]).tobytes(), name


def test_query_key_and_value_are_the_default():
    arrays, options = problem()
    got = polyhead.attention_backward(*arrays, **options)
    assert list(got) == ["query", "key", "value"]
    same_bits(got, polyhead.attention_backward(*arrays, **options, needs=["query", "key", "value"]))


@pytest.mark.parametrize("count", range(6))
def test_any_of_them_in_any_order_with_the_same_values(count):
    arrays, options = problem()
    everything = polyhead.attention_backward(*arrays, **options, needs=SOURCES)
    for needs in itertools.permutations(SOURCES, count) if count < 3 else itertools.combinations(SOURCES[::-1], count):
        got = polyhead.attention_backward(*arrays, **options, needs=needs)
        assert list(got) == list(needs)
        for name in needs:
            np.testing.assert_allclose(got[name], everything[name], rtol=0, atol=2e-6)


def test_needs_may_be_any_sequence_and_repeat_a_name():
    arrays, options = problem()
    expected = polyhead.attention_backward(*arrays, **options, needs=("key", "query"))
    for needs in (["key", "query"], {"key": 1, "query": 2}, iter(("key", "query")), ("key", "query", "key")):
        same_bits(polyhead.attention_backward(*arrays, **options, needs=needs), expected)


def test_into_is_written_and_returned():
    arrays, options = problem()
    expected = polyhead.attention_backward(*arrays, **options, needs=SOURCES)
    into = {name: np.full_like(x, np.nan) for name, x in expected.items()}
    got = polyhead.attention_backward(*arrays, **options, needs=SOURCES, into=into)
    assert all(got[name] is into[name] for name in SOURCES) and got is not into
    same_bits(into, expected)


def test_into_may_hold_some_of_needs():
    arrays, options = problem()
    expected = polyhead.attention_backward(*arrays, **options)
    into = {"key": np.full_like(expected["key"], np.nan)}
    got = polyhead.attention_backward(*arrays, **options, into=into)
    assert got["key"] is into["key"] and list(into) == ["key"]
    same_bits(got, expected)
    same_bits(polyhead.attention_backward(*arrays, **options, into={}), expected)


@pytest.mark.parametrize("dtype", [np.float64, np.float32, np.float16, ml_dtypes.bfloat16], ids=str)
def test_accumulate_adds(dtype):
    arrays, options = problem(dtype)
    gradients = polyhead.attention_backward(*arrays, **options, needs=SOURCES)
    rng = np.random.default_rng(1)
    held = {name: rng.standard_normal(x.shape).astype(x.dtype) for name, x in gradients.items()}
    into = {name: x.copy() for name, x in held.items()}
    got = polyhead.attention_backward(*arrays, **options, needs=SOURCES, into=into, accumulate=True)
    tolerance = {"float64": 1e-14, "float32": 2e-6, "float16": 2**-9, "bfloat16": 2**-6}
    for name in SOURCES:
        assert got[name] is into[name]
        exact = held[name].astype(np.float64) + gradients[name].astype(np.float64)
        room = tolerance[got[name].dtype.name]  # the sum is rounded once, the gradient beside it once more
        np.testing.assert_allclose(got[name].astype(np.float64), exact, rtol=room, atol=room)


@pytest.mark.parametrize("layout", ["bhsd", "fortran", "gaps", "backwards"])
def test_into_of_any_strides(layout):
    arrays, options = problem()
    expected = polyhead.attention_backward(*arrays, **options)
    into = {name: strided_views(np.full_like(x, np.nan))[layout] for name, x in expected.items()}
    polyhead.attention_backward(*arrays, **options, into=into)
    for name in into:
        np.testing.assert_allclose(into[name], expected[name], rtol=0, atol=2e-6)
    if layout == "gaps":
        assert np.isnan(into["query"].base).sum() == into["query"].base.size - into["query"].size


def test_one_buffer_of_three_gradients():
    qkv = np.random.default_rng(2).standard_normal((2, 5, 3, 4, 8)).astype(np.float32)
    query, key, value = (qkv[:, :, n] for n in range(3))
    out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True)
    expected = polyhead.attention_backward(out, query.copy(), key.copy(), value.copy(), out, logsumexp)
    grad_qkv = np.full_like(qkv, np.nan)
    into = {name: grad_qkv[:, :, n] for n, name in enumerate(expected)}
    polyhead.attention_backward(out, query, key, value, out, logsumexp, into=into)
    for n, name in enumerate(expected):
        np.testing.assert_allclose(grad_qkv[:, :, n], expected[name], rtol=0, atol=2e-6)


@needs_torch
def test_into_torch_tensors():
    arrays, options = problem(np.float32)
    expected = polyhead.attention_backward(*arrays, **options, needs=SOURCES)
    into = {name: to_torch(np.full_like(x, np.nan)) for name, x in expected.items()}
    got = polyhead.attention_backward(*map(to_torch, arrays), **options, needs=SOURCES, into=into)
    assert all(got[name] is into[name] for name in SOURCES)
    same_bits(got, expected)
    wide = torch.zeros(2, 4, 5, 8).transpose(1, 2)
    polyhead.attention_backward(*arrays, **options, needs=("query",), into={"query": wide}, accumulate=True)
    np.testing.assert_allclose(wide, expected["query"], rtol=0, atol=2e-6)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64], ids=str)
def test_kinds_give_the_same_bits_in_their_own_kind(make, dtype, jax_with_float64):  # noqa: F811
    arrays, options = problem(dtype)
    grad_logsumexp = np.ones_like(arrays[5])
    expected = polyhead.attention_backward(*arrays, **options, grad_logsumexp=grad_logsumexp, needs=SOURCES)
    options |= {name: make(options[name]) for name in ("attn_bias", "alibi_slopes", "sink_logits")}
    got = polyhead.attention_backward(
        *map(make, arrays), **options, grad_logsumexp=make(grad_logsumexp), needs=SOURCES
    )
    for name, gradient in got.items():
        assert type(gradient) is type(make(expected[name]))
        assert to_numpy(gradient).dtype == expected[name].dtype and to_numpy(gradient).shape == expected[name].shape
    same_bits(got, expected)


@needs_torch
@needs_jax
def test_each_gradient_is_of_its_input_s_kind():
    (grad_out, query, key, value, out, logsumexp), options = problem()
    expected = polyhead.attention_backward(grad_out, query, key, value, out, logsumexp, **options, needs=SOURCES)
    options["attn_bias"] = to_torch(options["attn_bias"])
    got = polyhead.attention_backward(
        to_torch(grad_out), to_jax(query), to_torch(key), value, out, to_jax(logsumexp), **options, needs=SOURCES
    )
    kinds = [jax.Array, torch.Tensor, np.ndarray, torch.Tensor, np.ndarray]
    assert all(isinstance(x, kind) for x, kind in zip(got.values(), kinds))
    same_bits(got, expected)


@pytest.mark.parametrize("shape", [(2, 4, 5, 7), (5, 7), (1, 1), (7,), ()], ids=str)
@pytest.mark.parametrize("dtype", [ml_dtypes.bfloat16, np.float16, np.float32], ids=str)
def test_gradient_of_the_bias_has_exactly_its_shape_and_dtype(shape, dtype):
    arrays, options = problem(attn_bias=np.zeros(shape, dtype))
    into = np.full(shape, np.nan, dtype)
    new = polyhead.attention_backward(*arrays, **options, needs=("attn_bias",))["attn_bias"]
    assert new.shape == shape and new.dtype == dtype and isinstance(new, np.ndarray)
    polyhead.attention_backward(*arrays, **options, needs=("attn_bias",), into={"attn_bias": into})
    assert into.tobytes() == new.tobytes()
    wide = problem(attn_bias=np.broadcast_to(np.zeros(shape, dtype), (2, 4, 5, 7)))
    full = polyhead.attention_backward(*wide[0], **wide[1], needs=("attn_bias",))["attn_bias"]
    assert full.shape == (2, 4, 5, 7)
    axes = tuple(range(4 - len(shape))) + tuple(4 - len(shape) + n for n, size in enumerate(shape) if size == 1)
    summed = full.astype(np.float64).sum(axis=axes).reshape(shape)
    np.testing.assert_allclose(new.astype(np.float64), summed, atol={2: 0.03, 4: 1e-5}[new.itemsize])


def test_gradients_of_outs_that_broadcast():
    (grad_out, *arrays), options = problem()
    for view in (
        np.broadcast_to(np.float32(1), grad_out.shape),  # as of a sum
        np.broadcast_to(grad_out[:, :1], grad_out.shape),
        np.asfortranarray(grad_out),
        grad_out[::-1, :, ::-1],
        strided_views(grad_out)["gaps"],
    ):
        got = polyhead.attention_backward(view, *arrays, **options, needs=SOURCES)
        expected = polyhead.attention_backward(np.ascontiguousarray(view), *arrays, **options, needs=SOURCES)
        for name in SOURCES:
            np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=2e-6)


@needs_torch
def test_expanded_gradients_of_torch_sums():
    arrays, options = problem()
    tensors = [to_torch(x) for x in arrays]
    ones = torch.ones(()).expand(tensors[0].shape)
    expected = polyhead.attention_backward(np.ones_like(arrays[0]), *arrays[1:], **options)
    got = polyhead.attention_backward(ones, *tensors[1:], **options)
    for name in got:
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=2e-6)


@pytest.mark.parametrize("layout", ["bhsd", "fortran", "gaps", "backwards"])
def test_inputs_of_any_strides(layout):
    arrays, options = problem()
    expected = polyhead.attention_backward(*arrays, **options)
    views = [strided_views(x)[layout] for x in arrays[:5]]
    logsumexp = np.asfortranarray(arrays[5])
    no_gradient = np.zeros((2, 5, 4), np.float32).transpose(0, 2, 1)
    got = polyhead.attention_backward(*views, logsumexp, **options, grad_logsumexp=no_gradient)
    for name in got:
        assert got[name].flags.c_contiguous and got[name].ctypes.data % 64 == 0
        np.testing.assert_allclose(got[name], expected[name], rtol=0, atol=2e-6)


def test_read_only_inputs_are_taken_and_unchanged():
    arrays, options = problem()
    before = [x.tobytes() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    polyhead.attention_backward(*arrays, **options)
    assert [x.tobytes() for x in arrays] == before


@needs_torch
def test_torch_tensors_that_require_gradients():
    arrays, options = problem()
    tensors = [to_torch(x).requires_grad_() for x in arrays]
    got = polyhead.attention_backward(*tensors, **options)
    assert not any(x.requires_grad for x in got.values())
    same_bits(got, polyhead.attention_backward(*arrays, **options))


ARRAYS, OPTIONS = problem()
GOOD = dict(zip(("grad_out", "query", "key", "value", "out", "logsumexp"), ARRAYS)) | OPTIONS
QUERY = ARRAYS[1]


def frozen(x):
    x = x.copy()
    x.flags.writeable = False
    return x


NEW = QUERY.copy()  # an array that a gradient may be written into
OVER_ITSELF = np.lib.stride_tricks.as_strided(np.zeros(8, np.float32), QUERY.shape, (0, 0, 0, 4))
BAD = [
    bad(TypeError, "grad_out has type NoneType, must be an array", grad_out=None),
    bad(TypeError, "out has type list, must be an array", out=[1.0]),
    bad(TypeError, "logsumexp has type NoneType, must be an array of float32 (float64 if query is)", logsumexp=None),
    bad(TypeError, "grad_logsumexp has type float, must be an array", grad_logsumexp=1.0),
    bad(TypeError, "needs has type str, must be a sequence of names", needs="query"),
    bad(TypeError, "needs has type int, must be a sequence of names", needs=1),
    bad(TypeError, 'needs[1] has type int, must be "query", "key"', needs=("query", 1)),
    bad(TypeError, "into has type list, must be a dict of arrays", into=[NEW]),
    bad(TypeError, 'into["query"] has type float, must be a NumPy array or a torch tensor', into={"query": 1.0}),
    bad(TypeError, "accumulate has type int, must be True or False", accumulate=1),
    bad(TypeError, "return_weights", return_weights=True),
    bad(TypeError, "return_logsumexp", return_logsumexp=True),
    # Names.
    bad(polyhead.Error, 'needs[0] is "bias", must be "query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits" or', needs=["bias"]),
    bad(polyhead.Error, 'needs[0] is "attn_bias", but attn_bias is not', needs=["attn_bias"], attn_bias=None),
    bad(polyhead.Error, 'needs[0] is "alibi_slopes", but alibi', needs=["alibi_slopes"], alibi_slopes=None),
    bad(polyhead.Error, 'into holds "attn_bias", which needs does not name', into={"attn_bias": NEW}),
    bad(polyhead.Error, 'into holds "3", which needs does not name', into={"query": NEW, 3: NEW}),
    bad(polyhead.Error, "accumulate is True, so into must be given", accumulate=True),
    bad(polyhead.Error, 'accumulate is True, so into must hold "key" too', accumulate=True, into={"query": NEW}),
    # What gradients are written into.
    bad(polyhead.Error, 'into["query"] is read-only, must be writable', into={"query": frozen(QUERY)}),
    bad(polyhead.Error, 'into["query"] is float64, must be float32 as query', into={"query": NEW.astype(float)}),
    bad(polyhead.Error, 'into["query"] is int64, must be float32 as query', into={"query": NEW.astype(np.int64)}),
    bad(polyhead.Error, 'into["query"] has 3 dimensions, must have 4', into={"query": NEW[0]}),
    bad(polyhead.Error, 'into["query"] dim 1 is 4, must be 5 as query', into={"query": NEW[:, :4]}),
    bad(polyhead.Error, 'into["attn_bias"] has 4 dim', needs=("attn_bias",), into={"attn_bias": NEW}),
    bad(polyhead.Error, "grad_query overlaps query", into={"query": QUERY}),
    bad(polyhead.Error, "grad_query overlaps itself", into={"query": OVER_ITSELF}),
    # Shapes and dtypes of the other arrays.
    bad(polyhead.Error, "grad_out has 3 dimensions, must have 4: [batch, seqlen_q, num_heads,", grad_out=ARRAYS[0][0]),
    bad(polyhead.Error, "grad_out dim 3 is 8, expected head_dim_v 6", grad_out=QUERY),
    bad(polyhead.Error, "grad_out is float64, expected float32", grad_out=ARRAYS[0].astype(float)),
    bad(polyhead.Error, "out dim 1 is 4, expected seqlen_q 5", out=ARRAYS[4][:, :4]),
    bad(polyhead.Error, "logsumexp dim 1 is 5, expected num_heads 4", logsumexp=ARRAYS[5].transpose(0, 2, 1)),
    bad(polyhead.Error, "logsumexp is float64, expected float32", logsumexp=ARRAYS[5].astype(float)),
    bad(polyhead.Error, "logsumexp has 4 dimensions, must have 3: [batch, num_heads, seqlen_q]", logsumexp=QUERY),
    bad(polyhead.Error, "grad_logsumexp dim 2 is 4, expected seqlen_q 5", grad_logsumexp=ARRAYS[5][..., :4]),
    # As forward.
    bad(polyhead.Error, "num_heads_kv is 0, must", key=GOOD["key"][:, :, :0], value=GOOD["value"][:, :, :0]),
    bad(polyhead.Error, "scale is nan", scale=float("nan")),
    bad(polyhead.Error, "dropout_p is 0.5, so dropout_seed must be given", dropout_p=0.5),
    bad(polyhead.Error, "kernel is cuda_sm99, known are", kernel="cuda_sm99"),
]


@pytest.mark.parametrize("kind, words, arguments", BAD)
def test_bad_input(kind, words, arguments):
    refused(polyhead.attention_backward, kind, words, GOOD | arguments)


def test_packed_shapes_are_named():
    rows = np.ones((6, 2, 4), np.float32)
    ends = np.array([0, 2, 6])
    sums = np.zeros((2, 6), np.float32)
    good = {"grad_out": rows, "query": rows, "key": rows, "value": rows, "out": rows, "logsumexp": sums}
    good |= {"cu_seqlens_q": ends, "cu_seqlens_k": ends}
    for words, arguments in [
        ("out has 4 dimensions, must have 3: [total_q, num_heads, head_dim_v]", {"out": rows[None]}),
        ("logsumexp has 3 dimensions, must have 2: [num_heads, total_q]", {"logsumexp": sums[None]}),
        ("grad_logsumexp dim 1 is 5, expected total_q 6", {"grad_logsumexp": sums[:, :5]}),
    ]:
        refused(polyhead.attention_backward, polyhead.Error, words, good | arguments)


def test_an_error_touches_nothing():
    into = {name: np.full_like(GOOD[name], 7) for name in ("query", "key", "value")}
    for wrong in ({"scale": float("inf")}, {"out": GOOD["out"][:1]}, {"seqlens_k": np.array([9, 9])}):
        with pytest.raises(polyhead.Error):
            polyhead.attention_backward(**GOOD | wrong, into=into)
    assert all((x == 7).all() for x in into.values())


@needs_torch
def test_torch_tensors_that_cannot_be_written():
    lazy = torch.complex(torch.zeros(QUERY.shape), torch.zeros(QUERY.shape)).conj().imag
    assert lazy.is_neg()
    meta = torch.zeros(QUERY.shape, device="meta")
    for tensor, words in ((lazy, 'into["query"] is negated lazily'), (meta, 'into["query"]')):
        refused(polyhead.attention_backward, polyhead.Error, words, GOOD | {"into": {"query": tensor}})


@needs_jax
def test_jax_arrays_are_never_written():
    into = {"query": to_jax(QUERY)}
    words = 'into["query"] has type jaxlib'
    refused(polyhead.attention_backward, TypeError, words, GOOD | {"into": into})
