// The options of the scores, in the order in which they apply. One more is a file beside this one and a line here.
#pragma once

#include "cpu/attention/score/alibi.h"
#include "cpu/attention/score/list.h"
#include "cpu/attention/score/mask_and_bias.h"
#include "cpu/attention/score/program_mask.h"
#include "cpu/attention/score/softcap.h"

namespace polyhead::cpu::POLYHEAD_ISA {
namespace {

using Options = OptionList<Softcap,  //
                           Alibi,    //
                           MaskAndBias, ProgramMask>;

}  // namespace
}  // namespace polyhead::cpu::POLYHEAD_ISA
