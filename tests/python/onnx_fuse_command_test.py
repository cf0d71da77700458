"""polyhead fuse, the command: reports, pictures, files, and both models run."""

import json
import re
import subprocess
import sys

import numpy as np
import pytest

import polyhead
from polyhead.__main__ import COMMAND

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
from onnx_fuse_test import NEAR_MISSES, PLACES_AS_TENSORS, VARIANTS, model_of, operands  # noqa: E402

import polyhead.onnx  # noqa: E402

if not COMMAND.exists():
    pytest.skip("this build of the package is without its command", allow_module_level=True)


def test_command(tmp_path):
    def run(*words):
        done = subprocess.run([COMMAND, "fuse", *words], cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, done.stdout, done.stderr

    model = model_of(VARIANTS["mask_padding"])
    onnx.save(model, tmp_path / "model.onnx")
    told = polyhead.onnx.fuse(model)
    code, out, _ = run("model.onnx", "-o", "fused.onnx", "--json")
    assert code == 0
    (row,) = json.loads(out)["rows"]
    assert row == {
        "place": "w", "attention": True, "fused": True, "pattern": "scale 1, added mask",
        "became": told.candidates[0].became, "saved_bytes": 0, "reason": "",
    }  # fmt: skip
    assert onnx.load(tmp_path / "fused.onnx") == told.model
    assert run("model.onnx")[1].startswith("1 of 1 attentions fused, 4 -> 5 nodes, opset 18 -> 23")
    assert "| w     | yes       | yes   |" in run("model.onnx", "--report")[1]
    assert run("model.onnx", "--dot", "q")[::2] == (2, "polyhead fuse: --dot is 'q', must be the place of a softmax: 'w'\n")
    code, out, _ = run("model.onnx", "--domain", "polyhead", "--dot", "w")
    assert code == 0 and re.findall(r'^    "([^"]*)" \[label="([^"]*)"', out, re.M) == [
        ("before#0", "MatMul: m"), ("before q", "q"), ("before kt", "kt"), ("before#1", "Add: s"), ("before pad", "pad"),
        ("before#2", "Softmax: w"), ("before#3", "MatMul: out"), ("before v", "v"), ("after#0", "Transpose: polyhead_Transpose_1"),
        ("after kt", "kt"), ("after#1", "polyhead.Attention: polyhead_attention"), ("after q", "q"), ("after v", "v"), ("after pad", "pad"),
    ]  # fmt: skip
    assert out.count(" -> ") == 7 + 5 and out.count("{") == out.count("}") == 3
    onnx.save(model_of(NEAR_MISSES["scale_of_each_key"][0]), tmp_path / "stays.onnx")
    (row,) = json.loads(run("stays.onnx", "--json")[1])["rows"]  # something like attention, though the factor is met ahead of the product
    assert (row["attention"], row["fused"], row["reason"]) == (True, False, '"s" (Mul) scales the scores by what is not a constant number, nor one for each row')
    assert re.search(r'^\| w +\| yes +\| no +\|.*"s" \(Mul\) scales the scores', run("stays.onnx", "--report")[1], re.M)
    assert run("stays.onnx")[1].startswith("0 of 1 attentions fused")
    out = run("stays.onnx", "--dot", "w")[1]
    assert re.findall(r'label="([^"]*)", color=red', out) == ["Mul: s"] and "after" not in out
    assert 'label="stays: \\"s\\" (Mul) scales the scores by what is not a constant number, nor one for each row"' in out
    assert run("model.onnx", "-o", "fused.onnx") == (2, "", "polyhead fuse: 'fused.onnx' exists already; --force replaces it\n")
    assert run("model.onnx", "--domain", "ort")[2] == "polyhead fuse: --domain is 'ort', must be onnx or polyhead\n"
    (tmp_path / "half.onnx").write_bytes((tmp_path / "model.onnx").read_bytes()[:-9])
    code, out, error = run("half.onnx", "-o", "none.onnx")
    assert (code, out) == (2, "") and "truncated" in error
    weight = onnx.numpy_helper.from_array(np.ones(300, np.float32), "weight")
    model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "far.onnx", save_as_external_data=True, location="far.data", size_threshold=16)
    (tmp_path / "other").mkdir()
    code, _, error = run("far.onnx", "-o", "other/none.onnx")
    assert code == 2 and "--out must name a file in the same folder" in error
    assert sorted(path.name for path in tmp_path.rglob("none.onnx*")) == []


def test_command_checks(tmp_path):
    """--check runs both models: what differs is told by output, and is not written."""
    pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: --check runs models in it")

    def run(*words):
        line = [sys.executable, "-m", "polyhead", "fuse", "-o", "fused.onnx", "--force", *words, "model.onnx"]
        done = subprocess.run(line, cwd=tmp_path, capture_output=True, text=True, check=False)
        return done.returncode, json.loads(done.stdout) if done.stdout else None, done.stderr

    model = model_of(PLACES_AS_TENSORS["finite_beside_padding"][0])
    onnx.save(model, tmp_path / "model.onnx")
    code, told, error = run("--domain", "polyhead", "--check", "--json", "--size", "T=9")
    assert code == 0 and told["facts"]["result"] == "same", error
    assert [row["sizes"] for row in told["rows"]] == [f"B {b}, S {s}, T 9" for b, s in ((2, 5), (3, 6), (4, 4), (1, 1))]
    assert [row["shape"] for row in told["rows"]] == [f"float32 [{b}, 4, {s}, 8]" for b, s in ((2, 5), (3, 6), (4, 4), (1, 1))]
    assert all(row["result"] == "same" and row["difference"] < 1e-6 < row["largest"] for row in told["rows"])
    assert told["rows"][0]["difference"] > 0  # other kernels than ONNX Runtime's
    assert onnx.load(tmp_path / "fused.onnx") == polyhead.onnx.fuse(model, target="polyhead").model
    (tmp_path / "fused.onnx").unlink()
    assert run("--domain", "polyhead", "--check", "--json", "--tolerance", "0")[0] == 1

    inputs = operands(model)
    inputs["some"][1, ..., :3] = False  # rows that see no key, which "zero" makes 0
    pytest.importorskip("safetensors.numpy", reason="safetensors is not installed: it writes the inputs").save_file(inputs, tmp_path / "inputs.safetensors")
    assert run("--check", "--json", "--inputs", "inputs.safetensors")[1]["facts"]["result"] == "same"
    (tmp_path / "fused.onnx").unlink()
    code, told, _ = run("--check", "--json", "--inputs", "inputs.safetensors", "--unseen-rows", "zero")
    assert code == 1 and told["rows"][0]["sizes"] == "given" and "differs by more than" in told["rows"][0]["result"]
    assert not (tmp_path / "fused.onnx").exists()

    assert "dims without a size are 'B', 'S', 'T'" in run("--check", "--size", "Q=3")[2]
    assert run("--size", "B=3")[2] == "polyhead fuse: --onnxruntime, --inputs, --size and --tolerance are for --check\n"
    assert "is not ONNX Runtime's library" in run("--check", "--onnxruntime", "libm.so.6")[2]
    add = '<ir_version: 8, opset_import: ["": 18]> g (float[%s,A] x, float[%s,C] y) => (float[E,F] z) { z = Add(x, y) }'
    onnx.save(onnx.parser.parse_model(add % ("G", "H")), tmp_path / "model.onnx")
    code, told, _ = run("--check", "--json")
    assert code == 0 and "the model itself does not run" in told["rows"][0]["result"] and told["rows"][2]["result"] == "same"
    code, told, _ = run("--check", "--json", "--size", "G=2", "--size", "H=3")
    assert code == 1 and all("the model itself does not run" in row["result"] for row in told["rows"])
