"""Decoders with a cache: polyhead.onnx.fuse takes the joining of earlier keys with new ones into the operator."""

import re

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: what is fused is not run")
from onnx_changes import change_dim, change_node  # noqa: E402
from onnxruntime_test import assert_close, ours, quiet_options, theirs  # noqa: E402

import polyhead.onnx  # noqa: E402

B, G, D = 2, 2, 8
JOINED = "present_key = Concat<axis = 2>(past_key, key)  present_value = Concat<axis = -2>(past_value, value)"
SCORES = """
  key_t = Transpose<perm = [0, 1, 3, 2]>(present_key)
  product = MatMul(query, key_t)
  root = Constant<value = float {3.0}>()
  scores = Div(product, root)"""
OUT = " weights = Softmax<axis = -1>(masked)  out = MatMul(weights, present_value)"
# Places of keys, in dims [1, T], and of queries, [S, 1], which stand behind the past's keys.
COUNTS = """
  zero = Constant<value = int64 {0}>()  one = Constant<value = int64 {1}>()  first = Constant<value_ints = [0]>()  last = Constant<value_ints = [1]>()
  past_shape = Shape(past_key)  new_shape = Shape(key)  two = Constant<value = int64 {2}>()
  P = Gather<axis = 0>(past_shape, two)  S = Gather<axis = 0>(new_shape, two)  T = Add(P, S)
  all = Range(zero, T, one)  columns = Unsqueeze(all, first)"""
ROWS = " behind = Range(P, T, one)  rows = Unsqueeze(behind, last)"
ROWS_FROM_ZERO = " from_zero = Range(zero, S, one)  rows = Unsqueeze(from_zero, last)"
HIDE = " fill = Constant<value = float {-inf}>()  masked = Where(visible, scores, fill)"
CAUSAL = COUNTS + ROWS + " visible = LessOrEqual(columns, rows)"
WINDOW = CAUSAL.replace("visible", "before") + """
  three = Constant<value = int64 {3}>()  least = Sub(rows, three)  after = GreaterOrEqual(columns, least)  visible = And(before, after)"""
PADDING = CAUSAL.replace("visible", "before") + " visible = And(before, padding)"
PLAIN = " masked = Identity(scores)"
OTHER_DIMS = """
  new_key = Transpose<perm = [0, 2, 1, 3]>(key)  joined_key = Concat<axis = 1>(late_key, new_key)
  new_value = Transpose<perm = [0, 2, 1, 3]>(value)  joined_value = Concat<axis = 1>(late_value, new_value)
  present_key = Transpose<perm = [0, 2, 1, 3]>(joined_key)  present_value = Transpose<perm = [0, 2, 1, 3]>(joined_value)"""
OUTSIDE = 'keys that "present_key" (Concat) joins outside: '
OF_ITSELF = OUTSIDE + 'the attention reads "visible", which is made of "present_key" or its shape'
# The words of the report, for each target; OUTSIDE: whatever the masks are, the keys are joined by the graph.
CASES = {
    "plain": (JOINED + SCORES + PLAIN + OUT, "a cache", "a cache"),
    "causal": (JOINED + SCORES + CAUSAL + HIDE + OUT, "a cache, causal", "a cache, causal"),
    "window": (JOINED + SCORES + WINDOW + HIDE + OUT, "a cache", "a cache, causal, a window of 3 keys to the left"),
    "causal, the past added": (JOINED + SCORES + CAUSAL.replace("behind = Range(P, T, one)", "from_zero = Range(zero, S, one)  behind = Add(from_zero, P)") + HIDE + OUT,
                               "a cache, causal", "a cache, causal"),
    "padding": (JOINED + SCORES + PADDING + HIDE + OUT, "a cache", "a cache"),
    "places from 0": (JOINED + SCORES + COUNTS + ROWS_FROM_ZERO + " visible = LessOrEqual(columns, rows)" + HIDE + OUT,
                      "its diagonal depends on sizes", "its diagonal depends on sizes"),
    "shape of what is joined": (JOINED + SCORES + CAUSAL.replace("T = Add(P, S)", "joined = Shape(present_key)  T = Gather<axis = 0>(joined, two)") + HIDE + OUT, OF_ITSELF, OF_ITSELF),
    "shape of the scores": (JOINED + SCORES + CAUSAL.replace("T = Add(P, S)", "of_scores = Shape(scores)  three_ = Constant<value = int64 {3}>()  T = Gather<axis = 0>(of_scores, three_)") + HIDE + OUT, OF_ITSELF, OF_ITSELF),
    "new ones first": (JOINED.replace("past_key, key", "key, past_key").replace("past_value, value", "value, past_value") + SCORES + PLAIN + OUT, OUTSIDE + '"past_key" is not known to hold one key for each query', OUTSIDE + '"past_key" is not known to hold one key for each query'),
    "what is past is computed": ("doubled = Add(past_key, past_key) " + JOINED.replace("past_key, key", "doubled, key") + SCORES + PLAIN + OUT, OUTSIDE + '"doubled" is computed, by "doubled" (Add)', OUTSIDE + '"doubled" is computed, by "doubled" (Add)'),
    "keys alone": (JOINED.replace("past_value, value", "past_value, value, value") + SCORES.replace("present_key)", "long)").replace("key_t =", "long = Concat<axis = 2>(present_key, key)  key_t =", 1) + PLAIN + OUT, OUTSIDE.replace("present_key", "long") + '"present_key" is computed, by "present_key" (Concat)', OUTSIDE.replace("present_key", "long") + '"present_key" is computed, by "present_key" (Concat)'),
    "values of other queries": (JOINED + SCORES + PLAIN + OUT + " again = MatMul(weights, present_value)  other = Softmax<axis = -1>(again)", OUTSIDE + "its scores or weights are read by others too", OUTSIDE + "its scores or weights are read by others too"),
    "three parts": (JOINED.replace("past_key, key", "past_key, key, nothing").replace("past_value, value", "past_value, value, nothing") + SCORES + PLAIN + OUT,
                    OUTSIDE + "it joins 3 tensors, must be two", OUTSIDE + "it joins 3 tensors, must be two"),
    "a constant past": ("prefix = Constant<value = float[2,2,1,8] {" + ", ".join(["0.5"] * 32) + "}>() " + JOINED.replace("past_key, key", "prefix, key").replace("past_value, value", "prefix, value") + SCORES + PLAIN + OUT,
                        OUTSIDE + '"prefix" is a constant', OUTSIDE + '"prefix" is a constant'),
    "values alone are as long": (JOINED.replace("present_value = Concat<axis = -2>(past_value, value)", "present_value = Identity(all_values)") + SCORES + PLAIN + OUT,
                                 OUTSIDE + "the values are not joined like them", OUTSIDE + "the values are not joined like them"),
    "keys that are the values": (JOINED + (SCORES + PLAIN + OUT).replace("present_key", "present_value"), OUTSIDE.replace("present_key", "present_value") + "they are the values too", OUTSIDE.replace("present_key", "present_value") + "they are the values too"),
    "other dims": (OTHER_DIMS + SCORES + PLAIN + OUT, *[OUTSIDE.replace("present_key", "joined_key") + "their dims are not [batch, heads, sequence, dim]"] * 2),
}  # fmt: skip

# The past's keys and the new ones are multiplied apart, and so are the weights with both's values.
COUNTED = COUNTS + "  P1 = Unsqueeze(P, first)  S1 = Unsqueeze(S, first)  sizes = Concat<axis = 0>(P1, S1)"
APART = """
  past_t = Transpose<perm = [0, 1, 3, 2]>(past_key)  new_t = Transpose<perm = [0, 1, 3, 2]>(key)
  s1 = MatMul(query, past_t)  s2 = MatMul(query, new_t)  both = Concat<axis = -1>(s1, s2)
  root = Constant<value = float {3.0}>()  scores = Div(both, root)"""
PARTS = " weights = Softmax<axis = -1>(masked)  w1, w2 = Split<axis = -1>(weights, sizes)"
TOGETHER = PARTS + "  o1 = MatMul(w1, past_value)  o2 = MatMul(w2, value)  out = Add(o1, o2)"
BY_SLICES = """ weights = Softmax<axis = -1>(masked)  minus = Constant<value_ints = [-1]>()  three_ = Constant<value_ints = [3]>()  T1 = Add(P1, S1)
  w1 = Slice(weights, first, P1, three_)  w2 = Slice(weights, P1, T1, three_)  o1 = MatMul(w1, past_value)  o2 = MatMul(w2, value)  out = Add(o2, o1)"""
SCALED = APART.replace("s1 = ", "z1 = ").replace("s2 = ", "root = Constant<value = float {3.0}>()  z2 = ").replace("both =", "s1 = Div(z1, root)  s2 = Div(z2, root)  scores =").rpartition("\n")[0]
APART_CASES = {
    "plain": (COUNTED + APART + PLAIN + TOGETHER, "a cache"),
    "causal": (CAUSAL.replace(COUNTS, COUNTED) + APART + HIDE + TOGETHER, "a cache, causal"),
    "padding": (PADDING.replace(COUNTS, COUNTED) + APART + HIDE + TOGETHER, "a cache"),
    "by slices": (COUNTED + APART + PLAIN + BY_SLICES, "a cache"),
    "scaled apart": (COUNTED + SCALED + PLAIN + TOGETHER, "a cache"),
    "new ones first": (COUNTED.replace("(P1, S1)", "(S1, P1)") + APART.replace("(s1, s2)", "(s2, s1)") + PLAIN + TOGETHER.replace("w1, w2", "w2, w1"), "is not known to hold one key for each query"),
    "keys transposed in the cache": (COUNTED + APART.replace("(past_key)", "(other_key)").replace("past_t =", "other_key = Identity(past_key)  past_t =") + PLAIN + TOGETHER, '"other_key" is computed'),
    "other dims": (COUNTED + APART.replace("past_t = Transpose<perm = [0, 1, 3, 2]>(past_key)", "past_t = Transpose<perm = [0, 2, 3, 1]>(late_key)") + PLAIN + TOGETHER, "their dims are not [batch, heads, sequence, dim]"),
}  # fmt: skip
NOT_APART = {
    "scales differ": (COUNTED + SCALED.replace("Div(z2, root)", "Mul(z2, root)") + PLAIN + TOGETHER, '"scores" (Concat) joins the scores with others: they are scaled by 0.333333 and by 3'),
    "queries differ": (COUNTED + APART.replace("MatMul(query, new_t)", "MatMul(doubled, new_t)").replace("s1 =", "doubled = Add(query, query)  s1 =") + PLAIN + TOGETHER, "they are products with different queries"),
    "scores are read": (COUNTED + APART + PLAIN + TOGETHER + "  other = Softmax<axis = -1>(s2)", '"s2" is read by others too'),
    "masked apart": (COUNTED + APART.replace("both = Concat<axis = -1>(s1, s2)", "s3 = Relu(s2)  both = Concat<axis = -1>(s1, s3)") + PLAIN + TOGETHER, '"both" (Concat) joins the scores with others'),
    "outputs are weighted": (COUNTED + APART + PLAIN + TOGETHER.replace("Add(o1, o2)", "Mul(o1, o2)"), "no product with values follows the softmax"),
    "a part is left out": (COUNTED + APART + PLAIN + PARTS + "  o1 = MatMul(w1, past_value)  o2 = MatMul(w1, past_value)  out = Add(o1, o2)", "no product with values follows the softmax"),
    "weights are read": (COUNTED + APART + PLAIN + TOGETHER + "  other = Softmax<axis = -1>(w2)", "no product with values follows the softmax"),
    "another axis": (COUNTED + APART.replace("Concat<axis = -1>(s1, s2)", "Concat<axis = -2>(s1, s1)").replace("s2 = MatMul(query, new_t)  ", "") + PLAIN + " weights = Softmax<axis = -1>(masked)  out = MatMul(weights, past_value)", '"both" (Concat) joins the scores with others'),
}  # fmt: skip


MORE = {
    "padding": "bool[2,1,1,T]", "nothing": "float[2,2,0,8]", "all_values": "float[2,2,L,8]", "late_key": "float[2,P,2,8]", "late_value": "float[2,P,2,8]",
}  # fmt: skip


def model_of(nodes):
    inputs = {"query": "float[2,2,S,8]", "key": "float[2,2,S,8]", "value": "float[2,2,S,8]", "past_key": "float[2,2,P,8]", "past_value": "float[2,2,P,8]"}
    inputs |= {name: told for name, told in MORE.items() if re.search(rf"\b{name}\b", nodes)}
    outputs = ["out"] + [name for name in ("present_key", "present_value", "other") if f"{name} =" in nodes]
    told = ", ".join(f"{kind} {name}" for name, kind in inputs.items())
    statements = re.sub(r"\s+(?=[A-Za-z]\w*(?:, \w+)* = [A-Z])", "\n", " " + nodes.strip())
    results = ", ".join(f"float[a,b,c,d] {name}" for name in outputs)
    return onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 18]> g ({told}) => ({results}) {{{statements}\n}}')


def operands(model, S, P):
    rng = np.random.default_rng(S + 10 * P)
    shapes = {"query": (B, G, S, D), "key": (B, G, S, D), "value": (B, G, S, D), "past_key": (B, G, P, D), "past_value": (B, G, P, D)}
    arrays = {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}
    arrays["padding"] = np.ones((B, 1, 1, S + P), bool)
    arrays["padding"][1, ..., : P // 2] = False
    arrays["nothing"] = np.empty((B, G, 0, D), np.float32)
    arrays["all_values"] = rng.standard_normal((B, G, S + P, D)).astype(np.float32)
    arrays["late_key"], arrays["late_value"] = (arrays[name].transpose(0, 2, 1, 3).copy() for name in ("past_key", "past_value"))
    return {value.name: arrays[value.name] for value in model.graph.input}


def assert_fused(model, check, sizes, what):
    """Both targets' fusion, given to `check`, and a session of the model itself have the numbers that the model has."""
    sessions = [ours(model)]
    for target in ("onnx", "polyhead"):
        fusion = polyhead.onnx.fuse(model, target=target)
        assert fusion.num_fused == 1, str(fusion)
        check(fusion, target)
        data = fusion.model.SerializeToString()
        sessions.append(polyhead.onnx.session(data, quiet_options()) if target == "polyhead" else ort.InferenceSession(data, quiet_options()))
    for S, P in sizes:
        inputs = operands(model, S, P)
        expected = theirs(model).run(None, inputs)
        for session in sessions:
            assert_close(session.run(None, inputs), expected, what=f"{what} {S} {P}")


def attention_of(fusion):
    (node,) = [node for node in fusion.model.graph.node if node.op_type == "Attention"]
    return node


@pytest.mark.parametrize("name", CASES)
def test_caches(name):
    nodes, *words = CASES[name]
    model = model_of(nodes)

    def check(fusion, target):
        said = words[target == "polyhead"]
        pattern = fusion.candidates[0].pattern
        is_outside = said.startswith("keys that")
        assert ("a cache" in pattern) != is_outside and said in pattern, pattern
        joins, kept = ({node.output[0] for node in each.graph.node if node.op_type == "Concat"} for each in (model, fusion.model))
        assert joins & kept == (joins if is_outside else set()), str(fusion)
        if "causal" in said:
            assert attention_of(fusion).input[3] == ""  # no mask is left

    assert_fused(model, check, ((3, 5), (1, 6), (4, 0), (2, 1)), name)


@pytest.mark.parametrize("name", APART_CASES)
def test_products_apart(name):
    """Scores against the past's keys and against new ones, in two products each: one attention."""
    nodes, said = APART_CASES[name]

    def check(fusion, target):
        assert said in fusion.candidates[0].pattern, str(fusion)
        kinds = [node.op_type for node in fusion.model.graph.node]
        assert not {"MatMul", "Split", "Softmax", "Slice"} & set(kinds), kinds
        assert "joined" not in "".join(kinds) and ("a cache" not in said or "past_key" in attention_of(fusion).input)

    assert_fused(model_of(nodes), check, ((3, 5), (1, 6), (2, 1)), name)


@pytest.mark.parametrize("name", NOT_APART)
def test_products_apart_that_stay(name):
    nodes, reason = NOT_APART[name]
    model = model_of(nodes)
    for target in ("onnx", "polyhead"):
        fusion = polyhead.onnx.fuse(model, target=target)
        assert fusion.num_fused == 0 and any(reason in each.reason for each in fusion.candidates), str(fusion)
        assert fusion.model.SerializeToString() == model.SerializeToString()


def test_score_programs_have_no_cache():
    nodes = JOINED + SCORES + " two_ = Constant<value = float {2.0}>()  bent = Tanh(scores)  masked = Pow(bent, two_)" + OUT
    (candidate,) = polyhead.onnx.fuse(model_of(nodes), target="polyhead").candidates
    assert OUTSIDE + "a score program counts the keys that it is given" in candidate.pattern


def test_layers_that_share_a_cache():
    """The first joins, and the second reads what it gives."""
    nodes = JOINED + SCORES + PLAIN + OUT.replace("out =", "between =")
    second = (SCORES + PLAIN + OUT).replace("query", "between")
    for word in ("key_t", "product", "root", "scores", "masked", "weights"):
        second = re.sub(rf"\b{word}\b", f"{word}_2", second)
    model = model_of(nodes + second)
    for target in ("onnx", "polyhead"):
        fusion = polyhead.onnx.fuse(model, target=target)
        assert [("a cache" in each.pattern) for each in fusion.candidates] == [True, False], str(fusion)
        assert OUTSIDE + "another attention joins them" in fusion.candidates[1].pattern
        session = polyhead.onnx.session(fusion.model.SerializeToString(), quiet_options())
        inputs = operands(model, 2, 5)
        assert_close(session.run(None, inputs), theirs(model).run(None, inputs))


def test_decoders_that_are_changed_by_chance():
    """Whatever fuses of decoders with a node or a dim that is another has the numbers that it had."""
    rng = np.random.default_rng(0)
    nodes = [case[0] for cases in (CASES, APART_CASES, NOT_APART) for case in cases.values()]
    fused = 0
    for _ in range(400):
        model = model_of(nodes[rng.integers(len(nodes))])
        name, place = change_dim(model, rng) if rng.random() < 0.5 else change_node(model, rng) or ("", 0)
        sizes = (3, 5) if rng.random() < 0.5 else (1, 6)
        inputs = operands(model, *sizes)
        if name and inputs[name].shape[place]:
            inputs[name] = inputs[name].take([0], axis=place)
        try:
            expected = theirs(model).run(None, inputs)
        except Exception:  # shapes that do not fit
            continue
        for target in ("onnx", "polyhead"):
            fusion = polyhead.onnx.fuse(model, target=target)
            if not fusion.num_fused:
                continue
            try:
                got = polyhead.onnx.session(fusion.model.SerializeToString(), quiet_options()).run(None, inputs)
            except Exception as error:  # one size for another's: told, and no wrong number
                assert name and ("polyhead" in str(error) or "Attention" in str(error)), f"{error} {fusion}"
                continue
            fused += 1
            for a, b in zip(expected, got, strict=True):
                assert a.shape == b.shape
                np.testing.assert_allclose(b, np.where(np.isnan(a), 0, a), rtol=1e-4, atol=1e-4 * max(1, np.nanmax(np.abs(a), initial=0)), err_msg=str(fusion))
    assert fused >= 100
