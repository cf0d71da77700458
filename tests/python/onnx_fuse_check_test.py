"""polyhead.onnx.fuse(..., check=): a rewrite that is right for some sizes alone is caught."""

import numpy as np
import pytest

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
from onnx_fuse_test import TAIL, VARIANTS, model_of, operands  # noqa: E402

import polyhead  # noqa: E402
import polyhead._onnx_fuse as checker  # noqa: E402
import polyhead.onnx  # noqa: E402

# Divided by the number of keys; by the root of a dim that is the same for all sizes.
SCALED = """
  n = Shape(v) i = Constant<value = int64 {%s}>() d = Gather<axis = 0>(n, i) f = Cast<to = 1>(d) m = MatMul(q, kt) s = Div(m, f)
"""
MODEL = SCALED % 2 + TAIL


def of_number(number):
    return f"f = Constant<value = float {{{number}.0}}>() m = MatMul(q, kt) s = Div(m, f) {TAIL}"


@pytest.fixture(name="fused_into")
def fixture_fused_into(monkeypatch):
    """Fusion gives the nodes that are told, whatever it is asked."""

    def replace(nodes):
        encoded = model_of(nodes).SerializeToString()
        monkeypatch.setattr(checker._bind, "fuse_model", lambda *_: (encoded, False, [], [], (8, 4, 18, 18)))

    return replace


# The number is right for these sizes of the keys alone, and for one key, which has weight 1 whatever its score.
@pytest.mark.parametrize("size", [7, 9, 4])
def test_a_rewrite_for_one_size_is_caught(fused_into, size):
    model = model_of(MODEL)
    fused_into(of_number(size))
    fusion = polyhead.onnx.fuse(model, check=True)
    assert [sizes["T"] for sizes, _ in fusion.checks] == [7, 9, 4, 1]
    assert [error < 1e-6 for _, error in fusion.checks] == [keys in (size, 1) for keys in (7, 9, 4, 1)], str(fusion)
    assert fusion.error > 1e-3


def test_sizes_differ_in_every_dim():
    fusion = polyhead.onnx.fuse(model_of(VARIANTS["mask_added"]), check=True)
    assert [sizes for sizes, _ in fusion.checks] == [{"B": b, "S": s, "T": t} for b, s, t in ((2, 5, 7), (3, 6, 9), (4, 4, 4), (1, 1, 1))]
    assert fusion.error == max(error for _, error in fusion.checks) < 1e-6
    assert "checked, B 3, S 6, T 9: the outputs differ by" in str(fusion)
    assert polyhead.onnx.fuse(model_of(VARIANTS["mask_added"])).error is None


def test_given_inputs(fused_into):
    """One set, or several: what is told is their sizes."""
    model = model_of(MODEL)
    inputs = operands(model)
    other = {name: array[:, :, :, :5] if name == "kt" else array[:, :, :5] for name, array in inputs.items()}
    fusion = polyhead.onnx.fuse(model, check=inputs)
    assert [sizes for sizes, _ in fusion.checks] == [{"B": 2, "S": 5, "T": 6}] and fusion.error < 1e-6
    fused_into(of_number(6))
    assert polyhead.onnx.fuse(model, check=inputs).error < 1e-6
    fusion = polyhead.onnx.fuse(model, check=[inputs, other])
    assert [error < 1e-6 for _, error in fusion.checks] == [True, False]
    with pytest.raises(Exception, match="q"):
        polyhead.onnx.fuse(model, check={"kt": inputs["kt"]})


@pytest.mark.parametrize("nodes", [
    "s = MatMul(q, kt) w = Softmax<axis = -1>(s) o = MatMul(w, v) last = Constant<value = int64[1] {0}>() out = ReduceMean<keepdims = 1>(o, last)",
    "none = Constant<value = float {inf}>() s = MatMul(q, kt) w = Softmax<axis = -1>(s) o = MatMul(w, v) out = Add(o, none)",
])  # fmt: skip
def test_shapes_and_numbers_that_are_none(fused_into, nodes):
    model = model_of(VARIANTS["returned_weights"].replace("weights", "w"))
    fused_into(nodes)
    assert polyhead.onnx.fuse(model, check=operands(model)).error == float("inf")


def test_sizes_that_the_model_refuses(tmp_path):
    """They do not count; where none is left that is told, and nothing is written."""
    nodes = "s = MatMul(q, kt) w = Softmax<axis = -1>(s) o = MatMul(w, v) out = Add(o, q)"
    model = model_of(nodes)
    model.graph.input[0].type.tensor_type.shape.dim[2].dim_param = "P"
    model.graph.input[1].type.tensor_type.shape.dim[0].dim_param = "C"
    fusion = polyhead.onnx.fuse(model, check=True)
    assert [sizes for sizes, _ in fusion.checks] == [dict.fromkeys("BCPT", 4), dict.fromkeys("BCPT", 1)] and fusion.error < 1e-6
    model.graph.input[1].type.tensor_type.shape.dim[2].dim_value = 9
    with pytest.raises(polyhead.Error, match="the model itself runs on none of the inputs that check=True draws, give some: "):
        polyhead.onnx.fuse(model, tmp_path / "fused.onnx", check=True)
    assert not list(tmp_path.iterdir())
