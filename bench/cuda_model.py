"""How fast the CUDA kernels can be, by count: no GPU is asked.

    cuda_model.py --objects build/release/tests/cuda --counts build/release/tests/cuda_tile_counts [--out FOLDER]

From SASS (ptxas and nvdisasm, PyPI: nvidia-cuda-nvdisasm) come the instructions of a round of each kernel's main loop; from
the interpreter (tests/cuda/tile_counts.cc) how many rounds (also of loops within), products and waves of shared memory a tile of 64
queries x 64 keys takes, and a large tile of a product. A pipe that issues a warp's instruction every so many cycles, four of them (shared memory: one) a multiprocessor, then
takes so long for a tile. Where all pipes overlapped, the slowest would bound the kernel; where a warp did one thing after the
other and nobody else ran meanwhile, the sum. The model expects what lies between, by the warps that share a scheduler.
"""

import argparse
import collections
import csv
import dataclasses
import datetime
import io
import pathlib
import subprocess
import sys
import tempfile

ROOT = pathlib.Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests" / "cuda"))
import kernel_table  # noqa: E402
import sass  # noqa: E402

TILE = 64 * 64  # pairs
WARPS = 4  # of a block, one for each scheduler of a multiprocessor


@dataclasses.dataclass(frozen=True)
class Gpu:
    """Cycles that a pipe takes for one instruction of a warp, of each of a multiprocessor's four schedulers."""

    name: str
    arch: str
    multiprocessors: int
    ghz: float
    mma: float  # m16n8k16 with sums in float32; m16n8k8 half of it
    float32: float  # FFMA, FADD, FMUL
    integer: float  # and comparisons, selections, conversions of float32 to 16 bits
    special: float  # ex2
    peak: dict  # TFLOP/s, dense
    bandwidth: float  # of memory, TB/s


# NVIDIA A100 and H100 whitepapers: throughput of a multiprocessor, clocks of the SXM boards. H100's mma.sync reaches 62 % of what
# wgmma does (arXiv:2402.13499, table 7): 4 cycles become 6.4.
A100 = Gpu("A100", "80", 108, 1.41, 8, 2, 2, 8, {"bfloat16": 312, "float16": 312, "float32": 19.5}, 2.04)
H100 = Gpu("H100", "90", 132, 1.83, 6.4, 1, 2, 8, {"bfloat16": 989, "float16": 989, "float32": 62}, 3.35)
GOALS = {("bfloat16", 128, "forward"): 330, ("bfloat16", 128, "backward"): 280, ("float32", 128, "forward"): 40}  # on H100

FLOAT32 = ("FFMA", "FADD", "FMUL", "IMAD")  # IMAD is the multiplier's
SPECIAL = ("MUFU",)
MEMORY = ("LDSM", "LDS", "STS", "LDGSTS", "LDG", "STG", "LDL", "STL", "SHFL")
OTHER = ("BAR", "BRA", "BSSY", "BSYNC", "CALL", "DEPBAR", "EXIT", "LDGDEPBAR", "NOP", "RET", "WARPSYNC", "YIELD", "S2R")


@dataclasses.dataclass
class Cost:
    """Of a tile, for one multiprocessor: cycles of each pipe, and of all one after the other."""

    pipes: dict
    serial: float
    blocks: int
    loop: int

    @property
    def bound(self):
        return max(self.pipes.values())

    @property
    def bounding(self):
        return max(self.pipes, key=self.pipes.get)

    @property
    def expected(self):
        """`blocks` warps share a scheduler: what one leaves idle the others may take."""
        return max(self.bound, self.bound + (self.serial - self.bound) / max(self.blocks, 1))


def read_counts(text):
    """{(dtype, head_dim, direction, seqlen_q, seqlen_k): {kernel: {name: count}}}"""
    counts = collections.defaultdict(lambda: collections.defaultdict(dict))
    for row in csv.reader(io.StringIO(text)):
        dtype, head_dim, direction, seqlen_q, seqlen_k, kernel, name, count = row
        counts[dtype, int(head_dim), direction, int(seqlen_q), int(seqlen_k)][kernel][name] = int(count)
    return counts


def per_tile(counts, dtype, head_dim, direction):
    """{kernel: {name: count}} of one more tile: along the sizes over which the kernel loops, which cost it less."""
    base = counts[dtype, head_dim, direction, 128, 128]
    found = {}
    for kernel, first in base.items():
        ways = []
        for sizes in ((128, 256), (256, 128)):
            more = counts[dtype, head_dim, direction, *sizes][kernel]
            tiles = (sizes[0] * sizes[1] - 128 * 128) / TILE
            ways.append({name: (number - first.get(name, 0)) / tiles for name, number in more.items()})
        found[kernel] = min(ways, key=lambda way: way["instructions"])
    return found


def tensor_products(counts):
    """Those that a tile's warps give to tensor cores, in units of m16n8k16."""
    return sum(number / (1 if "k16" in name else 2) for name, number in counts.items() if name.startswith("mma."))


def executed(counts, way):
    """{name: how often a tile's warps execute it}, of SASS.

    A loop goes round as often as its exponentials, products or copies to shared memory say, whichever no loop has that is not
    known yet: several loops of one kind alike often. Exponentials come first, for products may lie in loops within; unless one
    loop has all products, since a warp of several may have no exponentials (attention_backward_plain.cuh), or stores to shared
    memory say more, of warps that do something else instead (attention_backward_float32.cuh).
    """
    of_loops = collections.defaultdict(collections.Counter)
    for each in way:
        of_loops[each.loop].update([sass.name_of(each.opcode), *(["EX2"] if each.opcode.startswith("MUFU.EX2") else [])])
    product = next(name for name in sass.PRODUCTS if sass.count(way)[name])
    begins = {"EX2": "ex2.", product: "mma." if product == "HMMA" else "fma.rn.", "LDGSTS": ("cp.async.ca", "cp.async.cg"),
              "STS": "st.shared."}
    totals = {name: sum(n for opcode, n in counts.items() if opcode.startswith(begin)) for name, begin in begins.items()}
    in_one = sum(bool(has[product]) for has in of_loops.values()) == 1
    rounds = {}
    for name in (product, "EX2", "LDGSTS") if in_one else ("EX2", product, "LDGSTS"):
        holders = [loop for loop, has in of_loops.items() if has[name] and loop not in rounds]
        left = max(totals[name] - sum(often * of_loops[loop][name] for loop, often in rounds.items()), 0)
        often = left / sum(of_loops[each][name] for each in holders) if holders else 0
        stores = sum(of_loops[each]["STS"] for each in holders) if name == "EX2" else 0
        if stores < sum(has["STS"] for has in of_loops.values()):
            stores = 0  # there are others
        rounds.update((loop, max(often, totals["STS"] / stores if stores else 0)) for loop in holders)
    found = collections.Counter()
    for loop, names in of_loops.items():
        for name, number in names.items():
            found[name] += number * rounds.get(loop, rounds.get(None, 0))
    del found["EX2"]
    return found


def cost(gpu, counts, way, blocks):
    tensor = tensor_products(counts)
    by_name = executed(counts, way)
    instructions = sum(by_name.values())
    float32, special, memory, other = (sum(by_name[name] for name in names) for names in (FLOAT32, SPECIAL, MEMORY, OTHER))
    integer = instructions - float32 - special - memory - other - by_name["HMMA"]
    pipes = {
        "tensor": tensor * gpu.mma / 4,
        "shared": counts["bank_waves"],
        "issue": instructions / 4,
        "float32": float32 * gpu.float32 / 4,
        "integer": integer * gpu.integer / 4,
        "special": special * gpu.special / 4,
        "sectors": counts["sectors"] / 2,  # 64 bytes a cycle from L2
    }
    serial = pipes["tensor"] + pipes["shared"] + pipes["issue"] - by_name["HMMA"] / 4
    return Cost(pipes, serial, blocks, len(way))


def kernels(objects, gpu, nvdisasm):
    """{mangled: (name, one round of its main loop, blocks that a multiprocessor holds)}"""
    found = {}
    with tempfile.TemporaryDirectory() as folder:
        cubin = pathlib.Path(folder) / "kernels.cubin"
        for path in objects:
            ptx = kernel_table.ptx_of(path)
            shared = kernel_table.told_shared(ptx)
            resources = kernel_table.compiled(ptx, gpu.arch, cubin)
            for mangled, (code, labels) in sass.kernels_of(kernel_table.run(nvdisasm, "-c", cubin)).items():
                registers, _, of_kernel = resources[mangled]
                blocks = kernel_table.resident_blocks(gpu.arch, registers, shared[mangled] + of_kernel)
                found[mangled] = kernel_table.name_of(mangled), sass.main_loop(code, labels, whole=True), blocks
    return found


def useful_flops(head_dim, direction):
    """Of a tile: two products forward, five backward."""
    return 2 * TILE * head_dim * (2 if direction == "forward" else 5)


def rows(counts, found, gpu):
    """(dtype, head_dim, direction, [(kernel, counts, Cost)], TFLOP/s if pipes overlap, if nothing does, expected)"""
    for dtype, head_dim, direction in dict.fromkeys(key[:3] for key in counts if key[2] != "product"):
        parts = []
        for mangled, of_tile in per_tile(counts, dtype, head_dim, direction).items():
            name, way, blocks = found[mangled]
            if way and of_tile["instructions"] > 0:
                parts.append((name, of_tile, cost(gpu, of_tile, way, blocks)))

        def speed(cycles):
            return useful_flops(head_dim, direction) * gpu.multiprocessors * gpu.ghz / cycles / 1e3

        yield (dtype, head_dim, direction, parts, speed(sum(each.bound for _, _, each in parts)),
               speed(sum(each.serial for _, _, each in parts)), speed(sum(each.expected for _, _, each in parts)))  # fmt: skip


def products(counts, found, gpu):
    """(dtype, terms, kernel, Cost, useful operations), of large tiles: what twice as many terms cost more, and the rest once."""
    for dtype, rows_of_tile, direction, columns, _ in [key for key in counts if key[4] == 256 and key[2] == "product"]:
        ((mangled, few),) = counts[dtype, rows_of_tile, direction, columns, 256].items()
        many = counts[dtype, rows_of_tile, direction, columns, 512][mangled]
        of_terms = {name: number - few.get(name, 0) for name, number in many.items()}
        once = {name: number - of_terms[name] for name, number in few.items()}
        name, way, blocks = found[mangled]
        loop = cost(gpu, of_terms, way, blocks)
        rest = {"shared": once["bank_waves"], "issue": once["instructions"] / 4, "sectors": once["sectors"] / 2}
        for terms in (512, 1024, 4096):
            pipes = {pipe: cycles * terms / 256 + rest.get(pipe, 0) for pipe, cycles in loop.pipes.items()}
            serial = loop.serial * terms / 256 + rest["shared"] + rest["issue"]
            yield dtype, terms, name, Cost(pipes, serial, blocks, len(way)), 2 * rows_of_tile * columns * terms


def products_table(rows_of_products, gpu):
    lines = ["", "Products of matrices that fill the GPU with large tiles:", "",
             "| kernel | terms | overlapped | one after the other | expected, TFLOP/s | of peak | bound by |",
             "|---|--:|--:|--:|--:|--:|---|"]  # fmt: skip
    for dtype, terms, name, of, operations in rows_of_products:
        best, worst, expected = (operations * gpu.multiprocessors * gpu.ghz / cycles / 1e3 for cycles in (of.bound, of.serial, of.expected))
        lines.append(f"| `{name}` | {terms} | {best:.0f} | {worst:.0f} | **{expected:.0f}** | {expected / gpu.peak[dtype]:.0%} | "
                     f"{of.bounding} |")  # fmt: skip
    return lines


FEW_COLUMNS, FEW_IN_FLIGHT, FEW_SHARED = 32, 7 * 2 * 32 * 64, 8 * 2 * (16 + 32) * 64  # bytes of a block of src/cuda/few_rows.cuh
MEMORY_NS = 700  # that a loaded memory takes to answer: assumed
CHAIN = {"bfloat16": 33 / 16, "float32": 4}  # cycles from one term of a sum to the next: arXiv:2206.02874, table 3; FFMA's latency


def few_rows_table(gpu):
    """One row of A: B is read once, as fast as what is in flight of it, or the sum of a column, term by term, allows."""
    lines = ["", "Products of one row: microseconds for the bytes of B at the memory's bandwidth; at that of what is in flight (answered "
             f"in {MEMORY_NS} ns); and for the terms of a sum, one behind the other. The largest bounds it.", "",
             "| dtype | terms | columns | blocks | KiB in flight | bytes | in flight | terms | expected, us |",
             "|---|--:|--:|--:|--:|--:|--:|--:|--:|"]  # fmt: skip
    for dtype, size in (("bfloat16", 2), ("float32", 4)):
        for terms, columns in ((4096, 1024), (4096, 4096), (4096, 14336), (14336, 4096)):
            blocks = -(-columns // FEW_COLUMNS)
            resident = kernel_table.resident_blocks(gpu.arch, 128, FEW_SHARED) * gpu.multiprocessors
            flying, num_bytes = min(blocks, resident) * FEW_IN_FLIGHT, columns * terms * size
            times = num_bytes / gpu.bandwidth / 1e6, num_bytes / flying * MEMORY_NS / 1e3, terms * CHAIN[dtype] / gpu.ghz / 1e3
            cells = " | ".join(f"{us:.1f}" for us in times)
            expected = max(times) + MEMORY_NS / 1e3
            lines.append(f"| {dtype} | {terms} | {columns} | {blocks} | {flying // 1024} | {cells} | **{expected:.1f}** |")
    return lines


def table(all_rows, gpu):
    lines = [
        f"## {gpu.name}", "",
        "| dtype | head_dim | direction | overlapped | one after the other | expected, TFLOP/s | of peak | goal |",
        "|---|--:|---|--:|--:|--:|--:|---|",
    ]  # fmt: skip
    for dtype, head_dim, direction, _, best, worst, expected in all_rows:
        goal = GOALS.get((dtype, head_dim, direction)) if gpu is H100 else None
        verdict = "" if goal is None else f">= {goal}: {'met' if expected >= goal else '**missed**'}"
        lines.append(f"| {dtype} | {head_dim} | {direction} | {best:.0f} | {worst:.0f} | **{expected:.0f}** | "
                     f"{expected / gpu.peak[dtype]:.0%} | {verdict} |")  # fmt: skip
    pipes = ("tensor", "shared", "issue", "float32", "integer", "special", "sectors")
    lines += ["", "Cycles of a multiprocessor for a tile of 64 x 64 pairs, by pipe; the slowest bounds the kernel.", "",
              "| kernel | blocks | loop | " + " | ".join(pipes) + " | bound by | bank waves / phase | sectors / ideal |",
              "|---|--:|--:|" + "--:|" * len(pipes) + "---|--:|--:|"]  # fmt: skip
    for _, _, _, parts, *_ in all_rows:
        for name, counts, of in parts:
            waves = counts["bank_waves"] / counts["bank_phases"] if counts["bank_phases"] else 0
            sectors = counts["sectors"] / counts["ideal_sectors"] if counts["ideal_sectors"] else 0
            cells = " | ".join(f"{of.pipes[pipe]:.0f}" for pipe in pipes)
            lines.append(f"| `{name}` | {of.blocks} | {of.loop} | {cells} | {of.bounding} | {waves:.2f} | {sectors:.2f} |")
    return lines


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--objects", type=pathlib.Path, required=True, help="the folder with nvcc's objects of the tests")
    parser.add_argument("--counts", type=pathlib.Path, required=True, help="the program cuda_tile_counts, or what it printed")
    parser.add_argument("--nvdisasm", default="nvdisasm")
    parser.add_argument("--out", type=pathlib.Path, help="a folder for DATE-cuda-model.md; default: print it")
    options = parser.parse_args()
    is_text = options.counts.suffix == ".csv"
    text = options.counts.read_text() if is_text else subprocess.run([options.counts], capture_output=True, text=True, check=True).stdout
    counts = read_counts(text)
    objects = sorted([*options.objects.glob("attention_*_sm80.cu.o"), *options.objects.glob("gemm_*_sm80.cu.o")])
    today = datetime.date.today().isoformat()
    lines = [f"# CUDA kernels by count, {today}", "",
             f"`bench/cuda_model.py`, ptxas {kernel_table.release()}; no GPU was asked. Plain kernels (no options), square tiles of which "
             "all is seen, head_dim_v as head_dim; products without an epilogue. See docs/cuda.md.", ""]  # fmt: skip
    for gpu in (A100, H100):
        found = kernels(objects, gpu, options.nvdisasm)
        lines += [*table(list(rows(counts, found, gpu)), gpu), *products_table(products(counts, found, gpu), gpu), *few_rows_table(gpu), ""]
    if options.out is None:
        print("\n".join(lines))
    else:
        (options.out / f"{today}-cuda-model.md").write_text("\n".join(lines).rstrip("\n") + "\n")


if __name__ == "__main__":
    main()
