#include "cpu/cache_ops.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <functional>
#include <iterator>

#include "core/check.h"
#include "core/convert.h"
#include "core/tensor_checks.h"
#include "cpu/row_convert.h"

namespace foveal::cpu {
namespace {

/// A thread's piece of work: enough to be worth a wake-up.
constexpr std::int64_t kTokensPerTask = 32;

/// One token's keys or values on their way into the cache, head by head.
class RowWriter {
 public:
  RowWriter(const TensorView& tokens, const TensorView& cache, float scale)
      : tokens_(tokens),
        cache_(cache),
        // What is fp8 on either side stands there as value / scale.
        source_scale_(is_fp8(tokens.dtype()) ? scale : 1.0F),
        cache_scale_(is_fp8(cache.dtype()) ? scale : 1.0F) {}

  void write(std::int64_t token, std::int64_t slot) const {
    const std::int64_t block = slot / cache_.size(1);
    const std::int64_t offset = slot % cache_.size(1);
    for (std::int64_t head = 0; head < cache_.size(2); ++head) {
      write_row(token * tokens_.stride(0) + head * tokens_.stride(1),
                block * cache_.stride(0) + offset * cache_.stride(1) + head * cache_.stride(2));
    }
  }

 private:
  /// The offsets are in elements.
  void write_row(std::int64_t source, std::int64_t target) const {
    const std::int64_t size = cache_.size(3);
    const bool contiguous = size == 1 || (tokens_.stride(2) == 1 && cache_.stride(3) == 1);
    const std::byte* const from = tokens_.as<const std::byte>() + source * size_of(tokens_.dtype());
    std::byte* const to = cache_.as<std::byte>() + target * size_of(cache_.dtype());
    if (contiguous && tokens_.dtype() == cache_.dtype()) {
      std::memcpy(to, from, static_cast<std::size_t>(size * size_of(cache_.dtype())));
    } else if (contiguous && source_scale_ == 1.0F && is_row_dtype(tokens_.dtype())) {
      std::array<float, 256> piece;
      for (std::int64_t i = 0; i < size; i += std::ssize(piece)) {
        const auto count = static_cast<std::size_t>(std::min(std::ssize(piece), size - i));
        row_to_float(tokens_.dtype(), from + i * size_of(tokens_.dtype()), piece.data(), count);
        row_from_float(cache_.dtype(), piece.data(), cache_scale_, to + i * size_of(cache_.dtype()),
                       count);
      }
    } else {
      for (std::int64_t i = 0; i < size; ++i) {
        const double value =
            load_element(from, tokens_.dtype(), i * tokens_.stride(2)) * source_scale_;
        store_element(to, cache_.dtype(), i * cache_.stride(3), value / cache_scale_);
      }
    }
  }

  const TensorView& tokens_;
  const TensorView& cache_;
  float source_scale_;
  float cache_scale_;
};

}  // namespace

void reshape_and_cache(const TensorView& key, const TensorView& value, const KVCacheView& kv_cache,
                       const TensorView& slot_mapping, const QuantScales& scales,
                       const ExecutionContext& context) {
  check(key.device().type == DeviceType::cpu, "key is {}, it must be on cpu", key);
  const RowWriter key_writer(key, kv_cache.key, scales.k);
  const RowWriter value_writer(value, kv_cache.value, scales.v);
  const auto* const slots = slot_mapping.as<const std::int64_t>();
  const std::int64_t num_tokens = slot_mapping.size(0);
  const auto write_tokens = [&](std::int64_t task, int /*worker*/) {
    const std::int64_t end = std::min(num_tokens, (task + 1) * kTokensPerTask);
    for (std::int64_t token = task * kTokensPerTask; token < end; ++token) {
      const std::int64_t slot = slots[token * slot_mapping.stride(0)];
      if (slot >= 0) {
        key_writer.write(token, slot);
        value_writer.write(token, slot);
      }
    }
  };
  if (num_tokens <= kTokensPerTask) {
    write_tokens(0, 0);
    return;
  }
  // By reference: a std::function of so large a lambda would allocate.
  context.pool().parallel_for((num_tokens + kTokensPerTask - 1) / kTokensPerTask,
                              std::cref(write_tokens));
}

}  // namespace foveal::cpu
