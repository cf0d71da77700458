"""Each rule finds what it is there to find, and lets the opposite pass."""

import pathlib
import shutil
import subprocess
import sys
import tempfile
import unittest

import rules


class Rules(unittest.TestCase):
    def setUp(self):
        self.root = pathlib.Path(tempfile.mkdtemp())
        self.addCleanup(shutil.rmtree, self.root)
        subprocess.run(["git", "init", "-q", self.root], check=True)

    def write(self, path, text):
        (self.root / path).parent.mkdir(parents=True, exist_ok=True)
        (self.root / path).write_text(text)

    def broken(self, rule):
        return list(rule(self.root))

    def test_include_direction(self):
        self.write("src/core/a.cc", '#include "core/a.h"\n#include <vector>\n#include "polyhead/tensor.h"\n')
        self.write("src/attention/kernel_list.cc", '#include "cpu/attention/kernels.h"\n')
        self.write("src/cpu/isa/simd.h", "")
        self.write("src/cpu/isa/isa.cc", '#include "core/choose.h"\n#include "simd.h"\n')
        self.assertEqual(self.broken(rules.include_direction), [])
        for path, line in [("src/core/b.cc", '#include "polyhead/attention.h"'),
                           ("src/core/b.cc", '#include "contract/kernel.h"'),
                           ("src/attention/plan.cc", '#include "cpu/isa/isa.h"'),
                           ("src/reference/attention.cc", '#include "attention/plan.h"'),
                           ("src/cpu/attention/b.cc", '# include "attention/plan.h"'),
                           ("src/cpu/linear/b.cc", '#include "cpu/attention/problem.h"'),
                           ("src/cpu/isa/b.cc", '#include "contract/kernel.h"'),
                           ("src/capi/b.cc", '#include "contract/kernel.h"'),
                           ("examples/b/b.cc", '#include "layer/state.h"'),
                           ("include/polyhead/b.h", '#include "core/threads.h"')]:
            self.write(path, line + "\n")
            self.assertEqual(len(self.broken(rules.include_direction)), 1, line)
            (self.root / path).unlink()

    def test_prints(self):
        self.write("src/core/verbose.cc", "std::fwrite(line.data(), 1, 2, stderr);\n")
        self.write("src/core/a.cc", "std::snprintf(text, 3, line);  // printf(\n")
        self.assertEqual(self.broken(rules.prints), [])
        for line in ("std::fprintf(stderr, x);", "std::cerr << x;", "puts (x);"):
            self.write("src/core/a.cc", line + "\n")
            self.assertEqual(len(self.broken(rules.prints)), 1, line)

    def test_length(self):
        body = "  a();\n" * 77
        short = "template <int N>\nvoid f(int a,\n       int b) {\n" + body[:-14] + "}\n"
        self.write("src/a.cc", "namespace n {\nstruct S {\n" + short + "};\n" + short + "}\n" + "// comment\n" * 100)
        self.assertEqual(self.broken(rules.length), [])
        long = "void f(int a) {\n  // '{'\n  g(\"{\", '{');\n" + body + "}\n"
        self.write("src/a.cc", "namespace n {\n" + long + "}\n")
        self.assertEqual(self.broken(rules.length), ["src/a.cc:2: function of 80 lines, at most 79"])
        self.write("src/a.cc", "struct S {\n  S() : a(1) {\n" + body + "\n a();\n  }\n};\n")
        self.assertEqual(len(self.broken(rules.length)), 1)
        self.write("src/a.cc", "constexpr Case kCases[] = {\n" + "  {f(1)},\n" * 100 + "};\n")
        self.assertEqual(self.broken(rules.length), [])
        self.write("src/a.cc", "int a;\n" * 500)
        self.assertEqual(self.broken(rules.length), ["src/a.cc: 500 lines, at most 499"])
        self.write("src/a.cc", "")
        self.write("a.py", "def f():\n" + "    a()\n" * 79)
        self.assertEqual(self.broken(rules.length), ["a.py:1: function of 80 lines, at most 79"])

    def test_ascii(self):
        self.write("src/a.cc", "// fine\n")
        self.assertEqual(self.broken(rules.ascii_sources), [])
        self.write("src/a.cc", "\n// \u00b1\n")
        self.assertEqual(self.broken(rules.ascii_sources), ["src/a.cc:2: not ASCII"])

    def test_intrinsics(self):
        self.write("src/cpu/isa/simd_avx2.h", "#include <immintrin.h>\n#ifdef __AVX2__\n__m256 a;\n")
        self.write("src/cpu/a.cc", "// _mm256_add_ps\n")
        self.assertEqual(self.broken(rules.intrinsics), [])
        self.write("src/cpu/a.cc", "#include <immintrin.h>\n#if defined(__AVX2__)\n__m256 a = _mm256_setzero_ps();\n")
        self.assertEqual(len(self.broken(rules.intrinsics)), 3)
        self.write("src/cpu/a.cc", "#include <arm_neon.h>\nfloat32x4_t a = b;\nauto c = vfmaq_laneq_f32(a, a, a, 1);\n")
        self.assertEqual(len(self.broken(rules.intrinsics)), 3)

    def test_generated(self):
        self.write("src/a.cc", "int a;\n")
        self.assertEqual(self.broken(rules.no_generated), [])
        self.write("src/a.cc", "// DO NOT " + "EDIT\n")
        self.write("a.so", "")
        self.assertEqual(len(self.broken(rules.no_generated)), 2)

    def test_todo(self):
        self.write("src/a.cc", "// TO" + "DO(#12): more\n")
        self.assertEqual(self.broken(rules.todo), [])
        self.write("src/a.cc", "// TO" + "DO: more\n")
        self.assertEqual(self.broken(rules.todo), ["src/a.cc:1: no issue number"])

    def test_clang_format(self):
        shutil.copy(rules.ROOT / ".clang-format", self.root)
        self.write("src/a.cc", "int a;\n")
        try:
            self.assertEqual(self.broken(rules.clang_format), [])
        except SystemExit:
            self.skipTest("clang-format 14 is not here")
        self.write("src/a.cc", "int  a ;\n")
        self.assertEqual(self.broken(rules.clang_format), ["src/a.cc: ./dev format would change it"])

    def test_isa_symbols(self):
        compiler = shutil.which("c++")
        if compiler is None:
            self.skipTest("no c++")

        def symbols(text):
            self.write("a.cc", text)
            subprocess.run([compiler, "-std=c++20", "-O0", "-c", "a.cc"], cwd=self.root, check=True)
            return list(rules.isa_symbols("avx2", "nm", str(self.root / "a.o")))

        inside = "namespace polyhead::avx2 { int f(int a) { return a; } }\n"
        self.assertEqual(symbols(inside), [])
        self.assertEqual(len(symbols(inside + "int outside() { return 1; }\n")), 1)
        self.assertEqual(len(symbols("#include <algorithm>\nnamespace polyhead::avx2 {\n"
                                     "int f(int a, int b) { return std::min(a, b); } }\n")), 1)


if __name__ == "__main__":
    unittest.main(argv=sys.argv[:1])
