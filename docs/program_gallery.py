"""The directive `program-gallery`: the masks or scores of polyhead.programs, each with its docstring and its picture."""

import base64
import functools
import inspect
import io

import numpy as np
from docutils import nodes
from sphinx.util.docutils import SphinxDirective

from polyhead import programs

SIZE = 64  # queries and keys of a picture
RNG = np.random.default_rng(0)
TOKENS = np.arange(SIZE)
DISTANCE = TOKENS[:, None] - TOKENS


def normal(*dims):
    """A tensor to capture."""
    return RNG.standard_normal(dims)


def smooth(*dims):
    """Likewise, of values that stand beside ones like them."""
    return np.cumsum(normal(*dims), axis=-1) / 4


# What a picture shows instead of the defaults, and what it captures, for batch 0 and head 0.
PICTURES = {
    "sliding_window": {"window": 16},
    "band": {"width": 8},
    "streaming_llm": {"window": 16},
    "prefix_lm": {"prefix": np.array([20])},
    "window_of_head": {"window": np.array([12])},
    "padding": {"lengths": np.array([40])},
    "keep": {"kept": RNG.random((1, SIZE)) < 0.7},
    "longformer": {"window": 16, "dilation": 3},
    "global_tokens": {"is_global": TOKENS % 21 == 5, "width": 5},
    "sparse_strided": {"stride": 8},
    "sparse_fixed": {"block": 16, "summary": 3},
    "chunked": {"chunk": 16},
    "block_causal": {"block": 16},
    "block_diffusion": {"length": 32, "block": 8},
    "documents": {"doc": np.array([[0] * 12 + [1] * 30 + [2] * 22])},
    "shared_prefix": {"branch": np.array([-1] * 20 + [0] * 14 + [1] * 14 + [2] * 16)},
    "big_bird": {"table": RNG.random((1, 8, 8)) < 0.4, "block": 8},
    "flamingo": {"image": TOKENS // 22, "first": np.array([0, 20, 40]), "last": np.array([20, 40, 64])},
    "tree": {"ancestor": (DISTANCE[:, 20:] >= 0) & (RNG.random((SIZE, SIZE - 20)) < 0.3), "past": 20},
    "flash_mask": {"last": np.array([[20] * 10 + [64] * 10 + [44] * 30 + [64] * 14])},
    "natten_1d": {"size": SIZE, "kernel": 13},
    "natten_2d": {"height": 8, "width": 8, "kernel": 3},
    "natten_3d": {"depth": 4, "height": 4, "width": 4, "kernel": 3},
    "morton": {"reach": 1},
    "swin_windows": {"width": 8, "window": 4, "shift": 2},
    "sliding_tiles": {"width": 8, "tile": 2, "reach": 1},
    "axial": {"width": 8},
    "images_or_causal": {"image": np.array([[-1] * 10 + [0] * 20 + [-1] * 8 + [1] * 20 + [-1] * 6])},
    "random": {"part": 0.3},
    "alibi": {"slope": np.array([0.1])},
    "t5": {"table": smooth(1, 32).T},
    "relative": {"table": smooth(1, 2 * SIZE - 1), "longest": SIZE},
    "relative_clipped": {"table": smooth(1, 33)},
    "swin": {"table": smooth(1, 15 * 15).T, "width": 8},
    "deberta": {"content_to_position": normal(1, 1, SIZE, 32), "position_to_content": normal(1, 1, SIZE, 32)},
    "pair_bias": {"bias": smooth(1, 1, SIZE, SIZE)},
    "graphormer": {"distance": abs(DISTANCE[None]) % 7, "table": normal(1, 7)},
    "forgetting": {"log_forget": -np.cumsum(RNG.random((1, 1, SIZE)), -1)},
    "temperature": {"tau": np.array([0.5])},
    "kerple_log": {"r1": np.array([1.0]), "r2": np.array([0.5])},
    "kerple_power": {"r1": np.array([0.2]), "r2": np.array([0.7])},
    "sandwich": {"ratio": np.array([0.3])},
}
# Which change a score by what it is: their pictures begin with scores of all sizes, those of others with 0.
OF_THE_SCORE = {"softcap", "temperature", "log_length", *programs.WEIGHTS}


def picture_of(name):
    """[SIZE, SIZE]: what a query sees, or the score it gets."""
    function = functools.partial(getattr(programs, name), **PICTURES.get(name, {}))
    values = {"b": 0, "h": 0, "q": TOKENS[:, None], "k": TOKENS, "offset": 0}
    values["score"] = normal(SIZE, SIZE) * 40 if name in OF_THE_SCORE else np.zeros((SIZE, SIZE))
    code = getattr(programs, name).__code__
    taken = [word for word in code.co_varnames[: code.co_argcount] if word in values]
    return np.broadcast_to(function(**{word: values[word] for word in taken}), (SIZE, SIZE))


def drawn(name):
    """The picture as a PNG in a data URI: queries downwards, keys to the right."""
    from matplotlib.figure import Figure

    shown = picture_of(name)
    figure = Figure(figsize=(1.6, 1.6), dpi=100)
    axes = figure.add_axes((0.02, 0.02, 0.96, 0.96))
    axes.imshow(shown, cmap="Blues" if shown.dtype == bool else "viridis", interpolation="nearest")
    axes.set_xticks([])
    axes.set_yticks([])
    png = io.BytesIO()
    figure.savefig(png, format="png")
    return "data:image/png;base64," + base64.b64encode(png.getvalue()).decode("ascii")


class ProgramGallery(SphinxDirective):
    """```{program-gallery} MASKS```, ``SCORES`` or ``WEIGHTS``."""

    required_arguments = 1

    def run(self):
        shown = []
        for name in getattr(programs, self.arguments[0]):
            parameters = inspect.signature(getattr(programs, name)).parameters.values()
            call = ", ".join(str(each.replace(annotation=each.empty)) for each in parameters)
            entry = nodes.container(classes=["program"])
            entry += nodes.image(uri=drawn(name), alt=f"picture of {name}", align="right")
            text = "```{eval-rst}\n.. autofunction:: polyhead.programs." + f"{name}({call})\n```\n"
            entry += self.parse_text_to_nodes(text)
            shown.append(entry)
        return shown


def setup(app):
    app.add_directive("program-gallery", ProgramGallery)
    return {"parallel_read_safe": True, "parallel_write_safe": True}
