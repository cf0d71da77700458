"""polyhead.onnx.fuse: attention is found however a model says it, what only looks alike stays, and the numbers stay too."""

import os
import re
import warnings

import numpy as np
import pytest

import polyhead

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
from onnx.backend.test.case.node import collect_testcases  # noqa: E402
from onnx_fuse_cases import (  # noqa: E402
    FILL, INPUTS, MASKED, NEAR_MISSES, NO_PROGRAMS, NO_SINKS, PLACES, PLACES_AS_OPTIONS, PLACES_AS_TENSORS, PROGRAMS, SCALE, SINKS, TAIL, VARIANTS, B, S, T,
)  # fmt: skip

import polyhead.onnx  # noqa: E402

MORE = {"qt": ("float[B,4,8,S]", (B, 4, 8, S)), "vt": ("float[B,4,8,S]", (B, 4, 8, S))}
OUTPUTS = ("weights", "scores", "other")
NO_ATTENTION = ("class_softmax", "additive", "pooled", "gate")  # of the near-misses: no two products are around the softmax


def model_of(nodes, opset=18):
    """The nodes in a graph of the inputs that they read; `out`, and what is called weights, scores or other, are outputs."""
    inputs = {name: told for name, told in (INPUTS | MORE).items() if re.search(rf"[(,]\s*{name}\s*[,)]", nodes)}
    told = ", ".join(f"{kind} {name}" for name, (kind, _) in inputs.items())
    dims = {3: "float[e,f,h]", 4: "float[e,f,h,i]"}
    outputs = [f"{dims[3 if 'o4' in nodes or 'q3' in nodes else 4]} out"]
    outputs += [f"{dims[3 if 'keepdims = 0' in nodes or 'q3' in nodes else 4]} {name}" for name in OUTPUTS if re.search(rf"\b{name} =", nodes)]
    statements = re.sub(r"\s+(?=[a-z]\w*(?:, \w+)* = [A-Z])", "\n", " " + nodes.strip())
    if "{2, 4, 8, 6}" in nodes or "{2, 4, 5, 6}" in nodes:  # sizes that the nodes themselves have
        told = re.sub(r"\b[BSTN]\b", lambda size: {"B": "2", "S": "5", "T": "6", "N": "8"}[size[0]], told)
    text = f'<ir_version: 8, opset_import: ["": {opset}]> g ({told}) => ({", ".join(outputs)}) {{{statements}\n}}'
    return onnx.parser.parse_model(text)


def operands(model):
    rng = np.random.default_rng(0)
    arrays = {}
    for value in model.graph.input:
        shape = (INPUTS | MORE)[value.name][1]
        arrays[value.name] = rng.standard_normal(shape).astype(np.float32)
        if value.name in ("keep", "ones"):
            visible = np.tril(np.ones((S, T)), 1) * np.ones(shape)
            arrays[value.name] = visible.astype(bool if value.name == "keep" else np.float32)
        if value.name in ("some", "hide3"):
            first = np.arange(T) == 0
            arrays[value.name] = (rng.random(shape) < 0.5) | first if value.name == "some" else (rng.random(shape) < 0.5) & ~first
        if value.name == "lens":
            arrays[value.name] = np.arange(B).reshape(shape)
    return arrays


def assert_same_numbers(before, after, inputs):
    expected = onnx.reference.ReferenceEvaluator(before).run(None, inputs)
    got = polyhead.onnx.prepare(after).run(inputs)
    for a, b in zip(expected, got, strict=True):
        np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("target", ["onnx", "polyhead"])
@pytest.mark.parametrize("name", VARIANTS)
def test_variant(name, target):
    opset, nodes = VARIANTS[name] if isinstance(VARIANTS[name], tuple) else (18, VARIANTS[name])
    model = model_of(nodes, opset)
    fusion = polyhead.onnx.fuse(model, target=target)
    assert fusion.num_fused == 1, str(fusion)
    (node,) = [node for node in fusion.model.graph.node if node.op_type == "Attention"]
    assert node.domain == ("" if target == "onnx" else "polyhead")
    assert fusion.opset == ((opset, 23) if target == "onnx" else (opset, opset))
    assert not any(node.op_type in ("Softmax", "LogSoftmax", "Exp", "MatMul", "Einsum") for node in fusion.model.graph.node)
    onnx.checker.check_model(fusion.model, full_check=target == "onnx")
    assert_same_numbers(model, fusion.model, operands(model))


def options_of(fusion):
    (node,) = [node for node in fusion.model.graph.node if node.op_type == "Attention"]
    told = {attribute.name: attribute.i for attribute in node.attribute}
    mask = node.input[3] if len(node.input) > 3 else ""
    return told.get("is_causal", 0), told.get("left_window_size"), told.get("right_window_size"), mask


@pytest.mark.parametrize("name", PLACES_AS_OPTIONS)
def test_masks_by_places_become_options(name):
    nodes, options = PLACES_AS_OPTIONS[name]
    model = model_of(nodes)
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    assert options_of(fusion) == options, str(fusion)
    assert not any(node.op_type in ("Range", "Trilu", "Where") for node in fusion.model.graph.node)
    assert_same_numbers(model, fusion.model, operands(model))
    before_windows = polyhead.onnx.fuse(model)  # opset 23
    assert options_of(before_windows)[1:3] == (None, None)
    assert before_windows.num_fused == 1
    if any(size is not None for size in options[1:3]):
        assert "ONNX has windows from opset 25 on" in before_windows.candidates[0].pattern
    else:
        assert options_of(before_windows)[0] == options[0]
    assert_same_numbers(model, before_windows.model, operands(model))


@pytest.mark.parametrize("name", PLACES_AS_TENSORS)
def test_other_masks_by_places_stay_tensors(name):
    nodes, reason = PLACES_AS_TENSORS[name]
    model = model_of(nodes)
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    assert options_of(fusion)[:3] == (0, None, None) and options_of(fusion)[3], str(fusion)
    pattern = fusion.candidates[0].pattern
    assert reason in pattern and ("stays a tensor" in pattern) == bool(reason), pattern
    assert_same_numbers(model, fusion.model, operands(model))


def test_scores_before_a_softcap_are_returned_by_our_operator():
    """ONNX Runtime 1.32 gives those behind it."""
    model = model_of(f"{SCALE} scores = MatMul(q, kt) a = Div(scores, d) t = Tanh(a) s = Mul(t, d) {TAIL}")
    assert "come before a softcap" in polyhead.onnx.fuse(model).candidates[0].reason
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    assert fusion.num_fused == 1
    assert_same_numbers(model, fusion.model, operands(model))


def test_opset_25_says_windows():
    model = model_of(PLACES_AS_OPTIONS["window"][0], 25)
    fusion = polyhead.onnx.fuse(model)
    assert options_of(fusion) == (1, 2, None, "")
    assert_same_numbers(model, fusion.model, operands(model))


def test_random_masks_by_places():
    """Comparisons of places, joined and denied at random: whatever is recognised, the numbers stay what they were."""
    rng = np.random.default_rng(0)

    def condition(name, depth):
        kind = rng.integers(4 if depth else 1)
        if kind == 0:
            left, right = rng.permutation(["r", "c"])
            shift = f"{name}k = Constant<value = int64 {{{rng.integers(-3, 4)}}}>() {name}p = Add({left}, {name}k)"
            return f"{shift} {name} = {rng.choice(['Less', 'LessOrEqual', 'Greater', 'GreaterOrEqual'])}({name}p, {right})"
        if kind == 1:
            return f"{condition(name + 'n', depth - 1)} {name} = Not({name}n)"
        a, b = condition(name + "a", depth - 1), condition(name + "b", depth - 1)
        return f"{a} {b} {name} = {rng.choice(['And', 'Or'])}({name}a, {name}b)"

    num_options = 0
    for _ in range(80):
        hides = f"first = Equal(r, i0) seen = {rng.choice(['And', 'Or'])}(seenx, first)" if rng.random() < 0.3 else "seen = Identity(seenx)"
        model = model_of(f"{FILL} {PLACES} {condition('seenx', 2)} {hides} {MASKED}")
        fusion = polyhead.onnx.fuse(model, target="polyhead")
        num_options += options_of(fusion)[:3] != (0, None, None)
        inputs = operands(model)
        (before,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
        (after,) = polyhead.onnx.prepare(fusion.model).run(inputs)
        np.testing.assert_allclose(after, np.where(np.isnan(before), 0, before), rtol=2e-5, atol=2e-6)
    assert num_options >= 15


@pytest.mark.parametrize("op, last", [("And", "seen = Identity(b60)"), ("Add", "seen = LessOrEqual(b60, i0)")])
def test_masks_that_fork_at_every_node_stay_tensors(op, last):
    """60 nodes, and 2^60 ways through them: nobody walks them all."""
    forks = " ".join(f"b{i + 1} = {op}(b{i}, b{i})" for i in range(60))
    first = "LessOrEqual(r, c)" if op == "And" else "Sub(r, c)"
    fusion = polyhead.onnx.fuse(model_of(f"{FILL} {PLACES} b0 = {first} {forks} {last} {MASKED}"), target="polyhead")
    assert options_of(fusion) == (0, None, None, "seen"), str(fusion)


def test_rows_that_a_finite_number_hides_may_be_zero():
    """unseen_rows: with "zero" a causal mask beside a padding mask becomes an option, and the rest a boolean mask."""
    model = model_of(PLACES_AS_TENSORS["finite_beside_padding"][0])
    fusion = polyhead.onnx.fuse(model, target="polyhead", unseen_rows="zero")
    assert options_of(fusion) == (1, None, None, "some")
    inputs = operands(model)
    assert_same_numbers(model, fusion.model, inputs)
    inputs["some"][1, ..., :3] = False
    (before,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    (after,) = polyhead.onnx.prepare(fusion.model).run(inputs)
    assert (after[1, :, :3] == 0).all() and (before[1, :, :3] != 0).all()
    np.testing.assert_allclose(after[1, :, 3:], before[1, :, 3:], rtol=2e-5, atol=2e-6)
    with pytest.raises(polyhead.Error, match='unseen_rows is "drop", must be "keep" or "zero"'):
        polyhead.onnx.fuse(model, unseen_rows="drop")


def test_fills_stay_finite():
    """float32's lowest number is -inf in bfloat16, and ONNX Runtime takes a type's lowest for it: a bias of either would make
    a row that it hides as a whole another one. Beside another mask a number stays nearly what it is."""
    halves = " ".join(f"{name}h = Cast<to = 16>({name})" for name in ("q", "kt", "v", "lowest", "bias"))
    for masked, fill in (("s = Where(keep, m, lowesth)", -1e30), ("n = Add(m, biash) s = Where(keep, n, lowesth)", -253 * 2.0**120)):
        fusion = polyhead.onnx.fuse(model_of(f"{FILL} {halves} m = MatMul(qh, kth) {masked} w = Softmax<axis = -1>(s) o = MatMul(w, vh) out = Cast<to = 1>(o)"))
        assert fusion.num_fused == 1
        numbers = [onnx.numpy_helper.to_array(each).astype(np.float32) for each in fusion.model.graph.initializer if each.data_type == onnx.TensorProto.BFLOAT16]
        np.testing.assert_allclose(sorted(each.item() for each in numbers), [fill, 0], rtol=2**-8)


def test_layers_share_what_their_masks_need():
    """Two attentions, one padding mask: its rows are written out once, and numbers stand once."""
    model = model_of(f"{FILL} m = MatMul(q, kt) s = Where(some, m, lowest) w = Softmax<axis = -1>(s) o = MatMul(w, v) m2 = MatMul(o, kt) s2 = Where(some, m2, lowest) w2 = Softmax<axis = -1>(s2) out = MatMul(w2, v)")
    fusion = polyhead.onnx.fuse(model)
    assert fusion.num_fused == 2
    assert [node.op_type for node in fusion.model.graph.node if node.op_type in ("Expand", "Where")] == ["Where", "Expand"]
    assert_same_numbers(model, fusion.model, operands(model))


@pytest.mark.parametrize("name", NEAR_MISSES)
def test_near_miss(name):
    nodes, reason = NEAR_MISSES[name]
    model = model_of(nodes)
    fusion = polyhead.onnx.fuse(model)
    assert fusion.num_fused == 0
    assert any(reason in candidate.reason for candidate in fusion.candidates), str(fusion)
    assert all(each.is_attention == (name not in NO_ATTENTION) for each in fusion.candidates), str(fusion)
    assert fusion.model.SerializeToString() == model.SerializeToString()


@pytest.mark.parametrize("name", PROGRAMS)
def test_score_programs(name):
    """What no option says; ONNX's operator cannot."""
    nodes, text = PROGRAMS[name]
    model = model_of(nodes)
    assert polyhead.onnx.fuse(model).num_fused == 0
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    assert fusion.num_fused == 1, str(fusion)
    (node,) = [node for node in fusion.model.graph.node if node.op_type == "Attention"]
    (told,) = [attribute.s.decode() for attribute in node.attribute if attribute.name == "score"]
    assert told == text and f"the score program {text}" in fusion.candidates[0].pattern
    assert_same_numbers(model, fusion.model, operands(model))


@pytest.mark.parametrize("name", NO_PROGRAMS)
def test_what_no_program_says_stays(name):
    nodes, reason = NO_PROGRAMS[name]
    fusion = polyhead.onnx.fuse(model_of(nodes), target="polyhead")
    assert fusion.num_fused == 0 and reason in fusion.candidates[0].reason, str(fusion)


@pytest.mark.parametrize("name", SINKS)
def test_sinks(name):
    """Our operator has an input for them, which ONNX's has not."""
    model = model_of(SINKS[name])
    assert "target polyhead takes them" in polyhead.onnx.fuse(model).candidates[0].reason
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    assert fusion.num_fused == 1 and "sinks" in fusion.candidates[0].pattern, str(fusion)
    assert not any(node.op_type in ("Concat", "Slice", "Softmax") for node in fusion.model.graph.node)
    assert_same_numbers(model, fusion.model, operands(model))


@pytest.mark.parametrize("name", NO_SINKS)
def test_what_only_looks_like_sinks_stays(name):
    nodes, reason = NO_SINKS[name]
    fusion = polyhead.onnx.fuse(model_of(nodes), target="polyhead")
    assert fusion.num_fused == 0 and reason in fusion.candidates[0].reason, str(fusion)


@pytest.mark.parametrize("name", ["split_heads", "key_transposed_twice", "packed_by_split", "key_through_3d_static"])
def test_layouts_disappear(name):
    """Of projections [B, S, H * D] the operator takes what it is: no transpose and no reshape is left."""
    fusion = polyhead.onnx.fuse(model_of(VARIANTS[name]))
    assert {node.op_type for node in fusion.model.graph.node} <= {"Attention", "Split", "Constant"}, str(fusion)


def test_scale_is_one_number():
    for name in ("scale_mul", "scale_div", "scale_on_query", "scale_on_key", "scale_root_on_both", "scale_of_a_shape"):
        (node,) = [n for n in polyhead.onnx.fuse(model_of(VARIANTS[name])).model.graph.node if n.op_type == "Attention"]
        (scale,) = [attribute.f for attribute in node.attribute if attribute.name == "scale"]
        assert scale == pytest.approx(8**-0.5, rel=1e-6), name


def test_onnxruntime_gives_the_same_numbers():
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    for name, nodes in VARIANTS.items():
        model = model_of(*reversed(nodes)) if isinstance(nodes, tuple) else model_of(nodes)
        inputs = operands(model)
        if name in ("mask_where", "mask_where_10000", "scale_of_each_head"):  # and a row that a finite number hides as a whole
            inputs["keep"][1, :, 2] = False
        run = [
            onnxruntime.InferenceSession(each.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, inputs)
            for each in (model, polyhead.onnx.fuse(model).model)
        ]
        for a, b in zip(*run, strict=True):
            np.testing.assert_allclose(b, a, rtol=2e-5, atol=2e-6, err_msg=name)


def test_onnxruntime_knows_the_dims_of_a_flat_result():
    """ONNX Runtime 1.32 takes the last one for 0 where it does not know that of value; a product behind it has none of 32 then."""
    onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed")
    joined = VARIANTS["packed_by_sizes_that_are_computed"].replace("out =", "o3 =")
    product = "one_ = Constant<value = float {1.0}>() dims = Constant<value = int64[2] {32, 32}>() ones_ = Expand(one_, dims) out = MatMul(o3, ones_)"
    fusion = polyhead.onnx.fuse(model_of(f"{joined} {product}"))
    assert fusion.num_fused == 1
    onnxruntime.InferenceSession(fusion.model.SerializeToString(), providers=["CPUExecutionProvider"])


def test_rows_that_see_no_key_are_zero():
    """As ONNX says; by -inf alone the model itself gives NaN."""
    model = model_of(VARIANTS["mask_where_inf"])
    inputs = operands(model)
    inputs["keep"][1, :, 2] = False
    (before,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    (after,) = polyhead.onnx.prepare(polyhead.onnx.fuse(model).model).run(inputs)
    assert np.isnan(before[1, :, 2]).all()
    assert (after[1, :, 2] == 0).all()
    np.testing.assert_allclose(after[0], before[0], rtol=2e-5, atol=2e-6)


@pytest.mark.parametrize("name", ["mask_where", "mask_where_10000", "mask_arithmetic"])
def test_rows_hidden_by_a_finite_number_stay_what_they_were(name):
    model = model_of(VARIANTS[name])
    inputs = operands(model)
    inputs["ones" if name == "mask_arithmetic" else "keep"][1, :, 2] = 0
    inputs["q"] *= 100  # scores that a number like -1e9 would not absorb
    (before,) = onnx.reference.ReferenceEvaluator(model).run(None, inputs)
    (after,) = polyhead.onnx.prepare(polyhead.onnx.fuse(model).model).run(inputs)
    np.testing.assert_allclose(after[1, :, 2], inputs["v"][1].mean(axis=1), rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(after, before, rtol=1e-2, atol=1e-3)


def test_the_standards_own_decompositions():
    """ONNX's cases for Attention, each in the primitive operators that define it."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        found = collect_testcases("Attention")  # of all operators, where another test of the process has asked for these
    cases = [case for case in found if case.name.startswith("test_attention_") and case.name.endswith("_expanded")]
    assert len(cases) >= 93
    for case in cases:
        fusion = polyhead.onnx.fuse(case.model, target="polyhead")
        assert fusion.num_fused == 1, f"{case.name}: {fusion}"
        runner = polyhead.onnx.prepare(fusion.model)
        half = any(kind in case.name for kind in ("fp16", "float16", "bf16"))
        for inputs, expected in case.data_sets:
            for a, b in zip(expected, runner.run(inputs), strict=True):
                a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
                np.testing.assert_allclose(b, a, rtol=0.02 if half else 1e-3, atol=0.01 if half else 1e-6, err_msg=case.name)


def test_bodies_are_searched():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18]>
        g (float[B,4,S,8] q, float[B,4,8,T] kt, float[B,4,T,8] v, bool which) => (float[B,4,S,8] out) {
          out = If (which) <
            then_branch = yes () => (float[B,4,S,8] a) { s = MatMul(q, kt) w = Softmax<axis = -1>(s) a = MatMul(w, v) },
            else_branch = no () => (float[B,4,S,8] b) { b = Neg(q) }
          >
        }""")
    fusion = polyhead.onnx.fuse(model)
    assert fusion.num_fused == 1, str(fusion)
    assert "then_branch" in fusion.candidates[0].place
    inputs = operands(model_of(VARIANTS["returned_weights"]))
    assert_same_numbers(model, fusion.model, inputs | {"which": np.array(True)})


OLD = {
    "reduce": ("m = ReduceMax<axes = [1], keepdims = 0>(q)", 17),
    "split": ("m, n = Split<axis = 1>(q)", 13),
    "squeeze": ("z = Unsqueeze<axes = [0]>(q) m = Squeeze<axes = [0]>(z)", 11),
    "sum": ("m = ReduceSum<axes = [3]>(q)", 12),
    "dropout": ("m = Dropout<ratio = 0.5>(q)", 11),
}


@pytest.mark.parametrize("name", OLD)
def test_older_operators_are_raised(name):
    nodes, opset = OLD[name]
    model = model_of(f"{nodes} other = Relu(m) s = MatMul(q, kt) w = Softmax<axis = 3>(s) out = MatMul(w, v)", opset)
    fusion = polyhead.onnx.fuse(model)
    assert fusion.opset == (opset, 23), str(fusion)
    onnx.checker.check_model(fusion.model, full_check=True)
    assert_same_numbers(model, fusion.model, operands(model))


@pytest.mark.parametrize("nodes, opset, reason", [
    ("r = Softmax<axis = 1>(q) other = Relu(r)", 11, "runs over an axis that is not known to be the last one since 13"),
    ("other = GroupNormalization<num_groups = 2>(q, s2, s2)", 18, "means something else since 21"),
    ("other = Relu(q)", 9, "the model's opset is 9, which is raised from 11 on only"),
])  # fmt: skip
def test_what_cannot_be_raised_stays(nodes, opset, reason):
    constant = "s2 = Constant<value = float[2] {1.0, 1.0}>()" if "s2" in nodes else ""
    model = model_of(f"{constant} {nodes} s = MatMul(q, kt) w = Softmax<axis = 3>(s) out = MatMul(w, v)", opset)
    fusion = polyhead.onnx.fuse(model)
    assert fusion.num_fused == 0
    assert reason in fusion.candidates[-1].reason


def test_files(tmp_path):
    model = model_of(VARIANTS["mask_padding"])
    onnx.save(model, tmp_path / "model.onnx")
    fusion = polyhead.onnx.fuse(tmp_path / "model.onnx", tmp_path / "fused.onnx", check=True)
    assert fusion.error < 1e-6
    assert onnx.load(tmp_path / "fused.onnx") == fusion.model
    assert "1 fused, " in str(fusion)
    with pytest.raises(polyhead.Error, match='target is "ort", must be "onnx" or "polyhead"'):
        polyhead.onnx.fuse(model, target="ort")
    (tmp_path / "half.onnx").write_bytes((tmp_path / "model.onnx").read_bytes()[:-9])
    with pytest.raises(polyhead.Error, match="truncated"):
        polyhead.onnx.fuse(tmp_path / "half.onnx", tmp_path / "none.onnx")
    assert not (tmp_path / "none.onnx").exists()


def test_names_that_are_no_text(tmp_path):
    """A name is bytes: where they are not UTF-8 the report and errors show what can be shown, and the model keeps them."""
    encoded = model_of(VARIANTS["mask_padding"]).SerializeToString().replace(b"\x01w", b"\x01\xff")
    folder = tmp_path / os.fsdecode(b"\xfe")
    folder.mkdir()
    (folder / "model.onnx").write_bytes(encoded)
    fusion = polyhead.onnx.fuse(folder / "model.onnx", folder / "fused.onnx")
    assert [(each.place, each.fused) for each in fusion.candidates] == [("\ufffd", True)]
    stays = encoded.replace(b"\x01s", b"\x01\xff").replace(b"\x01m", b"\x01\xff")
    (folder / "model.onnx").write_bytes(stays)
    with pytest.raises(polyhead.Error, match='computes "\ufffd" twice'):
        polyhead.onnx.fuse(folder / "model.onnx")


def test_external_data(tmp_path):
    """Stays where it is; the new model has to stand beside it."""
    model = model_of(VARIANTS["mask_added"])
    weight = onnx.numpy_helper.from_array(np.ones((4, 300), np.float32), "weight")
    model.graph.initializer.append(weight)
    onnx.save(model, tmp_path / "model.onnx", save_as_external_data=True, location="model.data", size_threshold=16)
    fusion = polyhead.onnx.fuse(tmp_path / "model.onnx", tmp_path / "fused.onnx")
    assert fusion.num_fused == 1
    again = onnx.load(tmp_path / "fused.onnx")
    assert (onnx.numpy_helper.to_array(again.graph.initializer[0]) == 1).all()
    (tmp_path / "other").mkdir()
    with pytest.raises(polyhead.Error, match="where the model's external data is"):
        polyhead.onnx.fuse(tmp_path / "model.onnx", tmp_path / "other" / "fused.onnx")
    with pytest.raises(polyhead.Error, match="cannot be found from bytes alone"):
        polyhead.onnx.fuse(onnx.load(tmp_path / "model.onnx", load_external_data=False))
