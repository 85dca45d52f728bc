#include <gmock/gmock.h>

#include <limits>
#include <set>

#include "cuda/kernel_program.h"
#include "cuda/kernel_sources.h"
#include "cuda/models.h"
#include "cuda/test_support.h"
#include "support/expect_error.h"

namespace foveal::cuda {
namespace {

using ::testing::HasSubstr;
using testing::scale_key;

TEST(KernelKey, BecomesAHeader) {
  KernelKey key;
  key.source = "a.cu";
  key.entry = "a";
  key.arch = "sm_80";
  key.set("kInt", -3).set("kLong", std::int64_t{1} << 40).set("kYes", true).set("kHalf", 0.5F);
  key.set("kType", DType::f8e4m3);
  const std::string header = key.config_header();
  EXPECT_THAT(header, HasSubstr("constexpr int kInt = -3;\n"));
  EXPECT_THAT(header, HasSubstr("constexpr long long kLong = 1099511627776LL;\n"));
  EXPECT_THAT(header, HasSubstr("constexpr bool kYes = true;\n"));
  EXPECT_THAT(header, HasSubstr("constexpr float kHalf = 0x1p-1f;\n"));
  EXPECT_THAT(header, HasSubstr("constexpr DType kType = DType::f8e4m3;\n"));
  EXPECT_EQ(key.text(),
            "a.cu:a sm_80 kInt=-3 kLong=1099511627776LL kYes=true kHalf=0x1p-1f kType=f8e4m3");
  key.set("kInt", 4);
  EXPECT_THAT(key.config_header(), HasSubstr("kInt = 4;"));
  EXPECT_THAT(key.config_header(), ::testing::Not(HasSubstr("-3")));
}

TEST(KernelKey, RefusesWhatTheDeviceCouldNotRead) {
  foveal::testing::expect_error(
      ErrorCode::invalid_argument, [] { KernelKey().set("2x", 1); }, "2x", "identifier");
  foveal::testing::expect_error(
      ErrorCode::invalid_argument,
      [] { KernelKey().set("kX", std::numeric_limits<float>::infinity()); }, "kX", "finite");
}

TEST(KernelKey, NamesArchitecturesAsDevicesNeedThem) {
  EXPECT_EQ(arch_name(80), "sm_80");
  EXPECT_EQ(arch_name(86), "sm_86");
  EXPECT_EQ(arch_name(89), "sm_89");
  EXPECT_EQ(arch_name(90), "sm_90a");
  EXPECT_EQ(arch_name(100), "sm_100a");
  EXPECT_EQ(arch_name(120), "sm_120");
}

TEST(KernelProgram, IdChangesWithEverythingThatMatters) {
  std::set<std::string> ids;
  const auto add = [&](const KernelKey& key) { return ids.insert(assemble(key).id).second; };
  const KernelKey base = scale_key("sm_90a");
  EXPECT_TRUE(add(base));
  EXPECT_FALSE(add(scale_key("sm_90a")));
  EXPECT_TRUE(add(scale_key("sm_80"))) << "architecture";
  EXPECT_TRUE(add(scale_key("sm_90a", 4))) << "constant";
  KernelKey key = base;
  key.entry = "other";
  EXPECT_TRUE(add(key)) << "entry";
  key = base;
  key.headers["scale.cu"] += "// more\n";
  EXPECT_TRUE(add(key)) << "source";
  key = base;
  key.headers["multiply.cuh"] += "// more\n";
  EXPECT_TRUE(add(key)) << "included header";
  key = base;
  key.set("kMore", true);
  EXPECT_TRUE(add(key)) << "one more constant";
  key = base;
  key.headers["unused.cuh"] = "// not included\n";
  EXPECT_FALSE(add(key)) << "what is not included does not matter";

  const KernelProgram program = assemble(base);
  EXPECT_NE(program.id_with_compiler("nvrtc 12.8"), program.id_with_compiler("nvrtc 13.0"));
}

TEST(KernelProgram, FollowsIncludesOnce) {
  KernelKey key = scale_key("sm_80");
  key.headers["multiply.cuh"] =
      "#pragma once\n #  include \"config.cuh\"\n#include \"multiply.cuh\"\n";
  const KernelProgram program = assemble(key);
  ASSERT_EQ(program.program.headers.size(), 2U);
  EXPECT_EQ(program.program.headers[0].first, "config.cuh");
  EXPECT_EQ(program.program.headers[1].first, "multiply.cuh");
}

TEST(KernelProgram, NamesWhatIsMissing) {
  using foveal::testing::expect_error;
  KernelKey key = scale_key("sm_80");
  key.source = "nowhere.cu";
  expect_error(
      ErrorCode::invalid_argument, [&] { assemble(key); }, "nowhere.cu");
  key = scale_key("sm_80");
  key.headers.erase("multiply.cuh");
  expect_error(
      ErrorCode::compile, [&] { assemble(key); }, "scale.cu", "multiply.cuh");
  key.headers["multiply.cuh"] = "#include <cuda_fp16.h>\n";
  expect_error(
      ErrorCode::compile, [&] { assemble(key); }, "multiply.cuh", "<cuda_fp16.h>");
}

TEST(KernelSources, AreSortedAndTakeNothingFromAToolkit) {
  const auto sources = kernel_sources();
  ASSERT_FALSE(sources.empty());
  for (std::size_t i = 0; i < sources.size(); ++i) {
    EXPECT_TRUE(i == 0 || sources[i - 1].path < sources[i].path) << sources[i].path;
    EXPECT_EQ(find_kernel_source(sources[i].path).data(), sources[i].text.data());
    if (sources[i].path.ends_with(".cu")) {
      KernelKey key;
      key.source = std::string(sources[i].path);
      key.entry = "any";
      key.arch = "sm_80";
      EXPECT_NO_THROW(assemble(key)) << sources[i].path;
    }
  }
  EXPECT_EQ(find_kernel_source("nowhere.cu").data(), nullptr);
}

TEST(Models, HaveValidLayers) {
  for (const std::string& name : model_names()) {
    const auto layers = layers_of_model(name);
    EXPECT_FALSE(layers.empty()) << name;
    for (const AttentionSpec& layer : layers) {
      EXPECT_NO_THROW(layer.validate()) << name;
    }
  }
  EXPECT_TRUE(std::ranges::is_sorted(model_names()));
  foveal::testing::expect_error(
      ErrorCode::invalid_argument, [] { layers_of_model("llama-9"); }, "llama-9", "llama-3-8b");
}

}  // namespace
}  // namespace foveal::cuda
