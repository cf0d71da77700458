"""Models in ONNX Runtime with our library: the standard's cases, attention that is written out, bad inputs, many threads."""

import concurrent.futures
import pathlib
import subprocess
import sys
import warnings

import numpy as np
import pytest

import polyhead

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models do not run in ONNX Runtime")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: its sessions are left out")
from onnx import TensorProto, helper  # noqa: E402
from onnx.backend.test.case.node import collect_testcases  # noqa: E402
from onnx_fuse_test import NEAR_MISSES, NO_PROGRAMS, NO_SINKS, PROGRAMS, SINKS, VARIANTS, model_of, operands  # noqa: E402

import polyhead.onnx  # noqa: E402

BENCH = pathlib.Path(__file__).parents[2] / "bench" / "ort_models.py"
VERSION = tuple(int(part) for part in ort.__version__.split(".")[:2])
needs_provider = pytest.mark.skipif(VERSION < (1, 24), reason=f"onnxruntime {ort.__version__} cannot tell what is ours")
# What nobody can do in a group of nodes: multiply its output by a number, or repeat a mask. And ONNX Runtime does not tell a
# number that is an input from a tensor of any dims.
NOT_IN_GROUPS = {"scale_folded_into_weights", "weights_negated", "mask_of_windows", "scale_of_an_input"}


def quiet_options(threads=1):
    options = ort.SessionOptions()
    options.intra_op_num_threads = threads
    options.log_severity_level = 4
    return options


def theirs(model):
    return ort.InferenceSession(model.SerializeToString(), quiet_options(), providers=["CPUExecutionProvider"])


def ours(model, threads=1):
    options = quiet_options(threads)
    options.add_session_config_entry("session.record_ep_graph_assignment_info", "1")
    return polyhead.onnx.session(model.SerializeToString(), options, layers=True)


def by_custom_ops(model, domains="all"):
    options = quiet_options(2)
    if domains:
        options.add_session_config_entry("polyhead.domains", domains)
    options.register_custom_ops_library(polyhead.onnx.library_path())
    return ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def num_ours(session):
    parts = session.get_provider_graph_assignment_info()
    return sum(len(part.get_nodes()) for part in parts if part.ep_name == "polyhead")


def run(session, inputs):
    """By name or in order; bfloat16 goes in and out as ml_dtypes has it, which onnxruntime's arrays do not know."""
    binding = session.io_binding()
    if not isinstance(inputs, dict):
        inputs = dict(zip((value.name for value in session.get_inputs()), inputs, strict=True))
    for name, array in inputs.items():
        array = np.ascontiguousarray(array)
        if array.dtype.name == "bfloat16":
            array = ort.OrtValue.ortvalue_from_numpy_with_onnx_type(array.view(np.uint16), TensorProto.BFLOAT16)
        else:
            array = ort.OrtValue.ortvalue_from_numpy(array)
        binding.bind_ortvalue_input(name, array)
    for value in session.get_outputs():
        binding.bind_output(value.name)
    session.run_with_iobinding(binding)
    return [array_of(value) for value in binding.get_outputs()]


def array_of(value):
    if value.element_type() != TensorProto.BFLOAT16:
        return value.numpy()
    import ctypes

    import ml_dtypes

    count = int(np.prod(value.shape()))
    bits = np.ctypeslib.as_array((ctypes.c_uint16 * count).from_address(value.data_ptr()))
    return bits.copy().view(ml_dtypes.bfloat16).reshape(value.shape())


def assert_close(got, expected, rtol=1e-5, atol=2e-6, what=""):
    for a, b in zip(got, expected, strict=True):
        assert a.shape == b.shape, what
        np.testing.assert_allclose(a.astype(np.float64), b.astype(np.float64), rtol=rtol, atol=atol, err_msg=what)


def normal(rng, *shape, dtype=np.float32):
    return rng.standard_normal(shape).astype(dtype)


# --- the standard's cases ---


def standard_cases():
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # of other operators' cases, which are made at the same time
        found = collect_testcases("Attention")
    return [case for case in found if case.name.startswith("test_attention_") and not case.name.endswith("_expanded")]


def test_standard_cases_run():
    """As custom operators and by the provider."""
    cases = standard_cases()
    assert len(cases) >= 93  # onnx 1.23: 69 of opset 23, 13 of 24, 11 of 25
    for case in cases:
        half = any(kind in case.name for kind in ("fp16", "float16", "bf16"))
        close = {"rtol": 0.02, "atol": 0.01} if half else {"rtol": 1e-3, "atol": 1e-6}
        for inputs, expected in case.data_sets:
            assert_close(run(by_custom_ops(case.model), inputs), expected, **close, what=case.name)
            if VERSION >= (1, 24):
                session = ours(case.model)
                assert num_ours(session) == 1, case.name
                assert_close(run(session, inputs), expected, **close, what=case.name)


@pytest.mark.parametrize("mode", range(4))
@pytest.mark.parametrize("kind", ["float", "float16", "double"])
def test_returned_scores(mode, kind):
    """Beside the definition, with grouped heads, a mask that is shorter than the keys, windows, on two threads."""
    # onnx's reference caps the scores of mode 0 too, against its own text; ONNX Runtime and we do not.
    softcap = 0.0 if mode == 0 else 2.0
    text = f"""<ir_version: 12, opset_import: ["": 25]> g ({kind}[B,4,S,16] q, {kind}[B,2,T,16] k, {kind}[B,2,T,16] v, bool[S,M] m)
      => ({kind}[B,4,S,16] y, {kind}[B,4,S,T] scores) {{
      y, , , scores = Attention<qk_matmul_output_mode = {mode}, softcap = {softcap}, is_causal = 1, left_window_size = 20>(q, k, v, m)
    }}"""
    model = onnx.parser.parse_model(text)
    dtype = helper.tensor_dtype_to_np_dtype(model.graph.input[0].type.tensor_type.elem_type)
    rng = np.random.default_rng(mode)
    inputs = {name: normal(rng, 2, heads, 37, 16, dtype=dtype) for name, heads in (("q", 4), ("k", 2), ("v", 2))}
    inputs["m"] = rng.random((37, 30)) < 0.8
    exact = onnx.reference.ReferenceEvaluator(model).run(None, {
        name: x if x.dtype == bool else x.astype(np.float64) for name, x in inputs.items()})  # fmt: skip
    options = quiet_options(2)
    options.register_custom_ops_library(polyhead.onnx.library_path())
    session = ort.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    half = {"rtol": 2e-3, "atol": 2e-3} if kind == "float16" else {}
    assert_close(session.run(None, inputs), exact, **half)


@pytest.mark.parametrize("domains", [None, "polyhead", "all"])
def test_custom_operators_beside_those_that_the_optimizer_puts_in(domains):
    """A transposed product becomes com.microsoft's FusedMatMul, which nobody finds where that domain is ours."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 21]> g (float[2,3,4] x, float[2,3,5] y) => (float[2,4,5] z) {
      t = Transpose<perm = [0, 2, 1]>(x)
      z = MatMul(t, y)
    }""")
    if domains == "all":
        with pytest.raises(Exception, match="FusedMatMul"):
            by_custom_ops(model, domains)
        return
    x, y = np.ones((2, 3, 4), np.float32), np.ones((2, 3, 5), np.float32)
    assert_close(by_custom_ops(model, domains).run(None, {"x": x, "y": y}), [np.full((2, 4, 5), 3.0)])


# --- attention that is written out ---


@needs_provider
@pytest.mark.parametrize("name", VARIANTS)
def test_written_out(name):
    opset, nodes = VARIANTS[name] if isinstance(VARIANTS[name], tuple) else (18, VARIANTS[name])
    model = model_of(nodes, opset)
    inputs = operands(model)
    session = ours(model, threads=2)
    assert (num_ours(session) == 0) == (name in NOT_IN_GROUPS)
    assert_close(session.run(None, inputs), theirs(model).run(None, inputs), rtol=2e-5)


@pytest.mark.parametrize("name", SINKS | PROGRAMS)
def test_what_our_operator_alone_says(name):
    """Sinks and score programs, by the provider, which cannot say sinks of a constant, and by our operator in a fused model."""
    model = model_of(SINKS[name] if name in SINKS else PROGRAMS[name][0])
    inputs = operands(model)
    expected = theirs(model).run(None, inputs)
    fused = polyhead.onnx.fuse(model, target="polyhead").model
    assert_close(by_custom_ops(fused).run(None, inputs), expected, rtol=2e-5)
    if VERSION >= (1, 24):
        session = ours(model)
        of_a_number = name in PROGRAMS and "[]" in PROGRAMS[name][1]  # ONNX Runtime does not tell it from a tensor of any dims
        assert (num_ours(session) == 0) == ("static" in name or of_a_number)
        assert_close(session.run(None, inputs), expected, rtol=2e-5)


def test_sinks_that_are_not_one_for_each_head():
    model = onnx.parser.parse_model("""<ir_version: 8, opset_import: ["": 18, "polyhead": 1]>
      g (float[B,4,S,8] q, float[B,2,T,8] k, float[B,2,T,8] v, float[N] sinks) => (float[B,4,S,8] out) {
        out = polyhead.Attention(q, k, v, , , , , sinks)
      }""")
    rng = np.random.default_rng(0)
    inputs = {"q": normal(rng, 1, 4, 5, 8), "k": normal(rng, 1, 2, 6, 8), "v": normal(rng, 1, 2, 6, 8), "sinks": normal(rng, 3)}
    with pytest.raises(Exception, match=r"sink_logits is float32 \[3\], must be float \[4\]"):
        by_custom_ops(model).run(None, inputs)


@needs_provider
def test_what_only_looks_alike_stays():
    for name, (nodes, _) in (NEAR_MISSES | NO_SINKS | NO_PROGRAMS).items():
        if name in ("training_dropout", "mask_of_booleans_added") or name in PROGRAMS:
            continue  # ONNX Runtime takes the dropout away before anybody is asked, and refuses the booleans
        model = model_of(nodes)
        assert num_ours(ours(model)) == 0, name


def attention_text(dtype=TensorProto.FLOAT):
    """Scores, mask and softmax as an exporter of opset 17 writes them."""
    return f"""
      kt = Transpose<perm = [0, 1, 3, 2]>(k)
      s = MatMul(q, kt)
      four = Constant<value = float {{4.0}}>()
      c = Cast<to = {int(dtype)}>(four)
      scaled = Div(s, c)
      masked = Add(scaled, bias)
      p = Softmax<axis = -1>(masked)
      y = MatMul(p, v)"""


def qkv(rng, B=2, H=4, S=33, D=16, dtype=np.float32):
    arrays = {name: normal(rng, B, H, S, D, dtype=dtype) for name in "qkv"}
    return arrays | {"bias": normal(rng, B, 1, S, S, dtype=dtype)}


INPUTS = "{t}[B,4,S,16] q, {t}[B,4,S,16] k, {t}[B,4,S,16] v, {t}[B,1,S,S] bias"


@needs_provider
def test_outputs_that_nobody_reads():
    """ONNX Runtime's groups do not have them."""
    inputs = {name: normal(np.random.default_rng(0), 2, 4, length, 8) for name, length in (("q", 5), ("k", 5), ("v", 5), ("pk", 3), ("pv", 3))}
    head = '<ir_version: 8, opset_import: ["": 23]> g (float[2,4,5,8] q, float[2,4,5,8] k, float[2,4,5,8] v, float[2,4,3,8] pk, float[2,4,3,8] pv) =>'
    model = onnx.parser.parse_model(f"{head} (float[a,b,c,d] out) {{ out, keys, values = Attention(q, k, v, , pk, pv) }}")
    session = ours(model)
    assert num_ours(session) == 1
    assert_close(session.run(None, inputs), theirs(model).run(None, inputs))
    # An attention that is computed for nothing, or for its scores alone, stays.
    for result in ("q", "s"):
        model = onnx.parser.parse_model(f"""{head} (float[a,b,c,d] out) {{
          kt = Transpose<perm = [0, 1, 3, 2]>(k)
          s = MatMul(q, kt)
          w = Softmax<axis = -1>(s)
          o = MatMul(w, v)
          out = Relu({result})
        }}""")
        assert num_ours(ours(model)) == 0
        assert_close(ours(model).run(None, inputs), theirs(model).run(None, inputs))


@needs_provider
@pytest.mark.parametrize("form", ["Attention", "flat", "written out"])
def test_shapes_that_come_again(form):
    """Of a shape that has come before, pointers alone are others; the least change of a shape or a dtype is another one."""
    nodes = {
        "Attention": "out = Attention<is_causal = 1>(q, k, v, mask)",
        "flat": "out = Attention<q_num_heads = 2, kv_num_heads = 2>(q, k, v, mask)",
        "written out": "kt = Transpose<perm = [0, 1, 3, 2]>(k)\n s = MatMul(q, kt)\n a = Add(s, mask)\n w = Softmax<axis = -1>(a)\n out = MatMul(w, v)",
    }[form]
    heads, D = ("2,", 8) if form != "flat" else ("", 16)
    told = ", ".join(f"float[B,{heads}{size},{D}] {name}" for name, size in (("q", "S"), ("k", "T"), ("v", "T")))
    model = onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 23]> g ({told}, float[M,N] mask) => (float[{"a,b,c,d" if heads else "a,b,c"}] out) {{ {nodes}\n }}')
    session, judge, rng = ours(model, 2), theirs(model), np.random.default_rng(0)
    assert num_ours(session)

    def inputs_of(B, S, T, mask=None):
        shape = lambda size: (B, 2, size, D) if heads else (B, size, D)  # noqa: E731
        return {"q": normal(rng, *shape(S)), "k": normal(rng, *shape(T)), "v": normal(rng, *shape(T)), "mask": normal(rng, *(mask or (S, T)))}

    def check(*sizes):
        inputs = inputs_of(*sizes)
        assert_close(session.run(None, inputs), judge.run(None, inputs))

    for sizes in [(1, 4, 4), (1, 4, 4), (2, 4, 4), (1, 4, 5), (1, 5, 4), (1, 4, 4), (2, 300, 300), (2, 300, 300), (1, 4, 4)]:
        check(*sizes)
    with pytest.raises(Exception, match="mask|broadcast"):
        session.run(None, inputs_of(1, 4, 4, (3, 4)))
    for length in range(1, 70):  # more of them than are kept
        check(1, length, length)
    with concurrent.futures.ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda i: check(1 + i % 2, 4 + i % 3, 4), range(60)))


@needs_provider
def test_inside_bodies():
    body = f"g1 () => (float[B,4,S,16] y) {{{attention_text()}\n}}"
    text = f"""<ir_version: 8, opset_import: ["": 17]>
      g ({INPUTS.format(t="float")}, bool flag) => (float[B,4,S,16] out) {{
        chosen = If (flag) <then_branch = {body}, else_branch = g2 () => (float[B,4,S,16] z) {{ z = Identity(v) }}>
        out = Relu(chosen)
      }}"""
    model = onnx.parser.parse_model(text)
    inputs = qkv(np.random.default_rng(0)) | {"flag": np.array(True)}
    session = ours(model)
    assert_close(session.run(None, inputs), theirs(model).run(None, inputs))
    assert num_ours(session) > 0
    inputs["flag"] = np.array(False)
    assert_close(session.run(None, inputs), theirs(model).run(None, inputs))


@needs_provider
@pytest.mark.parametrize("kind", ["float16", "bfloat16", "double"])
def test_other_dtypes(kind):
    import ml_dtypes

    dtype = np.dtype(ml_dtypes.bfloat16 if kind == "bfloat16" else "float64" if kind == "double" else kind)
    text = f"""<ir_version: 10, opset_import: ["": 23]> g ({INPUTS.format(t=kind)}) => ({kind}[B,4,S,16] y) {{
      y = Attention<scale = 0.25>(q, k, v, bias) }}"""
    inputs = qkv(np.random.default_rng(1), dtype=dtype)
    q, k, v, bias = (inputs[name].astype(np.float64) for name in ("q", "k", "v", "bias"))
    scores = 0.25 * q @ k.swapaxes(2, 3) + bias
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    exact = weights / weights.sum(axis=-1, keepdims=True) @ v
    bound = {"float16": 2e-3, "bfloat16": 2e-2, "double": 1e-12}[kind]
    for session in (ours(onnx.parser.parse_model(text)), by_custom_ops(onnx.parser.parse_model(text))):
        (out,) = run(session, inputs)
        assert out.dtype == dtype
        np.testing.assert_allclose(out.astype(np.float64), exact, rtol=0, atol=bound)
    if kind == "bfloat16":
        return  # ONNX Runtime has no MatMul of it, and where we take the group no other node is needed
    written_out = f"""<ir_version: 8, opset_import: ["": 17]> g ({INPUTS.format(t=kind)}) => ({kind}[B,4,S,16] y) {{
      {attention_text(TensorProto.FLOAT16 if kind == "float16" else TensorProto.DOUBLE)} }}"""
    session = ours(onnx.parser.parse_model(written_out))
    assert num_ours(session) > 0
    np.testing.assert_allclose(run(session, inputs)[0].astype(np.float64), exact, rtol=0, atol=bound)


def test_what_fuse_emits_runs():
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
      g ({INPUTS.format(t="float")}) => (float[B,4,S,16] out) {{ {attention_text()}
      out = Relu(y) }}""")
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    assert fusion.num_fused == 1
    inputs = qkv(np.random.default_rng(2))
    for session in (ours(fusion.model), by_custom_ops(fusion.model)):
        assert_close(session.run(None, inputs), theirs(model).run(None, inputs))


def test_shapes_go_on():
    """What follows keeps its shapes: they are inferred for a reader that has none of its own."""
    model = onnx.parser.parse_model("""<ir_version: 10, opset_import: ["": 23]>
      g (float[2,S,64] q, float[2,T,64] k, float[2,T,32] v, float[2,4,P,16] pk, float[2,4,P,8] pv)
        => (y, present_key, present_value) {
        a, present_key, present_value = Attention<q_num_heads = 4, kv_num_heads = 4>(q, k, v, , pk, pv)
        y = Relu(a) }""")
    session = by_custom_ops(model)
    assert [value.shape[0] for value in session.get_outputs()] == [2, 2, 2]
    assert session.get_outputs()[0].shape == [2, "S", 32]
    assert session.get_outputs()[1].shape[1::2] == [4, 16]
    assert session.get_outputs()[2].shape[3] == 8


def test_shapes_that_are_not_told():
    """The outputs have the query's type all the same, whatever the last input has; and as many dims as they must."""
    nodes = [helper.make_node("Attention", ["q", "k", "v", "m"], ["y", "pk", "pv"]), helper.make_node("Relu", ["pk"], ["z"])]
    kinds = {name: TensorProto.BOOL if name == "m" else TensorProto.FLOAT for name in "qkvm"}
    inputs = [helper.make_tensor_value_info(name, kind, None) for name, kind in kinds.items()]
    outputs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in ("y", "z", "pv")]
    graph = helper.make_graph(nodes, "g", inputs, outputs)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 23)], ir_version=10)
    arrays = {name: np.ones((5, 5), bool) if name == "m" else np.ones((1, 4, 5, 16), np.float32) for name in "qkvm"}
    for session in (by_custom_ops(model), ours(model)):
        assert [out.shape for out in session.run(None, arrays)] == [(1, 4, 5, 16)] * 3
    assert [len(value.shape) for value in by_custom_ops(model).get_outputs()] == [4, 4, 4]


# --- caches ---


def attend(query, keys, values, before, scale, mask=None, sinks=None, causal=False):
    """[B, H, S, D] and [B, G, T, D], in float64: the output and the logarithms of the rows' sums."""
    keys, values = (np.repeat(x, query.shape[1] // x.shape[1], 1).astype(np.float64) for x in (keys, values))
    scores = scale * query.astype(np.float64) @ keys.swapaxes(2, 3)
    if mask is not None:
        scores = np.where(mask, scores, -np.inf) if mask.dtype == bool else scores + mask
    if causal:
        rows, columns = np.indices(scores.shape[2:])
        scores = np.where(columns <= rows + before, scores, -np.inf)
    terms = np.exp(scores)
    total = terms.sum(-1, keepdims=True)
    total += 0 if sinks is None else np.exp(sinks.astype(np.float64))[:, None, None]
    return terms / total @ values, np.log(total[..., 0])


@pytest.mark.parametrize("seed", range(10))
def test_caches_that_are_worth_a_call_for_each_head(seed):
    """From some megabytes on keys are copied and attended to head by head; shorter ones the contrib tests have. The first seed
    has all that is told by batch and head at once."""
    rng = np.random.default_rng(seed)
    every = seed == 0
    B, G, D, past, S = 2, int(rng.integers(2, 4)), int(rng.choice([40, 64])), int(rng.integers(3600, 4000)), int(rng.integers(1, 5))
    H, T = G * int(rng.integers(2, 4)), past + S
    flat, ours_alone = rng.random(2) < 0.5
    ours_alone = ours_alone or every
    query, key, value = (normal(rng, B, heads, S, D) for heads in (H, G, G))
    inputs = {"past_key": normal(rng, B, G, past, D), "past_value": normal(rng, B, G, past, D)}
    keys, values = (np.concatenate(pair, 2) for pair in ((inputs["past_key"], key), (inputs["past_value"], value)))
    mask = [None, normal(rng, B, H, S, T), rng.random((B, 1, S, T)) < 0.7, rng.random((1, H, 1, T)) < 0.7][1 if every else rng.integers(4)]
    causal, sinks = bool(rng.random() < 0.5), normal(rng, H) if ours_alone else None
    for name, x in (("q", query), ("k", key), ("v", value)):
        inputs[name] = x.transpose(0, 2, 1, 3).reshape(B, S, -1) if flat else x
    inputs |= ({} if mask is None else {"mask": mask}) | ({"sinks": sinks} if ours_alone else {})
    names = ["q", "k", "v", "" if mask is None else "mask", "past_key", "past_value"] + (["", "sinks"] if ours_alone else [])
    outputs = ["y", *(("present_key", "present_value") if rng.random() < 0.7 else ("", ""))] + (["", "lse"] if ours_alone else [])
    heads = {"q_num_heads": H, "kv_num_heads": G} if flat else {}
    domain = "polyhead" if ours_alone else ""
    node = helper.make_node("Attention", names, outputs, domain=domain, scale=0.3, is_causal=int(causal), **heads)
    told = [helper.make_tensor_value_info(name, helper.np_dtype_to_tensor_dtype(x.dtype), x.shape) for name, x in inputs.items()]
    given = [name for name in outputs if name]
    results = [helper.make_tensor_value_info(name, TensorProto.FLOAT, None) for name in given]
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("polyhead", 1)]
    model = helper.make_model(helper.make_graph([node], "g", told, results), opset_imports=opsets, ir_version=10)
    out, logsumexp = attend(query, keys, values, past, 0.3, mask, sinks, causal)
    wanted = {"y": out.transpose(0, 2, 1, 3).reshape(B, S, -1) if flat else out, "lse": logsumexp, "present_key": keys, "present_value": values}
    for threads in (1, 2):
        assert_close(ours(model, threads).run(None, inputs), [wanted[name] for name in given], what=f"{outputs} {names} {threads}")


# --- what cannot run ---


BAD = {
    "K and V differ": ({"v": (2, 4, 9, 16)}, ""),
    "Q": ({"q": (2, 4, 5, 8)}, ""),
    "attn_mask is float32 \\[5, 9\\], for 7 keys": ({"m": (5, 9)}, ""),
    "attn_mask is float32 \\[3, 7\\], does not broadcast": ({"m": (3, 7)}, ""),
    "num_heads|heads": ({"k": (2, 3, 7, 16), "v": (2, 3, 7, 16)}, ""),
    "softcap": ({}, "softcap = -2.0"),
}


@pytest.mark.parametrize("words", BAD)
def test_bad_inputs(words):
    """A sentence that names what is wrong; the session runs on."""
    shapes, attribute = BAD[words]
    good = {"q": (2, 4, 5, 16), "k": (2, 4, 7, 16), "v": (2, 4, 7, 16), "m": (5, 7)}
    dims = {name: ", ".join(f"{name}{i}" for i in range(len(shape))) for name, shape in good.items()}
    values = ", ".join(f"float[{told}] {name}" for name, told in dims.items())
    model = onnx.parser.parse_model(f"""<ir_version: 10, opset_import: ["": 23]> g ({values}) => (y) {{
      y = Attention<{attribute or "scale = 1.0"}>(q, k, v, m) }}""")
    make = lambda shapes: {name: np.ones(shape, np.float32) for name, shape in shapes.items()}  # noqa: E731
    for session in (by_custom_ops(model), ours(model)):
        with pytest.raises(Exception, match=f"polyhead: .*({words})"):
            session.run(None, make(good | shapes))
        if not attribute:
            assert np.isfinite(session.run(None, make(good))[0]).all()


def test_errors_of_python(monkeypatch):
    with pytest.raises(polyhead.Error, match="providers cannot be given"):
        polyhead.onnx.session(b"", providers=["CPUExecutionProvider"])
    monkeypatch.setattr("polyhead._onnxruntime._LIBRARY", "libnone.so")
    with pytest.raises(polyhead.Error, match="libnone.so is not in this package"):
        polyhead.onnx.library_path()


# --- many at once ---


def test_many_sessions_and_threads():
    """Sessions of one and two threads, each run from several, with shapes that change: the same bits as alone."""
    model = onnx.parser.parse_model(f"""<ir_version: 8, opset_import: ["": 17]>
      g ({INPUTS.format(t="float")}) => (float[B,4,S,16] y) {{ {attention_text()} }}""")
    rng = np.random.default_rng(3)
    problems = [qkv(rng, B=1 + i % 2, S=1 + 13 * i) for i in range(12)]
    expected = [ours(model).run(None, problem)[0] for problem in problems]
    sessions = [ours(model, threads=1 + i % 2) for i in range(4)]

    def work(seed):
        for i in np.random.default_rng(seed).permutation(len(problems)):
            np.testing.assert_array_equal(sessions[seed % 4].run(None, problems[i])[0], expected[i])

    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        list(pool.map(work, range(16)))


def test_bench_runs():
    pytest.importorskip("torch", reason="torch is not installed: bench/ort_models.py tells its version")
    command = [sys.executable, BENCH, "--models", "core_384", "--threads", "1", "--rounds", "1"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    assert "| core_384 | 1x384x12x64 | float32 | 1 |" in done.stdout
