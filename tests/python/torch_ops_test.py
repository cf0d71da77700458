"""polyhead.torch.attention: polyhead.attention's results and gradients, bit for bit, and their derivatives."""

import doctest
import inspect
import itertools
import os
import re
import subprocess
import sys

import pytest
from optional import needs_torch, torch

import polyhead

pytestmark = needs_torch
if torch is not None:
    import polyhead.torch
    from polyhead.torch import _composition, _options
    from polyhead.torch._attention import _options as positional
    from torch_cases import CASES, problem, tensors

    DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float64]
else:
    CASES, DTYPES = {}, []

cases = pytest.mark.parametrize("case", CASES)
DIFFERENTIABLE = ("query", "key", "value", "attn_bias", "alibi_slopes", "sink_logits")


def same_bits(got, expected):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    assert torch.equal(torch.nan_to_num(got), torch.nan_to_num(expected))
    assert torch.equal(got.isnan(), expected.isnan())


def leaves(operands, options, needs=DIFFERENTIABLE):
    """The differentiable inputs by name; those that `needs` names require a gradient from now on."""
    inputs = dict(zip(("query", "key", "value"), operands))
    inputs |= {name: options[name] for name in DIFFERENTIABLE[3:] if name in options}
    for name, tensor in inputs.items():
        tensor.requires_grad_(name in needs)
    return inputs


def test_which_implementation():
    asked = os.environ.get("POLYHEAD_TORCH_OPS")
    assert polyhead.torch.implementation() in ("C++", "Python")
    assert asked != "python" or polyhead.torch.implementation() == "Python"


@pytest.mark.skipif(os.environ.get("POLYHEAD_TORCH_OPS") == "python", reason="this is the run over the binding")
def test_everything_again_over_the_python_binding():
    """The same tests where no compiled operators are: a third of the cases of each, and what Inductor compiles for long
    not again; all of it under --full."""
    folder = os.path.dirname(__file__)
    every, left_out = ("1", "") if "POLYHEAD_TEST_FULL" in os.environ else ("3", "packaged_program or compiled_checkpoint")
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__,
         os.path.join(folder, "torch_ops_machinery_test.py"), *(["-k", f"not ({left_out})"] if left_out else [])],
        env=os.environ | {"POLYHEAD_TORCH_OPS": "python", "POLYHEAD_TEST_CASES_EVERY": every}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 150


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_forward_is_polyheads(case, dtype):
    operands, options = problem(case, dtype)
    packed = "cu_seqlens_q" in options
    asked = {"return_logsumexp": True} | ({} if packed else {"return_weights": True, "return_column_sums": True})
    expected = polyhead.attention(*operands, **options, **asked)
    got = polyhead.torch.attention(*operands, **options, **asked, kernel=None)
    same_bits(polyhead.torch.attention(*operands, **options), expected[0])
    with torch.no_grad():  # else the weights come with a gradient, out of torch's operations
        for one, other in zip(polyhead.torch.attention(*operands, **options, **asked), expected, strict=True):
            same_bits(one, other)
            assert one.is_contiguous()
    if not packed:
        torch.testing.assert_close(got[2], expected[2])


@cases
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_gradients_are_polyheads(case, dtype):
    operands, options = problem(case, dtype)
    out, logsumexp = polyhead.attention(*operands, **options, return_logsumexp=True)
    grad_out, grad_logsumexp = tensors(out.shape, logsumexp.shape, dtype=dtype, seed=9)
    grad_logsumexp = grad_logsumexp.to(logsumexp.dtype)
    inputs = leaves(operands, options)
    expected = polyhead.attention_backward(
        grad_out, *operands, out, logsumexp, **options, grad_logsumexp=grad_logsumexp, needs=list(inputs)
    )
    results = polyhead.torch.attention(*operands, **options, return_logsumexp=True)
    grads = torch.autograd.grad(results, list(inputs.values()), (grad_out, grad_logsumexp))
    for name, grad in zip(inputs, grads):
        same_bits(grad, expected[name])
    again = polyhead.torch.attention_backward(
        grad_out, *operands, out, logsumexp, **options, grad_logsumexp=grad_logsumexp, needs=list(inputs)
    )
    assert list(again) == list(inputs)
    for name, grad in again.items():
        same_bits(grad, expected[name])


def test_every_subset_of_what_requires_a_gradient():
    for count in range(6):
        for needs in itertools.combinations(DIFFERENTIABLE, count):
            operands, options = problem("everything")
            inputs = leaves(operands, options)
            polyhead.torch.attention(*operands, **options).sum().backward()
            expected = {name: tensor.grad for name, tensor in inputs.items()}
            operands, options = problem("everything")
            inputs = leaves(operands, options, needs)
            out = polyhead.torch.attention(*operands, **options)
            assert out.requires_grad == bool(needs)
            if needs:
                out.sum().backward()
            for name, tensor in inputs.items():
                if name in needs:
                    torch.testing.assert_close(tensor.grad, expected[name])
                else:
                    assert tensor.grad is None


def test_gradients_from_logsumexp_alone_and_from_nothing():
    operands, options = problem("causal")
    inputs = leaves(operands, options)
    out, logsumexp = polyhead.torch.attention(*operands, **options, return_logsumexp=True)
    grads = torch.autograd.grad(logsumexp.sum(), list(inputs.values()), allow_unused=True)
    assert grads[0].abs().sum() > 0 and grads[2].abs().sum() == 0
    out.detach_()


def in_float64(case):
    """(function of the differentiable inputs, these): out and logsumexp, or out alone where a row sees no key."""
    operands, options = problem(case, torch.float64)
    inputs = leaves(operands, options)

    def function(*tensors):
        given = dict(zip(inputs, tensors))
        operands = [given.pop(name) for name in ("query", "key", "value")]
        out, logsumexp = polyhead.torch.attention(*operands, **options | given, return_logsumexp=True)
        return out, torch.where(logsumexp.isinf(), 0.0, logsumexp)

    return function, tuple(inputs.values())


@cases
@pytest.mark.filterwarnings("ignore:Input #:UserWarning")  # that slopes are float32
def test_gradcheck(case):
    function, inputs = in_float64(case)
    # ALiBi's slopes are float32, so their differences need a larger step.
    eps, atol = (1e-3, 1e-4) if any(each.dtype == torch.float32 for each in inputs) else (1e-6, 1e-6)
    assert torch.autograd.gradcheck(function, inputs, eps=eps, atol=atol, fast_mode=False)


@pytest.mark.parametrize("case", [case for case in CASES if "slopes" not in case and case != "everything"])
def test_second_derivatives(case):
    function, inputs = in_float64(case)
    assert torch.autograd.gradgradcheck(function, inputs, atol=1e-5, fast_mode=True)


@cases
def test_third_way_to_the_gradients(case):
    """The composition, which gives the second derivatives, has the gradients themselves right."""
    operands, options = problem(case, torch.float64)
    out, logsumexp = polyhead.torch.attention(*operands, **options, return_logsumexp=True)
    grad_out, grad_logsumexp = tensors(out.shape, logsumexp.shape, dtype=torch.float64, seed=9)
    arguments = dict.fromkeys(_attention_options()) | {"normalizer": "softmax", "sink_keys": 0, "mask_at_end": False} | options
    inputs = leaves(operands, options, ())
    expected = polyhead.torch.attention_backward(
        grad_out, *operands, out, logsumexp, **options, grad_logsumexp=grad_logsumexp, needs=list(inputs)
    )
    for name in ("causal", "softcap", "dropout_p", "dropout_offset"):
        arguments[name] = arguments[name] or 0
    bits = sum(1 << DIFFERENTIABLE.index(name) for name in inputs)
    got = _composition.attention_backward(
        grad_out, grad_logsumexp, *operands, out, logsumexp, *(options.get(name) for name in DIFFERENTIABLE[3:]), (), bits, positional(operands[0], **arguments),
    )  # fmt: skip
    for name, grad in expected.items():
        torch.testing.assert_close(got[DIFFERENTIABLE.index(name)], grad)


def _attention_options():
    names = inspect.signature(polyhead.attention).parameters
    others = ("query", "key", "value", "out", "device", "stream", "score", "mask", "captured", "key_scales", "value_scales")
    return [name for name in names if not name.startswith("return_") and name not in others]


@pytest.mark.parametrize("mean", [True, "mean"], ids=str)
@pytest.mark.parametrize("case", ["plain", "everything", "lengths", "mask"])
def test_gradients_through_weights(case, mean):
    operands, options = problem(case, torch.float64)
    inputs = leaves(operands, {name: x for name, x in options.items() if name != "alibi_slopes"})

    def function(*tensors):
        given = dict(zip(inputs, tensors))
        operands = [given.pop(name) for name in ("query", "key", "value")]
        return polyhead.torch.attention(*operands, **options | given, return_weights=mean)

    assert torch.autograd.gradcheck(function, tuple(inputs.values()), fast_mode=True)
    with torch.no_grad():
        expected = polyhead.torch.attention(*operands, **options, return_weights=mean)[1]
    torch.testing.assert_close(function(*inputs.values())[1], expected)


def test_column_sums_have_no_gradient():
    operands, options = problem("plain")
    leaves(operands, options)
    out, sums = polyhead.torch.attention(*operands, return_column_sums=True)
    assert out.requires_grad and not sums.requires_grad


def test_expanded_gradients_and_transposed_operands():
    heads_first = tensors((2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 6))
    for tensor in heads_first:
        tensor.requires_grad_()
    polyhead.torch.attention(*(each.transpose(1, 2) for each in heads_first)).sum().backward()
    copies = [each.detach().transpose(1, 2).contiguous().requires_grad_() for each in heads_first]
    out = polyhead.torch.attention(*copies)
    out.backward(torch.ones_like(out))
    for one, other in zip(heads_first, copies):
        same_bits(one.grad.transpose(1, 2), other.grad)


@pytest.mark.parametrize("sizes", list(itertools.product((0, 2), repeat=6)), ids=str)
def test_sizes_of_zero(sizes):
    batch, seqlen_q, seqlen_k, heads, dim, dim_v = sizes
    operands = tensors((batch, seqlen_q, heads, dim), (batch, seqlen_k, heads, dim), (batch, seqlen_k, heads, dim_v))
    inputs = leaves(operands, {})
    out, logsumexp = polyhead.torch.attention(*operands, return_logsumexp=True)
    assert out.shape == (batch, seqlen_q, heads, dim_v) and logsumexp.shape == (batch, heads, seqlen_q)
    assert seqlen_k or (torch.all(out == 0) and torch.all(logsumexp == -float("inf")))
    out.sum().backward()
    for tensor in inputs.values():
        assert tensor.grad.shape == tensor.shape and not tensor.grad.isnan().any()


def test_hidden_rows_give_no_gradient_whatever_they_hold():
    operands, options = problem("lengths")
    operands[0][1, 2:], operands[1][0], operands[2][0] = float("nan"), float("nan"), float("inf")
    inputs = leaves(operands, options)
    out = polyhead.torch.attention(*operands, **options)
    out.sum().backward()
    assert not out.isnan().any()
    assert all(not tensor.grad.isnan().any() for tensor in inputs.values())


def test_padding_may_hold_nan_in_what_torch_computes_too():
    """Second derivatives, and gradients through returned weights."""
    operands, options = problem("lengths")
    operands[0][1, 2:], operands[1][0], operands[2][1, 6:] = float("nan"), float("nan"), float("inf")
    inputs = list(leaves(operands, options).values())
    out, weights = polyhead.torch.attention(*operands, **options, return_weights=True)
    first = torch.autograd.grad(out.square().sum() + weights.square().sum(), inputs, create_graph=True)
    second = torch.autograd.grad(sum(grad.square().sum() for grad in first), inputs)
    assert not out.isnan().any() and not weights.isnan().any()
    assert all(not grad.isnan().any() for grad in (*first, *second))


def test_visible_nan_stays_visible_in_weights_with_gradients():
    operands, _ = problem("plain")
    operands[0][1, 2, 0, 0] = float("nan")
    expected = polyhead.torch.attention(*operands, return_weights=True)[1]
    inputs = list(leaves(operands, {}).values())
    weights = polyhead.torch.attention(*operands, return_weights=True)[1]
    assert expected[1, 0, 2].isnan().all() and torch.equal(weights.isnan(), expected.isnan())
    assert torch.autograd.grad(weights.sum(), inputs, allow_unused=True)[0][1, 2, 0].isnan().all()


def parts(count=3, dtype=None):
    query, key, value = tensors((2, 5, 4, 8), (2, 9, 4, 8), (2, 9, 4, 6), dtype=dtype)
    cuts = [slice(at, at + 3) for at in range(0, 3 * count, 3)]
    pairs = [polyhead.torch.attention(query, key[:, c], value[:, c], return_logsumexp=True) for c in cuts]
    return (query, key, value), [out for out, _ in pairs], [logsumexp for _, logsumexp in pairs]


def test_merge():
    whole, outs, logsumexps = parts()
    out, logsumexp = polyhead.torch.merge(outs, logsumexps)
    expected = polyhead.torch.attention(*whole, return_logsumexp=True)
    torch.testing.assert_close((out, logsumexp), expected)
    for one, other in zip((out, logsumexp), polyhead.merge(outs, logsumexps)):
        same_bits(one, other)


def test_merge_gradcheck():
    _, outs, logsumexps = parts(dtype=torch.float64)
    inputs = [each.requires_grad_() for each in (*outs, *logsumexps)]
    function = lambda *all: polyhead.torch.merge(all[:3], all[3:])  # noqa: E731
    assert torch.autograd.gradcheck(function, inputs, fast_mode=True)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)
    cotangents = tensors((2, 5, 4, 6), (2, 4, 5), dtype=torch.float64)
    expected = torch.autograd.grad(function(*inputs), inputs, cotangents)
    torch.testing.assert_close(torch.func.vjp(function, *inputs)[1](tuple(cotangents)), expected)


def test_merge_of_parts_that_see_nothing():
    _, outs, logsumexps = parts()
    outs[1][0], logsumexps[1][0] = float("nan"), -float("inf")
    for each in logsumexps:
        each[1, :, 2] = -float("inf")
    inputs = [each.requires_grad_() for each in (*outs, *logsumexps)]
    out, logsumexp = polyhead.torch.merge(outs, logsumexps)
    assert not out.isnan().any() and torch.all(out[1, 2] == 0) and torch.all(logsumexp[1, :, 2] == -float("inf"))
    visible = torch.where(logsumexp.isinf(), 0.0, logsumexp)
    for create_graph in (False, True):  # by the kernel, and by torch's operations
        grads = torch.autograd.grad(out.sum() + visible.sum(), inputs, retain_graph=True, create_graph=create_graph)
        assert all(not grad.isnan().any() for grad in grads) and torch.all(grads[1][0] == 0)


def test_signatures_are_polyheads():
    for name in ("attention", "attention_backward", "merge"):
        ours, theirs = (inspect.signature(getattr(module, name)).parameters for module in (polyhead.torch, polyhead))
        assert [(each.name, each.kind, each.default) for each in ours.values()] == [
            (each.name, each.kind, each.default)
            for each in theirs.values()
            if each.name not in ("into", "accumulate", "grad_dtype", "device", "stream")
            and (name, each.name) != ("attention", "out")  # autograd makes its results itself
        ]


def test_docstrings():
    from polyhead.torch import _attention

    result = doctest.testmod(_attention)
    assert result.attempted >= 5 and result.failed == 0


def test_options_match_the_schemas():
    polyhead_ops, defaults = torch.ops.polyhead, _options.AllOptions()
    for forward, backward, options in (
        (polyhead_ops.attention_forward.default, polyhead_ops.attention_backward.default, defaults[: _options.PROGRAM]),
        (polyhead_ops.attention_forward.program, polyhead_ops.attention_backward.program, defaults),
    ):
        fields = _options.AllOptions._fields[: len(options)]
        assert tuple(each.name for each in forward._schema.arguments[3:]) == fields
        assert tuple(each.name for each in backward._schema.arguments[8:]) == _options.for_backward(fields)
        for argument, default in zip(forward._schema.arguments[3:], options):
            assert argument.has_default_value() or len(options) > _options.PROGRAM
            assert not argument.has_default_value() or argument.default_value == default
    names = [each.name.removeprefix("grad_") for each in polyhead_ops.attention_backward.program._schema.returns]
    assert tuple(names) == _options.DIFFERENTIABLE


REFUSED = {
    "longer_value": (lambda q, k, v: (q, k, torch.cat([v, v], 1)), {}, "value dim 1 is 14"),
    "no_kv_heads": (lambda q, k, v: (q, k[:, :, :0], v[:, :, :0]), {}, "num_heads_kv is 0"),
    "heads": (lambda q, k, v: (q[:, :, :3], k, v), {}, "num_heads_kv is 2"),
    "dtypes": (lambda q, k, v: (q, k.double(), v), {}, "key is"),
    "dims": (lambda q, k, v: (q, k[0], v), {}, "key has 3 dimensions"),
    "integers": (lambda q, k, v: (q.int(), k.int(), v.int()), {}, "int32"),
    "complex": (lambda q, k, v: (q.cfloat(), k.cfloat(), v.cfloat()), {}, "query has a?"),
    "device": (lambda q, k, v: (q, k.to("meta"), v), {}, "meta"),
    "mask_device": (lambda q, k, v: (q, k, v), {"attn_mask": "torch.ones(5, 7).bool().to('meta')"}, "attn_mask is on"),
    "bias_device": (lambda q, k, v: (q, k, v), {"attn_bias": "torch.ones(5, 7).to('meta')"}, "attn_bias is on meta"),
    "lengths_device": (lambda q, k, v: (q, k, v), {"seqlens_k": "integers(5, 2).to('meta')"}, "seqlens_k is on meta"),
    "slopes_device": (
        lambda q, k, v: (q, k, v), {"alibi_slopes": "torch.ones(4).to('meta')", "align": "top_left"}, "alibi_slopes is"
    ),
    "sparse": (lambda q, k, v: (q.to_sparse(), k, v), {}, "polyhead"),
    "array": (lambda q, k, v: (q, k.numpy(), v), {}, "key has type ndarray"),
    "nothing": (lambda q, k, v: (q, None, v), {}, "key has type NoneType"),
    "alignment": (lambda q, k, v: (q, k, v), {"causal": True}, "top_left"),
    "align": (lambda q, k, v: (q, k, v), {"align": "left"}, 'align is "left"'),
    "both": (lambda q, k, v: (q, k, v), {"align": "top_left", "query_offset": 1}, "query_offset and align"),
    "window": (lambda q, k, v: (q, k, v), {"window": 3}, "window has type int"),
    "window_of_3": (lambda q, k, v: (q, k, v), {"window": (1, 2, 3)}, "window has 3 elements"),
    "window_below": (lambda q, k, v: (q, k, v), {"window": (-2, 0), "align": "top_left"}, "window"),
    "mask": (lambda q, k, v: (q, k, v), {"attn_mask": "torch.ones(5, 7)"}, "attn_mask is float32"),
    "bias": (lambda q, k, v: (q, k, v), {"attn_bias": "torch.ones(3, 5, 7)"}, "attn_bias"),
    "p": (lambda q, k, v: (q, k, v), {"dropout_p": 1.5}, "dropout_p is 1.5"),
    "negative_p": (lambda q, k, v: (q, k, v), {"dropout_p": -0.5}, "dropout_p is -0.5"),
    "nan_p": (lambda q, k, v: (q, k, v), {"dropout_p": float("nan")}, "dropout_p is nan"),
    "seed": (lambda q, k, v: (q, k, v), {"dropout_p": 0.5, "dropout_seed": 2**64}, "dropout_seed is"),
    "offset": (lambda q, k, v: (q, k, v), {"dropout_p": 0.5, "dropout_offset": 2**32}, "dropout_offset"),
    "scale": (lambda q, k, v: (q, k, v), {"scale": float("inf")}, "scale is inf"),
    "softcap": (lambda q, k, v: (q, k, v), {"softcap": -1.0}, "softcap is -1"),
    "cu": (lambda q, k, v: (q, k, v), {"cu_seqlens_q": "integers(0, 1)"}, "cu_seqlens_q is given without"),
    "lengths": (lambda q, k, v: (q, k, v), {"seqlens_k": "integers(9, 1)"}, "seqlens_k"),
    "kernel": (lambda q, k, v: (q, k, v), {"kernel": "gpu"}, 'kernel is "gpu"'),
    "weights": (lambda q, k, v: (q, k, v), {"return_weights": "max"}, 'return_weights is "max"'),
}


@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("case", REFUSED)
def test_bad_input_is_refused_by_name(case, requires_grad):
    from torch_cases import integers

    change, options, sentence = REFUSED[case]
    options = {
        name: eval(text, {"torch": torch, "integers": integers}) if isinstance(text, str) and "(" in text else text
        for name, text in options.items()
    }
    operands = change(*problem("plain")[0])
    if requires_grad and all(isinstance(each, torch.Tensor) and each.is_floating_point() for each in operands):
        operands = [each.requires_grad_() for each in operands]
    with pytest.raises((polyhead.Error, RuntimeError, TypeError), match=sentence):
        polyhead.torch.attention(*operands, **options)


def test_bad_parts_and_bad_gradients_are_refused_by_name():
    _, outs, logsumexps = parts()
    for bad, sentence in [
        (([], []), "outs is empty"),
        ((outs, logsumexps[:2]), "logsumexps has 2 parts"),
        ((outs, [*logsumexps[:2], logsumexps[2][:, :3]]), r"parts\[2\].logsumexp|logsumexps\[2\]"),
        (([*outs[:2], outs[2].double()], logsumexps), r"outs\[2\]|parts\[2\].out"),
        (([*outs[:2], None], logsumexps), r"outs\[2\] has type NoneType"),
        (([*outs[:2], outs[2].to("meta")], logsumexps), r"outs\[2\] is on meta"),
        ((outs, [*logsumexps[:2], logsumexps[2].to("meta")]), r"logsumexps\[2\] is on meta"),
    ]:
        with pytest.raises((polyhead.Error, TypeError), match=sentence):
            polyhead.torch.merge(*bad)
    operands, options = problem("plain")
    out, logsumexp = polyhead.torch.attention(*operands, return_logsumexp=True)
    for bad, options, sentence in [
        ((out[:, :3], *operands, out, logsumexp), {}, "grad_out dim 1 is 3"),
        ((out, *operands, out, logsumexp[0]), {}, "logsumexp has 2 dimensions"),
        ((out, *operands, out, logsumexp), {"needs": ("attn_bias",)}, "attn_bias is not given"),
        ((out, *operands, out, logsumexp), {"needs": ("out",)}, 'needs holds "out"'),
        ((out, *operands, out, logsumexp), {"dropout_p": 0.5}, "dropout_seed must be given"),
        ((out, *operands, out, None), {}, "logsumexp has type NoneType"),
        ((out.to("meta"), *operands, out, logsumexp), {}, "grad_out is on meta"),
        ((out, *operands, out.to("meta"), logsumexp), {}, "out is on meta"),
        ((out, *operands, out, logsumexp), {"grad_logsumexp": logsumexp.to("meta")}, "grad_logsumexp is on meta"),
    ]:
        with pytest.raises((polyhead.Error, TypeError), match=sentence):
            polyhead.torch.attention_backward(*bad, **options)


SIGMOID = {"score": "sigmoid(score + shift[h])", "normalizer": "none", "causal": True, "align": "bottom_right"}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_without_a_softmax_it_is_polyheads_too(dtype):
    shift = tensors((4,), seed=6)[0]
    for case in ("plain", "packed", "dropout"):
        operands, options = problem(case, dtype)
        options |= SIGMOID | {"captured": {"shift": shift.detach()}}
        expected = polyhead.attention(*operands, **options)
        with torch.no_grad():
            same_bits(polyhead.torch.attention(*operands, **options), expected)
        grad_out = torch.ones_like(expected)
        names = ("query", "key", "value", "shift")
        gradients = polyhead.attention_backward(grad_out, *operands, None, None, **options, needs=names)
        leaves = [each.requires_grad_() for each in (*operands, shift.detach().clone())]
        out = polyhead.torch.attention(*operands, **options | {"captured": {"shift": leaves[3]}})
        for name, grad in zip(names, torch.autograd.grad(out, leaves, grad_out)):
            same_bits(grad, gradients[name])
        options["captured"] = {"shift": shift.detach()}
        again = polyhead.torch.attention_backward(grad_out, *operands, None, None, **options, needs=names)
        for name, grad in again.items():
            same_bits(grad.detach(), gradients[name])


@pytest.mark.parametrize("return_weights", [False, True])
def test_derivatives_without_a_softmax(return_weights):
    operands, options = problem("causal", torch.float64)
    leaves = [each.requires_grad_() for each in (*operands, tensors((4,), dtype=torch.float64, seed=6)[0])]

    def attention(query, key, value, shift):
        asked = SIGMOID | {"captured": {"shift": shift}, "return_weights": return_weights}
        return polyhead.torch.attention(query, key, value, **asked)

    assert torch.autograd.gradcheck(attention, leaves, fast_mode=True)
    assert torch.autograd.gradgradcheck(attention, leaves, fast_mode=True)


def test_without_a_softmax_in_graphs_and_under_transforms():
    operands, _ = problem("causal")
    torch.library.opcheck(
        torch.ops.polyhead.attention_forward.default, tuple(operands), {"normalizer": 1},
        test_utils=("test_schema", "test_faketensor"),
    )  # fmt: skip
    stacked = [torch.stack([each, -each]) for each in operands]
    mapped = torch.vmap(lambda *each: polyhead.torch.attention(*each, normalizer="none"))(*stacked)
    for i, one in enumerate(zip(*stacked)):
        torch.testing.assert_close(mapped[i], polyhead.torch.attention(*one, normalizer="none"))
    with pytest.raises(polyhead.Error, match='return_logsumexp is True, but normalizer is "none"'):
        polyhead.torch.attention(*operands, normalizer="none", return_logsumexp=True)
    with pytest.raises(polyhead.Error, match='normalizer is "sum", must be "softmax" or "none"'):
        polyhead.torch.attention(*operands, normalizer="sum")
