"""What the documentation shows runs: docstrings' examples, every ```python block of docs/, and tutorials' commands."""

import ast
import doctest
import importlib
import os
import pathlib
import re
import subprocess

import pytest

import polyhead

ROOT = pathlib.Path(__file__).parents[2]
COMMAND = pathlib.Path(os.environ.get("POLYHEAD_COMMAND", ROOT / "build/release/tools/polyhead"))
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


@pytest.mark.parametrize("module, examples", [("", 9), ("._dropout", 4), ("._merge", 5)])  # of layers, torch: their tests
def test_docstrings(module, examples):
    result = doctest.testmod(importlib.import_module(f"polyhead{module}"))
    assert result.attempted >= examples and result.failed == 0


ITEMS = {"Parameters", "Attributes", "Returns", "Raises"}


def prose_among_items(docstring):
    """Lines of a NumPy-style docstring that follow a list of items without a heading: renderers take them for items."""
    lines, section = docstring.splitlines(), None
    for number, line in enumerate(lines[:-1]):
        if lines[number + 1].startswith("---"):
            section = line
        elif section in ITEMS and line[:1].strip() and number and not lines[number - 1]:
            yield line


def test_lists_in_docstrings_hold_items_alone():
    for path in sorted((ROOT / "python" / "polyhead").rglob("*.py")):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                assert not [*prose_among_items(ast.get_docstring(node) or "")], f"{path}: {getattr(node, 'name', '')}"


# Pages without an example, and why; a name that ends in "/" is a folder's.
WITHOUT_EXAMPLE = {
    "docs/ARCHITECTURE.md": "the file of the root",
    "docs/CHANGELOG.md": "the file of the root",
    "docs/CONTRIBUTING.md": "the file of the root",
    "docs/SECURITY.md": "the file of the root",
    "docs/api/": "docstrings, whose examples test_docstrings runs, and headers",
    "docs/benchmarking.md": "its commands take minutes; torch_training_bench_test.py runs one",
    "docs/command.md": "what the command says of itself",
    "docs/cores.md": "measured figures of machines",
    "docs/cuda.md": "its example needs a GPU and CuPy; cuda_test.py makes such calls on a simulated GPU",
    "docs/decisions/": "what was decided, not how to use anything",
    "docs/environment.md": "tables, which environment_page_test.py compares with the sources",
    "docs/install.md": "the tests of the package do what it says",
    "docs/kernels.md": "how the kernels work, with measured figures",
    "docs/math.md": "formulas, which the tests compute by",
    "docs/migrate/index.md": "a table of pages and one of meanings",
    "docs/policy.md": "promises and platforms",
    "docs/support.md": "tables that support_table.py makes, tested in support_table_test.py",
    "docs/testing.md": "what the tests are",
    "docs/troubleshooting.md": "sentences, which troubleshooting_test.py provokes",
    "docs/tutorials/cpp_layer.md": "C++ of examples/layer_weights.cc, which is a test",
}


def name_of(page):
    return page.relative_to(ROOT).as_posix()


def examples_of(page):
    return BLOCK.findall(page.read_text())


def test_a_page_without_example_says_why():
    for page in PAGES:
        excused = {name_of(page), name_of(page.parent) + "/"} & WITHOUT_EXAMPLE.keys()
        fault = "has an example" if excused else "has no example: give it one, or say in WITHOUT_EXAMPLE why not"
        assert bool(examples_of(page)) != bool(excused), f"{name_of(page)} {fault}"


@pytest.mark.parametrize("page", [*filter(examples_of, PAGES)], ids=name_of)
def test_page(page, tmp_path, monkeypatch):
    blocks = examples_of(page)
    if "import torch" in "".join(blocks):
        pytest.importorskip("torch", reason="torch is not installed")
        importlib.import_module("polyhead.torch").report(reset=True)  # what other tests of this process left
    monkeypatch.chdir(tmp_path)
    names = {}  # the blocks of a page are one program
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_every_page_that_is_excused_is_there():
    assert all((ROOT / name).exists() for name in WITHOUT_EXAMPLE)


def commands():
    """The blocks of the tutorials that begin with the command."""
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        blocks = re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S)
        yield from (block for block in blocks if block.startswith("polyhead "))


needs_command = pytest.mark.skipif(not COMMAND.exists(), reason=f"needs the command: there is no {COMMAND}")


@needs_command
@pytest.mark.parametrize("block", list(commands()))
def test_commands(block, tmp_path):
    """As a shell runs them, with the command in front of the path."""
    path = f"{COMMAND.parent}:{os.environ['PATH']}"
    done = subprocess.run(["sh", "-e"], input=block, text=True, cwd=tmp_path, env=os.environ | {"PATH": path},
                          capture_output=True, timeout=300)  # fmt: skip
    assert done.returncode == 0, done.stderr


@needs_command
def test_the_page_of_the_command_has_every_sub_command():
    said = subprocess.run([COMMAND, "--help"], check=True, capture_output=True, text=True).stdout
    names = re.findall(r"^  (\w+) ", said.partition("Subcommands:")[2], re.M)
    sections = re.findall(r"^## (\w+)$", (ROOT / "docs" / "command.md").read_text(), re.M)
    assert "bench" in names and names == sections


def test_the_tests_that_the_page_of_testing_names_are_there():
    sources = [path.read_text() for path in (ROOT / "tests").rglob("*.cc")]
    there = {f"{suite}.{name}" for source in sources for suite, name in re.findall(r"^TEST\((\w+), (\w+)\)", source, re.M)}
    named = set(re.findall(r"`([A-Z]\w+\.[A-Z]\w+)`", (ROOT / "docs/testing.md").read_text()))
    assert len(named) > 10 and named <= there
