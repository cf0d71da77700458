"""bench/torch_training.py, torch_operator.py and layers.py: one small run of each from end to end."""

import json
import os
import pathlib
import subprocess
import sys

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)
pytest.importorskip("matplotlib")

BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
PROGRAM = BENCH / "torch_training.py"
SMALL = ["--tiny", "--quick", "--max-seconds", "1", "--modes", "eager", "--models", "TransformerEncoder"]


def test_a_small_run(tmp_path):
    command = [sys.executable, PROGRAM, "--out", tmp_path, *SMALL]
    subprocess.run(command, check=True, env=os.environ, capture_output=True)
    paths = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(paths) == {".md", ".json", ".csv", ".png"}
    result = json.loads(paths[".json"].read_text())
    assert [(row["mode"], row["switch"]) for row in result["steps"]] == [("eager", "off"), ("eager", "on")]
    assert all(row["peak_bytes"] > 0 for row in result["memory"]) and len(result["memory"]) == 2
    assert len(result["overhead"]) == 8
    text = paths[".md"].read_text()
    assert "| TransformerEncoder | eager |" in text and "polyhead.torch.attention | forward + backward" in text


@pytest.mark.parametrize("program", ["torch_training.py", "layers.py"])
def test_it_says_where_to_write(program):
    done = subprocess.run([sys.executable, BENCH / program], capture_output=True, text=True)
    assert done.returncode == 2 and "--out FOLDER" in done.stderr


def test_the_operator_beside_torchs(tmp_path):
    rows = ["1x2x40x8 --window 9,0", "1x2x128x8", "1x2x40x8 --bias 1,2,1,40", "1x2x40x8 --dropout 0.1"]
    ways = ["forward", "forward+backward"]
    command = [sys.executable, BENCH / "torch_operator.py", "--quick", "--threads", "1", "--out", tmp_path]
    done = subprocess.run([*command, "--rows", *rows, "--direction", *ways], capture_output=True, text=True, check=True)
    found = {path.suffix: path for path in tmp_path.iterdir()}
    result = json.loads(found[".json"].read_text())
    asked = [(row["problem"], row["direction"]) for row in result["rows"]]  # those that have a goal against torch
    assert asked == [(rows[0], ways[0]), (rows[1], ways[0]), (rows[2], ways[1]), (rows[3], ways[1])]
    for row in result["rows"]:
        assert set(row["contenders"]) == {"off", "on", "attention"}
        assert row["max_diff"] is None if "dropout" in row["problem"] else row["max_diff"] < 1e-5
    text = found[".md"].read_text()
    assert text in done.stdout and "4 goals: " in text and "| window 256 at S=4096, forward |" in text


def test_programs_beside_flex_attention(tmp_path):
    command = [sys.executable, BENCH / "flex_attention.py", "--no-compiled", "--rounds", "1", "--threads", "1"]
    command += ["--sizes", "1x2x40x8", "--programs", "relative", "softcap", "--out", tmp_path]
    done = subprocess.run(command, check=True, capture_output=True, text=True)
    found = {path.suffix: path for path in tmp_path.iterdir()}
    rows = {row["program"]: row for row in json.loads(found[".json"].read_text())["rows"]}
    assert all(row["max_diff"] < 1e-5 for row in rows.values())
    step = {"polyhead", "polyhead step"}
    dense = {"dense", "dense step"}
    assert {name: set(row["contenders"]) for name, row in rows.items()} == {
        "relative": step | dense, "softcap": step  # which no bias says
    }  # fmt: skip
    assert all(0 < row["new_program_s"] < 0.1 for row in rows.values())
    assert found[".md"].read_text() in done.stdout and found[".png"].stat().st_size > 5000


def test_generate_beside_transformers(tmp_path):
    pytest.importorskip("transformers")
    command = [sys.executable, BENCH / "generate.py", "--tiny", "--rounds", "1", "--batch", "2", "--dtype", "bfloat16"]
    command += ["--threads", "1"]
    done = subprocess.run([*command, "--out", tmp_path], check=True, capture_output=True, text=True)
    found = {path.suffix: path for path in tmp_path.iterdir()}
    rows = json.loads(found[".json"].read_text())["rows"]
    assert [row["piece"] for row in rows] == ["prompt", "576", "704", "832", "960"]
    assert all(each["min_s"] > 0 for row in rows for each in row["contenders"].values())
    line = next(line for line in done.stdout.splitlines() if "| polyhead, int8 |" in line)
    assert float(line.split("|")[10]) > 0 and "x (" in line  # only where every piece is there
    assert found[".md"].read_text() in done.stdout and found[".png"].stat().st_size > 5000


def test_layers_beside_torch_nns(tmp_path):
    command = [sys.executable, BENCH / "layers.py", "--tiny", "--rounds", "1", "--threads", "1", "--max-seconds", "1"]
    subprocess.run([*command, "--out", tmp_path], check=True, capture_output=True)
    found = {path.suffix: path for path in tmp_path.iterdir()}
    assert set(found) == {".md", ".json", ".csv", ".png"}
    result = json.loads(found[".json"].read_text())
    assert len(result["rows"]) == 6 and all(row["max_diff"] < 1e-5 for row in result["rows"])
    compiled = [row["direction"] for row in result["rows"] if "torch.nn compiled" in row["contenders"]]
    assert compiled == ["forward+backward"]  # of the encoder layer, whose goal it is
    assert {row["contender"]: row["step_bytes"] > 0 for row in result["memory"]} == {"polyhead": True, "torch.nn": True}
    text = found[".md"].read_text()
    assert "backward / forward" in text and ">= 1.3x" in text and "<= 50%" in text
