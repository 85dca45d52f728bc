// forward, update_kv_cache and merge_attn_states allocate nothing. A program of its own, since it
// replaces the operators that allocate.

#include <gtest/gtest.h>

#include <atomic>
#include <cstdlib>
#include <new>

#include "cpu/step.h"

namespace {

std::atomic<bool> counting = false;
std::atomic<int> allocations = 0;

void* allocate(std::size_t size, std::size_t alignment) {
  if (counting) {
    ++allocations;
  }
  void* memory = std::aligned_alloc(alignment, (size + alignment - 1) / alignment * alignment);
  if (memory == nullptr) {
    throw std::bad_alloc();
  }
  return memory;
}

}  // namespace

// Not inlined, or the compiler would see a pointer of operator new in free.
void* operator new(std::size_t size) { return allocate(size, alignof(std::max_align_t)); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  return allocate(size, static_cast<std::size_t>(alignment));
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::align_val_t) noexcept {
  std::free(memory);
}
[[gnu::noinline]] void operator delete(void* memory, std::size_t, std::align_val_t) noexcept {
  std::free(memory);
}

namespace foveal::testing {
namespace {

TEST(CpuAllocation, NoneOnceStarted) {
  for (const DType dtype : {DType::f32, DType::bf16}) {
    Step step;
    step.spec = make_spec(8, 2, 64, dtype);
    step.requests = {{40, 300}, {1, 700}, {1, 16}};
    step.fill();
    const AttentionBackendPtr backend = cpu_backend();
    const auto builder = backend->make_builder(step.config());
    const auto impl = backend->make_impl(step.spec);
    const auto pool = make_thread_pool(2);
    ExecutionContext context;
    context.threads = pool.get();
    CommonAttentionMetadata common = step.common();
    const std::vector<std::int64_t> slots(static_cast<std::size_t>(step.num_tokens), -1);
    common.slot_mapping = {const_cast<std::int64_t*>(slots.data()), DType::i64, {step.num_tokens}};
    const AttentionMetadataPtr metadata = builder->build(0, common);
    std::vector<std::byte> output(step.query.size());
    ForwardArgs args;
    args.query = step.query_view();
    args.kv_cache = step.cache_view();
    args.output = {output.data(), dtype, {step.num_tokens, 8, 64}};
    std::vector<float> lse(static_cast<std::size_t>(8 * step.num_tokens), 0.0F);
    const AttentionPart part{args.output, {lse.data(), DType::f32, {8, step.num_tokens}}};
    const TensorView rows = args.query.slice(1, 0, 2);
    const auto run = [&] {
      impl->update_kv_cache(rows, rows, args.kv_cache, common.slot_mapping, context);
      impl->forward(args, *metadata, context);
      backend->merge_attn_states(part, part, part, context);
    };
    run();  // Threads start, code for this processor is chosen.
    counting = true;
    run();
    counting = false;
    EXPECT_EQ(allocations.exchange(0), 0) << to_string(dtype);
    // The counter counts.
    counting = true;
    builder->build(0, common);
    counting = false;
    EXPECT_GT(allocations.exchange(0), 0);
  }
}

TEST(CpuAllocation, NoneOfMlaOnceStarted) {
  AttentionSpec spec = make_spec(4, 1, 24, DType::bf16);
  spec.mla = MlaDims{16, 8, 8, 8};
  spec.head_size_v = 16;
  spec.scale = 0.25F;
  const AttentionBackendPtr backend = BackendRegistry::global().get("CPU_MLA");
  BuilderConfig config;
  config.spec = spec;
  config.num_blocks = 64;
  config.num_threads = 2;
  const auto builder = backend->make_builder(config);
  const auto impl = backend->make_mla_impl(spec);
  const auto pool = make_thread_pool(2);
  ExecutionContext context;
  context.threads = pool.get();

  constexpr std::int64_t kTokens = 40;
  std::vector<std::int32_t> starts{0, kTokens};
  std::vector<std::int32_t> paged_lens{700};
  std::vector<std::int32_t> plain_lens{kTokens};
  std::vector<std::int32_t> table(44, 3);
  const std::vector<std::int64_t> slots(kTokens, 5);
  std::vector<std::uint16_t> memory(64 * 16 * 24, 0);
  CommonAttentionMetadata common;
  common.num_reqs = 1;
  common.num_actual_tokens = common.max_query_len = kTokens;
  common.max_seq_len = 700;
  common.query_start_loc = {starts.data(), DType::i32, {2}};
  common.seq_lens = {plain_lens.data(), DType::i32, {1}};
  const AttentionMetadataPtr plain = builder->build(0, common);
  common.seq_lens = {paged_lens.data(), DType::i32, {1}};
  common.block_table = {table.data(), DType::i32, {1, 44}};
  const AttentionMetadataPtr paged = builder->build(0, common);

  std::vector<std::uint16_t> written(kTokens * 4 * 16);
  std::vector<float> lse(4 * kTokens);
  const TensorView lse_view(lse.data(), DType::f32, {4, kTokens});
  const MlaDecodeArgs decode{.query = {memory.data(), DType::bf16, {kTokens, 4, 24}},
                             .kv_cache = {memory.data(), DType::bf16, {64, 16, 24}},
                             .output = {written.data(), DType::bf16, {kTokens, 4, 16}},
                             .lse = lse_view};
  const MlaPrefillArgs prefill{.query = {memory.data(), DType::bf16, {kTokens, 4, 16}},
                               .key = {memory.data(), DType::bf16, {kTokens, 4, 16}},
                               .value = {memory.data(), DType::bf16, {kTokens, 4, 8}},
                               .output = {written.data(), DType::bf16, {kTokens, 4, 8}},
                               .lse = lse_view};
  const TensorView latent(memory.data(), DType::bf16, {kTokens, 16});
  const TensorView key_rope(memory.data(), DType::bf16, {kTokens, 8});
  const TensorView mapping(const_cast<std::int64_t*>(slots.data()), DType::i64, {kTokens});
  const auto run = [&] {
    impl->update_kv_cache(latent, key_rope, decode.kv_cache, mapping, context);
    impl->forward_mha(prefill, *plain, context);
    impl->forward_mqa(decode, *paged, context);
  };
  run();
  counting = true;
  run();
  counting = false;
  EXPECT_EQ(allocations.exchange(0), 0);
}

}  // namespace
}  // namespace foveal::testing
