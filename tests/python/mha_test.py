"""torch's autograd against what `polyhead mha` computes in float64: whole layers, results and gradients.

The command runs the layer on its reference kernel and dumps inputs, weights and results; here all is computed once
more, written as the formulas of polyhead/layer.h stand, and differentiated by torch. The tests of the command in C++
hold its own float64 loops, which judge every kernel, to the same reference layer.

POLYHEAD_COMMAND=path names the command (default: the release build's). POLYHEAD_RANDOM_SEED=first
POLYHEAD_RANDOM_PROBLEMS=count ask for other random layers.
"""

import json
import os
import pathlib
import subprocess

import pytest

torch = pytest.importorskip("torch", reason="needs torch")
safetensors = pytest.importorskip("safetensors.torch", reason="needs safetensors")

BUILT = pathlib.Path(__file__).parents[2] / "build" / "release" / "tools" / "polyhead"
COMMAND = pathlib.Path(os.environ.get("POLYHEAD_COMMAND", BUILT))
if not COMMAND.exists():
    pytest.skip(f"needs the command: there is no {COMMAND}", allow_module_level=True)

ALLOWED = 1e-11  # of the largest element: far above float64's roundings, far below those of anything that is judged
INPUTS = ("query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits")
WEIGHTS = ("query_weight", "key_weight", "value_weight", "out_weight",
           "query_bias", "key_bias", "value_bias", "out_bias")  # fmt: skip
LINE = ("--batch 2 --heads 4 --kv-heads 2 --beam 2 --seqlen-q 5 --seqlen-k 7 --q-size 6 --k-size 5 --q-proj 4 "
        "--v-proj 3 --o-proj 5 --biases --residual --bias b,h,q,k --alibi --align top_left --lengths --weights head")


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
    sinks = j < p["sink_keys"]
    if p["window_left"] >= 0:
        visible = visible & ((j >= stand - p["window_left"]) | sinks)
    if p["window_right"] >= 0:
        visible = visible & (j <= stand + p["window_right"])
    if "window_lo" in t:
        visible = visible & ((j >= t["window_lo"].reshape(-1, 1)) | sinks) & (j < t["window_hi"].reshape(-1, 1))
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
    if p["normalizer"] == "softmax":
        seen = visible.any(-1, keepdim=True)
        scores = torch.where(seen, scores.masked_fill(~visible, -torch.inf), 0.0)
        if "sink_logits" in t:  # one logit more
            sinks = t["sink_logits"].reshape(-1, 1, 1).expand(*scores.shape[:-1], 1)
            scores = torch.cat([scores, sinks], -1).softmax(-1)[..., :-1]
        else:
            scores = scores.softmax(-1)
    weights = torch.where(visible, scores, 0.0) * kept_scale(t, "kept_weights", p["dropout_p"])
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


def polyhead_mha(*words):
    done = subprocess.run([COMMAND, "mha", *words], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return done.stdout


def computed(line, folder):
    """What the command computes of a layer in float64: the problem, its tensors, its results."""
    wide = line.split() + ["--dtype", "f64"] + (["--bias-dtype", "f64"] if "--bias" in line.split() else [])
    polyhead_mha(*wide, "--kernel", "reference", "--threads", "1", "--min-time", "0", "--samples", "1", "--force",
                 "--dump", str(folder))  # fmt: skip
    load = safetensors.load_file
    tensors = load(folder / "inputs.safetensors") | load(folder / "weights.safetensors")
    tensors = {name: x.double() if x.dtype.is_floating_point else x for name, x in tensors.items()}
    return json.loads((folder / "problem.json").read_text()), tensors, load(folder / "results.safetensors")


def complaint(results, want):
    """What is wrong with the results of the command, "" if nothing."""
    for name, got in results.items():
        exact = want[name].detach()
        if got.shape != exact.shape:
            return f"{name} has shape {list(got.shape)}, torch's has {list(exact.shape)}"
        if got.numel() == 0:
            continue
        rounding = 0.0 if got.dtype == torch.float64 else torch.finfo(got.dtype).eps
        # The slopes' gradient is float32 and summed over beams, whose parts are rounded and may cancel.
        allowed = ALLOWED * (1 + exact.abs().max()) + rounding * exact.abs().max()
        bad = ~((got.double() - exact).abs() <= allowed)
        if bad.any():
            at = tuple(bad.nonzero()[0].tolist())
            return f"{name}{list(at)} is {got[at].item()!r}, autograd gives {exact[at].item()!r}"
    return ""


MORE = ["", "--softcap 2", "--accumulate", "--dropout 0.2 --output-dropout 0.3", "--windows --causal --sink-keys 2", "--dropout 1",
        "--output-dropout 1", "--infer", "--sweep", "--sinks", "--normalizer none"]  # fmt: skip


@pytest.mark.parametrize("more", MORE)
def test_autograd_agrees_and_finds_what_is_wrong(more, tmp_path):
    problem, tensors, results = computed(f"{LINE} {more}", tmp_path)
    want = compute(tensors, problem)
    assert set(results) == ({"out", "attn_weights"} if "--infer" in more or "--sweep" in more else set(want))
    assert complaint(results, want) == ""
    for name, got in results.items():
        right = got.clone()
        last = got.view(-1)[-1:]
        last += 1e-6 * (1 + last.abs())
        assert complaint(results, want).startswith(name), name
        got.copy_(right)


def test_random_layers(tmp_path):
    count, seed = os.environ.get("POLYHEAD_RANDOM_PROBLEMS", "50"), os.environ.get("POLYHEAD_RANDOM_SEED", "1")
    table = json.loads(polyhead_mha("--random", count, "--seed", seed, "--kernel", "reference", "--threads", "1",
                                    "--min-time", "0", "--samples", "1", "--format", "json"))  # fmt: skip
    lines = list(dict.fromkeys(row["layer"] for row in table["rows"]))
    assert len(lines) >= int(count) - 5  # few are drawn twice
    # Autograd reads no programs: these are judged by the command's own loops alone.
    plain = [line for line in lines if "--score" not in line]
    assert len(plain) >= len(lines) * 3 // 4
    for line in plain:
        problem, tensors, results = computed(line, tmp_path)
        assert complaint(results, compute(tensors, problem)) == "", line
