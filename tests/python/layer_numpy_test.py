"""polyhead.MultiHeadAttention on NumPy arrays: against the formula in float64, and its gradients by differences."""

import doctest
import itertools
import sys

import numpy as np
import pytest

import polyhead

B, SQ, SK, H, D = 2, 4, 6, 4, 3


def softmax(scores):
    weights = np.exp(scores - scores.max(-1, keepdims=True))
    return weights / weights.sum(-1, keepdims=True)


def problem(groups, cross, biases, dtype=np.float64):
    """(weights, inputs)"""
    random = np.random.default_rng(groups + 2 * cross + 4 * biases)
    sizes = (8, 10, 7) if cross else (8, 8, 8)
    columns = (H * D, groups * D, groups * D)
    weights = {}
    for name, size, width in zip(("query", "key", "value"), sizes, columns):
        weights[f"{name}_weight"] = random.standard_normal((size, width)).astype(dtype) / 3
        if biases:
            weights[f"{name}_bias"] = random.standard_normal(width).astype(dtype)
    weights["out_weight"] = random.standard_normal((H * D, 5)).astype(dtype) / 3
    if biases:
        weights["out_bias"] = random.standard_normal(5).astype(dtype)
    lengths = (SQ, SK, SK) if cross else (SQ,)
    inputs = [random.standard_normal((B, length, size)).astype(dtype) for length, size in zip(lengths, sizes)]
    return weights, inputs


def formula(weights, inputs, groups, bias=None, visible=None, kept=(1.0, 1.0)):
    inputs = inputs if len(inputs) == 3 else inputs * 3
    q, k, v = (
        (x @ weights[f"{name}_weight"] + weights.get(f"{name}_bias", 0))
        .reshape(B, x.shape[1], -1, D)
        .transpose(0, 2, 1, 3)
        for x, name in zip(inputs, ("query", "key", "value"))
    )
    k, v = (np.repeat(x, H // groups, 1) for x in (k, v))
    scores = q @ k.transpose(0, 1, 3, 2) / np.sqrt(D)
    if bias is not None:
        scores = scores + bias
    if visible is not None:
        scores = np.where(visible, scores, -np.inf)
    p = softmax(scores) * kept[0]
    heads = (p @ v).transpose(0, 2, 1, 3).reshape(B, -1, H * D)
    return (heads @ weights["out_weight"] + weights.get("out_bias", 0)) * kept[1], p


@pytest.mark.parametrize("groups, cross, biases", list(itertools.product((4, 2, 1), (False, True), (False, True))))
def test_forward_and_gradients(groups, cross, biases):
    weights, inputs = problem(groups, cross, biases)
    keys = SK if cross else SQ
    random = np.random.default_rng(7)
    bias = random.standard_normal((H, SQ, keys))
    layer = polyhead.MultiHeadAttention(weights, H, groups)
    assert {name: array.shape for name, array in layer.weights.items()} == {n: a.shape for n, a in weights.items()}
    out, p = layer.forward(*inputs, attn_bias=bias, return_weights=True, training=True)
    expected, expected_p = formula(weights, inputs, groups, bias)
    np.testing.assert_allclose(out, expected, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(p, expected_p, rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(layer.forward(*inputs, attn_bias=bias), expected, rtol=1e-10, atol=1e-12)

    grad_out = random.standard_normal(out.shape)
    layer.forward(*inputs, attn_bias=bias, training=True)
    grads = layer.backward(grad_out)
    named = dict(zip(("query", "key", "value"), inputs)) | {"attn_bias": bias} | weights
    assert grads.keys() == named.keys()
    for name, array in named.items():
        assert grads[name].shape == array.shape and grads[name].dtype == array.dtype
        place = tuple(random.integers(size) for size in array.shape)
        before, sums = array[place], []
        for step in (1e-5, -1e-5):
            array[place] = before + step
            sums.append((formula(weights, inputs, groups, bias)[0] * grad_out).sum())
        array[place] = before
        np.testing.assert_allclose(grads[name][place], (sums[0] - sums[1]) / 2e-5, rtol=1e-5, atol=1e-7, err_msg=name)
    some = layer.backward(grad_out, needs=("value_weight", "query"))
    assert list(some) == ["value_weight", "query"]
    for name, grad in some.items():
        np.testing.assert_array_equal(grad, grads[name])


def test_masks_and_causal():
    weights, inputs = problem(2, True, True)
    layer = polyhead.MultiHeadAttention(weights, H, 2)
    visible = np.random.default_rng(3).random((B, 1, SQ, SK)) > 0.3
    visible[..., 0] = True
    expected, _ = formula(weights, inputs, 2, visible=visible)
    np.testing.assert_allclose(layer.forward(*inputs, attn_mask=visible), expected)
    causal = np.tril(np.ones((SQ, SK), bool))
    np.testing.assert_allclose(layer.forward(*inputs, causal=True), formula(weights, inputs, 2, visible=causal)[0])


def test_dropout_in_training_alone():
    weights, inputs = problem(4, False, True)
    layer = polyhead.MultiHeadAttention(weights, H, dropout_p=0.25, output_dropout_p=0.5)
    np.testing.assert_allclose(layer.forward(*inputs), formula(weights, inputs, 4)[0])
    out = layer.forward(*inputs, training=True, dropout_seed=3, output_dropout_seed=2**64 - 1)
    kept = (
        polyhead.dropout_mask((B, H, SQ, SQ), 0.25, 3) / 0.75,
        polyhead.dropout_mask((B, 1, SQ, 5), 0.5, 2**64 - 1, 1)[:, 0] / 0.5,
    )
    np.testing.assert_allclose(out, formula(weights, inputs, 4, kept=kept)[0])
    with pytest.raises(polyhead.Error, match="dropout_seed"):
        layer.forward(*inputs, training=True)


def test_one_seed_serves_both_dropouts():
    """A single key of weight 1 whose value passes unchanged: at p = .5 and .5 a quarter stays."""
    size = 64
    weights = {f"{name}_weight": np.eye(size, dtype=np.float32) for name in ("query", "key", "value", "out")}
    layer = polyhead.MultiHeadAttention(weights, size, dropout_p=0.5, output_dropout_p=0.5)
    x = np.ones((64, 1, size), np.float32)
    out = layer.forward(x, training=True, dropout_seed=3, output_dropout_seed=3)
    assert abs(np.mean(out != 0) - 0.25) < 0.05
    with pytest.raises(polyhead.Error, match="output_dropout_seed is not given, must be where output_dropout_p is 0.5"):
        layer.forward(x, training=True, dropout_seed=3)


def test_weights_change_in_place():
    weights, inputs = problem(4, False, True)
    layer = polyhead.MultiHeadAttention(weights, H)
    for array in layer.weights.values():
        array *= 0.5
    halved = {name: array / 2 for name, array in weights.items()}
    np.testing.assert_allclose(layer.forward(*inputs), formula(halved, inputs, 4)[0])


def test_scale_of_the_weights():
    weights, inputs = problem(4, False, False)
    layer = polyhead.MultiHeadAttention(weights | {"scale": 0.0}, H)
    _, p = layer.forward(*inputs, return_weights="mean")
    np.testing.assert_allclose(p, np.full((B, SQ, SQ), 1 / SQ))


@pytest.mark.parametrize("change, words", [
    ({"key_weight": None}, "key_weight"), ({"query_weight": np.ones(3)}, "query_weight"),
    ({"value_bias": np.ones(3)}, "value_bias"), ({"nothing": np.ones(3)}, "nothing"),
    ({"key_weight": np.ones((8, 12), np.float32)}, "key_weight"),
])  # fmt: skip
def test_bad_weights_are_named(change, words):
    weights = problem(4, False, True)[0] | change
    weights = {name: array for name, array in weights.items() if array is not None}
    with pytest.raises(polyhead.Error, match=words):
        polyhead.MultiHeadAttention(weights, H)


def test_bad_calls_are_named():
    weights, (x,) = problem(4, False, True)
    layer = polyhead.MultiHeadAttention(weights, H)
    for call, words in (
        (lambda: layer.backward(x), "training"),
        (lambda: layer.forward(x[0]), "query"),
        (lambda: layer.forward(x.astype(np.float32)), "float"),
        (lambda: layer.forward(x, x[:1]), "key"),
        (lambda: layer.forward(x, return_weights="sum"), "return_weights"),
        (lambda: polyhead.MultiHeadAttention(weights, 5).forward(x), "num_heads|rows"),
    ):
        with pytest.raises(polyhead.Error, match=words):
            call()
    out = layer.forward(x, training=True)
    for call, words in (
        (lambda: layer.backward(out[:1]), "grad_out"),
        (lambda: layer.backward(out, needs=("bias",)), "bias"),
        (lambda: layer.backward(out, needs=("attn_bias",)), "attn_bias"),
    ):
        with pytest.raises(polyhead.Error, match=words):
            call()


def test_docstrings():
    result = doctest.testmod(sys.modules[polyhead.MultiHeadAttention.__module__])
    assert result.attempted >= 6 and result.failed == 0
