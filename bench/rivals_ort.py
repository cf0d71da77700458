"""onnxruntime's ways to compute attention, each a model of one node built in memory.

  MultiHeadAttention    com.microsoft; query, key, value [B, S, H*D], or key and value [B, H, S, D] ("bnsh")
  Attention             ai.onnx, opset 23; [B, H, S, D]
  GroupQueryAttention   com.microsoft; one new key a call, appended in place to a cache [B, G, Sk, D]: decoding

The threads do not spin between calls, and outputs are bound to memory that is allocated once.
"""

import numpy as np
import onnx
import onnxruntime
from onnx import TensorProto, helper

from problem import Operands, Problem
from rivals import Contender, Refusal

_ELEMENTS = {"float32": TensorProto.FLOAT, "int32": TensorProto.INT32, "int8": TensorProto.INT8, "bool": TensorProto.BOOL}


def _check(p: Problem) -> None:
    if p.dtype != "f32":
        raise Refusal(f"its CPU kernels take no {p.dtype}" if p.dtype == "bf16" else "is measured in f32 only")
    if p.dropout_p > 0:
        raise Refusal("has no dropout")


def _swap(array: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(array.transpose(0, 2, 1, 3))


def _rows(array: np.ndarray) -> np.ndarray:
    """[B, H, S, D] as [B, S, H*D]."""
    batch, heads, seqlen, dim = array.shape
    return _swap(array).reshape(batch, seqlen, heads * dim)


def _session(node: onnx.NodeProto, inputs: dict, outputs: dict, threads: int) -> onnxruntime.InferenceSession:
    infos = [
        [helper.make_tensor_value_info(name, _ELEMENTS[a.dtype.name], a.shape) for name, a in arrays.items()]
        for arrays in (inputs, outputs)
    ]
    graph = helper.make_graph([node], "attention", infos[0], infos[1])
    opsets = [helper.make_opsetid("", 23), helper.make_opsetid("com.microsoft", 1)]
    model = helper.make_model(graph, opset_imports=opsets, ir_version=10)
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.inter_op_num_threads = 1
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])


def _bound(session: onnxruntime.InferenceSession, inputs: dict, outputs: dict):
    """A call that runs the session on `inputs` into `outputs`, without a copy."""
    binding = session.io_binding()
    held = []
    for bind, arrays in ((binding.bind_ortvalue_input, inputs), (binding.bind_ortvalue_output, outputs)):
        for name, array in arrays.items():
            value = onnxruntime.OrtValue.ortvalue_from_numpy(array)
            held.append(value)
            bind(name, value)
    first = len(inputs)

    def call():
        session.run_with_iobinding(binding)
        return held[first]

    return call


def _contender(node, inputs, outputs, threads, unpack) -> Contender:
    try:
        session = _session(node, inputs, outputs, threads)
        call = _bound(session, inputs, outputs)
        call()
    except Exception as error:  # onnxruntime's errors share no base class of their own
        raise Refusal(str(error).split("Status Message:")[-1].strip().splitlines()[-1][-200:]) from None
    return Contender(call, lambda value: [unpack(value.numpy())])


def _multi_head(p: Problem, x: Operands, threads: int, bnsh: bool) -> Contender:
    _check(p)
    if p.num_heads != p.num_heads_kv:
        raise Refusal("wants as many key/value heads as query heads")
    if p.causal and p.seqlen_q != p.seqlen_k:
        raise Refusal("takes causal for seqlen_q == seqlen_k only")
    inputs = {"query": _rows(x.query)}
    inputs["key"], inputs["value"] = (x.key, x.value) if bnsh else (_rows(x.key), _rows(x.value))
    names = ["query", "key", "value", "", "", ""]
    only_lengths = p.lengths and x.mask is None and p.window is None
    if only_lengths:
        names[4] = "key_padding_mask"
        inputs[names[4]] = x.lengths
    elif (mask := x.dense_mask(p)) is not None:
        mask = np.broadcast_to(mask, (*mask.shape[:2], p.seqlen_q, p.seqlen_k))
        inputs["attention_bias"] = np.where(mask, np.float32(0), np.float32(-np.inf))
    if x.bias is not None:
        bias = np.broadcast_to(x.bias, (*x.bias.shape[:2], p.seqlen_q, p.seqlen_k))
        inputs["attention_bias"] = bias + inputs.get("attention_bias", np.float32(0))
    if "attention_bias" in inputs:
        names[5] = "attention_bias"
    causal = p.causal and p.window is None
    node = helper.make_node(
        "MultiHeadAttention", names, ["out"], domain="com.microsoft", num_heads=p.num_heads, unidirectional=int(causal)
    )
    outputs = {"out": np.empty((p.batch, p.seqlen_q, p.num_heads * p.head_dim_v), np.float32)}
    unpack = lambda out: _swap(out.reshape(p.batch, p.seqlen_q, p.num_heads, p.head_dim_v))  # noqa: E731
    return _contender(node, inputs, outputs, threads, unpack)


def multi_head(p: Problem, x: Operands, threads: int) -> Contender:
    return _multi_head(p, x, threads, bnsh=False)


def multi_head_bnsh(p: Problem, x: Operands, threads: int) -> Contender:
    return _multi_head(p, x, threads, bnsh=True)


def attention_23(p: Problem, x: Operands, threads: int) -> Contender:
    _check(p)
    if p.causal and p.offset != 0:
        raise Refusal("its causal is top-left without a cache")
    inputs = {"query": x.query, "key": x.key, "value": x.value}
    mask = x.dense_mask(p)
    if mask is not None:  # it broadcasts batch and heads only
        inputs["mask"] = mask = np.ascontiguousarray(np.broadcast_to(mask, (*mask.shape[:2], p.seqlen_q, p.seqlen_k)))
    if x.bias is not None:
        bias = np.broadcast_to(x.bias, (*x.bias.shape[:2], p.seqlen_q, p.seqlen_k))
        inputs["mask"] = np.where(True if mask is None else mask, bias, np.float32(-np.inf))
    causal = int(p.causal and mask is None)
    node = helper.make_node("Attention", list(inputs), ["out"], is_causal=causal)
    outputs = {"out": np.empty((p.batch, p.num_heads, p.seqlen_q, p.head_dim_v), np.float32)}
    return _contender(node, inputs, outputs, threads, lambda out: out)


def group_query_on_cache(p: Problem, x: Operands, threads: int, bits: int = 0) -> tuple[Contender, int]:
    """The last seqlen_q keys are new, and appended in place to a cache [B, G, Sk, D]; and the cache's bytes. `bits`: 8 or 4 of a
    stored number, with one scale for all keys and one for all values; 0: float32."""
    caches, scales = {}, {}
    for name, array in (("key", x.key), ("value", x.value)):
        scale = np.abs(array).max() / {8: 127, 4: 7}[bits] if bits else np.float32(1)
        caches[name] = np.rint(array / scale).astype(np.int8) if bits else array.copy()
        scales[f"{name[0]}_scale"] = np.array([scale], np.float32)
    new = slice(p.seqlen_k - p.seqlen_q, p.seqlen_k)
    inputs = {
        "query": _rows(x.query),
        "new_key": _rows(x.key[:, :, new]),
        "new_value": _rows(x.value[:, :, new]),
        "past_key": caches["key"],
        "past_value": caches["value"],
        "last": np.full(p.batch, p.seqlen_k - 1, np.int32),
        "total": np.array(p.seqlen_k, np.int32),
    }
    names = list(inputs)
    attributes = {"num_heads": p.num_heads, "kv_num_heads": p.num_heads_kv}
    if bits:
        inputs |= scales
        names += ["", "", "", "", "", *scales]
        attributes |= {"k_quant_type": "PER_TENSOR", "v_quant_type": "PER_TENSOR", "kv_cache_bit_width": bits}
    outputs = {
        "out": np.empty((p.batch, p.seqlen_q, p.num_heads * p.head_dim_v), np.float32),
        "present_key": caches["key"],
        "present_value": caches["value"],
    }
    node = helper.make_node("GroupQueryAttention", names, list(outputs), domain="com.microsoft", **attributes)
    unpack = lambda out: _swap(out.reshape(p.batch, p.seqlen_q, p.num_heads, p.head_dim_v))  # noqa: E731
    made = _contender(node, inputs, outputs, threads, unpack)
    return made, sum(cache.nbytes for cache in caches.values())


def group_query(p: Problem, x: Operands, threads: int) -> Contender:
    _check(p)
    if not (p.seqlen_q == 1 and p.decode):
        raise Refusal("is measured where it is meant to be used: one new key a call, behind a cache")
    if p.lengths or x.mask is not None or x.bias is not None or p.window is not None:
        raise Refusal("is measured without mask, bias and window")
    return group_query_on_cache(p, x, threads)[0]
