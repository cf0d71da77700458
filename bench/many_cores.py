#!/usr/bin/env python3
"""How evenly calls are shared among more cores than there are: many_cores' tables as one table and a picture.

  bench/many_cores.py --out FOLDER FILE.csv ...     what `build/release/bench/many_cores ... --format csv` wrote

Writes <date>-<cpu>-many-cores.md, .csv and .png into FOLDER.
"""

import argparse
import csv
import pathlib
import re

import peers
import report

LIMIT = 1.15  # of the ideal


def read(paths: list[pathlib.Path]) -> tuple[list[str], list[dict]]:
    facts, rows = [], []
    for path in paths:
        lines = path.read_text().splitlines()
        facts = [line.lstrip("# ") for line in lines if line.startswith("#")]
        rows += csv.DictReader(line for line in lines if not line.startswith("#"))
    return facts, rows


def by_problem(rows: list[dict]) -> dict:
    """(problem, direction) -> threads -> row."""
    table = {}
    for row in rows:
        table.setdefault((row["problem"], row["direction"]), {})[int(row["threads"])] = row
    return table


def markdown(facts: list[str], table: dict, threads: list[int]) -> str:
    lines = ["# Critical path over the ideal, on many cores", "", *(f"- {fact}" for fact in facts), ""]
    columns = "".join(f" {n} threads |" for n in threads)
    lines += [f"| problem | direction | tasks at {threads[-1]} | one thread, ms |{columns}"]
    lines += ["|---|---|--:|--:|" + "--:|" * len(threads)]
    for (problem, direction), of in table.items():
        ratios = "".join(f" {float(of[n]['ratio']):.2f} |" for n in threads)
        last = of[threads[-1]]
        lines.append(f"| `{problem}` | {direction} | {last['tasks']} | {float(last['one_thread_ms']):.3f} |{ratios}")
    return "\n".join(lines) + "\n"


def draw(table: dict, threads: list[int], path: pathlib.Path) -> None:
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 1 + 0.16 * len(table)), layout="constrained")
    for n, colour in zip(threads, ("#9a9a9a", "#d1603d", "#30638e", "#003d5b")):
        axis.plot([float(of[n]["ratio"]) for of in table.values()], range(len(table)), "o", color=colour, markersize=3,
                  label=f"{n} threads")  # fmt: skip
    axis.axvline(LIMIT, color="black", linewidth=1)
    axis.set_yticks(range(len(table)), [f"{problem}, {direction}" for problem, direction in table], fontsize=5)
    axis.set_xlabel("critical path / ideal", fontsize=7)
    axis.invert_yaxis()
    axis.legend(fontsize=7)
    figure.savefig(path, dpi=150)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--out", type=pathlib.Path, required=True)
    parser.add_argument("tables", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    facts, rows = read(options.tables)
    table = by_problem(rows)
    threads = sorted({int(row["threads"]) for row in rows})
    date = re.search(r"\d{4}-\d\d-\d\d", " ".join(facts)).group()
    options.out.mkdir(parents=True, exist_ok=True)
    start = options.out / f"{date}-{report.slug(peers.cpu_name())}-many-cores"
    start.with_suffix(".md").write_text(markdown(facts, table, threads))
    with start.with_suffix(".csv").open("w", newline="") as out:
        writer = csv.DictWriter(out, rows[0].keys())
        writer.writeheader()
        writer.writerows(rows)
    draw(table, threads, start.with_suffix(".png"))
    print(start.with_suffix(".md"))


if __name__ == "__main__":
    main()
