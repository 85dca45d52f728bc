#pragma once

#include <string>
#include <vector>

#include "cpu/bf16_instructions.h"

namespace foveal::cpu {

/// What the kernels of this process use.
struct InstructionSet {
  std::string name;              ///< For people, and for FOVEAL_CPU_TARGET.
  const Bf16Instructions* bf16;  ///< Null where float32 products are no slower.
};

/// Those that this machine has, whether or not they pay.
std::vector<const Bf16Instructions*> bf16_instructions();

/// The best that the machine has, or what the environment variable FOVEAL_CPU_TARGET names: one of
/// Highway's targets (AVX2, AVX3, …), AVX512_BF16 or AMX_BF16. Chosen at the first call.
///
/// @throws Error(invalid_argument) where the variable names what the machine does not have.
const InstructionSet& instruction_set();

}  // namespace foveal::cpu
