"""The masks of `polyhead.torch.attn_bias`, against masks written out by hand."""

import itertools

import pytest
from optional import needs_torch, torch
from torch_formula import bias_of, close, naive, random

pytestmark = needs_torch
if torch is not None:
    import polyhead
    from polyhead import torch as ph
    from polyhead.torch import attn_bias


# What the kinds of mask let query i of q see among keys j of k: in all, or in a block.
def full(i, j, q, k):
    return True


def causal(i, j, q, k):
    return j <= i


def causal_bottom_right(i, j, q, k):
    return q - i <= k - j


def window_of_3(i, j, q, k):
    return 0 <= i - j < 3


def window_of_3_bottom_right(i, j, q, k):
    return 0 <= (i - q) - (j - k) < 3


def two_before_one_after_bottom_right(i, j, q, k):
    return -1 <= (i - q) - (j - k) <= 2


def plain_cases():
    """(mask, what it lets see in a block, lengths of queries, of keys, size of a slot of keys or their starts, or None)."""
    bottom_right = ph.LowerTriangularFromBottomRightMask()
    kinds = [
        (ph.LowerTriangularMask(), causal),
        (bottom_right, causal_bottom_right),
        (bottom_right.make_local_attention(3), window_of_3_bottom_right),
        (ph.LowerTriangularFromBottomRightLocalAttentionMask(3), window_of_3_bottom_right),
        (ph.LocalAttentionFromBottomRightMask(2, 1), two_before_one_after_bottom_right),
        (ph.LocalAttentionFromBottomRightMask(window_left=2, window_right=1), two_before_one_after_bottom_right),
    ]
    for (mask, sees), (q, k) in itertools.product(kinds, [(1, 1), (7, 7), (5, 9), (9, 5), (33, 65)]):
        yield mask, sees, [q], [k], None


def packed_cases():
    for q, k in [([4, 1, 6], [4, 1, 6]), ([4, 0, 2], [2, 3, 0]), ([33, 1, 20], [65, 2, 20])]:
        mask = ph.BlockDiagonalMask.from_seqlens(q, k)
        yield mask, full, q, k, None
        yield mask.make_causal(), causal, q, k, None
        yield ph.BlockDiagonalCausalMask.from_seqlens(q, kv_seqlen=k), causal, q, k, None
    for q, k in [([4, 1, 6], [4, 1, 6]), ([3, 1, 20], [5, 7, 65])]:
        mask = ph.BlockDiagonalMask.from_seqlens(q_seqlen=q, kv_seqlen=k)
        yield mask.make_causal_from_bottomright(), causal_bottom_right, q, k, None
        yield mask.make_local_attention(3), window_of_3, q, k, None
        yield mask.make_local_attention_from_bottomright(3), window_of_3_bottom_right, q, k, None


def slot_cases():
    decoding = [([1, 1, 1], [5, 0, 33], 33), ([3, 3], [2, 9], 9)]
    for q, k, slot in [([2, 1, 3], [4, 1, 7], 8), ([5, 0, 1], [2, 3, 8], 11), *decoding]:
        mask = ph.BlockDiagonalPaddedKeysMask.from_seqlens(q, slot, k)
        yield mask, full, q, k, slot
        yield mask.make_local_attention(window_left=2, window_right=1), two_before_one_after_bottom_right, q, k, slot
        mask = ph.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_seqlen=q, kv_padding=slot, kv_seqlen=k)
        yield mask, causal_bottom_right, q, k, slot
        mask = ph.BlockDiagonalLocalAttentionPaddedKeysMask.from_seqlens_local(q, slot, k, 2, 1)
        yield mask, two_before_one_after_bottom_right, q, k, slot
        mask = ph.BlockDiagonalCausalLocalAttentionPaddedKeysMask.from_seqlens_local(q, slot, k, window_size=3)
        yield mask, window_of_3_bottom_right, q, k, slot


def gappy_cases():
    for q, k, starts in [([2, 1, 3], [4, 1, 7], [0, 4, 9, 17]), ([5, 0, 1], [2, 3, 33], [3, 5, 11, 50])]:
        mask = ph.BlockDiagonalGappyKeysMask.from_seqlens(q, starts, k)
        yield mask, full, q, k, starts
        mask = ph.BlockDiagonalCausalWithOffsetGappyKeysMask.from_seqlens(q_seqlen=q, kv_seqstarts=starts, kv_seqlen=k)
        yield mask, causal_bottom_right, q, k, starts


CASES = [*plain_cases(), *packed_cases(), *slot_cases(), *gappy_cases()] if torch is not None else []


def name_of(case):
    mask, _, q, k, slot = case
    return f"{type(mask).__name__}-{q}x{k}" + (f"in{slot}" if slot else "")


by_case = pytest.mark.parametrize("case", CASES, ids=name_of)


def visible_by_hand(case):
    """Bool [all queries, all keys], and which keys lie in no sequence."""
    _, sees, q_lengths, k_lengths, slot = case
    starts = slot if isinstance(slot, list) else [slot * n for n in range(len(k_lengths) + 1)] if slot else None
    starts = starts or list(itertools.accumulate(k_lengths, initial=0))
    visible = torch.zeros(sum(q_lengths), starts[-1], dtype=torch.bool)
    unused = torch.ones(visible.shape[1], dtype=torch.bool)
    q_start = 0
    for q, k, k_start in zip(q_lengths, k_lengths, starts):
        unused[k_start : k_start + k] = False
        for i, j in itertools.product(range(q), range(k)):
            visible[q_start + i, k_start + j] = sees(i, j, q, k)
        q_start += q
    return visible, unused


def tensors(visible, batch=1, heads=2):
    mq, mk = visible.shape
    return tuple(random(batch, m, heads, dim, seed=m + dim) for m, dim in ((mq, 8), (mk, 8), (mk, 12)))


@by_case
def test_a_mask_materialises_as_it_reads(case):
    mask, (visible, _) = case[0], visible_by_hand(case)
    for dtype in (torch.float32, torch.bfloat16, torch.float16, torch.float64):
        shape = (2, 3, *visible.shape)
        dense = mask.materialize(shape, dtype=dtype, device="cpu")
        assert dense.shape == shape and dense.dtype == dtype
        assert torch.equal(dense.double(), bias_of(visible).expand(shape))
    assert torch.equal(mask.materialize(visible.shape), bias_of(visible).float())


@by_case
def test_a_mask_computes_what_it_materialises(case):
    mask, (visible, unused) = case[0], visible_by_hand(case)
    query, key, value = tensors(visible, batch=1 if hasattr(mask, "q_seqinfo") else 2)
    exact, exact_lse = naive(query, key, value, bias_of(visible))
    grad = random(*exact.shape, seed=4, needs_grad=False)
    exact_grads = torch.autograd.grad(exact, (query, key, value), grad.double())

    with torch.no_grad():  # what no sequence holds is not looked at
        key[:, unused], value[:, unused] = float("nan"), float("nan")
    out = ph.memory_efficient_attention(query, key, value, attn_bias=mask)
    close(out, exact)
    grads = torch.autograd.grad(out, (query, key, value), grad)
    out, lse = ph.memory_efficient_attention_forward_requires_grad(query, key, value, mask)
    assert not out.requires_grad and not lse.requires_grad and lse.dtype == torch.float32
    close(out, exact)
    close(lse, exact_lse)
    by_hand = ph.memory_efficient_attention_backward(grad, out, lse, query, key, value, mask)
    for x, got, returned, expected in zip((query, key, value), grads, by_hand, exact_grads):
        assert got.dtype == x.dtype and torch.equal(got, returned)
        close(got, expected, 1e-4)
    assert not grads[1][:, unused].any() and not grads[2][:, unused].any()


@pytest.mark.parametrize("slots", [False, True])
@pytest.mark.parametrize("q_lengths", [[2, 1, 3], [2, 2, 2]])
def test_packed_masks_in_groups(q_lengths, slots):
    k_lengths, slot = [4, 2, 7], 8 if slots else None
    visible, _ = visible_by_hand((None, causal_bottom_right, q_lengths, k_lengths, slot))
    query, key, value = tensors(visible, heads=6)
    if slots:
        mask = ph.BlockDiagonalCausalWithOffsetPaddedKeysMask.from_seqlens(q_lengths, slot, k_lengths)
    else:
        mask = ph.BlockDiagonalCausalFromBottomRightMask.from_seqlens(q_lengths, k_lengths)
    exact, exact_lse = naive(query, key, value, bias_of(visible))
    grouped = tuple(x.unflatten(2, (3, 2)) for x in (query, key, value))
    out, lse = ph.memory_efficient_attention_forward_requires_grad(*grouped, mask)
    assert lse.shape == (1, 3, 2, 6)
    close(out.flatten(2, 3), exact)
    close(lse.flatten(1, 2), exact_lse)
    grad = random(*exact.shape, seed=4, needs_grad=False)
    exact_grads = torch.autograd.grad(exact, (query, key, value), grad.double())
    grads = ph.memory_efficient_attention_backward(grad.unflatten(2, (3, 2)), out, lse, *grouped, mask)
    for got, expected in zip(grads, exact_grads):
        close(got.flatten(2, 3), expected, 1e-4)


def test_every_kind_of_the_interface_is_there_and_is_tested():
    names = set(attn_bias.__all__) - {"AttentionBias", "LowerTriangularMaskWithTensorBias"}
    assert names == {type(case[0]).__name__ for case in CASES}
    assert all(getattr(ph, name) is getattr(attn_bias, name) and name in ph.__all__ for name in attn_bias.__all__)


def test_tensors_are_packed_and_split_again():
    sequences = [random(1, 3, 2, 8, seed=1), random(3, 2, 2, 8, seed=2), random(2, 0, 2, 8, seed=3)]
    for kind in (ph.BlockDiagonalMask, ph.BlockDiagonalCausalMask):
        mask, packed = kind.from_tensor_list(sequences)
        assert type(mask) is kind and packed.shape == (1, 9, 2, 8)
        assert mask.q_seqinfo.seqstart_py == [0, 3, 5, 7, 9, 9, 9] and mask.q_seqinfo.max_seqlen == 3
        assert mask.q_seqinfo.seqstart.tolist() == mask.q_seqinfo.seqstart_py
        assert mask.q_seqinfo.seqstart.dtype == torch.int32
        out = mask.split(ph.memory_efficient_attention(packed, packed, packed, mask))
        again = mask.make_causal().split(packed)
        assert all(torch.equal(a, b) for a, b in zip(again, sequences, strict=True))
        for x, got in zip(sequences, out, strict=True):
            alone = ph.LowerTriangularMask() if kind is ph.BlockDiagonalCausalMask else None
            close(got, ph.memory_efficient_attention(x, x, x, alone), 1e-6)


def test_queries_keys_and_values_are_packed_and_split_again():
    queries = [random(1, 3, 2, 8, seed=1), random(2, 1, 2, 8, seed=2)]
    keys = [random(1, 2, 2, 8, seed=3), random(2, 3, 2, 8, seed=4)]
    values = [random(1, 2, 2, 4, seed=5), random(2, 3, 2, 4, seed=6)]
    mask, query, key, value = ph.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys, values)
    assert ph.BlockDiagonalMask.from_tensor_lists_qkv(queries, keys)[3] is None
    assert (query.shape[1], key.shape, value.shape) == (5, (1, 8, 2, 8), (1, 8, 2, 4))
    split = ((mask.split_queries(query), queries), (mask.split_kv(key), keys), (mask.split_kv(value), values))
    for parts, whole in split:
        assert all(torch.equal(a, b) for a, b in zip(parts, whole, strict=True))
    with pytest.raises(ValueError, match="tensor has shape .1, 8, 2, 8., must begin with .1, 5."):
        mask.split_queries(key)
    with pytest.raises(ValueError, match="split_queries or split_kv"):
        mask.split(query)


@by_case
def test_to_another_device(case):
    mask = case[0]
    moved = mask.to(torch.device("meta"))
    assert type(moved) is type(mask) and mask.to("cpu") is mask
    assert moved._band() == mask._band()
    if hasattr(moved, "q_seqinfo"):
        assert moved.q_seqinfo.seqstart.device.type == moved.k_seqinfo.seqstart.device.type == "meta"
        assert moved.k_seqinfo.seqstart_py == mask.k_seqinfo.seqstart_py


def test_no_mask_becomes_a_matrix():
    """What reaches `attention` has no tensor of Mq x Mk elements."""
    for case in CASES:
        mask = case[0]
        allowed = {"causal", "window", "align", "cu_seqlens_q", "cu_seqlens_k", "seqlens_k"}
        assert set(mask.options()) <= allowed
        if hasattr(mask, "q_seqinfo") and mask.uniform_slots():
            assert set(mask.slot_options()) <= allowed


def in_xformers(mask):
    """The mask as an instance of a stand-in for xFormers' class of its name: its module, its name, its attributes (0.0.35)."""
    def stand_in(value):
        kind = type(type(value).__name__, (), {"__module__": "xformers.ops.fmha.attn_bias"})
        theirs = kind()
        for name, each in vars(value).items():
            setattr(theirs, name, stand_in(each) if name in ("q_seqinfo", "k_seqinfo") else each)
        return theirs

    return stand_in(mask)


@by_case
def test_xformers_own_masks_are_taken(case):
    query, key, value = tensors(visible_by_hand(case)[0])
    theirs = in_xformers(case[0])
    assert not isinstance(theirs, attn_bias.AttentionBias)
    expected = ph.memory_efficient_attention(query, key, value, attn_bias=case[0])
    assert torch.equal(ph.memory_efficient_attention(query, key, value, attn_bias=theirs), expected)


def test_xformers_mask_with_a_bias_passes_its_gradient():
    query, key, value = (random(1, 5, 2, 8, seed=n) for n in range(3))
    bias = random(1, 2, 5, 5, seed=4)
    theirs = in_xformers(ph.LowerTriangularMaskWithTensorBias(bias))
    ph.memory_efficient_attention(query, key, value, attn_bias=theirs).sum().backward()
    got, bias.grad = bias.grad, None
    ph.memory_efficient_attention(query, key, value, attn_bias=ph.LowerTriangularMask().add_bias(bias)).sum().backward()
    assert torch.equal(got, bias.grad) and got.any()


def test_xformers_masks_of_pages_and_derived_ones_are_refused_by_name():
    x = random(1, 5, 2, 8)
    paged = type("PagedBlockDiagonalPaddedKeysMask", (), {"__module__": "xformers.ops.fmha.attn_bias"})()
    with pytest.raises(polyhead.Error, match="xFormers' PagedBlockDiagonalPaddedKeysMask"):
        ph.memory_efficient_attention(x, x, x, attn_bias=paged)
    derived = type("Mine", (type(in_xformers(ph.LowerTriangularMask())),), {"__module__": "mine"})()
    with pytest.raises(TypeError, match="attn_bias is a Mine"):
        ph.memory_efficient_attention(x, x, x, attn_bias=derived)
