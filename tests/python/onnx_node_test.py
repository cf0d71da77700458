"""ONNX's own node cases for Attention (opsets 23, 24 and 25) through polyhead.onnx; models and nodes run by it."""

import re
import subprocess
import sys
import unittest
import warnings

import numpy as np
import pytest

import polyhead

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its Attention node cases are left out")
from onnx.backend.test import BackendTest  # noqa: E402

import polyhead.onnx  # noqa: E402

def is_attention_case(name):
    return re.match(r"test_attention_.*_cpu$", name) and "_expanded" not in name


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other operators' cases, which are made at the same time
    CASES = {
        name: case
        for group in BackendTest(polyhead.onnx.Backend, __name__).test_cases.values()
        for name, case in vars(group).items()
        if is_attention_case(name)
    }
AttentionNodes = type("AttentionNodes", (unittest.TestCase,), {"__module__": __name__, **CASES})


def test_no_case_is_missing():
    assert len(CASES) >= 93  # onnx 1.23: 69 of opset 23, 13 of 24, 11 of 25


def attention_model():
    """x [2, S, 16] -> LayerNormalization -> Attention with itself, causal, 4 heads of 4, and the cache of keys -> Relu."""
    helper, float32 = onnx.helper, onnx.TensorProto.FLOAT
    scale = onnx.numpy_helper.from_array(np.ones(16, np.float32), "gamma")
    nodes = [
        helper.make_node("LayerNormalization", ["x", "gamma"], ["normed"]),
        helper.make_node("Attention", ["normed", "normed", "normed"], ["y", "key"], q_num_heads=4, kv_num_heads=4, is_causal=1),
        helper.make_node("Relu", ["y"], ["out"]),
    ]
    inputs = [helper.make_tensor_value_info("x", float32, [2, "S", 16])]
    shapes = {"out": [2, "S", 16], "key": [2, 4, "S", 4]}
    outputs = [helper.make_tensor_value_info(name, float32, shape) for name, shape in shapes.items()]
    graph = helper.make_graph(nodes, "model", inputs, outputs, [scale])
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=11)


def test_a_model_runs_with_its_attention_here(monkeypatch):
    calls, ours = [], polyhead.attention
    monkeypatch.setattr(polyhead, "attention", lambda *a, **k: calls.append(1) or ours(*a, **k))
    model = attention_model()
    for length in (5, 33):
        x = np.random.default_rng(length).standard_normal((2, length, 16), dtype=np.float32)
        expected = onnx.reference.ReferenceEvaluator(model).run(None, {"x": x})
        prepared = polyhead.onnx.prepare(model)
        for outputs in (prepared.run({"x": x}), prepared.run([x]), polyhead.onnx.run_model(model, [x])):
            assert len(outputs) == 2 and outputs[1].shape == (2, 4, length, 4)
            for got, wanted in zip(outputs, expected, strict=True):
                np.testing.assert_allclose(got, wanted, rtol=1e-5, atol=1e-6)
    assert len(calls) == 6


def test_a_node_runs_alone():
    node = onnx.helper.make_node("Attention", ["q", "k", "v"], ["y"], scale=0.5)
    q, k, v = np.random.default_rng(0).standard_normal((3, 1, 2, 7, 8), dtype=np.float32)
    (out,) = polyhead.onnx.run_node(node, [q, k, v])
    expected = polyhead.attention(*(x.transpose(0, 2, 1, 3) for x in (q, k, v)), scale=0.5)
    np.testing.assert_array_equal(out, expected.transpose(0, 2, 1, 3))


def test_what_cannot_run_is_said():
    model = attention_model()
    for call in (lambda: polyhead.onnx.prepare(model, "CUDA"), lambda: polyhead.onnx.run_node(model.graph.node[2], [1.0], "CUDA:0")):
        with pytest.raises(polyhead.Error, match='device is "CUDA'):
            call()
    del model.graph.node[0]
    with pytest.raises(onnx.checker.ValidationError):
        polyhead.onnx.prepare(model)
    assert polyhead.onnx.supports_device("CPU") and not polyhead.onnx.supports_device("CUDA")


def test_sessions_need_no_onnx():
    """Without the package onnx the module is there, and says what the rest of it needs."""
    program = """
import sys
sys.modules["onnx"] = None
import polyhead.onnx
assert callable(polyhead.onnx.session) and callable(polyhead.onnx.library_path)
try:
    polyhead.onnx.fuse
except ImportError as error:
    print(error)
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True)
    assert done.stdout == "polyhead.onnx.fuse needs the package onnx: pip install onnx\n"
