"""The operators' CPU kernels in C++ (python/torch_ops), where this build has them."""

import ctypes
import os
import pathlib

import torch

_PATH = pathlib.Path(__file__).parent / "libpolyhead_torch.so"
# By the number that the library gives them.
_OPS = (
    "attention_forward", "attention_backward", "attention_block_forward", "attention_block_backward",
    "feed_forward_block_forward", "feed_forward_block_backward",
)  # fmt: skip
_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)


class _CallCount(ctypes.Structure):
    """As in python/torch_ops/call_counts.h."""

    _fields_ = [
        *((name, ctypes.c_int32) for name in ("op", "dtype", "packed", "other")),
        *((name, ctypes.c_int64) for name in ("batch", "seqlen_q", "seqlen_k", "num_heads", "num_heads_kv")),
        *((name, ctypes.c_int64) for name in ("head_dim", "head_dim_v")),
        ("kernel", ctypes.c_char_p),
        ("count", ctypes.c_int64),
    ]


_library = None


def load():
    """Loads the kernels, which register themselves; False where this build or torch has none."""
    global _library
    if os.environ.get("POLYHEAD_TORCH_OPS") == "python" or not _PATH.exists():
        return False
    try:
        torch.ops.load_library(_PATH)
    except OSError:  # torch before 2.9
        return False
    _library = ctypes.CDLL(str(_PATH))
    _library.polyhead_torch_call_counts.argtypes = [ctypes.POINTER(_CallCount), ctypes.c_int64, ctypes.c_int32]
    _library.polyhead_torch_call_counts.restype = ctypes.c_int64
    return True


def call_counts(reset):
    """What they computed: {(op, query's, key's, value's shape, dtype, kernel): calls}; beyond 4096, without shapes."""
    if _library is None:
        return {}
    counts = (_CallCount * 4200)()
    found = _library.polyhead_torch_call_counts(counts, len(counts), reset)
    return {_call(each): each.count for each in counts[:found]}


def _call(c):
    op = _OPS[c.op]
    rest = (_DTYPES[c.dtype], c.kernel.decode())
    if c.other:
        return op, None, None, None, *rest
    lead_q, lead_k = ((c.seqlen_q,), (c.seqlen_k,)) if c.packed else ((c.batch, c.seqlen_q), (c.batch, c.seqlen_k))
    key, value = (*lead_k, c.num_heads_kv, c.head_dim), (*lead_k, c.num_heads_kv, c.head_dim_v)
    return op, (*lead_q, c.num_heads, c.head_dim), key, value, *rest
