"""The signatures as promised, equal in code and stubs; explain, kernels and the command."""

import ast
import inspect
import os
import pathlib
import re
import subprocess
import sys

import numpy as np
import pytest

import polyhead
from polyhead import __main__ as command

SIGNATURE = """(query, key, value, *, attn_bias=None, attn_mask=None, causal=False, window=None, align=None,
query_offset=None, scale=None, softcap=0.0, alibi_slopes=None, dropout_p=0.0, dropout_seed=None, dropout_offset=0,
dropout_origin=None, seqlens_q=None, seqlens_k=None, cu_seqlens_q=None, cu_seqlens_k=None, return_logsumexp=False,
return_weights=False, return_column_sums=False, out_dtype=None, kernel=None, device=None, stream=None)"""
BACKWARD_SIGNATURE = """(grad_out, query, key, value, out, logsumexp, *, attn_bias=None, attn_mask=None, causal=False,
window=None, align=None, query_offset=None, scale=None, softcap=0.0, alibi_slopes=None, dropout_p=0.0,
dropout_seed=None, dropout_offset=0, dropout_origin=None, seqlens_q=None, seqlens_k=None, cu_seqlens_q=None,
cu_seqlens_k=None, kernel=None, device=None, stream=None, grad_logsumexp=None, needs=('query', 'key', 'value'),
into=None, accumulate=False, grad_dtype=None)"""
SIGNATURES = {
    "attention": SIGNATURE.replace("\n", " "),
    "attention_backward": BACKWARD_SIGNATURE.replace("\n", " "),
    "explain": SIGNATURE.replace("\n", " "),
    "kernels": "()",
    "dropout_mask": "(shape, dropout_p, dropout_seed, dropout_offset=0, dropout_origin=None)",
    "merge": "(outs, logsumexps)",
    "merge_backward": "(grad_out, outs, logsumexps, out, logsumexp, grad_logsumexp=None)",
}
PACKAGE = pathlib.Path(polyhead.__file__).parent


def stub_signatures():
    """(name, signature without types) of every function in __init__.pyi; an overloaded one comes several times."""
    for node in ast.parse((PACKAGE / "__init__.pyi").read_text()).body:
        if isinstance(node, ast.FunctionDef):
            for argument in [*node.args.args, *node.args.kwonlyargs]:
                argument.annotation = None
            yield node.name, f"({ast.unparse(node.args)})"


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert str(inspect.signature(getattr(polyhead, name))) == SIGNATURES[name]
    in_stubs = {signature for stub_name, signature in stub_signatures() if stub_name == name}
    assert in_stubs == {SIGNATURES[name]}


def test_stubs_and_module_name_the_same_things():
    tree = ast.parse((PACKAGE / "__init__.pyi").read_text())
    assigned = {node.targets[0].id: node.value for node in tree.body if isinstance(node, ast.Assign)}
    exported = ast.literal_eval(assigned["__all__"])
    assert exported == polyhead.__all__
    assert all(hasattr(polyhead, name) for name in exported)
    assert (PACKAGE / "py.typed").exists()


def test_docstrings_name_every_argument():
    for name in SIGNATURES:
        function = getattr(polyhead, name)
        if name != "explain":  # its arguments are attention's
            for argument in inspect.signature(function).parameters:
                assert re.search(rf"\b{argument}\b.* : |^    {argument}, ", function.__doc__, re.M), argument
        assert "Returns\n" in function.__doc__


def test_backward_takes_the_options_of_forward():
    forward = inspect.signature(polyhead.attention).parameters
    backward = inspect.signature(polyhead.attention_backward).parameters
    for name, parameter in forward.items():
        if not name.startswith("return_") and name != "out_dtype":  # out itself tells
            assert backward[name] == parameter


@pytest.mark.parametrize("name", ["attention", "explain", "attention_backward"])
def test_every_argument_reaches_its_place(name):
    """Each keyword, wrong in a way of its own, is the one that the error names."""
    function = getattr(polyhead, name)
    x = np.ones((1, 2, 1, 4), np.float32)
    logsumexp = np.ones((1, 1, 2), np.float32)
    good = {"query": x, "key": x, "value": x}
    if name == "attention_backward":
        good |= {"grad_out": x, "out": x, "logsumexp": logsumexp}
    function(**good)
    for argument in inspect.signature(function).parameters:
        with pytest.raises(TypeError, match=rf"^{argument}\b"):
            function(**good | {argument: object()})


def test_kernels():
    names = polyhead.kernels()
    assert names[-1] == "reference" and len(names) == len(set(names))
    x = np.ones((1, 2, 1, 4), np.float32)
    assert set(names) <= set(polyhead.explain(x, x, x).reasons)


def test_explain():
    x = np.ones((2, 3, 4, 8), np.float32)
    explanation = polyhead.explain(x, x, x)
    assert explanation.kernel in polyhead.kernels() and explanation.reasons[explanation.kernel] == ""
    assert explanation.error == ""
    assert explanation.measured == "" or explanation.measured in str(explanation)
    assert explanation.workspace_bytes >= 0
    assert explanation.flops == 4 * 2 * 4 * 3 * 3 * 8
    assert explanation.backward_workspace_bytes >= 0
    assert explanation.backward_flops == 2.5 * explanation.flops
    text = str(explanation)
    assert all(name in text for name in explanation.reasons)
    assert re.search(rf"^{explanation.kernel} +taken$", text, re.M)
    assert f"backward  workspace {explanation.backward_workspace_bytes} bytes" in text


def test_explain_a_kernel_that_cannot():
    x = np.ones((1, 2, 1, 4), np.float64)
    refusing = [name for name, reason in polyhead.explain(x, x, x).reasons.items() if reason]
    for name in refusing:  # float64 is for the reference alone
        explanation = polyhead.explain(x, x, x, kernel=name)
        assert explanation.kernel == "" and name in explanation.error
        assert explanation.reasons[name] in str(explanation)
        assert (explanation.workspace_bytes, explanation.backward_workspace_bytes) == (0, 0)
    assert refusing or polyhead.kernels() == ["reference"]


def test_version():
    assert re.fullmatch(r"\d+\.\d+\.\d+", polyhead.__version__)


def run(*arguments, **environment):
    return subprocess.run(
        [sys.executable, "-m", "polyhead", *arguments], capture_output=True, text=True, env=os.environ | environment
    )


def test_info():
    shown = run("info")
    assert shown.returncode == 0 and shown.stderr == ""
    rows = dict(re.split(r": +", line, maxsplit=1) for line in shown.stdout.splitlines())
    assert rows["polyhead"] == polyhead.__version__
    assert rows["kernels"].split() == polyhead.kernels()
    assert rows["numpy"] == np.__version__
    assert int(rows["threads"]) >= 1


def test_other_words_go_to_the_command():
    shown = run("kernels", "--format", "csv")
    assert shown.returncode == 0 and shown.stdout.startswith("kernel,")
    assert run("no_such_word").returncode == 2


def test_a_build_without_the_command_says_so(monkeypatch, tmp_path, capfd):
    """A `polyhead` on PATH is not asked: it may be the script that asks."""
    script = tmp_path / "polyhead"
    script.write_text("#!/bin/sh\necho found\n")
    script.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(command, "COMMAND", tmp_path / "nowhere")
    assert command.main(["bench", "1x2x3x4"]) == 2
    told = capfd.readouterr()
    assert told.out == "" and "without its command" in told.err and "libcli11-dev" in told.err


def test_environment_forces_a_kernel():
    code = "import numpy, polyhead; x = numpy.ones((1, 2, 1, 4), 'f'); print(polyhead.explain(x, x, x).kernel)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"POLYHEAD_KERNEL": "reference"}
    )
    assert shown.stdout == "reference\n"
