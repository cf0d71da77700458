"""An operators' library that does not load, or that torch takes in part alone, is an error that says so."""

import os
import pathlib
import shutil
import subprocess
import sys

import pytest

from optional import torch

if torch is None:
    pytest.skip("torch is not installed", allow_module_level=True)

import polyhead

LIBRARY = pathlib.Path(polyhead.__file__).parent / "torch" / "libpolyhead_torch.so"
if not LIBRARY.exists():
    pytest.skip(f"this build has no {LIBRARY.name}", allow_module_level=True)

IMPORT = "import polyhead.torch; print(polyhead.torch.implementation())"


@pytest.fixture
def package(tmp_path):
    """A folder with the package as links, all but its library of operators: that is the test's to make."""
    source = pathlib.Path(polyhead.__file__).parent
    for path in source.rglob("*"):
        link = tmp_path / "polyhead" / path.relative_to(source)
        if path.is_file() and path != LIBRARY and "__pycache__" not in path.parts:
            link.parent.mkdir(parents=True, exist_ok=True)
            link.symlink_to(path.resolve())
    return tmp_path


def imported(package, **environment):
    """What a process prints that imports the package's operators: (exit status, output, the last line of its errors)."""
    environment = {name: value for name, value in os.environ.items() if name != "POLYHEAD_TORCH_OPS"} | environment
    environment["PYTHONPATH"] = os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])
    run = subprocess.run([sys.executable, "-c", IMPORT], cwd=package, env=environment, capture_output=True, text=True)
    return run.returncode, run.stdout.strip(), (run.stderr.strip().splitlines() or [""])[-1]


def compiled(path, source, *options):
    compiler = shutil.which("cc")
    if compiler is None:
        pytest.skip("there is no C compiler to make a library with")
    run = [compiler, "-shared", "-fPIC", "-x", "c", "-", "-o", str(path), *options]
    subprocess.run(run, input=source, text=True, check=True)


def assert_refused(result, words):
    status, output, error = result
    assert status != 0 and not output
    assert error.startswith(f"ImportError: polyhead's operators in C++ cannot be loaded into torch {torch.__version__}: ")
    assert words in error and "set POLYHEAD_TORCH_OPS=python" in error


def test_the_package_of_links_is_whole(package):
    (package / "polyhead" / "torch" / LIBRARY.name).symlink_to(LIBRARY)
    assert imported(package) == (0, "C++", "")


def test_a_corrupt_library(package):
    library = package / "polyhead" / "torch" / LIBRARY.name
    library.write_bytes(LIBRARY.read_bytes()[:100])
    assert_refused(imported(package), f"{library}: cannot read file data")
    library.write_bytes(b"\0" * 10000)
    assert_refused(imported(package), f"{library}: invalid ELF header")
    assert imported(package, POLYHEAD_TORCH_OPS="python") == (0, "Python", "")


def test_a_missing_symbol(package):
    library = package / "polyhead" / "torch" / LIBRARY.name
    compiled(library, "void aoti_torch_of_tomorrow(void); void run(void) { aoti_torch_of_tomorrow(); }")
    assert_refused(imported(package), f"{library}: undefined symbol: aoti_torch_of_tomorrow")
    compiled(library, "int polyhead_of_another_version;")
    assert_refused(imported(package), "undefined symbol: polyhead_torch_not_registered")


def test_what_is_declared_of_torch_is_what_torch_declares():
    """python/torch_ops/stable_abi.h beside torch's own headers, those of a build for CUDA too: no type differs."""
    compiler = shutil.which("c++")
    if compiler is None:
        pytest.skip("there is no C++ compiler to compare the declarations with")
    source = pathlib.Path(__file__).parents[2] / "python" / "torch_ops" / "stable_abi_check.cc"
    include = pathlib.Path(torch.__file__).parent / "include"
    words = [compiler, "-std=c++20", "-fsyntax-only", "-DUSE_CUDA", "-isystem", include, source]
    ran = subprocess.run(words, capture_output=True, text=True, check=False)
    assert ran.returncode == 0, ran.stderr


HALF = """
#define _GNU_SOURCE
#include <dlfcn.h>
#include <string.h>

typedef int (*Function)(void*, const char*, void*);

int aoti_torch_library_impl(void* library, const char* name, void* kernel) {
  if (strcmp(name, "feed_forward_block_forward") == 0) return 1;
  return ((Function)dlsym(dlopen("libtorch_cpu.so", RTLD_NOW | RTLD_NOLOAD), "aoti_torch_library_impl"))(library, name, kernel);
}
"""


def test_half_a_registration(package):
    (package / "polyhead" / "torch" / LIBRARY.name).symlink_to(LIBRARY)
    compiled(package / "half.so", HALF, "-ldl")
    assert_refused(imported(package, LD_PRELOAD=str(package / "half.so")), "did not register feed_forward_block_forward")
