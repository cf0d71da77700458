"""What is published: the source distribution, and the wheel that is built from it alone."""

import os
import pathlib
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import venv
import zipfile

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
BUILT = ROOT / "build" / "wheel"  # by ./dev wheel, which ./dev test runs first
FIRST_MINUTES = [str(pathlib.Path(__file__).with_name("first_minutes.py"))]
README = str(ROOT / "README.md")
NOT_IN_SDIST = re.compile(r"\.ci/|\.github/|\.gitignore$|bench/results/")
# What the wheel's libraries and command may need of the system: what every manylinux system has.
SYSTEM_LIBRARIES = {"libc.so.6", "libm.so.6", "libstdc++.so.6", "libgcc_s.so.1", "libpthread.so.0", "libdl.so.2"}
SYSTEM_LIBRARIES |= {"ld-linux-x86-64.so.2", "ld-linux-aarch64.so.1"}


@pytest.fixture(scope="session")
def wheel():
    if not list(BUILT.glob("*.whl")):
        subprocess.run([ROOT / "dev", "wheel"], check=True)
    (path,) = BUILT.glob("polyhead-*.whl")
    return path


@pytest.fixture(scope="session")
def sdist(wheel):
    (path,) = BUILT.glob("polyhead-*.tar.gz")
    return path


@pytest.fixture(scope="session")
def files(wheel, tmp_path_factory):
    """The wheel's files, unpacked with their modes."""
    folder = tmp_path_factory.mktemp("files")
    with zipfile.ZipFile(wheel) as archive:
        for member in archive.infolist():
            archive.extract(member, folder)
            (folder / member.filename).chmod(member.external_attr >> 16)
    return folder


def metadata(files):
    (path,) = files.glob("*.dist-info/METADATA")
    return path.read_text()


def run(*words, **options):
    done = subprocess.run([str(word) for word in words], capture_output=True, text=True, check=False, **options)
    assert done.returncode == 0, f"{words}\n{done.stdout}{done.stderr}"
    return done.stdout + done.stderr


def tool(*words, **options):
    return run(sys.executable, "-m", *words, **options)


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="not a git checkout")
def test_sdist_is_what_git_has_without_results_and_workplace(sdist):
    with tarfile.open(sdist) as archive:
        packed = {name.partition("/")[2] for name in archive.getnames()}
    listed = run("git", "-C", ROOT, "ls-files", "--cached", "--others", "--exclude-standard").splitlines()
    expected = {path for path in listed if (ROOT / path).is_file() and not NOT_IN_SDIST.match(path)}
    assert packed == expected | {"PKG-INFO"}


def test_sdist_holds_sources_only(sdist):
    # A library, a picture or a model is not text, or is larger than any source: the largest, a table of the CUDA kernels'
    # registers, has 74 KB.
    with tarfile.open(sdist) as archive:
        for member in archive.getmembers():
            assert member.isfile() or member.isdir(), member.name
            if member.isfile():
                assert member.size < 128 << 10, member.name
                text = archive.extractfile(member).read().decode()
                assert "\0" not in text, member.name


def test_the_wheel_has_the_package_and_nothing_else(files):
    names = {path.relative_to(files).as_posix() for path in files.rglob("*") if path.is_file()}
    python = ROOT / "python"
    expected = {path.relative_to(python).as_posix() for path in python.glob("polyhead/**/*.py*") if "__pycache__" not in
                path.parts}
    expected |= {"polyhead/py.typed", "polyhead/torch/schemas.txt", "polyhead/libpolyhead.so", "polyhead/torch/libpolyhead_torch.so",
                 "polyhead/libpolyhead_onnxruntime.so", "polyhead/bin/polyhead"}
    bind = {name for name in names if re.fullmatch(r"polyhead/_bind\.cpython-\d+-[\w-]+\.so", name)}
    assert len(bind) == 1
    (info,) = {name.partition("/")[0] for name in names if ".dist-info/" in name}
    expected |= {f"{info}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "licenses/LICENSE")}
    assert names == expected | bind
    assert (files / info / "licenses" / "LICENSE").read_text() == (ROOT / "LICENSE").read_text()
    assert (files / "polyhead/bin/polyhead").stat().st_mode & stat.S_IXUSR


def test_libraries_need_each_other_and_the_system_alone(files):
    from elftools.elf.dynamic import DynamicSection
    from elftools.elf.elffile import ELFFile

    own = {"_bind": ({"libpolyhead.so"}, "$ORIGIN"), "libpolyhead": (set(), None), "polyhead": (set(), None),
           "libpolyhead_torch": ({"libpolyhead.so", "libtorch_cpu.so"}, "$ORIGIN/.."),
           "libpolyhead_onnxruntime": ({"libpolyhead.so"}, "$ORIGIN")}
    seen = set()
    for path in files.rglob("*"):
        if path.is_file() and path.open("rb").read(4) == b"\x7fELF":
            with path.open("rb") as file:
                (dynamic,) = (s for s in ELFFile(file).iter_sections() if isinstance(s, DynamicSection))
                tags = [(tag.entry.d_tag, tag) for tag in dynamic.iter_tags()]
            needed = {tag.needed for kind, tag in tags if kind == "DT_NEEDED"}
            paths = [tag.runpath if kind == "DT_RUNPATH" else tag.rpath for kind, tag in tags
                     if kind in ("DT_RUNPATH", "DT_RPATH")]
            name = path.name.partition(".")[0]
            libraries, runpath = own[name]
            assert needed - SYSTEM_LIBRARIES == libraries, name
            assert paths == ([runpath] if runpath else []), name
            seen.add(name)
    assert seen == own.keys()


def test_auditwheel_finds_nothing_to_vendor(wheel, tmp_path):
    """The same command as cibuildwheel's, for this machine's own libc."""
    told = " ".join(tool("auditwheel", "show", wheel).split())
    assert re.search(r'constrains the platform tag to "manylinux_2_\d+_', told), told
    run(sys.executable, "-m", "auditwheel", "repair", "--exclude", "libtorch_cpu.so", "-w", tmp_path, wheel,
        env=os.environ | {"PATH": f"{pathlib.Path(sys.executable).parent}:{os.environ['PATH']}"})
    (repaired,) = tmp_path.glob("*.whl")
    assert "manylinux_2_" in repaired.name
    with zipfile.ZipFile(repaired) as after, zipfile.ZipFile(wheel) as before:
        added = {name for name in set(after.namelist()) - set(before.namelist()) if not name.endswith("/")}
    assert not [name for name in added if ".dist-info/" not in name]


def test_twine_accepts_both(wheel, sdist):
    told = tool("twine", "--no-color", "check", "--strict", wheel, sdist)
    assert told.count("PASSED") == 2, told


@pytest.fixture(scope="session")
def environment(wheel, files, tmp_path_factory):
    """A Python with the wheel and the oldest NumPy that it claims: without pip, and with no compiler in reach."""
    folder = tmp_path_factory.mktemp("empty") / "environment"
    venv.create(folder, with_pip=False, symlinks=True)
    oldest = re.search(r"^Requires-Dist: numpy>=([\d.]+)$", metadata(files), re.M)[1]
    tool("pip", "--python", folder / "bin/python", "install", "--disable-pip-version-check", "--only-binary=:all:",
         wheel, f"numpy=={oldest}", env=alone(folder))
    return folder


def alone(folder):
    """The environment variables of a shell that has the environment's programs and no others."""
    path = str(folder / "bin")
    assert not any(shutil.which(compiler, path=path) for compiler in ("cc", "c++", "gcc", "g++", "clang", "cmake"))
    return {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "CC", "CXX")} | {
        "PATH": path}


def test_first_minutes_in_an_empty_environment(environment, tmp_path):
    told = run(environment / "bin/python", "-I", *FIRST_MINUTES, README, env=alone(environment), cwd=tmp_path)
    assert f" of {environment}/lib" in told and "the command runs" in told


def test_torchs_examples_with_the_wheel(environment, tmp_path):
    """torch comes from these tests' own environment, which stands behind the wheel's on the path."""
    torch = pytest.importorskip("torch", reason="needs torch")
    (packages,) = environment.glob("lib/python*/site-packages")
    appended = packages / "behind.pth"
    appended.write_text(str(pathlib.Path(torch.__file__).parents[1]) + "\n")
    try:
        told = run(environment / "bin/python", "-I", *FIRST_MINUTES, "--torch", README, env=alone(environment),
                   cwd=tmp_path)
    finally:
        appended.unlink()
    assert f" of {environment}/lib" in told and "the command runs" in told


def test_uninstalling_leaves_nothing(environment):
    """Last: the environment is used up."""
    tool("pip", "--python", environment / "bin/python", "uninstall", "-y", "polyhead", env=alone(environment))
    assert not list(environment.glob("lib/python*/site-packages/polyhead*")) and not (environment / "bin/polyhead").exists()
