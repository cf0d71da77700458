"""The switch and others who patch the same places of torch: turned off, it takes away what is its own, and nothing else."""

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead.torch
from torch.nested._internal import ops as nested_ops
from torch.nn import functional as F


def multi_head_attention():
    layer, x = torch.nn.MultiheadAttention(8, 2), torch.rand(5, 1, 8)
    return layer(x, x, x, need_weights=True)


def jagged():
    x = torch.nested.nested_tensor([torch.rand(3, 2, 8), torch.rand(5, 2, 8)], layout=torch.jagged).transpose(1, 2)
    return F.scaled_dot_product_attention(x, x, x)


PLACES = {
    "multi_head_attention_forward": (F, multi_head_attention),
    "jagged_scaled_dot_product_attention": (nested_ops, jagged),
}


@pytest.fixture(params=PLACES)
def place(request):
    """(module, name, a call that comes there), the switch off and torch's own function in place, before and after."""
    module, run = PLACES[request.param]
    polyhead.torch.disable()
    theirs = getattr(module, request.param)
    yield module, request.param, run
    polyhead.torch.disable()
    setattr(module, request.param, theirs)


def patched(module, name):
    """Somebody's patch over what stands there now; its list of calls."""
    below, calls = getattr(module, name), []

    def patch(*arguments, **options):
        calls.append(name)
        return below(*arguments, **options)

    setattr(module, name, patch)
    return patch, calls


def reported(run):
    polyhead.torch.report(reset=True)
    run()
    return polyhead.torch.report(reset=True)


def test_a_patch_over_ours_stays_and_ours_below_it_is_off(place):
    module, name, run = place
    polyhead.torch.enable()
    patch, calls = patched(module, name)
    assert reported(run) and len(calls) == 1
    polyhead.torch.disable()
    assert getattr(module, name) is patch
    assert not reported(run) and len(calls) == 2
    for _ in range(2):  # again, over the patch this time
        polyhead.torch.enable()
        assert len(reported(run)) == 1 and getattr(module, name) is not patch
        polyhead.torch.disable()
        assert getattr(module, name) is patch and not reported(run)


def test_a_patch_below_ours_stays(place):
    module, name, run = place
    patch, calls = patched(module, name)
    with polyhead.torch.enabled():
        assert reported(run)
    assert getattr(module, name) is patch and not reported(run) and calls


def test_who_took_ours_for_torchs_and_puts_it_back_gets_torchs(place):
    module, name, run = place
    polyhead.torch.enable()
    ours = getattr(module, name)
    patched(module, name)
    polyhead.torch.disable()
    setattr(module, name, ours)
    assert not reported(run)


def test_the_key_of_caches_keeps_what_others_added():
    config = torch.compiler.config
    with config.patch(cache_key_tag="before"):
        with polyhead.torch.enabled():
            assert config.cache_key_tag.startswith("before polyhead")
            config.cache_key_tag += " after"
        assert config.cache_key_tag == "before after"
        with polyhead.torch.enabled():
            config.cache_key_tag = "another"
        assert config.cache_key_tag == "another"
