"""flash-attn's functions on polyhead against plain loops over their documented meaning."""

import inspect
import math

import pytest
import torch

from polyhead import Error
from polyhead import torch as ph

DTYPES = [torch.float32, torch.bfloat16, torch.float16]

# flash-attn 2.8's arguments, in their places.
SIGNATURES = {
    "flash_attn_func": "q k v dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs",
    "flash_attn_kvpacked_func": "q kv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs",
    "flash_attn_qkvpacked_func": "qkv dropout_p softmax_scale causal window_size softcap alibi_slopes deterministic "
    "return_attn_probs",
    "flash_attn_varlen_func": "q k v cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p softmax_scale "
    "causal window_size softcap alibi_slopes deterministic return_attn_probs block_table",
    "flash_attn_varlen_kvpacked_func": "q kv cu_seqlens_q cu_seqlens_k max_seqlen_q max_seqlen_k dropout_p "
    "softmax_scale causal window_size softcap alibi_slopes deterministic return_attn_probs",
    "flash_attn_varlen_qkvpacked_func": "qkv cu_seqlens max_seqlen dropout_p softmax_scale causal window_size softcap "
    "alibi_slopes deterministic return_attn_probs",
    "flash_attn_with_kvcache": "q k_cache v_cache k v rotary_cos rotary_sin cache_seqlens cache_batch_idx "
    "cache_leftpad block_table softmax_scale causal window_size softcap rotary_interleaved alibi_slopes num_splits "
    "return_softmax_lse",
}


@pytest.mark.parametrize("name", SIGNATURES)
def test_arguments_stand_where_flash_attn_has_them(name):
    assert list(inspect.signature(getattr(ph, name)).parameters) == SIGNATURES[name].split()


def formula(q, k, v, scale=None, causal=False, window_size=(-1, -1), softcap=0.0, alibi_slopes=None, first=0):
    """out, logsumexp and probabilities in float64 of q [B, Sq, H, D], k and v [B, Sk, G, D]."""
    q, k, v = (x.double().transpose(1, 2) for x in (q, k, v))
    k, v = (x.repeat_interleave(q.shape[1] // x.shape[1], 1) for x in (k, v))
    rows, keys = q.shape[2], k.shape[2]
    scores = q @ k.transpose(-1, -2) * (q.shape[-1] ** -0.5 if scale is None else scale)
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = torch.arange(rows)[:, None] + keys - rows - torch.arange(keys)
    if alibi_slopes is not None:
        scores = scores - alibi_slopes.double()[..., None, None] * distance.abs()
    left, right = window_size
    hidden = torch.arange(keys).expand(rows, keys) < first
    hidden = hidden | ((distance > left) if left >= 0 else False) | ((-distance > right) if right >= 0 else False)
    if causal:
        hidden = hidden | (distance < 0)
    scores = scores.masked_fill(hidden, -math.inf)
    weights = scores.softmax(-1).nan_to_num(0)
    return (weights @ v).transpose(1, 2), scores.logsumexp(-1), weights


def assert_near(got, want, dtype, times=1):
    """Of a kernel that rounds its operands to dtype: some ulp of the largest number."""
    tolerance = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}[dtype] * times
    largest = max(1.0, float(want.abs().max())) if want.numel() else 0.0
    torch.testing.assert_close(got.double(), want, rtol=tolerance, atol=tolerance * largest)


def operands(dtype, B=2, Sq=13, Sk=21, H=4, G=2, D=24, grad=False):
    generator = torch.Generator().manual_seed(Sq * 100 + Sk)
    shapes = (B, Sq, H, D), (B, Sk, G, D), (B, Sk, G, D)
    return tuple(torch.randn(shape, generator=generator).to(dtype).requires_grad_(grad) for shape in shapes)


SLOPES = torch.tensor([0.5, 0.25, 0.125, 0.0625])
OPTIONS = {
    "plain": {},
    "scale": {"softmax_scale": 0.3},
    "causal": {"causal": True},
    "window": {"window_size": (5, 2)},
    "left window, causal": {"window_size": (7, -1), "causal": True},
    "softcap": {"softcap": 3.0},
    "alibi": {"alibi_slopes": SLOPES},
    "alibi of each sequence": {"alibi_slopes": torch.stack([SLOPES, 2 * SLOPES]), "causal": True},
}


def of_formula(options):
    return {"scale" if name == "softmax_scale" else name: value for name, value in options.items()}


@pytest.mark.parametrize("sizes", [(13, 21), (21, 13), (16, 16), (1, 40)], ids=str)
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_func(options, dtype, sizes):
    q, k, v = operands(dtype, Sq=sizes[0], Sk=sizes[1])
    want, logsumexp, _ = formula(q, k, v, **of_formula(options))
    assert_near(ph.flash_attn_func(q, k, v, **options), want, dtype)
    out, lse, probabilities = ph.flash_attn_func(q, k, v, return_attn_probs=True, deterministic=True, **options)
    assert_near(out, want, dtype)
    assert lse.dtype == torch.float32 and probabilities is None
    torch.testing.assert_close(lse.double(), logsumexp, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_gradients_are_the_formula_s(options):
    mine, theirs = operands(torch.float32, grad=True), operands(torch.float32, grad=True)
    ph.flash_attn_func(*mine, **options).square().sum().backward()
    formula(*theirs, **of_formula(options))[0].square().sum().backward()
    for got, want in zip(mine, theirs):
        assert_near(got.grad, want.grad.double(), torch.float32, times=4)


def test_packed_tensors_are_their_parts_and_get_one_gradient():
    qkv = torch.randn(2, 9, 3, 4, 16, requires_grad=True)
    out = ph.flash_attn_qkvpacked_func(qkv, causal=True)
    out.sum().backward()
    q, kv = qkv.detach()[:, :, 0].clone().requires_grad_(), qkv.detach()[:, :, 1:].clone().requires_grad_()
    other = ph.flash_attn_kvpacked_func(q, kv, causal=True)
    other.sum().backward()
    torch.testing.assert_close(out, other, rtol=0, atol=0)
    torch.testing.assert_close(qkv.grad, torch.cat([q.grad.unsqueeze(2), kv.grad], 2), rtol=0, atol=0)
    torch.testing.assert_close(out, ph.flash_attn_func(q, *kv.unbind(2), causal=True), rtol=0, atol=0)


def test_probabilities_tell_what_was_dropped():
    q, k, v = operands(torch.float32)
    torch.manual_seed(3)
    out, _, probabilities = ph.flash_attn_func(q, k, v, dropout_p=0.4, causal=True, return_attn_probs=True)
    _, _, weights = formula(q, k, v, causal=True)
    torch.testing.assert_close(probabilities.abs().double(), weights, rtol=1e-5, atol=1e-6)
    dropped = (probabilities < 0).double().sum() / (weights > 0).sum()
    assert 0.3 < dropped < 0.5
    kept = torch.where(probabilities < 0, 0, weights) / 0.6
    wide = v.double().transpose(1, 2).repeat_interleave(2, 1)
    assert_near(out, (kept @ wide).transpose(1, 2), torch.float32, times=2)
    torch.manual_seed(3)
    torch.testing.assert_close(out, ph.flash_attn_func(q, k, v, dropout_p=0.4, causal=True), rtol=0, atol=0)


LENGTHS_Q, LENGTHS_K = [5, 0, 9, 1], [7, 3, 9, 0]


def starts(lengths):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0).tolist()], dtype=torch.int32)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [o for o in OPTIONS.values() if "alibi_slopes" not in o], ids=str)
def test_varlen(options, dtype):
    q = torch.randn(sum(LENGTHS_Q), 4, 24).to(dtype)
    kv = torch.randn(sum(LENGTHS_K), 2, 2, 24).to(dtype)
    bounds = starts(LENGTHS_Q), starts(LENGTHS_K), max(LENGTHS_Q), max(LENGTHS_K)
    out, lse, nothing = ph.flash_attn_varlen_func(q, *kv.unbind(1), *bounds, return_attn_probs=True, **options)
    assert nothing is None and lse.shape == (4, len(q))
    for b, (i, j) in enumerate(zip(LENGTHS_Q, LENGTHS_K)):
        rows, keys = slice(int(bounds[0][b]), int(bounds[0][b]) + i), slice(int(bounds[1][b]), int(bounds[1][b]) + j)
        want, logsumexp, _ = formula(q[None, rows], kv[None, keys, 0], kv[None, keys, 1], **of_formula(options))
        assert_near(out[rows], want[0], dtype)
        torch.testing.assert_close(lse[:, rows].double(), logsumexp[0], rtol=1e-5, atol=1e-5)
    packed = ph.flash_attn_varlen_kvpacked_func(q, kv, *bounds, **options)
    torch.testing.assert_close(packed, out, rtol=0, atol=0)
    qkv = torch.randn(sum(LENGTHS_Q), 3, 4, 24).to(dtype)
    one = ph.flash_attn_varlen_qkvpacked_func(qkv, bounds[0], max(LENGTHS_Q), **options)
    both = ph.flash_attn_varlen_func(*qkv.unbind(1), bounds[0], bounds[0], 9, 9, **options)
    torch.testing.assert_close(one, both, rtol=0, atol=0)


def paged(rows, page_size, order):
    """[B, capacity, G, D] in pages of a pool, each sequence's in the order given; the pool and the table."""
    batch, capacity = rows.shape[:2]
    pages = rows.reshape(batch * (capacity // page_size), page_size, *rows.shape[2:])
    pool = torch.full((len(pages) + 2, *pages.shape[1:]), float("nan"), dtype=rows.dtype)
    table = order.view(batch, -1)
    pool[table.flatten()] = pages
    return pool, table.int()


def test_varlen_of_pages():
    rows = torch.randn(3, 2, 32, 2, 24)[:2]  # keys, values [B, 32, G, D]
    order = torch.randperm(10)[:8]
    (k, table), (v, _) = (paged(each, 8, order) for each in rows)
    q, lengths = torch.randn(6, 4, 24), [32, 11]
    table[1, 2:] = -7  # behind the second sequence's pages
    options = dict(max_seqlen_q=4, max_seqlen_k=32, causal=True, block_table=table)
    out = ph.flash_attn_varlen_func(q, k, v, starts([4, 2]), starts(lengths), **options)
    recorded = ph.flash_attn_varlen_func(q.requires_grad_(), k, v, starts([4, 2]), starts(lengths), **options)
    assert recorded.requires_grad and torch.equal(recorded.detach(), out)
    q = q.detach()
    ends = options | {"return_attn_probs": True}
    one_length = ph.flash_attn_varlen_func(q, k, v, starts([3, 3]), starts(lengths), **options)
    assert torch.equal(one_length, ph.flash_attn_varlen_func(q, k, v, starts([3, 3]), starts(lengths), **ends)[0])
    for b, (queries, keys) in enumerate(zip((slice(0, 4), slice(4, 6)), lengths)):
        want = formula(q[None, queries], rows[0, b : b + 1, :keys], rows[1, b : b + 1, :keys], causal=True)[0]
        assert_near(out[queries], want[0], torch.float32)


def rotate(x, cos, sin, positions, interleaved):
    """x [S, H, D] by the tables' rows at positions, pair by pair."""
    pairs = cos.shape[1]
    out = x.double().clone()
    for p in range(pairs):
        a, b = (2 * p, 2 * p + 1) if interleaved else (p, p + pairs)
        c, s = cos[positions, p].double()[:, None], sin[positions, p].double()[:, None]
        out[..., a] = x[..., a].double() * c - x[..., b].double() * s
        out[..., b] = x[..., a].double() * s + x[..., b].double() * c
    return out.to(x.dtype)


class Decoding:
    """A cache with NaN where nothing is filled, and what one call on it should give."""

    def __init__(self, dtype, new=2, queries=2, lengths=(7, 0, 25)):
        generator = torch.Generator().manual_seed(5)
        self.lengths, self.new, self.capacity = list(lengths), new, 32
        self.dtype, batch = dtype, len(lengths)
        random = lambda *shape: torch.randn(shape, generator=generator).to(dtype)  # noqa: E731
        self.q = random(batch, queries, 4, 24)
        self.old = [random(batch, self.capacity, 2, 24) for _ in range(2)]
        self.added = [random(batch, new, 2, 24) for _ in range(2)]
        for cache in self.old:
            for b, length in enumerate(lengths):
                cache[b, length:] = float("nan")
        angles = torch.rand(64, 8, generator=generator) * 6
        self.tables = angles.cos(), angles.sin()

    def want(self, rotary=None, first=None, advances=True, **options):
        out = []
        for b, length in enumerate(self.lengths):
            q, start = self.q[b], 0 if first is None else first[b]
            k, v = (torch.cat([old[b, :length], new[b]]) for old, new in zip(self.old, self.added))
            if rotary is not None:
                position = length - start
                steps = torch.arange(len(q)) if advances else torch.zeros(len(q), dtype=torch.long)
                q = rotate(q, *self.tables, position + steps, rotary)
                k[length:] = rotate(k[length:], *self.tables, position + torch.arange(self.new), rotary)
            out.append(formula(q[None], k[None], v[None], first=start, **options)[0])
        return torch.cat(out)


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("options", [{}, {"causal": True}, {"window_size": (4, 0)}], ids=str)
@pytest.mark.parametrize("rotary", [None, True, False], ids=["", "interleaved", "halves"])
def test_kvcache_takes_the_new_rows_in(rotary, options, dtype):
    case = Decoding(dtype)
    k_cache, v_cache = (cache.clone() for cache in case.old)
    turn = {} if rotary is None else dict(zip(("rotary_cos", "rotary_sin"), case.tables), rotary_interleaved=rotary)
    out, lse = ph.flash_attn_with_kvcache(
        case.q, k_cache, v_cache, *case.added, cache_seqlens=torch.tensor(case.lengths, dtype=torch.int32),
        return_softmax_lse=True, **turn, **options,
    )  # fmt: skip
    assert_near(out, case.want(rotary, advances=bool(options), **options), dtype)
    assert lse.shape == (3, 4, 2)
    for b, length in enumerate(case.lengths):
        torch.testing.assert_close(v_cache[b, length : length + 2], case.added[1][b], rtol=0, atol=0)
        assert k_cache[b, length + 2 :].isnan().all() and not k_cache[b, : length + 2].isnan().any()


def test_kvcache_of_sequences_somewhere_in_the_cache():
    case = Decoding(torch.float32)
    index = torch.tensor([4, 0, 2], dtype=torch.int32)
    caches = [torch.full((5, *old.shape[1:]), float("nan")) for old in case.old]
    for cache, old in zip(caches, case.old):
        cache[index.long()] = old
    out = ph.flash_attn_with_kvcache(
        case.q, *caches, *case.added, cache_seqlens=torch.tensor(case.lengths), cache_batch_idx=index, causal=True
    )
    assert_near(out, case.want(causal=True), torch.float32)
    assert caches[0][[1, 3]].isnan().all()


@pytest.mark.parametrize("rotary", [None, True], ids=["", "rotary"])
def test_kvcache_with_padding_on_the_left(rotary):
    case = Decoding(torch.float32, lengths=(7, 3, 25))
    first = [2, 0, 11]
    turn = {} if rotary is None else dict(zip(("rotary_cos", "rotary_sin"), case.tables))
    k_cache, v_cache = (cache.clone() for cache in case.old)
    for cache in (k_cache, v_cache):
        for b, row in enumerate(first):
            cache[b, :row] = float("nan")
    out = ph.flash_attn_with_kvcache(
        case.q, k_cache, v_cache, *case.added, cache_seqlens=torch.tensor(case.lengths),
        cache_leftpad=torch.tensor(first), causal=True, **turn,
    )  # fmt: skip
    assert_near(out, case.want(rotary, first, causal=True), torch.float32)


def test_kvcache_of_pages():
    case = Decoding(torch.float32, lengths=(7, 0, 25))
    order = torch.randperm(14)[:12]
    (k, table), (v, _) = (paged(old, 8, order) for old in case.old)
    valid = table.clone()
    table[0, 2:] = table[1, 1:] = 99  # behind 9 and 2 tokens
    out = ph.flash_attn_with_kvcache(
        case.q, k, v, *case.added, cache_seqlens=torch.tensor(case.lengths), block_table=table, causal=True
    )
    assert_near(out, case.want(causal=True), torch.float32)
    rows = v[valid.long()].flatten(1, 2)
    for b, length in enumerate(case.lengths):
        torch.testing.assert_close(rows[b, length : length + 2], case.added[1][b], rtol=0, atol=0)


def test_kvcache_only_read():
    q, k, v = operands(torch.float32)
    assert_near(ph.flash_attn_with_kvcache(q, k, v), formula(q, k, v)[0], torch.float32)
    assert_near(ph.flash_attn_with_kvcache(q, k, v, cache_seqlens=6), formula(q, k[:, :6], v[:, :6])[0], torch.float32)


REFUSED = {
    "packed of two": (lambda c: ph.flash_attn_qkvpacked_func(torch.ones(1, 4, 2, 2, 8)), "qkv has shape"),
    "probabilities of packed sequences": (
        lambda c: ph.flash_attn_varlen_func(
            *torch.ones(3, 4, 2, 8), starts([4]), starts([4]), 4, 4, dropout_p=0.5, return_attn_probs=True
        ),
        "return_attn_probs is True",
    ),
    "no room": (
        lambda c: ph.flash_attn_with_kvcache(c.q, *c.old, *c.added, cache_seqlens=31),
        r"cache_seqlens is \[31, 31, 31\] before 2 new rows, which pass the cache's 32",
    ),
    "a length below 0": (
        lambda c: ph.flash_attn_with_kvcache(c.q, *c.old, cache_seqlens=torch.tensor([1, -1, 3])),
        r"cache_seqlens is \[1, -1, 3\], must be 0 to 32",
    ),
    "lengths of another batch": (
        lambda c: ph.flash_attn_with_kvcache(c.q, *c.old, cache_seqlens=torch.tensor([1, 2])), "cache_seqlens has shape"
    ),
    "k without v": (
        lambda c: ph.flash_attn_with_kvcache(c.q, *c.old, c.added[0], cache_seqlens=3), "must be given together"
    ),
    "k of another dtype": (
        lambda c: ph.flash_attn_with_kvcache(c.q, *c.old, c.added[0].double(), c.added[1], cache_seqlens=3),
        "k is .* must be",
    ),
    "a page that is not there": (
        lambda c: ph.flash_attn_with_kvcache(
            c.q, *c.old, *c.added, cache_seqlens=3, block_table=torch.full((3, 2), 9)
        ),
        "block_table holds 9 to 9, must be 0 to 2",
    ),
    "two sequences at one place": (
        lambda c: ph.flash_attn_with_kvcache(
            c.q, *c.old, *c.added, cache_seqlens=3, cache_batch_idx=torch.tensor([0, 1, 0])
        ),
        "two sequences would write one row of the cache",
    ),
    "lengths that are no integers": (
        lambda c: ph.flash_attn_with_kvcache(c.q, *c.old, cache_seqlens=torch.tensor([1.0, 2.0, 3.0])),
        "cache_seqlens is torch.float32, must be int32 or int64",
    ),
    "what attention refuses": (
        lambda c: ph.flash_attn_with_kvcache(c.q[..., :16], *c.old, *c.added, cache_seqlens=3), "24"
    ),
    "a shorter cache of values": (
        lambda c: ph.flash_attn_with_kvcache(c.q, c.old[0], c.old[1][:2], *c.added, cache_seqlens=3),
        r"v_cache is \(2, 32, 2, 24\), must begin with \(3, 32\) as k_cache",
    ),
    "rotary without k": (
        lambda c: ph.flash_attn_with_kvcache(c.q, *c.old, rotary_cos=c.tables[0], rotary_sin=c.tables[1]),
        "rotary_cos is given without k and v",
    ),
    "positions beyond the tables": (
        lambda c: ph.flash_attn_with_kvcache(
            c.q, *c.old, *c.added, cache_seqlens=9, rotary_cos=c.tables[0][:10], rotary_sin=c.tables[1][:10]
        ),
        "rotary_cos has 10 positions, k stands at 9 to 10",
    ),
}


@pytest.mark.parametrize("call, sentence", REFUSED.values(), ids=REFUSED)
def test_refusals_leave_the_cache_alone(call, sentence):
    case = Decoding(torch.float32)
    before = [cache.clone() for cache in case.old]
    with pytest.raises(Error, match=sentence):
        call(case)
    for cache, was in zip(case.old, before):
        torch.testing.assert_close(cache, was, rtol=0, atol=0, equal_nan=True)
