"""Programs from Python: functions that are traced, text, and the ready ones of polyhead.programs, all against the
formula, which calls the same functions on whole arrays."""

import functools
import pathlib
import subprocess
import sys

import numpy as np
import pytest

import formula
import polyhead
from attention_test import check, operands
from polyhead import programs

BATCH, HEADS, SQ, SK = 2, 4, 65, 71  # of sequences that are not one with themselves
SELF = 70


def floats(*dims):
    return lambda rng: (rng.standard_normal(dims) * 0.5).astype(np.float32)


def positive(*dims):
    return lambda rng: (0.1 + rng.random(dims)).astype(np.float32)


def ints(low, high, *dims, dtype=np.int64):
    return lambda rng: rng.integers(low, high, dims).astype(dtype)


def bools(*dims):
    return lambda rng: rng.random(dims) < 0.4


def rising(count, *dims):
    return lambda rng: np.sort(rng.integers(-1, count, dims))


# Captured tensors, and numbers that leave something to see and something to hide at these sizes.
READY = {
    "causal": ({}, {}),
    "sliding_window": ({}, {"window": 9}),
    "band": ({}, {"width": 7}),
    "streaming_llm": ({}, {"sinks": 3, "window": 20}),
    "prefix_lm": ({"prefix": ints(0, SELF, BATCH, dtype=np.int32)}, {}),
    "window_of_head": ({"window": ints(1, 40, HEADS)}, {}),
    "padding": ({"lengths": ints(0, SELF, BATCH)}, {}),
    "keep": ({"kept": bools(BATCH, SELF)}, {}),
    "longformer": ({}, {"window": 24, "dilation": 3}),
    "global_tokens": ({"is_global": bools(SELF)}, {"width": 3}),
    "sparse_strided": ({}, {"stride": 7}),
    "sparse_fixed": ({}, {"block": 16, "summary": 4}),
    "chunked": ({}, {"chunk": 50}),
    "block_causal": ({}, {"block": 32}),
    "block_diffusion": ({}, {"length": 35, "block": 8}),
    "documents": ({"doc": rising(4, BATCH, SELF)}, {}),
    "shared_prefix": ({"branch": rising(3, SELF)}, {}),
    "big_bird": ({"table": bools(HEADS, 5, 5)}, {"block": 16}),
    "flamingo": ({"image": ints(0, 3, SELF), "first": ints(0, 30, 3), "last": ints(30, SELF, 3)}, {}),
    "tree": ({"ancestor": bools(SELF, SELF - 20)}, {"past": 20}),
    "flash_mask": ({"last": ints(0, SELF, BATCH, SELF)}, {}),
    "natten_1d": ({}, {"size": SELF, "kernel": 13}),
    "natten_2d": ({}, {"height": 7, "width": 10, "kernel": 5}),
    "natten_3d": ({}, {"depth": 2, "height": 5, "width": 7, "kernel": 1}),
    "morton": ({}, {"reach": 2}),
    "swin_windows": ({}, {"width": 10, "window": 4, "shift": 2}),
    "sliding_tiles": ({}, {"width": 12, "tile": 2, "reach": 1}),
    "axial": ({}, {"width": 10}),
    "images_or_causal": ({"image": rising(3, BATCH, SELF)}, {}),
    "random": ({}, {"part": 0.3, "seed": 5}),
    "alibi": ({"slope": floats(HEADS)}, {}),
    "t5": ({"table": floats(32, HEADS)}, {"farthest": 50}),
    "relative": ({"table": floats(HEADS, 2 * SELF - 1)}, {"longest": SELF}),
    "relative_clipped": ({"table": floats(HEADS, 33)}, {}),
    "swin": ({"table": floats(19 * 19, HEADS)}, {"width": 10}),
    "deberta": (
        {"content_to_position": floats(BATCH, HEADS, SELF, 32), "position_to_content": floats(BATCH, HEADS, SELF, 32)},
        {},
    ),
    "pair_bias": ({"bias": floats(BATCH, HEADS, SELF, SELF)}, {}),
    "graphormer": ({"distance": ints(0, 9, BATCH, SELF, SELF), "table": floats(HEADS, 9)}, {}),
    "forgetting": ({"log_forget": floats(BATCH, HEADS, SELF)}, {}),
    "softcap": ({}, {"cap": 2.5}),
    "temperature": ({"tau": positive(HEADS)}, {}),
    "log_length": ({}, {}),
    "kerple_log": ({"r1": positive(HEADS), "r2": positive(HEADS)}, {}),
    "kerple_power": ({"r1": positive(HEADS), "r2": positive(HEADS)}, {}),
    "sandwich": ({"ratio": positive(HEADS)}, {"features": 5}),
    "sigmoid_attention": ({}, {"length": SELF}),
    "relu_attention": ({}, {"length": SELF}),
}


def ready(name, seed=0):
    """The options of a call that uses programs.<name>."""
    captured, numbers = READY[name]
    rng = np.random.default_rng(seed)
    function = functools.partial(getattr(programs, name), **numbers)
    what = "mask" if name in programs.MASKS else "score"
    normalizer = {"normalizer": "none"} if name in programs.WEIGHTS else {}
    return {what: function, "captured": {name: make(rng) for name, make in captured.items()}} | normalizer


def test_every_ready_program_is_tested():
    assert sorted(READY) == sorted((*programs.MASKS, *programs.SCORES, *programs.WEIGHTS))


def test_every_ready_program_has_a_row_in_the_bench():
    bench = pathlib.Path(__file__).parents[2] / "bench" / "ready_programs.py"
    suite = subprocess.run([sys.executable, bench], capture_output=True, text=True, check=True).stdout.splitlines()
    assert sorted(line[2:] for line in suite if line.startswith("# ")) == sorted(READY)
    assert all(row.startswith("1x8x2048x64 --") for row in suite[1::2])


@pytest.mark.parametrize("name", READY)
def test_ready(name):
    rng = np.random.default_rng(1)
    query, key, value = operands(rng, np.float32, BATCH, SELF, SELF, HEADS)
    options = ready(name)
    check(query, key, value, **options)
    if "mask" in options:  # it is no mask that shows nothing or all
        visible = formula.attention(query, key, value, **options).weights > 0
        assert visible.any()
        assert not visible.all()


@pytest.mark.parametrize(
    ("kernel", "dtype"),
    [(kernel, dtype) for kernel in polyhead.kernels() for dtype in (np.float32, np.float16)] + [("reference", np.float64)],
)
def test_composed_on_every_kernel(kernel, dtype):
    rng = np.random.default_rng(2)
    query, key, value = operands(rng, dtype, BATCH, SQ, SK, HEADS)
    if reason := polyhead.explain(query, key, value).reasons[kernel]:
        pytest.skip(f"{kernel}: {reason}")
    check(
        query, key, value, kernel, align="bottom_right",
        score=lambda score, h, q, k, offset, slope: programs.softcap(programs.alibi(score, h, q, k, slope, offset), 5.0),
        mask=lambda b, q, k, offset, kept: programs.streaming_llm(q, k, offset, window=30) & programs.keep(b, k, kept),
        captured={"slope": floats(HEADS)(rng), "kept": rng.random((BATCH, SK)) < 0.7},
    )  # fmt: skip


OPERATORS = {
    "ints": lambda score, q, k: score + 0.01 * ((q + 2) * 3 - k // 3 + (q - k) % 5 - (-k) // 4 + (k << 1) + (q >> 2)),
    "reflected": lambda score, q, k: 2 - score / 3 + (100 - k) * 0.01 + 7 // (k + 1) + 9 % (q + 1) + 1 / (q + 1.5),
    "bits": lambda score, q, k: score + 0.1 * ((q & 3) + (k | 4) + (q ^ k) + (3 & q) + ~k + (1 << (q & 3))),
    "floor of floats": lambda score, q: score + (q / 7) // 2 + (q / 7) % 2 + (score // 0.5) * 0.0,
    "powers": lambda score, q, k: score + 0.001 * (q**2 - k**3) + abs(score) ** 1.5 + score**4 * 0.01 + 2 ** (k * 0.01),
    "comparisons": lambda score, q, k: np.where((q > k) ^ (k != 3) | ~(q >= 5), score, np.where(k == q, score, -1.0)),
    "numpy": lambda score, q, k: (
        np.sqrt(np.abs(score)) + np.exp(-np.square(score)) + np.minimum(score, 0.3) * np.maximum(q, k) * 0.01
        + np.log(q + 1.0) + np.sin(score) + np.cos(k * 0.1) + np.tanh(score) + np.clip(score, -0.5, 0.5) + np.floor(score)
        + np.ceil(score) + np.logical_and(q > 3, k).astype(float) + np.where(np.logical_not(k > 4), 1, 0) - np.negative(score)
    ),
    "words": lambda score, q, k: (
        programs.sigmoid(score) + programs.erf(score) + programs.rsqrt(q + 1.0) + programs.clamp(score, -1, 1)
        + programs.power(programs.absolute(score) + 0.5, 0.3) + programs.where(k > q, 0.5, -0.5)
    ),
    "casts": lambda score, q, k: score + (score * 4).astype(int) * 0.1 + (q % 3).astype(bool) + (k > 3).astype(np.float32),
    "numpy's numbers": lambda score, q: np.float32(0.5) * score + np.int64(2) * q * np.float64(0.01) - np.bool_(True),
}  # fmt: skip


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_mean_what_they_mean_on_arrays(name):
    query, key, value = operands(np.random.default_rng(3), np.float64, 1, 9, 11, 2, 1)
    check(query, key, value, score=OPERATORS[name])


def test_gradients_of_what_is_captured_without_a_softmax():
    rng = np.random.default_rng(9)
    query, key, value = operands(rng, np.float64, BATCH, 6, 7, HEADS)
    shift = rng.standard_normal(HEADS)
    options = {"score": lambda score, h, shift: programs.sigmoid(score + shift[h]), "normalizer": "none"}
    options |= {"mask": lambda q, k: k <= q + 1, "captured": {"shift": shift}}
    grad_out = rng.standard_normal((BATCH, 6, HEADS, value.shape[-1]))
    grads = polyhead.attention_backward(grad_out, query, key, value, None, None, **options, needs=("shift", "query"))
    for array, grad in ((shift, grads["shift"]), (query, grads["query"])):
        losses = []
        direction = rng.standard_normal(array.shape)
        for step in (1e-5, -2e-5):
            array += step * direction
            losses.append((formula.attention(query, key, value, **options).out * grad_out).sum())
        array += 1e-5 * direction
        assert abs((losses[0] - losses[1]) / 2e-5 - (grad * direction).sum()) < 1e-6


def test_text_is_the_function():
    rng = np.random.default_rng(4)
    query, key, value = operands(rng, np.float32, BATCH, SELF, SELF, HEADS)
    captured = {"slope": floats(HEADS)(rng), "tau": np.array(1.5, np.float32), "doc": rising(3, SELF)(rng)}
    text = polyhead.attention(
        query, key, value, score="tau[] * score - slope[h] * abs(q - k)", mask="doc[q] == doc[k] and k <= q",
        captured=captured,
    )  # fmt: skip
    function = polyhead.attention(
        query, key, value, score=lambda score, h, q, k, tau, slope: tau * score - slope[h] * abs(q - k),
        mask=lambda q, k, doc: (doc[q] == doc[k]) & (k <= q), captured=captured,
    )  # fmt: skip
    assert text.tobytes() == function.tobytes()
    two_indices = polyhead.attention(query, key, value, score=lambda score, h, k, t: score + t[h][k % 3],
                                     captured={"t": np.ones((HEADS, 3))})  # fmt: skip
    assert np.allclose(two_indices, polyhead.attention(query, key, value), atol=1e-6)


def test_gradients_of_what_is_captured():
    rng = np.random.default_rng(5)
    query, key, value = operands(rng, np.float64, BATCH, 6, 7, HEADS)
    captured = {"slope": rng.standard_normal(HEADS), "tau": np.array(1.3), "doc": ints(0, 2, 7)(rng)}
    options = {
        "score": lambda score, h, q, k, slope, tau: tau * score - slope[h] * abs(q - k),
        "mask": lambda q, k, doc: doc[q] == doc[k],
        "captured": captured,
    }
    out, logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True)
    grad_out = rng.standard_normal(out.shape)
    grads = polyhead.attention_backward(
        grad_out, query, key, value, out, logsumexp, **options, needs=("tau", "slope", "query")
    )
    assert [*grads] == ["tau", "slope", "query"]

    def loss():
        return (formula.attention(query, key, value, **options).out * grad_out).sum()

    for name, array in {**captured, "query": query}.items():
        if name == "doc":
            continue
        assert grads[name].shape == array.shape
        for at in np.ndindex(array.shape):
            kept, step = array[at], 1e-5
            array[at] = kept + step
            above = loss()
            array[at] = kept - step
            below = loss()
            array[at] = kept
            assert abs((above - below) / (2 * step) - grads[name][at]) < 1e-7
    into = {"tau": np.array(5.0), "slope": np.ones(HEADS)}
    again = polyhead.attention_backward(
        grad_out, query, key, value, out, logsumexp, **options, needs=("tau", "slope"), into=into, accumulate=True
    )
    assert again["tau"] is into["tau"]
    assert into["tau"] == grads["tau"] + 5
    assert (into["slope"] == grads["slope"] + 1).all()


def test_other_arrays_and_strides():
    torch = pytest.importorskip("torch")
    rng = np.random.default_rng(6)
    query, key, value = operands(rng, np.float32, 1, 9, 9, HEADS)
    wide = rng.standard_normal((9, 2 * HEADS)).astype(np.float32)
    table = wide[::-1, ::2].T  # [H, 9], a negative stride
    option = {"score": lambda score, h, k, table: score + table[h, k]}
    strided = polyhead.attention(query, key, value, **option, captured={"table": table})
    tensor = polyhead.attention(query, key, value, **option, captured={"table": torch.from_numpy(table.copy())})
    bias = polyhead.attention(query, key, value, attn_bias=table[:, None])
    assert strided.tobytes() == tensor.tobytes()
    assert np.allclose(strided, bias, atol=1e-6)


ONE = np.ones((1, 2, 4, 8), np.float32)
DOC = np.arange(2)
REFUSED = {
    "score takes a parameter x, which is neither one of score, b, h, q, k, offset nor in captured": {
        "score": lambda score, x: score
    },
    "mask takes a parameter score, which is neither one of b, h, q, k, offset nor in captured": {
        "mask": lambda score: score > 0
    },
    "captured is given without score or mask, which could read it": {"captured": {"doc": DOC}},
    "tensor doc is captured, but neither score nor mask read it": {"score": lambda score: score, "captured": {"doc": DOC}},
    "the program reads doc, which captured does not hold": {"mask": "doc[q] == 1"},
    "doc has 1 dims, the program takes 2": {"mask": "doc[b, q] == 1", "captured": {"doc": DOC}},
    "captured['doc'] has dtype int8, must be an array of float32": {
        "mask": lambda q, doc: doc[q] == 1, "captured": {"doc": DOC.astype(np.int8)},
    },
    "program: element [2] of doc [2] is asked for at batch 0, head 0, query 0, key 0": {
        "score": lambda score, q, doc: score + doc[q + 2], "captured": {"doc": DOC},
    },
    "score has type int, must be a function or an expression as text": {"score": 3},
    "captured has type list, must be a dict of arrays by name": {"score": "score", "captured": [DOC]},
    "program: expected a value at": {"score": "score +"},
    "a question to a value": {"score": lambda score, q, k: score if q > k else 0.0},
    "numpy.sinh cannot stand in a score or mask program": {"score": lambda score: np.sinh(score)},
    "mask returns doc, must return a value": {"mask": lambda doc: doc, "captured": {"doc": DOC}},
    "score returns None, must return a value": {"score": lambda score: None},
    "an array that the function closes over, indexed by a value,": {"mask": lambda q: [0, 1][q]},
    "float() of a value": {"score": lambda score: float(score)},
    "doc has 1 dimensions, is indexed by 2 values": {"mask": lambda q, k, doc: doc[q, k], "captured": {"doc": DOC}},
    "doc is indexed by 1.5 in a program, takes integers": {"mask": lambda doc: doc[1.5], "captured": {"doc": DOC}},
}  # fmt: skip


@pytest.mark.parametrize("sentence", REFUSED)
def test_refused(sentence):
    with pytest.raises((polyhead.Error, TypeError, IndexError)) as error:
        polyhead.attention(ONE, ONE, ONE, **REFUSED[sentence])
    assert sentence in str(error.value)


def test_a_name_of_a_gradient_cannot_be_captured():
    out, logsumexp = polyhead.attention(ONE, ONE, ONE, return_logsumexp=True)
    with pytest.raises(polyhead.Error, match="query cannot be the name of a captured tensor here"):
        polyhead.attention_backward(
            ONE, ONE, ONE, ONE, out, logsumexp, score="score + query[k]", captured={"query": np.ones(2)}
        )


def test_what_is_closed_over_is_read_when_called():
    window = 1

    def near(q, k):
        return abs(q - k) <= window

    query, key, value = operands(np.random.default_rng(7), np.float32, 1, 9, 9)
    narrow = polyhead.attention(query, key, value, mask=near)
    window = 5
    assert (polyhead.attention(query, key, value, mask=near) != narrow).any()


def test_in_the_layer():
    rng = np.random.default_rng(8)
    names = ("query_weight", "key_weight", "value_weight", "out_weight")
    layer = polyhead.MultiHeadAttention({name: rng.standard_normal((16, 16)) * 0.3 for name in names}, num_heads=HEADS)
    x, grad_out = rng.standard_normal((2, BATCH, 9, 16))
    slope = rng.random(HEADS).astype(np.float32)
    out = layer.forward(x, causal=True, alibi_slopes=slope, training=True)
    grads = layer.backward(grad_out)
    again = layer.forward(
        x, score=programs.alibi, mask=programs.causal, captured={"slope": slope}, align="top_left", training=True
    )
    assert np.allclose(again, out, atol=1e-12)
    by_program = layer.backward(grad_out)
    assert [*by_program] == ["query", "slope", *names]
    assert np.allclose(by_program["slope"], grads["alibi_slopes"], rtol=1e-5, atol=1e-6)
    assert np.allclose(by_program["query"], grads["query"], atol=1e-12)
    assert [*layer.backward(grad_out, needs=("out_weight", "slope"))] == ["out_weight", "slope"]
    with pytest.raises(polyhead.Error, match='needs holds "slopes"'):
        layer.backward(grad_out, needs=("slopes",))


def test_single_steps_of_the_layer():
    rng = np.random.default_rng(8)
    names = ("query_weight", "key_weight", "value_weight", "out_weight")
    layer = polyhead.MultiHeadAttention({name: rng.standard_normal((16, 16)) * 0.3 for name in names}, num_heads=HEADS)
    x = rng.standard_normal((BATCH, 9, 16))
    program = dict(
        score=lambda score, h, q, k, slope, row: score - slope[h] * (q - k) + row[q] * k,
        mask=lambda q, k: (k <= q) & (k % 4 != 2),
        captured={"slope": rng.random(HEADS).astype(np.float32), "row": rng.random(9)},
    )
    whole = layer.forward(x, **program)
    caches = layer.new_caches(BATCH, 9)
    for step in range(9):
        out = layer.forward(x[:, step : step + 1], **program, caches=caches, step=step)
        assert np.allclose(out, whole[:, step : step + 1], rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize("normalizer", ["softmax", "none"])
def test_sinks_and_weights_without_a_softmax_in_the_layer(normalizer):
    rng = np.random.default_rng(10)
    weights = {f"{name}_weight": rng.standard_normal((16, 16)) * 0.3 for name in ("query", "key", "value", "out")}
    layer = polyhead.MultiHeadAttention(weights, num_heads=HEADS, normalizer=normalizer)
    x, grad_out = rng.standard_normal((2, BATCH, 9, 16))
    options = {"sink_logits": rng.standard_normal(HEADS)} if normalizer == "softmax" else {"score": "sigmoid(score - 2)"}
    out = layer.forward(x, causal=True, training=True, **options)
    grads = layer.backward(grad_out)
    q, k, v = ((x @ weights[f"{name}_weight"]).reshape(BATCH, 9, HEADS, 4) for name in ("query", "key", "value"))
    whole = polyhead.attention(q, k, v, causal=True, normalizer=normalizer, **options, return_logsumexp=normalizer == "softmax")
    whole, logsumexp = whole if normalizer == "softmax" else (whole, None)
    assert np.allclose(out, whole.reshape(BATCH, 9, 16) @ weights["out_weight"], atol=1e-12)
    by_whole = (grad_out @ weights["out_weight"].T).reshape(whole.shape)
    needs = ("query", *(["sink_logits"] if logsumexp is not None else []))
    wanted = polyhead.attention_backward(
        by_whole, q, k, v, whole, logsumexp, causal=True, normalizer=normalizer, **options, needs=needs
    )
    by_query = np.einsum("bsi,bsj->ij", x, wanted["query"].reshape(BATCH, 9, 16))
    assert np.allclose(grads["query_weight"], by_query, atol=1e-12)
    if logsumexp is not None:
        assert np.allclose(grads["sink_logits"], wanted["sink_logits"], atol=1e-12)


def test_explain_tells_what_values_depend_on_and_which_blocks_are_seen():
    query = np.zeros((2, 300, 4, 8), np.float32)
    document = np.repeat(np.arange(3), 100)
    told = polyhead.explain(
        query, query, query, score="score + slope[h] * (k - q)", mask=lambda q, k, doc: doc[q] == doc[k],
        captured={"doc": document, "slope": np.ones(4, np.float32)},
    )  # fmt: skip
    assert dict(told.program) == {
        "doc[q]": "q", "doc[k]": "k", "mask = doc[q] == doc[k]": "q, k", "slope[h]": "nothing",
        "slope[h] * float(k - q)": "q - k", "score = score + (slope[h] * float(k - q))": "q, k",
    }  # fmt: skip
    shown = document[:, None] == document
    blocks = [shown[q : q + 64, k : k + 128] for q in range(0, 300, 64) for k in range(0, 300, 128)]
    counts = [sum(not block.any() for block in blocks), 0, sum(block.all() for block in blocks)]
    counts[1] = len(blocks) - sum(counts)
    assert told.blocks == tuple(8 * count for count in counts)
    assert f"blocks of 64 x 128: {told.blocks[0]} hidden" in str(told)
    plain = polyhead.explain(query, query, query)
    assert plain.program == () and plain.blocks is None
    with pytest.raises(polyhead.Error, match="seqlens_k"):
        polyhead.explain(query, query, query, mask="k <= q", seqlens_k=np.array([1, 301]))
