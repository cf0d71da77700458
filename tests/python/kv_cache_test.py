"""`KvCache` and `PageTable` through NumPy and torch; what is stored, bit by bit: tests/cache."""

import ml_dtypes
import numpy as np
import pytest
from optional import needs_torch, torch

import polyhead

RNG = np.random.default_rng(3)
G, H, D, DV = 2, 4, 32, 16
STORED = ("float32", "bfloat16", "float16", "int8", "float8_e4m3", "float8_e5m2", "int4")


def tokens(n):
    return RNG.standard_normal((n, G, D), np.float32), RNG.standard_normal((n, G, DV), np.float32)


def tables(positions, pairs):
    angles = np.arange(positions)[:, None] / 100 ** (np.arange(pairs) / pairs)
    return np.cos(angles).astype("f"), np.sin(angles).astype("f")


@pytest.mark.parametrize("dtype", STORED)
def test_attention_reads_what_append_wrote(dtype):
    lengths, page = np.array([11, 6]), 4
    cache = polyhead.KvCache.zeros(9, page, G, D, DV, key_dtype=dtype, key_group=16 if dtype == "int4" else 0)
    table = polyhead.PageTable(9, page)
    sequences = [table.add() for _ in lengths]
    query, meant = RNG.standard_normal((2, 1, H, D), np.float32), np.zeros((2, 2, 11, G, D), np.float32)
    for sequence, length in zip(sequences, lengths):
        assert table.resize(sequence, length) is None
        slots = np.array([table.slot(sequence, token) for token in range(length)])
        written = tokens(length)
        assert cache.append(*written, slots=slots) is None
        for side, x, stored in zip(meant, written, cache.read(slots)):
            side[sequence, :length, :, : x.shape[-1]] = stored
            assert stored.dtype == np.float32 and np.abs(stored - x).max() < (0.5 if dtype == "int4" else 0.3)
    if dtype in ("bfloat16", "float16"):
        query = query.astype(cache.key.dtype)
    got = polyhead.attention(query, **cache.arrays(), page_table=table.array(sequences), seqlens_k=lengths)
    meant = meant.astype(query.dtype)  # exactly
    whole = polyhead.attention(query, meant[0], np.ascontiguousarray(meant[1, ..., :DV]), seqlens_k=lengths)
    assert np.allclose(got.astype("f"), whole.astype("f"), atol=1e-5 if query.dtype == np.float32 else 0)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_and_hadamard_keep_scores(interleaved):
    n, rotary_dim = 7, 8
    cos, sin = tables(40, rotary_dim // 2)
    positions = RNG.permutation(40)[:n].astype(np.int32)
    key, value = tokens(n)
    query = RNG.standard_normal((n, H, D), np.float32)
    options = dict(slots=np.arange(n), positions=positions, cos=cos, sin=sin, query=query)
    turned = {}
    for hadamard in (False, True):
        cache = polyhead.KvCache.zeros(1, n, G, D, DV, rotary_dim=rotary_dim, interleaved=interleaved, hadamard=hadamard)
        q = cache.append(key, value, **options)
        turned[hadamard] = polyhead.attention(q[None], cache.key, cache.value)
    pairs = np.arange(rotary_dim).reshape((-1, 2) if interleaved else (2, -1))
    first, second = pairs.T if interleaved else pairs
    c, s = cos[positions][:, None], sin[positions][:, None]

    def rotate(x):
        x = x.copy()
        x[..., first], x[..., second] = x[..., first] * c - x[..., second] * s, x[..., first] * s + x[..., second] * c
        return x

    expected = polyhead.attention(rotate(query)[None], rotate(key)[None], value[None])
    for got in turned.values():
        assert np.allclose(got, expected, atol=1e-5)


def test_forks_share_pages_until_they_are_written_to():
    cache, table = polyhead.KvCache.zeros(4, 4, G, D, DV), polyhead.PageTable(4, 4)
    first = table.add()
    table.resize(first, 6)
    cache.append(*tokens(6), slots=np.array([table.slot(first, token) for token in range(6)]))
    before = cache.read(np.arange(6))
    second = table.fork(first)
    assert table.array([first, second]).tolist() == [[0, 1], [0, 1]] and table.num_free == 2
    cache.copy(*table.resize(second, 7))
    cache.append(*tokens(1), slots=np.array([table.slot(second, 6)]))
    for was, now, forked in zip(before, cache.read(np.arange(6)), cache.read(np.array([0, 1, 2, 3, 8, 9]))):
        assert np.array_equal(was, now) and np.array_equal(was, forked)
    with pytest.raises(polyhead.Error, match="needs 3 more pages, 1 are free"):
        table.resize(second, 17)
    assert table.length(second) == 7 and table.pages(second) == [0, 2]
    table.remove(first)
    assert table.num_free == 2 and table.length(first) == -1
    with pytest.raises(polyhead.Error, match="sequence is 0, there is none of that number"):
        table.fork(first)


def test_extend_tells_where_new_tokens_stand():
    table = polyhead.PageTable(6, 4)
    first = table.add()
    new = table.extend([first], [6])
    assert new.slots.tolist() == [[0, 1, 2, 3, 4, 5]] and new.positions.tolist() == [[0, 1, 2, 3, 4, 5]]
    assert new.copies is None and new.seqlens_q.tolist() == new.seqlens_k.tolist() == [6]
    second, third = table.fork(first), table.fork(first)
    new = table.extend([first, second, third], [3, 1, 0])  # two write to the page that three hold: each takes another
    assert [each.tolist() for each in new.copies] == [[4, 5, 4, 5], [8, 9, 16, 17]]
    assert new.slots.tolist() == [[10, 11, 12], [18, -1, -1], [-1, -1, -1]]
    assert new.positions.tolist() == [[6, 7, 8]] * 3 and new.seqlens_k.tolist() == [9, 7, 6]
    assert new.page_table.tolist() == [[0, 2, 3], [0, 4, 0], [0, 1, 0]] and new.arguments().keys() == {"page_table", "slots", "seqlens_q", "seqlens_k"}
    for sequences, counts, message in (
        ([first, third], [4, 3], r"counts are \[4, 3\], which need 2 more pages, 1 are free"),
        ([second, 9], [1, 1], "sequence is 9, there is none of that number"),
        ([second, second], [1, 1], "each once, with its count"),
        ([second], [1, 1], "each once, with its count"),
        ([second], [-1], r"counts are \[-1\], must not be negative"),
    ):
        with pytest.raises(polyhead.Error, match=message):
            table.extend(sequences, counts)
    assert [table.length(each) for each in (first, second, third)] == [9, 7, 6] and table.num_free == 1
    assert table.extend([third], np.array([2])).copies is None  # nobody else holds its last page now
    assert table.extend([], []).slots.shape == (0, 0)


def test_what_is_refused():
    key, value = tokens(3)
    cache = polyhead.KvCache.zeros(2, 4, G, D, DV, key_dtype="int8", rotary_dim=4)
    cos, sin = tables(10, 2)
    turn = dict(positions=np.arange(3), cos=cos, sin=sin)
    before = {name: array.copy() for name, array in cache.arrays().items()}
    for change, message in (
        ({"slots": np.array([0, 8, 1])}, r"slots\[1\] is 8, must be -1 to 7"),
        ({"slots": np.array([0, 1, 1])}, "slots holds 1 twice"),
        ({"slots": np.array([0.0, 1, 2])}, "slots has dtype float64, must be int32 or int64|slots is float64"),
        ({"positions": np.array([0, 10, 1])}, r"positions\[1\] is 10"),
        ({"positions": None}, "positions is missing"),
        ({"cos": cos[:, :1]}, "cos"),
        ({"key": key[:, :1]}, "key"),
        ({"value": value.astype("d")}, "value"),
    ):
        options = {"key": key, "value": value, "slots": np.arange(3)} | turn | change
        with pytest.raises(polyhead.Error, match=message):
            cache.append(options.pop("key"), options.pop("value"), **options)
    for name, array in cache.arrays().items():
        assert np.array_equal(array, before[name])
    read_only = np.zeros((2, 4, G, D), np.float32)
    read_only.flags.writeable = False
    for arrays, message in (
        ((cache.key, cache.value), "pool.key_scales is missing"),
        ((np.zeros((2, 4, G, D), "f"), np.zeros((2, 4, G, D), "f"), cache.key_scales), "pool.key_scales is given, but the cache's dtype has no scales"),
        ((read_only, cache.value), "key is read-only"),
        ((np.zeros((2, 4, G, D), "f"), np.zeros((1, 4, G, D), "f")), "pool.value"),
        ((cache.value[0], cache.value), "key has 3 dimensions, must have 4"),
    ):
        with pytest.raises(polyhead.Error, match=message):
            polyhead.KvCache(*arrays)
    for options, message in (
        ({"key_dtype": "int5"}, "key_dtype is 'int5', must be one of float32"),
        ({"key_group": 24, "key_dtype": "int8"}, "key_group is 24, must be 0 or divide the head dim 32"),
        ({"key_group": 8, "key_dtype": "int8"}, "key_group is 8, must be 0"),
        ({"key_group": 16}, "key_group is 16, but float32 has no scales"),
        ({"rotary_dim": 3}, "rotary_dim is 3"),
        ({"head_dim": -2}, "must not be negative"),
    ):
        with pytest.raises(polyhead.Error, match=message):
            polyhead.KvCache.zeros(**dict(num_pages=2, page_size=4, num_heads_kv=G, head_dim=D) | options)


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "int8", "float8_e4m3fn"])
def test_torch_tensors(dtype):
    key, value = (torch.from_numpy(x).bfloat16() for x in tokens(5))
    scales = None if dtype == "bfloat16" else torch.zeros(1, 8, G, 1)
    pool = [torch.zeros(1, 8, G, dim, dtype=getattr(torch, dtype)) for dim in (D, DV)]
    cache = polyhead.KvCache(*pool, scales, None if scales is None else scales.clone())
    cache.append(key, value, slots=torch.tensor([4, 0, 3, 1, 2]))
    stored = cache.read(torch.tensor([4, 0, 3, 1, 2]))
    numpy = polyhead.KvCache.zeros(1, 8, G, D, DV, key_dtype=dtype.removesuffix("fn"))
    numpy.append(*(x.float().numpy().astype(ml_dtypes.bfloat16) for x in (key, value)), slots=np.array([4, 0, 3, 1, 2]))
    for tensor, array in zip(stored, numpy.read(np.array([4, 0, 3, 1, 2]))):
        assert isinstance(tensor, torch.Tensor) and np.array_equal(tensor.numpy(), array)
