"""polyhead.torch.convert and revert: modules change their class where they stand, and nothing else."""

import copy

import pytest
import torch
from torch import nn

from polyhead import torch as ph


class Decoderless(nn.Module):
    """A model with every kind of module: convertible, nested, shared, and not."""

    def __init__(self):
        super().__init__()
        layer = nn.TransformerEncoderLayer(32, 4, 64, batch_first=True, activation="gelu", norm_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        self.decoder = nn.TransformerDecoderLayer(32, 4, 64, batch_first=True)
        self.shared = self.again = nn.MultiheadAttention(32, 2, batch_first=True, kdim=16, vdim=24)
        self.head = nn.Linear(32, 3)

    def forward(self, x):
        x = self.encoder(x)
        x = self.decoder(x, x)
        x = x + self.shared(x, x[..., :16], x[..., :24])[0]
        return self.head(x)


def test_a_model_computes_and_trains_the_same():
    torch.manual_seed(0)
    model = Decoderless().eval()
    twin = copy.deepcopy(model)
    before = {name: id(parameter) for name, parameter in model.named_parameters()}
    x = torch.randn(3, 7, 32)
    swaps = ph.convert(model)
    assert {swap.name for swap in swaps if swap.reason is None} == {
        "encoder.layers.0", "encoder.layers.0.self_attn", "encoder.layers.1", "encoder.layers.1.self_attn",
        "decoder.self_attn", "decoder.multihead_attn", "shared"}  # fmt: skip
    assert type(model.encoder.layers[0]) is ph.TransformerEncoderLayer
    assert model.shared is model.again and type(model.again) is ph.MultiheadAttention
    assert {name: id(parameter) for name, parameter in model.named_parameters()} == before
    assert model.state_dict().keys() == twin.state_dict().keys()
    ph.report(reset=True)
    out = model(x)
    assert any(record.op == "attention_block_forward" for record in ph.report())
    torch.testing.assert_close(out, twin(x), rtol=1e-5, atol=1e-5)
    out.square().sum().backward()
    twin(x).square().sum().backward()
    for (name, mine), theirs in zip(model.named_parameters(), twin.parameters()):
        torch.testing.assert_close(mine.grad, theirs.grad, rtol=1e-4, atol=1e-4, msg=name)


def test_revert_gives_back_what_there_was():
    torch.manual_seed(0)
    model = Decoderless().eval()
    x, before = torch.randn(2, 5, 32), [(name, type(each)) for name, each in model.named_modules()]
    with torch.no_grad():
        want = model(x)
        ph.convert(model)
        swaps = ph.revert(model)
        assert len(swaps) == 7 and all(swap.reason is None for swap in swaps)
        assert [(name, type(each)) for name, each in model.named_modules()] == before
        assert not hasattr(model.shared, "rope")
        torch.testing.assert_close(model(x), want, rtol=0, atol=0)


def test_a_layer_made_by_polyhead_becomes_torch_s_with_its_fast_path():
    ours = ph.TransformerEncoderLayer(16, 2, 32, activation="gelu", batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        want = ours(x)
        ph.revert(ours)
        assert type(ours) is nn.TransformerEncoderLayer and ours.activation_relu_or_gelu == 2
        torch.testing.assert_close(ours(x), want, rtol=1e-5, atol=1e-5)


def test_the_model_itself_may_be_the_module():
    module = nn.MultiheadAttention(16, 4)
    assert [swap.name for swap in ph.convert(module)] == [""]
    assert "(model)" in str(ph.convert(nn.TransformerEncoderLayer(16, 2)))
    assert type(module) is ph.MultiheadAttention and ph.convert(module) == []


class Own(nn.MultiheadAttention):
    pass


def test_what_is_left_alone_is_said():
    model = nn.ModuleDict({"own": Own(16, 2), "layer": nn.TransformerEncoderLayer(16, 2), "plain": nn.Linear(2, 2)})
    model["layer"].self_attn = Own(16, 2)
    model["weighted"] = nn.utils.parametrizations.weight_norm(nn.MultiheadAttention(16, 2), "in_proj_weight")
    swaps = {swap.name: swap.reason for swap in ph.convert(model)}
    assert swaps == {
        "own": f"it is {__name__}.Own, not torch.nn.MultiheadAttention itself",
        "layer": f"its self_attn: it is {__name__}.Own, not torch.nn.MultiheadAttention itself",
        "layer.self_attn": f"it is {__name__}.Own, not torch.nn.MultiheadAttention itself",
        "weighted": "its parameters are parametrized",
    }
    assert type(model["layer"]) is nn.TransformerEncoderLayer
    on_meta = ph.convert(nn.MultiheadAttention(16, 2, device="meta"))
    assert on_meta[0].reason == "it is on meta, and layers are converted on the CPU alone"
    assert str(ph.convert(nn.Linear(2, 2))) == "polyhead.torch: no module of torch.nn's attention in this model"


@pytest.mark.parametrize("more", [{"num_heads_kv": 1}, {"head_dim": 12}, {"rope": ph.Rope()}], ids=str)
def test_what_torch_lacks_stays_ours(more):
    module = ph.MultiheadAttention(16, 2, **more)
    (swap,) = ph.revert(module)
    assert next(iter(more)) in swap.reason and type(module) is ph.MultiheadAttention


def test_hooks_of_the_module_go_on():
    module, seen = nn.MultiheadAttention(16, 2), []
    module.register_forward_hook(lambda *_: seen.append("forward"))
    ph.convert(module)
    x = torch.randn(3, 1, 16)
    module(x, x, x)
    ph.revert(module)
    module(x, x, x)
    assert seen == ["forward", "forward"]
