// Every kernel of a table of realistic layers compiles for every architecture, without a GPU, and
// the forward kernels of the usual layers keep all they compute in registers.

#include <elf.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <string>
#include <utility>
#include <vector>

#include "cuda/flash_attn/kernels.h"
#include "cuda/test_support.h"
#include "foveal/error.h"

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
  layers.push_back({.name = "fp8 query: 32/8 of 128", .spec = layer(32, 8, 128, DType::f8e4m3)});
  layers.push_back({.name = "fp8 query: 16/8 of 256", .spec = layer(16, 8, 256, DType::f8e4m3)});
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

/// How many instructions of the cubin have this opcode (the low nine bits of each 16 bytes).
int count_instructions(const Cubin& cubin, std::uint64_t opcode) {
  const std::byte* file = cubin.image.data();
  Elf64_Ehdr header;
  std::memcpy(&header, file, sizeof(header));
  int count = 0;
  for (int i = 0; i < header.e_shnum; ++i) {
    Elf64_Shdr section;
    std::memcpy(&section, file + header.e_shoff + static_cast<std::size_t>(i) * sizeof(section),
                sizeof(section));
    if (section.sh_type != SHT_PROGBITS || (section.sh_flags & SHF_EXECINSTR) == 0) {
      continue;
    }
    for (std::size_t at = 0; at < section.sh_size; at += 16) {
      std::uint64_t word;
      std::memcpy(&word, file + section.sh_offset + at, sizeof(word));
      count += (word & 0x1FF) == opcode ? 1 : 0;
    }
  }
  return count;
}
// As seen in disassembled cubins for sm_90a.
constexpr std::uint64_t kHmma = 0x03C;
constexpr std::uint64_t kHgmma = 0x1F0;

DeviceProperties hopper() {
  DeviceProperties device;
  device.compute_capability = 90;
  device.sm_count = 132;
  device.shared_bytes_per_block = 227 << 10;
  device.shared_bytes_per_sm = 228 << 10;
  return device;
}

TEST(FlashAttnTiles, Sm90WhereItServes) {
  using ::testing::HasSubstr;
  const DeviceProperties device = hopper();
  for (const int size : {64, 96, 128, 192, 256}) {
    for (const int group : {1, 2, 4, 8, 16}) {
      const HeadShape head{size, size, 2, 2, 16, group};
      EXPECT_EQ(why_not_sm90(head, device), "");
      for (const std::int64_t queries : {17, 8192}) {
        const TileConfig tile = prefill_tile(head, queries, 0, device);
        EXPECT_TRUE(tile.is_sm90());
        EXPECT_EQ(tile.block_m() % group, 0);
        EXPECT_LE(tile.shared_bytes(head), device.shared_bytes_per_block);
        // A plan for it serves the other kernel too.
        const TileConfig other = without_bulk_copies(tile, head);
        EXPECT_FALSE(other.is_sm90());
        EXPECT_EQ(other.block_m(), tile.block_m());
        EXPECT_EQ(other.block_n, tile.block_n);
        EXPECT_LE(other.shared_bytes(head), device.shared_bytes_per_block) << size;
        EXPECT_FALSE(prefill_tile(head, queries, 2, device).is_sm90());
      }
    }
  }
  // Caches in fp8, for queries of 16 bits and in fp8.
  for (const int query_bytes : {1, 2}) {
    for (const auto& [size, size_v] :
         {std::pair{64, 64}, {96, 96}, {128, 128}, {192, 128}, {192, 192}, {256, 256}}) {
      const HeadShape head{size, size_v, query_bytes, 1, 16, 4};
      if (query_bytes == 2 && size == 256) {
        EXPECT_THAT(why_not_sm90(head, device), HasSubstr("fp8"));
        continue;
      }
      EXPECT_EQ(why_not_sm90(head, device), "") << size;
      const TileConfig tile = prefill_tile(head, 8192, 0, device);
      EXPECT_TRUE(tile.is_sm90());
      EXPECT_EQ(decode_tile(head, 1, device).is_sm90(), query_bytes == 1);
      if (query_bytes == 2) {
        EXPECT_LE(without_bulk_copies(tile, head).shared_bytes(head), device.shared_bytes_per_block)
            << size;
      }
    }
  }
  EXPECT_EQ(prefill_tile({64, 64, 2, 2, 16, 3}, 64, 0, device).block_m(), 192);
  DeviceProperties ampere = device;
  ampere.compute_capability = 80;
  EXPECT_THAT(why_not_sm90({128, 128, 2, 2, 16, 4}, ampere), HasSubstr("capability is 80"));
  EXPECT_THAT(why_not_sm90({80, 80, 2, 2, 16, 4}, device), HasSubstr("a head size is 80"));
  EXPECT_THAT(why_not_sm90({128, 128, 2, 2, 16, 5}, device), HasSubstr("5 query heads"));
  EXPECT_FALSE(prefill_tile({128, 128, 2, 2, 16, 5}, 64, 0, device).is_sm90());
}

TEST(FlashAttnTiles, KernelsForTensorsThatTheCopyEngineCannotRead) {
  SKIP_WITHOUT_NVRTC();
  std::vector<KernelKey> keys;
  for (const int size : {64, 256}) {
    AttentionSpec spec = layer(8, 8, size);
    const TileConfig tile = without_bulk_copies(
        prefill_tile(head_shape(spec, 16), 8192, 0, hopper()), head_shape(spec, 16));
    ForwardVariant variant = forward_variant(spec, true, 16, 1, tile);
    variant.row_vector_bytes = variant.cache_vector_bytes = 2;
    keys.push_back(forward_key(variant, "sm_90a"));
  }
  Jit(JitOptions{}).compile_all(keys);
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
    if (is_fp8(l.spec.dtype) && arch != "sm_90a") {
      EXPECT_THROW(keys_for_model(l.spec, l.block_size, arch), Error) << l.name;
      continue;
    }
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
    const bool sm90 = keys[i].source == "flash_attn/sm90_forward.cu";
    EXPECT_EQ(count_instructions(cubin, kHgmma) > 0, sm90) << cubin.key_text;
    if (arch == "sm_90a") {
      EXPECT_EQ(count_instructions(cubin, kHmma) == 0, sm90) << cubin.key_text;
    }
    if (owners[i]->hot || sm90) {
      EXPECT_EQ(cubin.resources.spill_store_bytes, 0) << cubin.key_text;
    }
  }
}

INSTANTIATE_TEST_SUITE_P(Architectures, FlashAttnKeys, ::testing::Values(80, 86, 89, 90, 100, 120),
                         [](const auto& info) { return "sm_" + std::to_string(info.param); });

}  // namespace
}  // namespace foveal::cuda::flash_attn
