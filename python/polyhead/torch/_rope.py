"""Rotary positions (Su et al. 2021, arXiv:2104.09864)."""

from typing import NamedTuple

import torch

from polyhead import Error


class Rope(NamedTuple):
    """Rotary positions of q and k: pair p of a head turns by ``position * base ** (-2 p / D)``; positions start at 0.

    Attributes
    ----------
    base : float
    interleaved : bool
        Which elements are a pair. False: p and p + D/2 (Llama of Hugging Face). True: 2 p and 2 p + 1 (Meta's Llama).
    """

    base: float = 10000.0
    interleaved: bool = False


def rotated(heads, rope: Rope):
    """[B, S, H, D], turned by its positions; computed in float32, or float64 if heads are."""
    head_dim = heads.shape[-1]
    if head_dim % 2:
        raise Error(f"head_dim is {head_dim}, must be even for rope")
    wide = heads if heads.dtype == torch.float64 else heads.float()
    angle = angles(rope, head_dim, torch.arange(heads.shape[1], device=heads.device))[:, None]
    return turned(wide, angle.cos().to(wide.dtype), angle.sin().to(wide.dtype), rope.interleaved).to(heads.dtype)


def angles(rope: Rope, head_dim, positions):
    """[n, head_dim / 2] in float64, of positions [n]."""
    pair = torch.arange(0, head_dim, 2, device=positions.device, dtype=torch.float64)
    return positions[:, None] * rope.base ** (-pair / head_dim)


def turned(heads, cos, sin, interleaved):
    """Each pair of the last dim by its angle; cos and sin [..., pairs] broadcast."""
    if interleaved:
        first, second = heads[..., 0::2], heads[..., 1::2]
    else:
        first, second = heads.chunk(2, -1)
    pairs = (first * cos - second * sin, first * sin + second * cos)
    return torch.stack(pairs, -1).flatten(-2) if interleaved else torch.cat(pairs, -1)
