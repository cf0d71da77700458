"""polyhead.AttentionBlock and FeedForwardBlock on NumPy arrays: by the formula in float64, gradients by differences, caches."""

import doctest
import math
import sys

import numpy as np
import pytest

import polyhead
import polyhead._blocks

B, S, SK, E, H, G, D, INNER = 2, 5, 6, 12, 4, 2, 8, 20
GELU = np.vectorize(lambda x: x * (1 + math.erf(x / math.sqrt(2))) / 2)
ACTIVATIONS = {
    "relu": lambda x: np.maximum(x, 0), "gelu": GELU, "silu": lambda x: x / (1 + np.exp(-x)), None: lambda x: x,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
}  # fmt: skip


def random_weights(shapes, seed=1, dtype=np.float64):
    random = np.random.default_rng(seed)
    weights = {name: random.standard_normal(shape).astype(dtype) / 3 for name, shape in shapes.items()}
    if "norm_weight" in weights:
        weights["norm_weight"] += 1
    return weights


def attention_weights(key_size=E, dtype=np.float64, **more):
    shapes = {"query_weight": (E, H * D), "key_weight": (key_size, G * D), "value_weight": (key_size, G * D)}
    shapes |= {"out_weight": (H * D, E), "query_bias": (H * D,), "out_bias": (E,), "norm_weight": (E,), "norm_bias": (E,)}
    return random_weights(shapes, dtype=dtype)


def normed(x, weights, kind):
    if kind is None:
        return x
    x = x - x.mean(-1, keepdims=True) if kind == "layer" else x
    x = x / np.sqrt((x**2).mean(-1, keepdims=True) + 1e-5)
    return x * weights.get("norm_weight", 1) + weights.get("norm_bias", 0)


def around(inner, x, weights, kind, first, residual=True):
    """What a block has around `inner`, a function of tokens."""
    out = inner(normed(x, weights, kind) if first else x) + (x if residual else 0)
    return out if first else normed(out, weights, kind)


def attended(w, query, key, visible):
    heads = lambda x, name: (x @ w[name + "_weight"] + w.get(name + "_bias", 0)).reshape(*x.shape[:2], -1, D)  # noqa: E731
    q, k, v = heads(query, "query"), heads(key, "key").repeat(H // G, 2), heads(key, "value").repeat(H // G, 2)
    scores = np.where(visible, np.einsum("bqhd,bkhd->bhqk", q, k) / np.sqrt(D), -np.inf)
    p = np.exp(scores - scores.max(-1, keepdims=True))
    p /= p.sum(-1, keepdims=True)
    return np.einsum("bhqk,bkhd->bqhd", p, v).reshape(*query.shape[:2], -1) @ w["out_weight"] + w["out_bias"]


CAUSAL = np.tril(np.ones((S, S), bool))


def attention_formula(weights, x, key, kind, first, residual=True):
    visible = CAUSAL if key is None else np.ones((S, SK), bool)
    return around(lambda y: attended(weights, y, y if key is None else key, visible), x, weights, kind, first, residual)


def feed_forward_formula(w, x, activation, kind, first):
    inner = lambda y: ACTIVATIONS[activation](y @ w["weight1"] + w.get("bias1", 0)) @ w["weight2"] + w.get("bias2", 0)  # noqa: E731
    return around(inner, x, w, kind, first)


def check_gradients(block, formula, arrays, grads, grad_out):
    """Of one place of each array, by the difference of `formula`, a function without arguments."""
    random = np.random.default_rng(4)
    assert grads.keys() == arrays.keys()
    for name, array in arrays.items():
        assert grads[name].shape == array.shape and grads[name].dtype == array.dtype
        place = tuple(random.integers(size) for size in array.shape)
        before, sums = array[place], []
        for step in (1e-5, -1e-5):
            array[place] = before + step
            sums.append((formula() * grad_out).sum())
        array[place] = before
        np.testing.assert_allclose(grads[name][place], (sums[0] - sums[1]) / 2e-5, rtol=1e-5, atol=1e-7, err_msg=name)


@pytest.mark.parametrize("kind, first, residual", [
    ("layer", True, True), ("layer", False, True), ("rms", True, False), ("rms", False, True), (None, True, True)
])  # fmt: skip
@pytest.mark.parametrize("cross", [False, True])
def test_attention_block(kind, first, residual, cross):
    weights = attention_weights(7 if cross else E)
    if kind is None:
        del weights["norm_weight"]
    if kind != "layer":
        del weights["norm_bias"]
    random = np.random.default_rng(2)
    x, key = random.standard_normal((B, S, E)), random.standard_normal((B, SK, 7)) if cross else None
    block = polyhead.AttentionBlock(weights, H, G, norm=kind, norm_first=first, residual=residual)
    formula = lambda: attention_formula(weights, x, key, kind, first, residual)  # noqa: E731
    options = {} if cross else {"causal": True}
    np.testing.assert_allclose(block.forward(x, key, **options), formula(), rtol=1e-10, atol=1e-12)
    out = block.forward(x, key, **options, training=True)
    np.testing.assert_allclose(out, formula(), rtol=1e-10, atol=1e-12)
    grad_out = random.standard_normal(out.shape)
    arrays = {"query": x} | ({"key": key} if cross else {}) | weights
    check_gradients(block, formula, arrays, block.backward(grad_out), grad_out)
    assert list(block.backward(grad_out, needs=("query", "out_bias"))) == ["query", "out_bias"]


@pytest.mark.parametrize("activation", ACTIVATIONS)
@pytest.mark.parametrize("kind, first, biases", [("layer", True, True), ("rms", False, True), (None, True, False)])
def test_feed_forward_block(activation, kind, first, biases):
    shapes = {"weight1": (E, INNER), "weight2": (INNER, E)}
    shapes |= {"bias1": (INNER,), "bias2": (E,)} if biases else {}
    shapes |= {"norm_weight": (E,)} if kind else {}
    weights = random_weights(shapes)
    random = np.random.default_rng(2)
    x = random.standard_normal((B, S, E))
    block = polyhead.FeedForwardBlock(weights, activation=activation, norm=kind, norm_first=first)
    formula = lambda: feed_forward_formula(weights, x, activation, kind, first)  # noqa: E731
    np.testing.assert_allclose(block.forward(x), formula(), rtol=1e-10, atol=1e-12)
    out = block.forward(x, training=True)
    grad_out = random.standard_normal(out.shape)
    check_gradients(block, formula, {"x": x} | weights, block.backward(grad_out), grad_out)


def test_dropout_in_training_alone():
    weights = random_weights({"weight1": (E, INNER), "weight2": (INNER, E)})
    x = np.random.default_rng(2).standard_normal((B, S, E))
    block = polyhead.FeedForwardBlock(weights, activation=None, norm=None, inner_dropout_p=0.25, output_dropout_p=0.5)
    np.testing.assert_allclose(block.forward(x), x + x @ weights["weight1"] @ weights["weight2"])
    out = block.forward(x, training=True, inner_dropout_seed=3, output_dropout_seed=3)
    inner = polyhead.dropout_mask((B, 1, S, INNER), 0.25, 3)[:, 0] / 0.75
    outer = polyhead.dropout_mask((B, 1, S, E), 0.5, 3, 1)[:, 0] / 0.5
    np.testing.assert_allclose(out, x + x @ weights["weight1"] * inner @ weights["weight2"] * outer)
    with pytest.raises(polyhead.Error, match="inner_dropout_seed"):
        block.forward(x, training=True)


@pytest.mark.parametrize("stored, close", [("float32", 1e-5), ("int8", 3e-2)])
def test_a_transformer_generates_through_a_cache(stored, close):
    """Two layers, each of attention to itself, to an encoder's tokens, and feed-forward; prompts of two lengths, then a few
    tokens a call."""
    random = np.random.default_rng(2)
    x, encoded = (random.standard_normal((B, n, E)).astype("f") for n in (S, SK))
    lengths, lengths_k = np.array([5, 4]), np.array([SK, SK - 2])
    layers = []
    for n in range(2):
        own = {name: array + n / 9 for name, array in attention_weights(dtype=np.float32).items()}
        inner = random_weights({"weight1": (E, INNER), "weight2": (INNER, E), "norm_weight": (E,)}, n, np.float32)
        layers.append((
            polyhead.AttentionBlock(own, H, G, norm_first=n == 0), polyhead.AttentionBlock(own, H, G, norm="rms"),
            polyhead.FeedForwardBlock(inner, activation="silu", norm="rms"),
        ))  # fmt: skip
    whole = x
    for attend, cross, inner in layers:
        whole = attend.forward(whole, causal=True, seqlens_q=lengths, seqlens_k=lengths)
        whole = inner.forward(cross.forward(whole, encoded, seqlens_q=lengths, seqlens_k=lengths_k))

    table, table_k = polyhead.PageTable(8, 2), polyhead.PageTable(8, 2)
    sequences, sources = ([each.add() for _ in range(B)] for each in (table, table_k))
    caches = [[block.new_cache(8, 2, key_dtype=stored) for block in blocks[:2]] for blocks in layers]
    keys = table_k.extend(sources, lengths_k)
    cuts, outs = [np.array([0, 0]), np.array([3, 1]), np.array([4, 2]), lengths], []
    for before, after in zip(cuts, cuts[1:]):
        new = table.extend(sequences, after - before)
        out = np.full((B, max(after - before), E), np.nan, "f")  # padding is not looked at
        for b in range(B):
            out[b, : after[b] - before[b]] = x[b, before[b] : after[b]]
        out = np.nan_to_num(out)
        for (attend, cross, inner), (own, other) in zip(layers, caches):
            out = attend.forward(out, causal=True, align="bottom_right", cache=own, **new.arguments())
            first = {"key": encoded, "slots": keys.slots} if not before.any() else {}
            out = cross.forward(
                out, cache=other, page_table=keys.page_table, seqlens_q=new.seqlens_q, seqlens_k=lengths_k, **first
            )
            out = inner.forward(out)
        outs.append((out, before, after))
    for out, before, after in outs:
        for b in range(B):
            got, want = out[b, : after[b] - before[b]], whole[b, before[b] : after[b]]
            np.testing.assert_allclose(got, want, rtol=close, atol=10 * close)


def test_what_is_refused():
    weights = attention_weights()
    x = np.ones((B, S, E))
    block = polyhead.AttentionBlock(weights, H, G)
    inner = {"weight1": np.ones((E, INNER)), "weight2": np.ones((INNER, E))}
    feed = polyhead.FeedForwardBlock(inner)
    for call, words in (
        (lambda: polyhead.AttentionBlock(weights, H, G, norm="batch"), "norm is 'batch', must be 'layer', 'rms' or None"),
        (lambda: polyhead.AttentionBlock(weights, H, G, norm=None), "weights has norm_weight, but norm is None"),
        (lambda: polyhead.AttentionBlock(weights | {"norm_bias": np.ones((E, 1))}, H, G), "norm_bias has 2 dimensions"),
        (lambda: polyhead.AttentionBlock(weights | {"norm_bias": np.ones(3)}, H, G).forward(x), "norm.beta dim 0 is 3"),
        (lambda: polyhead.AttentionBlock(weights | {"gamma": np.ones(3)}, H, G), 'weights has "gamma"'),
        (lambda: block.new_caches(B, S), "take new_cache"),
        (lambda: block.forward(x, value=x + 1), "value is given without key"),
        (lambda: block.forward(x, caches=polyhead.MultiHeadAttention({n: a for n, a in weights.items() if "norm" not in n}, H, G).new_caches(B, S)), "a block has neither"),
        (lambda: block.backward(x), "call forward with training=True first"),
        (lambda: polyhead.AttentionBlock(weights | {"out_weight": np.ones((H * D, 5)), "out_bias": np.ones(5)}, H, G).forward(x), "residual adds query to out: out size is 5"),
        (lambda: polyhead.FeedForwardBlock({"weight1": inner["weight1"]}), 'weights has no "weight2"'),
        (lambda: polyhead.FeedForwardBlock(inner | {"weight3": x}), 'weights has "weight3", for which the block has no place'),
        (lambda: polyhead.FeedForwardBlock(inner | {"weight1": x}), "weight1 has 3 dimensions, must have 2"),
        (lambda: polyhead.FeedForwardBlock(inner, activation="tanh"), "activation is 'tanh', must be 'relu'"),
        (lambda: polyhead.FeedForwardBlock(inner | {"bias1": np.ones(3)}).forward(x), "bias1 dim 0 is 3"),
        (lambda: polyhead.FeedForwardBlock(inner | {"weight2": np.ones((3, E))}).forward(x), "weight2 dim"),
        (lambda: feed.forward(x[..., :3]), "weight1"),
        (lambda: feed.forward(x[0]), "x has 2 dimensions"),
        (lambda: feed.forward(x.astype("f")), "weight1 is float64"),
        (lambda: feed.backward(x), "call forward with training=True first"),
        (lambda: (feed.forward(x, training=True), feed.backward(x, needs=("bias1",))), 'needs holds "bias1", must be out of x, weight1, weight2'),
    ):  # fmt: skip
        with pytest.raises(polyhead.Error, match=words):
            call()
    with pytest.raises(TypeError, match='weights\\["weight1"\\] has type list'):
        polyhead.FeedForwardBlock(inner | {"weight1": [[1.0]]})


def test_docstrings():
    result = doctest.testmod(sys.modules["polyhead._blocks"])
    assert result.attempted >= 8 and result.failed == 0
