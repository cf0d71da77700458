"""torch.nn.TransformerEncoderLayer as two fused operators: its attention block and its feed-forward block."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from polyhead import Error
from polyhead.torch._block_ops import ACTIVATIONS, NORMS, FeedForwardBlock
from polyhead.torch._blocks import attention_block, feed_forward_block
from polyhead.torch._multihead_attention import (
    MultiheadAttention, check_causal_hint, check_tokens, score_masks, score_sizes,
)  # fmt: skip
from polyhead.torch._options import seed_tensor

_BY_NAME = {"relu": F.relu, "gelu": F.gelu}


def _fused_activation(activation):
    """Its number in ACTIVATIONS; None for one that the operator does not have."""
    if activation is F.relu or activation is torch.relu or isinstance(activation, nn.ReLU):
        return ACTIVATIONS["relu"]
    if activation is F.gelu:
        return ACTIVATIONS["gelu"]
    if isinstance(activation, nn.GELU):
        return ACTIVATIONS["gelu" if activation.approximate == "none" else "gelu_tanh"]
    if activation is F.silu or isinstance(activation, nn.SiLU):
        return ACTIVATIONS["silu"]
    return None


class TransformerEncoderLayer(nn.Module):
    """`torch.nn.TransformerEncoderLayer`: its arguments, sub-modules, results and state_dict, computed by polyhead.

    Two operators, each one call forward and one backward: norm, self-attention with its projections, dropout and
    residual; norm, feed-forward, dropout and residual. They use the parameters where they are. Hooks on sub-modules are
    not called: only the parameters, the dropouts' p and the norms' eps are read.

    What differs from nn's: a query that sees no key attends to nothing, where nn gives NaN; nested tensors are
    refused (in torch.nn.TransformerEncoder, pass src_key_padding_mask: nothing is nested).
    Under autocast, the sum with the residual is of autocast's dtype; the result has src's.

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
        device=None,
        dtype=None,
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

        Returns
        -------
        Tensor
            As src.
        """
        batched = check_tokens(src, src, src, self.self_attn.batch_first)
        if src.shape[-1] != self.self_attn.embed_dim:
            raise Error(f"src has vectors of {src.shape[-1]}, must be of d_model {self.self_attn.embed_dim}")
        x = src if batched else src.unsqueeze(0)
        if src_key_padding_mask is not None and not batched:
            src_key_padding_mask = src_key_padding_mask.unsqueeze(0)
        out = self._feed_forward(self._attend(x, src_mask, src_key_padding_mask, is_causal, batched)).to(src.dtype)
        return out if batched else out.squeeze(0)

    def _attend(self, x, src_mask, src_key_padding_mask, is_causal, batched):
        attn, norm = self.self_attn, self.norm1
        batch_first = attn.batch_first or not batched
        check_causal_hint(is_causal, src_mask, "src_mask")
        hint_suffices = is_causal and src_key_padding_mask is None
        sizes = score_sizes(x, None, attn.num_heads, batch_first)
        mask, bias = score_masks(None if hint_suffices else src_mask, src_key_padding_mask, sizes, x.dtype)
        output_dropout_p = self.dropout1.p if self.training else 0.0
        return attention_block(
            attn.block_arguments(x, mask, bias, batch_first=batch_first)._replace(
                norm_weight=norm.weight,
                norm_bias=norm.bias,
                output_dropout_seed=seed_tensor(output_dropout_p, None),
                output_dropout_p=float(output_dropout_p),
                causal=hint_suffices,
                norm_kind=NORMS["layer"],
                norm_first=self.norm_first,
                norm_eps=norm.eps,
                residual=True,
            )
        )[0]

    def _feed_forward(self, x):
        norm, activation = self.norm2, _fused_activation(self.activation)
        if activation is None:
            inner = self.dropout(self.activation(self.linear1(norm(x) if self.norm_first else x)))
            out = x + self.dropout2(self.linear2(inner))
            return out if self.norm_first else norm(out)
        inner_dropout_p = self.dropout.p if self.training else 0.0
        output_dropout_p = self.dropout2.p if self.training else 0.0
        return feed_forward_block(
            FeedForwardBlock(
                x,
                weight1=self.linear1.weight,
                bias1=self.linear1.bias,
                weight2=self.linear2.weight,
                bias2=self.linear2.bias,
                norm_weight=norm.weight,
                norm_bias=norm.bias,
                inner_dropout_seed=seed_tensor(inner_dropout_p, None),
                output_dropout_seed=seed_tensor(output_dropout_p, None),
                activation=activation,
                inner_dropout_p=float(inner_dropout_p),
                output_dropout_p=float(output_dropout_p),
                norm_kind=NORMS["layer"],
                norm_first=self.norm_first,
                norm_eps=norm.eps,
                residual=True,
            )
        )
