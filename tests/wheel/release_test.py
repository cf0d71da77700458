"""How a release is made: cibuildwheel's configuration and GitHub's workflows, checked by their own tools."""

import os
import pathlib
import re
import shutil
import subprocess
import sys
import sysconfig

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
WORKFLOWS = sorted((ROOT / ".github" / "workflows").glob("*.yml"))


def run(*words):
    return subprocess.run(words, capture_output=True, text=True, check=False, cwd=ROOT)


@pytest.mark.parametrize("machine", ["x86_64", "aarch64"])
def test_cibuildwheel_builds_every_python_that_is_promised(machine):
    listed = run(sys.executable, "-m", "cibuildwheel", "--platform", "linux", "--archs", machine,
                 "--print-build-identifiers", ".")
    pythons = ("cp310", "cp311", "cp312", "cp313", "cp314")
    assert listed.stdout.split() == [f"{python}-manylinux_{machine}" for python in pythons], listed.stderr


@pytest.mark.parametrize("flag, ending", [("0", ""), ("1", "+cuda")])
def test_a_wheel_with_cuda_kernels_has_a_version_of_its_own(flag, ending, tmp_path):
    prepare = "import sys; from scikit_build_core import build; build.prepare_metadata_for_build_wheel(sys.argv[1])"
    told = subprocess.run([sys.executable, "-c", prepare, tmp_path], capture_output=True, text=True, check=False, cwd=ROOT,
                          env={**os.environ, "POLYHEAD_CUDA": flag})  # fmt: skip
    assert told.returncode == 0, told.stderr
    version = re.search(r"project\(polyhead VERSION ([0-9.]+)", (ROOT / "CMakeLists.txt").read_text()).group(1)
    assert [path.name for path in tmp_path.iterdir()] == [f"polyhead-{version}{ending}.dist-info"]


@pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")
def test_workflows_are_valid():
    checked = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")
def test_workflows_have_no_more_rights_than_they_need():
    zizmor = shutil.which("zizmor", path=sysconfig.get_path("scripts"))
    audited = run(zizmor, "--offline", "--no-progress", "--min-severity", "medium", ".github")
    assert audited.returncode == 0, audited.stdout + audited.stderr
