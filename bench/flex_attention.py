#!/usr/bin/env python3
"""polyhead.torch.flex_attention beside torch's FlexAttention, compiled, and its attention with the scores' bias as a matrix.

  bench/flex_attention.py                                    every program, forward and a step of training, on 1 and 2
                                                             threads; 10 to 20 minutes, most of them torch's compiler
  bench/flex_attention.py --programs causal alibi            these alone
  bench/flex_attention.py --sizes 1x8x512x64 --no-compiled   other sizes; without FlexAttention
  bench/flex_attention.py --out FOLDER                       the table and the figures into files too
  bench/flex_attention.py --programs t5 --after FILE.json    rows of an earlier run come first: a table in quiet pieces

In one process, interleaved. What is timed is the second call and later ones; what the first of a new program takes longer
stands beside: torch's compiles it. FlexAttention has no backward pass on CPUs. "dense" is scaled_dot_product_attention with a bias [H or 1, Sq, Sk] that
is there already: to make it, and to sum its gradient up for what it was made of, is not timed.
"""

import argparse
import json
import pathlib
import statistics
import sys
import time

import torch
from torch.nn.attention.flex_attention import create_block_mask
from torch.nn.attention.flex_attention import flex_attention as torchs_flex_attention
from torch.nn.functional import scaled_dot_product_attention

import measure
import polyhead.torch
import torch_runs
from report import times

SECONDS_PER_ROUND = 4.0
NEW_PROGRAMS = 20  # whose first calls are timed, on as many queries and keys
GOALS = {"flex": 3.0, "dense": 1.3}  # how many times as fast


def causal(b, h, q, k):
    return q >= k


def programs(num_heads: int, seqlen: int) -> dict:
    """name: (score_mod, mask_mod, what of it is trained)."""
    generator = torch.Generator().manual_seed(0)
    slopes = 2.0 ** -torch.arange(1, num_heads + 1).float()
    table = torch.randn(num_heads, 2 * seqlen, generator=generator)
    buckets = torch.randn(32, num_heads, generator=generator)
    document = torch.arange(seqlen) // max(seqlen // 10, 1)

    def alibi(score, b, h, q, k):
        return score - slopes[h] * (q - k).abs()

    def relative(score, b, h, q, k):
        return score + table[h, q - k + seqlen]

    def t5(score, b, h, q, k):
        distance = (q - k).clamp(min=0)
        far = 16 + (torch.log(distance.clamp(min=16).float() / 16) * 7.6943735).to(torch.int32)
        return score + buckets[torch.where(distance < 16, distance, far.clamp(max=31)), h]

    def softcap(score, b, h, q, k):
        return 30.0 * torch.tanh(score / 30)

    return {
        "none": (None, None, []),
        "causal": (None, causal, []),
        "alibi": (alibi, None, [slopes]),
        "relative": (relative, None, [table]),
        "t5": (t5, None, [buckets]),
        "softcap": (softcap, None, []),
        "document": (None, lambda b, h, q, k: document[q] == document[k], []),
        "window": (None, lambda b, h, q, k: (q >= k) & (q - k < 256), []),
    }


def dense_bias(score_mod, mask_mod, num_heads: int, seqlen: int):
    """What is added to a score, [1, H or 1, S, S]; None where that is no sum."""
    h = torch.arange(num_heads).view(-1, 1, 1)
    q, k = torch.arange(seqlen).view(1, -1, 1), torch.arange(seqlen).view(1, 1, -1)
    if score_mod is None:
        seen = torch.ones(1, 1, 1, dtype=torch.bool) if mask_mod is None else mask_mod(0, h, q, k)
        return None if mask_mod is None else torch.zeros(seen.shape).masked_fill_(~seen, -torch.inf).unsqueeze(0)
    bias = score_mod(torch.zeros(1), 0, h, q, k).expand(num_heads, seqlen, seqlen).unsqueeze(0)
    higher = score_mod(torch.full((1,), 16.0), 0, h, q, k).expand(num_heads, seqlen, seqlen).unsqueeze(0)
    return bias.contiguous() if torch.allclose(higher - bias, torch.full((1,), 16.0), atol=1e-3) else None


def new_program_s(num_heads: int, name: str) -> float | None:
    """By how much our first call of a program takes longer than the second; the median of programs never seen."""
    size = NEW_PROGRAMS
    score_mod, mask_mod, _ = programs(num_heads, size)[name]
    if score_mod is None and mask_mod is None:
        return None
    query = torch.randn(1, num_heads, size, 16)

    def call(new: int) -> float:
        def new_score(score, b, h, q, k):
            return (score_mod(score, b, h, q, k) if score_mod else score) + (q - k) * 1e-3 * new

        start = time.perf_counter()
        block_mask = mask_mod and create_block_mask(mask_mod, None, None, size, size, device="cpu")
        polyhead.torch.flex_attention(query, query, query, new_score, block_mask)
        return time.perf_counter() - start

    with torch.inference_mode():
        call(NEW_PROGRAMS)
        return statistics.median(call(new) - call(new) for new in range(NEW_PROGRAMS))


def measure_row(name: str, sizes: tuple, threads: int, options) -> dict:
    torch.set_num_threads(threads)
    batch, num_heads, seqlen, head_dim = sizes
    score_mod, mask_mod, trained = programs(num_heads, seqlen)[name]
    generator = torch.Generator().manual_seed(1)
    query, key, value = torch.randn(3, batch, num_heads, seqlen, head_dim, generator=generator)
    block_mask = mask_mod and create_block_mask(mask_mod, None, None, seqlen, seqlen, device="cpu")
    bias = dense_bias(score_mod, mask_mod, num_heads, seqlen)
    row = {"program": name, "sizes": "x".join(map(str, sizes)), "threads": threads, "compiled_in_s": None}
    row["new_program_s"] = new_program_s(num_heads, name)

    def forward(function, *arguments, **given):
        def call():
            with torch.inference_mode():
                return function(query, key, value, *arguments, **given)

        return call

    calls = {"polyhead": forward(polyhead.torch.flex_attention, score_mod, block_mask)}
    if bias is not None or (score_mod is None and mask_mod is None):
        calls["dense"] = forward(scaled_dot_product_attention, bias)
    if options.compiled:
        torch._dynamo.reset()
        calls["flex"] = forward(torch.compile(torchs_flex_attention, dynamic=False), score_mod, block_mask)
        start = time.perf_counter()
        calls["flex"]()
        row["compiled_in_s"] = time.perf_counter() - start
    row["max_diff"] = max(float((call() - calls["polyhead"]()).abs().max()) for call in calls.values())

    inputs = [x.clone().requires_grad_() for x in (query, key, value)]
    grad_out = torch.randn(query.shape, generator=generator)

    def step(function, more, *arguments):
        leaves = [*inputs, *(x.requires_grad_() for x in more)]
        return lambda: torch.autograd.grad(function(*inputs, *arguments), leaves, grad_out)

    calls["polyhead step"] = step(polyhead.torch.flex_attention, trained, score_mod, block_mask)
    if "dense" in calls:
        more = [bias.clone()] if trained else []
        calls["dense step"] = step(scaled_dot_product_attention, more, *(more or [bias]))
    samples = measure.interleave(calls, set(), options.rounds, SECONDS_PER_ROUND * options.rounds)
    return {**row, "contenders": {name: each.summary() for name, each in samples.items()}}


def ratio(row: dict, contender: str, ours: str, figure: str = "min_s") -> float | None:
    """How many times as fast as it polyhead is."""
    if contender not in row["contenders"]:
        return None
    return row["contenders"][contender][figure] / row["contenders"][ours][figure]


COLUMNS = ("polyhead", "flex", "dense", "polyhead step", "dense step")
RATIOS = (("flex", "polyhead"), ("dense", "polyhead"), ("dense step", "polyhead step"))


def markdown(result: dict) -> str:
    lines = torch_runs.head("FlexAttention's programs: polyhead beside torch", result["environment"])
    lines += [
        "",
        "Times in ms: median (minimum) of interleaved samples; float32. Faster: the other's minimum over ours. A step is forward "
        "and all gradients, those of tables and slopes too; torch's FlexAttention has none on CPUs. First: what the first call of a "
        "new program takes longer than the next, ours in us, and FlexAttention's in s, which it compiles.",
        "",
        f"| program | sizes | threads | {' | '.join(COLUMNS)} | than flex | than dense | step than dense | first, us | flex's, s |",
        f"|---|---|--:{'|--:' * (len(COLUMNS) + 5)}|",
    ]
    for row in result["rows"]:
        cells = [row["program"], row["sizes"], str(row["threads"])]
        cells += [torch_runs.figures(row["contenders"][c]) if c in row["contenders"] else "-" for c in COLUMNS]
        found = [ratio(row, *pair) for pair in RATIOS]
        cells += ["-" if each is None else times(each) for each in found]
        cells.append("-" if row["new_program_s"] is None else f"{row['new_program_s'] * 1e6:.0f}")
        cells.append("-" if row["compiled_in_s"] is None else f"{row['compiled_in_s']:.1f}")
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(result: dict, path: pathlib.Path) -> None:
    """How many times as fast, a bar for each of torch's ways; the goals as lines."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    colours = ("#d1603d", "#3b7a9e", "#9aa36a")
    all_threads = sorted({row["threads"] for row in result["rows"]})
    height = 1.5 + 0.5 * len(result["rows"]) / len(all_threads)
    figure, axes = plt.subplots(
        1, len(all_threads), figsize=(5.5 * len(all_threads), height), sharey=True, squeeze=False, layout="constrained"
    )
    for axis, threads in zip(axes[0], all_threads):
        rows = [row for row in result["rows"] if row["threads"] == threads]
        for place, row in enumerate(rows):
            for n, (contender, ours) in enumerate(RATIOS):
                found = ratio(row, contender, ours)
                if found is not None:
                    bars = axis.barh(place + 0.27 * (n - 1), found, 0.25, color=colours[n], zorder=2)
                    axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
                if found is not None and contender in GOALS:
                    ends = [place + 0.27 * (n - 1) - 0.12, place + 0.27 * (n - 1) + 0.12]
                    axis.plot([GOALS[contender]] * 2, ends, color="black", linewidth=2, zorder=3)
        axis.set_yticks(range(len(rows)), [f"{row['program']}\n{row['sizes']}" for row in rows], fontsize=7)
        axis.axvline(1, color="#555555", linewidth=1)
        axis.margins(x=0.12)
        axis.set_title(f"{threads} thread{'s'[: threads > 1]}: times as fast, float32", fontsize=9)
    axes[0][0].invert_yaxis()
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in (*colours, "black")]
    labels = ["FlexAttention, compiled", "SDPA with a dense bias", "the same, a training step", "goal"]
    figure.legend(handles, labels, fontsize=7, loc="outside upper center", ncols=4)
    e = result["environment"]
    figure.supxlabel(f"{e['cpu']}, {e['date'][:10]}, commit {e['commit']}", fontsize=6)
    figure.savefig(path, dpi=130)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = [*programs(1, 10)]
    parser.add_argument("--programs", nargs="+", choices=names, default=names, metavar="NAME", help=", ".join(names))
    parser.add_argument("--sizes", nargs="+", default=["1x8x2048x64"], help="batch x heads x seqlen x head_dim")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    parser.add_argument("--no-compiled", dest="compiled", action="store_false", help="without torch's FlexAttention")
    parser.add_argument("--rounds", type=int, default=7, metavar="N", help="default: 7")
    parser.add_argument("--after", type=pathlib.Path, metavar="FILE", help="an earlier run's .json")
    parser.add_argument("--out", type=pathlib.Path, help="folder for files")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    environment = torch_runs.environment("flex_attention.py", options)
    rows = [] if options.after is None else json.loads(options.after.read_text())["rows"]
    for sizes in options.sizes:
        for name in options.programs:
            for threads in options.threads:
                rows.append(measure_row(name, tuple(map(int, sizes.split("x"))), threads, options))
                print(f"{name} {sizes}, threads {threads}", file=sys.stderr, flush=True)
    torch_runs.finish(environment)
    result = {"environment": environment, "rows": rows}
    keys = ("program", "sizes", "threads", "max_diff", "new_program_s", "compiled_in_s")
    torch_runs.print_and_write(result, options.out, "flex-attention", markdown(result), keys, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
