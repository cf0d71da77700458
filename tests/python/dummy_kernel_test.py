"""A backend that the library does not have, tests/attention/dummy_kernel.cc, computes through Python.

The release build makes a library with it, by one file and one line; here that library takes the place of the package's
own in a process of its own. POLYHEAD_DUMMY=path names it.
"""

import os
import pathlib
import subprocess
import sys

import pytest

BUILT = pathlib.Path(__file__).parents[2] / "build" / "release" / "tests" / "libpolyhead_dummy.so"
LIBRARY = pathlib.Path(os.environ.get("POLYHEAD_DUMMY", BUILT))
if not LIBRARY.exists() and not LIBRARY.parent.exists():  # where the tests are built, it is there
    pytest.skip(f"needs the library with the dummy backend: there is no {LIBRARY}", allow_module_level=True)

PROGRAM = """
import ctypes, sys
import numpy as np, polyhead

calls = ctypes.c_int.in_dll(ctypes.CDLL(sys.argv[1]), "_ZN8polyhead11dummy_callsE")  # polyhead::dummy_calls
random = np.random.default_rng(1)
query, key, value, grad_out = (random.standard_normal((2, 5, 4, 8), np.float32) for _ in range(4))
bias = random.standard_normal((4, 5, 5), np.float32)
options = dict(causal=True, align="top_left", attn_bias=bias, seqlens_k=np.array([5, 3]))

def run(**where):
    out, logsumexp = polyhead.attention(query, key, value, return_logsumexp=True, **options, **where)
    needs = ("query", "key", "value", "attn_bias")
    grads = polyhead.attention_backward(grad_out, query, key, value, out, logsumexp, needs=needs, **options, **where)
    return out, logsumexp, *grads.values()

assert "dummy" in polyhead.kernels(), polyhead.kernels()
assert polyhead.explain(query, key, value, kernel="dummy", device="cpu").kernel == "dummy"
got = run(kernel="dummy", device="cpu")
assert calls.value == 2, calls.value
for x, y in zip(got, run(kernel="reference")):
    np.testing.assert_allclose(x, y, rtol=1e-5, atol=1e-5)
assert calls.value == 2, calls.value
try:
    polyhead.attention(*(x.astype(np.float16) for x in (query, key, value)), kernel="dummy")
except polyhead.Error as error:
    assert "kernel is dummy, which cannot compute this: dtype is not float32 or float64" in str(error), error
else:
    raise AssertionError("float16 was taken")
print("computed")
"""


# Layers and blocks take no kernel but the one that POLYHEAD_KERNEL names.
LAYERS = """
import numpy as np, polyhead

SENTENCE = "POLYHEAD_KERNEL is dummy, the kernels with matrix products are cpu_"

def expect_refused(call):
    try:
        call()
    except polyhead.Error as error:
        assert str(error).startswith(SENTENCE), error
    else:
        raise AssertionError("a layer was computed by a kernel without products")

weights = {name + "_weight": np.eye(16, dtype=np.float32) for name in ("query", "key", "value", "out")}
expect_refused(lambda: polyhead.MultiHeadAttention(weights, num_heads=4).forward(np.ones((2, 5, 16), np.float32)))
try:
    import torch
except ImportError:
    print("no torch")
else:
    import polyhead.torch
    encoder = polyhead.torch.TransformerEncoderLayer(16, 4, 32, batch_first=True)
    expect_refused(lambda: encoder(torch.ones(2, 5, 16)))
    expect_refused(lambda: polyhead.torch.MultiheadAttention(16, 4)(*[torch.ones(5, 2, 16)] * 3))
    print("refused")
"""


def run(program, **variables):
    environment = {**os.environ, "LD_PRELOAD": str(LIBRARY), **variables}
    command = [sys.executable, "-c", program, str(LIBRARY)]
    return subprocess.run(command, env=environment, capture_output=True, text=True)


def test_layers_refuse_a_kernel_without_products():
    ran = run(LAYERS, POLYHEAD_KERNEL="dummy")
    assert ran.returncode == 0, ran.stderr
    if ran.stdout == "no torch\n":
        pytest.skip("torch is not installed: NumPy's layer alone was tried")
    assert ran.stdout == "refused\n"


def test_the_dummy_backend_computes_through_python():
    ran = run(PROGRAM)
    assert (ran.returncode, ran.stdout) == (0, "computed\n"), ran.stderr
