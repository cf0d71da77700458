// The library's list of options with one more: kernels that are compiled with this folder before src find this list.
#pragma once

#include "../../../even_blocks.h"
#include "cpu/attention/score/alibi.h"
#include "cpu/attention/score/list.h"
#include "cpu/attention/score/mask_and_bias.h"
#include "cpu/attention/score/softcap.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

using Options = OptionList<Softcap,      //
                           Alibi,        //
                           MaskAndBias,  //
                           EvenBlocks>;

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
