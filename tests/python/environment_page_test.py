"""docs/environment.md names every environment variable that the sources read, and no other."""

import pathlib
import re
import subprocess

ROOT = pathlib.Path(__file__).parents[2]
SOURCES = (".h", ".cc", ".c", ".py", ".sh")
# A name alone in quotes. Names of CMake's and of macros stand in no quotes in these files; `dev` sets what others read.
NAME = re.compile(r"""["'](POLYHEAD_[A-Z0-9_]+)["']""")


def read_by_sources():
    listing = subprocess.run(["git", "-C", ROOT, "ls-files"], capture_output=True, text=True, check=True).stdout
    paths = {ROOT / path for path in listing.splitlines() if path.endswith(SOURCES)} - {pathlib.Path(__file__)}
    return {name for path in paths if path.is_file() for name in NAME.findall(path.read_text(errors="replace"))}


def on_the_page():
    rows = re.findall(r"^\| `(POLYHEAD_[A-Z0-9_]+)` \|", (ROOT / "docs" / "environment.md").read_text(), re.M)
    assert len(rows) == len(set(rows))
    return set(rows)


def test_the_page_names_what_the_sources_read():
    sources = read_by_sources()
    assert {"POLYHEAD_KERNEL", "POLYHEAD_THREADS", "POLYHEAD_TORCH_OPS"} <= sources
    assert sources - on_the_page() == set(), "read by a source, not on the page"
    assert on_the_page() - sources == set(), "on the page, read by no source"
