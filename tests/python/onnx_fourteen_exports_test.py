"""The fourteen ways in which torch's exporters leave one attention, at opsets 17 to 24: each is fused, with the numbers that it had."""

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
E, H, G, D, B, S = 32, 4, 2, 8, 2, 7
HIDDEN = torch.finfo(torch.float32).min


class Projected(torch.nn.Module):
    """Projections around `attend`, a function of query [B, H, S, D], key, value and the mask [B, S] of zeros and ones."""

    def __init__(self, attend, groups=H):
        super().__init__()
        self.attend = attend
        self.query, self.out = torch.nn.Linear(E, E), torch.nn.Linear(E, E)
        self.key, self.value = torch.nn.Linear(E, groups * D), torch.nn.Linear(E, groups * D)

    def forward(self, x, mask):
        heads = lambda y: y.view(y.shape[0], y.shape[1], -1, D).transpose(1, 2)  # noqa: E731
        y = self.attend(heads(self.query(x)), heads(self.key(x)), heads(self.value(x)), mask)
        return self.out(y.transpose(1, 2).reshape(x.shape))


class Layer(torch.nn.Module):
    """A layer of torch's."""

    def __init__(self, layer):
        super().__init__()
        self.layer = layer

    def forward(self, x, mask):
        if isinstance(self.layer, torch.nn.MultiheadAttention):
            return self.layer(x, x, x, need_weights=False, key_padding_mask=mask == 0)[0]
        return self.layer(x, src_key_padding_mask=mask == 0)


class Block(torch.nn.Module):
    """A hand-written attention between norms, with its residual and a feed-forward."""

    def __init__(self):
        super().__init__()
        self.attention = Projected(naive_div)
        self.first, self.second = torch.nn.LayerNorm(E), torch.nn.LayerNorm(E)
        self.up, self.down = torch.nn.Linear(E, 64), torch.nn.Linear(64, E)

    def forward(self, x, mask):
        x = x + self.attention(self.first(x), mask)
        return x + self.down(F.gelu(self.up(self.second(x))))


def naive_div(q, k, v, mask):
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).softmax(-1) @ v


def naive_mul(q, k, v, mask):
    return torch.matmul((torch.matmul(q, k.transpose(2, 3)) * D**-0.5).softmax(-1), v)


def naive_mask(q, k, v, mask):
    scores = q @ k.transpose(-1, -2) / math.sqrt(D) + (1 - mask[:, None, None]) * HIDDEN
    return scores.softmax(-1) @ v


def naive_filled(q, k, v, mask):
    scores = (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(mask[:, None, None] == 0, -math.inf)
    return scores.softmax(-1) @ v


def naive_causal(q, k, v, mask):
    hidden = torch.ones(q.shape[2], q.shape[2], dtype=torch.bool).triu(1)
    return (q @ k.transpose(-1, -2) / math.sqrt(D)).masked_fill(hidden, -math.inf).softmax(-1) @ v


def naive_casts(q, k, v, mask):
    weights = F.softmax(q @ k.transpose(-1, -2) * D**-0.5, dim=-1, dtype=torch.float32).to(q.dtype)
    return F.dropout(weights, 0.1, False) @ v


def sdpa(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v)


def sdpa_mask(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask[:, None, None] > 0)


def sdpa_bias(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, attn_mask=(1 - mask[:, None, None]) * -1e9)


def sdpa_causal(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, is_causal=True)


def sdpa_grouped(q, k, v, mask):
    return F.scaled_dot_product_attention(q, k, v, enable_gqa=True)


EXPORTS = {
    "naive, by a division": lambda: Projected(naive_div),
    "naive, by a product": lambda: Projected(naive_mul),
    "naive, mask added": lambda: Projected(naive_mask),
    "naive, mask filled in": lambda: Projected(naive_filled),
    "naive, causal": lambda: Projected(naive_causal),
    "naive, casts and dropout": lambda: Projected(naive_casts),
    "naive, in a block": Block,
    "SDPA": lambda: Projected(sdpa),
    "SDPA, boolean mask": lambda: Projected(sdpa_mask),
    "SDPA, bias": lambda: Projected(sdpa_bias),
    "SDPA, causal": lambda: Projected(sdpa_causal),
    "SDPA, grouped heads": lambda: Projected(sdpa_grouped, groups=G),
    "nn.MultiheadAttention": lambda: Layer(torch.nn.MultiheadAttention(E, H, batch_first=True)),
    "nn.TransformerEncoderLayer": lambda: Layer(torch.nn.TransformerEncoderLayer(E, H, 64, batch_first=True)),
}
# The older exporter's newest opset is 20, the newer one's first 18; of those between each export has two, in turns.
OPSETS = [(name, opset) for i, name in enumerate(EXPORTS) for opset in (17, 18 + i % 3, 21 + i % 4)]


def export(name, opset, path):
    if opset > 17 and importlib.util.find_spec("onnxscript") is None:
        pytest.skip("onnxscript is not installed: torch's newer exporter needs it")
    if name == "SDPA, grouped heads" and opset == 17:
        pytest.skip("torch's older exporter has no grouped heads")
    torch.manual_seed(0)
    module = EXPORTS[name]().eval()
    x, mask = torch.randn(B, S, E), torch.ones(B, S)
    mask[1, 5:] = 0
    torch.backends.mha.set_fastpath_enabled(False)  # whose operators neither exporter knows
    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        newer = {"external_data": False, "verbose": False} if opset > 17 else {}
        torch.onnx.export(module, (x, mask), path, opset_version=opset, dynamo=opset > 17, input_names=["x", "mask"], **newer)
    return {"x": x.numpy(), "mask": mask.numpy()}


def run(model, inputs):
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
    return session.run(None, {value.name: inputs[value.name] for value in session.get_inputs()})


@pytest.mark.parametrize(("name", "opset"), OPSETS)
def test_export(name, opset, tmp_path):
    path = tmp_path / "model.onnx"
    inputs = export(name, opset, path)
    before = onnx.load(path)
    expected = run(before, inputs)
    written_out = sum(node.op_type == "Softmax" for node in before.graph.node)
    for target in ("onnx", "polyhead"):
        fusion = polyhead.onnx.fuse(path, target=target)
        kinds = [node.op_type for node in fusion.model.graph.node]
        assert fusion.num_fused == written_out and kinds.count("Attention") == 1 and "Softmax" not in kinds, str(fusion)
        got = run(fusion.model, inputs) if target == "onnx" else polyhead.onnx.session(fusion.model.SerializeToString()).run(
            None, {value.name: inputs[value.name] for value in fusion.model.graph.input}
        )  # fmt: skip
        for a, b in zip(expected, got, strict=True):
            np.testing.assert_allclose(b, a, rtol=1e-4, atol=1e-5)
