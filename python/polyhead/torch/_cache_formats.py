"""In which formats `Cache` stores keys and values, and how what is new gets there: `polyhead.KvCache` writes it."""

import dataclasses

import torch

from polyhead import Error, KvCache
from polyhead._kv_cache import check_name, widths
from polyhead.torch._stored import Stored, planes_of

WITH_SCALES = {
    "int8": (torch.int8, torch.float32),
    "float8_e4m3": (torch.float8_e4m3fn, torch.float32),
    "float8_e5m2": (torch.float8_e5m2, torch.float32),
    "int4": (torch.uint8, torch.float16),
}  # the dtypes of numbers and scales
_EVENLY_SPACED = ("int8", "int4")  # what these round, the Hadamard matrix spreads; float8's steps grow with the numbers


@dataclasses.dataclass(frozen=True)
class _Side:
    """Keys, or values."""

    name: str
    dtype: str | None  # a name of KvCache's, or None: as they come
    group: int | None  # None: 32 or else 16 numbers of int4 share a scale where those divide a head, otherwise all

    def planes(self, states):
        """What numbers and scales of states [B, G, S, D] look like, [B, G, S, ...]; nothing is written into these."""
        dim, group = states.shape[-1], self.group
        if self.dtype not in WITH_SCALES:
            given = str(states.dtype).removeprefix("torch.")
            if self.dtype not in (None, given):
                raise Error(f"{self.name}_dtype is {self.dtype!r}, but the model's {self.name}s are {given}")
            widths(self.name, given, dim, group or 0)
            return [torch.empty_like(states)]
        if group is None:
            group = next((n for n in (32, 16) if self.dtype == "int4" and dim % n == 0), 0)
        sizes = widths(self.name, self.dtype, dim, group)
        return [
            torch.empty((*states.shape[:-1], size), dtype=dtype, device=states.device)
            for size, dtype in zip(sizes, WITH_SCALES[self.dtype])
        ]


class Formats:
    """What a layer stores its keys and values as."""

    def __init__(self, key_dtype, value_dtype, key_group, value_group, hadamard):
        for argument, name in (("key_dtype", key_dtype), ("value_dtype", value_dtype)):
            if name is not None:
                check_name(argument, name)
        self.sides = _Side("key", key_dtype, key_group), _Side("value", value_dtype or key_dtype, value_group)
        self.hadamard = hadamard
        self.as_they_come = all(side == _Side(side.name, None, None) for side in self.sides)
        if hadamard and key_dtype not in WITH_SCALES:
            raise Error(f"hadamard is True, but key_dtype is {key_dtype!r}, must be one of {', '.join(WITH_SCALES)}")

    @torch.compiler.disable
    def join(self, rooms, held, states):
        """Held keys and values with the states [B, G, S, D] behind them, in rooms; `Stored` where they have scales."""
        joined, arrays = [], []
        hadamard = self._hadamard(states[0].shape[-1])
        for side, old, new in zip(self.sides, held, states):
            if torch.is_grad_enabled() and new.requires_grad:
                lost = f"which a Cache of {side.dtype} does not keep: take torch.no_grad()"
                raise Error(f"{side.name}_states have gradients, {lost}")
            planes = side.planes(new)
            before = planes_of(old) if old.numel() else [plane[:, :, :0] for plane in planes]
            rows = [rooms(side.name, n).grown(*each) for n, each in enumerate(zip(before, planes))]
            arrays.append([plane[:, :, plane.shape[2] - new.shape[2] :].transpose(1, 2) for plane in rows])
            turned = hadamard and side.name == "key"
            joined.append(Stored(*rows, new.shape[-1], new.dtype, turned) if len(rows) == 2 else rows[0])
        (key, *key_scales), (value, *value_scales) = arrays
        cache = KvCache(key, value, *(key_scales or [None]), *(value_scales or [None]), hadamard=hadamard)
        tokens = [new.transpose(1, 2).flatten(0, 1) for new in states]
        cache.append(*tokens, slots=torch.arange(len(tokens[0]), device=tokens[0].device))
        return joined

    def _hadamard(self, head_dim):
        if self.hadamard is None:
            return self.sides[0].dtype in _EVENLY_SPACED and head_dim & (head_dim - 1) == 0
        return self.hadamard
