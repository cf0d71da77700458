"""Attention found in ONNX models and replaced by one operator: `polyhead.onnx.fuse`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import onnx

import polyhead
from polyhead import _bind

_TARGETS = ("onnx", "polyhead")
_UNSEEN_ROWS = ("keep", "zero")


@dataclass(frozen=True)
class Candidate:
    """A Softmax of the model, or what amounts to one, and what became of it."""

    place: str  #: the node's name, behind those of the nodes in whose bodies it stands
    is_attention: bool  #: False: nothing that looks like attention is around it
    fused: bool
    pattern: str  #: in words
    became: str  #: of a fused one: the new node
    reason: str  #: of one that stays: the first condition that failed, with the name of the node where it did
    saved_bytes: int  #: of one fused with its backward: what a step keeps between both no more; 0: sizes are not known


@dataclass(frozen=True)
class Fusion:
    """What `polyhead.onnx.fuse` returns."""

    model: onnx.ModelProto
    candidates: tuple[Candidate, ...]
    num_nodes: tuple[int, int]  #: before and after
    opset: tuple[int, int]  #: before and after
    error: float | None  #: with ``check``: the largest difference of an output, by the largest number in it

    @property
    def num_fused(self) -> int:
        """How many candidates were fused."""
        return sum(candidate.fused for candidate in self.candidates)

    @property
    def saved_bytes(self) -> int:
        """Of a training graph: what a step keeps between forward and backward no more."""
        return sum(candidate.saved_bytes for candidate in self.candidates)

    def __str__(self) -> str:
        lines = [
            f"{each.place}: {each.became} ({each.pattern})" if each.fused else f"{each.place}: stays, {each.reason}"
            for each in self.candidates
        ]
        nodes, opset = self.num_nodes, self.opset
        lines.append(f"{self.num_fused} fused, {nodes[0]} -> {nodes[1]} nodes, opset {opset[0]} -> {opset[1]}")
        if self.saved_bytes:
            lines.append(f"{self.saved_bytes:,} bytes less are kept from forward to backward in a step")
        return "\n".join(lines)


def fuse(
    model: str | os.PathLike[str] | onnx.ModelProto,
    out: str | os.PathLike[str] | None = None,
    *,
    target: str = "onnx",
    unseen_rows: str = "keep",
    check: bool | Mapping[str, Any] = False,
) -> Fusion:
    """Replaces every attention that is found in a model by one operator.

    A hand-written or exported attention is found at its softmax: scales, masks, guards against rows that see no key,
    repeated heads and layouts around it are understood in any order. What is not understood stays as it is, with the
    reason. A row of scores that is hidden by -inf as a whole gives 0, as ONNX's Attention says, where the model may have
    given NaN. An attention whose backward is in the graph too is replaced with it by two operators of our domain, or stays.

    Parameters
    ----------
    model : path or onnx.ModelProto
        Not changed. A model with external data is given by its path.
    out : path, optional
        Where the new model is written; with external data it must be in the folder of the old one.
    target : str
        "onnx": Attention of ONNX's opset 23, to which an older model is raised where its other nodes allow it.
        "polyhead": Attention of our domain ``polyhead``, which has the same signature, in a model of any opset from 11 on, and
        takes sinks and score programs besides; `Backend.prepare` runs it.
    unseen_rows : str
        What becomes of a row of scores that a mask hides as a whole by a finite number, such as float's lowest, so that all
        keys weigh alike. "keep": it keeps the mean over all values. "zero": it gives 0, as if -inf hid it; causal masks and
        windows beside a padding mask of that kind become options of the operator then, and the rest a boolean mask.
    check : bool or mapping of str to array
        Run both models, on these inputs or on random ones, by onnxruntime if it is installed and else by
        ``onnx.reference``, and tell the difference in `Fusion.error`.

    Returns
    -------
    Fusion
        The new model and what became of each candidate. ``print(fusion)`` shows it.

    Raises
    ------
    polyhead.Error
        A file that is truncated, contradicts itself, names files outside of its folder, or has an opset that is not known.
        Nothing is written then.
    """
    if target not in _TARGETS:
        raise polyhead.Error(f'target is "{target}", must be "onnx" or "polyhead"')
    if unseen_rows not in _UNSEEN_ROWS:
        raise polyhead.Error(f'unseen_rows is "{unseen_rows}", must be "keep" or "zero"')
    if isinstance(model, onnx.ModelProto):
        folder, before = "", model.SerializeToString()
    else:
        path = pathlib.Path(model)
        folder, before = str(path.resolve().parent), path.read_bytes()
    after, has_external_data, candidates, counts = _bind.fuse_model(before, os.fsencode(folder), target, unseen_rows)
    if out is not None:
        _write(pathlib.Path(out), after, folder if has_external_data else None)
    fused = onnx.load_model_from_string(after)
    error = None
    if check is not False:
        if has_external_data:
            onnx.load_external_data_for_model(fused, folder)
        original = onnx.load(model) if folder else model
        inputs = _random_inputs(fused) if check is True else check
        error = _error(_run(original, inputs), _run(fused, inputs))
    told = tuple(Candidate(*candidate) for candidate in candidates)
    return Fusion(fused, told, counts[:2], counts[2:], error)


def _write(out, data, folder):
    if folder is not None and str(out.resolve().parent) != folder:
        raise polyhead.Error(f"out is {out}, must be in {folder}, where the model's external data is")
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


def _random_inputs(model):
    """By name: normal numbers, tokens 0 and 1, masks of ones; a size that is not told is 4 wherever its name is the same."""
    rng = np.random.default_rng(0)
    inputs = {}
    constants = {constant.name for constant in model.graph.initializer}
    for value in model.graph.input:
        if value.name in constants:
            continue
        kind = value.type.tensor_type
        shape = [dim.dim_value if dim.HasField("dim_value") else 4 for dim in kind.shape.dim]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)
        if dtype == bool or "mask" in value.name:
            inputs[value.name] = np.ones(shape, dtype)
        elif np.issubdtype(dtype, np.integer):
            inputs[value.name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            inputs[value.name] = rng.standard_normal(shape).astype(dtype)
    return inputs


def _run(model, inputs):
    try:
        import onnxruntime

        session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
        return session.run(None, dict(inputs))
    except (ImportError, RuntimeError):  # what onnxruntime cannot run: our own domain, bfloat16
        from polyhead.onnx import Model

        return list(Model(model).run(inputs))


def _error(expected, got):
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        both = np.isfinite(a) & np.isfinite(b)
        if both.any():
            worst = max(worst, float(np.max(np.abs(a - b)[both]) / max(np.max(np.abs(a[both])), 1e-30)))
    return worst


