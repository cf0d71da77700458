"""`Cache`: a cache for Hugging Face transformers whose keys and values grow where they lie."""

import functools

import torch
from transformers import cache_utils

from polyhead.torch._cache_formats import Formats
from polyhead.torch._stored import planes_of, with_planes

LEAST_ROOM = 128  # rows


class Cache(cache_utils.DynamicCache):
    """transformers' ``DynamicCache`` that writes new tokens behind the old ones instead of copying all of them.

    Room grows by half of what is there, so that a token costs the same however long the text is; memory of rows that
    nobody has written yet is not touched. Sliding windows move to the front when they reach the end. Every way to
    generate that takes a ``DynamicCache`` takes this: greedy, sampling, beams, assisted generation, which takes tokens
    back. Tokens are those that a ``DynamicCache`` gives, unless a dtype of fewer bytes is asked for.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        The model's: it tells which layers slide. Default: no layer does.
    key_dtype, value_dtype : str, optional
        What keys and values are stored as: "int8", "float8_e4m3", "float8_e5m2" or "int4", as by `polyhead.KvCache`, or
        the name of the model's dtype. value_dtype defaults to key_dtype, and that to what comes.
    key_group, value_group : int, optional
        How many numbers of a head share a scale: a multiple of 16 that divides head_dim; 0: all. Default: 32 of int4, 16
        where 32 does not divide head_dim, otherwise all.
    hadamard : bool, optional
        Keys are stored, and queries look at them, multiplied by the Hadamard matrix, as by `polyhead.KvCache`. Default:
        keys of int8 and int4 whose head_dim is a power of 2.

    Raises
    ------
    polyhead.Error
        Names, groups and dtypes that do not go together; where it depends on the model, when its first keys come.

    Notes
    -----
    Where autograd records (outside of ``torch.no_grad`` and ``generate``) and in compiled graphs, keys and values are
    copied as ``DynamicCache`` does. Layers without keys and values, and those of sparse attention, are transformers'
    own.

    What ``update`` returns, and ``layers[i].keys``, are views of the room. A rolled-back cache writes over the rows it
    took back: who keeps two continuations of one text takes ``copy.deepcopy(cache)``.

    Before transformers 5.24 ``generate`` and models call their argument past_key_values, and not cache.

    In fewer bytes these are tensors of the shape and dtype of the model's keys that hold only what is stored, of the
    prompt too. ``attn_implementation="polyhead"`` reads that as it is, and so does the switch where the model does not
    repeat heads before; whatever else uses such a tensor gets dense numbers, made anew for each operation. Keys that
    have gradients are refused; a compiled graph breaks there.

    Examples
    --------
    >>> cache = polyhead.torch.Cache(model.config)  # doctest: +SKIP
    >>> model.generate(**inputs, cache=cache, max_new_tokens=100)  # doctest: +SKIP
    >>> small = polyhead.torch.Cache(model.config, "int8")  # doctest: +SKIP
    """

    def __init__(
        self, config=None, key_dtype=None, value_dtype=None, *, key_group=None, value_group=None, hadamard=None
    ):
        super().__init__(config=config)
        formats = Formats(key_dtype, value_dtype, key_group, value_group, hadamard)
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = functools.partial(_growing, cache_utils.DynamicLayer, formats)
        self.layers = [_growing(type(layer), formats, layer.__dict__) for layer in self.layers]


class _Room:
    """Memory [B, G, rows, D], of which some rows are in use; others are behind them, or were cropped."""

    def __init__(self):
        self.memory = self.spare = None

    def join(self, held, new):
        """`held` [B, G, S, D], or no elements at all, and `new` behind it: in place where held lies here."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.cat([held, new], -2)  # what was returned before may be needed by a backward pass
        rows = self.grown(held, new)
        rows[:, :, rows.shape[2] - new.shape[2] :] = new
        return rows

    def grown(self, held, new):
        """`held` and rows for `new` behind it, which nobody has written yet."""
        length = held.shape[-2] if held.numel() else 0
        end = length + new.shape[-2]
        if self._holds(held, new):
            first = self._first_row(held)
        else:
            first = 0
            self.memory = new.new_empty((*new.shape[:2], end + max(end // 2, LEAST_ROOM), new.shape[3]))
            if length:
                self.memory[:, :, :length] = held
        return self.memory[:, :, first : first + end]

    def reorder(self, held, beams):
        """Row beams[b] of the batch in place of row b."""
        if torch.is_grad_enabled() or not self._holds(held, held[:, :, :0]):
            return held.index_select(0, beams)
        if self.spare is None or self.spare.shape != self.memory.shape or not _writable(self.spare):
            self.spare = torch.empty_like(self.memory)
        first, length = self._first_row(held), held.shape[-2]
        reordered = self.spare[:, :, first : first + length]
        torch.index_select(held, 0, beams, out=reordered)
        self.memory, self.spare = self.spare, self.memory
        return reordered

    def _holds(self, held, new):
        """Whether held is rows of memory, with room for new behind them."""
        memory = self.memory
        if memory is None or not _writable(memory) or not held.numel() or new.dtype != memory.dtype:
            return False
        if held.untyped_storage().data_ptr() != memory.untyped_storage().data_ptr():
            return False
        same_rows = held.shape[:2] == memory.shape[:2] == new.shape[:2] and held.shape[3] == memory.shape[3]
        if not same_rows or held.stride() != memory.stride() or new.shape[3] != memory.shape[3]:
            return False
        return self._first_row(held) + held.shape[-2] + new.shape[-2] <= memory.shape[-2]

    def _first_row(self, held):
        return (held.storage_offset() - self.memory.storage_offset()) // max(self.memory.stride(2), 1)


def _writable(memory):
    return torch.is_inference_mode_enabled() or not memory.is_inference()


class InPlace:
    """What a layer of transformers does with rooms for its keys and values."""

    def update(self, key_states, value_states, *args, **kwargs):
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        if self.formats.as_they_come:
            keys = self._room("key", 0).join(self.keys, key_states)
            values = self._room("value", 0).join(self.values, value_states)
        else:
            keys, values = self.formats.join(self._room, (self.keys, self.values), (key_states, value_states))
        return self._keep(keys, values, key_states.shape[-2])

    def reorder_cache(self, beam_idx):
        if self.get_seq_length() > 0:
            beams = beam_idx.to(self.keys.device)
            self.keys = self._reordered("key", self.keys, beams)
            self.values = self._reordered("value", self.values, beams)

    def batch_repeat_interleave(self, repeats):
        if self.get_seq_length() > 0:
            self.batch_select_indices(torch.arange(len(self.keys)).repeat_interleave(repeats))

    def batch_select_indices(self, indices):
        if self.get_seq_length() > 0:
            rows = torch.arange(len(self.keys), device=self.keys.device)[indices]
            self.keys, self.values = (x.index_select(0, rows) for x in (self.keys, self.values))

    def _reordered(self, side, held, beams):
        return with_planes(held, [self._room(side, n).reorder(each, beams) for n, each in enumerate(planes_of(held))])

    def _room(self, side, plane):
        return self.__dict__.setdefault("_rooms", {}).setdefault((side, plane), _Room())

    def _keep(self, keys, values, num_new):
        self.keys, self.values = keys, values
        return keys, values


class GrowingLayer(InPlace, cache_utils.DynamicLayer):
    """All tokens."""


class SlidingLayer(InPlace, cache_utils.DynamicSlidingWindowLayer):
    """The last sliding_window - 1 tokens and, where it must be able to go back, those before them."""

    def _keep(self, keys, values, num_new):
        self.cumulative_length += num_new
        past = self.sliding_window - 1
        seen, kept = (slice(max(keys.shape[-2] - n, 0), None) for n in (past + num_new, past))
        if self.record_past:
            kept = slice(None)
        elif keys.shape[-2] > 2 * (past + LEAST_ROOM):
            self._rooms.clear()  # a long prompt's: not kept for the sake of a few rows
        self.keys, self.values = keys[:, :, kept], values[:, :, kept]
        return keys[:, :, seen], values[:, :, seen]


class GrowingHybridLayer(InPlace, cache_utils.LinearAttentionAndFullAttentionLayer):
    """All tokens, beside the state of a linear attention."""

    def reorder_cache(self, beam_idx):
        cache_utils.LinearAttentionLayer.reorder_cache(self, beam_idx)
        InPlace.reorder_cache(self, beam_idx)


_GROWING = {
    cache_utils.DynamicLayer: GrowingLayer,
    cache_utils.DynamicSlidingWindowLayer: SlidingLayer,
    cache_utils.LinearAttentionAndFullAttentionLayer: GrowingHybridLayer,
}


def _growing(kind, formats, state=None):
    """A layer of this kind, or what it is with rooms if it can have some."""
    growing = _GROWING.get(kind, kind)
    layer = growing() if state is None else growing.__new__(growing)
    layer.__dict__.update(state or {}, formats=formats)
    return layer
