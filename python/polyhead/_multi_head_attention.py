"""The layer of multi-head attention on NumPy arrays, and on arrays in the memory of a CUDA device."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any, Literal, NamedTuple, SupportsFloat, SupportsIndex

import numpy as np

from polyhead import _bind
from polyhead._bind import Error
from polyhead._cuda_arrays import device_of, empty_like
from polyhead._kv_cache import KvCache
from polyhead._program import kind_of
from polyhead._program_call import program_arguments
from polyhead._typing import Array, ArrayT

_PROJECTIONS = ("query", "key", "value")
_WEIGHTS = tuple(f"{name}_weight" for name in (*_PROJECTIONS, "out"))
_BIASES = tuple(f"{name}_bias" for name in (*_PROJECTIONS, "out"))
# Inputs that have a gradient, as the binding returns them, with their places among the arguments of forward.
_INPUTS = {"query": 0, "key": 1, "value": 2, "attn_bias": 3, "alibi_slopes": 11, "sink_logits": 25}
_CAPTURED = 24  # the place of what is captured
_NORM = ("norm_weight", "norm_bias")  # of a block


def _captured_floats(captured: Mapping[str, Array] | None) -> list[str]:
    """Names of what has a gradient."""
    names = [name for name, array in (captured or {}).items() if kind_of(array.dtype) == "float"]
    for name in names:
        if name in (*_INPUTS, *_WEIGHTS, *_BIASES, *_NORM):
            raise Error(f"{name} cannot be the name of a captured tensor here")
    return names


class LayerCaches(NamedTuple):
    """The projected keys and values of past steps: what decoding with a layer keeps. `MultiHeadAttention.new_caches` makes them."""

    key: Any  #: array [B, Sk, G, D]
    value: Any  #: array [B, Sk, G, Dv]
    seqlen_q: int  #: how many steps of query there will be


class MultiHeadAttention:
    """``out = dropout(attention(query Wq + bq, key Wk + bk, value Wv + bv) Wo + bo)``, forward and backward.

    Sizes: B batch, Sq / Sk sequence lengths, H num_heads, G num_heads_kv, D, Dv head dims.

    Parameters
    ----------
    weights : mapping of str to array
        As `polyhead.weights.load` returns them: query_weight [query_size, H * D], key_weight [key_size, G * D],
        value_weight [value_size, G * Dv]; out_weight [H * Dv, out_size], without which out has the heads side by side;
        query_bias [H * D], key_bias [G * D], value_bias [G * Dv], out_bias [out_size] and scale if there are such.
        All of one dtype: float32, bfloat16, float16 or float64. They are copied; or they are arrays on a CUDA device (torch's,
        CuPy's, Numba's, `DeviceArray`, JAX's), which are used where they lie, and so are all that calls are given.
    num_heads : int
    num_heads_kv : int, optional
        Divides num_heads; query head h reads key/value head h // (H // G). Default num_heads.
    scale : float, optional
        Factor on the scores; default weights["scale"], else ``1 / sqrt(D)``.
    softcap : float
        ``softcap * tanh(scores / softcap)`` in place of the scores; 0 = off.
    normalizer : {"softmax", "none"}
        As of `polyhead.attention`: "none" takes the scores, or what score gives, for weights.
    dropout_p, output_dropout_p : float
        Of the attention's weights, and of the output; in training only.
    kernel : str, optional
        One of `polyhead.kernels()`, instead of the best that can compute this.

    Attributes
    ----------
    weights : dict of str to array
        The layer's own: to train it, change them in place (``layer.weights[name] -= rate * grads[name]``).

    Raises
    ------
    polyhead.Error, TypeError
        Weights that are missing, not known, or whose shapes disagree.

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> names = ("query_weight", "key_weight", "value_weight", "out_weight")
    >>> layer = polyhead.MultiHeadAttention({name: np.eye(16, dtype=np.float32) for name in names}, num_heads=4)
    >>> x = np.ones((2, 5, 16), np.float32)
    >>> out = layer.forward(x, causal=True, training=True)
    >>> grads = layer.backward(np.ones_like(out))
    >>> out.shape, grads["query"].shape, grads["key_weight"].shape
    ((2, 5, 16), (2, 5, 16), (16, 16))

    Decoding step by step: the same numbers, each step from the keys and values of those before it.

    >>> caches = layer.new_caches(batch=2, seqlen_k=5)
    >>> steps = [layer.forward(x[:, n : n + 1], causal=True, caches=caches, step=n) for n in range(5)]
    >>> bool(np.allclose(np.concatenate(steps, 1), out))
    True
    """

    _OTHERS: tuple[str, ...] = ()  # names of weights beside those of the projections

    def __init__(
        self,
        weights: Mapping[str, Any],
        num_heads: int,
        num_heads_kv: int | None = None,
        *,
        scale: SupportsFloat | None = None,
        softcap: SupportsFloat = 0.0,
        normalizer: Literal["softmax", "none"] = "softmax",
        dropout_p: SupportsFloat = 0.0,
        output_dropout_p: SupportsFloat = 0.0,
        kernel: str | None = None,
    ) -> None:
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.scale = weights.get("scale") if scale is None else scale
        self.softcap = softcap
        self.normalizer = normalizer
        self.dropout_p, self.output_dropout_p = dropout_p, output_dropout_p
        self.kernel = kernel
        self._saved: tuple[tuple[Any, ...], Any] | None = None
        for name, array in weights.items():
            if name != "scale" and name not in (*_WEIGHTS, *_BIASES, *self._OTHERS):
                raise Error(f'weights has "{name}", for which the layer has no place')
            if name != "scale" and not isinstance(array, np.ndarray) and device_of(array) is None:
                raise TypeError(
                    f'weights["{name}"] has type {type(array).__name__}, must be a NumPy array, or one on a CUDA device'
                )
        for name in _WEIGHTS[:3]:
            if name not in weights:
                raise Error(f'weights has no "{name}", which must be given')
        self._check_shapes({name: array for name, array in weights.items() if name in (*_WEIGHTS, *_BIASES)})
        self._pack(weights)

    @classmethod
    def _sharing(cls, weights: dict[str, Any], num_heads: int, num_heads_kv: int, **options: Any) -> Any:
        """A layer for inference on arrays of any kind, which have been checked and are used where they are."""
        made = cls.__new__(cls)
        made.__dict__.update(
            weights=weights, num_heads=num_heads, num_heads_kv=num_heads_kv, scale=None, softcap=0.0, normalizer="softmax",
            dropout_p=0.0, output_dropout_p=0.0, kernel=None,
        )  # fmt: skip
        made.__dict__.update(options)
        return made

    def _check_shapes(self, weights: Mapping[str, np.ndarray]) -> None:
        if self.num_heads < 1 or self.num_heads_kv < 1 or self.num_heads % self.num_heads_kv != 0:
            raise Error(f"num_heads_kv is {self.num_heads_kv}, must divide num_heads {self.num_heads}")
        for name, array in weights.items():
            if array.dtype != weights["query_weight"].dtype:
                raise Error(f"{name} is {array.dtype}, must be {weights['query_weight'].dtype} as query_weight")
            if len(array.shape) != (dims := 2 if name in _WEIGHTS else 1):
                raise Error(f"{name} has {len(array.shape)} dimensions, must have {dims}")
        head_dims = []
        for name, heads in zip(_WEIGHTS[:3], (self.num_heads, self.num_heads_kv, self.num_heads_kv), strict=True):
            columns = weights[name].shape[1]
            if columns == 0 or columns % heads != 0:
                raise Error(f"{name} has {columns} columns, must have a multiple of its {heads} heads")
            head_dims.append(columns // heads)
        if head_dims[0] != head_dims[1]:
            raise Error(f"key_weight has heads of {head_dims[1]} columns, must be {head_dims[0]} as query_weight's")
        if "out_weight" in weights and weights["out_weight"].shape[0] != self.num_heads * head_dims[2]:
            raise Error(
                f"out_weight has {weights['out_weight'].shape[0]} rows, must have {self.num_heads * head_dims[2]}: "
                f"num_heads times the columns of a head of value_weight"
            )
        for name, matrix in zip(_BIASES, _WEIGHTS, strict=True):
            if name in weights and matrix not in weights:
                raise Error(f"{name} is given without {matrix}")
            if name in weights and weights[name].shape != weights[matrix].shape[1:]:
                raise Error(f"{name} is {weights[name].shape}, must be {weights[matrix].shape[1:]} as the columns of {matrix}")

    def _pack(self, weights: Mapping[str, np.ndarray]) -> None:
        """One matrix and one bias for what can be one product; self.weights are views of them. On a CUDA device: as they are."""
        self.weights: dict[str, Any] = {}
        self._joined = False
        if not all(isinstance(array, np.ndarray) for name, array in weights.items() if name != "scale"):
            in_order = (*_WEIGHTS[:3], *_BIASES, "out_weight", *self._OTHERS)
            self.weights |= {name: weights[name] for name in in_order if name in weights}
            return
        matrices = [weights[name] for name in _WEIGHTS[:3]]
        columns = [matrix.shape[1] for matrix in matrices]
        self._parts = [slice(sum(columns[:i]), sum(columns[: i + 1])) for i in range(3)]
        self._joined = len({matrix.shape[0] for matrix in matrices}) == 1
        if self._joined:
            self.weights |= self._split(np.concatenate(matrices, 1))
        else:
            self.weights |= {name: matrix.copy() for name, matrix in zip(_WEIGHTS, matrices)}
        self.weights |= {name: weights[name].copy() for name in (*_BIASES, "out_weight", *self._OTHERS) if name in weights}

    def _split(self, in_proj: np.ndarray) -> dict[str, np.ndarray]:
        return {name: in_proj[:, part] for name, part in zip(_WEIGHTS, self._parts)}

    def _norm(self) -> tuple[Any, ...]:
        """What a block says of its norm and residual: this is none."""
        return (None,) * 6

    def _query_as_key(self, query: Any) -> Any:
        """Where value is given and key is not."""
        return query

    def _kv_dims(self) -> list[int]:
        return [self.weights[name].shape[1] // self.num_heads_kv for name in ("key_weight", "value_weight")]

    def new_cache(self, num_pages: int, page_size: int, **options: Any) -> KvCache:
        """A cache in pages for decoding with `forward`: `KvCache.zeros` with this layer's heads and dtype.

        Of a layer whose weights lie on a CUDA device it lies there, in arrays of their kind, whose pages hold nothing yet.

        Parameters
        ----------
        num_pages, page_size : int
        **options
            Of `KvCache.zeros`; key_dtype's default is the layer's.

        Returns
        -------
        KvCache

        Raises
        ------
        polyhead.Error, TypeError
        """
        like = self.weights["key_weight"]
        key_dtype = options.pop("key_dtype", str(like.dtype))
        dtypes = key_dtype, options.pop("value_dtype", None) or key_dtype
        sides = [
            (side, dtype, dim, options.pop(f"{side}_group", 0))
            for side, dtype, dim in zip(("key", "value"), dtypes, self._kv_dims())
        ]
        make = None if device_of(like) is None else lambda shape, dtype: empty_like(like, shape, dtype)
        return KvCache._made((num_pages, page_size, self.num_heads_kv), sides, make, **options)

    def new_caches(self, batch: int, seqlen_k: int, seqlen_q: int | None = None) -> LayerCaches:
        """Caches for decoding with `forward`: zeros, or where weights lie on a CUDA device arrays there that hold nothing yet.

        Parameters
        ----------
        batch : int
        seqlen_k : int
            How many keys there will be at most.
        seqlen_q : int, optional
            How many steps of query; default seqlen_k, as in self-attention.

        Returns
        -------
        LayerCaches
        """
        like = self.weights["key_weight"]
        shapes = [(batch, seqlen_k, self.num_heads_kv, dim) for dim in self._kv_dims()]
        if device_of(like) is None:
            key, value = (np.zeros(shape, like.dtype) for shape in shapes)
        else:
            key, value = (empty_like(like, shape) for shape in shapes)
        return LayerCaches(key, value, seqlen_k if seqlen_q is None else seqlen_q)

    def forward(
        self,
        query: ArrayT,
        key: Array | None = None,
        value: Array | None = None,
        *,
        attn_bias: Array | None = None,
        attn_mask: Array | None = None,
        causal: bool = False,
        window: Iterable[int] | None = None,
        sink_keys: SupportsIndex = 0,
        window_lo: Array | None = None,
        window_hi: Array | None = None,
        align: Literal["top_left", "bottom_right"] | None = None,
        query_offset: SupportsIndex | Array | None = None,
        alibi_slopes: Array | None = None,
        sink_logits: Array | None = None,
        score: Callable[..., Any] | str | None = None,
        mask: Callable[..., Any] | str | None = None,
        captured: Mapping[str, Array] | None = None,
        seqlens_q: Array | None = None,
        seqlens_k: Array | None = None,
        return_weights: bool | Literal["mean"] = False,
        training: bool = False,
        dropout_seed: SupportsIndex | None = None,
        output_dropout_seed: SupportsIndex | None = None,
        caches: LayerCaches | None = None,
        step: int | None = None,
        append: bool = True,
        cache: KvCache | None = None,
        page_table: Array | None = None,
        slots: Array | None = None,
        positions: Array | None = None,
        cos: Array | None = None,
        sin: Array | None = None,
    ) -> ArrayT | Any:
        """The output of the layer.

        Parameters
        ----------
        query : array [B, Sq, query_size]
        key : array [B, Sk, key_size], optional
            Default: query.
        value : array [B, Sk, value_size], optional
            Default: key.
        attn_bias, attn_mask : array, optional
            Broadcast to [B, H, Sq, Sk], as of `polyhead.attention`: added to the scores; bool, True = may look.
        causal : bool
            Query i sees keys up to i plus the offset that align or query_offset say.
        window, sink_keys, align, query_offset, alibi_slopes, sink_logits : optional
            As of `polyhead.attention`; align is needed if Sq != Sk and one of causal, window, alibi_slopes is used.
        score, mask, captured : optional
            As of `polyhead.attention`: relative positions that are learned, say. In a step of decoding q is its
            number; with more than 7 captured tensors there are none.
        window_lo, window_hi : int32 or int64 array [Sq], optional
            Query i sees keys ``window_lo[i] <= j < window_hi[i]``; cut to the keys there are. Both or none.
        seqlens_q, seqlens_k : int32 or int64 array [B], optional
            Rows behind these are padding: out has the output of zeros there (out_bias), and they pass on no gradient.
        return_weights : bool or "mean"
            P after dropout [B, H, Sq, Sk], or its mean over heads [B, Sq, Sk]. It has no gradient.
        training : bool
            With dropout, and what `backward` needs is kept until the next call.
        dropout_seed, output_dropout_seed : int
            0 .. 2^64 - 1; must be given in training for a dropout above 0. They may be one number: what they keep is
            `polyhead.dropout_mask` of [B, H, Sq, Sk] with dropout_offset 0, and of [B, 1, Sq, out_size] with
            dropout_offset 1.
        caches : LayerCaches, optional
            Not in training. Without step, k and v of these keys are written to the caches' beginning: of a prompt, say.
        step : int, optional
            One step of decoding with caches, 0 .. caches.seqlen_q - 1: query has one time step, this one. Key and value
            (default: query) have one too, which is put into the caches at this place; keys behind it are hidden. Masks,
            windows and lengths are those of the whole, of all steps and keys.
        append : bool
            False: the caches stand as they are and all their keys are seen: attention to another sequence.
        cache : KvCache, optional
            Not in training, and in place of caches: the pages where keys and values live, of any stored dtype, whose heads are
            this layer's. Query has any number of new time steps. Sk is what page_table has room for; seqlens_k, needed, counts
            each sequence's keys, those of this call included; ``align="bottom_right"`` puts the last query on the last of them.
            Tokens that come at most 12 a call have the bits of one by one.
        page_table : int32 or int64 array [B, pages of a sequence]
            Needed with cache, as of `polyhead.attention`.
        slots : int32 or int64 array [B, time steps of key], optional
            Where each token of key (default: query) and value is stored in the cache; -1: nowhere. No slot twice. Not given:
            nothing is stored, and key and value are not given either: attention to another sequence, say, whose keys the
            first call stored. Where key is query, or turns by positions, slots behind seqlens_q are not looked at.
        positions : int32 or int64 array [B, Sq]
            Rows of cos and sin, by which query and key turn, if the cache has a rotary_dim; key then has Sq time steps.
        cos, sin : float32 array [positions, rotary_dim / 2]
            As of `KvCache.append`.

        Returns
        -------
        out : array [B, Sq, out_size], or (out, weights) if asked for

        Raises
        ------
        polyhead.Error, TypeError
        """
        in_caches, num_steps = self._caches_of(query, key, caches, step, append, training)
        in_pages = (page_table, slots, positions, cos, sin)
        if cache is None and any(array is not None for array in in_pages):
            raise Error("page_table, slots, positions, cos or sin is given without cache")
        if cache is not None and (caches is not None or training):
            raise Error(f"cache is given {'in training' if training else 'and caches too'}")
        if cache is not None and slots is None and (key is not None or value is not None):
            raise Error("slots is missing: it tells where key and value go")
        if key is query:
            key = None
        value = None if value is key or (key is None and value is query) else value
        if key is None and value is not None:
            key = self._query_as_key(query)
        w = self.weights
        shared = (
            query, key, value, attn_bias, attn_mask, causal, window, align, query_offset, self.scale, self.softcap,
            alibi_slopes, self.dropout_p if training else 0.0, dropout_seed if training else None, 0, None, seqlens_q,
            seqlens_k, None, None, self.kernel, None, None, *program_arguments(score, mask, captured), sink_logits,
            self.normalizer, sink_keys, False, *(w.get(name) for name in (*_WEIGHTS, *_BIASES)),
            self.num_heads, self.num_heads_kv, self.output_dropout_p if training else 0.0,
            output_dropout_seed if training else None, window_lo, window_hi, return_weights, *self._norm(),
        )  # fmt: skip
        at = -1 if step is None else step
        pages = cache._arguments() if cache is not None else (None,) * 7
        out, weights, reserve = _bind.layer_forward(
            *shared, *in_caches, at, num_steps, append, training, *pages, *in_pages
        )
        self._saved = (shared, reserve) if training else None
        return (out, weights) if return_weights else out

    def _caches_of(
        self, query: Any, key: Any, caches: LayerCaches | None, step: int | None, append: bool, training: bool
    ) -> tuple[tuple[Any, Any], int]:
        """(arrays of the caches that forward writes or reads, number of steps)"""
        if caches is None:
            if step is not None:
                raise Error(f"step is {step}, so caches must be given: what new_caches returns")
            return (None, None), 0
        if training:
            raise Error("caches are given and training is True: decoding has no backward")
        if step is not None:
            if step < 0:
                raise Error(f"step is {step}, must be 0 to {caches.seqlen_q - 1}")
            if not append and key is not None:
                raise Error("append is False, so key and value must not be given: the caches stand")
            return (caches.key, caches.value), caches.seqlen_q
        seqlen_k = np.shape(query if key is None else key)[1:2]
        if seqlen_k and seqlen_k[0] > caches.key.shape[1]:
            raise Error(f"key has {seqlen_k[0]} time steps, caches have room for {caches.key.shape[1]}")
        return (caches.key, caches.value), 0

    def backward(self, grad_out: Array, needs: Iterable[str] | None = None) -> dict[str, Any]:
        """Gradients of the last `forward`, which was in training.

        Parameters
        ----------
        grad_out : array
            Of the shape and dtype of out, any strides.
        needs : sequence of str, optional
            Which: out of "query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits", the names of captured floats and those of
            the weights. Default: all there are.

        Returns
        -------
        dict of str to array
            Each of its input's shape and dtype. "query" has the gradient by key and value too where these were not
            given, "key" that by value.

        Raises
        ------
        polyhead.Error, TypeError
        """
        if self._saved is None:
            raise Error("backward needs what forward keeps: call forward with training=True first")
        shared, reserve = self._saved
        inputs = [name for name, place in _INPUTS.items() if shared[place] is not None]
        captured = _captured_floats(shared[_CAPTURED])
        there = (*inputs, *captured, *self.weights)
        needs = there if needs is None else tuple(needs)
        for name in needs:
            if name not in there:
                raise Error(f'needs holds "{name}", must be out of {", ".join(there)}')
        grads = self._weight_gradients(needs)
        bits = sum(1 << bit for bit, name in enumerate(_INPUTS) if name in needs)
        in_order = (grads.get(name) for name in (*_WEIGHTS, *_BIASES, *_NORM))
        asked = tuple(name for name in captured if name in needs)
        *by_inputs, by_captured = _bind.layer_backward(*shared, grad_out, reserve, bits, asked, *in_order)
        grads |= dict(zip(_INPUTS, by_inputs, strict=True)) | by_captured
        return {name: grads[name] for name in needs}

    def _weight_gradients(self, needs: Iterable[str]) -> dict[str, Any]:
        """New arrays; those of one product are views of one matrix, so that their gradients are one product too."""
        w = self.weights
        if not isinstance(w["query_weight"], np.ndarray):
            return {name: empty_like(w[name]) for name in needs if name in w}
        grads = {name: np.empty_like(w[name]) for name in needs if name in w}
        if self._joined and all(name in grads for name in _WEIGHTS[:3]):
            rows = self.weights["query_weight"].shape[0]
            grads |= self._split(np.empty((rows, self._parts[-1].stop), grads["query_weight"].dtype))
        return grads
