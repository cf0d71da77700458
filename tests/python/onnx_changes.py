"""Models that are changed by chance: what still fuses of them has to have their numbers."""

OTHERS = {
    "Mul": ("Add", "Div", "Sub"), "Sub": ("Add", "Mul"), "Div": ("Mul", "Add"), "Add": ("Sub", "Mul"), "Sum": ("Mul",), "Neg": ("Identity",),
    "And": ("Or",), "LessOrEqual": ("Less", "GreaterOrEqual"),
}  # fmt: skip


def change_node(model, rng):
    """One that does something else, or reads what was computed earlier."""
    nodes = [node for node in model.graph.node if node.op_type != "Constant"]
    node, other = rng.choice(len(nodes), 2, replace=False)
    if nodes[node].op_type in OTHERS and rng.random() < 0.5:
        nodes[node].op_type = rng.choice(OTHERS[nodes[node].op_type])
    else:
        nodes[max(node, other)].input[rng.integers(len(nodes[max(node, other)].input))] = nodes[min(node, other)].output[0]


def change_dim(model, rng):
    """A dim of an input that gets a name of its own: the input, and the dim's place. It may be 1 then."""
    value = model.graph.input[rng.integers(len(model.graph.input))]
    place = int(rng.integers(len(value.type.tensor_type.shape.dim)))
    dim = value.type.tensor_type.shape.dim[place]
    dim.Clear()
    dim.dim_param = f"{value.name}_{place}"
    return value.name, place
