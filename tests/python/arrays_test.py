"""Arrays of every kind, in and out, without a copy: NumPy, torch, jax, strides, read-only and broadcast ones."""

import ml_dtypes
import numpy as np
import pytest

import polyhead
from optional import jax, needs_jax, needs_torch, torch


def operands(shape=(2, 5, 4, 8), seed=0, dtype=np.float32):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal(shape).astype(dtype) for _ in range(3))


def to_torch(x):
    x = np.ascontiguousarray(x)
    if x.dtype == ml_dtypes.bfloat16:
        return torch.from_numpy(x.view(np.int16)).view(torch.bfloat16)
    return torch.from_numpy(x)


def to_jax(x):
    return jax.numpy.asarray(x)


def to_numpy(x):
    if torch is not None and isinstance(x, torch.Tensor):
        return x.view(torch.int16).numpy().view(ml_dtypes.bfloat16) if x.dtype == torch.bfloat16 else x.numpy()
    return np.asarray(x)


KINDS = [
    pytest.param(np.asarray, id="numpy"),
    pytest.param(to_torch, id="torch", marks=needs_torch),
    pytest.param(to_jax, id="jax", marks=needs_jax),
]


@pytest.fixture
def jax_with_float64():
    if jax is None:
        yield
        return
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64], ids=str)
def test_kinds_give_the_same_bits_in_their_own_kind(make, dtype, jax_with_float64):
    query, key, value = operands(dtype=dtype)
    mask = np.random.default_rng(1).random((5, 5)) < 0.7
    bias = np.random.default_rng(2).standard_normal((4, 1, 5)).astype(np.float32)
    lengths = np.array([5, 3], np.int32)
    options = {"return_logsumexp": True, "return_weights": "mean", "return_column_sums": True}
    expected = polyhead.attention(query, key, value, attn_mask=mask, attn_bias=bias, seqlens_k=lengths, **options)
    results = polyhead.attention(
        make(query), make(key), make(value),
        attn_mask=make(mask), attn_bias=make(bias), seqlens_k=make(lengths), **options,
    )  # fmt: skip
    for got, want in zip(results, expected, strict=True):
        assert type(got) is type(make(query))
        got = to_numpy(got)
        assert got.dtype == want.dtype and got.shape == want.shape
        assert got.tobytes() == want.tobytes()


@needs_torch
@needs_jax
def test_kinds_mix():
    query, key, value = operands()
    expected = polyhead.attention(query, key, value)
    out = polyhead.attention(to_jax(query), to_torch(key), value)
    assert isinstance(out, jax.Array) and np.asarray(out).tobytes() == expected.tobytes()


@needs_torch
def test_any_dlpack_array_of_a_known_package():
    class Wrapped(torch.Tensor):
        pass

    query, key, value = operands()
    out = polyhead.attention(to_torch(query).as_subclass(Wrapped), to_torch(key), to_torch(value))
    assert isinstance(out, torch.Tensor)

    class Lone:  # __dlpack__ and nothing to make another with
        __dlpack__ = lambda self, **_: query.__dlpack__()  # noqa: E731

    assert polyhead.attention(query, Lone(), value).shape == query.shape
    with pytest.raises(TypeError, match="Lone"):
        polyhead.attention(Lone(), key, value)


@needs_torch
def test_torch_gradients_are_not_recorded_and_values_are_read():
    query, key, value = (to_torch(x) for x in operands())
    expected = polyhead.attention(query, key, value)
    out = polyhead.attention(query.requires_grad_(), key, torch.nn.Parameter(value))
    assert torch.equal(out, expected) and not out.requires_grad


@needs_torch
def test_torch_views_that_are_negated_lazily():
    query, key, _ = (to_torch(x) for x in operands())
    value = torch.complex(key, query).conj().imag
    assert value.is_neg()
    assert torch.equal(polyhead.attention(query, key, value), polyhead.attention(query, key, -query))


def test_results_are_aligned_contiguous_and_writable():
    for shape in [(1, 1, 1, 1), (2, 5, 4, 8), (1, 33, 3, 65)]:
        for array in polyhead.attention(*operands(shape), return_logsumexp=True, return_weights=True):
            assert array.ctypes.data % 64 == 0 and array.flags.c_contiguous and array.flags.writeable


@needs_torch
def test_torch_results_are_aligned():
    assert polyhead.attention(*(to_torch(x) for x in operands())).data_ptr() % 64 == 0


@needs_jax
def test_jax_results_are_aligned():
    assert polyhead.attention(*(to_jax(x) for x in operands())).unsafe_buffer_pointer() % 64 == 0


@pytest.mark.parametrize("make", KINDS)
def test_results_outlive_inputs(make):
    out = polyhead.attention(*(make(x) for x in operands()))
    expected = polyhead.attention(*operands())
    for seed in range(1, 20):
        polyhead.attention(*(make(x) for x in operands(seed=seed)))
    assert to_numpy(out).tobytes() == expected.tobytes()


def strided_views(x):
    """The same elements under other strides."""
    batch, seqlen, heads, dim = x.shape
    bhsd = np.ascontiguousarray(x.transpose(0, 2, 1, 3)).transpose(0, 2, 1, 3)
    gaps = np.full((batch, 2 * seqlen, 3 * heads, 2 * dim), np.nan, x.dtype)[:, ::2, ::3, ::2]
    gaps[:] = x
    backwards = np.ascontiguousarray(x[:, ::-1, :, ::-1])[:, ::-1, :, ::-1]
    return {"bhsd": bhsd, "fortran": np.asfortranarray(x), "gaps": gaps, "backwards": backwards}


@pytest.mark.parametrize("layout", ["bhsd", "fortran", "gaps", "backwards"])
def test_strides(layout):
    query, key, value = operands()
    expected = polyhead.attention(query, key, value)
    views = [strided_views(x)[layout] for x in (query, key, value)]
    np.testing.assert_allclose(polyhead.attention(*views), expected, rtol=0, atol=2e-6)


@needs_torch
@pytest.mark.parametrize("layout", ["bhsd", "fortran", "gaps"])  # torch has no negative strides
def test_strides_of_torch(layout):
    query, key, value = operands()
    expected = polyhead.attention(query, key, value)
    tensors = [torch.from_numpy(strided_views(x)[layout]) for x in (query, key, value)]
    np.testing.assert_allclose(polyhead.attention(*tensors), expected, rtol=0, atol=2e-6)


def test_packed_query_key_value():
    qkv = np.random.default_rng(3).standard_normal((2, 5, 3, 4, 8)).astype(np.float32)
    query, key, value = qkv[:, :, 0], qkv[:, :, 1], qkv[:, :, 2]
    expected = polyhead.attention(query.copy(), key.copy(), value.copy())
    np.testing.assert_allclose(polyhead.attention(query, key, value), expected, rtol=0, atol=2e-6)


def test_broadcast_inputs():
    query, key, value = operands()
    one = key[:1, :, :1]
    wide = np.broadcast_to(one, key.shape)
    expected = polyhead.attention(query, wide.copy(), value)
    np.testing.assert_allclose(polyhead.attention(query, wide, value), expected, rtol=0, atol=2e-6)
    mask = np.broadcast_to(np.random.default_rng(4).random((5, 1)) < 0.5, (2, 4, 5, 5))
    assert (
        polyhead.attention(query, key, value, attn_mask=mask).tobytes()
        == polyhead.attention(query, key, value, attn_mask=mask.copy()).tobytes()
    )


@needs_torch
def test_expanded_torch_inputs():
    query, key, value = operands()
    expected = polyhead.attention(query, np.broadcast_to(key[:1, :, :1], key.shape), value)
    tensor = torch.from_numpy(key[:1, :, :1].copy()).expand(key.shape)
    np.testing.assert_allclose(polyhead.attention(query, tensor, value), expected, rtol=0, atol=2e-6)


def test_read_only_inputs_are_taken_and_unchanged():
    arrays = operands()
    before = [x.tobytes() for x in arrays]
    for x in arrays:
        x.flags.writeable = False
    polyhead.attention(*arrays, attn_mask=np.broadcast_to(True, (5, 5)))
    assert [x.tobytes() for x in arrays] == before


def test_size_one_dimensions_may_have_any_stride():
    x = np.random.default_rng(5).standard_normal((1, 3, 1, 8)).astype(np.float32)
    strides = (99990001, 32, 3333331, 4)
    odd = np.lib.stride_tricks.as_strided(x, x.shape, strides, writeable=False)
    assert polyhead.attention(odd, odd, odd).tobytes() == polyhead.attention(x, x, x).tobytes()


@pytest.mark.parametrize("dtype", [">f4", ">f8", ">f2"])
def test_big_endian_is_refused(dtype):
    query, key, value = operands()
    with pytest.raises(polyhead.Error, match="query has dtype >f[248], must be in this machine's byte order"):
        polyhead.attention(query.astype(dtype), key, value)
    with pytest.raises(polyhead.Error, match="seqlens_k has dtype >i4"):
        polyhead.attention(query, key, value, seqlens_k=np.array([5, 5], ">i4"))


def test_fields_of_structured_arrays():
    record = np.zeros((2, 5, 4, 8), [("pad", np.float32), ("x", np.float32)])
    query, key, value = operands()
    record["x"] = key
    expected = polyhead.attention(query, key, value)
    np.testing.assert_allclose(polyhead.attention(query, record["x"], value), expected, rtol=0, atol=2e-6)
    packed = np.zeros((2, 5, 4, 8), [("pad", np.int8), ("x", np.float32)])
    with pytest.raises(polyhead.Error, match="key (has stride|starts at an address)"):
        polyhead.attention(query, packed["x"], value)


@needs_jax
def test_pending_jax_computations_are_waited_for():
    slow = jax.jit(lambda x: jax.lax.fori_loop(0, 200, lambda _, y: jax.numpy.sin(y @ y.T @ y) + x, x))
    x = to_jax(np.random.default_rng(6).standard_normal((300, 300)).astype(np.float32))
    pending = slow(x).reshape(1, 300, 1, 300)
    out = polyhead.attention(pending, pending, pending)
    done = np.asarray(pending)
    assert np.asarray(out).tobytes() == polyhead.attention(done, done, done).tobytes()


@needs_jax
def test_tracers_are_refused_clearly():
    x = jax.numpy.ones((1, 2, 1, 4))
    with pytest.raises((TypeError, polyhead.Error, jax.errors.JAXTypeError), match="query|DLPack|racer"):
        jax.jit(lambda x: polyhead.attention(x, x, x))(x)


@needs_torch
def test_meta_tensors_are_refused():
    x = torch.ones((1, 2, 1, 4), device="meta")
    with pytest.raises(polyhead.Error, match="query"):
        polyhead.attention(x, x, x)
