"""The benchmark's picture: how many times as fast as each peer, and how near to what the machine can do."""

import pathlib

import matplotlib

matplotlib.use("Agg")
import matplotlib.pyplot as plt
import report
from goals import goal_of
from matplotlib.lines import Line2D
from matplotlib.patches import Patch
from problem import parse_problem

COLOURS = {"torch": "#d1603d", "ort": "#3b7a9e", "jax": "#9aa36a"}
OURS_COLOUR = "#2f4858"
GOAL_COLOUR = "#111111"
INCHES_A_ROW = 0.42


def _draw_goal(axis, x: float, y: float, height: float) -> None:
    axis.plot([x, x], [y - height / 2, y + height / 2], color=GOAL_COLOUR, linewidth=2, solid_capstyle="butt", zorder=4)


def _draw_ratios(axis, rows: list[dict]) -> None:
    """A bar a peer, from 1x; to the right we are faster."""
    height = 0.8 / len(report.PEERS)
    for index, row in enumerate(rows):
        goal = goal_of(parse_problem(row["problem"]))
        for place, peer in enumerate(report.PEERS):
            ratio = report.ratio(row, peer)
            y = index + (place - (len(report.PEERS) - 1) / 2) * height
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
        goal = goal_of(parse_problem(row["problem"]))
        if goal is not None and goal.fraction is not None:
            _draw_goal(axis, goal.fraction, index, 0.8)
    axis.set_xlim(0, 1.05)
    axis.set_xticks([0, 0.25, 0.5, 0.75, 1], ["0", "25 %", "50 %", "75 %", "100 %"])


def draw(result: dict, path: pathlib.Path) -> None:
    good = [row for row in result["rows"] if "error" not in row]
    all_threads = sorted({row["threads"] for row in good})
    names = list(dict.fromkeys(row["problem"] for row in good))
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
        rows.sort(key=lambda row: names.index(row["problem"]))
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
    handles = [Patch(color=colour, label=f"vs {peer}") for peer, colour in COLOURS.items()]
    handles += [
        Patch(color=OURS_COLOUR, label="of the measured FMA peak"),
        Patch(color=OURS_COLOUR, alpha=0.55, label="of the measured read bandwidth"),
        Line2D([], [], color=GOAL_COLOUR, linewidth=2, label="goal"),
    ]
    figure.legend(handles=handles, loc="outside upper left", ncols=len(handles), fontsize=8, frameon=False)
    e = result["environment"]
    caption = f"{e['cpu']}, {e['date'][:10]}, commit {e['commit']}: attention forward, fastest samples"
    figure.supxlabel(caption, fontsize=8)
    figure.savefig(path, dpi=110)
    plt.close(figure)
