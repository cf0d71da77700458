"""What a type checker sees: right calls pass, wrong ones are named."""

import os
import pathlib
import subprocess
import sys

import pytest

import polyhead

CALLS = """\
import numpy as np
import polyhead, polyhead.weights

x = np.ones((1, 2, 4, 8), np.float32)
out = polyhead.attention(x, x, x, causal=True, window=(1, 2), query_offset=np.array([1]), out=x)
out.sum()
out, logsumexp = polyhead.attention(x, x, x, return_logsumexp=True)
polyhead.attention_backward(out, x, x, x, out, logsumexp, needs=["query"])["query"].sum()
out, logsumexp = polyhead.merge([out], [logsumexp])
layer = polyhead.MultiHeadAttention({"query_weight": x[0, 0]}, 4)
layer.forward(x[0], seqlens_k=np.array([1]), caches=layer.new_caches(1, 2), step=0).sum()
polyhead.set_num_threads(2)
"""
WRONG = {
    'polyhead.attention(x, x, x, align="nowhere")': 'Argument "align" to "attention"',
    "polyhead.attention([1], x, x)": '"ArrayT" of "attention" cannot be "list[int]"',
    "polyhead.attention(x, x, x, kausal=True)": 'Unexpected keyword argument "kausal"',
    "polyhead.kernels()[0] + 1": "operand",
}


def test_type_checkers_know_the_interface(tmp_path):
    pytest.importorskip("mypy", reason="mypy is not installed: annotations are not checked by it")
    (tmp_path / "calls.py").write_text(CALLS + "\n".join(WRONG) + "\n")
    packages = str(pathlib.Path(polyhead.__file__).parents[1])
    shown = subprocess.run(
        [sys.executable, "-m", "mypy", "--follow-imports=silent", "--cache-dir", str(tmp_path), "calls.py"],
        cwd=tmp_path, env=os.environ | {"MYPYPATH": "" if "site-packages" in packages else packages},
        capture_output=True, text=True,
    )  # fmt: skip
    errors = [line for line in shown.stdout.splitlines() if ": error: " in line]
    first = CALLS.count("\n") + 1
    assert [line.split(":")[1] for line in errors] == [str(first + n) for n in range(len(WRONG))], shown.stdout + shown.stderr
    for line, words in zip(errors, WRONG.values(), strict=True):
        assert words in line
