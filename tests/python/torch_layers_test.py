"""polyhead.torch's modules against torch.nn's: state_dict both ways, torch's own module samples, gradients, report."""

import doctest
import importlib
import os

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from polyhead.torch import MultiheadAttention, Rope, TransformerEncoderLayer
from torch.nn import functional as F
from torch_layers_judge import OURS, counts, flat, pair
from torch_switch_judge import (
    DTYPES, SEED, assert_exact, assert_no_worse, gradients, in_double, kept, relative_errors,
)  # fmt: skip

LOGITS = 200  # as torch_switch_modules_test has it: torch's samples reach 9
EVERY = int(os.environ.get("POLYHEAD_TEST_EVERY", "1"))

pytestmark = pytest.mark.usefixtures("one_thread")


@pytest.fixture
def no_forward_of_nn(monkeypatch):
    """Nothing may fall to torch's own attention: not to its modules, its function, or its fused kernels."""
    fallen = []

    def forbid(owner, name):
        monkeypatch.setattr(owner, name, lambda *arguments, **options: fallen.append(name))

    def start():
        for owner, name in (
            (F, "multi_head_attention_forward"), (F, "scaled_dot_product_attention"), (F, "softmax"),
            (torch, "softmax"), (torch.nn.MultiheadAttention, "forward"),
            (torch.nn.TransformerEncoderLayer, "forward"), (torch, "_native_multi_head_attention"),
            (torch, "_transformer_encoder_layer_fwd"),
        ):  # fmt: skip
            forbid(owner, name)

    class Guard:
        def __enter__(self):
            polyhead.torch.report(reset=True)
            start()
            return self

        def __exit__(self, *error):
            monkeypatch.undo()
            self.records = polyhead.torch.report(reset=True)
            assert fallen == []

    return Guard()


def run(module, arguments, options):
    """Outputs, gradients of inputs and parameters, outputs without autograd."""
    inputs = [x for x in [*arguments, *module.parameters()] if isinstance(x, torch.Tensor)]
    outputs = flat(module(*arguments, **options))
    results = [*outputs, *gradients(outputs, inputs)]
    if len(outputs) > 1:  # gradients through returned weights are computed in another way than those of out alone
        results += gradients(flat(module(*arguments, **options))[:1], inputs)
    with torch.no_grad():
        return [*results, *flat(module(*arguments, **options))]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", OURS)
def test_module_samples(name, training, dtype, no_forward_of_nn):
    modules = pytest.importorskip("torch.testing._internal.common_modules", reason="needs expecttest")
    (info,) = [info for info in modules.module_db if info.name == f"nn.{name}"]
    torch.manual_seed(0)
    samples = list(info.module_inputs_func(info, "cpu", dtype, True, training))
    cases = []
    for sample in samples[::EVERY]:
        construct, forward = sample.constructor_input, sample.forward_input
        theirs, ours = pair(name, *construct.args, **construct.kwargs, device="cpu", dtype=dtype)
        theirs, ours = theirs.train(training), ours.train(training)
        arguments = list(forward.args)
        exact = run(in_double(theirs), in_double(arguments), in_double(forward.kwargs))
        cases.append((ours, arguments, forward.kwargs, exact, run(theirs, arguments, forward.kwargs)))
    errors = [], []
    with no_forward_of_nn as guard:
        results = [run(ours, arguments, options) for ours, arguments, options, *_ in cases]
    for index, (got, (*_, exact, yardstick)) in enumerate(zip(results, cases)):
        if dtype in (torch.float32, torch.float64):
            assert_exact(got, yardstick, exact, f"{name} sample {index}", logits=LOGITS)
        else:
            errors[0].extend(relative_errors(got, exact))
            errors[1].extend(relative_errors(yardstick, exact))
    if errors[0]:
        assert_no_worse(*errors)
    ran = counts(guard.records)
    assert ran["attention_block_forward"] > 0 and ran["attention_block_backward"] > 0
    print(f"{len(cases)} of {len(samples)} samples of {name}, training={training}, {dtype}")


@pytest.mark.parametrize("options", [
    {}, {"bias": False}, {"kdim": 12, "vdim": 20}, {"add_bias_kv": True}, {"add_zero_attn": True},
    {"kdim": 12, "bias": False, "add_bias_kv": True, "add_zero_attn": True},
])  # fmt: skip
def test_the_same_seed_makes_the_same_layer(options):
    torch.manual_seed(SEED)
    theirs = torch.nn.MultiheadAttention(16, 4, **options)
    torch.manual_seed(SEED)
    ours = MultiheadAttention(16, 4, **options)
    assert list(ours.state_dict()) == list(theirs.state_dict())
    for name, tensor in theirs.state_dict().items():
        assert torch.equal(tensor, ours.state_dict()[name]), name


EXTRAS = [{}, {"add_bias_kv": True}, {"add_zero_attn": True}, {"kdim": 12, "vdim": 20}]


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("extras", EXTRAS, ids=str)
@pytest.mark.parametrize("need_weights", [False, True, "heads"])
@pytest.mark.parametrize("masks", ["none", "causal", "bool", "float", "heads", "padding", "both", "both float"])
def test_every_mask_and_extra(masks, need_weights, extras, no_forward_of_nn):
    torch.manual_seed(0)
    batch, heads, length, keys = 3, 4, 5, 7
    appended = "add_bias_kv" in extras or "add_zero_attn" in extras
    theirs, ours = pair("MultiheadAttention", 16, heads, batch_first=True, **extras)
    if "add_bias_kv" in extras:
        assert ours.bias_k.abs().max() > 0
    query = torch.randn(batch, length, 16, requires_grad=True)
    key = torch.randn(batch, keys, extras.get("kdim", 16), requires_grad=True)
    value = torch.randn(batch, keys, extras["vdim"], requires_grad=True) if "vdim" in extras else key
    options = {"need_weights": bool(need_weights), "average_attn_weights": need_weights != "heads"}
    hidden = torch.rand(length, keys) > 0.7
    hidden[:, 0] = False
    padding = torch.arange(keys) >= torch.tensor([[7], [4], [1]])
    bias = torch.randn(length, keys, requires_grad=True)
    options |= {
        "none": {},
        # nn's hint would hide the appended keys too
        "causal": {"attn_mask": torch.ones(length, keys, dtype=torch.bool).triu(1), "is_causal": not appended},
        "bool": {"attn_mask": hidden},
        "float": {"attn_mask": bias},
        "heads": {"attn_mask": hidden.expand(batch * heads, -1, -1)},
        "padding": {"key_padding_mask": padding},
        "both": {"attn_mask": hidden, "key_padding_mask": padding},
        "both float": {"attn_mask": bias, "key_padding_mask": torch.randn(batch, keys)},
    }[masks]

    def results(module, query, key, value, options):
        outputs = flat(module(query, key, value, **options))
        leaves = [query, key, *([] if value is key else [value]), *module.parameters()]
        leaves += [x for x in options.values() if isinstance(x, torch.Tensor) and x.requires_grad]
        return [*outputs, *gradients(outputs[:1], leaves)]

    def doubled():
        q, k = in_double(query), in_double(key)
        return q, k, k if value is key else in_double(value)

    exact = results(in_double(theirs), *doubled(), in_double(options))
    yardstick = results(theirs, query, key, value, options)
    with no_forward_of_nn as guard:
        got = results(ours, query, key, value, options)
    assert_exact(got, yardstick, exact, logits=10)
    kind = "attention" if appended else "attention_block"
    assert counts(guard.records) == {f"{kind}_forward": 1, f"{kind}_backward": 1}


@pytest.mark.parametrize("average", [True, False])
@pytest.mark.parametrize("extras", [{}, {"add_bias_kv": True, "add_zero_attn": True}], ids=str)
def test_gradients_through_returned_weights(average, extras):
    torch.manual_seed(0)
    theirs, ours = pair("MultiheadAttention", 16, 4, batch_first=True, **extras)
    x, y = torch.randn(2, 5, 16, requires_grad=True), torch.randn(2, 7, 16, requires_grad=True)
    bias = torch.randn(5, 7, requires_grad=True)

    def grads(module, only_weights):
        outputs = module(x, y, y, attn_mask=bias, average_attn_weights=average)
        return torch.autograd.grad(
            sum((out * (index + 1)).square().sum() for index, out in enumerate(outputs[only_weights:])),
            [x, y, bias, module.in_proj_weight, module.in_proj_bias],
        )

    for only_weights in (0, 1):
        for got, expected in zip(grads(ours, only_weights), grads(theirs, only_weights)):
            torch.testing.assert_close(got, expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("extras", [{}, {"add_bias_kv": True}, {"add_zero_attn": True}], ids=str)
def test_the_causal_hint_stands_for_the_mask(extras):
    """Which then is not read; appended keys stay visible."""
    layer = MultiheadAttention(16, 4, batch_first=True, **extras)
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    mask = torch.ones(5, 7, dtype=torch.bool).triu(1)
    expected, weights = layer(x, y, y, attn_mask=mask)
    assert (weights[..., 7:] > 0).all()
    out, _ = layer(x, y, y, attn_mask=torch.zeros_like(mask), is_causal=True, need_weights=False)
    torch.testing.assert_close(out, expected)
    out, _ = layer(x, y, y, attn_mask=mask, is_causal=True)
    torch.testing.assert_close(out, expected)


@pytest.mark.parametrize("name", OURS)
def test_the_causal_hint_alone_is_refused_as_nn_does(name):
    theirs, ours = pair(name, 16, 4, batch_first=True)
    x = torch.randn(2, 5, 16)
    for module in (theirs, ours):
        with pytest.raises(RuntimeError, match="is_causal"):
            module(*[x] * (3 if name == "MultiheadAttention" else 1), is_causal=True)


def test_hidden_queries_are_zero_and_pass_no_gradient():
    torch.manual_seed(0)
    layer = MultiheadAttention(16, 4, batch_first=True)
    torch.nn.init.normal_(layer.out_proj.bias)
    x = torch.randn(2, 5, 16, requires_grad=True)
    hidden = torch.tensor([[False] * 5, [True] * 5])
    out, weights = layer(x, x, x, key_padding_mask=hidden)
    torch.testing.assert_close(out[1], layer.out_proj.bias.expand(5, 16), rtol=0, atol=0)
    assert weights[1].count_nonzero() == 0
    out[1].sum().backward()
    assert x.grad.count_nonzero() == 0 and layer.in_proj_weight.grad.count_nonzero() == 0


@pytest.mark.parametrize("batch_first", [True, False])
def test_dropout_is_the_mask_that_the_seed_tells(batch_first):
    layer = MultiheadAttention(16, 4, dropout=0.4, batch_first=batch_first)
    x = torch.randn(3, 5, 16, requires_grad=True)
    keep = kept((3, 4, 5, 5) if batch_first else (5, 4, 3, 3), 0.4)
    torch.manual_seed(SEED)
    out, weights = layer(x, x, x, average_attn_weights=False)
    assert torch.equal(weights > 0, keep)
    layer.eval()
    _, whole = layer(x, x, x, average_attn_weights=False)
    torch.testing.assert_close(weights, whole * keep / 0.6)
    torch.manual_seed(SEED)
    with torch.no_grad():  # dropout is a matter of training, not of autograd
        again, _ = layer.train()(x, x, x)
    torch.testing.assert_close(again, out)


HEADS = [(4, 2, None), (4, 1, None), (4, 4, 8), (6, 3, 10), (3, None, 4)]


@pytest.mark.parametrize("separate", [False, True])
@pytest.mark.parametrize("heads", HEADS, ids=str)
def test_key_value_heads_and_head_dim(heads, separate, no_forward_of_nn):
    """Against the formula: F.linear, scores in float64."""
    torch.manual_seed(0)
    num_heads, num_heads_kv, head_dim = heads
    sizes = {"kdim": 10, "vdim": 14} if separate else {}
    layer = MultiheadAttention(
        16, num_heads, batch_first=True, num_heads_kv=num_heads_kv, head_dim=head_dim, dtype=torch.float64, **sizes
    )
    dim, groups = layer.head_dim, layer.num_heads_kv
    rows = [num_heads * dim, groups * dim, groups * dim]
    torch.nn.init.normal_(layer.in_proj_bias)
    query = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    key = torch.randn(2, 7, sizes.get("kdim", 16), dtype=torch.float64, requires_grad=True)
    value = torch.randn(2, 7, sizes.get("vdim", 16), dtype=torch.float64, requires_grad=True)
    if separate:
        weights = [layer.q_proj_weight, layer.k_proj_weight, layer.v_proj_weight]
        assert [tuple(w.shape) for w in weights] == [(rows[0], 16), (rows[1], 10), (rows[2], 14)]
    else:
        assert layer.in_proj_weight.shape == (sum(rows), 16)
        weights = layer.in_proj_weight.split(rows)
    q, k, v = (
        F.linear(x, w, b).unflatten(-1, (-1, dim)).transpose(1, 2)
        for x, w, b in zip((query, key, value), weights, layer.in_proj_bias.split(rows))
    )
    k, v = (x.repeat_interleave(num_heads // groups, 1) for x in (k, v))
    attended = (q @ k.mT * dim**-0.5).softmax(-1) @ v
    expected = F.linear(attended.transpose(1, 2).flatten(2), layer.out_proj.weight, layer.out_proj.bias)
    leaves = [query, key, value, *layer.parameters()]
    expected_grads = gradients([expected], leaves)
    with no_forward_of_nn as guard:
        out, _ = layer(query, key, value)
        grads = gradients([out], leaves)
    assert counts(guard.records) == {"attention_block_forward": 1, "attention_block_backward": 1}
    torch.testing.assert_close(out, expected)
    for got, wanted in zip(grads, expected_grads):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("interleaved", [False, True])
def test_rope_turns_scores_by_distance_alone(interleaved):
    """Equal tokens everywhere: scores depend on i - j, and at distance 0 they are those without rope."""
    layer = MultiheadAttention(16, 2, rope=Rope(base=100.0, interleaved=interleaved), batch_first=True)
    token = torch.randn(16)
    x = token.expand(1, 6, 16)
    _, weights = layer(x, x, x, average_attn_weights=False)
    scores = weights[0].log()
    scores = scores - scores.diagonal(dim1=1, dim2=2).unsqueeze(-1)
    torch.testing.assert_close(scores[:, 1:, 1:], scores[:, :-1, :-1], rtol=1e-4, atol=1e-5)
    q, k, _ = F.linear(token, layer.in_proj_weight, layer.in_proj_bias).view(3, 2, 8).unbind()
    first = slice(0, None, 2) if interleaved else slice(0, 4)
    second = slice(1, None, 2) if interleaved else slice(4, 8)
    q, k = (torch.complex(z[:, first], z[:, second]) for z in (q, k))
    angle = -1 * 100.0 ** (-torch.arange(0, 8, 2) / 8)
    turned = (q * k.conj() * torch.polar(torch.ones(4), angle)).real.sum(-1) - (q * k.conj()).real.sum(-1)
    torch.testing.assert_close(scores[:, 0, 1], turned * 8**-0.5, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("activation", ["relu", "gelu", F.gelu, torch.nn.SiLU(), torch.nn.GELU("tanh"), torch.tanh])
@pytest.mark.parametrize("norm_first", [True, False])
def test_encoder_layer(activation, norm_first, no_forward_of_nn):
    torch.manual_seed(0)
    options = {"activation": activation, "norm_first": norm_first, "batch_first": True, "dropout": 0.0}
    theirs, ours = pair("TransformerEncoderLayer", 16, 4, 24, **options)
    x = torch.randn(3, 6, 16, requires_grad=True)
    arguments = {"src_key_padding_mask": torch.arange(6) >= torch.tensor([[6], [4], [1]])}
    exact = run(in_double(theirs), [in_double(x)], arguments)
    yardstick = run(theirs, [x], arguments)
    with no_forward_of_nn as guard:
        got = run(ours, [x], arguments)
    assert_exact(got, yardstick, exact)
    expected = {"attention_block_forward": 2, "attention_block_backward": 1}
    if activation is not torch.tanh:
        expected |= {"feed_forward_block_forward": 2, "feed_forward_block_backward": 1}
    not_taken = [(record.reason, record.count) for record in guard.records if record.kernel is None]
    assert not_taken == ([("activation is tanh", 2)] if activation is torch.tanh else [])
    assert counts([record for record in guard.records if record.kernel]) == expected


def test_encoder_layer_in_torchs_encoder():
    torch.manual_seed(0)
    theirs, ours = pair("TransformerEncoderLayer", 16, 4, 24, batch_first=True, dropout=0.0)
    x = torch.randn(3, 6, 16)
    padding = torch.arange(6) >= torch.tensor([[6], [4], [1]])
    results = []
    for layer in (theirs, ours):
        encoder = torch.nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)
        results.append(encoder(x, src_key_padding_mask=padding))
    torch.testing.assert_close(results[1][~padding], results[0][~padding], rtol=1e-4, atol=1e-5)


def test_encoder_layer_drops_what_the_masks_say():
    """All four dropouts, by composing the layer with the masks of the seeds in the order in which they are drawn."""
    torch.manual_seed(0)
    layer = TransformerEncoderLayer(16, 4, 24, batch_first=True, dropout=0.3, norm_first=True, dtype=torch.float64)
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    torch.manual_seed(SEED)
    seeds = [int(torch.randint(0, 2**63 - 1, ())) for _ in range(4)]
    shapes = [(2, 4, 5, 5), (2, 1, 5, 16), (2, 1, 5, 24), (2, 1, 5, 16)]
    masks = [
        torch.from_numpy(polyhead.dropout_mask(shape, 0.3, seed, place % 2)) / 0.7  # each output has offset 1
        for place, (shape, seed) in enumerate(zip(shapes, seeds))
    ]
    attn = layer.self_attn
    q, k, v = (
        each.unflatten(-1, (4, 4)).transpose(1, 2)
        for each in F.linear(layer.norm1(x), attn.in_proj_weight, attn.in_proj_bias).chunk(3, -1)
    )
    heads = ((q @ k.mT / 2).softmax(-1) * masks[0]) @ v
    y = x + attn.out_proj(heads.transpose(1, 2).flatten(2)) * masks[1][:, 0]
    inner = layer.linear1(layer.norm2(y)).relu() * masks[2][:, 0]
    expected = y + layer.linear2(inner) * masks[3][:, 0]
    leaves = [x, *layer.parameters()]
    expected = [expected, *gradients([expected], leaves)]
    torch.manual_seed(SEED)
    out = layer(x)
    for got, wanted in zip([out, *gradients([out], leaves)], expected):
        torch.testing.assert_close(got, wanted)


@pytest.mark.parametrize("call, words", [
    (lambda layer, x: layer(x, x[:1], x), "value"),
    (lambda layer, x: layer(x, x[:1], x[:1]), "batch size"),
    (lambda layer, x: layer(x[..., :8], x, x), "must be of 16"),
    (lambda layer, x: layer(x, x, x, attn_mask=torch.zeros(4, 5)), "attn_mask"),
    (lambda layer, x: layer(x, x, x, attn_mask=torch.zeros(5, 5, dtype=torch.int32)), "int32"),
    (lambda layer, x: layer(x, x, x, key_padding_mask=torch.zeros(3, 5)), "key_padding_mask"),
    (lambda layer, x: layer(x.double(), x.double(), x.double()), "in_proj_weight is float32, must be float64"),
    (lambda layer, x: layer(x, x.double(), x), "key is float64"),
    (lambda layer, x: layer(*[x.int()] * 3), "query is int32"),
    (lambda layer, x: layer(x[0, 0], x[0, 0], x[0, 0]), "dimensions"),
])  # fmt: skip
def test_bad_input_is_named(call, words):
    layer = MultiheadAttention(16, 4, batch_first=True)
    with pytest.raises(polyhead.Error, match=words):
        call(layer, torch.randn(2, 5, 16))


def test_what_is_no_tensor_is_named():
    layer, x = MultiheadAttention(16, 4, batch_first=True), torch.randn(2, 5, 16)
    for arguments, options, name in (
        ((x, x, None), {}, "value"), ((3, x, x), {}, "query"), ((x, x, x), {"attn_mask": [True]}, "attn_mask"),
        ((x, x, x), {"key_padding_mask": 1}, "key_padding_mask"),
    ):  # fmt: skip
        with pytest.raises(TypeError, match=f"{name} has type"):
            layer(*arguments, **options)


@pytest.mark.parametrize("sizes", [(0, 5, 2), (5, 0, 2), (0, 0, 2), (5, 7, 0)])
def test_empty_sizes(sizes):
    """Nothing to attend to: out_proj's bias, and gradients of 0."""
    length, keys, batch = sizes
    layer = MultiheadAttention(16, 4, dropout=0.5, batch_first=True)
    query, key = torch.randn(batch, length, 16, requires_grad=True), torch.randn(batch, keys, 16, requires_grad=True)
    out, weights = layer(query, key, key)
    assert out.shape == query.shape and weights.shape == (batch, length, keys)
    torch.testing.assert_close(out, layer.out_proj.bias.expand_as(out))
    grads = gradients([out], [query, key, layer.in_proj_weight, layer.out_proj.weight])
    assert all(grad.count_nonzero() == 0 for grad in grads)


@pytest.mark.parametrize("arguments", [
    {"num_heads_kv": 3}, {"head_dim": 0}, {"num_heads": 5}, {"num_heads": 0}, {"embed_dim": 0},
])  # fmt: skip
def test_bad_sizes_are_named(arguments):
    with pytest.raises(polyhead.Error, match=next(iter(arguments))):
        MultiheadAttention(**{"embed_dim": 16, "num_heads": 4} | arguments)


@pytest.mark.parametrize("name", ["_multihead_attention", "_encoder_layer", "_fused_multi_head_attention"])
def test_docstrings(name):
    result = doctest.testmod(importlib.import_module(f"polyhead.torch.{name}"))
    assert result.attempted >= 3 and result.failed == 0
