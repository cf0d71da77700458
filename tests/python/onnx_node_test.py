"""ONNX's own node cases for Attention (opsets 23, 24 and 25) through polyhead.attention.

The adaptor below says how ONNX's operator maps to ours. It passes the inputs in their own dtype: where ONNX's reference
rounds sqrt(scale) * Q to float16 or bfloat16, ours does not, and stays within the cases' tolerance.
"""

import re
import unittest
import warnings

import numpy as np
import pytest

import polyhead

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its Attention node cases are left out")
from onnx.backend.base import Backend, BackendRep  # noqa: E402
from onnx.backend.test import BackendTest  # noqa: E402

INPUTS = ("Q", "K", "V", "attn_mask", "past_key", "past_value", "nonpad_kv_seqlen")
OUTPUTS = ("Y", "present_key", "present_value", "qk_matmul_output")


def heads_first(x, num_heads):
    """[B, S, H * D] -> [B, H, S, D]; 4-D arrays are that already."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)


def padded_mask(mask, num_keys):
    """A mask may be shorter than the keys: those behind its end are hidden."""
    hidden = False if mask.dtype == bool else -np.inf
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, num_keys - mask.shape[-1])], constant_values=hidden)


def scores(query, key, scale, softcap):
    """qk_matmul_output before masks, [B, H, Sq, Sk]: no output of attention's, so computed here."""
    key = np.repeat(key, query.shape[1] // key.shape[1], axis=1).astype(np.float64)
    result = scale * np.einsum("bhid,bhjd->bhij", query.astype(np.float64), key)
    return softcap * np.tanh(result / softcap) if softcap > 0 else result


def hidden_as_bias(shape, options):
    """What ONNX adds to the scores in mode 2: the bias, and -inf where mask, causal, window and lengths hide."""
    result = np.zeros(shape) + np.asarray(options.get("attn_bias", 0.0)).astype(np.float64)
    i, j = np.ogrid[: shape[2], : shape[3]]
    position = i + np.reshape(options["query_offset"], (-1, 1, 1, 1))
    left, right = options["window"]
    visible = np.ones(shape, bool) & options.get("attn_mask", True)
    if options["causal"]:
        visible &= j <= position
    if left >= 0:
        visible &= j >= position - left
    if right >= 0:
        visible &= j <= position + right
    if "seqlens_k" in options:
        visible &= j < options["seqlens_k"].reshape(-1, 1, 1, 1)
    return np.where(visible, result, -np.inf)


def attention_node(inputs, attributes, wanted):
    """The outputs of one Attention node, by name; `inputs` and `attributes` as the node has them."""
    mode = attributes.get("qk_matmul_output_mode", 0)
    softcap = attributes.get("softcap", 0.0)
    query = heads_first(inputs["Q"], attributes.get("q_num_heads"))
    key = heads_first(inputs["K"], attributes.get("kv_num_heads"))
    value = heads_first(inputs["V"], attributes.get("kv_num_heads"))
    offset = 0
    if "past_key" in inputs:
        offset = inputs["past_key"].shape[2]
        key = np.concatenate([inputs["past_key"], key], axis=2)
        value = np.concatenate([inputs["past_value"], value], axis=2)

    options = {
        "causal": bool(attributes.get("is_causal", 0)),
        "window": (attributes.get("left_window_size", -1), attributes.get("right_window_size", -1)),
        "query_offset": offset,
        "scale": attributes.get("scale", 1 / np.sqrt(query.shape[3])),
        "softcap": softcap,
    }
    if "nonpad_kv_seqlen" in inputs:
        options["seqlens_k"] = inputs["nonpad_kv_seqlen"]
        options["query_offset"] = inputs["nonpad_kv_seqlen"] - query.shape[2]
    if "attn_mask" in inputs:
        mask = padded_mask(inputs["attn_mask"], key.shape[2])
        options["attn_mask" if mask.dtype == bool else "attn_bias"] = mask

    bshd = [x.transpose(0, 2, 1, 3) for x in (query, key, value)]
    qk = None
    if "qk_matmul_output" in wanted and mode == 3:
        out, qk = polyhead.attention(*bshd, **options, return_weights=True)
    else:
        out = polyhead.attention(*bshd, **options)
    if "qk_matmul_output" in wanted and mode < 3:
        qk = scores(query, key, options["scale"], softcap if mode > 0 else 0.0)
        if mode == 2:
            qk = qk + hidden_as_bias(qk.shape, options)
        qk = qk.astype(query.dtype)
    return {
        "Y": out.reshape(*out.shape[:2], -1) if inputs["Q"].ndim == 3 else out.transpose(0, 2, 1, 3),
        "present_key": key,
        "present_value": value,
        "qk_matmul_output": qk,
    }


class AttentionRep(BackendRep):
    def __init__(self, model):
        (self.node,) = model.graph.node
        self.names = [value.name for value in model.graph.input]
        self.attributes = {a.name: onnx.helper.get_attribute_value(a) for a in self.node.attribute}

    def run(self, arrays):
        given = dict(zip(self.names, arrays, strict=True))
        inputs = {role: given[name] for role, name in zip(INPUTS, self.node.input) if name}
        wanted = [role for role, name in zip(OUTPUTS, self.node.output) if name]
        outputs = attention_node(inputs, self.attributes, wanted)
        return [outputs[role] for role in wanted]


class PolyheadBackend(Backend):
    @classmethod
    def prepare(cls, model, device="CPU", **_):
        return AttentionRep(model)

    @classmethod
    def supports_device(cls, device):
        return device == "CPU"


def is_attention_case(name):
    return re.match(r"test_attention_.*_cpu$", name) and "_expanded" not in name


with warnings.catch_warnings():
    warnings.simplefilter("ignore")  # of other operators' cases, which are made at the same time
    CASES = {
        name: case
        for group in BackendTest(PolyheadBackend, __name__).test_cases.values()
        for name, case in vars(group).items()
        if is_attention_case(name)
    }
AttentionNodes = type("AttentionNodes", (unittest.TestCase,), {"__module__": __name__, **CASES})


def test_no_case_is_missing():
    assert len(CASES) >= 93  # onnx 1.23: 69 of opset 23, 13 of 24, 11 of 25
