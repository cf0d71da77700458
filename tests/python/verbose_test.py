"""POLYHEAD_VERBOSE=1: what Python's and torch's calls compute, as lines that the command takes back."""

import importlib.util
import os
import shlex
import subprocess
import sys

import pytest

NUMPY = """
import numpy, polyhead
x = numpy.ones((2, 9, 4, 8), numpy.float32)
for _ in range(3):
    polyhead.attention(x, x[:, :, :2], x[:, :, :2], causal=True)
    polyhead.explain(x, x, x)
"""
TORCH = """
import torch, polyhead.torch
layer = polyhead.torch.MultiheadAttention(32, 4, batch_first=True).eval()
tokens = torch.rand(2, 9, 32)
with torch.no_grad():
    for _ in range(3):
        layer(tokens, tokens, tokens, need_weights=False)
        polyhead.torch.attention(*3 * [torch.rand(2, 9, 4, 8).bfloat16()])
"""


def lines(*words, verbose="1"):
    environment = os.environ | {"POLYHEAD_KERNEL": "reference", "POLYHEAD_VERBOSE": verbose}
    done = subprocess.run([sys.executable, *words], capture_output=True, text=True, env=environment, check=True)
    return done.stderr.splitlines()


def again(line):
    """The line, run: the command prints the plan's own line."""
    program, *words = shlex.split(line)
    assert program == "polyhead"
    assert lines("-m", "polyhead", *words, "--min-time", "0", "--samples", "1") == [line]


def test_a_plan_of_numpy_arrays():
    (line,) = lines("-c", NUMPY)
    assert line.startswith("polyhead bench 2x4/2x9x8 --causal --kernel reference --threads ")
    again(line)
    assert lines("-c", NUMPY, verbose="0") == []


@pytest.mark.skipif(importlib.util.find_spec("torch") is None, reason="needs torch")
def test_plans_of_torchs_layer_and_operator():
    layer, attention = lines("-c", TORCH)
    assert layer.startswith("polyhead mha --batch 2 --heads 4 --seqlen-q 9 --q-size 32 --biases=")
    assert attention.startswith("polyhead bench 2x4x9x8 --dtype bf16 --kernel reference --threads ")
    again(layer)
    again(attention)
