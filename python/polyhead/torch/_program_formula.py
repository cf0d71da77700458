"""The text of a score and mask program (docs/programs.md) as a formula in torch's operations, on whole [B, H, Sq, Sk].

For second derivatives and gradients through weights, as `_composition` all of which is O(Sq Sk).
"""

import ast
import functools
import re

import torch


@functools.lru_cache(maxsize=256)
def _statements(text):
    """The names of its captures, in order; and [(name, expression)]: the language's grammar is Python's but for t[]."""
    lines = (line.strip() for line in re.split(r"[;\n]", re.sub(r"\[\s*\]", "[()]", text)))
    body = ast.parse("\n".join(lines)).body
    captures = [each.target.id for each in body if isinstance(each, ast.AnnAssign)]
    assigned = [(each.targets[0].id, each.value) for each in body if isinstance(each, ast.Assign)]
    reads = [node for _, expression in assigned for node in ast.walk(expression) if isinstance(node, ast.Subscript)]
    for node in sorted(reads, key=lambda node: (node.lineno, node.col_offset)):
        if node.value.id not in captures:  # one that is not declared is one where it is first read
            captures.append(node.value.id)
    return captures, assigned


def captures_named(text):
    """The names of the tensors that a program reads, in its order; none of what is no program, which the library refuses."""
    try:
        return tuple(_statements(text)[0])
    except SyntaxError:
        return ()


def _floor_div(a, b):
    return torch.where(b == 0, 0, torch.div(a, torch.where(b == 0, 1, b), rounding_mode="floor"))


_INFIX = {
    ast.Add: torch.add,
    ast.Sub: torch.sub,
    ast.Mult: torch.mul,
    ast.Div: torch.div,
    ast.FloorDiv: _floor_div,
    ast.Mod: lambda a, b: torch.where(b == 0, 0, a - _floor_div(a, b) * b),
    ast.Pow: torch.pow,
    ast.LShift: lambda a, b: a << b.clamp(0, 63),
    ast.RShift: lambda a, b: a >> b.clamp(0, 63),
    ast.BitAnd: torch.bitwise_and,
    ast.BitOr: torch.bitwise_or,
    ast.BitXor: torch.bitwise_xor,
    ast.Lt: torch.lt,
    ast.LtE: torch.le,
    ast.Gt: torch.gt,
    ast.GtE: torch.ge,
    ast.Eq: torch.eq,
    ast.NotEq: torch.ne,
}
_OF_FLOATS = {
    "floor": torch.floor, "ceil": torch.ceil, "exp": torch.exp, "log": torch.log, "tanh": torch.tanh,
    "sigmoid": torch.sigmoid, "erf": torch.erf, "sqrt": torch.sqrt, "rsqrt": torch.rsqrt, "sin": torch.sin,
    "cos": torch.cos, "pow": torch.pow,
}  # fmt: skip
_OTHERS = {
    "abs": torch.abs,
    "where": torch.where,
    "min": lambda *all: functools.reduce(torch.minimum, all),
    "max": lambda *all: functools.reduce(torch.maximum, all),
    "clamp": lambda x, low, high: torch.minimum(torch.maximum(x, low), high),
}
_TYPES = (torch.bool, torch.int64)  # and any of floats, each wider than the one before


class Formula:
    """A program for the places `inputs` (b, h, q, k, offset), whose floats are `dtype`."""

    def __init__(self, text, inputs, dtype):
        self._captures, self._statements = _statements(text)
        self._inputs, self._dtype = inputs, dtype

    def mask(self, captures):
        """Bool, True = may look."""
        mask = self._result("mask", self._inputs, captures)
        return torch.ones((), dtype=torch.bool) if mask is None else mask.to(torch.bool)

    def score(self, scores, captures):
        """What becomes of scores [B, H, Sq, Sk]."""
        result = self._result("score", self._inputs | {"score": scores}, captures)
        return scores if result is None else result.to(self._dtype).expand(scores.shape)

    def gradients(self, scores, captures, grad):
        """Of scores, and of each capture of floats (None of others), given that of the program's score."""
        floats = [i for i, each in enumerate(captures) if each is not None and each.is_floating_point()]

        def score(scores, *given):
            captured = list(captures)
            for i, each in zip(floats, given):
                captured[i] = each
            return self.score(scores, captured)

        _, vjp = torch.func.vjp(score, scores, *(captures[i] for i in floats))
        grad_scores, *given = vjp(grad)
        grads = dict(zip(floats, given))
        return grad_scores, [grads.get(i) for i in range(len(captures))]

    def _result(self, name, values, captures):
        values = {key: torch.as_tensor(value) for key, value in values.items()}
        tensors = dict(zip(self._captures, captures))
        last = max((i for i, (to, _) in enumerate(self._statements) if to == name), default=-1)
        for to, expression in self._statements[: last + 1]:
            if to in ("score", "mask") and to != name:
                continue
            if "score" not in values and _reads_score(expression, values, tensors):
                continue  # for the score alone
            values[to] = self._value(expression, values, tensors)
        return values[name] if last >= 0 else None

    def _wider(self, *operands):
        """All of the widest one's type."""
        rank = [_TYPES.index(each.dtype) if each.dtype in _TYPES else 2 for each in operands]
        dtype = (*_TYPES, self._dtype)[max(rank)]
        return [each.to(dtype) for each in operands]

    def _value(self, node, values, tensors):
        of = functools.partial(self._value, values=values, tensors=tensors)
        if isinstance(node, ast.Constant):
            dtype = self._dtype if isinstance(node.value, float) else None
            return torch.tensor(node.value, dtype=dtype)
        if isinstance(node, ast.Name):
            return torch.tensor(float(node.id), dtype=self._dtype) if node.id in ("inf", "nan") else values[node.id]
        if isinstance(node, ast.Subscript):
            return self._element(tensors[node.value.id], node.slice, of)
        if isinstance(node, ast.BoolOp):
            combine = torch.logical_and if isinstance(node.op, ast.And) else torch.logical_or
            return functools.reduce(combine, map(of, node.values))
        if isinstance(node, ast.Compare):
            sides = [*map(of, (node.left, *node.comparators))]
            pairs = zip(node.ops, sides, sides[1:])
            return functools.reduce(torch.logical_and, (_INFIX[type(op)](*self._wider(a, b)) for op, a, b in pairs))
        if isinstance(node, ast.UnaryOp):
            x = of(node.operand)
            if isinstance(node.op, ast.Not):
                return torch.logical_not(x)
            return ~x if isinstance(node.op, ast.Invert) else -self._number(x)
        if isinstance(node, ast.BinOp):
            return self._infix(type(node.op), of(node.left), of(node.right))
        return self._call(node.func.id, [*map(of, node.args)])

    def _number(self, x):
        return x.to(torch.int64) if x.dtype == torch.bool else x

    def _infix(self, op, a, b):
        if op in (ast.Div, ast.Pow):
            return _INFIX[op](a.to(self._dtype), b.to(self._dtype))
        if op in (ast.BitAnd, ast.BitOr, ast.BitXor):
            return _INFIX[op](*self._wider(a, b))
        return _INFIX[op](*self._wider(self._number(a), self._number(b)))

    def _element(self, tensor, index, of):
        indices = index.elts if isinstance(index, ast.Tuple) else [index]
        if tensor.is_floating_point():
            tensor = tensor.to(self._dtype)
        if not indices:
            return tensor.reshape(())
        places = (of(each).to(torch.int64) for each in indices)  # those of hidden pairs may lie anywhere
        return tensor[tuple(each.clamp(0, max(size - 1, 0)) for each, size in zip(places, tensor.shape))]

    def _call(self, word, operands):
        if word == "float":
            return operands[0].to(self._dtype)
        if word == "int":
            return operands[0].nan_to_num(0.0).to(torch.int64) if operands[0].is_floating_point() else operands[0].long()
        if word in _OF_FLOATS:
            return _OF_FLOATS[word](*(each.to(self._dtype) for each in operands))
        if word == "where":
            return torch.where(operands[0].to(torch.bool), *self._wider(*operands[1:]))
        return _OTHERS[word](*self._wider(*map(self._number, operands)))


def _reads_score(expression, values, tensors):
    """Whether it reads the score, or a value that was left out because it does."""
    names = {node.id for node in ast.walk(expression) if isinstance(node, ast.Name)}
    functions = {node.func.id for node in ast.walk(expression) if isinstance(node, ast.Call)}
    return bool(names - functions - set(values) - set(tensors) - {"inf", "nan"})
