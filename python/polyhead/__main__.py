"""The `polyhead` command from Python: ``python -m polyhead bench ...``. ``python -m polyhead info`` is Python's own."""

import os
import pathlib
import platform
import sys

from polyhead import _bind, __version__, kernels


def package_version(name):
    """Of an installed package, "" if there is none; nothing is imported."""
    from importlib import metadata

    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def cuda_rows():
    """What CUDA kernels find here: driver and devices, or why there are none to use."""
    machine = _bind.cuda_machine()
    versions = machine["runtime_version"], machine["driver_version"]
    built, driver = (f"{version // 1000}.{version % 1000 // 10}" for version in versions)
    told = [machine["why_not"]] if machine["why_not"] else []
    rows = {"cuda": "; ".join([*told, *([f"built with CUDA {built}, the driver serves {driver}"] if all(versions) else [])])}
    for number, (name, major, minor, memory, why_not) in enumerate(machine["devices"]):
        reason = f"; cannot be used: {why_not}" if why_not else ""
        rows[f"gpu {number}"] = f"{name}, compute capability {major}.{minor}, {memory / 2**30:.1f} GiB{reason}"
    return rows


def info():
    """Lines of "name: value"."""
    build = _bind.build_info()
    rows = {
        "polyhead": __version__,
        "compiler": build["compiler"],
        "cpu": f"{platform.machine()}, {build['cpu'] or 'no instruction set that a kernel of ours uses'}",
        "threads": build["threads"],
        "kernels": " ".join(kernels()),
        **cuda_rows(),
        "python": platform.python_version(),
    }
    for name in ("numpy", "ml_dtypes", "torch", "jax", "onnx", "onnxruntime"):
        rows[name] = package_version(name) or "not installed"
    return "\n".join(f"{name + ':':<13}{value}" for name, value in rows.items())


# Beside this package alone: a `polyhead` on PATH may be the script of this very file, or another build.
COMMAND = pathlib.Path(__file__).parent / "bin" / "polyhead"
MISSING = """\
polyhead: this build of the package is without its command: CLI11, fmt or nlohmann-json was not found when it was built.
With them (Debian: libcli11-dev, libfmt-dev, nlohmann-json3-dev) it is built by
    pip install --force-reinstall --no-deps --no-binary polyhead polyhead
`python -m polyhead info` describes this build."""


def onnxruntime_library():
    """Of the package onnxruntime, which is not imported; None if there is none."""
    from importlib.util import find_spec

    package = find_spec("onnxruntime")
    found = pathlib.Path(package.origin).parent.glob("capi/libonnxruntime.so*") if package and package.origin else ()
    return next(found, None)


def run_command(arguments):
    """Becomes the command; returns an exit code only where there is none."""
    if not COMMAND.exists():
        print(MISSING, file=sys.stderr)
        return 2
    if "--check" in arguments and not any(word.startswith("--onnxruntime") for word in arguments):
        library = onnxruntime_library()
        arguments = [*arguments, *(["--onnxruntime", str(library)] if library else [])]
    os.execv(COMMAND, [str(COMMAND), *arguments])


def script():
    """`polyhead ...` in a shell: the command with these words."""
    sys.exit(run_command(sys.argv[1:]))


def main(arguments):
    if arguments == ["info"]:
        print(info())
        return 0
    return run_command(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
