"""xFormers' own masks, taken as what ours of the same names are."""

import dataclasses

from polyhead import Error
from polyhead.torch import _seqlens, attn_bias


def from_xformers(mask):
    """Our mask of the class and the contents that an instance of xFormers' has; anything else as it is.

    A class derived from one of xFormers' may hide something else, so it is left as it is, too.
    """
    kind = type(mask)
    if kind.__module__ != "xformers.ops.fmha.attn_bias":
        return mask
    if kind.__name__ not in attn_bias.__all__:
        raise Error(f"attn_bias is xFormers' {kind.__name__}, which is not computed here: of its masks of pages there is "
                    "flash_attn_with_kvcache with its block_table")  # fmt: skip
    ours = object.__new__(getattr(attn_bias, kind.__name__))
    vars(ours).update({name: _own(value) for name, value in vars(mask).items()})
    if hasattr(ours, "__post_init__"):
        ours.__post_init__()
    return ours


def _own(value):
    """Where sequences lie, in our class of that name."""
    kind = type(value)
    if kind.__module__ != "xformers.ops.fmha.attn_bias" or not hasattr(_seqlens, kind.__name__):
        return value
    own = getattr(_seqlens, kind.__name__)
    return own(**{field.name: getattr(value, field.name) for field in dataclasses.fields(own)})
