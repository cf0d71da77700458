"""Decoding on a GPU: caches of keys and values, single steps, layers on a cache."""

import numpy as np
import pytest
from arrays import LAYER_WEIGHTS, DeviceMatrix, assert_close, drawn, nothing_is_left  # noqa: F401
from device import Interface, numpy_of

import polyhead


def layers(weights, made=polyhead.MultiHeadAttention):
    return (made(each, 4, 2) for each in (weights, {n: DeviceMatrix(x) for n, x in weights.items()}))


@pytest.mark.parametrize("program", [{}, {"score": lambda score, q, k: score - 0.1 * abs(q - k)}], ids=["plain", "program"])
def test_steps_of_a_layer(program):
    """A prompt's keys stand in the caches, then tokens join; and a program is told the number of the step."""
    here, there = layers(drawn(LAYER_WEIGHTS))
    x = drawn({"x": (2, 5, 12)})["x"]
    lengths = np.array([5, 4])
    both = here.new_caches(2, 5), there.new_caches(2, 5)
    assert type(both[1].key) is polyhead.DeviceArray and both[1].key.shape == both[0].key.shape
    for first in (True, False):
        for step in [None] if first else range(5):
            tokens = x[:, :3] if first else x[:, step : step + 1]
            seen = {} if first else {"seqlens_q": lengths, "align": "top_left"}
            want = here.forward(tokens, causal=True, caches=both[0], step=step, **seen, **program)
            seen |= {name: Interface(array) for name, array in seen.items() if name != "align"}
            got = there.forward(Interface(tokens), causal=True, caches=both[1], step=step, **seen, **program)
            assert_close(numpy_of(got), want, 1e-5)


CACHES = {
    "float32": ("float32", "float32", {"rotary_dim": 4}),
    "float16": ("float16", "float32", {"hadamard": True}),
    "int8": ("int8", "int4", {"rotary_dim": 16, "interleaved": True, "key_group": 16}),
}


def on_device(cache):
    """An unwritten cache like it on the device, and what its arrays hold there."""
    arrays = {name: Interface(array) for name, array in cache.arrays().items()}
    turn = {name: getattr(cache, name) for name in ("rotary_dim", "interleaved", "hadamard")}
    return polyhead.KvCache(**arrays, **turn), lambda: {name: numpy_of(array) for name, array in arrays.items()}


@pytest.mark.parametrize("name", CACHES)
def test_kv_cache(name):
    """What append stores has the bits of the CPU's, whatever slots and positions say; attention reads the pages."""
    key_dtype, value_dtype, options = CACHES[name]
    here = polyhead.KvCache.zeros(6, 3, 2, 32, key_dtype=key_dtype, value_dtype=value_dtype, **options)
    there, held = on_device(here)
    key, value, query = drawn({"key": (7, 2, 32), "value": (7, 2, 32), "query": (7, 4, 32)}).values()
    slots = np.array([4, 5, 0, -1, 17, 8, 9])
    turn = {"positions": np.array([0, 1, 2, 3, 0, 2, 3])} if here.rotary_dim else {}
    if turn:
        angles = drawn({"angles": (4, here.rotary_dim // 2)})["angles"]
        turn |= {"cos": np.cos(angles), "sin": np.sin(angles)}
    want = here.append(key, value, slots=slots, query=query, **turn)
    if turn:
        turn["positions"] = np.array([-5, 1, 2, 3, 0, 2, 1 << 40])
    there_all = {name: Interface(array) for name, array in (turn | {"slots": np.where(slots < 0, 18, slots), "query": query}).items()}
    got = there.append(Interface(key), Interface(value), **there_all)
    np.testing.assert_array_equal(numpy_of(got), want)
    same_bits = lambda: [np.testing.assert_array_equal(array, held()[each]) for each, array in here.arrays().items()]  # noqa: E731
    same_bits()
    moves = np.array([4, 5, 9, 8]), np.array([5, 4, 0, 16])
    here.copy(*moves)
    there.copy(*(Interface(np.append(slots, far)) for slots, far in zip(moves, (18, 17))))
    same_bits()
    for there_too, same in zip(there.read(Interface(np.array([16, -1, 0, 5]))), here.read(np.array([16, 16, 0, 5])), strict=True):
        same[1] = 0
        assert type(there_too) is polyhead.DeviceArray
        np.testing.assert_array_equal(numpy_of(there_too), same)
    if key_dtype == "float16":  # query's is another
        return
    table, lengths = np.array([[1, -9], [0, 2]]), np.array([3, 5])
    query = drawn({"query": (2, 3, 4, 32)})["query"]
    want = polyhead.attention(query, **here.arrays(), page_table=table, seqlens_k=lengths)
    got = polyhead.attention(Interface(query), **there.arrays(), page_table=Interface(table), seqlens_k=Interface(lengths))
    assert_close(numpy_of(got), want)


def test_kv_cache_refuses_by_a_sentence():
    here = polyhead.KvCache.zeros(2, 3, 1, 8)
    there, _ = on_device(here)
    key, slots = np.zeros((1, 1, 8), np.float32), np.array([0])
    refused = [
        (lambda: there.append(key, key, slots=slots), "key is in CPU memory, must be on CUDA device 0"),
        (lambda: here.append(Interface(key), key, slots=slots), "key is on CUDA device 0, must be in CPU memory"),
        (lambda: there.read(slots), "slots is in CPU memory, must be on CUDA device 0"),
        (lambda: there.copy(slots, Interface(slots)), "from_slots is in CPU memory, must be on CUDA device 0"),
        (lambda: on_device(polyhead.KvCache.zeros(1, 1, 1, 1040)), "head_dim is 1040, cuda_sm80 takes caches of 0 to 1024"),
    ]
    for call, sentence in refused:
        with pytest.raises(polyhead.Error, match=sentence) as error:
            call()
        del error


@pytest.mark.parametrize("kind", ["layer", "block"])
def test_layers_on_a_cache(kind):
    """Tokens a few at a time, in pages, turned by their positions."""
    norm = {"norm_weight": (12,), "norm_bias": (12,)} if kind == "block" else {}
    made = polyhead.MultiHeadAttention if kind == "layer" else polyhead.AttentionBlock
    here, there = layers(drawn(LAYER_WEIGHTS | norm), made)
    x, angles = drawn({"x": (2, 6, 12), "angles": (9, 1)}).values()
    both = here.new_cache(8, 2, rotary_dim=2), there.new_cache(8, 2, rotary_dim=2)
    table = np.array([[3, 0, 7], [1, 6, 2]])
    at = np.arange(6)[None] + np.zeros((2, 1), np.int64)
    slots = np.take_along_axis(table, at // 2, 1) * 2 + at % 2
    for first, end in ((0, 3), (3, 4), (4, 6)):
        part = slice(first, end)
        numbers = {"page_table": table, "slots": slots[:, part], "positions": at[:, part], "cos": np.cos(angles),
                   "sin": np.sin(angles), "seqlens_k": np.array([end, end])}  # fmt: skip
        want = here.forward(x[:, part], cache=both[0], causal=True, align="bottom_right", **numbers)
        numbers = {name: Interface(array) for name, array in numbers.items()}
        got = there.forward(Interface(x[:, part]), cache=both[1], causal=True, align="bottom_right", **numbers)
        assert_close(numpy_of(got), want, 1e-5)
