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


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_page(page, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    names = {}  # the blocks of a page are one program
    for block in BLOCK.findall(page.read_text()):
        exec(compile(block, str(page), "exec"), names)
