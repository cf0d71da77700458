"""The Python example of README.md, run as it stands there."""

import pathlib
import re

import numpy as np

README = pathlib.Path(__file__).resolve().parents[2] / "README.md"


def test_example_runs_and_is_right(capsys):
    blocks = re.findall(r"```python\n(.*?)```", README.read_text(encoding="ascii"), flags=re.S)
    assert len(blocks) == 1
    names = {}
    exec(compile(blocks[0], str(README), "exec"), names)

    assert names["out"].shape == (1, 384, 16, 64)
    assert names["logsumexp"].shape == (1, 16, 384)
    # Query 0 sees key 0 alone, so its output is that key's value; query head h reads head h / 4.
    np.testing.assert_allclose(names["out"][0, 0], np.repeat(names["value"][0, 0], 4, axis=0), rtol=1e-6)
    printed = capsys.readouterr().out
    assert "reference" in printed
