"""Attention found in ONNX models and replaced by one operator: `polyhead.onnx.fuse`."""

from __future__ import annotations

import os
import pathlib
from collections.abc import Mapping, Sequence
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
    """A Softmax of the model, or what amounts to one, or a product with a constant matrix, and what became of it."""

    place: str  #: the node's name, behind those of the nodes in whose bodies it stands
    is_attention: bool  #: False: nothing that looks like attention is around it, or it is a product
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
    products: tuple[Candidate, ...]  #: with ``layers``
    num_nodes: tuple[int, int]  #: before and after
    opset: tuple[int, int]  #: before and after
    #: with ``check``: of each set of inputs the sizes of the dims that the model leaves open, and the largest difference of an
    #: output, by the largest number in it
    checks: tuple[tuple[dict[str, int], float], ...] = ()

    @property
    def error(self) -> float | None:
        """The largest difference of `checks`; None without a check."""
        return max((error for _, error in self.checks), default=None)

    @property
    def num_fused(self) -> int:
        """How many attentions were fused."""
        return sum(candidate.fused for candidate in self.candidates)

    @property
    def saved_bytes(self) -> int:
        """Of a training graph: what a step keeps between forward and backward no more."""
        return sum(candidate.saved_bytes for candidate in self.candidates)

    def __str__(self) -> str:
        lines = [
            f"{each.place}: {each.became} ({each.pattern})" if each.fused else f"{each.place}: stays, {each.reason}"
            for each in self.candidates + self.products
        ]
        nodes, opset = self.num_nodes, self.opset
        fused = f"{self.num_fused} fused"
        if self.products:
            fused += f", and {sum(each.fused for each in self.products)} of {len(self.products)} products"
        lines.append(f"{fused}, {nodes[0]} -> {nodes[1]} nodes, opset {opset[0]} -> {opset[1]}")
        if self.saved_bytes:
            lines.append(f"{self.saved_bytes:,} bytes less are kept from forward to backward in a step")
        for sizes, error in self.checks:
            words = ", ".join(f"{name} {size}" for name, size in sizes.items()) or "the model's own sizes"
            lines.append(f"checked, {words}: the outputs differ by {error:.1e}")
        return "\n".join(lines)


def fuse(
    model: str | os.PathLike[str] | onnx.ModelProto,
    out: str | os.PathLike[str] | None = None,
    *,
    target: str = "onnx",
    unseen_rows: str = "keep",
    layers: bool = False,
    check: bool | Mapping[str, Any] | Sequence[Mapping[str, Any]] = False,
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
    layers : bool
        Where an attention is found, replace products with constant matrices too, each with what is done to its result (bias,
        activation, residual, norm), by ``Linear`` of our domain, which needs ``target="polyhead"``.
    check : bool, mapping of str to array, or several
        Run both models, by onnxruntime if it is installed and else by ``onnx.reference``, and tell the differences in
        `Fusion.checks`, the largest in `Fusion.error`; inf, where an output has another shape. True: on random inputs of four sets
        of sizes, each with others for every dim that the model leaves open, of which those count that the model itself runs
        on. Else on these inputs, which may be several sets.

    Returns
    -------
    Fusion
        The new model and what became of each candidate. ``print(fusion)`` shows it.

    Raises
    ------
    polyhead.Error
        A file that is truncated, contradicts itself, names files outside of its folder, or has an opset that is not known.
        Nothing is written then, nor where the model itself runs on none of the random inputs.
    """
    if target not in _TARGETS:
        raise polyhead.Error(f'target is "{target}", must be "onnx" or "polyhead"')
    if unseen_rows not in _UNSEEN_ROWS:
        raise polyhead.Error(f'unseen_rows is "{unseen_rows}", must be "keep" or "zero"')
    if layers and target != "polyhead":
        raise polyhead.Error('layers needs target="polyhead", for ONNX has no operator for a product with a norm')
    if isinstance(model, onnx.ModelProto):
        folder, before = "", model.SerializeToString()
    else:
        path = pathlib.Path(model)
        folder, before = str(path.resolve().parent), path.read_bytes()
    folder_bytes = os.fsencode(folder)
    after, has_external_data, candidates, products, counts = _bind.fuse_model(before, folder_bytes, target, unseen_rows, layers)
    fused = onnx.load_model_from_string(after)
    checks = ()
    if check is not False:
        if has_external_data:
            onnx.load_external_data_for_model(fused, folder)
        given = None if check is True else [check] if isinstance(check, Mapping) else check
        checks = _compare(onnx.load(model) if folder else model, fused, given)
    if out is not None:
        _write(pathlib.Path(out), after, folder if has_external_data else None)
    told, told_products = (tuple(Candidate(*each) for each in found) for found in (candidates, products))
    return Fusion(fused, told, told_products, counts[:2], counts[2:], checks)


def _write(out, data, folder):
    if folder is not None and str(out.resolve().parent) != folder:
        raise polyhead.Error(f"out is {out}, must be in {folder}, where the model's external data is")
    partial = out.with_name(f"{out.name}.{os.getpid()}.tmp")
    try:
        partial.write_bytes(data)
        partial.replace(out)
    finally:
        partial.unlink(missing_ok=True)


# Sizes for the dims that a model leaves open, by their names in order: each set has others of every dim. First sizes that
# differ, so that no two are taken for each other, twice; then equal ones, as models may want them; then ones.
_SIZES = (
    lambda i: (2, 5, 7, 3, 6)[i] if i < 5 else i + 4,
    lambda i: (3, 6, 9, 4, 8)[i] if i < 5 else i + 8,
    lambda i: 4,
    lambda i: 1,
)
_EQUAL = 2


def _open_dims(model):
    """Of each input its dims: sizes, or names; "?" is the name of all that have none."""
    constants = {constant.name for constant in model.graph.initializer}
    return {
        value.name: [dim.dim_value if dim.HasField("dim_value") else dim.dim_param or "?" for dim in value.type.tensor_type.shape.dim]
        for value in model.graph.input
        if value.name not in constants
    }


def _draws(model):
    """Sizes by name, and random inputs of them."""
    names = sorted({dim for dims in _open_dims(model).values() for dim in dims if isinstance(dim, str)})
    for which in range(len(_SIZES)) if names else (0, _EQUAL):
        sizes = {name: _SIZES[which](i) for i, name in enumerate(names)}
        yield sizes, _random_inputs(model, sizes, masks_of_ones=which == _EQUAL)


def _random_inputs(model, sizes, *, masks_of_ones):
    """By name: normal numbers; tokens 0 and 1; masks that show three keys of four, the first one among them, or all."""
    rng = np.random.default_rng(0)
    dims, inputs = _open_dims(model), {}
    for value in model.graph.input:
        if value.name not in dims:
            continue
        shape = [sizes.get(dim, dim) for dim in dims[value.name]]
        dtype = onnx.helper.tensor_dtype_to_np_dtype(value.type.tensor_type.elem_type)
        if dtype == bool or "mask" in value.name:
            visible = np.ones(shape, bool) if masks_of_ones else rng.random(shape) < 0.75
            visible[..., :1] = True
            inputs[value.name] = visible.astype(dtype)
        elif np.issubdtype(dtype, np.integer):
            inputs[value.name] = rng.integers(0, 2, shape).astype(dtype)
        else:
            inputs[value.name] = rng.standard_normal(shape).astype(dtype)
    return inputs


def _sizes_of(model, inputs):
    sizes = {}
    for name, dims in _open_dims(model).items():
        if name in inputs:
            sizes |= {dim: size for dim, size in zip(dims, np.shape(inputs[name]), strict=False) if isinstance(dim, str)}
    return sizes


def _compare(original, fused, given):
    """Of each set of inputs its sizes and the difference; random ones where `given` is None, of those on which the model runs."""
    before, after = _runner(original), _runner(fused)
    if given is not None:
        return tuple((_sizes_of(original, inputs), _error(before(inputs), after(inputs))) for inputs in given)
    checks, why = [], ""
    for sizes, inputs in _draws(original):
        try:
            expected = before(inputs)
        except Exception as error:  # whatever a model does with sizes that it is not made for
            why = str(error)
            continue
        checks.append((sizes, _error(expected, after(inputs))))
    if not checks:
        raise polyhead.Error(f"the model itself runs on none of the inputs that check=True draws, give some: {why}")
    return tuple(checks)


def _runner(model):
    """A call by name; what onnxruntime cannot load, such as our own domain or bfloat16, runs by onnx.reference."""
    try:
        import onnxruntime

        options = onnxruntime.SessionOptions()
        options.log_severity_level = 4  # sizes that a model is not made for are no news
        session = onnxruntime.InferenceSession(model.SerializeToString(), options, providers=["CPUExecutionProvider"])
        return lambda inputs: session.run(None, dict(inputs))
    except (ImportError, RuntimeError):
        from polyhead.onnx import Model

        return lambda inputs: list(Model(model).run(inputs))


def _error(expected, got):
    """By the largest number of its output; inf where shapes differ, or a number is none. A NaN may have become any number."""
    worst = 0.0
    for a, b in zip(expected, got, strict=True):
        a, b = np.asarray(a, np.float64), np.asarray(b, np.float64)
        if a.shape != b.shape:
            return float("inf")
        both = np.isfinite(a) & np.isfinite(b)
        if not np.array_equal(a[~both & ~np.isnan(a)], b[~both & ~np.isnan(a)]):
            return float("inf")
        if both.any():
            worst = max(worst, float(np.max(np.abs(a - b)[both]) / max(np.max(np.abs(a[both])), 1e-30)))
    return worst
