"""What runs where, asked of the installed package: each option of attention by kernel, dtype and direction.

`python docs/support_table.py` prints it as JSON. As an extension of Sphinx it is the directive `support-table` of
support.md, and support.json beside the pages.

A cell is what `polyhead.explain` gives for a small problem with that option; where it says "can", the problem is
computed as well, so a table that is not true cannot be made.
"""

import inspect
import itertools
import json
import pathlib
import sys

import numpy as np
from ml_dtypes import bfloat16

import polyhead
from polyhead import _bind

DTYPES = {"float32": np.float32, "bfloat16": bfloat16, "float16": np.float16, "float64": np.float64}
B, S, H, D = 2, 24, 4, 8  # sequences, queries and keys of each, heads, head_dim
CU_SEQLENS = np.array([0, 4, S], np.int32)
SCALES = np.ones((B, S, H, 1), np.float32)
# What is asked of each problem besides its shapes: the option's name, its arguments.
OPTIONS = {
    "none": {},
    "attn_mask": {"attn_mask": np.tri(S, dtype=bool)},
    "mask_at_end": {"attn_mask": np.tri(S, 3, 3 - S, dtype=bool), "mask_at_end": True},
    "attn_bias": {"attn_bias": np.zeros((H, S, S), np.float32)},
    "causal": {"causal": True},
    "window": {"window": (2, 1)},
    "sink_keys": {"window": (1, -1), "sink_keys": 2},
    "align": {"causal": True, "align": "bottom_right"},
    "query_offset": {"causal": True, "query_offset": 1},
    "query_offset per sequence": {"causal": True, "query_offset": np.array([0, 2])},
    "scale": {"scale": 1.0},
    "softcap": {"softcap": 20.0},
    "alibi_slopes": {"alibi_slopes": np.ones(H, np.float32)},
    "sink_logits": {"sink_logits": np.zeros(H)},
    'normalizer="none"': {"normalizer": "none"},
    "score, mask": {"score": "score - slope[h] * abs(q - k)", "mask": "k <= q + 2", "captured": {"slope": np.ones(H)}},
    "dropout_p": {"dropout_p": 0.5, "dropout_seed": 1, "dropout_offset": 2},
    "dropout_origin": {"dropout_p": 0.5, "dropout_seed": 1, "dropout_origin": polyhead.DropoutOrigin(first_head=4)},
    "seqlens_q, seqlens_k": {"seqlens_q": np.array([3, S]), "seqlens_k": np.array([4, S])},
    "cu_seqlens_q, cu_seqlens_k": {"cu_seqlens_q": CU_SEQLENS, "cu_seqlens_k": CU_SEQLENS},
    "page_table": {"page_table": np.array([[1], [0]]), "seqlens_k": np.array([4, S])},
    "key_scales, value_scales": {"key_scales": SCALES, "value_scales": SCALES},
    "return_logsumexp": {"return_logsumexp": True},
    "return_weights": {"return_weights": True},
    'return_weights="mean"': {"return_weights": "mean"},
    "return_column_sums": {"return_column_sums": True},
    "out_dtype=float32": {"out_dtype": "float32"},
}
# Which differ by their shapes: the option's name, key's and value's heads and value's head_dim.
SHAPES = {"fewer key/value heads": (2, D), "another head_dim of value": (H, 2 * D)}
NO_GRADIENT = "it has no gradient"  # of what is returned beside out: attention_backward takes nothing for it


def operands(option, dtype):
    """Query, key and value of the problem, and its keyword arguments."""
    heads_kv, dim_v = SHAPES.get(option, (H, D))
    rng = np.random.default_rng(0)
    batch = () if "cu_seqlens" in option else (B,)
    shapes = ((S, H, D), (S, heads_kv, D), (S, heads_kv, dim_v))
    arrays = [rng.standard_normal(batch + shape).astype(DTYPES[dtype]) for shape in shapes]
    options = dict(OPTIONS.get(option, {}))
    if "key_scales" in options:
        arrays[1:] = (x.astype(np.int8) for x in arrays[1:])
    if "sink_logits" in options and dtype != "float64":
        options["sink_logits"] = options["sink_logits"].astype(np.float32)
    return arrays, options


def backward_refusal(arrays, options, kernel):
    """Why there are no gradients, "" if there are: found out by asking for them."""
    if {"return_weights", "return_column_sums"} & options.keys():
        return NO_GRADIENT
    if "page_table" in options:
        return "paged keys have no gradients"
    if "key_scales" in options:
        return "keys and values with scales have no gradients"
    out = logsumexp = None
    if "normalizer" not in options:
        out, logsumexp = polyhead.attention(*arrays, **options | {"return_logsumexp": True}, kernel=kernel)
    takes = inspect.signature(polyhead.attention_backward).parameters
    given = {name: value for name, value in options.items() if name in takes}
    needs = ["query", "key", "value", *(name for name in ("attn_bias", "alibi_slopes", "sink_logits") if name in options), *options.get("captured", ())]
    if "return_logsumexp" in options:
        given["grad_logsumexp"] = np.ones_like(logsumexp)
    grad_out = np.zeros_like(polyhead.attention(*arrays)) if out is None else out
    polyhead.attention_backward(grad_out, *arrays, out, logsumexp, **given, kernel=kernel, needs=needs)
    return ""


def row(option, dtype):
    """{kernel: (why not forward, why not backward)}; "" where it can."""
    arrays, options = operands(option, dtype)
    try:
        reasons = polyhead.explain(*arrays, **options).reasons
    except polyhead.Error as error:
        return dict.fromkeys(polyhead.explain(*operands("none", dtype)[0]).reasons, (str(error), str(error)))
    cells = {}
    for kernel, reason in reasons.items():
        if not reason:
            polyhead.attention(*arrays, **options, kernel=kernel)
        cells[kernel] = (reason, reason or backward_refusal(arrays, options, kernel))
    return cells


def refused_pairs():
    """[first option, second, the sentence] for options that are refused together, though each alone is not."""
    found = []
    for first, second in itertools.combinations(OPTIONS, 2):
        if OPTIONS[first].keys() & OPTIONS[second].keys() - {"causal", "dropout_p", "dropout_seed"}:
            continue  # two values of one option
        arrays, _ = operands(f"{first} {second}", "float16")
        try:
            polyhead.explain(*arrays, **OPTIONS[first] | OPTIONS[second])
        except polyhead.Error as error:
            found.append((first, second, str(error)))
    return found


def table():
    """All of it, as JSON has it."""
    cells = [
        {"option": option, "dtype": dtype, "kernel": kernel, "forward": forward, "backward": backward}
        for option in (*OPTIONS, *SHAPES)
        for dtype in DTYPES
        for kernel, (forward, backward) in row(option, dtype).items()
    ]
    return {
        "polyhead": polyhead.__version__,
        "cpu": _bind.build_info()["cpu"],
        "usable_kernels": polyhead.kernels(),
        "cells": cells,
        "refused_together": [{"options": [a, b], "reason": reason} for a, b, reason in refused_pairs()],
    }


# --- as Markdown ---


def markdown(header, rows):
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines) + "\n"


def verdict(cell):
    if cell["forward"]:
        return "no"
    return "forward" if cell["backward"] else "forward, gradients"


def kernels_table(found):
    plain = [cell for cell in found["cells"] if cell["option"] == "none"]
    kernels = dict.fromkeys(cell["kernel"] for cell in plain)  # best first
    by_place = {(cell["kernel"], cell["dtype"]): cell for cell in plain}
    rows, why = [], {}
    for kernel in kernels:
        rows.append([f"`{kernel}`", *(verdict(by_place[kernel, dtype]) for dtype in DTYPES)])
        for dtype in DTYPES:
            if reason := by_place[kernel, dtype]["forward"]:
                why.setdefault(reason, []).append(f"`{kernel}`")
    lines = [f"- {', '.join(dict.fromkeys(names))}: {reason}." for reason, names in why.items()]
    asked = f"Asked of polyhead {found['polyhead']} on a CPU with {found['cpu'] or 'none of these instruction sets'}."
    return "\n".join((markdown(["kernel", *DTYPES], rows), asked, "", *lines))


def options_table(found):
    """Kernels that do not take a dtype at all are told by kernels_table, and left out here."""
    plain = {(c["kernel"], c["dtype"]) for c in found["cells"] if c["option"] == "none" and not c["forward"]}
    rows = []
    for option in (*OPTIONS, *SHAPES):
        cells = [c for c in found["cells"] if c["option"] == option and (c["kernel"], c["dtype"]) in plain]
        name = option if option in SHAPES or option == "none" else f"`{option}`"
        rows.append([name, summed(cells, "forward"), summed(cells, "backward")])
    return markdown(["option", "forward", "gradients"], rows)


def summed(cells, way):
    """One cell out of those of all kernels and dtypes."""
    refused = {}
    for cell in cells:
        if cell[way]:
            refused.setdefault(cell[way], []).append(cell)
    if not refused:
        return "all kernels, all dtypes"
    if any(len(each) == len(cells) for each in refused.values()):
        return f"no: {next(iter(refused))}"
    return "; ".join(
        f"not {', '.join(dict.fromkeys(c['dtype'] for c in each))}: {reason}" for reason, each in refused.items()
    )


def pairs_table(found):
    rows = [[*(f"`{option}`" for option in pair["options"]), pair["reason"]] for pair in found["refused_together"]]
    return markdown(["option", "together with", "what polyhead says"], rows)


PARTS = {"kernels": kernels_table, "options": options_table, "pairs": pairs_table}


def setup(app):
    from sphinx.util.docutils import SphinxDirective

    found = table()

    class SupportTable(SphinxDirective):
        """```{support-table} kernels``` puts one of PARTS there."""

        required_arguments = 1

        def run(self):
            return self.parse_text_to_nodes(PARTS[self.arguments[0]](found))

    def write_json(app, failure):
        if failure is None:
            pathlib.Path(app.outdir, "support.json").write_text(json.dumps(found, indent=1) + "\n", encoding="ascii")

    app.add_directive("support-table", SupportTable)
    app.connect("build-finished", write_json)
    return {"parallel_read_safe": True, "parallel_write_safe": True}


if __name__ == "__main__":
    json.dump(table(), sys.stdout, indent=1)
