// Each stored number format against values computed by hand.

#include "serving/weights.h"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "core/convert.h"
#include "serving/test_files.h"

namespace foveal::serving {
namespace {

using testing::append;

std::vector<float> decode_all(Encoding encoding, const std::string& bytes, std::int64_t elements) {
  std::vector<float> out(static_cast<std::size_t>(elements), -1.0F);
  // One byte in front, so that the data has no alignment.
  const std::string shifted = "x" + bytes;
  const StoredTensor stored{encoding, reinterpret_cast<const std::byte*>(shifted.data()) + 1,
                            elements};
  EXPECT_EQ(stored.bytes(), static_cast<std::int64_t>(bytes.size()));
  decode(stored, out.data());
  return out;
}

constexpr std::uint16_t kHalfOne = 0x3C00;     // 1.0 in float16
constexpr std::uint16_t kHalfHalf = 0x3800;    // 0.5
constexpr std::uint16_t kHalfMinus2 = 0xC000;  // −2.0

TEST(Weights, DecodesFloats) {
  std::string bytes;
  append(bytes, 1.5F);
  append(bytes, -3.0e30F);
  EXPECT_EQ(decode_all(Encoding::f32, bytes, 2), (std::vector<float>{1.5F, -3.0e30F}));

  bytes.clear();
  append(bytes, kHalfOne);
  append(bytes, kHalfMinus2);
  append(bytes, std::uint16_t{0x0001});  // the least subnormal, 2^−24
  EXPECT_EQ(decode_all(Encoding::f16, bytes, 3), (std::vector<float>{1.0F, -2.0F, 0x1p-24F}));

  bytes.clear();
  append(bytes, std::uint16_t{0x3F80});  // 1.0 in bfloat16
  append(bytes, std::uint16_t{0xC040});  // −3.0
  EXPECT_EQ(decode_all(Encoding::bf16, bytes, 2), (std::vector<float>{1.0F, -3.0F}));
}

TEST(Weights, DecodesQ8_0) {
  std::string bytes;
  append(bytes, kHalfHalf);
  std::vector<float> expected;
  for (int i = 0; i < 32; ++i) {
    const int value = i == 0 ? -128 : (i == 1 ? 127 : i - 16);
    append(bytes, static_cast<std::int8_t>(value));
    expected.push_back(0.5F * static_cast<float>(value));
  }
  EXPECT_EQ(decode_all(Encoding::q8_0, bytes, 32), expected);
}

TEST(Weights, DecodesQ4_0) {
  // Byte i holds element i in its low half and element i + 16 in its high half, both with 8 added.
  std::string bytes;
  append(bytes, kHalfMinus2);
  for (int i = 0; i < 16; ++i) {
    bytes += static_cast<char>(i | ((15 - i) << 4));
  }
  std::vector<float> expected(32);
  for (int i = 0; i < 16; ++i) {
    expected[static_cast<std::size_t>(i)] = -2.0F * static_cast<float>(i - 8);
    expected[static_cast<std::size_t>(i) + 16] = -2.0F * static_cast<float>(7 - i);
  }
  EXPECT_EQ(decode_all(Encoding::q4_0, bytes, 32), expected);
  EXPECT_EQ(expected[0], 16.0F);
}

TEST(Weights, DecodesQ4_1) {
  std::string bytes;
  append(bytes, kHalfHalf);
  append(bytes, kHalfMinus2);
  for (int i = 0; i < 16; ++i) {
    bytes += static_cast<char>(i | ((15 - i) << 4));
  }
  std::vector<float> expected(32);
  for (int i = 0; i < 16; ++i) {
    expected[static_cast<std::size_t>(i)] = 0.5F * static_cast<float>(i) - 2.0F;
    expected[static_cast<std::size_t>(i) + 16] = 0.5F * static_cast<float>(15 - i) - 2.0F;
  }
  EXPECT_EQ(decode_all(Encoding::q4_1, bytes, 32), expected);
}

TEST(Weights, DecodesManyBlocksInParallelAsOneByOne) {
  constexpr std::int64_t kBlocks = 10000;
  std::string bytes;
  std::vector<float> expected;
  for (std::int64_t b = 0; b < kBlocks; ++b) {
    append(bytes, float_to_f16(static_cast<float>(b % 100)));
    for (int i = 0; i < 32; ++i) {
      append(bytes, static_cast<std::int8_t>(i));
      expected.push_back(static_cast<float>(b % 100) * static_cast<float>(i));
    }
  }
  EXPECT_EQ(decode_all(Encoding::q8_0, bytes, kBlocks * 32), expected);
}

TEST(Weights, RefusesAbsurdConfigs) {
  const ModelConfig good{.name = "",
                         .num_layers = 2,
                         .hidden_size = 32,
                         .intermediate_size = 64,
                         .num_heads = 4,
                         .num_kv_heads = 2,
                         .head_size = 8,
                         .vocab_size = 40,
                         .max_seq_len = 128};
  check_config(good, "file");
  const auto refuse = [&](const std::string& field, auto change) {
    ModelConfig config = good;
    change(config);
    testing::expect_error(ErrorCode::io, {"file", field}, [&] { check_config(config, "file"); });
  };
  refuse("num_layers is -1", [](ModelConfig& c) { c.num_layers = -1; });
  refuse("hidden_size is 4611686018427387904", [](ModelConfig& c) { c.hidden_size = 1LL << 62; });
  refuse("intermediate_size is 0", [](ModelConfig& c) { c.intermediate_size = 0; });
  refuse("num_kv_heads is 3", [](ModelConfig& c) { c.num_kv_heads = 3; });
  refuse("num_kv_heads is 8", [](ModelConfig& c) { c.num_kv_heads = 8; });
  refuse("head_size is 7", [](ModelConfig& c) { c.head_size = 7; });
  refuse("rms_norm_eps is nan", [](ModelConfig& c) { c.rms_norm_eps = NAN; });
  refuse("rope_theta is 0", [](ModelConfig& c) { c.rope_theta = 0.0F; });
}

}  // namespace
}  // namespace foveal::serving
