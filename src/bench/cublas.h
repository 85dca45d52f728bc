#pragma once

#include <cstdint>

#include "cuda/driver.h"
#include "foveal/dtype.h"

namespace foveal::bench {

/// cuBLAS, opened when first needed: for the naive way and the rate of products; nothing of it is
/// linked.
class Cublas {
 public:
  /// Needs a context to be current. Throws unsupported when the library cannot be opened.
  explicit Cublas(cuda::Stream stream);
  ~Cublas();
  Cublas(const Cublas&) = delete;
  Cublas& operator=(const Cublas&) = delete;

  /// For each of `count` problems, all row-major, one behind the other:
  ///   c[m, n] = alpha · a[m, k] · b, with b [k, n], or [n, k] where `transpose_b`.
  /// Strides are from one problem to the next and `row` from one row to the next, in elements;
  /// numbers are f16 or bf16, sums f32.
  struct Matrix {
    void* data;
    std::int64_t row;
    std::int64_t stride;
  };
  void multiply(DType dtype, std::int64_t m, std::int64_t n, std::int64_t k, float alpha,
                const Matrix& a, const Matrix& b, bool transpose_b, const Matrix& c,
                std::int64_t count) const;

 private:
  void* handle_ = nullptr;
  cuda::DeviceBuffer workspace_;
};

}  // namespace foveal::bench
