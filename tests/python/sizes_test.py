"""Extreme sizes through NumPy: arrays of one element, broadcast to sizes near 0, 2^31, 2^32, 2^62, products near 2^64.

What is refused is refused with a sentence, what is too large for memory is a MemoryError, the rest is computed;
nothing crashes or hangs. It all happens in a child process, whose last line tells the case.
More: POLYHEAD_FUZZ_RUNS=10000; others: POLYHEAD_FUZZ_SEED=2; number n: POLYHEAD_FUZZ_RUNS=1 POLYHEAD_FUZZ_FIRST=n.
"""

import faulthandler
import math
import os
import random
import resource
import subprocess
import sys

import numpy as np

import polyhead

MOST_BYTES = 16 << 20  # of an array that is made
MOST_WORK = 1 << 21  # multiply-adds of a call that is run
ADDRESS_SPACE = 8 << 30  # of the child; arrays beyond do not exist
POWERS = (16, 20, 24, 31, 32, 33, 40, 48, 52, 54, 55, 56, 57, 58, 59, 60, 61, 62)


def setting(name, otherwise):
    return int(os.environ.get(name, otherwise))


class Sizes:
    """The sizes of one case: of most cases few are extreme, or NumPy had no such arrays, or every plan was refused."""

    def __init__(self, rng):
        self.rng = rng
        self.percent = rng.choice((0, 6, 12, 25, 50))

    def __call__(self):
        rng = self.rng
        if rng.randrange(100) >= self.percent:
            return rng.randint(1, 3) if rng.random() < 0.7 else rng.randint(0, 70)
        power = 1 << rng.choice(POWERS)
        return rng.choice((power, power + rng.randint(-3, 3), (1 << 64) // rng.randint(3, 5000), 0,
                           power // rng.randint(1, 100)))  # fmt: skip


class Figures:
    def __init__(self, of):
        self.of = of
        self.count = dict.fromkeys(("cases", "no such array", "refused", "no memory", "forward", "backward"), 0)

    def __getitem__(self, name):
        return self.count[name]

    def add(self, name):
        self.count[name] += 1

    def __str__(self):
        return f"{self.of}: " + ", ".join(f"{name} {count}" for name, count in self.count.items())


def is_numpys(error):
    """Whether NumPy says that it has no such array."""
    return any(words in str(error).lower() for words in ("too big", "too large", "maximum"))


def broadcast(dtype, *dims):
    return np.broadcast_to(np.zeros((), dtype), dims)


def size_bytes(*arrays):
    return max(math.prod(array.shape) * array.itemsize for array in arrays)


def attention_case(rng):
    """Operands and options; ValueError if NumPy has no such array."""
    size = Sizes(rng)
    dtype = rng.choice((np.float32, np.float32, np.float16, np.float64))
    batch, seqlen_q, seqlen_k, heads_kv, dim, dim_v = (size() for _ in range(6))
    heads = heads_kv * (size() if rng.random() < 0.3 else 1)
    options = {"causal": rng.random() < 0.3, "align": rng.choice(("top_left", "bottom_right"))}
    packed = rng.random() < 0.2
    lead = [(batch, seqlen_q), (batch, seqlen_k)] if not packed else [(seqlen_q,), (seqlen_k,)]
    arrays = [broadcast(dtype, *lead[0], heads, dim), broadcast(dtype, *lead[1], heads_kv, dim),
              broadcast(dtype, *lead[1], heads_kv, dim_v)]  # fmt: skip
    if packed:
        for name, tokens in (("cu_seqlens_q", seqlen_q), ("cu_seqlens_k", seqlen_k)):
            options[name] = np.array([0, min(tokens, 1), min(tokens, 2)])
    elif rng.random() < 0.2:
        options["seqlens_k"] = np.broadcast_to(np.array(min(seqlen_k, 1)), (batch,))
    if not packed and rng.random() < 0.2:
        options["attn_mask"] = np.broadcast_to(np.array(True), (1, 1, rng.choice((1, seqlen_q)), seqlen_k))
    if rng.random() < 0.2:
        options["window"] = (size(), -1)
    if not packed and rng.random() < 0.15:
        options["return_weights"] = rng.choice((True, "mean"))
    element, sums = np.dtype(dtype).itemsize, 8 if dtype is np.float64 else 4
    out_bytes = math.prod(lead[0]) * heads * max(dim_v * element, sums)  # or logsumexp
    if "return_weights" in options:
        per_head = heads if options["return_weights"] is True else 1
        out_bytes = max(out_bytes, batch * per_head * seqlen_q * seqlen_k * element)
    some = [max(n, 1) for n in (seqlen_k, dim, dim_v)]
    work = math.prod(lead[0]) * max(heads, 1) * some[0] * max(some[1:])
    # Rows are looked at where their vectors are empty, and lengths of every sequence.
    return arrays, options, out_bytes, max(work, batch, math.prod(lead[1]) * max(heads_kv, 1))


def run_attention(rng, figures):
    arrays, options, out_bytes, work = attention_case(rng)
    try:
        plan = polyhead.explain(*arrays, **options)
    except polyhead.Error as error:
        assert str(error)
        figures.add("refused")
        return
    if not plan.kernel:
        figures.add("refused")
        return
    if out_bytes > ADDRESS_SPACE or plan.workspace_bytes > ADDRESS_SPACE:
        try:
            polyhead.attention(*arrays, return_logsumexp=True, **options)
        except (MemoryError, polyhead.Error):
            figures.add("no memory")
            return
        raise AssertionError("it gave an array that has no memory")
    if out_bytes > MOST_BYTES or plan.workspace_bytes > MOST_BYTES or work > MOST_WORK:
        return
    out, logsumexp, *_ = polyhead.attention(*arrays, return_logsumexp=True, **options)
    assert out.shape == arrays[0].shape[:-1] + arrays[2].shape[-1:]
    figures.add("forward")
    options.pop("return_weights", None)
    if max(size_bytes(*arrays), plan.backward_workspace_bytes) > MOST_BYTES or 16 * work > MOST_WORK:
        return
    gradients = polyhead.attention_backward(out, *arrays, out, logsumexp, **options)
    assert [gradients[name].shape for name in ("query", "key", "value")] == [array.shape for array in arrays]
    figures.add("backward")


def run_layer(rng, figures):
    """MultiHeadAttention copies its weights, so these are small, and x is extreme."""
    dtype = rng.choice((np.float32, np.float16, np.float64))
    heads, dim, out_size, size = (rng.randint(1, 3) for _ in range(4))
    weights = {f"{name}_weight": np.zeros((size, heads * dim), dtype) for name in ("query", "key", "value")}
    weights["out_weight"] = np.zeros((heads * dim, out_size), dtype)
    extreme = Sizes(rng)
    batch, seqlen_q, seqlen_k = extreme(), extreme(), extreme()
    x, keys = broadcast(dtype, batch, seqlen_q, size), broadcast(dtype, batch, seqlen_k, size)
    layer = polyhead.MultiHeadAttention(weights, heads)
    tokens = batch * max(seqlen_q, seqlen_k)
    least_bytes = tokens * heads * dim * np.dtype(dtype).itemsize  # of the reserve
    if least_bytes <= ADDRESS_SPACE and max(tokens, batch * seqlen_q * seqlen_k) * heads * dim * 64 > MOST_WORK:
        return
    try:
        out = layer.forward(x, keys, training=True)
    except polyhead.Error as error:
        assert str(error)
        figures.add("refused")
        return
    except MemoryError:
        assert least_bytes > ADDRESS_SPACE
        figures.add("no memory")
        return
    assert out.shape == (batch, seqlen_q, out_size)
    figures.add("forward")
    gradients = layer.backward(broadcast(dtype, *out.shape))
    assert gradients["query"].shape == x.shape
    figures.add("backward")


def child(of):
    """Cases one after the other; before each a line that tells it, at the end the figures."""
    resource.setrlimit(resource.RLIMIT_AS, (ADDRESS_SPACE, ADDRESS_SPACE))
    run = {"attention": run_attention, "layer": run_layer}[of]
    figures = Figures(of)
    first = setting("POLYHEAD_FUZZ_FIRST", 0)
    for n in range(first, first + setting("POLYHEAD_FUZZ_RUNS", 1500)):
        print(f"POLYHEAD_FUZZ_RUNS=1 POLYHEAD_FUZZ_FIRST={n}", flush=True)
        faulthandler.dump_traceback_later(60, exit=True)
        figures.add("cases")
        try:
            run(random.Random(setting("POLYHEAD_FUZZ_SEED", 1) * 1000003 + n), figures)
        except ValueError as error:  # NumPy's, not polyhead's
            if isinstance(error, polyhead.Error) or not is_numpys(error):
                raise
            figures.add("no such array")
        faulthandler.cancel_dump_traceback_later()
    print(figures)


def fuzzed(of):
    """What the child counted."""
    done = subprocess.run([sys.executable, __file__, of], capture_output=True, text=True, timeout=1800)
    lines = done.stdout.splitlines()
    assert done.returncode == 0, f"{lines[-1:]} ended with {done.returncode}:\n{done.stderr[-4000:]}"
    print(lines[-1])
    return dict(part.rsplit(" ", 1) for part in lines[-1].split(": ")[1].split(", "))


def test_attention_of_extreme_sizes():
    count = {name: int(number) for name, number in fuzzed("attention").items()}
    assert count["forward"] > count["cases"] / 4
    assert count["backward"] > 0 and count["refused"] > 0


def test_an_empty_result_takes_no_memory():
    """Its other dims were once multiplied all the same: a MemoryError of 2^50 bytes."""
    query, keys = broadcast(np.float32, 0, 1 << 40, 2, 64), broadcast(np.float32, 0, 3, 2, 64)
    out, logsumexp = polyhead.attention(query, keys, keys, return_logsumexp=True)
    assert out.shape == query.shape and logsumexp.shape == (0, 2, 1 << 40)


def test_layers_of_extreme_sizes():
    count = {name: int(number) for name, number in fuzzed("layer").items()}
    assert count["forward"] > count["cases"] / 4


if __name__ == "__main__":
    child(sys.argv[1])
