"""The benchmark's pictures: how many times as fast as each peer, how near to what the machine can do; peak memory."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import memory
import report
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from problem import BACKWARD, FORWARD

COLOURS = {"torch": "#d1603d", "ort": "#3b7a9e", "jax": "#9aa36a"}
OURS_COLOUR = "#2f4858"
GOAL_COLOUR = "#111111"
INCHES_A_ROW = 0.42


def _draw_goal(axis, x: float, y: float, height: float) -> None:
    axis.plot([x, x], [y - height / 2, y + height / 2], color=GOAL_COLOUR, linewidth=2, solid_capstyle="butt", zorder=4)


def _draw_ratios(axis, rows: list[dict]) -> None:
    """A bar a peer, from 1x; to the right we are faster."""
    peers = report.peers_of(rows)
    height = 0.8 / max(len(peers), 1)
    for index, row in enumerate(rows):
        goal = report.row_goal(row)
        for place, peer in enumerate(peers):
            ratio = report.ratio(row, peer)
            y = index + (place - (len(peers) - 1) / 2) * height
            if ratio is not None:
                axis.barh(y, ratio - 1, height, left=1, color=COLOURS[peer], zorder=2)
                beside = (3, "left") if ratio >= 1 else (-3, "right")
                axis.annotate(
                    f"{ratio:.2f}" if ratio < 10 else f"{ratio:.0f}",
                    (ratio, y),
                    xytext=(beside[0], 0),
                    textcoords="offset points",
                    ha=beside[1],
                    va="center",
                    fontsize=6.5,
                    bbox={"facecolor": "white", "edgecolor": "none", "alpha": 0.85, "pad": 0.6},
                    zorder=5,
                )
            asked = getattr(goal, peer, None)
            if asked is not None:
                _draw_goal(axis, asked, y, height)
    axis.set_xscale("log")
    ticks = [t for t in (0.5, 1, 2, 5, 10, 20, 50, 100) if t < 1.5 * axis.get_xlim()[1]]
    axis.set_xticks(ticks, [f"{t:g}x" for t in ticks])
    axis.minorticks_off()
    left, right = axis.get_xlim()
    axis.set_xlim(left / 1.3, right * 1.5)  # room for the figures
    axis.axvline(1, color="#555555", linewidth=1, zorder=3)


def _draw_fractions(axis, rows: list[dict]) -> None:
    for index, row in enumerate(rows):
        share = report.fraction(row)
        if share is None:
            continue
        axis.barh(index, share, 0.6, color=OURS_COLOUR, alpha=0.55 if row["read_gb_per_s"] else 1, zorder=2)
        inside = share > 0.2
        axis.annotate(
            f"{share:.0%}",
            (0 if inside else share, index),
            xytext=(4, 0),
            textcoords="offset points",
            va="center",
            fontsize=7,
            color="white" if inside else "black",
            zorder=5,
        )
        goal = report.row_goal(row)
        if goal is not None and goal.fraction is not None:
            _draw_goal(axis, goal.fraction, index, 0.8)
    axis.set_xlim(0, 1.05)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])


def _name(row: dict) -> str:
    """Beside the row's bars."""
    return row["problem"] + ("" if row["direction"] in (FORWARD, BACKWARD) else "  forward + backward")


def _draw_rows(good: list[dict], environment: dict, what: str, path: pathlib.Path) -> None:
    all_threads = sorted({row["threads"] for row in good})
    names = list(dict.fromkeys(_name(row) for row in good))
    figure, axes = plt.subplots(
        1,
        2 * len(all_threads),
        figsize=(3.2 + 6.4 * len(all_threads), 1.9 + INCHES_A_ROW * len(names)),
        sharey=True,
        squeeze=False,
        width_ratios=[5, 3] * len(all_threads),
        layout="constrained",
    )
    for column, threads in enumerate(all_threads):
        rows = [row for row in good if row["threads"] == threads]
        rows.sort(key=lambda row: names.index(_name(row)))
        ratios, fractions = axes[0][2 * column], axes[0][2 * column + 1]
        label = f"{threads} thread{'s'[: threads > 1]}"
        _draw_ratios(ratios, rows)
        ratios.set_title(f"{label}: times as fast as the peer", fontsize=10)
        _draw_fractions(fractions, rows)
        fractions.set_title(f"{label}: share of the bound", fontsize=10)
    for axis in axes[0]:
        axis.grid(axis="x", color="#dddddd", zorder=0)
        axis.tick_params(labelsize=8)
        axis.tick_params(axis="y", length=0)
        axis.spines[["top", "right", "left"]].set_visible(False)
        for line in range(1, len(names)):
            axis.axhline(line - 0.5, color="#eeeeee", linewidth=0.7, zorder=0)
    axes[0][0].set_yticks(range(len(names)), names, family="monospace")
    axes[0][0].set_ylim(len(names) - 0.4, -0.6)
    handles = [Patch(color=COLOURS[peer], label=f"vs {peer}") for peer in report.peers_of(good)]
    handles.append(Patch(color=OURS_COLOUR, label="of the measured FMA peak"))
    if any(row["read_gb_per_s"] for row in good):
        handles.append(Patch(color=OURS_COLOUR, alpha=0.55, label="of the measured read bandwidth"))
    handles.append(Line2D([], [], color=GOAL_COLOUR, linewidth=2, label="goal"))
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=8, frameon=False)
    figure.supxlabel(f"{_source(environment)}: {what}, fastest samples", fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def _source(environment: dict) -> str:
    return f"{environment['cpu']}, {environment['date'][:10]}, commit {environment['commit']}"


MEMORY_COLOURS = {memory.OURS: OURS_COLOUR, "torch, fused": COLOURS["torch"], memory.UNFUSED: "#8c8c8c"}


def _draw_memory(rows: list[dict], environment: dict, path: pathlib.Path) -> None:
    """Peak memory of forward and backward against S, log-log."""
    figure, axis = plt.subplots(figsize=(7, 4.8), layout="constrained")
    for name, colour in MEMORY_COLOURS.items():
        measured = [row for row in rows if row["contender"] == name and "extra_bytes" in row]
        if not measured:
            continue
        mib = [row["extra_bytes"] / 2**20 for row in measured]
        axis.plot([row["seqlen"] for row in measured], mib, "o-", color=colour, label=name)
        last = (measured[-1]["seqlen"], mib[-1])
        axis.annotate(f"{mib[-1]:.0f} MiB", last, xytext=(6, 0), textcoords="offset points", va="center", fontsize=8)
    seqlens = sorted({row["seqlen"] for row in rows})
    operands = [memory.operand_bytes(seqlen) / 2**20 for seqlen in seqlens]
    axis.plot(seqlens, operands, ":", color="#555555", label="Q+K+V+O")
    axis.set_xscale("log", base=2)
    axis.set_yscale("log")
    axis.set_xticks(seqlens, [str(seqlen) for seqlen in seqlens])
    axis.margins(x=0.12)
    axis.set_xlabel("sequence length S")
    axis.set_ylabel("memory added at the peak, MiB")
    axis.set_title(f"Forward and backward, {memory.SHAPE}", fontsize=10)
    axis.grid(color="#dddddd")
    axis.spines[["top", "right"]].set_visible(False)
    axis.legend(fontsize=8, frameon=False)
    figure.supxlabel(_source(environment), fontsize=7)
    figure.savefig(path, dpi=110)
    plt.close(figure)


def draw_all(result: dict, folder: pathlib.Path, stem: str) -> list[pathlib.Path]:
    """Writes the pictures that the result has rows for; their paths."""
    good = [row for row in result["rows"] if "error" not in row]
    forward = [row for row in good if row["direction"] == FORWARD]
    backward = [row for row in good if row["direction"] != FORWARD]
    environment, paths = result["environment"], []
    for rows, what, end in ((forward, "attention forward", ".png"), (backward, "attention backward", "-backward.png")):
        if rows:
            paths.append(folder / f"{stem}{end}")
            _draw_rows(rows, environment, what, paths[-1])
    if any("extra_bytes" in row for row in result["memory"]):
        paths.append(folder / f"{stem}-memory.png")
        _draw_memory(result["memory"], environment, paths[-1])
    return paths
