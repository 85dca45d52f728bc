#pragma once

#include <cstddef>
#include <span>
#include <string_view>

#include "cuda/jit.h"

namespace foveal::cuda {

/// Registers, stack, static shared memory and parameters of a kernel, read from the cubin's ELF
/// sections; no GPU and no tool is needed. Throws compile when the bytes are no cubin or the kernel
/// is not in it. Spills are not in the ELF: they stay kUnknown.
KernelResources resources_from_elf(std::span<const std::byte> cubin, std::string_view entry);

/// Completes the spills from the assembler's report in a compile log.
void add_spills_from_log(KernelResources& resources, std::string_view log, std::string_view entry);

}  // namespace foveal::cuda
