#!/usr/bin/env python3
"""Attention in ONNX Runtime: models as they are, in sessions of its own and in `polyhead.onnx.session`.

  bench/ort_models.py                                     every model on 1 and 2 threads; about 90 seconds
  bench/ort_models.py --models encoder_384 --threads 1    one of them
  bench/ort_models.py --out FOLDER                        the table and the figures into files too

Each model is made in three forms, and each is run by ONNX Runtime (ORT_ENABLE_ALL) and by us: attention written out as
an exporter of opset 17 leaves it, ONNX's Attention of opset 23, and com.microsoft's MultiHeadAttention. In one process,
interleaved, by two sessions of each; outputs are compared first. A layer has its projections, feed-forward, norms and residuals; a core is
attention alone.
"""

import argparse
import pathlib
import sys

import numpy as np
import onnx
import onnxruntime
from onnx import helper

import measure
import polyhead.onnx
import torch_runs
from report import times

SECONDS_PER_ROUND = 3.0
SESSIONS = 2  # of each contender: where a session's memory lies makes up to 8 % on two threads, and stays as it is
HEADS, HEAD_DIM, FEED_FORWARD = 12, 64, 3072  # BERT-base's
FORMS = ("written", "Attention", "MultiHeadAttention")
MODELS = {  # sequence, layers (0: the core alone), causal, dtype
    "encoder_384": (384, 2, False, np.float32),
    "decoder_1024": (1024, 1, True, np.float32),
    "decoder_4096": (4096, 1, True, np.float32),  # attention is half of its products
    "core_384": (384, 0, False, np.float32),
    "core_1024": (1024, 0, False, np.float32),
    "core_1024_causal": (1024, 0, True, np.float32),
    "core_1024_float16": (1024, 0, False, np.float16),
}


class Model:
    """A graph that grows node by node."""

    def __init__(self, name: str, form: str):
        self.seqlen, self.layers, self.causal, self.dtype = MODELS[name]
        self.form, self.width = form, HEADS * HEAD_DIM
        self.nodes, self.constants, self.rng = [], {}, np.random.default_rng(0)

    def add(self, op, inputs, domain="", **attributes) -> str:
        name = f"{op}_{len(self.nodes)}"
        self.nodes.append(helper.make_node(op, inputs, [name], domain=domain, **attributes))
        return name

    def constant(self, array) -> str:
        array = np.asarray(array)
        name = f"constant_{len(self.constants)}"
        self.constants[name] = onnx.numpy_helper.from_array(array.astype(self.dtype) if array.dtype.kind == "f" else array, name)
        return name

    def linear(self, x, size_in, size_out) -> str:
        product = self.add("MatMul", [x, self.constant(self.rng.standard_normal((size_in, size_out)) * size_in**-0.5)])
        return self.add("Add", [product, self.constant(self.rng.standard_normal(size_out) * 0.02)])

    def norm(self, x) -> str:
        return self.add("LayerNormalization", [x, self.constant(np.ones(self.width)), self.constant(np.zeros(self.width))])

    def gelu(self, x) -> str:
        inner = self.add("Add", [self.add("Erf", [self.add("Div", [x, self.constant(2**0.5)])]), self.constant(1.0)])
        return self.add("Mul", [self.add("Mul", [x, inner]), self.constant(0.5)])

    def attention(self, query, key, value) -> str:
        if self.form == "Attention":
            heads = {"q_num_heads": HEADS, "kv_num_heads": HEADS, "is_causal": int(self.causal)}
            return self.add("Attention", [query, key, value], **heads)
        if self.form == "MultiHeadAttention":
            return self.add(self.form, [query, key, value], "com.microsoft", num_heads=HEADS, unidirectional=int(self.causal))
        apart = self.constant(np.array([0, 0, HEADS, HEAD_DIM]))
        query, key, value = (
            self.add("Transpose", [self.add("Reshape", [x, apart])], perm=perm)
            for x, perm in ((query, [0, 2, 1, 3]), (key, [0, 2, 3, 1]), (value, [0, 2, 1, 3]))
        )
        scores = self.add("Div", [self.add("MatMul", [query, key]), self.constant(HEAD_DIM**0.5)])
        if self.causal:
            hidden = np.triu(np.full((self.seqlen, self.seqlen), -np.inf), 1)
            scores = self.add("Add", [scores, self.constant(hidden[None, None])])
        out = self.add("MatMul", [self.add("Softmax", [scores], axis=-1), value])
        return self.add("Reshape", [self.add("Transpose", [out], perm=[0, 2, 1, 3]), self.constant(np.array([0, 0, self.width]))])

    def layer(self, x) -> str:
        """A decoder's norms stand before, an encoder's behind."""
        inside = self.norm(x) if self.causal else x
        attended = self.attention(*(self.linear(inside, self.width, self.width) for _ in range(3)))
        x = self.add("Add", [x, self.linear(attended, self.width, self.width)])
        x, inside = (x, self.norm(x)) if self.causal else (self.norm(x),) * 2
        hidden = self.linear(self.gelu(self.linear(inside, self.width, FEED_FORWARD)), FEED_FORWARD, self.width)
        x = self.add("Add", [x, hidden])
        return x if self.causal else self.norm(x)

    def build(self) -> tuple[bytes, dict]:
        names = ["x"] if self.layers else ["query", "key", "value"]
        out = names[0]
        for _ in range(self.layers):
            out = self.layer(out)
        if not self.layers:
            out = self.attention(*names)
        kind = helper.np_dtype_to_tensor_dtype(np.dtype(self.dtype))
        told = [helper.make_tensor_value_info(name, kind, ["batch", "sequence", self.width]) for name in names]
        result = helper.make_tensor_value_info(out, kind, None)
        graph = helper.make_graph(self.nodes, "model", told, [result], list(self.constants.values()))
        opsets = [helper.make_opsetid("", 23 if self.form == "Attention" else 17), helper.make_opsetid("com.microsoft", 1)]
        shape = (1, self.seqlen, self.width)
        inputs = {name: self.rng.standard_normal(shape).astype(self.dtype) for name in names}
        return helper.make_model(graph, opset_imports=opsets, ir_version=10).SerializeToString(), inputs


def options_of(threads: int) -> onnxruntime.SessionOptions:
    options = onnxruntime.SessionOptions()
    options.intra_op_num_threads = threads
    options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_ENABLE_ALL
    options.add_session_config_entry("session.intra_op.allow_spinning", "0")
    options.log_severity_level = 4
    return options


def bound(session, inputs: dict):
    """A call that runs the session into memory that is allocated once."""
    binding = session.io_binding()
    held = {name: onnxruntime.OrtValue.ortvalue_from_numpy(array) for name, array in inputs.items()}
    out = onnxruntime.OrtValue.ortvalue_from_numpy(np.empty_like(next(iter(inputs.values()))))
    for name, value in held.items():
        binding.bind_ortvalue_input(name, value)
    binding.bind_ortvalue_output(session.get_outputs()[0].name, out)

    def call():
        session.run_with_iobinding(binding)
        return out

    return call


def measure_row(name: str, threads: int, rounds: int) -> dict:
    calls, outputs = {}, {}
    for again in range(SESSIONS):
        for form in FORMS:
            model, _ = Model(name, form).build()
            inputs = Model(name, "Attention").build()[1]  # the same for all forms
            for who in ("onnxruntime", "polyhead"):
                if who == "polyhead":
                    session = polyhead.onnx.session(model, options_of(threads))
                else:
                    session = onnxruntime.InferenceSession(model, options_of(threads), providers=["CPUExecutionProvider"])
                label = f"{who} {form}"
                calls[label, again] = bound(session, inputs)
                outputs[label] = calls[label, again]().numpy().astype(np.float64)
    exact = outputs["onnxruntime written"]
    difference = max(float(np.abs(out - exact).max()) for out in outputs.values())
    samples = {label: measure.Samples() for label in outputs}
    for (label, _), each in measure.interleave(calls, set(), rounds, SECONDS_PER_ROUND * rounds).items():
        samples[label].clean += each.clean
        samples[label].dirty += each.dirty
        samples[label].dirty_turns += each.dirty_turns
    seqlen, layers, _, dtype = MODELS[name]
    sizes = f"1x{seqlen}x{HEADS}x{HEAD_DIM}" + (f", {layers} layers" if layers else "")
    row = {"model": name, "sizes": sizes, "dtype": np.dtype(dtype).name, "threads": threads, "max_diff": difference}
    return {**row, "contenders": {label: each.summary() for label, each in samples.items()}}


def best(row: dict, who: str) -> float:
    return min(entry["min_s"] for label, entry in row["contenders"].items() if label.startswith(who))


def ratio(row: dict, form: str) -> float | None:
    """How many times as fast as ONNX Runtime the same model is here."""
    pair = [row["contenders"].get(f"{who} {form}") for who in ("onnxruntime", "polyhead")]
    return pair[0]["min_s"] / pair[1]["min_s"] if all(pair) else None


def markdown(result: dict) -> str:
    columns = [f"{who} {form}" for form in FORMS for who in ("onnxruntime", "polyhead")]
    lines = torch_runs.head("Attention in ONNX Runtime: its own kernels and polyhead's", result["environment"])
    lines += [
        "",
        "Times in ms: median (minimum) of interleaved samples of two sessions. The first three ratios compare a form with itself, ONNX "
        "Runtime's minimum over ours; the last one the best of its three forms with ours of the model that is written out.",
        "",
        f"| model | sizes | dtype | threads | {' | '.join(columns)} | {' | '.join(FORMS)} | written than its best |",
        f"|---|---|---|--:{'|--:' * (len(columns) + len(FORMS) + 1)}|",
    ]
    for row in result["rows"]:
        cells = [row["model"], row["sizes"], row["dtype"], str(row["threads"])]
        cells += [torch_runs.figures(row["contenders"][c]) if c in row["contenders"] else "-" for c in columns]
        found = [ratio(row, form) for form in FORMS]
        cells += ["-" if each is None else times(each) for each in found]
        cells.append(times(best(row, "onnxruntime") / row["contenders"]["polyhead written"]["min_s"]))
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter, allow_abbrev=False
    )
    parser.add_argument("--models", nargs="+", choices=MODELS, default=list(MODELS), metavar="NAME", help=", ".join(MODELS))
    parser.add_argument("--threads", nargs="+", type=int, default=[1, 2], help="default: 1 2")
    parser.add_argument("--rounds", type=int, default=2, metavar="N", help="of each session; default: 2")
    parser.add_argument("--out", type=pathlib.Path, help="folder for files")
    parser.add_argument("--name", default="onnxruntime", help="end of the files' names; default: onnxruntime")
    return parser.parse_args()


def main() -> int:
    options = arguments()
    environment = torch_runs.environment("ort_models.py", options)
    environment["versions"] = environment["versions"] | {"onnxruntime": onnxruntime.__version__}
    rows = []
    for name in options.models:
        for threads in options.threads:
            rows.append(measure_row(name, threads, options.rounds))
            print(f"{name}, threads {threads}", file=sys.stderr, flush=True)
    torch_runs.finish(environment)
    result = {"environment": environment, "rows": rows}
    keys = ("model", "sizes", "dtype", "threads", "max_diff")
    torch_runs.print_and_write(result, options.out, options.name, markdown(result), keys)
    return 0


if __name__ == "__main__":
    sys.exit(main())
