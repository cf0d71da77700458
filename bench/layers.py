#!/usr/bin/env python3
"""polyhead.torch's layers beside torch.nn's: forward, backward, and a step of both, interleaved in one process.

  bench/layers.py --out FOLDER           everything, on 1 and on 2 threads; some 20 minutes
  bench/layers.py --out FOLDER --quick   two rounds
  bench/layers.py --out FOLDER --tiny    tiny layers: does it run?

The contenders have one state_dict and one input; their outputs are compared before anything is timed. forward is in
eval, without gradients; backward is autograd's alone, the graph kept; forward+backward is a step of training without
its optimizer. torch.nn's run with polyhead's switch off, eager and, where a goal asks for it, compiled by Inductor.
Peak memory: what a step adds in a process of its own, gradients of parameters allocated before.
Products by themselves: bench/gemm.py.

Writes <date>-<cpu>-layers.md, .csv, .json and .png into FOLDER.
"""

import argparse
import dataclasses
import json
import os
import pathlib
import sys

import torch

import measure
import memory
import polyhead.torch
import torch_models
import torch_runs
from problem import BACKWARD, BOTH, DIRECTIONS, FORWARD

OURS, NN, COMPILED = "polyhead", "torch.nn", "torch.nn compiled"


@dataclasses.dataclass(frozen=True)
class Case:
    """A layer that polyhead.torch and torch.nn both have, by the name `kind`; it is given [batch, seqlen, width].

    goals: (direction, against whom) -> how many times as fast, at least.
    """

    kind: str
    width: int
    heads: int
    batch: int
    seqlen: int
    feedforward: int = 0
    dropout: float = 0.0
    goals: dict = dataclasses.field(default_factory=dict)

    def __str__(self):
        feedforward = f", feedforward {self.feedforward}" if self.feedforward else ""
        return (
            f"{self.kind}, {self.width} wide, {self.heads} heads{feedforward}, B={self.batch}, S={self.seqlen}, "
            f"dropout {self.dropout}, float32"
        )


ATTENTION, ENCODER = "MultiheadAttention", "TransformerEncoderLayer"
BOTH_WAYS = {(FORWARD, NN): 1.2, (BOTH, NN): 1.2}
ENCODER_GOALS = {(BOTH, NN): 1.3, (BOTH, COMPILED): 1.15}
CASES = {
    "BERT-large, B=1": Case(ATTENTION, 1024, 16, batch=1, seqlen=384, goals=BOTH_WAYS),
    "BERT-large, B=8": Case(ATTENTION, 1024, 16, batch=8, seqlen=384, goals=BOTH_WAYS),
    "Flux": Case(ATTENTION, 128, 32, batch=128, seqlen=8, goals={(BOTH, NN): 5}),
    "encoder layer": Case(ENCODER, 1024, 16, 4, 384, feedforward=4096, dropout=0.1, goals=ENCODER_GOALS),
}
TINY = {
    "BERT-large, B=1": Case(ATTENTION, 32, 4, batch=1, seqlen=12, goals=BOTH_WAYS),
    "encoder layer": Case(ENCODER, 32, 4, 2, 12, feedforward=64, dropout=0.1, goals=ENCODER_GOALS),
}
MEMORY_CASES = {
    f"{what}, dropout {dropout}": Case(kind, 1024, 16, 1, 2048, feedforward, dropout)
    for what, kind, feedforward in (("attention", ATTENTION, 0), ("encoder layer", ENCODER, 4096))
    for dropout in (0.1, 0.0)
}
TINY_MEMORY_CASES = {"attention, dropout 0.1": Case(ATTENTION, 32, 4, 1, 256, dropout=0.1)}
MEMORY_GOAL = 0.5  # of torch.nn's, at most
BACKWARD_GOAL = 2.5  # times forward, at most; of attention's layers


def make(case: Case, contender: str) -> torch.nn.Module:
    """The layer, with weights that the seed gives."""
    torch.manual_seed(0)
    arguments = (case.feedforward, case.dropout) if case.feedforward else (case.dropout,)
    layers = [
        getattr(namespace, case.kind)(case.width, case.heads, *arguments, batch_first=True)
        for namespace in (torch.nn, polyhead.torch)
    ]
    layers[1].load_state_dict(layers[0].state_dict())
    return layers[contender == OURS]


def apply(case: Case, layer: torch.nn.Module, x: torch.Tensor) -> torch.Tensor:
    return layer(x) if case.kind == ENCODER else layer(x, x, x, need_weights=False)[0]


def contender_call(case: Case, contender: str, direction: str):
    """What is timed."""
    layer = make(case, contender)
    x = torch.randn(case.batch, case.seqlen, case.width, requires_grad=True)
    grad_out = torch.randn(x.shape)
    leaves = [x, *layer.parameters()]
    run = torch.compile(layer, backend=torch_models.inductor()) if contender == COMPILED else layer
    if direction == FORWARD:
        layer.eval()

        def forward():
            with torch.no_grad():
                return (apply(case, run, x),)

        return forward
    if direction == BOTH:
        return lambda: torch.autograd.grad(apply(case, run, x), leaves, grad_out)
    out = apply(case, run, x)
    return lambda: torch.autograd.grad(out, leaves, grad_out, retain_graph=True)


def largest_difference(case: Case) -> float:
    """Of the outputs without dropout, and of the gradients, over the largest value."""
    case = dataclasses.replace(case, dropout=0.0)
    largest = 0.0
    for direction in (FORWARD, BOTH):
        for ours, theirs in zip(*(contender_call(case, name, direction)() for name in (OURS, NN)), strict=True):
            largest = max(largest, float((ours - theirs).abs().max() / theirs.abs().max()))
    return largest


def measure_cases(cases: dict, threads: list[int], rounds: int, max_seconds: float) -> list[dict]:
    rows = []
    for name, case in cases.items():
        difference = largest_difference(case)
        for count in threads:
            torch.set_num_threads(count)
            for direction in DIRECTIONS:
                print(f"{name}, {direction}, threads {count}", file=sys.stderr, flush=True)
                names = [OURS, NN, *[COMPILED] * ((direction, COMPILED) in case.goals)]
                calls = {each: contender_call(case, each, direction) for each in names}
                samples = measure.interleave(calls, set(), rounds, max_seconds)
                found = {each: samples[each].summary() for each in names}
                where = {"case": name, "layer": str(case), "direction": direction, "threads": count}
                rows.append({**where, "max_diff": difference, "contenders": found})
    return rows


def memory_cases(tiny: bool) -> dict:
    return TINY_MEMORY_CASES if tiny else MEMORY_CASES


def measure_peak(name: str, contender: str, tiny: bool) -> dict:
    """What a step adds to the resident memory of this fresh process."""
    case = memory_cases(tiny)[name]
    layer = make(case, contender)
    x = torch.randn(case.batch, case.seqlen, case.width, requires_grad=True)

    def step(tokens):
        apply(case, layer, tokens).sum().backward()

    step(x[:, :16].detach().requires_grad_())
    _, added = memory.peaks_of(lambda: step(x))
    return {"case": name, "contender": contender, "step_bytes": added}


def measure_peaks(tiny: bool) -> list[dict]:
    rows = []
    for name in memory_cases(tiny):
        for contender in (OURS, NN):
            rows.append(memory.in_a_process(__file__, [name, contender, *["--tiny"] * tiny]))
    return rows


# --- the table, with its goals ---------------------------------------------------------------------------------------


def ratio(row: dict, against: str) -> float:
    """How many times as fast as `against` we are, by the fastest calls."""
    return row["contenders"][against]["min_s"] / row["contenders"][OURS]["min_s"]


def _verdict(met: bool, *entries: dict) -> str:
    return ("met" if met else "**missed**") + "!" * any(entry["noisy"] for entry in entries)


def goals_of(row: dict, cases: dict) -> dict:
    """against -> asked."""
    goals = cases[row["case"]].goals
    return {peer: asked for (direction, peer), asked in goals.items() if direction == row["direction"]}


def _speed_table(rows: list[dict], cases: dict) -> list[str]:
    lines = [
        f"| layer | direction | threads | {NN} | {COMPILED} | {OURS} | times as fast | asked | max diff |",
        "|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    for row in rows:
        entries, asked = row["contenders"], goals_of(row, cases)
        peers = [name for name in (NN, COMPILED) if name in entries]
        cells = [row["case"], row["direction"], str(row["threads"])]
        cells += [torch_runs.figures(entries[name]) if name in entries else "-" for name in (NN, COMPILED, OURS)]
        cells.append(" / ".join(f"{ratio(row, name):.2f}x" for name in peers))
        verdicts = [
            f">= {asked[name]}x, {_verdict(ratio(row, name) >= asked[name], entries[name], entries[OURS])}"
            for name in peers
            if name in asked
        ]
        cells += [" / ".join(verdicts) or "-", f"{row['max_diff']:.1e}"]
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def _backward_table(rows: list[dict], cases: dict) -> list[str]:
    lines = [f"| layer | threads | {OURS}: backward / forward | asked | {NN} |", "|---|--:|--:|--:|--:|"]
    for row in rows:
        if row["direction"] != BACKWARD or cases[row["case"]].kind != ATTENTION:
            continue
        forward = next(
            r for r in rows if (r["case"], r["threads"], r["direction"]) == (row["case"], row["threads"], FORWARD)
        )
        entries = [each["contenders"][OURS] for each in (row, forward)]
        ours, theirs = (row["contenders"][n]["min_s"] / forward["contenders"][n]["min_s"] for n in (OURS, NN))
        verdict = _verdict(ours <= BACKWARD_GOAL, *entries)
        lines.append(
            f"| {row['case']} | {row['threads']} | {ours:.2f} | <= {BACKWARD_GOAL}, {verdict} | {theirs:.2f} |"
        )
    return lines


def _memory_table(rows: list[dict], tiny: bool) -> list[str]:
    lines = [f"| a step of training adds, MiB | {NN} | {OURS} | of {NN}'s | asked |", "|---|--:|--:|--:|--:|"]
    for name, case in memory_cases(tiny).items():
        theirs, ours = (
            next(row["step_bytes"] for row in rows if (row["case"], row["contender"]) == (name, contender))
            for contender in (NN, OURS)
        )
        share = ours / max(theirs, 1)
        lines.append(
            f"| {case} | {theirs / 2**20:.1f} | {ours / 2**20:.1f} | {share:.0%} | <= {MEMORY_GOAL:.0%}, "
            f"{_verdict(share <= MEMORY_GOAL)} |"
        )
    return lines


def markdown(result: dict, cases: dict, tiny: bool) -> str:
    lines = torch_runs.head("polyhead.torch's layers beside torch.nn's", result["environment"])
    lines += [
        "",
        "Times in ms: median (minimum) of interleaved samples; times as fast: by the minimum. Max diff: of outputs and "
        "gradients without dropout, over the largest value. `!`: other processes disturbed every sample.",
        "",
        *_speed_table(result["rows"], cases),
        "",
        *(f"{name}: {case}." for name, case in cases.items()),
        "",
        *_backward_table(result["rows"], cases),
        "",
        *_memory_table(result["memory"], tiny),
    ]
    return "\n".join(lines) + "\n"


def draw(result: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    all_threads = sorted({row["threads"] for row in result["rows"]})
    size = (5.5 * len(all_threads), 1.5 + 0.35 * len(result["rows"]) / len(all_threads))
    figure, axes = plt.subplots(1, len(all_threads), figsize=size, sharey=True, squeeze=False, layout="constrained")
    for axis, threads in zip(axes[0], all_threads):
        rows = [row for row in result["rows"] if row["threads"] == threads]
        for place, row in enumerate(rows):
            for offset, peer, colour in ((-0.2, NN, "#d1603d"), (0.2, COMPILED, "#9a9a9a")):
                if peer in row["contenders"]:
                    bars = axis.barh(place + offset, ratio(row, peer), 0.36, color=colour, zorder=2)
                    axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
                asked = result["goals"].get(f"{row['case']}|{row['direction']}|{peer}")
                if asked is not None:
                    axis.plot([asked] * 2, [place + offset - 0.18, place + offset + 0.18], color="black", linewidth=2)
        axis.set_yticks(range(len(rows)), [f"{row['case']}\n{row['direction']}" for row in rows], fontsize=7)
        axis.axvline(1, color="#555555", linewidth=1)
        axis.margins(x=0.12)
        axis.set_title(f"{threads} thread{'s'[: threads > 1]}: times as fast as torch.nn", fontsize=9)
    handles = [plt.Rectangle((0, 0), 1, 1, color=colour) for colour in ("#d1603d", "#9a9a9a", "black")]
    axes[0][0].invert_yaxis()
    figure.legend(handles, [NN, COMPILED, "goal"], fontsize=7, loc="outside upper right", ncols=3)
    e = result["environment"]
    figure.supxlabel(f"{e['cpu']}, {e['date'][:10]}, commit {e['commit']}", fontsize=6)
    figure.savefig(path, dpi=150)


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--out", type=pathlib.Path, help="folder for the results")
    parser.add_argument("--cases", nargs="+", metavar="NAME", help=f"default: {', '.join(CASES)}")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 7; --quick: 2")
    parser.add_argument("--max-seconds", type=float, default=60, help="of one line of the table (default: 60)")
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--no-plot", action="store_true")
    parser.add_argument("--peak", nargs=2, help=argparse.SUPPRESS)  # what measure_peaks asks its processes
    options = parser.parse_args()
    if options.out is None and options.peak is None:
        parser.error("--out FOLDER: where the results go")
    known = TINY if options.tiny else CASES
    for name in options.cases or []:
        if name not in known:
            parser.error(f"--cases: '{name}' is none of {', '.join(known)}")
    options.rounds = options.rounds or (2 if options.quick else 7)
    return options


def main() -> int:
    options = arguments()
    if options.peak:
        print(json.dumps(measure_peak(*options.peak, options.tiny)))
        return 0
    known = TINY if options.tiny else CASES
    cases = {name: known[name] for name in options.cases or known}
    environment = torch_runs.environment("layers.py", options)
    rows = measure_cases(cases, options.threads, options.rounds, options.max_seconds)
    peaks = measure_peaks(options.tiny)
    torch_runs.finish(environment)
    goals = {f"{name}|{way}|{peer}": goal for name, case in cases.items() for (way, peer), goal in case.goals.items()}
    result = {"environment": environment, "goals": goals, "rows": rows, "memory": peaks}
    flat = [{**row, "contender": name, **entry} for row in rows for name, entry in row["contenders"].items()]
    for row in flat:
        del row["contenders"]
    text = markdown(result, cases, options.tiny)
    print(text)
    plot = None if options.no_plot else draw
    for path in torch_runs.write(result, options.out, "layers", text, flat + peaks, plot):
        print(os.path.relpath(path))
    return 0


if __name__ == "__main__":
    sys.exit(main())
