"""torch.nn.MultiheadAttention as one fused operator, with what that lacks: key/value heads, head_dim, rope."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import Error, KvCache
from polyhead.torch import _block_composition
from polyhead.torch._attention import _tensors_only
from polyhead.torch._block_ops import AttentionBlock
from polyhead.torch._blocks import attention_block
from polyhead.torch._cache_step import CacheStep, cache_of_layer, on_cache
from polyhead.torch._options import seed_tensor
from polyhead.torch._rope import Rope, rotated
from polyhead.torch._submodules import LINEAR, count_called, why_not_plain, why_not_tensors


class MultiheadAttention(nn.Module):
    """`torch.nn.MultiheadAttention`: its arguments, results and state_dict, computed by polyhead in one operator.

    Projections, attention and out projection are one call forward and one backward, which use the parameters where they
    are; nothing of size L * S is kept, be the weights returned or not. E embed_dim, H num_heads, G num_heads_kv, D
    head_dim, L and S sequence lengths, N batch.

    What differs from nn's: a query that sees no key gets weights 0, so out_proj's bias, where nn gives NaN. Nested
    tensors are refused. Gradients through returned weights take O(L S) memory, and torch.compile asks for these
    wherever weights are a result of the graph: there, pass need_weights=False.

    Parameters
    ----------
    embed_dim, num_heads, dropout, bias, add_bias_kv, add_zero_attn, kdim, vdim, batch_first, device, dtype
        As of torch.nn.MultiheadAttention. Keys appended by add_bias_kv and add_zero_attn are visible to every query.
    num_heads_kv : int, optional
        G, which divides H: query head h reads key/value head h // (H // G). Default H.
    head_dim : int, optional
        D. Default embed_dim // num_heads.
    rope : Rope, optional
        Rotary positions of q and k.

    Attributes
    ----------
    in_proj_weight : Parameter [(H + 2 G) * D, E], rows of q, of k, of v
        With kdim or vdim: q_proj_weight [H * D, E], k_proj_weight [G * D, kdim], v_proj_weight [G * D, vdim].
    in_proj_bias : Parameter [(H + 2 G) * D]
    out_proj : torch.nn.Linear of H * D and E
    bias_k, bias_v : Parameter [1, 1, G * D]

    Raises
    ------
    polyhead.Error
        Sizes that disagree; the message names the argument. It is a ValueError and a RuntimeError.

    Notes
    -----
    With add_bias_kv, add_zero_attn, rope or a program, the projections are torch's and the attention between them is polyhead's.
    out_proj is part of the operator where it is plain. With hooks, an adapter around it, or another module in its
    place, it is called, where nn's reads its weight and passes over the rest; `polyhead.torch.report` says so.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> layer = polyhead.torch.MultiheadAttention(16, 4, batch_first=True)
    >>> x = torch.ones(2, 5, 16)
    >>> out, weights = layer(x, x, x)
    >>> out.shape, weights.shape
    (torch.Size([2, 5, 16]), torch.Size([2, 5, 5]))
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout: float = 0.0,
        bias: bool = True,
        add_bias_kv: bool = False,
        add_zero_attn: bool = False,
        kdim: int | None = None,
        vdim: int | None = None,
        batch_first: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
        *,
        num_heads_kv: int | None = None,
        head_dim: int | None = None,
        rope: Rope | None = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0:
            raise Error(f"embed_dim is {embed_dim} and num_heads {num_heads}, must be greater than 0")
        if head_dim is None and embed_dim % num_heads:
            raise Error(f"embed_dim is {embed_dim}, must be divisible by num_heads {num_heads}, or head_dim be given")
        if num_heads_kv is not None and (num_heads_kv <= 0 or num_heads % num_heads_kv):
            raise Error(f"num_heads_kv is {num_heads_kv}, must divide num_heads {num_heads}")
        if head_dim is not None and head_dim <= 0:
            raise Error(f"head_dim is {head_dim}, must be greater than 0")
        if rope is not None and not isinstance(rope, Rope):
            raise TypeError(f"rope has type {type(rope).__name__}, must be a polyhead.torch.Rope")
        self.embed_dim = embed_dim
        self.kdim = embed_dim if kdim is None else kdim
        self.vdim = embed_dim if vdim is None else vdim
        self._qkv_same_embed_dim = self.kdim == embed_dim and self.vdim == embed_dim
        self.num_heads = num_heads
        self.num_heads_kv = num_heads if num_heads_kv is None else num_heads_kv
        self.head_dim = embed_dim // num_heads if head_dim is None else head_dim
        self.dropout = dropout
        self.batch_first = batch_first
        self.add_zero_attn = add_zero_attn
        self.rope = rope
        self._make_parameters(bias, add_bias_kv, {"device": device, "dtype": dtype})
        self._reset_parameters()

    def _make_parameters(self, bias, add_bias_kv, factory):
        query_rows, key_rows = self.num_heads * self.head_dim, self.num_heads_kv * self.head_dim
        rows = query_rows + 2 * key_rows

        def parameter(wanted, *shape):
            return nn.Parameter(torch.empty(shape, **factory)) if wanted else None

        joined = self._qkv_same_embed_dim
        self.register_parameter("in_proj_weight", parameter(joined, rows, self.embed_dim))
        self.register_parameter("q_proj_weight", parameter(not joined, query_rows, self.embed_dim))
        self.register_parameter("k_proj_weight", parameter(not joined, key_rows, self.kdim))
        self.register_parameter("v_proj_weight", parameter(not joined, key_rows, self.vdim))
        self.register_parameter("in_proj_bias", parameter(bias, rows))
        self.out_proj = nn.Linear(query_rows, self.embed_dim, bias=bias, **factory)
        self.register_parameter("bias_k", parameter(add_bias_kv, 1, 1, key_rows))
        self.register_parameter("bias_v", parameter(add_bias_kv, 1, 1, key_rows))

    def _reset_parameters(self):
        """As torch.nn.MultiheadAttention draws them, in its order: the same seed makes the same layer."""
        for weight in (self.in_proj_weight, self.q_proj_weight, self.k_proj_weight, self.v_proj_weight):
            if weight is not None:
                nn.init.xavier_uniform_(weight)
        if self.in_proj_bias is not None:
            nn.init.zeros_(self.in_proj_bias)
            nn.init.zeros_(self.out_proj.bias)
        for appended in (self.bias_k, self.bias_v):
            if appended is not None:
                nn.init.xavier_normal_(appended)

    def extra_repr(self) -> str:
        text = f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout={self.dropout}"
        if self.num_heads_kv != self.num_heads:
            text += f", num_heads_kv={self.num_heads_kv}"
        if self.num_heads * self.head_dim != self.embed_dim:
            text += f", head_dim={self.head_dim}"
        return text if self.rope is None else f"{text}, rope={self.rope}"

    def new_cache(self, num_pages: int, page_size: int, **options: Any) -> KvCache:
        """A cache for this layer, in tensors of its own: `forward` takes it in a `CacheStep`.

        Parameters
        ----------
        num_pages, page_size : int
        **options
            Of `polyhead.KvCache.zeros`: key_dtype (default: the layer's), value_dtype, key_group, value_group, rotary_dim,
            interleaved, hadamard. With rope the layer's turn is the default.

        Returns
        -------
        polyhead.KvCache

        Raises
        ------
        polyhead.Error
            Formats that do not go together.
        """
        return cache_of_layer(self, num_pages, page_size, **options)

    def forward(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        key_padding_mask: Tensor | None = None,
        need_weights: bool = True,
        attn_mask: Tensor | None = None,
        average_attn_weights: bool = True,
        is_causal: bool = False,
        *,
        score: Callable[..., Any] | str | None = None,
        mask: Callable[..., Any] | str | None = None,
        captured: Mapping[str, Tensor] | None = None,
        sink_logits: Tensor | None = None,
        normalizer: Literal["softmax", "none"] = "softmax",
        cache: CacheStep | None = None,
    ) -> tuple[Tensor, Tensor | None]:
        """As torch.nn.MultiheadAttention's.

        Parameters
        ----------
        query, key, value : Tensor
            [L, N, E], [S, N, kdim], [S, N, vdim]; [N, L, E], ... with batch_first; unbatched [L, E], ... One tensor
            given twice is projected once.
        key_padding_mask : Tensor, optional
            [N, S], unbatched [S]. Bool: True hides the key. Float: is added to its scores.
        need_weights : bool
        attn_mask : Tensor, optional
            [L, S] or [N * H, L, S]. Bool: True hides. Float: is added to the scores.
        average_attn_weights : bool
            Whether returned weights are the mean over heads.
        is_causal : bool
            A promise that attn_mask, which must be given, says that query i sees keys 0 .. i; it may be left unread.
        score, mask, captured : optional
            As of `polyhead.torch.attention`: what becomes of each score, behind the masks above, and where a query may look.
            Captured floats, say a table of relative positions that is a parameter of the model, have gradients.
        sink_logits : Tensor of floats [H], optional
            As of `polyhead.torch.attention`; a parameter of the model trains.
        normalizer : {"softmax", "none"}
            As of `polyhead.torch.attention`.
        cache : CacheStep, optional
            In inference: keys and values live there, those of key and value join them where slots are given, and all are
            attended to. S is what a sequence has room for. is_causal without attn_mask then means that the last of the L
            queries stands on the last key. Not with key_padding_mask, score or mask.

        Returns
        -------
        out : Tensor
            As query, [..., E].
        weights : Tensor or None
            [N, L, S], or [N, H, L, S]; unbatched without N. S with the keys appended.
        """
        batched = check_tokens(query, key, value, self.batch_first)
        if query.shape[-1] != self.embed_dim or key.shape[-1] != self.kdim or value.shape[-1] != self.vdim:
            raise Error(
                f"query, key and value have vectors of {query.shape[-1]}, {key.shape[-1]} and {value.shape[-1]}, "
                f"must be of {self.embed_dim}, {self.kdim} and {self.vdim}"
            )
        value = None if value is key else value if batched else value.unsqueeze(0)
        key = None if key is query else key if batched else key.unsqueeze(0)
        if key is None and value is not None:
            key = query if batched else query.unsqueeze(0)
        query = query if batched else query.unsqueeze(0)
        batch_first = self.batch_first or not batched
        if cache is not None:
            given = {"key_padding_mask": key_padding_mask, "score": score, "mask": mask, "captured": captured}
            check_for_cache(self, cache, given)
            out, weights = self._on_cache(
                (query, key, value), cache, batch_first, attn_mask, is_causal, sink_logits=sink_logits, normalizer=normalizer,
                return_weights=False if not need_weights else "mean" if average_attn_weights else True,
            )  # fmt: skip
            return (out, weights) if batched else (out.squeeze(0), None if weights is None else weights.squeeze(0))
        if key_padding_mask is not None and not batched:
            key_padding_mask = key_padding_mask.unsqueeze(0)
        check_causal_hint(is_causal, attn_mask, "attn_mask")
        hint_suffices = is_causal and key_padding_mask is None and not need_weights
        sizes = score_sizes(query, key, self.num_heads, batch_first)
        visible, bias = score_masks(None if hint_suffices else attn_mask, key_padding_mask, sizes, query.dtype)
        program = program_of(score, mask, captured, sink_logits, normalizer)
        if program is not None and (self.bias_k is not None or self.add_zero_attn):
            raise Error(
                "score, mask, sink_logits or normalizer is given, must not be with add_bias_kv or add_zero_attn: it would "
                "meet their keys"
            )
        out_proj = self.out_proj
        reason = why_not_plain("out_proj", out_proj, LINEAR)
        fused = out_proj if reason is None else None
        arguments = self.block_arguments(query, visible, bias, batch_first=batch_first, out_proj=fused)._replace(
            key=key,
            value=value,
            causal=hint_suffices,
            return_weights=0 if not need_weights else 2 if average_attn_weights else 1,
        )
        why_not_joined = why_not_tensors("", self)
        foreign = why_not_joined is not None
        if foreign or program is not None or self.has_parts():
            out, weights = self._in_parts(arguments, foreign, program)
        else:
            out, weights = attention_block(arguments)
        if reason is not None or foreign:
            count_called("attention_block_forward", query, reason or why_not_joined)
        if reason is not None:
            out = out_proj(out)
        if batched:
            return out, weights
        return out.squeeze(0), None if weights is None else weights.squeeze(0)

    def _on_cache(self, tokens, cache, batch_first, attn_mask, is_causal, **options):
        query, key, value = (x if x is None or batch_first else x.transpose(0, 1) for x in tokens)
        plain = why_not_plain("out_proj", self.out_proj, LINEAR) is None
        masks = cache_masks(query, cache, self.num_heads, attn_mask, is_causal)
        stored = None if key is None else (key, key if value is None else value)
        out_proj = self.out_proj if plain else None
        out, weights = on_cache(self, query, cache, out_proj, key_and_value=stored, **masks, **options)
        out = out if plain else self.out_proj(out)
        return (out if batch_first else out.transpose(0, 1)), weights

    def has_parts(self) -> bool:
        """Whether something stands between projections and scores."""
        return self.bias_k is not None or self.add_zero_attn or self.rope is not None

    def block_arguments(
        self,
        query: Tensor,
        attn_mask: Tensor | None,
        attn_bias: Tensor | None,
        *,
        batch_first: bool,
        out_proj: torch.nn.Linear | None,
    ) -> AttentionBlock:
        """Self-attention of `query` with this layer's parameters and, in training, its dropout.

        out_proj: this layer's; None ends the block before it.
        """
        dropout_p = self.dropout if self.training else 0.0
        joined = self._qkv_same_embed_dim
        return AttentionBlock(
            query,
            in_proj_weight=self.in_proj_weight if joined else None,
            q_proj_weight=None if joined else self.q_proj_weight,
            k_proj_weight=None if joined else self.k_proj_weight,
            v_proj_weight=None if joined else self.v_proj_weight,
            in_proj_bias=self.in_proj_bias,
            out_proj_weight=None if out_proj is None else out_proj.weight,
            out_proj_bias=None if out_proj is None else out_proj.bias,
            attn_mask=attn_mask,
            attn_bias=attn_bias,
            dropout_seed=seed_tensor(dropout_p, None),
            dropout_p=float(dropout_p),
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads_kv,
            batch_first=batch_first,
        )

    def _in_parts(self, a: AttentionBlock, foreign: bool, program):
        """With what comes between projections and output: rotary positions, keys that every query sees, a program.

        foreign: the projections' weights are of a class of their own, as why_not_tensors tells.
        """
        query = a.query if a.batch_first else a.query.transpose(0, 1)
        key = query if a.key is None else a.key if a.batch_first else a.key.transpose(0, 1)
        value = key if a.value is None else a.value if a.batch_first else a.value.transpose(0, 1)
        q, k, v = _block_composition.project(query, key, value, a, whole=foreign)
        if self.rope is not None:
            q, k = rotated(q, self.rope), rotated(k, self.rope)
        seqlen_k = k.shape[1]
        if self.bias_k is not None:
            k, v = (
                torch.cat([x, row.to(x.dtype).view(1, 1, *x.shape[2:]).expand(x.shape[0], -1, -1, -1)], 1)
                for x, row in ((k, self.bias_k), (v, self.bias_v))
            )
        if self.add_zero_attn:
            k, v = (F.pad(x, (0, 0, 0, 0, 0, 1)) for x in (k, v))
        a = _with_appended(a, q.shape[1], seqlen_k, k.shape[1] - seqlen_k)
        out, weights = _block_composition.attend(q, k, v, a, program)
        return (out if a.batch_first else out.transpose(0, 1)), weights


def check_for_cache(layer: MultiheadAttention, cache: CacheStep, given: dict) -> None:
    """What a layer on a cache is not."""
    if not isinstance(cache, CacheStep):
        raise TypeError(f"cache has type {type(cache).__name__}, must be a polyhead.torch.CacheStep")
    for name, each in given.items():
        if each is not None:
            raise Error(f"{name} is given with cache, must not be")
    if layer.bias_k is not None or layer.add_zero_attn:
        raise Error("cache is given, but the layer has add_bias_kv or add_zero_attn, whose keys no cache holds")
    if layer.training and layer.dropout:
        raise Error(f"cache is given in training with dropout {layer.dropout}: take eval()")
    if (reason := why_not_tensors("", layer)) is not None:
        raise Error(f"cache is given, but {reason}: the layer reads the numbers of its projections")


def cache_masks(query: Tensor, cache: CacheStep, num_heads: int, attn_mask: Tensor | None, is_causal: bool) -> dict:
    """The options of attention that say who sees whom, of query [N, L, E]."""
    room = cache.cache.key.shape[1] * cache.page_table.shape[-1]
    visible, bias = score_masks(attn_mask, None, (len(query), num_heads, query.shape[1], room), query.dtype)
    causal = is_causal and attn_mask is None
    return {"attn_mask": visible, "attn_bias": bias, "causal": causal, "align": "bottom_right" if causal else None}


def program_of(score, mask, captured, sink_logits, normalizer):
    """These arguments of `attention`, or None without any of them."""
    given = {"score": score, "mask": mask, "captured": captured, "sink_logits": sink_logits}
    if all(each is None for each in given.values()) and normalizer == "softmax":
        return None
    return given | {"normalizer": normalizer}


def _with_appended(a: AttentionBlock, seqlen_q: int, seqlen_k: int, count: int) -> AttentionBlock:
    """Masks for `count` keys more. Causal would hide these, so it becomes a mask."""
    if not count:
        return a
    mask, bias = a.attn_mask, a.attn_bias
    if a.causal:
        causal = torch.ones(seqlen_q, seqlen_k, dtype=torch.bool, device=a.query.device).tril()
        mask = causal if mask is None else mask & causal
    if mask is not None:
        mask = F.pad(mask, (0, count), value=True)
    if bias is not None:
        bias = F.pad(bias, (0, count))
    return a._replace(attn_mask=mask, attn_bias=bias, causal=False)


def check_tokens(query: Tensor, key: Tensor, value: Tensor, batch_first: bool) -> bool:
    """Whether there is a batch dim."""
    _tensors_only(query=query, key=key, value=value)
    for name, tokens in (("query", query), ("key", key), ("value", value)):
        if tokens.is_nested:
            raise Error(f"{name} is a nested tensor, must be a dense one: pad it and pass key_padding_mask")
        if tokens.dim() != query.dim() or tokens.dim() not in (2, 3):
            raise Error(f"{name} has {tokens.dim()} dimensions, must have 3, or all three 2 (unbatched)")
    if key is query and value is query:
        return query.dim() == 3
    if key.shape[:-1] != value.shape[:-1]:
        raise Error(f"value is {list(value.shape)}, must agree with key {list(key.shape)} but for its last dimension")
    batch_dim = 0 if batch_first else 1
    if query.dim() == 3 and query.shape[batch_dim] != key.shape[batch_dim]:
        raise Error(f"key has batch size {key.shape[batch_dim]}, must be {query.shape[batch_dim]} as query's")
    return query.dim() == 3


def check_causal_hint(is_causal: bool, mask: Tensor | None, name: str) -> None:
    if is_causal and mask is None:
        raise Error(f"is_causal is given without {name}, of which it is a hint")


def score_sizes(query: Tensor, key: Tensor | None, num_heads: int, batch_first: bool) -> tuple[int, int, int, int]:
    """(N, H, L, S) of tokens with a batch dim."""
    key = query if key is None else key
    batch_dim, rows = (0, 1) if batch_first else (1, 0)
    return query.shape[batch_dim], num_heads, query.shape[rows], key.shape[rows]


def score_masks(attn_mask, key_padding_mask, sizes, dtype):
    """torch.nn's masks, bool ones that hide and float ones that are added, as (attn_mask, attn_bias) of 4 dims."""
    batch, num_heads, seqlen_q, seqlen_k = sizes
    masks = []
    given = {"attn_mask": attn_mask, "key_padding_mask": key_padding_mask}
    _tensors_only(**{name: mask for name, mask in given.items() if mask is not None})
    if attn_mask is not None:
        if attn_mask.shape == (seqlen_q, seqlen_k):
            masks.append(attn_mask[None, None])
        elif attn_mask.shape == (batch * num_heads, seqlen_q, seqlen_k):
            masks.append(attn_mask.unflatten(0, (batch, num_heads)))
        else:
            raise Error(
                f"attn_mask is {list(attn_mask.shape)}, must be [{seqlen_q}, {seqlen_k}] or "
                f"[{batch * num_heads}, {seqlen_q}, {seqlen_k}]"
            )
    if key_padding_mask is not None:
        if key_padding_mask.shape != (batch, seqlen_k):
            raise Error(f"key_padding_mask is {list(key_padding_mask.shape)}, must be [{batch}, {seqlen_k}]")
        masks.append(key_padding_mask[:, None, None])
    visible = bias = None
    for mask in masks:
        if mask.dtype == torch.bool:
            visible = ~mask if visible is None else visible & ~mask
        elif mask.is_floating_point():
            mask = mask.to(dtype) if mask.dtype == torch.float64 else mask
            bias = mask if bias is None else bias + mask
        else:
            raise Error(f"a mask has dtype {mask.dtype}, must be bool or floating-point")
    return visible, bias
