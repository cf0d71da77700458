"""The front ends on CUDA devices, over a runtime that executes the kernels' PTX on the CPU (tests/cuda/sim).

The release build makes a library with these kernels; here it takes the place of the package's own in processes of their
own, which run the tests in on_cuda/. POLYHEAD_CUDA_TWIN=path names it. For torch, whose build for the CPU knows no CUDA
device, on_cuda/torch_device.cc is one, compiled with torch's own headers.
"""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from optional import needs_torch, torch

HERE = pathlib.Path(__file__).parent
BUILT = HERE.parents[1] / "build" / "release" / "tests" / "libpolyhead_cuda_twin.so"
TWIN = pathlib.Path(os.environ.get("POLYHEAD_CUDA_TWIN", BUILT))
if not TWIN.exists():
    pytest.skip(f"needs CUDA's kernels over the simulated runtime, built where nvcc is: there is no {TWIN}", allow_module_level=True)

# Without what happens at exit: threads that torch starts for its device have no end there.
RUN = "import os, pytest, sys; code = pytest.main(sys.argv[1:]); sys.stdout.flush(); os._exit(code)"


def run(name, *preloaded):
    nvrtc = os.pathsep.join([str(TWIN.parent / "cuda" / "nvrtc"), os.environ.get("LD_LIBRARY_PATH", "")])
    environment = {**os.environ, "LD_PRELOAD": " ".join(map(str, (TWIN, *preloaded))), "POLYHEAD_CUDA_TWIN": str(TWIN),
                   "LD_LIBRARY_PATH": nvrtc}  # fmt: skip
    command = [sys.executable, "-c", RUN, "-q", "-p", "no:cacheprovider", "-p", "no:xdist", str(HERE / "on_cuda" / name)]
    ran = subprocess.run(command, env=environment, capture_output=True, text=True)
    assert ran.returncode == 0, ran.stdout[-20000:] + ran.stderr[-5000:]
    print(ran.stdout.splitlines()[-1])


@pytest.mark.parametrize("name", ["arrays.py", "decoding.py"])
def test_arrays(name):
    run(name)


@pytest.fixture(scope="module")
def torch_device(tmp_path_factory):
    """A library that is a CUDA device to torch."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to make torch a device with")
    folder, library = pathlib.Path(torch.__file__).parent, tmp_path_factory.mktemp("device") / "torch_device.so"
    source = HERE / "on_cuda" / "torch_device.cc"
    options = ["-std=c++20", "-shared", "-fPIC", f"-isystem{folder}/include", f"-L{folder}/lib", f"-Wl,-rpath,{folder}/lib"]
    subprocess.run([compiler, *options, source, "-o", library, "-lc10", "-ltorch_cpu"], check=True)
    return library


@needs_torch
@pytest.mark.parametrize("name", ["torch_operators.py", "torch_layers.py"])
def test_torch(torch_device, name):
    run(name, torch_device)
