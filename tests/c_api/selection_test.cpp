// Version, devices, defaults of structs, and the choice of a backend.
#include <cmath>
#include <cstring>
#include <nlohmann/json.hpp>
#include <thread>

#include "c_api/c_support.h"
#include "foveal/foveal.h"

namespace foveal::testing {
namespace {

TEST(CApi, Version) {
  EXPECT_EQ(foveal_version(), std::string(version()));
  EXPECT_EQ(std::string(foveal_version()), std::to_string(FOVEAL_VERSION_MAJOR) + "." +
                                               std::to_string(FOVEAL_VERSION_MINOR) + "." +
                                               std::to_string(FOVEAL_VERSION_PATCH));
}

TEST(CApi, StatusNames) {
  EXPECT_STREQ(foveal_status_name(FOVEAL_OK), "ok");
  EXPECT_STREQ(foveal_status_name(FOVEAL_UNSUPPORTED), "unsupported");
  EXPECT_STREQ(foveal_status_name(FOVEAL_INTERNAL_ERROR), "internal");
}

TEST(CApi, DevicesAreThoseOfTheLibrary) {
  const std::vector<DeviceInfo> all = devices();
  std::int32_t count = 0;
  ASSERT_OK(foveal_num_devices(&count));
  ASSERT_EQ(count, std::ssize(all));
  ASSERT_GE(count, 1);
  for (std::int32_t i = 0; i < count; ++i) {
    foveal_device_info info{};
    info.struct_size = sizeof info;
    ASSERT_OK(foveal_get_device(i, &info));
    const DeviceInfo& expected = all[static_cast<std::size_t>(i)];
    EXPECT_EQ(info.device.device_type, i == 0 ? kDLCPU : kDLCUDA);
    EXPECT_EQ(info.name, expected.name);
    EXPECT_EQ(info.compute_capability, expected.compute_capability);
    EXPECT_EQ(info.memory_bytes, expected.memory_bytes);
    EXPECT_GT(info.memory_bytes, 1 << 20);
  }
}

TEST(CApi, SpecDefaults) {
  foveal_spec spec;
  std::memset(&spec, 0x5A, sizeof spec);
  ASSERT_OK(foveal_spec_init(&spec, sizeof spec));
  EXPECT_EQ(spec.struct_size, sizeof spec);
  EXPECT_TRUE(std::isnan(spec.scale));
  EXPECT_EQ(spec.dtype, FOVEAL_BF16);
  EXPECT_EQ(spec.window_left, -1);
  EXPECT_EQ(spec.window_right, -1);
  EXPECT_EQ(spec.k_scale, 1.0F);
  EXPECT_EQ(spec.alibi_slopes, nullptr);
  EXPECT_EQ(spec.mla, nullptr);
  EXPECT_EQ(spec.mod_user_data, nullptr);
}

/// A caller built with a later header: longer structs are set to zero behind what is known, and
/// taken as long as nothing is set there.
TEST(CApi, StructsMayGrow) {
  struct Later {
    foveal_spec spec;
    std::int64_t added;
  } later;
  std::memset(&later, 0x5A, sizeof later);
  ASSERT_OK(foveal_spec_init(&later.spec, sizeof later));
  EXPECT_EQ(later.added, 0);
  later.spec.num_heads = later.spec.num_kv_heads = 1;
  later.spec.head_size = 8;
  std::int64_t bytes = 0;
  EXPECT_OK(foveal_kv_cache_page_size_bytes(&later.spec, 16, &bytes));
  EXPECT_EQ(bytes, 16 * 2 * 8 * 2);
  later.added = 1;
  expect_status(foveal_kv_cache_page_size_bytes(&later.spec, 16, &bytes), FOVEAL_UNSUPPORTED,
                "spec sets members that version");
  later.spec.struct_size = sizeof(foveal_spec) - 1;
  expect_status(foveal_kv_cache_page_size_bytes(&later.spec, 16, &bytes), FOVEAL_INVALID_ARGUMENT,
                "spec.struct_size is", "sizeof the struct");
}

TEST(CApi, SelectorConfigFollowsTheSpec) {
  foveal_spec spec = small_spec();
  const std::vector<float> slopes(4, 0.5F);
  spec.alibi_slopes = slopes.data();
  spec.num_alibi_slopes = 4;
  spec.window_left = 7;
  spec.logits_soft_cap = 30.0F;
  spec.kv_cache_dtype = FOVEAL_F8E4M3;
  foveal_selector_config config;
  ASSERT_OK(foveal_selector_config_init(&config, sizeof config, &spec, kDLCUDA, 90));
  EXPECT_EQ(config.struct_size, sizeof config);
  EXPECT_EQ(config.device_type, kDLCUDA);
  EXPECT_EQ(config.compute_capability, 90);
  EXPECT_EQ(config.head_size, 8);
  EXPECT_EQ(config.dtype, FOVEAL_F32);
  EXPECT_EQ(config.kv_cache_dtype, FOVEAL_F8E4M3);
  EXPECT_TRUE(config.has_alibi);
  EXPECT_TRUE(config.has_sliding_window);
  EXPECT_TRUE(config.has_soft_cap);
  EXPECT_FALSE(config.has_sinks);
  EXPECT_FALSE(config.use_mla);
  EXPECT_EQ(config.decode_context_parallel_size, 1);
  ASSERT_OK(foveal_selector_config_init(&config, sizeof config, nullptr, kDLCUDA, 80));
  EXPECT_EQ(config.device_type, kDLCUDA);
  EXPECT_EQ(config.dtype, FOVEAL_BF16);
}

TEST(CApi, SelectsAndExplains) {
  const foveal_spec spec = small_spec();
  foveal_selector_config config;
  ASSERT_OK(foveal_selector_config_init(&config, sizeof config, &spec, kDLCPU, 0));
  BackendHandle backend;
  ASSERT_OK(foveal_select_backend(&config, &backend));
  EXPECT_STREQ(foveal_backend_name(backend), "CPU_ATTN");
  EXPECT_STRNE(foveal_backend_runtime(backend), "");

  SelectionHandle selection;
  ASSERT_OK(foveal_explain_selection(&config, &selection));
  SelectorConfig same;
  same.head_size = 8;
  same.dtype = DType::f32;
  const SelectionReport report = explain_selection(same);
  EXPECT_EQ(foveal_selection_chosen(selection), report.chosen);
  EXPECT_EQ(foveal_selection_summary(selection), report.summary());
  EXPECT_EQ(foveal_selection_text(selection), report.text());
  EXPECT_EQ(foveal_selection_json(selection), report.json());
  EXPECT_EQ(nlohmann::json::parse(foveal_selection_json(selection))["chosen"], "CPU_ATTN");
  ASSERT_EQ(foveal_selection_num_candidates(selection), std::ssize(report.candidates));
  for (std::int64_t i = 0; i < std::ssize(report.candidates); ++i) {
    const Candidate& expected = report.candidates[static_cast<std::size_t>(i)];
    foveal_candidate candidate{};
    candidate.struct_size = sizeof candidate;
    ASSERT_OK(foveal_selection_candidate(selection, i, &candidate));
    EXPECT_EQ(candidate.id, expected.id);
    EXPECT_EQ(candidate.display_name, expected.display_name);
    EXPECT_EQ(candidate.priority, expected.priority);
    EXPECT_EQ(candidate.chosen, expected.chosen);
    ASSERT_EQ(candidate.num_reasons, std::ssize(expected.reasons));
    for (std::int64_t r = 0; r < candidate.num_reasons; ++r) {
      EXPECT_EQ(candidate.reasons[r], expected.reasons[static_cast<std::size_t>(r)]);
    }
  }
}

TEST(CApi, NoneCanServe) {
  foveal_spec spec = small_spec();
  foveal_selector_config config;
  ASSERT_OK(foveal_selector_config_init(&config, sizeof config, &spec, kDLOpenCL, 0));
  BackendHandle backend;
  expect_status(foveal_select_backend(&config, &backend), FOVEAL_UNSUPPORTED, "CPU_ATTN",
                "device is opencl");
  EXPECT_EQ(backend.pointer, nullptr);
  SelectionHandle selection;
  ASSERT_OK(foveal_explain_selection(&config, &selection));
  EXPECT_STREQ(foveal_selection_chosen(selection), "");
  config.device_type = kDLCPU;
  config.backend = "NO_SUCH";
  expect_status(foveal_select_backend(&config, &backend), FOVEAL_INVALID_ARGUMENT, "NO_SUCH",
                "CPU_ATTN");
  expect_status(foveal_explain_selection(&config, &selection), FOVEAL_INVALID_ARGUMENT, "NO_SUCH");
}

TEST(CApi, CachesAreLaidOutAsInCxx) {
  foveal_spec spec = small_spec();
  const BackendHandle backend = backend_of("CPU_ATTN");
  foveal_kv_cache_layout layout{};
  layout.struct_size = sizeof layout;
  ASSERT_OK(foveal_backend_kv_cache_layout(backend, &spec, 16, 10, FOVEAL_HND, &layout));
  EXPECT_THAT(std::vector<std::int64_t>(layout.shape, layout.shape + layout.ndim),
              ::testing::ElementsAre(10, 2, 16, 2, 8));
  EXPECT_THAT(std::vector<std::int32_t>(layout.stride_order, layout.stride_order + layout.ndim),
              ::testing::ElementsAre(0, 1, 3, 2, 4));
  EXPECT_THAT(std::vector<std::int64_t>(layout.strides, layout.strides + layout.ndim),
              ::testing::ElementsAre(512, 256, 8, 128, 1));
  EXPECT_EQ(layout.size_bytes, 10 * 2 * 16 * 2 * 8 * 4);
  EXPECT_EQ(layout.dtype, FOVEAL_F32);

  foveal_tensor cache;
  foveal_tensor key;
  foveal_tensor value;
  char memory = 0;
  ASSERT_OK(foveal_tensor_init(&cache, &memory, layout.dtype, kCpu, layout.ndim, layout.shape,
                               layout.strides));
  ASSERT_OK(foveal_backend_kv_cache_views(backend, &spec, 16, &cache.tensor, &key, &value));
  EXPECT_THAT(std::vector<std::int64_t>(key.tensor.shape, key.tensor.shape + 4),
              ::testing::ElementsAre(10, 16, 2, 8));
  EXPECT_THAT(std::vector<std::int64_t>(value.tensor.strides, value.tensor.strides + 4),
              ::testing::ElementsAre(512, 8, 128, 1));
  EXPECT_EQ(static_cast<char*>(value.tensor.data) - static_cast<char*>(key.tensor.data), 256 * 4);

  std::int64_t number = 0;
  ASSERT_OK(foveal_kv_cache_page_size_bytes(&spec, 16, &number));
  EXPECT_EQ(number, 16 * 2 * (8 + 8) * 4);
  ASSERT_OK(foveal_kv_cache_max_blocks_per_request(&spec, 16, 100, 50, &number));
  EXPECT_EQ(number, 7);
  spec.window_left = 15;
  ASSERT_OK(foveal_kv_cache_max_blocks_per_request(&spec, 16, 100, 1, &number));
  EXPECT_EQ(number, 2);
  ASSERT_OK(foveal_backend_preferred_block_size(backend, 32, &number));
  EXPECT_EQ(number, 32);
  const foveal_backend* backends[] = {backend};
  ASSERT_OK(foveal_select_kernel_block_size(48, backends, 1, &number));
  EXPECT_EQ(number, 48);
}

TEST(CApi, PluginBackends) {
  if (std::string(FOVEAL_EXAMPLE_PLUGIN).empty()) {
    GTEST_SKIP() << "the example plug-in was not built";
  }
  ASSERT_OK(foveal_add_backend_library("EXAMPLE", "from C", FOVEAL_EXAMPLE_PLUGIN, nullptr));
  const BackendHandle backend = backend_of("EXAMPLE");
  EXPECT_STREQ(foveal_backend_name(backend), "EXAMPLE");
}

TEST(CApi, TheMessageIsTheThreads) {
  expect_status(foveal_num_devices(nullptr), FOVEAL_INVALID_ARGUMENT, "out is NULL");
  std::thread([] {
    EXPECT_STREQ(foveal_last_error(), "");
    expect_status(foveal_load_kernel_pack(nullptr), FOVEAL_INVALID_ARGUMENT, "path is NULL");
  }).join();
  EXPECT_THAT(foveal_last_error(), ::testing::HasSubstr("out is NULL"));
}

}  // namespace
}  // namespace foveal::testing
