"""torch.nn.attention.varlen on the CPU, which torch has for GPUs alone."""

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead
import polyhead.torch
from torch_switch_judge import assert_taken, counted

varlen = pytest.importorskip("torch.nn.attention.varlen", reason="this torch has no varlen_attn")

LENGTHS_Q, LENGTHS_K = (5, 1, 0, 7), (7, 3, 2, 7)


def starts(lengths):
    return torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)


def operands(heads_k=4, dtype=torch.float32):
    torch.manual_seed(0)
    total_q, total_k = sum(LENGTHS_Q), sum(LENGTHS_K)
    shapes = [(total_q, 4, 8), (total_k, heads_k, 8), (total_k, heads_k, 8)]
    return [torch.randn(shape).to(dtype).requires_grad_() for shape in shapes]


def one_by_one(query, key, value, lengths_k=LENGTHS_K, slots=LENGTHS_K, **options):
    """Each sequence by `polyhead.torch.attention`, FlashAttention's bottom-right alignment."""
    outs = []
    rows_q = query.split(LENGTHS_Q)
    for q, k, v, used in zip(rows_q, key.split(slots), value.split(slots), lengths_k):
        place = {"align": "bottom_right"} if options.get("window") else {}
        outs.append(polyhead.torch.attention(q[None], k[None, :used], v[None, :used], **options, **place)[0])
    return torch.cat(outs)


@pytest.mark.parametrize("window", [(-1, -1), (-1, 0), (2, 0), (1, 2)])
@pytest.mark.parametrize("heads_k", [4, 2])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_against_sequence_after_sequence(window, heads_k, dtype):
    arguments = operands(heads_k, dtype)
    options = {"window": window} if window != (-1, -1) else {}
    expected = one_by_one(*arguments, **options)
    grads = torch.autograd.grad(expected.sum(), arguments)
    with counted() as records:
        out, lse = varlen.varlen_attn(
            *arguments, starts(LENGTHS_Q), starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K), window_size=window,
            enable_gqa=heads_k != 4, return_aux=varlen.AuxRequest(lse=True),
        )  # fmt: skip
        got = torch.autograd.grad(out.sum(), arguments)
    assert_taken(records, backward=True)
    eps = torch.finfo(dtype).eps
    torch.testing.assert_close(out, expected, rtol=8 * eps, atol=8 * eps)
    assert lse.shape == (4, sum(LENGTHS_Q)) and lse.dtype == torch.float32
    for ours, wanted in zip(got, grads):
        torch.testing.assert_close(ours, wanted, rtol=32 * eps, atol=32 * eps)


def test_into_a_tensor_of_ones_own():
    arguments = [x.detach() for x in operands()]
    places = (starts(LENGTHS_Q), starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K))
    out = torch.full_like(arguments[0], torch.nan)
    with polyhead.torch.enabled():
        expected = varlen.varlen_attn(*arguments, *places, scale=0.3)
        varlen.varlen_attn_out(out, *arguments, *places, scale=0.3)
    assert torch.equal(out, expected)


def test_keys_in_use():
    arguments = [x.detach() for x in operands()]
    used = (4, 3, 0, 1)
    with polyhead.torch.enabled():
        out = varlen.varlen_attn(
            *arguments, starts(LENGTHS_Q), starts(LENGTHS_K), 7, 7, seqused_k=torch.tensor(used, dtype=torch.int32)
        )
        torch.testing.assert_close(out, one_by_one(*arguments, lengths_k=used))
        with pytest.raises(polyhead.Error, match="seqused_k"):
            varlen.varlen_attn(
                *arguments, starts(LENGTHS_Q), starts(LENGTHS_K), 7, 7, seqused_k=torch.tensor([8, 0, 0, 0])
            )


def test_pages():
    query, _, _ = (x.detach() for x in operands())
    pool = torch.randn(2, 6, 4, 4, 8)  # 6 pages of 4 keys
    table = torch.tensor([[3, 0], [5, 1], [2, 6], [4, 1]], dtype=torch.int32)  # 6: behind the third sequence's keys
    used = (7, 3, 2, 7)
    with polyhead.torch.enabled():
        out = varlen.varlen_attn(
            query, *pool, starts(LENGTHS_Q), None, 7, 8, seqused_k=torch.tensor(used), block_table=table
        )
        with pytest.raises(polyhead.Error, match="block_table"):
            varlen.varlen_attn(
                query, *pool, starts(LENGTHS_Q), None, 7, 8, seqused_k=torch.tensor(used), block_table=table + 1
            )
        decoding = dict(seqused_k=torch.tensor(used), block_table=table, return_aux=varlen.AuxRequest(lse=True))
        one, lse = varlen.varlen_attn(query[:8], *pool, starts((2,) * 4), None, 2, 8, **decoding)
        ragged, ragged_lse = varlen.varlen_attn(query[:8], *pool, starts((2, 2, 3, 1)), None, 3, 8, **decoding)
    assert torch.equal(one[:4], ragged[:4]) and torch.equal(lse[:, :4], ragged_lse[:, :4])
    key, value = (x[table.long() % 6].reshape(-1, 4, 8) for x in pool)
    torch.testing.assert_close(out, one_by_one(query, key, value, lengths_k=used, slots=(8, 8, 8, 8)))
