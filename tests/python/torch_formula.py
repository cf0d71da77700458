"""Attention by the formula on torch tensors in float64, and what tests of `polyhead.torch` compare with it."""

from optional import torch

INF = float("inf")


def naive(query, key, value, bias=None, scale=None):
    """out and logsumexp by the formula in float64, of [B, M, H, K]; bias broadcasts to [B, H, Mq, Mk]."""
    query, key, value = (x.double() for x in (query, key, value))
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if bias is not None:
        scores = scores + bias
    seen = scores > -INF
    alive = seen.any(-1, keepdim=True)
    weights = torch.where(alive, scores, 0).softmax(-1) * (seen & alive)
    logsumexp = torch.where(alive[..., 0], torch.where(alive, scores, 0).logsumexp(-1), -INF)
    return torch.einsum("bhij,bjhd->bihd", weights, value), logsumexp


def random(*shape, seed=0, dtype=None, needs_grad=True):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=dtype or torch.float32).requires_grad_(needs_grad)


def close(got, expected, tolerance=2e-5):
    assert got.shape == expected.shape
    torch.testing.assert_close(got.double(), expected.double(), rtol=0, atol=tolerance)


def bias_of(visible):
    """Bool, True = may look, as what is added to scores."""
    return torch.zeros(visible.shape, dtype=torch.float64).masked_fill(~visible, -INF)
