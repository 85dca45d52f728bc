#include "serving/safetensors.h"

#include <gtest/gtest.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <functional>
#include <map>

#include "foveal/registry.h"
#include "problem/judge.h"
#include "problem/problem_file.h"
#include "support/expect_error.h"

namespace foveal::problem {
namespace {

using foveal::testing::expect_error;
using serving::SafetensorsTensor;

class SafetensorsProblem : public ::testing::Test {
 protected:
  void SetUp() override {
    const auto* info = ::testing::UnitTest::GetInstance()->current_test_info();
    folder_ = std::filesystem::temp_directory_path() /
              ("foveal_problem_" + std::to_string(::getpid()) + "_" + info->name());
    std::filesystem::create_directories(folder_);
    path_ = folder_ / "problem.safetensors";
  }
  void TearDown() override { std::filesystem::remove_all(folder_); }

  std::filesystem::path folder_;
  std::filesystem::path path_;
};

AttentionProblem make_file_problem() {
  AttentionProblem problem;
  problem.name = "round trip";
  problem.spec.num_heads = 4;
  problem.spec.num_kv_heads = 2;
  problem.spec.head_size = 8;
  problem.spec.head_size_v = 6;
  problem.spec.scale = 0.3F;
  problem.spec.dtype = DType::bf16;
  problem.spec.window = {7, -1};
  problem.spec.logits_soft_cap = 4.0F;
  problem.spec.sinks = {0.5F, 1.5F, -0.5F, 0.0F};
  problem.requests = {{2, 9}, {1, 20}};
  problem.unowned_rows = 1;
  problem.block_size = 4;
  problem.fill_random(3);
  return problem;
}

void expect_same(const AttentionProblem& a, const AttentionProblem& b) {
  EXPECT_EQ(a.name, b.name);
  EXPECT_EQ(a.query, b.query);
  EXPECT_EQ(a.key, b.key);
  EXPECT_EQ(a.stored_key, b.stored_key);
  EXPECT_EQ(a.stored_value, b.stored_value);
  EXPECT_EQ(a.paged, b.paged);
  EXPECT_EQ(a.causal, b.causal);
  EXPECT_EQ(a.block_ids, b.block_ids);
  EXPECT_EQ(a.mask, b.mask);
  EXPECT_EQ(a.expected_output, b.expected_output);
  EXPECT_EQ(a.expected_lse, b.expected_lse);
  EXPECT_EQ(a.spec.dtype, b.spec.dtype);
  EXPECT_EQ(a.spec.sinks, b.spec.sinks);
  EXPECT_EQ(a.spec.alibi_slopes, b.spec.alibi_slopes);
  const AttentionBackendPtr reference = BackendRegistry::global().get("REFERENCE");
  EXPECT_EQ(run_problem(a, *reference).output, run_problem(b, *reference).output);
  EXPECT_EQ(run_problem(a, *reference).lse, run_problem(b, *reference).lse);
}

TEST_F(SafetensorsProblem, ComesBackAsItWas) {
  AttentionProblem problem = make_file_problem();
  std::vector<std::uint8_t> mask(2 * 9 + 20);
  for (std::size_t i = 0; i < mask.size(); ++i) {
    mask[i] = i % 3 != 0;
  }
  problem.set_mask(mask);
  const Solution exact = solve(problem);
  problem.expected_output = exact.output;
  problem.expected_lse = exact.lse;
  write_safetensors_problem(path_, problem);
  expect_same(read_problems(path_)[0].problem, problem);
  EXPECT_EQ(read_problems(path_, DType::f32)[0].problem.spec.dtype, DType::f32);
}

TEST_F(SafetensorsProblem, KeepsBlocksAndAnFp8Cache) {
  AttentionProblem problem = make_file_problem();
  problem.spec.kv_cache_dtype = DType::f8e4m3;
  problem.spec.scales = {.q = 1.0F, .k = 0.02F, .v = 0.03F};
  problem.fill_random(9);
  problem.dequantize();  // A file has the cache, not what it was made of.
  problem.block_ids = {{3, 1, 7}, {2, 9, 4, 5, 6}};
  problem.num_blocks = 12;
  write_safetensors_problem(path_, problem);
  expect_same(read_safetensors_problem(path_), problem);
}

TEST_F(SafetensorsProblem, PlainEncoder) {
  AttentionProblem problem = make_file_problem();
  problem.spec.attn_type = AttnType::encoder_only;
  problem.spec.alibi_slopes = {1.0F, 0.5F, 0.25F, 0.125F};
  problem.causal = false;
  problem.paged = false;
  write_safetensors_problem(path_, problem);
  expect_same(read_safetensors_problem(path_), problem);
}

TEST_F(SafetensorsProblem, WhatAFileCannotHoldIsRefused) {
  AttentionProblem problem = make_file_problem();
  problem.spec.score_mod = [](float score, const ScoreIndex&) { return score; };
  expect_error(
      ErrorCode::unsupported, [&] { write_safetensors_problem(path_, problem); }, "score_mod");
  expect_error(
      ErrorCode::io, [&] { read_problems(folder_ / "absent.json"); }, "absent.json");
}

/// A small valid file of tensors that a test spoils.
struct RawFile {
  std::map<std::string, std::vector<float>> floats;
  std::map<std::string, std::vector<std::int32_t>> ints;
  std::map<std::string, std::vector<std::uint8_t>> bytes;
  std::map<std::string, SafetensorsTensor> tensors;
  std::map<std::string, std::string> metadata;

  template <typename T>
  void add(std::map<std::string, std::vector<T>>& storage, const std::string& name, DType dtype,
           const std::vector<std::int64_t>& shape, std::vector<T> numbers = {}) {
    std::int64_t count = 1;
    for (const std::int64_t size : shape) {
      count *= size;
    }
    numbers.resize(static_cast<std::size_t>(count));
    std::vector<T>& kept = storage[name] = std::move(numbers);
    tensors[name] = {.dtype = dtype,
                     .is_bool = false,
                     .shape = shape,
                     .data = std::as_writable_bytes(std::span<T>(kept))};
  }
  void add_floats(const std::string& name, const std::vector<std::int64_t>& shape) {
    add(floats, name, DType::f32, shape);
  }
  void add_ints(const std::string& name, const std::vector<std::int64_t>& shape,
                std::vector<std::int32_t> numbers) {
    add(ints, name, DType::i32, shape, std::move(numbers));
  }

  explicit RawFile(bool paged) {
    add_floats("query", {3, 4, 8});
    add_ints("query_start_loc", {3}, {0, 1, 3});
    add_ints("seq_lens", {2}, {5, 3});
    if (paged) {
      add_floats("key_cache", {4, 4, 2, 8});
      add_floats("value_cache", {4, 4, 2, 8});
      add_ints("block_table", {2, 2}, {1, 3, 2, 0});
    } else {
      add_floats("key", {8, 2, 8});
      add_floats("value", {8, 2, 8});
    }
  }
};

TEST_F(SafetensorsProblem, RefusesWhatIsWrongWithATensor) {
  struct Spoiled {
    bool paged;
    std::function<void(RawFile&)> spoil;
    std::vector<std::string> parts;
  };
  const auto spec = [](const char* text) {
    return [text](RawFile& f) { f.metadata["spec"] = text; };
  };
  const std::vector<Spoiled> all{
      {true, [](RawFile& f) { f.tensors.erase("query"); }, {"tensor query", "is missing"}},
      {true, [](RawFile& f) { f.add_floats("extra", {1}); }, {"extra is unknown", "known are"}},
      {true,
       [](RawFile& f) {
         f.add_floats("query", {3, 32});
       },
       {"query has the shape [3, 32]"}},
      {true,
       [](RawFile& f) {
         f.add_ints("query", {3, 4, 8}, {});
       },
       {"query is i32", "floating"}},
      {true, [](RawFile& f) { f.add_floats("seq_lens", {2}); }, {"seq_lens is f32", "i32"}},
      {true,
       [](RawFile& f) {
         f.add_ints("seq_lens", {2}, {5, -3});
       },
       {"seq_lens[1] is -3"}},
      {true,
       [](RawFile& f) {
         f.add_ints("seq_lens", {2}, {5, 9});
       },
       {"block_table has 2 columns", "request 1 with 9 keys needs 3"}},
      {true,
       [](RawFile& f) {
         f.add_ints("query_start_loc", {2}, {0, 1});
       },
       {"query_start_loc has the shape [2]", "[3]"}},
      {true,
       [](RawFile& f) {
         f.add_ints("query_start_loc", {3}, {0, 2, 1});
       },
       {"query_start_loc decreases from 2 to 1"}},
      {true,
       [](RawFile& f) {
         f.add_ints("query_start_loc", {3}, {1, 2, 3});
       },
       {"query_start_loc[0] is 1"}},
      {true,
       [](RawFile& f) {
         f.add_ints("query_start_loc", {3}, {0, 1, 4});
       },
       {"ends at 4", "3 rows"}},
      {true,
       [](RawFile& f) {
         f.add_ints("block_table", {2, 2}, {1, 4, 2, 0});
       },
       {"block_table[0][1] names block 4", "[0, 4)"}},
      {true,
       [](RawFile& f) {
         f.add_ints("block_table", {2, 2}, {1, -1, 2, 0});
       },
       {"names block -1"}},
      {true, [](RawFile& f) { f.tensors.erase("block_table"); }, {"block_table", "missing"}},
      {true,
       [](RawFile& f) {
         f.add_floats("key", {8, 2, 8});
       },
       {"one pair"}},
      {true,
       [](RawFile& f) {
         f.add_floats("value_cache", {4, 4, 1, 8});
       },
       {"value_cache has the shape [4, 4, 1, 8]"}},
      {true,
       [](RawFile& f) {
         f.add_floats("key_cache", {4, 0, 2, 8});
         f.add_floats("value_cache", {4, 0, 2, 8});
       },
       {"key_cache has blocks of 0 tokens"}},
      {true,
       [](RawFile& f) {
         f.add_floats("key_cache", {4, 4, 3, 8});
       },
       {"value_cache"}},
      {false,
       [](RawFile& f) {
         f.add_floats("key", {7, 2, 8});
       },
       {"key has the shape [7, 2, 8]"}},
      {false, [](RawFile& f) { f.add_floats("sinks", {3}); }, {"sinks has the shape [3]", "[4]"}},
      {false,
       [](RawFile& f) { f.add(f.bytes, "mask", DType::u8, {10}); },
       {"mask has 10 entries, it must have 11"}},
      {false,
       [](RawFile& f) {
         f.add(f.bytes, "mask", DType::u8, {11}, std::vector<std::uint8_t>(11, 2));
       },
       {"mask[0] is 2"}},
      {false,
       [](RawFile& f) {
         f.add_floats("expected_lse", {3, 4});
       },
       {"expected_lse has the shape [3, 4]", "[4, 3]"}},
      {false, spec("{"), {"__metadata__.spec is not JSON"}},
      {false, spec("[]"), {"spec is []", "an object"}},
      {false, spec(R"({"softcap": 1})"), {"spec.softcap is unknown", "logits_soft_cap"}},
      {false, spec(R"({"window": 3})"), {"spec.window is 3"}},
      {false, spec(R"({"causal": 0})"), {"spec.causal is 0", "true or false"}},
      {false, spec(R"({"k_scale": 0})"), {"scales.k is 0"}},
      {false, spec(R"({"kv_cache_dtype": "f8e4m3"})"), {"there is no cache"}},
      {false, spec(R"({"kv_cache_dtype": "i32", "block_size": 4})"), {"floating"}},
      {false, spec(R"({"block_size": 0})"), {"spec.block_size is 0"}},
      {false, spec(R"({"attn_type": "encoder", "block_size": 4})"), {"attn_type encoder"}},
      {false, spec(R"({"attn_type": "encoder", "causal": true})"), {"spec.causal is true"}},
      {false, spec(R"({"block_size": 4, "common_prefix_len": 3})"), {"common_prefix_len is 3"}},
      {true, spec(R"({"block_size": 5})"), {"block_size 5", "blocks of 4"}},
      {true, spec(R"({"kv_cache_dtype": "bf16"})"), {"kv_cache_dtype bf16", "key_cache is f32"}},
  };
  for (const bool paged : {true, false}) {
    const RawFile file(paged);
    serving::write_safetensors(path_, file.tensors, file.metadata);
    EXPECT_EQ(read_safetensors_problem(path_).paged, paged);
  }
  for (const Spoiled& spoiled : all) {
    RawFile file(spoiled.paged);
    spoiled.spoil(file);
    serving::write_safetensors(path_, file.tensors, file.metadata);
    for (const std::string& part : spoiled.parts) {
      SCOPED_TRACE(part);
      expect_error(
          ErrorCode::io, [&] { read_problems(path_); }, path_.string(), part);
    }
  }
}

TEST_F(SafetensorsProblem, SurvivesChangedBytes) {
  write_safetensors_problem(path_, make_file_problem());
  std::ifstream in(path_, std::ios::binary);
  const std::string bytes((std::istreambuf_iterator<char>(in)), {});
  const AttentionBackendPtr reference = BackendRegistry::global().get("REFERENCE");
  for (std::size_t i = 0; i < std::min<std::size_t>(bytes.size(), 1200); i += 3) {
    for (const char byte : {'9', '\0', '\xff'}) {
      std::string hostile = bytes;
      hostile[i] = byte;
      std::ofstream(path_, std::ios::binary | std::ios::trunc) << hostile;
      try {
        run_problem(read_safetensors_problem(path_), *reference);
      } catch (const Error&) {
      }
    }
  }
}

}  // namespace
}  // namespace foveal::problem
