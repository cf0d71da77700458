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
    """Loads the kernels, which register themselves; False where this build has none, or none are wanted.

    Raises ImportError with what the loader or torch said: a slower way, silently taken, would be noticed by nobody.
    """
    global _library
    if os.environ.get("POLYHEAD_TORCH_OPS") == "python" or not _PATH.exists():
        return False
    try:
        library = ctypes.CDLL(str(_PATH))
        library.polyhead_torch_not_registered.restype = ctypes.c_char_p
        failed = library.polyhead_torch_not_registered()
        if failed is not None:
            raise OSError(f"torch {torch.__version__} did not register {failed.decode()}")
        library.polyhead_torch_call_counts.argtypes = [ctypes.POINTER(_CallCount), ctypes.c_int64, ctypes.c_int32]
        library.polyhead_torch_call_counts.restype = ctypes.c_int64
    except (OSError, AttributeError) as error:
        raise ImportError(
            f"polyhead's operators in C++ cannot be loaded into torch {torch.__version__}: {error}. Install polyhead "
            "anew, or set POLYHEAD_TORCH_OPS=python: the operators run in Python then, and small calls take longer"
        ) from error
    _library = library
    return True


def call_counts(reset):
    """What they computed: {(op, query's, key's, value's shape, dtype, kernel): calls}; beyond 4096, without shapes."""
    if _library is None:
        return {}
    counts = (_CallCount * 5000)()  # 4096, and those of any sizes: a few for each operator, dtype and kernel
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
