#!/usr/bin/env python3
"""`generate` of Hugging Face transformers: DynamicCache and torch's attention beside polyhead's cache and attention.

  bench/generate.py                                 GPT-2 of random weights, B = 8 and 1, float32 and bfloat16; 6 minutes
  bench/generate.py --batch 8 --dtype float32       these rows alone
  bench/generate.py --batch 8 --dtype float32 --pieces prompt 576 --out FOLDER
  bench/generate.py --batch 8 --dtype float32 --pieces 704 832 960 --after FILE.json --out FOLDER
                                                    rows of an earlier run come first: a table in quiet pieces
  bench/generate.py --tiny                          a model of two narrow layers, for a test

A prompt of 512 tokens and 512 new ones, in one process, in turns, and in pieces: the prompt's pass, and `generate` of 32
tokens from a cache that holds as many as the middle of each quarter of the new ones. What a token takes grows evenly with
the length that it attends to: the pieces say what the whole takes.
"""

import argparse
import functools
import json
import pathlib
import sys
import time
from typing import Callable

import torch
import transformers

import measure
import polyhead.torch
import torch_runs
from report import times

GOAL = {8: 1.5}  # B: how many times as fast as DynamicCache with sdpa
PROMPT, NEW = 512, 512  # tokens
PIECES = ("prompt", "576", "704", "832", "960")  # tokens in the cache
TOKENS = 32  # of a piece
CONTENDERS = {  # name: (attn_implementation, cache)
    "DynamicCache, sdpa": ("sdpa", lambda config: transformers.DynamicCache(config=config)),
    "polyhead": ("polyhead", polyhead.torch.Cache),
    "polyhead, int8": ("polyhead", lambda config: polyhead.torch.Cache(config, "int8")),
}
THEIRS = "DynamicCache, sdpa"
CACHE = "cache" if tuple(map(int, transformers.__version__.split(".")[:2])) >= (5, 24) else "past_key_values"
TINY = dict(n_layer=2, n_embd=32, n_head=2, vocab_size=99)


def model_of(dtype: torch.dtype, tiny: bool):
    torch.manual_seed(0)
    config = transformers.GPT2Config(eos_token_id=None, bos_token_id=None, pad_token_id=0, **(TINY if tiny else {}))
    return transformers.GPT2LMHeadModel(config).to(dtype).eval()


def cache_of(model, name: str, batch: int, length: int):
    """A contender's cache, `length` tokens in it."""
    config = model.config
    cache = CONTENDERS[name][1](config)
    generator = torch.Generator().manual_seed(1)
    rows = torch.randn(2, batch, config.n_head, length, config.n_embd // config.n_head, generator=generator).to(model.dtype)
    with torch.no_grad():
        for layer in range(config.n_layer if length else 0):
            cache.update(*rows, layer)
    return cache


def time_once(call: Callable, samples: measure.Samples) -> None:
    """As `measure.take_turn`, but a cache that has grown cannot be used again."""
    time.sleep(measure.SPIN_SECONDS)
    before, start = measure.usage(), time.perf_counter()
    call()
    seconds = time.perf_counter() - start
    crowded = True  # torch has threads, and polyhead
    (samples.dirty if measure.spoiled(before, measure.usage(), crowded) else samples.clean).append(seconds)


def measure_row(dtype: str, batch: int, piece: str, options) -> dict:
    torch.set_num_threads(options.threads)
    model = model_of(getattr(torch, dtype), options.tiny)
    held, given, new = (0, PROMPT, 1) if piece == "prompt" else (int(piece), int(piece) + 1, TOKENS)
    ids = torch.randint(1, model.config.vocab_size, (batch, given), generator=torch.Generator().manual_seed(2))

    def turn(name: str, ids: torch.Tensor, tokens: int, samples: measure.Samples) -> None:
        model.set_attn_implementation(CONTENDERS[name][0])
        call = functools.partial(
            model.generate, ids, attention_mask=torch.ones_like(ids), do_sample=False, max_new_tokens=tokens,
            **{CACHE: cache_of(model, name, len(ids), held)},
        )  # fmt: skip
        time_once(call, samples)

    samples = {name: measure.Samples() for name in CONTENDERS}
    for name in CONTENDERS:
        turn(name, ids[:1], 1, measure.Samples())  # what first calls cost
    for _ in range(options.rounds):
        for name in CONTENDERS:
            turn(name, ids, new, samples[name])
    row = {"dtype": dtype, "batch": batch, "threads": options.threads, "piece": piece, "tokens": new}
    return row | {"contenders": {name: each.summary() for name, each in samples.items()}}


def whole(pieces: dict, name: str, figure: str) -> float | None:
    """Seconds of prompt and new tokens; None before every piece has been measured."""
    if not set(PIECES) <= pieces.keys():
        return None
    each = {piece: pieces[piece]["contenders"][name][figure] / pieces[piece]["tokens"] for piece in PIECES}
    return each["prompt"] + sum(each[piece] for piece in PIECES[1:]) * NEW / len(PIECES[1:])


def grouped(rows: list[dict]) -> dict:
    """(dtype, batch, threads): {piece: its row}."""
    groups = {}
    for row in rows:
        groups.setdefault((row["dtype"], row["batch"], row["threads"]), {})[row["piece"]] = row
    return groups


def markdown(result: dict) -> str:
    lines = torch_runs.head("generate: polyhead's cache and attention beside DynamicCache and sdpa", result["environment"])
    lines += [
        "",
        f"GPT-2 (124M) of random weights, {PROMPT} tokens of prompt, {NEW} new ones. Times of the pieces: median (minimum); "
        f"the prompt in s, then ms for a step of `generate` that has so many tokens in its cache, of {TOKENS} steps. "
        "Tokens/s: the new ones, over the time of prompt and steps, by the minima. Faster: than DynamicCache with sdpa, "
        "by the minima, and in brackets by the medians. " + " ".join(f"Goal: {goal} times at B = {batch}." for batch, goal in GOAL.items()),
        "",
        f"| dtype | B | threads | contender | prompt, s | {' | '.join(PIECES[1:])} | tokens/s | faster |",
        f"|---|--:|--:|---{'|--:' * (len(PIECES) + 2)}|",
    ]
    for (dtype, batch, threads), pieces in grouped(result["rows"]).items():
        for name in CONTENDERS:
            cells = [dtype, str(batch), str(threads), name]
            for piece in PIECES:
                row = pieces.get(piece)
                unit_s = 1.0 if piece == "prompt" else TOKENS * 1e-3
                cells.append("-" if row is None else torch_runs.figures(row["contenders"][name], unit_s))
            least, median = (whole(pieces, name, figure) for figure in ("min_s", "median_s"))
            cells.append("-" if least is None else f"{batch * NEW / least:.1f}")
            if least is None or name == THEIRS:
                cells.append("-")
            else:
                theirs = [whole(pieces, THEIRS, figure) for figure in ("min_s", "median_s")]
                cells.append(f"{times(theirs[0] / least)} ({theirs[1] / median:.2f})")
            lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def draw(result: dict, path: pathlib.Path) -> None:
    """Tokens/s, a bar for each contender of each dtype and B that is measured whole."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    groups = {sizes: pieces for sizes, pieces in grouped(result["rows"]).items() if whole(pieces, THEIRS, "min_s")}
    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.7 * len(groups)), layout="constrained")
    for n, (name, colour) in enumerate(zip(CONTENDERS, ("#d1603d", "#3b7a9e", "#9aa36a"))):
        rates = [batch * NEW / whole(pieces, name, "min_s") for (_, batch, _), pieces in groups.items()]
        bars = axis.barh([place + 0.27 * (n - 1) for place in range(len(groups))], rates, 0.25, color=colour, label=name)
        axis.bar_label(bars, fmt="%.0f", fontsize=7, padding=2)
    axis.set_yticks(range(len(groups)), [f"{dtype}, B = {batch}\n{threads} threads" for dtype, batch, threads in groups])
    axis.invert_yaxis()
    axis.margins(x=0.08)
    axis.legend(fontsize=7)
    axis.set_title(f"GPT-2 (124M), {PROMPT} + {NEW} tokens: new tokens/s", fontsize=9)
    e = result["environment"]
    figure.supxlabel(f"{e['cpu']}, {e['date'][:10]}, commit {e['commit']}", fontsize=6)
    figure.savefig(path, dpi=130)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--dtype", nargs="+", default=["float32", "bfloat16"], choices=("float32", "bfloat16"))
    parser.add_argument("--batch", nargs="+", type=int, default=[8, 1], help="default: 8 1")
    parser.add_argument("--pieces", nargs="+", default=PIECES, choices=PIECES, metavar="PIECE", help=", ".join(PIECES))
    parser.add_argument("--threads", type=int, default=torch.get_num_threads(), help="default: all")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="default: 2")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--after", type=pathlib.Path, metavar="FILE", help="an earlier run's .json")
    parser.add_argument("--out", type=pathlib.Path, help="folder for files")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    transformers.logging.set_verbosity_error()
    polyhead.torch.register_transformers()
    environment = torch_runs.environment("generate.py", options)
    environment["versions"]["transformers"] = transformers.__version__
    rows = [] if options.after is None else json.loads(options.after.read_text())["rows"]
    for dtype in options.dtype:
        for batch in options.batch:
            for piece in options.pieces:
                rows.append(measure_row(dtype, batch, piece, options))
                print(f"{dtype}, B = {batch}, {piece}", file=sys.stderr, flush=True)
    torch_runs.finish(environment)
    result = {"environment": environment, "rows": rows}
    keys = ("dtype", "batch", "threads", "piece", "tokens")
    torch_runs.print_and_write(result, options.out, "generate", markdown(result), keys, draw)
    return 0


if __name__ == "__main__":
    sys.exit(main())
