"""The README's picture and its table, out of a result of bench/peers.py: what a reader should know first.

    bench/summary.py bench/results/NAME.json                 print the table, draw bench/results/summary.png
    bench/summary.py bench/results/NAME.json --readme        and put the table into README.md

All ratios are of medians: how many times as long the peer takes. Rows that lose are named, and the goals that were missed
are counted, over all rows of the result and not only those shown.
"""

import argparse
import json
import pathlib
import re

import report
from problem import BACKWARD, BOTH, FORWARD, parse_problem

ROOT = pathlib.Path(__file__).resolve().parents[1]
README = ROOT / "README.md"
PICTURE = ROOT / "bench" / "results" / "summary.png"
MEDIAN = "median_s"
MARKS = "<!-- bench/summary.py -->\n", "<!-- end -->"

# (what it is to people, problem, direction): on one thread
SHOWN = (
    ("BERT-large, one sequence of 384", "1x16x384x64", FORWARD),
    ("the same, bfloat16", "1x16x384x64 --dtype bf16", FORWARD),
    ("causal, 512 tokens", "2x8x512x64 --causal", FORWARD),
    ("4096 tokens, heads of 128", "1x8x4096x128", FORWARD),
    ("4096 tokens, window of 256", "1x8x4096x64 --window 256,0", FORWARD),
    ("32 short sequences of 128", "32x12x128x64", FORWARD),
    ("sequences of different lengths", "8x16x384x64 --lengths=k", FORWARD),
    ("decoding, 4096 keys, grouped heads", "8x32/8x1/4096x128", FORWARD),
    ("the same, bfloat16", "8x32/8x1/4096x128 --dtype bf16", FORWARD),
    ("decoding, 4096 keys, as many key heads", "8x32x1/4096x128", FORWARD),
    ("8192 tokens", "1x4x8192x64", FORWARD),
    ("gradients: BERT-large", "1x16x384x64", BACKWARD),
    ("gradients: causal, 512 tokens", "2x8x512x64 --causal", BACKWARD),
    ("gradients: 2048 tokens", "1x8x2048x64", BACKWARD),
    ("gradients: 2048 tokens, bfloat16", "1x8x2048x64 --dtype bf16", BACKWARD),
    ("a training step with dropout", "2x8x512x64 --dropout 0.1", BOTH),
)
# What people call a CPU whose family and model bench/measure.py writes down.
CPUS = {"AMD EPYC family 26 model 2": "AMD EPYC (Zen 5)", "AMD EPYC family 25 model 17": "AMD EPYC (Zen 4)"}
NAMES = {"torch": "torch", "ort": "onnxruntime", "jax": "jax"}


def shown_rows(result: dict) -> list[tuple[str, dict]]:
    by_key = {(row["problem"], row["direction"]): row for row in result["rows"] if row["threads"] == 1}
    return [(name, by_key[problem, direction]) for name, problem, direction in SHOWN if (problem, direction) in by_key]


def cpu(result: dict) -> str:
    name = result["environment"]["cpu"]
    return CPUS.get(name, name)


def bound_share(row: dict) -> str:
    """Share of the bound at the median; the minimum is what report.py's own tables show."""
    share = report.fraction(row)
    if share is None:
        return "-"
    ours = row["contenders"][report.OURS]
    return f"{share * ours['min_s'] / ours[MEDIAN]:.0%}"


def losing(rows: list[dict]) -> list[tuple[dict, str, float]]:
    """(row, peer, ratio) wherever a peer's median is the shorter one."""
    every = ((row, peer, report.ratio(row, peer, MEDIAN)) for row in rows for peer in report.PEERS)
    return [(row, peer, value) for row, peer, value in every if value is not None and value < 1]


def goals_missed(result: dict) -> tuple[int, int]:
    verdicts = [verdict[-1] for row in result["rows"] for verdict in report.verdicts(row)]
    measured = [verdict for verdict in verdicts if verdict != "not measured"]
    return sum("missed" in verdict for verdict in measured), len(measured)


def table(result: dict) -> str:
    environment, rows = result["environment"], result["rows"]
    versions = environment["versions"]
    compared = sum(report.ratio(row, peer, MEDIAN) is not None for row in rows for peer in report.PEERS)
    lines = [
        f"Medians, one thread, operands in the peers' own [B, H, S, D] memory; {cpu(result)}, torch "
        f"{versions['torch'].partition('+')[0]}, onnxruntime {versions['onnxruntime']}, jax {versions['jax']}, "
        f"{environment['date'][:10]}. A ratio is the peer's time over polyhead's: above 1x polyhead is faster.",
        "",
        "| attention | batch x heads x seqlen x head_dim | ms | of the machine's bound | torch | onnxruntime | jax |",
        "|---|---|--:|--:|--:|--:|--:|",
    ]
    for name, row in shown_rows(result):
        ratios = " | ".join(report.times(report.ratio(row, peer, MEDIAN)) for peer in report.PEERS)
        ms = row["contenders"][report.OURS][MEDIAN] * 1e3
        lines.append(f"| {name} | `{row['problem']}` | {ms:.3g} | {bound_share(row)} | {ratios} |")
    slower = losing(rows)
    lines += ["", f"All {len(rows)} rows (1 and 2 threads) have {compared} such ratios; {len(slower)} of them are below 1x:"]
    for row, peer, value in sorted(slower, key=lambda each: each[2]):
        threads = f"{row['threads']} thread{'s' if row['threads'] > 1 else ''}"
        noisy = ", in noise" if any(each["noisy"] for each in row["contenders"].values()) else ""
        lines.append(f"- `{row['problem']}` {row['direction']}, {threads}{noisy}: {NAMES[peer]} {value:.2f}x")
    missed, measured = goals_missed(result)
    lines += ["", f"Of the {measured} goals that these rows are held to (shares of the bound, ratios, memory), {missed} are missed."]
    return "\n".join(lines) + "\n"


def draw(result: dict, path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt
    from plot import COLOURS

    rows = shown_rows(result)
    figure, axis = plt.subplots(figsize=(8.6, 0.37 * len(rows) + 1.1), dpi=130)
    for index, (_, row) in enumerate(rows):
        for place, peer in enumerate(report.PEERS):
            value = report.ratio(row, peer, MEDIAN)
            if value is None:
                continue
            y = index + (place - 1) * 0.25
            axis.barh(y, value - 1, 0.23, left=1, color=COLOURS[peer], zorder=2)
            text = f"{value:.2f}" if value < 1.1 else f"{value:.1f}" if value < 10 else f"{value:.0f}"
            side = {"xytext": (3, 0), "ha": "left"} if value >= 1 else {"xytext": (-3, 0), "ha": "right"}
            axis.annotate(text, (value, y), textcoords="offset points", va="center", fontsize=6, **side)
    axis.set_xscale("log")
    ticks = (0.5, 1, 2, 5, 10, 20, 50)
    axis.set_xticks(ticks, [f"{tick:g}x" for tick in ticks], fontsize=8)
    axis.set_xlim(0.6, 80)
    axis.minorticks_off()
    axis.axvline(1, color="#444444", linewidth=1.2, zorder=3)
    axis.grid(axis="x", color="#dddddd", zorder=0)
    axis.set_yticks(range(len(rows)), [name for name, _ in rows], fontsize=8)
    axis.invert_yaxis()
    axis.set_xlabel("time of the peer / time of polyhead (median, one thread): right of 1x polyhead is faster", fontsize=8)
    handles = [plt.Rectangle((0, 0), 1, 1, color=COLOURS[peer]) for peer in report.PEERS]
    figure.legend(handles, NAMES.values(), loc="upper right", ncols=3, frameon=False, fontsize=8)
    figure.text(0.01, 0.975, f"Attention on the CPU: {cpu(result)}", fontsize=9, va="top")
    for side in ("top", "right", "left"):
        axis.spines[side].set_visible(False)
    figure.tight_layout(rect=(0, 0, 1, 0.96))
    figure.savefig(path)
    plt.close(figure)


def put_into(text: str, lines: str) -> str:
    """README's text with the table between the marks."""
    pattern = re.escape(MARKS[0]) + ".*?" + re.escape(MARKS[1])
    return re.sub(pattern, lambda _: MARKS[0] + lines + MARKS[1], text, flags=re.S)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("result", type=pathlib.Path, help="the JSON that bench/peers.py wrote")
    parser.add_argument("--readme", action="store_true", help="put the table into README.md")
    options = parser.parse_args()
    result = json.loads(options.result.read_text())
    for _, row in shown_rows(result):
        parse_problem(row["problem"])  # says what is wrong with a result of another kind
    lines = table(result)
    print(lines, end="")
    draw(result, PICTURE)
    if options.readme:
        README.write_text(put_into(README.read_text(), lines))


if __name__ == "__main__":
    main()
