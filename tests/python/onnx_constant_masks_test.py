"""Masks that are constants, of any size: triangles and windows become options of the operator."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: what is fused is not run")
from onnx import TensorProto, helper  # noqa: E402
from onnxruntime_test import assert_close, needs_provider, normal, num_ours, ours, theirs  # noqa: E402

import polyhead.onnx  # noqa: E402


def model_of_constant_mask(mask):
    """Of queries, keys and values [1, 2, ..., 16]; the mask, of numbers that are added or of booleans, may be told."""
    S, T = mask.shape[-2:]
    joins = helper.make_node("Add", ["s", "mask"], ["masked"]) if mask.dtype != bool else helper.make_node("Where", ["mask", "s", "hidden"], ["masked"])
    nodes = [helper.make_node("Transpose", ["k"], ["kt"], perm=[0, 1, 3, 2]), helper.make_node("MatMul", ["q", "kt"], ["s"]), joins,
             helper.make_node("Softmax", ["masked"], ["p"], axis=-1), helper.make_node("MatMul", ["p", "v"], ["out"])]  # fmt: skip
    told = [helper.make_tensor_value_info(name, TensorProto.FLOAT, (1, 2, size, 16)) for name, size in (("q", S), ("k", T), ("v", T))]
    constants = [onnx.numpy_helper.from_array(mask, "mask"), onnx.numpy_helper.from_array(np.float32(-np.inf), "hidden")]
    graph = helper.make_graph(nodes, "g", told, [helper.make_tensor_value_info("out", TensorProto.FLOAT, None)], constants)
    return helper.make_model(graph, opset_imports=[helper.make_opsetid("", 17)], ir_version=8)


def hiding(S, T, left, right, others=()):
    """Numbers that hide what is more than so many keys before or behind the query's own place, and other places."""
    distance = np.arange(T) - np.arange(S)[:, None]
    mask = np.where((distance < -left) | (distance > right), np.float32(-1e9), np.float32(0))
    for place, number in others:
        mask[place] = number
    return mask


BIG = 2200  # whose square was once too large to look at
# name: the mask, and what the pattern says
CONSTANT_MASKS = {
    "causal": (hiding(BIG, BIG, BIG, 0), "causal"),
    "causal, boolean": (hiding(BIG, BIG, BIG, 0) == 0, "causal"),
    "causal, float16 would round": (hiding(BIG, BIG, BIG, 0) * np.float32(1.5), "causal"),
    "a window": (hiding(BIG, BIG, 100, 0) == 0, "a window of 100 keys to the left"),
    "a window on both sides": (hiding(90, 70, 8, 5) == 0, "a window of 8 keys to the left, a window of 5 keys to the right"),
    "zeros of both signs": (hiding(90, 90, 90, 0, [((5, 3), -0.0), ((7, 0), -0.0)]), "causal"),
    "the same matrix twice": (np.stack([hiding(90, 90, 90, 0)] * 2), "causal"),
    "the last row's first place is hidden": (hiding(90, 90, 90, 0, [((89, 0), -1e9)]), "causal, a window of 88 keys to the left"),
    "a place more is hidden": (hiding(BIG, BIG, BIG, 0, [((2000, 7), -1e9)]), ""),
    "a place of the last row is hidden": (hiding(BIG, BIG, BIG, 0, [((BIG - 1, 1), -1e9)]), ""),
    "the last place is hidden": (hiding(BIG, BIG, BIG, 0, [((BIG - 1, BIG - 1), -1e9)]), ""),
    "a place is seen": (hiding(BIG, BIG, BIG, 0, [((0, BIG - 1), 0)]), ""),
    "a place hides otherwise": (hiding(BIG, BIG, BIG, 0, [((3, 9), -2e9)]), ""),
    "a small number": (hiding(BIG, BIG, BIG, 0, [((3, 1), 1e-9)]), ""),
    "a row of a window is wider": (hiding(90, 70, 8, 5, [((50, 41), 0)]) == 0, ""),
    "two matrices": (np.stack([hiding(90, 90, 90, 0), hiding(90, 90, 90, 1)]), ""),
    "the second matrix sees all": (np.stack([hiding(90, 90, 90, 0), hiding(90, 90, 90, 90)]), ""),
}  # fmt: skip


@needs_provider
@pytest.mark.parametrize("name", CONSTANT_MASKS)
def test_constant_masks(name):
    """Triangles and windows of any size become options, and what is nearly one stays a tensor."""
    mask, said = CONSTANT_MASKS[name]
    model = model_of_constant_mask(mask)
    pattern = polyhead.onnx.fuse(model, target="polyhead").candidates[0].pattern
    assert said in pattern and ("causal" in pattern or "window" in pattern) == bool(said), pattern
    rng = np.random.default_rng(0)
    inputs = {value.name: normal(rng, *(d.dim_value for d in value.type.tensor_type.shape.dim)) for value in model.graph.input}
    session = ours(model)
    assert num_ours(session) == len(model.graph.node)
    expected = [np.where(np.isnan(x), 0, x) for x in theirs(model).run(None, inputs)]
    assert_close(session.run(None, inputs), expected)
