"""torch's graphs in ONNX's words, for `polyhead.torch.fuse`: only what stands around attention is translated; the rest is opaque."""

from __future__ import annotations

import math
import operator

import numpy as np
import onnx
import torch
from onnx import helper, numpy_helper

from polyhead import _bind

_aten = torch.ops.aten
_MOST_FOLDED = 1 << 22  # elements of a constant, as of a mask that is one
_TYPES = {
    torch.float32: onnx.TensorProto.FLOAT, torch.float16: onnx.TensorProto.FLOAT16, torch.bfloat16: onnx.TensorProto.BFLOAT16,
    torch.float64: onnx.TensorProto.DOUBLE, torch.bool: onnx.TensorProto.BOOL, torch.int64: onnx.TensorProto.INT64,
    torch.int32: onnx.TensorProto.INT32,
}  # fmt: skip
_SAME = {_aten.contiguous.default, _aten.clone.default, _aten.alias.default, _aten.lift_fresh_copy.default}
_RESHAPES = {_aten.view.default, _aten.reshape.default, _aten._unsafe_view.default, _aten.flatten.using_ints, _aten.unflatten.int}
_BINARY = {
    _aten.mul.Tensor: "Mul", _aten.mul.Scalar: "Mul", _aten.div.Tensor: "Div", _aten.div.Scalar: "Div", _aten.add.Tensor: "Add",
    _aten.sub.Tensor: "Sub", _aten.matmul.default: "MatMul", _aten.bmm.default: "MatMul", _aten.logical_and.default: "And",
    _aten.bitwise_and.Tensor: "And",
}  # fmt: skip
_UNARY = {_aten.tanh.default: "Tanh", _aten.logical_not.default: "Not", _aten.bitwise_not.default: "Not", _aten.exp.default: "Exp", _aten.neg.default: "Neg"}
_BACK = {"Add": operator.add, "Mul": operator.mul, "And": torch.logical_and, "Not": torch.logical_not, "Where": torch.where}


def _value(node):
    return node.meta.get("val")


def _is_tensor(node):
    return isinstance(node, torch.fx.Node) and isinstance(_value(node), torch.Tensor)


class _Translation:
    """A graph of torch as a model of ONNX; values have the nodes' names."""

    def __init__(self, module):
        self.module, self.nodes, self.constants, self.constant_values = module, [], {}, {}
        inputs, told, outputs = [], [], []
        for node in module.graph.nodes:
            if node.op == "output":
                read = []
                torch.fx.map_arg(node.args, read.append)
                outputs = list(dict.fromkeys(each.name for each in read if _is_tensor(each)))
                continue
            if not _is_tensor(node) or _value(node).dtype not in _TYPES:
                if node.op == "call_function":
                    self._opaque(node)
                continue
            info = helper.make_tensor_value_info(node.name, _TYPES[_value(node).dtype], list(_value(node).shape))
            if node.op != "call_function":
                inputs.append(info)
            else:
                told.append(info)
                self._translate(node)
        infos = {info.name: info for info in (*inputs, *told)}
        graph = helper.make_graph(
            self.nodes, "g", inputs, [infos[name] for name in outputs if name in infos], list(self.constants.values()),
            value_info=[info for info in told if info.name not in self.constants],
        )  # fmt: skip
        imports = [helper.make_opsetid("", 18), helper.make_opsetid("torch", 1)]
        self.model = helper.make_model(graph, opset_imports=imports, ir_version=8)

    def _add(self, op, inputs, node, **attributes):
        self.nodes.append(helper.make_node(op, inputs, [node.name], node.name, **attributes))

    def _opaque(self, node):
        read = []
        torch.fx.map_arg((node.args, node.kwargs), read.append)
        self.nodes.append(helper.make_node("Opaque", [each.name for each in read], [node.name], node.name, domain="torch"))

    def _constant(self, array):
        name = f"polyhead constant {len(self.constants)}"
        self.constants[name] = numpy_helper.from_array(array, name)
        return name

    def _operand(self, argument, like):
        if isinstance(argument, torch.fx.Node):
            return argument.name
        dtype = _value(like).dtype
        return self._constant(np.asarray(argument, helper.tensor_dtype_to_np_dtype(_TYPES[dtype])))

    def _folded(self, node):
        """The value of a node that depends on no input, or None."""
        known = [each for each in node.all_input_nodes if each in self.constant_values]
        random = torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ())
        if len(known) < len(node.all_input_nodes) or random or not 0 < _value(node).numel() <= _MOST_FOLDED:
            return None
        if _value(node).dtype == torch.bfloat16 or _value(node).device.type != "cpu":
            return None
        args, kwargs = torch.fx.map_arg((node.args, node.kwargs), self.constant_values.__getitem__)
        with torch._subclasses.fake_tensor.unset_fake_temporarily(), torch.no_grad():
            return node.target(*args, **kwargs)

    def _translate(self, node):
        value = self._folded(node)
        if value is not None:
            self.constant_values[node] = value
            self.constants[node.name] = numpy_helper.from_array(value.contiguous().numpy(), node.name)
            return
        before = len(self.nodes)
        if not self._known(node):
            del self.nodes[before:]
            self._opaque(node)

    def _known(self, node):
        """Whether a node has been said in ONNX's words."""
        target, args = node.target, node.args
        out = _value(node)
        if target in _SAME:
            self._add("Identity", [args[0].name], node)
        elif target in _RESHAPES:
            self._add("Reshape", [args[0].name, self._constant(np.array(out.shape, np.int64))], node)
        elif target in (_aten.unsqueeze.default, _aten.squeeze.dim):
            rank = out.ndim if target is _aten.unsqueeze.default else _value(args[0]).ndim
            if _value(args[0]).ndim == out.ndim:
                return False
            axes = self._constant(np.array([args[1] % rank], np.int64))
            self._add("Unsqueeze" if target is _aten.unsqueeze.default else "Squeeze", [args[0].name, axes], node)
        elif target is _aten.expand.default:
            self._add("Expand", [args[0].name, self._constant(np.array(out.shape, np.int64))], node)
        elif target in (_aten.transpose.int, _aten.permute.default, _aten.t.default, _aten.mT.default if hasattr(_aten, "mT") else None):
            self._add("Transpose", [args[0].name], node, perm=_perm(target, args, out.ndim))
        elif target in _BINARY and not node.kwargs and len(args) == 2:
            self._add(_BINARY[target], [self._operand(each, node) for each in args], node)
            operands = [_value(each) for each in args if _is_tensor(each)]
            return all(each.dtype == out.dtype for each in operands) and (out.dtype == torch.bool) == (_BINARY[target] == "And")
        elif target in _UNARY:
            self._add(_UNARY[target], [args[0].name], node)
            return out.dtype == _value(args[0]).dtype and (out.dtype == torch.bool) == (_UNARY[target] == "Not")
        elif target in (_aten.softmax.int, _aten._softmax.default):
            if target is _aten.softmax.int and out.dtype != _value(args[0]).dtype:
                return self._softmax_in(node)
            self._add("Softmax", [args[0].name], node, axis=args[1])
        elif target in (_aten.masked_fill.Scalar, _aten.where.ScalarOther, _aten.where.ScalarSelf, _aten.where.self, _aten.masked_fill.Tensor):
            self._add("Where", self._chosen(node), node)
        elif target is _aten.dropout.default:
            drops = args[2] and args[1] > 0
            more = [self._constant(np.float32(args[1])), self._constant(np.bool_(True))] if drops else []
            self._add("Dropout" if drops else "Identity", [args[0].name, *more], node)
        elif target in (_aten.to.dtype, _aten._to_copy.default):
            self._add("Cast", [args[0].name], node, to=_TYPES[out.dtype])
        elif target is _aten.einsum.default and len(args[1]) == 2:
            self._add("Einsum", [each.name for each in args[1]], node, equation=args[0])
        else:
            return False
        return True

    def _softmax_in(self, node):
        """softmax(x, dtype=...): a cast first."""
        name = f"{node.name} in"
        self.nodes.append(helper.make_node("Cast", [node.args[0].name], [name], name, to=_TYPES[_value(node).dtype]))
        self._add("Softmax", [name], node, axis=node.args[1])
        return True

    def _chosen(self, node):
        """where(mask, x, y)"""
        if node.target in (_aten.masked_fill.Scalar, _aten.masked_fill.Tensor):
            x, mask, number = node.args
            return [mask.name, self._operand(number, node), x.name]
        return [node.args[0].name, *(self._operand(each, node) for each in node.args[1:])]


def _perm(target, args, rank):
    if target is _aten.permute.default:
        return [axis % rank for axis in args[1]]
    perm = list(range(rank))
    a, b = (args[1] % rank, args[2] % rank) if target is _aten.transpose.int else (rank - 2, rank - 1)
    if rank > 1:
        perm[a], perm[b] = b, a
    return perm


class _Return:
    """New nodes of a fused model, put into torch's graph."""

    def __init__(self, translation, fused, attend):
        self.graph, self.attend = translation.module.graph, attend
        self.by_name = {node.name: node for node in self.graph.nodes}
        self.numbers = {constant.name: numpy_helper.to_array(constant) for constant in fused.graph.initializer if constant.name not in self.by_name}
        self.places = {}
        for i, node in enumerate(self.graph.nodes):
            self.places[node] = (i,)
        self.new = {}

    def insert(self, node):
        """One node, as early as its operands are there; in the place of torch's of that name, if there is one."""
        operands = [self.operand(name) if name else None for name in node.input]
        attributes = {each.name: helper.get_attribute_value(each) for each in node.attribute}
        if node.op_type in ("Shape", "Concat", "Slice"):
            self.numbers[node.output[0]] = self.shape(node.op_type, operands, attributes)
            return
        last = max((each for each in operands if isinstance(each, torch.fx.Node)), key=self.places.__getitem__)
        with self.graph.inserting_after(last):
            made = self.make(node.op_type, operands, attributes)
        # Behind what stands there already: places compare as lists.
        self.places[made] = (*self.places[last], len(self.places))
        made.meta["val"] = self.fake(made)
        self.new[node.output[0]] = made
        if node.output[0] in self.by_name:
            self.by_name[node.output[0]].replace_all_uses_with(made)

    def operand(self, name):
        return self.new.get(name) if name in self.new else self.by_name[name] if name in self.by_name else self.numbers[name]

    def fake(self, made):
        args, kwargs = torch.fx.map_arg((made.args, made.kwargs), _value)
        with torch.no_grad():
            mode = next(each.fake_mode for each in torch.utils._pytree.tree_leaves(args) if hasattr(each, "fake_mode"))
            with mode:
                return made.target(*args, **kwargs)

    def shape(self, op, operands, attributes):
        if op == "Shape":
            return np.array(_value(operands[0]).shape, np.int64)[attributes.get("start", 0) : attributes.get("end")]
        return np.concatenate(operands) if op == "Concat" else operands[0][int(operands[1][0]) : int(operands[2][0])]

    def make(self, op, operands, attributes):
        call = self.graph.call_function
        x = operands[0]
        if op == "Attention":
            return call(self.attend, tuple(operands), attributes)
        if op == "Transpose":
            return call(_aten.permute.default, (x, list(attributes["perm"])))
        if op in ("Unsqueeze", "Squeeze"):
            axes = [int(axis) for axis in operands[1]]
            shape = list(_value(x).shape)
            for axis in axes:
                shape.insert(axis, 1) if op == "Unsqueeze" else shape.pop(axis)
            return call(_aten.reshape.default, (x, shape))
        if op == "Reshape":
            return call(_aten.reshape.default, (x, [int(size) for size in operands[1]]))
        if op == "Expand":
            shape = torch.broadcast_shapes(_value(x).shape, tuple(int(size) for size in operands[1]))
            return call(_aten.expand.default, (x, list(shape)))
        numbers = [each if isinstance(each, torch.fx.Node) else each.item() for each in operands]
        return call(_BACK[op], tuple(numbers))


def _written(graph):
    """The nodes whose elements are written in place, and by whom."""
    written = {}
    for node in graph.nodes:
        if node.op != "call_function" or not getattr(getattr(node.target, "_schema", None), "is_mutable", False):
            continue
        for argument, told in zip(node.args, node.target._schema.arguments, strict=False):
            if told.alias_info is not None and told.alias_info.is_write and isinstance(argument, torch.fx.Node):
                written[_base(argument)] = node.name
    return written


def _base(node):
    while node.op == "call_function" and node.args and isinstance(node.args[0], torch.fx.Node):
        schema = getattr(node.target, "_schema", None)
        if schema is None or not schema.arguments or schema.arguments[0].alias_info is None:
            break
        node = node.args[0]
    return node


def _place(node):
    """The line that calls it, if torch knows."""
    lines = [line.strip() for line in (node.meta.get("stack_trace") or "").splitlines() if line.strip()]
    files = [line for line in lines if line.startswith("File ")]
    if not files:
        return node.name
    name, line = files[-1].split(", ")[:2]
    return f"{name[5:].strip(chr(34)).rsplit('/', 1)[-1]}:{line.removeprefix('line ')}"


def replace_attention(module, inputs, unseen_rows, attend):
    """In place. For each candidate its place, whether it is attention, whether it is fused, pattern and reason; and how many
    are fused."""
    if any(isinstance(each, torch.Tensor) and each.device.type != "cpu" for each in inputs):
        return [("graph", True, False, "", "it is not on the CPU")], 0
    translation = _Translation(module)
    after, _, candidates, *_ = _bind.fuse_model(translation.model.SerializeToString(), b"", "torch", unseen_rows, False)
    by_name = {node.name: node for node in module.graph.nodes}
    told = [(_place(by_name[place]) if place in by_name else place, *rest) for place, *rest in candidates]
    found = [(place, is_attention, fused, pattern, reason) for place, is_attention, fused, pattern, _, reason, *_ in told]
    if not any(fused for _, _, fused, _, _ in found):
        return found, 0
    written = _written(module.graph)
    if written:
        name, by = next((node.name, by) for node, by in written.items())
        reason = f'the graph writes "{name}" in place, by "{by}"'
        return [(place, looks, False, "", reason if fused else why) for place, looks, fused, _, why in found], 0
    fused = onnx.load_model_from_string(after)
    back = _Return(translation, fused, attend)
    for node in fused.graph.node:
        if node.name not in back.by_name and not node.name.endswith(" in"):
            back.insert(node)
    kept = {node.name for node in fused.graph.node} | set(translation.constants)
    for node in reversed(list(module.graph.nodes)):
        if node.op == "call_function" and node.name in back.by_name and node.name not in kept and not node.users:
            module.graph.erase_node(node)
    module.graph.eliminate_dead_code()
    module.graph.lint()
    module.recompile()
    return found, sum(fused for _, _, fused, _, _ in found)
