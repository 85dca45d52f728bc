#include <gtest/gtest.h>

#include <cmath>
#include <limits>
#include <nlohmann/json.hpp>

#include "problem/problem_file.h"
#include "support/expect_error.h"

namespace foveal::problem {
namespace {

using Json = nlohmann::json;
using foveal::testing::expect_error;

Json make_case() {
  return Json::parse(R"({
    "name": "sample", "why": "a test",
    "spec": {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 1.0, "causal": true,
             "window": [3, 0], "logits_soft_cap": 5.0, "sinks": [0, 1, 2, 3]},
    "block_size": 4,
    "requests": [{"q_len": 1, "kv_len": 3}, {"q_len": 2, "kv_len": 2, "mask": [[1, 0], [0, 1]]}],
    "query": {"one_hot": 2}, "key": {"tokens": [1, 2, 3]}, "value": "kv_head",
    "vary": {"num_splits": [1, 4]}, "poison": "next_block", "dtypes": ["f32", "bf16"],
    "expect": {"output": [[[1, 2, 3, 4]], [[5, 6, 7, 8], [0, 0, 0, 0]]],
               "lse": [[[1, 2, 3, 4]], [[5, 6, 7, 8], [null, null, null, null]]]}})");
}

std::vector<FileProblem> parse(const Json& json) { return parse_cases(json.dump(), "file.json"); }

TEST(CaseJson, ReadsEveryField) {
  const auto problems = parse(Json::array({make_case(), make_case()}));
  ASSERT_EQ(problems.size(), 4U);
  EXPECT_EQ(problems[0].num_splits, (std::vector<std::int64_t>{1, 4}));
  EXPECT_EQ(problems[1].problem.spec.dtype, DType::bf16);
  const AttentionProblem& problem = problems[0].problem;
  EXPECT_EQ(problem.name, "sample");
  EXPECT_EQ(problem.spec.window, (Window{3, 0}));
  EXPECT_EQ(problem.spec.logits_soft_cap, 5.0F);
  EXPECT_EQ(problem.spec.sinks.size(), 4U);
  EXPECT_EQ(problem.block_size, 4);
  EXPECT_TRUE(problem.causal);
  EXPECT_EQ(problem.keys(), 5);
  // The query picks dimension 2, where alone the keys are not zero.
  EXPECT_EQ(problem.query[2], 1.0);
  EXPECT_EQ(problem.query[3], 0.0);
  EXPECT_EQ(problem.key[0], 0.0);
  EXPECT_EQ(problem.key[2 + 16 * 2], 3.0);
  EXPECT_EQ(problem.key[2 + 16 * 3], 1.0);  // The second request begins anew.
  EXPECT_EQ(problem.value[0], 0.0);
  EXPECT_EQ(problem.value[8], 1.0);
  ASSERT_TRUE(problem.spec.mask_mod);
  EXPECT_TRUE(problem.spec.mask_mod({0, 0, 0, 2, 1}));
  EXPECT_FALSE(problem.spec.mask_mod({1, 0, 0, 0, 1}));
  EXPECT_TRUE(problem.spec.mask_mod({1, 0, 1, 1, 1}));
  EXPECT_FALSE(problem.spec.mask_mod({1, 0, 1, 1, 2}));
  EXPECT_EQ((*problem.expected_output)[8 * 4 * 1 + 8 * 2], 7.0);
  EXPECT_EQ((*problem.expected_lse)[3 * 3 + 1], 8.0);
  EXPECT_EQ((*problem.expected_lse)[3 * 3 + 2], -std::numeric_limits<double>::infinity());
  EXPECT_FALSE(problem.inputs_rounded);
}

TEST(CaseJson, ScalesMeanAnFp8Cache) {
  Json json = make_case();
  json["spec"]["k_scale"] = 0.25;
  json["spec"]["v_scale"] = 0.5;
  const AttentionProblem problem = parse(json)[1].problem;
  EXPECT_EQ(problem.spec.cache_dtype(), DType::f8e4m3);
  EXPECT_EQ(problem.stored_key[2], 1.0);
  EXPECT_EQ(problem.key[2], 0.25);
  EXPECT_EQ(problem.value[8], 0.5);
}

TEST(CaseJson, NotesInputsThatTheDTypeRounds) {
  Json json = make_case();
  json["key"] = {{"fill", 0.1}};
  EXPECT_TRUE(parse(json)[0].problem.inputs_rounded);
}

struct Refusal {
  const char* pointer;
  const char* value;  ///< Empty: the field is removed.
  std::vector<std::string> parts;
};

TEST(CaseJson, RefusesWithFileCaseFieldValueAndWhatIsAccepted) {
  const std::vector<Refusal> refusals{
      {"/name", "", {"case", ".name is missing"}},
      {"/name", "7", {".name is 7", "a string"}},
      {"/spec", "", {"\"sample\".spec is missing"}},
      {"/spec/num_heads", "\"4\"", {"spec.num_heads is \"4\"", "an integer from 1"}},
      {"/spec/num_heads", "4.5", {"spec.num_heads is 4.5", "an integer"}},
      {"/spec/num_heads", "0", {"spec.num_heads is 0"}},
      {"/spec/num_heads", "18446744073709551615", {"spec.num_heads is 18446744073709551615"}},
      {"/spec/num_kv_heads", "3", {"sample", "num_heads is 4", "multiple of num_kv_heads = 3"}},
      {"/spec/head_size", "-8", {"spec.head_size is -8"}},
      {"/spec/causal", "1", {"spec.causal is 1", "true or false"}},
      {"/spec/window", "[1]", {"spec.window is [1]", "an array of 2 elements"}},
      {"/spec/window", "[-2, 0]", {"spec.window[0] is -2", "from -1"}},
      {"/spec/sinks", "[1, 2]", {"spec.sinks is [1,2]", "an array of 4 elements"}},
      {"/spec/sinks", "[1, 2, 3, null]", {"spec.sinks[3] is null", "a number"}},
      {"/spec/scale", "1e300", {"scale is inf", "finite"}},
      {"/spec/k_scale", "-1", {"scales.k is -1"}},
      {"/spec/attn_type", "\"foo\"", {"spec.attn_type is \"foo\"", "decoder"}},
      {"/spec/softcap", "1", {"spec.softcap is unknown", "logits_soft_cap"}},
      {"/block_size", "0", {"block_size is 0"}},
      {"/requests", "{}", {"requests is {}", "an array"}},
      {"/requests/0/q_len", "-1", {"requests[0].q_len is -1"}},
      {"/requests/0/kv_len", "16777216", {"requests", "numbers at most"}},
      {"/requests/1/mask", "[[1, 0]]", {"requests[1].mask is [[1,0]]", "an array of 2 elements"}},
      {"/requests/1/mask/1/0", "2", {"requests[1].mask[1][0] is 2", "from 0 to 1"}},
      {"/query", "{\"fill\": 1, \"one_hot\": 0}", {"query is", "one_hot"}},
      {"/query/one_hot", "8", {"query.one_hot is 8", "from 0 to 7"}},
      {"/key", "\"position\"", {"key is \"position\"", "an object"}},
      {"/key/tokens", "[1, 2]", {"key.tokens is [1,2]", "an array of 3 elements"}},
      {"/value", "\"heads\"", {"value is \"heads\"", "position_mod2"}},
      {"/vary", "{\"splits\": [1]}", {"vary.splits is unknown", "num_splits"}},
      {"/vary/num_splits", "[0]", {"vary.num_splits[0] is 0"}},
      {"/vary/num_splits", "[]", {"vary.num_splits is []"}},
      {"/poison", "\"all\"", {"poison is \"all\"", "unused_slots"}},
      {"/dtypes", "[\"f8\"]", {"dtypes[0] is \"f8\"", "bf16"}},
      {"/dtypes", "[]", {"dtypes is []"}},
      {"/expect/output/0", "[]", {"expect.output[0] is []", "an array of 1 elements"}},
      {"/expect/output/0/0/0", "null", {"expect.output[0][0][0] is null", "a number"}},
      {"/expect/lse/1/0", "[1]", {"expect.lse[1][0] is [1]", "an array of 4 elements"}},
      {"/extra", "1", {"\"sample\".extra is unknown", "known are name, why"}},
  };
  for (const Refusal& refusal : refusals) {
    SCOPED_TRACE(std::string(refusal.pointer) + " = " + refusal.value);
    Json json = make_case();
    const Json::json_pointer pointer(refusal.pointer);
    if (*refusal.value == '\0') {
      json[pointer.parent_pointer()].erase(pointer.back());
    } else {
      json[pointer] = Json::parse(refusal.value);
    }
    expect_error(
        ErrorCode::io, [&] { parse(Json::array({json})); }, "file.json", "case 0");
    for (const std::string& part : refusal.parts) {
      expect_error(
          ErrorCode::io, [&] { parse(json); }, part);
    }
  }
}

TEST(CaseJson, RefusesWhatIsNotJson) {
  for (const char* text : {"", "[", "nul", "{\"name\": 1e999}", "[1", "\xff"}) {
    expect_error(
        ErrorCode::io, [&] { parse_cases(text, "file.json"); }, "file.json is not JSON");
  }
  for (const char* text : {"1", "null", "\"x\"", "[[]]"}) {
    expect_error(
        ErrorCode::io, [&] { parse_cases(text, "file.json"); }, "file.json", "an object");
  }
  EXPECT_TRUE(parse_cases("[]", "file.json").empty());
}

TEST(CaseJson, HasEachKeyOnce) {
  expect_error(
      ErrorCode::io, [] { parse_cases(R"([{"name": "a", "name": "b"}])", "file.json"); },
      "the key \"name\" twice");
}

TEST(CaseJson, NestsNoDeeperThanItMust) {
  const std::string deep = std::string(100'000, '[') + std::string(100'000, ']');
  expect_error(
      ErrorCode::io, [&] { parse_cases(deep, "file.json"); }, "nests deeper than 200 levels");
  const std::string text = R"({"name": ")" + std::string(1000, '[') + R"(\"[", "x": 1})";
  expect_error(
      ErrorCode::io, [&] { parse_cases(text, "file.json"); },
      "x is unknown");  // Brackets of a string.
}

TEST(CaseJson, SurvivesTruncationAndChangedBytes) {
  const std::string text = Json::array({make_case()}).dump();
  for (std::size_t i = 0; i < text.size(); ++i) {
    for (const std::string& hostile :
         {text.substr(0, i), text.substr(0, i) + "9" + text.substr(i + 1),
          text.substr(0, i) + "-" + text.substr(i + 1), text.substr(0, i) + text.substr(i + 1)}) {
      try {
        parse_cases(hostile, "file.json");
      } catch (const Error& error) {
        EXPECT_EQ(error.code(), ErrorCode::io) << error.what();
      }
    }
  }
}

}  // namespace
}  // namespace foveal::problem
