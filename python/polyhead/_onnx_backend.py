"""ONNX's Attention computed by polyhead, and the backend that runs models with it."""

from __future__ import annotations

import itertools
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import onnx
from onnx.backend import base
from onnx.reference import ReferenceEvaluator
from onnx.reference.op_run import OpRun

import polyhead

# qk_matmul_output_mode
_PLAIN, _CAPPED, _MASKED, _WEIGHTS = range(4)


class Attention(OpRun):
    """The operator, for ``onnx.reference.ReferenceEvaluator(model, new_ops=[polyhead.onnx.Attention])``.

    Inputs Q, K, V [B, H, S, D] or [B, S, H * D], attn_mask, past_key, past_value, nonpad_kv_seqlen; outputs Y,
    present_key, present_value, qk_matmul_output, all as the standard has them. In float16 and bfloat16 the scores are
    summed in float32, whatever softmax_precision says; where the standard's reference rounds ``sqrt(scale) * Q``, this
    does not.
    """

    op_domain = ""

    def _run(
        self, Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, scale=None, is_causal=0,
        q_num_heads=None, kv_num_heads=None, softcap=None, qk_matmul_output_mode=None, softmax_precision=None,
        left_window_size=None, right_window_size=None, mask_broadcasts=None, own=None,
    ):  # fmt: skip
        query, key, value = _heads_first(Q, q_num_heads), _heads_first(K, kv_num_heads), _heads_first(V, kv_num_heads)
        offset = 0
        if past_key is not None:
            offset = past_key.shape[2]
            key, value = np.concatenate([past_key, key], axis=2), np.concatenate([past_value, value], axis=2)
        options = _options(query, scale, softcap, is_causal, (left_window_size, right_window_size))
        options["query_offset"] = offset
        if nonpad_kv_seqlen is not None:
            options |= {"seqlens_k": nonpad_kv_seqlen, "query_offset": nonpad_kv_seqlen - query.shape[2]}
        options |= own or {}
        if attn_mask is not None:
            mask = attn_mask if mask_broadcasts and attn_mask.shape[-1] == 1 else _padded(attn_mask, key.shape[2])
            options["attn_mask" if mask.dtype == bool else "attn_bias"] = mask
        wanted = len(self.onnx_node.output)
        mode = (qk_matmul_output_mode or _PLAIN) if wanted > 3 else None
        out, scores = _attend(query, key, value, options, mode)
        out = out.reshape(*out.shape[:2], -1) if Q.ndim == 3 else out.transpose(0, 2, 1, 3)
        return (out, key, value, scores)[:wanted]


class _OwnAttention(Attention):
    """The same of the domain "polyhead", as `fuse` emits it: without caches, with sink_logits, H floats in any dims, and a program
    `score`, whose tensors c0, c1 and so on stand behind them. Where its outputs are asked for, the half of a training step that
    `_OwnAttentionGrad` ends: logsumexp [B, H, Sq], and the int64 seed and offset of dropout.
    """

    op_domain = "polyhead"

    def __init__(self, node, run_params, schema=None):
        super().__init__(node, run_params, schema)
        self._seed = secrets.randbits(62)
        self._draws = itertools.count()

    def _run(
        self, Q, K, V, attn_mask=None, past_key=None, past_value=None, nonpad_kv_seqlen=None, sink_logits=None, *captures,
        score=None, dropout_p=None, seed=None, **attributes,
    ):  # fmt: skip
        outputs = self.onnx_node.output
        attn_mask, past_key, past_value, nonpad_kv_seqlen, sink_logits = map(_given, (attn_mask, past_key, past_value, nonpad_kv_seqlen, sink_logits))
        own = _own_options(Q, sink_logits, score, captures)
        if len(outputs) < 5:
            return super()._run(Q, K, V, attn_mask, past_key, past_value, nonpad_kv_seqlen, own=own, **attributes)
        heads = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
        query, key, value = (_sequence_first(x, n) for x, n in zip((Q, K, V), (heads[0], heads[1], heads[1]), strict=True))
        state = np.array([self._seed if seed is None else seed, next(self._draws)], np.int64)
        options = _training_options(query, attn_mask, dropout_p, state, attributes) | own
        out, logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True)
        return (_as_given(out, Q), _LEFT_OUT, _LEFT_OUT, _LEFT_OUT, logsumexp, state)[: len(outputs)]


class _OwnAttentionGrad(OpRun):
    """Gradients of that: inputs Q, K, V, Y, logsumexp, dY, attn_mask, dropout, sink_logits, c0, ...; outputs dQ, dK, dV, and those
    of attn_mask, sink_logits, c0, ...
    """

    op_domain = "polyhead"

    def _run(
        self, Q, K, V, Y, logsumexp, dY, attn_mask=None, dropout=None, sink_logits=None, *captures,
        score=None, dropout_p=None, **attributes,
    ):  # fmt: skip
        attn_mask, dropout, sink_logits = map(_given, (attn_mask, dropout, sink_logits))
        num_heads, num_heads_kv = attributes.get("q_num_heads"), attributes.get("kv_num_heads")
        query, out, grad_out = (_sequence_first(x, num_heads) for x in (Q, Y, dY))
        key, value = _sequence_first(K, num_heads_kv), _sequence_first(V, num_heads_kv)
        given = {"query": Q, "key": K, "value": V, "attn_bias": attn_mask, "sink_logits": sink_logits}
        given |= {f"c{i}": x for i, x in enumerate(captures)}
        wanted = [name for name, output in zip(given, self.onnx_node.output, strict=False) if output]
        options = _training_options(query, attn_mask, dropout_p, dropout, attributes) | _own_options(Q, sink_logits, score, captures)
        grads = polyhead.attention_backward(grad_out, query, key, value, out, logsumexp, **options, needs=wanted)
        if "attn_bias" in grads:
            grads["attn_bias"] = grads["attn_bias"].reshape(attn_mask.shape)
        if "sink_logits" in grads:
            grads["sink_logits"] = grads["sink_logits"].reshape(sink_logits.shape).astype(sink_logits.dtype)
        grads |= {name: _as_given(grads[name], given[name]) for name in ("query", "key", "value") if name in grads}
        return tuple(grads.get(name, _LEFT_OUT) for name in given)[: len(self.onnx_node.output)]


class _Linear(OpRun):
    """sum = activation(X W + B) + R, Y = norm(sum), as `fuse` emits it with ``layers``: X [..., k], W [k, n] or with transB
    [n, k]; B, gamma and beta n numbers in any dims, R and the outputs [..., n]. In float64, rounded once at each output.
    """

    op_domain = "polyhead"

    def _run(self, X, W, B=None, R=None, gamma=None, beta=None, transB=0, activation="", norm="", epsilon=1e-5):
        dtype = X.dtype
        X, W, B, R, gamma, beta = (None if x is None else np.asarray(x, np.float64) for x in (X, W, B, R, gamma, beta))
        total = X @ (W.T if transB else W)
        total = _ACTIVATIONS[activation or ""](total if B is None else total + B.reshape(-1))
        total = (total if R is None else total + R).astype(dtype)
        if not norm:
            return (total,)
        x = total.astype(np.float64)
        if norm == "layer":
            x -= x.mean(axis=-1, keepdims=True)
        x /= np.sqrt((x * x).mean(axis=-1, keepdims=True) + epsilon)
        x = x if gamma is None else x * gamma.reshape(-1)
        x = x if beta is None else x + beta.reshape(-1)
        return (x.astype(dtype), total)[: len(self.onnx_node.output)]


_erf = np.vectorize(math.erf, otypes=[np.float64])
_ACTIVATIONS = {
    "": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "gelu": lambda x: x * (1 + _erf(x / np.sqrt(2))) / 2,
    "gelu_tanh": lambda x: x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))) / 2,
    "silu": lambda x: x / (1 + np.exp(-x)),
}

_LEFT_OUT = np.empty(0, np.float32)  # an output that nobody reads


def _given(x):
    """An input; what has no name is None, or for the evaluator the last output without one."""
    return None if x is _LEFT_OUT else x


# The evaluator goes by the classes' names.
_OwnAttention.__name__, _OwnAttentionGrad.__name__, _Linear.__name__ = "Attention", "AttentionGrad", "Linear"


def _options(query, scale, softcap, is_causal, window):
    """Of query [..., D]."""
    return {
        "causal": bool(is_causal),
        "window": tuple(-1 if size is None else size for size in window),
        "scale": 1 / np.sqrt(query.shape[-1]) if scale is None else scale,
        "softcap": softcap or 0.0,
    }


def _training_options(query, attn_mask, dropout_p, state, attributes):
    window = attributes.get("left_window_size"), attributes.get("right_window_size")
    options = _options(query, attributes.get("scale"), attributes.get("softcap"), attributes.get("is_causal"), window)
    if attn_mask is not None:
        options["attn_mask" if attn_mask.dtype == bool else "attn_bias"] = attn_mask.reshape((1,) * (4 - attn_mask.ndim) + attn_mask.shape)
    if dropout_p:
        options |= {"dropout_p": dropout_p, "dropout_seed": int(state[0]), "dropout_offset": int(state[1])}
    return options


def _own_options(query, sink_logits, score, captures):
    """Of what the domain's operator has beside those of ONNX's."""
    own = {}
    if sink_logits is not None:
        own["sink_logits"] = np.reshape(sink_logits, -1).astype(np.float64 if query.dtype == np.float64 else np.float32)
    if score:
        own |= {"score": score.partition("score = ")[2], "captured": {f"c{i}": x for i, x in enumerate(captures)}}
    return own


def _sequence_first(x, num_heads):
    """[B, H, S, D] or [B, S, H * D] -> [B, S, H, D]"""
    return x.transpose(0, 2, 1, 3) if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads, -1)


def _as_given(x, like):
    """[B, S, H, D] in the form of `like`."""
    return x.transpose(0, 2, 1, 3) if like.ndim == 4 else x.reshape(*x.shape[:2], -1)


def _heads_first(x, num_heads):
    """[B, S, H * D] -> [B, H, S, D]; 4-D arrays are that already."""
    return x if x.ndim == 4 else x.reshape(*x.shape[:2], num_heads, -1).transpose(0, 2, 1, 3)


def _padded(mask, num_keys):
    """A mask may be shorter than the keys: those behind its end are hidden."""
    hidden = False if mask.dtype == bool else -np.inf
    return np.pad(mask, [(0, 0)] * (mask.ndim - 1) + [(0, num_keys - mask.shape[-1])], constant_values=hidden)


def _attend(query, key, value, options, mode):
    """out [B, Sq, H, Dv], and what mode asks for [B, H, Sq, Sk]."""
    tensors = [x.transpose(0, 2, 1, 3) for x in (query, key, value)]
    if mode == _WEIGHTS:
        return polyhead.attention(*tensors, **options, return_weights=True)
    out = polyhead.attention(*tensors, **options)
    return out, None if mode is None else _scores(query, key, options, mode)


def _scores(query, key, options, mode):
    """The scores of mode, [B, H, Sq, Sk]: what attention never stores, so computed here, in float64."""
    expanded = np.repeat(key, query.shape[1] // key.shape[1], axis=1).astype(np.float64)
    scores = options["scale"] * np.einsum("bhid,bhjd->bhij", query.astype(np.float64), expanded)
    if mode != _PLAIN and options["softcap"] > 0:
        scores = options["softcap"] * np.tanh(scores / options["softcap"])
    if mode == _MASKED:
        scores = scores + _masked_bias(scores.shape, options)
    return scores.astype(query.dtype)


def _masked_bias(shape, options):
    """The bias, and -inf where mask, causal, window and lengths hide."""
    bias = np.zeros(shape) + np.asarray(options.get("attn_bias", 0.0)).astype(np.float64)
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
    return np.where(visible, bias, -np.inf)


class Model(base.BackendRep):
    """A model that `polyhead.onnx.Backend.prepare` has made ready; may run many times."""

    def __init__(self, model: onnx.ModelProto) -> None:
        self._evaluator = ReferenceEvaluator(model, new_ops=[Attention, _OwnAttention, _OwnAttentionGrad, _Linear])

    def run(self, inputs: Mapping[str, Any] | Sequence[Any], **kwargs: Any) -> tuple[Any, ...]:
        """The model's outputs, in its order.

        Parameters
        ----------
        inputs : mapping of str to array, or sequence of array
            By the names of the model's inputs, or in their order.
        **kwargs
            Of ONNX's interface; unused.

        Returns
        -------
        tuple of array
        """
        if not isinstance(inputs, Mapping):
            inputs = dict(zip(self._evaluator.input_names, inputs, strict=False))
        return tuple(self._evaluator.run(None, dict(inputs)))


class Backend(base.Backend):
    """ONNX's interface to what runs models, for ``onnx.backend.test`` and the like."""

    @classmethod
    def prepare(cls, model: onnx.ModelProto, device: str = "CPU", **kwargs: Any) -> Model:
        """Makes a model ready to run.

        Parameters
        ----------
        model : onnx.ModelProto
            Checked by ``onnx.checker``.
        device : str
            "CPU".
        **kwargs
            Of ONNX's interface; unused.

        Raises
        ------
        polyhead.Error
            Another device. What ``onnx.checker`` refuses is its own ValidationError.
        """
        if not cls.supports_device(device):
            raise polyhead.Error(f'device is "{device}", must be "CPU"')
        onnx.checker.check_model(model)
        return Model(model)

    @classmethod
    def run_model(cls, model: onnx.ModelProto, inputs: Any, device: str = "CPU", **kwargs: Any) -> tuple[Any, ...]:
        """``prepare(model, device).run(inputs)``."""
        return cls.prepare(model, device, **kwargs).run(inputs)

    @classmethod
    def run_node(
        cls, node: onnx.NodeProto, inputs: Any, device: str = "CPU", outputs_info: Any = None, **kwargs: Any
    ) -> tuple[Any, ...]:
        """The outputs of one node; inputs as of `polyhead.onnx.Model.run`, outputs_info unused."""
        if not cls.supports_device(device):
            raise polyhead.Error(f'device is "{device}", must be "CPU"')
        super().run_node(node, inputs, device, outputs_info, **kwargs)  # checks the node
        evaluator = ReferenceEvaluator(node, new_ops=[Attention])
        names = [name for name in node.input if name]
        return tuple(evaluator.run(None, dict(inputs if isinstance(inputs, Mapping) else zip(names, inputs, strict=True))))

    @classmethod
    def supports_device(cls, device: str) -> bool:
        """Whether device is "CPU"."""
        return device == "CPU"


prepare = Backend.prepare
run_model = Backend.run_model
run_node = Backend.run_node
supports_device = Backend.supports_device
