#include "cpu/isa/order.h"

#include <algorithm>
#include <cstdio>
#include <iterator>

#include "cpu/isa/isa.h"
#include "cpu/isa/peak.h"

namespace polyhead::cpu {
namespace {

void measure(double (&rates)[kNumIsas]) {
  Isa contenders[kNumIsas];
  int num_contenders = 0;
  for (int i = 0; i < kNumIsas; ++i) {
    const Isa isa{i};
    if (!has(isa)) continue;
    contenders[num_contenders++] = isa;
    if (!multiplies_bf16(isa)) break;
  }
  if (num_contenders < 2) return;
  // The fastest of several short rounds, taken in turn: what else runs on the machine, or a clock that still rises,
  // hits all alike.
  for (int round = 0; round < 12; ++round) {
    for (int i = 0; i < num_contenders; ++i) {
      double& rate = rates[static_cast<int>(contenders[i])];
      rate = std::max(rate, peak_flops(contenders[i], DType::kBFloat16, 1000));
    }
  }
}

}  // namespace

IsaOrder order_isas(const double (&rates)[kNumIsas]) {
  IsaOrder order;
  for (int i = 0; i < kNumIsas; ++i) order.isas[i] = Isa{i};
  const auto rate = [&](Isa isa) { return rates[static_cast<int>(isa)]; };
  for (Isa* next = order.isas; next != std::end(order.isas); ++next) {
    if (rate(*next) == 0) continue;
    Isa* fastest = std::max_element(next, std::end(order.isas), [&](Isa a, Isa b) { return rate(a) < rate(b); });
    const double ratio = rate(*fastest) / rate(*next);
    if (ratio < kClearMargin) continue;
    if (order.measured[0] == 0) {
      std::snprintf(order.measured, sizeof order.measured,
                    "measured: cpu_%s before cpu_%s, %.2f times as fast in products of bfloat16", isa_name(*fastest),
                    isa_name(*next), ratio);
    }
    std::rotate(next, fastest, fastest + 1);
  }
  return order;
}

const IsaOrder& isa_order() {
  static const IsaOrder kOrder = [] {
    double rates[kNumIsas] = {};
    measure(rates);
    return order_isas(rates);
  }();
  return kOrder;
}

}  // namespace polyhead::cpu
