// Results through C are those of the C++ interface, to the bit; what handles keep alive; threads of
// the caller.
#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <thread>

#include "c_api/c_support.h"
#include "foveal/foveal.h"

namespace foveal::testing {
namespace {

std::vector<float> random_floats(std::size_t count, std::uint32_t seed) {
  std::vector<float> values(count);
  for (float& value : values) {
    seed = seed * 1664525U + 1013904223U;
    value = static_cast<float>(seed >> 8) / 8388608.0F - 1.0F;
  }
  return values;
}

TensorView view_of(const Tensor<float>& tensor) {
  const DLTensor& t = tensor.view.tensor;
  return {t.data, DType::f32, {t.shape, static_cast<std::size_t>(t.ndim)}};
}

/// Two requests, 5 queries of 9 keys and 1 of 20, over a paged cache of CPU_ATTN.
class PagedStep : public ::testing::Test {
 protected:
  static constexpr std::int64_t kBlocks = 4;
  static constexpr std::int64_t kTokens = 6;

  PagedStep()
      : query(floats({kTokens, 4, 8}, random_floats(kTokens * 4 * 8, 1))),
        key(floats({kTokens, 2, 8}, random_floats(kTokens * 2 * 8, 2))),
        value(floats({kTokens, 2, 8}, random_floats(kTokens * 2 * 8, 3))),
        cache(floats({kBlocks, 2, 16, 2, 8}, random_floats(kBlocks * 2 * 16 * 2 * 8, 4))) {
    step.struct_size = sizeof step;
    step.num_reqs = 2;
    step.num_actual_tokens = kTokens;
    step.max_query_len = 5;
    step.max_seq_len = 20;
    step.query_start_loc = query_start_loc;
    step.seq_lens = seq_lens;
    step.block_table = block_table;
    step.slot_mapping = slot_mapping;
    EXPECT_OK(foveal_backend_kv_cache_views(backend, &spec, 16, cache, &key_cache, &value_cache));
  }

  BuilderHandle make_builder(std::int64_t block_size = 16) {
    foveal_builder_config config{};
    config.struct_size = sizeof config;
    config.spec = &spec;
    config.block_size = block_size;
    config.num_blocks = kBlocks;
    BuilderHandle builder;
    EXPECT_OK(foveal_backend_make_builder(backend, &config, &builder));
    return builder;
  }

  foveal_forward_args args() {
    foveal_forward_args args{};
    args.struct_size = sizeof args;
    args.query = query;
    args.key_cache = &key_cache.tensor;
    args.value_cache = &value_cache.tensor;
    args.output = output;
    args.lse = lse;
    return args;
  }

  /// The same through C++, on a copy of the cache that update_kv_cache has not touched.
  void run_cxx(const std::vector<float>& cache_before) {
    AttentionSpec cxx;
    cxx.num_heads = 4;
    cxx.num_kv_heads = 2;
    cxx.head_size = 8;
    cxx.dtype = DType::f32;
    cxx.window = {spec.window_left, spec.window_right};
    cxx.logits_soft_cap = spec.logits_soft_cap;
    if (!std::isnan(spec.scale)) {
      cxx.scale = spec.scale;
    }
    cxx.sinks.assign(spec.sinks, spec.sinks + spec.num_sinks);
    expected_cache = cache_before;
    CommonAttentionMetadata common;
    common.num_reqs = 2;
    common.num_actual_tokens = kTokens;
    common.max_query_len = 5;
    common.max_seq_len = 20;
    common.query_start_loc = {query_start_loc.data.data(), DType::i32, {3}};
    common.seq_lens = {seq_lens.data.data(), DType::i32, {2}};
    common.block_table = {block_table.data.data(), DType::i32, {2, 2}};
    common.slot_mapping = {slot_mapping.data.data(), DType::i64, {kTokens}};
    common.causal = !step.non_causal;
    const AttentionBackendPtr cpu = BackendRegistry::global().get("CPU_ATTN");
    const auto builder = cpu->make_builder({.spec = cxx, .block_size = 16, .num_blocks = kBlocks});
    const auto plan = builder->build(0, common);
    const auto layer = cpu->make_impl(cxx);
    const KVCacheView views =
        KVCacheView::from_blocks_first({expected_cache.data(), DType::f32, {kBlocks, 2, 16, 2, 8}});
    layer->update_kv_cache(view_of(key), view_of(value), views, common.slot_mapping);
    expected_output.resize(output.data.size());
    expected_lse.resize(lse.data.size());
    layer->forward({.query = view_of(query),
                    .kv_cache = views,
                    .output = {expected_output.data(), DType::f32, {kTokens, 4, 8}},
                    .lse = {expected_lse.data(), DType::f32, {4, kTokens}}},
                   *plan);
  }

  void expect_equal() {
    EXPECT_EQ(output.data, expected_output);
    EXPECT_EQ(lse.data, expected_lse);
    EXPECT_EQ(cache.data, expected_cache);
  }

  foveal_spec spec = small_spec();
  BackendHandle backend = backend_of("CPU_ATTN");
  Tensor<std::int32_t> query_start_loc = ints({0, 5, 6});
  Tensor<std::int32_t> seq_lens = ints({9, 20});
  Tensor<std::int32_t> block_table{FOVEAL_I32, {2, 2}, {2, 0, 3, 1}};
  Tensor<std::int64_t> slot_mapping = longs({36, 37, 38, 39, 40, 19});
  Tensor<float> query;
  Tensor<float> key;
  Tensor<float> value;
  Tensor<float> cache;
  Tensor<float> output = floats({kTokens, 4, 8});
  Tensor<float> lse = floats({4, kTokens});
  foveal_tensor key_cache{};
  foveal_tensor value_cache{};
  foveal_step step{};
  std::vector<float> expected_cache;
  std::vector<float> expected_output;
  std::vector<float> expected_lse;
};

TEST_F(PagedStep, EqualsCxxWithEveryMemberOfTheSpec) {
  const std::vector<float> sinks{0.5F, -1.0F, 2.0F, 0.0F};
  spec.scale = 0.7F;
  spec.window_left = 6;
  spec.window_right = 1;
  step.non_causal = true;  // Or the right side of the window would not matter.
  spec.logits_soft_cap = 3.0F;
  spec.sinks = sinks.data();
  spec.num_sinks = 4;
  run_cxx(cache.data);
  const BuilderHandle builder = make_builder();
  MetadataHandle plan;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
  LayerHandle layer;
  ASSERT_OK(foveal_backend_make_layer(backend, &spec, &layer));
  EXPECT_FALSE(foveal_layer_is_mla(layer));
  ASSERT_OK(foveal_layer_update_kv_cache(layer, key, value, &key_cache.tensor, &value_cache.tensor,
                                         slot_mapping, nullptr));
  const foveal_forward_args call = args();
  ASSERT_OK(foveal_layer_forward(layer, &call, plan, nullptr));
  expect_equal();
}

TEST_F(PagedStep, HandlesKeepAliveWhatTheyNeed) {
  run_cxx(cache.data);
  MetadataHandle plan;
  LayerHandle layer;
  {
    const BuilderHandle builder = make_builder();
    ASSERT_OK(foveal_builder_build(builder, 0, &step, true, &plan));
    ASSERT_OK(foveal_backend_make_layer(backend, &spec, &layer));
    foveal_backend_destroy(std::exchange(backend.pointer, nullptr));
  }
  // Shapes and strides are copied: only the data must live on.
  ASSERT_OK(foveal_reshape_and_cache(key, value, &key_cache.tensor, &value_cache.tensor,
                                     slot_mapping, 1.0F, 1.0F, nullptr));
  const foveal_forward_args call = args();
  ASSERT_OK(foveal_layer_forward(layer, &call, plan, nullptr));
  expect_equal();
}

/// An engine's threads: one std::thread a worker, indices dealt out in turn.
void parallel_for(void* user_data, std::int64_t count, foveal_task task, void* task_data) {
  auto& calls = *static_cast<std::int64_t*>(user_data);
  ++calls;
  std::vector<std::thread> threads;
  for (std::int32_t worker = 0; worker < 2; ++worker) {
    threads.emplace_back([=] {
      for (std::int64_t i = worker; i < count; i += 2) {
        task(task_data, i, worker);
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
}

TEST_F(PagedStep, ThreadsAndWorkspaceOfTheCaller) {
  run_cxx(cache.data);
  const BuilderHandle builder = make_builder();
  MetadataHandle plan;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
  LayerHandle layer;
  ASSERT_OK(foveal_backend_make_layer(backend, &spec, &layer));
  std::int64_t calls = 0;
  PoolHandle pool;
  ASSERT_OK(foveal_thread_pool_wrap(2, parallel_for, &calls, &pool));
  std::int64_t bytes = 0;
  ASSERT_OK(foveal_metadata_workspace_bytes(plan, &bytes));
  std::vector<char> memory(static_cast<std::size_t>(bytes) + 64);
  void* aligned = memory.data();
  std::size_t space = memory.size();
  ASSERT_NE(std::align(64, static_cast<std::size_t>(bytes), aligned, space), nullptr);
  foveal_tensor workspace;
  ASSERT_OK(foveal_tensor_init(&workspace, aligned, FOVEAL_U8, kCpu, 1, &bytes, nullptr));
  foveal_context context{};
  context.struct_size = sizeof context;
  context.threads = pool;
  context.workspace = &workspace.tensor;
  ASSERT_OK(foveal_layer_update_kv_cache(layer, key, value, &key_cache.tensor, &value_cache.tensor,
                                         slot_mapping, &context));
  const foveal_forward_args call = args();
  ASSERT_OK(foveal_layer_forward(layer, &call, plan, &context));
  expect_equal();
  EXPECT_GT(calls, 0);
}

TEST_F(PagedStep, BadThreadsOfTheCallerAreAnError) {
  const BuilderHandle builder = make_builder();
  MetadataHandle plan;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
  LayerHandle layer;
  ASSERT_OK(foveal_backend_make_layer(backend, &spec, &layer));
  foveal_context context{};
  context.struct_size = sizeof context;
  const foveal_forward_args call = args();
  PoolHandle lazy;
  ASSERT_OK(foveal_thread_pool_wrap(
      2, [](void*, std::int64_t, foveal_task, void*) {}, nullptr, &lazy));
  context.threads = lazy;
  expect_status(foveal_layer_forward(layer, &call, plan, &context), FOVEAL_INVALID_ARGUMENT,
                "parallel_for of the wrapped thread pool ran 0 of");
  PoolHandle wrong;
  ASSERT_OK(foveal_thread_pool_wrap(
      2,
      [](void*, std::int64_t count, foveal_task task, void* data) {
        for (std::int64_t i = 0; i < count; ++i) {
          task(data, i, 2);
        }
      },
      nullptr, &wrong));
  context.threads = wrong;
  expect_status(foveal_layer_forward(layer, &call, plan, &context), FOVEAL_INVALID_ARGUMENT,
                "as worker 2, it must be in [0, num_threads = 2)");
}

TEST_F(PagedStep, OtherBlocksAndOtherQuestions) {
  const BuilderHandle builder = make_builder();
  MetadataHandle plan;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
  const Tensor<std::int32_t> other{FOVEAL_I32, {2, 2}, {1, 0, 2, 3}};
  MetadataHandle moved;
  ASSERT_OK(foveal_builder_update_block_table(builder, plan, other, slot_mapping, &moved));
  LayerHandle layer;
  ASSERT_OK(foveal_backend_make_layer(backend, &spec, &layer));
  const foveal_forward_args call = args();
  ASSERT_OK(foveal_layer_forward(layer, &call, plan, nullptr));
  const std::vector<float> first = output.data;
  ASSERT_OK(foveal_layer_forward(layer, &call, moved, nullptr));
  EXPECT_NE(output.data, first);

  std::int32_t support = -1;
  ASSERT_OK(foveal_builder_graph_support(builder, &support));
  EXPECT_EQ(support, FOVEAL_GRAPHS_NEVER);
  std::int64_t threshold = 0;
  ASSERT_OK(foveal_builder_reorder_threshold(builder, &threshold));
  foveal_cascade_query query_cascade{};
  query_cascade.struct_size = sizeof query_cascade;
  query_cascade.num_reqs = 1;
  bool cascade = true;
  ASSERT_OK(foveal_builder_use_cascade(builder, &query_cascade, &cascade));
  EXPECT_FALSE(cascade);
}

/// What EqualsCxxWithEveryMemberOfTheSpec leaves out: ALiBi, an fp8 cache and its two scales.
TEST_F(PagedStep, Fp8CachesAndAlibi) {
  const std::vector<float> slopes{0.5F, 0.25F, 0.125F, 1.0F};
  spec.kv_cache_dtype = FOVEAL_F8E4M3;
  spec.k_scale = 2.0F;
  spec.v_scale = 0.5F;
  spec.alibi_slopes = slopes.data();
  spec.num_alibi_slopes = 4;
  const auto run_c = [&](const Tensor<std::uint8_t>& cache_of_call) {
    EXPECT_OK(
        foveal_backend_kv_cache_views(backend, &spec, 16, cache_of_call, &key_cache, &value_cache));
    const BuilderHandle builder = make_builder();
    MetadataHandle plan;
    EXPECT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
    LayerHandle layer;
    EXPECT_OK(foveal_backend_make_layer(backend, &spec, &layer));
    EXPECT_OK(foveal_layer_update_kv_cache(layer, key, value, &key_cache.tensor,
                                           &value_cache.tensor, slot_mapping, nullptr));
    const foveal_forward_args call = args();
    EXPECT_OK(foveal_layer_forward(layer, &call, plan, nullptr));
  };
  const Tensor<std::uint8_t> fp8{FOVEAL_F8E4M3, {kBlocks, 2, 16, 2, 8}};
  run_c(fp8);

  AttentionSpec cxx;
  cxx.num_heads = 4;
  cxx.num_kv_heads = 2;
  cxx.head_size = 8;
  cxx.dtype = DType::f32;
  cxx.kv_cache_dtype = DType::f8e4m3;
  cxx.scales = {.q = 1.0F, .k = 2.0F, .v = 0.5F};
  cxx.alibi_slopes = slopes;
  std::vector<std::uint8_t> memory(fp8.data.size());
  const KVCacheView views =
      KVCacheView::from_blocks_first({memory.data(), DType::f8e4m3, {kBlocks, 2, 16, 2, 8}});
  CommonAttentionMetadata common;
  common.num_reqs = 2;
  common.num_actual_tokens = kTokens;
  common.max_query_len = 5;
  common.max_seq_len = 20;
  common.query_start_loc = {query_start_loc.data.data(), DType::i32, {3}};
  common.seq_lens = {seq_lens.data.data(), DType::i32, {2}};
  common.block_table = {block_table.data.data(), DType::i32, {2, 2}};
  common.slot_mapping = {slot_mapping.data.data(), DType::i64, {kTokens}};
  const AttentionBackendPtr cpu = BackendRegistry::global().get("CPU_ATTN");
  const auto builder = cpu->make_builder({.spec = cxx, .block_size = 16, .num_blocks = kBlocks});
  const auto plan = builder->build(0, common);
  const auto layer = cpu->make_impl(cxx);
  layer->update_kv_cache(view_of(key), view_of(value), views, common.slot_mapping);
  const auto expected = floats({kTokens, 4, 8});
  layer->forward({.query = view_of(query), .kv_cache = views, .output = view_of(expected)}, *plan);
  EXPECT_EQ(fp8.data, memory);
  EXPECT_EQ(output.data, expected.data);

  const Tensor<std::uint8_t> other{FOVEAL_F8E4M3, {kBlocks, 2, 16, 2, 8}};
  EXPECT_OK(foveal_backend_kv_cache_views(backend, &spec, 16, other, &key_cache, &value_cache));
  ASSERT_OK(foveal_reshape_and_cache(key, value, &key_cache.tensor, &value_cache.tensor,
                                     slot_mapping, 2.0F, 0.5F, nullptr));
  EXPECT_EQ(other.data, memory);
  // The scales and slopes matter.
  spec.v_scale = 1.0F;
  spec.num_alibi_slopes = 0;
  run_c(other);
  EXPECT_NE(output.data, expected.data);
}

/// A row that sees only key 0: its output is that value.
TEST_F(PagedStep, ScoresAndMasksOfTheCaller) {
  std::int64_t only_key = 0;
  spec.mask_mod = [](const foveal_score_index* index, void* data) {
    return index->key_position == *static_cast<std::int64_t*>(data);
  };
  spec.score_mod = [](float score, const foveal_score_index*, void*) { return score + 1.0F; };
  spec.mod_user_data = &only_key;
  const BackendHandle reference = backend_of("REFERENCE");
  foveal_builder_config config{};
  config.struct_size = sizeof config;
  config.spec = &spec;
  config.block_size = 16;
  config.num_blocks = kBlocks;
  BuilderHandle builder;
  ASSERT_OK(foveal_backend_make_builder(reference, &config, &builder));
  MetadataHandle plan;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
  LayerHandle layer;
  ASSERT_OK(foveal_backend_make_layer(reference, &spec, &layer));
  const foveal_forward_args call = args();
  ASSERT_OK(foveal_layer_forward(layer, &call, plan, nullptr));
  // Request 0 has block 2, request 1 block 3; values are the second half of a block.
  for (std::int64_t row = 0; row < kTokens; ++row) {
    for (std::int64_t i = 0; i < 4 * 8; ++i) {
      const std::int64_t slot = (row < 5 ? 2 : 3) * 2 * 256 + 256;
      const std::int64_t at = slot + i / 16 * 8 + i % 8;
      ASSERT_FLOAT_EQ(output.data[static_cast<std::size_t>(row * 32 + i)],
                      cache.data[static_cast<std::size_t>(at)]);
    }
  }
}

TEST(CApiAttention, PlainKeysOfAnEncoder) {
  foveal_spec spec = small_spec();
  spec.attn_type = FOVEAL_ENCODER_ONLY;
  const BackendHandle backend = backend_of("CPU_ATTN");
  foveal_builder_config config{};
  config.struct_size = sizeof config;
  config.spec = &spec;
  config.block_size = 16;
  BuilderHandle builder;
  ASSERT_OK(foveal_backend_make_builder(backend, &config, &builder));
  const auto starts = ints({0, 3});
  const auto lens = ints({3});
  foveal_step step{};
  step.struct_size = sizeof step;
  step.num_reqs = 1;
  step.num_actual_tokens = step.max_query_len = step.max_seq_len = 3;
  step.query_start_loc = starts;
  step.seq_lens = lens;
  MetadataHandle plan;
  expect_status(foveal_builder_build(builder, 0, &step, false, &plan), FOVEAL_INVALID_ARGUMENT,
                "causal");
  step.non_causal = true;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
  LayerHandle layer;
  ASSERT_OK(foveal_backend_make_layer(backend, &spec, &layer));
  // Keys of zero: every row is the mean of the values, its LSE the log of their number.
  const auto query = floats({3, 4, 8}, random_floats(3 * 4 * 8, 5));
  const auto key = floats({3, 2, 8});
  auto value = floats({3, 2, 8}, random_floats(3 * 2 * 8, 6));
  const auto output = floats({3, 4, 8});
  const auto lse = floats({4, 3});
  foveal_forward_args args{};
  args.struct_size = sizeof args;
  args.query = query;
  args.key = key;
  args.value = value;
  args.output = output;
  args.lse = lse;
  ASSERT_OK(foveal_layer_forward(layer, &args, plan, nullptr));
  for (std::size_t i = 0; i < output.data.size(); ++i) {
    const std::size_t at = i % 32 / 16 * 8 + i % 8;
    const float mean = (value.data[at] + value.data[at + 16] + value.data[at + 32]) / 3.0F;
    EXPECT_NEAR(output.data[i], mean, 1e-6F);
  }
  for (const float value_lse : lse.data) {
    EXPECT_NEAR(value_lse, std::log(3.0F), 1e-6F);
  }
}

TEST(CApiAttention, BothWaysOfMla) {
  const foveal_mla_dims dims{16, 8, 4, 6};
  foveal_spec spec = small_spec();
  spec.num_heads = 2;
  spec.num_kv_heads = 1;
  spec.head_size = 20;
  spec.head_size_v = 16;
  spec.scale = 0.3F;
  spec.mla = &dims;
  const BackendHandle backend = backend_of("CPU_MLA");
  LayerHandle layer;
  ASSERT_OK(foveal_backend_make_layer(backend, &spec, &layer));
  EXPECT_TRUE(foveal_layer_is_mla(layer));
  foveal_builder_config config{};
  config.struct_size = sizeof config;
  config.spec = &spec;
  config.block_size = 16;
  config.num_blocks = 2;
  BuilderHandle builder;
  ASSERT_OK(foveal_backend_make_builder(backend, &config, &builder));
  const auto starts = ints({0, 3});
  const auto lens = ints({3});
  const Tensor<std::int32_t> table{FOVEAL_I32, {1, 1}, {1}};
  const auto slots = longs({16, 17, 18});
  foveal_step step{};
  step.struct_size = sizeof step;
  step.num_reqs = 1;
  step.num_actual_tokens = step.max_query_len = step.max_seq_len = 3;
  step.query_start_loc = starts;
  step.seq_lens = lens;
  MetadataHandle prefill;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &prefill));
  step.block_table = table;
  step.slot_mapping = slots;
  MetadataHandle decode;
  ASSERT_OK(foveal_builder_build(builder, 0, &step, false, &decode));

  // The same through C++.
  AttentionSpec cxx;
  cxx.num_heads = 2;
  cxx.num_kv_heads = 1;
  cxx.head_size = 20;
  cxx.head_size_v = 16;
  cxx.scale = 0.3F;
  cxx.dtype = DType::f32;
  cxx.mla = MlaDims{16, 8, 4, 6};
  const AttentionBackendPtr cpu = BackendRegistry::global().get("CPU_MLA");
  const auto cxx_builder = cpu->make_builder({.spec = cxx, .block_size = 16, .num_blocks = 2});
  CommonAttentionMetadata common;
  common.num_reqs = 1;
  common.num_actual_tokens = common.max_query_len = common.max_seq_len = 3;
  std::array<std::int32_t, 2> cxx_starts{0, 3};
  std::int32_t cxx_len = 3;
  std::int32_t cxx_table = 1;
  std::array<std::int64_t, 3> cxx_slots{16, 17, 18};
  common.query_start_loc = {cxx_starts.data(), DType::i32, {2}};
  common.seq_lens = {&cxx_len, DType::i32, {1}};
  const auto cxx_prefill = cxx_builder->build(0, common);
  common.block_table = {&cxx_table, DType::i32, {1, 1}};
  common.slot_mapping = {cxx_slots.data(), DType::i64, {3}};
  const auto cxx_decode = cxx_builder->build(0, common);
  const auto cxx_layer = cpu->make_mla_impl(cxx);

  const auto query = floats({3, 2, 12}, random_floats(3 * 2 * 12, 7));
  const auto key = floats({3, 2, 12}, random_floats(3 * 2 * 12, 8));
  const auto value = floats({3, 2, 6}, random_floats(3 * 2 * 6, 9));
  const auto output = floats({3, 2, 6});
  const auto lse = floats({2, 3});
  foveal_mla_prefill_args mha{};
  mha.struct_size = sizeof mha;
  mha.query = query;
  mha.key = key;
  mha.value = value;
  mha.output = output;
  mha.lse = lse;
  ASSERT_OK(foveal_layer_forward_mha(layer, &mha, prefill, nullptr));
  const auto expected = floats({3, 2, 6});
  const auto expected_lse = floats({2, 3});
  cxx_layer->forward_mha({.query = view_of(query),
                          .key = view_of(key),
                          .value = view_of(value),
                          .output = view_of(expected),
                          .lse = view_of(expected_lse)},
                         *cxx_prefill);
  EXPECT_EQ(output.data, expected.data);
  EXPECT_EQ(lse.data, expected_lse.data);

  const auto latent = floats({3, 16}, random_floats(3 * 16, 10));
  const auto rope = floats({3, 4}, random_floats(3 * 4, 11));
  const auto cache = floats({2, 16, 20});
  ASSERT_OK(foveal_layer_update_mla_kv_cache(layer, latent, rope, cache, slots, nullptr));
  const auto expected_cache = floats({2, 16, 20});
  cxx_layer->update_kv_cache(view_of(latent), view_of(rope), view_of(expected_cache),
                             common.slot_mapping);
  EXPECT_EQ(cache.data, expected_cache.data);
  EXPECT_EQ(cache.data[16 * 20 + 16], rope.data[0]);

  const auto absorbed = floats({3, 2, 20}, random_floats(3 * 2 * 20, 12));
  const auto latent_output = floats({3, 2, 16});
  foveal_mla_decode_args mqa{};
  mqa.struct_size = sizeof mqa;
  mqa.query = absorbed;
  mqa.kv_cache = cache;
  mqa.output = latent_output;
  ASSERT_OK(foveal_layer_forward_mqa(layer, &mqa, decode, nullptr));
  const auto expected_output = floats({3, 2, 16});
  cxx_layer->forward_mqa(
      {.query = view_of(absorbed), .kv_cache = view_of(cache), .output = view_of(expected_output)},
      *cxx_decode);
  EXPECT_EQ(latent_output.data, expected_output.data);
}

TEST(CApiAttention, MergesParts) {
  constexpr float kEmpty = -std::numeric_limits<float>::infinity();
  const auto a = floats({2, 1, 2}, {1.0F, 2.0F, 3.0F, 4.0F});
  const auto a_lse = floats({1, 2}, {0.0F, 0.0F});
  const auto b = floats({2, 1, 2}, {3.0F, 6.0F, NAN, NAN});
  const auto b_lse = floats({1, 2}, {0.0F, kEmpty});
  const auto output = floats({2, 1, 2});
  const auto lse = floats({1, 2});
  ASSERT_OK(foveal_merge_attn_states(output, lse, a, a_lse, b, b_lse, nullptr));
  EXPECT_THAT(output.data, ::testing::ElementsAre(2.0F, 4.0F, 3.0F, 4.0F));
  EXPECT_NEAR(lse.data[0], std::log(2.0F), 1e-6F);
  EXPECT_EQ(lse.data[1], 0.0F);
  // The result may be one of the parts, and its lse absent.
  ASSERT_OK(foveal_merge_attn_states(a, nullptr, a, a_lse, b, b_lse, nullptr));
  EXPECT_EQ(a.data, output.data);
}

}  // namespace
}  // namespace foveal::testing
