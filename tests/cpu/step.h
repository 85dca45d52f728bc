#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <limits>
#include <random>
#include <vector>

#include "core/builtin_backends.h"
#include "core/convert.h"
#include "foveal/backend.h"
#include "foveal/registry.h"
#include "hwy/highway.h"

namespace foveal::testing {

inline AttentionBackendPtr cpu_backend() { return BackendRegistry::global().get("CPU_ATTN"); }

/// Runs `check` once on every Highway target that was compiled and that the machine has.
inline void for_each_target(const std::function<void(const char* name)>& check) {
  cpu_backend();  // Looks at the machine as it is.
  for (const std::int64_t target : hwy::SupportedAndGeneratedTargets()) {
    hwy::SetSupportedTargetsForTest(target);
    hwy::GetChosenTarget().Update(hwy::SupportedTargets());
    check(hwy::TargetName(target));
  }
  hwy::SetSupportedTargetsForTest(0);
  hwy::GetChosenTarget().Update(hwy::SupportedTargets());
}

struct Request {
  std::int64_t query_len;
  std::int64_t seq_len;
};

struct Result {
  std::vector<double> output;  ///< [tokens][heads][head_size_v]
  std::vector<float> lse;      ///< [heads][tokens]
};

/// A step over a paged cache (or plain keys) full of NaN wherever no request has a token.
struct Step {
  AttentionSpec spec;
  std::vector<Request> requests;
  std::int64_t block_size = 16;
  std::int64_t kernel_block_size = 0;
  KVCacheOrder order = KVCacheOrder::nhd;
  bool causal = true;
  bool plain = false;
  std::int64_t shared_prefix = 0;   ///< Leading tokens that all requests keep in the same blocks.
  std::int64_t padding_rows = 0;    ///< Rows that count but belong to no request.
  std::int64_t untouched_rows = 0;  ///< Rows past num_actual_tokens.

  std::int64_t num_tokens = 0;  ///< num_actual_tokens
  std::int64_t num_blocks = 0;
  std::int64_t table_width = 0;
  std::vector<std::int32_t> query_start_loc{0};
  std::vector<std::int32_t> key_start_loc{0};
  std::vector<std::int32_t> seq_lens;
  std::vector<std::int32_t> block_table;
  std::vector<std::byte> query;
  std::vector<std::byte> cache;  ///< Or plain keys, then values.
  std::vector<std::byte> value;  ///< Plain.
  KVCacheView cache_views;

  std::int64_t rows() const { return num_tokens + untouched_rows; }
  KVCacheSpec cache_spec() const { return KVCacheSpec::from(spec, block_size); }

  TensorView query_view() {
    return {query.data(), spec.dtype, {rows(), spec.num_heads, spec.head_size}};
  }
  const KVCacheView& cache_view() {
    if (!cache_views.empty()) {
      return cache_views;
    }
    KVCacheSpec kernel_spec = cache_spec();
    std::int64_t blocks = num_blocks;
    if (kernel_block_size != 0) {
      kernel_spec.block_size = kernel_block_size;
      blocks *= block_size / kernel_block_size;
    }
    const auto backend = cpu_backend();
    cache_views = backend->kv_cache_view(
        backend->kv_cache_layout(kernel_spec, blocks, order).view(cache.data()), kernel_spec);
    return cache_views;
  }
  TensorView key_view() {
    return {cache.data(), spec.dtype, {key_start_loc.back(), spec.num_kv_heads, spec.head_size}};
  }
  TensorView value_view() {
    return {value.data(),
            spec.dtype,
            {key_start_loc.back(), spec.num_kv_heads, spec.value_head_size()}};
  }

  /// Element of a key (or value) as attention sees it, and where it is stored.
  struct Element {
    void* data;
    DType dtype;
    std::int64_t offset;
    double scale;
  };
  Element element(bool is_value, std::int64_t request, std::int64_t position, std::int64_t head,
                  std::int64_t d) {
    const auto r = static_cast<std::size_t>(request);
    if (plain) {
      const TensorView view = is_value ? value_view() : key_view();
      return {view.data(), view.dtype(),
              (key_start_loc[r] + position) * view.stride(0) + head * view.stride(1) + d, 1.0};
    }
    const KVCacheView& views = cache_view();
    const TensorView& view = is_value ? views.value : views.key;
    const std::int64_t slot = block_table[r * static_cast<std::size_t>(table_width) +
                                          static_cast<std::size_t>(position / block_size)] *
                                  block_size +
                              position % block_size;
    const double scale =
        is_fp8(view.dtype()) ? static_cast<double>(is_value ? spec.scales.v : spec.scales.k) : 1.0;
    return {view.data(), view.dtype(),
            slot / view.size(1) * view.stride(0) + slot % view.size(1) * view.stride(1) +
                head * view.stride(2) + d,
            scale};
  }
  double load(bool is_value, std::int64_t request, std::int64_t position, std::int64_t head,
              std::int64_t d) {
    const Element e = element(is_value, request, position, head, d);
    return load_element(e.data, e.dtype, e.offset) * e.scale;
  }
  void store(bool is_value, std::int64_t request, std::int64_t position, std::int64_t head,
             std::int64_t d, double number) {
    const Element e = element(is_value, request, position, head, d);
    store_element(e.data, e.dtype, e.offset, number / e.scale);
  }

  /// Lays out the step and fills it with random numbers.
  void fill(unsigned seed = 1, double key_range = 1.0) {
    std::mt19937 random(seed);
    std::uniform_real_distribution<double> uniform(-1.0, 1.0);
    for (const Request& request : requests) {
      query_start_loc.push_back(query_start_loc.back() +
                                static_cast<std::int32_t>(request.query_len));
      key_start_loc.push_back(key_start_loc.back() + static_cast<std::int32_t>(request.seq_len));
      seq_lens.push_back(static_cast<std::int32_t>(request.seq_len));
      table_width = std::max(table_width, (request.seq_len + block_size - 1) / block_size);
    }
    num_tokens = query_start_loc.back() + padding_rows;

    // Blocks in random order, with unused ones among them; block 0 is nobody's.
    num_blocks = static_cast<std::int64_t>(requests.size()) * table_width + 3;
    std::vector<std::int32_t> ids(static_cast<std::size_t>(num_blocks - 1));
    for (std::size_t i = 0; i < ids.size(); ++i) {
      ids[i] = static_cast<std::int32_t>(i) + 1;
    }
    std::shuffle(ids.begin(), ids.end(), random);
    for (std::size_t r = 0; r < requests.size(); ++r) {
      for (std::int64_t b = 0; b < table_width; ++b) {
        if (b < shared_prefix / block_size && r > 0) {
          block_table.push_back(block_table[static_cast<std::size_t>(b)]);
        } else if (b * block_size < requests[r].seq_len) {
          block_table.push_back(ids.back());
          ids.pop_back();
        } else {
          block_table.push_back(kNullBlock);
        }
      }
    }

    const std::byte nan{0xFF};
    const std::int64_t kv_row =
        spec.num_kv_heads * (spec.head_size + spec.value_head_size()) * size_of(spec.cache_dtype());
    query.assign(
        static_cast<std::size_t>(rows() * spec.num_heads * spec.head_size * size_of(spec.dtype)),
        nan);
    cache.assign(
        static_cast<std::size_t>(kv_row * (plain ? key_start_loc.back() : num_blocks * block_size)),
        nan);
    value.assign(static_cast<std::size_t>(kv_row * (plain ? key_start_loc.back() : 0)), nan);
    for (std::int64_t i = 0; i < query_start_loc.back() * spec.num_heads * spec.head_size; ++i) {
      store_element(query.data(), spec.dtype, i, uniform(random));
    }
    for (std::size_t r = 0; r < requests.size(); ++r) {
      for (std::int64_t p = 0; p < requests[r].seq_len; ++p) {
        for (std::int64_t h = 0; h < spec.num_kv_heads; ++h) {
          for (std::int64_t d = 0; d < spec.head_size; ++d) {
            store(false, static_cast<std::int64_t>(r), p, h, d, key_range * uniform(random));
          }
          for (std::int64_t d = 0; d < spec.value_head_size(); ++d) {
            store(true, static_cast<std::int64_t>(r), p, h, d, uniform(random) + 0.25);
          }
        }
      }
    }
  }

  CommonAttentionMetadata common() {
    CommonAttentionMetadata common;
    common.num_reqs = static_cast<std::int64_t>(requests.size());
    common.num_actual_tokens = num_tokens;
    for (const Request& request : requests) {
      common.max_query_len = std::max(common.max_query_len, request.query_len);
      common.max_seq_len = std::max(common.max_seq_len, request.seq_len);
    }
    common.query_start_loc = {query_start_loc.data(), DType::i32, {common.num_reqs + 1}};
    common.seq_lens = {seq_lens.data(), DType::i32, {common.num_reqs}};
    if (plain) {
      common.key_start_loc = {key_start_loc.data(), DType::i32, {common.num_reqs + 1}};
    } else {
      common.block_table = {block_table.data(), DType::i32, {common.num_reqs, table_width}};
    }
    common.causal = causal;
    return common;
  }

  BuilderConfig config() const {
    BuilderConfig config;
    config.spec = spec;
    config.block_size = block_size;
    config.kernel_block_size = kernel_block_size;
    config.num_blocks = num_blocks;
    config.num_threads = 2;
    return config;
  }

  Result run(const BuilderConfig& config, std::int64_t prefix = 0, int num_threads = 2) {
    const auto backend = cpu_backend();
    const auto builder = backend->make_builder(config);
    const auto metadata = builder->build(prefix, common());
    return run_planned(*metadata, num_threads);
  }
  Result run() { return run(config()); }

  Result run_planned(const AttentionMetadata& metadata, int num_threads = 2,
                     const TensorView& workspace = {}) {
    const std::int64_t size_v = spec.value_head_size();
    std::vector<std::byte> output(
        static_cast<std::size_t>(rows() * spec.num_heads * size_v * size_of(spec.dtype)),
        std::byte{0x3E});
    Result result;
    result.lse.assign(static_cast<std::size_t>(spec.num_heads * rows()), 77.0F);
    ForwardArgs args;
    args.query = query_view();
    if (plain) {
      args.key = key_view();
      args.value = value_view();
    } else {
      args.kv_cache = cache_view();
    }
    args.output = {output.data(), spec.dtype, {rows(), spec.num_heads, size_v}};
    args.lse = {result.lse.data(), DType::f32, {spec.num_heads, rows()}};
    const auto pool = make_thread_pool(num_threads);
    ExecutionContext context;
    context.threads = pool.get();
    context.workspace = workspace;
    cpu_backend()->make_impl(spec)->forward(args, metadata, context);
    for (std::int64_t i = 0; i < rows() * spec.num_heads * size_v; ++i) {
      result.output.push_back(load_element(output.data(), spec.dtype, i));
    }
    return result;
  }

  /// All keys and values of a request, [position][KV head][size].
  void gather(std::int64_t request, std::vector<double>& keys, std::vector<double>& values) {
    keys.clear();
    values.clear();
    for (std::int64_t p = 0; p < requests[static_cast<std::size_t>(request)].seq_len; ++p) {
      for (std::int64_t h = 0; h < spec.num_kv_heads; ++h) {
        for (std::int64_t d = 0; d < spec.head_size; ++d) {
          keys.push_back(load(false, request, p, h, d));
        }
        for (std::int64_t d = 0; d < spec.value_head_size(); ++d) {
          values.push_back(load(true, request, p, h, d));
        }
      }
    }
  }

  /// The same in float64, straight from the contract.
  Result naive() {
    const std::int64_t size_v = spec.value_head_size();
    const double infinity = std::numeric_limits<double>::infinity();
    std::vector<double> keys;
    std::vector<double> values;
    Result result;
    result.output.assign(static_cast<std::size_t>(num_tokens * spec.num_heads * size_v), 0.0);
    result.lse.assign(static_cast<std::size_t>(spec.num_heads * rows()), 77.0F);
    for (std::int64_t h = 0; h < spec.num_heads; ++h) {
      for (std::int64_t t = 0; t < num_tokens; ++t) {
        result.lse[static_cast<std::size_t>(h * rows() + t)] = static_cast<float>(-infinity);
      }
    }
    for (std::int64_t r = 0; r < static_cast<std::int64_t>(requests.size()); ++r) {
      const auto [query_len, seq_len] = requests[static_cast<std::size_t>(r)];
      for (std::int64_t i = 0; i < query_len * spec.num_heads; ++i) {
        const std::int64_t row = i / spec.num_heads;
        const std::int64_t head = i % spec.num_heads;
        const std::int64_t kv_head = head / spec.group_size();
        const std::int64_t token = query_start_loc[static_cast<std::size_t>(r)] + row;
        const std::int64_t position = seq_len - query_len + row;
        if (i % spec.num_heads == 0 && row == 0) {
          gather(r, keys, values);
        }
        std::vector<double> scores(static_cast<std::size_t>(seq_len), -infinity);
        double max = -infinity;
        for (std::int64_t p = 0; p < seq_len; ++p) {
          const ScoreIndex index{r, head, row, position, p};
          if ((causal && p > position) ||
              (spec.window.left >= 0 && p < position - spec.window.left) ||
              (spec.window.right >= 0 && p > position + spec.window.right) ||
              (spec.mask_mod && !spec.mask_mod(index))) {
            continue;
          }
          double s = 0.0;
          for (std::int64_t d = 0; d < spec.head_size; ++d) {
            s += load_element(query.data(), spec.dtype,
                              (token * spec.num_heads + head) * spec.head_size + d) *
                 keys[static_cast<std::size_t>((p * spec.num_kv_heads + kv_head) * spec.head_size +
                                               d)];
          }
          s *= static_cast<double>(spec.softmax_scale());
          if (spec.logits_soft_cap > 0.0F) {
            s = spec.logits_soft_cap * std::tanh(s / spec.logits_soft_cap);
          }
          if (spec.score_mod) {
            s = spec.score_mod(static_cast<float>(s), index);
          } else if (!spec.alibi_slopes.empty()) {
            s += spec.alibi_slopes[static_cast<std::size_t>(head)] *
                 static_cast<double>(p - position);
          }
          scores[static_cast<std::size_t>(p)] = s;
          max = std::max(max, s);
        }
        if (max == -infinity) {
          continue;
        }
        double sum = 0.0;
        for (double& s : scores) {
          s = std::exp(s - max);
          sum += s;
        }
        result.lse[static_cast<std::size_t>(head * rows() + token)] =
            static_cast<float>(max + std::log(sum));
        if (!spec.sinks.empty()) {
          sum += std::exp(spec.sinks[static_cast<std::size_t>(head)] - max);
        }
        for (std::int64_t p = 0; p < seq_len; ++p) {
          for (std::int64_t d = 0; d < size_v && scores[static_cast<std::size_t>(p)] > 0.0; ++d) {
            result.output[static_cast<std::size_t>((token * spec.num_heads + head) * size_v + d)] +=
                scores[static_cast<std::size_t>(p)] / sum *
                values[static_cast<std::size_t>((p * spec.num_kv_heads + kv_head) * size_v + d)];
          }
        }
      }
    }
    return result;
  }
};

inline AttentionSpec make_spec(std::int64_t heads, std::int64_t kv_heads, std::int64_t size,
                               DType dtype = DType::f32) {
  AttentionSpec spec;
  spec.num_heads = heads;
  spec.num_kv_heads = kv_heads;
  spec.head_size = size;
  spec.dtype = dtype;
  return spec;
}

}  // namespace foveal::testing
