"""What `polyhead.explain` returns."""

import dataclasses


@dataclasses.dataclass(frozen=True)
class Explanation:
    """Which kernel would run, and why not the others.

    Attributes
    ----------
    kernel : str
        The one that would run; "" if none.
    reasons : dict of str to str
        Every kernel of this build, best first: why it cannot, or "" if it can.
    workspace_bytes : int
        Scratch memory of a call of `attention`.
    flops : float
        Of `attention`: 2 (D + Dv) for each pair of query and key that causal, window and sizes leave visible.
    backward_workspace_bytes : int
        Scratch memory of a call of `attention_backward`.
    backward_flops : float
        Of `attention_backward`, with the gradients of query, key and value: 2 (3 D + 2 Dv) for each of these pairs.
    error : str
        Why no kernel can compute this; "" if one can.
    measured : str
        Why the order of kernels departs from what the CPU's feature flags tell ("measured: ..."); "" if it does not.
    program : tuple of (str, str)
        Values of score and mask, operands first, and what each depends on besides sequence and head: "nothing" (it is
        computed once a head), "q", "k" or "q - k" (once a query, key or diagonal of a tile), "q, k" (for every pair).
    blocks : tuple of int, or None without score and mask, and where the arrays lie on a CUDA device
        How many blocks of 64 queries x 128 keys, of all sequences and heads, are hidden throughout (never computed), seen in
        part (or not told), and seen throughout (not masked); attn_mask and attn_bias are not looked at.
    """

    kernel: str
    reasons: dict[str, str]
    workspace_bytes: int
    flops: float
    backward_workspace_bytes: int
    backward_flops: float
    error: str
    measured: str
    program: tuple[tuple[str, str], ...] = ()
    blocks: tuple[int, int, int] | None = None

    def __str__(self) -> str:
        width = max(map(len, self.reasons), default=0)
        lines = [f"error: {self.error}"] if self.error else []
        for name, reason in self.reasons.items():
            lines.append(f"{name:<{width}}  {'taken' if name == self.kernel else reason or 'can, not taken'}")
        if self.measured:
            lines.append(self.measured)
        width = max((len(value) for value, _ in self.program), default=0)
        lines.extend(f"{value:<{width}}  by {depends_on}" for value, depends_on in self.program)
        if self.blocks:
            none, some, every = self.blocks
            lines.append(f"blocks of 64 x 128: {none} hidden, {some} seen in part, {every} seen throughout")
        lines.append(f"forward   workspace {self.workspace_bytes} bytes, {self.flops:.4g} flops")
        lines.append(f"backward  workspace {self.backward_workspace_bytes} bytes, {self.backward_flops:.4g} flops")
        return "\n".join(lines)
