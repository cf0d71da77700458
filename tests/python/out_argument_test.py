"""out= of polyhead.attention: the caller's array, in any layout, is what is written and returned."""

import ml_dtypes
import numpy as np
import pytest

import polyhead


def operands(dtype, packed=False, seed=0):
    rng = np.random.default_rng(seed)
    shapes = ((5, 4, 8), (7, 2, 8), (7, 2, 6)) if packed else ((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6))
    return tuple(rng.standard_normal(shape).astype(dtype) for shape in shapes)


def layouts(shape, dtype):
    """Arrays of that shape, all NaN: contiguous, heads first in memory, every second row of a larger one."""
    nan = np.full(shape, np.nan, dtype)
    yield nan
    yield np.moveaxis(np.moveaxis(nan, -2, 0).copy(), 0, -2)
    yield np.repeat(nan, 2, axis=-3)[..., ::2, :, :]


@pytest.mark.parametrize("dtype", [np.float32, np.float64, np.float16, ml_dtypes.bfloat16])
def test_out_is_written_in_place(dtype):
    inputs = operands(dtype)
    expected, logsumexp = polyhead.attention(*inputs, return_logsumexp=True)
    for out in layouts(expected.shape, dtype):
        assert polyhead.attention(*inputs, out=out) is out
        np.testing.assert_array_equal(out, expected)
        returned = polyhead.attention(*inputs, out=out, return_logsumexp=True)
        assert returned[0] is out
        np.testing.assert_array_equal(returned[1], logsumexp)


def test_packed_out():
    inputs, starts = operands(np.float32, packed=True), np.array([0, 2, 5])
    options = {"cu_seqlens_q": starts, "cu_seqlens_k": np.array([0, 3, 7])}
    expected = polyhead.attention(*inputs, **options)
    for out in layouts(expected.shape, np.float32):
        assert polyhead.attention(*inputs, **options, out=out) is out
        np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("dtype", [np.float16, ml_dtypes.bfloat16])
def test_out_in_float32_is_the_sums_before_rounding(dtype):
    inputs = operands(dtype)
    expected = polyhead.attention(*inputs, out_dtype="float32")
    for options in ({}, {"out_dtype": "float32"}):
        out = np.full(expected.shape, np.nan, np.float32)
        polyhead.attention(*inputs, **options, out=out)
        np.testing.assert_array_equal(out, expected)


def test_out_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed: its tensors as out are left out")
    inputs = operands(np.float32)
    out = torch.full((2, 5, 4, 6), torch.nan)
    assert polyhead.attention(*inputs, out=out) is out
    np.testing.assert_array_equal(out.numpy(), polyhead.attention(*inputs))


def test_refusals_leave_out_as_it_was():
    query, key, value = operands(np.float32)
    good = np.full((2, 5, 4, 6), 7, np.float32)
    read_only = good.copy()
    read_only.flags.writeable = False
    both = np.full((2, 5, 2, 4, 6), 7, np.float32)
    for out, words in (
        (np.full((2, 5, 4, 8), 7, np.float32), "out dim 3 is 8, expected head_dim_v 6"),
        (np.full((5, 4, 6), 7, np.float32), "^out has 3 dimensions"),
        (np.full((2, 5, 4, 6), 7, np.float64), "^out is float64, expected float32"),
        (read_only, "^out is read-only"),
        (np.broadcast_to(both[:, :, :1, :1], (2, 5, 1, 4, 6))[:, :, 0], "^out"),
        (query[..., :6], "^out overlaps"),
    ):
        before = np.array(out)
        with pytest.raises(polyhead.Error, match=words):
            polyhead.attention(query, key, value, out=out)
        np.testing.assert_array_equal(out, before)
    with pytest.raises(TypeError, match="^out has type list"):
        polyhead.attention(query, key, value, out=[1.0])
    with pytest.raises(polyhead.Error, match="^out is float32, expected float64"):
        polyhead.attention(*operands(np.float64), out=good)
    assert (good == 7).all()
    assert polyhead.explain(query, key, value, out=good).kernel
