"""The benchmark's result as Markdown, CSV and JSON, with its goals met and missed."""

import csv
import json
import pathlib
import re
from typing import Optional

import memory
from goals import EXTRA_MEMORY_FROM, MAX_EXTRA_MEMORY, MAX_PEAK_MEMORY, PEAK_MEMORY_AT, Goal, goal_of
from problem import DIRECTIONS, FORWARD, parse_problem

OURS = "polyhead"
PEERS = ("torch", "ort", "jax")  # a peer is the best of the contenders whose names begin so
NOT_IN_GOALS = frozenset({"ort GroupQueryAttention"})  # the goals speak of MultiHeadAttention and Attention-23


def slug(text: str) -> str:
    """For file names: "AMD EPYC family 26 model 2" -> "amd-epyc-family-26-model-2"."""
    return re.sub(r"[^a-z0-9]+", "-", text.lower()).strip("-")


def fastest(row: dict, peer: str, figure: str = "min_s", without: frozenset = frozenset()) -> Optional[str]:
    """The name of `peer`'s fastest contender in the row; None if none could."""
    names = [name for name in row["contenders"] if name.split()[0] == peer and name not in without]
    return min(names, key=lambda name: row["contenders"][name][figure], default=None)


def peers_of(rows: list[dict]) -> list[str]:
    """Those that computed one of the rows at least."""
    return [peer for peer in PEERS if any(fastest(row, peer) for row in rows)]


def ratio(row: dict, peer: str, figure: str = "min_s", without: frozenset = frozenset()) -> Optional[float]:
    """How many times as fast as the peer we are."""
    name = fastest(row, peer, figure, without)
    return None if name is None else row["contenders"][name][figure] / row["contenders"][OURS][figure]


def gflops(row: dict) -> float:
    return row["flops"] / row["contenders"][OURS]["min_s"] * 1e-9


def gb_per_s(row: dict) -> float:
    return row["kv_bytes"] / row["contenders"][OURS]["min_s"] * 1e-9


def fraction(row: dict) -> Optional[float]:
    """Of what bounds the row: the read bandwidth where decoding, else the FMA peak; measured beside it."""
    if row["read_gb_per_s"]:
        return gb_per_s(row) / row["read_gb_per_s"]
    return gflops(row) / row["peak_gflops"] if row["peak_gflops"] else None


def extra_memory(row: dict) -> float:
    return row["workspace_bytes"] / row["operand_bytes"]


def one_line(row: dict) -> str:
    """The row on the terminal while the run goes on."""
    if "error" in row:
        return row["error"]
    words = [f"{row['contenders'][OURS]['min_s'] * 1e3:.3f} ms"]
    if (share := fraction(row)) is not None:
        words.append(f"{share:.0%}")
    words += [f"{peer} {times(ratio(row, peer))}" for peer in PEERS if fastest(row, peer)]
    return ", ".join(words)


# --- goals -----------------------------------------------------------------------------------------------------------


def row_goal(row: dict) -> Optional[Goal]:
    return goal_of(parse_problem(row["problem"]), row["direction"], row["threads"], row.get("kernel", ""))


def verdicts(row: dict) -> list[tuple[str, str, float, Optional[float], str]]:
    """(goal, of what, asked, reached, verdict) for each goal that the row is held to."""
    p = parse_problem(row["problem"])
    found = []
    goal = row_goal(row)
    if goal is not None:
        bound = "read bandwidth" if p.decode else "FMA peak"
        asked = [(f"of {bound}", goal.fraction, fraction(row))]
        asked += [("vs torch", goal.torch, ratio(row, "torch"))]
        asked += [("vs ort", goal.ort, ratio(row, "ort", without=NOT_IN_GOALS))]
        for what, wanted, reached in asked:
            if wanted is not None:
                found.append((goal.name, what, wanted, reached, _verdict(row, reached, reached and reached >= wanted)))
    if row["direction"] == FORWARD and p.seqlen_k >= EXTRA_MEMORY_FROM:
        reached = extra_memory(row)
        verdict = "met" if reached <= MAX_EXTRA_MEMORY else "**missed**"
        found.append(("extra memory, S >= 1k", "of Q+K+V+O", MAX_EXTRA_MEMORY, reached, verdict))
    return found


def _verdict(row: dict, reached: Optional[float], met: Optional[bool]) -> str:
    if reached is None:
        return "not measured"
    noisy = "!" if any(entry["noisy"] for entry in row["contenders"].values()) else ""
    return ("met" if met else "**missed**") + noisy


def peak_memory_share(rows: list[dict], seqlen: int) -> Optional[float]:
    """Our peak over the unfused formula's; None if one of them was not measured."""
    bytes_of = {row["contender"]: row.get("extra_bytes") for row in rows if row["seqlen"] == seqlen}
    ours, unfused = bytes_of.get(memory.OURS), bytes_of.get(memory.UNFUSED)
    return ours / unfused if ours and unfused else None


def _goal_table(rows: list[dict], memory_rows: list[dict]) -> list[str]:
    lines = ["| goal | problem | direction | threads | what | asked | reached | |", "|---|---|---|--:|---|--:|--:|---|"]
    count = {"met": 0, "**missed**": 0, "not measured": 0}

    def add(goal, where, what, asked, reached, verdict):
        show = times if what.startswith("vs") else lambda x: "-" if x is None else f"{x:.1%}"
        bound = "<=" if "memory" in goal else ">="
        lines.append(f"| {goal} | {where} | {what} | {bound} {show(asked)} | {show(reached)} | {verdict} |")
        count[verdict.rstrip("!")] += 1

    for row in rows:
        where = f"`{row['problem']}` | {row['direction']} | {row['threads']}"
        for verdict in verdicts(row):
            add(verdict[0], where, *verdict[1:])
    if memory_rows:
        share = peak_memory_share(memory_rows, PEAK_MEMORY_AT)
        where = f"`{memory.BATCH}x{memory.NUM_HEADS}x{PEAK_MEMORY_AT}x{memory.HEAD_DIM}` | forward+backward | "
        verdict = "not measured" if share is None else "met" if share <= MAX_PEAK_MEMORY else "**missed**"
        add("peak memory", where, "of the unfused formula's", MAX_PEAK_MEMORY, share, verdict)
    total = ", ".join(f"{number} {word.strip('*')}" for word, number in count.items())
    return [f"{sum(count.values())} goals: {total}.", "", *lines]


# --- Markdown --------------------------------------------------------------------------------------------------------


def times(value: Optional[float]) -> str:
    return "-" if value is None else f"{value:.2f}x" if value < 10 else f"{value:.1f}x"


def _ms(entry: dict) -> str:
    noisy = "!" if entry["noisy"] else ""
    return f"{entry['min_s'] * 1e3:.3f} / {entry['median_s'] * 1e3:.3f}{noisy}"


def _difference(row: dict) -> str:
    found = [entry["max_diff"] for entry in row["contenders"].values() if entry["max_diff"] is not None]
    return f"{max(found):.1e}" if found else "-"


def _row_cells(row: dict, peers: list[str]) -> list[str]:
    ours = row["contenders"][OURS]
    share = fraction(row)
    if row["read_gb_per_s"]:
        speed, bound = f"{gb_per_s(row):.1f} GB/s", f"{row['read_gb_per_s']:.1f} GB/s"
    else:
        speed, bound = f"{gflops(row):.1f}", f"{row['peak_gflops']:.0f}" if row["peak_gflops"] else "-"
    bshd = row["contenders"].get("polyhead bshd")
    cells = [f"`{row['problem']}`", row["kernel"], _ms(ours), speed, bound, "-" if share is None else f"{share:.1%}"]
    for peer in peers:
        cells.append(f"{times(ratio(row, peer))} / {times(ratio(row, peer, 'median_s'))}")
    cells.append("-" if bshd is None else f"{bshd['min_s'] * 1e3:.3f}")
    return [*cells, f"{extra_memory(row):.2%}", _difference(row), f"{row['load']:.2f}"]


def _main_table(rows: list[dict]) -> list[str]:
    peers = peers_of(rows)
    head = ["problem", "kernel", "ms min / median", "GFLOP/s", "bound", "of bound"]
    head += [f"vs {peer} min / median" for peer in peers]
    head += ["bshd ms", "extra memory", "max diff", "load"]
    lines = ["| " + " | ".join(head) + " |", "|---|---|" + "--:|" * (len(head) - 2)]
    return lines + ["| " + " | ".join(_row_cells(row, peers)) + " |" for row in rows]


def _memory_table(rows: list[dict]) -> list[str]:
    names = list(dict.fromkeys(row["contender"] for row in rows))
    lines = ["| S | Q+K+V+O | " + " | ".join(names) + " | ours / unfused |", "|--:|--:|" + "--:|" * (len(names) + 1)]
    for seqlen in dict.fromkeys(row["seqlen"] for row in rows):
        found = {row["contender"]: row for row in rows if row["seqlen"] == seqlen}
        cells = [_mib(found[name]["extra_bytes"]) if "extra_bytes" in found[name] else "-" for name in names]
        share = peak_memory_share(rows, seqlen)
        cells.append("-" if share is None else f"{share:.1%}")
        lines.append(f"| {seqlen} | {_mib(memory.operand_bytes(seqlen))} | " + " | ".join(cells) + " |")
    errors = [f"- {row['contender']}, S = {row['seqlen']}: {row['error']}" for row in rows if "error" in row]
    return lines + ([""] + errors if errors else [])


def _mib(count: float) -> str:
    return f"{count / 2**20:.1f} MiB"


def _contender_table(rows: list[dict]) -> list[str]:
    names = list(dict.fromkeys(name for row in rows for name in (*row["contenders"], *row["refusals"])))
    lines = ["| problem | " + " | ".join(names) + " |", "|---|" + "--:|" * len(names)]
    for row in rows:
        cells = [_ms(row["contenders"][name]) if name in row["contenders"] else "-" for name in names]
        lines.append(f"| `{row['problem']}` | " + " | ".join(cells) + " |")
    return lines


def _refusals(rows: list[dict]) -> list[str]:
    where: dict[str, set[str]] = {}
    for row in rows:
        for name, reason in row["refusals"].items():
            where.setdefault(f"{name}: {reason}", set()).add(f"`{row['problem']}`")
    return [f"- {reason} ({', '.join(sorted(problems))})" for reason, problems in where.items()]


def _head(environment: dict, overhead_us: dict) -> list[str]:
    e = environment
    versions = ", ".join(f"{name} {number}" for name, number in e["versions"].items())
    lines = ["# polyhead beside its peers: attention on the CPU", "", f"    {e['command']}", ""]
    lines += [
        f"{e['date']}, commit {e['commit']}. {e['cpu']}, {e['cpus']} CPUs, {e['memory_gib']} GiB, Linux {e['kernel']}; "
        f"load {e['load_before']} before, {e['load_after']} after. {versions}.",
        "",
        "Times are the minimum / median of interleaved samples; \"2x\" means that the peer takes twice our time. `ort` "
        "is the fastest of onnxruntime's operators (in the goals: of MultiHeadAttention and Attention-23); backward, "
        "`torch` is the faster of autograd and of the fused kernel's own operator. GFLOP/s count visible pairs only: "
        "two products forward, five backward. The bound is the FMA peak that the same process measured beside the row "
        "(decoding: the bandwidth of reading memory). Main figures: operands in [B, H, S, D] memory, as torch gets "
        "them; `bshd`: contiguous [B, S, H, D]. Extra memory: our workspace over Q+K+V+O. Max diff: from a peer's "
        "outputs to ours. `!`: other processes disturbed every sample.",
    ]
    if "error" in overhead_us:
        lines += ["", f"Cost of a call: {overhead_us['error']}"]
    elif overhead_us:
        figures = ", ".join(f"{name} {us:.2f}" for name, us in overhead_us.items())
        lines += ["", f"Cost of a call at [1, 1, 1, 16], one thread, in us: {figures}."]
    return lines


TITLES = dict(zip(DIRECTIONS, ("Forward", "Backward, the gradients alone", "Forward and backward")))


def _groups(rows: list[dict]) -> list[tuple[str, list[dict]]]:
    """(title, rows) of each direction and number of threads."""
    found = []
    for direction in DIRECTIONS:
        for threads in sorted({row["threads"] for row in rows}):
            group = [row for row in rows if (row["direction"], row["threads"]) == (direction, threads)]
            if group:
                found.append((f"{TITLES[direction]}, {threads} thread{'s'[: threads > 1]}", group))
    return found


def markdown(result: dict) -> str:
    good = [row for row in result["rows"] if "error" not in row]
    lines = _head(result["environment"], result["overhead_us"])
    for title, rows in _groups(good):
        lines += ["", f"## {title}", "", *_main_table(rows)]
    if result["memory"]:
        lines += ["", f"## Peak memory of one forward and backward call, {memory.SHAPE}", ""]
        lines += _memory_table(result["memory"])
        lines += ["", "What the call adds to resident memory: out and three gradients, as large as Q+K+V+O, and more."]
    failed = [row for row in result["rows"] if "error" in row]
    if failed:
        lines += ["", "## Failed", ""]
        for row in failed:
            lines.append(f"- `{row['problem']}`, {row['direction']}, {row['threads']} threads: {row['error']}")
    lines += ["", "## Goals", "", *_goal_table(good, result["memory"])]
    for title, rows in _groups(good):
        lines += ["", f"## Every contender, ms min / median: {title}", "", *_contender_table(rows)]
    if refusals := _refusals(good):
        lines += ["", "## Not measured", "", *refusals]
    return "\n".join(lines) + "\n"


# --- files -----------------------------------------------------------------------------------------------------------


def _write_csv(result: dict, path: pathlib.Path) -> None:
    columns = ["problem", "direction", "threads", "contender", "min_s", "median_s", "samples", "dropped_turns", "noisy"]
    columns += ["max_diff", "flops", "kv_bytes", "operand_bytes", "workspace_bytes", "kernel", "peak_gflops"]
    columns += ["read_gb_per_s"]
    with open(path, "w", newline="") as file:
        writer = csv.DictWriter(file, columns, extrasaction="ignore", lineterminator="\n")
        writer.writeheader()
        for row in result["rows"]:
            for name, entry in row.get("contenders", {}).items():
                writer.writerow({**row, **entry, "contender": name})


def write(result: dict, folder: pathlib.Path, stem: str, plot: bool) -> list[pathlib.Path]:
    """Writes all forms of the result; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    paths = [folder / f"{stem}{end}" for end in (".md", ".csv", ".json")]
    paths[0].write_text(markdown(result))
    _write_csv(result, paths[1])
    paths[2].write_text(json.dumps(result, indent=1) + "\n")
    if plot:
        import plot as plotting

        paths += plotting.draw_all(result, folder, stem)
    return paths
