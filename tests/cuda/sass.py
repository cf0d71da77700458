"""SASS, as nvdisasm writes it: a kernel's instructions, and the main loop that its time goes to."""

import collections
import re

PRODUCTS = ("HGMMA", "HMMA", "FFMA")  # of tensor cores, if there are any in a loop; else of the others
WORK = ("MUFU.EX2", "LDGSTS")  # exponentials, and what the next rounds read: how opcodes begin
FEWEST_PRODUCTS = 8  # of a main loop's round
_LINE = re.compile(r"\s*/\*[0-9a-f]+\*/\s+(@!?\w+\s+)?([A-Z0-9_.]+)(.*)")
_LABEL = re.compile(r"(\.L_x_\d+):$")
_BRANCHES = ("BRA", "BRX", "BRXU", "JMP", "CALL")  # a call within a kernel is a branch to whence nobody returns
_ENDS = ("EXIT", "RET")

# "FFMA.FTZ"; of a branch the labels that it may go to; whether it may go on behind it, too; of main_loop's, the innermost
# loop within that it belongs to, or None.
Instruction = collections.namedtuple("Instruction", "opcode targets goes_on loop", defaults=[None])


def _instruction(guard, opcode, rest):
    name = name_of(opcode)
    targets = tuple(re.findall(r"\.L_x_\d+", rest)) if name in _BRANCHES else ()
    if {"DIV", "CONV"} & set(opcode.split(".")):
        return Instruction(opcode, (), True)  # for lanes that have gone different ways: not taken where none have
    if targets:
        asks = guard or re.match(r"\s*!?U?P\d", rest)
        return Instruction(opcode, targets, bool(asks))
    return Instruction(opcode, (), bool(guard) or name not in _ENDS)


def kernels_of(text):
    """{mangled name: (instructions, {label: index of an instruction})} of nvdisasm -c."""
    found, code, labels = {}, None, None
    for line in text.splitlines():
        if section := re.match(r"\.text\.(\w+):", line.strip()):
            code, labels = found.setdefault(section.group(1), ([], {}))
        elif label := _LABEL.match(line.strip()):
            if code is not None:
                labels[label.group(1)] = len(code)
        elif (word := _LINE.match(line)) and code is not None:
            code.append(_instruction(*word.groups()))
    return found


def name_of(opcode):
    return opcode.partition(".")[0]


def count(code):
    return collections.Counter(name_of(each.opcode) for each in code)


class _Graph:
    """Of the instructions that can be reached. A block is the index of its first one."""

    def __init__(self, code, labels):
        self.code = code
        begins = sorted({0, *labels.values(), *(at + 1 for at, each in enumerate(code) if each.targets or not each.goes_on)})
        begins = [at for at in begins if at < len(code)]
        self.end = dict(zip(begins, [*begins[1:], len(code)]))
        self.next = {}
        for first, end in self.end.items():
            last = code[end - 1]
            following = [labels[label] for label in last.targets if label in labels] + [end] * last.goes_on
            self.next[first] = [at for at in following if at < len(code)]
        self.order = {at: number for number, at in enumerate(self._in_order())}  # a block behind all that lead to it, but in loops
        self.before = {at: [] for at in self.order}
        for at in self.order:
            for then in self.next[at]:
                self.before[then].append(at)

    def _in_order(self):
        seen, done, stack = {0}, [], [(0, iter(self.next[0]))]
        while stack:
            at, following = stack[-1]
            then = next((other for other in following if other not in seen), None)
            if then is None:
                done.append(at)
                stack.pop()
            else:
                seen.add(then)
                stack.append((then, iter(self.next[then])))
        return done[::-1]

    def loops(self):
        """{first block: blocks}: those from which a branch leads back to it, and those between."""
        found = {}
        for at in self.order:
            for head in self.next[at]:
                if self.order[head] > self.order[at]:
                    continue
                body, left = found.setdefault(head, {head}), [at]
                while left:
                    block = left.pop()
                    if block not in body and self.order[block] > self.order[head]:
                        body.add(block)
                        left += self.before[block]
        return found

    def way(self, head, body, product):
        """A round of a loop, as instructions: of its ways that with the most products and work, of these the shortest."""
        worth, best = {}, {head: (0, 0, 0, None)}  # until a block begins: products, other work, -instructions, the one before
        for at in body:
            names = [each.opcode for each in self.code[at : self.end[at]]]
            worth[at] = sum(name_of(name) == product for name in names), sum(name.startswith(WORK) for name in names), -len(names)
        ends = []
        for at in sorted(body, key=self.order.get):
            if at not in best:
                continue
            reached = tuple(map(sum, zip(best[at], worth[at])))
            if head in self.next[at]:
                ends.append((*reached, at))
            for then in self.next[at]:
                if then in body and self.order[then] > self.order[at] and (then not in best or reached > best[then][:3]):
                    best[then] = (*reached, at)
        at, blocks = max(ends)[3] if ends else None, []
        while at is not None:
            blocks.append(at)
            at = best[at][3]
        inner = self._innermost(head, body)
        return [each._replace(loop=inner.get(block)) for block in reversed(blocks) for each in self.code[block : self.end[block]]]

    def _innermost(self, head, body):
        """{block: the first block of the smallest loop around it, within this one}"""
        within = [(other, blocks) for other, blocks in self.loops().items() if other != head and blocks <= body]
        return {block: other for other, blocks in sorted(within, key=lambda each: -len(each[1])) for block in blocks}


def main_loop(code, labels, whole=False):
    """One round of the loop that has most of the kernel's products, as instructions; [] if no loop has some.

    Tiles of which all is seen take the shortest way with all products through it; a loop within counts once. Of loops within
    each other that have the same products the innermost; `whole`: the outermost, with what it does besides.
    """
    graph = _Graph(code, labels)
    loops = graph.loops()
    for product in PRODUCTS:
        ways = [(len(body), graph.way(head, body, product)) for head, body in loops.items()]
        ways = [(count(way)[product], blocks if whole else -len(way), way) for blocks, way in ways]
        most = max(ways, key=lambda each: each[:2], default=(0, 0, []))
        if most[0] >= FEWEST_PRODUCTS:
            return most[2]
    return []
