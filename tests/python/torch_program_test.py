"""Programs in polyhead.torch.attention: functions and texts, gradients of what they capture, torch's machineries."""

import functools

import numpy as np
import pytest
from optional import needs_torch, torch

import polyhead
from polyhead import programs

pytestmark = needs_torch
if torch is not None:
    from torch.library import opcheck

    import polyhead.torch
    from polyhead.torch._options import AllOptions, for_backward
    from torch_cases import tensors
    from torch_ops_test import same_bits

OPERATORS = "doc: int; slope: float; cap: float; score = cap[] * tanh(score / cap[]) - slope[h] * abs(q - k); mask = doc[q] == doc[k]"


def captured(dtype=None):
    return {
        "doc": torch.tensor([0, 0, 0, 1, 1, 1, 1]),
        "slope": tensors((4,), seed=1, dtype=dtype)[0].abs().requires_grad_(),
        "cap": torch.tensor(1.5, dtype=dtype, requires_grad=True),
    }


def operands(dtype=None, seqlen=7):
    return [x.requires_grad_() for x in tensors((2, seqlen, 4, 8), (2, seqlen, 2, 8), (2, seqlen, 2, 6), dtype=dtype)]


def capped_alibi(score, h, q, k, slope, cap):
    return cap * torch.tanh(score / cap) - slope[h] * torch.abs(q - k)


def dense(query, key, value, doc, slope, cap):
    """The program above by torch's operations, with autograd."""
    key, value = (x.repeat_interleave(2, 2) for x in (key, value))
    place = torch.arange(query.shape[1])
    scores = torch.einsum("bihd,bjhd->bhij", query, key) * query.shape[-1] ** -0.5
    scores = cap * torch.tanh(scores / cap) - slope[:, None, None] * (place[:, None] - place).abs()
    scores = scores.masked_fill(doc[:, None] != doc, -torch.inf)
    return torch.einsum("bhij,bjhd->bihd", scores.softmax(-1), value)


def close(got, expected, dtype):
    tolerance = {torch.float64: 1e-12, torch.float32: 1e-5, torch.float16: 1e-2, torch.bfloat16: 8e-2}[dtype]
    for one, other in zip(got, expected):
        assert one.dtype == dtype
        torch.testing.assert_close(one.double(), other.double(), rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64] if torch else [])
def test_gradients_go_to_what_is_captured(dtype):
    given, inputs = captured(dtype), operands(dtype)
    out = polyhead.torch.attention(*inputs, score=capped_alibi, mask=lambda q, k, doc: doc[q] == doc[k], captured=given)
    leaves = [*inputs, given["slope"], given["cap"]]
    double = [x.detach().double().requires_grad_() for x in leaves]
    expected = dense(*double[:3], given["doc"], *double[3:])
    grad_out = tensors(out.shape, seed=2)[0]
    close([out], [expected], dtype)
    grads = torch.autograd.grad(out, leaves, grad_out.to(dtype))
    close(grads, torch.autograd.grad(expected, double, grad_out.double()), dtype)


def test_functions_texts_and_closures_are_the_same_bits():
    given, inputs = captured(), operands()
    doc, slope, cap = given.values()
    calls = [
        {"score": capped_alibi, "mask": lambda q, k, doc: doc[q] == doc[k], "captured": given},
        {"score": lambda score, h, q, k: capped_alibi(score, h, q, k, slope, cap), "mask": lambda q, k: doc[q] == doc[k]},
        {
            "score": "cap[] * tanh(score / cap[]) - slope[h] * abs(q - k)",
            "mask": lambda q, k, doc: doc[q] == doc[k],
            "captured": given,
        },
        {"score": functools.partial(capped_alibi, slope=slope, cap=cap), "mask": lambda q, k: doc[q] == doc[k]},
    ]
    results = [polyhead.torch.attention(*inputs, **call) for call in calls]
    grads = [torch.autograd.grad(each.sum(), [*inputs, slope, cap]) for each in results]
    for result, grad in zip(results[1:], grads[1:]):
        same_bits(result, results[0])
        for one, other in zip(grad, grads[0]):
            same_bits(one, other)
    array = polyhead.attention(
        *(x.detach().numpy() for x in inputs),
        score="cap[] * tanh(score / cap[]) - slope[h] * abs(q - k)",
        mask="doc[q] == doc[k]",
        captured={name: x.detach().numpy() for name, x in given.items()},
    )
    assert np.array_equal(array, results[0].detach().numpy())


def test_ready_ones_are_the_same_bits_as_of_arrays():
    from program_test import READY, ready

    rng = np.random.default_rng(0)
    arrays = [rng.standard_normal((2, 70, 4, 16), dtype=np.float32) for _ in range(3)]
    for name in READY:
        options = ready(name)
        expected = polyhead.attention(*arrays, **options)
        given = {key: torch.from_numpy(array) for key, array in options.pop("captured").items()}
        got = polyhead.torch.attention(*map(torch.from_numpy, arrays), **options, captured=given)
        assert np.array_equal(got.numpy(), expected), name


def test_attention_backward_by_name():
    given, inputs = captured(), [x.detach() for x in operands()]
    options = {"score": capped_alibi, "captured": {name: x.detach() for name, x in given.items() if name != "doc"}}
    out, logsumexp = polyhead.torch.attention(*inputs, **options, return_logsumexp=True)
    needs = ("cap", "key", "slope")
    got = polyhead.torch.attention_backward(out, *inputs, out, logsumexp, **options, needs=needs)
    expected = polyhead.attention_backward(out, *inputs, out, logsumexp, needs=needs, **options | {
        "score": "cap[] * tanh(score / cap[]) - slope[h] * abs(q - k)"
    })  # fmt: skip
    assert list(got) == list(needs)
    for name in needs:
        same_bits(got[name], expected[name])
    with pytest.raises(polyhead.Error, match=r'needs holds "doc", must be out of .*slope, cap'):
        polyhead.torch.attention_backward(out, *inputs, out, logsumexp, **options, needs=["doc"])


def as_operator_takes():
    return AllOptions(program=OPERATORS)._replace(**{f"capture{i}": each for i, each in enumerate(captured().values())})


def test_opcheck():
    inputs, options = operands(), as_operator_takes()
    opcheck(torch.ops.polyhead.attention_forward.program, (*inputs, *options))
    with torch.no_grad():
        out, logsumexp, *_ = torch.ops.polyhead.attention_forward.program(*inputs, *options)
    needs = 0b111 | 0b11 << 7
    arguments = (torch.ones_like(out), None, *inputs, out, logsumexp, needs, *for_backward(options))
    opcheck(torch.ops.polyhead.attention_backward.program, arguments)


@pytest.mark.parametrize("packed", [False, True])
def test_first_and_second_derivatives(packed):
    query, key, value = operands(torch.float64, seqlen=5)
    slope, cap = list(captured(torch.float64).values())[1:]
    table = tensors((9,), dtype=torch.float64, seed=5)[0].requires_grad_()
    options = {"align": "bottom_right", "causal": True}
    if packed:
        query, key, value = (x.detach().flatten(0, 1).requires_grad_() for x in (query, key, value))
        starts = torch.tensor([0, 4, 4, 9], dtype=torch.int32)
        options |= {"cu_seqlens_q": starts, "cu_seqlens_k": starts}

    def function(query, key, value, slope, cap, table):
        out, logsumexp = polyhead.torch.attention(
            query, key, value, **options, return_logsumexp=True,
            score=lambda score, b, h, q, k, offset: capped_alibi(score, h, q + offset, k, slope, cap)
            + torch.where(b > 0, table[q - k + 4], 0.0),
            mask=lambda q, k: (q + k) % 3 != 1,
        )  # fmt: skip
        return out, torch.where(logsumexp.isinf(), 0.0, logsumexp)

    inputs = (query, key, value, slope, cap, table)
    assert torch.autograd.gradcheck(function, inputs, fast_mode=packed)
    assert torch.autograd.gradgradcheck(function, inputs, fast_mode=True)


def test_gradients_through_weights():
    given, inputs = captured(torch.float64), operands(torch.float64)
    doc, slope, cap = given.values()
    _, weights = polyhead.torch.attention(
        *inputs, score=capped_alibi, mask="doc[q] == doc[k]", captured=given, return_weights=True
    )
    query, key, _ = inputs
    identity = torch.eye(7, dtype=torch.float64).view(1, 7, 1, 7).expand(2, 7, 2, 7)
    expected = dense(query, key, identity, doc, slope, cap).transpose(1, 2)
    leaves = [query, key, slope, cap]
    direction = tensors(weights.shape, dtype=torch.float64)[0]
    torch.testing.assert_close(weights, expected)
    got, theirs = (torch.autograd.grad(each, leaves, direction) for each in (weights, expected))
    torch.testing.assert_close(got, theirs)


def test_every_op_of_the_formula_is_the_librarys():
    """Second derivatives go by a formula of the text in torch's operations: it has the same values."""
    from polyhead.torch._program_formula import Formula

    place = torch.arange(-4, 5)
    query, key = torch.zeros(1, 9, 1, 4), torch.zeros(1, 9, 1, 4)
    table = {"t": torch.tensor([3.0, -1.5, 0.25]), "i": torch.tensor([4, -7, 0]), "f": torch.tensor([True, False, True])}
    kinds = {"t": "float", "i": "int", "f": "bool"}
    texts = [
        "float((q - 4) // (k - 4)) + (q - 4) % (k - 4)", "((q - 4) << (k - 4)) + ((q - 4) >> (k - 4)) * 2",
        "float((q - 4 & k) | (q ^ k)) + (~q)", "t[q % 3] * i[k % 3] + f[q % 3]", "where(f[k % 3], t[q % 3], i[k % 3])",
        "min(t[q % 3], k - 4) + max(q, i[k % 3]) + clamp(q - k, -2, 3)", "abs(t[q % 3]) + abs(i[k % 3]) - floor(q / 3) * ceil(k / 2)",
        "int(t[q % 3] * 3) + float(q - k) ** 2.0", "exp(t[q % 3]) + log(q + 1) + tanh(k - q) + sigmoid(q - k) + erf(t[k % 3])",
        "sqrt(q) + rsqrt(k + 1) + sin(q) * cos(k) + pow(q + 1, 0.5)", "float(0 <= q - k < 3) + (not f[q % 3] and q > k or q == k)",
        "float(q != k) + True - (q >= k) * 2", "where(q < k, inf, 1.0) * -1",
    ]  # fmt: skip
    grid = {"b": 0, "h": 0, "q": place.view(1, 1, -1, 1) + 4, "k": place.view(1, 1, 1, -1) + 4, "offset": 0}
    for text in texts:
        given = {name: tensor for name, tensor in table.items() if f"{name}[" in text}
        formula = Formula("; ".join([*(f"{name}: {kinds[name]}" for name in given), f"score = {text}"]), grid, torch.float32)
        expected = formula.score(torch.zeros(1, 1, 9, 9), list(given.values()))
        # weights of one key at a time tell its score, by logsumexp
        for j in range(9):
            _, got = polyhead.torch.attention(
                query, key, key, score=text, mask=f"k == {j}", captured=given, return_logsumexp=True
            )
            torch.testing.assert_close(got[0, 0], expected[0, 0, :, j], msg=lambda m: f"{text}, key {j}: {m}")


def test_vmap_and_batched_gradients():
    query, key, value = operands()
    options = as_operator_takes()

    def of_slope(slope):
        return torch.ops.polyhead.attention_forward.program(query, key, value, *options._replace(capture1=slope))[0]

    slopes = torch.stack([options.capture1, 2 * options.capture1]).detach()
    same_bits(torch.vmap(of_slope)(slopes), torch.stack([of_slope(each) for each in slopes]))
    got = torch.vmap(torch.func.grad(lambda slope: of_slope(slope).square().sum()))(slopes)
    one_by_one = [torch.func.grad(lambda slope: of_slope(slope).square().sum())(each) for each in slopes]
    same_bits(got, torch.stack(one_by_one))
    out = of_slope(options.capture1)
    directions = torch.stack(tensors(out.shape, out.shape))
    leaves = (query, options.capture1)
    together = torch.autograd.grad(out, leaves, directions, is_grads_batched=True, retain_graph=True)
    apart = [torch.autograd.grad(out, leaves, each, retain_graph=True) for each in directions]
    for one, others in zip(together, zip(*apart)):
        same_bits(one, torch.stack(others))


@pytest.mark.parametrize("how", ["text", "function"])
def test_compile(how):
    """Text in one graph; a function is traced where the graph is entered, between two."""
    given, inputs = captured(), operands()
    score = capped_alibi if how == "function" else "cap[] * tanh(score / cap[]) - slope[h] * abs(q - k)"
    options = {"score": score, "mask": "doc[q] == doc[k]", "captured": given}

    def step(query, key, value):
        return polyhead.torch.attention(query * 2, key, value, **options).sin()

    torch._dynamo.reset()
    leaves = [*inputs, given["slope"], given["cap"]]
    results = [step(*inputs), torch.compile(step, backend="aot_eager", fullgraph=how == "text")(*inputs)]
    torch.testing.assert_close(results[1], results[0])
    grads = [torch.autograd.grad(each.sum(), leaves) for each in results]
    torch.testing.assert_close(grads[1], grads[0])


def test_the_number_of_threads_changes_no_bit():
    inputs = [x.requires_grad_() for x in tensors((2, 150, 4, 16), (2, 150, 2, 16), (2, 150, 2, 16))]
    table, slope = (x.requires_grad_() for x in tensors((4, 299), (4,), seed=1))
    threads, results = torch.get_num_threads(), []
    for count in (1, 2, 3):
        torch.set_num_threads(count)
        out = polyhead.torch.attention(
            *inputs, mask="k <= q", score=lambda score, h, q, k: score + table[h, q - k + 149] - slope[h] * (q - k)
        )
        results.append((out, *torch.autograd.grad(out.square().sum(), [*inputs, table, slope])))
    torch.set_num_threads(threads)
    for each in results[1:]:
        for one, other in zip(each, results[0]):
            same_bits(one, other)


REFUSED = {
    "rank": ({"captured": {"slope": "torch.ones(4, 1)"}}, "slope has 2 dims, the program takes 1"),
    "dtype": ({"captured": {"slope": "torch.ones(4).cfloat()"}}, "slope is torch.complex64, a program reads"),
    "none": ({"captured": {"slope": None}}, r"captured\['slope'\] has type NoneType, must be a torch.Tensor"),
    "text": ({"score": "score + * 2"}, "expected"),
    "kind": ({"mask": 3}, "mask has type int, must be a function or an expression as text"),
    "alone": ({"score": None, "mask": None}, "captured is given without score or mask"),
    "parameter": ({"score": "lambda score, tau: score * tau"}, "score takes a parameter tau, which is neither"),
    "result": ({"score": "lambda score: 'score'"}, "score returns str, must return a tensor"),
    "index": ({"score": "score + slope[q]"}, r"element \[4\] of slope \[4\] is asked for .* lies outside"),
    "unread": ({"captured": {"slope": "torch.ones(4)", "cap": "torch.ones(())"}}, "tensor cap is captured, but neither"),
    "bool": ({"score": "lambda score: score if score > 0 else 0"}, r"score decides by a value .* use torch.where"),
    "too many": (
        {"captured": {f"t{i}": "torch.ones(4)" for i in range(9)}, "score": "score"}, "read 9 tensors .*a program reads 8"
    ),
}  # fmt: skip


@pytest.mark.parametrize("case", REFUSED)
def test_refused_by_name(case):
    changes, sentence = REFUSED[case]
    options = {"score": "score - slope[h]", "captured": {"slope": "torch.ones(4)"}} | changes
    options["captured"] = {name: eval(x) if isinstance(x, str) else x for name, x in options["captured"].items()}
    if isinstance(options["score"], str) and options["score"].startswith("lambda"):
        options["score"] = eval(options["score"])
    with pytest.raises((polyhead.Error, TypeError), match=sentence):
        polyhead.torch.attention(*operands(), **options)


def test_only_what_is_needed_is_computed():
    """A capture that requires no gradient gets none, and those of integers have none."""
    given, inputs = captured(), [x.detach() for x in operands()]
    given["cap"].requires_grad_(False)
    out = polyhead.torch.attention(*inputs, score=capped_alibi, mask="doc[q] == doc[k]", captured=given)
    out.sum().backward()
    assert given["slope"].grad.shape == (4,) and given["cap"].grad is None
    with pytest.raises(ValueError, match=r"grad_captures\[0\]|needs\[0\] is .doc"):
        torch.ops.polyhead.attention_backward.program(
            out.detach(), None, *inputs, out.detach(), torch.zeros(2, 4, 7), 1 << 6, *for_backward(as_operator_takes())
        )
