"""`page_table`: keys and values in pages, through NumPy and torch; src and tests/attention show the numbers."""

import numpy as np
import pytest
from optional import needs_torch, torch

import polyhead

RNG = np.random.default_rng(3)
B, P, SIZE, H, G, D = 3, 4, 8, 4, 2, 16


def pool():
    """Keys and values of three sequences, dense; the same in pages of a pool; its table and lengths."""
    dense = [RNG.standard_normal((B, P * SIZE, G, dim), "f") for dim in (D, 12)]
    places = RNG.permutation(B * P + 2)[: B * P].reshape(B, P)
    pages = [np.full((B * P + 2, SIZE, G, x.shape[-1]), np.nan, "f") for x in dense]
    for paged, x in zip(pages, dense):
        paged[places] = x.reshape(B, P, SIZE, G, -1)
    lengths = np.array([P * SIZE, 0, 11])
    table = places.copy()
    table[1], table[2, 2:] = -1, 1 << 40  # behind the lengths
    return dense, pages, table, lengths


@pytest.mark.parametrize("queries", [1, 40])
def test_the_bits_of_dense_keys(queries):
    dense, pages, table, lengths = pool()
    query = RNG.standard_normal((B, queries, H, D), "f")
    options = dict(causal=True, align="bottom_right", seqlens_k=lengths, return_logsumexp=True)
    expected = polyhead.attention(query, *dense, **options)
    for got in (
        polyhead.attention(query, *pages, page_table=table, **options),
        polyhead.attention(query, *(x.swapaxes(1, 2).copy().swapaxes(1, 2) for x in pages), page_table=table, **options),
    ):
        assert all(np.array_equal(a, b) for a, b in zip(got, expected))
    assert not polyhead.explain(query, *pages, page_table=table, **options).reasons["reference"]


def test_packed_queries():
    dense, pages, table, lengths = pool()
    query, cu_seqlens_q = RNG.standard_normal((9, H, D), "f"), np.array([0, 4, 5, 9])
    options = dict(page_table=table, seqlens_k=lengths, causal=True, align="bottom_right")
    out = polyhead.attention(query, *pages, cu_seqlens_q=cu_seqlens_q, **options)
    for b in range(B):
        rows = slice(cu_seqlens_q[b], cu_seqlens_q[b + 1])
        keys = (x[b : b + 1, : lengths[b]] for x in dense)
        alone = polyhead.attention(query[None, rows], *keys, causal=True, align="bottom_right")
        assert np.allclose(out[rows], alone[0], atol=1e-6)


def test_what_is_refused():
    _, pages, table, lengths = pool()
    query = np.ones((B, 1, H, D), "f")
    for options, message in (
        ({}, "page_table needs seqlens_k"),
        ({"seqlens_k": lengths + 1}, r"seqlens_k\[0\] is 33, must be 0 to seqlen_k 32"),
        ({"seqlens_k": lengths + [0, 1, 0]}, r"page_table\[1, 0\] is -1, must be 0 to num_pages - 1 = 13"),
        ({"seqlens_k": lengths, "cu_seqlens_k": lengths}, "cu_seqlens_k is given with page_table"),
    ):
        with pytest.raises(polyhead.Error, match=message):
            polyhead.attention(query, *pages, page_table=table, **options)
    with pytest.raises(polyhead.Error, match="key dim 1 is 0, must be 1 or more"):
        polyhead.attention(query, *(x[:, :0] for x in pages), page_table=table, seqlens_k=lengths)


@needs_torch
def test_torch():
    import polyhead.torch

    dense, pages, table, lengths = pool()
    dense, pages = ([torch.from_numpy(x) for x in part] for part in (dense, pages))
    table, lengths = torch.from_numpy(table), torch.from_numpy(lengths)
    query = torch.randn(B, 2, H, D)
    options = dict(causal=True, align="bottom_right", seqlens_k=lengths)
    expected = polyhead.torch.attention(query, *dense, return_logsumexp=True, **options)
    for attention in (polyhead.torch.attention, torch.compile(polyhead.torch.attention, backend="aot_eager")):
        got = attention(query, *pages, page_table=table, return_logsumexp=True, **options)
        assert all(torch.equal(a, b) for a, b in zip(got, expected))
    packed = dict(page_table=table, cu_seqlens_q=torch.tensor([0, 2, 4, 6]), **options)
    out = polyhead.torch.attention(query.flatten(0, 1), *pages, **packed)
    assert torch.allclose(out.view(expected[0].shape), expected[0], atol=1e-6)
    with pytest.raises(polyhead.Error, match="paged keys have none, take torch.no_grad"):
        polyhead.torch.attention(query.requires_grad_(), *pages, page_table=table, **options)
    with pytest.raises(polyhead.Error, match="score and mask cannot be given with page_table"):
        polyhead.torch.attention(query.detach(), *pages, page_table=table, score="score * 2", **options)
    with pytest.raises(TypeError, match="page_table has type ndarray"):
        polyhead.torch.attention(query.detach(), *pages, page_table=table.numpy(), **options)
