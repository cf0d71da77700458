"""`polyhead.torch`'s memory_efficient_attention and its family, against naive math."""

import re

import pytest
from optional import needs_torch, torch
from torch_formula import bias_of, close, naive, random

pytestmark = needs_torch
if torch is not None:
    from polyhead import torch as ph


@pytest.mark.parametrize("dtype_name, tolerance", [("float64", 1e-12), ("bfloat16", 3e-2), ("float16", 4e-3)])
def test_other_dtypes(dtype_name, tolerance):
    dtype = getattr(torch, dtype_name)
    query, key, value = (random(1, m, 2, 8, seed=seed, dtype=dtype) for m, seed in ((20, 1), (33, 2), (33, 3)))
    mask = ph.LowerTriangularFromBottomRightMask()
    exact, exact_lse = naive(query, key, value, bias_of(torch.ones(20, 33).tril(13).bool()))
    out, lse = ph.memory_efficient_attention_forward_requires_grad(query, key, value, mask)
    assert out.dtype == dtype and lse.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    close(out, exact, tolerance)
    close(lse, exact_lse, max(tolerance / 100, 1e-12))


# -- layouts ----------------------------------------------------------------------------------------------------------


def test_three_layouts_of_one_problem():
    query, key, value = random(2, 5, 6, 8, seed=1), random(2, 9, 6, 8, seed=2), random(2, 9, 6, 4, seed=3)
    mask = ph.LowerTriangularFromBottomRightMask()
    out, lse = ph.memory_efficient_attention_partial(query, key, value, mask)
    groups, group_lse = ph.memory_efficient_attention_partial(
        query.unflatten(2, (3, 2)), key.unflatten(2, (3, 2)), value.unflatten(2, (3, 2)), mask
    )
    assert groups.shape == (2, 5, 3, 2, 4) and group_lse.shape == (2, 3, 2, 5)
    assert torch.equal(groups.flatten(2, 3), out) and torch.equal(group_lse.flatten(1, 2), lse)
    single, single_lse = ph.memory_efficient_attention_partial(query[:, :, 4], key[:, :, 4], value[:, :, 4], mask)
    assert single.shape == (2, 5, 4) and single_lse.shape == (2, 1, 5)
    close(single, out[:, :, 4], 1e-6)
    close(single_lse, lse[:, 4:5], 1e-6)
    for x in (groups, single):
        x.sum().backward()
    assert query.grad.abs().sum() > 0


@pytest.mark.parametrize("of_a_group", [False, True])
def test_expanded_heads_are_shared_and_each_has_its_gradient(of_a_group):
    """[B, M, G, H, K] expanded over H, and [B, M, H, K] over all of H."""
    query = random(2, 5, 3, 4, 8, seed=1)
    key, value = (random(2, 7, 3, 1, 8, seed=seed) for seed in (2, 3))
    if not of_a_group:
        query, key, value = (x[:, :, 0].detach().requires_grad_() for x in (query, key, value))
    expanded = [x.expand(*x.shape[:-2], 4, 8) for x in (key, value)]
    whole = [x.detach().clone().requires_grad_() for x in expanded]
    out = ph.memory_efficient_attention(query, *whole)
    grads = torch.autograd.grad(out.square().sum(), (query, *whole))
    for leaf in (False, True):
        inputs = [x.detach().requires_grad_() for x in expanded] if leaf else expanded
        assert inputs[0].stride(-2) == 0
        out_expanded = ph.memory_efficient_attention(query, *inputs)
        close(out_expanded, out, 1e-6)
        for got, expected in zip(torch.autograd.grad(out_expanded.square().sum(), (query, *inputs)), grads):
            close(got, expected, 1e-5)
    close(ph.memory_efficient_attention_forward(query, *expanded), out, 1e-6)
    shared = ph.memory_efficient_attention(query, key, value)  # one head for all of the group
    close(shared, out, 1e-6)
    close(torch.autograd.grad(shared.square().sum(), key)[0], grads[1].sum(-2, keepdim=True), 1e-4)


def test_any_strides():
    query, key, value = (random(2, 3, 8, 6, seed=seed, needs_grad=False).permute(0, 3, 1, 2) for seed in (1, 2, 3))
    flipped = value.flip(-1)[..., ::2]
    exact, _ = naive(query, key, flipped)
    close(ph.memory_efficient_attention(query, key, flipped), exact)
    close(ph.memory_efficient_attention(query[:, :, 1], key[:, :, 1], flipped[:, :, 1]), exact[:, :, 1])


@pytest.mark.parametrize("batch, mq, mk", [(2, 0, 5), (2, 3, 0), (0, 3, 5)])
def test_empty(batch, mq, mk):
    query, key, value = random(batch, mq, 2, 8), random(batch, mk, 2, 8), random(batch, mk, 2, 4)
    out = ph.memory_efficient_attention(query, key, value)
    assert out.shape == (batch, mq, 2, 4) and not out.any()
    out.backward(torch.ones_like(out))
    assert not any(x.grad.any() for x in (query, key, value))


def test_a_mask_of_no_sequences():
    for mask in (ph.BlockDiagonalMask.from_seqlens([]), ph.BlockDiagonalPaddedKeysMask.from_seqlens([], 4, [])):
        assert mask.materialize((0, 0)).shape == (0, 0)
        x = random(1, 0, 2, 8, needs_grad=False)
        assert ph.memory_efficient_attention(x, x, x, mask).shape == (1, 0, 2, 8)


# -- tensors as bias --------------------------------------------------------------------------------------------------

BIASES = {
    3: [(2, 5, 7), (1, 5, 7), (5, 7), (1, 7), (7,), ()],
    4: [(2, 6, 5, 7), (1, 6, 5, 7), (2, 1, 5, 7), (2, 6, 1, 7), (6, 5, 1), (5, 7), (1, 1, 1, 7)],
    5: [
        (2, 3, 2, 5, 7), (1, 3, 2, 5, 7), (2, 1, 2, 5, 7), (2, 3, 1, 5, 7), (2, 1, 1, 5, 7), (3, 1, 5, 7), (2, 5, 7),
        (5, 7),
    ],
}


@pytest.mark.parametrize("dims, shape", [(dims, shape) for dims, shapes in BIASES.items() for shape in shapes])
@pytest.mark.parametrize("causal_too", [False, True])
def test_tensor_bias(dims, shape, causal_too):
    query, key, value = random(2, 5, 6, 8, seed=1), random(2, 7, 6, 8, seed=2), random(2, 7, 6, 4, seed=3)
    bias = random(*shape, seed=4)
    if dims == 3:
        query, key, value = (x[:, :, :1] for x in (query, key, value))
        whole = bias.unsqueeze(1) if len(shape) == 3 else bias
        given = (query[:, :, 0], key[:, :, 0], value[:, :, 0])
    elif dims == 5:
        whole = bias.expand(2, 3, 2, 5, 7).flatten(1, 2)
        given = tuple(x.unflatten(2, (3, 2)) for x in (query, key, value))
    else:
        whole, given = bias, (query, key, value)
    hidden = torch.ones(5, 7).triu(1).bool() if causal_too else torch.zeros(5, 7).bool()
    exact, _ = naive(query, key, value, whole.double() + bias_of(~hidden))
    grad = random(*exact.shape, seed=5, needs_grad=False)
    expected = torch.autograd.grad(exact, (bias, query), grad.double())
    mask = ph.LowerTriangularMask().add_bias(bias) if causal_too else bias
    out = ph.memory_efficient_attention(*given, attn_bias=mask)
    close(out.reshape(exact.shape), exact)
    got = torch.autograd.grad(out, (bias, query), grad.reshape(out.shape))
    close(got[0], expected[0], 1e-4)
    close(got[1], expected[1], 1e-4)
    if causal_too:
        assert type(mask) is ph.LowerTriangularMaskWithTensorBias is type(mask.to("cpu"))
        if len(shape) == 2:
            assert torch.equal(mask.materialize((5, 7)), bias + bias_of(~hidden).float())


# -- partial, merge, backward -----------------------------------------------------------------------------------------


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("dims", [3, 4, 5])
def test_parts_merge_to_the_whole(dims, stacked):
    pick = {3: lambda x: x[:, :, 0], 4: lambda x: x, 5: lambda x: x.unflatten(2, (3, 2))}[dims]
    query, key, value = (
        pick(random(2, m, 6, 8, seed=seed)).detach().requires_grad_() for m, seed in ((5, 1), (11, 2), (11, 3))
    )
    exact, exact_lse = ph.memory_efficient_attention_partial(query, key, value)
    parts = [
        ph.memory_efficient_attention_partial(query, key[:, rows], value[:, rows])
        for rows in (slice(0, 4), slice(4, 10), slice(10, 11), slice(0, 0))
    ]
    outs, lses = ([part[n] for part in parts] for n in (0, 1))
    if stacked:
        outs, lses = torch.stack(outs), torch.stack(lses)
    out, lse = ph.merge_attentions(outs, lses)
    close(out, exact, 2e-6)
    close(lse, exact_lse, 2e-6)
    grads = [
        torch.autograd.grad(out.square().sum() + lse.sin().sum(), (query, key, value))
        for out, lse in ((out, lse), (exact, exact_lse))
    ]
    for got, expected in zip(*grads):
        close(got, expected, 2e-5)
    only_out, nothing = ph.merge_attentions(outs, lses, write_lse=False, output_dtype=torch.bfloat16)
    assert nothing is None and only_out.dtype == torch.bfloat16
    close(only_out, exact, 1e-2)


@pytest.mark.parametrize("stacked", [False, True])
@pytest.mark.parametrize("output_dtype", [None, torch.float32])
def test_parts_have_the_dtypes_that_xformers_test_of_merging_expects(output_dtype, stacked):
    """Its test_merge_attentions_decoding: whole, part and merged of one call's output_dtype; None is query's dtype."""
    expected = output_dtype or torch.bfloat16
    query, key, value = (
        random(2, m, 4, 16, seed=seed, dtype=torch.bfloat16).detach() for m, seed in ((2, 1), (40, 2), (40, 3))
    )
    options = {"output_dtype": output_dtype}
    parts = [
        ph.memory_efficient_attention_partial(query, key[:, rows], value[:, rows], **options)
        for rows in (slice(0, 7), slice(7, 30), slice(30, 40))
    ]
    outs, lses = map(torch.stack if stacked else list, zip(*parts))
    assert all(out.dtype == expected for out in outs)
    out, lse = ph.merge_attentions(outs, lses)
    assert out.dtype == expected and lse.dtype == torch.float32
    out, _ = ph.merge_attentions(outs, lses, output_dtype=torch.bfloat16)
    assert out.dtype == torch.bfloat16
    whole, whole_lse = ph.memory_efficient_attention_partial(query, key, value, **options)
    other = ph.memory_efficient_attention_forward(query, key, value, **options)
    torch.testing.assert_close(lse, whole_lse, rtol=1e-3, atol=1e-3)
    torch.testing.assert_close(out.to(whole.dtype), whole, rtol=2**-7, atol=2**-8)  # bfloat16, rounded twice
    torch.testing.assert_close(other, whole, rtol=0, atol=0)  # of one dtype


def test_parts_that_are_asked_for_in_float32_are_not_rounded():
    query, key, value = (random(1, 5, 2, 8, seed=seed, dtype=torch.bfloat16) for seed in (1, 2, 3))
    out, lse = ph.memory_efficient_attention_partial(query, key, value, output_dtype=torch.float32)
    exact, exact_lse = naive(query, key, value)
    assert out.dtype == lse.dtype == torch.float32
    close(out, exact, 1e-6)
    out.sum().backward()
    assert query.grad.dtype == torch.bfloat16
    for dtype in (torch.float32, torch.float16, torch.float64):
        out = ph.memory_efficient_attention(query, key, value, output_dtype=dtype)
        assert out.dtype == dtype
        close(out, exact, 1e-3 if dtype == torch.float16 else 1e-6)
        assert ph.memory_efficient_attention_forward(query, key, value, output_dtype=dtype).dtype == dtype
    narrowed = ph.memory_efficient_attention(query.float(), key.float(), value.float(), output_dtype=torch.bfloat16)
    assert narrowed.dtype == torch.bfloat16


def test_backward_of_a_part_takes_the_whole_s_output():
    query, key, value = random(1, 5, 2, 8, seed=1), random(1, 9, 2, 8, seed=2), random(1, 9, 2, 8, seed=3)
    out, lse = ph.memory_efficient_attention_forward_requires_grad(query, key, value)
    grad = random(*out.shape, seed=4, needs_grad=False)
    whole = ph.memory_efficient_attention_backward(grad, out, lse, query, key, value)
    parts = [
        ph.memory_efficient_attention_backward(grad, out, lse, query, key[:, rows], value[:, rows])
        for rows in (slice(0, 4), slice(4, 9))
    ]
    close(parts[0][0] + parts[1][0], whole[0], 1e-6)
    for n in (1, 2):
        close(torch.cat([part[n] for part in parts], dim=1), whole[n], 1e-6)


def test_forward_has_no_gradient_and_scale_is_any_number():
    query, key, value = (random(1, 5, 2, 8, seed=seed) for seed in (1, 2, 3))
    for scale in (0.0, -0.5, 1.0):
        out = ph.memory_efficient_attention_forward(query, key, value, scale=scale)
        assert not out.requires_grad
        close(out, naive(query, key, value, scale=scale)[0])
        with_op = ph.memory_efficient_attention(query, key, value, scale=scale, op=("anything", None))
        assert torch.equal(with_op, out) and with_op.requires_grad


def test_dropout():
    query, key, value = (random(2, 40, 2, 8, seed=seed) for seed in (1, 2, 3))
    torch.manual_seed(3)
    first, second = (ph.memory_efficient_attention(query, key, value, p=0.5) for _ in range(2))
    torch.manual_seed(3)
    assert torch.equal(first, ph.memory_efficient_attention(query, key, value, p=0.5))
    assert not torch.equal(first, second)
    assert not ph.memory_efficient_attention(query, key, value, p=1.0).any()
    ones = torch.ones_like(value)
    kept = ph.memory_efficient_attention(0 * query, key, ones, p=0.25)[..., 0]  # sums of 40 weights, 1 on average
    assert abs(kept.mean() - 1) < 0.05 and kept.std() > 0.01


def test_compiled():
    mask = ph.BlockDiagonalCausalMask.from_seqlens([3, 6])
    query = random(1, 9, 2, 8, seed=1)

    @torch.compile(fullgraph=True, backend="aot_eager")
    def step(query):
        return ph.memory_efficient_attention(query, query, query, attn_bias=mask, scale=0.5)

    expected = ph.memory_efficient_attention(query, query, query, attn_bias=mask, scale=0.5)
    out = step(query)
    assert torch.equal(out, expected)
    (grad,) = torch.autograd.grad(out.sum(), query)
    close(grad, torch.autograd.grad(expected.sum(), query)[0], 1e-6)


# -- bad input --------------------------------------------------------------------------------------------------------


def refusals():
    """(a call that is refused, what its error says)."""
    x, lse, packed = torch.zeros(2, 4, 3, 8), torch.zeros(2, 3, 4), torch.zeros(1, 6, 3, 8)
    groups, one_group = x.unflatten(2, (3, 1)), x.unflatten(2, (1, 3))
    run, back, merge = ph.memory_efficient_attention, ph.memory_efficient_attention_backward, ph.merge_attentions
    blocks, slots = ph.BlockDiagonalMask.from_seqlens, ph.BlockDiagonalPaddedKeysMask.from_seqlens
    local = ph.LocalAttentionFromBottomRightMask
    mask = blocks([2, 4])
    return [
        (lambda: run(x, x[0], x), "key has 3 dimensions, must have 4 like query"),
        (lambda: run(x[0, 0], x, x), "query has 2 dimensions, must have 3, 4 or 5"),
        (lambda: run(x, x.double(), x), "key is torch.float64, must be torch.float32 like query"),
        (lambda: run(x, x, x.to("meta")), "value is on meta, must be on cpu like query"),
        (lambda: run(x, x, x[:, :3]), "value has shape (2, 3, 3, 8), must begin with (2, 4, 3) like key"),
        (lambda: run(x, x[..., :4], x), "head_dim"),
        (lambda: run(x, x[:1], x[:1]), "batch"),
        (lambda: run(x, x[:, :, :2], x[:, :, :2]), "num_heads_kv"),
        (lambda: run(groups, one_group, one_group), "key has shape (2, 4, 1, 3, 8), must have 3 groups of 1 heads"),
        (lambda: run(x, x, x, p=1.5), "p is 1.5, must be in 0 .. 1"),
        (lambda: run(x, x, x, scale=float("nan")), "scale"),
        (lambda: run(x, x, x, torch.zeros(5, 4)), "attn_bias"),
        (lambda: run(x, x, x, torch.zeros(1, 1, 1, 4, 4)), "attn_bias has 5 dimensions, takes at most 4"),
        (lambda: run(one_group, one_group, one_group, torch.zeros(2, 3, 4, 4)), "must broadcast to [B, 1, 3, Mq, Mk]"),
        (lambda: run(x, x, x, mask), "query has shape (2, 4, 3, 8), must begin with (1, 6): all sequences"),
        (lambda: run(packed, packed[:, :5], packed[:, :5], mask), "key has shape (1, 5, 3, 8), must begin with (1, 6)"),
        (lambda: mask.materialize((6, 5)), "shape ends in (6, 5), must end in (6, 6)"),
        (lambda: blocks([2, 4], [3]), "kv_seqlen has 1 lengths, must have 2 like q_seqlen"),
        (lambda: blocks([2, -4]), "lengths are [2, -4], must not be negative"),
        (lambda: blocks([3], [2]).make_causal_from_bottomright(), "block 0 has 2 keys, needs at least as many"),
        (lambda: blocks([5], [2]).make_local_attention(3), "block 0 has 5 queries: the last sees none of its 2 keys"),
        (lambda: mask.make_local_attention(0), "window_size is 0, must be at least 1"),
        (lambda: ph.BlockDiagonalCausalLocalAttentionMask.from_seqlens([2]), "window_size is 0, must be at least 1"),
        (lambda: local(-1, 0), "window_left is -1, must be at least 0"),
        (lambda: local(0, -1), "window_right is -1, must be at least 0"),
        (lambda: slots([1], 3, [4]), "kv_padding is 3, must be at least 4, the longest of kv_seqlen"),
        (lambda: slots([1, 1], 3, [2]), "kv_seqlen has 1 lengths, must have 2 like q_seqlen"),
        (lambda: merge([], []), "attn_split is empty, must have at least one part"),
        (lambda: merge([x], [lse, lse]), "lse_split has 2 parts, must have 1 like attn_split"),
        (lambda: merge([x], [lse[0]]), "lse_split has a part of shape (3, 4)"),
        (lambda: merge([x], [lse[:, :2]]), "logsumexp"),
        (lambda: back(x[:1], x, lse, x, x, x), "grad has shape (1, 4, 3, 8), must have (2, 4, 3, 8)"),
        (lambda: back(x, x[..., :4], lse, x, x, x), "output has shape (2, 4, 3, 4), must have (2, 4, 3, 8)"),
        (lambda: back(x, x, lse[:, :2], x, x, x), "logsumexp"),
    ]


@pytest.mark.parametrize("call, sentence", refusals() if torch is not None else [])
def test_bad_input_is_named(call, sentence):
    with pytest.raises(ValueError, match=re.escape(sentence)):
        call()


def test_the_wrong_kind_of_argument_is_a_type_error():
    x = torch.zeros(2, 4, 3, 8)
    with pytest.raises(TypeError, match="attn_bias is the class LowerTriangularMask, must be a torch.Tensor or a mask"):
        ph.memory_efficient_attention(x, x, x, attn_bias=ph.LowerTriangularMask)
    with pytest.raises(TypeError, match="attn_bias is a str"):
        ph.memory_efficient_attention(x, x, x, attn_bias="causal")
    with pytest.raises(TypeError, match="key is a list, must be a torch.Tensor"):
        ph.memory_efficient_attention(x, x.tolist(), x)
    with pytest.raises(TypeError, match="attn_split holds a int"):
        ph.merge_attentions([1], [x])
    for call in (ph.memory_efficient_attention_partial, ph.memory_efficient_attention_forward_requires_grad):
        with pytest.raises(NotImplementedError, match="p is 0.1, must be 0 here"):
            call(x, x, x, p=0.1)
    with pytest.raises(NotImplementedError, match="p is 0.1, must be 0 here"):
        ph.memory_efficient_attention_backward(x, x, torch.zeros(2, 3, 4), x, x, x, p=0.1)
