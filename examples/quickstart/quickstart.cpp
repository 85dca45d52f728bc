// One attention layer serving one step of two requests over a paged cache: select, lay the cache
// out, plan, run.

#include <cstdint>
#include <cstdio>
#include <vector>

#include "foveal/foveal.h"

int main() {
  using namespace foveal;

  // What never changes for the layer: 8 query heads on 2 KV heads of 64, a window of 128 tokens.
  AttentionSpec spec;
  spec.num_heads = 8;
  spec.num_kv_heads = 2;
  spec.head_size = 64;
  spec.dtype = DType::f32;
  spec.window = Window::of_tokens(128);

  const SelectorConfig wanted = SelectorConfig::from(spec);
  const AttentionBackendPtr backend = select_backend(wanted);
  std::printf("%s", explain_selection(wanted).text().c_str());

  // The backend says how its cache looks; the memory is ours.
  constexpr std::int64_t kNumBlocks = 16;
  const KVCacheSpec cache_spec = KVCacheSpec::from(spec, /*block_size=*/16);
  const KVCacheLayout layout = backend->kv_cache_layout(cache_spec, kNumBlocks);
  std::vector<std::byte> cache_memory(static_cast<std::size_t>(layout.size_bytes()));
  const KVCacheView cache = backend->kv_cache_view(layout.view(cache_memory.data()), cache_spec);

  // The step: request 0 prefills 20 tokens in blocks 1 and 2, request 1 prefills 5 in block 3.
  std::vector<std::int32_t> query_start_loc{0, 20, 25};
  std::vector<std::int32_t> seq_lens{20, 5};
  std::vector<std::int32_t> block_table{1, 2, 3, 0};
  std::vector<std::int64_t> slot_mapping;
  for (std::int64_t i = 0; i < 20; ++i) {
    slot_mapping.push_back(1 * 16 + i);
  }
  for (std::int64_t i = 0; i < 5; ++i) {
    slot_mapping.push_back(3 * 16 + i);
  }
  CommonAttentionMetadata step;
  step.num_reqs = 2;
  step.num_actual_tokens = 25;
  step.max_query_len = 20;
  step.max_seq_len = 20;
  step.query_start_loc = {query_start_loc.data(), DType::i32, {3}};
  step.seq_lens = {seq_lens.data(), DType::i32, {2}};
  step.block_table = {block_table.data(), DType::i32, {2, 2}};
  step.slot_mapping = {slot_mapping.data(), DType::i64, {25}};

  // The plan is made once a step, for all layers of the group.
  const auto builder =
      backend->make_builder({.spec = spec, .block_size = 16, .num_blocks = kNumBlocks});
  const AttentionMetadataPtr metadata = builder->build(/*common_prefix_len=*/0, step);

  // Once a layer: write the new keys and values, then attend.
  const auto layer = backend->make_impl(spec);
  std::vector<float> query(25 * 8 * 64,
                           0.0F);  // Queries of zero: each row is the mean of the values it sees.
  std::vector<float> key(25 * 2 * 64, 0.0F);
  std::vector<float> value(25 * 2 * 64);
  for (std::size_t i = 0; i < value.size(); ++i) {
    const std::size_t token = i / (2 * 64);
    value[i] = static_cast<float>(token);
  }
  std::vector<float> output(query.size());
  layer->update_kv_cache({key.data(), DType::f32, {25, 2, 64}},
                         {value.data(), DType::f32, {25, 2, 64}}, cache, step.slot_mapping);
  ForwardArgs args;
  args.query = {query.data(), DType::f32, {25, 8, 64}};
  args.kv_cache = cache;
  args.output = {output.data(), DType::f32, {25, 8, 64}};
  layer->forward(args, *metadata);

  std::printf("last row of request 0: %.2f (the mean of 0…19 is 9.50)\n", output[19 * 8 * 64]);
  std::printf("last row of request 1: %.2f (the mean of 20…24 is 22.00)\n", output[24 * 8 * 64]);
  return output[19 * 8 * 64] > 9.49F && output[19 * 8 * 64] < 9.51F ? 0 : 1;
}
