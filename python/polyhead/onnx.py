"""ONNX's own Attention operator (opsets 23 and later), computed by polyhead; `polyhead.onnx.fuse`, which finds attention in
models that others exported; and `polyhead.onnx.session`, which runs models in ONNX Runtime with their attention computed here.
Needs the package ``onnx``, but for `polyhead.onnx.session` and `polyhead.onnx.library_path`, which need onnxruntime alone.

A backend of ONNX's interface: ``prepare``, ``run_model``, ``run_node`` (those of `polyhead.onnx.Backend`). Attention nodes
run here, every other node on ``onnx.reference``, which is NumPy: right rather than fast. To have attention alone, as a
node of an evaluator of your own, pass `polyhead.onnx.Attention` as one of its ``new_ops``::

    import onnx, polyhead.onnx
    model = polyhead.onnx.prepare(onnx.load("model.onnx"))
    outputs = model.run({"tokens": tokens})
"""

from __future__ import annotations

from typing import Any

from polyhead._onnxruntime import library_path, session

try:
    from polyhead._onnx_backend import Attention, Backend, Model, prepare, run_model, run_node, supports_device
    from polyhead._onnx_fuse import Candidate, Fusion, fuse
except ModuleNotFoundError as error:
    if error.name != "onnx":
        raise

__all__ = [
    "Attention", "Backend", "Candidate", "Fusion", "Model", "fuse", "library_path", "prepare", "run_model", "run_node", "session",
    "supports_device",
]  # fmt: skip


def __getattr__(name: str) -> Any:
    if name in __all__:
        raise ImportError(f"polyhead.onnx.{name} needs the package onnx: pip install onnx")
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
