"""Masks and scores of the literature as users write them for FlexAttention: each maker gets tensors by name and returns
a mask_mod(b, h, q, k) or a score_mod(score, b, h, q, k)."""

import functools
import math

from optional import torch

if torch is not None:
    from torch._dynamo._trace_wrapped_higher_order_op import TransformGetItemToIndex
    from torch.nn.attention.flex_attention import _vmap_for_bhqkv

B, H, S = 2, 4, 70
W, HEIGHT, WIDTH = 9, 7, 10  # S = HEIGHT * WIDTH


def near(size, kernel):
    """Neighbours of a place, all of them as many: windows at the ends are moved inwards."""
    return lambda q, k: (q.clamp(kernel // 2, size - 1 - kernel // 2) - k).abs() <= kernel // 2


def even_bits(x):
    x = x & 0x5555
    x = (x | (x >> 1)) & 0x3333
    return (x | x >> 2) & 0x0F0F


def row_column(x):
    return torch.div(x, WIDTH, rounding_mode="floor"), x % WIDTH


def natten_2d(t):
    def mask_mod(b, h, q, k):
        (rows_q, columns_q), (rows_k, columns_k) = row_column(q), row_column(k)
        return near(HEIGHT, 3)(rows_q, rows_k) & near(WIDTH, 5)(columns_q, columns_k)

    return mask_mod


def natten_3d(t):
    def mask_mod(b, h, q, k):
        seen = (q // 35 - k // 35).abs() <= 1
        for size, stride in ((5, 7), (7, 1)):
            seen = seen & near(size, 3)(q // stride % size, k // stride % size)
        return seen

    return mask_mod


def block_diffusion(t, length=35, block=8):
    def mask_mod(b, h, q, k):
        clean_q, clean_k = q >= length, k >= length
        block_q = torch.where(clean_q, q - length, q) // block
        block_k = torch.where(clean_k, k - length, k) // block
        own = torch.logical_not(clean_q | clean_k) & (block_q == block_k)
        from_clean = clean_k & torch.where(clean_q, block_k <= block_q, block_k < block_q)
        return own | from_clean

    return mask_mod


def document_window(t):
    """Positions start anew in each document: elements by elements."""

    def mask_mod(b, h, q, k):
        place = q - t.start[t.doc[b, q]]
        return (t.doc[b][q] == t.doc[b][k]) & (k - t.start[t.doc[b, k]] <= place)

    return mask_mod


def tree(t, past=20):
    def mask_mod(b, h, q, k):
        return torch.logical_or(k < past, t.ancestor[q, torch.clamp(k - past, min=0)])

    return mask_mod


MASKS = {
    "causal": lambda t: lambda b, h, q, k: q >= k,
    "window": lambda t: lambda b, h, q, k: (q >= k) & (q - k < W),
    "band": lambda t: lambda b, h, q, k: torch.abs(q - k) <= W,
    "streaming": lambda t: lambda b, h, q, k: (q >= k) & ((k < 4) | (q - k < W)),
    "prefix": lambda t: lambda b, h, q, k: (k <= q) | (k < t.prefix[b]),
    "window_of_head": lambda t: lambda b, h, q, k: (q >= k).logical_and(q - k < t.windows[h]),
    "lengths": lambda t: lambda b, h, q, k: k < t.prefix[b],
    "dilated": lambda t: lambda b, h, q, k: ((q - k).abs() <= 3 * W) & ((q - k) % 3 == 0),
    "strided": lambda t: lambda b, h, q, k: (q >= k) & (((q - k) < 7) | (torch.remainder(q - k, 7) == 0)),
    "fixed": lambda t: lambda b, h, q, k: (k <= q) & ((q // 16 == k // 16) | (k % 16 >= 12)),
    "chunked": lambda t: lambda b, h, q, k: (q // 50 == k // 50) & (k <= q),
    "block_causal": lambda t: lambda b, h, q, k: torch.floor_divide(k, 32) <= torch.floor_divide(q, 32),
    "block_diffusion": block_diffusion,
    "documents": lambda t: lambda b, h, q, k: t.doc[b, q] == t.doc[b, k],
    "document_window": document_window,
    "shared_prefix": lambda t: lambda b, h, q, k: (k <= q) & ((t.branch[k] < 0) | (t.branch[k] == t.branch[q])),
    "global": lambda t: lambda b, h, q, k: t.is_global[q] | t.is_global[k] | ((q - k).abs() <= 3),
    "big_bird": lambda t: lambda b, h, q, k: t.blocks[h, q // 16, k // 16],
    "flamingo": lambda t: lambda b, h, q, k: (t.first[t.image[q]] <= k) & (k < t.last[t.image[q]]),
    "tree": tree,
    "flash_mask": lambda t: lambda b, h, q, k: (k <= q) & (q < t.hidden_from[b, k]),
    "natten_1d": lambda t: lambda b, h, q, k: near(S, 13)(q, k),
    "natten_2d": natten_2d,
    "natten_3d": natten_3d,
    "morton": lambda t: lambda b, h, q, k: (
        ((even_bits(q) - even_bits(k)).abs() <= 2) & ((even_bits(q >> 1) - even_bits(k >> 1)).abs() <= 2)
    ),
    "swin": lambda t: lambda b, h, q, k: (
        ((q // WIDTH + 2) // 4 == (k // WIDTH + 2) // 4) & ((q % WIDTH + 2) // 4 == (k % WIDTH + 2) // 4)
    ),
    "tiles": lambda t: lambda b, h, q, k: (
        ((q // 12 // 2 - k // 12 // 2).abs() <= 1) & ((q % 12 // 2 - k % 12 // 2).abs() <= 1)
    ),
    "axial": lambda t: lambda b, h, q, k: (q // WIDTH == k // WIDTH) | (q % WIDTH == k % WIDTH),
    "images": lambda t: lambda b, h, q, k: (
        (k <= q) | ((t.image_of[b, q] == t.image_of[b, k]) & (t.image_of[b, q] >= 0))
    ),
    "keep": lambda t: lambda b, h, q, k: t.kept[b, k],
    "hash": lambda t: lambda b, h, q, k: ((q * 40503 ^ k * 65537) * 48271 >> 7) % 65536 < int(0.3 * 65536),
}


def t5(t, exact=16, farthest=50):
    def score_mod(score, b, h, q, k):
        distance = torch.clamp(q - k, min=0)
        ratio = torch.log(distance.float().clamp(min=1) / exact) / math.log(farthest / exact)
        far = exact + (ratio * exact).to(torch.int64)
        bucket = torch.where(distance < exact, distance, torch.minimum(far, torch.tensor(2 * exact - 1)))
        return score + t.buckets[bucket, h]

    return score_mod


def swin_bias(t):
    def score_mod(score, b, h, q, k):
        rows, columns = q // WIDTH - k // WIDTH, q % WIDTH - k % WIDTH
        return score + t.swin_table[(rows + HEIGHT - 1) * (2 * WIDTH - 1) + columns + WIDTH - 1, h]

    return score_mod


def deberta(t, reach=16):
    def score_mod(score, b, h, q, k):
        at = (q - k + reach).clamp(0, 2 * reach - 1)
        return score + t.c2p[b, h, q, at] + t.p2c[b, h, k, at]

    return score_mod


def capped(score, b, h, q, k, cap):
    return cap * torch.tanh(score / cap)


def log_distance(t):
    """-inf at and above the diagonal is what hides: the other side of torch.where must leave no NaN in its gradient."""

    def score_mod(score, b, h, q, k):
        bias = t.tau[h] * torch.log((q - k).to(score.dtype))
        return torch.where(q > k, score + bias, torch.where(q == k, score, -float("inf")))

    return score_mod


def log_distance_in_range(t):
    """The same without an infinity on any side."""

    def score_mod(score, b, h, q, k):
        bias = t.tau[h] * torch.log((q - k).clamp(min=1).to(score.dtype))
        return torch.where(q >= k, score + bias, -float("inf"))

    return score_mod


SCORES = {
    "alibi": lambda t: lambda score, b, h, q, k: score - t.slope[h] * torch.abs(q - k),
    "alibi_one_sided": lambda t: lambda score, b, h, q, k: score + t.slope[h] * (k - q),
    "t5": t5,
    "relative": lambda t: lambda score, b, h, q, k: score + t.relative[h, q - k + S - 1],
    "relative_clipped": lambda t: lambda score, b, h, q, k: score + t.clipped[h, (q - k).clamp(-8, 8) + 8],
    "swin": swin_bias,
    "deberta": deberta,
    "pair": lambda t: lambda score, b, h, q, k: score + t.pair[b, h, q, k],
    "graphormer": lambda t: lambda score, b, h, q, k: score + t.hops_table[h, t.hops[b, q, k]],
    "forgetting": lambda t: lambda score, b, h, q, k: score + t.gates[b, h, q] - t.gates[b, h, k],
    "softcap": lambda t: functools.partial(capped, cap=2.5),
    "softcap_learned": lambda t: lambda score, b, h, q, k: capped(score, b, h, q, k, t.cap),
    "temperature": lambda t: lambda score, b, h, q, k: score * t.tau[h],
    "log_length": lambda t: lambda score, b, h, q, k: score * torch.log(q + 1.0),
    "kerple": lambda t: lambda score, b, h, q, k: score - t.tau[h] * torch.log1p(t.slope[h].square() * (q - k).abs()),
    "sandwich": lambda t: lambda score, b, h, q, k: (
        score + t.tau[h] * (torch.cos(0.3 * (q - k)) + torch.cos(0.03 * (q - k)) - 2)
    ),
    "log_distance": log_distance,
    "negated_causal": lambda t: lambda score, b, h, q, k: torch.where(q >= k, score, -float("inf")),
    "sigmoid_gate": lambda t: lambda score, b, h, q, k: score * torch.sigmoid(t.gates[b, h, k] - score) + 0.1 * score**2,
    "ignores_score": lambda t: lambda score, b, h, q, k: t.relative[h, q - k + S - 1],
}


def tensors_of(dtype):
    """What the makers read. Floats are leaves that require gradients."""
    generator = torch.Generator().manual_seed(0)

    def ints(low, high, *dims):
        return torch.randint(low, high, dims, generator=generator)

    def floats(*dims):
        return (torch.randn(dims, generator=generator) * 0.5).to(dtype).requires_grad_()

    class Tensors:
        prefix = ints(1, S, B).to(torch.int32)
        windows = ints(1, 40, H)
        doc = ints(0, 4, B, S).sort(-1).values
        start = torch.tensor([0, 15, 30, 50])
        branch = ints(-1, 3, S).sort().values
        is_global = ints(0, 12, S) == 0
        blocks = ints(0, 3, H, 5, 5) > 0
        first, last = ints(0, 30, 3), ints(30, S, 3)
        image = ints(0, 3, S).to(torch.int32)
        ancestor = ints(0, 2, S, S - 20).bool()
        hidden_from = ints(0, S + 1, B, S)
        image_of = ints(-1, 3, B, S).sort(-1).values.to(torch.int16)
        kept = ints(0, 3, B, S) > 0
        hops = ints(0, 9, B, S, S).to(torch.int32)
        slope, tau, cap = floats(H), floats(H), torch.tensor(2.0, dtype=dtype, requires_grad=True)
        buckets, relative, clipped = floats(32, H), floats(H, 2 * S - 1), floats(H, 17)
        swin_table = floats((2 * HEIGHT - 1) * (2 * WIDTH - 1), H)
        c2p, p2c, pair = floats(B, H, S, 32), floats(B, H, S, 32), floats(B, H, S, S)
        hops_table, gates = floats(H, 9), floats(B, H, S)

    return Tensors


def floats_of(tensors):
    return [x for x in vars(tensors).values() if isinstance(x, torch.Tensor) and x.is_floating_point()]


def dense(query, key, value, score_mod=None, mask_mod=None, scale=None):
    """out and lse, the functions called for each score as torch's own formula calls them, in query's dtype."""
    places = [torch.arange(n) for n in (*query.shape[:3], key.shape[2])]
    group = query.shape[1] // key.shape[1]
    key, value = (x.expand(query.shape[0], -1, -1, -1).repeat_interleave(group, 1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[3] ** -0.5 if scale is None else scale)
    if score_mod is not None:
        with TransformGetItemToIndex():
            scores = _vmap_for_bhqkv(score_mod, prefix=(0,))(scores, *places).to(value.dtype)
    if mask_mod is not None:
        with TransformGetItemToIndex():
            scores = torch.where(_vmap_for_bhqkv(mask_mod, prefix=())(*places), scores, -torch.inf)
    seen = (scores > -torch.inf).any(-1, keepdim=True)
    shown = torch.where(seen, scores, 0.0)
    return torch.where(seen, shown.softmax(-1), 0.0) @ value, torch.where(seen[..., 0], shown.logsumexp(-1), -torch.inf)
