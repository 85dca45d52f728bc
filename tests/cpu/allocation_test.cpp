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

}  // namespace
}  // namespace foveal::testing
