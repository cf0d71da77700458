"""The signatures as promised, annotated; explain, kernels, threads and the command."""

import importlib
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

SIGNATURE = """(query, key, value, *, attn_bias=None, attn_mask=None, mask_at_end=False, causal=False, window=None, sink_keys=0, align=None,
query_offset=None, scale=None, softcap=0.0, alibi_slopes=None, sink_logits=None, normalizer='softmax', score=None, mask=None, captured=None, dropout_p=0.0,
dropout_seed=None, dropout_offset=0, dropout_origin=None, seqlens_q=None, seqlens_k=None, cu_seqlens_q=None,
cu_seqlens_k=None, page_table=None, key_scales=None, value_scales=None, return_logsumexp=False, return_weights=False, return_column_sums=False, out_dtype=None, out=None, kernel=None, device=None, stream=None)"""
BACKWARD_SIGNATURE = """(grad_out, query, key, value, out, logsumexp, *, attn_bias=None, attn_mask=None, mask_at_end=False, causal=False,
window=None, sink_keys=0, align=None, query_offset=None, scale=None, softcap=0.0, alibi_slopes=None, sink_logits=None, normalizer='softmax', score=None, mask=None, captured=None,
dropout_p=0.0, dropout_seed=None, dropout_offset=0, dropout_origin=None, seqlens_q=None, seqlens_k=None,
cu_seqlens_q=None, cu_seqlens_k=None, kernel=None, device=None, stream=None, grad_logsumexp=None, needs=('query', 'key', 'value'),
into=None, accumulate=False, grad_dtype=None)"""
SIGNATURES = {
    "attention": SIGNATURE.replace("\n", " "),
    "attention_backward": BACKWARD_SIGNATURE.replace("\n", " "),
    "explain": SIGNATURE.replace("\n", " "),
    "kernels": "()",
    "set_num_threads": "(num_threads)",
    "get_num_threads": "()",
    "dropout_mask": "(shape, dropout_p, dropout_seed, dropout_offset=0, dropout_origin=None)",
    "merge": "(outs, logsumexps)",
    "merge_backward": "(grad_out, outs, logsumexps, out, logsumexp, grad_logsumexp=None)",
}
PACKAGE = pathlib.Path(polyhead.__file__).parent




def without_types(function):
    signature = inspect.signature(function)
    parameters = [each.replace(annotation=inspect.Parameter.empty) for each in signature.parameters.values()]
    return str(signature.replace(parameters=parameters, return_annotation=inspect.Signature.empty))


@pytest.mark.parametrize("name", SIGNATURES)
def test_signature(name):
    assert without_types(getattr(polyhead, name)) == SIGNATURES[name]


def public_functions(module):
    """(name, function) of every public function and method that the module's __all__, or its own names, lead to."""
    for name in getattr(module, "__all__", [name for name in vars(module) if not name.startswith("_")]):
        value = getattr(module, name)
        if not getattr(value, "__module__", "polyhead").startswith("polyhead"):
            continue
        if inspect.isclass(value) and not issubclass(value, tuple) and not getattr(value, "_is_protocol", False):
            for method_name, method in vars(value).items():
                method = getattr(method, "__func__", method)
                if inspect.isfunction(method) and (method_name == "__init__" or not method_name.startswith("_")):
                    yield f"{name}.{method_name}", method
        elif inspect.isfunction(value):
            yield name, value


@pytest.mark.parametrize("name", ["polyhead", "polyhead.weights", "polyhead.onnx", "polyhead.torch", "polyhead.torch.attn_bias"])
def test_public_functions_are_annotated(name):
    if name != "polyhead" and name != "polyhead.weights":
        pytest.importorskip(name.split(".")[1], reason=f"{name.split('.')[1]} is not installed: {name} is left out")
    functions = dict(public_functions(importlib.import_module(name)))
    assert functions
    bare = {}
    for each, function in functions.items():
        signature = inspect.signature(function)
        missing = [p.name for p in signature.parameters.values() if p.annotation is p.empty and p.name not in ("self", "cls")]
        if signature.return_annotation is signature.empty:
            missing.append("return")
        if missing and not hasattr(function, "__dataclass_fields__"):
            bare[each] = missing
    assert bare == {}
    assert (PACKAGE / "py.typed").exists()


def test_docstrings_name_every_argument():
    for name in SIGNATURES:
        function = getattr(polyhead, name)
        if name != "explain":  # its arguments are attention's
            for argument in inspect.signature(function).parameters:
                assert re.search(rf"\b{argument}\b.* : |^    {argument}, ", function.__doc__, re.M), argument
        returns = inspect.signature(function).return_annotation != "None"
        assert ("Returns\n" in function.__doc__) == returns


def test_backward_takes_the_options_of_forward():
    forward = inspect.signature(polyhead.attention).parameters
    backward = inspect.signature(polyhead.attention_backward).parameters
    for name, parameter in forward.items():
        if not name.startswith("return_") and name not in ("out_dtype", "out", "query", "page_table", "key_scales", "value_scales"):  # backward's out is an input, caches have no gradients
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


def test_number_of_threads():
    x = np.random.default_rng(0).standard_normal((3, 40, 4, 16), dtype=np.float32)
    before, whole = polyhead.get_num_threads(), polyhead.attention(x, x, x)
    try:
        for count in (1, 3, before):
            polyhead.set_num_threads(count)
            assert polyhead.get_num_threads() == count
            np.testing.assert_array_equal(polyhead.attention(x, x, x), whole)
        for wrong, error in ((0, polyhead.Error), (1025, polyhead.Error), (2.0, TypeError), ("2", TypeError)):
            with pytest.raises(error, match="^num_threads "):
                polyhead.set_num_threads(wrong)
        assert polyhead.get_num_threads() == before
    finally:
        polyhead.set_num_threads(before)


def test_as_many_threads_compute_as_were_set():
    """Threads of the process after a call that has work for all of them."""
    code = """if True:
        import os, numpy, polyhead
        polyhead.set_num_threads(1)
        x = numpy.ones((4, 64, 4, 32), 'f')
        polyhead.attention(x, x, x)
        alone = len(os.listdir('/proc/self/task'))
        polyhead.set_num_threads(5)
        polyhead.attention(x, x, x)
        print(len(os.listdir('/proc/self/task')) - alone)"""
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert shown.stdout == "4\n", shown.stderr


def test_environment_forces_a_kernel():
    code = "import numpy, polyhead; x = numpy.ones((1, 2, 1, 4), 'f'); print(polyhead.explain(x, x, x).kernel)"
    shown = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, env=os.environ | {"POLYHEAD_KERNEL": "reference"}
    )
    assert shown.stdout == "reference\n"
