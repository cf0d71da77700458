"""What the documentation shows runs: the docstrings' examples and every ```python block of docs/."""

import doctest
import pathlib
import re

import pytest

import polyhead

ROOT = pathlib.Path(__file__).parents[2]
PAGES = sorted((ROOT / "docs").rglob("*.md"))
BLOCK = re.compile(r"^```python\n(.*?)^```", re.M | re.S)


def test_docstrings():
    result = doctest.testmod(polyhead)
    assert result.attempted >= 18 and result.failed == 0


# Pages without an example, and why. Those of docs/decisions/ say what was decided, not how to use anything.
WITHOUT_EXAMPLE = {
    "docs/benchmarking.md": "its commands take minutes; torch_training_bench_test.py runs one",
    "docs/kernels.md": "measured figures of a machine",
    "docs/math.md": "formulas, which the tests compute by",
}


def examples_of(page):
    return BLOCK.findall(page.read_text())


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}  # the blocks of a page are one program
    name = page.relative_to(ROOT).as_posix()
    blocks = examples_of(page)
    if not blocks:
        why = "a decision" if name.startswith("docs/decisions/") else WITHOUT_EXAMPLE.get(name)
        assert why, f"{name} has no example: give it one, or say in WITHOUT_EXAMPLE why not"
        pytest.skip(f"no example: {why}")
    assert name not in WITHOUT_EXAMPLE
    for block in blocks:
        exec(compile(block, str(page), "exec"), names)


def test_every_page_that_is_excused_is_there():
    assert WITHOUT_EXAMPLE.keys() <= {page.relative_to(ROOT).as_posix() for page in PAGES}
