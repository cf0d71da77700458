#!/usr/bin/env python3
"""Two builds of polyhead beside each other: is any row of the benchmark slower than it was?

  bench/before_after.py BEFORE AFTER                     every row of bench/suites, on 1 and on 2 threads; 45 minutes
  bench/before_after.py BEFORE AFTER --rows '2x8x512x64 --causal' --direction backward
  bench/before_after.py BEFORE AFTER --suites bench/suites/decode.txt --rounds 15 --threads 1

BEFORE and AFTER are two `polyhead` commands, as build/release/tools/polyhead of two checkouts.

How: the two take turns, row by row (A B A B ...), each turn a fresh process of `polyhead bench`; the order is turned
round after each pair. A row's ratio is between the fastest samples of all turns: above 1, AFTER is slower. Turns during
which others used the CPUs are repeated, up to as often as there are rounds.

Prints a table and writes <date>-<cpu>-before-after.md and .json into bench/results (--out elsewhere). Exit status 1 if
a row is slower than --limit. The files are there from the first row on; with --resume, rows that are in them are not
measured again, but for those that were slower.

Where the two do not compute the same (random lengths that are drawn otherwise), the ratio is that of the times for one
operation, and the table says so.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import resource
import shlex
import statistics
import subprocess
import sys

from measure import MAX_OTHERS, TICK_SECONDS, usage

HERE = pathlib.Path(__file__).resolve().parent
SUITE_DIRECTIONS = {"backward": ["backward"], "training": ["forward", "backward"]}


def options():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("before")
    parser.add_argument("after")
    parser.add_argument("--rows", nargs="+", help="problems, as polyhead bench takes them")
    parser.add_argument("--direction", nargs="+", choices=["forward", "backward"], help="of --rows; default forward")
    parser.add_argument("--suites", nargs="+", type=pathlib.Path, help="default: all of bench/suites")
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--rounds", type=int, default=5, help="turns of each build (5)")
    parser.add_argument("--min-time", type=float, default=100, help="milliseconds of samples in a turn (100)")
    parser.add_argument("--limit", type=float, default=1.05, help="the largest ratio that counts as noise (1.05)")
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results")
    parser.add_argument("--resume", action="store_true", help="keep the rows of today's results that are not slower")
    return parser.parse_args()


def lines_of(suite):
    return [line for line in (text.split("#")[0].strip() for text in suite.read_text().splitlines()) if line]


def rows_of(args):
    """(problem, direction) of every row asked for, each once."""
    if args.rows:
        return [(row, direction) for row in args.rows for direction in args.direction or ["forward"]]
    rows = {}
    for suite in args.suites or sorted((HERE / "suites").glob("*.txt")):
        for row in lines_of(suite):
            for direction in SUITE_DIRECTIONS.get(suite.stem, ["forward"]):
                rows[row, direction] = None
    return list(rows)


class Turn:
    """One process of `polyhead bench` on one row."""

    def __init__(self, command, row, direction, threads, min_time):
        words = [command, "bench", *shlex.split(row), "--direction", direction, "--threads", str(threads),
                 "--min-time", str(min_time), "--format", "json"]
        before, ours = usage(), children_seconds()
        done = subprocess.run(words, capture_output=True, text=True, check=False)
        after = usage()
        if done.returncode != 0:
            sys.exit(f"{shlex.join(words)}: {done.stderr.strip()}")
        result = json.loads(done.stdout)["rows"][0]
        self.milliseconds, self.kernel = result["min_ms"], result["kernel"]
        # An older build names the rate otherwise.
        self.operations = result.get("gflop_per_s", result.get("GFLOP/s", 0)) * result["median_ms"]
        others = after.busy - before.busy - (after.own - before.own) - (children_seconds() - ours)
        self.spoiled = others > MAX_OTHERS * (after.wall - before.wall) + 2 * TICK_SECONDS * (os.cpu_count() or 1)


def children_seconds():
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def compare(args, row, direction, threads):
    """The figures of one row: the fastest sample of each build, and the ratios of all pairs of turns."""
    pairs = []
    for attempt in range(2 * args.rounds):
        commands = [args.before, args.after][:: 1 if attempt % 2 == 0 else -1]
        turns = [Turn(command, row, direction, threads, args.min_time) for command in commands]
        pairs.append(turns[:: 1 if attempt % 2 == 0 else -1])
        if sum(not (a.spoiled or b.spoiled) for a, b in pairs) >= args.rounds:
            break
    clean = [pair for pair in pairs if not (pair[0].spoiled or pair[1].spoiled)]
    used = clean or pairs
    before, after = (min(pair[n].milliseconds for pair in used) for n in (0, 1))
    operations = [used[0][n].operations for n in (0, 1)]
    work = operations[1] / operations[0] if all(operations) else 1
    if abs(work - 1) < 0.001:
        work = 1
    return {"problem": row, "direction": direction, "threads": threads, "kernel_before": used[0][0].kernel,
            "kernel_after": used[0][1].kernel, "before_ms": before, "after_ms": after, "work": work,
            "ratio": after / before / work,
            "median_ratio": statistics.median(b.milliseconds / a.milliseconds / work for a, b in used),
            "turns": len(used), "noisy": not clean}


def table(rows, limit):
    lines = ["| problem | direction | threads | before, ms | after, ms | after / before | median of pairs |",
             "|---|---|--:|--:|--:|--:|--:|"]
    for row in rows:
        mark = (" slower" if row["ratio"] > limit else "") + (" !" if row["noisy"] else "")
        if row["work"] != 1:
            mark += f" (of {row['work']:.3f} of the operations)"
        lines.append(f"| {row['problem']} | {row['direction']} | {row['threads']} | {row['before_ms']:.4g} | "
                     f"{row['after_ms']:.4g} | {row['ratio']:.3f}{mark} | {row['median_ratio']:.3f} |")
    return "\n".join(lines)


def describe(command):
    done = subprocess.run([command, "info"], capture_output=True, text=True, check=False)
    if done.returncode != 0:
        sys.exit(f"{command} info: {done.stderr.strip()}")
    return re.search(r"version\s*\|\s*(.*?)\s*\|", done.stdout)[1]


def cpu_name():
    with open("/proc/cpuinfo") as file:
        fields = dict(re.findall(r"^(model name|cpu family|model)\s*:\s*(.*)$", file.read(), flags=re.M))
    return f"{fields.get('model name', platform.machine())} family {fields.get('cpu family')} model {fields.get('model')}"


def write(args, builds, rows, num_rows, num_kept):
    """The table of what is measured so far, into the results too."""
    turns = sorted({row["turns"] for row in rows})
    num_slower = sum(row["ratio"] > args.limit for row in rows)
    text = (f"{builds}machine: {cpu_name()}, {os.cpu_count()} CPUs\n"
            f"method: fastest samples of {turns[0]} to {turns[-1]} turns each, in turn; ! = no turn without others on the "
            f"CPUs\n{num_kept} of the rows are kept from an earlier run of the day\n\n"
            f"{table(rows, args.limit)}\n\n{len(rows)} of {num_rows} rows, ratio "
            f"{statistics.geometric_mean(row['ratio'] for row in rows):.3f} in the geometric mean, "
            f"{num_slower} slower by more than {args.limit - 1:.0%}\n")
    args.out.mkdir(parents=True, exist_ok=True)
    results(args, "md").write_text(text)
    results(args, "json").write_text(json.dumps(rows, indent=1) + "\n")
    return text


def results(args, ending):
    name = re.sub(r"[^a-z0-9]+", "-", f"{datetime.date.today()} {cpu_name()}".lower()).strip("-")
    return args.out / f"{name}-before-after.{ending}"


def kept_rows(args):
    """(problem, direction, threads) -> row, of what --resume need not measure again."""
    if not args.resume or not results(args, "json").exists():
        return {}
    rows = json.loads(results(args, "json").read_text())
    return {(row["problem"], row["direction"], row["threads"]): {"work": 1} | row
            for row in rows if row["ratio"] <= args.limit}


def main():
    args = options()
    builds = f"before: {describe(args.before)}\nafter: {describe(args.after)}\n"
    work = [(row, direction, threads) for threads in args.threads for row, direction in rows_of(args)]
    kept, rows = kept_rows(args), []
    for number, (row, direction, threads) in enumerate(work, 1):
        if sys.stderr.isatty():
            print(f"\r\x1b[K{number}/{len(work)} {row} {direction}", end="", file=sys.stderr, flush=True)
        rows.append(kept.get((row, direction, threads)) or compare(args, row, direction, threads))
        text = write(args, builds, rows, len(work), len(kept))  # after each row: a run that is cut off leaves what it has
    if sys.stderr.isatty():
        print("\r\x1b[K", end="", file=sys.stderr)
    print(text)
    sys.exit(any(row["ratio"] > args.limit for row in rows))


if __name__ == "__main__":
    main()
