"""fork, threads, reference counts and memory."""

import gc
import multiprocessing
import os
import signal
import subprocess
import sys
import threading
import time

import numpy as np
import pytest

import polyhead
from optional import torch


def operands(seqlen=200, dtype=np.float32, seed=0):
    rng = np.random.default_rng(seed)
    return tuple(rng.standard_normal((2, seqlen, 4, 32)).astype(dtype) for _ in range(3))


def train(arrays, **options):
    """Bytes of the output and of the gradients."""
    out, logsumexp = polyhead.attention(*arrays, return_logsumexp=True, **options)
    gradients = polyhead.attention_backward(out, *arrays, out, logsumexp, **options)
    return b"".join(x.tobytes() for x in (out, *gradients.values()))


def run_in_fork(check):
    """`check()` in a forked child: seconds until it ended well; kills it after 20."""
    start = time.monotonic()
    child = os.fork()
    if child == 0:
        try:
            os._exit(0 if check() else 1)
        except BaseException:
            os._exit(2)
    while time.monotonic() - start < 20:
        pid, status = os.waitpid(child, os.WNOHANG)
        if pid == child:
            assert status == 0, f"wait status {status}"
            return time.monotonic() - start
        time.sleep(0.005)
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    pytest.fail("the child hung")


@pytest.mark.filterwarnings("ignore:.*fork")
def test_fork_after_use():
    arrays = operands()
    expected = train(arrays)  # the pool's threads have run
    for _ in range(3):
        assert run_in_fork(lambda: train(arrays) == expected) < 1
    assert train(arrays) == expected


@pytest.mark.filterwarnings("ignore:.*fork")
def test_fork_while_other_threads_compute():
    arrays = operands()
    expected = polyhead.attention(*arrays).tobytes()
    stop = threading.Event()

    def busy():
        while not stop.is_set():
            polyhead.attention(*arrays)

    threads = [threading.Thread(target=busy) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        for _ in range(5):
            run_in_fork(lambda: polyhead.attention(*arrays).tobytes() == expected)
    finally:
        stop.set()
        for thread in threads:
            thread.join()


def child_of_pool(seed):
    return polyhead.attention(*operands(seed=seed)).tobytes()


@pytest.mark.filterwarnings("ignore:.*fork")
def test_multiprocessing_pool_by_fork():
    expected = [child_of_pool(seed) for seed in range(4)]
    with multiprocessing.get_context("fork").Pool(2) as pool:
        assert pool.map_async(child_of_pool, range(4)).get(timeout=20) == expected


def test_threads_at_once():
    dtypes = (np.float32, np.float16, np.float64)
    problems = [operands(seqlen, dtype, seed=seqlen) for seqlen in (1, 17, 150) for dtype in dtypes]
    expected = [train(arrays) for arrays in problems]
    failures = []

    def work(first):
        for i in range(30):
            at = (first + i) % len(problems)
            if train(problems[at]) != expected[at]:
                failures.append(at)

    threads = [threading.Thread(target=work, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=60)
    assert not failures and not any(thread.is_alive() for thread in threads)


@pytest.mark.parametrize("backward", [False, True])
def test_other_threads_run_while_one_computes(backward):
    arrays = operands(seqlen=500 if backward else 1500)
    out, logsumexp = polyhead.attention(*arrays, return_logsumexp=True)
    counted = 0
    done = threading.Event()

    def compute():  # about a second
        if backward:
            polyhead.attention_backward(out, *arrays, out, logsumexp, kernel="reference")
        else:
            polyhead.attention(*arrays, kernel="reference")
        done.set()

    thread = threading.Thread(target=compute)
    thread.start()
    while not done.is_set():
        counted += 1
        time.sleep(0.001)
    thread.join()
    assert counted > 20


def test_inputs_may_be_dropped_while_computing():
    arrays = list(operands(seqlen=300))
    expected = polyhead.attention(*arrays, kernel="reference").tobytes()
    results = []
    thread = threading.Thread(target=lambda *a: results.append(polyhead.attention(*a, kernel="reference")), args=arrays)
    thread.start()
    arrays.clear()
    gc.collect()
    thread.join()
    assert results[0].tobytes() == expected


def test_into_may_be_emptied_while_computing():
    arrays = operands(seqlen=300)
    out, logsumexp = polyhead.attention(*arrays, return_logsumexp=True)
    expected = polyhead.attention_backward(out, *arrays, out, logsumexp, kernel="reference", needs=["query"])
    into = {"query": np.empty_like(out)}
    results = []

    def compute():
        options = {"kernel": "reference", "needs": ["query"], "into": into}
        results.append(polyhead.attention_backward(out, *arrays, out, logsumexp, **options))

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.02)
    into.clear()
    gc.collect()
    thread.join()
    assert results[0]["query"].tobytes() == expected["query"].tobytes()


def test_parts_may_be_dropped_while_merging():
    rng = np.random.default_rng(0)
    outs = [rng.standard_normal((8, 500, 16, 64)).astype(np.float32) for _ in range(3)]
    logsumexps = [np.zeros((8, 16, 500), np.float32) for _ in range(3)]
    expected = polyhead.merge(outs, logsumexps)[0].tobytes()
    results = []

    def compute():
        try:
            results.append(polyhead.merge(outs, logsumexps)[0].tobytes())
        except polyhead.Error:  # they were dropped before it had looked at them
            results.append(expected)

    thread = threading.Thread(target=compute)
    thread.start()
    time.sleep(0.005)
    outs.clear()
    gc.collect()
    thread.join()
    assert results == [expected]


def test_reference_counts_stay_flat():
    query, key, value = operands(seqlen=3)
    options = {
        "attn_mask": np.ones((3, 3), bool),
        "window": (5, 5),
        "align": "top_left",
        "query_offset": None,
        "scale": 0.123,
        "dropout_p": 0.5,
        "dropout_seed": 12345678901,
        "seqlens_k": np.array([2, 3]),
    }
    tensors = [torch.from_numpy(x) if torch else x.copy() for x in (query, key, value)]
    out, logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True)
    into = {"query": np.zeros_like(query), "key": torch.zeros(key.shape) if torch else np.zeros_like(key)}
    needs = ("query", "key", "value")
    names = ("grad_out", *needs, "out", "logsumexp")
    watched = [query, key, value, *tensors, *options.values(), query.dtype, polyhead.Error, np.dtype(np.float32)]
    watched += [out, logsumexp, into, *into.values(), needs, *needs]

    def every_path():
        polyhead.attention(query, key, value, **options, return_logsumexp=True, return_weights=True)
        polyhead.attention(*tensors, return_column_sums=True)
        polyhead.explain(query, key, value, **options)
        polyhead.dropout_mask((1, 1, 2, 2), 0.5, options["dropout_seed"])
        arrays = (out, query, key, value, out, logsumexp)
        polyhead.attention_backward(*arrays, **options, needs=needs, into=into, grad_logsumexp=logsumexp)
        polyhead.attention_backward(out, *tensors, out, logsumexp, needs=["query", "query"])
        polyhead.merge_backward(out, [out] * 2, [logsumexp] * 2, *polyhead.merge([out] * 2, [logsumexp] * 2), logsumexp)
        for wrong in ({"needs": "x"}, {"needs": ["x"]}, {"into": {"x": out}}, {"into": {"key": out[0]}}, {"out": 1}):
            with pytest.raises((polyhead.Error, TypeError)):
                polyhead.attention_backward(**dict(zip(names, arrays)) | wrong)
        for outs, logsumexps in (([], []), ([out], []), ([out, 1], [logsumexp] * 2), (1, 2)):
            with pytest.raises((polyhead.Error, TypeError)):
                polyhead.merge(outs, logsumexps)
        for wrong in ({"scale": "x"}, {"align": "x"}, {"seqlens_k": np.array([9, 9])}, {"window": (1, 2, 3)}):
            with pytest.raises((polyhead.Error, TypeError)):
                polyhead.attention(query, key, value, **options | wrong)

    every_path()
    gc.collect()
    before = [sys.getrefcount(x) for x in watched]
    objects = len(gc.get_objects())
    for _ in range(50):
        every_path()
    gc.collect()
    immortal = 2**30  # None, ... of Python 3.12 and later
    after = [sys.getrefcount(x) for x in watched]
    grown = [(a - b) for a, b, x in zip(after, before, watched) if b < immortal and x is not None]
    assert max(grown) < 10, grown
    assert len(gc.get_objects()) - objects < 50


def resident_bytes():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="no /proc here")
def test_memory_stays_flat():
    arrays = operands(seqlen=64)  # 64 KiB a result

    def many(count):
        for i in range(count):
            n = 1 + i % 64  # more plans than are remembered, with the two options
            views = [x[:, :n] for x in arrays]
            options = {"scale": 1 + i % 11}
            out, logsumexp = polyhead.attention(*views, **options, return_logsumexp=True)
            polyhead.attention_backward(out, *views, out, logsumexp, **options)
            polyhead.merge([out, out], [logsumexp, logsumexp])

    many(1500)
    before = resident_bytes()
    many(3000)
    assert resident_bytes() - before < 4 << 20


PEAKS = """
import numpy as np, polyhead
def peak():
    with open("/proc/self/status") as file:
        return int(next(line for line in file if line.startswith("VmHWM")).split()[1]) * 1024
rng = np.random.default_rng(0)
query, key, value = (rng.standard_normal((1, 4096, 4, 32), np.float32) for _ in range(3))
options = {"attn_bias": np.zeros((4, 1, 4096), np.float32), "dropout_p": 0.1, "dropout_seed": 1}
before = peak()
out, logsumexp = polyhead.attention(query, key, value, **options, return_logsumexp=True)
needs = ("query", "key", "value", "attn_bias")
polyhead.attention_backward(out, query, key, value, out, logsumexp, **options, needs=needs)
print(peak() - before)
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/status"), reason="no /proc here")
def test_nothing_of_the_size_of_the_scores_is_stored():
    shown = subprocess.run([sys.executable, "-c", PEAKS], capture_output=True, text=True, check=True)
    assert int(shown.stdout) < 4 * 4096 * 4096 * 4 // 10
