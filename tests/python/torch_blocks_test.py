"""The operators of blocks: opcheck, each number's meaning, FusedMultiHeadAttention; all again over the binding."""

import os
import random as stdlib_random
import re
import subprocess
import sys

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from polyhead.torch import FusedMultiHeadAttention
from polyhead.torch._block_composition import attention_block as composed_attention
from polyhead.torch._block_composition import feed_forward_block as composed_feed_forward
from polyhead.torch._block_ops import ACTIVATIONS, NORMS, NUM_DIFFERENTIABLE, AttentionBlock, FeedForwardBlock
from torch.library import opcheck
from torch.nn import functional as F
from torch_switch_judge import SEED, gradients

pytestmark = pytest.mark.usefixtures("one_thread")

DTYPES = [torch.float32, torch.float64]
SEEDS = {f"{name}dropout_p": f"{name}dropout_seed" for name in ("", "inner_", "output_")}


if os.environ.get("POLYHEAD_TORCH_OPS") == "python":
    assert polyhead.torch.implementation() == "Python"


@pytest.mark.skipif(os.environ.get("POLYHEAD_TORCH_OPS") == "python", reason="this is the run over the binding")
def test_everything_again_over_the_python_binding():
    """The same tests where no compiled operators are; what Inductor compiles for long again under --full alone."""
    folder = os.path.dirname(__file__)
    left_out = [] if "POLYHEAD_TEST_FULL" in os.environ else ["-k", "not packaged_program"]
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", __file__,
         *(os.path.join(folder, f"torch_layers_{name}.py") for name in ("test", "machinery_test")), *left_out],
        env=os.environ | {"POLYHEAD_TORCH_OPS": "python", "POLYHEAD_TEST_EVERY": "7"}, capture_output=True, text=True,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-3000:]
    assert int(re.search(r"(\d+) passed", run.stdout)[1]) > 200


def random(*shape, dtype, seed):
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)


def seeded(numbers):
    return numbers | {SEEDS[name]: torch.tensor(index - 3) for index, name in enumerate(SEEDS) if numbers.get(name)}


def attention_arguments(case, dtype, batch_first=True):
    """B 2, Sq 5, Sk 7, H 4, G 2, D 6."""
    sizes = {"query": 16, "key": 16, "value": 16}
    sizes |= {"key": 10, "value": 14} if case.get("separate") else {}
    lengths = {"query": 5, "key": 7, "value": 7}
    given = ["query"] if case.get("itself") else ["query", "key"] + ["value"] * bool(case.get("separate"))
    tokens = {}
    for seed, name in enumerate(given):
        shape = (2, lengths[name], sizes[name]) if batch_first else (lengths[name], 2, sizes[name])
        tokens[name] = random(*shape, dtype=dtype, seed=seed)
    out_size = 16 if case.get("residual") else 9
    weights = {"out_proj_weight": random(out_size, 24, dtype=dtype, seed=4) / 5}
    if case.get("separate"):
        for seed, (name, rows) in enumerate((("query", 24), ("key", 12), ("value", 12))):
            weights[f"{name[0]}_proj_weight"] = random(rows, sizes[name], dtype=dtype, seed=5 + seed) / 4
    else:
        weights["in_proj_weight"] = random(48, 16, dtype=dtype, seed=5) / 4
    if case.get("in_first"):
        weights = {name: weight.t().contiguous().t() for name, weight in weights.items()}
    if case.get("bias", True):
        weights["in_proj_bias"] = random(48, dtype=dtype, seed=8)
        weights["out_proj_bias"] = random(out_size, dtype=dtype, seed=9)
    if case.get("norm_kind"):
        size = 16 if case.get("norm_first") else out_size
        weights |= {"norm_weight": random(size, dtype=dtype, seed=10), "norm_bias": random(size, dtype=dtype, seed=11)}
    keys = 5 if case.get("itself") else 7
    scores = {}
    if case.get("attn_bias"):
        scores["attn_bias"] = random(4, 5, keys, dtype=dtype, seed=12)
    if case.get("attn_mask"):
        scores["attn_mask"] = random(2, 1, 5, keys, dtype=dtype, seed=13) > -0.5
    numbers = {name: value for name, value in case.items() if name in AttentionBlock._fields[16:]}
    return AttentionBlock(
        **tokens, **weights, **scores, **seeded(numbers), num_heads=4, num_heads_kv=2, batch_first=batch_first
    )


ATTENTION = {
    "plain": {},
    "itself": {"itself": True},
    "separate": {"separate": True},
    "no_bias": {"bias": False, "itself": True},
    "in_first": {"in_first": True, "itself": True},
    "causal": {"causal": True, "scale": 0.3},
    "scores": {"attn_bias": True, "attn_mask": True},
    "weights": {"return_weights": 1, "dropout_p": 0.3},
    "mean": {"return_weights": 2},
    "pre_norm": {"itself": True, "norm_kind": NORMS["layer"], "norm_first": True, "residual": True},
    "post_norm": {"norm_kind": NORMS["layer"], "residual": True, "norm_eps": 1e-3},
    "rms": {"norm_kind": NORMS["rms"], "norm_first": True, "separate": True},
    "everything": {
        "itself": True, "norm_kind": NORMS["rms"], "residual": True, "attn_bias": True, "attn_mask": True,
        "dropout_p": 0.2, "output_dropout_p": 0.4,
    },
}  # fmt: skip
FEED_FORWARD = {
    "plain": {"activation": ACTIVATIONS["relu"]},
    "gelu": {"activation": ACTIVATIONS["gelu"], "norm_kind": NORMS["layer"], "norm_first": True, "residual": True},
    "tanh": {"activation": ACTIVATIONS["gelu_tanh"], "norm_kind": NORMS["rms"], "residual": True},
    "silu": {"activation": ACTIVATIONS["silu"], "bias": False, "inner_dropout_p": 0.3, "output_dropout_p": 0.2},
}


def feed_forward_arguments(case, dtype):
    weights = {"weight1": random(20, 16, dtype=dtype, seed=1) / 4, "weight2": random(16, 20, dtype=dtype, seed=2) / 4}
    if case.get("bias", True):
        weights |= {"bias1": random(20, dtype=dtype, seed=3), "bias2": random(16, dtype=dtype, seed=4)}
    if case.get("norm_kind"):
        weights |= {"norm_weight": random(16, dtype=dtype, seed=5), "norm_bias": random(16, dtype=dtype, seed=6)}
    numbers = {name: value for name, value in case.items() if name in FeedForwardBlock._fields}
    return FeedForwardBlock(random(3, 5, 16, dtype=dtype, seed=0), **weights, **seeded(numbers))


def requiring(arguments):
    """The same, whose differentiable tensors are leaves that require a gradient; and these."""
    count = NUM_DIFFERENTIABLE[type(arguments)]
    leaves = [None if each is None else each.detach().requires_grad_() for each in arguments[:count]]
    return type(arguments)(*leaves, *arguments[count:]), [leaf for leaf in leaves if leaf is not None]


def compare(operator, composed, arguments):
    """The fused operator against torch's operations around attention, gradients included."""
    arguments, leaves = requiring(arguments)
    expected = [result for result in composed(*arguments) if result is not None]
    results = [result for result in operator(*arguments)[:-1] if result is not None]
    assert len(results) == len(expected)
    tolerance = {"rtol": 1e-9, "atol": 1e-10} if results[0].dtype == torch.float64 else {"rtol": 1e-4, "atol": 2e-5}
    for got, wanted in zip(results, expected):
        torch.testing.assert_close(got, wanted, **tolerance)
        assert got.is_contiguous()
    grads, expected_grads = gradients(results[:1], leaves), gradients(expected[:1], leaves)
    for leaf, got, wanted in zip(leaves, grads, expected_grads):
        torch.testing.assert_close(got, wanted, **tolerance)
        if leaf.dim() == 2:
            assert got.stride() == leaf.stride()
    with torch.no_grad():
        torch.testing.assert_close(operator(*arguments)[0], results[0], **tolerance)


@pytest.mark.parametrize("batch_first", [True, False])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", ATTENTION)
def test_attention_block(case, dtype, batch_first):
    arguments = attention_arguments(ATTENTION[case], dtype, batch_first)
    compare(torch.ops.polyhead.attention_block_forward, composed_attention, arguments)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", FEED_FORWARD)
def test_feed_forward_block(case, dtype):
    arguments = feed_forward_arguments(FEED_FORWARD[case], dtype)
    compare(torch.ops.polyhead.feed_forward_block_forward, composed_feed_forward, arguments)


# test_aot_dispatch compares all results, and a reserve has gaps that nobody writes; torch_layers_test compiles.
CHECKS = ("test_schema", "test_autograd_registration", "test_faketensor")


@pytest.mark.parametrize("case", ATTENTION)
def test_opcheck_attention_block(case):
    arguments = attention_arguments(ATTENTION[case], torch.float32)
    operator = torch.ops.polyhead.attention_block_forward.default
    opcheck(operator, (*arguments[:-1], True), test_utils=CHECKS)
    opcheck(operator, tuple(requiring(arguments)[0]), test_utils=CHECKS)
    out, _, reserve = operator(*arguments[:-1], True)
    needs = sum(1 << bit for bit, each in enumerate(arguments[:13]) if each is not None)
    backward = torch.ops.polyhead.attention_block_backward.default
    opcheck(backward, (out, reserve, needs, *arguments[:-1]), test_utils=("test_schema", "test_faketensor"))


@pytest.mark.parametrize("case", FEED_FORWARD)
def test_opcheck_feed_forward_block(case):
    arguments = feed_forward_arguments(FEED_FORWARD[case], torch.float32)
    operator = torch.ops.polyhead.feed_forward_block_forward.default
    opcheck(operator, (*arguments[:-1], True), test_utils=CHECKS)
    out, reserve = operator(*arguments[:-1], True)
    needs = sum(1 << bit for bit, each in enumerate(arguments[:7]) if each is not None)
    backward = torch.ops.polyhead.feed_forward_block_backward.default
    opcheck(backward, (out, reserve, needs, *arguments[:-1]), test_utils=("test_schema", "test_faketensor"))


def test_backward_twice_gives_the_same():
    """Backward leaves the reserve as it is."""
    arguments, leaves = requiring(attention_arguments(ATTENTION["everything"], torch.float32))
    out = torch.ops.polyhead.attention_block_forward(*arguments)[0]
    first = torch.autograd.grad(out.sum(), leaves, retain_graph=True)
    for got, expected in zip(torch.autograd.grad(out.sum(), leaves), first):
        assert torch.equal(got, expected)


STRANGE_NUMBERS = {
    bool: (False, True), int: (0, -1, 1, 3, 2**40, 2**63 - 1),
    float: (0.0, 0.5, 1.0, -1.0, 1e300, float("nan"), float("inf")),
}  # fmt: skip


def strange(value, choose):
    """Something else in the place of an argument."""
    if not isinstance(value, torch.Tensor):
        return choose.choice(STRANGE_NUMBERS[type(value)])
    changes = [value.double(), value.int(), value.unsqueeze(0), value.new_zeros(())]
    if value.dim():
        last = value.shape[-1]
        changes += [value[..., : last // 2], value[..., :0], value[:0], value.repeat_interleave(2, 0), value.flip(-1)]
        changes += [value[..., :1].expand(value.shape), value.transpose(0, -1), torch.full_like(value, 3)]
    return choose.choice(changes)


@pytest.mark.parametrize("name", ["attention_block", "feed_forward_block"])
def test_random_arguments_compute_or_are_refused(name):
    """A ValueError with a sentence, whatever comes; never a crash."""
    cases = ATTENTION if name == "attention_block" else FEED_FORWARD
    forward, backward = (getattr(torch.ops.polyhead, f"{name}_{direction}") for direction in ("forward", "backward"))
    choose = stdlib_random.Random(7)
    refused = 0
    for _ in range(int(os.environ.get("POLYHEAD_RANDOM_PROBLEMS", "300"))):
        case = choose.choice(list(cases.values()))
        good = (attention_arguments if name == "attention_block" else feed_forward_arguments)(case, torch.float32)
        out, *_, reserve = forward(*good[:-1], True)
        both = [out, reserve, 2 ** NUM_DIFFERENTIABLE[type(good)] - 1, *good[:-1]]
        for operator, arguments in ((forward, [*good[:-1], True]), (backward, both)):
            there = [i for i, each in enumerate(arguments) if each is not None]
            for i in choose.sample(there, choose.randint(1, 2)):
                arguments[i] = strange(arguments[i], choose)
            try:
                operator(*arguments)
            except ValueError as error:
                assert str(error)
                refused += 1
    assert refused > 100


@pytest.mark.parametrize("change, words", [
    ({"num_heads_kv": 3}, "num_heads_kv"), ({"num_heads": 0}, "num_heads"),
    ({"num_heads": 5, "num_heads_kv": 5}, "rows"),
    ({"in_proj_weight": None}, "in_proj_weight"), ({"in_proj_bias": torch.zeros(47)}, "in_proj_bias"),
    ({"out_proj_weight": torch.zeros(9, 23)}, "out"), ({"dropout_p": 0.5}, "dropout_seed"),
    ({"dropout_p": 2.0}, "dropout"),
    ({"norm_kind": 3}, "norm_kind"), ({"return_weights": 4}, "return_weights"), ({"residual": True}, "residual"),
    ({"query": torch.zeros(2, 5, 15)}, "15"), ({"value": torch.zeros(2, 6, 16)}, "value"),
])  # fmt: skip
def test_bad_arguments_are_named(change, words):
    arguments = attention_arguments(ATTENTION["plain"], torch.float32)._replace(**change)
    with pytest.raises(ValueError, match=words), torch.no_grad():
        torch.ops.polyhead.attention_block_forward(*arguments)


def test_one_seed_serves_both_dropouts():
    """An identity at p = .5 and .5 keeps a quarter."""
    x, eye, seed = torch.ones(1, 512, 16), torch.eye(16), torch.tensor(5)
    block = FeedForwardBlock(
        x, eye, None, eye, None, None, None, seed, seed, ACTIVATIONS[None], 0.5, 0.5, NORMS[None], False, 1e-5, False
    )
    for out in (composed_feed_forward(*block)[0],
                torch.ops.polyhead.feed_forward_block_forward(*block[:-1], True)[0]):  # fmt: skip
        assert abs((out != 0).double().mean() - 0.25) < 0.03


def test_a_strange_reserve_is_refused():
    arguments = attention_arguments(ATTENTION["plain"], torch.float32)
    out, _, reserve = torch.ops.polyhead.attention_block_forward(*arguments[:-1], True)
    for strange in (reserve[1:], torch.zeros_like(reserve), reserve.float()):
        with pytest.raises(ValueError, match="reserve"):
            torch.ops.polyhead.attention_block_backward(out, strange, 1, *arguments[:-1])


@pytest.mark.parametrize("transpose_qkv_wb", [False, True])
@pytest.mark.parametrize("normalize_before", [False, True])
@pytest.mark.parametrize("masked", [None, "bool", "int", "float"])
def test_fused_multi_head_attention(masked, normalize_before, transpose_qkv_wb):
    """Against Paddle's documented formula, dropouts drawn from the seeds in order."""
    torch.manual_seed(0)
    layer = FusedMultiHeadAttention(
        16, 4, 0.2, 0.3, normalize_before=normalize_before, transpose_qkv_wb=transpose_qkv_wb, epsilon=1e-3,
        qkv_bias_attr=torch.nn.init.normal_, ln_scale_attr=torch.nn.init.normal_, need_weights=True,
        dtype=torch.float64,
    )  # fmt: skip
    shapes = {name: tuple(each.shape) for name, each in layer.named_parameters()}
    norm = "pre_ln" if normalize_before else "ln"
    qkv = ((16, 48), (48,)) if transpose_qkv_wb else ((3, 4, 4, 16), (3, 4, 4))
    assert shapes == {
        "qkv_weight": qkv[0], "qkv_bias": qkv[1], "linear_weight": (16, 16), "linear_bias": (16,),
        f"{norm}_scale": (16,), f"{norm}_bias": (16,),
    }  # fmt: skip
    x = torch.randn(2, 5, 16, dtype=torch.float64, requires_grad=True)
    visible = torch.rand(2, 1, 5, 5) > 0.3
    visible[..., 0] = True  # or torch has NaN
    mask = {None: None, "bool": visible, "int": visible.int(), "float": torch.randn(4, 5, 5)}[masked]
    torch.manual_seed(SEED)
    seeds = [int(torch.randint(0, 2**63 - 1, ())) for _ in range(2)]
    drop = [
        torch.from_numpy(polyhead.dropout_mask(shape, p, seed, offset)) / (1 - p)
        for offset, (shape, p, seed) in enumerate(zip([(2, 4, 5, 5), (2, 1, 5, 16)], (0.3, 0.2), seeds))
    ]
    scale, bias = getattr(layer, f"{norm}_scale"), getattr(layer, f"{norm}_bias")
    y = F.layer_norm(x, (16,), scale, bias, 1e-3) if normalize_before else x
    weight = layer.qkv_weight if transpose_qkv_wb else layer.qkv_weight.reshape(48, 16).t()
    q, k, v = (y @ weight + layer.qkv_bias.reshape(48)).view(2, 5, 3, 4, 4).permute(2, 0, 3, 1, 4)
    scores = q @ k.mT / 2
    if masked == "float":
        scores = scores + mask
    elif masked:
        scores = scores.masked_fill(~visible, float("-inf"))
    weights = scores.softmax(-1) * drop[0]
    out = (weights @ v).transpose(1, 2).reshape(2, 5, 16) @ layer.linear_weight + layer.linear_bias
    out = x + out * drop[1][:, 0]
    out = out if normalize_before else F.layer_norm(out, (16,), scale, bias, 1e-3)
    leaves = [x, *layer.parameters()]
    expected = [out, weights, *gradients([out], leaves)]
    torch.manual_seed(SEED)
    polyhead.torch.report(reset=True)
    results = layer(x, attn_mask=mask)
    got = [*results, *gradients(results[:1], leaves)]
    ran = {record.op: record.count for record in polyhead.torch.report(reset=True)}
    assert ran == {"attention_block_forward": 1, "attention_block_backward": 1}
    for one, wanted in zip(got, expected):
        torch.testing.assert_close(one, wanted)


def test_fused_multi_head_attention_without_biases_and_of_another_sequence():
    layer = FusedMultiHeadAttention(16, 4, 0.0, 0.0, qkv_bias_attr=False, linear_bias_attr=False, ln_bias_attr=False)
    assert layer.qkv_bias is layer.linear_bias is layer.ln_bias is layer.pre_ln_scale is None
    x, y = torch.randn(2, 5, 16), torch.randn(2, 7, 16)
    assert layer(x, y, y).shape == x.shape
    torch.testing.assert_close(layer(x, x, x), layer(x))


@pytest.mark.parametrize("arguments, words", [
    ({"embed_dim": 15}, "embed_dim"), ({"kdim": 8}, "kdim"), ({"nranks": 2}, "nranks"),
    ({"qkv_weight_attr": False}, "False"),
])  # fmt: skip
def test_fused_multi_head_attention_names_bad_input(arguments, words):
    with pytest.raises(polyhead.Error, match=words):
        FusedMultiHeadAttention(**{"embed_dim": 16, "num_heads": 4} | arguments)
