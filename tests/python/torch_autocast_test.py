"""polyhead.torch's layers under autocast: the stream between them is float32 as torch's, weights are cast once."""

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
import torch.utils.checkpoint
from polyhead.torch import FusedMultiHeadAttention, TransformerEncoderLayer
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch_layers_judge import counts, pair
from torch_switch_judge import gradients, in_double

pytestmark = pytest.mark.usefixtures("one_thread")

LAYERS, SEEDS = 4, 24


def stacks(seed, norm_first):
    """torch's and ours of one state."""
    torch.manual_seed(seed)
    pairs = [
        pair("TransformerEncoderLayer", 64, 4, 128, dropout=0.0, batch_first=True, norm_first=norm_first)
        for _ in range(LAYERS)
    ]
    return [nn.Sequential(*layers) for layers in zip(*pairs)]


def errors_of(stack, x, exact, dtype):
    """Of out and of each gradient, the root of the mean square over that of the exact values."""
    with torch.autocast("cpu", dtype, enabled=dtype is not None):
        out = stack(x)
    assert out.dtype == x.dtype
    got = [out, *gradients([out], [x, *stack.parameters()])]
    return [float((one.detach().double() - truth).norm() / truth.norm()) for one, truth in zip(got, exact)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_a_stack_is_as_exact_as_torchs(norm_first, dtype):
    """Errors against float64, the mean over seeds: at most 1.1 times torch's."""
    means = torch.zeros(2, 2, dtype=torch.float64)  # theirs and ours; of out, and of the gradients
    for seed in range(SEEDS):
        theirs, ours = stacks(seed, norm_first)
        x = torch.randn(2, 16, 64, requires_grad=True)
        wide, wide_x = in_double(theirs), in_double(x)
        out = wide(wide_x)
        exact = [out.detach(), *gradients([out], [wide_x, *wide.parameters()])]
        for row, stack in enumerate((theirs, ours)):
            out_error, *grad_errors = errors_of(stack, x, exact, dtype)
            means[row] += torch.tensor([out_error, sum(grad_errors) / len(grad_errors)], dtype=torch.float64) / SEEDS
    ratios = (means[1] / means[0]).tolist()
    print(f"norm_first={norm_first} {dtype}: error of out {ratios[0]:.3f} times torch's, of gradients {ratios[1]:.3f}")
    assert max(ratios) <= 1.1, ratios


@pytest.mark.parametrize("normalize_before", [False, True])
def test_fused_multi_head_attention_keeps_the_stream_in_float32(normalize_before):
    """Its input is large, of which bfloat16 would lose more than all that attention adds."""
    torch.manual_seed(0)
    layer = FusedMultiHeadAttention(64, 4, 0.0, 0.0, normalize_before=normalize_before)
    x = torch.randn(2, 16, 64) * 100
    exact = in_double(layer)(x.double())
    with torch.autocast("cpu", torch.bfloat16):
        out = layer(x)
    assert out.dtype == torch.float32
    added = (exact - x.double()).norm() if normalize_before else exact.norm()
    assert (out.double() - exact).norm() < 0.02 * added


@pytest.mark.parametrize("tokens", [torch.float32, torch.bfloat16, torch.float16, torch.float64], ids=str)
@pytest.mark.parametrize("norm_first", [False, True])
def test_dtypes_are_torchs(norm_first, tokens):
    """Whatever comes in."""
    theirs, ours = stacks(0, norm_first)
    x = torch.randn(2, 5, 64, dtype=tokens)
    if tokens == torch.float64:
        theirs, ours = theirs.double(), ours.double()
    with torch.autocast("cpu", torch.bfloat16):
        expected, got = theirs(x), ours(x)
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=0.05, atol=0.05)


class Casts(TorchDispatchMode):
    """How often a matrix of a module's was cast."""

    def __init__(self, module):
        super().__init__()
        self.matrices = {each.data_ptr() for each in module.parameters() if each.dim() == 2}
        self.count = 0

    def __torch_dispatch__(self, function, types, arguments=(), options=None):
        if function is torch.ops.aten._to_copy.default and arguments[0].data_ptr() in self.matrices:
            self.count += 1
        return function(*arguments, **(options or {}))


def wide_layer():
    """Of matrices that are worth a cache."""
    torch.manual_seed(0)
    return TransformerEncoderLayer(384, 4, 512, dropout=0.0, batch_first=True), torch.randn(2, 5, 384)


@pytest.mark.parametrize("mode", [torch.enable_grad, torch.no_grad, torch.inference_mode])
def test_weights_are_cast_once_in_a_region(mode):
    """By torch's own cache, which is empty at the region's end: then the weights may be others."""
    layer, x = wide_layer()
    with Casts(layer) as casts, mode():
        for region in range(2):
            with torch.autocast("cpu", torch.bfloat16):
                outs = [layer(x) for _ in range(3)]
                layer.linear1(x)  # torch finds it there too
            assert casts.count == 4 * (region + 1)
            assert torch.equal(outs[0], outs[2])
        with torch.autocast("cpu", torch.bfloat16, cache_enabled=False):
            layer(x), layer(x)
        assert casts.count == 16
    with torch.no_grad():
        layer.linear2.weight.data.mul_(2)
    with torch.autocast("cpu", torch.bfloat16):
        assert not torch.equal(layer(x), outs[0])


def test_gradients_of_weights_that_are_used_twice():
    """Both uses share one cast; the gradient is the sum, also of a first use without gradients."""
    layer, x = wide_layer()
    with torch.autocast("cpu", torch.bfloat16):
        with torch.no_grad():
            layer(x)
        single = gradients([layer(x)], layer.parameters())
        twice = gradients([layer(x) + layer(x)], layer.parameters())
    for got, expected in zip(twice, single):
        torch.testing.assert_close(got, 2 * expected, rtol=0.02, atol=0.02 * float(expected.abs().max()))


def test_checkpointing():
    """Which hooks what is saved, and asks for it in backward alone."""
    layer, x = wide_layer()
    x.requires_grad_()

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    expected = gradients([step(x)], [x, *layer.parameters()])
    out = torch.utils.checkpoint.checkpoint(step, x, use_reentrant=False)
    for got, wanted in zip(gradients([out], [x, *layer.parameters()]), expected):
        assert torch.equal(got, wanted)


@pytest.mark.parametrize("norm_first", [False, True])
def test_compiled_is_the_same(norm_first):
    layer = TransformerEncoderLayer(64, 4, 128, dropout=0.0, batch_first=True, norm_first=norm_first)
    x = torch.randn(2, 5, 64, requires_grad=True)

    def step(x):
        with torch.autocast("cpu", torch.bfloat16):
            return layer(x)

    expected = step(x)
    expected_grads = gradients([expected], [x, *layer.parameters()])
    torch._dynamo.reset()
    polyhead.torch.report(reset=True)
    out = torch.compile(step, fullgraph=True, backend="aot_eager")(x)
    grads = gradients([out], [x, *layer.parameters()])
    assert set(counts(polyhead.torch.report(reset=True))) >= {"attention_block_forward", "feed_forward_block_backward"}
    assert out.dtype == torch.float32
    for got, wanted in zip([out, *grads], [expected.detach(), *expected_grads]):
        torch.testing.assert_close(got, wanted, rtol=0.02, atol=0.02 * float(wanted.abs().max()))


def heads(seed):
    """query, key and value of large scores, where a product in bfloat16 shows."""
    torch.manual_seed(seed)
    return [2 * torch.randn(2, 64, 4, 32) for _ in range(3)]


@pytest.mark.parametrize("compiled", [False, True])
def test_returned_weights_are_the_same_with_gradients(compiled):
    """These are computed in torch's operations, whose products autocast would round."""
    query, key, value = heads(0)

    def weights(query):
        with torch.autocast("cpu", torch.bfloat16):
            return polyhead.torch.attention(query, key, value, return_weights=True)[1]

    expected = weights(query)
    torch._dynamo.reset()
    function = torch.compile(weights, fullgraph=True, backend="aot_eager") if compiled else weights
    got = function(query.clone().requires_grad_()).detach()
    assert got.dtype == expected.dtype
    torch.testing.assert_close(got, expected, rtol=2**-6, atol=1e-5)


@pytest.mark.parametrize("layer", [False, True])
def test_derivatives_that_are_differentiated_may_be_taken_within_a_region(layer):
    tensors = [x.requires_grad_() for x in heads(1)]
    torch.manual_seed(0)
    module = TransformerEncoderLayer(32, 4, 64, dropout=0.0, activation="gelu", batch_first=True, norm_first=True)

    def second(enabled):
        out = module(tensors[0][:, :, 0]) if layer else polyhead.torch.attention(*tensors)
        with torch.autocast("cpu", torch.bfloat16, enabled=enabled):
            (first,) = torch.autograd.grad(out.square().sum(), tensors[0], create_graph=True)
        return torch.autograd.grad(first.square().sum(), tensors[0])[0]

    expected = second(False)
    assert (second(True) - expected).norm() < 1e-5 * expected.norm()
