"""What the rows are held to: fractions of what the machine can do, and ratios against peers."""

from dataclasses import dataclass
from typing import Optional

from problem import BACKWARD, FORWARD, Problem


@dataclass(frozen=True)
class Goal:
    name: str
    fraction: Optional[float] = None  # of the measured FMA peak; of the measured read bandwidth where decoding
    torch: Optional[float] = None  # at least this many times as fast
    ort: Optional[float] = None  # than the best of onnxruntime's operators


MAX_EXTRA_MEMORY = 0.05  # forward: workspace over Q+K+V+O, from this many keys on:
EXTRA_MEMORY_FROM = 1024

MAX_PEAK_MEMORY = 0.1  # forward + backward: peak over that of the unfused formula, at this many keys:
PEAK_MEMORY_AT = 8192


def _decode_goal(p: Problem) -> Goal:
    bf16 = p.dtype == "bf16"
    if p.num_heads == 4 * p.num_heads_kv:
        return Goal(f"decode, GQA 4:1, {p.dtype}", 0.80, torch=20 if bf16 else 3, ort=None if bf16 else 2)
    return Goal(f"decode, MHA, {p.dtype}", 0.80, torch=7 if bf16 else 1.9)


def _amx_goal(p: Problem) -> Optional[Goal]:
    """The same in the matrix unit that torch uses too: what its peak bounds there, docs/kernels.md counts."""
    s, d = p.seqlen_k, p.head_dim
    if p.causal:
        return Goal("bf16 forward, causal, S <= 512, AMX", torch=4) if s <= 512 else None
    return Goal(f"bf16 forward, D={d}, AMX", torch=3 if d <= 64 else 2)


def _plain_goal(p: Problem, amx: bool) -> Optional[Goal]:
    """Full or causal attention, nothing else hidden or added."""
    s, d = p.seqlen_k, p.head_dim
    if amx and p.dtype == "bf16":
        return _amx_goal(p)
    if p.dtype == "bf16" and not p.causal:
        return Goal(f"bf16 forward, D={d}", 0.87 if d >= 128 else 0.80, torch=2.3)
    if p.dtype != "f32":
        return None
    if p.causal and d == 64 and s >= 512:
        fraction, torch = (0.86, 1.25) if s >= 4096 else (0.83, 1.5) if s >= 1024 else (0.78, 2.2)
        return Goal(f"causal forward, S={s}", fraction, torch=torch, ort=2)
    if p.causal:
        return None
    if s <= 128:
        return Goal("forward f32, S=128" if s == 128 else "forward f32, S < 128", 0.80, torch=1.4, ort=1.3)
    if d == 32:
        return Goal("forward f32, D=32", 0.80, torch=1.4)
    if d == 128:
        return Goal("forward f32, full, D=128", 0.90, torch=1.12, ort=1.02)
    if d == 64 and s >= 256:
        return Goal("forward f32, full, D=64", 0.88, torch=1.25, ort=1.07)
    return None


def _forward_goal(p: Problem, amx: bool) -> Optional[Goal]:
    if p.dropout_p > 0 or p.bias_dims:
        return None  # held to goals together with their gradients only
    if p.window is not None:
        return Goal("window 256 at S=4096, forward", torch=6)
    if p.mask or p.lengths:
        return Goal("padding or bool mask, forward", torch=1.5)
    if p.decode:
        return _decode_goal(p)
    if p.tiny:
        return Goal("tiny heads, forward", torch=20, ort=10)
    return _plain_goal(p, amx)


def _backward_goal(p: Problem, threads: int, amx: bool) -> Optional[Goal]:
    if p.window is not None or p.mask or p.lengths or p.dropout_p > 0 or p.bias_dims or p.seqlen_k < 256:
        return None
    if p.dtype == "bf16" and amx:
        return Goal(f"bf16 backward, D={p.head_dim}, AMX", torch=2)
    if p.dtype == "bf16":
        return Goal(f"bf16 backward, D={p.head_dim}", 0.85, torch=1.7)
    if p.dtype != "f32" or p.num_heads != p.num_heads_kv:
        return None
    if p.batch * p.num_heads == 1 and threads == 2:
        return Goal("backward, B*H = 1 on 2 threads", torch=2.3)
    if not p.causal:
        return Goal(f"backward f32, full, D={p.head_dim}", 0.90, torch=1.25)
    if p.seqlen_k < 1024:
        return Goal("backward f32, causal, S < 1k", torch=2)
    return Goal("backward f32, causal, S >= 1k", 0.82, torch=1.4)


def _training_goal(p: Problem) -> Optional[Goal]:
    if p.dropout_p > 0:
        return Goal("dropout, forward + backward", torch=3)
    if p.bias_dims:
        return Goal("bias with gradient, forward + backward", torch=2)
    if p.tiny:
        return Goal("tiny heads, forward + backward", torch=10)
    return None


def goal_of(p: Problem, direction: str, threads: int, kernel: str = "") -> Optional[Goal]:
    """The goal that a problem's row stands for where `kernel` computes it; None if it is shown for comparison only."""
    amx = kernel == "cpu_amx"
    if direction == FORWARD:
        return _forward_goal(p, amx)
    return _backward_goal(p, threads, amx) if direction == BACKWARD else _training_goal(p)
