"""Interleaved timing that knows when another process took the machine.

A round runs each contender in turn (A B C A B C ...), so that a slow minute of the machine meets all of them. Before
each turn we wait until the threads of the one before sleep (OpenMP and onnxruntime spin on for some 30 ms). A turn is
spoiled, and its samples dropped, when our threads waited for a CPU (the kernel's run delay, in ns) or when others used
the CPUs meanwhile (ticks of /proc/stat that are not in our own rusage).
"""

import os
import resource
import statistics
import time
from dataclasses import dataclass, field
from typing import Callable, NamedTuple

SPIN_SECONDS = 0.04
TURN_SECONDS = 0.1
BATCH_SECONDS = 2e-4  # calls shorter than this are timed several at a time
MAX_WAITED = 0.01  # share of a turn that our threads may have waited for a CPU
MAX_OTHERS = 0.10  # CPUs that others may have used during a turn
TICK_SECONDS = 1 / os.sysconf("SC_CLK_TCK")


class Usage(NamedTuple):
    """What the clocks say at one moment, all in seconds."""

    wall: float
    own: float  # CPU time of this process
    busy: float  # CPU time of everything on this machine, in whole ticks
    waited: float  # our threads, runnable but without a CPU


def usage() -> Usage:
    waited = 0.0
    for task in os.listdir("/proc/self/task"):
        try:
            with open(f"/proc/self/task/{task}/schedstat") as file:
                waited += int(file.read().split()[1]) * 1e-9
        except (OSError, IndexError):  # the thread has ended, or the kernel keeps no such account
            pass
    with open("/proc/stat") as file:
        user, nice, system, _idle, _iowait, irq, softirq, steal = (int(x) for x in file.readline().split()[1:9])
    own = resource.getrusage(resource.RUSAGE_SELF)
    busy = (user + nice + system + irq + softirq + steal) * TICK_SECONDS
    return Usage(time.perf_counter(), own.ru_utime + own.ru_stime, busy, waited)


def spoiled(before: Usage, after: Usage, crowded: bool) -> bool:
    """Whether others took the machine between the two moments. `crowded`: the contender has more threads than CPUs, so
    that they wait for one another, which tells nothing."""
    wall = after.wall - before.wall
    others = (after.busy - before.busy) - (after.own - before.own)
    ticks = 1.5 * TICK_SECONDS * (os.cpu_count() or 1)  # what rounding to whole ticks can pretend
    waited = 0.0 if crowded else after.waited - before.waited
    return waited > MAX_WAITED * wall or others > MAX_OTHERS * wall + ticks


@dataclass
class Samples:
    """Seconds of one contender's calls."""

    clean: list[float] = field(default_factory=list)
    dirty: list[float] = field(default_factory=list)
    clean_turns: int = 0
    dirty_turns: int = 0

    @property
    def noisy(self) -> bool:
        """No clean sample was to be had; the figures are of spoiled ones."""
        return not self.clean

    @property
    def times(self) -> list[float]:
        return self.clean or self.dirty

    @property
    def minimum(self) -> float:
        return min(self.times)

    @property
    def median(self) -> float:
        return statistics.median(self.times)

    def summary(self) -> dict:
        return {
            "min_s": self.minimum,
            "median_s": self.median,
            "samples": len(self.times),
            "dropped_turns": self.dirty_turns,
            "noisy": self.noisy,
        }


def take_turn(call: Callable[[], object], expected_s: float, crowded: bool, samples: Samples) -> None:
    """Times `call` for about TURN_SECONDS into `samples`."""
    time.sleep(SPIN_SECONDS)
    batch = max(1, int(BATCH_SECONDS / max(expected_s, 1e-7)))
    if expected_s < 0.5 * TURN_SECONDS:  # wake the threads, warm the caches
        call()
    times = []
    before = usage()
    end = before.wall + TURN_SECONDS
    while True:
        start = time.perf_counter()
        for _ in range(batch):
            call()
        stop = time.perf_counter()
        times.append((stop - start) / batch)
        if stop >= end:
            break
    if spoiled(before, usage(), crowded):
        samples.dirty += times
        samples.dirty_turns += 1
    else:
        samples.clean += times
        samples.clean_turns += 1


def interleave(
    calls: dict[str, Callable[[], object]], crowded: set[str], rounds: int, max_seconds: float
) -> dict[str, Samples]:
    """Times every call in `rounds` clean turns each, interleaved; within `max_seconds`, but at least two turns."""
    samples = {name: Samples() for name in calls}
    expected_s = {}
    for name, call in calls.items():
        call()  # first-call costs: allocations, compilation, page faults
        start = time.perf_counter()
        call()
        expected_s[name] = time.perf_counter() - start
    end = time.perf_counter() + max_seconds
    for turn in range(3 * rounds):
        pending = [name for name, s in samples.items() if s.clean_turns < rounds]
        if not pending or (turn >= 2 and time.perf_counter() > end):
            break
        for name in pending:
            take_turn(calls[name], expected_s[name], name in crowded, samples[name])
    return samples
