"""polyhead's layers on CUDA tensors: torch's modules and the operators below them, against the CPU's."""

import copy

import pytest
import torch
from device import check, is_written, new_stream, pointer, twin
from torch_tensors import assert_close, cuda, device, host, made, nothing_is_left, set_stream  # noqa: F401

import polyhead
import polyhead.torch

def encoder(nhead, **options):
    """gelu: relu's derivative jumps, where 16 bits and float64 stand on different sides of 0."""
    return polyhead.torch.TransformerEncoderLayer(16, nhead, dim_feedforward=24, activation="gelu", batch_first=True, **options)


MODULES = {
    "attention": lambda: polyhead.torch.MultiheadAttention(16, num_heads=4, num_heads_kv=2, batch_first=True),
    "attention_dropout": lambda: polyhead.torch.MultiheadAttention(16, num_heads=2, dropout=0.3),
    "attention_cross": lambda: polyhead.torch.MultiheadAttention(16, num_heads=2, kdim=6, vdim=7, batch_first=True),
    "fused": lambda: polyhead.torch.FusedMultiHeadAttention(16, 2, dropout_rate=0.2, attn_dropout_rate=0.3),
    "encoder": lambda: encoder(2, norm_first=True),
    "encoder_post": lambda: encoder(4),
}  # fmt: skip


def there(module):
    """The module with its parameters on the device."""
    moved = copy.deepcopy(module)
    for each in moved.modules():
        for name, parameter in list(each.named_parameters(recurse=False)):
            setattr(each, name, torch.nn.Parameter(cuda(parameter.detach())))
    return moved


def run(module, x):
    torch.manual_seed(3)  # of dropout
    if not isinstance(module, polyhead.torch.MultiheadAttention):
        return module(x[0]), [x[0], *module.parameters()]
    out = module(*x, need_weights=False)[0]
    return out, [*dict.fromkeys(x), *module.parameters()]


RELATIVE = {torch.float32: 1e-5, torch.bfloat16: 0.06, torch.float16: 0.01}  # as in tests/layer/layer_block.h


def assert_near(got, want, dtype):
    """Beside the largest number that there is."""
    assert got.device == torch.device("cuda:0") and got.dtype == dtype and got.shape == want.shape
    largest = max(want.abs().max().item(), 1.0)
    assert (host(got).double() - want).abs().max().item() <= RELATIVE[dtype] * largest


@pytest.mark.parametrize("dtype", list(RELATIVE), ids=str)
@pytest.mark.parametrize("name", MODULES)
def test_modules(name, dtype):
    """Forward and all gradients against float64; dropout keeps what it keeps on the CPU."""
    torch.manual_seed(0)
    module = MODULES[name]().to(dtype)
    x = [torch.randn(2, 5, 16).to(dtype).requires_grad_()] * 3
    if name == "attention_cross":
        x[1:] = (torch.randn(2, 7, size).to(dtype).requires_grad_() for size in (6, 7))
    exact, moved = ({each: f(each.detach()).requires_grad_() for each in x} for f in (torch.Tensor.double, cuda))
    want, sources = run(copy.deepcopy(module).double(), [exact[each] for each in x])
    grad_out = torch.randn_like(want).to(dtype)
    wants = torch.autograd.grad(want, sources, grad_out.double())
    got, sources = run(there(module), [moved[each] for each in x])
    assert_near(got, want.detach(), dtype)
    for each, of in zip(torch.autograd.grad(got, sources, cuda(grad_out)), wants, strict=True):
        assert_near(each, of, dtype)


def test_inference_is_counted_under_its_kernel():
    torch.manual_seed(0)
    module = MODULES["encoder"]().eval()
    moved, x = there(module), torch.randn(2, 5, 16)
    polyhead.torch.report(reset=True)
    with torch.no_grad():
        assert_close(moved(cuda(x)), module(x))
    assert "cuda_sm80" in str(polyhead.torch.report())


def test_torchs_stream_and_torchs_allocator():
    stream = new_stream()
    torch.manual_seed(0)
    module = MODULES["encoder"]().eval()
    moved, x = there(module), torch.randn(2, 5, 16)
    tokens = cuda(x)
    set_stream(stream)
    made.clear()
    with torch.no_grad():
        out = moved(tokens)
    set_stream(0)
    assert made == [torch.float32, torch.uint8] * 2
    assert not is_written(out.data_ptr(), out.numel() * 4), "the call waited"
    check(twin.cudaStreamSynchronize(pointer(stream)))
    with torch.no_grad():
        assert_close(out, module(x))
    check(twin.cudaStreamDestroy(pointer(stream)))


def test_what_is_refused_by_a_sentence():
    torch.manual_seed(0)
    module = MODULES["encoder"]()
    moved, x = there(module), torch.randn(2, 5, 16)
    tokens = cuda(x)
    feed_forward = torch.ops.polyhead.feed_forward_block_forward
    weights = [cuda(module.linear1.weight.detach()), None, module.linear2.weight.detach()]
    refused = [
        (lambda: module(tokens), "in_proj_weight is not on cuda:0, must be as query"),
        (lambda: moved(x), "in_proj_weight is not on the CPU, must be"),
        (lambda: feed_forward(tokens, *weights, *[None] * 5, 0, 0.0, 0.0, 0, False, 0.0, False, False),
         "weight2 is not on cuda:0, must be as query"),
    ]  # fmt: skip
    for call, sentence in refused:
        with pytest.raises((polyhead.Error, ValueError)) as error:
            call()
        assert sentence in str(error.value)
        del error
    del refused, call


def test_shapes_of_results_without_a_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        layer = polyhead.torch.TransformerEncoderLayer(16, nhead=2, batch_first=True, device="cuda")
        x = torch.empty(2, 5, 16, device="cuda", requires_grad=True)
        out = layer(x)
        assert out.device.type == "cuda" and out.shape == x.shape
        assert torch.autograd.grad(out.sum(), x)[0].device.type == "cuda"
