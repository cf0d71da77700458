"""polyhead.onnx.fuse on quantised models: fused where both products are of floats, else it stays and the node that rounds is named."""

import logging
import re

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: it quantises models and runs them")
from onnxruntime.quantization import CalibrationDataReader, QuantFormat, quantize_dynamic, quantize_static  # noqa: E402
from onnxruntime_test import assert_close, quiet_options  # noqa: E402

import polyhead.onnx  # noqa: E402

E, H, D, B, S = 32, 4, 8, 2, 6
LAYER = """
  xq = MatMul(x, weight_q)  xk = MatMul(x, weight_k)  xv = MatMul(x, weight_v)
  split = Constant<value = int64[4] {0, 0, 4, 8}>()  joined = Constant<value = int64[3] {0, 0, 32}>()
  q4 = Reshape(xq, split)  k4 = Reshape(xk, split)  v4 = Reshape(xv, split)
  q = Transpose<perm = [0, 2, 1, 3]>(q4)  k = Transpose<perm = [0, 2, 3, 1]>(k4)  v = Transpose<perm = [0, 2, 1, 3]>(v4)
  root = Constant<value = float {2.82842712}>()  product = MatMul(q, k)  scaled = Div(product, root)
  scores = Add(scaled, pad)  weights = Softmax<axis = -1>(scores)  stacked = MatMul(weights, v)
  o4 = Transpose<perm = [0, 2, 1, 3]>(stacked)  o = Reshape(o4, joined)  out = MatMul(o, weight_o)
"""
SHAPES = {"x": (B, S, E), "pad": (B, 1, 1, S), "q": (B, H, S, D), "kt": (B, H, D, S), "v": (B, H, S, D), "bias": (B, 1, S, S)}
PRODUCTS = ["n_product", "n_stacked"]


def inputs_of(model, seed=0):
    rng = np.random.default_rng(seed)
    return {value.name: rng.standard_normal(SHAPES[value.name]).astype(np.float32) for value in model.graph.input}


def model_of(nodes, inputs="float[B,S,32] x, float[B,1,1,S] pad", dims="float[a,b,c]"):
    statements = re.sub(r"\s+(?=[a-z]\w*(?:, \w+)* = [A-Za-z])", "\n", " " + nodes.strip())
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18, "com.microsoft": 1]> g ({inputs}) => ({dims} out) {{{statements}\n}}')
    for node in model.graph.node:
        node.name = "n_" + node.output[0]
    return model


@pytest.fixture(name="layer", scope="module")
def fixture_layer(tmp_path_factory):
    """The file of an attention between its projections."""
    rng = np.random.default_rng(1)
    model = model_of(LAYER)
    for name in "qkvo":
        weight = rng.standard_normal((E, E)).astype(np.float32) / np.sqrt(E, dtype=np.float32)
        model.graph.initializer.append(onnx.numpy_helper.from_array(weight, f"weight_{name}"))
    path = tmp_path_factory.mktemp("layer") / "layer.onnx"
    onnx.save(model, path)
    return path


class Calibration(CalibrationDataReader):
    def __init__(self, model):
        self.sets = iter([inputs_of(model, seed) for seed in range(3)])

    def get_next(self):
        return next(self.sets, None)


def static(format, **more):
    def quantize(path, out):
        quantize_static(path, out, Calibration(onnx.load(path)), quant_format=format, **more)

    return quantize


def optimised(quantize):
    """As ONNX Runtime itself rewrites and saves it: with nodes of com.microsoft."""

    def save(path, out):
        quantize(path, out)
        options = quiet_options()
        options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_ENABLE_EXTENDED
        options.optimized_model_filepath = str(out)
        ort.InferenceSession(out, options, providers=["CPUExecutionProvider"])

    return save


# How the layer is quantised, and what the report says where it stays.
MATMULS = {"op_types_to_quantize": ["MatMul"]}
ALL = {"extra_options": {"MatMulConstBOnly": False}}
TOOLS = {
    "dynamic": (quantize_dynamic, ""),
    "dynamic, optimised": (optimised(quantize_dynamic), ""),
    "dynamic, of all products": (lambda path, out: quantize_dynamic(path, out, **ALL), 'by "weights_QuantizeLinear" (DynamicQuantizeLinear)'),
    "dynamic, of the scores": (lambda path, out: quantize_dynamic(path, out, nodes_to_exclude=["n_stacked"], **ALL), '"n_product_quant" (MatMulInteger) rounds the scores'),
    "QDQ of projections": (static(QuantFormat.QDQ, **MATMULS, nodes_to_exclude=PRODUCTS), ""),
    "QDQ of projections, optimised": (optimised(static(QuantFormat.QDQ, **MATMULS, nodes_to_exclude=PRODUCTS)), '"n_product" (MatMulIntegerToFloat) rounds the scores'),
    "QDQ of all but the softmax": (static(QuantFormat.QDQ, nodes_to_exclude=["n_weights", "n_stacked"]), '(QuantizeLinear) rounds the scores'),
    "QDQ": (static(QuantFormat.QDQ), 'by "weights_QuantizeLinear" (QuantizeLinear)'),
    "QDQ, optimised": (optimised(static(QuantFormat.QDQ)), '"n_weights" (QLinearSoftmax) is a softmax of integers'),
    "QLinearMatMul for projections": (static(QuantFormat.QOperator, **MATMULS, nodes_to_exclude=PRODUCTS), ""),
    "QLinearMatMul for scores": (static(QuantFormat.QOperator, **MATMULS, **ALL, nodes_to_exclude=["n_stacked"]), '"n_product_quant" (QLinearMatMul) rounds the scores'),
    "QLinearMatMul for values": (static(QuantFormat.QOperator, **MATMULS, **ALL, nodes_to_exclude=["n_product"]), 'by "weights_QuantizeLinear" (QuantizeLinear)'),
    "QLinear": (static(QuantFormat.QOperator), '"n_weights_quant" (QLinearSoftmax) is a softmax of integers'),
}  # fmt: skip


def run(data, inputs, make=lambda *of: ort.InferenceSession(*of, providers=["CPUExecutionProvider"])):
    options = quiet_options()
    options.graph_optimization_level = ort.GraphOptimizationLevel.ORT_DISABLE_ALL
    return make(data, options).run(None, inputs)


@pytest.mark.parametrize("target", ["onnx", "polyhead"])
@pytest.mark.parametrize("name", TOOLS)
def test_quantised_layer(name, target, layer, tmp_path):
    quantize, reason = TOOLS[name]
    logging.disable(logging.WARNING)  # onnxruntime's advice on calibration
    try:
        quantize(layer, tmp_path / "model.onnx")
    finally:
        logging.disable(logging.NOTSET)
    model = onnx.load(tmp_path / "model.onnx")
    del model.graph.value_info[:]  # nothing of what the tool inferred
    fusion = polyhead.onnx.fuse(model, target=target)
    (candidate,) = fusion.candidates
    assert candidate.is_attention and reason in candidate.reason, str(fusion)
    assert candidate.fused == (not reason), str(fusion)
    if reason:
        assert fusion.model.SerializeToString() == model.SerializeToString()
        return
    inputs = inputs_of(model, 7)
    make = {"make": polyhead.onnx.session} if target == "polyhead" else {}
    # A number that falls between two integers may fall to the other one of them: one step of the output's projection.
    assert_close(run(fusion.model.SerializeToString(), inputs, **make), run(model.SerializeToString(), inputs), atol=0.02)


STACKS = "float[B,4,S,8] q, float[B,4,8,S] kt, float[B,4,S,8] v, float[B,1,S,S] bias"
GRID = "grid = Constant<value = float {0.05}>()  none = Constant<value = int8 {0}>()"
TAIL = "weights = Softmax<axis = -1>(scores)  out = MatMul(weights, v)"
ROUNDED = "{0}_i = QuantizeLinear({0}, grid, none)  {1} = DequantizeLinear({0}_i, grid, none)"
# By hand: nodes, whether something like attention is there, and the reason; "": it is fused.
BY_HAND = {
    "a mask that is rounded": (f"{GRID} m = MatMul(q, kt)  {ROUNDED.format('bias', 'b')}  scores = Add(b, m)  {TAIL}", True, ""),
    "scores and a mask that are rounded": (f"{GRID} m = MatMul(q, kt)  {ROUNDED.format('bias', 'b')}  {ROUNDED.format('m', 'a')}  scores = Add(b, a)  {TAIL}",
                                           True, '"n_m_i" (QuantizeLinear) rounds the scores'),
    "scores in floats of integers": (f"{GRID} {ROUNDED.format('q', 'qf')} kt_i = QuantizeLinear(kt, grid, none)  scores = com.microsoft.MatMulIntegerToFloat(q_i, kt_i, grid, grid, none, none)  {TAIL}",
                                     True, '"n_scores" (MatMulIntegerToFloat) rounds the scores'),
    "weights that are rounded and moved": (f"{GRID} scores = MatMul(q, kt)  w = Softmax<axis = -1>(scores)  {ROUNDED.format('w', 'u')}  three = Constant<value = int64[3] {{-1, 0, 0}}>()  four = Constant<value = int64[4] {{-1, 4, 6, 6}}>()"
                                           f" t = Transpose<perm = [0, 1, 2, 3]>(u)  r = Reshape(t, four)  out = MatMul(r, v)", True, 'by "n_w_i" (QuantizeLinear)'),
    "classes": (f"{GRID} m = MatMul(q, kt)  {ROUNDED.format('m', 'scores')}  w = Softmax<axis = -1>(scores)  {ROUNDED.format('w', 'out')}", False, "no product with values follows"),
    "classes in integers": (f"{GRID} m = MatMul(q, kt)  m_i = QuantizeLinear(m, grid, none)  w = com.microsoft.QLinearSoftmax<axis = -1, opset = 13>(m_i, grid, none, grid, none)  out = DequantizeLinear(w, grid, none)",
                            False, '"n_w" (QLinearSoftmax) is a softmax of integers'),
}  # fmt: skip


@pytest.mark.parametrize("name", BY_HAND)
def test_quantised_by_hand(name):
    nodes, is_attention, reason = BY_HAND[name]
    used = [each for each in STACKS.split(", ") if re.search(rf"\b{each.split()[1]}\b", nodes)]
    model = model_of(nodes, ", ".join(used), "float[a,b,c,d]")
    fusion = polyhead.onnx.fuse(model)
    (candidate,) = fusion.candidates
    assert (candidate.is_attention, candidate.fused) == (is_attention, not reason), str(fusion)
    assert reason in candidate.reason, str(fusion)
    if not reason:
        inputs = inputs_of(model)
        assert_close(run(fusion.model.SerializeToString(), inputs), run(model.SerializeToString(), inputs))
