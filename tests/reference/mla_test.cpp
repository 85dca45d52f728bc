// MLA both ways. With the up-projections absorbed into query and output, attention on the latent is
// attention on the decompressed keys and values: two paths of the oracle that share no layout.

#include <gtest/gtest.h>

#include <cmath>
#include <vector>

#include "core/convert.h"
#include "core/index.h"
#include "foveal/registry.h"
#include "problem/problem.h"

namespace foveal {
namespace {

constexpr std::int64_t kHeads = 3;
constexpr std::int64_t kBlockSize = 4;
const MlaDims kDims{
    .kv_lora_rank = 6, .qk_nope_head_dim = 5, .qk_rope_head_dim = 2, .v_head_dim = 4};

std::vector<double> random_numbers(std::int64_t count, int seed) {
  std::vector<double> numbers;
  for (std::int64_t i = 0; i < count; ++i) {
    numbers.push_back(std::sin(static_cast<double>(i * (2 * seed + 1)) * 1.37 + seed));
  }
  return numbers;
}

/// Random weights, latents and queries of two requests, the second with a context.
struct MlaModel {
  std::vector<std::int32_t> query_start_loc{0, 5, 7};
  std::vector<std::int32_t> key_start_loc{0, 5, 14};
  std::vector<std::int32_t> seq_lens{5, 9};
  std::int64_t rows = 7;
  std::int64_t keys = 14;
  std::vector<double> latent = random_numbers(keys * kDims.kv_lora_rank, 1);
  std::vector<double> key_rope = random_numbers(keys * kDims.qk_rope_head_dim, 2);
  std::vector<double> query = random_numbers(rows * kHeads * kDims.qk_head_dim(), 3);
  /// [heads, nope, rank] and [heads, v, rank]: the up-projections of keys and values.
  std::vector<double> key_up =
      random_numbers(kHeads * kDims.qk_nope_head_dim * kDims.kv_lora_rank, 4);
  std::vector<double> value_up = random_numbers(kHeads * kDims.v_head_dim * kDims.kv_lora_rank, 5);

  AttentionSpec spec() const {
    AttentionSpec spec;
    spec.num_heads = kHeads;
    spec.num_kv_heads = 1;
    spec.head_size = kDims.cache_entry();
    spec.head_size_v = kDims.kv_lora_rank;
    spec.scale = 0.4F;
    spec.dtype = DType::f64;
    spec.mla = kDims;
    spec.sinks = {0.5F, -1.0F, 1.0F};
    return spec;
  }

  CommonAttentionMetadata common() {
    CommonAttentionMetadata common;
    common.num_reqs = 2;
    common.num_actual_tokens = rows;
    common.max_query_len = 5;
    common.max_seq_len = 9;
    common.query_start_loc = {query_start_loc.data(), DType::i32, {3}};
    common.seq_lens = {seq_lens.data(), DType::i32, {2}};
    return common;
  }

  /// Σ over the rank of up[head][i] · latent[token].
  double project(const std::vector<double>& up, std::int64_t head, std::int64_t i,
                 std::int64_t size, const double* latent_of_token) const {
    double sum = 0.0;
    for (std::int64_t l = 0; l < kDims.kv_lora_rank; ++l) {
      sum += up[at((head * size + i) * kDims.kv_lora_rank + l)] * latent_of_token[l];
    }
    return sum;
  }
};

struct Result {
  std::vector<double> output;  ///< [rows, heads, v_head_dim]
  std::vector<float> lse;
};

Result run_mha(MlaModel& model) {
  const std::int64_t size = kDims.qk_head_dim();
  std::vector<double> key;
  std::vector<double> value;
  for (std::int64_t token = 0; token < model.keys; ++token) {
    const double* latent = &model.latent[at(token * kDims.kv_lora_rank)];
    for (std::int64_t head = 0; head < kHeads; ++head) {
      for (std::int64_t i = 0; i < kDims.qk_nope_head_dim; ++i) {
        key.push_back(model.project(model.key_up, head, i, kDims.qk_nope_head_dim, latent));
      }
      for (std::int64_t i = 0; i < kDims.qk_rope_head_dim; ++i) {
        key.push_back(model.key_rope[at(token * kDims.qk_rope_head_dim + i)]);
      }
      for (std::int64_t i = 0; i < kDims.v_head_dim; ++i) {
        value.push_back(model.project(model.value_up, head, i, kDims.v_head_dim, latent));
      }
    }
  }
  const AttentionBackendPtr backend = BackendRegistry::global().get("REFERENCE_MLA");
  CommonAttentionMetadata common = model.common();
  common.key_start_loc = {model.key_start_loc.data(), DType::i32, {3}};
  BuilderConfig config;
  config.spec = model.spec();
  const auto metadata = backend->make_builder(config)->build(0, common);
  Result result{std::vector<double>(at(model.rows * kHeads * kDims.v_head_dim)),
                std::vector<float>(at(model.rows * kHeads))};
  backend->make_mla_impl(model.spec())
      ->forward_mha(
          {.query = {model.query.data(), DType::f64, {model.rows, kHeads, size}},
           .key = {key.data(), DType::f64, {model.keys, kHeads, size}},
           .value = {value.data(), DType::f64, {model.keys, kHeads, kDims.v_head_dim}},
           .output = {result.output.data(), DType::f64, {model.rows, kHeads, kDims.v_head_dim}},
           .lse = {result.lse.data(), DType::f32, {kHeads, model.rows}}},
          *metadata);
  return result;
}

/// `cache_dtype` fp8 quantises the cache with `scale`.
Result run_mqa(MlaModel& model, DType cache_dtype = DType::f64, float scale = 1.0F) {
  AttentionSpec spec = model.spec();
  spec.kv_cache_dtype = cache_dtype;
  spec.scales.k = scale;
  std::vector<double> query;
  for (std::int64_t i = 0; i < model.rows * kHeads; ++i) {
    const double* nope = &model.query[at(i * kDims.qk_head_dim())];
    for (std::int64_t l = 0; l < kDims.kv_lora_rank; ++l) {
      double sum = 0.0;
      for (std::int64_t p = 0; p < kDims.qk_nope_head_dim; ++p) {
        sum += nope[p] *
               model.key_up[at((i % kHeads * kDims.qk_nope_head_dim + p) * kDims.kv_lora_rank + l)];
      }
      query.push_back(sum);
    }
    query.insert(query.end(), nope + kDims.qk_nope_head_dim, nope + kDims.qk_head_dim());
  }

  // Blocks in an order of their own; what no key fills is NaN.
  std::vector<std::int32_t> table{3, 1, 0, 5, 2, 4};
  std::vector<std::int64_t> slots;
  for (std::int64_t r = 0; r < 2; ++r) {
    for (std::int64_t position = 0; position < model.seq_lens[at(r)]; ++position) {
      slots.push_back(table[at(r * 3 + position / kBlockSize)] * kBlockSize +
                      position % kBlockSize);
    }
  }
  std::vector<std::byte> memory(at(6 * kBlockSize * kDims.cache_entry() * size_of(cache_dtype)));
  for (std::int64_t i = 0; i < 6 * kBlockSize * kDims.cache_entry(); ++i) {
    store_element(memory.data(), cache_dtype, i, std::nan(""));
  }
  const TensorView cache(memory.data(), cache_dtype, {6, kBlockSize, kDims.cache_entry()});
  const AttentionBackendPtr backend = BackendRegistry::global().get("REFERENCE_MLA");
  const auto impl = backend->make_mla_impl(spec);
  impl->update_kv_cache({model.latent.data(), DType::f64, {model.keys, kDims.kv_lora_rank}},
                        {model.key_rope.data(), DType::f64, {model.keys, kDims.qk_rope_head_dim}},
                        cache, {slots.data(), DType::i64, {model.keys}});

  CommonAttentionMetadata common = model.common();
  common.block_table = {table.data(), DType::i32, {2, 3}};
  BuilderConfig config;
  config.spec = spec;
  config.block_size = kBlockSize;
  config.num_blocks = 6;
  const auto metadata = backend->make_builder(config)->build(0, common);
  std::vector<double> latent_output(at(model.rows * kHeads * kDims.kv_lora_rank));
  Result result{{}, std::vector<float>(at(model.rows * kHeads))};
  impl->forward_mqa(
      {.query = {query.data(), DType::f64, {model.rows, kHeads, kDims.cache_entry()}},
       .kv_cache = cache,
       .output = {latent_output.data(), DType::f64, {model.rows, kHeads, kDims.kv_lora_rank}},
       .lse = {result.lse.data(), DType::f32, {kHeads, model.rows}}},
      *metadata);
  for (std::int64_t i = 0; i < model.rows * kHeads; ++i) {
    for (std::int64_t v = 0; v < kDims.v_head_dim; ++v) {
      result.output.push_back(model.project(model.value_up, i % kHeads, v, kDims.v_head_dim,
                                            &latent_output[at(i * kDims.kv_lora_rank)]));
    }
  }
  return result;
}

void expect_near(const Result& a, const Result& b) {
  ASSERT_EQ(a.output.size(), b.output.size());
  for (std::size_t i = 0; i < a.output.size(); ++i) {
    ASSERT_NEAR(a.output[i], b.output[i], 1e-12) << i;
  }
  for (std::size_t i = 0; i < a.lse.size(); ++i) {
    ASSERT_NEAR(a.lse[i], b.lse[i], 1e-6) << i;
  }
}

TEST(Mla, AttentionOnTheLatentIsAttentionOnDecompressedKeys) {
  MlaModel model;
  expect_near(run_mqa(model), run_mha(model));
}

TEST(Mla, AnFp8CacheIsScaledAsKeyAndAsValue) {
  MlaModel model;
  const float scale = 0.015625F;
  const Result quantised = run_mqa(model, DType::f8e4m3, scale);
  // The same with latents that went through fp8 before.
  for (std::vector<double>* numbers : {&model.latent, &model.key_rope}) {
    for (double& number : *numbers) {
      number = problem::round_to(DType::f8e4m3, number / scale) * scale;
    }
  }
  expect_near(quantised, run_mha(model));
}

TEST(Mla, PartsOfTheContextMergeToTheWhole) {
  // Two new tokens behind a context of seven: the context without causality, the new ones with it.
  MlaModel model;
  AttentionSpec spec = model.spec();
  spec.sinks.clear();
  const AttentionBackendPtr backend = BackendRegistry::global().get("REFERENCE_MLA");
  const auto impl = backend->make_mla_impl(spec);
  std::vector<double> key = random_numbers(9 * kHeads * kDims.qk_head_dim(), 6);
  std::vector<double> value = random_numbers(9 * kHeads * kDims.v_head_dim, 7);
  const auto run = [&](std::int64_t first, std::int64_t count, bool causal) {
    std::vector<std::int32_t> starts{0, 2};
    std::vector<std::int32_t> key_starts{0, static_cast<std::int32_t>(count)};
    std::vector<std::int32_t> lens{static_cast<std::int32_t>(count)};
    CommonAttentionMetadata common;
    common.num_reqs = 1;
    common.num_actual_tokens = common.max_query_len = 2;
    common.max_seq_len = count;
    common.query_start_loc = {starts.data(), DType::i32, {2}};
    common.key_start_loc = {key_starts.data(), DType::i32, {2}};
    common.seq_lens = {lens.data(), DType::i32, {1}};
    common.causal = causal;
    BuilderConfig config;
    config.spec = spec;
    const auto metadata = backend->make_builder(config)->build(0, common);
    Result result{std::vector<double>(at(2 * kHeads * kDims.v_head_dim)),
                  std::vector<float>(at(2 * kHeads))};
    const TensorView all_keys(key.data(), DType::f64, {9, kHeads, kDims.qk_head_dim()});
    const TensorView all_values(value.data(), DType::f64, {9, kHeads, kDims.v_head_dim});
    impl->forward_mha({.query = {model.query.data(), DType::f64, {2, kHeads, kDims.qk_head_dim()}},
                       .key = all_keys.slice(0, first, first + count),
                       .value = all_values.slice(0, first, first + count),
                       .output = {result.output.data(), DType::f64, {2, kHeads, kDims.v_head_dim}},
                       .lse = {result.lse.data(), DType::f32, {kHeads, 2}}},
                      *metadata);
    return result;
  };
  const auto part = [](Result& result) {
    return AttentionPart{{result.output.data(), DType::f64, {2, kHeads, kDims.v_head_dim}},
                         {result.lse.data(), DType::f32, {kHeads, 2}}};
  };
  Result context = run(0, 7, false);
  Result fresh = run(7, 2, true);
  Result all = run(0, 9, true);
  backend->merge_attn_states(part(fresh), part(context), part(fresh), {});
  for (std::size_t i = 0; i < all.output.size(); ++i) {
    // The LSEs that weigh the parts are float32.
    EXPECT_NEAR(fresh.output[i], all.output[i], 1e-6);
  }
  for (std::size_t i = 0; i < all.lse.size(); ++i) {
    EXPECT_NEAR(fresh.lse[i], all.lse[i], 1e-6);
  }
}

}  // namespace
}  // namespace foveal
