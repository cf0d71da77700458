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
    np.testing.assert_allclose(layer.forward(*inputs, causal=True, align="top_left"), formula(weights, inputs, 2, visible=causal)[0])
    with pytest.raises(polyhead.Error, match="^causal needs align: seqlen_q 4 is not seqlen_k 6"):
        layer.forward(*inputs, causal=True)


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
        (lambda: polyhead.MultiHeadAttention(weights, 5), "query_weight has 12 columns, must have a multiple of its 5"),
        (lambda: polyhead.MultiHeadAttention(weights, 4, 3), "num_heads_kv is 3, must divide num_heads 4"),
        (lambda: polyhead.MultiHeadAttention(weights, 0), "num_heads"),
        (lambda: layer.forward(x, window_lo=np.zeros(SQ, int)), "window_lo is given without window_hi"),
        (lambda: layer.forward(x, step=0), "step is 0, so caches must be given"),
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


def hidden(visible, **options):
    """Out of the layer with these options, and of the formula with what they should leave visible."""
    weights, inputs = problem(2, True, True)
    layer = polyhead.MultiHeadAttention(weights, H, 2)
    return layer.forward(*inputs, **options), formula(weights, inputs, 2, visible=visible)[0]


def test_windows_lengths_and_offsets():
    i, j = np.ogrid[:SQ, :SK]
    lengths = np.array([3, 6])
    lo, hi = np.array([0, 0, 2, 5]), np.array([1, 9, 4, 6])
    for visible, options in (
        ((j >= i - 1) & (j <= i + 2), {"window": (1, 2), "align": "top_left"}),
        (j <= i + 2, {"causal": True, "align": "bottom_right"}),
        (j <= i + 1, {"causal": True, "query_offset": 1}),
        ((j <= i + np.array([0, 2])[:, None, None])[:, None], {"causal": True, "query_offset": np.array([0, 2])}),
        ((j < lengths[:, None, None])[:, None], {"seqlens_k": lengths}),
        ((j >= lo[:, None]) & (j < hi[:, None]), {"window_lo": lo, "window_hi": hi}),
    ):
        np.testing.assert_allclose(*hidden(visible, **options), err_msg=str(options))


def test_alibi_softcap_and_gradients_of_what_is_there():
    weights, inputs = problem(4, True, True)
    slopes = np.linspace(0.1, 0.7, H, dtype=np.float32)
    distance = np.abs(np.arange(SQ)[:, None] - np.arange(SK))
    layer = polyhead.MultiHeadAttention(weights, H)
    out = layer.forward(*inputs, alibi_slopes=slopes, align="top_left", training=True)
    expected, _ = formula(weights, inputs, 4, bias=-slopes[:, None, None].astype(float) * distance)
    np.testing.assert_allclose(out, expected)
    assert layer.backward(np.ones_like(out))["alibi_slopes"].shape == (H,)
    capped = polyhead.MultiHeadAttention(weights, H, softcap=0.01).forward(*inputs, return_weights=True)[1]
    np.testing.assert_allclose(capped, 1 / SK, rtol=0.03)  # scores of at most 0.01


def test_padding_passes_on_no_gradient():
    weights, (x,) = problem(4, False, True)
    lengths = np.array([2, 3], np.int32)
    layer = polyhead.MultiHeadAttention(weights, H)
    out = layer.forward(x, seqlens_q=lengths, seqlens_k=lengths, training=True)
    grads = layer.backward(np.ones_like(out), needs=("query", "value_weight"))
    for b, length in enumerate(lengths):
        alone = layer.forward(x[b : b + 1, :length])
        np.testing.assert_allclose(out[b : b + 1, :length], alone)
        assert not grads["query"][b, length:].any() and grads["query"][b, :length].any()


@pytest.mark.parametrize("groups, dtype", [(4, np.float64), (2, np.float32), (1, np.float16)])
def test_steps_give_what_the_whole_gives(groups, dtype):
    weights, (x,) = problem(groups, False, True, dtype)
    layer = polyhead.MultiHeadAttention(weights, H, groups)
    whole, p = layer.forward(x, causal=True, return_weights=True)
    eps = 100 * np.finfo(dtype).eps  # of numbers about 1
    close = {"rtol": eps, "atol": eps / 10}
    for prompt in range(SQ):
        caches = layer.new_caches(B, SQ)
        if prompt:
            out = layer.forward(x[:, :prompt], causal=True, caches=caches)
            np.testing.assert_allclose(out, whole[:, :prompt], **close)
        for step in range(prompt, SQ):
            one = x[:, step : step + 1]
            out, weights_of_step = layer.forward(one, causal=True, caches=caches, step=step, return_weights=True)
            np.testing.assert_allclose(out, whole[:, step : step + 1], **close)
            np.testing.assert_allclose(weights_of_step, p[:, :, step : step + 1], **close)
        assert caches.key.shape == (B, SQ, groups, D) and caches.key.all()


def test_steps_of_attention_to_another_sequence():
    weights, inputs = problem(2, True, True)
    layer = polyhead.MultiHeadAttention(weights, H, 2)
    caches = layer.new_caches(B, SK, seqlen_q=SQ)
    whole = layer.forward(*inputs, caches=caches)
    for step in range(SQ):
        out = layer.forward(inputs[0][:, step : step + 1], caches=caches, step=step, append=False)
        np.testing.assert_allclose(out, whole[:, step : step + 1])


def test_bad_steps_are_named():
    weights, (x,) = problem(4, False, True)
    layer = polyhead.MultiHeadAttention(weights, H)
    caches, one = layer.new_caches(B, SQ), x[:, :1]
    for call, words in (
        (lambda: layer.forward(one, caches=caches, step=SQ), "step"),
        (lambda: layer.forward(one, caches=caches, step=-2), "step is -2, must be 0 to 3"),
        (lambda: layer.forward(x, caches=caches, step=0), "query"),
        (lambda: layer.forward(one, caches=caches, step=0, training=True), "training"),
        (lambda: layer.forward(one, one, caches=caches, step=0, append=False), "append"),
        (lambda: layer.forward(np.concatenate([x, x], 1), caches=caches), "caches have room for 4"),
        (lambda: layer.forward(one, caches=caches._replace(key=caches.key[:1]), step=0), "key_cache"),
    ):
        with pytest.raises(polyhead.Error, match=words):
            call()
    assert not caches.key.any() and not caches.value.any()


def pages_of(table, lengths):
    """(page_table, slots of all tokens of sequences that are `lengths` long now; -1 behind)"""
    sequences = range(len(lengths))
    for sequence, length in zip(sequences, lengths):
        table.resize(sequence, length)
    slots = [[table.slot(sequence, token) for token in range(max(lengths))] for sequence in sequences]
    return table.array(sequences), np.array(slots)


def in_calls(layer, cache, x, lengths, cut, **options):
    """Out of causal self-attention whose tokens come at these cuts, and join the cache."""
    table, outs = polyhead.PageTable(9, 2), []
    for _ in lengths:
        table.add()
    for first, last in itertools.pairwise(cut):
        now = [min(length, last) for length in lengths]
        page_table, slots = pages_of(table, now)
        slots = np.pad(slots, ((0, 0), (0, last - slots.shape[1])), constant_values=-1)[:, first:last]
        new = np.maximum(np.array(now) - first, 0)
        own = {name: array[:, first:last] if name == "positions" else array for name, array in options.items()}
        out = layer.forward(
            x[:, first:last], causal=True, align="bottom_right", cache=cache, page_table=page_table, slots=slots,
            seqlens_q=new, seqlens_k=np.array(now), **own,
        )  # fmt: skip
        outs.append(out)
    return np.concatenate(outs, 1)


@pytest.mark.parametrize("groups, stored, close", [(4, "float32", 1e-5), (2, "float32", 1e-5), (2, "int8", 3e-2)])
def test_tokens_that_join_a_cache(groups, stored, close):
    weights, (x,) = problem(groups, False, True, np.float32)
    layer = polyhead.MultiHeadAttention(weights, H, groups)
    lengths = [SQ, SQ - 1]
    whole = layer.forward(x, causal=True, seqlens_q=np.array(lengths), seqlens_k=np.array(lengths))
    outs = []
    for cut in ((0, 2, 3, SQ), (0, 1, 2, 3, SQ), (0, SQ)):
        cache = layer.new_cache(9, 2, key_dtype=stored)
        assert cache.key.shape == (9, 2, groups, D) and cache.key.dtype == stored
        outs.append(in_calls(layer, cache, x, lengths, cut))
        np.testing.assert_allclose(outs[-1], whole, rtol=close, atol=close)
        np.testing.assert_array_equal(outs[-1], outs[0])


@pytest.mark.parametrize("interleaved", [False, True])
def test_rotary_positions_of_a_layer(interleaved):
    weights, (x,) = problem(2, False, False, np.float32)
    layer = polyhead.MultiHeadAttention(weights, H, 2)
    angles = np.random.default_rng(3).uniform(0, 7, (20, 1))
    positions = np.array([[1, 5, 6, 9], [0, 2, 19, 3]])
    c, s = np.cos(angles)[positions], np.sin(angles)[positions]  # [B, SQ, 1]

    def heads(name):
        return (x @ weights[f"{name}_weight"]).reshape(B, SQ, -1, D)

    def turned(heads):
        first, second = heads[..., 0], heads[..., 1]
        return np.stack([first * c - second * s, first * s + second * c, heads[..., 2]], -1).astype(np.float32)

    cache = layer.new_cache(9, 2, rotary_dim=2, interleaved=interleaved)
    tables = {"cos": np.cos(angles).astype("f"), "sin": np.sin(angles).astype("f")}
    out = in_calls(layer, cache, x, [SQ, SQ], (0, 3, SQ), positions=positions, **tables)
    attended = polyhead.attention(turned(heads("query")), turned(heads("key")), heads("value"), causal=True)
    np.testing.assert_allclose(out, attended.reshape(B, SQ, -1) @ weights["out_weight"], rtol=1e-4, atol=1e-5)


def test_keys_of_another_sequence_in_a_cache():
    weights, (x, key, value) = problem(2, True, True, np.float32)
    layer = polyhead.MultiHeadAttention(weights, H, 2)
    lengths = [SK, SK - 2]
    whole = layer.forward(x, key, value, seqlens_k=np.array(lengths))
    table, cache = polyhead.PageTable(9, 2), layer.new_cache(9, 2)
    for _ in lengths:
        table.add()
    page_table, slots = pages_of(table, lengths)
    shared = {"cache": cache, "page_table": page_table, "seqlens_k": np.array(lengths)}
    outs = [layer.forward(x[:, :1], key, value, slots=slots, **shared), layer.forward(x[:, 1:], **shared)]
    np.testing.assert_allclose(np.concatenate(outs, 1), whole, rtol=1e-5, atol=1e-6)


def test_bad_calls_on_a_cache_are_named():
    weights, (x,) = problem(4, False, True, np.float32)
    layer = polyhead.MultiHeadAttention(weights, H)
    cache = layer.new_cache(9, 2)
    good = {
        "cache": cache, "page_table": np.zeros((B, 2), int), "seqlens_k": np.array([0, SQ]),
        "slots": np.array([[-1] * SQ, [0, 1, 2, 3]]),
    }  # fmt: skip
    for bad, words in (
        ({"page_table": None}, "page_table must be given with a cache"),
        ({"page_table": np.full((B, 2), 9)}, r"page_table\[1, 0\] is 9, must be 0 to num_pages - 1 = 8"),
        ({"slots": np.full((B, SQ), 18)}, r"slots\[0, 0\] is 18, must be -1 to 17"),
        ({"slots": np.zeros((B, SQ), int)}, "slots holds 0 twice"),
        ({"slots": None, "key": x}, "slots is missing"),
        ({"seqlens_k": None}, "seqlens_k is missing"),
        ({"positions": np.zeros((B, SQ), int)}, "positions is given, but rotary_dim is 0"),
        ({"cache": None}, "given without cache"),
        ({"training": True}, "cache is given in training"),
        ({"caches": layer.new_caches(B, SQ)}, "cache is given and caches too"),
        ({"cache": polyhead.KvCache.zeros(9, 2, H, D + 1)}, f"cache.head_dim is {D + 1}, must be {D}"),
    ):
        with pytest.raises(polyhead.Error, match=words):
            layer.forward(x, **(good | bad))
    assert not cache.key.any() and not cache.value.any()


def test_a_kernel_by_name():
    weights, (x,) = problem(4, False, True, np.float32)
    heads = np.ones((1, 24, H, 8), np.float32)
    for name, reason in polyhead.explain(heads, heads, heads).reasons.items():
        if reason:  # not of this machine, or of another dtype
            continue
        out = polyhead.MultiHeadAttention(weights, H, kernel=name).forward(x)
        np.testing.assert_allclose(out, formula(weights, [x], 4)[0], rtol=1e-4, atol=1e-5)
    with pytest.raises(polyhead.Error, match="no_such"):
        polyhead.MultiHeadAttention(weights, H, kernel="no_such").forward(x)


def test_tensors_of_torch_give_tensors_of_torch():
    torch = pytest.importorskip("torch", reason="torch is not installed: its tensors in the layer are left out")
    weights, (x,) = problem(4, False, True, np.float32)
    layer = polyhead.MultiHeadAttention(weights, H)
    out = layer.forward(torch.from_numpy(x), training=True)
    grad = layer.backward(torch.ones_like(out))["query"]
    assert isinstance(out, torch.Tensor) and isinstance(grad, torch.Tensor)
    np.testing.assert_array_equal(out.numpy(), layer.forward(x))


def test_docstrings():
    result = doctest.testmod(sys.modules[polyhead.MultiHeadAttention.__module__])
    assert result.attempted >= 6 and result.failed == 0
