"""A packaged model (AOTInductor) runs in a C++ process that has no Python: the library brings its operators itself."""

import pathlib
import shutil
import subprocess

import numpy as np
import pytest
from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead
import polyhead.torch

PACKAGE = pathlib.Path(polyhead.__file__).parent
TORCH = pathlib.Path(torch.__file__).parent
if polyhead.torch.implementation() != "C++":
    pytest.skip("the operators of this build are Python's", allow_module_level=True)

# argv: libpolyhead_torch.so, a package, sizes of x. x is sin(0, 1, 2, ...); the results go to stdout, as bytes.
PROGRAM = r"""
#include <ATen/ATen.h>
#include <dlfcn.h>
#include <torch/csrc/inductor/aoti_package/model_package_loader.h>

#include <cstdio>
#include <cstdlib>

int main(int argc, char** argv) {
  if (dlopen(argv[1], RTLD_NOW) == nullptr) return std::fprintf(stderr, "%s\n", dlerror()), 1;
  std::vector<int64_t> sizes;
  for (int i = 3; i < argc; ++i) sizes.push_back(std::atoll(argv[i]));
  const at::Tensor x = at::zeros(sizes);
  for (int64_t i = 0; i < x.numel(); ++i) x.data_ptr<float>()[i] = float(i);
  torch::inductor::AOTIModelPackageLoader loader(argv[2]);
  for (const at::Tensor& result : loader.run({at::sin(x)})) {
    const at::Tensor bytes = result.contiguous();
    std::fwrite(bytes.data_ptr(), 1, bytes.nbytes(), stdout);
  }
}
"""


FLOATS = np.ones((2, 5, 2, 16), np.float32)
KERNEL = polyhead.explain(FLOATS, FLOATS, FLOATS).kernel


class Model(torch.nn.Module):
    """A layer, which is blocks; attention with options, one of them a kernel's name; and with a program by text."""

    def __init__(self):
        super().__init__()
        self.layer = polyhead.torch.TransformerEncoderLayer(32, 4, 64, batch_first=True, norm_first=True)
        self.slope = torch.nn.Parameter(torch.tensor([0.5, 0.25]))

    def forward(self, x):  # [B, S, 32]
        x = self.layer(x).unflatten(2, (2, 16))
        options = {"causal": True, "alibi_slopes": torch.tensor([0.5, 0.25]), "kernel": KERNEL}
        x = polyhead.torch.attention(x, x, x, **options)
        program = {"score": "score - slope[h] * abs(q - k)", "mask": "k <= q + 2", "captured": {"slope": self.slope}}
        return polyhead.torch.attention(x, x, x, **program, return_logsumexp=True)


def build(path):
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to build the process with")
    flags = ["-std=c++20", "-O0", "-I", TORCH / "include", "-L", TORCH / "lib", f"-Wl,-rpath,{TORCH / 'lib'}"]
    libraries = ["-Wl,--no-as-needed", "-ltorch", "-ltorch_cpu", "-lc10", "-ldl"]
    subprocess.run([compiler, "-x", "c++", "-", *flags, *libraries, "-o", path], input=PROGRAM, text=True, check=True)
    needs = subprocess.run(["ldd", path], capture_output=True, text=True, check=True).stdout
    assert not [line for line in needs.splitlines() if line.split()[0].startswith("libpython")]


def test_a_package_runs_without_python(tmp_path):
    torch.manual_seed(0)
    model, sizes = Model().eval(), (2, 9, 32)
    x = torch.arange(torch.Size(sizes).numel(), dtype=torch.float32).reshape(sizes).sin()
    with torch.no_grad():
        exported = torch.export.export(model, (x,))
        package = torch._inductor.aoti_compile_and_package(exported, package_path=str(tmp_path / "model.pt2"))
        expected = torch.cat([each.flatten() for each in model(x)])
    build(tmp_path / "run_package")
    run = [tmp_path / "run_package", PACKAGE / "torch" / "libpolyhead_torch.so", package, *map(str, sizes)]
    shown = subprocess.run(run, capture_output=True)
    assert shown.returncode == 0, shown.stderr.decode()
    torch.testing.assert_close(torch.frombuffer(bytearray(shown.stdout), dtype=torch.float32), expected, rtol=1e-5, atol=1e-6)
