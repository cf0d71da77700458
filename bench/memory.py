#!/usr/bin/env python3
"""The memory that one forward and backward call takes at its peak, each contender in a process of its own.

  bench/memory.py CONTENDER SEQLEN     one measurement, as JSON; peers.py asks for them all

The process imports, draws its operands and calls once at a tiny size; then the kernel's record of the peak (VmHWM) is
set back, and one call at full size is made. What it adds to the resident memory counts: results, scratch memory, and
whatever is stored between forward and backward.
"""

import json
import os
import subprocess
import sys
from typing import Callable

BATCH, NUM_HEADS, HEAD_DIM = 1, 8, 64
SHAPE = f"[{BATCH}, {NUM_HEADS}, S, {HEAD_DIM}] float32"
SEQLENS = {"quick": [2048, 8192], "full": [1024, 2048, 4096, 8192]}
OURS, UNFUSED = "polyhead", "torch, unfused"
TINY = 16


def _operands(seqlen: int):
    """query, key, value and grad_out, [B, H, S, D]."""
    import numpy as np

    rng = np.random.default_rng(1)
    return [rng.standard_normal((BATCH, NUM_HEADS, seqlen, HEAD_DIM), dtype=np.float32) for _ in range(4)]


def _polyhead(seqlen: int) -> Callable[[], object]:
    import polyhead

    query, key, value, grad_out = (a.transpose(0, 2, 1, 3) for a in _operands(seqlen))

    def call():
        out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True)
        return out, polyhead.attention_backward(grad_out, query, key, value, out, logsumexp)

    return call


def _torch(seqlen: int, fused: bool) -> Callable[[], object]:
    import torch
    from torch.nn.attention import SDPBackend, sdpa_kernel
    from torch.nn.functional import scaled_dot_product_attention

    *inputs, grad_out = (torch.from_numpy(a) for a in _operands(seqlen))
    for tensor in inputs:
        tensor.requires_grad_()

    def call():
        with sdpa_kernel(SDPBackend.FLASH_ATTENTION if fused else SDPBackend.MATH):
            out = scaled_dot_product_attention(*inputs)
        return out, torch.autograd.grad(out, inputs, grad_out)

    return call


CONTENDERS = {
    OURS: _polyhead,
    "torch, fused": lambda seqlen: _torch(seqlen, fused=True),
    UNFUSED: lambda seqlen: _torch(seqlen, fused=False),
}


def _status_bytes(field: str) -> int:
    with open("/proc/self/status") as file:
        return next(int(line.split()[1]) * 1024 for line in file if line.startswith(field))


def peaks_of(call: Callable[[], object]) -> tuple[int, int]:
    """Bytes that are resident at the peak of the call, and those of them that it added."""
    with open("/proc/self/clear_refs", "w") as file:
        file.write("5")  # VmHWM = VmRSS
    before = _status_bytes("VmHWM")
    results = call()
    peak = _status_bytes("VmHWM")
    del results
    return peak, peak - before


def in_a_process(program: str, arguments: list[str]) -> dict:
    """What `program` prints on its last line, as JSON, called with --peak and these arguments."""
    done = subprocess.run([sys.executable, program, "--peak", *arguments], capture_output=True, text=True)
    if done.returncode:
        raise RuntimeError(f"{program} --peak {' '.join(arguments)}: {done.stderr}")
    return json.loads(done.stdout.splitlines()[-1])


def _check_memory(seqlen: int) -> None:
    """Exits where the unfused formula's arrays of the scores' size would not fit."""
    with open("/proc/meminfo") as file:
        available = int(next(line for line in file if line.startswith("MemAvailable")).split()[1]) * 1024
    needed = 5 * BATCH * NUM_HEADS * seqlen**2 * 4
    if needed > 0.8 * available:
        sys.exit(f"needs about {needed / 2**30:.0f} GiB, {available / 2**30:.0f} GiB are free")


def measure_here(contender: str, seqlen: int) -> dict:
    if contender == UNFUSED:
        _check_memory(seqlen)
    make = CONTENDERS[contender]
    make(TINY)()
    _, extra = peaks_of(make(seqlen))
    return {"contender": contender, "seqlen": seqlen, "extra_bytes": extra}


def measure(effort: str, threads: int) -> list[dict]:
    """All contenders at all lengths; where one fails, "error" says why."""
    rows = []
    for seqlen in SEQLENS[effort]:
        for contender in CONTENDERS:
            print(f"memory: {contender}, S = {seqlen}", file=sys.stderr, flush=True)
            environment = {"POLYHEAD_THREADS": str(threads), "OMP_NUM_THREADS": str(threads)}
            done = subprocess.run(
                [sys.executable, __file__, contender, str(seqlen)],
                capture_output=True,
                text=True,
                env={**os.environ, **environment},
            )
            if done.returncode == 0:
                rows.append(json.loads(done.stdout.splitlines()[-1]))
                continue
            words = done.stderr.strip().splitlines() or [f"ended with status {done.returncode}"]
            rows.append({"contender": contender, "seqlen": seqlen, "error": words[-1]})
    return rows


def operand_bytes(seqlen: int) -> int:
    """Of query, key, value and out."""
    return 4 * BATCH * NUM_HEADS * seqlen * HEAD_DIM * 4


if __name__ == "__main__":
    print(json.dumps(measure_here(sys.argv[1], int(sys.argv[2]))))
