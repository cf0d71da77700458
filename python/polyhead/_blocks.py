"""The two blocks of a transformer on NumPy arrays, and on arrays in the memory of a CUDA device."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any, Literal, SupportsFloat, SupportsIndex

import numpy as np

from polyhead import _bind
from polyhead._bind import Error
from polyhead._cuda_arrays import device_of
from polyhead._multi_head_attention import _NORM, LayerCaches, MultiHeadAttention
from polyhead._typing import Array, ArrayT

_NORM_KINDS = {None: 0, "layer": 1, "rms": 2}
_ACTIVATIONS = {None: 0, "relu": 1, "gelu": 2, "gelu_tanh": 3, "silu": 4}
_INNER = ("weight1", "bias1", "weight2", "bias2")


def _num_dims(array: Any) -> int:
    return len(array.shape) if hasattr(array, "shape") else np.ndim(array)


def _check_norm(weights: Mapping[str, Any], norm: str | None) -> None:
    if norm not in _NORM_KINDS:
        raise Error(f"norm is {norm!r}, must be 'layer', 'rms' or None")
    for name in _NORM:
        if name in weights and norm is None:
            raise Error(f"weights has {name}, but norm is None")
        if name in weights and _num_dims(weights[name]) != 1:
            raise Error(f"{name} has {_num_dims(weights[name])} dimensions, must have 1")


class AttentionBlock(MultiHeadAttention):
    """``x + dropout(layer(norm(x)))``, or ``norm(x + dropout(layer(x)))``: a `MultiHeadAttention` with what a transformer
    has around it, in one call forward and one backward.

    Parameters
    ----------
    weights : mapping of str to array
        As of `MultiHeadAttention`, and norm_weight and norm_bias [size of x] where the norm has such: float32, or of the
        others' dtype.
    num_heads, num_heads_kv, scale, softcap, normalizer, dropout_p, output_dropout_p, kernel
        As of `MultiHeadAttention`.
    norm : {"layer", "rms", None}
        (x - mean) / sqrt(variance + norm_eps), or x / sqrt(mean of x^2 + norm_eps), or x itself.
    norm_first : bool
        The norm is of x; else of the sum.
    norm_eps : float
    residual : bool
        False: "x +" is left out.

    Raises
    ------
    polyhead.Error, TypeError
        Weights that are missing, not known, or whose shapes disagree.

    Notes
    -----
    Its calls are `MultiHeadAttention.forward`, with query for x and without ``caches`` and ``step``, and
    `MultiHeadAttention.backward`. It keeps keys and values in a `KvCache`, which `MultiHeadAttention.new_cache` makes. key and
    value, another sequence, are taken as they are, without norm.

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> names = ("query_weight", "key_weight", "value_weight", "out_weight")
    >>> weights = {name: np.eye(16, dtype=np.float32) for name in names}
    >>> block = polyhead.AttentionBlock(weights | {"norm_weight": np.ones(16, np.float32)}, num_heads=4, norm="rms")
    >>> block.forward(np.ones((2, 5, 16), np.float32), causal=True)[0, 0, :2]
    array([1.999995, 1.999995], dtype=float32)
    """

    _OTHERS = _NORM

    def __init__(
        self,
        weights: Mapping[str, Any],
        num_heads: int,
        num_heads_kv: int | None = None,
        *,
        norm: Literal["layer", "rms"] | None = "layer",
        norm_first: bool = True,
        norm_eps: SupportsFloat = 1e-5,
        residual: bool = True,
        scale: SupportsFloat | None = None,
        softcap: SupportsFloat = 0.0,
        normalizer: Literal["softmax", "none"] = "softmax",
        dropout_p: SupportsFloat = 0.0,
        output_dropout_p: SupportsFloat = 0.0,
        kernel: str | None = None,
    ) -> None:
        _check_norm(weights, norm)
        self.norm, self.norm_first, self.norm_eps, self.residual = norm, norm_first, norm_eps, residual
        super().__init__(
            weights, num_heads, num_heads_kv, scale=scale, softcap=softcap, normalizer=normalizer, dropout_p=dropout_p,
            output_dropout_p=output_dropout_p, kernel=kernel,
        )  # fmt: skip

    def new_caches(self, batch: int, seqlen_k: int, seqlen_q: int | None = None) -> LayerCaches:
        """A block has none, but `MultiHeadAttention.new_cache`.

        Parameters
        ----------
        batch, seqlen_k, seqlen_q
            As of `MultiHeadAttention.new_caches`.

        Returns
        -------
        LayerCaches
            Never.

        Raises
        ------
        polyhead.Error
            Always.
        """
        raise Error("a block keeps keys and values in a KvCache: take new_cache")

    def _norm(self) -> tuple[Any, ...]:
        gamma, beta = (self.weights.get(name) for name in _NORM)
        return _NORM_KINDS[self.norm], self.norm_first, self.norm_eps, self.residual, gamma, beta

    def _query_as_key(self, query: Any) -> Any:
        raise Error("value is given without key: give both, or neither")


class FeedForwardBlock:
    """``x + dropout(dropout(activation(norm(x) W1 + b1)) W2 + b2)``, or with the norm of the sum, forward and backward.

    Parameters
    ----------
    weights : mapping of str to array
        weight1 [size, inner_size], weight2 [inner_size, size]; bias1, bias2, norm_weight, norm_bias if there are such. All of
        one dtype: float32, bfloat16, float16 or float64; those of the norm may be float32. They are copied, or lie on a CUDA
        device, as `MultiHeadAttention`'s.
    activation : {"relu", "gelu", "gelu_tanh", "silu", None}
    norm, norm_first, norm_eps, residual
        As of `AttentionBlock`.
    inner_dropout_p, output_dropout_p : float
        Behind the activation, and before the residual; in training only.

    Attributes
    ----------
    weights : dict of str to array
        The block's own: to train it, change them in place.

    Raises
    ------
    polyhead.Error, TypeError
        Weights that are missing, not known, or whose shapes disagree.

    Examples
    --------
    >>> import numpy as np, polyhead
    >>> weights = {"weight1": np.ones((4, 8), np.float32), "weight2": np.ones((8, 4), np.float32)}
    >>> block = polyhead.FeedForwardBlock(weights, activation="relu", norm=None)
    >>> x = np.ones((1, 3, 4), np.float32)
    >>> out = block.forward(x, training=True)
    >>> out[0, 0], block.backward(np.ones_like(out))["weight2"].shape
    (array([33., 33., 33., 33.], dtype=float32), (8, 4))
    """

    def __init__(
        self,
        weights: Mapping[str, Any],
        *,
        activation: Literal["relu", "gelu", "gelu_tanh", "silu"] | None = "gelu",
        norm: Literal["layer", "rms"] | None = "layer",
        norm_first: bool = True,
        norm_eps: SupportsFloat = 1e-5,
        residual: bool = True,
        inner_dropout_p: SupportsFloat = 0.0,
        output_dropout_p: SupportsFloat = 0.0,
    ) -> None:
        for name, array in weights.items():
            if name not in (*_INNER, *_NORM):
                raise Error(f'weights has "{name}", for which the block has no place')
            if not isinstance(array, np.ndarray) and device_of(array) is None:
                raise TypeError(
                    f'weights["{name}"] has type {type(array).__name__}, must be a NumPy array, or one on a CUDA device'
                )
        for name in ("weight1", "weight2"):
            if name not in weights:
                raise Error(f'weights has no "{name}", which must be given')
            if len(weights[name].shape) != 2:
                raise Error(f"{name} has {len(weights[name].shape)} dimensions, must have 2")
        if activation not in _ACTIVATIONS:
            raise Error(f"activation is {activation!r}, must be 'relu', 'gelu', 'gelu_tanh', 'silu' or None")
        _check_norm(weights, norm)
        self.weights: dict[str, Any] = {
            name: array.copy() if isinstance(array, np.ndarray) else array for name, array in weights.items()
        }
        self.activation, self.norm, self.norm_first = activation, norm, norm_first
        self.norm_eps, self.residual = norm_eps, residual
        self.inner_dropout_p, self.output_dropout_p = inner_dropout_p, output_dropout_p
        self._saved: tuple[tuple[Any, ...], Any] | None = None

    def forward(
        self,
        x: ArrayT,
        *,
        training: bool = False,
        inner_dropout_seed: SupportsIndex | None = None,
        output_dropout_seed: SupportsIndex | None = None,
    ) -> ArrayT:
        """The output of the block.

        Parameters
        ----------
        x : array [B, S, size]
        training : bool
            With dropout, and what `backward` needs is kept until the next call.
        inner_dropout_seed, output_dropout_seed : int
            0 .. 2^64 - 1; must be given in training for a dropout above 0. They may be one number: what they keep is
            `polyhead.dropout_mask` of [B, 1, S, inner_size] with dropout_offset 0, and of [B, 1, S, size] with 1.

        Returns
        -------
        array [B, S, size]

        Raises
        ------
        polyhead.Error, TypeError
        """
        w = self.weights
        drops = (self.inner_dropout_p, self.output_dropout_p) if training else (0.0, 0.0)
        seeds = (inner_dropout_seed, output_dropout_seed) if training else (None, None)
        arguments = (
            x, w["weight1"].T, w.get("bias1"), w["weight2"].T, w.get("bias2"), *(w.get(name) for name in _NORM), *seeds,
            _ACTIVATIONS[self.activation], *drops, _NORM_KINDS[self.norm], self.norm_first, self.norm_eps, self.residual,
        )  # fmt: skip
        out, reserve, _ = _bind.feed_forward_block(*arguments, training)
        self._saved = (arguments, reserve) if training else None
        return out

    def backward(self, grad_out: Array, needs: Iterable[str] | None = None) -> dict[str, Any]:
        """Gradients of the last `forward`, which was in training.

        Parameters
        ----------
        grad_out : array [B, S, size]
            Of the dtype of out, any strides.
        needs : sequence of str, optional
            Which: out of "x" and the names of the weights. Default: all there are.

        Returns
        -------
        dict of str to array
            Each of its input's shape and dtype.

        Raises
        ------
        polyhead.Error, TypeError
        """
        if self._saved is None:
            raise Error("backward needs what forward keeps: call forward with training=True first")
        arguments, reserve = self._saved
        places = ("x", *_INNER, *_NORM)  # of the first arguments
        there = [name for name, array in zip(places, arguments) if array is not None]
        needs = there if needs is None else tuple(needs)
        for name in needs:
            if name not in there:
                raise Error(f'needs holds "{name}", must be out of {", ".join(there)}')
        bits = sum(1 << places.index(name) for name in set(needs))
        by_place, _ = _bind.feed_forward_block_backward(*arguments, grad_out, reserve, bits)
        grads = dict(zip(places, by_place))
        return {name: grads[name].T if name in ("weight1", "weight2") else grads[name] for name in needs}
