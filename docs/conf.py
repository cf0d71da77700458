"""The documentation site: `./dev docs` builds it into build/docs, and every warning is an error.

The pages are those of docs/ and of the root (ARCHITECTURE.md, ...). The API of Python is autodoc's, C and C++ Doxygen's
by way of breathe, so what they say stands in docstrings and headers alone. support_table.py makes the tables of
support.md, command_help.py the text of command.md.
"""

import pathlib
import subprocess
import sys

from sphinx import addnodes

import polyhead

DOCS = pathlib.Path(__file__).parent
HEADERS = DOCS.parent / "include" / "polyhead"
C_HEADERS = sorted(HEADERS.glob("polyhead*.h"))
CPP_HEADERS = sorted(set(HEADERS.glob("*.h")) - {*C_HEADERS, HEADERS / "api.h"})
sys.path.insert(0, str(DOCS))

project = "polyhead"
author = "the polyhead authors"
copyright = "the polyhead authors, Apache-2.0"
version = release = polyhead.__version__

extensions = ["myst_parser", "sphinx.ext.autodoc", "sphinx.ext.napoleon", "breathe", "command_help", "program_gallery", "support_table"]
suppress_warnings = [
    "config.cache",  # read_headers tells breathe where it has written
    "duplicate_declaration.cpp",  # each header's section opens the same namespace
]
html_theme = "furo"
html_title = f"polyhead {release}"
html_theme_options = {"navigation_with_keys": True}
html_static_path = ["site.css"]
html_css_files = ["site.css"]
html_copy_source = False
html_show_sourcelink = False

myst_enable_extensions = ["colon_fence", "deflist"]
myst_heading_anchors = 3

# Single backticks in a docstring name something of the package: they are links, and a wrong one is an error.
default_role = "py:obj"
add_module_names = False
toc_object_entries_show_parents = "hide"
highlight_language = "none"  # of blocks that name none: formulas
autodoc_member_order = "bysource"
autodoc_typehints = "signature"
python_maximum_signature_line_length = 90
maximum_signature_line_length = 90
napoleon_use_param = False  # types of parameters are in words: "int32 array [B]"
napoleon_use_rtype = False
napoleon_use_ivar = True

breathe_projects = {}
breathe_default_members = ("members", "undoc-members")
breathe_domain_by_extension = {"h": "cpp"}
breathe_domain_by_file_pattern = {f"*/{header.name}": "c" for header in C_HEADERS}
breathe_show_include = False

nitpicky = True
# What has pages elsewhere, and what is declared in headers without being public.
nitpick_ignore_regex = [
    ("py:class", r"(?!polyhead\.(torch\.)?[A-Z]).*"),  # types in words, torch's, NumPy's; our own private ones
    ("py:obj", r"(torch|numpy|paddle)\..*"),
    ("cpp:identifier", r"(std|polyhead)(::.*)?|u?int\d+_t|size_t|Kernel|PlannedOperand|Schedule|\w+State"),
    ("c:identifier", r"u?int\d+_t|size_t"),
]

DOXYFILE = """
QUIET = YES
WARN_AS_ERROR = FAIL_ON_WARNINGS
WARN_IF_UNDOCUMENTED = NO
GENERATE_HTML = NO
GENERATE_LATEX = NO
GENERATE_XML = YES
XML_PROGRAMLISTING = NO
EXTRACT_ALL = YES
SORT_MEMBER_DOCS = NO
MACRO_EXPANSION = YES
EXPAND_ONLY_PREDEF = YES
PREDEFINED = POLYHEAD_API=
# Sphinx's parser of C++ does not know designated initializers: such defaults are left out. The word at a sentence's
# beginning is not the struct Where.
INPUT_FILTER = "sed -e 's/ = {[.].*};/;/' -e 's,///\\(.*\\)Where \\([a-z]\\),///\\1%Where \\2,'"
"""


def read_headers(app):
    """Doxygen's XML of the headers, beside the pages made of it; C and C++ apart, which read typedefs otherwise."""
    for name, headers, options in (
        ("cpp", CPP_HEADERS, ""),
        ("c", C_HEADERS, "OPTIMIZE_OUTPUT_FOR_C = YES\nTYPEDEF_HIDES_STRUCT = YES\n"),
    ):
        out = pathlib.Path(app.outdir).parent / "doxygen" / name
        out.mkdir(parents=True, exist_ok=True)
        where = f'OUTPUT_DIRECTORY = "{out}"\nSTRIP_FROM_PATH = "{HEADERS.parent}"\n'
        where += "\n".join(f'INPUT += "{header}"' for header in headers)
        subprocess.run(["doxygen", "-"], input=DOXYFILE + options + where, text=True, check=True)
        app.config.breathe_projects[name] = str(out / "xml")


def leave_members_out_of_contents(app, doctree):
    """Structs and functions stand in the contents of a page; their members do not: there are hundreds."""
    for outer in doctree.findall(addnodes.desc):
        if outer["domain"] in ("c", "cpp") and outer["objtype"] in ("struct", "class", "enum", "enum-class"):
            for inner in outer.findall(addnodes.desc):
                if inner is not outer:
                    inner[0]["_toc_name"] = ""
            outer[0]["_toc_name"] = outer[0]["_toc_name"].removeprefix("polyhead::")


def setup(app):
    app.connect("builder-inited", read_headers, priority=1)  # before breathe looks for it
    app.connect("doctree-read", leave_members_out_of_contents, priority=1)  # before Sphinx collects the contents
    return {"parallel_read_safe": True, "parallel_write_safe": True}
