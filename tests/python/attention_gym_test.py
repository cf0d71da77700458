"""The masks and scores of attention-gym (github.com/meta-pytorch/attention-gym), each made as its users make them: functions
that close over numbers and tensors, put together by and_masks and or_masks. Names as there; the code is ours."""

import pytest
from optional import needs_torch, torch

pytestmark = needs_torch
if torch is not None:
    from torch.nn.attention.flex_attention import and_masks, create_block_mask, or_masks

    from polyhead.torch import flex_attention
    from torch_formula import random

from flex_functions import B, H, S, dense


def causal(b, h, q_idx, kv_idx):
    return q_idx >= kv_idx


def sliding_window(window_size):
    def window(b, h, q_idx, kv_idx):
        return q_idx - kv_idx <= window_size

    mask = and_masks(window, causal)
    mask.__name__ = f"sliding_window_{window_size}"
    return mask


def dilated_sliding_window(window_size, dilation):
    def mask(b, h, q_idx, kv_idx):
        distance = torch.abs(q_idx - kv_idx)
        return (distance <= window_size) & (distance % dilation == 0)

    return mask


def prefix_lm(prefix_length):
    def prefix(b, h, q_idx, kv_idx):
        return kv_idx < prefix_length

    mask = or_masks(prefix, causal)
    mask.__name__ = f"prefix_lm_{prefix_length}"
    return mask


def documents(mask_mod, offsets):
    """mask_mod within each document, by its own positions."""
    counts = offsets[1:] - offsets[:-1]
    document = torch.repeat_interleave(torch.arange(len(counts), dtype=torch.int32), counts)

    def mask(b, h, q_idx, kv_idx):
        same = document[q_idx] == document[kv_idx]
        q_logical = q_idx - offsets[document[q_idx]]
        kv_logical = kv_idx - offsets[document[kv_idx]]
        return same & mask_mod(b, h, q_logical, kv_logical)

    return mask


def natten(width, height, kernel_width, kernel_height, place_of):
    def mask(b, h, q_idx, kv_idx):
        q_x, q_y = place_of(q_idx)
        kv_x, kv_y = place_of(kv_idx)
        center_x = q_x.clamp(kernel_width // 2, width - 1 - kernel_width // 2)
        center_y = q_y.clamp(kernel_height // 2, height - 1 - kernel_height // 2)
        return ((center_x - kv_x).abs() <= kernel_width // 2) & ((center_y - kv_y).abs() <= kernel_height // 2)

    return mask


def tiled(width, tile_width, tile_height):
    def place_of(idx):
        tile_size, tiles_per_row = tile_width * tile_height, width // tile_width
        tile, within = idx // tile_size, idx % tile_size
        x = tile % tiles_per_row * tile_width + within % tile_width
        y = tile // tiles_per_row * tile_height + within // tile_width
        return x, y

    return place_of


def morton(idx):
    def every_other(n):
        n = n & 0x55555555
        for shift, keep in ((1, 0x33333333), (2, 0x0F0F0F0F), (4, 0x00FF00FF)):
            n = (n | (n >> shift)) & keep
        return n

    return every_other(idx), every_other(idx >> 1)


def flamingo(image_boundaries):
    """Text tokens see the image before them; [images + 1]."""
    image_of_token = torch.bucketize(torch.arange(S), image_boundaries, right=True) - 1

    def mask(b, h, q_idx, kv_idx):
        return kv_idx // 16 == image_of_token[q_idx]

    return mask


def block_diffusion(n, block_size):
    def mask(b, h, q_idx, kv_idx):
        x0_q, x0_kv = q_idx >= n, kv_idx >= n
        block_q = torch.where(x0_q == 1, (q_idx - n) // block_size, q_idx // block_size)
        block_kv = torch.where(x0_kv == 1, (kv_idx - n) // block_size, kv_idx // block_size)
        diagonal = (block_q == block_kv) & (x0_q == x0_kv)
        offset = (block_q > block_kv) & (x0_kv == 1) & (x0_q == 0)
        before = (block_q >= block_kv) & (x0_kv == 1) & (x0_q == 1)
        return diagonal | offset | before

    return mask


OFFSETS = (0, 11, 12, 40, S)


def masks():
    offsets = torch.tensor(OFFSETS)
    window = sliding_window(7)
    return {
        "causal": causal,
        "sliding_window": window,
        "dilated_sliding_window": dilated_sliding_window(12, 3),
        "prefix_lm": prefix_lm(20),
        "document_mask": documents(causal, offsets),
        "document_prefix_lm": documents(prefix_lm(5), offsets),
        "natten": natten(10, 7, 3, 5, lambda idx: (idx % 10, idx // 10)),
        "tiled_natten": natten(10, 7, 3, 5, tiled(10, 5, 7)),
        "morton_natten": natten(16, 16, 5, 5, morton),
        "flamingo": flamingo(torch.tensor([0, 9, 30, 50])),
        "block_diffusion": block_diffusion(35, 4),
    }


def alibi(num_heads):
    def score_mod(score, b, h, q_idx, kv_idx):
        scale = torch.exp2(-((h + 1) * 8.0 / num_heads))
        return score + (kv_idx - q_idx) * scale

    return score_mod


if torch is not None:

    @torch.library.custom_op("approx::tanh", mutates_args=())
    def _tanh_approx(x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x)

    @_tanh_approx.register_fake
    def _(x):
        return torch.empty_like(x)

    class TanhApprox(torch.autograd.Function):
        """With a rule for vmap, so that torch's formula takes it."""

        @staticmethod
        def forward(x):
            return torch.ops.approx.tanh(x)

        @staticmethod
        def setup_context(ctx, inputs, output):
            ctx.save_for_backward(output)

        @staticmethod
        def backward(ctx, grad):
            (out,) = ctx.saved_tensors
            return grad * (1 - out * out)

        @staticmethod
        def vmap(info, in_dims, x):
            return torch.tanh(x), 0


def tanh_softcap(soft_cap, approx=False):
    tanh = TanhApprox.apply if approx else torch.tanh

    def score_mod(score, b, h, q_idx, kv_idx):
        return soft_cap * tanh(score / soft_cap)

    return score_mod


def relative_bias(table):
    def score_mod(score, b, h, q_idx, kv_idx):
        return score + table[h, q_idx - kv_idx + S - 1]

    return score_mod


def transformer_xl(query_by_distance):
    """(q + v) . r[i - j], computed before for each query and distance."""

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + query_by_distance[b, h, q_idx, q_idx - kv_idx + S - 1]

    return score_mod


def activation(score, b, h, q_idx, kv_idx):
    return torch.nn.functional.relu(score) * 2


def scores():
    return {
        "alibi": alibi(H),
        "tanh_softcap": tanh_softcap(3),
        "tanh_softcap_approx": tanh_softcap(3, approx=True),
        "relative_bias": relative_bias(random(H, 2 * S - 1)),
        "transformer_xl": transformer_xl(random(B, H, S, 2 * S - 1)),
        "activation": activation,
        "gelu": lambda score, b, h, q, k: torch.nn.functional.gelu(score),
        "gelu_tanh": lambda score, b, h, q, k: torch.nn.functional.gelu(score, approximate="tanh"),
        "silu": lambda score, b, h, q, k: torch.nn.functional.silu(score),
        "leaky_relu": lambda score, b, h, q, k: torch.nn.functional.leaky_relu(score, 0.2),
    }


def agree(score_mod, mask_mod):
    inputs = [random(B, H, S, 16, seed=i) for i in range(3)]
    block_mask = mask_mod and create_block_mask(mask_mod, B, H, S, S, device="cpu", BLOCK_SIZE=32)
    results = [flex_attention(*inputs, score_mod, block_mask), dense(*inputs, score_mod, mask_mod)[0]]
    torch.testing.assert_close(*results, rtol=3e-5, atol=3e-5)
    direction = random(B, H, S, 16, seed=7, needs_grad=False)
    leaves = [*inputs, *(cell.cell_contents for cell in getattr(score_mod, "__closure__", None) or ()
                         if isinstance(cell.cell_contents, torch.Tensor))]  # fmt: skip
    ours, expected = (torch.autograd.grad((out * direction).sum(), leaves) for out in results)
    for one, other in zip(ours, expected):
        torch.testing.assert_close(one, other, rtol=3e-4, atol=3e-4)


@pytest.mark.parametrize("name", masks() if torch is not None else [])
def test_masks(name):
    agree(None, masks()[name])


@pytest.mark.parametrize("name", scores() if torch is not None else [])
def test_scores(name):
    agree(scores()[name], None)


def test_both():
    agree(alibi(H), masks()["document_mask"])


def test_an_operator_of_the_same_name_is_not_taken_for_torchs():
    @torch.library.custom_op("polyhead_gym_test::exp", mutates_args=())
    def exp(x: torch.Tensor) -> torch.Tensor:
        return x * 2

    query = random(B, H, S, 16, needs_grad=False)
    with pytest.raises(TypeError, match="score_mod calls polyhead_gym_test::exp, which no score or mask program can say"):
        flex_attention(query, query, query, lambda score, b, h, q, k: torch.ops.polyhead_gym_test.exp(score))
    with pytest.raises(TypeError, match="score_mod calls polyhead_gym_test::exp"):
        flex_attention(query, query, query, lambda score, b, h, q, k: torch.ops.polyhead_gym_test.exp.default(score))


def test_what_multiplies_vectors_is_refused_by_name():
    """As MLA's rotary part: a program knows numbers."""
    rotary = random(B, H, S, 8, needs_grad=False)

    def score_mod(score, b, h, q_idx, kv_idx):
        return score + rotary[b, h, q_idx] @ rotary[b, h, kv_idx]

    query = random(B, H, S, 16, needs_grad=False)
    with pytest.raises(TypeError, match="computes with a row of a tensor"):
        flex_attention(query, query, query, score_mod)
