"""Dims of masks that have names of their own, and turn out to be 1 when the fused model runs: they broadcast as they did."""

import itertools
import re

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: what is fused is not run")
from onnxruntime_test import assert_close, num_ours, ours, quiet_options, theirs  # noqa: E402

import polyhead.onnx  # noqa: E402

SIZES = {"B": 4, "S": 5, "T": 6, "b": 4, "h": 4, "g": 2, "r": 2, "s": 5, "t": 6, "n": 16}  # a small letter: that, or 1
STACKS = "float[B,4,S,8] q, float[B,4,8,T] kt, float[B,4,T,8] v"
FLAT = "float[B,S,32] x, float[B,T,32] y"
INF = "inf = Constant<value = float {-inf}>() "
TAIL = " w = Softmax<axis = -1>(z) out = MatMul(w, v)"
PLACES = """
  n = Shape(q) m = Shape(v) two = Constant<value = int64 {2}>() zero = Constant<value = int64 {0}>() one = Constant<value = int64 {1}>()
  num_rows = Gather<axis = 0>(n, two) num_columns = Gather<axis = 0>(m, two) r = Range(zero, num_rows, one) c = Range(zero, num_columns, one)
  last = Constant<value = int64[1] {-1}>() first = Constant<value = int64[1] {0}>() rows = Unsqueeze(r, last) columns = Unsqueeze(c, first)
  before = LessOrEqual(columns, rows) """
MERGED = """
  rows = Constant<value = int64[3] {-1, 5, 8}>() columns = Constant<value = int64[3] {-1, 6, 8}>()
  q = Reshape(q4, rows) k = Reshape(k4, columns) v = Reshape(v4, columns) kt = Transpose<perm = [0, 2, 1]>(k) product = MatMul(q, kt) """
APART = MERGED + "four = Constant<value = int64[4] {-1, 4, 5, 6}>() three = Constant<value = int64[3] {-1, 5, 6}>() p4 = Reshape(product, four) "
FIVE = """
  halves = Constant<value = int64[2] {16, 16}>() a, b = Split<axis = 2>(y, halves) five = Constant<value = int64[5] {0, 0, 2, 2, 8}>()
  q5 = Reshape(x, five) q = Transpose<perm = [0, 2, 3, 1, 4]>(q5) single = Constant<value = int64[5] {0, 0, 2, 1, 8}>() k5 = Reshape(a, single)
  v5 = Reshape(b, single) kt = Transpose<perm = [0, 2, 3, 4, 1]>(k5) v = Transpose<perm = [0, 2, 3, 1, 4]>(v5) product = MatMul(q, kt) """
JOINED = " w = Softmax<axis = -1>(z) o5 = MatMul(w, v) o4 = Transpose<perm = [0, 3, 1, 2, 4]>(o5) flat = Constant<value = int64[3] {0, 0, 32}>() out = Reshape(o4, flat)"
MERGED_INPUTS = "float[B,4,S,8] q4, float[B,4,T,8] k4, float[B,4,T,8] v4"

# name: inputs, kind of the mask, nodes up to the output, dims that the mask has in turn
CASES = {
    "added": (STACKS, "float", "m = MatMul(q, kt) z = Add(m, mask)" + TAIL, ["b,h,s,t", "b,1,1,t", "h,s,t", "s,t", "t"]),
    "subtracted": (STACKS, "float", "m = MatMul(q, kt) z = Sub(m, mask)" + TAIL, ["b,h,s,t", "t"]),
    "boolean": (STACKS, "bool", INF + "m = MatMul(q, kt) z = Where(mask, m, inf)" + TAIL, ["b,h,s,t", "b,1,1,t", "s,t", "t"]),
    "hidden": (STACKS, "bool", INF + "m = MatMul(q, kt) z = Where(mask, inf, m)" + TAIL, ["b,h,s,t", "t"]),
    "finite": (STACKS, "bool", "low = Constant<value = float {-1000000000.0}>() m = MatMul(q, kt) z = Where(mask, m, low)" + TAIL, ["b,h,s,t", "t"]),
    "beside one of all keys": (STACKS + ", float[S,T] bias", "float", "m = MatMul(q, kt) a = Add(m, bias) z = Add(a, mask)" + TAIL, ["b,h,s,t", "t"]),
    "causal and padding": (STACKS, "bool", PLACES + INF + "both = And(before, mask) m4 = MatMul(q, kt) z = Where(both, m4, inf)" + TAIL, ["b,h,s,t", "b,1,1,t", "t"]),
    "scores that are returned": (STACKS, "float", "m = MatMul(q, kt) scores = Add(m, mask) w = Softmax<axis = -1>(scores) out = MatMul(w, v)", ["b,h,s,t", "t"]),
    "sizes that are numbers": (STACKS.replace("S", "5").replace("T", "6"), "float", "m = MatMul(q, kt) z = Add(m, mask)" + TAIL, ["b,h,s,t", "t"]),
    "batch and heads in one": (MERGED_INPUTS, "float", MERGED + "z = Add(product, mask)" + TAIL, ["n,s,t", "n,1,t", "s,t"]),
    "batch and heads apart": (MERGED_INPUTS, "float", APART + "z4 = Add(p4, mask) z = Reshape(z4, three)" + TAIL, ["h,5,6"]),
    "five dims": (FLAT, "bool", FIVE + INF + "z = Where(mask, product, inf)" + JOINED, ["b,1,1,s,t", "b,2,2,s,t", "2,2,s,t", "s,t"]),
    "factors of rows": (STACKS, "float", "m = MatMul(q, kt) z = Mul(m, mask)" + TAIL, ["b,h,s,1", "h,1,1"]),
}  # fmt: skip
# Dims that are put together, of which one would take another's place: of two sequences and one head with two heads and one
# sequence.
STAYS = {
    "five dims": (FLAT, "bool", FIVE + INF + "z = Where(mask, product, inf)" + JOINED, ["b,g,r,s,t", "b,g,2,S,T", "2,r,S,T", "g,2,S,T"]),
    "batch and heads apart": (MERGED_INPUTS, "float", APART + "z4 = Add(p4, mask) z = Reshape(z4, three)" + TAIL, ["b,h,5,6", "b,4,5,t"]),
    "a program": (STACKS, "float", "m = MatMul(q, kt) z = Mul(m, mask)" + TAIL, ["b,h,s,t", "4,S,t"]),
}  # fmt: skip
NOT_IN_GROUPS = {("batch and heads apart", "h,5,6"), ("factors of rows", "h,1,1")}  # of nodes that ONNX Runtime gives us; what is repeated is


def model_of(inputs, kind, nodes, dims):
    told = re.sub(r"\b([a-z])\b", r"\1_of_mask", dims)
    outs = ["out"] + ["scores"] * (" scores =" in nodes)
    rank = {FLAT: 3, MERGED_INPUTS: 3}.get(inputs, 4)
    results = ", ".join(f"float[{','.join('uvwx'[:rank])}] {name}" for name in outs)
    statements = re.sub(r"\s+(?=[A-Za-z]\w*(?:, \w+)* = [A-Z])", "\n", " " + nodes.strip())
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({inputs}, {kind}[{told}] mask) => ({results}) {{{statements}\n}}')


def operands_of(model, dims):
    """One set for each choice of 1 or the scores' size."""
    rng = np.random.default_rng(0)
    fixed = {}
    for value in model.graph.input:
        if value.name != "mask":
            fixed[value.name] = rng.standard_normal([SIZES[d.dim_param] if d.dim_param else d.dim_value for d in value.type.tensor_type.shape.dim]).astype(np.float32)
    is_bool = model.graph.input[-1].type.tensor_type.elem_type == onnx.TensorProto.BOOL
    for shape in itertools.product(*((int(d),) if d.isdigit() else (SIZES[d],) if d.isupper() else (1, SIZES[d]) for d in dims.split(","))):
        yield fixed | {"mask": rng.random(shape) < 0.6 if is_bool else rng.standard_normal(shape).astype(np.float32)}


@pytest.mark.parametrize(("name", "dims"), [(name, dims) for name, case in CASES.items() for dims in case[3]])
def test_dims_of_one(name, dims):
    model = model_of(*CASES[name][:3], dims)
    in_group = ours(model)
    assert num_ours(in_group) or (name, dims) in NOT_IN_GROUPS
    runs = [lambda inputs: in_group.run(None, inputs)]
    for target in ("onnx", "polyhead"):
        fusion = polyhead.onnx.fuse(model, target=target)
        assert fusion.num_fused == 1, str(fusion)
        data = fusion.model.SerializeToString()
        session = polyhead.onnx.session(data, quiet_options()) if target == "polyhead" else ort.InferenceSession(data, quiet_options())
        runs.append(lambda inputs, session=session: session.run(None, inputs))
    runs.append(polyhead.onnx.prepare(fusion.model).run)
    for inputs in operands_of(model, dims):
        expected = [np.where(np.isnan(x), 0, x) for x in theirs(model).run(None, inputs)]  # of rows that see no key
        for run in runs:
            assert_close(run(inputs), expected, what=str(inputs["mask"].shape))


@pytest.mark.parametrize(("name", "dims"), [(name, dims) for name, case in STAYS.items() for dims in case[3]])
def test_dims_that_could_take_anothers_place(name, dims):
    model = model_of(*STAYS[name][:3], dims)
    for target in ("onnx", "polyhead"):
        fusion = polyhead.onnx.fuse(model, target=target)
        assert fusion.num_fused == 0, str(fusion)
        assert "the dims of the mask" in fusion.candidates[0].reason or name == "a program"


def test_a_mask_of_known_columns_is_not_written_out():
    model = model_of(*CASES["added"][:3], "B,1,S,T")
    for target in ("onnx", "polyhead"):
        nodes = polyhead.onnx.fuse(model, target=target).model.graph.node
        assert [node.op_type for node in nodes] == ["Transpose", "Attention"]
        assert not any(attribute.name == "mask_broadcasts" for node in nodes for attribute in node.attribute)


def test_one_column_is_for_the_first_key_where_nobody_says_otherwise():
    """ONNX's own meaning, which our operator keeps."""
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "polyhead": 1]>
      g (float[2,4,5,8] q, float[2,4,6,8] k, float[2,4,6,8] v, bool[1,1] mask) => (float[a,b,c,d] out) { out = polyhead.Attention(q, k, v, mask) }""")
    rng = np.random.default_rng(0)
    q, k, v = (rng.standard_normal((2, 4, n, 8)).astype(np.float32) for n in (5, 6, 6))
    inputs = {"q": q, "k": k, "v": v, "mask": np.ones((1, 1), bool)}
    for run in (polyhead.onnx.prepare(model).run, lambda inputs: ours(model).run(None, inputs)):
        assert_close(run(inputs), [np.broadcast_to(v[:, :, :1], q.shape)])
