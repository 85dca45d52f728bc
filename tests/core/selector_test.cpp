#include "foveal/selector.h"

#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <nlohmann/json.hpp>
#include <stdexcept>

#include "foveal/ops.h"
#include "foveal/registry.h"
#include "support/expect_error.h"

namespace foveal {
namespace {

using ::testing::ElementsAre;
using testing::expect_error;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

/// A backend that can do whatever a test sets, and makes nothing.
template <int kTag>
struct Fake {
  static inline BackendCapabilities can;
  static inline int loads = 0;
  static inline int validations = 0;

  static std::string_view name() { return "FAKE"; }
  static BackendCapabilities capabilities() { return can; }
  static std::vector<std::string> validate(const SelectorConfig& config) {
    ++validations;
    return config.has_alibi && config.has_soft_cap
               ? std::vector<std::string>{"alibi and soft cap exclude each other"}
               : std::vector<std::string>{};
  }
  static KVCacheLayout kv_cache_layout(const KVCacheSpec&, std::int64_t, KVCacheOrder) {
    return {};
  }
  static KVCacheView kv_cache_view(const TensorView&, const KVCacheSpec&) { return {}; }
  static std::unique_ptr<AttentionMetadataBuilder> make_builder(const BuilderConfig&) {
    return nullptr;
  }
  static std::unique_ptr<AttentionImpl> make_impl(const AttentionSpec&) { return nullptr; }
  static void reshape_and_cache(const TensorView&, const TensorView&, const KVCacheView&,
                                const TensorView&, const QuantScales&, const ExecutionContext&) {}
  static void merge_attn_states(const AttentionPart&, const AttentionPart&, const AttentionPart&,
                                const ExecutionContext&) {}

  static AttentionBackendPtr make() {
    ++loads;
    return make_backend<Fake>();
  }
  static void reset() {
    loads = 0;
    validations = 0;
    can = {};
    can.dtypes = {DType::bf16, DType::f16};
    can.kv_cache_dtypes = {DType::f8e4m3};
    can.head_size_multiple = 8;
    can.max_head_size = 256;
    can.block_sizes = {{16, true}};
    can.attn_types = {AttnType::decoder};
  }
};
using First = Fake<1>;
using Second = Fake<2>;
static_assert(AttentionBackendTraits<First>);

struct NotABackend {
  static std::string_view name() { return "NOT"; }
};
static_assert(!AttentionBackendTraits<NotABackend>);

class Selector : public ::testing::Test {
 protected:
  Selector() {
    First::reset();
    Second::reset();
    registry.add("first", "The first", First::make);
    registry.add("SECOND", "The second", Second::make);
    config.head_size = 128;
  }

  std::vector<std::string> reasons() {
    return explain_selection(config, registry).candidates.at(0).reasons;
  }

  BackendRegistry registry;
  SelectorConfig config;
};

TEST_F(Selector, ListsInOrderAndLoadsOnFirstUse) {
  registry.add("before", "Before the second", Second::make, "second");
  std::vector<std::string> ids;
  for (const auto& entry : registry.entries()) {
    ids.push_back(entry.id);
    EXPECT_FALSE(entry.loaded);
  }
  EXPECT_THAT(ids, ElementsAre("FIRST", "BEFORE", "SECOND"));
  EXPECT_EQ(First::loads, 0);
  EXPECT_NE(registry.get("First"), nullptr);
  EXPECT_EQ(registry.get("FIRST"), registry.get("first"));
  EXPECT_EQ(First::loads, 1);
  EXPECT_TRUE(registry.entries()[0].loaded);
}

TEST_F(Selector, UnknownIdsNameTheKnownOnes) {
  expect_error(
      ErrorCode::invalid_argument, [&] { registry.get("THIRD"); }, "'THIRD'", "FIRST, SECOND");
  config.backend = "third";
  expect_error(
      ErrorCode::invalid_argument, [&] { select_backend(config, registry); }, "'THIRD'",
      "FIRST, SECOND");
  expect_error(
      ErrorCode::invalid_argument, [&] { registry.add("FIRST", "", First::make); }, "exists");
  expect_error(
      ErrorCode::invalid_argument, [&] { registry.add("auto", "", First::make); }, "auto");
  expect_error(
      ErrorCode::invalid_argument, [&] { registry.override_backend("x", First::make); }, "'x'");
  expect_error(
      ErrorCode::invalid_argument, [&] { registry.add("x", "", nullptr); }, "factory");
}

TEST_F(Selector, TakesTheFirstThatCanServe) {
  EXPECT_EQ(select_backend(config, registry), registry.get("FIRST"));
  First::can.dtypes = {DType::f16};
  registry.override_backend("FIRST", First::make);
  EXPECT_EQ(select_backend(config, registry), registry.get("SECOND"));
  const SelectionReport report = explain_selection(config, registry);
  EXPECT_EQ(report.chosen, "SECOND");
  EXPECT_THAT(report.passed_over, ElementsAre("FIRST"));
}

TEST_F(Selector, EveryCriterionHasItsReason) {
  const auto refuses = [&](const std::string& part, auto&& change) {
    SelectorConfig saved = config;
    change(config);
    EXPECT_THAT(reasons(), ElementsAre(HasSubstr(part)));
    config = saved;
  };
  EXPECT_THAT(reasons(), IsEmpty());
  refuses("device is cuda, it serves cpu", [](auto& c) { c.device = DeviceType::cuda; });
  refuses("head_size is 60, accepted are multiples of 8 up to 256",
          [](auto& c) { c.head_size = 60; });
  refuses("head_size is 264", [](auto& c) { c.head_size = 264; });
  refuses("head_size_v is 64, it must be head_size = 128", [](auto& c) { c.head_size_v = 64; });
  refuses("dtype is f32, accepted are bf16, f16", [](auto& c) { c.dtype = DType::f32; });
  refuses("kv_cache_dtype is f8e5m2", [](auto& c) { c.kv_cache_dtype = DType::f8e5m2; });
  refuses("block_size is 24, accepted are any multiple of 16", [](auto& c) { c.block_size = 24; });
  refuses("attn_type is encoder, accepted are decoder",
          [](auto& c) { c.attn_type = AttnType::encoder; });
  refuses("MLA is not supported", [](auto& c) { c.use_mla = true; });
  refuses("sinks", [](auto& c) { c.has_sinks = true; });
  refuses("sliding windows", [](auto& c) { c.has_sliding_window = true; });
  refuses("soft cap", [](auto& c) { c.has_soft_cap = true; });
  refuses("ALiBi", [](auto& c) { c.has_alibi = true; });
  refuses("custom scores", [](auto& c) { c.has_custom_score = true; });
  refuses("non-causal", [](auto& c) { c.use_non_causal = true; });
  refuses("log-sum-exp", [](auto& c) { c.needs_lse = true; });
  refuses("needs_graphs is uniform_batch, graph support is never",
          [](auto& c) { c.needs_graphs = GraphSupport::uniform_batch; });
  refuses("decode_context_parallel_size is 2", [](auto& c) { c.decode_context_parallel_size = 2; });
  refuses("prefill_context_parallel_size is 4",
          [](auto& c) { c.prefill_context_parallel_size = 4; });
  refuses("batch invariance", [](auto& c) { c.batch_invariant = true; });
}

TEST_F(Selector, GivesEveryReasonNotOnlyTheFirst) {
  First::can.alibi = First::can.soft_cap = true;
  config.has_alibi = config.has_soft_cap = config.has_sinks = true;
  config.head_size = 7;
  EXPECT_THAT(reasons(), ElementsAre(HasSubstr("head_size"), HasSubstr("sinks"),
                                     HasSubstr("exclude each other")));
}

TEST_F(Selector, FeaturesThatAreThereGiveNoReason) {
  First::can.sinks = First::can.sliding_window = First::can.lse = First::can.batch_invariant = true;
  First::can.graphs = GraphSupport::always;
  config.has_sinks = config.has_sliding_window = config.needs_lse = config.batch_invariant = true;
  config.needs_graphs = GraphSupport::uniform_batch;
  config.kv_cache_dtype = DType::f8e4m3;
  config.block_size = 48;
  EXPECT_THAT(reasons(), IsEmpty());
}

TEST_F(Selector, CudaCapabilityIsARange) {
  First::can.device = DeviceType::cuda;
  First::can.min_compute_capability = 80;
  First::can.max_compute_capability = 90;
  config.device = DeviceType::cuda;
  config.compute_capability = 75;
  EXPECT_THAT(reasons(),
              ElementsAre(HasSubstr("compute_capability is 75, it must be at least 80")));
  config.compute_capability = 100;
  EXPECT_THAT(reasons(), ElementsAre(HasSubstr("it may be at most 90")));
  config.compute_capability = 90;
  EXPECT_THAT(reasons(), IsEmpty());
}

TEST_F(Selector, AnExplicitChoiceThatCannotServeIsAnErrorWithAllReasons) {
  config.backend = "first";
  EXPECT_EQ(select_backend(config, registry), registry.get("FIRST"));
  config.has_sinks = true;
  config.head_size = 300;
  expect_error(
      ErrorCode::unsupported, [&] { select_backend(config, registry); },
      "backend FIRST was asked for", "head_size is 300", "sinks");
  EXPECT_EQ(explain_selection(config, registry).candidates.size(), 1U);
}

TEST_F(Selector, NoneListsEveryBackendsReasons) {
  config.has_sinks = true;
  expect_error(
      ErrorCode::unsupported, [&] { select_backend(config, registry); },
      "FIRST: ", "SECOND: ", "sinks", "head_size=128");
}

TEST_F(Selector, ByNameOnlyBackendsAreNotChosenAutomatically) {
  First::can.auto_select = false;
  EXPECT_EQ(select_backend(config, registry), registry.get("SECOND"));
  config.backend = "FIRST";
  EXPECT_EQ(select_backend(config, registry), registry.get("FIRST"));
}

TEST_F(Selector, IsCachedAndOverridesDropWhatDependedOnThem) {
  select_backend(config, registry);
  const int before = First::validations;
  select_backend(config, registry);
  EXPECT_EQ(First::validations, before);

  SelectorConfig only_second = config;
  only_second.backend = "SECOND";
  select_backend(only_second, registry);
  const int second_before = Second::validations;

  registry.override_backend("FIRST", Second::make);
  EXPECT_TRUE(registry.entries()[0].overridden);
  const AttentionBackendPtr replaced = select_backend(config, registry);
  EXPECT_EQ(replaced, registry.get("FIRST"));
  EXPECT_GT(Second::validations, second_before);

  // What did not depend on FIRST is still cached.
  const int after = Second::validations;
  select_backend(only_second, registry);
  EXPECT_EQ(Second::validations, after);

  registry.clear_override("FIRST");
  EXPECT_FALSE(registry.entries()[0].overridden);
  EXPECT_NE(select_backend(config, registry), replaced);

  // A newly added backend may be preferred.
  registry.add("ZEROTH", "", Second::make, "FIRST");
  EXPECT_EQ(select_backend(config, registry), registry.get("ZEROTH"));
}

TEST_F(Selector, BackendsThatCannotBeLoadedAreRefusedWithTheReason) {
  registry.override_backend(
      "FIRST", []() -> AttentionBackendPtr { throw std::runtime_error("no such driver"); });
  EXPECT_THAT(reasons(), ElementsAre("cannot be loaded: no such driver"));
  EXPECT_EQ(select_backend(config, registry), registry.get("SECOND"));
  expect_error(
      ErrorCode::unsupported, [&] { registry.get("FIRST"); }, "no such driver");
}

TEST_F(Selector, FactoriesMayChangeTheRegistry) {
  registry.override_backend("FIRST", [&] {
    for (int i = 0; i < 100; ++i) {
      registry.add("EXTRA" + std::to_string(i), "", Second::make);
    }
    return First::make();
  });
  EXPECT_EQ(select_backend(config, registry), registry.get("FIRST"));
  EXPECT_EQ(registry.entries().size(), 102U);
  registry.override_backend("SECOND", [&] { return registry.get("SECOND"); });
  expect_error(
      ErrorCode::unsupported, [&] { registry.get("SECOND"); }, "asked for the backend");
}

/// Knows float32 only, and says so when it is asked to merge.
struct OnlyF32 : Fake<2> {
  static BackendCapabilities capabilities() {
    BackendCapabilities can;
    can.dtypes = {DType::f32};
    return can;
  }
  static void merge_attn_states(const AttentionPart&, const AttentionPart&, const AttentionPart&,
                                const ExecutionContext&) {
    throw std::runtime_error("asked");
  }
  static AttentionBackendPtr make() { return make_backend<OnlyF32>(); }
};

TEST(Ops, GoToTheFirstBackendThatHasTheDtype) {
  BackendRegistry& global = BackendRegistry::global();
  const std::string preferred = global.entries().front().id;
  global.override_backend(preferred, OnlyF32::make);
  std::array<float, 2> memory{2.0F, 2.0F};
  float lse = 0.0F;
  const auto merge = [&](DType dtype) {
    const AttentionPart part{TensorView(memory.data(), dtype, {1, 1, 2}),
                             TensorView(&lse, DType::f32, {1, 1})};
    merge_attn_states(part, part, part);
  };
  EXPECT_THROW(merge(DType::f32), std::runtime_error);
  EXPECT_NO_THROW(merge(DType::bf16));
  EXPECT_FLOAT_EQ(lse, std::log(2.0F));
  global.clear_override(preferred);
}

TEST_F(Selector, ReportsAsTextAndJson) {
  First::can.dtypes = {DType::f16};
  const SelectionReport report = explain_selection(config, registry);
  EXPECT_EQ(report.summary(),
            "SECOND, the first in order of preference that can serve the layer (before it, FIRST: "
            "dtype is bf16, "
            "accepted are f16)");
  EXPECT_THAT(report.text(), HasSubstr("chosen: SECOND"));
  EXPECT_THAT(report.text(), HasSubstr("dtype is bf16, accepted are f16"));
  EXPECT_THAT(report.text(), HasSubstr("fell back past: FIRST"));
  const auto json = nlohmann::json::parse(report.json());
  EXPECT_EQ(json["chosen"], "SECOND");
  EXPECT_EQ(json["config"]["head_size"], 128);
  EXPECT_EQ(json["config"]["block_size"], "free");
  EXPECT_EQ(json["candidates"][0]["reasons"][0], "dtype is bf16, accepted are f16");
  EXPECT_EQ(json["candidates"][1]["chosen"], true);
}

TEST_F(Selector, RefusesImpossibleConfigs) {
  config.head_size = 0;
  expect_error(
      ErrorCode::invalid_argument, [&] { select_backend(config, registry); }, "head_size is 0");
  config.head_size = 64;
  config.block_size = 0;
  expect_error(
      ErrorCode::invalid_argument, [&] { select_backend(config, registry); }, "block_size is 0");
  config.block_size.reset();
  config.decode_context_parallel_size = 0;
  expect_error(
      ErrorCode::invalid_argument, [&] { explain_selection(config, registry); }, "it must be >= 1");
}

TEST_F(Selector, KernelBlockSizes) {
  const auto with_blocks = [](auto tag, const std::vector<BlockSize>& sizes) {
    decltype(tag)::can.block_sizes = sizes;
    return make_backend<decltype(tag)>();
  };
  const AttentionBackendPtr sixteens = with_blocks(First{}, {{16, true}});
  const AttentionBackendPtr listed = with_blocks(Second{}, {{32, false}, {64, false}});
  const std::vector<AttentionBackendPtr> both{sixteens, listed};
  EXPECT_EQ(select_kernel_block_size(48, std::vector{sixteens}), 48);
  EXPECT_EQ(select_kernel_block_size(64, both), 64);
  EXPECT_EQ(select_kernel_block_size(128, both), 64);
  EXPECT_EQ(select_kernel_block_size(784, std::vector{sixteens}), 784);
  expect_error(
      ErrorCode::unsupported, [&] { select_kernel_block_size(48, both); }, "block of 48",
      "any multiple of 16", "32, 64");
  EXPECT_EQ(preferred_block_size(*sixteens), 16);
  EXPECT_EQ(preferred_block_size(*listed), 32);
}

TEST(BuiltInBackends, AreListedWithTheOracleByNameOnly) {
  BackendRegistry& registry = BackendRegistry::global();
  EXPECT_TRUE(registry.contains("CPU_ATTN"));
  SelectorConfig config;
  config.head_size = 64;
  EXPECT_EQ(select_backend(config)->name(), "CPU_ATTN");
  config.backend = "REFERENCE";
  EXPECT_EQ(select_backend(config)->name(), "REFERENCE");
  config.backend.clear();
  config.head_size = 63;
  expect_error(
      ErrorCode::unsupported, [&] { select_backend(config); }, "head_size is 63",
      "multiples of 8 up to 512", "is chosen by name only");
  config.head_size = 576;
  config.head_size_v = 512;
  config.use_mla = true;
  EXPECT_EQ(select_backend(config)->name(), "CPU_MLA");
  config.backend = "REFERENCE_MLA";
  const AttentionBackendPtr mla = select_backend(config);
  AttentionSpec spec;
  expect_error(
      ErrorCode::unsupported, [&] { mla->make_impl(spec); }, "no forward", "make_mla_impl");
  expect_error(
      ErrorCode::unsupported, [&] { registry.get("CPU_ATTN")->make_mla_impl(spec); }, "make_impl");
  for (const auto& entry : registry.entries()) {
    EXPECT_EQ(registry.get(entry.id)->name(), entry.id);
  }
}

TEST(Plugin, ServesFromASharedLibrary) {
  if (std::string(FOVEAL_EXAMPLE_PLUGIN).empty()) {
    GTEST_SKIP() << "the examples are not built";
  }
  BackendRegistry registry;
  registry.add_library("EXAMPLE", "Example plug-in", FOVEAL_EXAMPLE_PLUGIN);
  EXPECT_FALSE(registry.entries()[0].loaded);
  SelectorConfig config;
  config.head_size = 64;
  config.dtype = DType::f32;
  EXPECT_EQ(select_backend(config, registry)->name(), "EXAMPLE");
  EXPECT_TRUE(registry.entries()[0].loaded);
  EXPECT_EQ(registry.entries()[0].source, FOVEAL_EXAMPLE_PLUGIN);

  registry.add_library("OTHER", "Not in there", FOVEAL_EXAMPLE_PLUGIN);
  expect_error(
      ErrorCode::unsupported, [&] { registry.get("OTHER"); }, "no backend of the id OTHER");
}

TEST(Plugin, FailuresNameTheFileAndTheReason) {
  BackendRegistry registry;
  registry.add_library("MISSING", "", "/nonexistent/libnone.so");
  expect_error(
      ErrorCode::unsupported, [&] { registry.get("MISSING"); }, "/nonexistent/libnone.so",
      "cannot be opened");
  registry.add_library("PLAIN", "", FOVEAL_LIBRARY);
  expect_error(
      ErrorCode::unsupported, [&] { registry.get("PLAIN"); }, "no function foveal_plugin_v1");
}

}  // namespace
}  // namespace foveal
