// FLASH_ATTN on device tensors, where copies of host tensors do not reach: graphs, addresses past
// 2³¹ elements, many requests, several streams.

#include <gtest/gtest.h>

#include <cmath>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "core/convert.h"
#include "cuda/driver.h"
#include "cuda/jit.h"
#include "foveal/registry.h"

namespace foveal::tests {
namespace {

using cuda::DeviceBuffer;

constexpr Device kDevice{DeviceType::cuda, 0};

template <typename T>
DeviceBuffer upload(const std::vector<T>& values) {
  DeviceBuffer buffer(0, std::max<std::size_t>(values.size() * sizeof(T), 16));
  cuda::copy_async(buffer.data(), values.data(), values.size() * sizeof(T), nullptr);
  cuda::synchronize(nullptr);
  return buffer;
}

template <typename T>
std::vector<T> download(const DeviceBuffer& buffer, std::size_t count) {
  std::vector<T> values(count);
  cuda::copy_async(values.data(), buffer.data(), count * sizeof(T), nullptr);
  cuda::synchronize(nullptr);
  return values;
}

std::vector<std::uint16_t> random_bf16(std::size_t count, unsigned seed) {
  std::mt19937 engine(seed);
  std::normal_distribution<float> normal;
  std::vector<std::uint16_t> numbers(count);
  for (std::uint16_t& number : numbers) {
    number = float_to_bf16(normal(engine));
  }
  return numbers;
}

struct Lengths {
  std::vector<int> queries;
  std::vector<int> keys;
};

/// Device tensors of a fixed size whose contents change from step to step.
class Engine {
 public:
  static constexpr int kRequests = 12;
  static constexpr int kTokens = 400;
  static constexpr int kHeads = 8, kKvHeads = 2, kSize = 64, kBlock = 16, kWidth = 256;
  static constexpr int kBlocks = kRequests * kWidth;

  explicit Engine(cuda::Stream stream, unsigned seed) : stream_(stream) {
    spec.num_heads = kHeads;
    spec.num_kv_heads = kKvHeads;
    spec.head_size = kSize;
    query = upload(random_bf16(kTokens * kHeads * kSize, seed));
    cache = upload(random_bf16(std::size_t{kBlocks} * 2 * kBlock * kKvHeads * kSize, seed + 1));
    output = DeviceBuffer(0, kTokens * kHeads * kSize * 2);
    lse = DeviceBuffer(0, kTokens * kHeads * 4);
    starts = DeviceBuffer(0, (kRequests + 1) * 4);
    lens = DeviceBuffer(0, kRequests * 4);
    std::vector<int> blocks(kBlocks);
    for (int i = 0; i < kBlocks; ++i) {
      blocks[static_cast<std::size_t>(i)] = i * 7 % kBlocks;
    }
    table = upload(blocks);
    BuilderConfig config;
    config.spec = spec;
    config.block_size = kBlock;
    config.num_blocks = kBlocks;
    config.device = kDevice;
    config.stream = stream;
    const auto backend = BackendRegistry::global().get("FLASH_ATTN");
    builder = backend->make_builder(config);
    impl = backend->make_impl(spec);
  }

  void set(const Lengths& lengths) {
    std::vector<int>& start = host_starts;
    std::vector<int>& key = host_lens;
    start = {0};
    key = lengths.keys;
    for (const int q : lengths.queries) {
      start.push_back(start.back() + q);
    }
    start.resize(kRequests + 1, start.back());
    key.resize(kRequests, 0);
    cuda::copy_async(starts.data(), start.data(), start.size() * 4, stream_);
    cuda::copy_async(lens.data(), key.data(), key.size() * 4, stream_);
    clear();
    cuda::synchronize(stream_);
  }

  void clear() {
    cuda::fill_async(output.data(), 0xFF, output.bytes(), stream_);  // NaN
    cuda::fill_async(lse.data(), 0xFF, lse.bytes(), stream_);
  }

  /// With copies on the host of what set() wrote last.
  CommonAttentionMetadata common_with_host(int max_query_len) const {
    CommonAttentionMetadata common = this->common(max_query_len);
    common.query_start_loc_host = {
        const_cast<int*>(host_starts.data()), DType::i32, {kRequests + 1}};
    common.seq_lens_host = {const_cast<int*>(host_lens.data()), DType::i32, {kRequests}};
    return common;
  }

  CommonAttentionMetadata common(int max_query_len) const {
    CommonAttentionMetadata common;
    common.num_reqs = kRequests;
    common.num_actual_tokens = kTokens;
    common.max_query_len = max_query_len;
    common.max_seq_len = kWidth * kBlock;
    common.query_start_loc = {starts.data(), DType::i32, {kRequests + 1}, kDevice};
    common.seq_lens = {lens.data(), DType::i32, {kRequests}, kDevice};
    common.block_table = {table.data(), DType::i32, {kRequests, kWidth}, kDevice};
    return common;
  }

  ForwardArgs args() const {
    ForwardArgs args;
    args.query = {query.data(), DType::bf16, {kTokens, kHeads, kSize}, kDevice};
    args.output = {output.data(), DType::bf16, {kTokens, kHeads, kSize}, kDevice};
    args.lse = {lse.data(), DType::f32, {kHeads, kTokens}, kDevice};
    args.kv_cache = KVCacheView::from_blocks_first(
        {cache.data(), DType::bf16, {kBlocks, 2, kBlock, kKvHeads, kSize}, kDevice});
    return args;
  }

  void forward(const AttentionMetadata& metadata) const {
    ExecutionContext context;
    context.stream = stream_;
    impl->forward(args(), metadata, context);
  }

  std::vector<std::uint16_t> result() const {
    cuda::synchronize(stream_);
    std::vector<std::uint16_t> all = download<std::uint16_t>(output, kTokens * kHeads * kSize);
    const auto sums = download<std::uint16_t>(lse, kTokens * kHeads * 2);
    all.insert(all.end(), sums.begin(), sums.end());
    return all;
  }

  AttentionSpec spec;
  DeviceBuffer query, cache, output, lse, starts, lens, table;
  std::unique_ptr<AttentionMetadataBuilder> builder;
  std::unique_ptr<AttentionImpl> impl;
  std::vector<int> host_starts, host_lens;

 private:
  cuda::Stream stream_;
};

const std::vector<Lengths> kSteps{
    {{1, 1, 1, 1}, {700, 4000, 16, 1}},
    {{1, 200, 1, 17, 3}, {3000, 900, 4096, 17, 2500}},
    {{400}, {4096}},
    {{1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1},
     {4000, 4000, 3, 80, 4096, 17, 1000, 2000, 3000, 64, 65, 63}},
    {{}, {}},
    {{0, 5, 0, 64, 1}, {100, 5, 0, 64, 4096}},
};

class FlashAttnGpu : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!cuda::available()) {
      GTEST_SKIP() << cuda::unavailable_reason();
    }
  }
};

std::vector<std::uint16_t> fresh(Engine& engine, const Lengths& lengths) {
  engine.set(lengths);
  engine.forward(*engine.builder->build(0, engine.common(400)));
  return engine.result();
}

TEST_F(FlashAttnGpu, GraphWithThePlanningInIt) {
  const cuda::ContextGuard guard(0);
  const cuda::OwnedStream stream(0);
  Engine engine(stream.get(), 1);
  engine.set(kSteps[1]);
  AttentionMetadataPtr metadata;
  cuda::Graph graph = cuda::Graph::capture(0, stream.get(), [&] {
    metadata = engine.builder->build_for_graph_capture(engine.common(400));
    engine.forward(*metadata);
  });
  for (int round = 0; round < 2; ++round) {
    for (const Lengths& lengths : kSteps) {
      const auto expected = fresh(engine, lengths);
      engine.set(lengths);
      graph.launch(stream.get());
      EXPECT_EQ(engine.result(), expected);
    }
  }
}

TEST_F(FlashAttnGpu, GraphOfForwardAlone) {
  const cuda::ContextGuard guard(0);
  const cuda::OwnedStream stream(0);
  Engine engine(stream.get(), 2);
  Engine other(stream.get(), 2);
  engine.set(kSteps[3]);
  const auto metadata = engine.builder->build_for_graph_capture(engine.common(400));
  cuda::Graph graph = cuda::Graph::capture(0, stream.get(), [&] { engine.forward(*metadata); });
  for (const Lengths& lengths : kSteps) {
    const auto expected = fresh(other, lengths);
    engine.set(lengths);
    const auto replanned = engine.builder->build(0, engine.common(400));
    graph.launch(stream.get());
    EXPECT_EQ(engine.result(), expected);
  }
}

TEST_F(FlashAttnGpu, GraphOfForwardAloneWithLengthsKnownToTheHost) {
  const cuda::ContextGuard guard(0);
  const cuda::OwnedStream stream(0);
  Engine engine(stream.get(), 5);
  Engine other(stream.get(), 5);
  engine.set(kSteps[1]);
  const auto metadata = engine.builder->build_for_graph_capture(engine.common_with_host(400));
  cuda::Graph graph = cuda::Graph::capture(0, stream.get(), [&] { engine.forward(*metadata); });
  for (const Lengths& lengths : kSteps) {
    const auto expected = fresh(other, lengths);
    engine.set(lengths);
    // Some steps have no request with few rows: what was captured needs a plan for those too.
    const auto replanned = engine.builder->build(0, engine.common_with_host(400));
    graph.launch(stream.get());
    EXPECT_EQ(engine.result(), expected);
  }
}

TEST_F(FlashAttnGpu, LayersOfOnePlanRepeatBitForBit) {
  const cuda::ContextGuard guard(0);
  const cuda::OwnedStream stream(0);
  Engine engine(stream.get(), 6);
  for (const Lengths& lengths : kSteps) {
    const auto expected = fresh(engine, lengths);
    const auto metadata = engine.builder->build(0, engine.common(400));
    for (int layer = 0; layer < 50; ++layer) {
      engine.clear();
      engine.forward(*metadata);
      ASSERT_EQ(engine.result(), expected) << "layer " << layer;
    }
  }
}

TEST_F(FlashAttnGpu, RepeatsBitForBit) {
  const cuda::ContextGuard guard(0);
  const cuda::OwnedStream stream(0);
  Engine engine(stream.get(), 3);
  const auto expected = fresh(engine, kSteps[1]);
  for (int i = 0; i < 50; ++i) {
    EXPECT_EQ(fresh(engine, kSteps[1]), expected);
  }
}

TEST_F(FlashAttnGpu, TwoThreadsWithStreamsOfTheirOwn) {
  std::vector<std::thread> threads;
  std::vector<int> wrong(2, 0);
  for (int t = 0; t < 2; ++t) {
    threads.emplace_back([&, t] {
      const cuda::ContextGuard guard(0);
      const cuda::OwnedStream stream(0);
      Engine engine(stream.get(), 10 + static_cast<unsigned>(t));
      std::vector<std::vector<std::uint16_t>> expected;
      for (const Lengths& lengths : kSteps) {
        expected.push_back(fresh(engine, lengths));
      }
      for (int i = 0; i < 60; ++i) {
        const std::size_t step = static_cast<std::size_t>(i) % kSteps.size();
        wrong[static_cast<std::size_t>(t)] += fresh(engine, kSteps[step]) != expected[step];
      }
    });
  }
  for (std::thread& thread : threads) {
    thread.join();
  }
  EXPECT_EQ(wrong, (std::vector<int>{0, 0}));
}

TEST_F(FlashAttnGpu, BlocksPastTwoToThe31Elements) {
  const cuda::ContextGuard guard(0);
  const cuda::OwnedStream stream(0);
  Engine engine(stream.get(), 4);
  // The same blocks in a cache whose blocks lie 4 GiB apart, three of them.
  constexpr std::int64_t kStride = std::int64_t{2} << 30;
  constexpr std::size_t kBlockElements =
      std::size_t{2} * Engine::kBlock * Engine::kKvHeads * Engine::kSize;
  if (cuda::memory_info()[0] < (std::size_t{14} << 30)) {
    GTEST_SKIP() << "needs 14 GiB";
  }
  DeviceBuffer sparse(0, static_cast<std::size_t>(2 * kStride + 65536) * 2);
  for (std::int64_t b = 0; b < 3; ++b) {
    cuda::copy_async(
        sparse.as<std::uint16_t>() + b * kStride,
        engine.cache.as<std::uint16_t>() + b * static_cast<std::int64_t>(kBlockElements),
        kBlockElements * 2, stream.get());
  }
  std::vector<int> blocks(Engine::kRequests * Engine::kWidth, 0);
  for (std::size_t r = 0; r < Engine::kRequests; ++r) {
    for (std::size_t i = 0; i < 3; ++i) {
      blocks[r * Engine::kWidth + i] = static_cast<int>(2 - i);
    }
  }
  engine.table = upload(blocks);
  const Lengths lengths{{1, 40, 3}, {48, 48, 33}};
  const auto expected = fresh(engine, lengths);
  engine.set(lengths);
  ForwardArgs args = engine.args();
  const std::vector<std::int64_t> shape{3, 2, Engine::kBlock, Engine::kKvHeads, Engine::kSize};
  const std::vector<std::int64_t> strides{kStride,
                                          Engine::kBlock * Engine::kKvHeads * Engine::kSize,
                                          Engine::kKvHeads * Engine::kSize, Engine::kSize, 1};
  args.kv_cache =
      KVCacheView::from_blocks_first({sparse.data(), DType::bf16, shape, strides, kDevice});
  BuilderConfig config = engine.builder->config();
  config.num_blocks = 3;
  const auto builder = BackendRegistry::global().get("FLASH_ATTN")->make_builder(config);
  ExecutionContext context;
  context.stream = stream.get();
  engine.impl->forward(args, *builder->build(0, engine.common(400)), context);
  EXPECT_EQ(engine.result(), expected);
  // And written: a token into the last block.
  const std::vector<std::int64_t> slots{2 * Engine::kBlock + 5, -1};
  DeviceBuffer slot = upload(slots);
  const TensorView rows(engine.query.data(), DType::bf16, {2, Engine::kKvHeads, Engine::kSize},
                        kDevice);
  engine.impl->update_kv_cache(rows, rows, args.kv_cache, {slot.data(), DType::i64, {2}, kDevice},
                               context);
  cuda::synchronize(stream.get());
  std::vector<std::uint16_t> written(Engine::kKvHeads * Engine::kSize);
  cuda::copy_async(written.data(),
                   sparse.as<std::uint16_t>() + 2 * kStride + 5 * Engine::kKvHeads * Engine::kSize,
                   written.size() * 2, stream.get());
  cuda::synchronize(stream.get());
  EXPECT_EQ(written, download<std::uint16_t>(engine.query, written.size()));
}

/// The same in float32 as plain loops: a block a row and head, a thread every 128th key. Counts
/// what is further off than bf16 allows for numbers of this size.
constexpr const char* kExact = R"(
#include "config.cuh"
#include "ptx/convert.cuh"
using namespace config;
extern "C" __global__ void __launch_bounds__(128)
    exact(const ptx::bf16* query, const ptx::bf16* cache, const ptx::bf16* output, const float* lse,
          const int* starts, const int* lens, const int* table, int tokens, int* wrong) {
  __shared__ float part[128][kSize + 2];
  const int row = blockIdx.x, head = blockIdx.y, thread = threadIdx.x;
  int request = -1;
  for (int r = 0; r < kRequests; ++r) {
    if (row >= starts[r] && row < starts[r + 1]) request = r;
  }
  const int keys = request < 0 ? 0
      : lens[request] - (starts[request + 1] - starts[request]) + row - starts[request] + 1;
  float maximum = -1e30f, sum = 0.0f, out[kSize];
  for (int d = 0; d < kSize; ++d) out[d] = 0.0f;
  for (int j = thread; j < keys; j += 128) {
    const long long block = table[request * kWidth + j / kBlock];
    const long long at = ((block * 2 * kBlock + j % kBlock) * kKvHeads + head / (kHeads / kKvHeads)) * kSize;
    float score = 0.0f;
    for (int d = 0; d < kSize; ++d) {
      score += ptx::to_float(query[(row * kHeads + head) * kSize + d]) * ptx::to_float(cache[at + d]);
    }
    score *= 0.125f;
    const float top = fmaxf(maximum, score);
    const float old = expf(maximum - top), p = expf(score - top);
    sum = sum * old + p;
    for (int d = 0; d < kSize; ++d) {
      out[d] = out[d] * old + p * ptx::to_float(cache[at + kBlock * kKvHeads * kSize + d]);
    }
    maximum = top;
  }
  for (int d = 0; d < kSize; ++d) part[thread][d] = out[d];
  part[thread][kSize] = maximum;
  part[thread][kSize + 1] = sum;
  __syncthreads();
  if (thread >= kSize) return;
  float top = -1e30f, total = 0.0f, result = 0.0f;
  for (int t = 0; t < 128; ++t) top = fmaxf(top, part[t][kSize]);
  for (int t = 0; t < 128; ++t) {
    const float weight = expf(part[t][kSize] - top);
    total += weight * part[t][kSize + 1];
    result += weight * part[t][thread];
  }
  const bool empty = keys <= 0;
  const float want = empty ? 0.0f : result / total;
  const float got = ptx::to_float(output[(row * kHeads + head) * kSize + thread]);
  bool right = empty ? got == 0.0f : fabsf(got - want) <= 0.004f * fabsf(want) + 0.01f;
  if (thread == 0) {
    const float sums = lse[head * tokens + row];
    right = right && (empty ? sums < -1e30f : fabsf(sums - top - logf(total)) <= 1e-4f);
  }
  if (!right) atomicAdd(wrong, 1);
}
)";

TEST_F(FlashAttnGpu, TenThousandRandomSteps) {
  const cuda::ContextGuard guard(0);
  const cuda::OwnedStream stream(0);
  cuda::KernelKey key;
  key.source = "exact.cu";
  key.entry = "exact";
  key.arch = cuda::arch_name(cuda::device_properties(0).compute_capability);
  key.headers["exact.cu"] = kExact;
  key.set("kSize", Engine::kSize).set("kHeads", Engine::kHeads).set("kKvHeads", Engine::kKvHeads);
  key.set("kBlock", Engine::kBlock).set("kWidth", Engine::kWidth);
  key.set("kRequests", Engine::kRequests);
  const cuda::Kernel* exact = cuda::Jit::global().prepare(key, 0);
  Engine engine(stream.get(), 20);
  const DeviceBuffer wrong = upload(std::vector<int>{0});
  std::mt19937 random(7);
  const auto below = [&](int bound) {
    return static_cast<int>(random() % static_cast<unsigned>(bound));
  };
  for (int step = 0; step < 10000; ++step) {
    Lengths lengths;
    int left = Engine::kTokens;
    const int requests = below(Engine::kRequests + 1);
    for (int r = 0; r < requests; ++r) {
      const int queries = std::min(left, below(3) == 0 ? below(120) : below(3));
      left -= queries;
      const int context = below(4) == 0 ? below(3900) : below(200);
      lengths.queries.push_back(queries);
      lengths.keys.push_back(below(20) == 0 ? below(queries + 1) : queries + context);
    }
    engine.set(lengths);
    const int longest = lengths.queries.empty()
                            ? 1
                            : *std::max_element(lengths.queries.begin(), lengths.queries.end());
    engine.forward(*engine.builder->build(0, engine.common(std::max(longest, 1))));
    cuda::launch(*exact,
                 {.grid = {Engine::kTokens, Engine::kHeads, 1},
                  .block = {128, 1, 1},
                  .stream = stream.get()},
                 engine.query.data(), engine.cache.data(), engine.output.data(), engine.lse.data(),
                 engine.starts.data(), engine.lens.data(), engine.table.data(), Engine::kTokens,
                 wrong.data());
    if (step % 500 == 499) {
      cuda::synchronize(stream.get());
      ASSERT_EQ(download<int>(wrong, 1)[0], 0) << "up to step " << step;
    }
  }
}

TEST_F(FlashAttnGpu, SeventyThousandRequests) {
  const cuda::ContextGuard guard(0);
  constexpr int kMany = 70000;
  AttentionSpec spec;
  spec.num_heads = spec.num_kv_heads = 1;
  spec.head_size = 16;
  const auto backend = BackendRegistry::global().get("FLASH_ATTN");
  BuilderConfig config;
  config.spec = spec;
  config.num_blocks = kMany;
  config.device = kDevice;
  std::vector<int> starts(kMany + 1);
  std::vector<int> table(kMany);
  for (int r = 0; r < kMany; ++r) {
    starts[static_cast<std::size_t>(r) + 1] = r + 1;
    table[static_cast<std::size_t>(r)] = kMany - 1 - r;
  }
  const DeviceBuffer d_starts = upload(starts);
  const DeviceBuffer d_lens = upload(std::vector<int>(kMany, 1));
  const DeviceBuffer d_table = upload(table);
  const DeviceBuffer query = upload(random_bf16(kMany * 16, 1));
  const auto kv = random_bf16(std::size_t{kMany} * 2 * 16 * 16, 2);
  const DeviceBuffer cache = upload(kv);
  const DeviceBuffer output(0, kMany * 16 * 2);
  CommonAttentionMetadata common;
  common.num_reqs = common.num_actual_tokens = kMany;
  common.max_query_len = common.max_seq_len = 1;
  common.query_start_loc = {d_starts.data(), DType::i32, {kMany + 1}, kDevice};
  common.seq_lens = {d_lens.data(), DType::i32, {kMany}, kDevice};
  common.block_table = {d_table.data(), DType::i32, {kMany, 1}, kDevice};
  ForwardArgs args;
  args.query = {query.data(), DType::bf16, {kMany, 1, 16}, kDevice};
  args.output = {output.data(), DType::bf16, {kMany, 1, 16}, kDevice};
  args.kv_cache =
      KVCacheView::from_blocks_first({cache.data(), DType::bf16, {kMany, 2, 16, 1, 16}, kDevice});
  const auto builder = backend->make_builder(config);
  backend->make_impl(spec)->forward(args, *builder->build(0, common));
  cuda::synchronize(nullptr);
  const auto out = download<std::uint16_t>(output, kMany * 16);
  for (std::size_t r = 0; r < kMany; ++r) {  // One visible key: its value.
    const std::size_t block = kMany - 1 - r;
    ASSERT_EQ(std::memcmp(&out[r * 16], &kv[(block * 2 + 1) * 256], 32), 0) << "request " << r;
  }
}

}  // namespace
}  // namespace foveal::tests
