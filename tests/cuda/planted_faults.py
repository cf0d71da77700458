"""Plants faults in the CUDA kernels, one at a time, and looks whether the tests find each: kernel_faults.py lists them.

    planted_faults.py --list                              each fault: its kernel, its file, what is expected to be said
    planted_faults.py                                     all of them, with build/release; some minutes of one core
    planted_faults.py --only wide                         those of one kernel; wide.wrong_stage: that one
    planted_faults.py --jobs 2 --out build/faults.csv     two at once; what was said of each, as a table (or .json)
    planted_faults.py --check                             only whether each text to replace is in its file once

A fault is a text of src/cuda and what replaces it, in a copy. Of the copy one kernel is compiled to PTX, and a test program of the
build takes it in the place of its own (POLYHEAD_SIMULATED_PTX). First each kernel goes that way without a fault: its cases
must pass. Exits with 1 if they do not, if a fault is not found or found for another reason, or if a text is not in its file
exactly once; with 77 where there is no nvcc, or no test program.
"""

import argparse
import concurrent.futures
import csv
import json
import os
import pathlib
import re
import shutil
import subprocess
import sys
import tempfile
import time

import kernel_table
from kernel_faults import FAULTS, KERNELS

ROOT = pathlib.Path(__file__).resolve().parents[2]
SKIPPED = 77  # SKIP_RETURN_CODE
MOST_SECONDS = 1800  # of a test program; what waits for ever is found by the interpreter


class Stop(Exception):
    """What makes it impossible to judge a fault."""


def source_of(fault):
    return ROOT / "src" / "cuda" / fault.file


def misplaced():
    """A line for each fault whose text is not in its file once."""
    lines = []
    for name, fault in FAULTS.items():
        times = source_of(fault).read_text().count(fault.text)
        if times != 1:
            lines.append(f"{name}: its text is in src/cuda/{fault.file} {times} times, must be there once")
    return lines


def alone(source, instances):
    """Of a file with templates of kernels, these instances and no others: what launches them is cut off."""
    head = source[: source.index("\n}  // namespace")]
    wanted = []
    for name, *parameters in instances:
        told = ", ".join(f"const __grid_constant__ {each}" for each in parameters)
        wanted.append(f"template __global__ void {name.replace('<', '_kernel<', 1)}({told});")
    return "\n".join([head, *wanted]) + "\n" + head.count("\nnamespace ") * "}\n"


def compiled(kernel, fault, folder, nvcc):
    """The kernel's PTX, in the folder."""
    shutil.copytree(ROOT / "src" / "cuda", folder / "cuda")
    if fault is not None:
        path = folder / "cuda" / fault.file
        path.write_text(path.read_text().replace(fault.text, fault.instead))
    source = folder / "cuda" / kernel.source
    main, ptx = folder / (source.stem + ".cu"), folder / "kernel.ptx"
    main.write_text(alone(source.read_text(), kernel.instances) if kernel.instances else source.read_text())
    include = [f"-I{path}" for path in (folder, ROOT / "src", ROOT / "include")]
    command = [nvcc, "-std=c++20", "-O3", "-expt-relaxed-constexpr", "-lineinfo", f"-arch=compute_{kernel.arch}", *include]
    done = subprocess.run([*command, "-ptx", main, "-o", ptx], capture_output=True, text=True, check=False)
    if done.returncode:
        raise Stop(f"nvcc refuses it: {done.stdout}{done.stderr}")
    return ptx


def run(cases, ptx, build):
    """What a test program said, and whether it passed."""
    environment = {
        **os.environ,
        "POLYHEAD_TEST_KERNEL": "cuda_sm80_on_host",
        "LD_LIBRARY_PATH": str(build / "tests" / "cuda" / "nvrtc"),
        "POLYHEAD_SIMULATED_PTX": str(ptx),
        **dict(cases.environment),
    }
    names = (name if "." in name else f"*/{name}" for name in cases.names)
    command = [build / "tests" / cases.program, "--gtest_brief=1", f"--gtest_filter={':'.join(names)}"]
    try:
        done = subprocess.run(command, env=environment, capture_output=True, text=True, errors="replace", timeout=MOST_SECONDS, check=False)
    except subprocess.TimeoutExpired as error:
        raise Stop(f"{cases.program} did not end within {MOST_SECONDS} s") from error
    return done.stdout + done.stderr, done.returncode == 0


def unlaunched(kernel, said):
    """Of the instances that are wanted those that no case has launched."""
    launched = re.findall(r"^POLYHEAD_SIMULATED_PTX: [1-9]\d* launches of (\S+)", said, re.M)
    names = [kernel_table.name_of(mangled) for mangled in launched]
    return [f"{name}: no case launches it" for name, *_ in kernel.instances if name not in names]


def sentence_of(said, passed):
    """Of what a test program said: the interpreter's sentence, or the first difference."""
    if passed:
        return "nothing"
    if erred := re.search(r"[^\n\"]*, block \(\d+, \d+, \d+\), warp \d+(?:, lane \d+)?", said):
        return erred.group().rpartition("the kernel erred: ")[2]
    failed = re.search(r"Which is: \"(.*?)(?:\\n|\"?\n)", said) or re.search(r"Failure\n(.*)", said)
    return "wrong: " + (failed.group(1) if failed else said.strip().rpartition("\n")[2])


def judge(kernel_name, cases, fault, options):
    """(what was said, seconds)"""
    start, kernel = time.monotonic(), KERNELS[kernel_name]
    with tempfile.TemporaryDirectory() as folder:
        try:
            ptx = compiled(kernel, fault, pathlib.Path(folder), options.nvcc)
            said, passed = run(cases, ptx, options.build)
            missing = [] if fault else unlaunched(kernel, said)
            sentence = "; ".join(missing) or sentence_of(said, passed)
        except Stop as stop:
            sentence = f"not judged: {stop}"
    return sentence, time.monotonic() - start


def chosen(only):
    """{name: fault} of what --only names: faults, or all of a kernel."""
    if not only:
        return dict(FAULTS)
    wanted = {name for word in only for name in FAULTS if name == word or name.startswith(word + ".")}
    unknown = [word for word in only if not any(name == word or name.startswith(word + ".") for name in FAULTS)]
    if unknown:
        sys.exit(f"there is no fault or kernel {', '.join(unknown)}; --list names them")
    return {name: fault for name, fault in FAULTS.items() if name in wanted}


def jobs_of(faults):
    """(name, kernel, fault, what must be said): each kernel without a fault and each of its cases, and then the faults."""
    jobs = []
    for name, fault in faults.items():
        kernel = name.partition(".")[0]
        jobs.append((name, kernel, fault, fault.cases or KERNELS[kernel].cases, fault.said))
    clean = dict.fromkeys((kernel, cases) for _, kernel, _, cases, _ in jobs)
    return [(f"{kernel}, no fault", kernel, None, cases, "nothing") for kernel, cases in clean] + jobs


def why_not_here(faults, options):
    """Why nothing can be judged; "" if it can."""
    if shutil.which(options.nvcc) is None:
        return "there is no nvcc on the path"
    programs = {cases.program for _, _, _, cases, _ in jobs_of(faults)}
    missing = sorted(program for program in programs if not (options.build / "tests" / program).exists())
    return f"{options.build} has no {', '.join(missing)}" if missing else ""


def report(rows, path):
    """rows: {name, file, expected, said, found, seconds}"""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", newline="") as file:
        if path.suffix == ".json":
            json.dump(rows, file, indent=1)
        else:
            table = csv.DictWriter(file, rows[0])
            table.writeheader()
            table.writerows(rows)


def arguments():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--list", action="store_true", help="name the faults and do nothing")
    parser.add_argument("--check", action="store_true", help="only look whether each text is in its file once")
    parser.add_argument("--only", action="append", default=[], metavar="NAME", help="this fault, or all of this kernel; may be repeated")
    parser.add_argument("--build", type=pathlib.Path, default=ROOT / "build" / "release", help="a build with its tests; default: build/release")
    parser.add_argument("--nvcc", default="nvcc")
    parser.add_argument("--jobs", type=int, default=1, help="how many at once")
    parser.add_argument("--out", type=pathlib.Path, help="a file for what was said: .json, else a table in CSV")
    return parser.parse_args()


def main():
    options = arguments()
    options.build = options.build.resolve()
    faults = chosen(options.only)
    if options.list:
        for name, fault in faults.items():
            print(f"{name:44} {fault.file:32} {fault.said}")
        return 0
    if lines := misplaced():
        print("\n".join(lines))
        return 1
    if options.check:
        return 0
    if why := why_not_here(faults, options):
        print(f"left out: {why}")
        return SKIPPED
    start, rows, jobs = time.monotonic(), [], jobs_of(faults)
    with concurrent.futures.ThreadPoolExecutor(options.jobs) as pool:
        judged = [pool.submit(judge, kernel, cases, fault, options) for _, kernel, fault, cases, _ in jobs]
        for (name, _, fault, _, expected), future in zip(jobs, judged):
            said, seconds = future.result()
            found = said.startswith(expected)
            file = fault.file if fault else ""
            rows.append({"name": name, "file": file, "expected": expected, "said": said, "found": found, "seconds": round(seconds, 1)})
            print(f"[{len(rows):3}/{len(jobs)}] {'ok    ' if found else 'FAILED'} {seconds:5.1f} s  {name}: {said}", flush=True)
            if not found:
                print(f"          expected: {expected}")
    failed = sum(not row["found"] for row in rows)
    print(f"{len(faults)} faults in {time.monotonic() - start:.0f} s: {f'{failed} not as expected' if failed else 'each was found'}")
    if options.out is not None:
        report(rows, options.out)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
