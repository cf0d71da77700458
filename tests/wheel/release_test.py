"""How a release is made: cibuildwheel's configuration and GitHub's workflows, checked by their own tools."""

import pathlib
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


@pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")
def test_workflows_are_valid():
    checked = run(sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.github-workflows", *WORKFLOWS)
    assert checked.returncode == 0, checked.stdout + checked.stderr


@pytest.mark.skipif(not WORKFLOWS, reason="a source distribution has no workflows")
def test_workflows_have_no_more_rights_than_they_need():
    zizmor = shutil.which("zizmor", path=sysconfig.get_path("scripts"))
    audited = run(zizmor, "--offline", "--no-progress", "--min-severity", "medium", ".github")
    assert audited.returncode == 0, audited.stdout + audited.stderr
