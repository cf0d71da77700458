#!/usr/bin/env python3
"""Training steps of torch models with polyhead's switch off and on, interleaved in one process.

  bench/torch_training.py --out FOLDER           everything; some ten minutes
  bench/torch_training.py --out FOLDER --quick   two rounds
  bench/torch_training.py --out FOLDER --tiny    tiny models: does it run?

Models: torch_models.py. Each step in eager mode and compiled by Inductor; forward, loss, backward, AdamW. The switch is
turned before each contender's turn; compiled contenders keep graphs of their own, made with the switch as it is for
them. A turn that another process disturbed is dropped (measure.py). Peak memory: of one step in a process of its own.
Call overhead: scaled_dot_product_attention at [1, 1, 8, 16] on one thread, also called without the switch.

Writes <date>-<cpu>-torch.md, .csv, .json and .png into FOLDER.
"""

import argparse
import json
import os
import pathlib
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

import measure
import memory
import polyhead.torch
import torch_models
import torch_runs
from torch_runs import STATES, figures, switched, turn_switch

MODES = ("eager", "compiled")
OVERHEAD_SHAPE = (1, 1, 8, 16)
OVERHEAD_GOALS = {"forward": 1.3, "forward + backward": 1.5}  # times torch's, at most


def measure_steps(sizes: dict, rounds: int, max_seconds: float, modes) -> list[dict]:
    rows = []
    for name, size in sizes.items():
        calls = {}
        for mode in modes:
            for state in STATES:
                calls[f"{mode} {state}"] = switched(state, torch_models.training_step(size, mode == "compiled"))
        print(f"{name}: {size}", file=sys.stderr, flush=True)
        polyhead.torch.report(reset=True)
        for samples_name, samples in measure.interleave(calls, set(), rounds, max_seconds).items():
            mode, state = samples_name.split()
            rows.append({"model": name, "size": str(size), "mode": mode, "switch": state, **samples.summary()})
        print(polyhead.torch.report(reset=True), file=sys.stderr, flush=True)
    turn_switch("off")
    return rows


def measure_peak(name: str, mode: str, state: str, tiny: bool) -> dict:
    """What a step adds to the resident memory of this fresh process; compiled graphs are made before."""
    size = (torch_models.TINY if tiny else torch_models.SIZES)[name]
    turn_switch(state)
    torch_models.training_step(torch_models.TINY[name], False)()
    step = torch_models.training_step(size, mode == "compiled")
    if mode == "compiled":
        step()
    peak, added = memory.peaks_of(step)
    return {"model": name, "mode": mode, "switch": state, "peak_bytes": peak, "step_bytes": added}


def measure_peaks(sizes: dict, tiny: bool, modes) -> list[dict]:
    rows = []
    for name in sizes:
        for mode in modes:
            for state in STATES:
                rows.append(memory.in_a_process(__file__, [name, mode, state, *["--tiny"] * tiny]))
    return rows


def measure_overhead(rounds: int) -> list[dict]:
    torch.set_num_threads(1)
    query, key, value = (torch.randn(OVERHEAD_SHAPE, requires_grad=True) for _ in range(3))
    grad = torch.randn(OVERHEAD_SHAPE)
    ours = polyhead.torch.scaled_dot_product_attention
    attention = polyhead.torch.attention  # [B, S, H, D]

    def forward(function):
        def call():
            with torch.no_grad():
                return function(query, key, value)

        return call

    def both(function):
        return lambda: torch.autograd.grad(function(query, key, value), (query, key, value), grad)

    rows = []
    for direction, make in (("forward", forward), ("forward + backward", both)):
        calls = {
            "torch, switch off": switched("off", make(scaled_dot_product_attention)),
            "torch, switch on": switched("on", make(scaled_dot_product_attention)),
            "polyhead.torch.scaled_dot_product_attention": switched("off", make(ours)),
            "polyhead.torch.attention": switched("off", make(attention)),
        }
        for call, samples in measure.interleave(calls, set(), rounds, 60).items():
            rows.append({"call": call, "direction": direction, **samples.summary()})
    turn_switch("off")
    return rows


def _off_and_on(rows: list[dict], where: dict) -> list[dict]:
    """The rows of a model and mode, by the switch."""
    return [next(row for row in rows if (where | {"switch": state}).items() <= row.items()) for state in STATES]


def markdown(result: dict) -> str:
    lines = torch_runs.head("Training with polyhead's switch off and on", result["environment"])
    lines += [
        "",
        f"{result['environment']['threads']} threads. A step is forward, loss, backward and AdamW. Times: median of "
        "interleaved samples (minimum in brackets). `!`: other processes disturbed every sample.",
        "",
        "| model | mode | off, ms | on, ms | faster | goal | peak memory off / on, MiB | a step adds off / on, MiB |",
        "|---|---|--:|--:|--:|--:|--:|--:|",
    ]
    sizes = {}
    for row in result["steps"]:
        if row["switch"] == "off":
            where = {"model": row["model"], "mode": row["mode"]}
            both, memories = (_off_and_on(result[what], where) for what in ("steps", "memory"))
            gain, goal = both[0]["median_s"] / both[1]["median_s"], torch_models.GOALS.get(row["model"])
            met = f"{goal}x, {'met' if gain >= goal else 'missed'}" if goal else "-"
            cells = [row["model"], row["mode"], *map(figures, both), f"{gain:.2f}x", met]
            cells += [" / ".join(f"{m[f] / 2**20:.0f}" for m in memories) for f in ("peak_bytes", "step_bytes")]
            lines.append(f"| {' | '.join(cells)} |")
            sizes[row["model"]] = row["size"]
    lines += ["", *(f"{name}: {size}." for name, size in sizes.items()), "", *_overhead_table(result["overhead"])]
    return "\n".join(lines) + "\n"


def _overhead_table(rows: list[dict]) -> list[str]:
    lines = [
        f"## A call at {list(OVERHEAD_SHAPE)}, one thread",
        "",
        "| call | direction | us, median (minimum) | of torch's | goal |",
        "|---|---|--:|--:|--:|",
    ]
    for row in rows:
        torchs = next(r for r in rows if r["direction"] == row["direction"])
        share, goal = row["median_s"] / torchs["median_s"], OVERHEAD_GOALS[row["direction"]]
        met = "-" if row is torchs else f"{goal}x, {'met' if share <= goal else 'missed'}"
        cell = figures(row, 1e-6)
        lines.append(f"| {row['call']} | {row['direction']} | {cell} | {share:.2f}x | {met} |")
    return lines


def draw(result: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    steps = [row for row in result["steps"] if row["switch"] == "off"]
    names = [f"{row['model']}\n{row['mode']}" for row in steps]
    figure, axes = plt.subplots(1, 2, figsize=(10, 3.6), constrained_layout=True)
    for axis, rows, field, unit, title in (
        (axes[0], result["steps"], "median_s", 1e-3, "ms a training step (median)"),
        (axes[1], result["memory"], "peak_bytes", 2**20, "peak memory, MiB"),
    ):
        for offset, (state, colour) in zip((-0.2, 0.2), (("off", "#9a9a9a"), ("on", "#2f4858"))):
            heights = [row[field] / unit for row in rows if row["switch"] == state]
            places = [x + offset for x in range(len(steps))]
            bars = axis.bar(places, heights, 0.38, color=colour, label=f"switch {state}")
            axis.bar_label(bars, fmt="%.0f", fontsize=7)
        axis.set_xticks(range(len(steps)), names, fontsize=7)
        axis.set_title(title, fontsize=9)
    axes[0].legend(fontsize=7)
    e = result["environment"]
    figure.supxlabel(f"{e['cpu']}, {e['threads']} threads, {e['date'][:10]}, commit {e['commit']}", fontsize=6)
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results")
    parser.add_argument("--models", nargs="+", choices=torch_models.SIZES, default=list(torch_models.SIZES))
    parser.add_argument("--modes", nargs="+", choices=MODES, default=MODES)
    parser.add_argument("--rounds", type=int, default=0, metavar="N", help="default: 7; --quick: 2")
    parser.add_argument("--max-seconds", type=float, default=300, help="a model's steps together (default: 300)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--peak", nargs=3, help=argparse.SUPPRESS)  # what measure_peaks asks its processes
    options = parser.parse_args()
    if options.out is None and options.peak is None:
        parser.error("--out FOLDER: where the results go")
    options.rounds = options.rounds or (2 if options.quick else 7)
    return options


def main() -> int:
    options = arguments()
    if options.peak:
        print(json.dumps(measure_peak(*options.peak, options.tiny)))
        return 0
    sizes = {name: (torch_models.TINY if options.tiny else torch_models.SIZES)[name] for name in options.models}
    environment = torch_runs.environment("torch_training.py", options)
    environment["threads"] = torch.get_num_threads()
    result = {"environment": environment}
    result["steps"] = measure_steps(sizes, options.rounds, options.max_seconds, options.modes)
    result["memory"] = measure_peaks(sizes, options.tiny, options.modes)
    result["overhead"] = measure_overhead(options.rounds)
    torch_runs.finish(environment)
    rows = [{"what": what, **row} for what in ("steps", "memory", "overhead") for row in result[what]]
    plot = None if options.no_plot else draw
    for path in torch_runs.write(result, options.out, "torch", markdown(result), rows, plot):
        print(os.path.relpath(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
