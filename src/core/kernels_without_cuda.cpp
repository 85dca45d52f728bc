#include "core/builtin_backends.h"
#include "core/check.h"
#include "core/cuda_devices.h"
#include "foveal/kernels.h"

// Stands for src/cuda in a build without it.
namespace foveal {
namespace {

[[noreturn]] void fail_without_cuda() {
  fail(ErrorCode::unsupported, "this build of Foveal has no CUDA (FOVEAL_CUDA is OFF)");
}

}  // namespace

KernelCache kernel_cache() { fail_without_cuda(); }
std::int64_t clear_kernel_cache() { fail_without_cuda(); }
void load_kernel_pack(const std::string&) { fail_without_cuda(); }
std::vector<std::string> known_models() { return {}; }
std::vector<KernelInfo> prebuild_kernels(const PrebuildRequest&) { fail_without_cuda(); }

void add_cuda_devices(std::vector<DeviceInfo>&) {}

AttentionBackendPtr make_flash_attn_backend() { fail_without_cuda(); }

}  // namespace foveal
