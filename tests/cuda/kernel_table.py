"""What ptxas makes of the CUDA kernels, by kernel and architecture: kernels_*.txt beside this file.

    kernel_table.py OBJECT...           compares: is the table that of these objects' PTX, do products and norms, and
                                        attention without options but for float16's, spill nothing, and does ptxas say the same of some
    kernel_table.py --write OBJECT...   computes it; a minute of one core. Wants nvdisasm (PyPI: nvidia-cuda-nvdisasm)

OBJECTs are those that nvcc made for the tests, with readable PTX. Exits with 77 where nothing can be compared.
"""

import argparse
import hashlib
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile

import sass

TABLES = {family: pathlib.Path(__file__).with_name(f"kernels_{family}.txt") for family in ("forward", "backward", "linear")}
# What ptxas is asked of each time.
COMPARED = (("forward<BFloat16, 128, 0>", "80"), ("gemm<BFloat16, 128, 128, 1, 0>", "80"), ("forward_groups<BFloat16, 128, 0>", "90a"),
            ("backward_groups<BFloat16, 128, 1, 0>", "90a"))
OPCODES = ("HGMMA", "HMMA", "LDSM", "LDGSTS", "LDS", "FFMA", "MUFU", "LDL")
COLUMNS = ("arch", "registers", "spilled", "shared", "blocks", "loop", *OPCODES)

# Of a multiprocessor: bytes of shared memory, those that one block may have, blocks, threads. CUDA C++ Programming
# Guide, "Technical Specifications per Compute Capability".
LIMITS = {
    "80": (164 << 10, 163 << 10, 32, 2048),
    "89": (100 << 10, 99 << 10, 24, 1536),
    "90": (228 << 10, 227 << 10, 32, 2048),
    "90a": (228 << 10, 227 << 10, 32, 2048),
    "100": (228 << 10, 227 << 10, 32, 2048),
}


def architectures(name):
    """Those that an object's kernels are compiled for."""
    return ("90a",) if name.endswith("_sm90") else tuple(arch for arch in LIMITS if arch != "90a")


def ptx_of(object_file):
    text = re.search(rb"\.version [^\0]*", object_file.read_bytes())
    if text is None:
        sys.exit(f"{object_file} holds no PTX that can be read")
    return text.group().decode()


def name_of(mangled):
    """_ZN8polyhead4cuda...14forward_kernelINS0_8BFloat16ELi64ELb1EEEv... -> forward<BFloat16, 64, 1>"""
    name, arguments = re.search(r"\d([a-z_]+)_kernel(I?\S*)", mangled).groups()
    arguments = arguments.split("EEv")[0] if arguments.startswith("I") else ""
    told = re.findall(r"\d(B?Float\d\d)E|L[ib](\d+)E", arguments + "E")
    return f"{name}<{', '.join(a or b for a, b in told)}>"


def fingerprint(ptx):
    """Of the instructions alone: not of lines, comments and names that tell where the source lay."""
    code = ptx.split("\n.section")[0]
    code = re.sub(r"_GLOBAL__N__\w+?_sm[89]0_cu_[0-9a-f]{8}", "", code)
    lines = (line.strip() for line in code.splitlines())
    kept = "\n".join(line for line in lines if line and not line.startswith((".loc", ".file", "//")))
    return hashlib.sha256(kept.encode()).hexdigest()[:16]


def told_shared(ptx):
    """Bytes of the launch's own shared memory, of each kernel that has some."""
    kernels = re.split(r"\.entry (\w+)", ptx)
    found = {}
    for mangled, body in zip(kernels[1::2], kernels[2::2]):
        bytes_told = re.search(r"dynamic_shared_bytes, (\d+);", body)
        found[mangled] = int(bytes_told.group(1)) if bytes_told else 0
    return found


def told_threads(ptx):
    """Threads of a block of each kernel."""
    return {mangled: int(threads) for mangled, threads in re.findall(r"\.entry (\w+)\([^{]*?\.maxntid (\d+)", ptx)}


def resident_blocks(arch, registers, shared, threads=128):
    """Blocks that a multiprocessor holds at once; 0 if a block is too large for it."""
    all_shared, most_shared, most_blocks, most_threads = LIMITS[arch]
    if shared > most_shared:
        return 0
    of_warp = -(-registers * 32 // 256) * 256
    by_registers = 65536 // of_warp // (threads // 32)
    return min(by_registers, all_shared // (shared + 1024), most_threads // threads, most_blocks)


def run(*command):
    done = subprocess.run([str(part) for part in command], capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed:\n{done.stdout}{done.stderr}")
    return done.stdout + done.stderr


def compiled(ptx, arch, cubin, *options):
    """{mangled: (registers, bytes spilled, bytes of static shared memory)}"""
    source = cubin.with_suffix(".ptx")
    source.write_text(ptx)
    told = {}
    words = run("ptxas", "-v", f"-arch=sm_{arch}", *options, source, "-o", cubin)
    if serialized := re.search(r".*wgmma.*serialized.*", words):  # products that wait for each other
        sys.exit(serialized.group())
    for part in words.split("Function properties for ")[1:]:
        frame, stores, loads = map(int, re.search(r"(\d+) bytes stack.* (\d+) bytes spill st.* (\d+) b", part).groups())
        shared = re.search(r"(\d+) bytes smem", part)
        registers = int(re.search(r"Used (\d+) reg", part).group(1))
        told[part.split()[0]] = (registers, max(frame, stores, loads), int(shared.group(1)) if shared else 0)
    return told


def loop_counts(nvdisasm, cubin):
    """{mangled: instructions of one round of its main loop, and of these each of OPCODES}"""
    counts = {}
    for kernel, (code, labels) in sass.kernels_of(run(nvdisasm, "-c", cubin)).items():
        way = sass.main_loop(code, labels)
        by_name = sass.count(way)
        by_name["LDGSTS"] = sass.count(code)["LDGSTS"]
        counts[kernel] = (len(way), *(by_name[name] for name in OPCODES))
    return counts


def rows_of(ptx, arch, nvdisasm, folder):
    cubin = folder / "kernels.cubin"
    resources, shared, threads = compiled(ptx, arch, cubin), told_shared(ptx), told_threads(ptx)
    counts = loop_counts(nvdisasm, cubin)
    for mangled, (registers, spilled, of_kernel) in resources.items():
        all_shared = shared[mangled] + of_kernel
        blocks = resident_blocks(arch, registers, all_shared, threads[mangled])
        yield name_of(mangled), (arch, registers, spilled, all_shared, blocks, *counts[mangled])


def release():
    return re.search(r"V[\d.]+", run("ptxas", "--version")).group()


def family_of(name):
    """Of an object: the table that its kernels are in."""
    if not name.startswith("attention_"):
        return "linear"
    return "forward" if name.startswith("attention_forward_") else "backward"


def write(family, texts, nvdisasm):
    rows = {}
    with tempfile.TemporaryDirectory() as folder:
        for of_object, ptx in texts.items():
            for arch in architectures(of_object):
                for name, row in rows_of(ptx, arch, nvdisasm, pathlib.Path(folder)):
                    rows.setdefault(name, []).append(row)
    prints = [f"# {name} {fingerprint(ptx)}" for name, ptx in texts.items()]
    lines = [
        "# Written by kernel_table.py: what ptxas makes of the kernels' PTX (compute_80, compute_90a). `spilled`: bytes, of registers",
        "# or the stack; `shared`: bytes of a block; `blocks`: that a multiprocessor holds at once; `loop`: SASS",
        "# instructions of a warp in one round of the main loop, where all is seen (sass.py), of which those beside it;",
        "# LDGSTS, copies in loops of their own: of the kernel's whole code.",
        "# forward<elements, columns, options>, backward<elements, columns, pass, float32 gradients, options>,",
        "# backward_plain<elements, columns, pass over keys>, backward_wide<columns, pass over keys>, gemm<elements, rows,",
        "# columns, terms inside: of A, of B>, few_rows<elements, terms inside of B>, forward_groups<elements, columns, options>,",
        "# backward_groups<elements, columns, pass over keys, options>. 512 columns stand for all above 256.",
        f"# ptxas {release()}",
        *prints,
        f"{'':36}" + "".join(f"{column:>10}" for column in COLUMNS),
    ]
    for name in sorted(rows):
        lines += [f"{name:36}" + "".join(f"{value:>10}" for value in row) for row in rows[name]]
    TABLES[family].write_text("\n".join(lines) + "\n")


def committed():
    """What the tables begin with, and {(kernel, arch): its other columns}."""
    heads, rows = [], {}
    for table in TABLES.values():
        lines = table.read_text().splitlines()
        head = [line[2:] for line in lines if line.startswith("# ")]
        heads += head
        for line in lines[len(head) + 1 :]:
            arch, *numbers = line[36:].split()
            rows[line[:36].strip(), arch] = dict(zip(COLUMNS[1:], map(int, numbers)))
    return heads, rows


def compare(texts):
    head, rows = committed()
    if f"ptxas {release()}" not in head:
        print(f"not compared: the tables are not of ptxas {release()}, which is here")
        return 77
    others = [name for name, ptx in texts.items() if f"{name} {fingerprint(ptx)}" not in head]
    wrong = [f"{name}: {TABLES[family_of(name)].name} is of other PTX" for name in others]
    # float16 multiplies weights as two numbers, and options change scores: both want registers that the others have. For 8.9,
    # whose multiprocessors hold one block of backward_plain of 128 columns, ptxas keeps less of it in as many registers.
    for (name, arch), row in rows.items():
        linear = name.partition("<")[0] in ("append", "copy_tokens", "read_tokens", "gemm", "few_rows", "pointwise", "merge_sums", "norm_forward",
                                            "norm_backward", "norm_parameters")  # fmt: skip
        in_pairs = name.startswith("backward_plain<") and (arch != "89" or ", 64," in name)
        narrow = not name.startswith("backward_plain<") and name.endswith(" 0>") and "<Float16" not in name
        plain = linear or in_pairs or narrow or name.startswith(("forward_stored<", "forward_wide<", "backward_wide<")) or ("_groups<" in name and name.endswith(" 0>"))
        if row["spilled"] and plain:
            wrong.append(f"{name}, sm_{arch}: {row['spilled']} bytes are spilled")
    for kernel, arch in COMPARED:
        for ptx, mangled in ((ptx, each) for ptx in texts.values() for each in told_shared(ptx) if name_of(each) == kernel):
            with tempfile.TemporaryDirectory() as folder:
                cubin = pathlib.Path(folder) / "kernels.cubin"
                registers, spilled, _ = compiled(ptx, arch, cubin, "--entry", mangled)[mangled]
            row = rows[kernel, arch]
            if (registers, spilled) != (row["registers"], row["spilled"]):
                wrong.append(f"{kernel}, sm_{arch}: {registers} registers, {spilled} bytes spilled; the table: {row}")
    for line in wrong:
        print(line)
    if wrong:
        print("If that is meant: tests/cuda/kernel_table.py --write, with the objects of this test's command")
    return 1 if wrong else 0


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    parser.add_argument("objects", nargs="+", type=pathlib.Path)
    options = parser.parse_args()
    if shutil.which("ptxas") is None:
        print("not compared: there is no ptxas on the path")
        return 77
    texts = {path.name.removesuffix(".cu.o"): ptx_of(path) for path in options.objects}
    if options.write:
        for family in sorted({family_of(name) for name in texts}):
            write(family, {name: text for name, text in texts.items() if family_of(name) == family}, options.nvdisasm)
        return 0
    return compare(texts)


if __name__ == "__main__":
    sys.exit(main())
