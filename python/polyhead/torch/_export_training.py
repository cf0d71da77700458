"""A training step as one ONNX graph: `polyhead.torch.export_training`."""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.overrides import TorchFunctionMode

import polyhead

if TYPE_CHECKING:
    import onnx


class _WholeDropout(TorchFunctionMode):
    """Dropout as the one operator that ONNX has, where torch takes it apart."""

    def __torch_function__(self, func, types, args=(), kwargs=None):
        if func in (torch.dropout, torch.nn.functional.dropout):
            return _dropout(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))


def _dropout(input, p=0.5, training=True, train=True, inplace=False):
    return torch.native_dropout(input, p, True)[0] if training and train and p > 0 else input


def export_training(
    model: torch.nn.Module,
    inputs: tuple[torch.Tensor, ...],
    targets: tuple[torch.Tensor, ...],
    loss: Callable[..., torch.Tensor],
    *,
    opset: int = 18,
    open_dims: Sequence[Collection[int]] | None = None,
) -> onnx.ModelProto:
    """One training step of a module, forward and backward, as one ONNX graph.

    `polyhead.onnx.fuse` with ``target="polyhead"`` finds the attentions in it with their backwards, so that no weights of
    attention are kept between both. The graph holds no optimizer: it gives gradients.

    Parameters
    ----------
    model : torch.nn.Module
        In training mode, if its dropout shall drop. Buffers become constants. What autograd does is traced, so nothing may
        depend on values of tensors.
    inputs : tuple of torch.Tensor
        Of the model. The graph has their shapes, but for ``open_dims``.
    targets : tuple of torch.Tensor
        What the loss takes beside the model's output.
    loss : callable
        ``loss(model(*inputs), *targets)`` is a tensor of one number.
    opset : int
        ONNX's, 18 to 22. From 23 on torch's exporter writes attention as one operator, which has no gradients.
    open_dims : sequence of collections of int, optional
        For each of ``inputs`` and then of ``targets`` the dims that may have another size in each run, such as batch and
        sequence: ``[(0, 1), (0, 1)]``. Their sizes must be above 1 here. Default: none.

    Returns
    -------
    onnx.ModelProto
        Its inputs are ``input_0``, ..., ``target_0``, ... and the parameters that need gradients, by their names; its
        outputs ``loss`` and, for each of these parameters, ``grad.`` and its name, for those that the loss depends on.

    Raises
    ------
    polyhead.Error
        The package onnxscript is not installed, with which torch exports; opset is out of range; no parameter needs a gradient;
        ``open_dims`` does not fit the tensors, or the model or the loss wants such a dim as it is.
    """
    try:
        import onnxscript  # noqa: F401
    except ImportError as error:
        raise polyhead.Error("export_training needs onnxscript, with which torch exports: pip install onnxscript") from error
    if not 18 <= opset <= 22:
        raise polyhead.Error(f"opset is {opset}, must be 18 to 22")
    parameters = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    if not parameters:
        raise polyhead.Error("model has no parameter that needs a gradient")
    arguments = tuple(each.detach() for each in (*inputs, *targets, *parameters.values()))  # one given twice is two for torch
    dims = _open_dims(open_dims, (*inputs, *targets), len(parameters))
    step, names = _traced(model, inputs, targets, loss, parameters, dims)
    told = [f"input_{i}" for i in range(len(inputs))] + [f"target_{i}" for i in range(len(targets))]
    exported = torch.onnx.export(
        step, arguments, dynamo=True, opset_version=opset, verbose=False, input_names=[*told, *parameters],
        output_names=["loss", *(f"grad.{name}" for name in names)],
        dynamic_shapes=tuple(dict.fromkeys(each, torch.export.Dim.DYNAMIC) for each in dims) if any(dims) else None,
    )  # fmt: skip
    return exported.model_proto


def _open_dims(told, tensors, num_parameters) -> list[frozenset[int]]:
    """The dims of each argument that stay open; checked."""
    if told is None:
        return [frozenset()] * (len(tensors) + num_parameters)
    dims = [frozenset(each) for each in told]
    if len(dims) != len(tensors):
        raise polyhead.Error(f"open_dims has {len(dims)} entries, must have {len(tensors)}: one for each input and target")
    for i, (each, tensor) in enumerate(zip(dims, tensors, strict=True)):
        for dim in each:
            if not 0 <= dim < tensor.dim():
                raise polyhead.Error(f"open_dims[{i}] names dim {dim} of a tensor of {tensor.dim()} dims")
            if tensor.shape[dim] < 2:
                raise polyhead.Error(f"open_dims[{i}] names dim {dim}, whose size is {tensor.shape[dim]}, must be above 1 here")
    return dims + [frozenset()] * num_parameters


def _traced(model, inputs, targets, loss, parameters, dims):
    """The step as torch's operators, and the names of the parameters that it gives gradients of."""
    from torch._decomp import core_aten_decompositions
    from torch.fx.experimental.proxy_tensor import make_fx

    names: list[str] = []

    def step(*arguments):
        values = [each.requires_grad_() for each in arguments[len(inputs) + len(targets) :]]
        out = torch.func.functional_call(model, dict(zip(parameters, values, strict=True)), arguments[: len(inputs)])
        result = loss(out, *arguments[len(inputs) : len(inputs) + len(targets)])
        gradients = torch.autograd.grad(result, values, allow_unused=True)
        names[:] = [name for name, gradient in zip(parameters, gradients, strict=True) if gradient is not None]
        return (result, *(gradient for gradient in gradients if gradient is not None))

    table: dict[Any, Any] = dict(core_aten_decompositions())
    table.pop(torch.ops.aten.native_dropout.default, None)
    # clones, for requires_grad_ marks what is given
    given = [each.detach().clone() for each in (*inputs, *targets, *parameters.values())]
    with sdpa_kernel(SDPBackend.MATH), _WholeDropout():
        if not any(dims):
            return make_fx(step, decomposition_table=table)(*given), names
        given, shapes = _of_open_sizes(given, dims)
        traced = make_fx(step, decomposition_table=table, tracing_mode="symbolic")(*given)
    for i, (tensor, each) in enumerate(zip(given, dims, strict=True)):
        for dim in each:
            size = shapes.replace(tensor.shape[dim].node.expr)
            if size.is_number:
                raise polyhead.Error(f"open_dims[{i}] names dim {dim}, which the model or the loss wants to be {size}")
    return traced, names


def _of_open_sizes(tensors, dims):
    """Tensors without numbers, whose open dims have symbols for sizes, no two the same; and what is known of these."""
    from torch._subclasses.fake_tensor import FakeTensorMode
    from torch.fx.experimental.symbolic_shapes import DimDynamic, ShapeEnv, StatelessSymbolicContext

    shapes = ShapeEnv(duck_shape=False)
    mode = FakeTensorMode(shape_env=shapes, allow_non_fake_inputs=True)
    kinds = {True: DimDynamic.DYNAMIC, False: DimDynamic.STATIC}
    return [
        mode.from_tensor(tensor, symbolic_context=StatelessSymbolicContext([kinds[dim in each] for dim in range(tensor.dim())]))
        for tensor, each in zip(tensors, dims, strict=True)
    ], shapes
