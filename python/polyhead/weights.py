"""Weights of other frameworks: in, out, and from file to file.

    from polyhead import weights
    arrays = weights.read("model.safetensors")
    layer = weights.load(arrays, "llama", num_heads=32, prefix="model.layers.0.self_attn.")
    query = (x @ layer["query_weight"]).reshape(batch, seqlen, 32, -1)

`sources` lists the frameworks, `load` and `export` go from and to their arrays, `read` and `write` are for .safetensors
and .npz files. docs/weights.md has the table and its traps.
"""

import collections.abc
from typing import Any, NamedTuple

from polyhead import _bind
from polyhead._weight_files import flat, read, write

__all__ = ["Source", "export", "load", "read", "sources", "write"]


class Source(NamedTuple):
    """How a framework stores an attention layer."""

    module: str
    """Whose it is."""
    arrays: tuple[str, ...]
    """Names of its arrays, without a prefix; biases may be missing."""
    extras: tuple[str, ...]
    """Arrays that change its results and that are no projection: `load` hands them through as they are."""
    scale: float | str | None
    """Its factor on the scores: 1.0, "1/sqrt(head_dim)", or None if its caller says it (`load` then needs scale)."""
    norm_epsilon: float
    """Default epsilon of the norm beside it; 0.0: the model's own configuration tells."""


def sources() -> dict[str, Source]:
    """The sources that `load` and `export` know, by name.

    Returns
    -------
    dict of str to Source

    Examples
    --------
    >>> from polyhead import weights
    >>> weights.sources()["gpt2"].arrays
    ('c_attn.weight', 'c_attn.bias', 'c_proj.weight', 'c_proj.bias')
    >>> weights.sources()["t5"].scale
    1.0
    """
    return {name: Source(*each) for name, each in _bind.weight_sources().items()}


def load(
    arrays: collections.abc.Mapping[str, Any],
    source: str,
    *,
    num_heads: int,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    scale: float | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """Arrays of a framework as ``y = x @ weight + bias`` wants them.

    Sizes: H num_heads, G num_heads_kv, D head_dim, Dv head_dim_v.

    Parameters
    ----------
    arrays : mapping of str to array
        A state_dict, an .npz, what `read` returns; nested ones (Flax) count as names joined by "/". float32, bfloat16,
        float16 or float64: NumPy arrays, or any in CPU memory with ``__dlpack__`` (torch, jax). Other names are passed
        over.
    source : str
        One of `sources`.
    num_heads : int
    num_heads_kv, head_dim, head_dim_v : int, optional
        Found from the arrays' shapes. What these leave open: head_dim_v is head_dim, num_heads_kv is num_heads.
    scale : float, optional
        The model's own factor on the scores, where it is not the source's (T5: 1, others: ``1 / sqrt(D)``). "cudnn" has
        none, so there it is needed.
    prefix : str
        What stands before the source's names: ``"model.layers.0.self_attn."``.

    Returns
    -------
    dict
        query_weight [query_size, H * D], key_weight [key_size, G * D], value_weight [value_size, G * Dv] and out_weight
        [H * Dv, out_size], head h in the columns (of out_weight: rows) from h * D on; query_bias [H * D], ... where the
        source has them; scale, a float for `polyhead.attention`. New arrays, of the dtype and kind of the array that
        each comes from, bit for bit. Then the source's extras, as they are: "bias_k" and "bias_v" (torch, rows
        [1, 1, H * D] behind the projected keys and values), "relative_attention_bias.weight" (t5), norms of q and k.

    Raises
    ------
    polyhead.Error
        An array that is missing, or not of the shape or dtype that the source has; the message names it.
    TypeError

    Examples
    --------
    >>> import numpy as np
    >>> from polyhead import weights
    >>> checkpoint = {"c_attn.weight": np.ones((8, 24), "f"), "c_proj.weight": np.ones((8, 8), "f")}
    >>> layer = weights.load(checkpoint, "gpt2", num_heads=2)
    >>> {name: np.shape(array) for name, array in layer.items()}
    {'query_weight': (8, 8), 'key_weight': (8, 8), 'value_weight': (8, 8), 'out_weight': (8, 8), 'scale': ()}
    """
    return _bind.load_weights(
        flat(arrays, "arrays"), source, num_heads, num_heads_kv, head_dim, head_dim_v, scale, prefix
    )


def export(
    weights: collections.abc.Mapping[str, Any],
    source: str,
    *,
    num_heads: int,
    num_heads_kv: int | None = None,
    head_dim: int | None = None,
    head_dim_v: int | None = None,
    prefix: str = "",
) -> dict[str, Any]:
    """The way back: a layer's weights under the names and in the shapes of a framework.

    Parameters
    ----------
    weights : mapping of str to array
        As `load` returns them. Without "scale": ``1 / sqrt(D)``.
    source, num_heads, num_heads_kv, head_dim, head_dim_v, prefix : as of `load`

    Returns
    -------
    dict of str to array
        New arrays, of the dtype and kind of the weights.

    Raises
    ------
    polyhead.Error
        Weights that disagree, or that the source has no place for: key/value heads in GPT-2, another scale, ...
    TypeError

    Examples
    --------
    >>> import numpy as np
    >>> from polyhead import weights
    >>> layer = {name: np.ones((8, 8), "f") for name in ("query_weight", "key_weight", "value_weight", "out_weight")}
    >>> {name: array.shape for name, array in weights.export(layer, "torch", num_heads=2).items()}
    {'in_proj_weight': (24, 8), 'out_proj.weight': (8, 8)}
    """
    return _bind.export_weights(
        flat(weights, "weights"), source, num_heads, num_heads_kv, head_dim, head_dim_v, prefix
    )
