"""The torch operators under torch's machineries: opcheck, compile, export, vmap, autocast, checkpoint, threads."""

import concurrent.futures
import subprocess
import sys

import pytest
from optional import needs_torch, torch

pytestmark = needs_torch
if torch is not None:
    from torch.library import opcheck
    from torch.utils.checkpoint import checkpoint

    import polyhead.torch
    from polyhead.torch._attention import _options as positional
    from polyhead.torch._options import NUM_SHARED
    from torch_cases import CASES, PACKED, problem, tensors
    from torch_ops_test import _attention_options, leaves, same_bits
else:
    CASES, PACKED = {}, []


def as_operator_arguments(operands, options):
    """The positional arguments of torch.ops.polyhead.attention_forward."""
    given = dict.fromkeys(_attention_options()) | {"causal": False, "softcap": 0.0, "dropout_p": 0.0, "normalizer": "softmax", "sink_keys": 0, "mask_at_end": False}
    given["dropout_offset"] = 0
    return (*operands, *positional(operands[0], **given | options))


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("requires_grad", [False, True])
def test_opcheck_forward(case, requires_grad):
    operands, options = problem(case)
    if requires_grad:
        leaves(operands, options)
    if case == "mask":
        options |= {"return_weights": True, "return_column_sums": True}
    opcheck(torch.ops.polyhead.attention_forward.default, as_operator_arguments(operands, options))


@pytest.mark.parametrize("case", CASES)
def test_opcheck_backward(case):
    operands, options = problem(case)
    out, logsumexp = polyhead.torch.attention(*operands, **options, return_logsumexp=True)
    needs = 7 + 8 * ("attn_bias" in options) + 16 * ("alibi_slopes" in options) + 32 * ("sink_logits" in options)
    arguments = (torch.randn_like(out), None, *operands, out, logsumexp, needs)
    rest = as_operator_arguments(operands, options)[3 : 3 + NUM_SHARED]
    opcheck(torch.ops.polyhead.attention_backward.default, (*arguments, *rest))


@pytest.mark.parametrize("case", ["plain", "causal", "scale"])
def test_opcheck_below_autograd(case):
    operands, options = problem(case)
    out, logsumexp = polyhead.torch.attention(*operands, **options, return_logsumexp=True)
    given = (options.get("causal", False), options.get("scale"), 2)
    checks = ("test_schema", "test_faketensor")  # autograd is what these leave to their caller
    for layout in (0, 2):
        if layout:
            *operands, out = (each.transpose(1, 2) for each in (*operands, out))
        arguments = (*operands, *given, layout)
        opcheck(torch.ops.polyhead.attention_forward.below_autograd, arguments, test_utils=checks)
        opcheck(torch.ops.polyhead.attention_forward.inference, arguments, test_utils=checks)
        arguments = (out, *operands, out, logsumexp, 5, *given, layout)
        opcheck(torch.ops.polyhead.attention_backward.below_autograd, arguments, test_utils=checks)


def test_opcheck_merge_and_dropout():
    outs, logsumexps = tensors((2, 5, 4, 6), (2, 5, 4, 6)), tensors((2, 4, 5), (2, 4, 5))
    opcheck(torch.ops.polyhead.merge_forward.default, (outs, logsumexps))
    merged = torch.ops.polyhead.merge_forward(outs, logsumexps)
    opcheck(torch.ops.polyhead.merge_backward.default, (outs[0], None, outs, logsumexps, *merged))
    opcheck(torch.ops.polyhead.dropout_mask.default, (torch.tensor(3), 0.5, 0, 1, 2, 3, 4))


@pytest.mark.parametrize("dynamic", [False, True])
@pytest.mark.parametrize("case", CASES)
def test_compile_fullgraph(case, dynamic):
    operands, options = problem(case)
    inputs = leaves(operands, options)

    def step(query, key, value):
        return polyhead.torch.attention(query, key, value, **options, return_logsumexp=True)

    expected = step(*operands)
    expected_grads = torch.autograd.grad(expected[0].sum() + expected[1].nan_to_num(neginf=0).sum(), [*inputs.values()])
    torch._dynamo.reset()
    got = torch.compile(step, fullgraph=True, backend="aot_eager", dynamic=dynamic)(*operands)
    grads = torch.autograd.grad(got[0].sum() + got[1].nan_to_num(neginf=0).sum(), [*inputs.values()])
    for one, other in zip((*got, *grads), (*expected, *expected_grads)):
        same_bits(one, other)


@pytest.mark.parametrize("asked", ["weights", "mean", "kernel", "merge", "backward"])
def test_compile_of_the_rest(asked):
    """Returned weights with their gradients, a kernel by name, merge, and attention_backward itself."""

    def step(query, key, value):
        if asked == "kernel":
            return polyhead.torch.attention(query, key, value, kernel="reference")
        if asked == "merge":
            first, second = slice(0, 2), slice(2, 7)
            pairs = [
                polyhead.torch.attention(query, key[:, c], value[:, c], return_logsumexp=True) for c in (first, second)
            ]
            return polyhead.torch.merge(*zip(*pairs))[0]
        if asked == "backward":
            out, logsumexp = polyhead.torch.attention(query, key, value, return_logsumexp=True)
            return polyhead.torch.attention_backward(out, query, key, value, out, logsumexp)["key"]
        options = {"return_weights": asked if asked == "mean" else True, "dropout_p": 0.3, "dropout_seed": 3}
        return polyhead.torch.attention(query, key, value, **options)[1]

    operands, options = problem("plain")
    inputs = list(leaves(operands, options).values())
    torch._dynamo.reset()
    results = [each(*operands) for each in (step, torch.compile(step, fullgraph=True, backend="aot_eager"))]
    torch.testing.assert_close(results[1], results[0])
    grads = [torch.autograd.grad(each.square().sum(), inputs, allow_unused=True) for each in results]
    torch.testing.assert_close(grads[1], grads[0])


def test_compiled_checkpoint_with_dropout_has_its_own_gradient():
    """By difference: torch.compile draws other seeds than eager code."""
    query = tensors((1, 4, 2, 8))[0]
    direction = tensors((1, 4, 2, 8), seed=1)[0]

    @torch.compile(fullgraph=True)
    def step(query):
        return checkpoint(lambda q: polyhead.torch.attention(q, q, q, dropout_p=0.5).sin(), query, use_reentrant=False)

    def loss(query):
        torch.manual_seed(0)
        return step(query.requires_grad_()).double().sum()

    (grad,) = torch.autograd.grad(loss(query), query)
    with torch.no_grad():
        ends = [query + step_size * direction for step_size in (1e-2, -1e-2)]
    difference = (loss(ends[0]) - loss(ends[1])) / 2e-2
    torch.testing.assert_close(difference.float(), (grad * direction).sum(), rtol=2e-2, atol=2e-2)


def test_inductor_draws_a_new_seed_for_each_call_and_backward_uses_it():
    query = torch.ones(1, 32, 2, 16)
    value = torch.eye(32).repeat(1, 1, 2).view(1, 32, 2, 32).clone().requires_grad_()

    @torch.compile(fullgraph=True)
    def weights(value):
        return polyhead.torch.attention(query, query, value, dropout_p=0.5)

    first, second = weights(value), weights(value)
    assert not torch.equal(first, second)
    torch.manual_seed(4)
    third = weights(value)
    torch.manual_seed(4)
    assert torch.equal(third, weights(value))
    (grad,) = torch.autograd.grad(third, value, torch.eye(32).view(1, 32, 1, 32).expand(1, 32, 2, 32))
    # The loss is the trace of each head's weights, so value's gradient is the weights, transposed.
    torch.testing.assert_close(grad.transpose(1, 3), third)


def test_compile_with_sizes_known_at_run_time_only():
    def step(keep, query, key):
        rows = keep.nonzero().squeeze(1)  # as many as the data say
        chosen = key[:, rows]
        return polyhead.torch.attention(query, chosen, chosen, causal=True, align="bottom_right")

    keep, (query, key) = torch.arange(9) % 2, tensors((1, 3, 2, 8), (1, 9, 2, 8))
    with torch._dynamo.config.patch(capture_dynamic_output_shape_ops=True):
        torch._dynamo.reset()
        got = torch.compile(step, fullgraph=True, backend="aot_eager")(keep, query, key)
    same_bits(got, step(keep, query, key))


@pytest.mark.parametrize("strict", [False, True])
def test_export(strict):
    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = torch.nn.Parameter(tensors((8, 8))[0])

        def forward(self, query, key):
            return polyhead.torch.attention(query @ self.weight, key, key, causal=True, align="top_left")

    layer = Layer()
    query, key = tensors((2, 5, 4, 8), (2, 7, 4, 8))
    rows = torch.export.Dim("rows", min=2, max=64)
    exported = torch.export.export(layer, (query, key), dynamic_shapes=({1: rows}, None), strict=strict)
    assert "polyhead.attention_forward" in str(exported.graph)
    longer = tensors((2, 9, 4, 8))[0]
    same_bits(exported.module()(longer, key), layer(longer, key))


def test_a_packaged_program(tmp_path):
    """AOTInductor's, with results that nobody asked for."""

    class Layer(torch.nn.Module):
        def forward(self, query, key):
            out, weights = polyhead.torch.attention(query, key, key, return_weights=True)
            return polyhead.torch.attention(out, key, key, causal=True, align="top_left", kernel="reference"), weights

    query, key = tensors((2, 5, 4, 8), (2, 7, 4, 8))
    with torch.no_grad():
        program = torch.export.export(Layer(), (query, key))
        path = torch._inductor.aoti_compile_and_package(program, package_path=str(tmp_path / "layer.pt2"))
        for one, other in zip(torch._inductor.aoti_load_package(path)(query, key), Layer()(query, key), strict=True):
            same_bits(one, other)


class ByName(torch.nn.Module if torch is not None else object):
    """Attention and its gradient by a kernel that is named."""

    def forward(self, query, key):
        out, logsumexp = polyhead.torch.attention(query, key, key, return_logsumexp=True, kernel="reference")
        return polyhead.torch.attention_backward(out, query, key, key, out, logsumexp, kernel="reference")["key"]


def test_an_exported_program_holds_its_kernels_name(tmp_path):
    """Not its number among the kernels of the machine that exported it."""
    query, key = tensors((2, 5, 4, 8), (2, 7, 4, 8))
    torch.export.save(torch.export.export(ByName(), (query, key)), tmp_path / "program.pt2")
    program = torch.export.load(tmp_path / "program.pt2")
    calls = [node for node in program.graph.nodes if "polyhead" in str(node.target)]
    assert len(calls) == 2 and all("reference" in node.args for node in calls)
    polyhead.torch.report(reset=True)
    same_bits(program.module()(query, key), ByName()(query, key))
    assert {record.kernel for record in polyhead.torch.report(reset=True)} == {"reference"}


@pytest.mark.parametrize("name, sentence", [
    ("cpu_of_tomorrow", "kernel is cpu_of_tomorrow, known are"), ("", 'kernel is "", must be a name'),
    ("reference\0", 'kernel is "?reference'),
])  # fmt: skip
@pytest.mark.parametrize("direction", ["forward", "backward"])
def test_a_program_whose_kernel_is_not_here_is_refused_by_name(direction, name, sentence):
    query, key = tensors((2, 5, 4, 8), (2, 7, 4, 8))
    program = torch.export.export(ByName(), (query, key))
    (call,) = [node for node in program.graph.nodes if f"attention_{direction}" in str(node.target)]
    call.args = tuple(name if each == "reference" else each for each in call.args)
    with pytest.raises((polyhead.Error, ValueError, RuntimeError), match=sentence):
        program.module()(query, key)


def mapped_options(options):
    """The options that have one element of each of the mapped calls' own."""
    return {name: torch.stack([x, x]) for name, x in options.items() if name in ("attn_bias", "alibi_slopes", "sink_logits")}


@pytest.mark.parametrize("case", [case for case in CASES if case not in PACKED])
def test_vmap(case):
    calls = [problem(case), problem(case)]
    calls[1][0][0].neg_()
    options = calls[0][1]
    query = torch.stack([operands[0] for operands, _ in calls], -1)  # mapped over the last dimension
    (_, key, value), mapped = calls[0][0], mapped_options(options)

    def one(query, mapped):
        return polyhead.torch.attention(query, key, value, **options | mapped, return_logsumexp=True)

    got = torch.vmap(one, in_dims=(-1, 0))(query, mapped)
    for i, (operands, _) in enumerate(calls):
        for each, expected in zip(got, polyhead.torch.attention(*operands, **options, return_logsumexp=True)):
            same_bits(each[i], expected)


@pytest.mark.parametrize("case", ["plain", "bias_heads", "slopes", "dropout", "packed"])
def test_gradients_of_each_sample(case):
    """vmap over grad, as per-sample gradients are taken; and grad over vmap."""
    operands, options = problem(case)
    batch = [torch.stack([each, -each]) for each in operands]

    def loss(query, key, value):
        return polyhead.torch.attention(query, key, value, **options).square().sum()

    got = torch.vmap(torch.func.grad(loss, argnums=(0, 1, 2)))(*batch)
    whole = torch.func.grad(lambda *all: torch.vmap(loss)(*all).sum(), argnums=(0, 1, 2))(*batch)
    for i in range(2):
        inputs = [each[i].clone().requires_grad_() for each in batch]
        for grads in (got, whole):
            expected = torch.autograd.grad(loss(*inputs), inputs)
            torch.testing.assert_close([each[i] for each in grads], list(expected))


def test_jacobian_and_hessian_by_transforms():
    query, key, value = tensors((1, 2, 1, 3), (1, 3, 1, 3), (1, 3, 1, 2), dtype=torch.float64)

    def function(query):
        return polyhead.torch.attention(query, key, value).square().sum()

    expected = torch.autograd.functional.hessian(function, query)
    torch.testing.assert_close(torch.func.jacrev(torch.func.jacrev(function))(query), expected)


def test_forward_mode_is_refused_by_name():
    query = tensors((1, 2, 1, 3))[0]
    with pytest.raises(RuntimeError, match="jvp"):
        torch.func.jvp(lambda q: polyhead.torch.attention(q, query, query), (query,), (query,))
    with torch.autograd.forward_ad.dual_level(), pytest.raises(RuntimeError, match="jvp"):
        polyhead.torch.attention(torch.autograd.forward_ad.make_dual(query, query), query, query)


@pytest.mark.parametrize("compiled", [False, True])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast(dtype, compiled):
    operands, options = problem("bias_heads")
    inputs = leaves(operands, options)

    def step(query, key, value):
        return polyhead.torch.attention(query, key, value, **options)

    if compiled:
        torch._dynamo.reset()
        step = torch.compile(step, fullgraph=True, backend="aot_eager")
    with torch.autocast("cpu", dtype=dtype):
        out = step(*operands)
    grads = torch.autograd.grad(out.sum(), list(inputs.values()))
    casts = [each.detach().to(dtype) for each in operands]
    same_bits(out, polyhead.torch.attention(*casts, **options))
    assert all(grad.dtype == tensor.dtype for grad, tensor in zip(grads, inputs.values()))
    with torch.autocast("cpu", dtype=dtype):
        doubles = [each.detach().double() for each in operands]
        assert polyhead.torch.attention(*doubles).dtype == torch.float64  # as torch's own attention


def test_inference_mode():
    operands, options = problem("causal")
    with torch.inference_mode():
        out = polyhead.torch.attention(*operands, **options)
    assert out.is_inference()
    same_bits(out.clone(), polyhead.torch.attention(*operands, **options))


def test_meta_device():
    operands, _ = problem("plain")
    out, logsumexp = polyhead.torch.attention(*(each.to("meta") for each in operands), return_logsumexp=True)
    assert out.is_meta and out.shape == (2, 5, 4, 6) and logsumexp.shape == (2, 4, 5)


def test_seeds_come_from_torchs_generator():
    (query, key, value), _ = problem("plain")
    calls = []
    for seed in (1, 1, 2):
        torch.manual_seed(seed)
        calls += [polyhead.torch.attention(query, key, value, dropout_p=0.5) for _ in range(2)]
    assert torch.equal(calls[0], calls[2]) and torch.equal(calls[1], calls[3])
    assert not torch.equal(calls[0], calls[1]) and not torch.equal(calls[0], calls[4])
    state = torch.get_rng_state()
    polyhead.torch.attention(query, key, value, dropout_p=0.5, dropout_seed=7)
    polyhead.torch.attention(query, key, value)
    assert torch.equal(state, torch.get_rng_state())


def test_the_seed_is_on_the_cpu_whatever_the_default_device():
    operands, _ = problem("plain")
    with torch.device("meta"):
        for options in ({}, {"dropout_seed": 3}):
            assert polyhead.torch.attention(*operands, dropout_p=0.5, **options).device.type == "cpu"


@pytest.mark.parametrize("use_reentrant", [False, True])
def test_checkpoint_replays_the_mask(use_reentrant):
    operands, _ = problem("plain")
    inputs = [each.requires_grad_() for each in operands]

    def step(*operands):
        return polyhead.torch.attention(*operands, dropout_p=0.5)

    torch.manual_seed(3)
    expected = torch.autograd.grad(step(*inputs).square().sum(), inputs)
    torch.manual_seed(3)
    checkpoint(step, *inputs, use_reentrant=use_reentrant).square().sum().backward()
    for tensor, grad in zip(inputs, expected):
        same_bits(tensor.grad, grad)


def test_saved_tensors_are_watched():
    """What backward needs and somebody wrote to is an error, the options' tensors too."""
    operands, options = problem("bias")
    leaves(operands, {})
    out = polyhead.torch.attention(*operands, **options)
    options["attn_bias"].zero_()
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        out.sum().backward()


def test_8_threads_at_once():
    names = ["plain", "everything", "packed", "lengths"]
    expected = {}

    def step(name):
        operands, options = problem(name)
        inputs = leaves(operands, options)
        out = polyhead.torch.attention(*operands, **options)
        return [out, *torch.autograd.grad(out.sum(), list(inputs.values()))]

    for name in names:
        expected[name] = step(name)
    with concurrent.futures.ThreadPoolExecutor(8) as pool:
        for name, results in zip(names * 50, pool.map(step, names * 50)):
            for one, other in zip(results, expected[name], strict=True):
                same_bits(one, other)


def test_the_number_of_torchs_threads_changes_no_bit():
    operands = [each.requires_grad_() for each in tensors((2, 300, 4, 32), (2, 300, 4, 32), (2, 300, 4, 32))]
    before, results = torch.get_num_threads(), []
    try:
        for count in (1, 2, 5):
            torch.set_num_threads(count)
            out = polyhead.torch.attention(*operands, causal=True)
            results.append([out, *torch.autograd.grad(out.sum(), operands)])
    finally:
        torch.set_num_threads(before)
    for each in results[1:]:
        for one, other in zip(each, results[0]):
            same_bits(one, other)


NO_THREADS = """
import os, torch, polyhead.torch
torch.set_num_threads(1)
query = torch.ones(4, 512, 8, 64)
before = len(os.listdir("/proc/self/task"))
polyhead.torch.attention(query, query, query)
print(len(os.listdir("/proc/self/task")) - before)
"""


def test_one_torch_thread_is_one_thread():
    if polyhead.torch.implementation() == "Python":
        pytest.skip("over the binding calls run on polyhead's own threads")
    run = subprocess.run([sys.executable, "-c", NO_THREADS], capture_output=True, text=True, check=True)
    assert run.stdout.strip() == "0"


def test_profilers_show_the_operators():
    operands, options = problem("causal")
    leaves(operands, options)
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        polyhead.torch.attention(*operands, **options).sum().backward()
    names = {event.key for event in profile.key_averages()}
    assert {"polyhead::attention_forward", "polyhead::attention_backward"} <= names


def test_importing_polyhead_does_not_import_torch():
    subprocess.run([sys.executable, "-c", "import sys, polyhead; assert 'torch' not in sys.modules"], check=True)
