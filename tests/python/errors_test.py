"""Bad input: each is refused with a sentence that names the argument, and none crashes."""

import numpy as np
import pytest

import polyhead
from polyhead import _bind

ONE = np.ones((1, 2, 2, 4), np.float32)  # [B, S, H, D]
ROWS = np.ones((6, 2, 4), np.float32)  # [total, H, D]
ENDS = np.array([0, 2, 6])


def without_cuda():
    """What a call on NumPy arrays says that names the device cuda."""
    machine = _bind.cuda_machine()
    if not machine["runtime_version"]:
        return "device is cuda, this build has no kernel for it"
    return "no kernel can compute this: cuda_sm80 (" if machine["why_not"] else "query is not on cuda, where this call computes"


def bad(kind, words, **arguments):
    return pytest.param(kind, words, arguments, id=words)


BAD = [
    # Kinds of objects.
    bad(TypeError, "query has type list, must be an array", query=[1.0]),
    bad(TypeError, "query has type NoneType, must be an array", query=None),
    bad(TypeError, "key has type float, must be an array", key=1.0),
    bad(TypeError, "value has type type, must be an array", value=np.ndarray),
    bad(TypeError, "attn_mask has type bool, must be an array of bool", attn_mask=True),
    bad(TypeError, "seqlens_k has type list, must be an array of int32 or int64", seqlens_k=[2]),
    bad(TypeError, "causal has type int, must be True or False", causal=1),
    bad(TypeError, "causal has type NoneType, must be True or False", causal=None),
    bad(TypeError, "window has type int, must be a pair of integers", window=3),
    bad(TypeError, "window has type str, must be a pair of integers", window="ab"),
    bad(TypeError, "window[1] has type float, must be an integer", window=(1, 2.0)),
    bad(TypeError, 'align has type int, must be "top_left" or "bottom_right"', align=0),
    bad(TypeError, "query_offset has type float, must be an integer or an integer array", query_offset=1.0),
    bad(TypeError, "query_offset has type bool, must be an integer", query_offset=True),
    bad(TypeError, "scale has type str, must be a number", scale="1"),
    bad(TypeError, "softcap has type NoneType, must be a number", softcap=None),
    bad(TypeError, "dropout_seed has type float, must be an integer", dropout_p=0.5, dropout_seed=1.0),
    bad(TypeError, "dropout_offset has type NoneType, must be an integer", dropout_offset=None),
    bad(TypeError, "return_logsumexp has type str, must be True or False", return_logsumexp="yes"),
    bad(TypeError, "return_weights has type NoneType, must be True or False", return_weights=None),
    bad(TypeError, "kernel has type int, must be a name out of polyhead.kernels()", kernel=0),
    bad(TypeError, 'device has type int, must be "cpu" or "cuda"', device=0),
    bad(TypeError, "stream has type float, must be an integer", stream=1.0),
    bad(TypeError, "unexpected keyword argument", is_causal=True),
    # Dtypes.
    bad(polyhead.Error, "query has dtype complex64, must be float32, bfloat16", query=ONE.astype(np.complex64)),
    bad(polyhead.Error, "query has dtype object, must be float32", query=ONE.astype(object)),
    bad(polyhead.Error, "int64", query=ONE.astype(np.int64)),
    bad(polyhead.Error, "key is float64", key=ONE.astype(np.float64)),
    bad(polyhead.Error, "attn_mask has dtype uint8, must be bool", attn_mask=np.ones((2, 2), np.uint8)),
    bad(polyhead.Error, "attn_mask is float32", attn_mask=np.ones((2, 2), np.float32)),
    bad(polyhead.Error, "attn_bias", attn_bias=np.ones((2, 2), np.float64)),
    bad(polyhead.Error, "attn_bias", attn_bias=np.ones((2, 2), bool)),
    bad(polyhead.Error, "sink_logits is float64, expected float32", sink_logits=np.ones(4)),
    bad(polyhead.Error, 'normalizer is "sigmoid", must be "softmax" or "none"', normalizer="sigmoid"),
    bad(polyhead.Error, 'return_logsumexp is True, but normalizer is "none"', normalizer="none", return_logsumexp=True),
    bad(polyhead.Error, "sink_logits are given, but normalizer is none", normalizer="none", sink_logits=np.ones(4, np.float32)),
    bad(polyhead.Error, "sink_logits dim 0 is 3", sink_logits=np.ones(3, np.float32)),
    bad(polyhead.Error, "alibi_slopes is float64", alibi_slopes=np.ones(2), align="top_left"),
    bad(polyhead.Error, "seqlens_q has dtype int16, must be int32 or int64", seqlens_q=np.ones(1, np.int16)),
    bad(polyhead.Error, "seqlens_k is float32", seqlens_k=np.ones(1, np.float32)),
    # Ranks and sizes.
    bad(polyhead.Error, "query has 3 dimensions, must have 4: [batch, seqlen_q,", query=ONE[0]),
    bad(polyhead.Error, "key has 5 dimensions, must have 4: [batch, seqlen_k,", key=ONE[None]),
    bad(polyhead.Error, "attn_bias has 5 dimensions, must have 0 to 4", attn_bias=np.ones((1,) * 5, np.float32)),
    bad(polyhead.Error, "alibi_slopes has 3 dimensions, must have 1 to 2", alibi_slopes=np.ones((1, 1, 1), "f")),
    bad(polyhead.Error, "seqlens_k has 0 dimensions, must have 1: [batch]", seqlens_k=np.array(2)),
    bad(polyhead.Error, "key dim 0 is 3, expected batch 1", key=np.repeat(ONE, 3, 0)),
    bad(polyhead.Error, "value dim 1 is 1, expected seqlen_k 2", value=ONE[:, :1]),
    bad(polyhead.Error, "value dim 2 is 1, expected num_heads_kv 2", value=ONE[:, :, :1]),
    bad(polyhead.Error, "key dim 3 is 3, expected head_dim 4", key=ONE[..., :3]),
    bad(polyhead.Error, "num_heads_kv is 0, must", key=ONE[:, :, :0], value=ONE[:, :, :0]),
    bad(polyhead.Error, "num_heads_kv is 4, must", key=np.repeat(ONE, 2, 2), value=np.repeat(ONE, 2, 2)),
    bad(polyhead.Error, "attn_mask dim 3 is 3", attn_mask=np.ones((2, 3), bool)),
    bad(polyhead.Error, "attn_bias dim 1 is 3", attn_bias=np.ones((3, 1, 1), np.float32)),
    bad(polyhead.Error, "alibi_slopes dim 0 is 3", alibi_slopes=np.ones(3, np.float32), align="top_left"),
    bad(polyhead.Error, "query_offset", query_offset=np.zeros(2, np.int32), causal=True),
    bad(polyhead.Error, "seqlens_q dim 0 is 2", seqlens_q=np.ones(2, np.int32)),
    # Where it runs.
    bad(polyhead.Error, 'device is "tpu", must be "cpu" or "cuda"', device="tpu"),
    bad(polyhead.Error, without_cuda(), device="cuda"),
    bad(polyhead.Error, "stream is given, but the CPU has no streams", device="cpu", stream=7),
    bad(polyhead.Error, "stream is -1, must be 0 to 2^64 - 1", stream=-1),
    # Values.
    bad(polyhead.Error, "scale is nan", scale=float("nan")),
    bad(polyhead.Error, "scale is inf", scale=float("inf")),
    bad(polyhead.Error, "must be a finite number", scale=10**400),
    bad(polyhead.Error, "softcap is -1", softcap=-1),
    bad(polyhead.Error, "softcap is nan", softcap=float("nan")),
    bad(polyhead.Error, 'align is "left", must be "top_left" or "bottom_right"', align="left"),
    bad(polyhead.Error, "align is top_left and query_offset is given too", align="top_left", query_offset=0),
    bad(polyhead.Error, "align", causal=True, key=ONE[:, :1], value=ONE[:, :1]),
    bad(polyhead.Error, "window has 3 elements, must be a pair", window=(1, 2, 3)),
    bad(polyhead.Error, "window_left is -2", window=(-2, 0)),
    bad(polyhead.Error, "window[0] is 9223372036854775808, must be -2^63 to 2^63 - 1", window=(2**63, 0)),
    bad(polyhead.Error, "query_offset is -9223372036854775809, must be", query_offset=-(2**63) - 1),
    bad(polyhead.Error, "dropout_p is 0.5, so dropout_seed must be given", dropout_p=0.5),
    bad(polyhead.Error, "dropout_p is 1.5, must be 0 to 1", dropout_p=1.5, dropout_seed=0),
    bad(polyhead.Error, "dropout_p is nan", dropout_p=float("nan"), dropout_seed=0),
    bad(polyhead.Error, "dropout_seed is -1, must be 0 to 2^64 - 1", dropout_seed=-1),
    bad(polyhead.Error, "dropout_seed is 18446744073709551616, must be", dropout_seed=2**64),
    bad(polyhead.Error, "dropout_offset is 4294967296, must be 0 to 2^32 - 1", dropout_offset=2**32),
    bad(polyhead.Error, "dropout_offset is too much to print, must be", dropout_offset=10**5000),
    bad(polyhead.Error, "seqlens_q[0] is 3", seqlens_q=np.array([3])),
    bad(polyhead.Error, "seqlens_k[0] is -1", seqlens_k=np.array([-1])),
    bad(polyhead.Error, 'return_weights is "men", must be True, False or "mean"', return_weights="men"),
    bad(polyhead.Error, "kernel is cuda_sm99, known are", kernel="cuda_sm99"),
    bad(polyhead.Error, 'kernel is "", must be a name', kernel=""),
    # A NUL ends a string in C alone.
    bad(polyhead.Error, r'align is "top_left\x00", must be "top_left" or "bottom_right"', align="top_left\0"),
    bad(polyhead.Error, r'kernel is "reference\x00x", must be a name out of', kernel="reference\0x"),
    bad(polyhead.Error, r'device is "cpu\x00", must be "cpu" or "cuda"', device="cpu\0"),
    bad(polyhead.Error, r"out_dtype is float32\x00, must be float32 or", out_dtype="float32\0"),
    bad(polyhead.Error, r'return_weights is "mean\x00", must be True, False or "mean"', return_weights="mean\0"),
]

PACKED = {"query": ROWS, "key": ROWS, "value": ROWS, "cu_seqlens_q": ENDS, "cu_seqlens_k": ENDS}
BAD_PACKED = [
    bad(polyhead.Error, "cu_seqlens_q is given without cu_seqlens_k", cu_seqlens_k=None),
    bad(polyhead.Error, "cu_seqlens_k is given without cu_seqlens_q", cu_seqlens_q=None),
    bad(polyhead.Error, "query has 4 dimensions, must have 3: [total_q,", query=ONE),
    bad(polyhead.Error, "cu_seqlens_q is empty, must be [batch + 1]", cu_seqlens_q=ENDS[:0]),
    bad(polyhead.Error, "cu_seqlens_k dim 0 is 2", cu_seqlens_k=ENDS[:2]),
    bad(polyhead.Error, "cu_seqlens_k", cu_seqlens_k=np.array([1, 2, 6])),
    bad(polyhead.Error, "cu_seqlens_q[2] is 1", cu_seqlens_q=np.array([0, 2, 1])),
    bad(polyhead.Error, "cu_seqlens_k ends at 7", cu_seqlens_k=np.array([0, 2, 7])),
    bad(polyhead.Error, "seqlens_q", seqlens_q=np.array([1, 1])),
    bad(polyhead.Error, "attn_mask", attn_mask=np.ones((6, 6), bool)),
    bad(polyhead.Error, "return_weights", return_weights=True),
    bad(polyhead.Error, "return_column_sums", return_column_sums=True),
]


def refused(function, kind, words, arguments):
    with pytest.raises(kind) as error:
        function(**arguments)
    message = str(error.value)
    assert words in message
    assert "\n" not in message and len(message) < 600


@pytest.mark.parametrize("kind, words, arguments", BAD)
def test_bad_input(kind, words, arguments):
    refused(polyhead.attention, kind, words, {"query": ONE, "key": ONE, "value": ONE} | arguments)


@pytest.mark.parametrize("kind, words, arguments", BAD_PACKED)
def test_bad_packed_input(kind, words, arguments):
    refused(polyhead.attention, kind, words, PACKED | arguments)


@pytest.mark.parametrize(
    "kind, words, arguments",
    [
        bad(TypeError, "shape has type int, must be four integers", shape=3),
        bad(TypeError, "shape has type float, must be an integer", shape=(1, 1, 1, 1.0)),
        bad(polyhead.Error, "shape has 3 elements, must be four integers", shape=(1, 1, 1)),
        bad(polyhead.Error, "shape is (1, 1, 1, -1), must not be negative", shape=(1, 1, 1, -1)),
        bad(MemoryError, "no memory for a result", shape=(1, 1, 2**20, 2**40)),
        bad(polyhead.Error, "dropout_p is -0.1", dropout_p=-0.1),
        bad(polyhead.Error, "dropout_p is nan", dropout_p=float("nan")),
        bad(TypeError, "dropout_seed has type NoneType, must be an integer", dropout_seed=None),
    ],
)
def test_bad_dropout_mask(kind, words, arguments):
    good = {"shape": (1, 1, 2, 2), "dropout_p": 0.5, "dropout_seed": 1}
    refused(polyhead.dropout_mask, kind, words, good | arguments)


def test_results_too_large_for_memory():
    huge = np.broadcast_to(np.float32(1), (1, 2**40, 1, 4))
    with pytest.raises(MemoryError, match="no memory for a result of 17592186044416 bytes"):
        polyhead.attention(huge, ONE[:, :, :1], ONE[:, :, :1])


def test_explain_refuses_what_attention_refuses():
    with pytest.raises(polyhead.Error, match="scale is nan"):
        polyhead.explain(ONE, ONE, ONE, scale=float("nan"))
    with pytest.raises(polyhead.Error, match="num_heads_kv is 0"):
        polyhead.explain(ONE, ONE[:, :, :0], ONE[:, :, :0])
    with pytest.raises(polyhead.Error, match="kernel is cuda_sm99, known are"):
        polyhead.explain(ONE, ONE, ONE, kernel="cuda_sm99")


def test_error_is_both_kinds():
    assert issubclass(polyhead.Error, ValueError) and issubclass(polyhead.Error, RuntimeError)
    assert polyhead.Error.__module__ == "polyhead" and polyhead.Error.__doc__
