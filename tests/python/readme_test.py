"""README.md: its Python examples run as they stand there, its table is of the result that it names."""

import importlib
import json
import pathlib
import re
import sys

import numpy as np
import pytest

import polyhead

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def _blocks():
    return re.findall(r"```python\n(.*?)```", README.read_text(encoding="ascii"), flags=re.S)


def test_examples_run_and_are_right(capsys):
    blocks = _blocks()
    assert len(blocks) == 5
    *_, first, training, program = (compile(block, str(README), "exec") for block in blocks)
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

    exec(program, names)
    i, j = np.ogrid[:384, :384]
    same = polyhead.attention(
        names["query"], names["key"], names["value"], alibi_slopes=names["program"]["captured"]["slope"],
        attn_mask=((i >= j) & (i - j < 128)) | (j < 4),
    )  # fmt: skip
    np.testing.assert_allclose(names["out"], same, rtol=1e-4, atol=1e-5)
    assert names["grads"]["slope"].shape == (16,)


def test_the_example_of_torchs_layers_runs():
    pytest.importorskip("torch", reason="needs torch")
    names = {}
    exec(compile(_blocks()[1], str(README), "exec"), names)
    assert names["out"].shape == (2, 50, 64) and names["weights"].shape == (2, 50, 50)
    assert all(parameter.grad is not None for parameter in names["attention"].parameters())


def test_the_example_of_torch_runs_on_polyhead(capsys):
    pytest.importorskip("torch", reason="needs torch")
    importlib.import_module("polyhead.torch").report(reset=True)  # what other tests of this process left
    exec(compile(_blocks()[0], str(README), "exec"), {})
    printed = capsys.readouterr().out
    assert "attention_forward" in printed and "attention_backward" in printed and "not taken" not in printed


def test_the_table_of_what_was_measured_is_the_results():
    sys.path.insert(0, str(README.parent / "bench"))
    summary = importlib.import_module("summary")
    text = README.read_text(encoding="ascii")
    (result,) = re.findall(r"\]\((bench/results/.*)\.md\)", text)
    path = README.parent / f"{result}.json"
    assert summary.put_into(text, summary.table(json.loads(path.read_text()))) == text
    assert summary.PICTURE.exists() and "](bench/results/summary.png)" in text


def test_what_runs_where_is_what_explain_says():
    import ml_dtypes

    rows = dict(re.findall(r"^\| `(\w+)` \|[^|]*\| (.*) \|$", README.read_text(encoding="ascii"), re.M))
    dtypes = np.float32, ml_dtypes.bfloat16, np.float16, np.float64
    for at, dtype in enumerate(dtypes):
        x = np.ones((1, 24, 1, 8), dtype)
        for name, reason in polyhead.explain(x, x, x).reasons.items():
            if name in polyhead.kernels():
                assert (rows[name].split(" | ")[at] == "yes") == (reason == ""), (name, dtype)
    assert set(rows) >= set(polyhead.explain(x, x, x).reasons)
