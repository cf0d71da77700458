"""The directive `command-help`: what the installed package's command says to --help, of itself or of a sub-command."""

import subprocess
import sys

from docutils import nodes
from docutils.parsers.rst import directives
from sphinx.util.docutils import SphinxDirective


class CommandHelp(SphinxDirective):
    """```{command-help} bench``` puts the text of `polyhead bench --help` there.

    The words of a problem are the same in every sub-command: they are left out, or, with the option `problem`, alone.
    """

    optional_arguments = 1
    option_spec = {"problem": directives.flag}

    def run(self):
        words = [sys.executable, "-m", "polyhead", *self.arguments, "--help"]
        text = subprocess.run(words, check=True, capture_output=True, text=True).stdout
        head, _, rest = text.partition("\nProblem: ")
        problem, _, examples = rest.partition("\nExamples:")
        text = "Problem: " + problem if "problem" in self.options else head + (examples and "\nExamples:" + examples)
        return [nodes.literal_block(text, text, language="none")]


def setup(app):
    app.add_directive("command-help", CommandHelp)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
