"""``python -m polyhead info`` describes this build and machine; other words go to the `polyhead` command."""

import os
import pathlib
import platform
import shutil
import sys

from polyhead import _bind, __version__, kernels


def package_version(name):
    """Of an installed package, "" if there is none; nothing is imported."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def info():
    """Lines of "name: value"."""
    build = _bind.build_info()
    rows = {
        "polyhead": __version__,
        "compiler": build["compiler"],
        "cpu": f"{platform.machine()}, {build['cpu'] or 'no instruction set that a kernel of ours uses'}",
        "threads": build["threads"],
        "kernels": " ".join(kernels()),
        "python": platform.python_version(),
    }
    for name in ("numpy", "ml_dtypes", "torch", "jax", "onnx", "onnxruntime"):
        rows[name] = package_version(name) or "not installed"
    return "\n".join(f"{name + ':':<13}{value}" for name, value in rows.items())


def find_command():
    """The `polyhead` command: beside this package, else on PATH; None if there is none."""
    beside = pathlib.Path(__file__).parent / "bin" / "polyhead"
    return str(beside) if beside.exists() else shutil.which("polyhead")


def main(arguments):
    if arguments == ["info"]:
        print(info())
        return 0
    command = find_command()
    if command is not None:
        os.execv(command, [command, *arguments])
    print("usage: python -m polyhead info", file=sys.stderr)
    if arguments:
        print("The polyhead command, which has the rest (bench, verify, run, ...), is not on PATH.", file=sys.stderr)
    return 2


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
