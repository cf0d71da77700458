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
    """One line that counts ONNX's node cases, whatever else is printed."""
    counts = {}
    for outcome in ("passed", "failed", "skipped"):
        for report in terminalreporter.stats.get(outcome, []):
            if "::AttentionNodes::" in report.nodeid:
                counts[outcome] = counts.get(outcome, 0) + 1
    if counts:
        passed = counts.get("passed", 0)
        terminalreporter.write_line(f"ONNX Attention node cases: {passed} of {sum(counts.values())} pass")
