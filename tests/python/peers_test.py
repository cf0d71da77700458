"""bench/peers.py: its suites, its arithmetic, its guards, and one small run from end to end."""

import json
import pathlib
import subprocess
import sys

import numpy as np
import polyhead
import pytest

pytest.importorskip("ml_dtypes")
BENCH = pathlib.Path(__file__).resolve().parents[2] / "bench"
sys.path.insert(0, str(BENCH))

import goals  # noqa: E402
import measure  # noqa: E402
import memory  # noqa: E402
import peers  # noqa: E402
import problem  # noqa: E402
import report  # noqa: E402
import rivals  # noqa: E402
import rivals_packed  # noqa: E402


def test_every_line_of_the_suites_is_a_problem_and_every_goal_has_one():
    found = {direction: set() for direction in problem.DIRECTIONS}
    for path in problem.suites():
        direction = problem.suite_direction(path.stem)
        for p in problem.read_suite(path):
            found[direction] |= {goal.name for n in (1, 2) if (goal := goals.goal_of(p, direction, n))}
    assert found[problem.FORWARD] == {
        "forward f32, full, D=64", "forward f32, full, D=128", "forward f32, D=32", "forward f32, S=128",
        "forward f32, S < 128",
        "causal forward, S=512", "causal forward, S=1024", "causal forward, S=4096",
        "bf16 forward, D=64", "bf16 forward, D=128", "padding or bool mask, forward", "window 256 at S=4096, forward",
        "tiny heads, forward", "decode, GQA 4:1, f32", "decode, GQA 4:1, bf16", "decode, MHA, f32", "decode, MHA, bf16",
    }  # fmt: skip
    assert found[problem.BACKWARD] == {
        "backward f32, full, D=32", "backward f32, full, D=64", "backward f32, full, D=128",
        "backward f32, causal, S < 1k", "backward f32, causal, S >= 1k", "backward, B*H = 1 on 2 threads",
        "bf16 backward, D=64", "bf16 backward, D=128",
    }  # fmt: skip
    assert found[problem.BOTH] == {
        "dropout, forward + backward", "bias with gradient, forward + backward", "tiny heads, forward + backward",
    }  # fmt: skip


def test_what_the_matrix_unit_computes_is_held_to_more():
    def asked(line, direction=problem.FORWARD, kernel="cpu_amx"):
        return goals.goal_of(problem.parse_problem(line), direction, 1, kernel)

    assert [asked(f"1x8x{shape} --dtype bf16").torch for shape in ("2048x64", "4096x128")] == [3, 2]
    assert asked("2x8x512x64 --causal --dtype bf16").torch == 4
    assert asked("1x8x2048x64 --causal --dtype bf16") is None
    assert asked("1x8x2048x64 --dtype bf16", problem.BACKWARD).torch == 2
    assert asked("1x8x2048x64") == asked("1x8x2048x64", kernel="cpu_avx512")
    assert asked("1x8x2048x64 --dtype bf16", kernel="cpu_avx512bf16").torch == 2.3


def test_a_quick_look_takes_rows_of_the_suites():
    suites = {(problem.suite_direction(path.stem), p.line) for path in problem.suites()
              for p in problem.read_suite(path)}  # fmt: skip
    quick = {(direction, line) for direction, lines in peers.QUICK_ROWS.items() for line in lines}
    assert quick <= suites
    assert len(peers.QUICK_ROWS[problem.BACKWARD]) == 4


@pytest.mark.parametrize(
    "line",
    ["1x16x384", "1x16x384x64 --softcap 3", "1x16x384x64 --dtype f8", "1x1x4x4 --window a,b",
     "1x1x4x4 --causal --lengths=k"],
)  # fmt: skip
def test_a_line_that_cannot_be_measured_is_refused_by_its_words(line):
    with pytest.raises(ValueError, match="problem '1x"):
        problem.parse_problem(line)


@pytest.mark.parametrize(
    "line",
    ["2x4x33x8", "1x4/2x5/33x8/16", "1x2x40x8 --causal", "1x2x7/40x8 --causal --align bottom_right",
     "1x2x40/7x8 --causal --align top_left", "2x2x40x8 --window 5,3", "1x2x40x8 --window 9,0 --causal"],
)  # fmt: skip
def test_visible_pairs_are_counted_as_the_library_counts_them(line):
    p = problem.parse_problem(line)
    x = problem.Operands(p)
    query, key, value = (array.transpose(0, 2, 1, 3) for array in (x.query, x.key, x.value))
    explanation = polyhead.explain(query, key, value, causal=p.causal, window=p.window, align=p.align)
    assert p.flops(problem.FORWARD) == explanation.flops
    assert p.flops(problem.BACKWARD) == explanation.backward_flops
    assert p.flops(problem.BOTH) == explanation.flops + explanation.backward_flops


def test_one_dense_mask_hides_what_the_options_hide():
    p = problem.parse_problem("3x2x40x8 --causal --window 9,0 --align top_left --lengths=k --mask 3,1,40,40:blocks")
    x = problem.Operands(p)
    query, key, value = (array.transpose(0, 2, 1, 3) for array in (x.query, x.key, x.value))
    by_options = polyhead.attention(query, key, value, **rivals.polyhead_arguments(p, x))
    by_mask = polyhead.attention(query, key, value, attn_mask=x.dense_mask(p))
    assert not x.dense_mask(p).all()
    np.testing.assert_allclose(by_options, by_mask, rtol=0, atol=1e-6)


def test_a_turn_is_spoiled_by_waiting_and_by_others():
    start = measure.Usage(wall=0, own=0, busy=0, waited=0)
    alone = measure.Usage(wall=1, own=1, busy=1, waited=0)
    assert not measure.spoiled(start, alone, crowded=False)
    assert measure.spoiled(start, alone._replace(waited=0.02), crowded=False)
    assert not measure.spoiled(start, alone._replace(waited=0.02), crowded=True)
    assert measure.spoiled(start, alone._replace(busy=1.5), crowded=True)


def run_peers(folder, *options):
    """The result and the table of a small run beside torch on one thread."""
    command = [sys.executable, BENCH / "peers.py", "--quick", "--threads", "1", "--peers", "torch", "--no-plot"]
    done = subprocess.run([*command, "--out", folder, *options], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    (path,) = folder.glob("*.json")
    result, table = json.loads(path.read_text()), path.with_suffix(".md").read_text()
    for row in result["rows"]:
        assert row["kernel"] in polyhead.kernels()
        assert f"`{row['problem']}`" in table
        for name, entry in row["contenders"].items():
            assert 0 < entry["min_s"] <= entry["median_s"] and entry["samples"] > 0
            assert name == report.OURS or row["problem"].endswith("--dropout 0.1") or entry["max_diff"] < 1e-5
    assert result["overhead_us"]["polyhead, NumPy arrays, backward"] > 0
    measured = sum(len(row["contenders"]) for row in result["rows"])
    assert len(path.with_suffix(".csv").read_text().splitlines()) == 1 + measured
    return result, table


def test_a_small_run_writes_its_table_and_figures(tmp_path):
    lines = ["1x2x40x8 --causal", "2x2x40x8 --lengths=k", "1x4/2x1/128x16"]
    result, _ = run_peers(tmp_path, "--rows", *lines)
    assert [row["problem"] for row in result["rows"]] == lines
    assert result["memory"] == []


def test_gradients_are_measured_alone_and_in_a_step(tmp_path):
    pytest.importorskip("torch")
    lines = ["2x4/2x40x8 --causal", "1x2x40x8 --bias 1,2,1,40", "1x2x40x8 --lengths=k", "1x2x40x8 --dropout 0.1"]
    result, table = run_peers(tmp_path, "--rows", *lines, "--direction", "backward", "forward+backward")
    rows = result["rows"]
    asked = [(direction, line) for direction in ("backward", "forward+backward") for line in lines]
    assert [(row["direction"], row["problem"]) for row in rows] == asked
    assert "## Backward, the gradients alone, 1 thread" in table
    assert "## Forward and backward, 1 thread" in table
    for row in rows:
        fused = row["problem"] == "1x2x40x8 --lengths=k"
        assert set(row["contenders"]) == {"polyhead", "torch", *(["torch fused"] if fused else [])}
    bounded = [v for row in rows for v in report.verdicts(row)]
    assert {what for _, what, *_ in bounded} == {"vs torch"}


def test_caches_are_measured_in_the_same_way(tmp_path):
    pytest.importorskip("torch")
    lines = ["2x4/2x1/256x32", "1x2x20/256x32 --causal --align bottom_right"]
    command = [sys.executable, BENCH / "cache_peers.py", "--threads", "1", "--rounds", "1", "--out", tmp_path]
    subprocess.run([*command, "--peers", "polyhead", "torch", "--rows", *lines], check=True, capture_output=True)
    (path,) = tmp_path.glob("*-caches.json")
    rows, table = json.loads(path.read_text())["rows"], path.with_suffix(".md").read_text()
    assert [row["problem"] for row in rows] == lines
    for row in rows:
        assert "torch" in row["contenders"] and not row["refusals"]
        for name, entry in row["contenders"].items():
            coarse = {"int8": 0.05, "float8_e4m3": 0.2, "int4": 0.5}
            kept = next((word for word in coarse if word in name), None)
            assert entry["max_diff"] < coarse.get(kept, 1e-5), name
    assert "| polyhead, pages of 16 than polyhead | `2x4/2x1/256x32` | 1 | 0.97x |" in table
    assert "| polyhead than torch |" in table and "| polyhead, step |" in table


def test_packed_sequences_are_measured_in_the_same_way(tmp_path):
    pytest.importorskip("torch")
    line = "packed 4/2x32 3*1/256 5/40 20/20"
    command = [sys.executable, BENCH / "cache_peers.py", "--threads", "1", "--rounds", "1", "--out", tmp_path]
    subprocess.run([*command, "--peers", "polyhead", "torch", "--rows", line], check=True, capture_output=True)
    (path,) = tmp_path.glob("*-caches.json")
    (row,), table = json.loads(path.read_text())["rows"], path.with_suffix(".md").read_text()
    assert row["contenders"].keys() == {
        "polyhead", "polyhead, pages of 128", "polyhead, end to end", "torch, one by one", "torch, gathered and masked"
    }  # fmt: skip
    assert all(entry["max_diff"] < 1e-5 for entry in row["contenders"].values())
    assert f"| polyhead than torch, one by one | `{line}` | 1 | 1.00x |" in table
    for bad in ("packed 4/2x32", "packed 4x32 5/4", "packed 4 1/4", "packed 4x32 1/4 --dtype f16"):
        with pytest.raises(ValueError, match=f"problem '{bad}"):
            rivals_packed.parse_packed(bad)


def test_peak_memory_grows_with_the_length_and_is_less_than_unfused(monkeypatch):
    pytest.importorskip("torch")
    monkeypatch.setitem(memory.SEQLENS, "quick", [512, 1024])
    rows = memory.measure("quick", threads=1)
    assert not [row for row in rows if "error" in row]
    extra = {(row["contender"], row["seqlen"]): row["extra_bytes"] for row in rows}
    for contender in memory.CONTENDERS:
        assert extra[contender, 512] < extra[contender, 1024]
        assert extra[contender, 1024] >= memory.operand_bytes(1024)  # out and three gradients
    assert report.peak_memory_share(rows, 1024) < 0.5
    assert report.peak_memory_share(rows, 4096) is None
