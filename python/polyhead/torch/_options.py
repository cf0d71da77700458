"""The options of one call, as the operators take them: positions instead of words, tensors apart from numbers."""

from collections import namedtuple
from typing import NamedTuple, Optional

import torch
from torch import Tensor

import polyhead
from polyhead import Error

ALIGNS = (None, "top_left", "bottom_right")
_ALIGN_NUMBERS = {"top_left": 1, "bottom_right": 2}
LAYOUTS = ("BSHD", "BHSD", "BHSD, fewer heads of key and value")  # layout, where it is an argument; not 0: torch's own
WEIGHTS = (False, True, "mean")  # return_weights; its number is the operators'
NORMALIZERS = ("softmax", "none")  # normalizer; its number is the operators'
KERNELS = tuple(polyhead.kernels())


class Options(NamedTuple):
    """What follows query, key and value in the operators' arguments, the commonest first: a call leaves the rest out.

    `attention_backward` takes them too, but for the last three. schemas.txt has the same names in the same order.
    """

    causal: bool = False
    scale: Optional[float] = None
    attn_bias: Optional[Tensor] = None
    attn_mask: Optional[Tensor] = None
    alibi_slopes: Optional[Tensor] = None
    dropout_seed: Optional[Tensor] = None  # int64 scalar, the bits of a uint64: a tensor, so that a graph can draw it
    dropout_p: float = 0.0
    dropout_offset: int = 0
    window_left: int = -1
    window_right: int = -1
    align: int = 0  # of ALIGNS
    query_offset: Optional[int] = None
    query_offsets: Optional[Tensor] = None  # [B], instead of query_offset
    softcap: float = 0.0
    seqlens_q: Optional[Tensor] = None
    seqlens_k: Optional[Tensor] = None
    cu_seqlens_q: Optional[Tensor] = None
    cu_seqlens_k: Optional[Tensor] = None
    kernel_name: Optional[str] = None  # a graph may run on another machine; Inductor takes no argument `kernel`
    dropout_origin: Optional[Tensor] = None  # polyhead.DropoutOrigin as int64 [4]
    sink_logits: Optional[Tensor] = None
    normalizer: int = 0  # of NORMALIZERS
    sink_keys: int = 0
    mask_at_end: bool = False
    return_weights: int = 0  # of WEIGHTS
    return_column_sums: bool = False
    out_float32: bool = False  # beside 16-bit inputs

    @property
    def packed(self):
        return self.cu_seqlens_q is not None


PROGRAM = len(Options._fields)  # where a program's text follows, and then what it captures, in its order
NUM_SHARED = PROGRAM - 3  # those of attention_backward
MOST_CAPTURES = 8
_CAPTURES = tuple(f"capture{i}" for i in range(MOST_CAPTURES))
# Where gradients go. attention_backward's `needs` has a bit for each; its overload without a program knows the plain ones.
PLAIN_DIFFERENTIABLE = ("query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits")
DIFFERENTIABLE = (*PLAIN_DIFFERENTIABLE, *_CAPTURES)


OPTIONS_OF_GRADIENTS = tuple(Options._fields.index(name) for name in PLAIN_DIFFERENTIABLE[3:])


class AllOptions(
    namedtuple("_AllOptions", (*Options._fields, "program", *_CAPTURES), defaults=(*Options(), *[None] * (1 + MOST_CAPTURES)))
):
    """Of the overloads with a program too; a tuple of options without one is shorter."""

    packed = Options.packed


def captures_of(options):
    """Those slots of a tuple of options that captures may stand in; none where no program is given."""
    return options[PROGRAM + 1 :]


def for_backward(options):
    """What attention_backward takes of the options that attention_forward was given."""
    return options[:NUM_SHARED] + options[PROGRAM:]


def of_backward(options):
    """The options that attention_backward was given; defaults at the end may be left out."""
    if len(options) <= NUM_SHARED:
        return AllOptions(*options)
    return AllOptions(*options[:NUM_SHARED], *Options()[NUM_SHARED:], *options[NUM_SHARED:])


def window_pair(window):
    if window is None:
        return -1, -1
    if isinstance(window, str) or not hasattr(window, "__len__"):
        raise TypeError(f"window has type {type(window).__name__}, must be a pair of integers (left, right)")
    if len(window) != 2:
        raise Error(f"window has {len(window)} elements, must be a pair of integers (left, right)")
    return tuple(window)


def align_number(align):
    if align is None:
        return 0
    number = _ALIGN_NUMBERS.get(align) if isinstance(align, str) else None
    if number is None:
        raise Error(f'align is "{align}", must be "top_left" or "bottom_right"')
    return number


def kernel_name(kernel):
    if kernel is not None and kernel not in KERNELS:
        raise Error(f'kernel is "{kernel}", must be one of polyhead.kernels(): {", ".join(KERNELS)}')
    return kernel


def normalizer_number(normalizer):
    if normalizer not in NORMALIZERS:
        raise Error(f'normalizer is "{normalizer}", must be "softmax" or "none"')
    return NORMALIZERS.index(normalizer)


def weights_number(return_weights):
    if isinstance(return_weights, str) and return_weights != "mean":
        raise Error(f'return_weights is "{return_weights}", must be True, False or "mean"')
    return 2 if return_weights == "mean" else int(bool(return_weights))


def seed_tensor(dropout_p, dropout_seed):
    """The seed as the operators take it; drawn from torch's default generator where none is given."""
    if dropout_seed is None:
        if not dropout_p:
            return None
        return torch.randint(0, 2**63 - 1, (), dtype=torch.int64, device="cpu")
    if isinstance(dropout_seed, Tensor):
        if dropout_seed.dtype != torch.int64 or dropout_seed.dim() != 0:
            raise Error(
                f"dropout_seed is a tensor of {dropout_seed.dtype} with {dropout_seed.dim()} dimensions, "
                "must be an integer or an int64 scalar"
            )
        return dropout_seed
    if not 0 <= dropout_seed < 2**64:
        raise Error(f"dropout_seed is {dropout_seed}, must be 0 to 2^64 - 1")
    return torch.full((), dropout_seed - (dropout_seed >> 63 << 64), dtype=torch.int64, device="cpu")


def origin_tensor(dropout_origin):
    """A DropoutOrigin, or four integers, as the operators take it."""
    if dropout_origin is None:
        return None
    if len(dropout_origin) != 4:
        raise Error(f"dropout_origin has {len(dropout_origin)} elements, must be a polyhead.DropoutOrigin")
    return torch.tensor([*dropout_origin], dtype=torch.int64, device="cpu")


def asks_float32(out_dtype, query):
    """Whether out shall be float32 where query is not."""
    if out_dtype is None or out_dtype == query.dtype:
        return False
    half = query.dtype in (torch.bfloat16, torch.float16)
    if out_dtype != torch.float32 or not half:
        raise Error(f"out_dtype is {out_dtype}, must be {query.dtype} as query{', or torch.float32' if half else ''}")
    return True


def offset_pair(query_offset, query, cu_seqlens_q):
    """query_offset as (int or None, tensor [B] or None)."""
    if not isinstance(query_offset, Tensor):
        return query_offset, None
    if query_offset.dim() == 0:  # not read here: a graph may not know it yet
        batch = query.shape[0] if cu_seqlens_q is None else cu_seqlens_q.shape[0] - 1
        return None, query_offset.expand(batch)
    return None, query_offset
