// Products of tensor cores as kernels of one warp a block: of A and B, and of C, as its lanes hold them, in random numbers.
#pragma once

#include <cstdint>
#include <random>
#include <string>
#include <vector>

namespace cuda_sim {

struct MatrixProduct {
  std::string name, body;
  int words = 0;     // of 32 bits, that a lane reads of A and B; of C 4
  double bound = 0;  // of the difference between two orders of its sums, whose terms are below 1 in magnitude

  uint64_t (*random_word)(std::mt19937_64&) = nullptr;
};

// Two words of numbers from -1 to 1.
inline uint64_t random_bfloat16s(std::mt19937_64& random) {
  return (random() & 0x807f807f807f807f) | 0x3f003f003f003f00;
}
inline uint64_t random_float16s(std::mt19937_64& random) { return random() & 0xbbffbbffbbffbbff; }
inline uint64_t random_tf32s(std::mt19937_64& random) { return (random() & 0x807fe000807fe000) | 0x3f0000003f000000; }

// Numbers of C: from 2^-8 to 1 in magnitude.
inline uint64_t random_floats(std::mt19937_64& random) {
  const uint64_t exponents = (119 + random() % 8) << 55 | (119 + random() % 8) << 23;
  return (random() & 0x807fffff807fffff) | exponents;
}

inline std::vector<MatrixProduct> matrix_products() {
  struct Form {
    const char* type;
    int depth, words_of_a, words_of_b;
    uint64_t (*random_word)(std::mt19937_64&);
  };
  constexpr Form kForms[] = {{"bf16", 16, 4, 2, random_bfloat16s}, {"bf16", 8, 2, 1, random_bfloat16s},
                             {"f16", 16, 4, 2, random_float16s},   {"f16", 8, 2, 1, random_float16s},
                             {"tf32", 8, 4, 2, random_tf32s},      {"tf32", 4, 2, 1, random_tf32s}};
  std::vector<MatrixProduct> all;
  for (const auto& [type, depth, of_a, of_b, random_word] : kForms) {
    const int words = of_a + of_b;
    std::string body =
        "mov.u32 %r1, %laneid; mov.u32 %r2, %ctaid.x; shl.b32 %r2, %r2, 5; add.u32 %r3, %r1, %r2;\n"
        "mul.wide.u32 %rd10, %r3, " +
        std::to_string(4 * words) +
        "; add.s64 %rd11, %rd0, %rd10;\n"
        "mul.wide.u32 %rd12, %r3, 16; add.s64 %rd13, %rd1, %rd12; add.s64 %rd14, %rd2, %rd12;\n";
    std::string lists[2];
    for (int n = 0; n < words; ++n) {
      const std::string name = "%r" + std::to_string(10 + n);
      body += "ld.global.u32 " + name + ", [%rd11+" + std::to_string(4 * n) + "];\n";
      std::string& list = lists[n < of_a ? 0 : 1];
      list += (list.empty() ? "" : ", ") + name;
    }
    const std::string name = "m16n8k" + std::to_string(depth) + "." + type;
    body += "ld.global.v4.f32 {%f6, %f7, %f8, %f9}, [%rd13];\nmma.sync.aligned.m16n8k" + std::to_string(depth) +
            ".row.col.f32." + type + "." + type + ".f32 {%f2, %f3, %f4, %f5}, {" + lists[0] + "}, {" + lists[1] +
            "}, {%f6, %f7, %f8, %f9};\nst.global.v4.f32 [%rd14], {%f2, %f3, %f4, %f5};";
    all.push_back({name, body, words, depth * 0x1p-21, random_word});
  }
  return all;
}

}  // namespace cuda_sim
