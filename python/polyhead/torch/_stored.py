"""Keys or values in fewer bytes, as a tensor: `attention` reads what is stored, all else gets dense numbers."""

import functools

import torch

from polyhead import Error, KvCache

aten = torch.ops.aten
# Operations that do the same to numbers and scales as to what they stand for, if they leave the last dimension alone;
# which of their arguments are dimensions.
_ALIKE = {
    aten.alias.default: slice(0),
    aten.detach.default: slice(0),
    aten.index_select.default: slice(1, 2),
    aten.slice.Tensor: slice(1, 2),
    aten.transpose.int: slice(1, 3),
}


class Stored(torch.Tensor):
    """Keys or values [B, G, S, D], or views of them with D last, of which only the stored numbers and scales exist.

    Slices, transposes and selections of all but the last dimension are stored too. Any other operation works on dense
    numbers, and its results are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, numbers, scales, head_dim, dtype, hadamard):
        shape = (*numbers.shape[:-1], head_dim)
        return torch.Tensor._make_wrapper_subclass(cls, shape, dtype=dtype, device=numbers.device)

    def __init__(self, numbers, scales, head_dim, dtype, hadamard):
        self.numbers = numbers  # [..., D], of int4 [..., D / 2]
        self.scales = scales  # [..., groups]
        self.hadamard = hadamard  # whether numbers are those of rows times the Hadamard matrix

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        dims = _ALIKE.get(function)
        if dims is not None and all(dim % 4 != 3 for dim in args[dims]):
            return with_planes(args[0], [function(plane, *args[1:], **kwargs) for plane in planes_of(args[0])])
        if function is aten.scaled_dot_product_attention.default and (ours := _switched(args[0])):
            return ours(*args, **kwargs)
        for given, parameter in zip(args, function._schema.arguments):
            if isinstance(given, cls) and parameter.alias_info is not None and parameter.alias_info.is_write:
                raise Error(f"{function} would write into {given!r}, which only its Cache does: take a copy")
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.dense, (args, kwargs))
        return function(*args, **kwargs)

    def __deepcopy__(self, memo):
        return with_planes(self, [plane.__deepcopy__(memo) for plane in planes_of(self)])

    def __repr__(self):
        return f"Stored({tuple(self.shape)}, {self.dtype} as {self.numbers.dtype}, hadamard={self.hadamard})"

    @torch.compiler.disable
    def dense(self):
        """The numbers that are stored, rounded to this tensor's dtype."""
        rows = self._multiplied() if self.is_cuda else self._read()  # float32
        if self.hadamard:
            rows = turned(rows)  # the matrix is its own inverse
        return rows.view(self.shape).to(self.dtype)

    def _read(self):
        without_values = self.scales[..., :0].float()
        cache = KvCache(self.numbers, without_values, self.scales)
        return cache.read(torch.arange(self.shape[:2].numel()))[0]

    def _multiplied(self):
        """The same by torch: `KvCache` reads on the CPU alone."""
        numbers = self.numbers
        if numbers.dtype == torch.uint8:  # pairs of int4, the first in the low half
            halves = torch.stack((numbers % 16, numbers // 16), -1).flatten(-2).int()
            numbers = torch.where(halves < 8, halves, halves - 16)  # two's complement
        by_group = numbers.float().unflatten(-1, (self.scales.shape[-1], -1))
        return (by_group * self.scales.float()[..., None]).flatten(-2).flatten(0, -3)


def _switched(query):
    """The switch's function if it takes this query: torch's dispatcher comes here before it in inference mode."""
    from polyhead.torch import _aten, _sdpa, _switch  # they import this module

    return _sdpa.scaled_dot_product_attention if _switch.is_enabled() and _aten.why_not(query) is None else None


def planes_of(x):
    """The tensors that hold keys or values."""
    return [x.numbers, x.scales] if isinstance(x, Stored) else [x]


def with_planes(x, planes):
    """Keys or values of x's kind in other planes."""
    return Stored(*planes, x.shape[-1], x.dtype, x.hadamard) if isinstance(x, Stored) else planes[0]


@torch.compiler.disable
def turned(rows):
    """rows [..., heads, D] times the orthogonal Hadamard matrix, as `KvCache.append` multiplies queries."""
    tokens = rows.flatten(0, -3)
    cache, nothing = _of_nothing(rows.shape[-1], rows.dtype, rows.device)
    nothing, nowhere = nothing.expand(len(tokens), -1, -1), torch.full((len(tokens),), -1, device=rows.device)
    return cache.append(nothing, nothing, slots=nowhere, query=tokens).view(rows.shape)


@functools.lru_cache
def _of_nothing(head_dim, dtype, device):
    """A cache that is never written, and a key for it."""
    key, value, new = torch.zeros(3, 1, 1, 1, head_dim, dtype=dtype, device=device)
    return KvCache(key, value, hadamard=True), new[0]


def operands_of(query, key, value):
    """(query, key, value, key_scales, value_scales), as `attention` takes them."""
    key_scales = value_scales = None
    if isinstance(key, Stored):
        query = turned(query) if key.hadamard else query
        key, key_scales = key.numbers, key.scales
    if isinstance(value, Stored):
        value, value_scales = value.numbers, value.scales
    return query, key, value, key_scales, value_scales
