"""Results in float32 beside 16-bit inputs (out_dtype, grad_dtype) and shards that draw the whole's dropout mask."""

import ml_dtypes
import numpy as np
import pytest

import polyhead
from arrays_test import to_numpy, to_torch
from errors_test import refused
from optional import needs_torch, torch

BF16 = ml_dtypes.bfloat16
HALVES = pytest.mark.parametrize("dtype", [BF16, np.float16], ids=["bfloat16", "float16"])
EXACT = "cpu_generic" if "cpu_generic" in polyhead.kernels() else "reference"  # rounds to 16 bits at the end alone


def operands(dtype, batch=2, seqlen_q=6, seqlen_k=40, heads=4, heads_kv=2, dim=16, seed=0):
    rng = np.random.default_rng(seed)
    query = rng.standard_normal((batch, seqlen_q, heads, dim)).astype(dtype)
    key, value = (rng.standard_normal((batch, seqlen_k, heads_kv, dim)).astype(dtype) for _ in range(2))
    return query, key, value


@HALVES
@pytest.mark.parametrize("name", ["float32", np.float32, np.dtype(np.float32)], ids=["text", "class", "dtype"])
def test_out_is_what_16_bits_round(dtype, name):
    query, key, value = operands(dtype)
    options = {"causal": True, "align": "bottom_right", "kernel": EXACT}
    out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True, **options)
    wide, same = polyhead.attention(query, key, value, return_logsumexp=True, out_dtype=name, **options)
    assert wide.dtype == np.float32 and (same == logsumexp).all()
    assert (wide.astype(dtype) == out).all() and (wide != out.astype(np.float32)).mean() > 0.9
    exact = polyhead.attention(*(x.astype(np.float64) for x in (query, key, value)), **(options | {"kernel": None}))
    assert np.abs(wide - exact).max() < 1e-6 < np.abs(out.astype(np.float64) - exact).max()
    assert polyhead.attention(query, key, value, out_dtype=dtype).dtype == dtype


@HALVES
def test_gradients_are_what_16_bits_round_and_add_up(dtype):
    query, key, value = operands(dtype)
    out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True, kernel=EXACT)
    grad_out = np.random.default_rng(1).standard_normal(out.shape).astype(dtype)
    arguments = (grad_out, query, key, value, out, logsumexp)
    narrow = polyhead.attention_backward(*arguments, kernel=EXACT)
    wide = polyhead.attention_backward(*arguments, grad_dtype="float32", kernel=EXACT)
    for name, grad in wide.items():
        assert grad.dtype == np.float32 and (grad.astype(dtype) == narrow[name]).all()
        assert (grad != narrow[name].astype(np.float32)).mean() > 0.9
    into = {name: grad.copy() for name, grad in wide.items()}
    polyhead.attention_backward(*arguments, grad_dtype="float32", into=into, accumulate=True, kernel=EXACT)
    for name, grad in into.items():
        np.testing.assert_allclose(grad, 2 * wide[name], rtol=1e-6)
    refused(polyhead.attention_backward, polyhead.Error, f'into["query"] is {np.dtype(dtype)}, must be float32 as grad_dtype',
            dict(zip(("grad_out", "query", "key", "value", "out", "logsumexp"), arguments), grad_dtype="float32",
                 needs=["query"], into={"query": narrow["query"]}))  # fmt: skip


@HALVES
def test_backward_reads_float32_out_and_grad_out(dtype):
    query, key, value = operands(dtype)
    out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True, out_dtype="float32")
    grad_out = np.random.default_rng(1).standard_normal(out.shape).astype(np.float32)
    grads = polyhead.attention_backward(grad_out, query, key, value, out, logsumexp, grad_dtype="float32")
    wide = [x.astype(np.float64) for x in (query, key, value)]
    exact_out, exact_logsumexp = polyhead.attention(*wide, return_logsumexp=True)
    exact = polyhead.attention_backward(grad_out.astype(np.float64), *wide, exact_out, exact_logsumexp)
    for name, grad in grads.items():
        assert np.abs(grad - exact[name]).max() < 1e-5


def test_refusals():
    query, key, value = operands(BF16)
    good = {"query": query, "key": key, "value": value}
    for out_dtype, words in [
        ("float16", "out_dtype is float16, must be bfloat16 as dtype, or float32"),
        (np.float64, "out_dtype is float64, must be bfloat16 as dtype, or float32"),
        ("int8", "out_dtype is int8, must be float32 or the dtype of query"),
        (np.int8, "out_dtype is int8, must be float32 or the dtype of query"),
    ]:
        refused(polyhead.attention, polyhead.Error, words, good | {"out_dtype": out_dtype})
    refused(polyhead.attention, TypeError, "out_dtype has type int, must be float32 or", good | {"out_dtype": 3})
    wide = {name: each.astype(np.float32) for name, each in good.items()}
    refused(polyhead.attention, polyhead.Error, "out_dtype is bfloat16, must be float32 as dtype",
            wide | {"out_dtype": "bfloat16"})  # fmt: skip


def test_merge_takes_a_mix_of_dtypes():
    query, key, value = operands(BF16)
    parts = [
        polyhead.attention(query, key[:, rows], value[:, rows], return_logsumexp=True, out_dtype=out_dtype, kernel=EXACT)
        for rows, out_dtype in [(slice(0, 16), "float32"), (slice(16, 40), None)]
    ]
    outs, logsumexps = zip(*parts)
    assert [each.dtype for each in outs] == [np.float32, BF16]
    out, logsumexp = polyhead.merge(outs, logsumexps)
    wide, same = polyhead.merge([each.astype(np.float32) for each in outs], logsumexps)
    assert out.dtype == np.float32 and (out == wide).all() and (logsumexp == same).all()
    narrow, _ = polyhead.merge(outs[::-1], logsumexps[::-1])
    assert narrow.dtype == BF16
    grad_outs, _ = polyhead.merge_backward(np.ones_like(out), outs, logsumexps, out, logsumexp)
    assert [each.dtype for each in grad_outs] == [np.float32, BF16]


ORIGIN = polyhead.DropoutOrigin(first_head=1 * 4 + 2, num_heads=4, first_query=3, first_key=16)
SHARD = np.s_[1:, 3:, 2:], np.s_[1:, 16:, 1:]  # of queries, of keys
DROPOUT = {"dropout_p": 0.4, "dropout_seed": 7, "dropout_offset": 3}


def test_a_shard_draws_the_mask_of_the_whole():
    whole = polyhead.dropout_mask((2, 4, 6, 40), 0.4, 7, 3)
    shard = polyhead.dropout_mask((1, 2, 3, 24), 0.4, 7, 3, ORIGIN)
    assert (shard == whole[1:, 2:, 3:, 16:]).all()
    assert (shard != polyhead.dropout_mask((1, 2, 3, 24), 0.4, 7, 3)).any()
    assert (polyhead.dropout_mask((1, 2, 3, 24), 0.4, 7, 3, tuple(ORIGIN)) == shard).all()
    for origin, kind, words in [
        (ORIGIN._replace(first_key=4), polyhead.Error, "^dropout_origin.first_key is 4, must be a multiple of 8"),
        (ORIGIN[:3], polyhead.Error, "dropout_origin has 3 elements"),
        (5, TypeError, "dropout_origin has type int"),
        ((0, 0, "a", 0), TypeError, "dropout_origin.first_query has type str"),
    ]:
        with pytest.raises(kind, match=words):
            polyhead.dropout_mask((1, 2, 3, 24), 0.4, 7, 3, origin)


def shard_and_whole():
    """Weights after dropout of a shard, which sees its own keys alone, and those of the whole, which sees these too."""
    query, key, value = operands(np.float32)
    rows, keys = SHARD
    mask = np.arange(40) >= 16
    out, logsumexp, weights = polyhead.attention(
        query, key, value, attn_mask=mask, return_logsumexp=True, return_weights=True, **DROPOUT
    )
    whole = out[rows], logsumexp[1:, 2:, 3:], weights[1:, 2:, 3:, 16:]
    return (query[rows], key[keys], value[keys]), whole


def test_attention_of_a_shard():
    shard, (whole_out, whole_logsumexp, whole_weights) = shard_and_whole()
    options = DROPOUT | {"dropout_origin": ORIGIN}
    out, logsumexp, weights = polyhead.attention(*shard, return_logsumexp=True, return_weights=True, **options)
    np.testing.assert_allclose(weights, whole_weights, rtol=1e-5)
    np.testing.assert_allclose(out, whole_out, rtol=1e-5, atol=1e-6)
    grads = polyhead.attention_backward(np.ones_like(out), *shard, out, logsumexp, needs=["value"], **options)
    by_weights = weights[0].sum(axis=(0, 1))  # both heads read one value
    np.testing.assert_allclose(grads["value"][0, :, 0], np.repeat(by_weights[:, None], 16, 1), rtol=1e-5)


@needs_torch
def test_torch_attention_of_a_shard_and_its_gradients():
    import polyhead.torch

    shard, (whole_out, _, _) = shard_and_whole()
    query, key, value = (to_torch(np.ascontiguousarray(x)).requires_grad_() for x in shard)
    options = DROPOUT | {"dropout_origin": ORIGIN}
    out, logsumexp, weights = polyhead.torch.attention(
        query, key, value, return_logsumexp=True, return_weights=True, **options
    )
    np.testing.assert_allclose(to_numpy(out.detach()), whole_out, rtol=1e-5, atol=1e-6)
    out.sum().backward()
    expected = polyhead.attention_backward(
        np.ones(out.shape, np.float32), *shard, to_numpy(out.detach()), to_numpy(logsumexp.detach()), **options
    )
    for tensor, name in ((query, "query"), (key, "key"), (value, "value")):
        np.testing.assert_allclose(to_numpy(tensor.grad), expected[name], rtol=1e-5, atol=1e-6)
    again = polyhead.torch.attention_backward(
        torch.ones_like(out), query.detach(), key.detach(), value.detach(), out.detach(), logsumexp.detach(), **options
    )
    assert torch.equal(again["query"], query.grad)
    # Weights are differentiated in torch's own operations, which draw the mask by the operator dropout_mask.
    np.testing.assert_allclose(
        to_numpy(weights.detach()), polyhead.attention(*shard, return_weights=True, **options)[1], rtol=1e-5
    )
    with pytest.raises(polyhead.Error, match="dropout_origin has 2 elements"):
        polyhead.torch.attention(query, key, value, **DROPOUT, dropout_origin=(1, 2))


@needs_torch
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_torch_out_in_float32_with_gradients(dtype):
    import polyhead.torch

    dtype = getattr(torch, dtype)
    inputs = [to_torch(x).to(dtype).requires_grad_() for x in operands(np.float32)]
    out = polyhead.torch.attention(*inputs, out_dtype=torch.float32, kernel=EXACT)
    assert out.dtype == torch.float32
    assert torch.equal(out.to(dtype), polyhead.torch.attention(*inputs, kernel=EXACT))
    grad_out = torch.randn(out.shape, generator=torch.Generator().manual_seed(1))
    out.backward(grad_out)
    exact = [x.detach().double().requires_grad_() for x in inputs]
    polyhead.torch.attention(*exact).backward(grad_out.double())
    for got, want in zip(inputs, exact):
        assert got.grad.dtype == dtype
        assert (got.grad.double() - want.grad).abs().max() <= torch.finfo(dtype).eps * want.grad.abs().max()
    compiled = torch.compile(lambda *x: polyhead.torch.attention(*x, out_dtype=torch.float32, kernel=EXACT),
                             backend="aot_eager", fullgraph=True)  # fmt: skip
    assert torch.equal(compiled(*inputs), out)
    arrays = polyhead.attention(*(x.detach() for x in inputs), out_dtype=torch.float32, kernel=EXACT)
    assert arrays.dtype == torch.float32 and torch.equal(arrays, out)
    with pytest.raises(polyhead.Error, match="out_dtype is torch.float64, must be"):
        polyhead.torch.attention(*inputs, out_dtype=torch.float64)
    parts = [polyhead.torch.attention(inputs[0], inputs[1][:, rows], inputs[2][:, rows], return_logsumexp=True,
                                      out_dtype=wide)
             for rows, wide in ((slice(0, 24), torch.float32), (slice(24, 40), None))]  # fmt: skip
    merged, _ = polyhead.torch.merge([out for out, _ in parts], [logsumexp for _, logsumexp in parts])
    assert merged.dtype == torch.float32
    merged.sum().backward()
