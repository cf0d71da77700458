"""What polyhead computed for torch in this process, and what it left to torch and why."""

import math
import threading
from typing import NamedTuple, Optional

import torch

import polyhead
from polyhead.torch import _cpp

MAX_SHAPES = 4096  # told apart; a decoder meets a new one at every step

_lock = threading.Lock()
_ran: dict[tuple, int] = {}  # (op, query's, key's, value's shape, dtype, kernel asked for) -> calls
_refused: dict[tuple, int] = {}  # (op, shape, dtype, reason) -> calls


class Record(NamedTuple):
    """One line of the report.

    Attributes
    ----------
    op : str
        What ran, of ``torch.ops.polyhead``: "attention_forward", "attention_block_forward" (of layers),
        "feed_forward_block_forward" and their backward; or the function of torch that
        was called and left to torch, or the block of a layer that called its sub-modules one by one.
    shape : str
        Batch x heads x sequence length x head_dim, as the command ``polyhead bench`` takes it: "2x8x512x64"; "8/2" where
        query and key differ (the last: key and value). Packed sequences: "packed 8x4096x64". Feed-forward blocks: one
        head, as "2x1x512x64/256", of size and inner size. Blocks that called their sub-modules: the tokens',
        "2x512x64"; "compiled" in a graph.
    dtype : torch.dtype
    kernel : str or None
        One of `polyhead.kernels()`; None: not taken.
    reason : str or None
        Why not; None: taken.
    count : int
    """

    op: str
    shape: str
    dtype: torch.dtype
    kernel: Optional[str]
    reason: Optional[str]
    count: int


class Report(list):
    """A list of `Record`, printed as a table."""

    def __repr__(self) -> str:
        if not self:
            return "polyhead.torch: no call yet"
        rows = [("op", "shape", "dtype", "kernel", "count")]
        for op, shape, dtype, kernel, reason, count in self:
            taken = kernel if reason is None else f"not taken: {reason}"
            rows.append((op, shape, str(dtype).removeprefix("torch."), taken, str(count)))
        widths = [max(map(len, column)) for column in zip(*rows)]
        return "\n".join("  ".join(map(str.ljust, row, widths)).rstrip() for row in rows)

    __str__ = __repr__


def report(reset: bool = False) -> Report:
    """What ran on polyhead's kernels since the process began, and which calls the switch left to torch.

    Counted are all calls of attention and of the blocks of layers that computed, be it from eager code, from
    backward or from a compiled graph; and all calls of torch's attention that the switch met and did not take, and
    blocks of layers with sub-modules that they call by themselves, those within torch.compile when a graph is traced.

    Parameters
    ----------
    reset : bool
        Begin a new count.

    Returns
    -------
    Report
        A list of `Record`: op, shape, dtype, kernel (None if not taken), reason (None if taken), count. Printed as a
        table. Beyond 4096 shapes, further ones are counted together as "other".

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> _ = polyhead.torch.report(reset=True)
    >>> query = torch.ones(1, 4, 2, 8)
    >>> with polyhead.torch.enabled():
    ...     out = torch.nn.functional.scaled_dot_product_attention(query, query, query)
    >>> [(record.op, record.shape, record.count) for record in polyhead.torch.report()]
    [('attention_forward', '1x4x2x8', 1)]
    """
    with _lock:
        ran, refused = {**_cpp.call_counts(reset), **_ran}, dict(_refused)
        if reset:
            _ran.clear()
            _refused.clear()
    records = Report()
    for (op, *shapes, dtype, kernel), count in ran.items():
        shape = "other" if shapes[0] is None else _problem(*shapes)
        records.append(Record(op, shape, dtype, kernel or _chosen_kernel(shapes, dtype), None, count))
    for (op, shape, dtype, reason), count in refused.items():
        records.append(Record(op, shape, dtype, None, reason, count))
    records.sort(key=lambda r: (r.kernel is None, r.shape, str(r.dtype), r.op.endswith("_backward")))
    return records


def count_run(op: str, query, key, value, kernel: Optional[str] = None) -> None:
    """Counts a call of `op` on [B, S, H, D] or packed [S, H, D] tensors, with the kernel asked for by name, if any.

    For operators in Python; those in C++ count their own.
    """
    count_sizes(op, query.shape, key.shape, value.shape, query.dtype, kernel)


def count_sizes(op: str, query, key, value, dtype: torch.dtype, kernel: Optional[str] = None) -> None:
    """The same, of shapes."""
    call = (op, query, key, value, dtype, kernel)
    with _lock:
        if call not in _ran and len(_ran) >= MAX_SHAPES:
            call = (op, None, None, None, dtype, kernel)
        _ran[call] = _ran.get(call, 0) + 1


def count_refused(op: str, shape: str, dtype: torch.dtype, reason: str) -> None:
    """Counts a call of torch's `op` that was left to torch."""
    call = (op, shape, dtype, reason)
    with _lock:
        if call not in _refused and len(_refused) >= MAX_SHAPES:
            call = (op, "other", dtype, reason)
        _refused[call] = _refused.get(call, 0) + 1


def sdpa_shape(query, key, value) -> str:
    """As `Record.shape`, of torch's [..., H, S, D] tensors."""
    return _problem(*map(_bshd, (query, key, value)))


def _chosen_kernel(shapes, dtype) -> str:
    """By sizes and dtype alone, which is what the choice rests on."""
    one = torch.zeros((), dtype=dtype)
    return polyhead.explain(*(one.expand((1, *(shape or (1, 1, 1)))[-4:]) for shape in shapes)).kernel


def _problem(query, key, value) -> str:
    """Shapes [B, S, H, D] or, packed, [S, H, D], in words."""
    *batch, seqlen_q, num_heads, head_dim = query
    seqlen_k, num_heads_kv = key[-3:-1]
    start = f"{batch[0]}x" if batch else "packed "
    return f"{start}{_pair(num_heads, num_heads_kv)}x{_pair(seqlen_q, seqlen_k)}x{_pair(head_dim, value[-1])}"


def _pair(first, second) -> str:
    first, second = str(first), str(second)  # sizes that are not known yet have names, and are not to be compared
    return first if first == second else f"{first}/{second}"


def _bshd(x) -> tuple:
    """[B, S, H, D] of a tensor of torch's [..., H, S, D], [H, S, D] or [S, D]."""
    *batch, num_heads, seqlen, head_dim = (1,) * (3 - x.dim()) + tuple(x.shape)
    return math.prod(batch), seqlen, num_heads, head_dim
