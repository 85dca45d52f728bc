// CPU_MLA against REFERENCE_MLA, with the bounds of problem/judge.h: both ways are problems of
// ordinary attention, and bounds follow from those.

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>
#include <random>
#include <string>
#include <vector>

#include "core/convert.h"
#include "core/index.h"
#include "cpu/step.h"
#include "foveal/registry.h"
#include "foveal/selector.h"
#include "problem/judge.h"
#include "support/expect_error.h"

namespace foveal::testing {
namespace {

using problem::AttentionProblem;
using problem::RunResult;
using problem::Solution;

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kUntouched = 77.0;
constexpr std::int64_t kRowsPastTheEnd = 2;

const MlaDims kSmall{
    .kv_lora_rank = 20, .qk_nope_head_dim = 9, .qk_rope_head_dim = 4, .v_head_dim = 7};
const MlaDims kReal{};  // DeepSeek's: 576 and 512, 192 and 128.

AttentionBackendPtr mla_backend() { return BackendRegistry::global().get("CPU_MLA"); }

AttentionSpec mla_spec(const MlaDims& dims, std::int64_t heads, DType dtype = DType::f32) {
  AttentionSpec spec;
  spec.num_heads = heads;
  spec.num_kv_heads = 1;
  spec.head_size = dims.cache_entry();
  spec.head_size_v = dims.kv_lora_rank;
  spec.scale = 1.2F / std::sqrt(static_cast<float>(dims.qk_head_dim()));
  spec.dtype = dtype;
  spec.mla = dims;
  return spec;
}

/// Prefill, a continued chunk, decodes, and the legal oddities: no keys, no queries, more queries
/// than keys.
std::vector<problem::Request> ragged() {
  return {{9, 9}, {1, 131}, {5, 70}, {1, 1}, {0, 40}, {3, 0}, {0, 0}, {6, 4}};
}

/// One way of a layer, and the same as a problem without MLA: spec.mla is unset there.
struct MlaProblem {
  AttentionSpec spec;
  AttentionProblem plain;
};

AttentionProblem without_mla(const AttentionSpec& spec,
                             const std::vector<problem::Request>& requests) {
  AttentionProblem plain;
  plain.spec = spec;
  plain.spec.mla.reset();
  plain.requests = requests;
  plain.padded_requests = 1;
  plain.unowned_rows = 2;
  return plain;
}

MlaProblem make_mqa(const AttentionSpec& spec,
                    const std::vector<problem::Request>& requests = ragged()) {
  MlaProblem mla{spec, without_mla(spec, requests)};
  AttentionProblem& plain = mla.plain;
  plain.spec.scales.v = plain.spec.scales.k;  // The value is part of the key.
  plain.fill_random(5);
  for (std::int64_t i = 0; i < std::ssize(plain.value); ++i) {
    plain.value[at(i)] =
        plain.key[at(i / spec.head_size_v * spec.head_size + i % spec.head_size_v)];
  }
  plain.quantize();
  return mla;
}

MlaProblem make_mha(const AttentionSpec& spec,
                    const std::vector<problem::Request>& requests = ragged(), bool causal = true) {
  MlaProblem mla{spec, without_mla(spec, requests)};
  AttentionProblem& plain = mla.plain;
  plain.paged = false;
  plain.causal = causal;
  plain.spec.num_kv_heads = spec.num_heads;
  plain.spec.head_size = spec.mla->qk_head_dim();
  plain.spec.head_size_v = spec.mla->v_head_dim;
  plain.spec.kv_cache_dtype.reset();
  plain.fill_random(6);
  return mla;
}

/// What must not matter.
struct Layout {
  std::int64_t block_size = 16;
  std::int64_t kernel_block_size = 0;
  std::int64_t num_splits = 0;
  std::int64_t gap = 3;  ///< Elements between rows of tensors and between entries of the cache.
  double poison = kNan;  ///< In unused slots, blocks, rows and gaps.
  int num_threads = 2;
  bool batch_invariant = false;
};

/// A tensor with gaps behind its innermost rows.
class Tensor {
 public:
  Tensor(DType dtype, const std::vector<std::int64_t>& shape, std::int64_t gap, double fill)
      : row_(shape.back()), pitch_(shape.back() + gap) {
    std::vector<std::int64_t> strides(shape.size(), 1);
    std::int64_t stride = pitch_;
    for (std::size_t d = shape.size() - 1; d-- > 0;) {
      strides[d] = stride;
      stride *= shape[d];
    }
    size_ = stride / pitch_ * row_;
    bytes_.resize(at(std::max<std::int64_t>(stride, 1) * size_of(dtype)));
    for (std::int64_t i = 0; i < stride; ++i) {
      store_element(bytes_.data(), dtype, i, fill);
    }
    view_ = {bytes_.data(), dtype, shape, strides};
  }

  Tensor(Tensor&&) = default;  // The view follows the bytes, which stay where they are.
  Tensor(const Tensor&) = delete;

  const TensorView& view() const { return view_; }
  std::int64_t size() const { return size_; }
  void store(std::int64_t i, double number) {
    store_element(bytes_.data(), view_.dtype(), i / row_ * pitch_ + i % row_, number);
  }
  double load(std::int64_t i) const {
    return load_element(bytes_.data(), view_.dtype(), i / row_ * pitch_ + i % row_);
  }
  /// Everything that is not among the first `count` numbers.
  void expect_untouched_past(std::int64_t count) const {
    for (std::int64_t i = 0; i < size_ / row_ * pitch_; ++i) {
      if (i % pitch_ >= row_ || i / pitch_ * row_ >= count) {
        ASSERT_EQ(load_element(bytes_.data(), view_.dtype(), i), kUntouched) << "element " << i;
      }
    }
  }

 private:
  std::int64_t row_;
  std::int64_t pitch_;
  std::int64_t size_ = 0;
  std::vector<std::byte> bytes_;
  TensorView view_;
};

Tensor filled(DType dtype, const std::vector<std::int64_t>& shape, const Layout& layout,
              const std::vector<double>& numbers) {
  Tensor tensor(dtype, shape, layout.gap, layout.poison);
  for (std::int64_t i = 0; i < std::ssize(numbers); ++i) {
    tensor.store(i, numbers[at(i)]);
  }
  return tensor;
}

/// The metadata's tensors.
struct Tables {
  Tables(const AttentionProblem& plain, const Layout& layout) : num_reqs(plain.padded_requests) {
    for (const problem::Request& request : plain.requests) {
      starts.push_back(starts.back() + static_cast<std::int32_t>(request.q_len));
      key_starts.push_back(key_starts.back() + static_cast<std::int32_t>(request.kv_len));
      lens.push_back(static_cast<std::int32_t>(request.kv_len));
      width = std::max(width, (request.kv_len + layout.block_size - 1) / layout.block_size);
      ++num_reqs;
    }
    for (std::int64_t i = 0; i < plain.padded_requests; ++i) {
      starts.push_back(starts.back());
      key_starts.push_back(key_starts.back());
      lens.push_back(0);
    }
    common.num_reqs = num_reqs;
    common.num_actual_tokens = plain.rows();
    common.max_query_len = starts.back();
    common.max_seq_len = *std::max_element(lens.begin(), lens.end());
    common.query_start_loc = {starts.data(), DType::i32, {num_reqs + 1}};
    common.seq_lens = {lens.data(), DType::i32, {num_reqs}};
    common.causal = plain.causal;
    if (!plain.paged) {
      common.key_start_loc = {key_starts.data(), DType::i32, {num_reqs + 1}};
      return;
    }
    // Blocks in random order with unused ones among them; padding names the null block.
    num_blocks = num_reqs * width + 3;
    std::vector<std::int32_t> ids(at(num_blocks - 1));
    std::iota(ids.begin(), ids.end(), 1);
    std::shuffle(ids.begin(), ids.end(), std::mt19937(9));
    table.assign(at(num_reqs * width), kNullBlock);
    for (std::int64_t r = 0; r < num_reqs; ++r) {
      for (std::int64_t position = 0; position < lens[at(r)]; ++position) {
        std::int32_t& block = table[at(r * width + position / layout.block_size)];
        if (position % layout.block_size == 0) {
          block = ids.back();
          ids.pop_back();
        }
        slots.push_back(block * layout.block_size + position % layout.block_size);
      }
    }
    common.block_table = {table.data(), DType::i32, {num_reqs, width}};
  }

  std::int64_t num_reqs = 0;
  std::int64_t width = 1;
  std::int64_t num_blocks = 0;
  std::vector<std::int32_t> starts{0};
  std::vector<std::int32_t> key_starts{0};
  std::vector<std::int32_t> lens;
  std::vector<std::int32_t> table;
  std::vector<std::int64_t> slots;  ///< Of all keys.
  CommonAttentionMetadata common;
};

/// Runs either way on a backend. REFERENCE_MLA runs in float64, on what the stored numbers mean.
RunResult run_on(const std::string& id, const MlaProblem& mla, const Layout& layout = {}) {
  const bool exact = id == "REFERENCE_MLA";
  const AttentionProblem& plain = mla.plain;
  const MlaDims& dims = *mla.spec.mla;
  AttentionSpec spec = mla.spec;
  std::vector<double> keys = plain.key;
  if (exact) {
    spec.dtype = DType::f64;
    spec.kv_cache_dtype.reset();
    if (plain.paged) {
      keys = plain.stored_key;
      for (double& number : keys) {
        number *= problem::scale_in(mla.spec.cache_dtype(), mla.spec.scales.k);
      }
    }
  }
  Tables tables(plain, layout);
  BuilderConfig config;
  config.spec = spec;
  config.block_size = layout.block_size;
  config.kernel_block_size = layout.kernel_block_size;
  config.num_blocks = tables.num_blocks;
  config.num_splits = layout.num_splits;
  config.num_threads = layout.num_threads;
  config.batch_invariant = layout.batch_invariant;
  const AttentionBackendPtr backend = BackendRegistry::global().get(id);
  const auto metadata = backend->make_builder(config)->build(0, tables.common);
  const auto impl = backend->make_mla_impl(spec);
  const auto pool = make_thread_pool(layout.num_threads);
  ExecutionContext context;
  context.threads = pool.get();

  const std::int64_t heads = spec.num_heads;
  const std::int64_t rows = plain.rows();
  const std::int64_t size_v = plain.spec.head_size_v;
  Tensor query = filled(spec.dtype, {rows + kRowsPastTheEnd, heads, plain.spec.head_size}, layout,
                        plain.query);
  for (std::int64_t i = plain.owned_rows() * heads * plain.spec.head_size; i < query.size(); ++i) {
    query.store(i, layout.poison);
  }
  Tensor output(spec.dtype, {rows + kRowsPastTheEnd, heads, size_v}, layout.gap, kUntouched);
  Tensor lse(DType::f32, {rows + kRowsPastTheEnd, heads}, layout.gap, kUntouched);
  const TensorView lse_view = lse.view().permute({1, 0});
  if (plain.paged) {
    const std::int64_t kernel_block =
        layout.kernel_block_size == 0 ? layout.block_size : layout.kernel_block_size;
    const Tensor cache(
        spec.cache_dtype(),
        {tables.num_blocks * layout.block_size / kernel_block, kernel_block, dims.cache_entry()},
        layout.gap, layout.poison);
    // Latents and rotated keys as the two parts of one tensor: views with strides.
    std::vector<std::int64_t> slots = tables.slots;
    slots.push_back(kPaddingSlot);
    keys.resize(keys.size() + at(dims.cache_entry()), layout.poison);
    const std::int64_t tokens = std::ssize(slots);
    const Tensor entries = filled(spec.dtype, {tokens, dims.cache_entry()}, layout, keys);
    impl->update_kv_cache(entries.view().slice(1, 0, dims.kv_lora_rank),
                          entries.view().slice(1, dims.kv_lora_rank, dims.cache_entry()),
                          cache.view(), {slots.data(), DType::i64, {tokens}}, context);
    impl->forward_mqa(
        {.query = query.view(), .kv_cache = cache.view(), .output = output.view(), .lse = lse_view},
        *metadata, context);
  } else {
    const Tensor key =
        filled(spec.dtype, {plain.keys(), heads, plain.spec.head_size}, layout, keys);
    const Tensor value = filled(spec.dtype, {plain.keys(), heads, size_v}, layout, plain.value);
    impl->forward_mha({.query = query.view(),
                       .key = key.view(),
                       .value = value.view(),
                       .output = output.view(),
                       .lse = lse_view},
                      *metadata, context);
  }
  output.expect_untouched_past(rows * heads * size_v);
  lse.expect_untouched_past(rows * heads);
  RunResult result;
  result.backend = id;
  for (std::int64_t i = 0; i < rows * heads * size_v; ++i) {
    result.output.push_back(output.load(i));
  }
  for (std::int64_t i = 0; i < rows * heads; ++i) {
    result.lse.push_back(lse.load(i % rows * heads + i / rows));
  }
  return result;
}

RunResult run(const MlaProblem& mla, const Layout& layout = {}) {
  return run_on("CPU_MLA", mla, layout);
}

/// The numbers of REFERENCE_MLA with the bounds of the judge, whose own numbers they must be.
Solution solve(const MlaProblem& mla) {
  Solution solution = problem::solve(mla.plain);
  const RunResult exact = run_on("REFERENCE_MLA", mla);
  for (std::size_t i = 0; i < exact.output.size(); ++i) {
    EXPECT_NEAR(exact.output[i], solution.output[i], 1e-12);
  }
  solution.output = exact.output;
  solution.lse = exact.lse;
  return solution;
}

void expect_right(const MlaProblem& mla, const RunResult& result, const Solution& solution,
                  const std::string& what, double factor = 1.0) {
  const problem::Comparison comparison = problem::compare(mla.plain, result, solution, factor);
  EXPECT_TRUE(comparison.passed) << what << ": " << comparison.message;
  if (mla.spec.dtype == DType::f32) {  // The bounds are those of the worst case.
    EXPECT_LT(comparison.max_error, 2e-5) << what;
    EXPECT_LT(comparison.max_lse_error, 2e-5) << what;
  }
}

void expect_same(const RunResult& a, const RunResult& b) {
  EXPECT_EQ(a.output, b.output);
  EXPECT_EQ(a.lse, b.lse);
}

TEST(CpuMla, SmallSizesEveryHeadCountBlockSizeAndDtype) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t heads : {1, 16, 128}) {
      const std::string what = std::string(to_string(dtype)) + ", heads " + std::to_string(heads);
      const AttentionSpec spec = mla_spec(kSmall, heads, dtype);
      const MlaProblem mqa = make_mqa(spec);
      const Solution solution = solve(mqa);
      for (const std::int64_t block_size : {1, 16, 64}) {
        expect_right(mqa, run(mqa, {.block_size = block_size}), solution,
                     what + ", mqa, blocks of " + std::to_string(block_size));
      }
      expect_right(mqa, run(mqa, {.block_size = 64, .kernel_block_size = 16}), solution, what);
      const MlaProblem mha = make_mha(spec);
      expect_right(mha, run(mha), solve(mha), what + ", mha");
    }
  }
}

TEST(CpuMla, RealSizes) {
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    for (const std::int64_t heads : {16, 128}) {
      const std::string what = std::string(to_string(dtype)) + ", heads " + std::to_string(heads);
      const AttentionSpec spec = mla_spec(kReal, heads, dtype);
      const std::vector<problem::Request> requests{{1, 70}, {2, 19}, {0, 0}, {1, 1}};
      const MlaProblem mqa = make_mqa(spec, requests);
      expect_right(mqa, run(mqa, {.block_size = 64}), solve(mqa), what + ", mqa");
      const MlaProblem mha = make_mha(spec, requests);
      expect_right(mha, run(mha), solve(mha), what + ", mha");
    }
  }
}

TEST(CpuMla, EveryTarget) {
  const AttentionSpec spec = mla_spec(kSmall, 6);
  for (const MlaProblem& mla : {make_mqa(spec), make_mha(spec)}) {
    const Solution solution = solve(mla);
    for_each_target([&](const char* target) { expect_right(mla, run(mla), solution, target); });
  }
}

TEST(CpuMla, SplitsOfTheKeys) {
  const AttentionSpec spec = mla_spec(kSmall, 16);
  const std::vector<problem::Request> requests{{1, 700}, {2, 301}};
  for (const MlaProblem& mla : {make_mqa(spec, requests), make_mha(spec, requests)}) {
    const Solution solution = solve(mla);
    for (const std::int64_t splits : {0, 1, 2, 5}) {
      const Layout layout{.num_splits = splits, .num_threads = 3};
      const RunResult result = run(mla, layout);
      expect_right(mla, result, solution, std::to_string(splits) + " splits");
      expect_same(run(mla, layout), result);
    }
  }
}

TEST(CpuMla, Fp8Latents) {
  for (const DType cache : {DType::f8e4m3, DType::f8e5m2}) {
    for (const DType dtype : {DType::f32, DType::bf16}) {
      AttentionSpec spec = mla_spec(kSmall, 16, dtype);
      spec.kv_cache_dtype = cache;
      spec.scales.k = 0.37F;
      spec.scales.v = 5.0F;  // Nothing has this scale: the value is part of the key.
      const MlaProblem mqa = make_mqa(spec);
      expect_right(mqa, run(mqa), solve(mqa), std::string(to_string(cache)));
      const MlaProblem mha = make_mha(spec);
      expect_right(mha, run(mha), solve(mha), std::string(to_string(cache)));
    }
  }
}

TEST(CpuMla, Features) {
  const std::vector<void (*)(AttentionSpec&)> features{
      [](AttentionSpec& s) {
        s.sinks = {0.5F, -1.0F, 2.0F};
      },
      [](AttentionSpec& s) { s.window = Window::of_tokens(20); },
      [](AttentionSpec& s) { s.logits_soft_cap = 1.5F; },
      [](AttentionSpec& s) {
        s.alibi_slopes = {0.02F, 0.05F, 0.1F};
      },
      [](AttentionSpec& s) {
        s.mask_mod = [](const ScoreIndex& i) { return (i.key_position + i.query_head) % 3 != 1; };
      },
  };
  for (std::size_t i = 0; i < features.size(); ++i) {
    AttentionSpec spec = mla_spec(kSmall, 3);
    features[i](spec);
    for (const MlaProblem& mla : {make_mqa(spec), make_mha(spec)}) {
      expect_right(mla, run(mla), solve(mla), "feature " + std::to_string(i));
    }
  }
}

TEST(CpuMla, UnusedMemoryNeverMatters) {
  const AttentionSpec spec = mla_spec(kSmall, 5, DType::bf16);
  for (const MlaProblem& mla : {make_mqa(spec), make_mha(spec)}) {
    const RunResult zeros = run(mla, {.gap = 0, .poison = 0.0});
    expect_same(run(mla, {.gap = 5, .poison = kNan}), zeros);
    expect_same(run(mla, {.poison = std::numeric_limits<double>::infinity()}), zeros);
  }
}

TEST(CpuMla, InfinityInALatentThatARowDoesNotSee) {
  const MlaProblem finite = make_mqa(mla_spec(kSmall, 3), {{4, 9}});
  const RunResult wanted = run(finite);
  const std::int64_t entry = kSmall.cache_entry();
  for (const std::int64_t d : {std::int64_t{0}, entry - 1}) {  // In the latent; in the rotated key.
    MlaProblem mla = finite;
    mla.plain.key[at(8 * entry + d)] = std::numeric_limits<double>::infinity();
    const RunResult result = run(mla);
    for (std::int64_t i = 0; i < 3 * 3 * kSmall.kv_lora_rank; ++i) {
      ASSERT_EQ(result.output[at(i)], wanted.output[at(i)]) << "element " << i;
    }
  }
}

TEST(CpuMla, ARequestAloneIsTheSameRequestInABatch) {
  const AttentionSpec spec = mla_spec(kSmall, 16);
  for (const MlaProblem& batch : {make_mqa(spec), make_mha(spec)}) {
    const RunResult together = run(batch, {.batch_invariant = true});
    const std::int64_t width = 16 * batch.plain.spec.head_size_v;
    for (std::int64_t r = 0; r < std::ssize(batch.plain.requests); ++r) {
      const problem::Request& request = batch.plain.requests[at(r)];
      MlaProblem alone = batch;
      AttentionProblem& plain = alone.plain;
      plain.requests = {request};
      plain.unowned_rows = plain.padded_requests = 0;
      const auto part = [](std::vector<double>& numbers, std::int64_t first, std::int64_t count,
                           std::int64_t row) {
        const auto begin = numbers.begin() + first * row;
        numbers = std::vector<double>(begin, begin + count * row);
      };
      const std::int64_t start = batch.plain.query_start(r);
      part(plain.query, start, request.q_len, 16 * plain.spec.head_size);
      for (auto* keys : {&plain.key, &plain.stored_key}) {
        part(*keys, batch.plain.key_start(r), request.kv_len,
             plain.spec.num_kv_heads * plain.spec.head_size);
      }
      for (auto* values : {&plain.value, &plain.stored_value}) {
        part(*values, batch.plain.key_start(r), request.kv_len,
             plain.spec.num_kv_heads * plain.spec.head_size_v);
      }
      const RunResult result = run(alone, {.num_threads = 1, .batch_invariant = true});
      for (std::int64_t i = 0; i < request.q_len * width; ++i) {
        ASSERT_EQ(result.output[at(i)], together.output[at(start * width + i)])
            << "request " << r << ", element " << i;
      }
      for (std::int64_t i = 0; i < request.q_len * 16; ++i) {
        ASSERT_EQ(
            result.lse[at(i)],
            together.lse[at(i / request.q_len * batch.plain.rows() + start + i % request.q_len)]);
      }
    }
  }
}

TEST(CpuMla, ChunksOfTheContextMergeToOnePass) {
  // New tokens behind contexts of 40, 0 and 7 tokens, the contexts in chunks of 16 at most.
  const std::vector<problem::Request> requests{{6, 46}, {4, 4}, {1, 8}};
  constexpr std::int64_t kChunk = 16;
  for (const DType dtype : {DType::f32, DType::f16, DType::bf16}) {
    const MlaProblem whole = make_mha(mla_spec(kReal, 4, dtype), requests);
    // A part of the keys of every request, as a problem of its own.
    using Range = std::pair<std::int64_t, std::int64_t>;
    const auto keys_of = [&](bool causal, const auto& range) {
      MlaProblem part = whole;
      AttentionProblem& plain = part.plain;
      plain.causal = causal;
      plain.key.clear();
      plain.value.clear();
      for (std::int64_t r = 0; r < std::ssize(requests); ++r) {
        const Range part_of = range(requests[at(r)]);
        plain.requests[at(r)].kv_len = part_of.second - part_of.first;
        const std::int64_t first = whole.plain.key_start(r);
        const auto append = [&](std::vector<double>& to, const std::vector<double>& from,
                                std::int64_t width) {
          to.insert(to.end(), from.begin() + (first + part_of.first) * width,
                    from.begin() + (first + part_of.second) * width);
        };
        append(plain.key, whole.plain.key, 4 * plain.spec.head_size);
        append(plain.value, whole.plain.value, 4 * plain.spec.head_size_v);
      }
      return run(part);
    };
    const std::vector<std::int64_t> shape{whole.plain.rows(), 4, kReal.v_head_dim};
    const auto as_tensors = [&](const RunResult& result) {
      const Layout layout;
      return std::pair(filled(dtype, shape, layout, result.output),
                       filled(DType::f32, {4, whole.plain.rows()}, layout, result.lse));
    };
    auto [output, lse] = as_tensors(keys_of(true, [](const problem::Request& request) {
      return Range(request.kv_len - request.q_len, request.kv_len);
    }));
    for (std::int64_t begin = 0; begin < 40; begin += kChunk) {
      const auto chunk = as_tensors(keys_of(false, [begin](const problem::Request& request) {
        const std::int64_t context = request.kv_len - request.q_len;
        return Range(std::min(begin, context), std::min(begin + kChunk, context));
      }));
      mla_backend()->merge_attn_states({output.view(), lse.view()},
                                       {chunk.first.view(), chunk.second.view()},
                                       {output.view(), lse.view()}, {});
    }
    RunResult merged;
    for (std::int64_t i = 0; i < output.size(); ++i) {
      merged.output.push_back(output.load(i));
    }
    for (std::int64_t i = 0; i < lse.size(); ++i) {
      merged.lse.push_back(lse.load(i));
    }
    // Each of three merges rounds the output once more.
    expect_right(whole, merged, solve(whole), std::string(to_string(dtype)), 4.0);
  }
}

TEST(CpuMla, EachWayHasAWorkspaceOfItsOwnSize) {
  const MlaProblem mqa = make_mqa(mla_spec(kSmall, 4));
  Tables tables(mqa.plain, {});
  BuilderConfig config;
  config.spec = mqa.spec;
  config.num_blocks = tables.num_blocks;
  config.num_threads = 1;
  const auto metadata = mla_backend()->make_builder(config)->build(0, tables.common);
  EXPECT_GT(metadata->workspace_bytes(), 0);
  const MlaProblem mha = make_mha(mla_spec(kSmall, 4));
  Tables plain_tables(mha.plain, {});
  const auto plain = mla_backend()->make_builder(config)->build(0, plain_tables.common);
  EXPECT_LT(plain->workspace_bytes(), metadata->workspace_bytes());
}

/// Both ways with tensors that can be spoilt one at a time.
TEST(CpuMla, WrongTensorsAreRefusedAndNothingIsWritten) {
  const MlaDims dims = kSmall;
  const AttentionSpec spec = mla_spec(dims, 2);
  const std::int64_t entry = dims.cache_entry();
  Tables paged(make_mqa(spec, {{2, 5}}).plain, {});
  Tables plain(make_mha(spec, {{2, 5}}).plain, {});
  BuilderConfig config;
  config.spec = spec;
  config.num_blocks = paged.num_blocks;
  config.num_threads = 1;
  const auto builder = mla_backend()->make_builder(config);
  const auto paged_step = builder->build(0, paged.common);
  const auto plain_step = builder->build(0, plain.common);
  const auto impl = mla_backend()->make_mla_impl(spec);
  const auto one_thread = make_thread_pool(1);
  ExecutionContext context;
  context.threads = one_thread.get();
  const std::int64_t rows = paged.common.num_actual_tokens;

  const Tensor cache(DType::f32, {paged.num_blocks, 16, entry}, 0, kUntouched);
  const Tensor query(DType::f32, {rows, 2, 64}, 0, 1.0);
  const Tensor keys(DType::f32, {5, 2, 64}, 0, 1.0);
  const Tensor output(DType::f32, {rows, 2, 64}, 0, kUntouched);
  const Tensor lse(DType::f32, {2, rows}, 0, kUntouched);
  const auto head_part = [](const Tensor& tensor, std::int64_t size) {
    return tensor.view().slice(2, 0, size);
  };
  const MlaDecodeArgs decode{.query = head_part(query, entry),
                             .kv_cache = cache.view(),
                             .output = head_part(output, dims.kv_lora_rank),
                             .lse = lse.view()};
  const MlaPrefillArgs prefill{.query = head_part(query, dims.qk_head_dim()),
                               .key = head_part(keys, dims.qk_head_dim()),
                               .value = head_part(keys, dims.v_head_dim),
                               .output = head_part(output, dims.v_head_dim),
                               .lse = lse.view()};
  const auto refused = [&](const auto& action, const std::string& part) {
    expect_error(ErrorCode::invalid_argument, action, part);
  };
  const auto decode_refused = [&](auto change, const std::string& part) {
    MlaDecodeArgs args = decode;
    change(args);
    refused([&] { impl->forward_mqa(args, *paged_step, context); }, part);
  };
  const auto prefill_refused = [&](auto change, const std::string& part) {
    MlaPrefillArgs args = prefill;
    change(args);
    refused([&] { impl->forward_mha(args, *plain_step, context); }, part);
  };
  decode_refused([&](auto& a) { a.query = head_part(query, entry - 1); }, "query is f32[4, 2, 23]");
  decode_refused([&](auto& a) { a.kv_cache = a.kv_cache.slice(2, 1, entry); }, "kv_cache is f32");
  decode_refused([&](auto& a) { a.kv_cache = a.kv_cache.slice(0, 0, 1); }, "kv_cache has 1 blocks");
  decode_refused([&](auto& a) { a.output = head_part(output, entry); }, "output is f32[4, 2, 24]");
  decode_refused([&](auto& a) { a.lse = lse.view().permute({1, 0}); }, "lse is f32");
  prefill_refused([&](auto& a) { a.query = a.query.slice(0, 0, 1); }, "query is f32[1, 2, 13]");
  prefill_refused([&](auto& a) { a.key = head_part(keys, 12); }, "key is f32[5, 2, 12]");
  prefill_refused([&](auto& a) { a.value = a.value.slice(1, 0, 1); }, "value is f32[5, 1, 7]");
  prefill_refused([](auto& a) { a.key = a.key.slice(0, 0, 4); }, "must have at least 5 rows");
  prefill_refused([](auto& a) { a.output = {}; }, "output is absent");
  refused([&] { impl->forward_mqa(decode, *plain_step, context); }, "no block_table");
  refused([&] { impl->forward_mha(prefill, *paged_step, context); }, "reads plain keys");
  const auto two_threads = make_thread_pool(2);
  ExecutionContext wide;
  wide.threads = two_threads.get();
  refused([&] { impl->forward_mqa(decode, *paged_step, wide); }, "context.threads has 2 threads");
  const auto others = BackendRegistry::global().get("REFERENCE_MLA")->make_builder(config);
  refused([&] { impl->forward_mqa(decode, *others->build(0, paged.common), context); },
          "built by REFERENCE_MLA");
  AttentionSpec other = spec;
  other.mla->qk_nope_head_dim = 11;
  refused([&] { mla_backend()->make_mla_impl(other)->forward_mqa(decode, *paged_step, context); },
          "other MLA dimensions");
  ExecutionContext narrow = context;
  alignas(64) std::byte memory[64];
  narrow.workspace = {memory, DType::u8, {64}};
  refused([&] { impl->forward_mqa(decode, *paged_step, narrow); }, "context.workspace");

  const TensorView rows_of = query.view().select(1, 0);
  std::vector<std::int64_t> slots{0, 1, 2, paged.num_blocks * 16};
  const TensorView mapping(slots.data(), DType::i64, {4});
  refused(
      [&] {
        impl->update_kv_cache(rows_of.slice(1, 0, 20), rows_of.slice(1, 0, 4), cache.view(),
                              mapping);
      },
      "slot_mapping");
  refused(
      [&] {
        impl->update_kv_cache(rows_of.slice(1, 0, 19), rows_of.slice(1, 0, 4), cache.view(),
                              mapping.slice(0, 0, 3));
      },
      "latent is f32[4, 19]");

  for (const Tensor* tensor : {&cache, &output, &lse}) {
    tensor->expect_untouched_past(0);
  }
  impl->forward_mqa(decode, *paged_step, context);  // The tensors themselves are right.
  EXPECT_NE(lse.load(0), kUntouched);
}

TEST(CpuMla, AStepIsCheckedWhenItIsBuilt) {
  const AttentionSpec spec = mla_spec(kSmall, 2);
  Tables tables(make_mqa(spec, {{2, 40}}).plain, {});
  BuilderConfig config;
  config.spec = spec;
  config.num_blocks = tables.num_blocks;
  const auto builder = mla_backend()->make_builder(config);
  const auto refused = [&](std::int64_t prefix, const std::string& part) {
    expect_error(
        ErrorCode::invalid_argument, [&] { builder->build(prefix, tables.common); }, part);
  };
  refused(16, "common_prefix_len is 16");
  tables.table[1] = 99;
  refused(0, "names block 99");
  EXPECT_FALSE(builder->use_cascade(
      {.common_prefix_len = 4096, .num_reqs = 64, .num_tokens = 64, .single_token_queries = true}));
}

TEST(CpuMla, IsPreferredForMlaOnTheCpuAndExplainsItself) {
  const AttentionSpec spec = mla_spec(kReal, 16, DType::bf16);
  SelectorConfig config = SelectorConfig::from(spec);
  config.needs_lse = true;
  EXPECT_EQ(select_backend(config)->name(), "CPU_MLA");
  const SelectionReport report = explain_selection(config);
  EXPECT_EQ(report.chosen, "CPU_MLA");
  EXPECT_TRUE(report.passed_over.empty());
  EXPECT_THAT(report.text(), ::testing::HasSubstr("is chosen by name only"));
  EXPECT_THAT(mla_backend()->runtime(), ::testing::HasSubstr("instruction set"));

  config.use_mla = false;
  config.backend = "CPU_MLA";
  expect_error(
      ErrorCode::unsupported, [&] { select_backend(config); },
      "use_mla is false, only MLA is supported");
  config.use_mla = true;
  config.dtype = DType::f64;
  expect_error(
      ErrorCode::unsupported, [&] { select_backend(config); },
      "dtype is f64, accepted are f32, f16, bf16");
  config.dtype = DType::f8e4m3;
  config.decode_context_parallel_size = 2;
  expect_error(
      ErrorCode::unsupported, [&] { select_backend(config); }, "dtype is f8e4m3",
      "decode_context_parallel_size is 2");
  AttentionSpec wide = spec;
  wide.dtype = DType::f64;
  expect_error(
      ErrorCode::unsupported, [&] { mla_backend()->make_mla_impl(wide); }, "dtype is f64");
  expect_error(
      ErrorCode::unsupported, [&] { mla_backend()->make_impl(spec); }, "make_mla_impl");
  const KVCacheLayout layout =
      mla_backend()->kv_cache_layout(KVCacheSpec::from(spec, 64), 3, KVCacheOrder::nhd);
  EXPECT_EQ(layout.shape, (std::vector<std::int64_t>{3, 64, 576}));
  EXPECT_EQ(layout.dtype, DType::bf16);
}

}  // namespace
}  // namespace foveal::testing
