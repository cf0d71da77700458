"""The strides of scaled_dot_product_attention's out, against torch's own, over layouts, sizes, options and ranks."""

import itertools

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from torch.nn import functional as F


def switched(*arguments, **options):
    with polyhead.torch.enabled():
        return F.scaled_dot_product_attention(*arguments, **options)


def direct(*arguments, **options):
    return polyhead.torch.scaled_dot_product_attention(*arguments, **options)


LAYOUTS = {
    "contiguous": lambda b, h, s, d: torch.randn(b, h, s, d),
    "[B, S, H, D]": lambda b, h, s, d: torch.randn(b, s, h, d).transpose(1, 2),
    "[S, B, H, D]": lambda b, h, s, d: torch.randn(s, b, h, d).permute(1, 2, 0, 3),
    "[B, H, D, S]": lambda b, h, s, d: torch.randn(b, h, d, s).transpose(2, 3),
    "every other": lambda b, h, s, d: torch.randn(b, h, 2 * s, 2 * d)[:, :, ::2, ::2],
    "every other row": lambda b, h, s, d: torch.randn(b, h, 2 * s, d)[:, :, ::2],
    "packed": lambda b, h, s, d: torch.randn(b, s, 3, h, d)[:, :, 0].transpose(1, 2),
    "expanded batch": lambda b, h, s, d: torch.randn(1, h, s, d).expand(b, h, s, d),
    "expanded heads": lambda b, h, s, d: torch.randn(b, 1, s, d).expand(b, h, s, d),
    "expanded rows": lambda b, h, s, d: torch.randn(b, h, 1, d).expand(b, h, s, d),
    "[B, S, H, D], expanded heads": lambda b, h, s, d: torch.randn(b, s, 1, d).expand(b, s, h, d).transpose(1, 2),
    "[S, B, H, D], expanded batch": lambda b, h, s, d: torch.randn(s, 1, h, d).expand(s, b, h, d).permute(1, 2, 0, 3),
    "expanded elements": lambda b, h, s, d: torch.randn(b, h, s, 1).expand(b, h, s, d),
    "expanded all": lambda b, h, s, d: torch.randn(1, 1, 1, 1).expand(b, h, s, d),
}
SIZES = [(3, 5, 8, 4), (1, 5, 8, 4), (3, 1, 8, 4), (3, 5, 1, 4), (3, 5, 8, 1), (0, 5, 8, 4), (3, 0, 8, 4), (3, 5, 0, 4)]


def assert_as_torchs(function, arguments, options, case):
    expected = F.scaled_dot_product_attention(*arguments, **options)
    got = function(*arguments, **options)
    assert got.stride() == expected.stride() and got.shape == expected.shape, case
    if not options.get("dropout_p"):
        torch.testing.assert_close(got, expected, rtol=2e-5, atol=2e-6, msg=str(case))


@pytest.mark.parametrize("function", [direct, switched])
@pytest.mark.parametrize("layout", LAYOUTS)
def test_of_every_layout(layout, function):
    torch.manual_seed(1)
    for size, key_layout in itertools.product(SIZES, ("contiguous", "[B, S, H, D]", "[B, H, D, S]", "expanded heads")):
        batch, heads, seqlen_q, head_dim = size
        for seqlen_k, head_dim_v, grad in itertools.product((seqlen_q, 6, 0), (head_dim, head_dim + 2), (False, True)):
            query = LAYOUTS[layout](*size).requires_grad_(grad)
            key = LAYOUTS[key_layout](batch, heads, seqlen_k, head_dim)
            value = LAYOUTS[key_layout](batch, heads, seqlen_k, head_dim_v)
            for options in ({}, {"is_causal": True}, {"attn_mask": torch.ones(seqlen_q, seqlen_k, dtype=torch.bool)}):
                if seqlen_q == 0 == seqlen_k or not seqlen_k and options:
                    continue  # torch's formula has NaN where no key is
                assert_as_torchs(function, (query, key, value), options, (size, key_layout, seqlen_k, head_dim_v, grad))


def test_layouts_in_a_graph():
    """The strides of fake tensors too, by which a compiled graph goes on."""
    for name, layout in LAYOUTS.items():
        query, key = layout(3, 5, 8, 4), torch.randn(3, 8, 5, 4).transpose(1, 2)
        for options in ({}, {"attn_mask": torch.zeros(8, 8)}, {"dropout_p": 0.5}):
            torch._dynamo.reset()
            compiled = torch.compile(direct, fullgraph=True, backend="aot_eager")(query, key, key, **options)
            assert compiled.stride() == F.scaled_dot_product_attention(query, key, key, **options).stride(), name


MASKS = {
    "square": lambda: torch.zeros(8, 8), "transposed": lambda: torch.zeros(8, 8).t(), "keys": lambda: torch.zeros(1, 8),
    "expanded": lambda: torch.zeros(8, 1).expand(8, 8), "heads": lambda: torch.zeros(6, 8, 8),
    "one head": lambda: torch.zeros(1, 8, 8), "whole": lambda: torch.zeros(3, 6, 8, 8),
    "padding": lambda: torch.ones(3, 1, 1, 8, dtype=torch.bool), "grad": lambda: torch.zeros(8, 8, requires_grad=True),
}  # fmt: skip


@pytest.mark.parametrize("function", [direct, switched])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_of_options_and_ranks(dtype, function):
    def draw(*shape):
        return torch.randn(*shape, dtype=dtype)

    query, key = draw(3, 8, 6, 4).transpose(1, 2), draw(3, 8, 6, 4).transpose(1, 2)
    few = draw(3, 8, 2, 4).transpose(1, 2)
    rank_5 = draw(2, 3, 8, 6, 4).transpose(2, 3)
    calls = {name: ((query, key, key), {"attn_mask": mask()}) for name, mask in MASKS.items()} | {
        "dropout": ((query, key, key), {"dropout_p": 0.5}),
        "fewer heads": ((query, few, few), {"enable_gqa": True}),
        "one batch of keys": ((query, key[:1], key[:1]), {}),
        "rank 2": ((draw(4, 8).t(),) * 3, {}),
        "rank 3": ((query[0],) * 3, {}),
        "rank 5": ((rank_5,) * 3, {}),
    }
    for name, (arguments, options) in calls.items():
        if options.get("attn_mask") is not None and options["attn_mask"].dtype.is_floating_point:
            options["attn_mask"] = options["attn_mask"].detach().to(dtype).requires_grad_(name == "grad")
        expected = F.scaled_dot_product_attention(*arguments, **options)
        assert function(*arguments, **options).stride() == expected.stride(), name
