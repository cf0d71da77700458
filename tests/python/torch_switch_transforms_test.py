"""torch.vmap and torch.func around attention, with the switch on: what torch gives call by call, on kernels of ours."""

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead
import polyhead.torch
from torch.nn import functional as F
from torch_switch_judge import assert_taken, counted

CALLS = {  # (of three tensors, a bias and a mask)
    "plain": lambda q, k, v, b, m: F.scaled_dot_product_attention(q, k, v),
    "causal": lambda q, k, v, b, m: F.scaled_dot_product_attention(q, k, v, is_causal=True),
    "narrow value": lambda q, k, v, b, m: F.scaled_dot_product_attention(q, k, v[..., :5]),
    "bias": lambda q, k, v, b, m: F.scaled_dot_product_attention(q, k, v, b),
    "mask": lambda q, k, v, b, m: F.scaled_dot_product_attention(q, k, v, m),
    "grouped": lambda q, k, v, b, m: F.scaled_dot_product_attention(q, k[:, :2], v[:, :2], enable_gqa=True),
    "three dimensions": lambda q, k, v, b, m: F.scaled_dot_product_attention(q[0], k[0], v[0]),
    "everything dropped": lambda q, k, v, b, m: F.scaled_dot_product_attention(q, k, v, b, dropout_p=1.0),
}
MAPPED = [(0, 0, 0, 0, 0), (None, 0, 0, None, None), (0, None, None, None, 0), (None, None, None, 0, None)]
calls = pytest.mark.parametrize("name", CALLS)


def operands(size=3):
    """As CALLS takes them, `size` of each."""
    torch.manual_seed(1)
    shapes = [(2, 4, 5, 8), (2, 4, 7, 8), (2, 4, 7, 8), (4, 5, 7)]
    return [*(torch.randn(size, *shape) for shape in shapes), torch.rand(size, 5, 7) > 0.3]


def one_of(batch, in_dims, index):
    return [x[0] if dim is None else x[index] for x, dim in zip(batch, in_dims)]


def close(got, expected):
    torch.testing.assert_close(got, expected, rtol=2e-4, atol=2e-5)


@calls
@pytest.mark.parametrize("in_dims", MAPPED, ids=str)
def test_vmap(name, in_dims):
    """Whatever of the operands is mapped, the outputs are those of call after call; gradients through it, too."""
    batch = operands()
    given = [x[0] if dim is None else x for x, dim in zip(batch, in_dims)]
    leaves = [x.requires_grad_() for x in given[:4]]
    expected = torch.stack([CALLS[name](*one_of(batch, in_dims, i)) for i in range(3)])
    weights = torch.randn(expected.shape)
    with counted() as records:
        out = torch.vmap(CALLS[name], in_dims, randomness="same")(*given)
        grads = torch.autograd.grad((out * weights).sum(), leaves, allow_unused=True)
    assert_taken(records, backward=True)
    close(out, expected)
    sum_of_calls = sum(
        (CALLS[name](*[x if dim is None else x[i] for x, dim in zip(given, in_dims)]) * weights[i]).sum()
        for i in range(3)
    )
    for got, wanted in zip(grads, torch.autograd.grad(sum_of_calls, leaves, allow_unused=True)):
        close(torch.zeros(()) if got is None else got, torch.zeros(()) if wanted is None else wanted)


@calls
def test_gradients_of_each_sample(name):
    """vmap over grad, and grad over vmap."""
    batch = operands()

    def loss(*all):
        return CALLS[name](*all).square().sum()

    argnums = (0, 1, 2, 3)
    expected = [
        torch.autograd.grad(loss(*[x.requires_grad_(x.is_floating_point()) for x in each]), each[:4], allow_unused=True)
        for each in ([x[i].clone() for x in batch] for i in range(3))
    ]
    with counted() as records:
        each = torch.vmap(torch.func.grad(loss, argnums), randomness="same")(*batch)
        whole = torch.func.grad(lambda *all: torch.vmap(loss, randomness="same")(*all).sum(), argnums)(*batch)
    assert_taken(records, backward=True)
    for got in (each, whole):
        for position in argnums:
            for i in range(3):
                wanted = expected[i][position]
                close(got[position][i], torch.zeros_like(batch[position][i]) if wanted is None else wanted)


def test_vmap_within_vmap():
    query, key, value, _, mask = operands(6)
    nested = [x.unflatten(0, (2, 3)) for x in (query, key, value, mask)]

    def call(q, k, v, m):
        return F.scaled_dot_product_attention(q, k, v[..., :5], m)

    expected = torch.stack([call(*each) for each in zip(query, key, value, mask)]).unflatten(0, (2, 3))
    with counted() as records:
        got = torch.vmap(torch.vmap(call, (0, None, 0, 0)), (0, None, 0, 0))(nested[0], key[0], *nested[2:])
        same = torch.vmap(torch.vmap(call))(*nested)
    assert_taken(records, backward=False)
    close(same, expected)
    close(got[1, 2], call(query[5], key[0], value[5], mask[5]))


def test_dropout_under_vmap_is_as_random_as_asked():
    query = torch.randn(3, 1, 2, 16, 8)
    same_thrice = query[:1].expand(3, -1, -1, -1, -1)

    def call(q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=0.5)

    with counted() as records:
        with pytest.raises(RuntimeError, match="randomness"):
            torch.vmap(call)(query)
        alike = torch.vmap(call, randomness="same")(same_thrice)
        different = torch.vmap(call, randomness="different")(same_thrice)
    assert_taken(records, backward=False)
    assert torch.equal(alike[0], alike[1]) and not torch.equal(different[0], different[1])


def test_what_stays_torchs_under_vmap_has_a_record():
    query = torch.randn(3, 1, 2, 5, 8, dtype=torch.float64)

    def call(q):
        return F.scaled_dot_product_attention(q, q, q, dropout_p=1.0)

    with counted() as records:
        torch.vmap(call, randomness="same")(query)
    assert records and all(record.kernel is None and "float64" in record.reason for record in records)


@pytest.mark.parametrize("needs", [(True, True, True), (True, False, False), (False, False, True)])
@pytest.mark.parametrize("options", [{}, {"dropout_p": 1.0}, {"attn_mask": torch.ones(5, 7).tril(2).bool()}])
def test_batched_gradients(options, needs):
    """Many gradients of out at once (is_grads_batched), of some inputs alone."""
    arguments = [x[0].requires_grad_(need) for x, need in zip(operands(), needs)]
    wanted = [x for x in arguments if x.requires_grad]
    with counted() as records:
        out = F.scaled_dot_product_attention(*arguments, **options)
        grad_outs = torch.randn(4, *out.shape)
        got = torch.autograd.grad(out, wanted, grad_outs, is_grads_batched=True, retain_graph=True)
        for i, grad_out in enumerate(grad_outs):
            for all_of_it, grad in zip(got, torch.autograd.grad(out, wanted, grad_out, retain_graph=True)):
                close(all_of_it[i], grad)
    assert_taken(records, backward=True)


@pytest.mark.parametrize("operator", ["attention_forward", "attention_backward", "merge_forward"])
def test_the_operators_themselves_under_func_grad(operator):
    """As graphs call them."""
    query, key, value = (torch.randn(2, s, 4, 8) for s in (5, 7, 7))
    out, logsumexp = polyhead.torch.attention(query, key, value, return_logsumexp=True)

    def call(query):
        if operator == "attention_forward":
            return torch.ops.polyhead.attention_forward(query, key, value)[0].square().sum()
        if operator == "attention_backward":
            return torch.ops.polyhead.attention_backward(out, None, query, key, value, out, logsumexp, 7)[1].sum()
        return torch.ops.polyhead.merge_forward([query, out], [logsumexp, logsumexp])[0].square().sum()

    leaf = query.clone().requires_grad_()
    close(torch.func.grad(call)(query), torch.autograd.grad(call(leaf), leaf)[0])
