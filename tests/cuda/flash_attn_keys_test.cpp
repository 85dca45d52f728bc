// Every kernel of a table of realistic layers compiles for every architecture, without a GPU, and
// the forward kernels of the usual layers keep all they compute in registers.

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <string>
#include <vector>

#include "cuda/flash_attn/kernels.h"
#include "cuda/test_support.h"

namespace foveal::cuda::flash_attn {
namespace {

struct Layer {
  const char* name;
  AttentionSpec spec;
  std::int64_t block_size = 16;
  bool hot = false;  ///< A spill fails the test.
};

AttentionSpec layer(std::int64_t heads, std::int64_t kv_heads, std::int64_t size,
                    DType dtype = DType::bf16) {
  AttentionSpec spec;
  spec.num_heads = heads;
  spec.num_kv_heads = kv_heads;
  spec.head_size = size;
  spec.dtype = dtype;
  return spec;
}

std::vector<Layer> layers() {
  std::vector<Layer> layers{
      {.name = "8B: 32/8 of 128", .spec = layer(32, 8, 128), .hot = true},
      {.name = "70B: 64/8 of 128", .spec = layer(64, 8, 128), .hot = true},
      {.name = "7B without groups: 32/32 of 128", .spec = layer(32, 32, 128), .hot = true},
      {.name = "32/8 of 128, f16", .spec = layer(32, 8, 128, DType::f16), .hot = true},
      {.name = "small: 9/3 of 64", .spec = layer(9, 3, 64), .hot = true},
      {.name = "16/8 of 256", .spec = layer(16, 8, 256), .hot = true},
      {.name = "head of 80", .spec = layer(32, 32, 80)},
      {.name = "blocks of 64", .spec = layer(32, 8, 128), .block_size = 64},
  };
  Layer fp8{.name = "fp8 cache", .spec = layer(32, 8, 128)};
  fp8.spec.kv_cache_dtype = DType::f8e4m3;
  layers.push_back(fp8);
  Layer window{.name = "window and sinks: 64/8 of 64", .spec = layer(64, 8, 64)};
  window.spec.window = Window::of_tokens(128);
  window.spec.sinks.assign(64, 0.5F);
  layers.push_back(window);
  Layer cap{.name = "soft cap and window: 16/8 of 256", .spec = layer(16, 8, 256)};
  cap.spec.window = Window::of_tokens(4096);
  cap.spec.logits_soft_cap = 50.0F;
  layers.push_back(cap);
  Layer alibi{.name = "ALiBi: 32/32 of 128", .spec = layer(32, 32, 128)};
  alibi.spec.alibi_slopes.assign(32, 0.1F);
  layers.push_back(alibi);
  Layer encoder{.name = "encoder: 12/12 of 64", .spec = layer(12, 12, 64)};
  encoder.spec.attn_type = AttnType::encoder_only;
  layers.push_back(encoder);
  Layer narrow{.name = "192/128", .spec = layer(16, 16, 192)};
  narrow.spec.head_size_v = 128;
  layers.push_back(narrow);
  return layers;
}

class FlashAttnKeys : public ::testing::TestWithParam<int> {};

TEST_P(FlashAttnKeys, CompileWithoutSpills) {
  SKIP_WITHOUT_NVRTC();
  const std::string arch = arch_name(GetParam());
  if (!nvrtc_knows(arch)) {
    GTEST_SKIP() << "NVRTC does not know " << arch;
  }
  std::vector<KernelKey> keys;
  std::vector<const Layer*> owners;
  const std::vector<Layer> table = layers();
  for (const Layer& l : table) {
    for (KernelKey& key : keys_for_model(l.spec, l.block_size, arch)) {
      if (std::find(keys.begin(), keys.end(), key) == keys.end()) {
        keys.push_back(std::move(key));
        owners.push_back(&l);
      }
    }
  }
  Jit jit(JitOptions{});
  const auto cubins = jit.compile_all(keys);
  for (std::size_t i = 0; i < cubins.size(); ++i) {
    const Cubin& cubin = *cubins[i];
    if (cubin.entry != "flash_forward") {
      continue;
    }
    std::printf("%-8s %-32s %3d registers, %d bytes spilled, %d of stack\n", arch.c_str(),
                owners[i]->name, cubin.resources.registers, cubin.resources.spill_store_bytes,
                cubin.resources.stack_bytes);
    if (owners[i]->hot) {
      EXPECT_EQ(cubin.resources.spill_store_bytes, 0) << cubin.key_text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, FlashAttnKeys, ::testing::Values(80, 86, 89, 90, 100, 120),
                         [](const auto& info) { return "sm_" + std::to_string(info.param); });

}  // namespace
}  // namespace foveal::cuda::flash_attn
