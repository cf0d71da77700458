"""`polyhead.torch.Cache`: tiny Hugging Face models generate with it what they generate with `DynamicCache`."""

import copy

import pytest
from optional import load, needs_torch, torch
from torch_formula import bias_of, naive
from transformers_models import cache_name, inputs, make

transformers = load("transformers") if torch is not None else None
pytestmark = [needs_torch, pytest.mark.skipif(transformers is None, reason="transformers is not installed")]
if transformers is not None:
    import polyhead.torch
    from polyhead.torch import _cache, _stored

    polyhead.torch.register_transformers()
    transformers.logging.set_verbosity_error()
    CACHE = cache_name(transformers)

GREEDY = dict(max_new_tokens=6, do_sample=False, pad_token_id=0)
# Ten models: full and sliding attention, mixed; one and several heads a group.
MODELS = ("gpt2", "gpt_neox", "opt", "llama", "mistral", "qwen3", "gemma2", "gemma3", "phi3", "granite")


@pytest.fixture(autouse=True)
def little_room(monkeypatch):
    """Rooms of so few rows that a few tokens pass their ends."""
    monkeypatch.setattr(_cache, "LEAST_ROOM", 2)


def generated(model, cache=None, **options):
    """Of a batch that is padded on the left, and the logits."""
    arguments, _ = inputs("llama")
    torch.manual_seed(3)
    options = GREEDY | options | dict(return_dict_in_generate=True, output_logits=True)
    result = model.generate(**arguments, **{CACHE: cache}, **options)
    return result.sequences, torch.stack(result.logits), result[CACHE]


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("options", [{}, {"num_beams": 3}], ids=["greedy", "beams"])
def test_the_same_tokens(name, options):
    model = make(transformers, name)[1]
    tokens, logits, _ = generated(model, **options)
    got, got_logits, cache = generated(model, polyhead.torch.Cache(model.config), **options)
    assert torch.equal(got, tokens)
    assert torch.equal(got_logits, logits)  # keys and values have the same bits, and attention does not see strides
    assert all(isinstance(layer, _cache.InPlace) for layer in cache.layers)


@pytest.mark.parametrize("options", [
    dict(do_sample=True, top_k=5), dict(prompt_lookup_num_tokens=3), dict(num_return_sequences=2, num_beams=4)
], ids=["sampling", "prompt_lookup", "sequences"])  # fmt: skip
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_other_ways_to_generate(name, options):
    model = make(transformers, name)[1]
    if "prompt_lookup_num_tokens" in options:  # takes one sequence
        arguments = {"input_ids": torch.tensor([[5, 6, 7, 8, 5, 6, 7, 9, 5, 6, 7]])}
        options = GREEDY | options
        expected = model.generate(**arguments, **options)
        assert torch.equal(model.generate(**arguments, **options, **{CACHE: new_cache(model)}), expected)
        return
    tokens, logits, _ = generated(model, **options)
    got, got_logits, _ = generated(model, new_cache(model), **options)
    assert torch.equal(got, tokens) and torch.equal(got_logits, logits)


def new_cache(model):
    cache = polyhead.torch.Cache(model.config)
    cache.activate_past_recording()
    return cache


@pytest.mark.parametrize("name", ["llama", "mistral"])
def test_assisted_generation_takes_tokens_back(name):
    model, assistant = make(transformers, name)[1], make(transformers, name, num_hidden_layers=1)[1]
    arguments = {"input_ids": torch.randint(1, 99, (1, 11), generator=torch.Generator().manual_seed(4))}
    expected = model.generate(**arguments, **GREEDY)
    got = model.generate(**arguments, **GREEDY, assistant_model=assistant, **{CACHE: new_cache(model)})
    assert torch.equal(got, expected)


def rows(generator, num, batch=2):
    return torch.randn(batch, 3, num, 8, generator=generator), torch.randn(batch, 3, num, 6, generator=generator)


def as_stored(new, **formats):
    """Each token as a cache of its own stores it, dense."""
    alone = [polyhead.torch.Cache(**formats).update(*token, 0) for token in zip(*(x.split(1, 2) for x in new))]
    return [torch.cat([x + 0 for x in side], 2) for side in zip(*alone)]


@pytest.mark.parametrize("window, formats", [
    (None, {}), (1, {}), (4, {}), (None, dict(key_dtype="int8")), (1, dict(key_dtype="int8", value_dtype="float32")),
    (4, dict(key_dtype="int4", value_dtype="float8_e4m3")),
])  # fmt: skip
def test_any_order_of_what_can_be_asked(window, formats):
    """Updates, roll-backs, reorderings, batches that change: bit for bit what transformers' layer holds and returns."""
    random = torch.Generator().manual_seed(5)
    draw = lambda n: int(torch.randint(n, (), generator=random))  # noqa: E731
    made = (transformers.DynamicCache(), polyhead.torch.Cache(**formats))
    if window is not None:
        config = transformers.MistralConfig(sliding_window=window + 1, num_hidden_layers=1)
        made = transformers.DynamicCache(config=config), polyhead.torch.Cache(config, **formats)
    for cache in made:
        cache.activate_past_recording()
    batch = 2
    for _ in range(300):
        what = draw(10)
        if what == 0 and made[0].get_seq_length() > 3:
            count = 1 + draw(3)
            for cache in made:
                cache.crop(-count)
        elif what == 1 and made[0].get_seq_length() > 0:
            beams = torch.randint(batch, (batch,), generator=random)
            for cache in made:
                cache.reorder_cache(beams)
        elif what == 2 and made[0].get_seq_length() > 0 and batch < 5:
            batch *= 2
            for cache in made:
                cache.batch_repeat_interleave(2)
        elif what == 3 and batch > 2:
            batch = 2
            for cache in made:
                cache.batch_select_indices(torch.tensor([1, 0]))
        elif what == 4 and draw(4) == 0:
            for cache in made:
                cache.reset()
        elif what == 5:
            made = (made[0], copy.deepcopy(made[1]))
        else:
            new = rows(random, 1 + draw(3), batch)
            assert made[0].get_mask_sizes(new[0].shape[2], 0) == made[1].get_mask_sizes(new[0].shape[2], 0)
            with torch.no_grad() if draw(3) else torch.enable_grad():
                expected = made[0].update(*(as_stored(new, **formats) if formats else new), 0)
                got = made[1].update(*new, 0)
            assert isinstance(got[0], _stored.Stored) == bool(formats)
            assert all(torch.equal(a, b + 0) for a, b in zip(expected, got, strict=True))
        assert made[0].get_seq_length() == made[1].get_seq_length()


@torch.no_grad()
def test_nothing_is_copied_where_there_is_room():
    cache, random = polyhead.torch.Cache(), torch.Generator().manual_seed(6)
    cache.update(*rows(random, 40), 0)
    before = cache.layers[0].keys.data_ptr()
    for _ in range(15):
        cache.update(*rows(random, 1), 0)
    assert cache.layers[0].keys.data_ptr() == before
    cache.crop(-5)
    cache.update(*rows(random, 5), 0)
    assert cache.layers[0].keys.data_ptr() == before


def test_a_long_prompt_is_not_kept_for_a_short_window():
    config = transformers.MistralConfig(sliding_window=5, num_hidden_layers=1)
    cache, random = polyhead.torch.Cache(config), torch.Generator().manual_seed(7)
    with torch.no_grad():
        cache.update(*rows(random, 1000), 0)
        cache.update(*rows(random, 1), 0)
    assert cache.layers[0].keys.untyped_storage().nbytes() < 100 * 2 * 3 * 8 * 4


def test_gradients_and_inference_mode():
    cache, random = polyhead.torch.Cache(), torch.Generator().manual_seed(8)
    with torch.inference_mode():
        cache.update(*rows(random, 3), 0)
        cache.update(*rows(random, 1), 0)
    with torch.no_grad():
        cache.update(*rows(random, 1), 0)  # what inference mode made cannot be written here
    keys, values = (x.requires_grad_() for x in rows(random, 2))
    first, _ = cache.update(keys, values, 0)
    loss = first.square().sum()
    cache.update(*rows(random, 2), 0)
    loss.backward()
    assert torch.equal(keys.grad, 2 * keys)


def test_an_encoder_and_a_decoder():
    model = make(transformers, "bart")[1]
    arguments, _ = inputs("bart")
    del arguments["decoder_input_ids"]
    options = dict(max_new_tokens=6, do_sample=False, num_beams=2)
    expected = model.generate(**arguments, **options)
    cache = transformers.EncoderDecoderCache(polyhead.torch.Cache(model.config), polyhead.torch.Cache(model.config))
    assert torch.equal(model.generate(**arguments, **options, **{CACHE: cache}), expected)


# -- fewer bytes ------------------------------------------------------------------------------------------------------

FORMATS = {"int8": 127, "float8_e4m3": 448, "float8_e5m2": 57344, "int4": 7}


def meant(x):
    """What a `Stored` tensor [B, G, S, D] stands for, in float64."""
    numbers = x.numbers
    if numbers.dtype == torch.uint8:  # pairs of int4, the first in the low bits
        pairs = torch.stack([numbers & 15, numbers >> 4], -1).flatten(-2).to(torch.int16)
        numbers = torch.where(pairs > 7, pairs - 16, pairs)
    groups = numbers.double().unflatten(-1, (x.scales.shape[-1], -1)) * x.scales.double()[..., None]
    matrix = torch.ones(1, 1, dtype=torch.float64)
    while x.hadamard and len(matrix) < x.shape[-1]:
        matrix = torch.kron(matrix, torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64) / 2**0.5)
    return groups.flatten(-2) @ matrix if x.hadamard else groups.flatten(-2)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("name", FORMATS)
@torch.no_grad()
def test_attention_reads_what_is_stored(name, dtype):
    random = torch.Generator().manual_seed(9)
    for hadamard, group, visible in ((None, None, None), (False, 16, bool), (True, 0, float)):
        cache = polyhead.torch.Cache(key_dtype=name, key_group=group, hadamard=hadamard)
        for num in (30, 1, 4):
            states = torch.randn(2, 2, 3, num, 32, generator=random).to(dtype)
            key, value = cache.update(*states, 0)
        assert key.shape == value.shape == (2, 3, 35, 32) and key.dtype == value.dtype == dtype
        assert key.hadamard == (name.startswith("int") if hadamard is None else hadamard) and not value.hadamard
        assert key.scales.shape[-1] == {None: 1, 16: 2, 0: 1}[group]
        for x in (key, value):
            assert (meant(x) - (x + 0)).abs().max() <= 4 * torch.finfo(dtype).eps * meant(x).abs().max()
        step = (meant(value)[:, :, -4:] - states[1]).abs().max() / states[1].abs().max()
        assert 1e-4 < step < {"int8": 0.005, "float8_e4m3": 0.07, "float8_e5m2": 0.13, "int4": 0.09}[name]
        query = torch.randn(2, 6, 4, 32, generator=random).to(dtype)
        mask = torch.ones(2, 1, 4, 35).tril(31).bool()
        mask[1, :, :, :5] = False
        exact, _ = naive(
            *(x.transpose(1, 2) for x in (query, *(meant(x).repeat_interleave(2, 1) for x in (key, value)))),
            None if visible is None else bias_of(mask),
        )
        given = {None: None, bool: mask, float: bias_of(mask).to(dtype)}[visible]
        module = torch.nn.Module().eval()
        attend = lambda k, v: polyhead.torch._transformers._attention(module, query, k, v, given, is_causal=False)[0]  # noqa: E731
        dense = attend(key + 0, value + 0)
        assert type(key + 0) is torch.Tensor and dense.dtype == dtype
        error, error_of_dense = ((x.double() - exact).abs().max() for x in (attend(key, value), dense))
        assert error <= 2 * error_of_dense + 1e-6


@pytest.mark.parametrize("options", [{}, dict(num_beams=3), dict(do_sample=True, top_k=5)], ids=["greedy", "beams", "sampling"])
@pytest.mark.parametrize("name", ["llama", "gemma3"])
def test_models_in_fewer_bytes(name, options, monkeypatch):
    """What a model generates with a cache whose attention reads what is stored, and from dense numbers: logits alike."""
    model = make(transformers, name)[1]
    with monkeypatch.context() as patch:
        patch.setattr(_stored.Stored, "dense", None)  # nothing asks for it under our attention
        tokens, logits, cache = generated(model, polyhead.torch.Cache(model.config, "int8"), **options)
    assert isinstance(cache.layers[0].keys, _stored.Stored)
    model.set_attn_implementation("eager")
    same, dense_logits, _ = generated(model, polyhead.torch.Cache(model.config, "int8"), **options)
    assert torch.equal(same, tokens) and torch.allclose(dense_logits, logits, atol=1e-2)  # a key may round the other way
    exact, exact_logits, _ = generated(model, **options)
    assert 1e-4 < (logits[0] - exact_logits[0]).abs().max() < 0.2


def test_fewer_bytes_take_tokens_back():
    model, assistant = make(transformers, "mistral")[1], make(transformers, "mistral", num_hidden_layers=1)[1]
    arguments = {"input_ids": torch.randint(1, 99, (1, 11), generator=torch.Generator().manual_seed(4))}
    cache = lambda: polyhead.torch.Cache(model.config, "int8", value_dtype="float8_e5m2")  # noqa: E731
    expected = model.generate(**arguments, **GREEDY, **{CACHE: cache()})
    for more in (dict(assistant_model=assistant), dict(prompt_lookup_num_tokens=3)):
        assert torch.equal(model.generate(**arguments, **GREEDY, **more, **{CACHE: cache()}), expected)


@pytest.mark.parametrize("mode", ["no_grad", "inference_mode"])
def test_fewer_bytes_under_the_switch(mode, monkeypatch):
    random = torch.Generator().manual_seed(10)
    key, value = polyhead.torch.Cache(key_dtype="int8").update(*rows(random, 7), 0)
    query = torch.randn(2, 3, 2, 8, generator=random)
    expected = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    monkeypatch.setattr(_stored.Stored, "dense", None)
    with getattr(torch, mode)(), polyhead.torch.enabled():
        key, value = polyhead.torch.Cache(key_dtype="int8").update(*rows(torch.Generator().manual_seed(10), 7), 0)
        got = torch.nn.functional.scaled_dot_product_attention(query, key, value)
    assert torch.allclose(got, expected, atol=1e-6)


def test_gradients_through_dense_numbers():
    random = torch.Generator().manual_seed(11)
    key, value = polyhead.torch.Cache(key_dtype="int8").update(*rows(random, 7), 0)
    query = torch.randn(2, 3, 2, 8, generator=random, requires_grad=True)
    grads = [
        torch.autograd.grad(polyhead.torch.scaled_dot_product_attention(query, k, v).square().sum(), query)[0]
        for k, v in ((key, value), (key + 0, value + 0))
    ]
    assert torch.equal(*grads)


def test_what_is_refused():
    make_cache = polyhead.torch.Cache
    random = torch.Generator().manual_seed(12)
    states = rows(random, 3)
    with_gradients = states[0], states[1].clone().requires_grad_()
    cache = make_cache(key_dtype="int8")
    keys, _ = cache.update(*states, 0)
    for call, message in (
        (lambda: make_cache(key_dtype="int5"), "key_dtype is 'int5', must be one of float32"),
        (lambda: make_cache(None, "int8", "q4"), "value_dtype is 'q4', must be one of"),
        (lambda: make_cache(hadamard=True), "hadamard is True, but key_dtype is None, must be one of int8"),
        (lambda: make_cache(key_dtype="int8", value_dtype="bfloat16").update(*states, 0), "value_dtype is 'bfloat16', but the model's values are float32"),
        (lambda: make_cache(key_dtype="int8", key_group=3).update(*states, 0), "key_group is 3, must be 0 or divide the head dim 8"),
        (lambda: make_cache(key_dtype="int8", value_group=4).update(*states, 0), "value_group is 4, must be 0 or divide the head dim 6"),
        (lambda: make_cache(key_group=16).update(*states, 0), "key_group is 16, must be 0 or divide"),
        (lambda: make_cache(key_dtype="int8", hadamard=True).update(*(x[..., :6] for x in states), 0), "power of 2"),
        (lambda: cache.update(*(x.double() for x in states), 0), "key is float64"),
        (lambda: cache.update(*with_gradients, 0), "value_states have gradients, which a Cache of int8 does not keep"),
        (lambda: keys.zero_(), "would write into Stored.*, which only its Cache does"),
    ):  # fmt: skip
        with pytest.raises(polyhead.Error, match=message):
            call()
    assert cache.get_seq_length() == 3 and torch.equal(cache.layers[0].keys + 0, keys + 0)
