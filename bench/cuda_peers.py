"""polyhead's CUDA kernels beside the backends of torch's scaled_dot_product_attention, on one GPU in one process.

    cuda_peers.py [--out FOLDER] [--rounds 20]

Rows of KERNELS.md's table: 16,384 tokens of 2,048 channels, full and causal, forward and backward; and steps of decoding, a
query of each sequence over many keys. Contenders take turns; a call is timed by events, milliseconds are the median of the rounds.
Without a GPU it says so and does nothing.
"""

import argparse
import datetime
import itertools
import pathlib
import re
import statistics
import sys

TOKENS, CHANNELS = 16384, 2048
BACKENDS = ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
OURS = "polyhead"
COLUMNS = (OURS, *BACKENDS)


def problems():
    """(dtype, head_dim, seqlen, causal)"""
    for dtype, head_dim in (("bfloat16", 64), ("bfloat16", 128), ("float16", 128), ("float32", 64), ("float32", 128)):
        for seqlen, causal in itertools.product((512, 2048, 8192), (False, True)):
            yield dtype, head_dim, seqlen, causal


def decoding_problems():
    """(batch, heads, heads of keys, keys), bfloat16 of 128 columns"""
    return (1, 32, 8, 32768), (16, 32, 8, 8192), (64, 32, 32, 2048), (64, 32, 8, 8192), (256, 32, 8, 1024)


def flops(head_dim, seqlen, causal, backward):
    pairs = TOKENS * seqlen * (CHANNELS // head_dim) / (2 if causal else 1)
    return pairs * head_dim * (10 if backward else 4)


def milliseconds(torch, run):
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    run()
    end.record()
    end.synchronize()
    return start.elapsed_time(end)


class Contender:
    """One way to compute a problem: `forward()` and `backward()`, or why it cannot."""

    def __init__(self, torch, name, tensors, grad_out, causal, grouped=False):
        import polyhead.torch
        from torch.nn.attention import SDPBackend, sdpa_kernel

        self.torch, self.name, self.times, self.why_not = torch, name, {False: [], True: []}, ""
        self.grad_out = grad_out
        self.inputs = [x.detach().clone().requires_grad_(grad_out is not None) for x in tensors]
        options = {"is_causal": causal, "enable_gqa": grouped}
        if name == OURS:
            self.attend = lambda: polyhead.torch.scaled_dot_product_attention(*self.inputs, **options)
        else:
            def attend():
                with sdpa_kernel(getattr(SDPBackend, name)):
                    return torch.nn.functional.scaled_dot_product_attention(*self.inputs, **options)

            self.attend = attend
        try:
            self.out = self.attend()
            self.grads = self.gradients() if grad_out is not None else ()
            torch.cuda.synchronize()
        except (RuntimeError, ValueError) as error:
            self.why_not = str(error).splitlines()[0]

    def gradients(self):
        return self.torch.autograd.grad(self.out, self.inputs, self.grad_out, retain_graph=True)

    def time(self):
        with self.torch.no_grad():
            self.times[False].append(milliseconds(self.torch, self.attend))
        if self.grad_out is not None:
            self.times[True].append(milliseconds(self.torch, self.gradients))


def measure(torch, problem, rounds):
    """{name: Contender}"""
    dtype, head_dim, seqlen, causal = problem
    shape = (TOKENS // seqlen, CHANNELS // head_dim, seqlen, head_dim)
    torch.manual_seed(0)
    *tensors, grad_out = [torch.randn(shape, device="cuda").to(getattr(torch, dtype)) for _ in range(4)]
    return take_turns({name: Contender(torch, name, tensors, grad_out, causal) for name in COLUMNS}, rounds)


def measure_decoding(torch, problem, rounds):
    """The same of a step of decoding."""
    batch, heads, heads_kv, keys = problem
    torch.manual_seed(0)
    shapes = (batch, heads, 1, 128), (batch, heads_kv, keys, 128), (batch, heads_kv, keys, 128)
    tensors = [torch.randn(shape, device="cuda").bfloat16() for shape in shapes]
    return take_turns({name: Contender(torch, name, tensors, None, False, heads_kv < heads) for name in COLUMNS}, rounds)


def take_turns(contenders, rounds):
    can = [each for each in contenders.values() if not each.why_not]
    for round_ in range(rounds + 3):
        for each in can:
            each.time()
            if round_ < 3:  # clocks and caches
                each.times = {False: [], True: []}
    return contenders


def difference(contenders):
    """The largest between our results and those of another contender."""
    ours = contenders[OURS]
    others = [each for name, each in contenders.items() if name != OURS and not each.why_not]
    if ours.why_not or not others:
        return "-"
    pairs = zip((ours.out, *ours.grads), (others[0].out, *others[0].grads))
    return f"{max(float((a.detach().float() - b.float().detach()).abs().max()) for a, b in pairs):.1e}"


def rows_of(problem, contenders):
    dtype, head_dim, seqlen, causal = problem
    for backward in (False, True):
        speeds = {}
        for name, each in contenders.items():
            if not each.why_not:
                ms = statistics.median(each.times[backward])
                speeds[name] = flops(head_dim, seqlen, causal, backward) / ms / 1e9
        cells = [f"{speeds[name]:.1f}" if name in speeds else "-" for name in COLUMNS]
        best = max((speed for name, speed in speeds.items() if name != OURS), default=None)
        ratio = f"{speeds[OURS] / best:.2f}x" if best and OURS in speeds else "-"
        what = f"{dtype} | {head_dim} | {seqlen} | {'causal' if causal else 'full'} | {'backward' if backward else 'forward'}"
        yield f"| {what} | " + " | ".join(cells) + f" | {ratio} | {difference(contenders)} |"


def row_of_decoding(problem, contenders):
    batch, heads, heads_kv, keys = problem
    times = {name: statistics.median(each.times[False]) for name, each in contenders.items() if not each.why_not}
    gigabytes = 2 * batch * heads_kv * keys * 128 * 2 / 1e9
    cells = [f"{gigabytes / times[name] * 1e3:.0f}" if name in times else "-" for name in COLUMNS]
    best = min((ms for name, ms in times.items() if name != OURS), default=None)
    ratio = f"{best / times[OURS]:.2f}x" if best and OURS in times else "-"
    return f"| {batch} | {heads} / {heads_kv} | {keys} | " + " | ".join(cells) + f" | {ratio} | {difference(contenders)} |"


def torch_with_gpu():
    """torch, or None where it is not there or finds no GPU, which is said."""
    try:
        import torch
    except ImportError:
        print("left out: torch is not installed")
        return None
    if not torch.cuda.is_available():
        print(f"left out: torch {torch.__version__} finds no CUDA device")
        return None
    return torch


def tell(lines, reasons, folder, gpu, name):
    """The table and why some could not, printed or as DATE-GPU-NAME.md in a folder."""
    text = "\n".join([*lines, "", *(f"- {who}: {why}" for who, why in reasons.items())]).rstrip("\n") + "\n"
    if folder is None:
        print(text)
        return
    slug = re.sub(r"[^a-z0-9]+", "-", gpu.lower()).strip("-")
    (folder / f"{datetime.date.today().isoformat()}-{slug}-{name}.md").write_text(text)


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="a folder for DATE-GPU-cuda.md; default: print it")
    parser.add_argument("--rounds", type=int, default=20)
    options = parser.parse_args()
    torch = torch_with_gpu()
    if torch is None:
        return 0
    import polyhead

    gpu, today = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    lines = [
        f"# CUDA, {gpu}, {today}", "",
        f"`bench/cuda_peers.py --rounds {options.rounds}`: polyhead {polyhead.__version__}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}. TFLOP/s, {TOKENS} tokens of {CHANNELS} channels; the ratio is to the fastest backend.", "",
        "| dtype | head_dim | seqlen | mask | direction | " + " | ".join(COLUMNS) + " | ratio | largest difference |",
        "|---|--:|--:|---|---|" + "--:|" * (len(COLUMNS) + 2),
    ]  # fmt: skip
    reasons = {}
    for problem in problems():
        contenders = measure(torch, problem, options.rounds)
        lines += rows_of(problem, contenders)
        print(lines[-2], lines[-1], sep="\n", file=sys.stderr)
        reasons |= {f"{name}, {problem[0]}": each.why_not for name, each in contenders.items() if each.why_not}
    lines += [
        "", "A step of decoding, bfloat16, head_dim 128: GB/s of keys and values.", "",
        "| batch | heads | keys | " + " | ".join(COLUMNS) + " | ratio | largest difference |",
        "|--:|--:|--:|" + "--:|" * (len(COLUMNS) + 2),
    ]  # fmt: skip
    for problem in decoding_problems():
        contenders = measure_decoding(torch, problem, options.rounds)
        lines.append(row_of_decoding(problem, contenders))
        print(lines[-1], file=sys.stderr)
        reasons |= {f"{name}, decoding": each.why_not for name, each in contenders.items() if each.why_not}
    tell(lines, reasons, options.out, gpu, "cuda")
    return 0


if __name__ == "__main__":
    sys.exit(main())
