import collections
import os

import pytest


def pytest_collection_modifyitems(config, items):
    """Of each test, the first of every so many cases, where POLYHEAD_TEST_CASES_EVERY says so."""
    every, met = int(os.environ.get("POLYHEAD_TEST_CASES_EVERY", "1")), collections.Counter()
    kept = []
    for item in items:
        test = (item.path, item.originalname)
        if met[test] % every == 0:
            kept.append(item)
        met[test] += 1
    if len(kept) < len(items):
        config.hook.pytest_deselected(items=[*set(items).difference(kept)])
        items[:] = kept


@pytest.fixture
def one_thread():
    """torch on one thread: with tiny operations more would only wait for one another."""
    import torch

    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(threads)


def pytest_terminal_summary(terminalreporter):
    """Lines that count ONNX's node cases, and torch's exports by opset, whatever else is printed."""
    cases, exports = collections.Counter(), collections.defaultdict(collections.Counter)
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "::AttentionNodes::" in report.nodeid:
                cases[outcome] += 1
            if "onnx_fourteen_exports_test.py::test_export[" in report.nodeid:
                exports[report.nodeid.rpartition("-")[2].rstrip("]")][outcome] += 1
    if cases:
        terminalreporter.write_line(f"ONNX Attention node cases: {cases['passed']} of {cases.total()} pass")
    if exports:
        told = (f"{each['passed']} of {each['passed'] + each['failed']} at {opset}" for opset, each in sorted(exports.items()))
        terminalreporter.write_line(f"torch's exports that are one Attention, by opset: {', '.join(told)}")
