#include "core/builtin_backends.h"

#include "foveal/registry.h"

namespace foveal {

// In order of preference.
void register_builtin_backends(BackendRegistry& registry) {
  registry.add("FLASH_ATTN", "CUDA flash attention (sm_80 and later)", make_flash_attn_backend);
  registry.add("CPU_ATTN", "CPU flash attention", make_cpu_attn_backend);
  registry.add("CPU_MLA", "CPU flash attention for MLA", make_cpu_mla_backend);
  registry.add("REFERENCE", "Float64 oracle", make_reference_backend);
  registry.add("REFERENCE_MLA", "Float64 oracle for MLA", make_reference_mla_backend);
}

}  // namespace foveal
