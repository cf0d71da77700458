"""`polyhead.torch.register_transformers`: tiny Hugging Face models with random weights, eager against "polyhead"."""

import itertools

import pytest
from optional import load, needs_torch, torch
from transformers_models import DECODERS, ENCODERS, MODELS, SEQ2SEQ, cache_name, inputs, main_output, make

transformers = load("transformers") if torch is not None else None
pytestmark = [needs_torch, pytest.mark.skipif(transformers is None, reason="transformers is not installed")]
if transformers is not None:
    from transformers import masking_utils
    from transformers.generation import ContinuousBatchingConfig

    import polyhead.torch
    from polyhead.torch import _continuous_batching, _transformers

    polyhead.torch.register_transformers()
    transformers.logging.set_verbosity_error()


@pytest.fixture
def taken(monkeypatch):
    """The options of every call of `attention` by transformers."""
    calls = []
    real = _transformers.attention

    def attention(query, key, value, **options):
        calls.append(options | {"sizes": (query.shape[1], key.shape[1])})
        return real(query, key, value, **options)

    monkeypatch.setattr(_transformers, "attention", attention)
    return calls


def close(got, expected, tolerance=2e-5):
    assert got.shape == expected.shape
    worst = (got - expected).abs().max().item() if got.numel() else 0.0
    assert worst <= tolerance * (1 + expected.abs().max().item() if got.numel() else 1), worst


def run(model, arguments, counts, **more):
    """The output where it counts, and its gradient by every parameter."""
    model.zero_grad()
    output = main_output(model(**arguments, **more))
    output = output if counts is None else output[counts]
    weights = torch.randn(output.shape, generator=torch.Generator().manual_seed(2))
    (output * weights).sum().backward()
    return output.detach(), {name: p.grad for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", MODELS)
def test_forward_and_gradients(name, taken):
    eager, ours = make(transformers, name)
    arguments, counts = inputs(name)
    exact, exact_grads = run(eager, arguments, counts)
    assert not taken
    output, grads = run(ours, arguments, counts)
    assert len(taken) >= 2  # two layers at least
    assert not any(call["return_weights"] for call in taken)
    close(output, exact)
    assert grads.keys() == exact_grads.keys()
    for parameter, grad in grads.items():
        close(grad, exact_grads[parameter], 1e-4)
    # A padded causal mask is not spelled out.
    masks = [call["attn_mask"] for call in taken if call.get("attn_mask") is not None]
    assert all(mask.shape[-2] == 1 for mask in masks)
    if name in ENCODERS | DECODERS:
        assert masks


def test_windows_and_soft_caps_arrive(taken):
    for name, expected in (
        ("mistral", {(4, -1)}), ("gemma2", {(4, -1), None}), ("modernbert", {(3, 3), None}), ("llama", {None})
    ):  # fmt: skip
        taken.clear()
        _, ours = make(transformers, name)
        ours(**inputs(name)[0])
        assert {call.get("window") for call in taken} == expected
        assert {call["softcap"] for call in taken} == {0.5 if name == "gemma2" else 0.0}


@pytest.mark.parametrize("name", DECODERS)
def test_generate_with_a_cache(name, taken):
    eager, ours = make(transformers, name)
    arguments, _ = inputs(name)
    options = dict(max_new_tokens=7, do_sample=False, pad_token_id=0)
    expected = eager.generate(**arguments, **options)
    assert torch.equal(ours.generate(**arguments, **options), expected)
    assert {call["sizes"][0] for call in taken} == {11, 1}  # the prompt, then one token at a time
    assert {call["sizes"][1] for call in taken if call["sizes"][0] == 1} & {12, 5}  # all before it, or its window


@pytest.mark.parametrize("name", SEQ2SEQ)
def test_generate_after_an_encoder(name, taken):
    eager, ours = make(transformers, name)
    arguments, _ = inputs(name)
    del arguments["decoder_input_ids"]
    options = dict(max_new_tokens=6, do_sample=False, num_beams=1 if name == "whisper" else 2)
    assert torch.equal(ours.generate(**arguments, **options), eager.generate(**arguments, **options))
    assert taken


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_generate_with_a_static_cache(name):
    eager, ours = make(transformers, name)
    arguments, _ = inputs(name)
    options = dict(max_new_tokens=7, do_sample=False, cache_implementation="static", disable_compile=True)
    assert torch.equal(ours.generate(**arguments, **options), eager.generate(**arguments, **options))


def test_a_prompt_in_two_pieces():
    eager, ours = make(transformers, "mistral")
    arguments, counts = inputs("mistral")
    exact = eager(**arguments).logits
    ids, mask = arguments.values()
    name = cache_name(transformers)
    first = ours(input_ids=ids[:, :7], attention_mask=mask[:, :7], use_cache=True)
    second = ours(input_ids=ids[:, 7:], attention_mask=mask, **{name: first[name]})
    logits = torch.cat([first.logits, second.logits], dim=1)
    # The pieces' positions count padding, as those of a whole prompt do.
    close(logits[counts], exact[counts])


@pytest.mark.parametrize("name", ["bert", "gpt2", "llama", "gemma2", "t5", "bart", "whisper", "vit", "clip"])
def test_output_attentions(name):
    eager, ours = make(transformers, name)
    arguments, counts = inputs(name)
    expected, got = eager(**arguments, output_attentions=True), ours(**arguments, output_attentions=True)
    if name == "clip":
        expected, got = expected.vision_model_output, got.vision_model_output
        arguments_seen = {"attentions"}
    else:
        arguments_seen = {key for key in expected.keys() if key.endswith("attentions") and expected[key]}
    assert arguments_seen
    for key in arguments_seen:
        assert len(got[key]) == len(expected[key]) > 0
        for weights, exact in zip(got[key], expected[key]):
            if counts is not None:  # queries in padding differ: 0, where eager looks at everything alike
                weights, exact = weights * counts[:, None, :, None], exact * counts[:, None, :, None]
            close(weights, exact)
    assert not ours(**arguments).get("attentions")


def test_gradients_through_the_weights():
    grads = []
    for model in make(transformers, "llama"):
        arguments, counts = inputs("llama")
        weights = model(**arguments, output_attentions=True).attentions[1]
        (weights * counts[:, None, :, None]).square().sum().backward()
        grads.append({name: p.grad for name, p in model.named_parameters() if p.grad is not None})
    for name, grad in grads[0].items():
        close(grads[1][name], grad, 1e-4)


def test_dropout_in_training():
    _, ours = make(transformers, "llama", attention_dropout=0.3)
    arguments, counts = inputs("llama")
    without = ours(**arguments).logits
    ours.train()
    runs = []
    for seed, checkpointing in ((1, False), (1, False), (2, False), (1, True)):
        if checkpointing:
            ours.gradient_checkpointing_enable()
        torch.manual_seed(seed)
        runs.append(run(ours, arguments, counts))
    (first, grads), (again, _), (other, _), (checkpointed, checkpointed_grads) = runs
    assert torch.equal(first, again) and torch.equal(first, checkpointed)
    assert not torch.equal(first, other) and not torch.equal(first, without[counts])
    for name, grad in grads.items():
        close(checkpointed_grads[name], grad, 1e-6)


# -- packed sequences -------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "mistral", "qwen3"])
def test_packed_sequences(name, taken):
    """Sequences side by side in a row, told by positions that start again or by cu_seq_lens."""
    eager, ours = make(transformers, name)
    ids = inputs(name)[0]["input_ids"][:1].repeat(2, 1) + torch.tensor([[0], [1]])
    positions = torch.tensor([[0, 1, 2, 3, 4, 5, 6, 0, 1, 2, 3], [0, 0, 1, 2, 0, 1, 2, 3, 4, 5, 6]])
    exact, exact_grads = run(eager, {"input_ids": ids, "position_ids": positions, "use_cache": False}, None)
    output, grads = run(ours, {"input_ids": ids, "position_ids": positions, "use_cache": False}, None)
    close(output, exact)
    for parameter, grad in grads.items():
        close(grad, exact_grads[parameter], 1e-4)
    assert all(call["cu_seqlens_q"].tolist() == [0, 7, 11, 12, 15, 22] for call in taken)
    starts = torch.tensor([0, 7, 11], dtype=torch.int32)
    lengths = dict(cu_seq_lens_q=starts, cu_seq_lens_k=starts, max_length_q=7, max_length_k=7)
    for more in (lengths, {}):
        taken.clear()
        row = {"input_ids": ids[:1], "position_ids": positions[:1], "use_cache": False}
        close(ours(**row, **more).logits, exact[:1])
        assert all(call["cu_seqlens_k"].tolist() == [0, 7, 11] for call in taken)


# -- continuous batching ----------------------------------------------------------------------------------------------


def batched(model, prompts, implementation, num_new):
    """Of prompts that are cut into pieces and packed with others' single tokens, in pages of 4."""
    model.set_attn_implementation(implementation)
    result = model.generate_batch(
        prompts,
        transformers.GenerationConfig(max_new_tokens=num_new, do_sample=False, eos_token_id=-1, pad_token_id=0),
        continuous_batching_config=ContinuousBatchingConfig(page_size=4, num_blocks=40, max_batch_tokens=16),
        progress_bar=False,
    )  # fmt: skip
    return [result[request].generated_tokens for request in sorted(result)]


@pytest.mark.parametrize("name, in_pages", [("llama", 2), ("gemma2", 1), ("gpt_oss", 1)])
def test_continuous_batching(name, in_pages, monkeypatch):
    pytest.importorskip("psutil", reason="transformers sizes its cache by it")
    model = make(transformers, name)[0]
    random, num_new = torch.Generator().manual_seed(3), 6
    prompts = [torch.randint(3, 99, (n,), generator=random).tolist() for n in (5, 3, 29, 1, 17)]
    expected = [
        model.generate(torch.tensor([prompt]), max_new_tokens=num_new, do_sample=False)[0, len(prompt) :].tolist()
        for prompt in prompts
    ]
    calls, real = [], _continuous_batching.attention
    recorded = lambda *tensors, **options: calls.append(options) or real(*tensors, **options)  # noqa: E731
    monkeypatch.setattr(_continuous_batching, "attention", recorded)
    monkeypatch.setattr(type(model), "_compatible_flash_implementations", None)  # gpt_oss has a list, of GPUs' kernels
    assert batched(model, prompts, "polyhead_flash", num_new) == expected
    layers = [calls[first :: len(model.model.layers)] for first in range(len(model.model.layers))]
    assert sum(any("page_table" in call for call in layer) for layer in layers) == in_pages
    assert any(len(call["cu_seqlens_q"]) == 6 for call in calls)  # all of them at once
    if name == "llama":
        assert batched(model, prompts, "sdpa", num_new) == expected


def test_polyhead_flash_is_polyhead_elsewhere(taken):
    eager, ours = make(transformers, "llama")
    arguments, counts = inputs("llama")
    ours.set_attn_implementation("polyhead_flash")
    close(ours(**arguments).logits[counts], eager(**arguments).logits[counts])
    assert len(taken) == 2 and all(call["causal"] for call in taken)


# -- the mask ---------------------------------------------------------------------------------------------------------


def mask_requests():
    """Arguments with which transformers asks for masks, and whether the answer is a `BandMask`."""
    packed = torch.tensor([[0] * 4 + [1] * 5, [0] * 9, [0] + [1] * 3 + [2] * 5])
    positions = torch.tensor([[0, 1, 2, 3, 0, 1, 2, 3, 4], list(range(9)), [0, 0, 1, 2, 0, 1, 2, 3, 4]])
    padding = torch.ones(3, 9, dtype=torch.bool)
    padding[1, :3] = padding[2, :9] = False
    utils = masking_utils
    functions = [
        (utils.causal_mask_function, True),
        (utils.bidirectional_mask_function, True),
        (utils.sliding_window_causal_mask_function(3), True),
        (utils.sliding_window_bidirectional_mask_function(2), True),
        (utils.chunked_causal_mask_function(3, torch.zeros(3, dtype=torch.long)), False),
        (utils.or_masks(utils.causal_mask_function, utils.blockwise_overlay(packed)), False),
        (lambda b, h, q, k: (k + q) % 2 == 0, False),
    ]
    for (function, known), pad in itertools.product(functions, (None, padding)):
        yield dict(q_length=9, kv_length=9, mask_function=function, attention_mask=pad), known
    for function, q_offset, kv_offset in [(functions[0][0], 6, 0), (functions[2][0], 6, 4), (functions[2][0], 2, 0)]:
        yield dict(
            q_length=3, kv_length=9 - kv_offset, q_offset=q_offset, kv_offset=kv_offset, mask_function=function,
            attention_mask=padding,
        ), True  # fmt: skip
    for function in (functions[0][0], functions[2][0]):
        parts = utils.remap_positions_for_packed_sequence(function, positions), utils.packed_sequence_mask_function(packed)
        for both in (parts, parts[::-1]):  # from 5.24 on, and before
            yield dict(q_length=9, kv_length=9, mask_function=utils.and_masks(*both)), True


@pytest.mark.parametrize("request_, known", list(mask_requests()) if transformers is not None else [])
def test_a_mask_is_what_was_asked_for(request_, known):
    request_ = dict(batch_size=3, **request_)
    expected = masking_utils.sdpa_mask(**request_, allow_is_causal_skip=False)
    mask = _transformers._mask(**request_, allow_is_causal_skip=True, allow_is_bidirectional_skip=True)
    assert isinstance(mask, _transformers.BandMask) == known
    assert mask.shape == expected.shape and mask.dtype == torch.bool
    assert torch.equal(mask & True, expected)
    assert type(mask[:, :, :2, 1:]) is torch.Tensor and torch.equal(mask[:, :, :2, 1:], expected[:, :, :2, 1:])
    assert torch.equal(torch.where(mask, 1.0, 2.0), torch.where(expected, 1.0, 2.0))


def test_a_model_s_own_mask():
    """[B, 1, S, S], of bools or to be added."""
    eager, ours = make(transformers, "llama")
    ids = inputs("llama")[0]["input_ids"]
    visible = torch.ones(3, 1, 11, 11).tril().bool()
    visible[:, :, 4:, 2] = False
    added = torch.zeros(visible.shape).masked_fill(~visible, torch.finfo(torch.float32).min)
    exact = eager(input_ids=ids, attention_mask=added).logits
    for mask in (visible, added, added.masked_fill(~visible, float("-inf"))):
        close(ours(input_ids=ids, attention_mask=mask).logits, exact)


# -- refusals ---------------------------------------------------------------------------------------------------------


def refused_calls():
    x = torch.zeros(1, 2, 5, 8)
    longer = torch.zeros(1, 2, 9, 8)
    starts = torch.tensor([0, 5], dtype=torch.int32)
    module = torch.nn.Module()
    module.layer_idx = 0
    call = _transformers._attention
    two = x.expand(2, -1, -1, -1)
    return [
        (lambda: call(module, x, x, x, torch.ones(1, 5)), ValueError, "attention_mask has 2 dimensions, must have 4"),
        (
            lambda: call(module, two, two, two, None, cu_seq_lens_q=starts, cu_seq_lens_k=starts), ValueError,
            "cu_seq_lens_q ends at 5, must tell the sequences of all 2 rows",
        ),
        (lambda: call(module, x, x, x, None, head_mask=torch.ones(2)), NotImplementedError, "Module gives head_mask"),
        (lambda: call(module, x, x, x, None, unheard_of=1.0), NotImplementedError, "Module gives unheard_of"),
        (
            lambda: call(module, x, x, x, None, cache=transformers.DynamicCache(), read_index=[starts]), NotImplementedError,
            "cache is a DynamicCache, must be the one that generate_batch makes",
        ),
        (lambda: call(module, x, longer, longer, None), ValueError, "attention_mask is None, must say where 5 causal"),
        (
            lambda: call(module, x, x, x, None, is_causal=False, sliding_window=3), ValueError,
            "attention_mask is None, must say where a sliding_window of 3 lies",
        ),
        (
            lambda: call(module, x, x, x, torch.ones(1, 1, 5, 5).bool(), cu_seq_lens_q=starts, cu_seq_lens_k=starts),
            ValueError, "cu_seq_lens_q is given beside attn_mask",
        ),
    ]  # fmt: skip


@pytest.mark.parametrize("call, error, sentence", refused_calls() if transformers is not None else [])
def test_what_cannot_be_said_is_refused(call, error, sentence):
    with pytest.raises(error, match=sentence):
        call()


def test_a_cache_that_was_asked_before_says_nothing_more():
    """From transformers 5.24 on some models' layers hand it down, under the name that continuous batching's has."""
    x, module = torch.randn(1, 2, 5, 8, generator=torch.Generator().manual_seed(0)), torch.nn.Module()
    with_cache, without = (
        _transformers._attention(module, x, x, x, None, **more)[0] for more in ({"cache": transformers.DynamicCache()}, {})
    )
    assert torch.equal(with_cache, without)


def test_without_a_mask_causal_means_what_sdpa_takes_it_for():
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(2, 4, 6, 8, generator=generator) for _ in range(3))
    module = torch.nn.Module()
    sdpa = torch.nn.functional.scaled_dot_product_attention
    for causal in (True, False):
        module.is_causal = causal
        out, weights = _transformers._attention(module, query, key, value, None, head_mask=None, use_cache=False)
        assert weights is None
        close(out, sdpa(query, key, value, is_causal=causal).transpose(1, 2))
    out, _ = _transformers._attention(module, query[:, :, :1], key, value, None, is_causal=True)
    close(out, sdpa(query[:, :, :1], key, value).transpose(1, 2))
    out, _ = _transformers._attention(module, query, key, value, None, is_causal=True, sliding_window=2)
    band = torch.ones(6, 6).tril().triu(-1).bool()
    close(out, sdpa(query, key, value, attn_mask=band).transpose(1, 2))


def test_queries_without_a_batch_and_dropout_out_of_training():
    generator = torch.Generator().manual_seed(0)
    query = torch.randn(1, 4, 3, 8, generator=generator, requires_grad=True)
    key, value = (torch.randn(2, 4, 6, 8, generator=generator) for _ in range(2))
    module = torch.nn.Module().eval()
    out, _ = _transformers._attention(module, query, key, value, None, is_causal=False, dropout=0.9)
    exact = torch.nn.functional.scaled_dot_product_attention(query.expand(2, -1, -1, -1), key, value).transpose(1, 2)
    close(out, exact)
    close(*(torch.autograd.grad(result.square().sum(), query)[0] for result in (out, exact)))


def test_compiled(taken):
    _, ours = make(transformers, "llama")
    arguments, counts = inputs("llama")
    expected, grads = run(ours, arguments, counts)
    compiled = torch.compile(ours, backend="aot_eager")
    output, compiled_grads = run(compiled, arguments, counts)
    close(output, expected)
    for name, grad in grads.items():
        close(compiled_grads[f"_orig_mod.{name}"], grad, 1e-4)
