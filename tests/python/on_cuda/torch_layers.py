"""polyhead's layers on CUDA tensors: torch's modules and the operators below them, against the CPU's."""

import copy

import pytest
import torch
from device import check, is_written, new_stream, pointer, twin
from torch_tensors import (  # noqa: F401
    assert_close, assert_refused, cuda, device, host, host_operators, made, nothing_is_left, set_stream,
)

import polyhead
import polyhead.torch
from polyhead.torch import _stored

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


@pytest.mark.parametrize("stored", [None, "int4"])
@pytest.mark.parametrize("rope", [None, polyhead.torch.Rope()], ids=["plain", "rope"])
def test_layers_on_a_cache(host_operators, rope, stored):
    """Prompts, then a token each, in pages on the device: what the same calls give on the CPU."""
    torch.manual_seed(0)
    module = polyhead.torch.MultiheadAttention(64, num_heads=2, num_heads_kv=1, batch_first=True, rope=rope).eval()
    moved, x = there(module), torch.randn(2, 4, 64)
    caches = [each.new_cache(6, 2, key_dtype=stored) for each in (module, moved)]
    table = polyhead.PageTable(6, 2)
    sequences = [table.add(), table.add()]
    for new in ([3, 2], [1, 1]):
        step = table.extend(sequences, new)
        arrays = {name: torch.as_tensor(x) for name, x in step.arguments().items()}
        if rope is not None:
            arrays["positions"] = torch.as_tensor(step.positions)
        tokens = x[:, : max(new)]
        outs = []
        for each, cache, place in ((module, caches[0], lambda x: x), (moved, caches[1], cuda)):
            placed = {name: place(array) for name, array in arrays.items()}
            with torch.no_grad():
                outs.append(each(*[place(tokens)] * 3, cache=polyhead.torch.CacheStep(cache, **placed), is_causal=True, need_weights=False)[0])
        got = host(outs[1])
        for b, length in enumerate(new):
            torch.testing.assert_close(got[b, :length], outs[0][b, :length], rtol=2e-5, atol=2e-5)
    slots = torch.tensor([0, 2, 3, 1])
    for cache, place in zip(caches, (lambda x: x, cuda)):
        cache.copy(place(slots), place(slots.flip(0)))
    for got, want in zip(caches[1].read(cuda(slots)), caches[0].read(slots), strict=True):
        assert got.device == torch.device("cuda:0")
        torch.testing.assert_close(host(got), want, rtol=2e-5, atol=2e-5)


@pytest.mark.parametrize("stored", [None, "int4"])
def test_transformers_cache(host_operators, stored):
    """Tokens behind tokens, in place, on the device as on the CPU; attention reads what is stored."""
    pytest.importorskip("transformers")
    torch.manual_seed(0)
    caches = [polyhead.torch.Cache(None, stored) for _ in range(2)]
    for new in (5, 1, 1):
        key, value = torch.randn(2, 2, 2, new, 64)
        query = torch.randn(2, 4, new, 64)
        outs = []
        for cache, place in zip(caches, (lambda x: x, cuda)):
            with torch.no_grad():
                keys, values = cache.update(place(key), place(value), 0)
                assert keys.device == place(key).device
                outs.append(polyhead.torch.scaled_dot_product_attention(place(query), keys, values, enable_gqa=True))
        assert_close(outs[1], outs[0])
    if stored is not None:
        here, there_ = (cache.layers[0].keys.dense() for cache in caches)
        assert_close(there_, here)
        _stored._of_nothing.cache_clear()


PAGES = {"pages": torch.tensor([[1, 3, 0], [2, 5, 4]]), "alone": None}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("pages", PAGES)
def test_flash_attn_with_kvcache(host_operators, pages, dtype):
    """New rows are written and read where the numbers say, which lie on the device: nobody waits for them."""
    torch.manual_seed(0)
    table = PAGES[pages]
    size = (6, 4, 2, 16) if table is not None else (2, 12, 2, 16)
    caches = [torch.randn(size).to(dtype) for _ in range(2)]
    q, k, v = (torch.randn(2, 2, heads, 16).to(dtype) for heads in (4, 2, 2))
    angles = torch.randn(16, 4)
    rotary = [angles.cos(), angles.sin()]

    def call(place, lengths, table, caches):
        placed = None if table is None else place(table)
        return polyhead.torch.flash_attn_with_kvcache(
            place(q), *caches, place(k), place(v), *map(place, rotary), place(lengths), block_table=placed, causal=True
        )

    moved = [cuda(each) for each in caches]
    lengths = torch.tensor([5, 2], dtype=torch.int32)
    assert_close(call(cuda, lengths, table, moved), call(lambda x: x, lengths, table, caches), dtype)
    for there_, here in zip(moved, caches):
        assert torch.equal(host(there_), here)
    # What does not exist is not written: the second sequence's rows lie behind its room, or in no page.
    wild = None if table is None else torch.tensor([[1, 3, 0], [2, -7, 99]])
    first = [each.clone() for each in caches]
    call(lambda x: x, torch.tensor([7, 0]), table, first)
    call(cuda, torch.tensor([7, 1 << 40 if table is None else 4]), wild, moved)
    second = 1 if table is None else 2
    for there_, want, before in zip(moved, first, caches):
        want[second, :2] = before[second, :2]
        assert torch.equal(host(there_), want)


def test_what_is_refused_by_a_sentence():
    torch.manual_seed(0)
    module = MODULES["encoder"]()
    moved, x = there(module), torch.randn(2, 5, 16)
    tokens = cuda(x)
    feed_forward = torch.ops.polyhead.feed_forward_block_forward
    weights = [cuda(module.linear1.weight.detach()), None, module.linear2.weight.detach()]
    assert_refused([
        (lambda: module(tokens), "in_proj_weight is not on cuda:0, must be as query"),
        (lambda: moved(x), "in_proj_weight is not on the CPU, must be"),
        (lambda: feed_forward(tokens, *weights, *[None] * 5, 0, 0.0, 0.0, 0, False, 0.0, False, False),
         "weight2 is not on cuda:0, must be as query"),
    ])  # fmt: skip


def test_shapes_of_results_without_a_device():
    from torch._subclasses.fake_tensor import FakeTensorMode

    with FakeTensorMode():
        layer = polyhead.torch.TransformerEncoderLayer(16, nhead=2, batch_first=True, device="cuda")
        x = torch.empty(2, 5, 16, device="cuda", requires_grad=True)
        out = layer(x)
        assert out.device.type == "cuda" and out.shape == x.shape
        assert torch.autograd.grad(out.sum(), x)[0].device.type == "cuda"
