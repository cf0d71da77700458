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
