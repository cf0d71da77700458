"""bench/torch_training.py: one small run from end to end."""

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

PROGRAM = pathlib.Path(__file__).resolve().parents[2] / "bench" / "torch_training.py"
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


def test_it_says_where_to_write():
    done = subprocess.run([sys.executable, PROGRAM], capture_output=True, text=True)
    assert done.returncode == 2 and "--out FOLDER" in done.stderr
