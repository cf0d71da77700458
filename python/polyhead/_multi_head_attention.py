"""The layer of multi-head attention on NumPy arrays."""

import numpy as np

from polyhead import _bind
from polyhead._bind import Error

_PROJECTIONS = ("query", "key", "value")
_WEIGHTS = tuple(f"{name}_weight" for name in (*_PROJECTIONS, "out"))
_BIASES = tuple(f"{name}_bias" for name in (*_PROJECTIONS, "out"))
# Bits of needs and places of gradients, in the order of the binding's arguments.
_IN_PROJ, _SEPARATE, _IN_BIAS, _OUT_WEIGHT, _OUT_BIAS, _ATTN_BIAS = 3, (4, 5, 6), 7, 8, 9, 12


class MultiHeadAttention:
    """``out = dropout(attention(query Wq + bq, key Wk + bk, value Wv + bv) Wo + bo)``, forward and backward.

    Sizes: B batch, Sq / Sk sequence lengths, H num_heads, G num_heads_kv, D, Dv head dims.

    Parameters
    ----------
    weights : mapping of str to NumPy array
        As `polyhead.weights.load` returns them: query_weight [query_size, H * D], key_weight [key_size, G * D],
        value_weight [value_size, G * Dv]; out_weight [H * Dv, out_size], without which out has the heads side by side;
        query_bias [H * D], key_bias [G * D], value_bias [G * Dv], out_bias [out_size] and scale if there are such.
        All of one dtype: float32, bfloat16, float16 or float64. They are copied.
    num_heads : int
    num_heads_kv : int, optional
        Divides num_heads; query head h reads key/value head h // (H // G). Default num_heads.
    scale : float, optional
        Factor on the scores; default weights["scale"], else ``1 / sqrt(D)``.
    dropout_p, output_dropout_p : float
        Of the attention's weights, and of the output; in training only.

    Attributes
    ----------
    weights : dict of str to NumPy array
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
    """

    def __init__(self, weights, num_heads, num_heads_kv=None, *, scale=None, dropout_p=0.0, output_dropout_p=0.0):
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.scale = weights.get("scale") if scale is None else scale
        self.dropout_p, self.output_dropout_p = dropout_p, output_dropout_p
        self._saved = None
        for name, array in weights.items():
            if name != "scale" and name not in _WEIGHTS and name not in _BIASES:
                raise Error(f'weights has "{name}", for which the layer has no place')
            if name != "scale" and not isinstance(array, np.ndarray):
                raise TypeError(f'weights["{name}"] has type {type(array).__name__}, must be a NumPy array')
        for name in _WEIGHTS[:3]:
            if name not in weights:
                raise Error(f'weights has no "{name}", which must be given')
        self._pack(weights)

    def _pack(self, weights):
        """One matrix and one bias for what can be one product; self.weights are views of them."""
        matrices = [weights[name] for name in _WEIGHTS[:3]]
        for name, matrix in zip(_WEIGHTS, matrices):
            if matrix.ndim != 2:
                raise Error(f"{name} has {matrix.ndim} dimensions, must have 2")
            if matrix.dtype != matrices[0].dtype:
                raise Error(f"{name} is {matrix.dtype}, must be {matrices[0].dtype} as query_weight")
        columns = [matrix.shape[1] for matrix in matrices]
        self._parts = [slice(sum(columns[:i]), sum(columns[: i + 1])) for i in range(3)]
        one_dim = columns[0] * self.num_heads_kv == columns[1] * self.num_heads and columns[1] == columns[2]
        self._joined = one_dim and len({matrix.shape[0] for matrix in matrices}) == 1
        self.weights = {}
        if self._joined:
            self._in_proj = np.concatenate(matrices, 1)
            for name, part in zip(_WEIGHTS, self._parts):
                self.weights[name] = self._in_proj[:, part]
        else:
            self.weights |= {name: matrix.copy() for name, matrix in zip(_WEIGHTS, matrices)}
        self._in_bias = None
        if any(name in weights for name in _BIASES[:3]):
            self._in_bias = np.zeros(sum(columns), matrices[0].dtype)
            for name, part in zip(_BIASES, self._parts):
                if name in weights:
                    if weights[name].shape != (part.stop - part.start,):
                        raise Error(f"{name} is {weights[name].shape}, must be ({part.stop - part.start},)")
                    self._in_bias[part] = weights[name]
                    self.weights[name] = self._in_bias[part]
        self.weights |= {name: weights[name].copy() for name in ("out_weight", "out_bias") if name in weights}

    def forward(
        self,
        query,
        key=None,
        value=None,
        *,
        attn_bias=None,
        attn_mask=None,
        causal=False,
        return_weights=False,
        training=False,
        dropout_seed=None,
        output_dropout_seed=None,
    ):
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
            Query i sees keys 0 .. i.
        return_weights : bool or "mean"
            P after dropout [B, H, Sq, Sk], or its mean over heads [B, Sq, Sk]. It has no gradient.
        training : bool
            With dropout, and what `backward` needs is kept until the next call.
        dropout_seed, output_dropout_seed : int
            0 .. 2^64 - 1; must be given in training for a dropout above 0. They may be one number: what they keep is
            `polyhead.dropout_mask` of [B, H, Sq, Sk] with dropout_offset 0, and of [B, 1, Sq, out_size] with
            dropout_offset 1.

        Returns
        -------
        out : array [B, Sq, out_size], or (out, weights) if asked for

        Raises
        ------
        polyhead.Error, TypeError
        """
        returned = {False: 0, True: 1, "mean": 2}.get(return_weights)
        if returned is None:
            raise Error(f'return_weights is "{return_weights}", must be True, False or "mean"')
        separate = (None,) * 3 if self._joined else tuple(self.weights[name].T for name in _WEIGHTS[:3])
        out_weight = self.weights.get("out_weight")
        if key is query:
            key = None
        value = None if value is key or (key is None and value is query) else value
        if key is None and value is not None:
            key = query
        arguments = (
            query, key, value,
            self._in_proj.T if self._joined else None, *separate, self._in_bias,
            None if out_weight is None else out_weight.T, self.weights.get("out_bias"), None, None,
            attn_bias, attn_mask, dropout_seed, output_dropout_seed, self.num_heads, self.num_heads_kv, causal,
            self.scale, self.dropout_p if training else 0.0, self.output_dropout_p if training else 0.0, returned,
            0, False, 1e-5, False,
        )  # fmt: skip
        out, weights, reserve, _ = _bind.attention_block(*arguments, training)
        self._saved = (arguments, reserve) if training else None
        return (out, weights) if returned else out

    def backward(self, grad_out, needs=None):
        """Gradients of the last `forward`, which was in training.

        Parameters
        ----------
        grad_out : array
            Of the shape and dtype of out, any strides.
        needs : sequence of str, optional
            Which: out of "query", "key", "value", "attn_bias" and the names of the weights. Default: all there are.

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
        arguments, reserve = self._saved
        there = {name: bit for bit, name in enumerate(_PROJECTIONS) if arguments[bit] is not None}
        if arguments[_ATTN_BIAS] is not None:
            there["attn_bias"] = _ATTN_BIAS
        for name in self.weights:
            there[name] = self._place(name)
        needs = tuple(there if needs is None else needs)
        for name in needs:
            if name not in there:
                raise Error(f'needs holds "{name}", must be out of {", ".join(there)}')
        bits = sum(1 << bit for bit in {there[name] for name in needs})
        grads, _ = _bind.attention_block_backward(*arguments, grad_out, reserve, bits)
        return {name: self._gradient(name, grads[there[name]]) for name in needs}

    def _place(self, name):
        """Of a weight, among the binding's arguments."""
        if name in _WEIGHTS[:3]:
            return _IN_PROJ if self._joined else _SEPARATE[_WEIGHTS.index(name)]
        if name in _BIASES[:3]:
            return _IN_BIAS
        return _OUT_WEIGHT if name == "out_weight" else _OUT_BIAS

    def _gradient(self, name, grad):
        if name in _WEIGHTS:
            grad = grad.T
            return grad[:, self._parts[_WEIGHTS.index(name)]] if self._joined and name != "out_weight" else grad
        return grad[self._parts[_BIASES.index(name)]] if name in _BIASES[:3] else grad
