"""polyhead.merge and merge_backward: keys split over calls give what one call over all of them gives, gradients too."""

import ml_dtypes
import numpy as np
import pytest

import polyhead
from arrays_test import KINDS, jax_with_float64, strided_views, to_jax, to_numpy, to_torch  # noqa: F401
from attention_test import DTYPES, operands
from errors_test import bad, refused
from optional import needs_jax, needs_torch, torch

TOLERANCE = {"float64": 1e-13, "float32": 4e-6, "float16": 2**-8, "bfloat16": 2**-5}
SPLITS = {"two": [3], "three": [2, 5], "one_each": range(1, 7), "first_empty": [0, 4], "last_empty": [4, 7], "one": []}


def close(got, expected, room=1):
    assert got.dtype == expected.dtype and got.shape == expected.shape
    tolerance = room * TOLERANCE[expected.dtype.name]
    got, expected = (np.asarray(x).astype(np.float64) for x in (got, expected))
    np.testing.assert_allclose(got, expected, rtol=tolerance, atol=tolerance)


def parts_of(query, key, value, cuts, **options):
    """[(options, keys)] of the parts: the options that see the part's keys where the whole sees them."""
    edges = [0, *cuts, key.shape[1]]
    for first, end in zip(edges, edges[1:]):
        own = dict(options)
        if "query_offset" in options:
            own["query_offset"] = options["query_offset"] - first
        for name in ("attn_mask", "attn_bias"):
            if name in options:
                own[name] = options[name][..., first:end]
        yield slice(first, end), own


def forward(query, key, value, parts):
    results = [
        polyhead.attention(query, key[:, keys], value[:, keys], **own, return_logsumexp=True) for keys, own in parts
    ]
    return [out for out, _ in results], [logsumexp for _, logsumexp in results]


OPTIONS = {
    "plain": {},
    "causal": {"causal": True, "query_offset": 1},  # the last part is hidden from all but few
    "window": {"window": (1, 1), "query_offset": np.array([0, 2])},
    "mask": {"attn_mask": np.arange(35).reshape(5, 7) % 9 > 5},  # some rows see no key in a part, some none at all
    "bias": {"attn_bias": np.sin(np.arange(4 * 7)).reshape(4, 1, 7).astype(np.float32), "softcap": 2.0},
    "large": {"scale": 40.0},
}


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("cuts", SPLITS.values(), ids=SPLITS.keys())
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS.keys())
def test_parts_merge_to_the_whole_and_so_do_their_gradients(options, cuts, dtype):
    rng = np.random.default_rng(1)
    query, key, value = operands(rng, dtype)
    whole, whole_logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True)
    parts = list(parts_of(query, key, value, cuts, **options))
    outs, logsumexps = forward(query, key, value, parts)
    out, logsumexp = polyhead.merge(outs, logsumexps)
    close(out, whole)
    close(logsumexp, whole_logsumexp)

    grad_out = rng.standard_normal(out.shape).astype(dtype)
    grad_logsumexp = rng.standard_normal(logsumexp.shape).astype(logsumexp.dtype)
    expected = polyhead.attention_backward(
        grad_out, query, key, value, whole, whole_logsumexp, **options, grad_logsumexp=grad_logsumexp
    )
    grad_outs, grad_logsumexps = polyhead.merge_backward(grad_out, outs, logsumexps, out, logsumexp, grad_logsumexp)
    grad_query, shared_grad_query = np.zeros(query.shape), np.zeros(query.shape)
    room = 8 * max(1, abs(options.get("scale", 0)))  # gradients are sums of rounded ones, of size up to some
    for n, (keys, own) in enumerate(parts):
        assert grad_outs[n].dtype == dtype and grad_logsumexps[n].dtype == logsumexp.dtype
        through_the_part = polyhead.attention_backward(
            grad_outs[n], query, key[:, keys], value[:, keys], outs[n], logsumexps[n], **own,
            grad_logsumexp=grad_logsumexps[n],
        )  # fmt: skip
        of_the_whole = polyhead.attention_backward(
            grad_out, query, key[:, keys], value[:, keys], out, logsumexp, **own, grad_logsumexp=grad_logsumexp
        )
        for name in ("key", "value"):
            close(through_the_part[name], expected[name][:, keys], room)
            close(of_the_whole[name], expected[name][:, keys], room)
        grad_query += through_the_part["query"].astype(np.float64)
        shared_grad_query += of_the_whole["query"].astype(np.float64)
    close(grad_query.astype(dtype), expected["query"], room)
    close(shared_grad_query.astype(dtype), expected["query"], room)


def random_parts(count, shape=(2, 5, 4, 6), dtype=np.float32, seed=0, empty=0.3):
    """Partial results as of attention; rows empty in some parts, one in all: their out is NaN, which must not show."""
    rng = np.random.default_rng(seed)
    batch, sq, heads, dim = shape
    sums = np.float64 if dtype == np.float64 else np.float32
    outs = [rng.standard_normal(shape).astype(dtype) for _ in range(count)]
    logsumexps = [(5 * rng.standard_normal((batch, heads, sq))).astype(sums) for _ in range(count)]
    for out, logsumexp in zip(outs, logsumexps):
        hidden = rng.random(logsumexp.shape) < empty
        hidden[:1, :1, :1] = empty > 0
        logsumexp[hidden] = -np.inf
        out[hidden.transpose(0, 2, 1)] = np.nan
    return outs, logsumexps


def formula(outs, logsumexps):
    """merge in float64."""
    L = np.stack([x.astype(np.float64) for x in logsumexps])
    most = np.maximum(L.max(axis=0), -1e300)
    total = np.exp(L - most).sum(axis=0)
    with np.errstate(divide="ignore"):
        logsumexp = most + np.log(total)
    weights = np.exp(L - most) / np.where(total == 0, 1, total)
    weights = weights.transpose(0, 1, 3, 2)[..., None]
    return np.where(weights > 0, weights * np.stack(outs).astype(np.float64), 0).sum(axis=0), logsumexp


@pytest.mark.parametrize("count", [1, 2, 3, 7])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_merge_is_its_formula(dtype, count):
    outs, logsumexps = random_parts(count, dtype=dtype, seed=count)
    out, logsumexp = polyhead.merge(outs, logsumexps)
    exact, exact_logsumexp = formula(outs, logsumexps)
    close(out, exact.astype(dtype))
    close(logsumexp, exact_logsumexp.astype(logsumexp.dtype))
    blind = np.isneginf(np.stack(logsumexps)).all(axis=0)
    assert blind.any() and not blind.all()
    assert (logsumexp[blind] == -np.inf).all() and (out[blind.transpose(0, 2, 1)] == 0).all()


def test_an_empty_part_changes_no_bit():
    outs, logsumexps = random_parts(2, empty=0)
    alone = polyhead.merge(outs, logsumexps)
    nothing = np.full_like(outs[0], np.nan), np.full_like(logsumexps[0], -np.inf)
    for n in range(3):
        more = [outs[:n] + [nothing[0]] + outs[n:], logsumexps[:n] + [nothing[1]] + logsumexps[n:]]
        got = polyhead.merge(*more)
        assert got[0].tobytes() == alone[0].tobytes() and got[1].tobytes() == alone[1].tobytes()
    one = polyhead.merge([nothing[0], outs[1]], [nothing[1], logsumexps[1]])
    assert one[0].tobytes() == outs[1].tobytes() and one[1].tobytes() == logsumexps[1].tobytes()


def test_weights_far_apart_do_not_overflow():
    outs, logsumexps = random_parts(3, empty=0)
    for n, shift in enumerate((-3e4, 3e4, 0)):
        logsumexps[n] = logsumexps[n] + np.float32(shift)
    out, logsumexp = polyhead.merge(outs, logsumexps)
    assert out.tobytes() == outs[1].tobytes() and logsumexp.tobytes() == logsumexps[1].tobytes()


def test_visible_nan_stays_visible():
    outs, logsumexps = random_parts(2, empty=0)
    logsumexps[0][1, 2, 3] = np.nan
    outs[1][0, 1, 0, 5] = np.nan
    out, logsumexp = polyhead.merge(outs, logsumexps)
    seen = np.isnan(out)
    assert seen[1, 3, 2].all() and seen[0, 1, 0, 5] and seen.sum() == 7
    assert np.isnan(logsumexp[1, 2, 3]) and np.isnan(logsumexp).sum() == 1


def test_packed():
    outs, logsumexps = random_parts(3, shape=(1, 9, 4, 6))
    out, logsumexp = polyhead.merge(outs, logsumexps)
    packed, packed_logsumexp = polyhead.merge([x[0] for x in outs], [x[0] for x in logsumexps])
    assert packed.tobytes() == out.tobytes() and packed.shape == (9, 4, 6)
    assert packed_logsumexp.tobytes() == logsumexp.tobytes() and packed_logsumexp.shape == (4, 9)


@needs_torch
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("with_grad_logsumexp", [False, True])
def test_gradients_against_autograd(with_grad_logsumexp, dtype):
    outs, logsumexps = random_parts(3, dtype=dtype, seed=4)
    out, logsumexp = polyhead.merge(outs, logsumexps)
    rng = np.random.default_rng(5)
    grad_out = rng.standard_normal(out.shape).astype(dtype)
    grad_logsumexp = rng.standard_normal(logsumexp.shape).astype(logsumexp.dtype)

    O = torch.from_numpy(np.nan_to_num(np.stack(outs).astype(np.float64))).requires_grad_()
    L = torch.from_numpy(np.stack(logsumexps).astype(np.float64)).requires_grad_()
    hidden = torch.isneginf(L)
    blind = hidden.all(0)
    scores = torch.where(blind, 0.0, L)  # torch's gradients of a row of -inf are NaN
    weights = torch.where(hidden, 0.0, torch.softmax(scores, 0)).transpose(-1, -2)[..., None]
    whole = torch.where(blind, 0.0, torch.logsumexp(scores, 0))
    loss = ((weights * O).sum(0) * torch.from_numpy(grad_out.astype(np.float64))).sum()
    if with_grad_logsumexp:
        loss = loss + (whole * torch.from_numpy(grad_logsumexp.astype(np.float64))).sum()
    exact_outs, exact_logsumexps = torch.autograd.grad(loss, (O, L))

    given = (grad_logsumexp,) if with_grad_logsumexp else ()
    got = polyhead.merge_backward(grad_out, outs, logsumexps, out, logsumexp, *given)
    for n in range(3):
        close(got[0][n], exact_outs[n].numpy().astype(dtype), 2)
        error = np.abs(got[1][n] - exact_logsumexps[n].numpy())
        assert error.max() <= 8 * TOLERANCE[np.dtype(dtype).name]  # through the rounded out
        zero = np.isneginf(logsumexps[n])
        assert zero.any() and (got[1][n][zero] == 0).all() and (got[0][n][zero.transpose(0, 2, 1)] == 0).all()


@pytest.mark.parametrize("make", KINDS)
@pytest.mark.parametrize("dtype", [np.float32, np.float16, ml_dtypes.bfloat16, np.float64], ids=str)
def test_kinds_give_the_same_bits_in_their_own_kind(make, dtype, jax_with_float64):  # noqa: F811
    outs, logsumexps = random_parts(2, dtype=dtype)
    whole = polyhead.merge(outs, logsumexps)
    gradients = polyhead.merge_backward(outs[0], outs, logsumexps, *whole, logsumexps[0])
    made = [make(x) for x in outs], tuple(make(x) for x in logsumexps)
    got = polyhead.merge(*made)
    got_gradients = polyhead.merge_backward(made[0][0], *made, *got, made[1][0])
    results = [*got, *got_gradients[0], *got_gradients[1]]
    assert type(got_gradients) is tuple and type(got_gradients[0]) is type(got_gradients[1]) is list
    for result, expected in zip(results, [*whole, *gradients[0], *gradients[1]], strict=True):
        assert type(result) is type(make(expected))
        assert to_numpy(result).dtype == expected.dtype and to_numpy(result).tobytes() == expected.tobytes()


@needs_torch
@needs_jax
def test_kinds_mix():
    outs, logsumexps = random_parts(2)
    expected = polyhead.merge(outs, logsumexps)
    out, logsumexp = polyhead.merge((to_torch(outs[0]), outs[1]), [to_jax(logsumexps[0]), logsumexps[1]])
    assert isinstance(out, torch.Tensor) and isinstance(logsumexp, torch.Tensor)
    assert to_numpy(out).tobytes() == expected[0].tobytes()


def test_any_strides_and_any_sequence():
    outs, logsumexps = random_parts(2, empty=0)
    expected = polyhead.merge(outs, logsumexps)
    for layout in ("bhsd", "fortran", "gaps", "backwards"):
        views = [strided_views(x)[layout] for x in outs]
        close(polyhead.merge(views, [np.asfortranarray(x) for x in logsumexps])[0], expected[0])
        (grad, _), _ = polyhead.merge_backward(views[0], views, logsumexps, views[1], np.asfortranarray(expected[1]))
        assert grad.flags.c_contiguous and grad.ctypes.data % 64 == 0
    for sequence in (tuple, iter, np.stack):
        assert polyhead.merge(sequence(outs), sequence(logsumexps))[0].tobytes() == expected[0].tobytes()
    ones = np.broadcast_to(np.float32(1), outs[0].shape)
    broadcast = polyhead.merge_backward(ones, outs, logsumexps, *expected)
    copied = polyhead.merge_backward(ones.copy(), outs, logsumexps, *expected)
    for some, others in zip(broadcast, copied):
        for got, want in zip(some, others):
            close(got, want)


@pytest.mark.parametrize("shape", [(0, 5, 4, 6), (2, 0, 4, 6), (2, 5, 0, 6), (2, 5, 4, 0)], ids=str)
def test_empty_sizes(shape):
    outs, logsumexps = random_parts(2, shape=shape)
    out, logsumexp = polyhead.merge(outs, logsumexps)
    assert out.shape == shape
    close(logsumexp, formula(outs, logsumexps)[1].astype(np.float32))
    ones = np.ones_like(logsumexp)
    grad_outs, grad_logsumexps = polyhead.merge_backward(out, outs, logsumexps, out, logsumexp, ones)
    assert [x.shape for x in grad_outs + grad_logsumexps] == [shape] * 2 + [logsumexp.shape] * 2


OUT, SUMS = np.ones((1, 2, 3, 4), np.float32), np.zeros((1, 3, 2), np.float32)


@pytest.mark.parametrize(
    "kind, words, arguments",
    [
        bad(TypeError, "outs has type NoneType, must be a sequence of arrays, one of each part", outs=None),
        bad(TypeError, "logsumexps has type str, must be a sequence of arrays", logsumexps="ab"),
        bad(TypeError, "outs has type dict, must be a sequence of arrays", outs={0: OUT}),
        bad(TypeError, "outs[1] has type float, must be an array of float32", outs=[OUT, 1.0]),
        bad(TypeError, "logsumexps[0] has type NoneType, must be an array", logsumexps=[None, SUMS]),
        bad(polyhead.Error, "outs is empty, must hold the out of each part", outs=[], logsumexps=[]),
        bad(polyhead.Error, "logsumexps has 1 parts, outs has 2", logsumexps=[SUMS]),
        bad(polyhead.Error, "outs[0] is int64, must be float32, bfloat16, float16 or", outs=[OUT.astype(int)] * 2),
        bad(polyhead.Error, "outs[0] has 2 dimensions, must have 3 to 4: [batch, seqlen_q,", outs=[OUT[0, 0]] * 2),
        bad(polyhead.Error, "outs[1] is [1, 2, 3, 3], must be [1, 2, 3, 4]", outs=[OUT, OUT[..., :3]]),
        bad(polyhead.Error, "outs[1] is [2, 3, 4], must be [1, 2, 3, 4]", outs=[OUT, OUT[0]]),
        bad(polyhead.Error, "outs[1] is float64, must be float32", outs=[OUT, OUT.astype(float)]),
        bad(polyhead.Error, "logsumexps[1] is [1, 2, 3], must be [1, 3, 2]", logsumexps=[SUMS, SUMS.reshape(1, 2, 3)]),
        bad(polyhead.Error, "logsumexps[0] is float64, must be float32", logsumexps=[SUMS.astype(float)] * 2),
    ],
)
def test_bad_input(kind, words, arguments):
    good = {"outs": [OUT, OUT], "logsumexps": [SUMS, SUMS]}
    refused(polyhead.merge, kind, words, good | arguments)
    refused(polyhead.merge_backward, kind, words, {"grad_out": OUT, "out": OUT, "logsumexp": SUMS} | good | arguments)


@pytest.mark.parametrize(
    "kind, words, arguments",
    [
        bad(TypeError, "grad_out has type NoneType, must be an array", grad_out=None),
        bad(TypeError, "logsumexp has type NoneType, must be an array", logsumexp=None),
        bad(polyhead.Error, "grad_out is [1, 2, 3, 1], must be [1, 2, 3, 4]", grad_out=OUT[..., :1]),
        bad(polyhead.Error, "grad_out is float64, must be float32", grad_out=OUT.astype(float)),
        bad(polyhead.Error, "out has 3 dimensions, must have 4", out=OUT[0]),
        bad(polyhead.Error, "logsumexp is [1, 3, 1], must be [1, 3, 2]", logsumexp=SUMS[..., :1]),
        bad(polyhead.Error, "grad_logsumexp is float64, must be float32", grad_logsumexp=SUMS.astype(float)),
    ],
)
def test_bad_gradients(kind, words, arguments):
    good = {"grad_out": OUT, "outs": [OUT, OUT], "logsumexps": [SUMS, SUMS], "out": OUT, "logsumexp": SUMS}
    refused(polyhead.merge_backward, kind, words, good | arguments)
