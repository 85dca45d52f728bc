// Problems with explicit tensors: the reader and the writer of the safetensors form.

#include <algorithm>
#include <array>

#include "core/check.h"
#include "core/convert.h"
#include "core/index.h"
#include "core/json_text.h"
#include "problem/problem_file.h"
#include "problem/spec_json.h"
#include "serving/safetensors.h"

namespace foveal::problem {
namespace {

using serving::SafetensorsFile;
using serving::SafetensorsTensor;
using Shape = std::vector<std::int64_t>;

/// Numbers of one tensor: a gibibyte as doubles. Requests that share blocks can ask for more than
/// the file holds.
constexpr std::int64_t kMaxNumbers = 1 << 27;

constexpr std::array<std::string_view, 13> kTensors{
    "query",           "key",      "value", "key_cache",    "value_cache", "block_table",
    "query_start_loc", "seq_lens", "mask",  "alibi_slopes", "sinks",       "expected_output",
    "expected_lse"};

/// The tensors of a file, with checks.
class Reader {
 public:
  explicit Reader(const std::filesystem::path& path) : file_(path) {
    for (const auto& [name, tensor] : file_.tensors()) {
      if (std::find(kTensors.begin(), kTensors.end(), name) == kTensors.end()) {
        refuse("tensor {} is unknown; known are {}", name,
               fmt::join(kTensors.begin(), kTensors.end(), ", "));
      }
    }
  }

  template <typename... Args>
  [[noreturn]] void refuse(fmt::format_string<Args...> format, Args&&... args) const {
    fail(ErrorCode::io, "{}: {}", file_.name(), fmt::format(format, std::forward<Args>(args)...));
  }

  const SafetensorsFile& file() const { return file_; }
  bool has(const std::string& name) const { return file_.has(name); }

  /// −1 in the shape accepts any size.
  const SafetensorsTensor& tensor(const std::string& name, const Shape& shape,
                                  std::string_view form) const {
    if (!has(name)) {
      refuse("tensor {} {} is missing", name, form);
    }
    const SafetensorsTensor& found = file_.tensor(name);
    bool fits = found.shape.size() == shape.size();
    for (std::size_t d = 0; fits && d < shape.size(); ++d) {
      fits = shape[d] < 0 || found.shape[d] == shape[d];
      if (found.shape[d] > kMaxLength) {
        refuse("{} has the shape [{}], a dimension may have {} elements at most", name,
               fmt::join(found.shape, ", "), kMaxLength);
      }
    }
    if (!fits) {
      std::vector<std::string> sizes;
      for (const std::int64_t size : shape) {
        sizes.push_back(size < 0 ? "any" : std::to_string(size));
      }
      refuse("{} has the shape [{}], it must be {} = [{}]", name, fmt::join(found.shape, ", "),
             form, fmt::join(sizes, ", "));
    }
    return found;
  }

  const SafetensorsTensor& floats(const std::string& name, const Shape& shape,
                                  std::string_view form) const {
    const SafetensorsTensor& found = tensor(name, shape, form);
    if (!is_float(found.dtype)) {
      refuse("{} is {}, its dtype must be a floating type", name, to_string(found.dtype));
    }
    return found;
  }

  std::vector<double> numbers(const SafetensorsTensor& tensor) const {
    std::int64_t count = 1;
    for (const std::int64_t size : tensor.shape) {
      count *= size;
    }
    if (count > kMaxNumbers) {
      refuse("a tensor has {} numbers, {} are accepted at most", count, kMaxNumbers);
    }
    std::vector<double> result(at(count));
    for (std::int64_t i = 0; i < count; ++i) {
      result[at(i)] = load_element(tensor.data.data(), tensor.dtype, i);
    }
    return result;
  }

  std::vector<std::int32_t> integers(const std::string& name, const Shape& shape,
                                     std::string_view form) const {
    const SafetensorsTensor& found = tensor(name, shape, form);
    if (found.dtype != DType::i32) {
      refuse("{} is {}, its dtype must be i32", name, to_string(found.dtype));
    }
    const auto* data = reinterpret_cast<const std::int32_t*>(found.data.data());
    return {data, data + found.data.size() / sizeof(std::int32_t)};
  }

 private:
  SafetensorsFile file_;
};

void read_spec(const Reader& reader, AttentionProblem& problem, bool& has_block_size) {
  const auto found = reader.file().metadata().find("spec");
  const std::string text = found == reader.file().metadata().end() ? "{}" : found->second;
  const std::string where = fmt::format("{}: __metadata__.spec", reader.file().name());
  const nlohmann::json json = parse_json(text, where);
  const JsonValue spec(json, where);
  spec.only({"name", "scale", "causal", "attn_type", "window", "logits_soft_cap", "q_scale",
             "k_scale", "v_scale", "kv_cache_dtype", "block_size", "common_prefix_len"});
  read_layer_members(spec, problem);
  if (const auto name = spec.find("name")) {
    problem.name = name->text();
  }
  const auto scale = [&](const char* name, float& target) {
    if (const auto number = spec.find(name)) {
      target = static_cast<float>(number->number());
    }
  };
  scale("q_scale", problem.spec.scales.q);
  scale("k_scale", problem.spec.scales.k);
  scale("v_scale", problem.spec.scales.v);
  if (const auto dtype = spec.find("kv_cache_dtype")) {
    problem.spec.kv_cache_dtype = dtype_from_string(dtype->text());
    if (!problem.spec.kv_cache_dtype || !is_float(*problem.spec.kv_cache_dtype)) {
      dtype->refuse("a floating dtype");
    }
  }
  const auto block_size = spec.find("block_size");
  has_block_size = block_size.has_value();
  if (block_size) {
    problem.block_size = block_size->integer(1, kMaxBlockSize);
  }
  if (const auto prefix = spec.find("common_prefix_len")) {
    problem.common_prefix_len = prefix->integer(0, kMaxLength);
  }
}

/// query and the lengths of the requests.
void read_queries(const Reader& reader, AttentionProblem& problem) {
  const SafetensorsTensor& query =
      reader.floats("query", {-1, -1, -1}, "[tokens, num_heads, head_size]");
  problem.spec.dtype = query.dtype;
  problem.spec.num_heads = query.shape[1];
  problem.spec.head_size = query.shape[2];
  problem.query = reader.numbers(query);
  const auto lens = reader.integers("seq_lens", {-1}, "[requests]");
  const auto starts = reader.integers("query_start_loc", {std::ssize(lens) + 1}, "[requests + 1]");
  if (starts.front() != 0) {
    reader.refuse("query_start_loc[0] is {}, it must be 0", starts.front());
  }
  for (std::size_t r = 0; r < lens.size(); ++r) {
    if (lens[r] < 0 || lens[r] > kMaxLength) {
      reader.refuse("seq_lens[{}] is {}, it must be from 0 to {}", r, lens[r], kMaxLength);
    }
    if (starts[r + 1] < starts[r]) {
      reader.refuse("query_start_loc decreases from {} to {} at index {}, it must not", starts[r],
                    starts[r + 1], r + 1);
    }
    problem.requests.push_back({starts[r + 1] - starts[r], lens[r]});
  }
  problem.unowned_rows = query.shape[0] - starts.back();
  if (problem.unowned_rows < 0) {
    reader.refuse("query_start_loc ends at {}, query has {} rows only", starts.back(),
                  query.shape[0]);
  }
}

/// Plain keys, [keys, num_kv_heads, head_size]: what a cache is made from when there is a block
/// size.
void read_plain(const Reader& reader, AttentionProblem& problem) {
  AttentionSpec& spec = problem.spec;
  const std::int64_t keys = problem.keys();
  const SafetensorsTensor& key = reader.floats("key", {keys, -1, spec.head_size},
                                               "[sum of seq_lens, num_kv_heads, head_size]");
  const SafetensorsTensor& value = reader.floats("value", {keys, key.shape[1], -1},
                                                 "[sum of seq_lens, num_kv_heads, head_size_v]");
  for (const auto* tensor : {&key, &value}) {
    if (tensor->dtype != spec.dtype) {
      reader.refuse("{} is {}, its dtype must be {} as that of query",
                    tensor == &key ? "key" : "value", to_string(tensor->dtype),
                    to_string(spec.dtype));
    }
  }
  spec.num_kv_heads = key.shape[1];
  spec.head_size_v = value.shape[2];
  problem.key = reader.numbers(key);
  problem.value = reader.numbers(value);
  problem.quantize();
}

/// The blocks that each request's length reaches.
void read_table(const Reader& reader, AttentionProblem& problem) {
  const std::int64_t num_reqs = std::ssize(problem.requests);
  const auto table = reader.integers("block_table", {num_reqs, -1}, "[requests, blocks]");
  const std::int64_t width = reader.file().tensor("block_table").shape[1];
  for (std::int64_t r = 0; r < num_reqs; ++r) {
    const std::int64_t kv_len = problem.requests[at(r)].kv_len;
    const std::int64_t needed = (kv_len + problem.block_size - 1) / problem.block_size;
    if (needed > width) {
      reader.refuse("block_table has {} columns, request {} with {} keys needs {} blocks of {}",
                    width, r, kv_len, needed, problem.block_size);
    }
    std::vector<std::int64_t>& blocks = problem.block_ids.emplace_back();
    for (std::int64_t b = 0; b < needed; ++b) {
      const std::int32_t id = table[at(r * width + b)];
      if (id < 0 || id >= problem.num_blocks) {
        reader.refuse("block_table[{}][{}] names block {}, it must be in [0, {})", r, b, id,
                      problem.num_blocks);
      }
      blocks.push_back(id);
    }
  }
}

/// A paged cache, [num_blocks, block_size, num_kv_heads, head_size], and its table.
void read_cache(const Reader& reader, AttentionProblem& problem, bool has_block_size) {
  AttentionSpec& spec = problem.spec;
  const SafetensorsTensor& key = reader.floats("key_cache", {-1, -1, -1, spec.head_size},
                                               "[num_blocks, block_size, num_kv_heads, head_size]");
  const SafetensorsTensor& value =
      reader.floats("value_cache", {key.shape[0], key.shape[1], key.shape[2], -1},
                    "[num_blocks, block_size, num_kv_heads, head_size_v]");
  if (value.dtype != key.dtype || (key.dtype != spec.dtype && !is_fp8(key.dtype))) {
    reader.refuse("key_cache is {} and value_cache {}, both must be {} as query, or one fp8 type",
                  to_string(key.dtype), to_string(value.dtype), to_string(spec.dtype));
  }
  if (has_block_size && problem.block_size != key.shape[1]) {
    reader.refuse("spec has block_size {}, key_cache has blocks of {}", problem.block_size,
                  key.shape[1]);
  }
  if (key.shape[1] <= 0) {
    reader.refuse("key_cache has blocks of {} tokens, they must have at least 1", key.shape[1]);
  }
  if (spec.kv_cache_dtype && *spec.kv_cache_dtype != key.dtype) {
    reader.refuse("spec has kv_cache_dtype {}, key_cache is {}", to_string(*spec.kv_cache_dtype),
                  to_string(key.dtype));
  }
  spec.num_kv_heads = key.shape[2];
  spec.head_size_v = value.shape[3];
  spec.kv_cache_dtype = key.dtype;
  problem.block_size = key.shape[1];
  problem.num_blocks = key.shape[0];
  read_table(reader, problem);
  for (const auto& [tensor, numbers] :
       {std::pair{&key, &problem.stored_key}, std::pair{&value, &problem.stored_value}}) {
    const std::int64_t width = tensor->shape[2] * tensor->shape[3];
    if (width > 0 && problem.keys() > kMaxNumbers / width) {
      reader.refuse("the requests have {} keys of {} numbers, {} numbers are accepted at most",
                    problem.keys(), width, kMaxNumbers);
    }
    for (std::int64_t r = 0; r < std::ssize(problem.requests); ++r) {
      for (std::int64_t position = 0; position < problem.requests[at(r)].kv_len; ++position) {
        const std::int64_t slot =
            problem.block_ids[at(r)][at(position / problem.block_size)] * problem.block_size +
            position % problem.block_size;
        for (std::int64_t i = 0; i < width; ++i) {
          numbers->push_back(load_element(tensor->data.data(), tensor->dtype, slot * width + i));
        }
      }
    }
  }
  problem.dequantize();
}

void read_extras(const Reader& reader, AttentionProblem& problem) {
  AttentionSpec& spec = problem.spec;
  const std::int64_t rows = problem.rows();
  for (const auto& [name, target] :
       {std::pair<std::string, std::vector<float>*>{"alibi_slopes", &spec.alibi_slopes},
        {"sinks", &spec.sinks}}) {
    if (reader.has(name)) {
      const auto numbers = reader.numbers(reader.floats(name, {spec.num_heads}, "[num_heads]"));
      target->assign(numbers.begin(), numbers.end());
    }
  }
  if (reader.has("expected_output")) {
    problem.expected_output = reader.numbers(
        reader.floats("expected_output", {rows, spec.num_heads, spec.value_head_size()},
                      "[tokens, num_heads, head_size_v]"));
  }
  if (reader.has("expected_lse")) {
    problem.expected_lse = reader.numbers(
        reader.floats("expected_lse", {spec.num_heads, rows}, "[num_heads, tokens]"));
  }
  if (reader.has("mask")) {
    const SafetensorsTensor& mask = reader.tensor("mask", {-1}, "[sum of q_len x kv_len]");
    if (mask.dtype != DType::u8) {
      reader.refuse("mask is {}, its dtype must be u8 or bool", to_string(mask.dtype));
    }
    const auto* bits = reinterpret_cast<const std::uint8_t*>(mask.data.data());
    for (std::size_t i = 0; i < mask.data.size(); ++i) {
      if (bits[i] > 1) {
        reader.refuse("mask[{}] is {}, it must be 0 or 1", i, bits[i]);
      }
    }
    problem.set_mask({bits, bits + mask.data.size()});
  }
}

}  // namespace

AttentionProblem read_safetensors_problem(const std::filesystem::path& path) {
  const Reader reader(path);
  AttentionProblem problem;
  problem.name = path.stem().string();
  bool has_block_size = false;
  read_spec(reader, problem, has_block_size);
  read_queries(reader, problem);
  const bool cached = reader.has("key_cache") || reader.has("value_cache");
  if (cached && (reader.has("key") || reader.has("value"))) {
    reader.refuse("has key or value beside key_cache or value_cache, it must have one pair");
  }
  if (!cached && reader.has("block_table")) {
    reader.refuse("has a block_table without key_cache and value_cache");
  }
  if ((cached || has_block_size) && !problem.spec.uses_cache()) {
    reader.refuse("has a cache or block_size, attn_type {} reads plain key and value",
                  to_string(problem.spec.attn_type));
  }
  problem.paged = cached || has_block_size;
  if (!problem.paged && problem.spec.kv_cache_dtype) {
    reader.refuse("spec has kv_cache_dtype without block_size or key_cache: there is no cache");
  }
  cached ? read_cache(reader, problem, has_block_size) : read_plain(reader, problem);
  try {
    read_extras(reader, problem);
    problem.validate();
  } catch (const Error& error) {
    if (error.code() == ErrorCode::io) {
      throw;
    }
    reader.refuse("{}", error.what());
  }
  return problem;
}

std::vector<FileProblem> read_problems(const std::filesystem::path& path,
                                       std::optional<DType> dtype) {
  constexpr std::size_t kMaxCaseBytes = 64 << 20;
  const bool is_safetensors = serving::is_safetensors(serving::MappedFile(path).bytes());
  if (is_safetensors) {
    AttentionProblem problem = read_safetensors_problem(path);
    return {{dtype ? with_dtype(problem, *dtype) : std::move(problem)}};
  }
  std::vector<FileProblem> cases =
      parse_cases(serving::read_text_file(path, kMaxCaseBytes), path.string());
  std::erase_if(
      cases, [&](const FileProblem& each) { return dtype && each.problem.spec.dtype != *dtype; });
  return cases;
}

}  // namespace foveal::problem
