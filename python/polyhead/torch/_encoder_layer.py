"""torch.nn.TransformerEncoderLayer as two fused operators: its attention block and its feed-forward block."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import Error
from polyhead.torch._block_ops import ACTIVATIONS, NORMS, FeedForwardBlock
from polyhead.torch._blocks import attention_block, feed_forward_block
from polyhead.torch._cache_step import CacheStep, on_cache
from polyhead.torch._multihead_attention import (
    MultiheadAttention, cache_masks, check_causal_hint, check_for_cache, check_tokens, program_of, score_masks, score_sizes,
)  # fmt: skip
from polyhead.torch._options import seed_tensor
from polyhead.torch._submodules import (
    GELU, LAYER_NORM, LINEAR, RELU, SILU, count_called, dropout_p, hooks_of_all, why_not_dropout, why_not_plain,
)  # fmt: skip

_BY_NAME = {"relu": F.relu, "gelu": F.gelu}
_ATTENTION = MultiheadAttention.forward


def _fused_activation(activation):
    """Its number in ACTIVATIONS and None; or None, and why the operator does not have it."""
    if activation is F.relu or activation is torch.relu:
        return ACTIVATIONS["relu"], None
    if activation is F.gelu:
        return ACTIVATIONS["gelu"], None
    if activation is F.silu:
        return ACTIVATIONS["silu"], None
    if not isinstance(activation, nn.Module):
        return None, f"activation is {getattr(activation, '__name__', type(activation).__name__)}"
    forward = type(activation).forward
    reason = why_not_plain("activation", activation, forward)
    if reason is None and forward is GELU:
        return ACTIVATIONS["gelu" if activation.approximate == "none" else "gelu_tanh"], None
    if reason is None and (forward is RELU or forward is SILU):
        return ACTIVATIONS["relu" if forward is RELU else "silu"], None
    return None, reason or f"activation is {type(activation).__name__}"


def _why_not_norm(name, norm, size):
    reason = why_not_plain(name, norm, LAYER_NORM)
    if reason is None and norm.normalized_shape != (size,):
        return f"{name} is over {list(norm.normalized_shape)}"
    return reason


class TransformerEncoderLayer(nn.Module):
    """`torch.nn.TransformerEncoderLayer`: its arguments, sub-modules, results and state_dict, computed by polyhead.

    Two operators, each one call forward and one backward: norm, self-attention with its projections, dropout and
    residual; norm, feed-forward, dropout and residual. They use the parameters where they are. A block with a sub-module
    that is not the plain one is computed as nn does, by calling its sub-modules: so hooks, adapters, subclasses and
    exchanged sub-modules have their effect. `polyhead.torch.report` tells which. Parametrizations stay in the operator.

    What differs from nn's: a query that sees no key attends to nothing, where nn gives NaN; nested tensors are
    refused (in torch.nn.TransformerEncoder, pass src_key_padding_mask: nothing is nested).
    Under autocast, dtypes are nn's: products and attention have autocast's, norm and residual those of the tokens.

    Parameters
    ----------
    d_model, nhead, dim_feedforward, dropout, activation, layer_norm_eps, batch_first, norm_first, bias, device, dtype
        As of torch.nn.TransformerEncoderLayer. relu, gelu and silu, as functions or modules, are part of the operator;
        around other activations, the feed-forward network is torch's operations.

    Raises
    ------
    polyhead.Error
        Sizes that disagree; the message names the argument.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> layer = polyhead.torch.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    >>> layer(torch.ones(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    __constants__ = ["norm_first"]

    def __init__(
        self,
        d_model: int,
        nhead: int,
        dim_feedforward: int = 2048,
        dropout: float = 0.1,
        activation: str | Callable[[Tensor], Tensor] = F.relu,
        layer_norm_eps: float = 1e-5,
        batch_first: bool = False,
        norm_first: bool = False,
        bias: bool = True,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        factory = {"device": device, "dtype": dtype}
        self.self_attn = MultiheadAttention(
            d_model, nhead, dropout=dropout, bias=bias, batch_first=batch_first, **factory
        )
        self.linear1 = nn.Linear(d_model, dim_feedforward, bias=bias, **factory)
        self.dropout = nn.Dropout(dropout)
        self.linear2 = nn.Linear(dim_feedforward, d_model, bias=bias, **factory)
        self.norm_first = norm_first
        self.norm1 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)
        self.norm2 = nn.LayerNorm(d_model, eps=layer_norm_eps, bias=bias, **factory)
        self.dropout1 = nn.Dropout(dropout)
        self.dropout2 = nn.Dropout(dropout)
        if isinstance(activation, str):
            if activation not in _BY_NAME:
                raise Error(f'activation is "{activation}", must be "relu", "gelu" or a function of a tensor')
            activation = _BY_NAME[activation]
        self.activation = activation

    def forward(
        self,
        src: Tensor,
        src_mask: Tensor | None = None,
        src_key_padding_mask: Tensor | None = None,
        is_causal: bool = False,
        *,
        score: Callable[..., Any] | str | None = None,
        mask: Callable[..., Any] | str | None = None,
        captured: Mapping[str, Tensor] | None = None,
        sink_logits: Tensor | None = None,
        normalizer: Literal["softmax", "none"] = "softmax",
        cache: CacheStep | None = None,
    ) -> Tensor:
        """As torch.nn.TransformerEncoderLayer's.

        Parameters
        ----------
        src : Tensor
            [S, N, E]; [N, S, E] with batch_first; unbatched [S, E].
        src_mask : Tensor, optional
            [S, S] or [N * nhead, S, S]. Bool: True hides. Float: is added to the scores.
        src_key_padding_mask : Tensor, optional
            [N, S], unbatched [S], likewise.
        is_causal : bool
            A promise that src_mask, which must be given, says that query i sees keys 0 .. i; it may be left unread.
        score, mask, captured, sink_logits, normalizer : optional
            As of `MultiheadAttention.forward`. The attention block is then computed by calling its sub-modules.
        cache : CacheStep, optional
            As of `MultiheadAttention.forward`: src are new tokens, behind those in the cache, which self_attn.new_cache makes.
            src_mask is [S, room of a sequence]; is_causal alone suffices.

        Returns
        -------
        Tensor
            As src.
        """
        batched = check_tokens(src, src, src, True)
        program = program_of(score, mask, captured, sink_logits, normalizer)
        x = self._attend(src, src_mask, src_key_padding_mask, is_causal, batched, program, cache)
        return self._feed_forward(x, batched)

    def _attend(self, src, src_mask, src_key_padding_mask, is_causal, batched, program, cache):
        norm, attn, dropout = self.norm1, self.self_attn, self.dropout1
        reason = (
            hooks_of_all()
            or why_not_plain("self_attn", attn, _ATTENTION)
            or ("self_attn has rope, add_bias_kv or add_zero_attn" if cache is None and attn.has_parts() else None)
            or why_not_plain("self_attn.out_proj", attn.out_proj, LINEAR)
            or _why_not_norm("norm1", norm, attn.embed_dim)
            or why_not_dropout("dropout1", dropout)
            or ("score, mask, sink_logits or normalizer is given" if program is not None else None)
        )
        if reason is not None:
            count_called("attention_block_forward", src, reason)
            others = (program or {}) | ({} if cache is None else {"cache": cache})
            return self._attend_in_parts(src, src_mask, src_key_padding_mask, is_causal, others)
        if src.shape[-1] != attn.embed_dim:
            raise Error(f"src has vectors of {src.shape[-1]}, must be of d_model {attn.embed_dim}")
        x = src if batched else src.unsqueeze(0)
        if src_key_padding_mask is not None and not batched:
            src_key_padding_mask = src_key_padding_mask.unsqueeze(0)
        batch_first = attn.batch_first or not batched
        if cache is not None:
            out = self._attend_on_cache(x, src_mask, src_key_padding_mask, is_causal, batch_first, cache)
            return out if batched else out.squeeze(0)
        check_causal_hint(is_causal, src_mask, "src_mask")
        hint_suffices = is_causal and src_key_padding_mask is None
        sizes = score_sizes(x, None, attn.num_heads, batch_first)
        mask, bias = score_masks(None if hint_suffices else src_mask, src_key_padding_mask, sizes, x.dtype)
        output_dropout_p = dropout_p(dropout)
        out = attention_block(
            attn.block_arguments(x, mask, bias, batch_first=batch_first, out_proj=attn.out_proj)._replace(
                norm_weight=norm.weight,
                norm_bias=norm.bias,
                output_dropout_seed=seed_tensor(output_dropout_p, None),
                output_dropout_p=output_dropout_p,
                causal=hint_suffices,
                norm_kind=NORMS["layer"],
                norm_first=self.norm_first,
                norm_eps=norm.eps,
                residual=True,
            )
        )[0]
        return out if batched else out.squeeze(0)

    def _attend_on_cache(self, x, src_mask, src_key_padding_mask, is_causal, batch_first, cache):
        attn = self.self_attn
        check_for_cache(attn, cache, {"src_key_padding_mask": src_key_padding_mask})
        x = x if batch_first else x.transpose(0, 1)
        masks = cache_masks(x, cache, attn.num_heads, src_mask, is_causal)
        out, _ = on_cache(
            attn, x, cache, attn.out_proj, norm=self.norm1, norm_first=self.norm_first, normalizer="softmax",
            return_weights=False, **masks,
        )  # fmt: skip
        return out if batch_first else out.transpose(0, 1)

    def _attend_in_parts(self, x, src_mask, src_key_padding_mask, is_causal, others):
        """As torch.nn.TransformerEncoderLayer calls its sub-modules."""
        padding = F._canonical_mask(
            src_key_padding_mask, "src_key_padding_mask", F._none_or_dtype(src_mask), "src_mask", x.dtype
        )
        mask = F._canonical_mask(src_mask, "src_mask", None, "", x.dtype, check_other=False)
        tokens = self.norm1(x) if self.norm_first else x
        attended = self.self_attn(
            tokens, tokens, tokens, attn_mask=mask, key_padding_mask=padding, need_weights=False, is_causal=is_causal,
            **others,
        )[0]  # fmt: skip
        out = x + self.dropout1(attended)
        return out if self.norm_first else self.norm1(out)

    def _feed_forward(self, x, batched):
        norm, linear1, linear2 = self.norm2, self.linear1, self.linear2
        inner_dropout, dropout = self.dropout, self.dropout2
        activation, reason = _fused_activation(self.activation)
        reason = (
            reason
            or hooks_of_all()
            or _why_not_norm("norm2", norm, x.shape[-1])
            or why_not_plain("linear1", linear1, LINEAR)
            or why_not_dropout("dropout", inner_dropout)
            or why_not_plain("linear2", linear2, LINEAR)
            or why_not_dropout("dropout2", dropout)
        )
        if reason is not None:
            count_called("feed_forward_block_forward", x, reason)
            inner = inner_dropout(self.activation(linear1(norm(x) if self.norm_first else x)))
            out = x + dropout(linear2(inner))
            return out if self.norm_first else norm(out)
        inner_dropout_p, output_dropout_p = dropout_p(inner_dropout), dropout_p(dropout)
        out = feed_forward_block(
            FeedForwardBlock(
                x if batched else x.unsqueeze(0),
                weight1=linear1.weight,
                bias1=linear1.bias,
                weight2=linear2.weight,
                bias2=linear2.bias,
                norm_weight=norm.weight,
                norm_bias=norm.bias,
                inner_dropout_seed=seed_tensor(inner_dropout_p, None),
                output_dropout_seed=seed_tensor(output_dropout_p, None),
                activation=activation,
                inner_dropout_p=inner_dropout_p,
                output_dropout_p=output_dropout_p,
                norm_kind=NORMS["layer"],
                norm_first=self.norm_first,
                norm_eps=norm.eps,
                residual=True,
            )
        )
        return out if batched else out.squeeze(0)
