#include "serving/linear.h"

#include <oneapi/dnnl/dnnl.h>

#include <algorithm>
#include <functional>

#include "core/check.h"
#include "serving/openmp.h"

namespace foveal::serving {

void linear(const float* x, std::int64_t m, const Matrix& weight, float* y, bool accumulate,
            ThreadPool& threads) {
  const std::int64_t n = weight.rows;
  const std::int64_t k = weight.cols;
  // Slices of the output's columns depend on the matrix alone, so that each column is always
  // computed by the same call. Sixteen are enough to keep the threads of usual machines busy to the
  // end, and a multiple of 16 columns is a whole number of registers for oneDNN's kernels.
  const std::int64_t width = std::max<std::int64_t>(16, (n / 16 + 15) / 16 * 16);
  const auto slice = [&](std::int64_t i, int) {
    keep_openmp_to_one_thread();
    const std::int64_t begin = i * width;
    const std::int64_t columns = std::min(width, n - begin);
    const dnnl_status_t status =
        dnnl_sgemm('N', 'T', m, columns, k, 1.0F, x, k, weight.data.data() + begin * k, k,
                   accumulate ? 1.0F : 0.0F, y + begin, n);
    if (status != dnnl_success) {
      fail(ErrorCode::device, "oneDNN's sgemm of [{}, {}] by [{}, {}] gave status {}", m, k,
           columns, k, static_cast<int>(status));
    }
  };
  // std::function keeps a reference in place, where the closure itself would cost an allocation.
  threads.parallel_for((n + width - 1) / width, std::ref(slice));
}

}  // namespace foveal::serving
