#include "fuzz/targets.h"

#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <initializer_list>
#include <iterator>
#include <string_view>
#include <utility>

#include "foveal/foveal.h"
#include "problem/problem_file.h"
#include "replay/trace.h"
#include "serving/gguf.h"
#include "serving/gguf_builder.h"
#include "serving/hf_tokenizer.h"
#include "serving/llama2c_tokenizer.h"
#include "serving/safetensors.h"

namespace foveal::fuzz {
namespace {

using Bytes = std::span<const std::uint8_t>;

std::string_view text_of(Bytes bytes) {
  return {reinterpret_cast<const char*>(bytes.data()), bytes.size()};
}

/// A file in memory with a path.
class MemoryFile {
 public:
  explicit MemoryFile(Bytes bytes) : file_(memfd_create("foveal", 0)) {
    if (file_ < 0 || write(file_, bytes.data(), bytes.size()) != std::ssize(bytes)) {
      std::abort();
    }
  }
  ~MemoryFile() { close(file_); }
  MemoryFile(const MemoryFile&) = delete;
  MemoryFile& operator=(const MemoryFile&) = delete;
  std::filesystem::path path() const { return "/proc/self/fd/" + std::to_string(file_); }

 private:
  int file_;
};

// ---- attention problems ----

void read_cases(Bytes bytes) { problem::parse_cases(text_of(bytes), "fuzz"); }

std::vector<std::string> case_seeds() {
  return {R"([{"name": "a", "why": "a seed",
 "spec": {"num_heads": 4, "num_kv_heads": 2, "head_size": 8, "scale": 1.0, "causal": true,
          "window": [3, 0], "logits_soft_cap": 5.0, "sinks": [0, 1, 2, 3]},
 "block_size": 4, "requests": [{"q_len": 1, "kv_len": 3}, {"q_len": 1, "kv_len": 2, "mask": [[1, 0]]}],
 "query": {"one_hot": 2}, "key": {"tokens": [1, 2, 3]}, "value": "kv_head",
 "vary": {"num_splits": [1, 4]}, "poison": "next_block", "dtypes": ["f32", "bf16"],
 "expect": {"output": [[[1, 2, 3, 4]], [[5, 6, 7, 8]]],
            "lse": [[[1, 2, 3, 4]], [[5, 6, 7, null]]]}}])"};
}

void read_problem(Bytes bytes) {
  const MemoryFile file(bytes);
  problem::read_safetensors_problem(file.path());
}

std::vector<std::string> problem_seeds() {
  std::vector<std::string> seeds;
  for (const bool paged : {true, false}) {
    problem::AttentionProblem problem;
    problem.name = "seed";
    problem.spec.num_heads = 2;
    problem.spec.num_kv_heads = 1;
    problem.spec.head_size = 8;
    problem.spec.sinks = {0.5F, 1.0F};
    problem.paged = paged;
    problem.block_size = 16;
    problem.requests = {{2, 5}, {1, 1}};
    problem.fill_random(1);
    const serving::testing::TempDir folder;
    problem::write_safetensors_problem(folder.path() / "seed", problem);
    std::ifstream in(folder.path() / "seed", std::ios::binary);
    seeds.emplace_back(std::istreambuf_iterator<char>(in), std::istreambuf_iterator<char>());
  }
  return seeds;
}

// ---- traces ----

void read_trace(Bytes bytes) { replay::parse_trace(text_of(bytes)); }

std::vector<std::string> trace_seeds() {
  return {
      "TIMESTAMP,ContextTokens,GeneratedTokens\n"
      "2023-11-16 18:15:46.6805900,374,44\n2023-11-16 18:15:50.9951690,396,109\n",
      R"({"timestamp": 0, "input_length": 600, "output_length": 5, "hash_ids": [1, 2]})"
      "\n"
      R"({"timestamp": 9.5, "input_length": 1024, "output_length": 1, "hash_ids": [1, 3]})"};
}

// ---- models ----

void read_gguf(Bytes bytes) {
  const MemoryFile file(bytes);
  serving::load_gguf_model(file.path(), nullptr, nullptr);
}

std::vector<std::string> gguf_seeds() {
  serving::testing::GgufBuilder file;
  file.string("general.architecture", "llama").u32("llama.block_count", 1);
  file.u32("llama.embedding_length", 8).u32("llama.feed_forward_length", 8);
  file.u32("llama.context_length", 16).u32("llama.attention.head_count", 1);
  file.u32("llama.attention.head_count_kv", 1).f32("llama.rope.freq_base", 1e4F);
  file.f32("llama.attention.layer_norm_rms_epsilon", 1e-6F);
  file.f32_tensor("token_embd.weight", {8, 4}, 0.0F, 1.0F);
  file.f32_tensor("output_norm.weight", {8}, 0.0F, 1.0F);
  for (const std::string_view norm : {"attn_norm", "ffn_norm"}) {
    file.f32_tensor("blk.0." + std::string(norm) + ".weight", {8}, 0.0F, 1.0F);
  }
  for (const std::string_view matrix :
       {"attn_q", "attn_k", "attn_v", "attn_output", "ffn_gate", "ffn_up", "ffn_down"}) {
    file.f32_tensor("blk.0." + std::string(matrix) + ".weight", {8, 8}, 0.0F, 1.0F);
  }
  return {file.build()};
}

void read_safetensors(Bytes bytes) {
  const MemoryFile file(bytes);
  const serving::SafetensorsFile tensors(file.path());
}

/// A tokenizer's file up to the first 0xFF 0xFF, then a text for it.
std::pair<Bytes, Bytes> file_and_text(Bytes bytes) {
  constexpr std::array<std::uint8_t, 2> kEnd{0xFF, 0xFF};
  const auto end = std::search(bytes.begin(), bytes.end(), kEnd.begin(), kEnd.end());
  const auto size = static_cast<std::size_t>(end - bytes.begin());
  return {bytes.first(size), bytes.subspan(std::min(bytes.size(), size + 2))};
}

void use_tokenizer(const serving::Tokenizer& tokenizer, Bytes text) {
  for (const std::int32_t token : tokenizer.encode(std::string(text_of(text)))) {
    tokenizer.decode(token, -1);
  }
}

void read_hf_tokenizer(Bytes bytes) {
  const auto [json, text] = file_and_text(bytes);
  const MemoryFile file(json);
  use_tokenizer(*serving::load_hf_tokenizer(file.path()), text);
}

std::vector<std::string> hf_tokenizer_seeds() {
  return {
      R"({"added_tokens": [{"id": 4, "content": "<|im_end|>", "special": true, "lstrip": false}],
 "normalizer": null, "post_processor": null,
 "pre_tokenizer": {"type": "Sequence", "pretokenizers": [
   {"type": "Digits", "individual_digits": true},
   {"type": "ByteLevel", "add_prefix_space": false, "trim_offsets": true, "use_regex": true}]},
 "model": {"type": "BPE", "vocab": {"a": 0, "b": 1, "ab": 2, "1": 3}, "merges": ["a b"]}})"
      "\xFF\xFF"
      "abba1<|im_end|>"};
}

void read_llama2c_tokenizer(Bytes bytes) {
  const auto [content, text] = file_and_text(bytes);
  const MemoryFile file(content);
  use_tokenizer(*serving::load_llama2c_tokenizer(file.path(), 4), text);
}

std::vector<std::string> llama2c_tokenizer_seeds() {
  std::string file;
  serving::testing::append(file, std::int32_t{2});
  for (const std::string_view token : {"a", "b", "ab", " "}) {
    serving::testing::append(file, 0.5F);
    serving::testing::append(file, static_cast<std::int32_t>(token.size()));
    file += token;
  }
  return {file + "\xFF\xFF" + "ab ba"};
}

// ---- steps ----

/// Numbers out of bytes: mostly small ones, which pass for lengths and blocks.
class Numbers {
 public:
  explicit Numbers(Bytes bytes) : rest_(bytes) {}

  int byte() {
    if (rest_.empty()) {
      return 0;
    }
    const int value = rest_.front();
    rest_ = rest_.subspan(1);
    return value;
  }
  std::int64_t any() {
    const int first = byte();
    if (first < 250) {
      return first / 4;
    }
    std::int64_t value = 0;
    for (int i = 0; i < (first < 253 ? 4 : 8); ++i) {
      value = value << 8 | byte();
    }
    return first % 2 == 0 ? value : -value;
  }
  template <typename T>
  std::vector<T> list(std::size_t size) {
    std::vector<T> values(size);
    for (T& value : values) {
      value = static_cast<T>(any());
    }
    return values;
  }

 private:
  Bytes rest_;
};

/// A step, planned and computed where it passes the checks. The tensors are as small as the checks
/// demand, so that a sanitizer sees every look beyond.
void plan_step(Bytes bytes) {
  Numbers numbers(bytes);
  AttentionSpec spec;
  spec.num_heads = 2;
  spec.num_kv_heads = 1;
  spec.head_size = 8;
  spec.dtype = DType::f32;
  const int flags = numbers.byte();
  if ((flags & 1) != 0) {
    spec.window = {numbers.any(), numbers.any()};
  }
  const auto num_reqs = static_cast<std::size_t>(numbers.byte() % 5);
  auto starts = numbers.list<std::int32_t>(num_reqs + (numbers.byte() != 1 ? 1 : 2));
  auto lens = numbers.list<std::int32_t>(num_reqs);
  const auto width = static_cast<std::size_t>(numbers.byte() % 5);
  auto table = numbers.list<std::int32_t>(num_reqs * width);
  auto key_starts = numbers.list<std::int32_t>(num_reqs + 1);
  for (std::vector<std::int32_t>* offsets : {&starts, &key_starts}) {
    offsets->front() = (flags & 2) != 0 ? offsets->front() : 0;
    if ((flags & 4) == 0) {
      std::sort(offsets->begin(), offsets->end());
    }
  }
  CommonAttentionMetadata step;
  step.num_reqs = std::ssize(lens);
  step.num_actual_tokens = (flags & 8) != 0 ? numbers.any() : starts.back();
  step.max_query_len = (flags & 16) != 0 ? numbers.any() : step.num_actual_tokens;
  step.max_seq_len = (flags & 32) != 0 ? numbers.any() : 64;
  auto slots = numbers.list<std::int64_t>(
      static_cast<std::size_t>(std::clamp<std::int64_t>(step.num_actual_tokens, 0, 512)));
  step.query_start_loc = TensorView(starts.data(), DType::i32, {std::ssize(starts)});
  step.seq_lens = TensorView(lens.data(), DType::i32, {std::ssize(lens)});
  const bool paged = (flags & 64) == 0;
  if (paged) {
    step.slot_mapping = TensorView(slots.data(), DType::i64, {std::ssize(slots)});
    step.block_table =
        TensorView(table.data(), DType::i32, {std::ssize(lens), static_cast<std::int64_t>(width)});
  } else if ((flags & 128) != 0) {
    step.key_start_loc = TensorView(key_starts.data(), DType::i32, {std::ssize(key_starts)});
  }
  step.causal = numbers.byte() % 4 != 0;

  constexpr std::int64_t kBlockSize = 16;
  constexpr std::int64_t kBlocks = 4;
  const AttentionBackendPtr backend = BackendRegistry::global().get("CPU_ATTN");
  const auto builder = backend->make_builder(
      {.spec = spec, .block_size = kBlockSize, .num_blocks = paged ? kBlocks : 0});
  if (step.num_actual_tokens > 1'000'000) {
    return;  // A plan of so many rows is right, and takes its time.
  }
  const std::int64_t prefix = numbers.byte() % 8 == 0 ? numbers.any() : 0;
  const AttentionMetadataPtr plan = builder->build(prefix, step);

  const std::int64_t rows = step.num_actual_tokens;
  if (rows > 4096) {
    return;
  }
  std::vector<float> query(static_cast<std::size_t>(rows * 2 * 8), 0.5F);
  std::vector<float> output(query.size());
  std::vector<float> cache(static_cast<std::size_t>(kBlocks * 2 * kBlockSize * 8), 0.25F);
  // Plain keys reach as far as the step says, or not quite.
  std::int64_t keys = numbers.any();
  for (std::size_t r = 0; r < num_reqs && numbers.byte() != 7; ++r) {
    const auto& key_begins = step.key_start_loc.empty() ? starts : key_starts;
    keys = std::max(keys, std::int64_t{key_begins[r]} + lens[r]);
  }
  std::vector<float> plain(static_cast<std::size_t>(std::clamp<std::int64_t>(keys, 0, 1000) * 8));
  const TensorView keys_and_values(plain.data(), DType::f32, {std::ssize(plain) / 8, 1, 8});
  ForwardArgs args{.query = TensorView(query.data(), DType::f32, {rows, 2, 8}),
                   .output = TensorView(output.data(), DType::f32, {rows, 2, 8})};
  const auto impl = backend->make_impl(spec);
  if (paged) {
    const KVCacheSpec layer = KVCacheSpec::from(spec, kBlockSize);
    const KVCacheLayout layout = backend->kv_cache_layout(layer, kBlocks);
    args.kv_cache =
        backend->kv_cache_view(TensorView(cache.data(), DType::f32, layout.shape), layer);
    const TensorView fresh(query.data(), DType::f32, {rows, 1, 8});
    impl->update_kv_cache(fresh, fresh, args.kv_cache, step.slot_mapping);
  } else {
    args.key = keys_and_values;
    args.value = keys_and_values;
  }
  impl->forward(args, *plan);
}

/// Two requests of 1 and 2 rows: paged, with a window, with plain keys, and with keys of their own.
std::vector<std::string> step_seeds() {
  std::vector<std::string> seeds;
  for (const int flags : {0, 1, 64, 64 + 128}) {
    std::string seed{static_cast<char>(flags)};
    const auto raw = [&](int value) { seed += static_cast<char>(value); };
    const auto numbers = [&](std::initializer_list<int> values) {
      for (const int value : values) {
        raw(4 * value);  // As Numbers::any reads it.
      }
    };
    if (flags == 1) {
      numbers({3, 0});
    }
    raw(2);
    raw(0);
    numbers({0, 1, 3});
    flags == 64 ? numbers({1, 2}) : numbers({20, 30});
    raw(2);
    numbers({0, 1, 2, 3, 0, 20, 50, 8, 9, 10});
    seeds.push_back(seed + "\x01\x01");  // Causal, without a prefix.
  }
  return seeds;
}

}  // namespace

const std::vector<Target>& targets() {
  static const std::vector<Target> all{
      {"cases", read_cases, case_seeds},
      {"problem", read_problem, problem_seeds},
      {"trace", read_trace, trace_seeds},
      {"gguf", read_gguf, gguf_seeds},
      {"safetensors", read_safetensors, problem_seeds},
      {"hf_tokenizer", read_hf_tokenizer, hf_tokenizer_seeds},
      {"llama2c_tokenizer", read_llama2c_tokenizer, llama2c_tokenizer_seeds},
      {"step", plan_step, step_seeds},
  };
  return all;
}

void run(const Target& target, std::span<const std::uint8_t> bytes) {
  try {
    target.run(bytes);
  } catch (const Error&) {  // What a reader is to say of bad bytes.
  }
}

}  // namespace foveal::fuzz
