// Every function refuses what it cannot take, by code and with a message that names the argument;
// then nothing has been written.
#include <limits>

#include "c_api/c_support.h"

namespace foveal::testing {
namespace {

class CApiErrors : public ::testing::Test {
 protected:
  CApiErrors() {
    config.struct_size = sizeof config;
    config.spec = &spec;
    config.block_size = 16;
    config.num_blocks = 4;
    step.struct_size = sizeof step;
    step.num_reqs = 1;
    step.num_actual_tokens = step.max_query_len = step.max_seq_len = 2;
    step.query_start_loc = starts;
    step.seq_lens = lens;
    step.block_table = table;
    step.slot_mapping = slots;
    EXPECT_OK(foveal_backend_make_builder(backend, &config, &builder));
    EXPECT_OK(foveal_builder_build(builder, 0, &step, false, &plan));
    EXPECT_OK(foveal_backend_make_layer(backend, &spec, &layer));
    EXPECT_OK(foveal_backend_kv_cache_views(backend, &spec, 16, cache, &key_cache, &value_cache));
    args.struct_size = sizeof args;
    args.query = query;
    args.key_cache = &key_cache.tensor;
    args.value_cache = &value_cache.tensor;
    args.output = output;
    mla_spec.num_heads = 2;
    mla_spec.num_kv_heads = 1;
    mla_spec.head_size = 20;
    mla_spec.head_size_v = 16;
    mla_spec.scale = 0.3F;
    mla_spec.mla = &dims;
    EXPECT_OK(foveal_backend_make_layer(mla_backend, &mla_spec, &mla_layer));
  }

  foveal_status forward() { return foveal_layer_forward(layer, &args, plan, nullptr); }

  foveal_spec spec = small_spec();
  foveal_spec mla_spec = small_spec();
  foveal_mla_dims dims{16, 8, 4, 6};
  BackendHandle backend = backend_of("CPU_ATTN");
  BackendHandle mla_backend = backend_of("CPU_MLA");
  foveal_builder_config config{};
  foveal_step step{};
  foveal_forward_args args{};
  BuilderHandle builder;
  MetadataHandle plan;
  LayerHandle layer;
  LayerHandle mla_layer;
  Tensor<std::int32_t> starts = ints({0, 2});
  Tensor<std::int32_t> lens = ints({2});
  Tensor<std::int32_t> table{FOVEAL_I32, {1, 1}, {1}};
  Tensor<std::int64_t> slots = longs({16, 17});
  Tensor<float> query = floats({2, 4, 8});
  Tensor<float> key = floats({2, 2, 8});
  Tensor<float> value = floats({2, 2, 8});
  Tensor<float> cache = floats({4, 2, 16, 2, 8});
  Tensor<float> output = floats({2, 4, 8}, std::vector<float>(64, 7.0F));
  foveal_tensor key_cache{};
  foveal_tensor value_cache{};
};

TEST_F(CApiErrors, NullHandlesAndOutputs) {
  const auto null = [](foveal_status status, const std::string& name) {
    expect_status(status, FOVEAL_INVALID_ARGUMENT, name + " is NULL, it must be given");
  };
  std::int64_t number = 0;
  std::int32_t small = 0;
  bool flag = false;
  foveal_tensor tensor;
  foveal_device_info info{};
  foveal_candidate candidate{};
  candidate.struct_size = sizeof candidate;
  foveal_kv_cache_layout layout{};
  layout.struct_size = sizeof layout;
  foveal_selector_config wanted;
  ASSERT_OK(foveal_selector_config_init(&wanted, sizeof wanted, &spec, kDLCPU, 0));
  BackendHandle made;
  SelectionHandle selection;
  BuilderHandle new_builder;
  MetadataHandle new_plan;
  LayerHandle new_layer;
  PoolHandle pool;

  null(foveal_tensor_init(nullptr, nullptr, FOVEAL_F32, kCpu, 0, nullptr, nullptr), "out");
  null(foveal_num_devices(nullptr), "out");
  null(foveal_get_device(0, nullptr), "out");
  null(foveal_spec_init(nullptr, sizeof spec), "spec");
  null(foveal_selector_config_init(nullptr, sizeof wanted, &spec, kDLCPU, 0), "config");
  null(foveal_select_backend(nullptr, &made), "config");
  null(foveal_select_backend(&wanted, nullptr), "out");
  null(foveal_get_backend(nullptr, &made), "id");
  null(foveal_get_backend("CPU_ATTN", nullptr), "out");
  null(foveal_add_backend_library(nullptr, "", "", nullptr), "id");
  null(foveal_add_backend_library("X", nullptr, "", nullptr), "display_name");
  null(foveal_add_backend_library("X", "", nullptr, nullptr), "path");
  null(foveal_explain_selection(nullptr, &selection), "config");
  null(foveal_explain_selection(&wanted, nullptr), "out");
  null(foveal_selection_candidate(nullptr, 0, &candidate), "selection");
  null(foveal_backend_kv_cache_layout(nullptr, &spec, 16, 4, 0, &layout), "backend");
  null(foveal_backend_kv_cache_layout(backend, nullptr, 16, 4, 0, &layout), "spec");
  null(foveal_backend_kv_cache_layout(backend, &spec, 16, 4, 0, nullptr), "out");
  null(foveal_backend_kv_cache_views(nullptr, &spec, 16, cache, &tensor, &tensor), "backend");
  null(foveal_backend_kv_cache_views(backend, nullptr, 16, cache, &tensor, &tensor), "spec");
  null(foveal_backend_kv_cache_views(backend, &spec, 16, nullptr, &tensor, &tensor), "cache");
  null(foveal_backend_kv_cache_views(backend, &spec, 16, cache, nullptr, &tensor), "key_cache");
  null(foveal_backend_kv_cache_views(backend, &spec, 16, cache, &tensor, nullptr), "value_cache");
  null(foveal_kv_cache_page_size_bytes(nullptr, 16, &number), "spec");
  null(foveal_kv_cache_page_size_bytes(&spec, 16, nullptr), "out");
  null(foveal_kv_cache_max_blocks_per_request(nullptr, 16, 1, 1, &number), "spec");
  null(foveal_kv_cache_max_blocks_per_request(&spec, 16, 1, 1, nullptr), "out");
  null(foveal_backend_preferred_block_size(nullptr, 16, &number), "backend");
  null(foveal_backend_preferred_block_size(backend, 16, nullptr), "out");
  const foveal_backend* none[] = {nullptr};
  null(foveal_select_kernel_block_size(16, none, 1, &number), "backends[i]");
  null(foveal_select_kernel_block_size(16, none, 0, nullptr), "out");
  null(foveal_thread_pool_create(1, nullptr), "out");
  null(foveal_thread_pool_wrap(1, nullptr, nullptr, &pool), "parallel_for");
  null(foveal_backend_make_builder(nullptr, &config, &new_builder), "backend");
  null(foveal_backend_make_builder(backend, nullptr, &new_builder), "config");
  null(foveal_backend_make_builder(backend, &config, nullptr), "out");
  null(foveal_builder_build(nullptr, 0, &step, false, &new_plan), "builder");
  null(foveal_builder_build(builder, 0, nullptr, false, &new_plan), "step");
  null(foveal_builder_build(builder, 0, &step, false, nullptr), "out");
  null(foveal_builder_build_for_graph_capture(nullptr, &step, &new_plan), "builder");
  null(foveal_builder_build_for_graph_capture(builder, &step, nullptr), "out");
  null(foveal_builder_update_block_table(nullptr, plan, table, slots, &new_plan), "builder");
  null(foveal_builder_update_block_table(builder, nullptr, table, slots, &new_plan), "metadata");
  null(foveal_builder_update_block_table(builder, plan, table, slots, nullptr), "out");
  null(foveal_builder_graph_support(nullptr, &small), "builder");
  null(foveal_builder_graph_support(builder, nullptr), "out");
  null(foveal_builder_reorder_threshold(nullptr, &number), "builder");
  null(foveal_builder_reorder_threshold(builder, nullptr), "out");
  null(foveal_builder_use_cascade(nullptr, nullptr, &flag), "builder");
  null(foveal_builder_use_cascade(builder, nullptr, &flag), "query");
  null(foveal_builder_use_cascade(builder, nullptr, nullptr), "out");
  null(foveal_metadata_workspace_bytes(nullptr, &number), "metadata");
  null(foveal_metadata_workspace_bytes(plan, nullptr), "out");
  null(foveal_backend_make_layer(nullptr, &spec, &new_layer), "backend");
  null(foveal_backend_make_layer(backend, nullptr, &new_layer), "spec");
  null(foveal_backend_make_layer(backend, &spec, nullptr), "out");
  null(foveal_layer_update_kv_cache(nullptr, key, value, cache, cache, slots, nullptr), "layer");
  null(foveal_layer_forward(nullptr, &args, plan, nullptr), "layer");
  null(foveal_layer_forward(layer, nullptr, plan, nullptr), "args");
  null(foveal_layer_forward(layer, &args, nullptr, nullptr), "metadata");
  null(foveal_layer_update_mla_kv_cache(nullptr, key, value, cache, slots, nullptr), "layer");
  null(foveal_layer_forward_mha(nullptr, nullptr, plan, nullptr), "layer");
  null(foveal_layer_forward_mha(mla_layer, nullptr, plan, nullptr), "args");
  null(foveal_layer_forward_mqa(nullptr, nullptr, plan, nullptr), "layer");
  null(foveal_layer_forward_mqa(mla_layer, nullptr, plan, nullptr), "args");
  null(foveal_load_kernel_pack(nullptr), "path");
  info.struct_size = sizeof info;
  expect_status(foveal_get_device(-1, &info), FOVEAL_INVALID_ARGUMENT, "index is -1");

  // Those that return a value.
  EXPECT_EQ(foveal_backend_name(nullptr), nullptr);
  EXPECT_EQ(foveal_backend_runtime(nullptr), nullptr);
  EXPECT_EQ(foveal_selection_chosen(nullptr), nullptr);
  EXPECT_EQ(foveal_selection_summary(nullptr), nullptr);
  EXPECT_EQ(foveal_selection_text(nullptr), nullptr);
  EXPECT_EQ(foveal_selection_json(nullptr), nullptr);
  EXPECT_EQ(foveal_selection_num_candidates(nullptr), -1);
  EXPECT_FALSE(foveal_layer_is_mla(nullptr));
  foveal_backend_destroy(nullptr);
  foveal_selection_destroy(nullptr);
  foveal_thread_pool_destroy(nullptr);
  foveal_builder_destroy(nullptr);
  foveal_metadata_destroy(nullptr);
  foveal_layer_destroy(nullptr);
}

TEST_F(CApiErrors, StructSizes) {
  const auto size = [](foveal_status status, const std::string& name) {
    expect_status(status, FOVEAL_INVALID_ARGUMENT, name + ".struct_size is 0, it must be sizeof");
  };
  foveal_device_info info{};
  size(foveal_get_device(0, &info), "out");
  foveal_kv_cache_layout layout{};
  size(foveal_backend_kv_cache_layout(backend, &spec, 16, 4, 0, &layout), "out");
  foveal_selector_config wanted{};
  BackendHandle made;
  size(foveal_select_backend(&wanted, &made), "config");
  expect_status(foveal_selector_config_init(&wanted, 8, &spec, kDLCPU, 0), FOVEAL_INVALID_ARGUMENT,
                "struct_size is 8");
  config.struct_size = 0;
  BuilderHandle new_builder;
  size(foveal_backend_make_builder(backend, &config, &new_builder), "config");
  step.struct_size = 0;
  MetadataHandle new_plan;
  size(foveal_builder_build(builder, 0, &step, false, &new_plan), "step");
  args.struct_size = 0;
  size(forward(), "args");
  args.struct_size = sizeof args;
  foveal_context context{};
  size(foveal_layer_forward(layer, &args, plan, &context), "context");
  const foveal_mla_prefill_args mha{};
  size(foveal_layer_forward_mha(mla_layer, &mha, plan, nullptr), "args");
  const foveal_mla_decode_args mqa{};
  size(foveal_layer_forward_mqa(mla_layer, &mqa, plan, nullptr), "args");
  const foveal_cascade_query query_cascade{};
  bool flag = false;
  size(foveal_builder_use_cascade(builder, &query_cascade, &flag), "query");
}

TEST_F(CApiErrors, TheWrongLayer) {
  expect_status(foveal_layer_forward(mla_layer, &args, plan, nullptr), FOVEAL_UNSUPPORTED,
                "layer is an MLA layer",
                "call foveal_layer_forward_mha (prefill) or foveal_layer_forward_mqa (decode)");
  expect_status(foveal_layer_update_kv_cache(mla_layer, key, value, &key_cache.tensor,
                                             &value_cache.tensor, slots, nullptr),
                FOVEAL_UNSUPPORTED, "call foveal_layer_update_mla_kv_cache");
  foveal_mla_prefill_args mha{};
  mha.struct_size = sizeof mha;
  expect_status(foveal_layer_forward_mha(layer, &mha, plan, nullptr), FOVEAL_UNSUPPORTED,
                "layer is not an MLA layer", "call foveal_layer_forward");
  foveal_mla_decode_args mqa{};
  mqa.struct_size = sizeof mqa;
  expect_status(foveal_layer_forward_mqa(layer, &mqa, plan, nullptr), FOVEAL_UNSUPPORTED,
                "layer is not an MLA layer", "call foveal_layer_forward");
  expect_status(
      foveal_layer_update_mla_kv_cache(layer, key, value, &key_cache.tensor, slots, nullptr),
      FOVEAL_UNSUPPORTED, "call foveal_layer_update_kv_cache");
  LayerHandle made;
  expect_status(foveal_backend_make_layer(backend, &mla_spec, &made), FOVEAL_UNSUPPORTED,
                "CPU_ATTN");
  expect_status(foveal_backend_make_layer(mla_backend, &spec, &made), FOVEAL_UNSUPPORTED,
                "CPU_MLA");
  foveal_tensor tensor;
  expect_status(foveal_backend_kv_cache_views(mla_backend, &mla_spec, 16, cache, &tensor, &tensor),
                FOVEAL_UNSUPPORTED, "CPU_MLA");
  EXPECT_EQ(made.pointer, nullptr);
}

TEST_F(CApiErrors, NumbersOfTheSpec) {
  std::int64_t bytes = -3;
  const auto refuses = [&](auto&& change, const auto&... parts) {
    foveal_spec changed = small_spec();
    change(changed);
    expect_status(foveal_kv_cache_page_size_bytes(&changed, 16, &bytes), FOVEAL_INVALID_ARGUMENT,
                  parts...);
  };
  refuses([](foveal_spec& s) { s.num_heads = 0; }, "num_heads is 0");
  refuses([](foveal_spec& s) { s.num_heads = std::int64_t{1} << 40; }, "num_heads is");
  refuses([](foveal_spec& s) { s.head_size = -1; }, "head_size is -1");
  refuses([](foveal_spec& s) { s.head_size = std::int64_t{1} << 62; }, "head_size is");
  refuses([](foveal_spec& s) { s.dtype = 0; }, "spec.dtype is 0", "FOVEAL_F32 = 1");
  refuses([](foveal_spec& s) { s.dtype = FOVEAL_I32; }, "dtype is i32");
  refuses([](foveal_spec& s) { s.kv_cache_dtype = 10; }, "spec.kv_cache_dtype is 10");
  refuses([](foveal_spec& s) { s.attn_type = 4; }, "spec.attn_type is 4");
  refuses([](foveal_spec& s) { s.attn_type = -1; }, "spec.attn_type is -1");
  refuses([](foveal_spec& s) { s.window_left = -2; }, "window is (-2, -1)");
  refuses([](foveal_spec& s) { s.num_sinks = 4; }, "spec.sinks is NULL");
  refuses([](foveal_spec& s) { s.num_alibi_slopes = -1; }, "spec.alibi_slopes");
  refuses([](foveal_spec& s) { s.k_scale = 0.0F; }, "scales.k is 0");
  refuses([](foveal_spec& s) { s.scale = std::numeric_limits<float>::infinity(); }, "scale is inf");
  const float slope = 1.0F;
  refuses(
      [&](foveal_spec& s) {
        s.alibi_slopes = &slope;
        s.num_alibi_slopes = 1;
      },
      "alibi_slopes has 1 entries");
  expect_status(foveal_kv_cache_page_size_bytes(&spec, std::int64_t{1} << 61, &bytes),
                FOVEAL_INVALID_ARGUMENT, "countable in 63 bits");
  EXPECT_EQ(bytes, -3);
}

TEST_F(CApiErrors, Caches) {
  foveal_kv_cache_layout layout{};
  layout.struct_size = sizeof layout;
  expect_status(foveal_backend_kv_cache_layout(backend, &spec, 0, 4, 0, &layout),
                FOVEAL_INVALID_ARGUMENT, "block_size is 0");
  expect_status(foveal_backend_kv_cache_layout(backend, &spec, 16, -1, 0, &layout),
                FOVEAL_INVALID_ARGUMENT, "-1");
  expect_status(
      foveal_backend_kv_cache_layout(backend, &spec, 16, std::int64_t{1} << 60, 0, &layout),
      FOVEAL_INVALID_ARGUMENT, "countable in 63 bits");
  expect_status(foveal_backend_kv_cache_layout(backend, &spec, 16, 4, 2, &layout),
                FOVEAL_INVALID_ARGUMENT, "order is 2");
  foveal_tensor tensor{};
  expect_status(foveal_backend_kv_cache_views(backend, &spec, 16, query, &tensor, &tensor),
                FOVEAL_INVALID_ARGUMENT, "cache is f32[2, 4, 8]");
  EXPECT_EQ(tensor.tensor.shape, nullptr);
  std::int64_t number = 0;
  expect_status(foveal_kv_cache_max_blocks_per_request(&spec, 16, -1, 1, &number),
                FOVEAL_INVALID_ARGUMENT, "max_seq_len is -1");
  const foveal_backend* backends[] = {backend};
  expect_status(foveal_select_kernel_block_size(0, backends, 1, &number), FOVEAL_INVALID_ARGUMENT,
                "block_size");
  expect_status(foveal_select_kernel_block_size(16, nullptr, 1, &number), FOVEAL_INVALID_ARGUMENT,
                "backends is NULL");
  expect_status(foveal_get_backend("NOPE", nullptr), FOVEAL_INVALID_ARGUMENT, "out is NULL");
  BackendHandle made;
  expect_status(foveal_get_backend("NOPE", &made), FOVEAL_INVALID_ARGUMENT, "NOPE", "CPU_ATTN");
  expect_status(foveal_add_backend_library("CPU_ATTN", "", "x.so", nullptr),
                FOVEAL_INVALID_ARGUMENT, "CPU_ATTN");
}

TEST_F(CApiErrors, Tensors) {
  foveal_tensor tensor{};
  const std::int64_t shape[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
  const auto init = [&](std::int32_t dtype, DLDevice device, std::int32_t ndim,
                        const std::int64_t* sizes) {
    return foveal_tensor_init(&tensor, nullptr, dtype, device, ndim, sizes, nullptr);
  };
  expect_status(init(FOVEAL_F32, kCpu, 9, shape), FOVEAL_INVALID_ARGUMENT, "ndim is 9");
  expect_status(init(FOVEAL_F32, kCpu, -1, shape), FOVEAL_INVALID_ARGUMENT, "ndim is -1");
  expect_status(init(FOVEAL_F32, kCpu, 2, nullptr), FOVEAL_INVALID_ARGUMENT, "shape is NULL");
  expect_status(init(0, kCpu, 1, shape), FOVEAL_INVALID_ARGUMENT, "dtype is 0");
  expect_status(init(FOVEAL_F32, {kDLMetal, 0}, 1, shape), FOVEAL_INVALID_ARGUMENT,
                "device.device_type is 8");
  expect_status(init(FOVEAL_F32, {kDLCUDA, -1}, 1, shape), FOVEAL_INVALID_ARGUMENT,
                "device has device_id -1");

  // What a foreign DLTensor may hold; every message names the argument.
  const DLTensor good = query.view.tensor;
  DLTensor bad = good;
  args.query = &bad;
  bad.ndim = 9;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "query has 9 dimensions");
  bad = good;
  bad.shape = nullptr;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "query has a NULL shape");
  bad = good;
  bad.data = nullptr;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "query has a null data pointer");
  bad.byte_offset = 4;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "query has a NULL data pointer");
  bad = good;
  bad.dtype.lanes = 4;
  expect_status(forward(), FOVEAL_UNSUPPORTED, "query: ", "4 lanes");
  bad = good;
  bad.dtype.code = kDLComplex;
  expect_status(forward(), FOVEAL_UNSUPPORTED, "query: ", "code 5");
  bad = good;
  bad.device.device_type = kDLMetal;
  expect_status(forward(), FOVEAL_UNSUPPORTED, "query: ", "device_type is 8");
  bad = good;
  std::int64_t negative[] = {2, -4, 8};
  bad.shape = negative;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "-4");
  EXPECT_THAT(output.data, ::testing::Each(7.0F));
}

TEST_F(CApiErrors, BuildersAndSteps) {
  BuilderHandle made;
  config.block_size = 0;
  expect_status(foveal_backend_make_builder(backend, &config, &made), FOVEAL_INVALID_ARGUMENT,
                "block_size is 0");
  config.block_size = 16;
  config.device = {kDLCUDA, 0};
  expect_status(foveal_backend_make_builder(backend, &config, &made), FOVEAL_INVALID_ARGUMENT,
                "device");
  config.device = {static_cast<DLDeviceType>(0), 1};
  expect_status(foveal_backend_make_builder(backend, &config, &made), FOVEAL_INVALID_ARGUMENT,
                "config.device has device_type 0 and device_id 1");
  MetadataHandle new_plan;
  const auto refuses = [&](auto&&... parts) {
    expect_status(foveal_builder_build(builder, 0, &step, false, &new_plan),
                  FOVEAL_INVALID_ARGUMENT, parts...);
    EXPECT_EQ(new_plan.pointer, nullptr);
  };
  step.num_reqs = 2;
  refuses("query_start_loc");
  step.num_reqs = 1;
  step.seq_lens = nullptr;
  refuses("seq_lens is absent");
  step.seq_lens = lens;
  table.data[0] = 4;
  refuses("block_table[0][0] names block 4");
  table.data[0] = 1;
  slots.data[0] = 64;
  refuses("slot_mapping[0] is 64");
  slots.data[0] = 16;
  expect_status(foveal_builder_build(builder, 3, &step, false, &new_plan), FOVEAL_INVALID_ARGUMENT,
                "common_prefix_len is 3");
  expect_status(foveal_builder_build_for_graph_capture(builder, &step, &new_plan),
                FOVEAL_UNSUPPORTED, "graph support 'never'");
  table.data[0] = -1;
  expect_status(foveal_builder_update_block_table(builder, plan, table, slots, &new_plan),
                FOVEAL_INVALID_ARGUMENT, "names block -1");
  PoolHandle pool;
  expect_status(foveal_thread_pool_create(-1, &pool), FOVEAL_INVALID_ARGUMENT, "num_threads is -1");
  expect_status(foveal_thread_pool_wrap(
                    0, [](void*, std::int64_t, foveal_task, void*) {}, nullptr, &pool),
                FOVEAL_INVALID_ARGUMENT, "num_threads is 0");
}

TEST_F(CApiErrors, CallsWriteNothing) {
  const std::vector<float> before = cache.data;
  args.value_cache = nullptr;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "value_cache is NULL", "or neither");
  args.key_cache = nullptr;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "kv_cache is absent");
  args.key_cache = &key_cache.tensor;
  args.value_cache = &value_cache.tensor;
  args.query = key;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "query is f32[2, 2, 8]");
  args.query = nullptr;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "query is absent");
  args.query = query;
  args.lse = output;
  expect_status(forward(), FOVEAL_INVALID_ARGUMENT, "lse is");
  slots.data[1] = 64;
  key.data[0] = 1.0F;
  expect_status(foveal_layer_update_kv_cache(layer, key, value, &key_cache.tensor,
                                             &value_cache.tensor, slots, nullptr),
                FOVEAL_INVALID_ARGUMENT, "slot_mapping[1] is 64");
  expect_status(foveal_reshape_and_cache(key, value, &key_cache.tensor, &value_cache.tensor, slots,
                                         1.0F, 1.0F, nullptr),
                FOVEAL_INVALID_ARGUMENT, "slot_mapping[1] is 64");
  expect_status(foveal_merge_attn_states(output, nullptr, query, key, query, key, nullptr),
                FOVEAL_INVALID_ARGUMENT, "a.lse");
  expect_status(foveal_layer_update_mla_kv_cache(mla_layer, key, value, cache, slots, nullptr),
                FOVEAL_INVALID_ARGUMENT, "latent is");
  foveal_mla_prefill_args mha{};
  mha.struct_size = sizeof mha;
  mha.query = query;
  expect_status(foveal_layer_forward_mha(mla_layer, &mha, plan, nullptr), FOVEAL_INVALID_ARGUMENT,
                "metadata was built by CPU_ATTN");
  expect_status(foveal_load_kernel_pack("/nonexistent"), foveal_load_kernel_pack("/nonexistent"),
                "");
  EXPECT_NE(foveal_load_kernel_pack("/nonexistent"), FOVEAL_OK);
  EXPECT_EQ(cache.data, before);
  EXPECT_THAT(output.data, ::testing::Each(7.0F));
}

}  // namespace
}  // namespace foveal::testing
