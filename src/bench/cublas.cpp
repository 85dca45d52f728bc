#include "bench/cublas.h"

#include <dlfcn.h>

#include <limits>
#include <string>

#include "core/check.h"

namespace foveal::bench {
namespace {

// The part of the library's public ABI that is used.
constexpr int kNoTranspose = 0;
constexpr int kTranspose = 1;
constexpr int kRealF16 = 2;
constexpr int kRealBF16 = 14;
constexpr int kComputeF32 = 68;
constexpr int kDefaultAlgorithm = -1;

struct Api {
  int (*create)(void**) = nullptr;
  int (*destroy)(void*) = nullptr;
  int (*set_stream)(void*, cuda::Stream) = nullptr;
  int (*set_workspace)(void*, void*, std::size_t) = nullptr;
  int (*gemm)(void*, int, int, int, int, int, const void*, const void*, int, int, long long,
              const void*, int, int, long long, const void*, void*, int, int, long long, int, int,
              int) = nullptr;
  std::string error;
};

template <typename Function>
void find(void* library, const char* name, Function& function, std::string& error) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  if (function == nullptr && error.empty()) {
    error = std::string("libcublas lacks ") + name;
  }
}

Api open_cublas() {
  Api api;
  for (const char* name : {"libcublas.so.13", "libcublas.so.12"}) {
    void* library = dlopen(name, RTLD_LAZY | RTLD_LOCAL);
    if (library != nullptr) {
      api.error.clear();
      find(library, "cublasCreate_v2", api.create, api.error);
      find(library, "cublasDestroy_v2", api.destroy, api.error);
      find(library, "cublasSetStream_v2", api.set_stream, api.error);
      find(library, "cublasSetWorkspace_v2", api.set_workspace, api.error);
      find(library, "cublasGemmStridedBatchedEx", api.gemm, api.error);
      return api;
    }
    const char* reason = dlerror();
    api.error += (api.error.empty() ? "" : "; ") + std::string(reason != nullptr ? reason : name);
  }
  return api;
}

/// Opened once, kept until the process ends.
const Api& cublas_api() {
  static const Api api = open_cublas();
  return api;
}

void require_success(int status, const char* call) {
  if (status != 0) {
    fail(ErrorCode::device, "{} failed with status {}", call, status);
  }
}

int as_int(const char* name, std::int64_t value) {
  check(value <= std::numeric_limits<int>::max(), "{} is {}, cuBLAS takes at most {}", name, value,
        std::numeric_limits<int>::max());
  return static_cast<int>(value);
}

}  // namespace

Cublas::Cublas(cuda::Stream stream) {
  const Api& api = cublas_api();
  if (!api.error.empty()) {
    fail(ErrorCode::unsupported, "cannot open libcublas: {}; set LD_LIBRARY_PATH", api.error);
  }
  // What NVIDIA recommends for Hopper; given by us, so that nothing is allocated in a capture.
  workspace_ = cuda::DeviceBuffer(0, std::size_t{32} << 20);
  require_success(api.create(&handle_), "cublasCreate");
  require_success(api.set_stream(handle_, stream), "cublasSetStream");
  require_success(api.set_workspace(handle_, workspace_.data(), workspace_.bytes()),
                  "cublasSetWorkspace");
}

Cublas::~Cublas() {
  if (handle_ != nullptr) {
    cublas_api().destroy(handle_);
  }
}

void Cublas::multiply(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                      const Matrix& a, const Matrix& b, bool transpose_b, const Matrix& c,
                      std::int64_t count) const {
  check(dtype == DType::f16 || dtype == DType::bf16, "dtype is {}, accepted are f16, bf16",
        to_string(dtype));
  const int type = dtype == DType::f16 ? kRealF16 : kRealBF16;
  const float beta = 0.0F;
  // cuBLAS is column-major and sees each matrix transposed: cᵀ = bᵀ · aᵀ.
  require_success(cublas_api().gemm(handle_, transpose_b ? kTranspose : kNoTranspose, kNoTranspose,
                                    as_int("n", n), as_int("m", m), as_int("k", k), &alpha, b.data,
                                    type, as_int("the row of b", b.row), b.stride, a.data, type,
                                    as_int("the row of a", a.row), a.stride, &beta, c.data, type,
                                    as_int("the row of c", c.row), c.stride, as_int("count", count),
                                    kComputeF32, kDefaultAlgorithm),
                  "cublasGemmStridedBatchedEx");
}

}  // namespace foveal::bench
