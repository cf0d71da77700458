"""The switch itself: what it changes and restores, its report, and torch's machinery around attention."""

import doctest
import importlib
import subprocess
import sys
import threading

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead
import polyhead.torch
import torch.nn.attention as registry
from torch.nested._internal import ops as nested_ops
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch_switch_judge import assert_taken, counted

OPERATORS = (
    "scaled_dot_product_attention", "_scaled_dot_product_flash_attention_for_cpu",
    "_scaled_dot_product_flash_attention_for_cpu_backward", "_native_multi_head_attention", "_flash_attention_forward",
    "_flash_attention_forward_no_dropout_inplace", "_flash_attention_backward",
)  # fmt: skip


def draw(*shape, dtype=torch.float32):
    return torch.randn(shape, dtype=torch.float32).to(dtype).requires_grad_()


def state_of_torch():
    """Kernels by dispatch key, without the lines that tell who registered when; and what is patched."""
    torch._C._dispatch_check_all_invariants()
    tables = [torch._C._dispatch_dump_table(f"aten::{name}") for name in OPERATORS]
    jagged = nested_ops.jagged_scaled_dot_product_attention
    return tables, F.multi_head_attention_forward, torch.compiler.config.cache_key_tag, jagged


def test_importing_activates_nothing():
    code = (
        "import torch; from torch.nn import functional as F; before = F.multi_head_attention_forward\n"
        f"names = {OPERATORS}\n"
        "dump = lambda: [torch._C._dispatch_dump_table('aten::' + name) for name in names]\n"
        "tables = dump()\n"
        "import polyhead.torch\n"
        "assert torch.nn.attention.current_flash_attention_impl() is None\n"
        "assert 'polyhead' in torch.nn.attention.list_flash_attention_impls()\n"
        "assert dump() == tables and F.multi_head_attention_forward is before\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_it_restores_what_was():
    before = state_of_torch()
    polyhead.torch.enable()
    on = state_of_torch()
    assert on[0] != before[0] and on[1] is not before[1] and registry.current_flash_attention_impl() == "polyhead"
    polyhead.torch.enable()  # once more is no more
    assert state_of_torch()[1] is on[1]
    polyhead.torch.disable()
    assert state_of_torch() == before and registry.current_flash_attention_impl() is None
    polyhead.torch.disable()
    assert state_of_torch() == before
    for _ in range(3):
        with polyhead.torch.enabled(), polyhead.torch.enabled():
            assert registry.current_flash_attention_impl() == "polyhead"
        assert state_of_torch() == before
    polyhead.torch.enable()
    for change in (lambda: None, polyhead.torch.disable):
        with polyhead.torch.enabled():
            change()
        assert registry.current_flash_attention_impl() == "polyhead"  # as it was before the with
    polyhead.torch.disable()
    with pytest.raises(ZeroDivisionError), polyhead.torch.enabled():
        1 / 0
    assert state_of_torch() == before


def test_torchs_own_way_to_switch():
    before = state_of_torch()
    registry.activate_flash_attention_impl("polyhead")
    try:
        registry.activate_flash_attention_impl("polyhead")
        query = draw(1, 2, 5, 8)
        polyhead.torch.report(reset=True)
        F.scaled_dot_product_attention(query, query, query)
        assert_taken(polyhead.torch.report(reset=True), backward=False)
    finally:
        registry.restore_flash_attention_impl()
    assert state_of_torch() == before


def test_another_implementation_comes_back():
    removed = []

    class Handle:
        def remove(self):
            removed.append(1)

    registry.register_flash_attention_impl("test's own", register_fn=Handle)
    try:
        registry.activate_flash_attention_impl("test's own")
        with polyhead.torch.enabled():
            assert removed == [1]
        assert registry.current_flash_attention_impl() == "test's own"
    finally:
        registry.restore_flash_attention_impl()
        registry._registry._FLASH_ATTENTION_IMPLS.pop("test's own")


def test_what_cannot_be_installed_leaves_everything_as_it_was(monkeypatch):
    class Handle:
        def remove(self):
            pass

    registry.register_flash_attention_impl("test's own", register_fn=Handle)
    before, impl, calls = state_of_torch(), torch.library.Library.impl, []

    def fails_at_last(self, *arguments, **options):
        calls.append(arguments)
        if len(calls) == 9:
            raise RuntimeError("no more")
        return impl(self, *arguments, **options)

    try:
        registry.activate_flash_attention_impl("test's own")
        with monkeypatch.context() as patch:
            patch.setattr(torch.library.Library, "impl", fails_at_last)
            with pytest.raises(RuntimeError, match="no more"):
                polyhead.torch.enable()
        assert state_of_torch() == before and registry.current_flash_attention_impl() == "test's own"
    finally:
        registry.restore_flash_attention_impl()
        registry._registry._FLASH_ATTENTION_IMPLS.pop("test's own")


# What older versions of torch lack, taken away.
OLDER = {
    "2.10": "del torch.nn.attention.restore_flash_attention_impl",
    "2.9": "\n".join(
        f"del torch.nn.attention.{name}_flash_attention_impl" for name in ("restore", "activate", "register", "current")
    ),
}


@pytest.mark.parametrize("version", OLDER)
def test_without_what_older_versions_lack(version):
    code = f"""
import torch, torch.nn.attention
{OLDER[version]}
import polyhead.torch
dump = lambda: torch._C._dispatch_dump_table("aten::scaled_dot_product_attention")
before, query = dump(), torch.rand(1, 2, 5, 8)
for _ in range(2):
    with polyhead.torch.enabled():
        polyhead.torch.enable()
        torch.nn.functional.scaled_dot_product_attention(query, query, query)
        assert dump() != before
    polyhead.torch.disable()
    assert dump() == before
assert [(r.op, r.count) for r in polyhead.torch.report()] == [("attention_forward", 2)]
"""
    subprocess.run([sys.executable, "-c", code], check=True)


def test_torch_too_old_is_said_so():
    code = "import torch; torch.__version__ = torch.torch_version.TorchVersion('2.8.1'); import polyhead.torch"
    run = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert run.returncode == 1
    assert "ImportError: torch is 2.8.1, polyhead.torch is tested with 2.13 and cannot work before 2.9" in run.stderr


@pytest.mark.parametrize("off", ["sdpa_kernel", "enable_flash_sdp"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_with_flash_off_torch_computes_bit_for_bit(off, dtype):
    def results():
        torch.manual_seed(0)
        layer = torch.nn.TransformerEncoderLayer(32, 4, 64, dropout=0.1, batch_first=True, dtype=dtype)
        found = []
        for options in ({}, {"is_causal": True}, {"dropout_p": 0.3}, {"attn_mask": draw(5, 7, dtype=dtype)}):
            arguments = [draw(2, 4, s, 8, dtype=dtype) for s in (5, 7, 7)]
            out = F.scaled_dot_product_attention(*arguments, **options)
            found += [out, *torch.autograd.grad(out.sum(), arguments)]
        x = draw(2, 6, 32, dtype=dtype)
        out = layer(x)
        found += [out, *torch.autograd.grad(out.sum(), [x, *layer.parameters()])]
        out, weights = layer.self_attn(x, x, x)
        found += [out, weights]
        layer.eval()
        with torch.no_grad():
            found += [layer(x), *layer.self_attn(x, x, x)]
        return found

    def without_flash():
        if off == "sdpa_kernel":
            with sdpa_kernel(SDPBackend.MATH):
                return results()
        torch.backends.cuda.enable_flash_sdp(False)
        try:
            return results()
        finally:
            torch.backends.cuda.enable_flash_sdp(True)

    expected = without_flash()
    with counted() as records:
        found = without_flash()
    assert len(found) == len(expected) and all(map(torch.equal, found, expected))
    assert records and all(record.kernel is None and "switched off" in record.reason for record in records)


QUERY, KEY, VALUE = (2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8)
BAD = {  # what is wrong: (shapes, options, words of the error)
    "value longer than key": ((QUERY, KEY, (2, 4, 900, 8)), {}, "value"),
    "value shorter than key": ((QUERY, KEY, (2, 4, 3, 8)), {}, "value"),
    "key of another head_dim": ((QUERY, (2, 4, 7, 6), VALUE), {}, "key"),
    "no heads of keys": ((QUERY, (2, 0, 7, 8), (2, 0, 7, 8)), {"enable_gqa": True}, "key"),
    "no heads of keys, ungrouped": ((QUERY, (2, 0, 7, 8), (2, 0, 7, 8)), {}, "key"),
    "heads that do not divide": ((QUERY, (2, 3, 7, 8), (2, 3, 7, 8)), {"enable_gqa": True}, "key"),
    "fewer heads without enable_gqa": ((QUERY, (2, 2, 7, 8), (2, 2, 7, 8)), {}, "enable_gqa"),
    "another batch": ((QUERY, (3, 4, 7, 8), (3, 4, 7, 8)), {}, "query.*key"),
    "another batch of values": ((QUERY, KEY, (3, 4, 7, 8)), {}, "value"),
    "a mask of another size": ((QUERY, KEY, VALUE), {"attn_mask": torch.ones(5, 6, dtype=torch.bool)}, "attn_mask"),
    "a bias of another size": ((QUERY, KEY, VALUE), {"attn_mask": torch.ones(3, 5, 7)}, "attn_"),
    "a mask with too many dimensions": ((QUERY, KEY, VALUE), {"attn_mask": torch.ones(2, 2, 4, 5, 7)}, "attn_"),
    "a mask of integers": ((QUERY, KEY, VALUE), {"attn_mask": torch.ones(5, 7, dtype=torch.int64)}, "attn_mask"),
    "dropout above 1": ((QUERY, KEY, VALUE), {"dropout_p": 1.5}, "dropout_p"),
    "dropout below 0": ((QUERY, KEY, VALUE), {"dropout_p": -0.1}, "dropout_p"),
    "scale nan": ((QUERY, KEY, VALUE), {"scale": float("nan")}, "scale"),
    "scale inf": ((QUERY, KEY, VALUE), {"scale": float("inf")}, "scale"),
    "one dimension": (((8,), (8,), (8,)), {}, "query"),
}


@pytest.mark.parametrize("what", BAD)
@pytest.mark.parametrize("function", ["ours", "switched"])
def test_bad_input_is_named(function, what):
    shapes, options, words = BAD[what]
    arguments = [torch.randn(shape) for shape in shapes]
    call = polyhead.torch.scaled_dot_product_attention if function == "ours" else F.scaled_dot_product_attention
    with polyhead.torch.enabled(), pytest.raises((polyhead.Error, TypeError), match=words):
        call(*arguments, **options)


@pytest.mark.parametrize("function", ["ours", "switched"])
def test_bad_tensors_are_named(function):
    call = polyhead.torch.scaled_dot_product_attention if function == "ours" else F.scaled_dot_product_attention
    query, key, value = (torch.randn(shape) for shape in (QUERY, KEY, VALUE))
    with polyhead.torch.enabled():
        for arguments in ((query, key.double(), value), (query, key, value.bfloat16())):
            with pytest.raises((polyhead.Error, RuntimeError), match="key|value"):
                call(*arguments)
        with pytest.raises((polyhead.Error, RuntimeError, NotImplementedError), match="meta|device"):
            call(query, key.to("meta"), value)
        for mask in (torch.ones(5, 7, dtype=torch.bool, device="meta"), torch.ones(5, 7, device="meta")):
            with pytest.raises(polyhead.Error, match="attn_mask is on meta"):
                call(query, key, value, mask)
        assert call(*(x.to("meta") for x in (query, key, value))).shape == query.shape
        for dtype in (torch.int64, torch.complex64):
            with pytest.raises((polyhead.Error, TypeError, RuntimeError, NotImplementedError)):
                call(query.to(dtype), key.to(dtype), value.to(dtype))
        with pytest.raises(TypeError):
            call(query, None, value)


def test_float64_that_does_not_fit_does_not_reach_torchs_kernel():
    arguments = [torch.randn(shape, dtype=torch.float64) for shape in (QUERY, KEY, (2, 4, 900, 8))]
    with polyhead.torch.enabled(), pytest.raises(polyhead.Error, match="value"):
        F.scaled_dot_product_attention(*arguments)
    with polyhead.torch.enabled(), pytest.raises(polyhead.Error, match="key"):
        F.scaled_dot_product_attention(arguments[0], *[x[:, :0] for x in arguments[1:2] * 2], enable_gqa=True)


def test_the_report():
    polyhead.torch.report(reset=True)
    assert polyhead.torch.report() == [] and "no call" in str(polyhead.torch.report())
    query, key = draw(2, 4, 5, 8), draw(2, 2, 7, 8)
    with polyhead.torch.enabled():
        for _ in range(3):
            F.scaled_dot_product_attention(query, key, key, enable_gqa=True).sum().backward()
        F.scaled_dot_product_attention(*[draw(1, 2, 4, 8).double()] * 3)
    records = polyhead.torch.report()
    heads = draw(2, 5, 4, 8)
    kernel = polyhead.explain(heads, heads, heads).kernel
    assert [tuple(record) for record in records[:2]] == [
        ("attention_forward", "2x4/2x5/7x8", torch.float32, kernel, None, 3),
        ("attention_backward", "2x4/2x5/7x8", torch.float32, kernel, None, 3),
    ]
    assert records[2].op == "scaled_dot_product_attention" and records[2].kernel is None
    assert records[2].shape == "1x2x4x8" and "float64" in records[2].reason and records[2].dtype == torch.float64
    table = str(records).splitlines()
    assert table[0].split() == ["op", "shape", "dtype", "kernel", "count"] and len(table) == 1 + len(records)
    assert "not taken: float64" in str(records) and repr(records) == str(records)
    assert polyhead.torch.report(reset=True) == records and polyhead.torch.report() == []


@pytest.mark.parametrize("name", ["_report", "_sdpa", "_switch"])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"polyhead.torch.{name}"))
    assert result.attempted >= 3 and result.failed == 0


def test_the_report_keeps_within_bounds():
    from polyhead.torch import _report

    query = torch.zeros(1, 1, 1, 1)
    polyhead.torch.report(reset=True)
    for rows in range(_report.MAX_SHAPES + 5):
        _report.count_refused("test", f"{rows}", torch.float32, "test")
        _report.count_run("test", query.expand(1, rows, 1, 1), query, query)
    records = polyhead.torch.report(reset=True)
    assert len(records) == 2 * _report.MAX_SHAPES + 2
    assert [record.count for record in records if record.shape == "other"] == [5, 5]


def test_calls_from_many_threads_are_all_counted():
    arguments = [draw(1, 2, 8, 8) for _ in range(3)]
    expected = F.scaled_dot_product_attention(*arguments)

    def work():
        for _ in range(50):
            torch.testing.assert_close(F.scaled_dot_product_attention(*arguments), expected, rtol=1e-5, atol=1e-5)

    with counted() as records:
        threads = [threading.Thread(target=work) for _ in range(8)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    assert [(record.op, record.count) for record in records] == [("attention_forward", 400)]


@pytest.mark.parametrize("randomness", ["plain", "masked"])
def test_vmap(randomness):
    query, key, value = (torch.randn(3, 2, 4, s, 8) for s in (5, 7, 7))
    mask = torch.rand(5, 7) > 0.3 if randomness == "masked" else None

    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, mask)

    expected = torch.stack([call(*each) for each in zip(query, key, value)])
    with counted() as records:
        out = torch.vmap(call)(query, key, value)
        grads = torch.vmap(torch.func.grad(lambda *a: call(*a).sum(), argnums=(0, 1, 2)))(query, key, value)
    assert_taken(records, backward=True)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)
    leaves = [x.clone().requires_grad_() for x in (query, key, value)]
    expected_grads = torch.autograd.grad(call(*(x.flatten(0, 1) for x in leaves)).sum(), leaves)
    for got, wanted in zip(grads, expected_grads):
        torch.testing.assert_close(got, wanted, rtol=1e-4, atol=1e-5)


def test_func_grad():
    query, key, value = (torch.randn(2, 4, s, 8) for s in (5, 7, 7))

    def loss(*arguments):
        return F.scaled_dot_product_attention(*arguments, is_causal=True).square().sum()

    expected = torch.func.grad(loss, argnums=(0, 1, 2))(query, key, value)
    with counted() as records:
        got = torch.func.grad(loss, argnums=(0, 1, 2))(query, key, value)
    assert_taken(records, backward=True)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("options", [{}, {"is_causal": True}, {"attn_mask": torch.ones(5, 7).tril(2).bool()}])
def test_second_derivatives(options):
    """Which torch has on its math path alone."""

    def second():
        arguments = [draw(2, 4, s, 8) for s in (5, 7, 7)]
        out = F.scaled_dot_product_attention(*arguments, **options)
        first = torch.autograd.grad(out.square().sum(), arguments, create_graph=True)
        return torch.autograd.grad(sum(grad.square().sum() for grad in first), arguments)

    torch.manual_seed(0)
    with sdpa_kernel(SDPBackend.MATH):
        expected = second()
    torch.manual_seed(0)
    with polyhead.torch.enabled():
        got = second()
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


def test_forward_mode_is_torchs():
    query, tangent = torch.randn(2, 1, 4, 5, 8)

    def derivative():
        with sdpa_kernel([SDPBackend.MATH, SDPBackend.FLASH_ATTENTION]):
            return torch.func.jvp(lambda x: F.scaled_dot_product_attention(x, x, x), (query,), (tangent,))

    try:
        expected = derivative()
    except (NotImplementedError, RuntimeError) as error:
        with polyhead.torch.enabled(), pytest.raises(type(error)):
            derivative()
    else:
        with polyhead.torch.enabled():
            assert all(map(torch.equal, derivative(), expected))


def test_autocast():
    query = draw(2, 4, 5, 8)
    with torch.autocast("cpu", torch.bfloat16):
        expected = F.scaled_dot_product_attention(query, query, query)
        with counted() as records:
            out = F.scaled_dot_product_attention(query, query, query)
    assert out.dtype == expected.dtype == torch.bfloat16
    assert_taken(records, backward=False)
    assert records[0].dtype == torch.bfloat16
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)
    out.sum().backward()
    assert query.grad.dtype == torch.float32


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_without_autograd(mode):
    query = torch.randn(2, 4, 5, 8)
    expected = F.scaled_dot_product_attention(query, query, query, is_causal=True)
    with counted() as records, mode():
        out = F.scaled_dot_product_attention(query, query, query, is_causal=True)
        F.scaled_dot_product_attention(query, query, query, dropout_p=0.5)
    assert_taken(records, backward=False)
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=1e-5)


def test_scripted_functions_and_modules():
    @torch.jit.script
    def before(x):
        return torch.nn.functional.scaled_dot_product_attention(x, x, x)

    query = torch.randn(2, 4, 5, 8)
    expected = before(query)
    modules = [torch.nn.MultiheadAttention(16, 4), torch.nn.TransformerEncoderLayer(16, 4, 32, 0.0)]
    x = torch.randn(5, 2, 16)
    with counted() as records:
        torch.testing.assert_close(before(query), expected, rtol=1e-5, atol=1e-5)
        scripted = [torch.jit.script(module) for module in modules]
        wanted = [modules[0](x, x, x), modules[1](x)]
        torch.testing.assert_close(scripted[0](x, x, x), wanted[0], rtol=1e-5, atol=1e-5)
        torch.testing.assert_close(scripted[1](x), wanted[1], rtol=1e-5, atol=1e-5)
    assert_taken(records, backward=False)


def test_export_keeps_torchs_name():
    class Attend(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x)

    with polyhead.torch.enabled():
        program = torch.export.export(Attend(), (torch.randn(2, 4, 5, 8),))
    assert any("scaled_dot_product_attention" in str(node.target) for node in program.graph.nodes)
    assert not any("polyhead" in str(node.target) for node in program.graph.nodes)
