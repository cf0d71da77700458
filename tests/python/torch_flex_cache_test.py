"""What flex_attention keeps between calls: traces and tables of blocks, never longer than they are right."""


import numpy as np
import pytest
from optional import needs_torch, torch

pytestmark = needs_torch
if torch is not None:
    from torch.nn.attention.flex_attention import BlockMask, and_masks, create_block_mask, or_masks

    from polyhead.torch import _flex_attention, _trace_cache, flex_attention
    from torch_formula import random

from flex_functions import MASKS, SCORES, B, H, S, dense, tensors_of

LIMIT = 9  # a global that functions read


def operands():
    return [random(B, H, S, 16, seed=i, needs_grad=False) for i in range(3)]


def slots(query, key, score_mod=None, block_mask=None):
    return _flex_attention._program_slots(score_mod, block_mask, query, key)


def agrees(inputs, score_mod=None, block_mask=None, mask_mod=None):
    got = flex_attention(*inputs, score_mod, block_mask)
    torch.testing.assert_close(got, dense(*inputs, score_mod, mask_mod)[0], rtol=3e-5, atol=3e-5)


@pytest.mark.parametrize("name", MASKS)
def test_the_table_of_a_mask_mod_is_left_out(name):
    """Those of create_block_mask say nothing that the function does not."""
    query, key, _ = operands()
    mask_mod = MASKS[name](tensors_of(torch.float32))
    block_mask = create_block_mask(mask_mod, B, H, S, S, device="cpu", BLOCK_SIZE=16)
    whole = BlockMask.from_kv_blocks(
        *(torch.zeros(1, 1, 1, *more, dtype=torch.int32) + count for more, count in (((), 1), ((1,), 0))),
        BLOCK_SIZE=128, seq_lengths=(S, S), mask_mod=mask_mod,
    )  # fmt: skip
    assert slots(query, key, None, block_mask)[0] == slots(query, key, None, whole)[0]


def test_a_table_that_says_more_than_its_mask_mod_counts():
    inputs = operands()
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    block_mask.mask_mod = lambda b, h, q, k: q < S  # now the table alone hides what is behind the diagonal's blocks

    def both(b, h, q, k):
        return q // 16 >= k // 16

    agrees(inputs, None, block_mask, both)
    block_mask.mask_mod = lambda b, h, q, k: q > k  # of full blocks all is seen, whatever it says
    agrees(inputs, None, block_mask, lambda b, h, q, k: (q > k) & (q // 16 >= k // 16))


@pytest.mark.parametrize("by_numpy", [False, True])
def test_a_table_comes_back_when_what_its_mask_mod_reads_changes(by_numpy):
    inputs = operands()
    numbers = np.repeat(np.arange(4), 20)[:S]
    doc = torch.from_numpy(numbers)
    old = doc.clone()
    block_mask = create_block_mask(lambda b, h, q, k: doc[q] == doc[k], 1, 1, S, S, device="cpu", BLOCK_SIZE=10)
    agrees(inputs, None, block_mask, lambda b, h, q, k: old[q] == old[k])
    assert len([x for x in slots(*inputs[:2], None, block_mask)[1:] if x is not None]) == 1  # doc alone
    (numbers if by_numpy else doc)[:] = 0  # the function shows all now, the table what it was made of

    def as_torch_has_it(b, h, q, k):
        return old[q] == old[k]  # blocks of 10 lie within a document

    agrees(inputs, None, block_mask, as_torch_has_it)
    doc.copy_(old)
    agrees(inputs, None, block_mask, lambda b, h, q, k: old[q] == old[k])


def test_a_block_mask_that_is_changed_in_place():
    inputs = operands()
    block_mask = create_block_mask(lambda b, h, q, k: q >= k, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
    agrees(inputs, None, block_mask, lambda b, h, q, k: q >= k)
    block_mask.kv_num_blocks[..., 2] = 0  # the blocks on the diagonal of queries 32 to 47

    def without(b, h, q, k):
        return (q >= k) & ((q // 16 != 2) | (k // 16 != 2))

    agrees(inputs, None, block_mask, without)


def traces(function, times=1):
    """How many of the calls traced `function`, and the last program."""
    query, key, _ = operands()
    calls = []
    kept = _flex_attention.Tracing.trace

    def counted(self, *arguments):
        calls.append(arguments[0])
        return kept(self, *arguments)

    _flex_attention.Tracing.trace = counted
    try:
        for _ in range(times):
            program = slots(query, key, function)
    finally:
        _flex_attention.Tracing.trace = kept
    return len(calls), program


@pytest.mark.parametrize("name", SCORES)
def test_functions_of_tensors_are_traced_once(name):
    """t.slope is an attribute of an object, which could change: such functions are traced each time; these are not."""
    tensors = tensors_of(torch.float32)
    score_mod = SCORES[name](tensors)
    first, second = traces(score_mod)[1], traces(score_mod)[1]
    assert first[0] == second[0] and all(a is b for a, b in zip(first[1:], second[1:]))


def test_what_a_function_closes_over_is_read_anew():
    inputs = operands()
    slope, cap, weights = torch.rand(H), 2.0, [1.0, 2.0]

    def score_mod(score, b, h, q, k):
        return cap * torch.tanh(score * weights[0] / cap) - slope[h] * (q - k).abs() / LIMIT

    assert traces(score_mod, 3)[0] == 1
    agrees(inputs, score_mod)
    slope.mul_(3)  # the same tensor
    assert traces(score_mod)[0] == 0
    agrees(inputs, score_mod)
    cap = 3.0
    assert traces(score_mod)[0] == 1
    agrees(inputs, score_mod)
    weights[0] = 0.5
    assert traces(score_mod)[0] == 1
    agrees(inputs, score_mod)
    slope = torch.rand(H)
    assert traces(score_mod)[0] == 1
    agrees(inputs, score_mod)
    globals()["LIMIT"] = 5
    try:
        assert traces(score_mod)[0] == 1
        agrees(inputs, score_mod)
    finally:
        globals()["LIMIT"] = 9
    assert traces(lambda score, b, h, q, k: score * cap, 1)[0] == traces(lambda score, b, h, q, k: score * cap, 1)[0] == 1


def test_signed_zeros_and_nans_are_numbers_of_their_own():
    def score_of(number):
        return lambda score, b, h, q, k: score + number

    texts = [traces(score_of(number))[1] for number in (0.0, -0.0, 1, 1.0, True)]
    assert [text[0] for text in texts] == [traces(score_of(number))[1][0] for number in (0.0, -0.0, 1, 1.0, True)]


def test_functions_made_of_functions():
    def window(size):
        return lambda b, h, q, k: q - k < size

    inputs = operands()
    for size in (5, 9):
        mask_mod = and_masks(lambda b, h, q, k: q >= k, or_masks(window(size), lambda b, h, q, k: k < 2))
        block_mask = create_block_mask(mask_mod, 1, 1, S, S, device="cpu", BLOCK_SIZE=16)
        for _ in range(2):
            agrees(inputs, None, block_mask, mask_mod)
    assert any("and_mask" in str(key) for key in _trace_cache._programs)


class Holder:
    factor = 1.0


holder, calls = Holder(), []


def by_attribute(score, b, h, q, k):
    return score * holder.factor


def by_content(score, b, h, q, k, bias=torch.tensor([1.0, 2.0]) if torch is not None else None):
    return score * float(bias[0])


def by_sum(score, b, h, q, k, bias=torch.tensor([1.0, 2.0]) if torch is not None else None):
    return score * bias.sum()


def with_effects(score, b, h, q, k):
    calls.append(1)
    return score


def by_module(score, b, h, q, k):
    return score * np.pi


def by_import(score, b, h, q, k):
    import math as other

    return score * other.pi


def by_random(score, b, h, q, k):
    return score * torch.rand(())


@pytest.mark.parametrize("function", [by_attribute, by_content, by_sum, with_effects, by_module, by_import, by_random])
def test_what_no_key_can_tell_is_traced_each_time(function):
    if function is by_content:
        function.__defaults__[0].requires_grad_(False)
    assert traces(function, 3)[0] == 3


def test_tensors_that_are_gone_are_no_keys():
    def score_of(table):
        return lambda score, b, h, q, k: score + table[h]

    for _ in range(20):  # a new tensor may lie where the last one lay
        table = torch.rand(H)
        program = traces(score_of(table))[1]
        assert program[1] is table
        del table, program


def test_the_cache_stays_small():
    for number in range(200):
        traces(lambda score, b, h, q, k, number=number: score * number)
    assert len(_trace_cache._programs) <= _trace_cache._MOST
