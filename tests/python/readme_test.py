"""The Python examples of README.md, run as they stand there, one after the other."""

import importlib
import pathlib
import re

import numpy as np
import pytest

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def _blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="ascii"), flags=re.S)


def test_examples_run_and_are_right(capsys):
    blocks = _blocks()
    assert len(blocks) == 4
    first, training, *_ = (compile(block, str(README), "exec") for block in blocks)
    names = {}
    exec(first, names)

    assert names["out"].shape == (1, 384, 16, 64)
    assert names["logsumexp"].shape == (1, 16, 384)
    # Query 0 sees key 0 alone, so its output is that key's value; query head h reads head h / 4.
    np.testing.assert_allclose(names["out"][0, 0], np.repeat(names["value"][0, 0], 4, axis=0), rtol=1e-6)
    printed = capsys.readouterr().out
    assert "reference" in printed

    exec(training, names)
    assert names["grads"]["key"].shape == names["key"].shape == (1, 384, 4, 64)
    assert (np.diff(names["losses"]) < 0).all() and names["losses"][-1] < 0.9 * names["losses"][0]


def test_the_example_of_torchs_layers_runs():
    pytest.importorskip("torch", reason="needs torch")
    names = {}
    exec(compile(_blocks()[3], str(README), "exec"), names)
    assert names["out"].shape == (2, 50, 64) and names["weights"].shape == (2, 50, 50)
    assert all(parameter.grad is not None for parameter in names["attention"].parameters())


def test_the_example_of_torch_runs_on_polyhead(capsys):
    pytest.importorskip("torch", reason="needs torch")
    importlib.import_module("polyhead.torch").report(reset=True)  # what other tests of this process left
    exec(compile(_blocks()[2], str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "attention_forward" in printed and "attention_backward" in printed and "not taken" not in printed
