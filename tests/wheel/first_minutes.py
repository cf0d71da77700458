"""What somebody does first with an installed polyhead: README's Python examples, then the command.

    python tests/wheel/first_minutes.py [--torch] README.md

It needs nothing but the package; --torch adds the examples that import torch. The tests run it in an environment that
has no compiler, and cibuildwheel with every wheel.
"""

import json
import pathlib
import re
import subprocess
import sys
import sysconfig

import polyhead

COMMANDS = ("run", "bench", "compare", "verify", "mha", "explain", "kernels", "info")


def examples(readme, with_torch):
    """README's Python blocks, as one program: each may use the names of those before."""
    names = {}
    count = 0
    for block in re.findall(r"^```python\n(.*?)^```", readme.read_text(encoding="utf-8"), flags=re.M | re.S):
        if "torch" in block and not with_torch:
            continue
        exec(compile(block, str(readme), "exec"), names)
        count += 1
    assert count >= (4 if with_torch else 2), f"{readme} has {count} examples"
    return count


def words_of(*command):
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}: exit code {done.returncode}\n{done.stderr}"
    return done.stdout


def commands():
    """The command as a script and as a module: both are the same program."""
    script = (str(pathlib.Path(sysconfig.get_path("scripts")) / "polyhead"),)
    module = (sys.executable, "-m", "polyhead")
    for polyhead_command in (script, module):
        told = words_of(*polyhead_command, "--help")
        assert all(re.search(rf"^ +{name} ", told, re.M) for name in COMMANDS), told
        assert polyhead.__version__ in words_of(*polyhead_command, "--version")
        timed = json.loads(words_of(*polyhead_command, "bench", "1x2x16x8", "--min-time", "1", "--json"))
        assert timed["rows"][0]["kernel"] in polyhead.kernels()
        words_of(*polyhead_command, "verify", "1x2x16x8", "--causal")


if __name__ == "__main__":
    *options, readme_path = sys.argv[1:]
    print(f"polyhead {polyhead.__version__} of {pathlib.Path(polyhead.__file__).parent}")
    print(f"{examples(pathlib.Path(readme_path), '--torch' in options)} examples run")
    commands()
    print("the command runs")
