// What tensor cores make of products: not what IEEE 754's operations one after the other would. So does an H100 (Khattak,
// Mikaitis, "Accurate Models of NVIDIA Tensor Cores", arXiv:2512.07004), of all k of an instruction at once:
//   products are exact, and with c are aligned to the largest exponent among them (of a product the factors' exponents added)
//   of each, what lies more than 25 bits behind that is cut off; their sum is exact
//   the sum is cut off to float32's 24 bits
// An A100 keeps 24 bits, and adds 8 products of halves, or 4 of tf32, at a time.
#pragma once

namespace cuda_sim {

// c += a b, kK (4, 8 or 16) columns and rows of 8. least_exponent: of the factors' type, of its subnormals too.
template <int kK>
void add_products(const float (*a)[kK], const float (*b)[8], float (*c)[8], int rows, int least_exponent);

}  // namespace cuda_sim
