"""The front ends on a GPU, where there is one: what cuda_test.py does on a simulated one, with torch's and CuPy's own arrays."""

import sys

import numpy as np
import pytest

import polyhead
from optional import torch

if torch is None or not torch.cuda.is_available():
    pytest.skip("torch finds no CUDA device", allow_module_level=True)
if "cuda_sm80" not in polyhead.kernels():
    pytest.skip(f"no CUDA kernel: {polyhead.explain(*[np.ones((1, 1, 1, 8), np.float32)] * 3).reasons.get('cuda_sm80', 'not in this build')}",
                allow_module_level=True)  # fmt: skip

import polyhead.torch

BOUNDS = {torch.float32: 2e-5, torch.bfloat16: 2e-2, torch.float16: 3e-3}


def operands(dtype, seqlen_k=300, requires_grad=False):
    torch.manual_seed(0)
    shapes = [(2, 130, 4, 64), (2, seqlen_k, 2, 64), (2, seqlen_k, 2, 64)]
    return [torch.randn(shape).to(dtype).requires_grad_(requires_grad) for shape in shapes]


def on_device(tensors):
    return [x.detach().cuda().requires_grad_(x.requires_grad) for x in tensors]


def assert_close(got, want, dtype):
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=BOUNDS[dtype], atol=BOUNDS[dtype])


@pytest.mark.parametrize("dtype", list(BOUNDS), ids=str)
def test_forward_and_gradients(dtype):
    arrays = operands(dtype, requires_grad=True)
    options = {"causal": True, "align": "bottom_right", "softcap": 5.0}
    out = polyhead.torch.attention(*arrays, **options)
    grad_out = torch.randn_like(out)
    want = torch.autograd.grad(out, arrays, grad_out)
    there = on_device(arrays)
    got = polyhead.torch.attention(*there, **options)
    assert_close(got, out, dtype)
    for x, y in zip(torch.autograd.grad(got, there, grad_out.cuda()), want, strict=True):
        assert x.is_cuda
        assert_close(x, y, dtype)


def test_other_streams_and_compiled_graphs():
    arrays = operands(torch.float32)
    want = polyhead.torch.attention(*arrays)
    with torch.cuda.stream(torch.cuda.Stream()):
        there = on_device(arrays)
        got = polyhead.torch.attention(*there)
    torch.cuda.synchronize()
    assert_close(got, want, torch.float32)
    compiled = torch.compile(lambda q, k, v: polyhead.torch.attention(q, k, v) * 2, fullgraph=True)
    assert_close(compiled(*there), 2 * want, torch.float32)


def test_autocast_and_merge():
    arrays = operands(torch.float32)
    there = on_device(arrays)
    with torch.autocast("cuda", dtype=torch.bfloat16):
        assert polyhead.torch.attention(*there).dtype == torch.bfloat16
    halves = [
        polyhead.torch.attention(there[0], there[1][:, part], there[2][:, part], return_logsumexp=True)
        for part in (slice(0, 100), slice(100, None))
    ]
    out, _ = polyhead.torch.merge(*zip(*halves))
    assert_close(out, polyhead.torch.attention(*arrays), torch.float32)


def test_arrays():
    arrays = operands(torch.float32)
    want = polyhead.attention(*arrays)
    got = polyhead.attention(*on_device(arrays))
    assert got.is_cuda
    assert_close(got, want, torch.float32)
    if "cupy" not in sys.modules:
        pytest.importorskip("cupy", reason="CuPy is not installed: torch's tensors alone were tried")
    import cupy

    there = [cupy.asarray(x.numpy()) for x in arrays]
    with cupy.cuda.Stream(non_blocking=True):
        got = polyhead.attention(*there)
        assert type(got) is cupy.ndarray
        assert_close(torch.from_numpy(got.get()), want, torch.float32)


def test_memory_goes_back_to_torchs_allocator():
    there = on_device(operands(torch.float32, seqlen_k=5000))
    polyhead.torch.attention(*there)
    torch.cuda.synchronize()
    before = torch.cuda.memory_allocated()
    for _ in range(20):
        polyhead.torch.attention(*there)
        polyhead.attention(*there)
    assert torch.cuda.memory_allocated() == before
