"""polyhead's operators on CUDA tensors of torch's build for the CPU, to which on_cuda/torch_device.cc is a device."""

import pytest
import torch
from device import check, is_written, new_stream, pointer, twin
from torch_tensors import BOUNDS, assert_close, assert_refused, cuda, device, host, made, nothing_is_left, set_stream  # noqa: F401

import polyhead
import polyhead.torch


def operands(dtype=torch.float32, heads_first=False, requires_grad=False):
    torch.manual_seed(0)
    shapes = [(2, 5, 4, 16), (2, 70, 2, 16), (2, 70, 2, 16)]
    if heads_first:
        shapes = [(2, 4, 5, 16), (2, 4, 70, 16), (2, 4, 70, 16)]
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_forward(dtype):
    arrays = operands(dtype)
    out = polyhead.torch.attention(*map(cuda, arrays), causal=True, align="bottom_right")
    assert out.device == torch.device("cuda:0") and out.is_contiguous()
    assert_close(out, polyhead.torch.attention(*arrays, causal=True, align="bottom_right"), dtype)


def test_options():
    """Those of the operator with strings and optional tensors; lengths on the device, the seed on the CPU."""
    arrays = operands()
    options = {"dropout_p": 0.5, "dropout_seed": 7, "softcap": 3.0, "return_logsumexp": True}
    tensors = {"attn_bias": torch.randn(4, 5, 70), "seqlens_k": torch.tensor([70, 33]), "sink_logits": torch.randn(4)}
    want = polyhead.torch.attention(*arrays, **options, **tensors)
    got = polyhead.torch.attention(*map(cuda, arrays), **options, **{name: cuda(x) for name, x in tensors.items()})
    for x, y in zip(got, want, strict=True):
        assert_close(x, y)


@pytest.mark.parametrize("options", [{}, {"softcap": 3.0}], ids=str)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_gradients(dtype, options):
    arrays = operands(dtype, requires_grad=True)
    out = polyhead.torch.attention(*arrays, **options)
    grad_out = torch.randn_like(out)
    want = torch.autograd.grad(out, arrays, grad_out)
    there = [cuda(x) for x in arrays]
    got = torch.autograd.grad(polyhead.torch.attention(*there, **options), there, cuda(grad_out))
    for x, y in zip(got, want, strict=True):
        assert x.device == torch.device("cuda:0") and x.dtype == dtype
        assert_close(x, y, dtype)


def test_scaled_dot_product_attention():
    arrays = operands(heads_first=True, requires_grad=True)
    out = polyhead.torch.scaled_dot_product_attention(*arrays, is_causal=True)
    grad_out = torch.randn_like(out)
    want = torch.autograd.grad(out, arrays, grad_out)
    there = [cuda(x) for x in arrays]
    got = polyhead.torch.scaled_dot_product_attention(*there, is_causal=True)
    assert got.stride() == out.stride()
    assert_close(got, out)
    for x, y in zip(torch.autograd.grad(got, there, cuda(grad_out)), want, strict=True):
        assert_close(x, y)


def test_flash_attention():
    arrays = operands()
    want = polyhead.torch.flash_attn_func(*arrays, causal=True, window_size=(20, 0))
    assert_close(polyhead.torch.flash_attn_func(*map(cuda, arrays), causal=True, window_size=(20, 0)), want)


def test_torchs_stream_and_torchs_allocator():
    stream = new_stream()
    query, key, value = operands()
    key, value = (torch.randn(2, 600, 2, 16) for _ in range(2))  # few queries and many keys: a workspace
    there = [cuda(x) for x in (query, key, value)]
    set_stream(stream)
    made.clear()
    out = polyhead.torch.attention(*there)
    set_stream(0)
    assert made == [torch.float32, torch.uint8]
    assert not is_written(out.data_ptr(), out.numel() * 4), "the call waited"
    check(twin.cudaStreamSynchronize(pointer(stream)))
    assert_close(out, polyhead.torch.attention(query, key, value))
    check(twin.cudaStreamDestroy(pointer(stream)))


def test_arrays_interface_takes_torchs_tensors():
    arrays = operands()
    out, logsumexp = polyhead.attention(*map(cuda, arrays), return_logsumexp=True)
    assert type(out) is torch.Tensor and out.device == torch.device("cuda:0")
    for x, y in zip((out, logsumexp), polyhead.attention(*arrays, return_logsumexp=True), strict=True):
        assert_close(x, y)


def test_what_is_refused_by_a_sentence():
    query, key, value = operands()
    there = [cuda(x) for x in (query, key, value)]
    attention, wide = polyhead.torch.attention, [torch.ones(1, 1, 1, 1032)] * 3
    assert_refused([
        (lambda: attention(there[0], key, there[2]), "key is not on cuda:0, must be as query"),
        (lambda: attention(query, there[1], value), "key is not on the CPU, must be"),
        (lambda: attention(*there, seqlens_k=torch.tensor([1, 2])), "seqlens_k is not on cuda:0, must be as query"),
        (lambda: attention(*there, dropout_p=0.5, dropout_seed=cuda(torch.tensor(7))), "dropout_seed is not on the CPU"),
        (lambda: attention(*there, kernel="reference"), "kernel is reference, which computes on cpu, the call's tensors are on cuda"),
        (lambda: attention(*map(cuda, wide)), "no kernel can compute this: cuda_sm80 (head_dim is 1032, takes 0 to 1024)"),
        (lambda: torch.ops.polyhead.dropout_mask(cuda(torch.tensor(1)), 0.5, 0, 1, 1, 1, 1), "computes on the CPU alone"),
    ])  # fmt: skip


def test_shapes_of_results_without_a_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        query = torch.empty(2, 5, 4, 16, device="cuda", dtype=torch.bfloat16)
        out, logsumexp, *_ = torch.ops.polyhead.attention_forward(query, query, query)
        grads = torch.ops.polyhead.attention_backward(out, None, query, query, query, out, logsumexp, 7)
    for x in (out, logsumexp, *grads[:3]):
        assert x.device.type == "cuda"
    assert out.shape == query.shape and logsumexp.shape == (2, 4, 5)
