"""The switch and torch.nn.attention.flex_attention: whoever imported it, eager and compiled, and what is left to torch."""

import copy
import types

import pytest
from optional import load, needs_torch, torch

pytestmark = needs_torch
if torch is not None:
    from torch.nn.attention import flex_attention as module
    from torch.nn.attention.flex_attention import AuxRequest, create_block_mask, flex_attention

    import polyhead.torch
    from torch_formula import random
    from torch_ops_test import same_bits
    from torch_switch_judge import assert_taken, counted

transformers = load("transformers")
OWN_CODE = None if torch is None else flex_attention.__code__


@pytest.fixture(autouse=True)
def torchs_own_formula(monkeypatch):
    """What is left to torch runs its formula: to compile takes it half a minute."""
    if torch is not None:
        monkeypatch.setattr(module, "_FLEX_ATTENTION_DISABLE_COMPILE_DEBUG", True)


def operands():
    return [random(2, 4, 20, 8, seed=i) for i in range(3)]


def causal(b, h, q, k):
    return q >= k


def test_the_name_that_was_imported_before():
    query, key, value = operands()
    slope = random(4)

    def score_mod(score, b, h, q, k):
        return score - slope[h] * (q - k)

    block_mask = create_block_mask(causal, 1, 1, 20, 20, device="cpu")
    with counted() as records:
        out, aux = flex_attention(query, key, value, score_mod, block_mask, return_aux=AuxRequest(lse=True))
        grads = torch.autograd.grad(out.sum() + aux.lse.sum(), [query, key, value, slope])
    assert_taken(records, backward=True)
    assert records[0].shape == "2x4x20x8"
    with torch.no_grad():
        expected = flex_attention(
            *(x.detach() for x in (query, key, value)), score_mod, block_mask, return_aux=AuxRequest(lse=True)
        )
    torch.testing.assert_close((out, aux.lse), (expected[0], expected[1].lse))
    ours = polyhead.torch.flex_attention(query, key, value, score_mod, block_mask, return_lse=True)
    for one, other in zip(grads, torch.autograd.grad(ours[0].sum() + ours[1].sum(), [query, key, value, slope])):
        same_bits(one, other)


def test_torch_compile_of_flex_attention_itself():
    inputs = operands()
    before = torch.compile(flex_attention)
    with counted() as records:
        results = [each(*inputs, lambda score, b, h, q, k: score * 0.5) for each in (before, torch.compile(flex_attention))]
        torch.autograd.grad(results[0].sum(), inputs)
    assert_taken(records, backward=True)
    for out in results:
        same_bits(out, polyhead.torch.flex_attention(*inputs, lambda score, b, h, q, k: score * 0.5))


def test_a_compiled_function_that_calls_it_is_torchs():
    inputs = [x.detach() for x in operands()]

    def function(query, key, value):
        return flex_attention(query * 2, key, value, lambda score, b, h, q, k: score - (q - k).abs())

    torch._dynamo.reset()
    with counted() as records:
        out = torch.compile(function, backend="aot_eager", fullgraph=True)(*inputs)
    assert [(record.op, record.kernel, record.reason) for record in records] == [
        ("flex_attention", None, "within torch.compile")
    ]
    torch.testing.assert_close(out, function(*inputs))


LEFT = {
    "cumsum": (lambda q: {"score_mod": lambda s, b, h, i, j: s + torch.cumsum(s.view(1), 0)[0]}, "score_mod calls torch.Tensor.view"),
    "integers": (lambda q: {"score_mod": lambda s, b, h, i, j: s + torch.special.i0(s)}, "score_mod calls torch.special.i0"),
}  # fmt: skip


@pytest.mark.parametrize("case", LEFT)
def test_what_cannot_be_said_is_left_to_torch(case):
    options, reason = LEFT[case]
    inputs = [x.detach() for x in operands()]
    expected = flex_attention(*inputs, **options(inputs[0]))
    with counted() as records:
        same_bits(flex_attention(*inputs, **options(inputs[0])), expected)
    assert [record.op for record in records] == ["flex_attention"] and reason in records[0].reason


def test_torchs_refusals_stay_torchs():
    with counted() as records:
        with pytest.raises(NotImplementedError, match="max scores"):
            flex_attention(*(x.detach() for x in operands()), return_aux=AuxRequest(max_scores=True))
    assert "max_scores is asked for" in records[0].reason
    meta = [x.detach().to("meta") for x in operands()]
    with counted() as records, pytest.raises(Exception):
        flex_attention(*meta)
    assert "on meta" in records[0].reason


def test_off_is_off():
    with polyhead.torch.enabled():
        assert flex_attention.__code__ is not OWN_CODE
    assert flex_attention.__code__ is OWN_CODE
    with pytest.raises(NotImplementedError, match="backward on CPU"):
        flex_attention(*operands())


def test_another_ones_change_stays():
    def theirs(*arguments, **options):
        return "theirs"

    with polyhead.torch.enabled():
        flex_attention.__code__ = theirs.__code__
    assert flex_attention() == "theirs"
    flex_attention.__code__ = OWN_CODE
    assert isinstance(flex_attention, types.FunctionType)


@pytest.mark.skipif(transformers is None, reason="transformers is not installed")
@pytest.mark.parametrize("name", ["llama", "gemma2", "gpt_oss"])
def test_transformers_train_through_it(name):
    """Padding on the left, windows, soft caps, grouped heads, sinks: logits and gradients are those of attention "eager"."""
    from transformers_models import DECODERS

    model_name, config_name, sizes = DECODERS[name]
    config = getattr(transformers, config_name)(**sizes)
    make = getattr(transformers, model_name)._from_config
    torch.manual_seed(0)
    eager = make(copy.deepcopy(config), attn_implementation="eager").train()
    flex = make(copy.deepcopy(config), attn_implementation="flex_attention").train()
    flex.load_state_dict(eager.state_dict())
    tokens, mask = torch.randint(3, 99, (2, 11)), torch.ones(2, 11, dtype=torch.long)
    mask[1, :3] = 0
    results = []
    with counted() as records:
        for model in (eager, flex):
            logits = model(input_ids=tokens, attention_mask=mask).logits
            (logits.square() * mask.unsqueeze(2)).sum().backward()
            results.append([logits * mask.unsqueeze(2), *(x.grad for x in model.parameters())])
    assert_taken([record for record in records if "attention" in record.op], backward=True)
    assert sum(record.count for record in records) == 4  # two layers, forward and backward
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=5e-5)
    if name == "gpt_oss":  # without the switch
        with pytest.raises(ValueError, match="Attention sinks cannot be run on CPU"):
            flex(input_ids=tokens, attention_mask=mask)
