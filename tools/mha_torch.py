"""What torch's autograd gives for the layers that `polyhead mha --verify` judges by.

The command runs this text in a child process. First line out: "torch VERSION", or "no torch: REASON". Then, for each
line in, a JSON object {"file": a .safetensors, "problem": sizes and options}, one line out: "ok ERROR", the largest
error in units of the sums of the terms' absolute values, or a complaint.

The file holds the inputs, the weights, and as exact.NAME and magnitude.NAME what tools/layer_truth.h gives. All is
computed once more in float64, written as the formulas of polyhead/layer.h stand, and differentiated by torch.
"""

import sys

sys.path[:] = [folder for folder in sys.path if folder]  # python -c looks into the working folder first: not here

import json  # noqa: E402

ALLOWED = 1e-10  # far above float64's roundings, far below those of anything that is judged by these numbers

try:
    import torch
except Exception as error:  # also what a broken installation raises
    print(f"no torch: {error}".replace("\n", " "), flush=True)
    sys.exit()

DTYPES = {
    "F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16,
    "I64": torch.int64, "I32": torch.int32, "BOOL": torch.bool
}
INPUTS = ("query", "key", "value", "attn_bias", "alibi_slopes")
WEIGHTS = ("query_weight", "key_weight", "value_weight", "out_weight",
           "query_bias", "key_bias", "value_bias", "out_bias")


def read_safetensors(path):
    """Name -> tensor; floating-point ones in float64."""
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
        data = file.read()
    tensors = {}
    for name, entry in header.items():
        begin, end = entry["data_offsets"]
        dtype = DTYPES[entry["dtype"]]
        flat = torch.frombuffer(bytearray(data[begin:end]), dtype=dtype) if end > begin else torch.empty(0, dtype=dtype)
        tensor = flat.reshape(entry["shape"])
        tensors[name] = tensor.double() if dtype.is_floating_point else tensor
    return tensors


def project(t, name, heads, dim):
    """[batch, beam, time, heads, dim]; without a projection every head is the whole vector."""
    x = t[name]
    if name + "_weight" not in t:
        return x.unsqueeze(3).expand(*x.shape[:3], heads, dim)
    y = x @ t[name + "_weight"]
    if name + "_bias" in t:
        y = y + t[name + "_bias"]
    return y.reshape(*x.shape[:3], heads, dim)


def lengths(t, name, p, most):
    """[batch, 1]: one for each sequence, the same for all its beams."""
    return t[name].long().reshape(-1, 1) if name in t else torch.full((p["batch"], 1), most)


def positions(t, p):
    """i + offset [batch, 1, 1, seqlen_q, 1], and the keys' j."""
    offset = lengths(t, "query_offsets", p, p["query_offset"])
    if p["bottom_right"]:
        offset = lengths(t, "seqlens_k", p, p["seqlen_k"]) - lengths(t, "seqlens_q", p, p["seqlen_q"])
    stand = torch.arange(p["seqlen_q"]) + offset
    return stand.reshape(p["batch"], 1, 1, p["seqlen_q"], 1), torch.arange(p["seqlen_k"])


def visible_pairs(t, p):
    """Boolean, broadcast to [batch, beam, heads, seqlen_q, seqlen_k]."""
    stand, j = positions(t, p)
    i = torch.arange(p["seqlen_q"]).reshape(-1, 1)
    of_sequence = (p["batch"], 1, 1, 1, 1)
    visible = (i < lengths(t, "seqlens_q", p, p["seqlen_q"]).reshape(of_sequence)) & \
        (j < lengths(t, "seqlens_k", p, p["seqlen_k"]).reshape(of_sequence))
    if p["causal"]:
        visible = visible & (j <= stand)
    if p["window_left"] >= 0:
        visible = visible & (j >= stand - p["window_left"])
    if p["window_right"] >= 0:
        visible = visible & (j <= stand + p["window_right"])
    if "window_lo" in t:
        visible = visible & (j >= t["window_lo"].reshape(-1, 1)) & (j < t["window_hi"].reshape(-1, 1))
    if "attn_mask" in t:
        visible = visible & t["attn_mask"].unsqueeze(1)
    if "attn_bias" in t:
        visible = visible & (t["attn_bias"].detach() != -torch.inf).unsqueeze(1)
    return visible


def kept_scale(t, name, dropout_p):
    """What dropout multiplies with."""
    return t[name].double() * (1 / (1 - dropout_p) if dropout_p < 1 else 0.0) if name in t else 1.0


def layer(t, p):
    """out [batch, beam, seqlen_q, out_size] and the weights P after dropout."""
    heads, heads_kv, group = p["num_heads"], p["num_heads_kv"], p["num_heads"] // max(p["num_heads_kv"], 1)
    q = project(t, "query", heads, p["head_dim"])
    k = project(t, "key", heads_kv, p["head_dim"]).repeat_interleave(group, dim=3)
    v = project(t, "value", heads_kv, p["head_dim_v"]).repeat_interleave(group, dim=3)
    if p["beam_kv"] == 1:
        k, v = (x.expand(-1, p["beam"], -1, -1, -1) for x in (k, v))
    scores = torch.einsum("bnihd,bnjhd->bnhij", q, k) * p["scale"]
    if p["softcap"] > 0:
        scores = p["softcap"] * torch.tanh(scores / p["softcap"])
    if "attn_bias" in t:
        bias = t["attn_bias"].unsqueeze(1)
        scores = scores + torch.where(bias == -torch.inf, 0.0, bias)
    if "alibi_slopes" in t:
        stand, j = positions(t, p)
        scores = scores - t["alibi_slopes"].reshape(-1, 1, heads, 1, 1) * (stand - j).abs()
    visible = visible_pairs(t, p).expand(scores.shape)
    seen = visible.any(-1, keepdim=True)
    weights = torch.where(seen, scores.masked_fill(~visible, -torch.inf), 0.0).softmax(-1)
    weights = torch.where(visible, weights, 0.0) * kept_scale(t, "kept_weights", p["dropout_p"])
    out = torch.einsum("bnhij,bnjhd->bnihd", weights, v)
    out = out.reshape(p["batch"], p["beam"], p["seqlen_q"], heads * p["head_dim_v"])
    if "out_weight" in t:
        out = out @ t["out_weight"]
    if "out_bias" in t:
        out = out + t["out_bias"]
    out = out * kept_scale(t, "kept_out", p["output_dropout_p"])
    return out + t["residual"] if "residual" in t else out, weights


def gradients(t, p, out, leaves):
    """grad_NAME of each leaf; padding passes on none."""
    step = torch.arange(p["seqlen_q"]).reshape(1, 1, -1, 1)
    inside = step < lengths(t, "seqlens_q", p, p["seqlen_q"]).reshape(-1, 1, 1, 1)
    grad_out = torch.where(inside, t["grad_out"], 0.0)
    if not out.requires_grad:
        return {"grad_" + name: torch.zeros_like(x) for name, x in leaves.items()}
    found = torch.autograd.grad(out, list(leaves.values()), grad_out, allow_unused=True)
    return {"grad_" + name: torch.zeros_like(x) if g is None else g for (name, x), g in zip(leaves.items(), found)}


def compute(t, p):
    """All results by name."""
    leaves = {name: t[name].requires_grad_() for name in INPUTS + WEIGHTS if name in t}
    if p["key_is_query"]:
        t["key"] = t["query"]
        del leaves["key"]
    if p["value_is_key"]:
        t["value"] = t["key"]
        del leaves["value"]
    out, weights = layer(t, p)
    results = {"out": out, "attn_weights": weights.mean(2) if p["attn_weights"] == "mean" else weights}
    if p["training"]:
        results.update(gradients(t, p, out, leaves))
        for name in WEIGHTS:
            if "before." + name in t:
                results["grad_" + name] = results["grad_" + name] + t["before." + name]
    return results


def check(file, problem):
    """The line that answers one request."""
    t = read_safetensors(file)
    results = compute(t, problem)
    worst = 0.0
    for name in [name[len("exact."):] for name in t if name.startswith("exact.")]:
        exact, magnitude, got = t["exact." + name], t["magnitude." + name].abs(), results[name].detach()
        if got.shape != exact.shape:
            return f"{name} has shape {list(exact.shape)}, torch's has {list(got.shape)}"
        error = (got - exact).abs()
        bad = ~(error <= ALLOWED * magnitude)
        if bad.any():
            at = bad.nonzero()[0].tolist()
            return f"{name}{at} is {exact[tuple(at)].item()!r}, autograd gives {got[tuple(at)].item()!r}"
        relative = error[magnitude > 0] / magnitude[magnitude > 0]
        worst = max(worst, relative.max().item() if relative.numel() > 0 else 0.0)
    return f"ok {worst}"


def main():
    torch.set_num_threads(1)  # problems are small
    print(f"torch {torch.__version__}", flush=True)
    for line in sys.stdin:
        try:
            answer = check(**json.loads(line))
        except Exception as error:
            answer = f"{type(error).__name__}: {error}"
        print(answer.replace("\n", " "), flush=True)


if __name__ == "__main__":
    main()
