#include "contract/linear.h"

namespace polyhead::linear {

Axis collapsed(const Axis& axis) {
  Axis to;
  if (axis.size() == 0) {
    to.sizes[2] = 0;
    return to;
  }
  to.strides[2] = 1;
  int at = 3;  // the dims of `to` from here on are those that there are
  for (int d = 2; d >= 0; --d) {
    if (axis.sizes[d] == 1) continue;
    if (at < 3 && axis.strides[d] == to.sizes[at] * to.strides[at]) {
      to.sizes[at] *= axis.sizes[d];
      continue;
    }
    --at;
    to.sizes[at] = axis.sizes[d];
    to.strides[at] = axis.strides[d];
  }
  return to;
}

}  // namespace polyhead::linear
