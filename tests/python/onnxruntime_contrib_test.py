"""MultiHeadAttention and GroupQueryAttention of com.microsoft on random problems, beside ONNX Runtime's own kernels."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models do not run in ONNX Runtime")
ort = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: its sessions are left out")
from onnx import helper  # noqa: E402
from onnxruntime_test import assert_close, by_custom_ops, normal, ours, theirs  # noqa: E402


def contrib_model(op, inputs, num_outputs, attributes):
    """One node; inputs by their places."""
    names = [f"i{k}" if k in inputs else "" for k in range(max(inputs) + 1)]
    outputs = [f"o{k}" for k in range(num_outputs)]
    node = helper.make_node(op, names, outputs, domain="com.microsoft", **attributes)
    kind = helper.np_dtype_to_tensor_dtype
    values = [helper.make_tensor_value_info(f"i{k}", kind(x.dtype), x.shape) for k, x in sorted(inputs.items())]
    told = [helper.make_tensor_value_info(name, kind(inputs[0].dtype), None) for name in outputs]
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("com.microsoft", 1)]
    return helper.make_model(helper.make_graph([node], "g", values, told), opset_imports=opsets, ir_version=9)


def assert_as_theirs(rng, op, inputs, num_outputs, attributes, looked_at=None):
    model = contrib_model(op, inputs, num_outputs, attributes)
    feed = {f"i{k}": x for k, x in inputs.items()}
    expected = theirs(model).run(None, feed)
    session = by_custom_ops(model) if rng.random() < 0.5 else ours(model, threads=2)
    half = inputs[0].dtype == np.float16
    for k, (got, wanted) in enumerate(zip(session.run(None, feed), expected, strict=True)):
        assert got.shape == wanted.shape
        seen = np.broadcast_to(looked_at[k], got.shape) if looked_at else np.ones(got.shape, bool)
        what = f"{op} {attributes} {[(k, x.shape, x.dtype.name) for k, x in inputs.items()]} output {k}"
        np.testing.assert_allclose(got[seen].astype(float), wanted[seen].astype(float), rtol=0, atol=2e-3 if half else 1e-5,
                                   err_msg=what)  # fmt: skip


@pytest.mark.parametrize("seed", range(40))
def test_multi_head_attention(seed):
    rng = np.random.default_rng(seed)
    B, H, D = int(rng.integers(1, 4)), int(rng.integers(1, 5)), int(rng.choice([4, 12, 16, 24, 64]))
    S, T, P, Dv = (int(rng.integers(1, 40)) for _ in range(4))
    inputs = {0: normal(rng, B, S, H * D)}
    form = rng.choice(["plain", "past", "stacks"])
    if form == "stacks":
        Dv = D
        inputs |= {1: normal(rng, B, H, T, D), 2: normal(rng, B, H, T, Dv)}
    else:
        if form == "past":
            T, Dv = S, D
            inputs |= {6: normal(rng, B, H, P, D), 7: normal(rng, B, H, P, D)}
        inputs |= {1: normal(rng, B, T, H * D), 2: normal(rng, B, T, H * Dv)}
        if rng.random() < 0.5:
            inputs[3] = normal(rng, 2 * H * D + H * Dv)
    keys = T + (P if form == "past" else 0)
    kind = rng.choice(["none", "lengths", "mask", "mask of each query"])
    if kind == "lengths":
        inputs[4] = rng.integers(1, keys + 1, B).astype(np.int32)
    elif kind != "none":
        inputs[4] = (rng.random((B, keys) if kind == "mask" else (B, S, keys)) < 0.7).astype(np.int32)
        inputs[4][..., 0] = 1  # beside a bias, -10000 takes the digits that both have of rows that see nothing
    if rng.random() < 0.4:
        inputs[5] = normal(rng, int(rng.choice([1, B])), int(rng.choice([1, H])), S, keys)
    attributes = {"num_heads": H} | ({"scale": 0.3} if rng.random() < 0.3 else {})
    if S == T and rng.random() < 0.5:
        attributes["unidirectional"] = 1
    assert_as_theirs(rng, "MultiHeadAttention", inputs, 3 if form == "past" else 1, attributes)


def test_multi_head_attention_with_a_cache_of_megabytes():
    rng = np.random.default_rng(1)
    B, H, S, P, D = 2, 3, 2, 3000, 64
    inputs = {0: normal(rng, B, S, H * D), 1: normal(rng, B, S, H * D), 2: normal(rng, B, S, H * D), 5: normal(rng, B, 1, S, S + P)}
    inputs |= {6: normal(rng, B, H, P, D), 7: normal(rng, B, H, P, D)}
    assert_as_theirs(rng, "MultiHeadAttention", inputs, 3, {"num_heads": H, "unidirectional": 1})


def test_multi_head_attention_packed_and_hidden():
    """Packed forms, which ONNX Runtime's CPU kernel refuses, are the same numbers. What is hidden gets -10000, so a row
    that sees nothing sees everything."""
    rng = np.random.default_rng(0)
    q, k, v = normal(rng, 3, 2, 9, 3, 8)
    flat = [x.reshape(2, 9, 24) for x in (q, k, v)]
    visible = np.ones((2, 9), np.int32)
    visible[0, 4:] = visible[1] = 0
    plain = {0: flat[0], 1: flat[1], 2: flat[2], 4: visible}
    (expected,) = theirs(contrib_model("MultiHeadAttention", plain, 1, {"num_heads": 3})).run(
        None, {f"i{i}": x for i, x in plain.items()})  # fmt: skip
    packed = {0: np.stack([q, k, v], axis=3), 4: visible}
    packed_keys = {0: flat[0], 1: np.stack([k, v], axis=3), 4: visible}
    for inputs in (plain, packed, packed_keys):
        model = contrib_model("MultiHeadAttention", inputs, 1, {"num_heads": 3})
        (got,) = by_custom_ops(model).run(None, {f"i{i}": x for i, x in inputs.items()})
        np.testing.assert_allclose(got, expected, atol=1e-5)
    del plain[4]
    (all_seen,) = by_custom_ops(contrib_model("MultiHeadAttention", plain, 1, {"num_heads": 3})).run(
        None, {f"i{i}": x for i, x in plain.items()})  # fmt: skip
    np.testing.assert_allclose(expected[1], all_seen[1], atol=2e-3)  # the digits that -10000 leaves


def test_multi_head_attention_with_a_bias_of_other_dims():
    """None is half believed: beside a padding mask the sum of both would be of other rows."""
    inputs = {i: np.ones((2, 3, 8), np.float32) for i in range(3)}
    for padding in ({}, {4: np.ones((2, 3), np.int32)}):
        for shape in ((1, 1, 1, 3), (2, 3, 3), (3, 1, 3, 3), (1, 3, 3, 3), (1, 1, 3, 2)):
            model_inputs = inputs | padding | {5: np.ones(shape, np.float32)}
            session = ours(contrib_model("MultiHeadAttention", model_inputs, 1, {"num_heads": 2}))
            with pytest.raises(Exception, match=r"attention_bias is float32 \[.*, must be float \[1 or 2, 1 or 2, 3, 3\]"):
                session.run(None, {f"i{k}": x for k, x in model_inputs.items()})


@pytest.mark.parametrize("seed", range(60))
def test_group_query_attention(seed):
    rng = np.random.default_rng(100 + seed)
    G, R, D = int(rng.integers(1, 4)), int(rng.integers(1, 4)), int(rng.choice([8, 16, 24, 64]))
    H, dtype, is_prompt = G * R, rng.choice([np.float32, np.float16]), rng.random() < 0.5
    S = int(rng.integers(1, 30)) if is_prompt else int(rng.choice([1, 1, 3]))
    before = 0 if is_prompt else int(rng.integers(1, 30))
    most = before + S
    B = int(rng.integers(1, 4)) if S == 1 or is_prompt else 1
    if is_prompt:
        total = rng.integers(1, S + 1, B)
        past = int(rng.choice([0, S + 4])) if B == 1 else 0
    else:
        total = rng.integers(S, most + 1, B)
        past = before + int(rng.choice([0, 5]))
    total[0] = most
    inputs = {0: normal(rng, B, S, (H + 2 * G) * D, dtype=dtype)}
    if rng.random() < 0.5:
        inputs = {i: normal(rng, B, S, heads * D, dtype=dtype) for i, heads in enumerate((H, G, G))}
    inputs |= {3: normal(rng, B, G, past, D, dtype=dtype), 4: normal(rng, B, G, past, D, dtype=dtype)}
    inputs |= {5: (total - 1).astype(np.int32), 6: np.array(most, np.int32)}
    if rng.random() < 0.4:
        inputs[10] = normal(rng, int(rng.choice([1, B])), int(rng.choice([1, H])), S, most, dtype=dtype)
    attributes = {"num_heads": H, "kv_num_heads": G}
    attributes |= {"scale": 0.3} if rng.random() < 0.3 else {}
    attributes |= {"softcap": 5.0} if rng.random() < 0.3 else {}
    attributes |= {"local_window_size": int(rng.integers(1, 12))} if rng.random() < 0.4 else {}
    if D % 16 == 0 and rng.random() < 0.5:
        angles = rng.random((most + 3, int(rng.choice([D // 2, D // 4 // 8 * 8 or D // 2])))) * 6
        inputs |= {7: np.cos(angles).astype(dtype), 8: np.sin(angles).astype(dtype)}
        attributes |= {"do_rotary": 1, "rotary_interleaved": int(rng.integers(0, 2))}
    sink = rng.choice(["none", "none", "zero", "of each head"])
    if sink == "of each head":
        inputs[11] = normal(rng, H, dtype=dtype)
    attributes |= {"smooth_softmax": 1} if sink == "zero" else {}
    queries = (np.arange(S) < total[:, None])[..., None] if is_prompt else np.ones((B, 1, 1), bool)
    cached = (np.arange(max(most, past)) < total[:, None])[:, None, :, None]
    assert_as_theirs(rng, "GroupQueryAttention", inputs, 3, attributes, [queries, cached, cached])


def test_group_query_attention_writes_its_cache_in_place():
    rng = np.random.default_rng(0)
    G, D, room = 2, 8, 12
    new = {i: normal(rng, 1, 1, heads * D) for i, heads in enumerate((4, G, G))}
    cache = [normal(rng, 1, G, room, D) for _ in range(2)]
    inputs = new | {3: cache[0], 4: cache[1], 5: np.array([6], np.int32), 6: np.array(7, np.int32)}
    model = contrib_model("GroupQueryAttention", inputs, 3, {"num_heads": 4, "kv_num_heads": G})
    expected = theirs(model).run(None, {f"i{k}": x for k, x in inputs.items()})
    session = ours(model)
    binding = session.io_binding()
    values = {k: ort.OrtValue.ortvalue_from_numpy(x) for k, x in inputs.items()}
    for k, value in values.items():
        binding.bind_ortvalue_input(f"i{k}", value)
    binding.bind_output("o0")
    binding.bind_ortvalue_output("o1", values[3])
    binding.bind_ortvalue_output("o2", values[4])
    session.run_with_iobinding(binding)
    got = [value.numpy() for value in binding.get_outputs()]
    np.testing.assert_allclose(got[0], expected[0], atol=1e-5)
    for out, wanted, old in zip(got[1:], expected[1:], cache, strict=True):
        np.testing.assert_array_equal(out[:, :, :7], wanted[:, :, :7])
        np.testing.assert_array_equal(out[:, :, 7:], old[:, :, 7:])


def test_bad_nodes():
    rng = np.random.default_rng(0)
    inputs = {i: normal(rng, 1, 2, heads * 16) for i, heads in enumerate((4, 2, 2))}
    inputs |= {3: normal(rng, 1, 2, 0, 16), 4: normal(rng, 1, 2, 0, 16)}
    inputs |= {5: np.array([1], np.int32), 6: np.array(2, np.int32)}
    attributes = {"num_heads": 4, "kv_num_heads": 2}
    model = contrib_model("GroupQueryAttention", inputs, 4, attributes | {"qk_output": 1})
    model.graph.output[3].type.tensor_type.elem_type = onnx.TensorProto.FLOAT
    with pytest.raises(Exception, match='GroupQueryAttention "": output_qk, the scores, is an output that is not computed'):
        by_custom_ops(model)
    feed = {f"i{k}": x for k, x in inputs.items()}
    assert_close(ours(model).run(None, feed), theirs(model).run(None, feed))  # left to ONNX Runtime
    model = contrib_model("GroupQueryAttention", inputs, 3, attributes)
    for lengths, total in (([7], 2), ([1], -5), ([-9], 2), ([1], 2_000_000_000)):
        bad = inputs | {5: np.array(lengths, np.int32), 6: np.array(total, np.int32)}
        for session in (by_custom_ops(model), ours(model)):
            with pytest.raises(Exception, match="polyhead: (seqlens_k|total_sequence_length|past_key)"):
                session.run(None, {f"i{k}": x for k, x in bad.items()})


def test_rotary_positions():
    """Positions that are given, and one outside of the tables."""
    rng = np.random.default_rng(0)
    inputs = {i: normal(rng, 1, 3, heads * 16) for i, heads in enumerate((4, 2, 2))}
    inputs |= {3: normal(rng, 1, 2, 2, 16), 4: normal(rng, 1, 2, 2, 16), 5: np.array([4], np.int32), 6: np.array(5, np.int32)}
    angles = rng.random((9, 8)) * 6
    inputs |= {7: np.cos(angles).astype(np.float32), 8: np.sin(angles).astype(np.float32), 9: np.array([[7, 1, 8]])}
    attributes = {"num_heads": 4, "kv_num_heads": 2, "do_rotary": 1}
    assert_as_theirs(rng, "GroupQueryAttention", inputs, 3, attributes)
    inputs[9][0, 1] = 9
    session = by_custom_ops(contrib_model("GroupQueryAttention", inputs, 3, attributes))
    with pytest.raises(Exception, match="the position of query 1 is 9, cos_cache has 9 rows"):
        session.run(None, {f"i{k}": x for k, x in inputs.items()})
