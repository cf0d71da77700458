"""`polyhead.torch.Cache`: tiny Hugging Face models generate with it what they generate with `DynamicCache`."""

import copy

import pytest
from optional import load, needs_torch, torch
from transformers_models import inputs, make

transformers = load("transformers") if torch is not None else None
pytestmark = [needs_torch, pytest.mark.skipif(transformers is None, reason="transformers is not installed")]
if transformers is not None:
    import polyhead.torch
    from polyhead.torch import _cache

    polyhead.torch.register_transformers()
    transformers.logging.set_verbosity_error()

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
    result = model.generate(**arguments, past_key_values=cache, **options)
    return result.sequences, torch.stack(result.logits), result.past_key_values


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
        assert torch.equal(model.generate(**arguments, **options, past_key_values=new_cache(model)), expected)
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
    got = model.generate(**arguments, **GREEDY, assistant_model=assistant, past_key_values=new_cache(model))
    assert torch.equal(got, expected)


def rows(generator, num, batch=2):
    return torch.randn(batch, 3, num, 8, generator=generator), torch.randn(batch, 3, num, 5, generator=generator)


@pytest.mark.parametrize("window", [None, 1, 4])
def test_any_order_of_what_can_be_asked(window):
    """Updates, roll-backs, reorderings, batches that change: bit for bit what transformers' layer holds and returns."""
    random = torch.Generator().manual_seed(5)
    draw = lambda n: int(torch.randint(n, (), generator=random))  # noqa: E731
    made = (transformers.DynamicCache(), polyhead.torch.Cache())
    if window is not None:
        config = transformers.MistralConfig(sliding_window=window + 1, num_hidden_layers=1)
        made = transformers.DynamicCache(config=config), polyhead.torch.Cache(config)
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
                expected, got = (cache.update(*new, 0) for cache in made)
            assert all(torch.equal(a, b) for a, b in zip(expected, got, strict=True))
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
    assert torch.equal(model.generate(**arguments, **options, past_key_values=cache), expected)
