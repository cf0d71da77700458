"""`Cache`: a cache for Hugging Face transformers whose keys and values grow where they lie."""

import torch
from transformers import cache_utils

LEAST_ROOM = 128  # rows


class Cache(cache_utils.DynamicCache):
    """transformers' ``DynamicCache`` that writes new tokens behind the old ones instead of copying all of them.

    Room grows by half of what is there, so that a token costs the same however long the text is; memory of rows that
    nobody has written yet is not touched. Sliding windows move to the front when they reach the end. Every way to generate
    that takes a ``DynamicCache`` takes this: greedy, sampling, beams, assisted generation, which takes tokens back.
    Tokens are those that a ``DynamicCache`` gives.

    Parameters
    ----------
    config : transformers.PreTrainedConfig, optional
        The model's: it tells which layers slide. Default: no layer does.

    Notes
    -----
    Where autograd records (outside of ``torch.no_grad`` and ``generate``) and in compiled graphs, keys and values are
    copied as ``DynamicCache`` does. Layers without keys and values, and those of sparse attention, are transformers' own.

    What ``update`` returns, and ``layers[i].keys``, are views of the room. A rolled-back cache writes over the rows it
    took back: who keeps two continuations of one text takes ``copy.deepcopy(cache)``.

    Examples
    --------
    >>> cache = polyhead.torch.Cache(model.config)  # doctest: +SKIP
    >>> model.generate(**inputs, past_key_values=cache, max_new_tokens=100)  # doctest: +SKIP
    """

    def __init__(self, config=None):
        super().__init__(config=config)
        if self.layer_class_to_replicate is not None:
            self.layer_class_to_replicate = GrowingLayer
        self.layers = [_growing(layer) for layer in self.layers]


class _Room:
    """Memory [B, G, rows, D], of which some rows are in use; others are behind them, or were cropped."""

    def __init__(self):
        self.memory = self.spare = None

    def join(self, held, new):
        """`held` [B, G, S, D], or no elements at all, and `new` behind it: in place where held lies here."""
        if torch.is_grad_enabled() or torch.compiler.is_compiling():
            return torch.cat([held, new], -2)  # what was returned before may be needed by a backward pass
        length = held.shape[-2] if held.numel() else 0
        end = length + new.shape[-2]
        if self._holds(held, new):
            first = self._first_row(held)
        else:
            first = 0
            self.memory = new.new_empty((*new.shape[:2], end + max(end // 2, LEAST_ROOM), new.shape[3]))
            if length:
                self.memory[:, :, :length] = held
        self.memory[:, :, first + length : first + end] = new
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
        keys = self._room("keys").join(self.keys, key_states)
        values = self._room("values").join(self.values, value_states)
        return self._keep(keys, values, key_states.shape[-2])

    def reorder_cache(self, beam_idx):
        if self.get_seq_length() > 0:
            self.keys = self._room("keys").reorder(self.keys, beam_idx.to(self.keys.device))
            self.values = self._room("values").reorder(self.values, beam_idx.to(self.values.device))

    def _room(self, name):
        return self.__dict__.setdefault("_rooms", {}).setdefault(name, _Room())

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


def _growing(layer):
    """The same layer with rooms, if it is of a kind that can have some."""
    kind = _GROWING.get(type(layer))
    if kind is None:
        return layer
    growing = kind.__new__(kind)
    growing.__dict__.update(layer.__dict__)
    return growing
