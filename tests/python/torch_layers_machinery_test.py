"""polyhead.torch's modules under torch's machineries: compile, autocast, torch.func, export, checkpoints, threads."""

import concurrent.futures

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
import torch.utils.checkpoint
from polyhead.torch import MultiheadAttention, TransformerEncoderLayer
from torch.nn import functional as F
from torch_layers_judge import OURS, counts, flat, pair
from torch_switch_judge import SEED, gradients

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.mark.parametrize("name", OURS)
@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_fullgraph(name, dynamic):
    torch.manual_seed(0)
    layer = OURS[name](16, 4, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)

    def step(x):
        return layer(x, x, x, need_weights=False)[0] if name == "MultiheadAttention" else layer(x)

    leaves = [x, *layer.parameters()]
    expected = [step(x), *gradients([step(x)], leaves)]
    torch._dynamo.reset()
    compiled = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    polyhead.torch.report(reset=True)
    out = compiled(x)
    got = [out, *gradients([out], leaves)]
    assert set(counts(polyhead.torch.report(reset=True))) >= {"attention_block_forward", "attention_block_backward"}
    for one, other in zip(got, expected):
        torch.testing.assert_close(one, other)


@pytest.mark.parametrize("dynamic", [False, True])
def test_compile_keeps_the_fused_backward_where_weights_are_not_a_result(dynamic):
    layer = MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    torch._dynamo.reset()
    compiled = torch.compile(lambda x: layer(x, x, x)[0] + x, fullgraph=True, backend="aot_eager", dynamic=dynamic)
    polyhead.torch.report(reset=True)
    gradients([compiled(x)], [x, *layer.parameters()])
    assert counts(polyhead.torch.report(reset=True)) == {"attention_block_forward": 1, "attention_block_backward": 1}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("name", OURS)
def test_autocast_gives_nns_dtypes(name, dtype):
    theirs, ours = pair(name, 16, 4, batch_first=True)
    for x in (torch.randn(2, 5, 16), torch.randn(2, 5, 16, dtype=dtype)):
        arguments = [x] * (3 if name == "MultiheadAttention" else 1)
        with torch.autocast("cpu", dtype):
            expected, got = flat(theirs(*arguments)), flat(ours(*arguments))
        assert [out.dtype for out in got] == [out.dtype for out in expected]


@pytest.mark.parametrize("name", OURS)
def test_autocast(name):
    layer = OURS[name](16, 4, dropout=0.0, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x, x, x)[0] if name == "MultiheadAttention" else layer(x)
    assert out.dtype == (torch.bfloat16 if name == "MultiheadAttention" else torch.float32)
    out.float().sum().backward()
    assert x.grad.dtype == torch.float32 and all(p.grad.dtype == torch.float32 for p in layer.parameters())
    whole = layer(x, x, x)[0] if name == "MultiheadAttention" else layer(x)
    torch.testing.assert_close(out.float(), whole, rtol=0.1, atol=0.1)


@pytest.mark.parametrize("name", OURS)
def test_nothing_of_the_size_of_scores_is_kept(name):
    """Also where weights are returned."""
    heads, length = 16, 256
    layer = OURS[name](16, heads, *[32] * (name == "TransformerEncoderLayer"), batch_first=True)
    x = torch.randn(1, length, 16, requires_grad=True)
    kept_bytes = 0

    def keep(tensor):
        nonlocal kept_bytes
        kept_bytes += tensor.numel() * tensor.element_size()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = layer(x, x, x)[0] if name == "MultiheadAttention" else layer(x)
    assert 0 < kept_bytes < heads * length * length * 4 / 2
    out.sum().backward()


@pytest.mark.parametrize("name", OURS)
def test_checkpointing_replays_the_masks(name):
    layer = OURS[name](16, 4, dropout=0.4, batch_first=True)
    x = torch.randn(2, 5, 16, requires_grad=True)

    def step(x):
        return layer(x, x, x)[0] if name == "MultiheadAttention" else layer(x)

    results = []
    for run_step in (step, lambda x: torch.utils.checkpoint.checkpoint(step, x, use_reentrant=False)):
        torch.manual_seed(SEED)
        out = run_step(x)
        results.append([out, *gradients([out], [x, *layer.parameters()])])
    for got, expected in zip(*results):
        assert torch.equal(got, expected)


def test_many_threads_at_once():
    torch.manual_seed(0)
    layers = [TransformerEncoderLayer(16, 4, 24, dropout=0.0, batch_first=True) for _ in range(2)]
    tokens = [torch.randn(2, 3 + index % 3, 16, requires_grad=True) for index in range(8)]

    def step(index):
        layer, x = layers[index % 2], tokens[index]
        return [torch.autograd.grad(layer(x).square().sum(), [x, *layer.parameters()]) for _ in range(5)]

    expected = [step(index) for index in range(8)]
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for got, wanted in zip(pool.map(step, range(8)), expected):
            for grads, wanted_grads in zip(got, wanted):
                assert all(torch.equal(one, other) for one, other in zip(grads, wanted_grads))


@pytest.mark.parametrize("name", OURS)
def test_functional_transforms(name):
    """torch.func's gradients, and those of each sample, by the same formulas in torch's operations."""
    layer = OURS[name](16, 4, dropout=0.0, batch_first=True, dtype=torch.float64)
    x = torch.randn(3, 5, 16, dtype=torch.float64)
    parameters = dict(layer.named_parameters())

    def loss(parameters, x):
        out = torch.func.functional_call(layer, parameters, (x,) * (3 if name == "MultiheadAttention" else 1))
        return (out[0] if name == "MultiheadAttention" else out).square().sum()

    expected = torch.autograd.grad(loss(parameters, x), list(parameters.values()))
    for got, wanted in zip(torch.func.grad(loss)(parameters, x).values(), expected):
        torch.testing.assert_close(got, wanted)
    each = torch.func.vmap(torch.func.grad(loss), (None, 0))(parameters, x.unsqueeze(1))
    for got, wanted in zip(each.values(), expected):
        torch.testing.assert_close(got.sum(0), wanted)


def test_export():
    layer = MultiheadAttention(16, 4, batch_first=True).eval()
    x = torch.randn(2, 5, 16)
    program = torch.export.export(layer, (x, x, x))
    assert any("attention_block_forward" in str(node.target) for node in program.graph.nodes)
    for got, expected in zip(program.module()(x, x, x), layer(x, x, x)):
        torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("name", OURS)
def test_second_derivatives(name):
    layer = OURS[name](8, 2, dropout=0.0, batch_first=True, dtype=torch.float64)
    if name == "TransformerEncoderLayer":
        layer.activation = F.gelu  # relu's kink is nothing for finite differences
    x = torch.randn(1, 3, 8, dtype=torch.float64, requires_grad=True)

    def function(x):
        return layer(x, x, x)[0] if name == "MultiheadAttention" else layer(x)

    assert torch.autograd.gradcheck(function, (x,))
    assert torch.autograd.gradgradcheck(function, (x,))


def test_parameters_are_used_in_place():
    """What they hold at the call counts, with any strides; nothing is packed at construction."""
    layer = MultiheadAttention(16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    with torch.no_grad():
        before = layer(x, x, x)[0]
        layer.in_proj_weight.mul_(0.5)
        layer.out_proj.weight.data = layer.out_proj.weight.data.t().contiguous().t()
        expected = layer(x, x, x)[0]
        assert not torch.equal(before, expected)
        layer.out_proj.weight.data = layer.out_proj.weight.data.contiguous()
        torch.testing.assert_close(layer(x, x, x)[0], expected)


def test_a_packaged_program(tmp_path):
    """AOTInductor's, with and without returned weights; what backward needs is a result that nobody asks for."""

    class Model(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.layer = TransformerEncoderLayer(16, 4, 32, batch_first=True)
            self.attention = MultiheadAttention(16, 4, batch_first=True)

        def forward(self, x, padding):
            x = self.layer(x, src_key_padding_mask=padding)
            return *self.attention(x, x, x), self.attention(x, x, x, need_weights=False)[0]

    torch.manual_seed(0)
    model, x = Model().eval(), torch.randn(2, 5, 16)
    padding = torch.arange(5).ge(torch.tensor([[5], [3]]))
    with torch.no_grad():
        program = torch.export.export(model, (x, padding))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "model.pt2"))
        polyhead.torch.report(reset=True)
        got = torch._inductor.aoti_load_package(path)(x, padding)
        assert counts(polyhead.torch.report()) == {"attention_block_forward": 3, "feed_forward_block_forward": 1}
        for one, other in zip(got, model(x, padding), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=0)
