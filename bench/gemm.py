"""Products of the layer's sizes beside torch's linear: python bench/gemm.py BUILD/bench/gemm [--threads N].

Rounds of both are interleaved in one run; the fastest call of each counts. torch's weights are [out, in] as nn.Linear
has them; ours are packed before, as a plan for inference does ("packed"), or lie as torch's do ("as is").
"""

import argparse
import subprocess
import time

import torch

SIZES = [(512, 512), (1024, 1024), (4096, 1024), (1024, 4096)]
ROWS = [1, 8, 64, 384, 3072]


class Ours:
    """The program `gemm -`, which answers a line with the time of a product."""

    def __init__(self, program: str):
        self._process = subprocess.Popen([program, "-"], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def best_ms(self, dtype: str, direction: str, m: int, n: int, k: int, threads: int, seconds: float) -> float:
        self._process.stdin.write(f"{dtype} {direction} {m} {n} {k} {threads} {seconds}\n")
        self._process.stdin.flush()
        return float(self._process.stdout.readline())


def torch_ms(x: torch.Tensor, weight: torch.Tensor, seconds: float) -> float:
    """The fastest call of torch's linear in `seconds`."""
    best, end = float("inf"), time.perf_counter() + seconds
    while True:
        start = time.perf_counter()
        torch.nn.functional.linear(x, weight)
        now = time.perf_counter()
        best = min(best, 1e3 * (now - start))
        if now > end:
            return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("program", help="BUILD/bench/gemm")
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--dtype", default="float32", choices=["float32", "bfloat16", "float16"])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=0.1, help="of each side in each round")
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_grad_enabled(False)
    ours = Ours(options.program)
    print(f"torch {torch.__version__}, {options.dtype}, {options.threads} threads; ms a call, torch's over ours")
    print(f"{'M':>6} {'N':>6} {'K':>6} {'torch':>10} {'packed':>10} {'ratio':>6} {'as is':>10} {'ratio':>6}")
    for m in ROWS:
        for n, k in SIZES:
            x = torch.randn(m, k).to(getattr(torch, options.dtype))
            weight = torch.randn(n, k).to(getattr(torch, options.dtype))
            best = {"torch": float("inf"), "forward": float("inf"), "data": float("inf")}
            for _ in range(options.rounds):
                best["torch"] = min(best["torch"], torch_ms(x, weight, options.seconds))
                time.sleep(0.05)  # its threads spin on for a while
                for direction in ("forward", "data"):
                    ms = ours.best_ms(options.dtype, direction, m, n, k, options.threads, options.seconds)
                    best[direction] = min(best[direction], ms)
            print(f"{m:>6} {n:>6} {k:>6} {best['torch']:>10.4f} {best['forward']:>10.4f}"
                  f" {best['torch'] / best['forward']:>6.2f} {best['data']:>10.4f}"
                  f" {best['torch'] / best['data']:>6.2f}", flush=True)


if __name__ == "__main__":
    main()
