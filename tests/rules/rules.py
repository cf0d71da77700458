"""The house rules that a program can check. `python3 rules.py RULE [arguments]`; a rule that is broken names file and line.

ctest runs each rule as rules.RULE; rules_test.py shows that each of them can fail.
"""

import ast
import pathlib
import re
import shutil
import subprocess
import sys

ROOT = pathlib.Path(__file__).resolve().parents[2]
CPP = (".h", ".cc", ".c", ".cu", ".cuh")
SOURCES = CPP + (".py", ".pyi", ".cmake", ".txt", ".toml", ".in")
MAX_FILE_LINES = 499
MAX_FUNCTION_LINES = 79
SKIPPED = 77  # tests/rules/CMakeLists.txt: SKIP_RETURN_CODE

# What files of a folder may include, besides the standard library: prefixes, or whole names. ARCHITECTURE.md draws it.
# include/polyhead is the public interface; core must not know its attention half.
MAY_INCLUDE = {
    "include/polyhead/": ("polyhead/",),
    "src/core/": ("core/", "polyhead/api.h", "polyhead/status.h", "polyhead/tensor.h", "polyhead/executor.h",
                  "polyhead/dropout.h", "polyhead/kernels.h", "polyhead/cuda.h"),
    "src/contract/": ("core/", "contract/", "program/", "polyhead/"),
    "src/program/": ("core/", "program/", "polyhead/"),
    "src/reference/": ("core/", "contract/", "reference/", "polyhead/"),
    "src/cpu/isa/": ("core/", "cpu/isa/", "polyhead/"),
    "src/cpu/attention/": ("core/", "contract/", "program/", "cpu/isa/", "cpu/attention/", "polyhead/"),
    "src/cpu/linear/": ("core/", "contract/", "cpu/isa/", "cpu/linear/", "polyhead/"),
    "src/cuda/": ("core/", "contract/", "program/", "cuda/", "polyhead/"),
    "src/attention/kernel_list.cc": ("core/", "contract/", "attention/", "reference/", "cpu/", "cuda/", "polyhead/"),
    "src/attention/": ("core/", "contract/", "attention/", "polyhead/"),
    "src/linear/kernel_list.cc": ("core/", "contract/", "linear/", "reference/", "cpu/", "cuda/", "polyhead/"),
    "src/linear/": ("core/", "contract/", "linear/", "polyhead/"),
    "src/weights/": ("core/", "weights/", "polyhead/"),
    "src/layer/": ("core/", "contract/", "attention/", "linear/", "cache/", "layer/", "polyhead/"),
    "src/cache/": ("cache/", "core/", "contract/", "polyhead/"),
    "src/graph/": ("core/", "graph/", "polyhead/"),
    # A library of its own on the public interface; what it needs of core are headers alone.
    "src/onnxruntime/": ("onnxruntime/", "core/dtype.h", "core/rotary.h", "core/sentence.h", "polyhead/"),
    "src/capi/": ("capi/", "core/", "polyhead/"),
    # The testing library knows no command, and no kernel but the yardstick of error.
    "testing/": ("testing/", "core/", "attention/words.h", "contract/kernel.h", "reference/attention.h",
                 "reference/program.h", "polyhead/"),
    # An example shows what anybody can write; the file formats are the command's. `bench` needs the machine's peak.
    "examples/": ("polyhead/", "tools/", "testing/random.h", "CLI/", "fmt/"),
    "tools/": ("tools/", "testing/", "core/", "attention/words.h", "layer/words.h", "contract/sequences.h", "cpu/attention/kernels.h",
               "onnxruntime/abi.h", "onnxruntime/api.h", "polyhead/", "CLI/", "fmt/", "nlohmann/"),
    "python/src/": ("polyhead/", "nanobind/", "numpy/"),
}
INTRINSICS = re.compile(r"#\s*(el)?if.*__(AVX|FMA|F16C|SSE|ARM_)|<(\w*intrin|arm_\w+)\.h>|\b_mm\d*_\w+|"
                        r"\b__m(128|256|512)|\bv\w+_[fpsu](8|16|32|64)\b|\b(float|u?int)\d+x\d+(x\d)?_t\b")
PRINTS = re.compile(r"\b(printf|fprintf|vfprintf|dprintf|puts|fputs|fwrite|perror)\s*\(|std::(cout|cerr|clog)\b")
GENERATED_ENDINGS = (".o", ".a", ".so", ".pyc", ".whl", ".egg-info", ".ninja", ".gcda", ".gcno")


def tracked(root=ROOT):
    """Paths, relative to root, of the files that are or could be committed."""
    listing = subprocess.run(["git", "-C", root, "ls-files", "--cached", "--others", "--exclude-standard"],
                             capture_output=True, text=True, check=True).stdout
    return [path for path in listing.splitlines() if (root / path).is_file()]


def read(root, path):
    return (root / path).read_text(encoding="utf-8", errors="surrogateescape")


def include_direction(root=ROOT):
    """A layer includes only what stands below it; kernel_list.cc alone names the backends."""
    for path in tracked(root):
        allowed = next((names for prefix, names in MAY_INCLUDE.items() if path.startswith(prefix)), None)
        if allowed is None or not path.endswith(CPP):
            continue
        beside = pathlib.PurePosixPath(path).parent
        for number, line in enumerate(read(root, path).splitlines(), 1):
            found = re.match(r'\s*#\s*include\s*(?:"([^"]+)"|<([^>]+/[^>]+)>)', line)
            name = found and (found[1] or found[2])
            own = name and "/" not in name and (root / beside / name).is_file()
            if name and not own and not name.startswith(allowed + ("sys/", "linux/")):
                yield f"{path}:{number}: must not include {name}"


def without_comments(text):
    """C++ text with comments and the contents of literals blanked; lines stay where they are."""
    def blank(match):
        token = match[0]
        if token.startswith(("/", "R")):
            return re.sub(r"[^\n]", " ", token)
        return token[0] + " " * (len(token) - 2) + token[-1]
    pattern = r'//[^\n]*|/\*.*?\*/|\bR"(\w*)\(.*?\)\1"|"(?:\\.|[^"\\\n])*"|(?<!\w)\'(?:\\.|[^\'\\\n])+\''
    return re.sub(pattern, blank, text, flags=re.S)


NO_FUNCTION = re.compile(r"^\s*(inline\s+)?(namespace|class|struct|union|enum|extern\b)|=\s*$|^\s*$")


def cpp_functions(text):
    """(first line, lines of code) of every outermost function body. A heuristic: a brace after a header with `(...)`."""
    text = re.sub(r"(?m)^[ \t]*#(?:[^\n]*\\\n)*[^\n]*", lambda m: re.sub(r"[^\n]", " ", m[0]), without_comments(text))
    lines = text.split("\n")
    header, depth, parens, start, start_depth = "", 0, 0, None, 0
    number = 1
    for character in text:
        if character == "\n":
            number += 1
        parens += (character == "(") - (character == ")")
        if character == "{":
            is_function = "(" in header and not NO_FUNCTION.search(re.sub(r"template\s*<[^{;]*?>\s*(?=\w)", "", header))
            if start is None and is_function and parens == 0:
                start, start_depth = number - header.strip().count("\n"), depth
            depth += 1
            header = ""
        elif character == "}":
            depth -= 1
            if start is not None and depth == start_depth:
                yield start, sum(1 for line in lines[start - 1:number] if line.strip())
                start = None
            header = ""
        elif character == ";" and parens == 0:
            header = ""
        else:
            header += character


def python_functions(text):
    for node in ast.walk(ast.parse(text)):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef)):
            first = node.body[0]
            is_docstring = isinstance(first, ast.Expr) and isinstance(first.value, ast.Constant)
            length = node.end_lineno - node.lineno + 1
            yield node.lineno, length - (first.end_lineno - first.lineno + 1 if is_docstring else 0)


def length(root=ROOT):
    """Files below 500 lines, functions below 80."""
    for path in tracked(root):
        if not path.endswith(SOURCES) and path != "dev":
            continue
        text = read(root, path)
        count = text.count("\n")
        if count > MAX_FILE_LINES:
            yield f"{path}: {count} lines, at most {MAX_FILE_LINES}"
        functions = cpp_functions(text) if path.endswith(CPP) else python_functions(text) if path.endswith(".py") else ()
        for first, lines in functions:
            if lines > MAX_FUNCTION_LINES:
                yield f"{path}:{first}: function of {lines} lines, at most {MAX_FUNCTION_LINES}"


def ascii_sources(root=ROOT):
    """Sources are ASCII."""
    for path in tracked(root):
        if path.endswith(SOURCES) or path == "dev":
            for number, line in enumerate(read(root, path).splitlines(), 1):
                if not line.isascii():
                    yield f"{path}:{number}: not ASCII"


def intrinsics(root=ROOT):
    """Instruction sets are named in src/cpu/isa/simd*.h alone."""
    for path in tracked(root):
        if path.endswith(CPP) and path.startswith("src/") and not path.startswith("src/cpu/isa/simd"):
            for number, line in enumerate(without_comments(read(root, path)).splitlines(), 1):
                if INTRINSICS.search(line):
                    yield f"{path}:{number}: intrinsics belong in src/cpu/isa/simd*.h"


def prints(root=ROOT):
    """The library prints at one place."""
    for path in tracked(root):
        if path.endswith(CPP) and path.startswith(("src/", "include/")) and path != "src/core/verbose.cc":
            for number, line in enumerate(without_comments(read(root, path)).splitlines(), 1):
                if PRINTS.search(line):
                    yield f"{path}:{number}: prints: src/core/verbose.cc alone does"


def no_generated(root=ROOT):
    """Nothing generated is committed (bench/results is measured data)."""
    mark = re.compile("DO NOT " + "EDIT|@" + "generated")
    for path in tracked(root):
        if path.endswith(GENERATED_ENDINGS):
            yield f"{path}: generated"
        elif path.endswith(SOURCES) and mark.search(read(root, path)):
            yield f"{path}: says that it is generated"


def todo(root=ROOT):
    """What is left to do has an issue's number: TO""DO(#12)."""
    for path in tracked(root):
        if path.endswith(SOURCES) or path == "dev":
            for number, line in enumerate(read(root, path).splitlines(), 1):
                if re.search(r"\b(TO" r"DO|FIX" r"ME|X" r"XX)\b(?!\(#\d+\))", line):
                    yield f"{path}:{number}: no issue number"


def clang_format(root=ROOT):
    """clang-format 14 has nothing to change."""
    candidates = [root / ".venv/bin/clang-format", "clang-format-14", "clang-format"]
    program = next((found for found in map(shutil.which, map(str, candidates)) if found and " 14." in subprocess.run(
        [found, "--version"], capture_output=True, text=True, check=True).stdout), None)
    if program is None:
        print("clang-format 14 is not here (./dev setup brings it)")
        sys.exit(SKIPPED)
    files = [path for path in tracked(root) if path.endswith(CPP)]
    done = subprocess.run([program, "--dry-run", *files], cwd=root, capture_output=True, text=True, check=False)
    for path in sorted(set(re.findall(r"^(\S+?):\d+:\d+: ", done.stderr, flags=re.M))):
        yield f"{path}: ./dev format would change it"


def isa_symbols(isa, nm, *objects):
    """An ISA's objects define nothing that another object could run instead of its own: all is in namespace `isa`."""
    for path in objects:
        listing = subprocess.run([nm, "-C", "--defined-only", path], capture_output=True, text=True, check=True).stdout
        for line in listing.splitlines():
            _, kind, name = line.split(maxsplit=2)
            if (kind.isupper() or kind in "uvw") and kind != "N" and f"::{isa}::" not in name:
                yield f"{pathlib.Path(path).name}: {kind} {name} is outside namespace {isa}"


RULES = {rule.__name__: rule for rule in (include_direction, length, ascii_sources, intrinsics, prints, no_generated, todo,
                                          clang_format, isa_symbols)}


def main():
    if len(sys.argv) < 2 or sys.argv[1] not in RULES:
        sys.exit(f"usage: rules.py {'|'.join(RULES)} [arguments]")
    broken = list(RULES[sys.argv[1]](*sys.argv[2:]))
    print(*broken, sep="\n")
    sys.exit(bool(broken))


if __name__ == "__main__":
    main()
