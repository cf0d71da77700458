from collections.abc import Iterable, Sequence
from typing import Any, Literal, NamedTuple, Protocol, SupportsFloat, SupportsIndex, TypeVar, overload

import numpy as np
import numpy.typing as npt

from polyhead._bind import Error as Error, __version__ as __version__
from polyhead._explanation import Explanation as Explanation
from polyhead._multi_head_attention import MultiHeadAttention as MultiHeadAttention

__all__ = [
    "DropoutOrigin", "Error", "Explanation", "MultiHeadAttention", "__version__", "attention", "attention_backward",
    "dropout_mask", "explain", "kernels", "merge", "merge_backward",
]  # fmt: skip

class _Array(Protocol):
    def __dlpack__(self) -> Any: ...

_ArrayT = TypeVar("_ArrayT", bound=_Array)

class DropoutOrigin(NamedTuple):
    first_head: int = 0
    num_heads: int = 0
    first_query: int = 0
    first_key: int = 0

@overload
def attention(
    query: _ArrayT,
    key: _Array,
    value: _Array,
    *,
    attn_bias: _Array | None = None,
    attn_mask: _Array | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: SupportsIndex | _Array | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat = 0.0,
    alibi_slopes: _Array | None = None,
    dropout_p: SupportsFloat = 0.0,
    dropout_seed: SupportsIndex | None = None,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Sequence[int] | None = None,
    seqlens_q: _Array | None = None,
    seqlens_k: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    return_logsumexp: Literal[False] = False,
    return_weights: Literal[False] = False,
    return_column_sums: Literal[False] = False,
    out_dtype: Any = None,
    kernel: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    stream: SupportsIndex | None = None,
) -> _ArrayT: ...
@overload
def attention(
    query: _ArrayT,
    key: _Array,
    value: _Array,
    *,
    attn_bias: _Array | None = None,
    attn_mask: _Array | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: SupportsIndex | _Array | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat = 0.0,
    alibi_slopes: _Array | None = None,
    dropout_p: SupportsFloat = 0.0,
    dropout_seed: SupportsIndex | None = None,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Sequence[int] | None = None,
    seqlens_q: _Array | None = None,
    seqlens_k: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    return_logsumexp: bool = False,
    return_weights: bool | Literal["mean"] = False,
    return_column_sums: bool = False,
    out_dtype: Any = None,
    kernel: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    stream: SupportsIndex | None = None,
) -> tuple[_ArrayT, ...]: ...
def attention_backward(
    grad_out: _Array,
    query: _ArrayT,
    key: _Array,
    value: _Array,
    out: _Array,
    logsumexp: _Array,
    *,
    attn_bias: _Array | None = None,
    attn_mask: _Array | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: SupportsIndex | _Array | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat = 0.0,
    alibi_slopes: _Array | None = None,
    dropout_p: SupportsFloat = 0.0,
    dropout_seed: SupportsIndex | None = None,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Sequence[int] | None = None,
    seqlens_q: _Array | None = None,
    seqlens_k: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    kernel: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    stream: SupportsIndex | None = None,
    grad_logsumexp: _Array | None = None,
    needs: Iterable[str] = ("query", "key", "value"),
    into: dict[str, _ArrayT] | None = None,
    accumulate: bool = False,
    grad_dtype: Any = None,
) -> dict[str, _ArrayT]: ...
def merge(outs: Iterable[_ArrayT], logsumexps: Iterable[_Array]) -> tuple[_ArrayT, _ArrayT]: ...
def merge_backward(
    grad_out: _Array,
    outs: Iterable[_ArrayT],
    logsumexps: Iterable[_Array],
    out: _Array,
    logsumexp: _Array,
    grad_logsumexp: _Array | None = None,
) -> tuple[list[_ArrayT], list[_ArrayT]]: ...
def explain(
    query: _Array,
    key: _Array,
    value: _Array,
    *,
    attn_bias: _Array | None = None,
    attn_mask: _Array | None = None,
    causal: bool = False,
    window: Sequence[int] | None = None,
    align: Literal["top_left", "bottom_right"] | None = None,
    query_offset: SupportsIndex | _Array | None = None,
    scale: SupportsFloat | None = None,
    softcap: SupportsFloat = 0.0,
    alibi_slopes: _Array | None = None,
    dropout_p: SupportsFloat = 0.0,
    dropout_seed: SupportsIndex | None = None,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Sequence[int] | None = None,
    seqlens_q: _Array | None = None,
    seqlens_k: _Array | None = None,
    cu_seqlens_q: _Array | None = None,
    cu_seqlens_k: _Array | None = None,
    return_logsumexp: bool = False,
    return_weights: bool | Literal["mean"] = False,
    return_column_sums: bool = False,
    out_dtype: Any = None,
    kernel: str | None = None,
    device: Literal["cpu", "cuda"] | None = None,
    stream: SupportsIndex | None = None,
) -> Explanation: ...
def kernels() -> list[str]: ...
def dropout_mask(
    shape: Sequence[int],
    dropout_p: SupportsFloat,
    dropout_seed: SupportsIndex,
    dropout_offset: SupportsIndex = 0,
    dropout_origin: DropoutOrigin | Sequence[int] | None = None,
) -> npt.NDArray[np.bool_]: ...
