#!/usr/bin/env python3
"""The goals against torch, held through torch: its scaled_dot_product_attention with polyhead's switch off and on.

  bench/torch_operator.py                                    every problem with such a goal, on 1 and on 2 threads;
                                                             some 30 minutes
  bench/torch_operator.py --quick                            two rounds of a few problems
  bench/torch_operator.py --suite masks training             these suites alone
  bench/torch_operator.py --rows '2x8x512x64' --direction backward
  bench/torch_operator.py --out FOLDER                       the table and the figures into files too

bench/peers.py times polyhead's kernels over NumPy arrays; this tells what of that arrives in torch, in one process,
interleaved. off and on are the same call. attention is polyhead.torch.attention, which has words (window, lengths)
where torch's call needs a mask of the scores' size. backward is autograd's alone, the graph kept.
"""

import argparse
import pathlib
import sys

import torch
from torch.nn.functional import scaled_dot_product_attention

import measure
import peers
import polyhead.torch
import problem
import rivals
import rivals_backward
import torch_runs
from goals import goal_of
from problem import BACKWARD, BOTH, DIRECTIONS, FORWARD, Operands, Problem
from report import times

SECONDS_PER_ROUND = 4.0  # a row whose rounds last longer gets fewer of them


def _step(direction: str, forward, inputs: list[torch.Tensor], grad_out: torch.Tensor):
    """What is timed: forward without gradients, the gradients alone, or both."""
    if direction == FORWARD:

        def call():
            with torch.inference_mode():
                return (forward(),)

        return call
    if direction == BOTH:
        return lambda: torch.autograd.grad(forward(), inputs, grad_out)
    out = forward()
    return lambda: torch.autograd.grad(out, inputs, grad_out, retain_graph=True)


def _torchs(p: Problem, x: Operands, direction: str, state: str):
    options = rivals.torch_options(p, x)
    inputs = [rivals.as_torch(t).requires_grad_() for t in (x.query, x.key, x.value)]
    if p.bias_dims:
        inputs.append(options["attn_mask"].requires_grad_())
    torch_runs.turn_switch(state)
    call = _step(
        direction, lambda: scaled_dot_product_attention(*inputs[:3], **options), inputs, rivals.as_torch(x.grad_out)
    )
    return torch_runs.switched(state, call)


def _attention(p: Problem, x: Operands, direction: str):
    options = rivals.polyhead_arguments(p, x)
    for name in ("attn_mask", "attn_bias", "seqlens_k"):
        if options.get(name) is not None:
            options[name] = rivals.as_torch(options[name])
    inputs = [rivals.as_torch(t).requires_grad_() for t in (x.query, x.key, x.value)]
    if p.bias_dims:
        inputs.append(options["attn_bias"].requires_grad_())

    def forward():
        return polyhead.torch.attention(*(t.transpose(1, 2) for t in inputs[:3]), **options).transpose(1, 2)

    return _step(direction, forward, inputs, rivals.as_torch(x.grad_out))


def _largest_difference(p: Problem, calls: dict) -> float | None:
    """Between the results of "on" and of the others; None where each draws its own dropout."""
    if p.dropout_p > 0:
        return None
    results = {name: [t.float() for t in call()] for name, call in calls.items()}
    return max(
        float((a - b).abs().max()) for name in calls for a, b in zip(results[name], results["on"], strict=True)
    )


def measure_row(p: Problem, direction: str, threads: int, rounds: int) -> dict:
    torch.set_num_threads(threads)
    row = {"problem": p.line, "direction": direction, "threads": threads}
    x = Operands(p)
    try:
        if direction != FORWARD and (p.dropout_p > 0 or p.bias_dims):
            rivals_backward.check_memory(p)
        calls = {state: _torchs(p, x, direction, state) for state in torch_runs.STATES}
    except rivals.Refusal as refusal:
        return {**row, "refusal": str(refusal)}
    calls["attention"] = _attention(p, x, direction)
    row["max_diff"] = _largest_difference(p, calls)
    samples = measure.interleave(calls, set(), rounds, SECONDS_PER_ROUND * rounds)
    torch_runs.turn_switch("off")
    return {**row, "contenders": {name: each.summary() for name, each in samples.items()}}


def ratio(row: dict, contender: str, figure: str = "min_s") -> float:
    """How many times as fast as torch with the switch off."""
    return row["contenders"]["off"][figure] / row["contenders"][contender][figure]


def _verdict(row: dict, contender: str, goal) -> str:
    noisy = "!" if row["contenders"]["off"]["noisy"] or row["contenders"][contender]["noisy"] else ""
    reached = ratio(row, contender)
    return f"{times(reached)} / {times(ratio(row, contender, 'median_s'))}, " + (
        ("met" if reached >= goal.torch else "**missed**") + noisy
    )


def markdown(result: dict) -> str:
    lines = torch_runs.head("torch's attention with polyhead's switch off and on", result["environment"])
    lines += [
        "",
        "Times in ms: median (minimum) of interleaved samples. Faster: torch's minimum over ours / the same of the "
        "medians; the goals speak of the minimum. `!`: other processes disturbed every sample.",
        "",
        "| goal | problem | direction | threads | off | on | attention | asked | on is faster | attention is faster |",
        "|---|---|---|--:|--:|--:|--:|--:|--:|--:|",
    ]
    met = {"on": 0, "attention": 0}
    measured = [row for row in result["rows"] if "contenders" in row]
    for row in measured:
        goal = goal_of(problem.parse_problem(row["problem"]), row["direction"], row["threads"])
        cells = [goal.name, f"`{row['problem']}`", row["direction"], str(row["threads"])]
        cells += [torch_runs.figures(row["contenders"][name]) for name in ("off", "on", "attention")]
        cells += [f">= {times(goal.torch)}", *(_verdict(row, name, goal) for name in met)]
        lines.append(f"| {' | '.join(cells)} |")
        for name in met:
            met[name] += ratio(row, name) >= goal.torch
    lines += ["", f"{len(measured)} goals: {met['on']} met with the switch on, {met['attention']} by attention."]
    for row in result["rows"]:
        if "refusal" in row:
            lines.append(f"- not measured: `{row['problem']}`, {row['direction']}: torch {row['refusal']}")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    suites = peers.suite_names()
    parser.add_argument("--suite", nargs="+", choices=suites, default=[], metavar="NAME", help=", ".join(suites))
    parser.add_argument("--rows", nargs="+", default=[], metavar="PROBLEM", help="these problems instead of suites")
    parser.add_argument("--direction", nargs="+", choices=DIRECTIONS, default=[], help="of the --rows")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    parser.add_argument("--quick", action="store_true", help="two rounds; without --suite, few problems")
    parser.add_argument("--rounds", type=int, metavar="N", help="default: 7")
    parser.add_argument("--out", type=pathlib.Path, help="folder for files")
    options = parser.parse_args()
    options.rounds = options.rounds or (2 if options.quick else 7)
    return options


def main() -> int:
    options = arguments()
    environment = torch_runs.environment("torch_operator.py", options)
    todo = [
        (p, direction, threads)
        for direction, p in peers.problems(options)
        for threads in options.threads
        if (goal := goal_of(p, direction, threads)) is not None and goal.torch is not None
    ]
    rows = []
    for index, (p, direction, threads) in enumerate(todo):
        print(f"[{index + 1}/{len(todo)}] {direction} {p.line}, threads {threads}", end="", file=sys.stderr, flush=True)
        rows.append(measure_row(p, direction, threads, options.rounds))
        told = f"on {times(ratio(rows[-1], 'on'))}" if "contenders" in rows[-1] else rows[-1]["refusal"]
        print(f": {told}", file=sys.stderr, flush=True)
    torch_runs.finish(environment)
    result = {"environment": environment, "rows": rows}
    torch_runs.print_and_write(result, options.out, "torch-operator", markdown(result), ("problem", "direction", "threads", "max_diff"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
