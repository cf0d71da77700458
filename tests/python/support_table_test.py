"""docs/support_table.py, which makes the site's support table: complete, and true where it says that something runs."""

import importlib.util
import inspect
import json
import pathlib

import pytest

import polyhead

pytest.importorskip("ml_dtypes", reason="needs ml_dtypes")
SCRIPT = pathlib.Path(__file__).parents[2] / "docs" / "support_table.py"
spec = importlib.util.spec_from_file_location("support_table", SCRIPT)
support_table = importlib.util.module_from_spec(spec)
spec.loader.exec_module(support_table)

# Arguments of attention that are no option of what is computed.
NO_OPTION = {"query", "key", "value", "kernel", "device", "stream", "out"}


def test_every_option_of_attention_has_a_row():
    named = {name for options in support_table.OPTIONS.values() for name in options}
    options = inspect.signature(polyhead.attention).parameters.keys() - NO_OPTION
    assert named == options


def test_the_cells_are_what_the_package_says():
    found = json.loads(json.dumps(support_table.table()))
    cells = {(cell["option"], cell["dtype"], cell["kernel"]): cell for cell in found["cells"]}
    rows = len(support_table.OPTIONS) + len(support_table.SHAPES)
    assert len(cells) == len(found["cells"]) == rows * len(support_table.DTYPES) * len({c[2] for c in cells})
    for dtype in support_table.DTYPES:
        assert cells["none", dtype, "reference"]["forward"] == cells["none", dtype, "reference"]["backward"] == ""
        assert cells["return_weights", dtype, "reference"]["backward"] == support_table.NO_GRADIENT
    assert "float64" in cells["causal", "float64", "cpu_generic"]["forward"]
    assert {cell["kernel"] for cell in found["cells"] if not cell["forward"]} == set(polyhead.kernels())
    assert ["attn_mask", "cu_seqlens_q, cu_seqlens_k"] in [pair["options"] for pair in found["refused_together"]]
    for part in support_table.PARTS.values():
        lines = [line for line in part(found).splitlines() if line.startswith("|")]
        assert len(lines) > 3 and len({line.replace("\\|", "").count("|") for line in lines}) == 1


def test_a_cell_that_says_what_is_not_so_is_found(monkeypatch):
    """The kernel named by explain is asked to compute: with one that cannot, the table is not made."""
    explain = polyhead.explain

    def liar(*arrays, **options):
        explanation = explain(*arrays, **options)
        explanation.reasons["cpu_generic"] = ""
        return explanation

    monkeypatch.setattr(polyhead, "explain", liar)
    with pytest.raises(polyhead.Error, match="cpu_generic"):
        support_table.row("none", "float64")
