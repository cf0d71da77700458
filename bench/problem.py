"""One line of a suite: the size and the options of an attention problem, its operands and its arithmetic.

The syntax is the command's (`polyhead bench --help`): BxHxSxD, refined BxH/GxSQ/SKxD/DV, then options. Of the options
the suites of this folder use a part; any other is refused by name.

What is timed of a problem is its direction: forward; backward, which is the gradients alone, given what forward wrote;
or both, one after the other. A suite's name tells: backward*.txt, training*.txt (both), and the rest forward.
"""

import argparse
import pathlib
from dataclasses import dataclass
from functools import cached_property
from typing import Optional

import ml_dtypes
import numpy as np

FORWARD, BACKWARD, BOTH = DIRECTIONS = ("forward", "backward", "forward+backward")
DTYPES = {"f32": np.dtype(np.float32), "bf16": np.dtype(ml_dtypes.bfloat16), "f16": np.dtype(np.float16)}


def _pair(text: str) -> tuple[int, int]:
    first, _, second = text.partition("/")
    return int(first), int(second or first)


def _dims(text: str) -> tuple[int, ...]:
    return tuple(int(size) for size in text.split(","))


@dataclass(frozen=True)
class Problem:
    """[batch, num_heads, seqlen, head_dim] and what hides or changes scores. `line` parses back to it."""

    line: str
    batch: int
    num_heads: int
    num_heads_kv: int
    seqlen_q: int
    seqlen_k: int
    head_dim: int
    head_dim_v: int
    dtype: str = "f32"
    causal: bool = False
    align: Optional[str] = None
    window: Optional[tuple[int, int]] = None
    mask: Optional[str] = None  # DIMS[:KIND]
    bias_dims: Optional[tuple[int, ...]] = None
    lengths: Optional[str] = None
    dropout_p: float = 0.0

    @property
    def decode(self) -> bool:
        return self.seqlen_q <= 8 and self.seqlen_k >= 64 * self.seqlen_q

    @property
    def tiny(self) -> bool:
        return max(self.seqlen_q, self.seqlen_k, self.head_dim, self.head_dim_v) <= 16

    @property
    def offset(self) -> int:
        return self.seqlen_k - self.seqlen_q if self.align == "bottom_right" else 0

    @property
    def operand_bytes(self) -> int:
        """Of query, key, value and out together."""
        q_and_out = self.num_heads * self.seqlen_q * (self.head_dim + self.head_dim_v)
        return self.batch * (q_and_out + self._kv_elements) * DTYPES[self.dtype].itemsize

    @property
    def kv_bytes(self) -> int:
        return self.batch * self._kv_elements * DTYPES[self.dtype].itemsize

    @property
    def _kv_elements(self) -> int:
        return self.num_heads_kv * self.seqlen_k * (self.head_dim + self.head_dim_v)

    def key_lengths(self) -> np.ndarray:
        """Keys of each sequence that are not padding: with `--lengths=k` spread from half of seqlen_k to all of it."""
        if not self.lengths:
            return np.full(self.batch, self.seqlen_k, np.int32)
        return np.linspace(self.seqlen_k // 2, self.seqlen_k, self.batch).astype(np.int32)

    def key_limits(self) -> tuple[np.ndarray, np.ndarray]:
        """First and end key of each query, [Sq], as causal and window tell."""
        at = np.arange(self.seqlen_q) + self.offset
        first = np.zeros_like(at)
        end = np.full_like(at, self.seqlen_k)
        if self.causal:
            end = np.minimum(end, at + 1)
        if self.window is not None:
            left, right = self.window
            first = np.maximum(first, at - left) if left >= 0 else first
            end = np.minimum(end, at + right + 1) if right >= 0 else end
        return first, np.maximum(end, 0)

    @property
    def scores_bytes(self) -> int:
        """Of one [B, H, Sq, Sk] array in the dtype: what unfused attention stores several of."""
        return self.batch * self.num_heads * self.seqlen_q * self.seqlen_k * DTYPES[self.dtype].itemsize

    @property
    def needs(self) -> tuple[str, ...]:
        """The operands whose gradients backward gives: all that have one."""
        return ("query", "key", "value") + (("attn_bias",) if self.bias_dims else ())

    @cached_property
    def _visible_pairs(self) -> float:
        """Of all heads; a mask's holes count as visible, for they may stand anywhere."""
        first, end = self.key_limits()
        ends = np.minimum(end[None, :], self.key_lengths()[:, None])
        return float(np.maximum(ends - first[None, :], 0).sum()) * self.num_heads

    def flops(self, direction: str) -> float:
        """Of the products for each visible pair: S and O forward; S, dP, dQ, dK and dV backward."""
        forward = 2.0 * (self.head_dim + self.head_dim_v) * self._visible_pairs
        backward = 2.0 * (3 * self.head_dim + 2 * self.head_dim_v) * self._visible_pairs
        return {FORWARD: forward, BACKWARD: backward, BOTH: forward + backward}[direction]


def _options() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(add_help=False, exit_on_error=False, allow_abbrev=False)
    parser.add_argument("size")
    parser.add_argument("--dtype", choices=DTYPES, default="f32")
    parser.add_argument("--causal", action="store_true")
    parser.add_argument("--align", choices=["top_left", "bottom_right"])
    parser.add_argument("--window", type=_dims)
    parser.add_argument("--mask")
    parser.add_argument("--bias", type=_dims, dest="bias_dims")
    parser.add_argument("--lengths", choices=["k"])
    parser.add_argument("--dropout", type=float, default=0.0, dest="dropout_p")
    return parser


def parse_problem(line: str) -> Problem:
    """The problem that `line` names; a ValueError says what is wrong with it."""
    words = line.split("#")[0].split()
    try:
        options, unknown = _options().parse_known_args(words)
        if unknown:
            raise ValueError(f"option {unknown[0]} is not one that the peers are measured with")
        batch, heads, seqlen, dim = options.size.split("x")
        options = {k: v for k, v in vars(options).items() if k != "size"}
        (num_heads, num_heads_kv), (seqlen_q, seqlen_k), (head_dim, head_dim_v) = map(_pair, (heads, seqlen, dim))
        if options["lengths"] and (options["causal"] or options["window"]) and options["align"] != "top_left":
            raise ValueError("--lengths=k beside --causal or --window is measured with --align top_left only")
    except (ValueError, argparse.ArgumentError) as error:
        raise ValueError(f"problem '{' '.join(words)}': {error}") from None
    sizes = (int(batch), num_heads, num_heads_kv, seqlen_q, seqlen_k, head_dim, head_dim_v)
    return Problem(" ".join(words), *sizes, **options)


def read_suite(path: pathlib.Path) -> list[Problem]:
    """The problems of a suite's lines; '#' begins a comment."""
    with open(path) as file:
        return [parse_problem(line) for line in file if line.split("#")[0].strip()]


def suites() -> list[pathlib.Path]:
    """Those of this folder that peers are measured with; programs have a bench of their own, flex_attention.py."""
    return sorted(p for p in (pathlib.Path(__file__).parent / "suites").glob("*.txt") if p.stem != "programs")


def suite_direction(name: str) -> str:
    """What is timed of a suite's problems."""
    return BACKWARD if name.startswith("backward") else BOTH if name.startswith("training") else FORWARD


def _random_mask(text: str, rng: np.random.Generator) -> np.ndarray:
    """A mask of the kinds that the command draws: random, 7 of 8 True; padding, True up to a key of each row; blocks,
    1 of 2 blocks of 64 x 64 all False, else random."""
    sizes, _, kind = text.partition(":")
    dims = _dims(sizes)
    if kind == "padding":
        return np.arange(dims[3]) < rng.integers(dims[3] // 2, dims[3] + 1, (*dims[:3], 1))
    mask = rng.random(dims) < 0.875
    if kind == "blocks":
        rows, columns = -(-dims[2] // 64), -(-dims[3] // 64)
        kept = rng.random((*dims[:2], rows, columns)) < 0.5
        mask &= kept.repeat(64, axis=2).repeat(64, axis=3)[:, :, : dims[2], : dims[3]]
    elif kind not in ("", "random"):
        raise ValueError(f"--mask's kind is '{kind}', must be random, padding or blocks")
    return mask


class Operands:
    """Random operands of a problem, in the memory order [B, H, S, D]; and those of its options."""

    def __init__(self, problem: Problem, seed: int = 1):
        p, rng = problem, np.random.default_rng(seed)

        def draw(*dims: int) -> np.ndarray:
            return rng.standard_normal(dims, dtype=np.float32).astype(DTYPES[p.dtype])

        self.query = draw(p.batch, p.num_heads, p.seqlen_q, p.head_dim)
        self.key = draw(p.batch, p.num_heads_kv, p.seqlen_k, p.head_dim)
        self.value = draw(p.batch, p.num_heads_kv, p.seqlen_k, p.head_dim_v)
        self.mask = _random_mask(p.mask, rng) if p.mask else None
        self.bias = rng.standard_normal(p.bias_dims, dtype=np.float32) if p.bias_dims else None
        self.grad_out = draw(p.batch, p.num_heads, p.seqlen_q, p.head_dim_v)
        self.lengths = p.key_lengths()

    def dense_mask(self, problem: Problem) -> Optional[np.ndarray]:
        """All that hides (mask, lengths, window; causal too beside them) as one bool array that broadcasts to
        [B, H, Sq, Sk], True = may look: for peers without a word for it. None if nothing but causal hides."""
        p = problem
        if p.window is None and self.mask is None and not p.lengths:
            return None
        keys = np.arange(p.seqlen_k)
        visible = np.ones((1, 1, 1, 1), bool) if self.mask is None else self.mask
        if p.lengths:
            visible = visible & (keys < self.lengths[:, None])[:, None, None, :]
        if p.window is not None or p.causal:
            first, end = p.key_limits()
            visible = visible & ((keys >= first[:, None]) & (keys < end[:, None]))[None, None]
        return np.ascontiguousarray(visible)
