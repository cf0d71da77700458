"""Scores and masks to use as they are or to compose: plain functions for `polyhead.attention`'s score and mask::

    def mask(b, q, k, doc):
        return programs.documents(b, q, k, doc) & programs.causal(q, k)

    out = polyhead.attention(query, key, value, score=programs.alibi, mask=mask, captured={"slope": slope, "doc": doc})

Beside score, b (batch), h (query head), q (query) and k (key), what has no default is a tensor that the call captures, and
what has one is a number, which ``functools.partial(programs.sliding_window, window=128)`` sets. q and k count within
their sequence; where a function takes offset, the call fills it in: query i stands at key i + offset. Each works on NumPy arrays too: ``programs.causal(q[:, None], k)`` is a
dense mask.

Words that functions may use, beside Python's operators and NumPy's functions: ``where``, ``minimum``, ``maximum``, ``clamp``,
``absolute``, ``power``, ``floor``, ``ceil``, ``exp``, ``log``, ``tanh``, ``sigmoid``, ``erf``, ``sqrt``, ``rsqrt``, ``sin``, ``cos``.
"""

# ruff: noqa: D103
from __future__ import annotations

import math
from typing import Any

from polyhead._program import (
    absolute, ceil, clamp, cos, erf, exp, floor, log, maximum, minimum, power, rsqrt, sigmoid, sin, sqrt, tanh, where,
)  # fmt: skip

MASKS = (
    "causal", "sliding_window", "band", "streaming_llm", "prefix_lm", "window_of_head", "padding", "keep", "longformer",
    "global_tokens", "sparse_strided", "sparse_fixed", "chunked", "block_causal", "block_diffusion", "documents",
    "shared_prefix", "big_bird", "flamingo", "tree", "flash_mask", "natten_1d", "natten_2d", "natten_3d", "morton",
    "swin_windows", "sliding_tiles", "axial", "images_or_causal", "random",
)  # fmt: skip
SCORES = (
    "alibi", "t5", "relative", "relative_clipped", "swin", "deberta", "pair_bias", "graphormer", "forgetting", "softcap",
    "temperature", "log_length", "kerple_log", "kerple_power", "sandwich",
)  # fmt: skip
WEIGHTS = ("sigmoid_attention", "relu_attention")  # scores that are weights: with normalizer="none"

__all__ = [
    "MASKS", "SCORES", "WEIGHTS", *MASKS, *SCORES, *WEIGHTS, "absolute", "ceil", "clamp", "cos", "erf", "exp", "floor",
    "log", "maximum", "minimum", "power", "rsqrt", "sigmoid", "sin", "sqrt", "tanh", "where",
]  # fmt: skip


def causal(q: Any, k: Any, offset: Any = 0) -> Any:
    """Nothing that comes later."""
    return k <= q + offset


def sliding_window(q: Any, k: Any, offset: Any = 0, window: int = 256) -> Any:
    """The last ``window`` keys. Mistral 7B (arXiv:2310.06825)."""
    distance = q + offset - k
    return (distance >= 0) & (distance < window)


def band(q: Any, k: Any, offset: Any = 0, width: int = 64) -> Any:
    """Keys at most ``width`` away on either side. Longformer's window (arXiv:2004.05150)."""
    return absolute(q + offset - k) <= width


def streaming_llm(q: Any, k: Any, offset: Any = 0, sinks: int = 4, window: int = 256) -> Any:
    """The last ``window`` keys and the first ``sinks`` ones. StreamingLLM (arXiv:2309.17453)."""
    distance = q + offset - k
    return (distance >= 0) & ((k < sinks) | (distance < window))


def prefix_lm(b: Any, q: Any, k: Any, prefix: Any, offset: Any = 0) -> Any:
    """Causal behind a prefix that all see: prefix [B], its lengths. T5 (arXiv:1910.10683)."""
    return (k <= q + offset) | (k < prefix[b])


def window_of_head(h: Any, q: Any, k: Any, window: Any, offset: Any = 0) -> Any:
    """The last window[h] keys: window [H]. Adaptive spans (arXiv:1905.07799)."""
    distance = q + offset - k
    return (distance >= 0) & (distance < window[h])


def padding(b: Any, k: Any, lengths: Any) -> Any:
    """The keys before lengths[b]: lengths [B]."""
    return k < lengths[b]


def keep(b: Any, k: Any, kept: Any) -> Any:
    """Keys that are marked: kept [B, Sk], bool. As torch's key_padding_mask, true where it is false."""
    return kept[b, k]


def longformer(q: Any, k: Any, window: int = 256, dilation: int = 2) -> Any:
    """Every ``dilation``-th key of a window on either side. Longformer (arXiv:2004.05150)."""
    return (absolute(q - k) <= window) & ((q - k) % dilation == 0)


def global_tokens(q: Any, k: Any, is_global: Any, width: int = 64) -> Any:
    """A band, and tokens that see all and are seen by all: is_global [S], bool. Longformer (arXiv:2004.05150)."""
    return is_global[q] | is_global[k] | band(q, k, width=width)


def sparse_strided(q: Any, k: Any, stride: int = 32) -> Any:
    """The last ``stride`` keys and every ``stride``-th before. Sparse Transformer (arXiv:1904.10509)."""
    distance = q - k
    return (distance >= 0) & ((distance < stride) | (distance % stride == 0))


def sparse_fixed(q: Any, k: Any, block: int = 32, summary: int = 8) -> Any:
    """The own block and the last ``summary`` keys of earlier ones. Sparse Transformer (arXiv:1904.10509)."""
    return (k <= q) & ((q // block == k // block) | (k % block >= block - summary))


def chunked(q: Any, k: Any, offset: Any = 0, chunk: int = 8192) -> Any:
    """Causal within chunks. Llama 4's local layers."""
    return (k <= q + offset) & ((q + offset) // chunk == k // chunk)


def block_causal(q: Any, k: Any, offset: Any = 0, block: int = 32) -> Any:
    """All of the own block and of earlier ones: frames of a video, say."""
    return k // block <= (q + offset) // block


def block_diffusion(q: Any, k: Any, length: int = 128, block: int = 16) -> Any:
    """A noisy sequence of ``length`` tokens before its clean copy. Block diffusion (arXiv:2503.09573)."""
    clean_q, clean_k = q >= length, k >= length
    block_q = where(clean_q, q - length, q) // block
    block_k = where(clean_k, k - length, k) // block
    own = ~clean_k & ~clean_q & (block_q == block_k)
    return own | (clean_k & where(clean_q, block_k <= block_q, block_k < block_q))


def documents(b: Any, q: Any, k: Any, doc: Any) -> Any:
    """The own document alone: doc [B, S], its number for each token."""
    return doc[b, q] == doc[b, k]


def shared_prefix(q: Any, k: Any, branch: Any) -> Any:
    """Branches behind one prefix, each causal: branch [S], its number, -1 in the prefix. Hydragen (arXiv:2402.05099)."""
    return (k <= q) & ((branch[k] < 0) | (branch[k] == branch[q]))


def big_bird(h: Any, q: Any, k: Any, table: Any, block: int = 64) -> Any:
    """Blocks of a table: table [H, Sq / block, Sk / block], bool. BigBird (arXiv:2007.14062), MoBA, NSA."""
    return table[h, q // block, k // block]


def flamingo(q: Any, k: Any, image: Any, first: Any, last: Any) -> Any:
    """Texts that see their images alone: image [Sq] of each query; first, last [Sq] of images: their keys (arXiv:2204.14198)."""
    return (k >= first[image[q]]) & (k < last[image[q]])


def tree(q: Any, k: Any, ancestor: Any, past: int = 0) -> Any:
    """Drafts of a tree behind ``past`` tokens: ancestor [Sq, Sk - past], bool. SpecInfer (arXiv:2305.09781)."""
    return (k < past) | ancestor[q, maximum(k - past, 0)]


def flash_mask(b: Any, q: Any, k: Any, last: Any) -> Any:
    """Causal, each key up to the query before last[b, k]: last [B, Sk]. FlashMask (arXiv:2410.01359)."""
    return (k <= q) & (q < last[b, k])


def _near(q: Any, k: Any, size: int, kernel: int) -> Any:
    """NATTEN's neighbours in one dimension: a window that is moved inwards at the ends, so that all see ``kernel`` keys."""
    center = clamp(q, kernel // 2, size - 1 - kernel // 2)
    return absolute(center - k) <= kernel // 2


def natten_1d(q: Any, k: Any, size: int = 256, kernel: int = 13) -> Any:
    """The nearest ``kernel`` (odd) of ``size`` places. Neighborhood attention (arXiv:2204.07143)."""
    return _near(q, k, size, kernel)


def natten_2d(q: Any, k: Any, height: int = 16, width: int = 16, kernel: int = 7) -> Any:
    """The nearest kernel x kernel of height x width places. Neighborhood attention (arXiv:2204.07143)."""
    return _near(q // width, k // width, height, kernel) & _near(q % width, k % width, width, kernel)


def natten_3d(q: Any, k: Any, depth: int = 4, height: int = 8, width: int = 8, kernel: int = 3) -> Any:
    """The nearest kernel^3 of depth x height x width places. Neighborhood attention (arXiv:2204.07143)."""
    area = height * width
    return _near(q // area, k // area, depth, kernel) & natten_2d(q % area, k % area, height, width, kernel)


def _even_bits(x: Any) -> Any:
    """Bits 0, 2, 4, ... of an int of 16 bits, side by side."""
    x = x & 0x5555
    for shift, kept in ((1, 0x3333), (2, 0x0F0F), (4, 0x00FF)):
        x = (x | (x >> shift)) & kept
    return x


def morton(q: Any, k: Any, reach: int = 3) -> Any:
    """A window on a plane whose places are numbered in Morton order (up to 2^16). PyTorch's FlexAttention blog."""
    near_x = absolute(_even_bits(q) - _even_bits(k)) <= reach
    return near_x & (absolute(_even_bits(q >> 1) - _even_bits(k >> 1)) <= reach)


def swin_windows(q: Any, k: Any, width: int = 16, window: int = 8, shift: int = 0) -> Any:
    """Square windows of an image, the last at the edges when shifted. Swin Transformer (arXiv:2103.14030)."""
    same_row = (q // width + shift) // window == (k // width + shift) // window
    return same_row & ((q % width + shift) // window == (k % width + shift) // window)


def sliding_tiles(q: Any, k: Any, width: int = 32, tile: int = 8, reach: int = 1) -> Any:
    """All of the tiles of an image that are at most ``reach`` tiles away. Sliding tile attention (arXiv:2502.04507)."""
    near_row = absolute(q // width // tile - k // width // tile) <= reach
    return near_row & (absolute(q % width // tile - k % width // tile) <= reach)


def axial(q: Any, k: Any, width: int = 16) -> Any:
    """The own row and the own column of an image. Axial attention (arXiv:1912.12180)."""
    return (q // width == k // width) | (q % width == k % width)


def images_or_causal(b: Any, q: Any, k: Any, image: Any) -> Any:
    """Causal, and all of the own image: image [B, S], its number, -1 in text. Gemma 3 (arXiv:2503.19786)."""
    return (k <= q) | ((image[b, q] == image[b, k]) & (image[b, q] >= 0))


def random(q: Any, k: Any, part: float = 0.5, seed: int = 0) -> Any:
    """About ``part`` of all pairs, the same at each call."""
    mixed = (q * 40503 ^ k * 65537 ^ seed * 69069) * 48271
    mixed = (mixed ^ (mixed >> 15)) * 40503
    return (mixed >> 7) % 65536 < int(part * 65536)


def alibi(score: Any, h: Any, q: Any, k: Any, slope: Any, offset: Any = 0) -> Any:
    """Less by slope[h] a step: slope [H]. ALiBi (arXiv:2108.12409)."""
    return score - slope[h] * absolute(q + offset - k)


def t5(score: Any, h: Any, q: Any, k: Any, table: Any, offset: Any = 0, buckets: int = 32, farthest: int = 128) -> Any:
    """A number for each bucket of distances, later keys in the first: table [buckets, H]. T5's decoder (arXiv:1910.10683)."""
    distance, exact = maximum(q + offset - k, 0), buckets // 2
    # Below ``exact`` the logarithm is not taken; its argument is kept from 0.
    ratio = log(maximum(distance, exact) / exact) / float(log(farthest / exact))
    far = exact + (ratio * (buckets - exact)).astype(int)
    return score + table[where(distance < exact, distance, minimum(far, buckets - 1)), h]


def relative(score: Any, h: Any, q: Any, k: Any, table: Any, longest: int = 512) -> Any:
    """A number for each distance: table [H, 2 * longest - 1], of q - k = 0 in the middle. Music Transformer (arXiv:1809.04281)."""
    return score + table[h, q - k + longest - 1]


def relative_clipped(score: Any, h: Any, q: Any, k: Any, table: Any, reach: int = 16) -> Any:
    """A number for each distance up to ``reach``: table [H, 2 * reach + 1]. Shaw et al. (arXiv:1803.02155)."""
    return score + table[h, clamp(q - k, -reach, reach) + reach]


def swin(score: Any, h: Any, q: Any, k: Any, table: Any, width: int = 8) -> Any:
    """Distances in a window of width x width: table [(2 * width - 1)^2, H]. Swin Transformer (arXiv:2103.14030)."""
    rows, columns = q // width - k // width, q % width - k % width
    return score + table[(rows + width - 1) * (2 * width - 1) + columns + width - 1, h]


def deberta(score: Any, b: Any, h: Any, q: Any, k: Any, content_to_position: Any, position_to_content: Any, reach: int = 16) -> Any:
    """Two terms by clipped distance: content_to_position [B, H, Sq, 2 * reach], position_to_content [B, H, Sk, 2 * reach]
    (arXiv:2006.03654).
    """  # fmt: skip
    at = clamp(q - k + reach, 0, 2 * reach - 1)
    return score + content_to_position[b, h, q, at] + position_to_content[b, h, k, at]


def pair_bias(score: Any, b: Any, h: Any, q: Any, k: Any, bias: Any) -> Any:
    """A number for each pair: bias [B, H, Sq, Sk]. Evoformer, AlphaFold 2 (doi:10.1038/s41586-021-03819-2)."""
    return score + bias[b, h, q, k]


def graphormer(score: Any, b: Any, h: Any, q: Any, k: Any, distance: Any, table: Any) -> Any:
    """A number for each distance in a graph: distance [B, Sq, Sk], ints; table [H, distances] (arXiv:2106.05234)."""
    return score + table[h, distance[b, q, k]]


def forgetting(score: Any, b: Any, h: Any, q: Any, k: Any, log_forget: Any) -> Any:
    """Sums of log forget gates between key and query: log_forget [B, H, S], summed (arXiv:2503.02130)."""
    return score + log_forget[b, h, q] - log_forget[b, h, k]


def softcap(score: Any, cap: float = 50.0) -> Any:
    """Within -cap and cap. Gemma 2 (arXiv:2408.00118)."""
    return cap * tanh(score / cap)


def temperature(score: Any, h: Any, tau: Any) -> Any:
    """A learned factor of each head: tau [H]. Swin V2 (arXiv:2111.09883)."""
    return score * tau[h]


def log_length(score: Any, q: Any, offset: Any = 0) -> Any:
    """Times the logarithm of the number of keys, for long texts (arXiv:2202.12172)."""
    return score * log(q + offset + 1.0)


def kerple_log(score: Any, h: Any, q: Any, k: Any, r1: Any, r2: Any) -> Any:
    """-r1 log(1 + r2 distance): r1, r2 [H]. KERPLE (arXiv:2205.09921)."""
    return score - r1[h] * log(1 + r2[h] * absolute(q - k))


def kerple_power(score: Any, h: Any, q: Any, k: Any, r1: Any, r2: Any) -> Any:
    """-r1 distance^r2: r1, r2 [H]. KERPLE (arXiv:2205.09921)."""
    return score - r1[h] * where(q == k, 0.0, power(maximum(absolute(q - k), 1) * 1.0, r2[h]))


def sandwich(score: Any, h: Any, q: Any, k: Any, ratio: Any, features: int = 16) -> Any:
    """Cosines of the distance over ``features`` wavelengths, times ratio [H]. Sandwich (arXiv:2212.10356)."""
    total = sum(cos((q - k) * (1e-4 ** (i / features))) for i in range(features))
    return score + ratio[h] * (total - features)


def sigmoid_attention(score: Any, length: int = 1024) -> Any:
    """The weight itself, sigmoid(score - log ``length``), of about as many keys: with ``normalizer="none"``. Sigmoid
    attention (arXiv:2409.04431)."""
    return sigmoid(score - math.log(length))


def relu_attention(score: Any, length: int = 1024) -> Any:
    """The weight itself, max(score, 0) / ``length``: with ``normalizer="none"``. ReLU attention (arXiv:2309.08586)."""
    return maximum(score, 0.0) / length
