"""What the programs that time torch's calls share: polyhead's switch, where a run was made, and the files it writes."""

import csv
import json
import os
import pathlib
import shlex
import sys
from typing import Callable

import torch

import peers
import polyhead.torch
import report

STATES = ("off", "on")


def turn_switch(state: str) -> None:
    if (torch.nn.attention.current_flash_attention_impl() == "polyhead") != (state == "on"):
        polyhead.torch.enable() if state == "on" else polyhead.torch.disable()


def switched(state: str, call: Callable) -> Callable:
    def run():
        turn_switch(state)
        return call()

    return run


def environment(program: str, options) -> dict:
    found = peers.environment(options, {"polyhead": polyhead.__version__, "torch": torch.__version__})
    command = f"bench/{program} {shlex.join(sys.argv[1:])}".rstrip()
    return {**found, "command": command, "operators": polyhead.torch.implementation()}


def head(title: str, e: dict) -> list[str]:
    """The first lines of the Markdown, of a finished run's environment."""
    versions = ", ".join(f"{name} {version}" for name, version in e["versions"].items())
    return [
        f"# {title}",
        "",
        f"    {e['command']}",
        "",
        f"{e['date']}, commit {e['commit']}. {e['cpu']}, {e['cpus']} CPUs, {e['memory_gib']} GiB, Linux {e['kernel']}; "
        f"load {e['load_before']} before, {e['load_after']} after. {versions}; operators in {e['operators']}.",
    ]


def figures(entry: dict, unit_s: float = 1e-3) -> str:
    """The median, and the minimum in brackets; "!" where other processes disturbed every sample."""
    return f"{entry['median_s'] / unit_s:.2f} ({entry['min_s'] / unit_s:.2f}){'!' * entry['noisy']}"


def print_and_write(
    result: dict,
    folder: pathlib.Path | None,
    end: str,
    text: str,
    keys: tuple[str, ...],
    draw: Callable | None = None,
) -> None:
    """The table, and files where a folder is given: with a row of `keys` for each contender of each of the result's rows."""
    print(text)
    if folder is None:
        return
    flat = [
        {**{key: row[key] for key in keys}, "contender": name, **entry}
        for row in result["rows"]
        for name, entry in row.get("contenders", {}).items()
    ]
    for path in write(result, folder, end, text, flat, draw):
        print(os.path.relpath(path))


def write(
    result: dict, folder: pathlib.Path, end: str, text: str, rows: list[dict], draw: Callable | None = None
) -> list[pathlib.Path]:
    """<date>-<cpu>-<end>.md, .json, .csv of the rows, and .png if there is something to draw with; their paths."""
    folder.mkdir(parents=True, exist_ok=True)
    e = result["environment"]
    stem = folder / f"{e['date'][:10]}-{report.slug(e['cpu'])}-{end}"
    paths = [stem.with_name(stem.name + suffix) for suffix in (".md", ".json", ".csv")]
    paths[0].write_text(text)
    paths[1].write_text(json.dumps(result, indent=1) + "\n")
    with open(paths[2], "w", newline="") as file:
        writer = csv.DictWriter(file, list(dict.fromkeys(name for row in rows for name in row)), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    if draw is not None:
        paths.append(stem.with_name(stem.name + ".png"))
        draw(result, paths[-1])
    return paths


def finish(e: dict) -> None:
    e["load_after"] = round(os.getloadavg()[0], 2)
