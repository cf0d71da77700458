#!/usr/bin/env python3
"""polyhead beside torch, onnxruntime and jax, in the same minute of the same machine.

  bench/peers.py                                     every suite, on 1 and on 2 threads; 60 to 100 minutes
  bench/peers.py --quick                             a rough look at a few rows of each direction
  bench/peers.py --quick --suite forward             ... at one suite
  bench/peers.py --rows '2x8x512x64 --causal'        one problem, forward
  bench/peers.py --rows '2x8x512x64' --direction backward forward+backward
  bench/peers.py --threads 1 --peers torch ort       fewer contenders

What: forward; backward, which is the gradients alone, given what forward wrote; or both in one call. A suite's name
tells: backward*.txt, training*.txt (both), the others forward. Beside them the peak memory of forward and backward,
against the sequence length.

How: one worker process for each number of threads, confined to as many CPUs, with POLYHEAD_THREADS saying the same;
each holds polyhead and all its peers and times them interleaved, A B C A B C (polyhead and jax size their thread pools
once a process, so the number cannot change inside one). Only one worker computes at a time. Every ratio is between
samples of one process, taken within the same seconds. Samples during which other processes took the CPUs are dropped;
a figure for which no clean sample was to be had carries a '!'. Before timing, each peer's outputs are compared with
ours. Memory is measured in a fresh process for each contender and length.

Writes <date>-<cpu>.md, .csv, .json and pictures into bench/results (--out elsewhere). Times: the minimum and the median
of all clean samples. Operands and layouts: rivals.py, rivals_backward.py. Guards: measure.py. Goals: goals.py.
"""

import argparse
import datetime
import json
import os
import pathlib
import platform
import re
import shlex
import subprocess
import sys
import time

import memory
import report
from problem import (
    BACKWARD, BOTH, DIRECTIONS, FORWARD, Problem, parse_problem, read_suite, suite_direction, suites,
)  # fmt: skip

HERE = pathlib.Path(__file__).resolve().parent

# --quick without --suite or --rows
QUICK_ROWS = {
    FORWARD: [
        "1x16x384x64",
        "1x16x384x64 --dtype bf16",
        "2x8x512x64 --causal",
        "1x8x4096x128",
        "32x12x128x64",
        "8x32/8x1/4096x128",
        "8x32/8x1/4096x128 --dtype bf16",
        "128x32x8x4",
    ],
    BACKWARD: ["1x16x384x64", "1x16x384x64 --dtype bf16", "2x8x512x64 --causal", "1x8x2048x64"],
    BOTH: ["2x8x512x64 --dropout 0.1", "128x32x8x4"],
}


class Worker:
    """A worker.py process on `threads` threads, on the CPUs it may use."""

    def __init__(self, threads: int):
        self.threads = threads
        self._process = None

    def _start(self) -> subprocess.Popen:
        cpus = sorted(os.sched_getaffinity(0))[: self.threads]
        return subprocess.Popen(
            [sys.executable, str(HERE / "worker.py"), str(self.threads)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "POLYHEAD_THREADS": str(self.threads), "OMP_NUM_THREADS": str(self.threads)},
            preexec_fn=lambda: os.sched_setaffinity(0, cpus),
        )

    def ask(self, **request) -> dict:
        """The worker's answer; {"error": ...} if it died of the request."""
        if self._process is None:
            self._process = self._start()
        try:
            print(json.dumps(request), file=self._process.stdin, flush=True)
            answer = self._process.stdout.readline()
        except BrokenPipeError:
            answer = ""
        if answer:
            return json.loads(answer)
        status = self._process.wait()
        self._process = None
        return {"error": f"the worker ended with status {status}"}

    def stop(self) -> None:
        if self._process is not None:
            self._process.stdin.close()
            self._process.wait()


def suite_names() -> list[str]:
    return [path.stem for path in suites()]


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    names = suite_names()
    parser.add_argument("--suite", nargs="+", choices=names, default=[], metavar="NAME", help=", ".join(names))
    parser.add_argument("--rows", nargs="+", default=[], metavar="PROBLEM", help="these problems instead of suites")
    parser.add_argument(
        "--direction", nargs="+", choices=DIRECTIONS, default=[], help="of the --rows (default: forward)"
    )
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    parser.add_argument("--peers", nargs="+", default=[], metavar="NAME", help="torch, ort, jax; default: all")
    parser.add_argument("--quick", action="store_true", help="two rounds a problem; without --suite, few problems")
    parser.add_argument("--rounds", type=int, metavar="N", help="rounds of all contenders a problem (default: 7)")
    parser.add_argument(
        "--memory", action=argparse.BooleanOptionalAction, help="peak memory (default: measured, but not with --rows)"
    )
    parser.add_argument(
        "--overhead",
        type=pathlib.Path,
        metavar="PROGRAM",
        default=HERE.parent / "build" / "release" / "bench" / "overhead",
        help="the cost of a C++ call (default: build/release/bench/overhead)",
    )
    parser.add_argument("--out", type=pathlib.Path, default=HERE / "results", help="folder for the results")
    parser.add_argument("--no-plot", action="store_true")
    options = parser.parse_args()
    if options.direction and not options.rows:
        parser.error("--direction goes with --rows; a suite's name tells its own")
    if options.suite and options.rows:
        parser.error("--rows beside --suite: give one or the other")
    if options.memory is None:
        options.memory = not options.rows
    if options.rounds is None:
        options.rounds = 2 if options.quick else 7
    if options.rounds < 1:
        parser.error(f"--rounds is {options.rounds}, must be at least 1")
    cpus = len(os.sched_getaffinity(0))
    if max(options.threads) > cpus or min(options.threads) < 1:
        parser.error(f"--threads {max(options.threads)}: this process may use {cpus} CPUs")
    return options


def problems(options: argparse.Namespace) -> list[tuple[str, Problem]]:
    """(direction, problem), each once."""
    if options.rows:
        return [(d, parse_problem(line)) for d in options.direction or [FORWARD] for line in options.rows]
    if options.quick and not options.suite:
        return [(direction, parse_problem(line)) for direction, lines in QUICK_ROWS.items() for line in lines]
    found = {}
    for name in options.suite or suite_names():
        for problem in read_suite(HERE / "suites" / f"{name}.txt"):
            found.setdefault((suite_direction(name), problem.line), problem)
    return [(direction, problem) for (direction, _), problem in found.items()]


def cpu_name() -> str:
    with open("/proc/cpuinfo") as file:
        fields = dict(re.findall(r"^(\w[\w ]*?)\s*: (.*)$", file.read(), re.MULTILINE))
    name = fields.get("model name", platform.machine())
    return f"{name} family {fields['cpu family']} model {fields['model']}" if "cpu family" in fields else name


def _git(*words: str) -> str:
    done = subprocess.run(["git", "-C", str(HERE), *words], capture_output=True, text=True)
    return done.stdout.strip()


def environment(options: argparse.Namespace, versions: dict) -> dict:
    changed = any(not line.endswith(".md") for line in _git("status", "--porcelain", "-uno").splitlines())
    with open("/proc/meminfo") as file:
        memory_gib = int(file.readline().split()[1]) / 2**20
    return {
        "command": "bench/peers.py " + shlex.join(sys.argv[1:]),
        "date": datetime.datetime.now().astimezone().isoformat(timespec="seconds"),
        "commit": (_git("rev-parse", "--short=12", "HEAD") or "none") + (" with changes" if changed else ""),
        "cpu": cpu_name(),
        "cpus": len(os.sched_getaffinity(0)),
        "memory_gib": round(memory_gib, 1),
        "kernel": platform.release(),
        "load_before": round(os.getloadavg()[0], 2),
        "versions": versions,
    }


def run_rows(options: argparse.Namespace, workers: list[Worker]) -> list[dict]:
    """Every problem on every number of threads, told on stderr as it goes."""
    rows = []
    todo = [(direction, problem, worker) for direction, problem in problems(options) for worker in workers]
    for index, (direction, problem, worker) in enumerate(todo):
        start = time.perf_counter()
        label = f"[{index + 1:3}/{len(todo)}] {direction} {problem.line}, {worker.threads} thread"
        print(label + "s" * (worker.threads > 1), end=" ... ", file=sys.stderr, flush=True)
        request = {"problem": problem.line, "direction": direction, "rounds": options.rounds, "peers": options.peers}
        row = {"problem": problem.line, "direction": direction, "threads": worker.threads}
        row.update(worker.ask(what="row", **request))
        rows.append(row)
        print(f"{report.one_line(row)} ({time.perf_counter() - start:.0f} s)", file=sys.stderr, flush=True)
    return rows


def cpp_overhead(options: argparse.Namespace) -> dict:
    """Microseconds of Plan::forward and Plan::backward, as bench/overhead prints them."""
    if not options.overhead.exists():
        print(f"peers.py: no {os.path.relpath(options.overhead)}: left out (./dev build makes it)", file=sys.stderr)
        return {}
    done = subprocess.run([options.overhead], capture_output=True, text=True, check=True)
    told = json.loads(done.stdout)
    return {f"polyhead, C++ plan, {direction}": told[f"{direction}_us"] for direction in (FORWARD, BACKWARD)}


def main() -> int:
    options = arguments()
    workers = [Worker(threads) for threads in options.threads]
    versions = workers[0].ask(what="versions")
    if "error" in versions:
        print(f"peers.py: {versions['error']}", file=sys.stderr)
        return 1
    result = {"environment": environment(options, versions)}
    result["rows"] = run_rows(options, workers)
    result["memory"] = memory.measure("quick" if options.quick else "full", max(options.threads)) if options.memory else []
    result["overhead_us"] = {**workers[0].ask(what="overhead"), **cpp_overhead(options)}
    result["environment"]["load_after"] = round(os.getloadavg()[0], 2)
    for worker in workers:
        worker.stop()
    stem = f"{result['environment']['date'][:10]}-{report.slug(cpu_name())}"
    for path in report.write(result, options.out, stem, plot=not options.no_plot):
        print(os.path.relpath(path))
    return 1 if any("error" in row for row in result["rows"]) else 0


if __name__ == "__main__":
    sys.exit(main())
