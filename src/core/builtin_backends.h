#pragma once

#include "foveal/backend.h"

namespace foveal {

class BackendRegistry;

// One declaration and one line in builtin_backends.cpp a backend; each is defined in its folder.
AttentionBackendPtr make_cpu_attn_backend();
AttentionBackendPtr make_cpu_mla_backend();
AttentionBackendPtr make_flash_attn_backend();
AttentionBackendPtr make_reference_backend();
AttentionBackendPtr make_reference_mla_backend();

void register_builtin_backends(BackendRegistry& registry);

}  // namespace foveal
