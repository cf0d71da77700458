#!/usr/bin/env python3
"""The memory of a training step in ONNX Runtime, its graph as torch exports it and fused by polyhead.

  bench/training_graph.py                 six layers of 512 at S = 1024, with and without dropout; some three minutes
  bench/training_graph.py --out FOLDER    the table and the figures into files too

A decoder whose attention is written by hand (product, scale, causal mask, softmax, dropout, product), exported by
`polyhead.torch.export_training` with forward and backward in one graph. Each contender runs in a process of its own,
without torch; what the first step adds to the resident memory at its peak counts: activations, scratch and gradients.
Losses of both are compared where nothing is dropped at random.
"""

import argparse
import logging
import math
import pathlib
import sys
import tempfile
import warnings

import memory

WIDTH, HEADS, FEED_FORWARD, BATCH = 512, 8, 2048, 1
DROPOUTS = (0.0, 0.1)
CONTENDERS = ("written out", "fused")
GOAL = 0.5


def decoder(layers: int, dropout: float):
    import torch

    class Layer(torch.nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.second = torch.nn.LayerNorm(WIDTH), torch.nn.LayerNorm(WIDTH)
            self.packed, self.out = torch.nn.Linear(WIDTH, 3 * WIDTH), torch.nn.Linear(WIDTH, WIDTH)
            self.wide, self.narrow = torch.nn.Linear(WIDTH, FEED_FORWARD), torch.nn.Linear(FEED_FORWARD, WIDTH)

        def attend(self, x):
            batch, seqlen, _ = x.shape
            split = (part.view(batch, seqlen, HEADS, -1).transpose(1, 2) for part in self.packed(x).split(WIDTH, dim=-1))
            query, key, value = split
            scores = query @ key.transpose(-2, -1) / math.sqrt(WIDTH // HEADS)
            later = torch.ones(seqlen, seqlen, dtype=torch.bool).triu(1)
            weights = scores.masked_fill(later, -math.inf).softmax(-1)
            weights = torch.nn.functional.dropout(weights, dropout, self.training)
            return self.out((weights @ value).transpose(1, 2).reshape(x.shape))

        def forward(self, x):
            x = x + self.attend(self.first(x))
            return x + self.narrow(torch.nn.functional.gelu(self.wide(self.second(x))))

    return torch.nn.Sequential(*(Layer() for _ in range(layers)))


def export(layers: int, seqlen: int, dropout: float, folder: pathlib.Path) -> tuple[dict, int]:
    """The graphs' files by contender, and the bytes that fusion says it saves."""
    import onnx
    import polyhead.onnx
    import polyhead.torch
    import torch

    logging.getLogger("torch.onnx").setLevel(logging.ERROR)
    torch.manual_seed(0)
    x, y = torch.randn(BATCH, seqlen, WIDTH), torch.randn(BATCH, seqlen, WIDTH)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        model = polyhead.torch.export_training(decoder(layers, dropout), (x,), (y,), torch.nn.functional.mse_loss)
    fusion = polyhead.onnx.fuse(model, target="polyhead")
    if fusion.num_fused != layers:
        raise RuntimeError(f"{fusion.num_fused} of {layers} attentions are fused:\n{fusion}")
    files = {}
    for contender, each in zip(CONTENDERS, (model, fusion.model), strict=True):
        files[contender] = folder / f"{contender.replace(' ', '_')}_{dropout}.onnx"
        onnx.save(each, files[contender])
    return files, fusion.saved_bytes


def peak_here(path: str) -> dict:
    """Of the first step of a graph."""
    import numpy as np
    import onnxruntime
    import polyhead.onnx

    written_out = pathlib.Path(path).name.startswith("written")
    session = onnxruntime.InferenceSession(path) if written_out else polyhead.onnx.session(path)
    rng = np.random.default_rng(0)
    inputs = {each.name: (0.05 * rng.standard_normal(each.shape)).astype(np.float32) for each in session.get_inputs()}
    losses = []
    peak, extra = memory.peaks_of(lambda: losses.append(session.run(None, inputs)[0]))
    return {"peak_bytes": peak, "extra_bytes": extra, "loss": float(losses[0])}


def markdown(result: dict, layers: int, seqlen: int) -> str:
    import torch_runs

    lines = [
        "",
        f"A decoder of {layers} layers of {WIDTH} with {HEADS} heads and {FEED_FORWARD} between, batch {BATCH}, S = {seqlen}, float32. MiB",
        "that the first training step adds to a process at its peak; in brackets all that is resident then.",
        "",
        f"| dropout | {' | '.join(CONTENDERS)} | share (goal {GOAL}) | said to be saved |",
        "|--:|--:|--:|--:|--:|",
    ]
    for row in result["rows"]:
        cells = [f"{each['extra_bytes'] / 2**20:.0f} ({each['peak_bytes'] / 2**20:.0f})" for each in row["contenders"].values()]
        lines.append(f"| {row['dropout']} | {' | '.join(cells)} | {row['share']:.2f} | {row['saved_bytes'] / 2**20:.0f} |")
    head = torch_runs.head("Memory of a training step in ONNX Runtime", result["environment"])
    return "\n".join([*head, *lines]) + "\n"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--layers", type=int, default=6)
    parser.add_argument("--seqlen", type=int, default=1024)
    parser.add_argument("--out", type=pathlib.Path)
    parser.add_argument("--peak", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.peak:
        import json

        print(json.dumps(peak_here(options.peak)))
        return 0
    import torch_runs

    environment = torch_runs.environment("training_graph.py", options)
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        for dropout in DROPOUTS:
            files, saved = export(options.layers, options.seqlen, dropout, pathlib.Path(folder))
            row = {"dropout": dropout, "saved_bytes": saved}
            row["contenders"] = {name: memory.in_a_process(__file__, [str(files[name])]) for name in CONTENDERS}
            written, fused = (row["contenders"][name] for name in CONTENDERS)
            row["share"] = fused["extra_bytes"] / written["extra_bytes"]
            losses = [written["loss"], fused["loss"]]
            if dropout == 0 and abs(losses[0] - losses[1]) > 1e-5 * abs(losses[0]):
                raise RuntimeError(f"losses differ: {losses}")
            rows.append(row)
    torch_runs.finish(environment)
    result = {"environment": environment, "rows": rows}
    torch_runs.print_and_write(result, options.out, "training-graph", markdown(result, options.layers, options.seqlen), ("dropout", "share", "saved_bytes"))
    return 0


if __name__ == "__main__":
    sys.exit(main())
