#pragma once

namespace foveal::tests {

/// Registers FLASH_ATTN_MIRROR: FLASH_ATTN for tensors of the host. Every call copies what its
/// tensors span, gaps included, to the device and back, so that whatever runs a backend of the CPU
/// (the conformance suite, the cases) can run the GPU's.
void register_flash_attn_mirror();

}  // namespace foveal::tests
