"""torch's scaled_dot_product_attention with the switch on, and polyhead's of that name: values, shapes, layouts."""

import itertools
import math

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_switch_judge import (
    DTYPES, SEED, assert_exact, assert_taken, counted, gradients, in_double, kept, rounding_of_out, weights_of,
)  # fmt: skip


def direct(*arguments, **options):
    return polyhead.torch.scaled_dot_product_attention(*arguments, **options)


def switched(*arguments, **options):
    return F.scaled_dot_product_attention(*arguments, **options)


def draw(*shape, dtype=torch.float32, requires_grad=True):
    return torch.randn(shape, dtype=torch.float64).to(dtype).requires_grad_(requires_grad)


def by_formula(
    query, key, value, attn_mask=None, dropout_p=0.0, is_causal=False, scale=None, enable_gqa=False, keep=None
):  # fmt: skip
    """torch's math path; mask and is_causal together, which it refuses, as one mask."""
    if is_causal and attn_mask is not None:
        causal = torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
        attn_mask = attn_mask & causal if attn_mask.dtype == torch.bool else attn_mask.masked_fill(~causal, -torch.inf)
        is_causal = False
    if attn_mask is not None:
        attn_mask = as_bias(attn_mask, query.dtype).to(query.dtype)
    with sdpa_kernel(SDPBackend.MATH):
        return torch.ops.aten._scaled_dot_product_attention_math(
            query, key, value, attn_mask, dropout_p, is_causal, keep, scale=scale, enable_gqa=enable_gqa
        )[0]


def heads_repeated(key, query, options):
    return key.repeat_interleave(query.shape[-3] // key.shape[-3], -3) if options.get("enable_gqa") else key


def dropped(query, key, options):
    """What dropout keeps in `check`'s call; None without dropout."""
    if not options.get("dropout_p"):
        return None
    key = heads_repeated(key, query, options)
    lead, scores = torch.broadcast_shapes(query.shape[:-2], key.shape[:-2]), (query.shape[-2], key.shape[-2])
    keep = kept((math.prod(lead[:-1]), math.prod(lead[-1:]), *scores), options["dropout_p"])
    return keep.reshape(*lead, *scores)


def allowances(doubles, options, exact, dtype):
    """For the gradients of query, key, value and mask, by `rounding_of_out`."""
    query, key, _ = doubles
    mask, causal = options.get("attn_mask"), torch.ones(query.shape[-2], key.shape[-2], dtype=torch.bool).tril()
    bias = torch.zeros((), dtype=torch.float64) if mask is None else as_bias(mask, torch.float64)
    hidden = as_bias(causal, torch.float64) if options.get("is_causal") else torch.zeros((), dtype=torch.float64)
    scale = options.get("scale") or query.shape[-1] ** -0.5
    repeated = heads_repeated(key, query, options)
    moved = rounding_of_out(query, repeated, bias + hidden, exact, *weights_of([exact]), scale, dtype)
    return [moved[0], _summed(moved[1], key), 0.0, _summed(moved[2], bias)]


def as_bias(mask, dtype):
    return mask if mask.dtype != torch.bool else torch.zeros(mask.shape, dtype=dtype).masked_fill(~mask, -torch.inf)


def _summed(x, like):
    """Over what was broadcast or repeated; heads that share a key too."""
    if x.dim() > 2 and like.dim() > 2 and x.shape[-3] != like.shape[-3] and like.shape[-3] > 1:
        x = x.unflatten(-3, (like.shape[-3], -1)).sum(-3)
    return x.sum_to_size(like.shape)


def check(function, arguments, options, what=""):
    """Output and gradients against the formula. Returns the output."""
    query, key = arguments[:2]
    inputs = [*arguments, options.get("attn_mask")]
    keep = dropped(query, key, options)
    torch.manual_seed(SEED)
    out = function(*arguments, **options)
    doubles, double_options = in_double(list(arguments)), in_double(options)
    exact = by_formula(*doubles, **double_options, keep=keep)
    yardstick = by_formula(*arguments, **options, keep=keep)
    double_inputs = [*doubles, double_options.get("attn_mask")]
    allowed = allowances(doubles, double_options, exact, query.dtype)
    wanted = [isinstance(x, torch.Tensor) and x.requires_grad for x in inputs]
    assert_exact(
        [out, *gradients([out], inputs)],
        [yardstick, *gradients([yardstick], inputs)],
        [exact, *gradients([exact], double_inputs)],
        what,
        [0.0, *(each for each, asked in zip(allowed, wanted) if asked)],
        logits=float(query.detach().abs().max() * key.detach().abs().max()) * query.shape[-1] ** 0.5,
    )
    return out


def opinfo_samples(dtype):
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")
    (info,) = [op for op in database.op_db if op.name == "nn.functional.scaled_dot_product_attention"]
    torch.manual_seed(0)
    samples = [((x.input, *x.args), x.kwargs) for x in info.sample_inputs("cpu", dtype, requires_grad=True)]
    assert len(samples) >= 25
    print(f"{len(samples)} samples of OpInfo, {dtype}")
    return samples


@pytest.mark.parametrize("function, dtype", [(f, d) for f in (direct, switched) for d in DTYPES if d != torch.float64])
def test_opinfo_samples(function, dtype):
    with counted() as records:
        for index, (arguments, options) in enumerate(opinfo_samples(dtype)):
            check(function, arguments, options, f"sample {index} {options}")
    assert_taken(records, backward=True)


def test_opinfo_samples_in_float64():
    """Ours by name computes them with the reference; under the switch they stay torch's bit for bit, and it is said."""

    def results(arguments, options):
        torch.manual_seed(SEED)
        out = F.scaled_dot_product_attention(*arguments, **options)
        return [out, *gradients([out], arguments)]

    for index, (arguments, options) in enumerate(opinfo_samples(torch.float64)):
        expected = results(arguments, options)
        with counted() as records:
            assert all(map(torch.equal, results(arguments, options), expected))
        assert records and all(record.kernel is None and "float64" in record.reason for record in records)
        with counted() as records:
            check(direct, arguments, options, f"sample {index} {options}")
        assert {record.kernel for record in records} == {"reference"}


SHAPES = {
    "plain": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "value wider": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 12)),
    "value narrower": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 3)),
    "two dimensions": ((5, 8), (7, 8), (7, 6)),
    "three dimensions": ((3, 5, 8), (3, 7, 8), (3, 7, 8)),
    "five dimensions": ((2, 3, 4, 5, 8), (2, 3, 4, 7, 8), (2, 3, 4, 7, 8)),
    "five and three": ((2, 3, 4, 5, 8), (4, 7, 8), (3, 1, 7, 8)),
    "batch of keys 1": ((3, 4, 5, 8), (1, 4, 7, 8), (1, 4, 7, 8)),
    "batch of queries 1": ((1, 4, 5, 8), (3, 4, 7, 8), (3, 4, 7, 8)),
    "one head of keys": ((2, 4, 5, 8), (2, 1, 7, 8), (2, 1, 7, 8)),
    "one head of values": ((2, 4, 5, 8), (2, 4, 7, 8), (2, 1, 7, 8)),
    "one head of queries": ((2, 1, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)),
    "one key": ((2, 4, 5, 8), (2, 4, 1, 8), (2, 4, 1, 8)),
}


@pytest.mark.parametrize("function", [direct, switched])
@pytest.mark.parametrize("name", SHAPES)
def test_shapes(function, name):
    torch.manual_seed(1)
    with counted() as records:
        for options in ({}, {"is_causal": True}, {"dropout_p": 0.3}, {"scale": 0.7}):
            check(function, [draw(*shape) for shape in SHAPES[name]], options, f"{name} {options}")
    assert_taken(records, backward=True)


@pytest.mark.parametrize("function", [direct, switched])
@pytest.mark.parametrize("heads", [(8, 2, 2), (8, 1, 1), (6, 3, 3), (8, 4, 2), (8, 8, 2), (4, 4, 4)])
def test_grouped_heads(function, heads):
    torch.manual_seed(2)
    arguments = [draw(2, h, s, 8) for h, s in zip(heads, (5, 7, 7))]
    with counted() as records:
        for options in ({}, {"is_causal": True}, {"dropout_p": 0.3}, {"attn_mask": torch.rand(2, 1, 5, 7) > 0.4}):
            check(function, arguments, {**options, "enable_gqa": True}, str(options))
    assert_taken(records, backward=True)


MASKS = [(5, 7), (1, 7), (5, 1), (7,), (), (4, 5, 7), (4, 1, 7), (2, 1, 1, 7), (1, 4, 5, 7), (2, 4, 5, 7), (2, 1, 5, 7)]


@pytest.mark.parametrize("function", [direct, switched])
@pytest.mark.parametrize("dtype", ["bool", "float32", "bfloat16", "float16", "float64"])
def test_masks(function, dtype):
    """Of every shape that broadcasts and any float dtype, with gradients, alone and beside is_causal."""
    torch.manual_seed(3)
    arguments = [draw(2, 4, s, 8) for s in (5, 7, 7)]
    with counted() as records:
        for shape, causal in itertools.product(MASKS, [False, True]):
            mask = torch.rand(shape) > 0.3 if dtype == "bool" else draw(*shape, dtype=getattr(torch, dtype))
            check(function, arguments, {"attn_mask": mask, "is_causal": causal}, f"mask {shape} causal {causal}")
    assert_taken(records, backward=True)


def test_mask_over_five_dimensions():
    torch.manual_seed(4)
    arguments = [draw(2, 3, 4, s, 8) for s in (5, 7, 7)]
    for shape in [(2, 3, 4, 5, 7), (3, 1, 5, 7), (2, 1, 1, 1, 7), (4, 5, 7)]:
        check(direct, arguments, {"attn_mask": draw(*shape)}, f"mask {shape}")


@pytest.mark.parametrize("function", [direct, switched])
def test_any_subset_of_gradients(function):
    torch.manual_seed(5)
    with counted():
        for wanted in itertools.product([False, True], repeat=4):
            *arguments, mask = (
                draw(*shape, requires_grad=grad)
                for shape, grad in zip([(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (4, 1, 7)], wanted)
            )
            check(function, arguments, {"attn_mask": mask}, str(wanted))


@pytest.mark.parametrize("function", [direct, switched])
def test_sizes_of_zero(function):
    """Every lattice point: the result's shape, its zeros, and gradients of the inputs' shapes."""
    count = 0
    with counted() as records:
        for batch, heads, seqlen_q, seqlen_k, head_dim, head_dim_v in itertools.product((0, 2), repeat=6):
            shapes = [(batch, heads, seqlen_q, head_dim), (batch, heads, seqlen_k, head_dim)]
            arguments = [draw(*shape) for shape in [*shapes, (batch, heads, seqlen_k, head_dim_v)]]
            for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)}):
                out = function(*arguments, **options)
                assert out.shape == (batch, heads, seqlen_q, head_dim_v)
                if not seqlen_k:
                    assert out.count_nonzero() == 0
                elif not head_dim and not options:  # all scores are 0: the mean
                    torch.testing.assert_close(out, arguments[2].mean(2, keepdim=True).expand_as(out))
                out.sum().backward()
                for x in arguments:
                    assert x.grad.shape == x.shape and x.grad.isfinite().all()
                count += 1
    assert count == 192
    assert_taken(records, backward=True)


LAYOUTS = list(itertools.permutations(range(4)))


@pytest.mark.parametrize("function", [direct, switched])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_layouts(function, dtype):
    """Whatever order the memory has: gradients lie [B, S, H, D] in memory; torch_strides_test.py has the strides of out."""
    torch.manual_seed(6)
    with counted():
        for order in LAYOUTS:
            inverse = [order.index(dim) for dim in range(4)]
            arguments = []
            for seqlen in (5, 7, 7):
                shape = (2, 3, seqlen, 8)
                memory = draw(*(shape[d] for d in order), dtype=dtype).detach()
                arguments.append(memory.permute(inverse).requires_grad_())
            check(function, arguments, {"is_causal": True}, str(order))
    leaf = draw(2, 3, 5, 8, dtype=dtype)
    with counted():
        out = function(leaf, leaf, leaf)
        (grad,) = torch.autograd.grad(out, leaf, torch.ones_like(out).sum().expand_as(out))
        assert grad.shape == leaf.shape


@pytest.mark.parametrize("function", [direct, switched])
def test_strides_of_any_kind(function):
    torch.manual_seed(7)
    every_other = draw(2, 4, 10, 16).detach()[:, :, ::2, ::2].requires_grad_()
    expanded = draw(1, 1, 7, 8).detach().expand(2, 4, 7, 8).requires_grad_()
    with counted():
        check(function, [every_other, expanded, expanded], {})
        out = function(every_other, expanded, expanded)
        grad = torch.autograd.grad(out, every_other, torch.tensor(1.0).expand_as(out))[0]
        assert grad.isfinite().all()


def test_hidden_queries_are_zero_and_hidden_nan_stays_hidden():
    torch.manual_seed(8)
    query, key, value = (draw(2, 4, s, 8) for s in (5, 7, 7))
    with torch.no_grad():
        key[:, :, 3], value[:, :, 3] = torch.nan, torch.inf
    mask = torch.rand(5, 7) > 0.3
    mask[:, 3] = False
    mask[2] = False
    with counted():
        out = F.scaled_dot_product_attention(query, key, value, mask)
        out.sum().backward()
    assert out.isfinite().all() and out[:, :, 2].count_nonzero() == 0
    assert all(x.grad.isfinite().all() for x in (query, key, value)) and query.grad[:, :, 2].count_nonzero() == 0


def test_dropout_repeats_with_the_seed_and_differs_without():
    query = draw(1, 2, 16, 8)
    with counted():
        torch.manual_seed(0)
        first, second = (F.scaled_dot_product_attention(query, query, query, dropout_p=0.5) for _ in range(2))
        torch.manual_seed(0)
        third = F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
        everything = F.scaled_dot_product_attention(query, query, query, dropout_p=1.0)
    assert torch.equal(first, third) and not torch.equal(first, second) and everything.count_nonzero() == 0
