// The writer of problems and results in the safetensors form.

#include <list>
#include <map>
#include <nlohmann/json.hpp>

#include "core/check.h"
#include "core/convert.h"
#include "core/index.h"
#include "problem/problem_file.h"
#include "serving/safetensors.h"

namespace foveal::problem {
namespace {

using Shape = std::vector<std::int64_t>;

/// Tensors by name, with their data.
class Tensors {
 public:
  template <typename T>
  void add(const std::string& name, DType dtype, const Shape& shape,
           const std::vector<T>& numbers) {
    std::vector<std::byte>& bytes =
        storage_.emplace_back(numbers.size() * static_cast<std::size_t>(size_of(dtype)));
    for (std::size_t i = 0; i < numbers.size(); ++i) {
      store_element(bytes.data(), dtype, static_cast<std::int64_t>(i),
                    static_cast<double>(numbers[i]));
    }
    tensors_[name] = {.dtype = dtype, .is_bool = false, .shape = shape, .data = bytes};
  }

  void write(const std::filesystem::path& path,
             const std::map<std::string, std::string>& metadata) const {
    serving::write_safetensors(path, tensors_, metadata);
  }

 private:
  std::list<std::vector<std::byte>> storage_;
  std::map<std::string, serving::SafetensorsTensor> tensors_;
};

std::string spec_json(const AttentionProblem& problem) {
  const AttentionSpec& spec = problem.spec;
  nlohmann::ordered_json json;
  json["name"] = problem.name;
  if (spec.scale) {
    json["scale"] = *spec.scale;
  }
  json["causal"] = problem.causal;
  json["attn_type"] = to_string(spec.attn_type);
  json["window"] = {spec.window.left, spec.window.right};
  json["logits_soft_cap"] = spec.logits_soft_cap;
  json["q_scale"] = spec.scales.q;
  json["k_scale"] = spec.scales.k;
  json["v_scale"] = spec.scales.v;
  if (problem.paged) {
    json["block_size"] = problem.block_size;
    json["kv_cache_dtype"] = to_string(spec.cache_dtype());
    json["common_prefix_len"] = problem.common_prefix_len;
  }
  return json.dump(-1, ' ', /*ensure_ascii=*/true, nlohmann::json::error_handler_t::replace);
}

/// [num_blocks, block_size, heads, size]; slots that no request reaches are 0.
std::vector<double> as_cache(const AttentionProblem& problem, const std::vector<double>& numbers,
                             std::int64_t width) {
  std::vector<double> cache(at(problem.num_blocks * problem.block_size * width), 0.0);
  for (std::int64_t r = 0; r < std::ssize(problem.requests); ++r) {
    for (std::int64_t position = 0; position < problem.requests[at(r)].kv_len; ++position) {
      const std::int64_t slot =
          problem.block_ids[at(r)][at(position / problem.block_size)] * problem.block_size +
          position % problem.block_size;
      const std::int64_t token = problem.key_start(r) + position;
      std::copy_n(numbers.begin() + token * width, width, cache.begin() + slot * width);
    }
  }
  return cache;
}

void add_cache(const AttentionProblem& problem, Tensors& tensors) {
  const AttentionSpec& spec = problem.spec;
  for (const bool is_key : {true, false}) {
    const std::int64_t size = is_key ? spec.head_size : spec.value_head_size();
    tensors.add(is_key ? "key_cache" : "value_cache", spec.cache_dtype(),
                {problem.num_blocks, problem.block_size, spec.num_kv_heads, size},
                as_cache(problem, is_key ? problem.stored_key : problem.stored_value,
                         spec.num_kv_heads * size));
  }
  std::size_t width = 0;
  for (const auto& blocks : problem.block_ids) {
    width = std::max(width, blocks.size());
  }
  std::vector<std::int64_t> table;
  for (std::vector<std::int64_t> blocks : problem.block_ids) {
    blocks.resize(width, 0);
    table.insert(table.end(), blocks.begin(), blocks.end());
  }
  tensors.add("block_table", DType::i32,
              {std::ssize(problem.block_ids), static_cast<std::int64_t>(width)}, table);
}

}  // namespace

void write_safetensors_problem(const std::filesystem::path& path, const AttentionProblem& problem) {
  problem.validate();
  const AttentionSpec& spec = problem.spec;
  if (spec.score_mod || (spec.mask_mod && problem.mask.empty())) {
    fail(ErrorCode::unsupported,
         "{}: problem {} has a score_mod or mask_mod, which a file cannot hold; a mask can",
         path.string(), problem.name);
  }
  Tensors tensors;
  const std::int64_t rows = problem.rows();
  tensors.add("query", spec.dtype, {rows, spec.num_heads, spec.head_size}, problem.query);
  if (problem.block_ids.empty()) {
    tensors.add("key", spec.dtype, {problem.keys(), spec.num_kv_heads, spec.head_size},
                problem.key);
    tensors.add("value", spec.dtype, {problem.keys(), spec.num_kv_heads, spec.value_head_size()},
                problem.value);
  } else {
    add_cache(problem, tensors);
  }
  std::vector<std::int64_t> starts{0};
  std::vector<std::int64_t> lens;
  for (const Request& request : problem.requests) {
    starts.push_back(starts.back() + request.q_len);
    lens.push_back(request.kv_len);
  }
  if (problem.block_ids.empty()) {
    // Padded requests are requests of length 0 in a file; a table of blocks has no rows for them.
    starts.resize(starts.size() + at(problem.padded_requests), starts.back());
    lens.resize(lens.size() + at(problem.padded_requests), 0);
  }
  tensors.add("query_start_loc", DType::i32, {std::ssize(starts)}, starts);
  tensors.add("seq_lens", DType::i32, {std::ssize(lens)}, lens);
  if (!problem.mask.empty()) {
    tensors.add("mask", DType::u8, {std::ssize(problem.mask)}, problem.mask);
  }
  if (!spec.alibi_slopes.empty()) {
    tensors.add("alibi_slopes", DType::f32, {spec.num_heads}, spec.alibi_slopes);
  }
  if (!spec.sinks.empty()) {
    tensors.add("sinks", DType::f32, {spec.num_heads}, spec.sinks);
  }
  if (problem.expected_output) {
    tensors.add("expected_output", DType::f64, {rows, spec.num_heads, spec.value_head_size()},
                *problem.expected_output);
  }
  if (problem.expected_lse) {
    tensors.add("expected_lse", DType::f64, {spec.num_heads, rows}, *problem.expected_lse);
  }
  tensors.write(path, {{"spec", spec_json(problem)}});
}

void write_safetensors_result(const std::filesystem::path& path, const AttentionProblem& problem,
                              const RunResult& result) {
  const AttentionSpec& spec = problem.spec;
  Tensors tensors;
  tensors.add("output", problem.output_dtype(),
              {problem.rows(), spec.num_heads, spec.value_head_size()}, result.output);
  if (!result.lse.empty()) {
    tensors.add("lse", DType::f32, {spec.num_heads, problem.rows()}, result.lse);
  }
  tensors.write(path, {{"backend", result.backend}, {"problem", problem.name}});
}

}  // namespace foveal::problem
