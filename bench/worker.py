"""The process that measures: polyhead and its peers side by side, on a fixed number of threads.

peers.py starts one for each number of threads, on as many CPUs. It reads a request a line on stdin and answers with a
line of JSON.
"""

import contextlib
import functools
import json
import os
import platform
import sys
import timeit
from importlib import metadata
from typing import Callable, Optional

import measure
import numpy as np
import polyhead
import rivals
import rivals_backward
from problem import BACKWARD, BOTH, DTYPES, FORWARD, Operands, Problem, parse_problem

OURS = "polyhead"
CROWDED = {"jax"}  # its pool has as many threads as CPUs, beside the calling one
READ_BYTES = 1 << 30  # far more than any cache
SECONDS_PER_ROUND = 6.0  # a row whose rounds last longer gets fewer of them


def _contenders(direction: str, threads: int) -> dict[str, Callable[[Problem, Operands], rivals.Contender]]:
    if direction != FORWARD:
        makers = {
            OURS: rivals_backward.polyhead,
            "polyhead bshd": rivals_backward.polyhead_bshd,
            "torch": rivals_backward.torch,
            "torch fused": rivals_backward.torch_fused,
            "jax": rivals_backward.jax,
        }
        return {name: functools.partial(make, direction=direction) for name, make in makers.items()}

    def on_threads(name):
        def make(p, x):
            import rivals_ort

            return getattr(rivals_ort, name)(p, x, threads)

        return make

    return {
        OURS: rivals.polyhead,
        "polyhead bshd": rivals.polyhead_bshd,
        "torch": rivals.torch,
        "ort MultiHeadAttention": on_threads("multi_head"),
        "ort MultiHeadAttention bnsh": on_threads("multi_head_bnsh"),
        "ort Attention-23": on_threads("attention_23"),
        "ort GroupQueryAttention": on_threads("group_query"),
        "jax": rivals.jax,
    }


def peak_gflops(dtype: str, threads: int) -> Optional[float]:
    """What the FMA units of `threads` cores do in registers alone; None if the package cannot tell."""
    native = getattr(polyhead, "_core", polyhead._bind)
    probe = getattr(native, "measured_peak_gflops", None)
    return probe(DTYPES[dtype].name) * threads if probe else None


class Bandwidth:
    """Reads memory with torch's sum, the fastest plain reader at hand (as fast as a hand-written loop)."""

    def __init__(self):
        self._memory = None

    def gb_per_s(self) -> Optional[float]:
        try:
            import torch
        except ModuleNotFoundError:
            return None
        if self._memory is None:
            self._memory = torch.zeros(READ_BYTES // 4, dtype=torch.float32)
        best = min(timeit.repeat(self._memory.sum, number=1, repeat=3))
        return READ_BYTES / best * 1e-9

    def release(self) -> None:
        self._memory = None


def _largest(before: Optional[float], after: Optional[float]) -> Optional[float]:
    return None if before is None or after is None else max(before, after)


def _prepare(p: Problem, x: Operands, makers: dict[str, Callable], only: list[str]) -> tuple[dict, dict]:
    """The contenders that can compute the problem, and why the others cannot."""
    ready, refusals = {}, {}
    for name, make in makers.items():
        if name != OURS and only and not any(name.startswith(word) for word in only):
            continue
        try:
            ready[name] = make(p, x)
        except rivals.Refusal as refusal:
            refusals[name] = str(refusal)
        except ModuleNotFoundError as error:
            if error.name == OURS:
                raise
            refusals[name] = f"{error.name} is not installed"
    return ready, refusals


def _differences(p: Problem, ready: dict[str, rivals.Contender]) -> dict[str, Optional[float]]:
    """Largest difference of each contender's outputs from ours; None where each draws its own dropout."""
    ours = ready[OURS].outputs(ready[OURS].call())
    differences: dict[str, Optional[float]] = {}
    for name, contender in ready.items():
        if name == OURS:
            continue
        theirs = contender.outputs(contender.call())
        largest = [float(np.abs(a - b).max(initial=0.0)) for a, b in zip(theirs, ours, strict=True)]
        differences[name] = None if p.dropout_p > 0 else max(largest)
    return differences


def _workspace_bytes(explanation: polyhead.Explanation, direction: str) -> int:
    forward, backward = explanation.workspace_bytes, explanation.backward_workspace_bytes
    return {FORWARD: forward, BACKWARD: backward, BOTH: max(forward, backward)}[direction]


def measure_row(request: dict, threads: int, bandwidth: Bandwidth) -> dict:
    p, direction = parse_problem(request["problem"]), request["direction"]
    x = Operands(p)
    ready, refusals = _prepare(p, x, _contenders(direction, threads), request["peers"])
    differences = _differences(p, ready)
    peak = peak_gflops(p.dtype, threads)
    read = bandwidth.gb_per_s() if p.decode else None
    calls = {name: contender.call for name, contender in ready.items()}
    samples = measure.interleave(calls, CROWDED, request["rounds"], SECONDS_PER_ROUND * request["rounds"])
    peak = _largest(peak, peak_gflops(p.dtype, threads))
    read = _largest(read, bandwidth.gb_per_s() if p.decode else None)
    bandwidth.release()

    views = (a.transpose(0, 2, 1, 3) for a in (x.query, x.key, x.value))
    explanation = polyhead.explain(*views, **rivals.polyhead_arguments(p, x))
    return {
        "problem": p.line,
        "direction": direction,
        "threads": threads,
        "kernel": explanation.kernel,
        "flops": p.flops(direction),
        "kv_bytes": p.kv_bytes,
        "operand_bytes": p.operand_bytes,
        "workspace_bytes": _workspace_bytes(explanation, direction),
        "peak_gflops": peak,
        "read_gb_per_s": read,
        "load": os.getloadavg()[0],
        "contenders": {name: {**s.summary(), "max_diff": differences.get(name)} for name, s in samples.items()},
        "refusals": refusals,
    }


def measure_cache_row(request: dict, threads: int, bandwidth: Bandwidth) -> dict:
    """Every kind of cache on one problem. Differences are from our first one, a share of its largest number."""
    import torch

    torch.set_num_threads(threads)
    if request["problem"].startswith("packed"):
        import rivals_packed as rivals_on_caches

        p = rivals_on_caches.parse_packed(request["problem"])
        x = rivals_on_caches.PackedOperands(p)
    else:
        import rivals_cache as rivals_on_caches

        p = parse_problem(request["problem"])
        x = Operands(p)
    ready, refusals = _prepare(p, x, rivals_on_caches.contenders(p, threads), request["peers"])
    expected, *_ = ready[OURS].outputs(ready[OURS].call())
    row = {"problem": p.line, "threads": threads, "flops": p.flops(FORWARD), "refusals": refusals}
    differences = {n: np.abs(c.outputs(c.call())[0] - expected).max() / np.abs(expected).max() for n, c in ready.items()}
    read = bandwidth.gb_per_s()
    calls = {name: contender.call for name, contender in ready.items()}
    samples = measure.interleave(calls, CROWDED, request["rounds"], SECONDS_PER_ROUND * request["rounds"])
    row["read_gb_per_s"] = _largest(read, bandwidth.gb_per_s())
    row["contenders"] = {
        n: {**s.summary(), "kept_bytes": ready[n].kept_bytes, "max_diff": float(differences[n])} for n, s in samples.items()
    }
    return row


def measure_overhead() -> dict:
    """Microseconds of one call at [1, 1, 1, 16]: what a call costs beside the arithmetic."""
    array = np.ones((1, 1, 1, 16), np.float32)
    out, logsumexp = polyhead.attention(array, array, array, return_logsumexp=True)
    calls = {
        "polyhead, NumPy arrays": lambda: polyhead.attention(array, array, array),
        "polyhead, NumPy arrays, backward": lambda: polyhead.attention_backward(
            out, array, array, array, out, logsumexp
        ),
    }
    outside = contextlib.nullcontext()
    try:
        import torch
        from torch.nn.functional import scaled_dot_product_attention
    except ModuleNotFoundError:
        pass
    else:
        tensor = torch.from_numpy(array)
        calls["polyhead, torch tensors"] = lambda: polyhead.attention(tensor, tensor, tensor)
        calls["torch"] = lambda: scaled_dot_product_attention(tensor, tensor, tensor)
        outside = torch.inference_mode()
    best = dict.fromkeys(calls, float("inf"))
    with outside:
        for _ in range(15):
            for name, call in calls.items():
                best[name] = min(best[name], timeit.timeit(call, number=2000) / 2000 * 1e6)
    return best


def versions() -> dict:
    found = {}
    for name in ("torch", "onnxruntime", "jax", "numpy"):
        try:
            found[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            found[name] = "not installed"
    return {"polyhead": polyhead.__version__, **found, "python": platform.python_version()}


def main() -> None:
    threads = int(sys.argv[1])
    answers = os.fdopen(os.dup(1), "w")  # what the libraries print goes to stderr instead
    os.dup2(2, 1)

    bandwidth = Bandwidth()
    for line in sys.stdin:
        request = json.loads(line)
        try:
            if request["what"] == "row":
                answer = measure_row(request, threads, bandwidth)
            elif request["what"] == "cache row":
                answer = measure_cache_row(request, threads, bandwidth)
            elif request["what"] == "overhead":
                answer = measure_overhead()
            else:
                answer = versions()
        except Exception as error:  # one row's failure is that row's result
            answer = {"error": f"{type(error).__name__}: {error}"}
        print(json.dumps(answer), file=answers, flush=True)


if __name__ == "__main__":
    main()
