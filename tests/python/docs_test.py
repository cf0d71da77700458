"""What the documentation shows runs: docstrings' examples, every ```python block of docs/, and tutorials' commands."""

import ast
import doctest
import importlib
import os
import pathlib
import re
import shlex
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
    "docs/decisions/": "what was decided, not how to use anything",
    "docs/environment.md": "tables, which environment_page_test.py compares with the sources",
    "docs/install.md": "the tests of the package do what it says",
    "docs/kernels.md": "measured figures of a machine",
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
    """The lines of the tutorials that begin with the command."""
    for page in sorted((ROOT / "docs" / "tutorials").glob("*.md")):
        for block in re.findall(r"^```sh\n(.*?)^```", page.read_text(), re.M | re.S):
            yield from (line for line in block.splitlines() if line.startswith("polyhead "))


@pytest.mark.parametrize("line", list(commands()))
def test_command(line):
    if not COMMAND.exists():
        pytest.skip(f"needs the command: there is no {COMMAND}")
    subprocess.run([COMMAND, *shlex.split(line, comments=True)[1:]], check=True, capture_output=True, timeout=300)
