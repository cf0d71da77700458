"""bench/before_after.py on two made-up commands whose times are known."""

import json
import pathlib
import subprocess
import sys

ROOT = pathlib.Path(__file__).parents[2]

COMMAND = """#!{python}
import json, sys
if sys.argv[1] == "info":
    print("| version | {version} |")
else:
    row = dict(problem=sys.argv[2], kernel="cpu_made_up", min_ms={milliseconds} * (2 if "--causal" in sys.argv else 1))
    row["median_ms"] = row["min_ms"] * 1.5
    row["gflop_per_s"] = {flops} / row["median_ms"]
    print(json.dumps(dict(rows=[row])))
"""


def command(path, version, milliseconds, flops=5):
    path.write_text(
        COMMAND.format(python=sys.executable, version=version, milliseconds=milliseconds, flops=flops)
    )
    path.chmod(0o755)
    return path


def before_after(tmp_path, before, after, *options):
    words = [sys.executable, ROOT / "bench/before_after.py", before, after, "--out", tmp_path, "--rounds", "1", *options]
    done = subprocess.run(words, capture_output=True, text=True, check=False)
    results = list(tmp_path.glob("*-before-after.json"))
    return done, json.loads(results[0].read_text()) if results else []


def test_a_slower_row_is_named(tmp_path):
    before, after = command(tmp_path / "a", "1", 10), command(tmp_path / "b", "2", 12)
    done, rows = before_after(tmp_path, before, after, "--rows", "1x1x8x8 --causal", "--threads", "1")
    assert done.returncode == 1, done.stderr
    assert rows[0]["before_ms"] == 20 and rows[0]["after_ms"] == 24
    assert rows[0]["ratio"] == 1.2
    assert "1.200 slower" in done.stdout and "before: 1\nafter: 2\n" in done.stdout


def test_what_is_as_fast_passes(tmp_path):
    before, after = command(tmp_path / "a", "1", 10), command(tmp_path / "b", "2", 10.2)
    suite = tmp_path / "training.txt"
    suite.write_text("# both directions\n1x1x8x8  # one row\n")
    done, rows = before_after(tmp_path, before, after, "--suites", suite)
    assert done.returncode == 0, done.stderr
    assert [(row["direction"], row["threads"]) for row in rows] == [
        ("forward", 1), ("backward", 1), ("forward", 2), ("backward", 2)]
    assert "0 slower" in done.stdout


def test_a_run_goes_on_and_looks_again_at_what_was_slower(tmp_path):
    before = command(tmp_path / "a", "1", 10)
    rows = ["--rows", "1x1x8x8", "1x1x8x8 --causal", "--threads", "1", "--resume"]
    _, first = before_after(tmp_path, before, command(tmp_path / "b", "2", 12), *rows)
    assert [row["ratio"] for row in first] == [1.2, 1.2]
    _, second = before_after(tmp_path, before, command(tmp_path / "b", "2", 9), *rows)
    assert [row["ratio"] for row in second] == [0.9, 0.9]
    _, third = before_after(tmp_path, before, command(tmp_path / "b", "2", 8), *rows)
    assert third == second


def test_other_work_is_divided_out(tmp_path):
    before, after = command(tmp_path / "a", "1", 10), command(tmp_path / "b", "2", 12, flops=6)
    done, (row,) = before_after(tmp_path, before, after, "--rows", "1x1x8x8 --lengths=k", "--threads", "1")
    assert done.returncode == 0 and row["ratio"] == 1 and "(of 1.200 of the operations)" in done.stdout


def test_a_refusal_is_shown(tmp_path):
    failing = tmp_path / "c"
    failing.write_text("#!/bin/sh\necho 'polyhead bench: no such thing' >&2\nexit 2\n")
    failing.chmod(0o755)
    done, _ = before_after(tmp_path, failing, failing, "--rows", "1x1x8x8")
    assert done.returncode != 0 and "no such thing" in done.stderr
