"""paddle.incubate.nn.FusedMultiHeadAttention on torch tensors, as one fused operator."""

from collections.abc import Callable, Mapping
from typing import Any, Literal

import torch
from torch import Tensor, nn

from polyhead import Error
from polyhead.torch import _block_composition
from polyhead.torch._attention import _tensors_only
from polyhead.torch._block_ops import NORMS, AttentionBlock
from polyhead.torch._blocks import attention_block
from polyhead.torch._multihead_attention import program_of
from polyhead.torch._options import seed_tensor

_Attribute = Callable[[Tensor], object] | bool | None


class FusedMultiHeadAttention(nn.Module):
    """`paddle.incubate.nn.FusedMultiHeadAttention`: norm, attention with its projections, dropout and residual in one
    operator, with Paddle's arguments, parameter names and shapes.

    ``out = query + dropout(attention(norm(query)))`` with normalize_before, else ``norm(query + dropout(...))``. What
    Paddle's has not: it runs on the CPU, also in bfloat16; key and value of another sequence; returned weights.

    Sizes: E embed_dim, H num_heads, D = E / H, B batch, Sq and Sk sequence lengths.

    Parameters
    ----------
    embed_dim, num_heads : int
    dropout_rate, attn_dropout_rate : float
        Of the output, before the residual, and of the attention's weights; in training only, scaled by 1 / (1 - rate).
    kdim, vdim : int, optional
        Only E, as Paddle has it.
    normalize_before : bool
    need_weights : bool
        Returns (out, weights [B, H, Sq, Sk] after dropout). Paddle's takes False only.
    qkv_weight_attr, linear_weight_attr, pre_ln_scale_attr, ln_scale_attr : callable, optional
        Initialises the parameter in place, as ``torch.nn.init.normal_`` does. Default: Xavier's uniform; scales 1.
    qkv_bias_attr, linear_bias_attr, pre_ln_bias_attr, ln_bias_attr : callable or False, optional
        Likewise; default 0. False: there is no such parameter.
    epsilon : float
        The norm's.
    nranks, ring_id : int
        Only 1 and -1: one process.
    transpose_qkv_wb : bool
        qkv_weight is [E, 3 * E] and qkv_bias [3 * E] instead of [3, H, D, E] and [3, H, D].
    name : str, optional
        Not used.
    device, dtype : optional
        As of torch's modules.

    Attributes
    ----------
    qkv_weight, qkv_bias : Parameter [3, H, D, E] and [3, H, D]
        With transpose_qkv_wb [E, 3 * E] and [3 * E].
    linear_weight, linear_bias : Parameter [E, E] (in, out) and [E]
    pre_ln_scale, pre_ln_bias : Parameter [E], with normalize_before
    ln_scale, ln_bias : Parameter [E], else
        Those that it has not are None, as in Paddle.

    Raises
    ------
    polyhead.Error
        Sizes that disagree, arguments that only Paddle's GPU code has; the message names the argument.

    Examples
    --------
    >>> import torch, polyhead.torch
    >>> layer = polyhead.torch.FusedMultiHeadAttention(16, 4, normalize_before=True)
    >>> layer(torch.ones(2, 5, 16)).shape
    torch.Size([2, 5, 16])
    """

    def __init__(
        self,
        embed_dim: int,
        num_heads: int,
        dropout_rate: float = 0.5,
        attn_dropout_rate: float = 0.5,
        kdim: int | None = None,
        vdim: int | None = None,
        normalize_before: bool = False,
        need_weights: bool = False,
        qkv_weight_attr: _Attribute = None,
        qkv_bias_attr: _Attribute = None,
        linear_weight_attr: _Attribute = None,
        linear_bias_attr: _Attribute = None,
        pre_ln_scale_attr: _Attribute = None,
        pre_ln_bias_attr: _Attribute = None,
        ln_scale_attr: _Attribute = None,
        ln_bias_attr: _Attribute = None,
        epsilon: float = 1e-5,
        nranks: int = 1,
        ring_id: int = -1,
        transpose_qkv_wb: bool = False,
        name: str | None = None,
        *,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        if embed_dim <= 0 or num_heads <= 0 or embed_dim % num_heads:
            raise Error(f"embed_dim is {embed_dim}, must be positive and divisible by num_heads {num_heads}")
        for argument, value, only in (("kdim", kdim, embed_dim), ("vdim", vdim, embed_dim)):
            if value is not None and value != only:
                raise Error(f"{argument} is {value}, must be embed_dim {only}: qkv_weight is one array")
        if nranks != 1 or ring_id != -1:
            raise Error(f"nranks is {nranks} and ring_id {ring_id}, must be 1 and -1: one process")
        self.embed_dim = embed_dim
        self.num_heads = num_heads
        self.head_dim = embed_dim // num_heads
        self.dropout_rate = dropout_rate
        self.attn_dropout_rate = attn_dropout_rate
        self.normalize_before = normalize_before
        self.need_weights = need_weights
        self.epsilon = epsilon
        self.transpose_qkv_wb = transpose_qkv_wb
        factory = {"device": device, "dtype": dtype}

        def add(name, attribute, shape, default):
            parameter = None
            if attribute is not False:
                parameter = nn.Parameter(torch.empty(shape, **factory))
                with torch.no_grad():
                    (attribute if callable(attribute) else default)(parameter)
            self.register_parameter(name, parameter)

        def needed(attribute):  # only biases can be left out
            if attribute is False:
                raise Error("the attribute of a weight or a scale is False, must be None or a function")
            return attribute

        heads = (3, num_heads, self.head_dim)
        qkv_shape = (embed_dim, 3 * embed_dim) if transpose_qkv_wb else (*heads, embed_dim)
        add("qkv_weight", needed(qkv_weight_attr), qkv_shape, self._xavier_qkv)
        add("qkv_bias", qkv_bias_attr, (3 * embed_dim,) if transpose_qkv_wb else heads, nn.init.zeros_)
        add("linear_weight", needed(linear_weight_attr), (embed_dim, embed_dim), nn.init.xavier_uniform_)
        add("linear_bias", linear_bias_attr, (embed_dim,), nn.init.zeros_)
        size = (embed_dim,)
        add("pre_ln_scale", needed(pre_ln_scale_attr) if normalize_before else False, size, nn.init.ones_)
        add("pre_ln_bias", pre_ln_bias_attr if normalize_before else False, size, nn.init.zeros_)
        add("ln_scale", False if normalize_before else needed(ln_scale_attr), size, nn.init.ones_)
        add("ln_bias", False if normalize_before else ln_bias_attr, size, nn.init.zeros_)

    def _xavier_qkv(self, weight):
        """As of the matrix [3 * E, E] that it is, whatever its dims."""
        nn.init.xavier_uniform_(weight if self.transpose_qkv_wb else weight.view(3 * self.embed_dim, self.embed_dim))

    def extra_repr(self) -> str:
        return (
            f"embed_dim={self.embed_dim}, num_heads={self.num_heads}, dropout_rate={self.dropout_rate}, "
            f"attn_dropout_rate={self.attn_dropout_rate}, epsilon={self.epsilon}, "
            f"normalize_before={self.normalize_before}"
        )

    def forward(
        self,
        query: Tensor,
        key: Tensor | None = None,
        value: Tensor | None = None,
        attn_mask: Tensor | None = None,
        cache: object = None,
        *,
        score: Callable[..., Any] | str | None = None,
        mask: Callable[..., Any] | str | None = None,
        captured: Mapping[str, Tensor] | None = None,
        sink_logits: Tensor | None = None,
        normalizer: Literal["softmax", "none"] = "softmax",
    ) -> Tensor | tuple[Tensor, Tensor]:
        """As Paddle's.

        Parameters
        ----------
        query : Tensor [B, Sq, E]
        key, value : Tensor [B, Sk, E], optional
            Another sequence, taken as it is, without norm. Default: query.
        attn_mask : Tensor, optional
            Broadcasts to [B, H, Sq, Sk]. Bool or integers: True or not 0 = may look. Float: is added to the scores.
        cache : None
            As in Paddle. `MultiheadAttention` takes a `CacheStep`.
        score, mask, captured, sink_logits, normalizer : optional
            As of `polyhead.torch.attention`, behind attn_mask; projections, norm and residual are then torch's.

        Returns
        -------
        out : Tensor [B, Sq, E], or (out, weights) with need_weights
        """
        if cache is not None:
            raise Error("cache is given, must be None: this layer keeps no keys and values")
        given = {"query": query, "key": key, "value": value, "attn_mask": attn_mask}
        _tensors_only(**{name: each for name, each in given.items() if name == "query" or each is not None})
        for name, tokens in (("query", query), ("key", key), ("value", value)):
            if tokens is not None and (tokens.dim() != 3 or tokens.shape[-1] != self.embed_dim):
                raise Error(f"{name} is {list(tokens.shape)}, must be [batch, seqlen, {self.embed_dim}]")
        key = None if key is query else key
        value = None if value is key or (key is None and value is query) else value
        if key is None and value is not None:
            key = query
        visible = bias = None
        if attn_mask is not None and attn_mask.is_floating_point():
            bias = attn_mask.to(query.dtype) if attn_mask.dtype == torch.float64 else attn_mask
        elif attn_mask is not None:
            visible = attn_mask != 0
        arguments = self._arguments(query, key, value, visible, bias)
        program = program_of(score, mask, captured, sink_logits, normalizer)
        if program is None:
            out, weights = attention_block(arguments)
        else:
            out, weights = _block_composition.attention_block(*arguments, program=program)
        return (out, weights) if self.need_weights else out

    def _arguments(self, query, key, value, attn_mask, attn_bias):
        embed_dim = self.embed_dim
        if self.transpose_qkv_wb:
            qkv_weight, qkv_bias = self.qkv_weight.t(), self.qkv_bias
        else:
            qkv_weight = self.qkv_weight.view(3 * embed_dim, embed_dim)
            qkv_bias = None if self.qkv_bias is None else self.qkv_bias.view(3 * embed_dim)
        dropout_p = self.attn_dropout_rate if self.training else 0.0
        output_dropout_p = self.dropout_rate if self.training else 0.0
        return AttentionBlock(
            query,
            key,
            value,
            in_proj_weight=qkv_weight,
            in_proj_bias=qkv_bias,
            out_proj_weight=self.linear_weight.t(),
            out_proj_bias=self.linear_bias,
            norm_weight=self.pre_ln_scale if self.normalize_before else self.ln_scale,
            norm_bias=self.pre_ln_bias if self.normalize_before else self.ln_bias,
            attn_bias=attn_bias,
            attn_mask=attn_mask,
            dropout_seed=seed_tensor(dropout_p, None),
            output_dropout_seed=seed_tensor(output_dropout_p, None),
            num_heads=self.num_heads,
            num_heads_kv=self.num_heads,
            dropout_p=float(dropout_p),
            output_dropout_p=float(output_dropout_p),
            return_weights=int(self.need_weights),
            norm_kind=NORMS["layer"],
            norm_first=self.normalize_before,
            norm_eps=self.epsilon,
            residual=True,
        )
