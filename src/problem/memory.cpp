#include "problem/memory.h"

#include <algorithm>
#include <array>
#include <numeric>

#include "core/check.h"
#include "core/convert.h"
#include "core/index.h"

namespace foveal::problem {
namespace {

constexpr std::int64_t kGap = 8;  ///< Elements, so that what was aligned to 8 elements stays so.
constexpr std::int64_t kUnnamedBlocks = 2;

/// The pool's blocks but the null block, in an order that depends on the seed only.
std::vector<std::int64_t> shuffled_blocks(std::int64_t num_blocks, std::uint64_t seed) {
  std::vector<std::int64_t> ids(at(num_blocks - 1));
  std::iota(ids.begin(), ids.end(), 1);
  std::uint64_t state = seed * 2 + 1;
  for (std::size_t i = ids.size(); i > 1; --i) {
    state = state * 6364136223846793005U + 1442695040888963407U;
    std::swap(ids[i - 1], ids[(state >> 33) % i]);
  }
  return ids;
}

CacheShape own_layout(const AttentionBackend& backend, const KVCacheSpec& spec,
                      std::int64_t num_blocks, KVCacheOrder order) {
  const KVCacheLayout layout = backend.kv_cache_layout(spec, num_blocks, order);
  return {layout.size_bytes() / size_of(layout.dtype), [=, &backend](GuardedBuffer& buffer) {
            return backend.kv_cache_view(layout.view(buffer.data()), spec);
          }};
}

CacheShape kv_first_layout(const KVCacheSpec& spec, std::int64_t num_blocks) {
  check(spec.head_size == spec.head_size_v,
        "CacheStyle::kv_first needs keys and values of one size, they have {} and {}",
        spec.head_size, spec.head_size_v);
  const std::array<std::int64_t, 5> shape{2, num_blocks, spec.block_size, spec.num_kv_heads,
                                          spec.head_size};
  return {2 * num_blocks * spec.block_size * spec.num_kv_heads * spec.head_size,
          [=](GuardedBuffer& buffer) {
            return KVCacheView::from_kv_first(TensorView(buffer.data(), spec.dtype, shape));
          }};
}

CacheShape packed_layout(const KVCacheSpec& spec, std::int64_t num_blocks) {
  const std::array<std::int64_t, 4> shape{num_blocks, spec.num_kv_heads, spec.block_size,
                                          spec.head_size + spec.head_size_v};
  return {shape[0] * shape[1] * shape[2] * shape[3], [=](GuardedBuffer& buffer) {
            return KVCacheView::from_packed(TensorView(buffer.data(), spec.dtype, shape),
                                            spec.head_size);
          }};
}

CacheShape padded_layout(const KVCacheSpec& spec, std::int64_t num_blocks) {
  const auto head_stride = [&](std::int64_t size) { return size + kGap; };
  const auto token_stride = [&](std::int64_t size) {
    return spec.num_kv_heads * head_stride(size) + kGap;
  };
  const std::int64_t key_part = spec.block_size * token_stride(spec.head_size);
  const std::int64_t block_stride =
      key_part + spec.block_size * token_stride(spec.head_size_v) + kGap;
  const std::array<std::int64_t, 4> key_shape{num_blocks, spec.block_size, spec.num_kv_heads,
                                              spec.head_size};
  const std::array<std::int64_t, 4> key_strides{block_stride, token_stride(spec.head_size),
                                                head_stride(spec.head_size), 1};
  const std::array<std::int64_t, 4> value_shape{num_blocks, spec.block_size, spec.num_kv_heads,
                                                spec.head_size_v};
  const std::array<std::int64_t, 4> value_strides{block_stride, token_stride(spec.head_size_v),
                                                  head_stride(spec.head_size_v), 1};
  return {num_blocks * block_stride, [=](GuardedBuffer& buffer) {
            return KVCacheView{buffer.view(key_shape, key_strides),
                               buffer.view(value_shape, value_strides, key_part)};
          }};
}

}  // namespace

CacheShape cache_shape(const AttentionProblem& problem, const AttentionBackend& backend,
                       CacheStyle style, std::int64_t num_kernel_blocks,
                       std::int64_t kernel_block_size) {
  const KVCacheSpec spec = KVCacheSpec::from(problem.spec, kernel_block_size);
  switch (style) {
    case CacheStyle::nhd:
      return own_layout(backend, spec, num_kernel_blocks, KVCacheOrder::nhd);
    case CacheStyle::hnd:
      return own_layout(backend, spec, num_kernel_blocks, KVCacheOrder::hnd);
    case CacheStyle::kv_first:
      return kv_first_layout(spec, num_kernel_blocks);
    case CacheStyle::packed:
      return packed_layout(spec, num_kernel_blocks);
    case CacheStyle::padded:
      return padded_layout(spec, num_kernel_blocks);
  }
  fail(ErrorCode::invalid_argument, "CacheStyle is {}, there is none of that number",
       static_cast<int>(style));
}

RowTensor::RowTensor(std::string name, DType dtype, std::int64_t rows, std::int64_t heads,
                     std::int64_t size, std::int64_t row_gap, double fill)
    : buffer(dtype, rows * (heads * size + row_gap), fill) {
  const std::array<std::int64_t, 3> shape{rows, heads, size};
  const std::array<std::int64_t, 3> strides{heads * size + row_gap, size, 1};
  view = buffer.view(shape, strides);
  names = {{std::move(name), view}};
}

void RowTensor::fill(std::int64_t to, const std::vector<double>& numbers, std::int64_t first,
                     std::int64_t count) {
  const std::int64_t width = view.size(1) * view.size(2);
  for (std::int64_t row = 0; row < count; ++row) {
    for (std::int64_t i = 0; i < width; ++i) {
      store_element(view.data(), view.dtype(), (to + row) * view.stride(0) + i,
                    numbers[at((first + row) * width + i)]);
    }
  }
}

std::vector<double> RowTensor::read(std::int64_t rows) const {
  const std::int64_t width = view.size(1) * view.size(2);
  std::vector<double> numbers;
  numbers.reserve(at(rows * width));
  for (std::int64_t row = 0; row < rows; ++row) {
    for (std::int64_t i = 0; i < width; ++i) {
      numbers.push_back(load_element(view.data(), view.dtype(), row * view.stride(0) + i));
    }
  }
  return numbers;
}

BlockPlan::BlockPlan(const AttentionProblem& problem, std::uint64_t seed)
    : num_blocks(problem.num_blocks), blocks(problem.block_ids) {
  const auto blocks_of = [&](std::int64_t tokens) {
    return (tokens + problem.block_size - 1) / problem.block_size;
  };
  std::int64_t padding = kNullBlock;
  if (blocks.empty()) {
    const std::int64_t shared = problem.common_prefix_len / problem.block_size;
    std::int64_t needed = shared;
    for (const Request& request : problem.requests) {
      needed += std::max<std::int64_t>(blocks_of(request.kv_len) - shared, 0);
    }
    num_blocks = 1 + needed + kUnnamedBlocks;
    const std::vector<std::int64_t> pool = shuffled_blocks(num_blocks, seed);
    std::int64_t next = shared;
    for (const Request& request : problem.requests) {
      std::vector<std::int64_t>& own = blocks.emplace_back();
      for (std::int64_t b = 0; b < blocks_of(request.kv_len); ++b) {
        own.push_back(pool[at(b < shared ? b : next++)]);
      }
    }
    padding = pool.back();
  }

  width = 1;
  for (const Request& request : problem.requests) {
    width = std::max(width, blocks_of(request.kv_len) + 1);
  }
  const std::int64_t num_reqs = std::ssize(problem.requests) + problem.padded_requests;
  for (std::int64_t r = 0; r < num_reqs; ++r) {
    for (std::int64_t b = 0; b < width; ++b) {
      const bool named =
          r < std::ssize(problem.requests) && b < blocks_of(problem.requests[at(r)].kv_len);
      table.push_back(static_cast<std::int32_t>(named ? blocks[at(r)][at(b)] : padding));
    }
  }
}

std::int64_t BlockPlan::slot(const AttentionProblem& problem, std::int64_t request,
                             std::int64_t position) const {
  return blocks[at(request)][at(position / problem.block_size)] * problem.block_size +
         position % problem.block_size;
}

CacheMemory::CacheMemory(DType dtype, const CacheShape& shape, double poison)
    : buffer(dtype, shape.elements, poison),
      view(shape.view(buffer)),
      names({{"kv_cache.key", view.key}, {"kv_cache.value", view.value}}) {}

void CacheMemory::write(const AttentionProblem& problem, std::int64_t token, std::int64_t slot) {
  put(problem, token, slot, true);
}

void CacheMemory::expect(const AttentionProblem& problem, std::int64_t token, std::int64_t slot) {
  put(problem, token, slot, false);
}

void CacheMemory::put(const AttentionProblem& problem, std::int64_t token, std::int64_t slot,
                      bool now) {
  for (const auto& [tensor, numbers] :
       {std::pair{view.key, &problem.stored_key}, std::pair{view.value, &problem.stored_value}}) {
    const std::int64_t heads = tensor.size(2);
    const std::int64_t size = tensor.size(3);
    for (std::int64_t i = 0; i < heads * size; ++i) {
      const std::array<std::int64_t, 4> index{slot / tensor.size(1), slot % tensor.size(1),
                                              i / size, i % size};
      const double number = (*numbers)[at(token * heads * size + i)];
      if (now) {
        std::int64_t offset = 0;
        for (int d = 0; d < 4; ++d) {
          offset += index[at(d)] * tensor.stride(d);
        }
        store_element(tensor.data(), tensor.dtype(), offset, number);
      } else {
        buffer.expect(tensor, index, number);
      }
    }
  }
}

}  // namespace foveal::problem
