"""polyhead.onnx.fuse on training graphs: an attention and its backward become one operator each, or both stay."""

import re
import warnings

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
import onnx_training_cases as training  # noqa: E402
from onnx_changes import change_node  # noqa: E402

import polyhead.onnx  # noqa: E402


class FusedMatMul(onnx.reference.op_run.OpRun):
    op_domain = "com.microsoft"

    def _run(self, a, b, transA=0, transB=0):
        turn = [x.swapaxes(-1, -2) if turns else x for x, turns in ((a, transA), (b, transB))]
        return (np.matmul(*turn),)


class SoftmaxGrad_13(onnx.reference.op_run.OpRun):
    op_domain = "com.microsoft"

    def _run(self, grad, weights, axis=-1):
        return (weights * (grad - (grad * weights).sum(axis=axis, keepdims=True)),)


def training_model_of(nodes):
    """The nodes in a graph of the inputs that they read, and these; `out`, gradients and `other` are outputs."""
    nodes = training.NUMBERS + nodes
    read = {name: shape for name, shape in training.INPUTS.items() if re.search(rf"[(,]\s*{name}\s*[,)]", nodes)}
    told = ", ".join(
        f"{'bool' if name == 'keep' else 'float'}[{', '.join(map(str, shape))}] {name}" for name, shape in read.items()
    )
    outputs = [name for name in ("out", "dq", "dk", "dv", "db", "other") if re.search(rf"\b{name} =", nodes)]
    statements = re.sub(r"\s+(?=[a-z]\w*(?:, \w+)* = [A-Zc])", "\n", " " + nodes.strip())
    text = f'<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> g ({told}) => ({", ".join(f"float {name}" for name in outputs)}) {{{statements}\n}}'
    model = onnx.parser.parse_model(text)
    inputs = {name: each for name, each in training.arrays().items() if name in read}
    for output in model.graph.output:
        output.type.tensor_type.ClearField("shape")
    for output, result in zip(model.graph.output, run_written_out(model, inputs), strict=True):
        output.CopyFrom(onnx.helper.make_tensor_value_info(output.name, onnx.TensorProto.FLOAT, result.shape))
    return model, inputs


def run_written_out(model, inputs):
    evaluator = onnx.reference.ReferenceEvaluator(model, new_ops=[FusedMatMul, SoftmaxGrad_13])
    return evaluator.run(None, inputs)


@pytest.mark.parametrize("name", training.TRAINING)
def test_training_graph(name):
    """Forward and backward become one operator each; neither weights nor products of them are left."""
    model, inputs = training_model_of(training.TRAINING[name])
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    assert fusion.num_fused == 1, str(fusion)
    left = [node.op_type for node in fusion.model.graph.node]
    assert left.count("Attention") == left.count("AttentionGrad") == 1
    assert not {"Softmax", "LogSoftmax", "Exp", "MatMul", "FusedMatMul", "Einsum", "ReduceSum", "SoftmaxGrad_13", "Where"} & set(left), left
    assert 0 < fusion.saved_bytes and f"{fusion.saved_bytes:,} bytes less" in str(fusion)
    for a, b in zip(run_written_out(model, inputs), polyhead.onnx.prepare(fusion.model).run(inputs), strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=5e-6)
    stays = polyhead.onnx.fuse(model)
    by_onnx = re.search(r"target polyhead replaces both|also read by|(Pow|Clip|Mul|Add)\) |before the softcap", stays.candidates[0].reason)
    assert stays.num_fused == 0 and by_onnx, str(stays)


@pytest.mark.parametrize("name", training.NEAR_MISSES)
def test_training_near_miss(name):
    nodes, reason = training.NEAR_MISSES[name]
    model, _ = training_model_of(nodes)
    for target in ("polyhead", "onnx"):
        fusion = polyhead.onnx.fuse(model, target=target)
        assert fusion.num_fused == 0
        assert target == "onnx" or reason in fusion.candidates[0].reason, str(fusion)
        assert fusion.model.SerializeToString() == model.SerializeToString()


def test_training_graphs_that_are_changed_by_chance():
    """Whatever fuses of graphs with one node that does something else has the numbers that it had."""
    rng = np.random.default_rng(0)
    fused = 0
    for _ in range(400):
        name = rng.choice([name for name in training.TRAINING if name != "onnxruntime"])
        model, inputs = training_model_of(training.TRAINING[name])
        change_node(model, rng)
        with warnings.catch_warnings(), np.errstate(all="ignore"):
            warnings.simplefilter("ignore")
            try:
                before = run_written_out(model, inputs)
            except Exception:  # shapes that do not fit
                continue
            fusion = polyhead.onnx.fuse(model, target="polyhead")
            if not fusion.num_fused:
                assert fusion.model.SerializeToString() == model.SerializeToString()
                continue
            fused += 1
            for a, b in zip(before, polyhead.onnx.prepare(fusion.model).run(inputs), strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-4 * max(1, np.nanmax(np.abs(a))), err_msg=f"{name}: {fusion}")
    assert fused >= 10
