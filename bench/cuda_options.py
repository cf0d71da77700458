"""What options cost on a GPU: polyhead's forward and backward with a softcap, ALiBi, a window, a bias, a mask or dropout beside
torch's FlexAttention, compiled, and those backends of scaled_dot_product_attention that take them.

    cuda_options.py [--out FOLDER] [--rounds 20] [--head-dims 64 128] [--seqlen 2048]

bfloat16, 16,384 tokens of 2,048 channels. Contenders take turns; a call is timed by events, milliseconds are the median of the
rounds, and TFLOP/s count the pairs that causality and the window leave. FlexAttention's compiler takes most of the minutes. Without a GPU it says so
and does nothing.
"""

import argparse
import datetime
import pathlib
import statistics
import sys

from cuda_peers import CHANNELS, TOKENS, milliseconds, tell, torch_with_gpu

WINDOW, DROPOUT = 256, 0.1
OURS, FLEX, BACKENDS = "polyhead", "FlexAttention", ("FLASH_ATTENTION", "CUDNN_ATTENTION", "EFFICIENT_ATTENTION")
COLUMNS = (OURS, FLEX, *BACKENDS)


class Ways:
    """{contender: function of query, key and value [B, H, S, D]} of each option, and how many pairs of a head it sees."""

    def __init__(self, torch, batch, heads, seqlen):
        import polyhead.torch
        from torch.nn.attention.flex_attention import create_block_mask, flex_attention

        self.torch, self.attention, self.seqlen = torch, polyhead.torch.attention, seqlen
        self.flex_attention = torch.compile(flex_attention, dynamic=False)
        self.block_mask = lambda seen: create_block_mask(seen, None, None, seqlen, seqlen, device="cuda")
        torch.manual_seed(0)
        self.slopes = (0.1 * 2.0 ** -torch.arange(1, heads + 1).float()).cuda()
        self.bias = torch.randn(1, heads, seqlen, seqlen, device="cuda", dtype=torch.bfloat16)
        self.mask = torch.rand(batch, 1, seqlen, seqlen, device="cuda") < 0.9

    def ours(self, **options):
        def attend(*inputs):
            return self.attention(*(x.transpose(1, 2) for x in inputs), **options).transpose(1, 2)

        return attend

    def flex(self, score, seen):
        block_mask = self.block_mask(seen)
        return lambda *inputs: self.flex_attention(*inputs, score, block_mask)

    def of_backends(self, names, **options):
        from torch.nn.attention import SDPBackend, sdpa_kernel

        def of(name):
            def attend(*inputs):
                with sdpa_kernel(getattr(SDPBackend, name)):
                    return self.torch.nn.functional.scaled_dot_product_attention(*inputs, **options)

            return attend

        return {name: of(name) for name in names}

    def all(self):
        """(option, pairs, {contender: function})"""
        torch, slopes, all_pairs = self.torch, self.slopes, self.seqlen**2

        def causal(b, h, i, j):
            return i >= j

        def softcap(score, b, h, i, j):
            return 30 * torch.tanh(score / 30)

        def alibi(score, b, h, i, j):
            return score - slopes[h] * (i - j).abs()

        def alibi_of_ours(score, b, h, q, k):
            return score - slopes[h] * (q - k).abs()

        def window(b, h, i, j):
            return (i >= j) & (i - j < WINDOW)

        with_mask = self.of_backends(BACKENDS[1:], attn_mask=self.mask)
        with_bias = self.of_backends(BACKENDS[1:], attn_mask=self.bias)
        dropping = self.of_backends((BACKENDS[0], BACKENDS[2]), dropout_p=DROPOUT)
        return [
            ("softcap, causal", all_pairs / 2, {OURS: self.ours(causal=True, softcap=30.0), FLEX: self.flex(softcap, causal)}),
            ("ALiBi, causal", all_pairs / 2,
             {OURS: self.ours(causal=True, alibi_slopes=slopes), FLEX: self.flex(alibi, causal)}),
            ("ALiBi as a program, causal", all_pairs / 2,
             {OURS: self.ours(causal=True, score=alibi_of_ours), FLEX: self.flex(alibi, causal)}),
            (f"window of {WINDOW}, causal", (self.seqlen - (WINDOW - 1) / 2) * WINDOW,
             {OURS: self.ours(causal=True, window=(WINDOW - 1, 0)), FLEX: self.flex(None, window)}),
            ("bias [1, H, S, S]", all_pairs, {OURS: self.ours(attn_bias=self.bias), **with_bias}),
            ("mask [B, 1, S, S]", all_pairs, {OURS: self.ours(attn_mask=self.mask), **with_mask}),
            (f"dropout of {DROPOUT}", all_pairs, {OURS: self.ours(dropout_p=DROPOUT, dropout_seed=3), **dropping}),
        ]  # fmt: skip


def measure(torch, ways, tensors, grad_out, rounds):
    """{contender: (milliseconds of forward, of backward)}, {contender: why it cannot}"""
    runs, why_not = {}, {}
    for name, attend in ways.items():
        inputs = [x.detach().clone().requires_grad_() for x in tensors]
        try:
            out = attend(*inputs)
            torch.autograd.grad(out, inputs, grad_out, retain_graph=True)
            torch.cuda.synchronize()
        except Exception as error:  # of torch's compiler too
            why_not[name] = str(error).splitlines()[0]
            continue
        runs[name] = attend, inputs, out
    times = {name: ([], []) for name in runs}
    for _ in range(rounds + 2):
        for name, (attend, inputs, out) in runs.items():
            with torch.no_grad():
                times[name][0].append(milliseconds(torch, lambda: attend(*inputs)))
            gradients = lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)  # noqa: E731
            times[name][1].append(milliseconds(torch, gradients))
    return {name: tuple(statistics.median(x[2:]) for x in both) for name, both in times.items()}, why_not


def rows_of(what, flops, times):
    for backward, direction in enumerate(("forward", "backward")):
        speeds = {name: flops * (2.5 if backward else 1) / both[backward] / 1e9 for name, both in times.items()}
        best = max((speed for name, speed in speeds.items() if name != OURS), default=None)
        cells = [f"{speeds[name]:.0f}" if name in speeds else "-" for name in COLUMNS]
        ratio = f"{speeds[OURS] / best:.2f}x" if best and OURS in speeds else "-"
        yield f"| {what} | {direction} | " + " | ".join(cells) + f" | {ratio} |"


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, help="a folder for DATE-GPU-cuda-options.md; default: print it")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--head-dims", type=int, nargs="+", default=(64, 128))
    parser.add_argument("--seqlen", type=int, default=2048)
    options = parser.parse_args()
    torch = torch_with_gpu()
    if torch is None:
        return 0
    import polyhead

    torch._dynamo.config.recompile_limit = 256
    gpu, today = torch.cuda.get_device_name(), datetime.date.today().isoformat()
    lines = [
        f"# Options on CUDA, {gpu}, {today}", "",
        f"`bench/cuda_options.py --rounds {options.rounds}`: polyhead {polyhead.__version__}, torch {torch.__version__}, CUDA "
        f"{torch.version.cuda}. bfloat16, TFLOP/s of {TOKENS} tokens of {CHANNELS} channels, {options.seqlen} queries and keys; the "
        "ratio is to the fastest other.", "",
        "| head_dim, option | direction | " + " | ".join(COLUMNS) + " | ratio |", "|---|---|" + "--:|" * (len(COLUMNS) + 1),
    ]  # fmt: skip
    reasons = {}
    for head_dim in options.head_dims:
        batch, heads = TOKENS // options.seqlen, CHANNELS // head_dim
        shape = batch, heads, options.seqlen, head_dim
        *tensors, grad_out = [torch.randn(shape, device="cuda", dtype=torch.bfloat16) for _ in range(4)]
        for option, pairs, ways in Ways(torch, batch, heads, options.seqlen).all():
            times, why_not = measure(torch, ways, tensors, grad_out, options.rounds)
            lines += rows_of(f"{head_dim}, {option}", 4 * batch * heads * pairs * head_dim, times)
            print(lines[-2], lines[-1], sep="\n", file=sys.stderr)
            reasons |= {f"{name}, {option}": why for name, why in why_not.items()}
    tell(lines, reasons, options.out, gpu, "cuda-options")
    return 0


if __name__ == "__main__":
    sys.exit(main())
