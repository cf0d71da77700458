"""torch.nn's attention modules with the switch on: torch's own module samples, returned weights, fast paths."""

import itertools
import os
import warnings

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead
import polyhead.torch
from torch.nn import functional as F
from torch_switch_judge import (
    DTYPES, SEED, assert_exact, assert_no_worse, assert_taken, counted, gradients, in_double, kept, relative_errors,
)  # fmt: skip

pytestmark = pytest.mark.usefixtures("one_thread")

MODULES = (
    "MultiheadAttention", "TransformerEncoder", "TransformerEncoderLayer", "TransformerDecoderLayer", "Transformer",
)  # fmt: skip
LOGITS = 200  # the samples reach 9 and meet weights of about 1, so scores reach some hundreds
EVERY = int(os.environ.get("POLYHEAD_TEST_EVERY", "1"))  # one in so many samples


def flat(outputs):
    return [out for out in (outputs if isinstance(outputs, tuple) else (outputs,)) if out is not None]


def run(module, arguments, options):
    """Outputs, the gradients of the inputs and the parameters, and the outputs without autograd: eval's fast path."""
    outputs = flat(module(*arguments, **options))
    inputs = [x for x in [*arguments, *module.parameters()] if isinstance(x, torch.Tensor)]
    with torch.no_grad():
        return [*outputs, *gradients(outputs, inputs), *flat(module(*arguments, **options))]


class Judge:
    """float32 and float64: each tensor by its own bound. Else by how the errors of all scatter."""

    def __init__(self, dtype):
        self.strict = dtype in (torch.float32, torch.float64)
        self.ours, self.theirs = [], []

    def add(self, got, yardstick, exact, what):
        if self.strict:
            assert_exact(got, yardstick, exact, what, logits=LOGITS)
        else:
            self.ours += relative_errors(got, exact)
            self.theirs += relative_errors(yardstick, exact)

    def finish(self):
        if not self.strict:
            assert_no_worse(self.ours, self.theirs)


@pytest.mark.filterwarnings("ignore")  # torch's own, about its masks and its nested tensors
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", MODULES)
def test_module_samples(name, training, dtype):
    modules = pytest.importorskip("torch.testing._internal.common_modules", reason="needs expecttest")
    (info,) = [info for info in modules.module_db if info.name == f"nn.{name}"]
    torch.manual_seed(0)
    samples = list(info.module_inputs_func(info, "cpu", dtype, True, training))
    cases = []
    for sample in samples[::EVERY]:
        construct, forward = sample.constructor_input, sample.forward_input
        options = dict(construct.kwargs)
        if name != "TransformerEncoder":
            options |= {"device": "cpu", "dtype": dtype}
        module = info.module_cls(*construct.args, **options).train(training)
        exact = run(in_double(module), in_double(list(forward.args)), in_double(forward.kwargs))
        cases.append((module, forward, exact, run(module, forward.args, forward.kwargs)))
    judge = Judge(dtype)
    with counted() as records:
        for index, (module, forward, exact, yardstick) in enumerate(cases):
            judge.add(run(module, forward.args, forward.kwargs), yardstick, exact, f"{name} sample {index}")
    judge.finish()
    assert_taken(records, backward=True, dtype=dtype)
    print(f"{len(cases)} of {len(samples)} samples of {name}, training={training}, {dtype}")


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("requires_grad", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_opinfo_samples_of_the_function(dtype, requires_grad, monkeypatch):
    """multi_head_attention_forward returning weights; dropout is compared by the mask that it drew."""
    database = pytest.importorskip("torch.testing._internal.common_methods_invocations", reason="needs expecttest")
    (info,) = [op for op in database.op_db if op.name == "nn.functional.multi_head_attention_forward"]
    torch.manual_seed(0)
    samples = list(info.sample_inputs("cpu", dtype, requires_grad=requires_grad))
    assert len(samples) >= (1 if requires_grad else 192)

    def results(arguments, options):
        leaves = [x for x in [*arguments, *options.values()] if isinstance(x, torch.Tensor)]
        outputs = flat(F.multi_head_attention_forward(*arguments, **options))
        return [*outputs, *gradients(outputs, leaves)]

    def dropout(weights, p, **_):
        keep = kept((batch, weights.shape[0] // batch, *weights.shape[1:]), p).reshape(weights.shape)
        return weights * keep / (1 - p)

    cases = []
    for sample in samples[::EVERY]:
        arguments, options = (sample.input, *sample.args), sample.kwargs
        batch = sample.input.shape[1] if sample.input.dim() == 3 else 1
        with monkeypatch.context() as patch:
            patch.setattr(F, "dropout", dropout)
            yardstick = results(arguments, options)
            cases.append((arguments, options, results(in_double(list(arguments)), in_double(options)), yardstick))
    judge = Judge(dtype)
    with counted() as records:
        for index, (arguments, options, exact, yardstick) in enumerate(cases):
            torch.manual_seed(SEED)
            judge.add(results(arguments, options), yardstick, exact, f"sample {index}")
    judge.finish()
    assert_taken(records, backward=requires_grad)
    print(f"{len(cases)} of {len(samples)} samples of the function, {dtype}, requires_grad={requires_grad}")


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("training", [True, False])
def test_hidden_queries_are_zero_where_torch_has_nan(training, average):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True).train(training)
    x = torch.randn(3, 5, 16, requires_grad=True)
    padding = torch.tensor([[0, 0, 0, 0, 0], [0, 0, 0, 1, 1], [1, 1, 1, 1, 1]], dtype=torch.bool)
    expected, expected_weights = module(x, x, x, key_padding_mask=padding, average_attn_weights=average)
    assert expected[2].isnan().all() and expected_weights[2].isnan().all()
    with counted() as records:
        out, weights = module(x, x, x, key_padding_mask=padding, average_attn_weights=average)
        (out.sum() + weights.square().sum()).backward()
        with torch.no_grad():
            fast, fast_weights = module(x, x, x, key_padding_mask=padding, average_attn_weights=average)
    assert_taken(records, backward=True)
    assert weights[2].count_nonzero() == 0
    torch.testing.assert_close(out[2], module.out_proj.bias.expand(5, 16))
    for got, wanted in ((out, expected), (weights, expected_weights)):
        torch.testing.assert_close(got[:2], wanted[:2], rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast, out, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(fast_weights, weights, rtol=1e-5, atol=1e-6)
    assert x.grad.isfinite().all() and all(p.grad.isfinite().all() for p in module.parameters())


@pytest.mark.parametrize("average", [True, False])
def test_gradients_through_returned_weights(average):
    torch.manual_seed(0)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    x, y = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 7, 16, requires_grad=True)
    bias = torch.randn(5, 7, requires_grad=True)
    leaves = [x, y, bias, *module.parameters()]

    def grads():
        return gradients(module(x, y, y, attn_mask=bias, average_attn_weights=average), leaves)

    expected = grads()
    with counted() as records:
        got = grads()
    assert_taken(records, backward=True)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-5)


MASKINGS = list(itertools.product([None, "causal", "random", "heads"], [None, "padding"]))


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("masking", MASKINGS)
def test_eval_of_every_mask(masking, dtype):
    """MultiheadAttention's and TransformerEncoderLayer's fast paths against their slow ones."""
    torch.manual_seed(0)
    attn_mask, padding = masking
    batch, heads, seqlen = 3, 4, 6
    x = torch.randn(batch, seqlen, 16).to(dtype)
    mask = {
        None: None,
        "causal": torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1),
        "random": (torch.rand(seqlen, seqlen) > 0.7).fill_diagonal_(False),
        "heads": torch.rand(batch * heads, seqlen, seqlen) > 0.7,
    }[attn_mask]
    if attn_mask == "heads":
        mask[:, :, 0] = False
    keys = torch.arange(seqlen) >= torch.tensor([[6], [4], [5]]) if padding else None
    attend = torch.nn.MultiheadAttention(16, heads, batch_first=True, dtype=dtype).eval()
    layer = torch.nn.TransformerEncoderLayer(16, heads, 32, batch_first=True, dtype=dtype).eval()
    doubles = in_double(attend), in_double(layer)

    def results(attend, layer, x):
        return [
            *attend(x, x, x, key_padding_mask=keys, attn_mask=mask),
            *attend(x, x, x, key_padding_mask=keys, attn_mask=mask, average_attn_weights=False),
            attend(x, x, x, key_padding_mask=keys, attn_mask=mask, need_weights=False)[0],
            layer(x, src_mask=mask, src_key_padding_mask=keys),
        ]

    torch.backends.mha.set_fastpath_enabled(False)
    try:
        exact = [out.detach() for out in results(*doubles, x.double())]
        yardstick = [out.detach() for out in results(attend, layer, x)]
    finally:
        torch.backends.mha.set_fastpath_enabled(True)
    with counted() as records, torch.no_grad():
        got = results(attend, layer, x)
    assert_taken(records, backward=False)
    assert sum(record.count for record in records) == 4
    assert_exact(got, yardstick, exact)


@pytest.mark.filterwarnings("ignore")
def test_the_encoder_with_padding_in_eval():
    """The nested fast path: at real positions what the slow path gives; padded ones are 0, as torch has them."""
    torch.manual_seed(0)
    layer = torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    encoder = torch.nn.TransformerEncoder(layer, 2).eval()
    x = torch.randn(3, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [1]])
    slow = encoder(x, src_key_padding_mask=padding).detach()
    with torch.no_grad():
        torchs = encoder(x, src_key_padding_mask=padding)
    with counted() as records, torch.no_grad():
        fast = encoder(x, src_key_padding_mask=padding)
    assert_taken(records, backward=False)
    torch.testing.assert_close(fast[~padding], slow[~padding], rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(fast, torchs, rtol=1e-4, atol=1e-5)


@pytest.mark.filterwarnings("ignore")
def test_nested_input():
    torch.manual_seed(0)
    attend = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    sequences = [torch.randn(length, 16) for length in (6, 4, 1)]
    nested = torch.nested.nested_tensor(sequences)
    with counted() as records, torch.no_grad():
        out, weights = attend(nested, nested, nested, need_weights=False)
    assert weights is None
    assert_taken(records, backward=False)
    with torch.no_grad():
        for x, y in zip(sequences, out.unbind()):
            wanted = attend(x[None], x[None], x[None], need_weights=False)[0][0]
            torch.testing.assert_close(y, wanted, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("layout", [torch.strided, torch.jagged])
def test_attention_of_nested_tensors_is_torchs_and_has_a_record(layout):
    sequences = [torch.randn(rows, 4, 8) for rows in (3, 5)]
    if layout is torch.strided:
        nested = torch.nested.nested_tensor([x.transpose(0, 1).contiguous() for x in sequences])
    else:
        nested = torch.nested.nested_tensor(sequences, layout=layout).transpose(1, 2)
    expected = F.scaled_dot_product_attention(nested, nested, nested)
    with counted() as records:
        out = F.scaled_dot_product_attention(nested, nested, nested)
    assert all(map(torch.equal, out.unbind(), expected.unbind()))
    assert [(r.op, r.shape, r.kernel) for r in records] == [("scaled_dot_product_attention", "nested", None)]
    assert "nested" in records[0].reason


@pytest.mark.filterwarnings("ignore")
def test_eval_under_autocast():
    """Which hands the fast path three casts of one tensor."""
    torch.manual_seed(0)
    attend = torch.nn.MultiheadAttention(16, 4, batch_first=True).eval()
    encoder = torch.nn.TransformerEncoder(torch.nn.TransformerEncoderLayer(16, 4, 32, batch_first=True), 2).eval()
    x = torch.randn(3, 6, 16)

    def results():
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return [*attend(x, x, x), encoder(x)]

    expected = results()
    with counted() as records:
        got = results()
    assert_taken(records, backward=False)
    for ours, theirs in zip(got, expected):
        torch.testing.assert_close(ours, theirs, rtol=3e-2, atol=3e-2)


def native(query, key, value):
    torch.manual_seed(1)
    weights = torch.randn(48, 16) / 4, torch.randn(48), torch.randn(16, 16) / 4, torch.randn(16)
    return torch.ops.aten._native_multi_head_attention(query, key, value, 16, 4, *weights)


def test_the_fast_path_of_other_keys_and_values():
    query, key, value = torch.randn(2, 5, 16), torch.randn(2, 5, 16), torch.randn(2, 5, 16)
    cases = [(query, key, key), (query, key, value), (query, query, value), (query, query, query)]
    for arguments in cases:
        expected, expected_weights = native(*arguments)
        with counted() as records:
            out, weights = native(*arguments)
        assert_taken(records, backward=False)
        torch.testing.assert_close(out, expected, rtol=1e-4, atol=1e-5)
        torch.testing.assert_close(weights, expected_weights, rtol=1e-4, atol=1e-5)


def test_a_default_device_changes_nothing():
    """Which is a mode that sees every call of torch's functions."""
    x = torch.randn(2, 5, 16)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    with counted() as records, torch.device("cpu"):
        module(x, x, x)
    assert_taken(records, backward=False)


def test_what_is_torchs_has_a_record():
    x = torch.randn(2, 5, 16, dtype=torch.float64)
    module = torch.nn.MultiheadAttention(16, 4, batch_first=True, dtype=torch.float64).eval()
    with counted() as records, torch.no_grad():
        module(x, x, x)
    assert [(r.op, r.shape, r.kernel) for r in records] == [("_native_multi_head_attention", "2x4x5x4", None)]
    assert "float64" in records[0].reason


@pytest.mark.parametrize("module", ["MultiheadAttention", "TransformerEncoderLayer"])
def test_wrong_shapes_raise_as_ever(module):
    x = torch.randn(2, 5, 16)
    attend = torch.nn.MultiheadAttention(16, 4, batch_first=True)
    bad = [
        {"key_padding_mask": torch.zeros(3, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(4, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(3, 5, 5, dtype=torch.bool)},
        {"attn_mask": torch.zeros(5, 5, dtype=torch.int32)},
        {"is_causal": True},
    ]
    for options in bad:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            with pytest.raises((RuntimeError, AssertionError)) as theirs:
                attend(x, x, x, **options)
            with polyhead.torch.enabled(), pytest.raises(type(theirs.value)) as ours:
                attend(x, x, x, **options)
        assert str(ours.value) == str(theirs.value)
