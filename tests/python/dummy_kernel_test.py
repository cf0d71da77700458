"""A backend that the library does not have, tests/dummy_kernel.cc, computes through Python.

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
if not LIBRARY.exists():
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
    polyhead.attention(*(x.astype(np.float64) for x in (query, key, value)), kernel="dummy")
except polyhead.Error as error:
    assert "kernel is dummy, which cannot compute this: dtype is not float32" in str(error), error
else:
    raise AssertionError("float64 was taken")
print("computed")
"""


def test_the_dummy_backend_computes_through_python():
    environment = {**os.environ, "LD_PRELOAD": str(LIBRARY)}
    ran = subprocess.run([sys.executable, "-c", PROGRAM, str(LIBRARY)], env=environment, capture_output=True, text=True)
    assert (ran.returncode, ran.stdout) == (0, "computed\n"), ran.stderr
