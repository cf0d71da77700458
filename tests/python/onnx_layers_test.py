"""Products around attention, with what is done to their results: found by polyhead.onnx.fuse(layers=True), and run by sessions."""

import re

import numpy as np
import pytest

import polyhead

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: it judges the numbers")
from onnxruntime_test import assert_close, by_custom_ops, needs_provider, num_ours, ours, quiet_options, theirs  # noqa: E402

import polyhead.onnx  # noqa: E402

B, S, E, F = 2, 6, 32, 48
WEIGHTS = {
    "wq": (E, E), "wk": (E, E), "wv": (E, E), "w": (E, F), "wt": (F, E), "w2": (F, E), "we": (E, E),
    "bias": (F,), "bias_row": (1, 1, F), "bias_e": (E,), "column": (S, 1), "gamma": (F,), "beta": (F,), "gamma_e": (E,), "beta_e": (E,), "table": (B, S, E),
}  # fmt: skip
ATTENTION = """
  split = Constant<value = int64[4] {0, 0, 4, 8}>()  joined = Constant<value = int64[3] {0, 0, 32}>()
  q3 = MatMul(x, wq)  k3 = MatMul(x, wk)  v3 = MatMul(x, wv)
  q4 = Reshape(q3, split)  k4 = Reshape(k3, split)  v4 = Reshape(v3, split)
  q = Transpose<perm = [0, 2, 1, 3]>(q4)  k = Transpose<perm = [0, 2, 3, 1]>(k4)  v = Transpose<perm = [0, 2, 1, 3]>(v4)
  s = MatMul(q, k)  p = Softmax<axis = -1>(s)  o3 = MatMul(p, v)  o4 = Transpose<perm = [0, 2, 1, 3]>(o3)  o = Reshape(o4, joined)
"""
NUMBERS = """
  half = Constant<value = float {0.5}>()  one = Constant<value = float {1.0}>()  root = Constant<value = float {1.41421354}>()
  third = Constant<value = float {3.0}>()  cube = Constant<value = float {0.044715}>()  c = Constant<value = float {0.797884583}>()
  quick = Constant<value = float {1.702}>()  two = Constant<value = float {2.0}>()
"""
GELU = "d = Div(m, root) e = Erf(d) a = Add(e, one) n = Mul(m, a)"

# What follows o, and the patterns of the products in it.
LAYERS = {
    "alone": ("out = MatMul(o, w)", ["a product"]),
    "bias": ("m = MatMul(o, w) out = Add(bias, m)", ["a product, bias"]),
    "bias_that_others_share": ("same = Identity(bias) m = MatMul(o, w) out = Add(m, same)", ["a product, bias"]),
    "bias_with_dims_of_one": ("m = MatMul(o, w) out = Add(m, bias_row)", ["a product, bias"]),
    "gemm": ("""rows = Constant<value = int64[2] {-1, 32}>() back = Constant<value = int64[3] {2, 6, 48}>() x2 = Reshape(o, rows)
        m = Gemm<transB = 1>(x2, wt, bias) n = Reshape(m, back) out = Relu(n)""", ["a product, bias, relu"]),
    "gemm_in_rows": ("rows = Constant<value = int64[2] {-1, 32}>() x2 = Reshape(o, rows) out = Gemm(x2, w)", ["a product"]),
    "gemm_adds_a_matrix": ("rows = Constant<value = int64[2] {-1, 32}>() x2 = Reshape(o, rows) r2 = Reshape(x, rows) out = Gemm(x2, we, r2)",
        ["a product, residual"]),
    "relu": ("m = MatMul(o, w) n = Add(m, bias) out = Relu(n)", ["a product, bias, relu"]),
    "gelu": (f"m = MatMul(o, w) {GELU} out = Mul(n, half)", ["a product, gelu"]),
    "gelu_halved_first": ("m0 = MatMul(o, w) m = Add(m0, bias) d = Div(m, root) e = Erf(d) a = Add(e, one) h = Mul(m, half) out = Mul(a, h)",
        ["a product, bias, gelu"]),
    "gelu_by_a_factor": ("m = MatMul(o, w) r = Reciprocal(root) d = Mul(r, m) e = Erf(d) a = Add(one, e) h = Mul(a, half) out = Mul(h, m)",
        ["a product, gelu"]),
    "gelu_tanh": ("""m = MatMul(o, w) q1 = Pow(m, third) q2 = Mul(q1, cube) q5 = Add(m, q2) q6 = Mul(q5, c) t = Tanh(q6) t1 = Add(t, one)
        h = Mul(m, half) out = Mul(h, t1)""", ["a product, gelu_tanh"]),
    "gelu_tanh_by_products": ("""m = MatMul(o, w) q1 = Mul(m, m) q2 = Mul(q1, m) q5 = Mul(q2, cube) q6 = Add(m, q5) q7 = Mul(c, q6) t = Tanh(q7)
        t1 = Add(one, t) h = Mul(half, t1) out = Mul(m, h)""", ["a product, gelu_tanh"]),
    "gelu_of_onnx": (20, "m = MatMul(o, w) out = Gelu(m)", ["a product, gelu"]),
    "gelu_tanh_of_onnx": (20, 'm = MatMul(o, w) out = Gelu<approximate = "tanh">(m)', ["a product, gelu_tanh"]),
    "gelu_of_microsoft": ("m = MatMul(o, w) out = com.microsoft.BiasGelu(m, bias)", ["a product, bias, gelu"]),
    "fast_gelu": ("m = MatMul(o, w) out = com.microsoft.FastGelu(m, bias)", ["a product, bias, gelu_tanh"]),
    "silu": ("m = MatMul(o, w) e = Sigmoid(m) out = Mul(m, e)", ["a product, silu"]),
    "silu_by_exp": ("m = MatMul(o, w) n = Neg(m) e = Exp(n) a = Add(e, one) out = Div(m, a)", ["a product, silu"]),
    "residual": ("m = MatMul(o, we) n = Add(m, bias_e) out = Add(x, n)", ["a product, bias, residual"]),
    "post_norm": ("m = MatMul(o, we) n = Add(m, bias_e) r = Add(n, x) out = LayerNormalization(r, gamma_e, beta_e)",
        ["a product, bias, residual, layer norm"]),
    "pre_norm": (f"""m0 = MatMul(o, we) r = Add(m0, x) y = LayerNormalization<epsilon = 1e-3>(r, gamma_e, beta_e)
        m = MatMul(y, w) {GELU} g = Mul(n, half) m2 = MatMul(g, w2) n2 = Add(m2, bias_e) out = Add(r, n2)""",
        ["a product, residual, layer norm", "a product, gelu", "a product, bias, residual"]),
    "norm_without_residual": ("m = MatMul(o, w) out = LayerNormalization<axis = 2>(m, gamma)", ["a product, layer norm"]),
    "rms_norm": (23, "m = MatMul(o, w) out = RMSNormalization(m, gamma)", ["a product, RMS norm"]),
    "skip_norm": ("m = MatMul(o, we) out = com.microsoft.SkipLayerNormalization(x, m, gamma_e, beta_e, bias_e)",
        ["a product, bias, residual, layer norm"]),
    "skip_norm_with_its_sum": ("""m = MatMul(o, we) y, , , r = com.microsoft.SkipLayerNormalization<epsilon = 1e-3>(m, x, gamma_e, beta_e)
        out = Add(y, r)""", ["a product, residual, layer norm"]),
    "skip_rms_norm": ("m = MatMul(o, we) out = com.microsoft.SkipSimplifiedLayerNormalization(m, x, gamma_e)", ["a product, residual, RMS norm"]),
}  # fmt: skip

# What looks alike stays outside, or as it is: the patterns, or the reason.
NEAR_MISSES = {
    "quick_gelu": ("m = MatMul(o, w) d = Mul(m, quick) e = Sigmoid(d) out = Mul(m, e)", ["a product"]),
    "gelu_of_another_number": (f"m = MatMul(o, w) {GELU.replace('root', 'two')} out = Mul(n, half)", ["a product"]),
    "gelu_read_inside": (f"m = MatMul(o, w) {GELU} g = Mul(n, half) out = Add(g, e)", ["a product"]),
    "bias_behind_the_activation": ("m = MatMul(o, w) n = Relu(m) out = Add(n, bias)", ["a product, relu"]),
    "two_residuals": ("m = MatMul(o, we) r = Add(m, x) out = Add(r, o)", ["a product, residual"]),
    "a_number_of_each_row": ("m = MatMul(o, w) out = Add(m, column)", ["a product"]),
    "norm_of_two_dims": ("m = MatMul(o, we) gn = Constant<value = float[1] {1.0}>() g2 = Expand(gn, gs) out = LayerNormalization<axis = 1>(m, g2)", ["a product"]),
    "norm_with_its_mean": ("m = MatMul(o, w) y, mean = LayerNormalization(m, gamma) out = Add(y, mean)", ["a product"]),
    "product_read_twice": ("m = MatMul(o, w) n = Add(m, bias) out = Mul(m, n)", ["a product"]),
    "times_a_number": ("rows = Constant<value = int64[2] {-1, 32}>() x2 = Reshape(o, rows) out = Gemm<alpha = 0.5>(x2, w, bias)", "multiplies by a number"),
    "transposed_rows": ("rows = Constant<value = int64[2] {32, -1}>() x2 = Reshape(o, rows) out = Gemm<transA = 1>(x2, w, bias)", "transposes its first operand"),
}  # fmt: skip


def model_of(opset, nodes, kind="float", dims=f"{B},{S}", attention=ATTENTION):
    """Attention between products of x, and nodes behind it; what they read of WEIGHTS are initializers."""
    nodes = NUMBERS + attention + f" gs = Constant<value = int64[2] {{{S}, {E}}}>() " + nodes
    statements = re.sub(r"\s+(?=[a-z]\w*(?:, \w*)* = [A-Zc])", "\n", " " + nodes.strip())
    out = "a,b" if re.search(r"out = Gemm", nodes) else "a,b,c"
    text = f'<ir_version: 10, opset_import: ["": {opset}, "com.microsoft": 1]> g ({kind}[{dims},{E}] x) => ({kind}[{out}] out) {{{statements}\n}}'
    model = onnx.parser.parse_model(text)
    rng = np.random.default_rng(1)
    dtype = onnx.helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    for node in model.graph.node:
        for attribute in node.attribute:
            if attribute.t.data_type == onnx.TensorProto.FLOAT:
                attribute.t.CopyFrom(onnx.numpy_helper.from_array(onnx.numpy_helper.to_array(attribute.t).astype(dtype)))
    for name, shape in WEIGHTS.items():
        if re.search(rf"[(,]\s*{name}\s*[,)]", nodes):
            array = rng.standard_normal(shape) / (np.sqrt(shape[0]) if len(shape) == 2 else 1)
            model.graph.initializer.append(onnx.numpy_helper.from_array(array.astype(dtype), name))
    return model


def case_of(case):
    return (17, *case) if len(case) == 2 else case


def x_of(dtype=np.float32, rows=S):
    return {"x": np.random.default_rng(0).standard_normal((B, rows, E)).astype(dtype)}


def found(fusion):
    """The patterns of the products behind the attention; those of q, k and v come first."""
    assert [each.pattern for each in fusion.products[:3]] == ["a product"] * 3, str(fusion)
    return [each.pattern if each.fused else each.reason for each in fusion.products[3:]]


@pytest.mark.parametrize("name", LAYERS)
def test_layer(name):
    """As custom operators, by the provider, by the reference runner, and as exactly these products."""
    opset, nodes, patterns = case_of(LAYERS[name])
    model = model_of(opset, nodes)
    fusion = polyhead.onnx.fuse(model, target="polyhead", layers=True)
    assert found(fusion) == patterns
    left = {node.op_type for node in fusion.model.graph.node}
    assert not {"MatMul", "Gemm", "Erf", "Tanh", "LayerNormalization"} & left, left
    expected = theirs(model).run(None, x_of())
    assert_close(by_custom_ops(fusion.model, "polyhead").run(None, x_of()), expected, rtol=2e-5, atol=1e-5)
    assert_close(polyhead.onnx.prepare(fusion.model).run(x_of()), expected, rtol=2e-5, atol=1e-5)


@needs_provider
@pytest.mark.parametrize("name", LAYERS)
def test_layer_in_a_session(name):
    """Of the model as it is, and of the fused one, whose constants the provider keeps."""
    opset, nodes, patterns = case_of(LAYERS[name])
    model = model_of(opset, nodes)
    expected = theirs(model).run(None, x_of())
    for each in (model, polyhead.onnx.fuse(model, target="polyhead", layers=True).model):
        session = ours(each, threads=2)
        assert len(session.get_provider_graph_assignment_info()) >= 1
        assert_close(session.run(None, x_of()), expected, rtol=2e-5, atol=1e-5)
    assert groups(ours(model)) == 1 + 3 + len(patterns)


def groups(session):
    return sum(part.ep_name == "polyhead" for part in session.get_provider_graph_assignment_info())


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    opset, nodes, patterns = case_of(NEAR_MISSES[name])
    model = model_of(opset, nodes)
    fusion = polyhead.onnx.fuse(model, target="polyhead", layers=True)
    if isinstance(patterns, str):
        assert patterns in found(fusion)[0]
    else:
        assert found(fusion) == patterns
    expected = theirs(model).run(None, x_of())
    assert_close(by_custom_ops(fusion.model, "polyhead").run(None, x_of()), expected, rtol=2e-5, atol=1e-5)


def pre_norm(opset=17, **options):
    return model_of(opset, LAYERS["pre_norm"][0], **options)


@needs_provider
def test_open_sizes():
    """One session, products of any number of rows."""
    model = pre_norm(dims="B,S")
    session, expected = ours(model, threads=2), theirs(model)
    assert groups(session) == 1 + 3 + 3
    for rows in (6, 1, 37, 6, 200):
        assert_close(session.run(None, x_of(rows=rows)), expected.run(None, x_of(rows=rows)), rtol=2e-5, atol=1e-5)


@needs_provider
def test_layers_that_read_the_shapes_of_others():
    """Each takes its sizes from its own input, as exporters write it: what makes that input is no part of it."""
    sizes = """four = Constant<value = int64[1] {4}>()  eight = Constant<value = int64[1] {8}>()  all = Constant<value = int64[1] {32}>()
        b1 = Shape<start = 0, end = 1>(x)  n1 = Shape<start = 1, end = 2>(x)  split = Concat<axis = 0>(b1, n1, four, eight)
        joined = Concat<axis = 0>(b1, n1, all)"""
    body = re.sub(r"(split|joined) = Constant<[^>]*>\(\)", "", ATTENTION)
    first = f"{sizes} {body} m = MatMul(o, we) y = LayerNormalization(m, gamma_e, beta_e) "
    names = dict.fromkeys(re.findall(r"(\w+) = [A-Z]", first))
    second = re.sub(r"\b\w+\b", lambda at: "y" if at[0] == "x" else f"{at[0]}_2" if at[0] in names else at[0], first)
    model = model_of(17, "out = MatMul(y_2, w)", dims="B,S", attention=first + second)
    session = ours(model, threads=2)
    assert groups(session) == 2 * (3 + 1 + 1) + 1
    for rows in (6, 17):
        assert_close(session.run(None, x_of(rows=rows)), theirs(model).run(None, x_of(rows=rows)), rtol=2e-5, atol=1e-5)


@needs_provider
def test_float16():
    model = pre_norm(kind="float16")
    session = ours(model)
    assert groups(session) == 1 + 3 + 3
    exact = theirs(pre_norm()).run(None, {"x": x_of(np.float16)["x"].astype(np.float32)})
    assert_close(session.run(None, x_of(np.float16)), exact, rtol=2e-2, atol=2e-2)


@needs_provider
def test_error_is_that_of_the_plain_formula():
    """At most twice the error of ONNX Runtime's own, beside the definition in float64."""
    rng = np.random.default_rng(5)
    model = pre_norm()
    exact = onnx.reference.ReferenceEvaluator(pre_norm(kind="double"))
    for seed in range(3):
        x = rng.standard_normal((B, S, E)).astype(np.float32) * 10.0**seed
        (truth,) = exact.run(None, {"x": x.astype(np.float64)})
        own, other = (np.abs(session.run(None, {"x": x})[0] - truth).max() for session in (ours(model), theirs(model)))
        assert own <= 2 * other + 2e-7 * np.abs(truth).max()


@needs_provider
def test_layers_can_be_left_out():
    model = pre_norm()
    options = quiet_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = polyhead.onnx.session(model.SerializeToString(), options, layers=False)
    assert groups(session) == 1
    devices = [device for device in ort.get_ep_devices() if device.ep_name == "polyhead"]
    options = quiet_options()
    options.add_provider_for_devices(devices[:1], {"layers": "yes"})
    with pytest.raises(Exception, match='layers is "yes", must be 0 or 1'):
        ort.InferenceSession(model.SerializeToString(), options)


@needs_provider
def test_small_matrices_stay_by_default():
    """But for those with an activation, a residual or a norm."""
    model = pre_norm()
    options = quiet_options()
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    session = polyhead.onnx.session(model.SerializeToString(), options)
    assert groups(session) == 1 + 3
    assert_close(session.run(None, x_of()), theirs(model).run(None, x_of()), rtol=2e-5, atol=1e-5)


@needs_provider
def test_matrix_that_others_read():
    """An embedding's matrix is a product's too: ONNX Runtime keeps it, and both read the same numbers."""
    model = model_of(17, "i = ArgMax<axis = -1, keepdims = 0>(x) r = Gather(we, i) m = MatMul(o, we) out = Add(m, r)")
    session = ours(model)
    assert groups(session) == 1 + 3 + 1
    assert_close(session.run(None, x_of()), theirs(model).run(None, x_of()), rtol=2e-5, atol=1e-5)


@needs_provider
@pytest.mark.parametrize("node", [
    (23, "o = Attention<q_num_heads = 4, kv_num_heads = 4>(q3, k3, v3)"),
    (17, "o = com.microsoft.MultiHeadAttention<num_heads = 4>(q3, k3, v3)"),
])  # fmt: skip
def test_attention_that_is_a_node(node):
    model = pre_norm(opset=node[0], attention=f"q3 = MatMul(x, wq)  k3 = MatMul(x, wk)  v3 = MatMul(x, wv)  {node[1]}")
    session = ours(model)
    assert groups(session) == 1 + 3 + 3
    assert_close(session.run(None, x_of()), theirs(model).run(None, x_of()), rtol=2e-5, atol=1e-5)
    fusion = polyhead.onnx.fuse(model, target="polyhead", layers=True)
    assert [each.fused for each in fusion.products] == [True] * 6


@needs_provider
def test_rows_that_are_constant():
    """They are no input of a group, whose constants ONNX Runtime lets go: the product stays."""
    model = model_of(17, "m = MatMul(o, we) out = Add(m, table)")
    session = ours(model)
    assert groups(session) == 1 + 3
    assert_close(session.run(None, x_of()), theirs(model).run(None, x_of()), rtol=2e-5, atol=1e-5)


@needs_provider
def test_graph_without_attention_stays():
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]> g (float[B,S,{E}] x) => (float[B,S,{E}] out) {{ out = MatMul(x, we) }}""")
    model.graph.initializer.append(onnx.numpy_helper.from_array(np.eye(E, dtype=np.float32), "we"))
    assert num_ours(ours(model)) == 0
    assert polyhead.onnx.fuse(model, target="polyhead", layers=True).products == ()


@needs_provider
def test_in_a_body():
    """Of If, whose nodes read constants of the graph around it."""
    inner = pre_norm()
    body = onnx.helper.make_graph(list(inner.graph.node), "then", [], [inner.graph.output[0]])
    other = onnx.helper.make_graph([onnx.helper.make_node("Identity", ["x"], ["same"])], "else", [], [onnx.helper.make_tensor_value_info("same", 1, None)])
    node = onnx.helper.make_node("If", ["which"], ["result"], then_branch=body, else_branch=other)
    inputs = [inner.graph.input[0], onnx.helper.make_tensor_value_info("which", onnx.TensorProto.BOOL, [])]
    graph = onnx.helper.make_graph([node], "g", inputs, [onnx.helper.make_tensor_value_info("result", 1, None)], list(inner.graph.initializer))
    model = onnx.helper.make_model(graph, opset_imports=inner.opset_import, ir_version=10)
    session = ours(model)
    given = x_of() | {"which": np.array(True)}
    assert_close(session.run(None, given), theirs(inner).run(None, x_of()), rtol=2e-5, atol=1e-5)
    given["which"] = np.array(False)
    assert_close(session.run(None, given), [x_of()["x"]])
    fusion = polyhead.onnx.fuse(model, target="polyhead", layers=True)
    assert sum(each.fused for each in fusion.products) == 6, str(fusion)


def linear(attributes, inputs, outputs="y", told="float[M,K] x, float[K2,N] w, float[N2] b, float[R,N3] r"):
    text = f'<ir_version: 10, opset_import: ["": 18, "polyhead": 1]> g ({told}) => (float[m,n] y) {{ {outputs} = polyhead.Linear<{attributes}>({inputs}) }}'
    return onnx.parser.parse_model(text.replace("<>", ""))


def test_node_whose_matrix_is_an_input():
    rng = np.random.default_rng(0)
    given = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in {"x": (5, 7), "w": (9, 7), "b": (9,), "r": (5, 9)}.items()}
    model = linear('transB = 1, activation = "relu"', "x, w, b, r", told="float[M,K] x, float[N,K] w, float[N] b, float[M,N] r")
    expected = np.maximum(given["x"] @ given["w"].T + given["b"], 0) + given["r"]
    assert_close(by_custom_ops(model).run(None, given), [expected], atol=1e-5)
    assert_close(polyhead.onnx.prepare(model).run(given), [expected], atol=1e-5)


@pytest.mark.parametrize(("attributes", "outputs", "words"), [
    ('activation = "swish"', "y", 'activation is "swish", must be one of relu, gelu, gelu_tanh, silu'),
    ('norm = "batch"', "y", 'norm is "batch", must be one of layer, rms'),
    ("", "y, z", "what is normalised, is asked for without a norm"),
])  # fmt: skip
def test_attributes_that_are_none(attributes, outputs, words):
    with pytest.raises(Exception, match=re.escape(words)):
        by_custom_ops(linear(attributes, "x, w", outputs, "float[M,K] x, float[K,N] w"))


@pytest.mark.parametrize(("sizes", "words"), [
    ({"x": (5, 6)}, "X is float32 [5, 6], W float32 [7, 9] as [k, n]: X must be floats [..., k]"),
    ({"w": (7, 9, 1)}, "W is float32 [7, 9, 1], must have 2 dims"),
    ({"b": (8,)}, "B is float32 [8], must be 9 numbers of float32"),
    ({"r": (4, 9)}, "R is float32 [4, 9], must be as X but for the last dim, 9"),
])  # fmt: skip
def test_shapes_that_do_not_fit(sizes, words):
    shapes = {"x": (5, 7), "w": (7, 9), "b": (9,), "r": (5, 9)} | sizes
    told = ", ".join(f"float[{','.join(f'{name}{i}' for i in range(len(shape)))}] {name}" for name, shape in shapes.items())
    session = by_custom_ops(linear("", "x, w, b, r", told=told))
    with pytest.raises(Exception, match=re.escape(words)):
        session.run(None, {name: np.ones(shape, np.float32) for name, shape in shapes.items()})


def test_layers_need_our_domain():
    with pytest.raises(polyhead.Error, match='layers needs target="polyhead"'):
        polyhead.onnx.fuse(pre_norm(), layers=True)
