"""polyhead.onnx.fuse on what torch's two exporters leave of attention: layers, hand-written code, and models of transformers."""

import importlib.util
import logging
import math
import pathlib
import re
import sys
import warnings

import numpy as np
import pytest
from optional import torch

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
if torch is None:
    pytest.skip("torch is not installed: nothing is exported", allow_module_level=True)
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: it judges the numbers")
from onnx_fourteen_exports_test import Layer  # noqa: E402

import polyhead.onnx  # noqa: E402
import polyhead.torch  # noqa: E402

sys.path.insert(0, str(pathlib.Path(__file__).resolve().parents[2] / "bench"))

F = torch.nn.functional
E, H, D, B, S = 32, 4, 8, 2, 7
EXPORTERS = {"torchscript": 17, "dynamo": 18}


class Attention(torch.nn.Module):
    """Projections around what a subclass does with query, key, value [B, H, S, D] and the mask."""

    def __init__(self, groups=H):
        super().__init__()
        self.query, self.out = torch.nn.Linear(E, E), torch.nn.Linear(E, E)
        self.key, self.value = torch.nn.Linear(E, groups * D), torch.nn.Linear(E, groups * D)

    def forward(self, x, mask):
        split = lambda y: y.view(y.shape[0], y.shape[1], -1, D).transpose(1, 2)  # noqa: E731
        y = self.attend(split(self.query(x)), split(self.key(x)), split(self.value(x)), mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class ByHand(Attention):
    def attend(self, q, k, v, mask):
        scores = q @ k.transpose(-1, -2) / math.sqrt(D)
        scores = scores.masked_fill(mask[:, None, None] == 0, torch.finfo(torch.float32).min)
        return F.dropout(scores.softmax(-1), 0.1, self.training) @ v


class Sdpa(Attention):
    def attend(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None] > 0)


class Causal(Attention):
    def attend(self, q, k, v, mask):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)


class Unmasked(Causal):
    def forward(self, x):
        return super().forward(x, None)


class OfOne(torch.nn.Module):
    """An attention that takes no mask beside its input."""

    def __init__(self, attention):
        super().__init__()
        self.attention = attention

    def forward(self, x):
        return self.attention(x, None)


class Grouped(Attention):
    def __init__(self):
        super().__init__(groups=2)

    def attend(self, q, k, v, mask):
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for y in (k, v))
        bias = (1.0 - mask[:, None, None]) * torch.finfo(torch.float32).min
        return torch.softmax(q @ k.transpose(2, 3) * D**-0.5 + bias, dim=-1, dtype=torch.float32).to(q.dtype) @ v


MODELS = {
    "by_hand": ByHand,
    "sdpa": Sdpa,
    "causal": Causal,
    "grouped": Grouped,
    "multihead_attention": lambda: Layer(torch.nn.MultiheadAttention(E, H, batch_first=True)),
    "encoder_layer": lambda: Layer(torch.nn.TransformerEncoderLayer(E, H, 64, batch_first=True)),
}


def export(module, arguments, exporter, path):
    if exporter == "dynamo" and importlib.util.find_spec("onnxscript") is None:
        pytest.skip("onnxscript is not installed: torch's newer exporter needs it")
    names = ["x", "mask"]
    torch.backends.mha.set_fastpath_enabled(False)  # whose operators neither exporter knows
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        if exporter == "dynamo":
            torch.onnx.export(module, arguments, path, opset_version=EXPORTERS[exporter], dynamo=True, input_names=names,
                              external_data=False, verbose=False)  # fmt: skip
        else:
            axes = {name: {0: "batch", 1: "length"} for name in names}
            torch.onnx.export(module, arguments, path, opset_version=EXPORTERS[exporter], dynamo=False, input_names=names,
                              dynamic_axes=axes)  # fmt: skip


def outputs(model, inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    names = {value.name for value in session.get_inputs()}
    return session.run(None, {name: array for name, array in inputs.items() if name in names})


def assert_fused(path, inputs, count):
    """As many attentions, and the numbers of before."""
    fusion = polyhead.onnx.fuse(path)
    assert fusion.num_fused == count, str(fusion)
    assert not [node for node in fusion.model.graph.node if node.op_type == "Softmax"]
    for a, b in zip(outputs(onnx.load(path), inputs), outputs(fusion.model, inputs), strict=True):
        np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


# The layer of the encoder takes dynamo seconds, and is the attention of nn.MultiheadAttention.
@pytest.mark.parametrize("name, exporter", [(name, each) for name in MODELS for each in EXPORTERS
                                            if (name, each) != ("encoder_layer", "dynamo")])  # fmt: skip
def test_layer(name, exporter, tmp_path):
    torch.manual_seed(0)
    x, mask = torch.randn(B, S, E), torch.ones(B, S)
    mask[1, 5:] = 0
    export(MODELS[name]().eval(), (x, mask), exporter, tmp_path / "model.onnx")
    assert_fused(tmp_path / "model.onnx", {"x": x.numpy(), "mask": mask.numpy()}, 1)


SMALL = {"hidden_size": E, "num_hidden_layers": 2, "num_attention_heads": H, "intermediate_size": 64, "vocab_size": 64}
TRANSFORMERS = {
    "Bert": (SMALL, "eager", "torchscript"),
    "GPT2": ({"n_embd": E, "n_layer": 2, "n_head": H, "vocab_size": 64, "n_positions": 16}, "sdpa", "dynamo"),
    "T5Encoder": ({"d_model": E, "d_kv": D, "d_ff": 64, "num_layers": 2, "num_heads": H, "vocab_size": 64}, "sdpa", "torchscript"),
}  # fmt: skip


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, tmp_path):
    pytest.importorskip("transformers", reason="transformers is not installed")
    from onnx_exports import model_of

    sizes, implementation, exporter = TRANSFORMERS[name]
    model = model_of(name, sizes, implementation)
    tokens, mask = torch.randint(3, 60, (B, S)), torch.ones(B, S, dtype=torch.long)
    mask[1, 5:] = 0
    export(model, (tokens, mask), exporter, tmp_path / "model.onnx")
    assert_fused(tmp_path / "model.onnx", {"x": tokens.numpy(), "mask": mask.numpy()}, 2)


class Cached(Attention):
    """A step of decoding: keys and values of the past stand ahead of new ones, and half as many heads as of the query."""

    def forward(self, x, mask, past_key, past_value):
        query, key, value = (y.view(y.shape[0], y.shape[1], -1, D).transpose(1, 2) for y in (self.query(x), self.key(x), self.value(x)))
        key, value = torch.cat([past_key, key], 2), torch.cat([past_value, value], 2)
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(y.shape[0], H, y.shape[2], D) for y in (key, value))
        y = F.scaled_dot_product_attention(query, k, v, attn_mask=mask[:, None, None] > 0)
        return self.out(y.transpose(1, 2).reshape(x.shape[0], x.shape[1], H * v.shape[-1])), key, value


def test_steps_with_a_cache(tmp_path):
    """A prompt and two steps; each run has the caches that it made itself."""
    torch.manual_seed(0)
    names, caches = ["x", "mask", "past_key", "past_value"], ["present_key", "present_value"]
    axes = {"x": {0: "batch", 1: "length"}, "mask": {0: "batch", 1: "total"}, "past_key": {0: "batch", 2: "past"}, "past_value": {0: "batch", 2: "past"}}
    arguments = (torch.randn(B, 3, E), torch.ones(B, 5), torch.randn(B, 2, 2, D), torch.randn(B, 2, 2, D))
    path = tmp_path / "model.onnx"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.onnx.export(Cached(groups=2).eval(), arguments, path, opset_version=17, dynamo=False, input_names=names,
                          output_names=["out", *caches], dynamic_axes=axes)  # fmt: skip
    sessions = [onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"]), polyhead.onnx.session(path)]
    for target in ("onnx", "polyhead"):
        fusion = polyhead.onnx.fuse(path, target=target)
        assert fusion.num_fused == 1 and "repeated heads" in fusion.candidates[0].pattern and "a cache" in fusion.candidates[0].pattern, str(fusion)
        kept = [node.name for node in fusion.model.graph.node if node.op_type == "Expand"]  # repeated heads are read by nobody, nor is their shape
        assert all(name.startswith("polyhead") for name in kept), kept
        sessions.append(polyhead.onnx.session(fusion.model.SerializeToString()))
    pasts = [[np.zeros((B, 2, 0, D), np.float32)] * 2 for _ in sessions]
    rng = np.random.default_rng(0)
    for length in (4, 1, 1):
        x = rng.standard_normal((B, length, E)).astype(np.float32)
        mask = np.ones((B, pasts[0][0].shape[2] + length), np.float32)
        mask[1, 0] = 0
        results = [session.run(None, dict(zip(names, [x, mask, *past], strict=True))) for session, past in zip(sessions, pasts, strict=True)]
        pasts = [result[1:] for result in results]
        for result in results[1:]:
            for a, b in zip(results[0], result, strict=True):
                np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)


class Sinks(torch.nn.Module):
    """The attention of gpt-oss, with a padding mask."""

    def __init__(self, config):
        super().__init__()
        from transformers.models.gpt_oss import modeling_gpt_oss

        self.attention = modeling_gpt_oss.GptOssAttention(config, 0)
        self.positions = modeling_gpt_oss.GptOssRotaryEmbedding(config)
        torch.nn.init.normal_(self.attention.sinks)

    def forward(self, x, mask):
        hidden = torch.where(mask[:, None, None] > 0, 0.0, torch.finfo(torch.float32).min)
        return self.attention(x, self.positions(x, torch.arange(x.shape[1])[None]), hidden)[0]


def test_sinks(tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    config = transformers.GptOssConfig(hidden_size=E, num_attention_heads=H, num_key_value_heads=2, head_dim=D, num_hidden_layers=1)
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    x, mask = torch.randn(B, S, E), torch.ones(B, S)
    mask[1, 5:] = 0
    export(Sinks(config).eval(), (x, mask), "torchscript", tmp_path / "model.onnx")
    fusion = polyhead.onnx.fuse(tmp_path / "model.onnx", target="polyhead")
    assert fusion.num_fused == 1 and "sinks" in fusion.candidates[0].pattern, str(fusion)
    inputs = {"x": x.numpy(), "mask": mask.numpy()}
    (expected,) = outputs(onnx.load(tmp_path / "model.onnx"), inputs)
    for run in (lambda: polyhead.onnx.prepare(fusion.model).run(inputs), lambda: polyhead.onnx.session(fusion.model.SerializeToString()).run(None, inputs)):
        np.testing.assert_allclose(run()[0], expected, rtol=1e-4, atol=1e-5)


class Decoder(torch.nn.Module):
    """Hand-written layers, of which one learns a bias of its scores, and one drops weights."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.first, self.second = Attention(), Attention(groups=2)
        self.table = torch.nn.Parameter(torch.zeros(H, S, S))
        self.norm, self.out = torch.nn.LayerNorm(E), torch.nn.Linear(E, E)
        self.first.attend, self.second.attend = self.biased, self.grouped
        self.dropout = dropout

    def biased(self, q, k, v, mask):
        weights = (q @ k.transpose(-1, -2) / math.sqrt(D) + self.table).softmax(-1)
        return F.dropout(weights, self.dropout, self.training) @ v

    def grouped(self, q, k, v, mask):
        k, v = (y.repeat_interleave(H // 2, dim=1) for y in (k, v))
        scores = (q * D**-0.5) @ k.transpose(-1, -2)
        hidden = torch.ones(S, S, dtype=torch.bool).triu(1)
        return scores.masked_fill(hidden, -math.inf).softmax(-1) @ v

    def forward(self, x):
        x = x + self.first(x, None)
        return self.out(torch.tanh(x + self.second(self.norm(x), None)))


class SinksOfHeads(Attention):
    """The attention of gpt-oss, whose logits of sinks learn."""

    def __init__(self):
        super().__init__()
        self.sinks = torch.nn.Parameter(torch.randn(H))

    def attend(self, q, k, v, mask):
        scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(torch.ones(S, S, dtype=torch.bool).triu(1), -math.inf)
        joined = torch.cat([scores, self.sinks.reshape(1, -1, 1, 1).expand(q.shape[0], -1, q.shape[2], -1)], dim=-1)
        joined = joined - joined.max(dim=-1, keepdim=True).values
        return joined.softmax(-1)[..., :-1] @ v


class RelativeBias(Attention):
    """The attention of T5: a bias of heads by relative places, here beside a mask of the batch."""

    def __init__(self):
        super().__init__()
        self.table = torch.nn.Parameter(torch.randn(2 * S - 1, H))
        self.hidden = torch.zeros(B, 1, 1, S, dtype=torch.bool)
        self.hidden[1, ..., 5:] = True

    def bias(self):
        i = torch.arange(S)
        return F.embedding(i[None] - i[:, None] + S - 1, self.table).permute(2, 0, 1)[None]

    def attend(self, q, k, v, mask):
        return (q @ k.transpose(-1, -2) + self.bias()).masked_fill(self.hidden, -math.inf).softmax(-1) @ v


class CosineAttention(RelativeBias):
    """That of Swin V2: scores between unit vectors by a number of each head that learns, and a bias."""

    def __init__(self):
        super().__init__()
        self.logit = torch.nn.Parameter(torch.rand(H, 1, 1))

    def attend(self, q, k, v, mask):
        scores = F.normalize(q, dim=-1) @ F.normalize(k, dim=-1).transpose(-1, -2) * self.logit.clamp(max=math.log(100)).exp()
        return (scores + 16 * torch.sigmoid(self.bias())).softmax(-1) @ v


class CappedBias(RelativeBias):
    """A bias inside a softcap."""

    def attend(self, q, k, v, mask):
        return (3 * torch.tanh((q @ k.transpose(-1, -2) / math.sqrt(D) + self.bias()) / 3)).softmax(-1) @ v


def exported_step(dropout=0.0, of=None, **options):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: torch exports with it")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = of() if of else Decoder(dropout)
    x, y = torch.randn(B, S, E), torch.randn(B, S, E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = polyhead.torch.export_training(model, (x,), (y,), F.mse_loss, **options)
    parameters = {name: p.detach().numpy().copy() for name, p in model.named_parameters()}
    return model, exported, {"input_0": x.numpy(), "target_0": y.numpy()}, parameters


def descend(run, exported, data, parameters, steps):
    """Losses, and the gradients of the last step, of gradient descent in place."""
    losses = []
    for _ in range(steps):
        results = dict(zip([output.name for output in exported.graph.output], run(data | parameters), strict=True))
        losses.append(results.pop("loss"))
        for name, gradient in results.items():
            parameters[name.removeprefix("grad.")] -= 0.3 * gradient
    return np.array(losses), results


def test_training_step():
    """50 steps of two layers, fused and not, in ONNX Runtime and in our reference runner; the first step is torch's own."""
    model, exported, data, parameters = exported_step()
    fusion = polyhead.onnx.fuse(exported, target="polyhead")
    assert fusion.num_fused == 2, str(fusion)
    assert fusion.saved_bytes == 2 * (B * H * S * S - B * H * S) * 4
    assert not {"Softmax", "ReduceMax"} & {node.op_type for node in fusion.model.graph.node}
    bytes_of = [each.SerializeToString() for each in (exported, fusion.model)]
    plain = onnxruntime.InferenceSession(bytes_of[0], providers=["CPUExecutionProvider"])
    session = polyhead.onnx.session(bytes_of[1])
    reference = polyhead.onnx.prepare(fusion.model)
    copy = lambda: {name: each.copy() for name, each in parameters.items()}  # noqa: E731
    expected, gradients = descend(lambda x: plain.run(None, x), exported, data, copy(), 50)
    for run, steps in ((lambda x: session.run(None, x), 50), (reference.run, 50)):
        losses, got = descend(run, exported, data, copy(), steps)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(got[name], gradient, atol=1e-5, err_msg=name)
    assert expected[-1] < 0.8 * expected[0]
    loss = F.mse_loss(model(torch.from_numpy(data["input_0"])), torch.from_numpy(data["target_0"]))
    loss.backward()
    np.testing.assert_allclose(loss.item(), expected[0], rtol=1e-5)
    first = descend(lambda x: session.run(None, x), exported, data, copy(), 1)[1]
    for name, parameter in model.named_parameters():
        np.testing.assert_allclose(first[f"grad.{name}"], parameter.grad, atol=1e-6, err_msg=name)


@pytest.mark.parametrize(("of", "outputs", "words"), [
    (SinksOfHeads, 5, "sinks"), (RelativeBias, 7, "score program"), (CosineAttention, 7, "score program"), (CappedBias, 6, "score program"),
])  # fmt: skip
def test_training_step_of(of, outputs, words):
    """Gradients of sinks and of what a score program reads: 20 steps, fused and not; the first one is torch's own."""
    model, exported, data, parameters = exported_step(of=lambda: OfOne(of()))
    fusion = polyhead.onnx.fuse(exported, target="polyhead")
    assert fusion.num_fused == 1 and words in fusion.candidates[0].pattern, str(fusion)
    (backward,) = [node for node in fusion.model.graph.node if node.op_type == "AttentionGrad"]
    assert len(backward.output) == outputs and backward.output[-1]
    copy = lambda: {name: each.copy() for name, each in parameters.items()}  # noqa: E731
    plain = onnxruntime.InferenceSession(exported.SerializeToString(), providers=["CPUExecutionProvider"])
    session = polyhead.onnx.session(fusion.model.SerializeToString())
    reference = polyhead.onnx.prepare(fusion.model)
    expected, gradients = descend(lambda x: plain.run(None, x), exported, data, copy(), 20)
    for run in (lambda x: session.run(None, x), reference.run):
        losses, got = descend(run, exported, data, copy(), 20)
        np.testing.assert_allclose(losses, expected, rtol=1e-5)
        for name, gradient in gradients.items():
            np.testing.assert_allclose(got[name], gradient, atol=1e-5, err_msg=name)
    F.mse_loss(model(torch.from_numpy(data["input_0"])), torch.from_numpy(data["target_0"])).backward()
    first = descend(lambda x: session.run(None, x), exported, data, copy(), 1)[1]
    for name, parameter in model.named_parameters():
        assert np.abs(parameter.grad).max() > 1e-5 or "key.bias" in name, name
        np.testing.assert_allclose(first[f"grad.{name}"], parameter.grad, atol=1e-6, err_msg=name)


def test_training_step_with_dropout():
    """The backward drops the weights that its forward drops, others in each run; as many as it should."""
    _, exported, data, parameters = exported_step(dropout=0.25)
    fusion = polyhead.onnx.fuse(exported, target="polyhead")
    assert fusion.num_fused == 2 and "dropout" in fusion.candidates[0].pattern, str(fusion)
    (forward,) = [node for node in fusion.model.graph.node if len(node.output) == 6]
    (backward,) = [node for node in fusion.model.graph.node if forward.output[5] in node.input]
    for name in dict.fromkeys((*forward.input, *forward.output, *backward.input, *backward.output)):  # outputs, for whoever is curious
        kind = onnx.TensorProto.INT64 if name == forward.output[5] else onnx.TensorProto.FLOAT
        if name and name not in parameters and name not in [output.name for output in exported.graph.output]:
            fusion.model.graph.output.append(onnx.helper.make_tensor_value_info(name, kind, None))
    shown = onnx.shape_inference.infer_shapes(fusion.model)
    session = polyhead.onnx.session(shown.SerializeToString())
    seen = set()
    for _ in range(3):
        results = dict(zip([output.name for output in shown.graph.output], session.run(None, data | parameters), strict=True))
        state = results[forward.output[5]]
        seen.add(tuple(state))
        q, k, v = (results[name].transpose(0, 2, 1, 3) for name in forward.input[:3])
        options = {"attn_bias": parameters["table"], "dropout_p": 0.25, "dropout_seed": int(state[0]), "dropout_offset": int(state[1])}
        expected, logsumexp = polyhead.attention(q, k, v, **options, return_logsumexp=True)
        np.testing.assert_allclose(results[forward.output[0]].transpose(0, 2, 1, 3), expected, atol=1e-5)
        grad_out = results[backward.input[5]].transpose(0, 2, 1, 3)
        gradients = polyhead.attention_backward(grad_out, q, k, v, expected, logsumexp, **options)
        for name, gradient in zip(backward.output, gradients.values(), strict=False):
            np.testing.assert_allclose(results[name].transpose(0, 2, 1, 3), gradient, atol=1e-5)
    assert len(seen) == 3


def test_training_step_of_open_sizes():
    """One graph, other batches and lengths in each run; here sizes are those of heads and projections, which stay what they are."""
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: torch exports with it")
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    model = Unmasked()
    x = torch.randn(H, E, E)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        exported = polyhead.torch.export_training(model, (x,), (x,), F.mse_loss, open_dims=[(0, 1), (0, 1)])
    fusion = polyhead.onnx.fuse(exported, target="polyhead")
    assert fusion.num_fused == 1, str(fusion)
    session = polyhead.onnx.session(fusion.model.SerializeToString())
    parameters = dict(model.named_parameters())
    for batch, seqlen in ((H, E), (3, 17), (1, 1)):
        x, y = torch.randn(batch, seqlen, E), torch.randn(batch, seqlen, E)
        loss = F.mse_loss(model(x), y)
        expected = [loss, *torch.autograd.grad(loss, parameters.values())]
        arrays = {name: parameter.detach().numpy() for name, parameter in parameters.items()}
        got = session.run(None, {"input_0": x.numpy(), "target_0": y.numpy()} | arrays)
        for one, other in zip(got, expected, strict=True):
            np.testing.assert_allclose(one, other.detach(), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(("dims", "words"), [
    ([(0,)], "open_dims has 1 entries, must have 2"),
    ([(0,), (2,)], re.escape("open_dims[1] names dim 2 of a tensor of 2 dims")),
    ([(0,), (1,)], re.escape("open_dims[1] names dim 1, whose size is 1, must be above 1 here")),
    ([(0,), ()], re.escape("open_dims[0] names dim 0, which the model or the loss wants to be 3")),
])  # fmt: skip
def test_open_dims_that_are_refused(dims, words):
    pytest.importorskip("onnxscript", reason="onnxscript is not installed: torch exports with it")
    with pytest.raises(polyhead.Error, match=words):
        polyhead.torch.export_training(torch.nn.Linear(4, 1), (torch.randn(3, 4),), (torch.randn(3, 1),), F.mse_loss, open_dims=dims)


def test_training_step_is_refused():
    x = torch.randn(2, 4)
    with pytest.raises(polyhead.Error, match="opset is 23, must be 18 to 22"):
        polyhead.torch.export_training(torch.nn.Linear(4, 4), (x,), (x,), F.mse_loss, opset=23)
    with pytest.raises(polyhead.Error, match="no parameter that needs a gradient"):
        polyhead.torch.export_training(torch.nn.Tanh(), (x,), (x,), F.mse_loss)
