"""polyhead.onnx.fuse on what torch's two exporters leave of attention: layers, hand-written code, and models of transformers."""

import importlib.util
import logging
import math
import warnings

import numpy as np
import pytest
from optional import torch

onnx = pytest.importorskip("onnx", reason="onnx is not installed: its models are not fused")
if torch is None:
    pytest.skip("torch is not installed: nothing is exported", allow_module_level=True)
onnxruntime = pytest.importorskip("onnxruntime", reason="onnxruntime is not installed: it judges the numbers")
import polyhead.onnx  # noqa: E402

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


class Grouped(Attention):
    def __init__(self):
        super().__init__(groups=2)

    def attend(self, q, k, v, mask):
        k, v = (y[:, :, None].expand(-1, -1, 2, -1, -1).reshape(q.shape) for y in (k, v))
        bias = (1.0 - mask[:, None, None]) * torch.finfo(torch.float32).min
        return torch.softmax(q @ k.transpose(2, 3) * D**-0.5 + bias, dim=-1, dtype=torch.float32).to(q.dtype) @ v


class Layer(torch.nn.Module):
    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        if isinstance(self.layer, torch.nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False, key_padding_mask=mask == 0)[0]
        return self.layer(x)


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


class Tokens(torch.nn.Module):
    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, x, mask):
        return self.model(input_ids=x, attention_mask=mask)[0]


@pytest.mark.parametrize("name", TRANSFORMERS)
def test_transformers(name, tmp_path):
    transformers = pytest.importorskip("transformers", reason="transformers is not installed")
    sizes, implementation, exporter = TRANSFORMERS[name]
    config = getattr(transformers, name.removesuffix("Encoder") + "Config")(**sizes)
    config.use_cache = False
    config._attn_implementation = implementation
    torch.manual_seed(0)
    model = Tokens(getattr(transformers, name + "Model")(config).eval())
    tokens, mask = torch.randint(3, 60, (B, S)), torch.ones(B, S, dtype=torch.long)
    mask[1, 5:] = 0
    export(model, (tokens, mask), exporter, tmp_path / "model.onnx")
    assert_fused(tmp_path / "model.onnx", {"x": tokens.numpy(), "mask": mask.numpy()}, 2)
