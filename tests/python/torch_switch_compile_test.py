"""torch.compile with the switch on: graphs of calls, forward and backward, and what Inductor takes for attention."""

import contextlib
import math
import subprocess
import sys

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from torch.nn import functional as F
from torch_switch_judge import SEED, assert_taken, counted

pytestmark = pytest.mark.filterwarnings("ignore")  # Inductor's, about itself


@pytest.fixture(autouse=True)
def fresh_graphs():
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def draw(*shape):
    return torch.randn(shape, requires_grad=True)


def results(function, arguments):
    torch.manual_seed(SEED)
    out = function(*arguments)
    return [out, *torch.autograd.grad(out.square().sum(), arguments)]


def assert_same(got, expected):
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=2e-4, atol=2e-5)


CALLS = {
    "plain": lambda q, k, v: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "grouped": lambda q, k, v: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "dropout": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, dropout_p=0.3),
    "bias with gradient": lambda q, k, v: F.scaled_dot_product_attention(q, k, v, attn_mask=q[..., :7] * 0.1),
    "narrow value": lambda q, k, v: F.scaled_dot_product_attention(q, k, v[..., :5]),
    "three dimensions": lambda q, k, v: F.scaled_dot_product_attention(q[0], k[0], v[0]),
}


# Inductor takes its time: two calls show that it takes what aot_eager takes.
@pytest.mark.parametrize(
    "name, backend", [*((name, "aot_eager") for name in CALLS), ("causal", "inductor"), ("dropout", "inductor")]
)
def test_calls(name, backend):
    torch.manual_seed(1)
    arguments = [draw(2, 4, 5, 8), draw(2, 4, 7, 8), draw(2, 4, 7, 8)]
    with counted():
        expected = results(CALLS[name], arguments)
    compiled = torch.compile(CALLS[name], backend=backend, fullgraph=True)
    with counted() as records:
        got = results(compiled, arguments)
    assert_taken(records, backward=True)
    if name == "dropout":
        with polyhead.torch.enabled():
            another = compiled(*arguments)
            torch.manual_seed(SEED)
            assert torch.equal(compiled(*arguments), got[0]) and not torch.equal(another, got[0])
    else:
        assert_same(got, expected)


def test_dynamic_sizes():
    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    compiled = torch.compile(call, backend="aot_eager", fullgraph=True, dynamic=True)
    with counted() as records:
        for seqlen in (5, 9, 16):
            arguments = [draw(2, 4, seqlen, 8) for _ in range(3)]
            assert_same(results(compiled, arguments), results(call, arguments))
    assert_taken(records, backward=True)


def test_a_packaged_program_computes_without_us(tmp_path):
    """AOTInductor's, made while the switch is on: torch's operators alone are in it."""

    class Attend(torch.nn.Module):
        def forward(self, x):
            return F.scaled_dot_product_attention(x, x, x, is_causal=True)

    x = torch.randn(2, 4, 5, 8)
    with torch.no_grad(), counted() as records:
        program = torch.export.export(Attend(), (x,))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "attend.pt2"))
    assert records and all(record.kernel is None and "export" in record.reason for record in records)
    torch.testing.assert_close(torch._inductor.aoti_load_package(path)(x), Attend()(x), rtol=1e-5, atol=1e-5)


def test_sizes_that_no_one_knows():
    """Unbacked sizes: fake kernels must not ask for them."""

    def call(x, rows):
        n = rows.item()
        torch._check(n >= 2)
        torch._check(n <= x.shape[2])
        y = x[:, :, :n]
        return F.scaled_dot_product_attention(y, y, y)

    x = torch.randn(2, 4, 9, 8)
    with torch._dynamo.config.patch(capture_scalar_outputs=True), counted() as records:
        compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
        for rows in (6, 7):
            torch.testing.assert_close(compiled(x, torch.tensor(rows)), call(x, torch.tensor(rows)))
    assert_taken(records, backward=False)


def test_written_out_attention_in_training():
    """What Inductor's patterns find: neither call nor operator of ours in the code, yet both kernels run."""

    def call(q, k, v):
        return (torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(8)).softmax(-1).matmul(v)

    arguments = [draw(2, 4, 16, 8) for _ in range(3)]
    expected = results(call, arguments)
    with counted() as records:
        got = results(torch.compile(call, fullgraph=True), arguments)
    assert_taken(records, backward=True)
    assert_same(got, expected)


def test_a_graph_made_before_follows_the_switch():
    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, is_causal=True)

    arguments = [draw(2, 4, 16, 8) for _ in range(3)]
    compiled = torch.compile(call, backend="aot_eager", fullgraph=True)
    expected = results(compiled, arguments)
    with counted() as records:
        got = results(compiled, arguments)
    assert_taken(records, backward=True)
    assert_same(got, expected)
    polyhead.torch.report(reset=True)
    assert all(map(torch.equal, results(compiled, arguments), expected))
    assert polyhead.torch.report(reset=True) == []


def test_tracing_follows_the_switch_to_and_fro():
    def call(q, k, v):
        return F.scaled_dot_product_attention(q, k, v, dropout_p=0.5)

    arguments = [draw(2, 4, 16, 8) for _ in range(3)]
    for turn in range(4):
        torch.compiler.reset()
        on = turn % 2 == 1
        polyhead.torch.report(reset=True)
        with polyhead.torch.enabled() if on else contextlib.nullcontext():
            results(torch.compile(call, backend="aot_eager", fullgraph=True), arguments)
        assert bool(polyhead.torch.report(reset=True)) == on


@pytest.mark.parametrize("need_weights", [False, True])
def test_multi_head_attention(need_weights):
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)

    def call(x):
        out, weights = module(x, x, x, need_weights=need_weights)
        return out if weights is None else out + weights.sum()

    x = draw(2, 5, 16)
    expected = results(call, [x])
    with counted() as records:
        got = results(torch.compile(call, backend="aot_eager", fullgraph=True), [x])
    assert_taken(records, backward=True)
    assert_same(got, expected)


ENABLED_BEFORE = """
import torch, polyhead.torch
polyhead.torch.enable()  # before Dynamo looks for torch's functions by their names
module, x = torch.nn.MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
call = torch.compile(lambda x: module(x, x, x)[1], backend="aot_eager", fullgraph=True)
call(x).square().sum().backward()
module.eval()
with torch.no_grad():
    call(x)
heads = torch.randn(2, 5, 4, 4)
assert {record.kernel for record in polyhead.torch.report()} == {polyhead.explain(heads, heads, heads).kernel}
"""


def test_returned_weights_where_the_switch_was_on_before_anything_was_compiled():
    subprocess.run([sys.executable, "-c", ENABLED_BEFORE], check=True)


def test_the_encoder_layer():
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, dropout=0.0, batch_first=True)
    x = draw(2, 5, 16)
    expected = results(layer, [x])
    with torch.no_grad():
        expected.append(layer.eval()(x))
    layer.train()
    with counted() as records:
        compiled = torch.compile(layer, backend="aot_eager")
        got = results(compiled, [x])
        with torch.no_grad():
            layer.eval()
            got.append(compiled(x))
    assert_taken(records, backward=True)
    assert_same(got, expected)
