// Loads a backend out of a shared library, prints whether the selector takes it, and why, and
// compares one step with the oracle:
//   foveal_try_plugin EXAMPLE ./libfoveal_example_plugin.so

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstdio>
#include <random>
#include <vector>

#include "foveal/foveal.h"

namespace {

using namespace foveal;

std::vector<float> random_numbers(std::int64_t count) {
  std::mt19937 random(0);
  std::normal_distribution<float> normal;
  std::vector<float> numbers(static_cast<std::size_t>(count));
  std::generate(numbers.begin(), numbers.end(), [&] { return normal(random); });
  return numbers;
}

/// One step of two requests: 20 tokens of a prompt, and one token behind 29 that are in the cache.
std::vector<float> run(const AttentionBackend& backend, const AttentionSpec& spec) {
  constexpr std::int64_t kBlockSize = 16;
  constexpr std::int64_t kNumBlocks = 6;
  const KVCacheSpec cache_spec = KVCacheSpec::from(spec, kBlockSize);
  const KVCacheLayout layout = backend.kv_cache_layout(cache_spec, kNumBlocks);
  std::vector<std::byte> memory(static_cast<std::size_t>(layout.size_bytes()));
  const KVCacheView cache = backend.kv_cache_view(layout.view(memory.data()), cache_spec);

  std::vector<std::int32_t> query_start_loc{0, 20, 21};
  std::vector<std::int32_t> seq_lens{20, 30};
  std::vector<std::int32_t> block_table{5, 2, 1, 4};
  CommonAttentionMetadata step;
  step.num_reqs = 2;
  step.num_actual_tokens = 21;
  step.max_query_len = 20;
  step.max_seq_len = 30;
  step.query_start_loc = {query_start_loc.data(), DType::i32, {3}};
  step.seq_lens = {seq_lens.data(), DType::i32, {2}};
  step.block_table = {block_table.data(), DType::i32, {2, 2}};
  const auto builder =
      backend.make_builder({.spec = spec, .block_size = kBlockSize, .num_blocks = kNumBlocks});
  const AttentionMetadataPtr plan = builder->build(/*common_prefix_len=*/0, step);

  std::vector<std::int64_t> slots;  // Of the 50 keys, those of earlier steps included.
  for (std::int64_t request = 0; request < 2; ++request) {
    for (std::int64_t position = 0; position < seq_lens[request]; ++position) {
      const std::int64_t block = block_table[request * 2 + position / kBlockSize];
      slots.push_back(block * kBlockSize + position % kBlockSize);
    }
  }
  std::vector<float> numbers = random_numbers(50 * spec.num_heads * spec.head_size);
  float* data = numbers.data();
  const auto layer = backend.make_impl(spec);
  const TensorView key{data, DType::f32, {50, spec.num_kv_heads, spec.head_size}};
  const TensorView value{data + 1000, DType::f32, {50, spec.num_kv_heads, spec.head_size}};
  layer->update_kv_cache(key, value, cache, {slots.data(), DType::i64, {50}});

  std::vector<float> output(static_cast<std::size_t>(21 * spec.num_heads * spec.head_size));
  const TensorView query{data + 2000, DType::f32, {21, spec.num_heads, spec.head_size}};
  layer->forward({.query = query,
                  .kv_cache = cache,
                  .output = {output.data(), DType::f32, {21, spec.num_heads, spec.head_size}}},
                 *plan);
  return output;
}

int try_backend(const char* id, const char* library) {
  BackendRegistry& registry = BackendRegistry::global();
  registry.add_library(id, "from a shared library", library, /*before=*/"CPU_ATTN");

  AttentionSpec spec;
  spec.num_heads = 6;
  spec.num_kv_heads = 2;
  spec.head_size = 64;
  spec.dtype = DType::f32;
  const SelectionReport report = explain_selection(SelectorConfig::from(spec));
  std::printf("%s", report.text().c_str());
  if (report.chosen != id) {
    return 1;
  }

  const std::vector<float> output = run(*registry.get(id), spec);
  const std::vector<float> expected = run(*registry.get("REFERENCE"), spec);
  std::size_t wrong = 0;
  for (std::size_t i = 0; i < output.size(); ++i) {
    wrong += std::fabs(output[i] - expected[i]) < 1e-5F ? 0 : 1;
  }
  std::printf("%zu of %zu numbers are not the oracle's\n", wrong, output.size());
  return wrong == 0 ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    std::fprintf(stderr, "usage: foveal_try_plugin ID LIBRARY\n");
    return 2;
  }
  try {
    return try_backend(argv[1], argv[2]);
  } catch (const foveal::Error& error) {
    std::fprintf(stderr, "%s\n", error.what());
    return 1;
  }
}
