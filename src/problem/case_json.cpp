// Closed-form cases: the reader of the JSON form.

#include <algorithm>
#include <cmath>
#include <functional>
#include <limits>
#include <tuple>

#include "core/check.h"
#include "core/index.h"
#include "core/json_text.h"
#include "problem/json_value.h"
#include "problem/problem_file.h"
#include "problem/spec_json.h"

namespace foveal::problem {
namespace {

constexpr std::int64_t kMaxHeads = 1 << 14;
constexpr std::int64_t kMaxHeadSize = 1 << 14;
/// Numbers of all tensors of a file: half a gibibyte as doubles. A few bytes of JSON can ask for
/// more.
constexpr std::int64_t kMaxCaseNumbers = 1 << 26;

void read_spec(const JsonValue& json, AttentionProblem& problem) {
  json.only({"num_heads", "num_kv_heads", "head_size", "head_size_v", "scale", "causal",
             "attn_type", "window", "logits_soft_cap", "alibi_slopes", "sinks", "k_scale",
             "v_scale"});
  AttentionSpec& spec = problem.spec;
  spec.num_heads = json.member("num_heads").integer(1, kMaxHeads);
  spec.num_kv_heads = json.member("num_kv_heads").integer(1, kMaxHeads);
  spec.head_size = json.member("head_size").integer(1, kMaxHeadSize);
  if (const auto size = json.find("head_size_v")) {
    spec.head_size_v = size->integer(1, kMaxHeadSize);
  }
  read_layer_members(json, problem);
  if (const auto slopes = json.find("alibi_slopes")) {
    spec.alibi_slopes = slopes->floats(spec.num_heads);
  }
  if (const auto sinks = json.find("sinks")) {
    spec.sinks = sinks->floats(spec.num_heads);
  }
  const auto k_scale = json.find("k_scale");
  const auto v_scale = json.find("v_scale");
  if (k_scale || v_scale) {
    spec.kv_cache_dtype = DType::f8e4m3;
    spec.scales.k = k_scale ? static_cast<float>(k_scale->number()) : 1.0F;
    spec.scales.v = v_scale ? static_cast<float>(v_scale->number()) : 1.0F;
  }
}

std::vector<std::uint8_t> read_mask(const JsonValue& json, const Request& request) {
  std::vector<std::uint8_t> mask;
  for (const JsonValue& row : json.elements(request.q_len)) {
    for (const JsonValue& bit : row.elements(request.kv_len)) {
      mask.push_back(static_cast<std::uint8_t>(bit.integer(0, 1)));
    }
  }
  return mask;
}

/// `budget` is how many numbers the file's tensors may still have.
void read_requests(const JsonValue& json, AttentionProblem& problem, std::int64_t& budget) {
  const AttentionSpec& spec = problem.spec;
  const auto spend = [&](std::int64_t numbers) {
    if (numbers > budget) {
      fail(ErrorCode::io, "{}: the tensors of a file may have {} numbers at most", json.where(),
           kMaxCaseNumbers);
    }
    budget -= numbers;
  };
  bool has_mask = false;
  for (const JsonValue& element : json.elements()) {
    element.only({"q_len", "kv_len", "mask"});
    const Request request{element.member("q_len").integer(0, kMaxLength),
                          element.member("kv_len").integer(0, kMaxLength)};
    spend(request.q_len * spec.num_heads * (spec.head_size + spec.value_head_size()));
    spend(request.kv_len * spec.num_kv_heads * 2 * (spec.head_size + spec.value_head_size()));
    problem.requests.push_back(request);
    has_mask = has_mask || element.find("mask").has_value();
  }
  if (!has_mask) {
    return;
  }
  std::vector<std::uint8_t> mask;
  const auto elements = json.elements();
  for (std::size_t r = 0; r < elements.size(); ++r) {
    const Request& request = problem.requests[r];
    spend(request.q_len * request.kv_len);
    if (const auto rows = elements[r].find("mask")) {
      const std::vector<std::uint8_t> bits = read_mask(*rows, request);
      mask.insert(mask.end(), bits.begin(), bits.end());
    } else {
      mask.resize(mask.size() + at(request.q_len * request.kv_len), 1);
    }
  }
  problem.set_mask(std::move(mask));
}

/// A number for each key position of a request and KV head.
using TokenNumbers = std::function<double(std::int64_t position, std::int64_t kv_head)>;

TokenNumbers read_tokens(const JsonValue& json, const AttentionProblem& problem, bool named) {
  if (named && json.json().is_string()) {
    const std::string name = json.text();
    if (name == "position") {
      return [](std::int64_t position, std::int64_t) { return static_cast<double>(position); };
    }
    if (name == "position_mod2") {
      return [](std::int64_t position, std::int64_t) { return static_cast<double>(position % 2); };
    }
    if (name == "kv_head") {
      return [](std::int64_t, std::int64_t kv_head) { return static_cast<double>(kv_head); };
    }
    json.refuse(R"("position", "position_mod2", "kv_head", {"fill": x} or {"tokens": [...]})");
  }
  json.only({"fill", "tokens"});
  if (const auto fill = json.find("fill"); fill && !json.find("tokens")) {
    return [number = fill->number()](std::int64_t, std::int64_t) { return number; };
  }
  if (const auto tokens = json.find("tokens"); tokens && !json.find("fill")) {
    std::int64_t longest = 0;
    for (const Request& request : problem.requests) {
      longest = std::max(longest, request.kv_len);
    }
    std::vector<double> numbers;
    for (const JsonValue& element : tokens->elements(longest)) {
      numbers.push_back(element.number());
    }
    return [numbers](std::int64_t position, std::int64_t) { return numbers[at(position)]; };
  }
  json.refuse(R"({"fill": x} or {"tokens": [a number for each key position]})");
}

/// Rounds, and notes when that changed anything.
double rounded(AttentionProblem& problem, DType dtype, double number) {
  const double result = round_to(dtype, number);
  problem.inputs_rounded = problem.inputs_rounded || result != number;
  return result;
}

/// The dimension that a one_hot query picks; none where it is filled.
std::optional<std::int64_t> read_query(const JsonValue& json, AttentionProblem& problem) {
  json.only({"fill", "one_hot"});
  const auto fill = json.find("fill");
  const auto one_hot = json.find("one_hot");
  if (fill.has_value() == one_hot.has_value()) {
    json.refuse(R"({"fill": x} or {"one_hot": dimension})");
  }
  if (fill) {
    std::fill(problem.query.begin(), problem.query.end(),
              rounded(problem, problem.spec.dtype, fill->number()));
    return std::nullopt;
  }
  const std::int64_t dim = one_hot->integer(0, problem.spec.head_size - 1);
  for (std::int64_t i = dim; i < std::ssize(problem.query); i += problem.spec.head_size) {
    problem.query[at(i)] = 1.0;
  }
  return dim;
}

/// Sets numbers of [keys, num_kv_heads, size], in one dimension or all.
void fill_tokens(AttentionProblem& problem, std::vector<double>& tensor, std::int64_t size,
                 std::optional<std::int64_t> dim, const TokenNumbers& numbers) {
  const DType dtype = problem.paged ? problem.spec.cache_dtype() : problem.spec.dtype;
  std::size_t i = 0;
  for (const Request& request : problem.requests) {
    for (std::int64_t position = 0; position < request.kv_len; ++position) {
      for (std::int64_t head = 0; head < problem.spec.num_kv_heads; ++head) {
        const double number = rounded(problem, dtype, numbers(position, head));
        for (std::int64_t d = 0; d < size; ++d) {
          tensor[i++] = !dim || d == *dim ? number : 0.0;
        }
      }
    }
  }
}

/// [request][row][head], flat.
std::vector<double> read_expected(const JsonValue& json, const AttentionProblem& problem,
                                  bool null_is_infinite) {
  std::vector<double> numbers;
  const auto requests = json.elements(std::ssize(problem.requests));
  for (std::size_t r = 0; r < requests.size(); ++r) {
    for (const JsonValue& row : requests[r].elements(problem.requests[r].q_len)) {
      for (const JsonValue& number : row.elements(problem.spec.num_heads)) {
        numbers.push_back(null_is_infinite && number.is_null()
                              ? -std::numeric_limits<double>::infinity()
                              : number.number());
      }
    }
  }
  return numbers;
}

void read_expectation(const JsonValue& json, AttentionProblem& problem) {
  json.only({"output", "lse"});
  const std::int64_t heads = problem.spec.num_heads;
  if (const auto output = json.find("output")) {
    problem.expected_output.emplace();
    for (const double number : read_expected(*output, problem, false)) {
      problem.expected_output->insert(problem.expected_output->end(),
                                      at(problem.spec.value_head_size()), number);
    }
  }
  if (const auto lse = json.find("lse")) {
    const std::vector<double> numbers = read_expected(*lse, problem, true);
    problem.expected_lse.emplace(numbers.size());
    for (std::int64_t i = 0; i < std::ssize(numbers); ++i) {
      (*problem.expected_lse)[at(i % heads * problem.rows() + i / heads)] = numbers[at(i)];
    }
  }
}

AttentionProblem read_problem(const JsonValue& json, DType dtype, std::int64_t& budget) {
  AttentionProblem problem;
  problem.name = json.member("name").text();
  problem.spec.dtype = dtype;
  read_spec(json.member("spec"), problem);
  if (const auto size = json.find("block_size")) {
    problem.block_size = size->integer(1, kMaxBlockSize);
  }
  read_requests(json.member("requests"), problem, budget);
  problem.allocate();
  const auto dim = read_query(json.member("query"), problem);
  auto [key, value] = problem.paged ? std::tie(problem.stored_key, problem.stored_value)
                                    : std::tie(problem.key, problem.value);
  fill_tokens(problem, key, problem.spec.head_size, dim,
              read_tokens(json.member("key"), problem, false));
  fill_tokens(problem, value, problem.spec.value_head_size(), std::nullopt,
              read_tokens(json.member("value"), problem, true));
  problem.paged ? problem.dequantize() : problem.quantize();
  if (const auto expect = json.find("expect")) {
    read_expectation(*expect, problem);
  }
  try {
    problem.validate();
  } catch (const Error& error) {
    fail(ErrorCode::io, "{}: {}", json.where(), error.what());
  }
  return problem;
}

std::vector<DType> read_dtypes(const JsonValue& json) {
  const auto listed = json.find("dtypes");
  if (!listed) {
    return {DType::f32, DType::f16, DType::bf16};
  }
  std::vector<DType> dtypes;
  for (const JsonValue& name : listed->elements()) {
    const auto dtype = dtype_from_string(name.text());
    if (!dtype || !is_float(*dtype) || is_fp8(*dtype)) {
      name.refuse("f64, f32, f16 or bf16");
    }
    dtypes.push_back(*dtype);
  }
  if (dtypes.empty()) {
    listed->refuse("an array of at least one dtype");
  }
  return dtypes;
}

std::vector<std::int64_t> read_num_splits(const JsonValue& json) {
  const auto vary = json.find("vary");
  if (!vary) {
    return {0};
  }
  vary->only({"num_splits"});
  std::vector<std::int64_t> counts;
  for (const JsonValue& count : vary->member("num_splits").elements()) {
    counts.push_back(count.integer(1, kMaxLength));
  }
  if (counts.empty()) {
    vary->member("num_splits").refuse("an array of at least one number");
  }
  return counts;
}

void append_case(const nlohmann::json& json, const std::string& where, std::int64_t& budget,
                 std::vector<FileProblem>& problems) {
  JsonValue value(json, where);
  if (json.is_object() && json.contains("name") && json["name"].is_string()) {
    value = JsonValue(json, fmt::format("{} \"{}\"", where, json["name"].get<std::string>()));
  }
  value.only({"name", "why", "spec", "block_size", "requests", "query", "key", "value", "vary",
              "poison", "dtypes", "expect"});
  if (const auto why = value.find("why")) {
    why->text();
  }
  if (const auto poison = value.find("poison")) {
    // All unused slots and blocks are poisoned always; the field tells the reader what the case is
    // for.
    const std::string what = poison->text();
    if (what != "unused_slots" && what != "next_block") {
      poison->refuse(R"("unused_slots" or "next_block")");
    }
  }
  const std::vector<std::int64_t> num_splits = read_num_splits(value);
  for (const DType dtype : read_dtypes(value)) {
    problems.push_back({read_problem(value, dtype, budget), num_splits});
  }
}

}  // namespace

std::vector<FileProblem> parse_cases(std::string_view text, const std::string& file) {
  const nlohmann::json json = parse_json(text, file);
  std::vector<FileProblem> problems;
  std::int64_t budget = kMaxCaseNumbers;
  if (!json.is_array()) {
    append_case(json, fmt::format("{}: case", file), budget, problems);
    return problems;
  }
  for (std::size_t i = 0; i < json.size(); ++i) {
    append_case(json[i], fmt::format("{}: case {}", file, i), budget, problems);
  }
  return problems;
}

}  // namespace foveal::problem
