"""Calls of attention that between them use every option: what the torch operators are tested with."""

import numpy as np
from optional import torch


def tensors(*shapes, dtype=None, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype or torch.float32) for shape in shapes]


def integers(*values):
    return torch.tensor(values, dtype=torch.int32)


def problem(name, dtype=None):
    """([query, key, value], options) of the case of this name."""
    operands = tensors((2, 5, 4, 8), (2, 7, 2, 8), (2, 7, 2, 6), dtype=dtype, seed=len(name))
    options = {}
    if name in PACKED:
        operands = tensors((9, 4, 8), (11, 2, 8), (11, 2, 6), dtype=dtype, seed=len(name))
        options = {"cu_seqlens_q": integers(0, 3, 3, 8), "cu_seqlens_k": integers(0, 4, 5, 11)}
    return operands, options | CASES[name](dtype or torch.float32)


def bias(*shape):
    return lambda dtype: {"attn_bias": tensors(shape, dtype=dtype, seed=3)[0]}


def mask(dtype):
    return {"attn_mask": torch.from_numpy(np.random.default_rng(1).random((2, 1, 5, 7)) < 0.6)}


def slopes(*shape):
    return lambda dtype: {"alibi_slopes": tensors(shape, seed=4)[0].abs(), "align": "bottom_right"}


def sinks(dtype):
    return {"sink_logits": tensors((4,), dtype=torch.float64 if dtype == torch.float64 else torch.float32, seed=5)[0]}


def dropout(dtype):
    return {"dropout_p": 0.3, "dropout_seed": 2**63 + 5, "dropout_offset": 3}


CASES = {
    "plain": lambda dtype: {},
    "causal": lambda dtype: {"causal": True, "align": "bottom_right"},
    "scale": lambda dtype: {"scale": -0.3},
    "window": lambda dtype: {"window": (2, 1), "align": "top_left"},
    "window_sinks": lambda dtype: {"window": (1, 0), "sink_keys": 2, "align": "bottom_right"},
    "offset": lambda dtype: {"causal": True, "query_offset": 1},
    "offsets": lambda dtype: {"window": (-1, 0), "query_offset": integers(-2, 3)},
    "softcap": lambda dtype: {"softcap": 1.5},
    "bias": bias(2, 4, 5, 7),
    "bias_scalar": bias(),
    "bias_keys": bias(7),
    "bias_heads": bias(4, 1, 1),
    "bias_rows": bias(2, 1, 5, 1),
    "mask": mask,
    "mask_at_end": lambda dtype: {
        "attn_mask": mask(dtype)["attn_mask"][..., :4], "mask_at_end": True, "seqlens_k": integers(2, 6)
    },
    "slopes": slopes(4),
    "slopes_batch": slopes(2, 4),
    "sinks": lambda dtype: {"causal": True, "query_offset": -2, **sinks(dtype)},  # two queries see no key
    "lengths": lambda dtype: {"seqlens_q": integers(5, 2), "seqlens_k": integers(0, 6)},
    "dropout": dropout,
    "packed": lambda dtype: {},
    "packed_causal": lambda dtype: {"causal": True, "align": "bottom_right"},
    "packed_slopes": lambda dtype: {"alibi_slopes": tensors((3, 4), seed=4)[0].abs(), "align": "top_left"},
    "packed_dropout": dropout,
    "packed_sinks": sinks,
    "everything": lambda dtype: {
        "causal": True, "align": "bottom_right", "softcap": 2.0, "scale": 0.5, **bias(4, 5, 1)(dtype), **mask(dtype),
        **slopes(4)(dtype), **dropout(dtype), **sinks(dtype), "seqlens_q": integers(5, 2),
    },  # fmt: skip
}  # fmt: skip
PACKED = [name for name in CASES if name.startswith("packed")]
