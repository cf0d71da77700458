"""Attention and masks for Hugging Face transformers, under the name "polyhead".

Transformers asks for a mask once a forward pass (`_mask`) and for attention once a layer (`_attention`). The mask built
here is a `BandMask`, which holds how causal, window, offset and padding were asked for; where a model's own code works
on it as on a tensor, it becomes one.
"""

import inspect

import torch

from polyhead import Error
from polyhead.torch import _continuous_batching
from polyhead.torch._attention import attention
from polyhead.torch._mask import band

# What models hand down to every layer and what says nothing about the attention that query, key, value and mask do not.
SAYS_NOTHING_MORE = frozenset({
    "cache_params", "cache_position", "deterministic", "grid_thw", "image_grid_thw", "image_position_ids",
    "image_sizes", "input_features", "input_features_mask", "input_ids", "inputs_embeds", "labels", "logits_indices",
    "logits_processor_args", "logits_to_keep", "max_length_k", "max_length_q", "max_seqlen", "mm_encoder_outputs",
    "mm_token_type_ids", "num_items_in_batch", "output_hidden_states", "output_router_logits", "padding_cache",
    "past_key_value", "past_key_values", "pixel_mask", "pixel_values", "pixel_values_videos", "position_embeddings",
    "position_ids", "return_dict", "seq_idx", "token_type_ids", "use_cache", "video_grid_thw", "video_position_ids",
})  # fmt: skip


def register_transformers() -> None:
    """Makes ``attn_implementation="polyhead"`` work in Hugging Face transformers, and "polyhead_flash".

    Models of all kinds that take their attention from transformers' interface: padding on either side, grouped heads,
    sliding windows, soft caps, attention sinks, caches, dropout in training, packed sequences.
    ``output_attentions=True`` returns the weights. Causal, windowed, padded and packed masks are not spelled out as
    matrices, unless a model's own code looks into them, wants the weights or is compiled. A query that sees no key (in
    left padding) gets 0.

    "polyhead_flash" is the same under a name that ``generate_batch``, continuous batching, takes: it wants a "flash" in
    it. There keys and values are read in the pages of its cache, where they lie, without the matrix of a mask;
    those of sliding layers are gathered first, which its cache does.

    An argument that means something else (masks of heads, ...) raises NotImplementedError naming it.

    Raises
    ------
    ImportError
        Transformers is not installed, or so old that it has not this interface. Tried with 5.23 and 5.24.

    Examples
    --------
    >>> import polyhead.torch
    >>> polyhead.torch.register_transformers()  # doctest: +SKIP
    >>> model = transformers.AutoModel.from_pretrained(name, attn_implementation="polyhead")  # doctest: +SKIP
    """
    from transformers import AttentionInterface, AttentionMaskInterface, __version__, masking_utils

    if "q_offset" not in inspect.signature(masking_utils.sdpa_mask).parameters:
        raise ImportError(f"transformers {__version__} is too old: its requests for masks have no q_offset")
    for name in ("polyhead", _continuous_batching.NAME):
        AttentionInterface.register(name, _attention)
        AttentionMaskInterface.register(name, _mask)
    _continuous_batching.tell_transformers()


class BandMask(torch.Tensor):
    """A bool mask [B, 1, Sq, Sk], True = may look, that holds no matrix but what it is made of.

    Any operation on it works on the matrix, and its results are plain tensors.
    """

    __torch_function__ = torch._C._disabled_torch_function_impl

    @staticmethod
    def __new__(cls, batch, seqlen_q, seqlen_k, device, **made_of):
        return torch.Tensor._make_wrapper_subclass(cls, (batch, 1, seqlen_q, seqlen_k), dtype=torch.bool, device=device)

    def __init__(self, batch, seqlen_q, seqlen_k, device, *, causal, window, offset, padding, packed):
        self.causal = causal
        self.window = window
        self.offset = offset  # query i stands at key i + offset
        self.padding = padding  # bool [B, Sk], True = a token; or None
        self.packed = packed  # int [B, Sk], the number of the sequence that a token belongs to; or None

    @classmethod
    def __torch_dispatch__(cls, function, types, args=(), kwargs=None):
        args, kwargs = torch.utils._pytree.tree_map_only(cls, cls.dense, (args, kwargs or {}))
        return function(*args, **kwargs)

    def __repr__(self):
        return f"BandMask({tuple(self.shape)}, causal={self.causal}, window={self.window}, offset={self.offset})"

    def options(self):
        """What to say to `attention`, but for packed."""
        options = {"causal": self.causal}
        if self.window != (-1, -1):
            options["window"] = self.window
        if self.causal or self.window != (-1, -1):
            options["query_offset"] = self.offset
        if self.padding is not None:
            options["attn_mask"] = self.padding[:, None, None, :]
        return options

    def cu_seqlens(self):
        """packed as the starts and the end of its sequences, int32, for the rows of the batch one after the other."""
        begins = torch.ones_like(self.packed, dtype=torch.bool)
        begins[:, 1:] = self.packed[:, 1:] != self.packed[:, :-1]
        starts = begins.flatten().nonzero().flatten()
        return torch.cat([starts, starts.new_tensor([begins.numel()])]).to(torch.int32)

    def dense(self):
        """The matrix."""
        visible = band(*self.shape[2:], self.offset, self.causal, self.window, self.device).expand(self.shape)
        if self.padding is not None:
            visible = visible & self.padding[:, None, None, :]
        if self.packed is not None:
            visible = visible & (self.packed[:, None, :, None] == self.packed[:, None, None, :])
        return visible


def _made_of(mask_function):
    """{"causal", "window", "packed"} of a mask function of transformers, or None of one that is not known here."""
    from transformers import masking_utils

    if mask_function is masking_utils.causal_mask_function:
        return {"causal": True, "window": (-1, -1), "packed": None}
    if mask_function is masking_utils.bidirectional_mask_function:
        return {"causal": False, "window": (-1, -1), "packed": None}
    made_in, held = _closure(mask_function)
    if made_in == "sliding_window_overlay" and set(held) == {"sliding_window"}:
        return {"causal": False, "window": (held["sliding_window"] - 1, -1), "packed": None}
    if made_in == "sliding_window_bidirectional_overlay" and set(held) == {"sliding_window"}:
        return {"causal": False, "window": (held["sliding_window"],) * 2, "packed": None}
    if made_in == "and_masks" and set(held) == {"mask_functions"} and len(held["mask_functions"]) == 2:
        return _both(*held["mask_functions"])
    return None


def _closure(mask_function):
    """The function of transformers.masking_utils that made this one, and what it holds; None and {} of any other."""
    if getattr(mask_function, "__module__", None) != "transformers.masking_utils":
        return None, {}
    return mask_function.__qualname__.partition(".")[0], inspect.getclosurevars(mask_function).nonlocals


def _both(first, second):
    """What two mask functions, both of which must allow a key, are made of; None if that is not known."""
    held = dict(map(_closure, (first, second)))
    if held.keys() == {"packed_sequence_mask_function", "remap_positions_for_packed_sequence"}:  # in either order
        # Within a sequence the positions that it remaps to count up by one: the band lies as without it.
        made_of = _made_of(held["remap_positions_for_packed_sequence"].get("mask_function"))
        return made_of and made_of | {"packed": held["packed_sequence_mask_function"]["packed_sequence_mask"]}
    parts = _made_of(first), _made_of(second)
    if None in parts or any(part["packed"] is not None for part in parts):
        return None
    if all(part["window"] != (-1, -1) for part in parts):
        return None
    return {
        "causal": any(part["causal"] for part in parts),
        "window": max(part["window"] for part in parts),  # at most one is not (-1, -1)
        "packed": None,
    }


def _wants_weights():
    """Whether the forward pass under way was called with output_attentions=True, which not all models hand down."""
    from transformers.utils import output_capturing

    collector = output_capturing._active_collector
    collected = collector.global_var if torch.compiler.is_compiling() else collector.get()  # no graph has the latter
    return collected is not None and any(name.endswith("attentions") for name in collected)


def _mask(
    batch_size, q_length, kv_length, q_offset=0, kv_offset=0, mask_function=None, attention_mask=None, use_vmap=False,
    device="cpu", **kwargs,
):  # fmt: skip
    """Transformers' request for a mask: a `BandMask`, or where it cannot say what is asked for, what sdpa would get."""
    from transformers import masking_utils

    mask_function = mask_function or masking_utils.causal_mask_function
    made_of = None if use_vmap or torch.compiler.is_compiling() else _made_of(mask_function)
    if made_of is None or (made_of["packed"] is not None and (attention_mask is not None or q_length != kv_length)):
        # A mask is never left out (None), whatever kwargs allow: then nobody has to guess what that means.
        kwargs |= {"allow_is_causal_skip": False, "allow_is_bidirectional_skip": False}
        return masking_utils.sdpa_mask(
            batch_size=batch_size, q_length=q_length, kv_length=kv_length, q_offset=q_offset, kv_offset=kv_offset,
            mask_function=mask_function, attention_mask=attention_mask, use_vmap=use_vmap, device=device, **kwargs,
        )  # fmt: skip
    padding = masking_utils.prepare_padding_mask(attention_mask, kv_length, kv_offset)
    if padding is not None:
        padding = padding[:, kv_offset : kv_offset + kv_length]
        padding = None if padding.all() else padding
    return BandMask(
        batch_size, q_length, kv_length, device, **made_of, offset=int(q_offset) - int(kv_offset), padding=padding
    )


def _attention(
    module, query, key, value, attention_mask, dropout=0.0, scaling=None, is_causal=None, position_bias=None,
    sliding_window=None, softcap=None, s_aux=None, output_attentions=False, cu_seq_lens_q=None, cu_seq_lens_k=None,
    cache=None, read_index=None, write_index=None, **others,
):  # fmt: skip
    """Transformers' request for attention: query [B, H, Sq, D], key [B, G, Sk, D], value [B, G, Sk, Dv].

    Returns out [B, Sq, H, Dv], and the weights [B, H, Sq, Sk] or None.
    """
    for name, given in others.items():
        if name not in SAYS_NOTHING_MORE and given is not None and given is not False:
            raise NotImplementedError(f"{type(module).__name__} gives {name}, which attention 'polyhead' does not know")
    if read_index is not None:  # else a cache says nothing more: who asked it for keys gives these
        options = {"scale": scaling, "softcap": softcap or 0.0, "sink_logits": s_aux}
        if sliding_window is not None:
            options["window"] = (sliding_window - 1, -1)
        indices = cu_seq_lens_q, cu_seq_lens_k, read_index, write_index
        return _continuous_batching.paged(module.layer_idx, query, key, value, cache, *indices, options), None
    if query.shape[0] == 1:  # queries that are learned have no batch of their own
        query = query.expand(key.shape[0], -1, -1, -1)
    tensors = tuple(x.transpose(1, 2) for x in (query, key, value))
    dropout_p = dropout if module.training else 0.0
    options = {"scale": scaling, "softcap": softcap or 0.0, "dropout_p": dropout_p, "attn_bias": position_bias}
    options["sink_logits"] = s_aux
    output_attentions = bool(output_attentions) or _wants_weights()
    mask = attention_mask
    if isinstance(mask, BandMask) and (mask.shape[2:] != (query.shape[2], key.shape[2]) or output_attentions):
        mask = mask.dense()
    if mask is None:
        causal = getattr(module, "is_causal", True) if is_causal is None else is_causal
        options |= _unspoken(query.shape[2], key.shape[2], causal, sliding_window)
    elif isinstance(mask, BandMask):
        options |= mask.options()
        if mask.packed is not None and cu_seq_lens_q is None:
            cu_seq_lens_q = cu_seq_lens_k = mask.cu_seqlens()
    else:
        options |= _dense(mask, key.shape[2], position_bias)
    if cu_seq_lens_q is not None:
        return _packed(tensors, cu_seq_lens_q, cu_seq_lens_k, options), None
    result = attention(*tensors, return_weights=output_attentions, **options)
    return result if output_attentions else (result, None)


def _dense(mask, seqlen_k, position_bias):
    if mask.dim() != 4:
        raise Error(f"attention_mask has {mask.dim()} dimensions, must have 4: [B, H, Sq, Sk]")
    mask = mask[..., :seqlen_k]  # some models leave that to the attention
    if mask.dtype == torch.bool:
        return {"attn_mask": mask}
    return {"attn_bias": mask if position_bias is None else mask + position_bias}


def _unspoken(seqlen_q, seqlen_k, causal, sliding_window):
    """Options of a call without a mask: causal then means what it says, but for a single query, as for sdpa."""
    causal = bool(causal) and seqlen_q > 1
    if causal and seqlen_q != seqlen_k:
        raise Error(f"attention_mask is None, must say where {seqlen_q} causal queries stand among {seqlen_k} keys")
    if sliding_window is None or sliding_window >= seqlen_k:
        return {"causal": causal}
    if not causal:
        raise Error(f"attention_mask is None, must say where a sliding_window of {sliding_window} lies")
    return {"causal": True, "window": (sliding_window - 1, -1)}


def _packed(tensors, cu_seqlens_q, cu_seqlens_k, options):
    for name in ("attn_mask", "attn_bias"):
        if options.get(name) is not None:
            raise Error(f"cu_seq_lens_q is given beside {name}, must be alone")
    batch, seqlen_q = tensors[0].shape[:2]
    if batch > 1 and cu_seqlens_q[-1] <= seqlen_q:
        raise Error(f"cu_seq_lens_q ends at {cu_seqlens_q[-1]}, must tell the sequences of all {batch} rows")
    if options.pop("query_offset", 0):
        raise Error("cu_seq_lens_q is given with a cache, must be without")
    if options.get("causal") or "window" in options:
        options["align"] = "bottom_right"
    query, key, value = (x.flatten(0, 1) for x in tensors)
    out = attention(query, key, value, cu_seqlens_q=cu_seqlens_q, cu_seqlens_k=cu_seqlens_k, **options)
    return out.unflatten(0, (batch, seqlen_q))
