"""`key_scales`, `value_scales`: keys and values as caches store them, through NumPy and torch; numbers: tests/attention."""

import ml_dtypes
import numpy as np
import pytest
from optional import needs_torch, torch

import polyhead

RNG = np.random.default_rng(5)
B, S, H, G, D = 2, 40, 4, 2, 32
FORMATS = {"int8": 127, "float8_e4m3fn": 448, "float8_e5m2": 57344, "uint8": 7}


def stored(x, name, group=None):
    """(what is stored, its scales, what it stands for) of [..., D]."""
    groups = x.reshape(*x.shape[:-1], -1, group or x.shape[-1])
    scales = np.abs(groups).max(-1) / FORMATS[name]
    scales = scales.astype("e" if name == "uint8" else "f")
    numbers = np.clip(groups / scales[..., None].astype("f"), -FORMATS[name], FORMATS[name])
    if name.startswith("float8"):
        numbers = numbers.astype(getattr(ml_dtypes, name))
    else:
        numbers = np.rint(numbers).astype(np.int8)
    meant = (numbers.astype("f") * scales[..., None].astype("f")).reshape(x.shape)
    numbers = numbers.reshape(x.shape)
    if name == "uint8":
        numbers = (numbers[..., ::2] & 15 | numbers[..., 1::2] << 4).view(np.uint8)
    return numbers, scales, meant


def operands(name, group=None):
    query = RNG.standard_normal((B, 3, H, D), "f")
    sides = [stored(RNG.standard_normal((B, S, G, dim), "f"), name, group) for dim in (D, 16)]
    numbers, scales, meant = zip(*sides)
    return query, numbers, dict(zip(("key_scales", "value_scales"), scales)), meant


@pytest.mark.parametrize("name", FORMATS)
def test_what_is_stored_is_meant(name):
    for group in (None, 16):
        query, numbers, scales, meant = operands(name, group)
        expected = polyhead.attention(query, *meant, seqlens_k=np.array([S, 7]))
        got = polyhead.attention(query, *numbers, **scales, seqlens_k=np.array([S, 7]))
        assert np.allclose(got, expected, atol=1e-6)
        assert not polyhead.explain(query, *numbers, **scales).reasons["reference"]


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("name", ["float8_e4m3fn", "float8_e5m2"])
def test_every_byte_of_float8(name, dtype):
    numbers = np.arange(256, dtype=np.uint8).view(getattr(ml_dtypes, name))
    meant, finite = numbers.astype("f"), np.isfinite(numbers.astype("f"))
    bytes_of_one_key = [np.where(seen, numbers, 0).astype(numbers.dtype) for seen in (finite, True)]
    key, value = (np.broadcast_to(x, (1, 512, 1, 256)) for x in bytes_of_one_key)
    scales = np.ones((1, 512, 1, 1), "f")
    query = np.eye(256, dtype="f").reshape(1, 1, 256, 256).astype(dtype if dtype == "float32" else ml_dtypes.bfloat16)
    options = {"key_scales": scales, "value_scales": scales, "seqlens_k": np.array([1]), "scale": 1.0}
    taken = [k for k, reason in polyhead.explain(query, key, value, **options).reasons.items() if not reason]
    assert len(taken) > 2
    for kernel in taken:
        out, logsumexp = polyhead.attention(query, key, value, kernel=kernel, return_logsumexp=True, **options)
        assert np.array_equal(logsumexp.ravel(), np.where(finite, meant, 0)), kernel
        assert np.array_equal(out[0, 0].astype("f"), np.broadcast_to(meant, (256, 256)), equal_nan=True), kernel


def test_pages_and_one_side_alone():
    query, (key, _), scales, (meant, _) = operands("int8")
    value = RNG.standard_normal((B, S, G, D), "f")
    table, lengths = np.arange(B * 4).reshape(B, 4), np.array([S, 13])
    in_pages = [x.reshape(B * 4, S // 4, *x.shape[2:]) for x in (key, value, scales["key_scales"])]
    got = polyhead.attention(query, *in_pages[:2], key_scales=in_pages[2], page_table=table, seqlens_k=lengths)
    assert np.array_equal(got, polyhead.attention(query, key, value, key_scales=scales["key_scales"], seqlens_k=lengths))
    assert np.allclose(got, polyhead.attention(query, meant, value, seqlens_k=lengths), atol=1e-6)


def test_what_is_refused():
    query, numbers, scales, meant = operands("int8")
    wrong = {"key_scales": scales["key_scales"].astype("d"), "value_scales": scales["value_scales"]}
    for arrays, options, message in (
        (numbers, {}, "key_scales is missing"),
        (numbers, wrong, "key_scales is float64, expected float32"),
        (numbers, scales | {"key_scales": np.ones((B, S, G, 3), "f")}, "key_group is 10, must be 0"),
        (meant, scales, "key_scales is given, but the plan was made without"),
        ((numbers[0].astype(np.int16), meant[1]), {}, "key has dtype int16, must be as query, or with scales int8"),
    ):
        with pytest.raises(polyhead.Error, match=message):
            polyhead.attention(query, *arrays, **options)
    out, logsumexp = polyhead.attention(query, *meant, return_logsumexp=True)
    with pytest.raises(polyhead.Error, match="key is int8: backward takes query, key and value of one dtype"):
        polyhead.attention_backward(out, query, *numbers, out, logsumexp)


@needs_torch
@pytest.mark.parametrize("name", FORMATS)
def test_torch(name):
    import polyhead.torch

    query, numbers, scales, _ = operands(name, 16)
    expected = polyhead.attention(query, *numbers, **scales)
    numbers = [torch.from_numpy(x.view(np.uint8)).view(getattr(torch, name)) for x in numbers]
    scales = {key: torch.from_numpy(x) for key, x in scales.items()}
    query = torch.from_numpy(query)
    for attention in (polyhead.torch.attention, torch.compile(polyhead.torch.attention, backend="aot_eager")):
        got = attention(query, *numbers, **scales)
        assert np.array_equal(got.numpy(), expected)
    with pytest.raises(polyhead.Error, match="keys and values with scales have none, take torch.no_grad"):
        polyhead.torch.attention(query.requires_grad_(), *numbers, **scales)
    with pytest.raises(polyhead.Error, match="score and mask cannot be given with key_scales"):
        polyhead.torch.attention(query.detach(), *numbers, **scales, score="score * 2")
