"""polyhead.torch.flex_attention: torch's signature and meaning, masks and scores as users write them, with all gradients."""

import doctest
import functools
import inspect

import pytest
from optional import needs_torch, torch

import polyhead

pytestmark = needs_torch
if torch is not None:
    from torch.nn.attention import flex_attention as theirs
    from torch.nn.attention.flex_attention import AuxRequest, BlockMask, and_masks, create_block_mask, noop_mask, or_masks

    import polyhead.torch
    from polyhead.torch import flex_attention
    from torch_formula import random
    from torch_ops_test import same_bits

from flex_functions import MASKS, SCORES, B, H, S, dense, floats_of, log_distance_in_range, tensors_of

D = 16


def operands(dtype=None, heads_kv=2, seqlen_q=S, seqlen_k=S):
    shapes = (B, H, seqlen_q, D), (B, heads_kv, seqlen_k, D), (B, heads_kv, seqlen_k, D)
    return [random(*shape, seed=i, dtype=dtype) for i, shape in enumerate(shapes)]


def doubles(tensors):
    return [x.detach().double().requires_grad_() for x in tensors]


def block_mask_of(mask_mod, block_size=32, seqlen_q=S, seqlen_k=S):
    return create_block_mask(mask_mod, B, H, seqlen_q, seqlen_k, device="cpu", BLOCK_SIZE=block_size)


def gradients(out, lse, leaves):
    direction = random(*out.shape, seed=7, needs_grad=False).to(out.dtype)
    loss = (out * direction).sum() + torch.where(lse > -torch.inf, lse, 0.0).sum()
    grads = torch.autograd.grad(loss, leaves, allow_unused=True)
    return [torch.zeros_like(x) if grad is None else grad for x, grad in zip(leaves, grads)]


def agree(inputs, expected_inputs, got, expected, tolerance=3e-5):
    """Results, and gradients by all inputs; those that many rows add up to are larger."""
    for one, other in zip(got, expected):
        torch.testing.assert_close(one.double(), other, rtol=tolerance, atol=tolerance)
    for one, other in zip(gradients(*got, inputs), gradients(*expected, expected_inputs)):
        torch.testing.assert_close(one.double(), other, rtol=10 * tolerance, atol=10 * tolerance)


def with_lse(*arguments, **options):
    out, aux = flex_attention(*arguments, **options, return_aux=AuxRequest(lse=True))
    assert aux.max_scores is None
    return out, aux.lse


@pytest.mark.parametrize("name", MASKS)
def test_masks_of_the_literature(name):
    inputs, tensors = operands(), tensors_of(torch.float32)
    mask_mod = MASKS[name](tensors)
    got = with_lse(*inputs, block_mask=block_mask_of(mask_mod), enable_gqa=True)
    double = doubles(inputs)
    agree(inputs, double, got, dense(*double, mask_mod=mask_mod))


@pytest.mark.parametrize("name", SCORES)
def test_scores_of_the_literature(name):
    tensors, double_tensors = tensors_of(torch.float32), tensors_of(torch.float64)
    inputs = [*operands(), *floats_of(tensors)]
    double = [*doubles(inputs[:3]), *floats_of(double_tensors)]
    for one, other in zip(inputs[3:], double[3:]):
        other.data.copy_(one)
    got = with_lse(*inputs[:3], SCORES[name](tensors), enable_gqa=True)
    in_range = log_distance_in_range if name == "log_distance" else SCORES[name]
    agree(inputs, double, got, dense(*double[:3], in_range(double_tensors)), 1e-4 if name == "sigmoid_gate" else 3e-5)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64] if torch else [])
def test_dtypes(dtype):
    tensors, double_tensors = tensors_of(dtype), tensors_of(torch.float64)
    inputs = [*operands(dtype), tensors.slope]
    double = [*doubles(inputs[:3]), double_tensors.slope]
    double[3].data.copy_(inputs[3])
    mask = block_mask_of(MASKS["documents"](tensors))
    got = with_lse(*inputs[:3], SCORES["alibi"](tensors), mask, enable_gqa=True)
    assert got[0].dtype == dtype and got[1].dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    expected = dense(*double[:3], SCORES["alibi"](double_tensors), MASKS["documents"](tensors))
    agree(inputs, double, got, expected, {torch.float64: 1e-10, torch.float16: 5e-3, torch.bfloat16: 4e-2}[dtype])


def test_signature_is_torchs():
    ours, torchs = (inspect.signature(each).parameters for each in (flex_attention, theirs.flex_attention))
    assert [(x.name, x.kind, x.default) for x in ours.values()] == [(x.name, x.kind, x.default) for x in torchs.values()]


def test_docstring():
    from polyhead.torch import _flex_attention

    result = doctest.testmod(_flex_attention)
    assert result.attempted >= 5 and result.failed == 0


def test_composed_masks_and_scores():
    inputs, tensors = operands(), tensors_of(torch.float32)
    documents, causal, band = (MASKS[name](tensors) for name in ("documents", "causal", "band"))
    mask_mod = or_masks(and_masks(documents, causal), band)

    def score_mod(score, b, h, q, k):
        return SCORES["softcap"](tensors)(SCORES["alibi"](tensors)(score, b, h, q, k), b, h, q, k)

    double = doubles(inputs)
    got = with_lse(*inputs, score_mod, block_mask_of(mask_mod), enable_gqa=True)
    agree(inputs, double, got, dense(*double, score_mod, mask_mod))


class Distances(torch.nn.Module):
    """Scores by a module's parameters and buffers, one of them transformed on the way."""

    def __init__(self):
        super().__init__()
        self.raw = torch.nn.Parameter(torch.linspace(-1, 1, H))
        self.table = torch.nn.ModuleList([torch.nn.Embedding(2 * S - 1, H)])
        self.register_buffer("temperature", torch.tensor(0.7))

    def forward(self, score, b, h, q, k):
        slope = torch.nn.functional.softplus(self.raw)
        return score * self.temperature - slope[h] * (q - k).abs() + self.table[0].weight[q - k + S - 1, h]


def test_a_module_is_trained_through_its_scores():
    module, inputs = Distances(), operands(heads_kv=H)
    module.double_ = Distances().double()
    module.double_.load_state_dict({name: x for name, x in module.state_dict().items() if "double" not in name})
    double = doubles(inputs)
    leaves = [*inputs, module.raw, module.table[0].weight]
    double_leaves = [*double, module.double_.raw, module.double_.table[0].weight]
    agree(leaves, double_leaves, with_lse(*inputs, module), dense(*double, module.double_))


def test_block_tables_without_a_mask_mod():
    """Blocks that are not listed are hidden; full ones are seen whatever the mask_mod says, others as it says."""
    inputs = operands()
    double = doubles(inputs)
    generator = torch.Generator().manual_seed(3)
    counts = torch.randint(0, 4, (B, 1, 4), generator=generator, dtype=torch.int32)
    indices = torch.stack([torch.randperm(4, generator=generator) for _ in range(B * 4)]).view(B, 1, 4, 4).to(torch.int32)
    table = torch.zeros(B, 1, 4, 5, dtype=torch.bool)
    table.scatter_(3, torch.where(torch.arange(4) < counts.unsqueeze(3), indices.long(), 4), True)

    def listed(b, h, q, k):
        return table[b, 0, q // 20, k // 20]

    for causal in (False, True):
        mask_mod = (lambda b, h, q, k: q >= k) if causal else None
        block_mask = BlockMask.from_kv_blocks(counts, indices, BLOCK_SIZE=20, seq_lengths=(S, S), mask_mod=mask_mod)
        expected = dense(*double, mask_mod=and_masks(listed, mask_mod or noop_mask) if causal else listed)
        agree(inputs, double, with_lse(*inputs, block_mask=block_mask, enable_gqa=True), expected)
    full = BlockMask.from_kv_blocks(
        torch.zeros_like(counts), indices, counts, indices, BLOCK_SIZE=20, seq_lengths=(S, S), mask_mod=mask_mod
    )
    agree(inputs, double, with_lse(*inputs, block_mask=full, enable_gqa=True), dense(*double, mask_mod=listed))


def test_a_step_of_decoding_moves_its_query():
    """The mask of the whole, at an offset that is a tensor: the program's text stays the same."""
    query, key, value = operands()
    table = random(H, 2 * S - 1)

    def whole(b, h, q, k):
        return (q >= k) & (q - k < 30)

    def score_mod(score, b, h, q, k):
        return score + table[h, q - k + S - 1]

    block_mask = create_block_mask(whole, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    expected = flex_attention(query, key, value, score_mod, block_mask, enable_gqa=True)
    for step in (0, 15, 16, 40, S - 1):
        offset = torch.tensor(step)
        one = block_mask[:, :, step // 16]
        with pytest.raises(polyhead.Error, match="block_mask is a slice"):
            flex_attention(query[:, :, :1], key, value, None, one, enable_gqa=True)
        one.mask_mod = lambda b, h, q, k: whole(b, h, q + offset, k)
        one.seq_lengths = (1, S)
        out = flex_attention(
            query[:, :, step : step + 1], key, value, lambda score, b, h, q, k: score_mod(score, b, h, q + offset, k),
            one, enable_gqa=True,
        )  # fmt: skip
        torch.testing.assert_close(out, expected[:, :, step : step + 1])


def test_rows_that_see_nothing():
    inputs = operands(heads_kv=H)
    for score_mod, mask_mod in (
        (None, lambda b, h, q, k: (q > 5) & (q >= k)),
        (lambda score, b, h, q, k: torch.where(q > 5, score, -torch.inf), None),
        (lambda score, b, h, q, k: score.masked_fill(q <= 5, -torch.inf), lambda b, h, q, k: q != 2),
    ):
        block_mask = None if mask_mod is None else block_mask_of(mask_mod)
        out, lse = with_lse(*inputs, score_mod, block_mask)
        assert torch.all(out[:, :, :6] == 0) and torch.all(lse[:, :, :6] == -torch.inf)
        grads = torch.autograd.grad(out.square().sum() + lse[:, :, 6:].sum(), inputs)
        assert all(grad.isfinite().all() for grad in grads) and torch.all(grads[0][:, :, :6] == 0)


def test_what_is_hidden_may_hold_anything():
    """NaN in hidden keys and in hidden elements of tables, indices that lie outside where hidden."""
    query, key, value = (x.detach() for x in operands(heads_kv=H))
    table = random(H, 10, needs_grad=False)
    tables = [table, torch.cat([table, torch.full((H, S), torch.nan)], 1).requires_grad_()]
    results = []
    for padding, given in zip((0.0, torch.nan), tables):
        inputs = [x.clone() for x in (query, key, value)]
        inputs[1][:, :, 40:], inputs[2][:, :, 40:] = padding, padding
        inputs = [x.requires_grad_() for x in inputs]
        given = given.requires_grad_()
        out = flex_attention(
            *inputs, lambda score, b, h, q, k: score + given[h, q - k],
            block_mask_of(lambda b, h, q, k: (q >= k) & (q - k < 10) & (k < 40)),
        )  # fmt: skip
        grads = torch.autograd.grad(out.square().sum(), [*inputs, given])
        results.append((out, *grads[:3], grads[3][:, :10]))
    for one, other in zip(*results):
        same_bits(one, other)


def test_strides_batches_and_layouts():
    query, key, value = operands(heads_kv=H)
    expected = flex_attention(query, key, value)
    assert expected.is_contiguous()  # as query
    tokens_first = [x.transpose(1, 2).contiguous().transpose(1, 2) for x in (query, key, value)]
    out = flex_attention(*tokens_first)
    assert out.transpose(1, 2).is_contiguous()
    same_bits(out.contiguous(), expected)
    reversed_key = torch.stack([key, key], -1)[..., 1]  # innermost stride 2
    same_bits(flex_attention(query, reversed_key, value), expected)
    one = flex_attention(query, key[:1], value[:1])
    same_bits(one[0], flex_attention(query[:1], key[:1], value[:1])[0])
    (grad,) = torch.autograd.grad(one.sum(), key)
    assert torch.all(grad[1] == 0) and grad[0].abs().sum() > 0
    with torch.autocast("cpu", torch.bfloat16):
        assert flex_attention(query, key, value).dtype == torch.bfloat16
    low = flex_attention(query, key.bfloat16(), value.bfloat16())
    same_bits(low, flex_attention(query, key.bfloat16().float(), value.bfloat16().float()))


@pytest.mark.parametrize("sizes", [(1, 1), (63, 65), (64, 129), (127, 128), (129, 3), (0, 5), (5, 0)], ids=str)
def test_sizes_on_the_edges_of_tiles(sizes):
    inputs = operands(seqlen_q=sizes[0], seqlen_k=sizes[1])
    table = random(H, 300, seed=4)

    def score_mod(score, b, h, q, k):
        return score + table[h, q - k + 150]

    def mask_mod(b, h, q, k):
        return (q - k).abs() <= 60

    block_mask = block_mask_of(mask_mod, 64, *sizes) if 0 not in sizes else None
    got = with_lse(*inputs, score_mod, block_mask, enable_gqa=True)
    if 0 in sizes:
        assert got[0].shape == (B, H, sizes[0], D) and torch.all(got[0] == 0) and torch.all(got[1] == -torch.inf)
    else:
        double = doubles([*inputs, table])
        expected = dense(*double[:3], lambda score, b, h, q, k: score + double[3][h, q - k + 150], mask_mod)
        agree([*inputs, table], double, got, expected)


def test_captures_of_any_strides_and_large_numbers():
    inputs = operands(heads_kv=H)
    wide = random(2 * S, 2 * H, seed=5)
    layouts = [wide[::2, ::2].T, wide.detach()[::2, ::2].T.contiguous().requires_grad_()]  # [H, S]
    one = torch.tensor(0.5, requires_grad=True)
    slopes = [one.expand(H), torch.full((H,), 0.5, requires_grad=True)]
    document = torch.arange(S) // 20
    documents = [2**24 + document, document - 2**40]
    results = []
    for table, slope, doc in zip(layouts, slopes, documents):
        out = flex_attention(
            *inputs, lambda score, b, h, q, k: score + table[h, k] - slope[h] * abs(q - k),
            block_mask_of(lambda b, h, q, k: doc[q] == doc[k]),
        )  # fmt: skip
        results.append((out, *torch.autograd.grad(out.sum(), [*inputs, table, slope], retain_graph=True)))
    for first, second in zip(*results):
        same_bits(first, second)
    (summed,) = torch.autograd.grad(results[0][0].sum(), one)
    torch.testing.assert_close(summed, results[1][-1].sum())


def test_what_is_returned():
    inputs = operands(heads_kv=H)
    out, lse = flex_attention(*inputs, return_lse=True)
    same_bits(lse, with_lse(*inputs)[1])
    alone = flex_attention(*inputs, return_aux=AuxRequest())
    assert alone[1].lse is None and torch.equal(alone[0], out)
    torch.testing.assert_close(lse.double(), dense(*doubles(inputs))[1], rtol=1e-5, atol=1e-5)
    scaled = flex_attention(*inputs, scale=0.5, kernel_options={"BLOCK_M": 64})
    torch.testing.assert_close(scaled.double(), dense(*doubles(inputs), scale=0.5)[0], rtol=1e-5, atol=1e-5)


def test_the_number_of_threads_changes_no_bit():
    tensors, inputs = tensors_of(torch.float32), operands()
    threads, results = torch.get_num_threads(), []
    mask = block_mask_of(MASKS["documents"](tensors))
    for count in (1, 2):
        torch.set_num_threads(count)
        out, lse = with_lse(*inputs, SCORES["deberta"](tensors), mask, enable_gqa=True)
        results.append((out, *gradients(out, lse, [*inputs, tensors.c2p, tensors.p2c])))
    torch.set_num_threads(threads)
    for one, other in zip(*results):
        same_bits(one, other)


def test_torchs_operations_by_other_names():
    """Each pair means the same: the second one in words that are tested above."""
    inputs = [x.detach() for x in operands(heads_kv=H)]
    gate, pair = random(H, needs_grad=False), random(H, S, S, needs_grad=False)
    pairs = [
        (lambda s, b, h, q, k: torch.add(s, gate[h], alpha=2), lambda s, b, h, q, k: s + 2 * gate[h]),
        (lambda s, b, h, q, k: torch.rsub(s, gate[h]), lambda s, b, h, q, k: gate[h] - s),
        (lambda s, b, h, q, k: s * torch.div(q - k, 3, rounding_mode="trunc"), lambda s, b, h, q, k: s * ((q - k).abs() // 3) * torch.sign(q - k)),
        (lambda s, b, h, q, k: s * torch.fmod(k - q, 5), lambda s, b, h, q, k: s * ((q - k).abs() % 5) * (k - q).sign()),
        (lambda s, b, h, q, k: s - torch.maximum(q, k) % 7, lambda s, b, h, q, k: s - torch.where(q > k, q, k) % 7),
        (lambda s, b, h, q, k: s.clamp(max=gate[h]), lambda s, b, h, q, k: torch.where(s > gate[h], gate[h], s)),
        (lambda s, b, h, q, k: torch.relu(s) + torch.exp2(s), lambda s, b, h, q, k: s.clip(min=0) + 2.0**s),
        (lambda s, b, h, q, k: s + torch.log2(q + 1) * torch.rsqrt(k + 1), lambda s, b, h, q, k: s + torch.log(q + 1) / 0.6931472 / torch.sqrt(k + 1)),
        (lambda s, b, h, q, k: s * torch.logical_xor(q > 3, k > 3), lambda s, b, h, q, k: s * ((q > 3) != (k > 3)).to(s.dtype)),
        (lambda s, b, h, q, k: s + b.new_full((), 2) * torch.ones_like(h), lambda s, b, h, q, k: s + 2),
        (lambda s, b, h, q, k: s + torch.full((), 2.0) + torch.tensor([1.0, 3.0])[1], lambda s, b, h, q, k: s + 5),
        (lambda s, b, h, q, k: s + pair[h][q][k], lambda s, b, h, q, k: s + pair[h, q, k]),
        (lambda s, b, h, q, k: s + gate[..., h] * gate[-1], lambda s, b, h, q, k: s + gate[h] * gate[3]),
        (lambda s, b, h, q, k: s.where(~(q < k), -1.0), lambda s, b, h, q, k: torch.where(q >= k, s, -1)),
        (lambda s, b, h, q, k: torch.where(s.isneginf() | s.isnan(), 0, torch.expm1(s)), lambda s, b, h, q, k: torch.exp(s) - 1),
    ]  # fmt: skip
    for at, (first, second) in enumerate(pairs):
        got, expected = (flex_attention(*inputs, each) for each in (first, second))
        torch.testing.assert_close(got, expected, msg=lambda m: f"pair {at}: {m}")
        torch.testing.assert_close(got.double(), dense(*(x.double() for x in inputs), lambda s, *at: first(s.float(), *at))[0], rtol=1e-4, atol=1e-4)


ROW = None if torch is None else torch.ones(S)
REFUSED = {
    "if": (lambda s, b, h, q, k: s if q > k else 0, None, r"score_mod decides by a value \(if"),
    "and": (None, lambda b, h, q, k: q > k and q < 9, "mask_mod decides by a value"),
    "cumsum": (lambda s, b, h, q, k: torch.cumsum(s, 0), None, "score_mod calls torch.cumsum, which no score or mask"),
    "method": (lambda s, b, h, q, k: s.softmax(-1), None, "score_mod calls torch.Tensor.softmax, which no"),
    "stack": (lambda s, b, h, q, k: torch.stack([s, s]).sum(), None, "score_mod calls torch.stack"),
    "rounding": (lambda s, b, h, q, k: torch.abs(s, out=s), None, r"score_mod calls torch.abs\(\.\.\., out\)"),
    "vector": (lambda s, b, h, q, k: s + ROW, None, r"score_mod computes with a tensor \[70\].*: index it"),
    "row": (lambda s, b, h, q, k: s + ROW.view(7, 10)[h], None, r"computes with a row of a tensor \[7, 10\]"),
    "row method": (lambda s, b, h, q, k: ROW.view(7, 10)[h].sum(), None, r"takes \.sum of a row of a tensor"),
    "indices": (lambda s, b, h, q, k: s + ROW[q, k], None, "gives 2 indices to a tensor of 1 dim"),
    "slice": (lambda s, b, h, q, k: s + ROW.view(7, 10)[q, 1:2], None, r"by slice\(1, 2, None\) beside values"),
    "float": (lambda s, b, h, q, k: s + ROW[s], None, r"indexes a tensor \[70\] by a float, takes integers"),
    "int": (lambda s, b, h, q, k: s + [1, 2][h], None, "uses a value as a Python integer"),
    "item": (lambda s, b, h, q, k: s * q.item(), None, "score_mod calls torch.Tensor.item"),
    "attribute": (lambda s, b, h, q, k: s.nothing, None, "has no attribute nothing"),
    "text": (lambda s, b, h, q, k: "s", None, "score_mod returns str, must return a tensor"),
    "outside": (lambda s, b, h, q, k: s + ROW[q + k], None, r"element \[70\] of tensor0 \[70\] is asked for"),
    "negative": (lambda s, b, h, q, k: s + ROW[q - 1], None, r"element \[-1\] of tensor0 \[70\] is asked for"),
    "complex": (lambda s, b, h, q, k: s + ROW.cfloat()[q], None, "is torch.complex64, a program reads"),
    "five dims": (lambda s, b, h, q, k: s + ROW.view(1, 1, 1, 1, S)[b, h, q, k, k], None, "those of 4 dims at most"),
    "nine": (lambda s, b, h, q, k: sum((ROW + i)[q] for i in range(9)), None, "read 9 tensors .* 8 at most"),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_cannot_be_said_is_refused_by_name(case):
    score_mod, mask_mod, sentence = REFUSED[case]
    block_mask = mask_mod and BlockMask.from_kv_blocks(
        torch.ones(1, 1, 1, dtype=torch.int32), torch.zeros(1, 1, 1, 1, dtype=torch.int32), BLOCK_SIZE=128,
        mask_mod=mask_mod, seq_lengths=(S, S),
    )  # fmt: skip
    with pytest.raises((TypeError, AttributeError, IndexError, polyhead.Error), match=sentence):
        flex_attention(*operands(heads_kv=H), score_mod, block_mask)


WRONG = {
    "dims": (lambda q, k, v: {"query": q[0]}, "query has 3 dimensions, must have 4"),
    "heads": (lambda q, k, v: {"key": k[:, :2], "value": v[:, :2]}, "key has 2 heads, must have 4 as query, or enable_gqa"),
    "batch": (lambda q, k, v: {"query": q[:1]}, "key has a batch of 2, must have 1 as query, or 1"),
    "array": (lambda q, k, v: {"key": k.detach().numpy()}, "key is a ndarray, must be a torch.Tensor"),
    "mask": (lambda q, k, v: {"block_mask": noop_mask}, "block_mask is a function, must be a BlockMask"),
    "both": (lambda q, k, v: {"return_lse": True, "return_aux": AuxRequest(lse=True)}, "return_lse and return_aux are both"),
    "max": (lambda q, k, v: {"return_aux": AuxRequest(max_scores=True)}, "return_aux asks for max_scores"),
    "lengths": (lambda q, k, v: {"block_mask": block_mask_of(noop_mask, seqlen_q=64)}, r"is for \(64, 70\) queries and keys"),
    "heads of the mask": (
        lambda q, k, v: {"block_mask": create_block_mask(noop_mask, 1, 3, S, S, device="cpu")}, "has heads of 3, must have 1 or 4"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", WRONG)
def test_wrong_arguments_are_refused_by_name(case):
    change, sentence = WRONG[case]
    given = dict(zip(("query", "key", "value"), operands(heads_kv=H)))
    with pytest.raises((polyhead.Error, TypeError), match=sentence):
        flex_attention(**given | change(*given.values()))


def test_a_lost_gradient_is_refused():
    scale = torch.tensor(2.0, requires_grad=True)
    with pytest.raises(TypeError, match="item of a tensor that requires a gradient, which would be lost"):
        flex_attention(*operands(heads_kv=H), lambda s, b, h, q, k: s * scale.item())
    out = flex_attention(*operands(heads_kv=H), functools.partial(lambda s, b, h, q, k, by: s * by, by=scale))
    assert torch.autograd.grad(out.sum(), scale)[0].shape == ()
