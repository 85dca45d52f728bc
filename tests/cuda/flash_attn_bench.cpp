// Times the kernels of FLASH_ATTN on one GPU, over tile shapes: what heuristics.cpp is tuned by.
//   flash_attn_bench prefill|decode|host [tiles]
// Prints one line a shape and tile: microseconds, TFLOP/s or GB/s.

#include <fmt/format.h>

#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstdio>
#include <cstring>
#include <functional>
#include <random>
#include <string>
#include <vector>

#include "cuda/flash_attn/kernels.h"
#include "cuda/kernels/flash_attn/params.cuh"
#include "foveal/error.h"
#include "foveal/registry.h"

using namespace foveal;
using namespace foveal::cuda;
using namespace foveal::cuda::flash_attn;

namespace {

struct Shape {
  int batch, q_len, kv_len, heads, kv_heads, head_size;
  bool causal;
  int page;  // 0: plain.
  DType cache = DType::bf16;
  bool mixed = false;  // Lengths from kv_len / batch up to kv_len.

  int length(int request) const {
    return mixed ? int((long(kv_len) * (request * 7 % batch + 1) + batch - 1) / batch) : kv_len;
  }
  double keys() const {
    double all = 0;
    for (int r = 0; r < batch; ++r) {
      all += length(r);
    }
    return all;
  }
  /// Of keys and values that are read.
  double bytes() const { return 2.0 * keys() * kv_heads * head_size * double(size_of(cache)); }
  double flops() const {
    const double all = 4.0 * keys() * heads * q_len * head_size;
    return causal && q_len > 1 ? all / 2 : all;
  }
  std::size_t kv_elements() const {
    return std::size_t(batch) * std::size_t((kv_len + 15) / 16 * 16) * std::size_t(kv_heads) *
           std::size_t(head_size);
  }
  std::string text() const {
    return fmt::format("b{} q{} kv{}{} h{}/{} d{} {} {} {}", batch, q_len, kv_len,
                       mixed ? " mixed" : "", heads, kv_heads, head_size,
                       causal ? "causal" : "full", page > 0 ? "paged" : "plain", to_string(cache));
  }
};

std::string text(const TileConfig& t) {
  return fmt::format("rt{} wm{} wn{}{} n{} s{} qr{} mb{}", t.row_tiles, t.warps_m, t.warps_n,
                     t.teams ? " teams" : "", t.block_n, t.stages, int(t.query_in_registers),
                     t.min_blocks);
}

std::vector<unsigned short> random_bf16(std::size_t count) {
  std::vector<unsigned short> numbers(count);
  std::mt19937 engine(1);
  std::normal_distribution<float> normal;
  for (unsigned short& number : numbers) {
    const float value = normal(engine);
    unsigned bits;
    std::memcpy(&bits, &value, 4);
    number = static_cast<unsigned short>((bits + 0x8000U) >> 16);
  }
  return numbers;
}

DeviceBuffer random_buffer(std::size_t bytes, unsigned seed) {
  static const std::vector<unsigned short> numbers = random_bf16(std::size_t{8} << 20);
  DeviceBuffer buffer(0, bytes);
  const std::size_t piece = numbers.size() * 2;
  const std::size_t shift = seed * 4096 % (piece / 2);
  for (std::size_t at = 0; at < bytes; at += piece - shift) {
    copy_async(buffer.as<char>() + at, reinterpret_cast<const char*>(numbers.data()) + shift,
               std::min(piece - shift, bytes - at), nullptr);
  }
  synchronize(nullptr);
  return buffer;
}

template <typename T>
DeviceBuffer upload(const std::vector<T>& values) {
  DeviceBuffer buffer(0, values.size() * sizeof(T));
  copy_async(buffer.data(), values.data(), values.size() * sizeof(T), nullptr);
  synchronize(nullptr);
  return buffer;
}

/// Reads everything; writes nothing that matters.
KernelKey sum_key() {
  KernelKey key;
  key.source = "sum.cu";
  key.entry = "sum";
  key.arch = arch_name(device_properties(0).compute_capability);
  key.headers["sum.cu"] = R"(
extern "C" __global__ void __launch_bounds__(512) sum(const int4* data, long long bytes, int* out) {
  int total = 0;
  const long long count = bytes / 16, step = static_cast<long long>(gridDim.x) * 512;
#pragma unroll 8
  for (long long i = blockIdx.x * 512LL + threadIdx.x; i < count; i += step) {
    const int4 v = data[i];
    total += v.x ^ v.y ^ v.z ^ v.w;
  }
  if (total == 0x12345678) *out = total;
}
)";
  return key;
}

/// As in builder.cpp.
struct Planning {
  int waves = 3;
  int good_keys = 2048;
};
constexpr Planning kPrefillPlanning{1, 0};

/// Everything one shape needs on the device, planned anew for each tile.
class Bench {
 public:
  explicit Bench(const Shape& shape) : s(shape), stream_(0) {
    const std::size_t rows = std::size_t(s.batch) * std::size_t(s.q_len) * std::size_t(s.heads);
    query_ = random_buffer(rows * std::size_t(s.head_size) * 2, 1);
    output_ = DeviceBuffer(0, rows * std::size_t(s.head_size) * 2);
    const std::size_t bytes = s.kv_elements() * std::size_t(size_of(s.cache));
    cache_ = random_buffer(2 * bytes, 2);
    std::vector<int> starts;
    std::vector<int> key_starts;
    for (int r = 0; r <= s.batch; ++r) {
      starts.push_back(r * s.q_len);
      key_starts.push_back(r * s.kv_len);
    }
    starts_ = upload(starts);
    key_starts_ = upload(key_starts);
    std::vector<int> lens;
    for (int r = 0; r < s.batch; ++r) {
      lens.push_back(s.length(r));
    }
    lens_ = upload(lens);
    if (s.page > 0) {
      width_ = (s.kv_len + s.page - 1) / s.page;
      std::vector<int> table(std::size_t(width_) * std::size_t(s.batch));
      for (std::size_t i = 0; i < table.size(); ++i) {
        table[i] = int(i);
      }
      std::shuffle(table.begin(), table.end(), std::mt19937(3));
      table_ = upload(table);
    }
  }

  double microseconds(const TileConfig& tile, int class_number, bool flush, Planning planning,
                      std::string& note) {
    ForwardVariant v;
    v.dtype = DType::bf16;
    v.cache_dtype = s.cache;
    v.head = {s.head_size, s.head_size, 2, int(size_of(s.cache)), s.page, s.heads / s.kv_heads};
    v.right_bound = s.causal;
    v.tile = tile;
    const ForwardShape fs = tile.shape(v.head);
    const int bytes = shared_layout(fs).total;
    const DeviceProperties& device = device_properties(0);
    if (bytes > device.shared_bytes_per_block) {
      note = "too much shared memory";
      return 0;
    }
    const Kernel& forward = forward_kernel(v, 0);
    const int blocks = max_active_blocks_per_sm(forward.function, fs.threads(), bytes);
    note = fmt::format("regs {} spill {} blocks/SM {} smem {}", forward.attributes.registers,
                       forward.attributes.local_bytes, blocks, bytes);
    if (blocks == 0) {
      return 0;
    }
    const int parts = blocks * device.sm_count * planning.waves / s.kv_heads + 2;
    const int tiles = s.batch * ((s.q_len * v.head.group + fs.block_m() - 1) / fs.block_m()) + 1;
    const int items = tiles + parts;
    DeviceBuffer counts(0, 256);
    DeviceBuffer work(0, std::size_t(items) * sizeof(WorkItem));
    DeviceBuffer counters(0, std::size_t(parts) * std::size_t(s.kv_heads) * sizeof(unsigned));
    const std::size_t partial_rows =
        std::size_t(2 * parts) * std::size_t(s.kv_heads) * std::size_t(fs.block_m());
    DeviceBuffer partial(0, partial_rows * std::size_t(s.head_size) * 4);
    DeviceBuffer partial_lse(0, partial_rows * 4);
    PlanParams plan{};
    plan.query_start_loc = starts_.as<int>();
    plan.seq_lens = lens_.as<int>();
    plan.num_requests = s.batch;
    plan.num_rows = s.batch * s.q_len;
    plan.group = v.head.group;
    plan.rows_max = class_number == 0 ? 1 << 30 : 0;
    plan.num_kv_heads = s.kv_heads;
    plan.window_left = -1;
    plan.window_right = s.causal ? 0 : -1;
    for (int n = 0; n < 2; ++n) {
      plan.classes[n] = {
          .counts = counts.as<PlanCounts>() + n,
          .items = work.as<WorkItem>(),
          .counters = counters.as<unsigned>(),
          .block_rows = fs.block_m(),
          .block_keys = fs.block_n,
          .capacity = blocks * device.sm_count,
          .waves = planning.waves,
          .good_tiles = (planning.good_keys + fs.block_n - 1) / fs.block_n,
          .min_tiles = ((class_number == 0 ? 128 : 512) + fs.block_n - 1) / fs.block_n,
          .forced_splits = 0,
          .max_items = n == class_number ? items : 0,
          .max_slots = n == class_number ? 2 * parts : 0};
    }
    const double plan_us = microseconds(
        [&] {
          launch(plan_kernel(0),
                 {.grid = {1, 1, 1}, .block = {1024, 1, 1}, .stream = stream_.get()}, plan);
        },
        false);
    note = fmt::format("plan {:.1f} us, {}", plan_us, note);

    const long long row = static_cast<long long>(s.kv_heads) * s.head_size;
    ForwardParams p{};
    p.query = {query_.data(), static_cast<long long>(s.heads) * s.head_size, s.head_size};
    p.output = {output_.data(), static_cast<long long>(s.heads) * s.head_size, s.head_size};
    const long long element = size_of(s.cache);
    const long long row_bytes = row * element;
    const long long head_bytes = s.head_size * element;
    if (s.page > 0) {  // [blocks, 2, block_size, kv_heads, head_size]
      const long long block = 2 * s.page * row_bytes;
      p.key = {cache_.data(), block, row_bytes, head_bytes};
      p.value = {cache_.as<char>() + s.page * row_bytes, block, row_bytes, head_bytes};
      p.block_table = table_.as<int>();
      p.table_stride = width_;
    } else {
      p.key = {cache_.data(), 0, row_bytes, head_bytes};
      p.value = {cache_.as<char>() + s.kv_elements() * std::size_t(element), 0, row_bytes,
                 head_bytes};
      p.key_start_loc = key_starts_.as<int>();
    }
    p.counts = counts.as<PlanCounts>() + class_number;
    p.items = work.as<WorkItem>();
    p.counters = counters.as<unsigned>();
    p.partial_output = partial.as<float>();
    p.partial_lse = partial_lse.as<float>();
    p.scale = 1.4426950408889634F / std::sqrt(float(s.head_size));
    p.inverse_scale = 1.0F / p.scale;
    p.value_scale = 1.0F;
    p.window_left = -1;
    p.num_kv_heads = s.kv_heads;
    const auto run = [&] {
      launch(forward,
             {.grid = {unsigned(items), unsigned(s.kv_heads), 1},
              .block = {unsigned(fs.threads()), 1, 1},
              .dynamic_shared_bytes = unsigned(bytes),
              .stream = stream_.get()},
             p, HeadValues<1>{});
    };
    return microseconds(run, flush);
  }

  /// A plain sum of all keys and values: what the device reads at best.
  double sum_microseconds() {
    return microseconds([&] { read(cache_); }, true);
  }

  Shape s;

 private:
  /// Median of graph replays.
  double microseconds(const std::function<void()>& run, bool flush) {
    run();
    synchronize(stream_.get());
    Graph graph = Graph::capture(0, stream_.get(), run);
    graph.launch(stream_.get());
    synchronize(stream_.get());
    if (flush && flush_.bytes() == 0) {
      flush_ = DeviceBuffer(0, std::size_t{256} << 20);
    }
    Event begin(0);
    Event end(0);
    std::vector<double> times;
    double total = 0;
    while (times.size() < 5 || (times.size() < 30 && total < 60000)) {
      if (flush) {  // By reads: lines that were written would be written back while we measure.
        read(flush_);
      }
      begin.record(stream_.get());
      graph.launch(stream_.get());
      end.record(stream_.get());
      times.push_back(1000.0 * Event::elapsed_ms(begin, end));
      total += times.back();
    }
    std::sort(times.begin(), times.end());
    return times[times.size() / 2];
  }

  void read(const DeviceBuffer& buffer) {
    static const Kernel& sum = *Jit::global().prepare(sum_key(), 0);
    launch(sum,
           {.grid = {unsigned(device_properties(0).sm_count) * 4, 1, 1},
            .block = {512, 1, 1},
            .stream = stream_.get()},
           buffer.data(), static_cast<long long>(buffer.bytes()), output_.data());
  }

  OwnedStream stream_;
  DeviceBuffer query_, output_, cache_, starts_, key_starts_, lens_, table_, flush_;
  int width_ = 0;
};

void report(const Shape& shape, const std::vector<TileConfig>& tiles, bool decode,
            const std::vector<Planning>& plannings = {Planning{}}) {
  Bench bench(shape);
  if (decode) {
    const double us = bench.sum_microseconds();
    fmt::print("{:48} {:32} {:9.1f} us {:15} {:7.0f} GB/s\n", shape.text(), "a plain sum", us, "",
               2.0 * double(shape.kv_elements()) * double(size_of(shape.cache)) / us / 1e3);
  }
  for (const TileConfig& tile : tiles) {
    for (const Planning& planning : plannings) {
      std::string note;
      double us = 0;
      try {
        us = bench.microseconds(tile, decode ? 0 : 1, decode, decode ? planning : kPrefillPlanning,
                                note);
      } catch (const Error& error) {
        note = error.what();
      }
      fmt::print("{:48} {:32} {:9.1f} us {:7.1f} TFLOP/s {:7.0f} GB/s  {} waves of {} keys, {}\n",
                 shape.text(), text(tile), us, us > 0 ? shape.flops() / us / 1e6 : 0,
                 us > 0 ? shape.bytes() / us / 1e3 : 0, planning.waves, planning.good_keys,
                 note.substr(0, 300));
      std::fflush(stdout);
    }
  }
}

HeadShape head_of(const Shape& s) {
  return {s.head_size, s.head_size, 2, int(size_of(s.cache)), s.page, s.heads / s.kv_heads};
}

void prefill(bool sweep) {
  for (const int d : {64, 128, 256}) {
    const int heads = 2048 / d;
    std::vector<TileConfig> tiles{
        prefill_tile({d, d, 2, 2, 0, 1}, 1 << 20, 2, device_properties(0))};
    if (sweep && d == 64) {
      tiles.push_back({2, 4, 1, false, 64, 2, true, 2});
      tiles.push_back({2, 4, 1, false, 96, 2, true, 2});
      tiles.push_back({2, 4, 1, false, 64, 2, false, 2});
      tiles.push_back({2, 4, 1, false, 64, 2, false, 3});
      tiles.push_back({2, 4, 1, false, 128, 2, true, 2});
      tiles.push_back({2, 4, 1, false, 96, 2, true, 2});
    } else if (sweep && d == 128) {
      tiles.push_back({2, 4, 1, false, 64, 2, false, 2});
      tiles.push_back({2, 4, 1, false, 48, 2, false, 2});
      tiles.push_back({2, 4, 1, false, 32, 2, false, 2});
      tiles.push_back({2, 8, 1, false, 64, 2, false, 1});
    } else if (sweep) {
      tiles.push_back({1, 8, 1, false, 64, 2, false, 1});
      tiles.push_back({2, 2, 2, true, 64, 1, false, 2});
      tiles.push_back({2, 4, 2, true, 64, 1, false, 1});
    }
    for (const bool causal : {false, true}) {
      report({4, 4096, 4096, heads, heads, d, causal, 0}, tiles, false);
      report({1, 16384, 16384, heads, heads, d, causal, 0}, {tiles[0]}, false);
      if (causal) {
        report({4, 4096, 4096, heads, heads, d, causal, 16}, {tiles[0]}, false);
        report({4, 4096, 4096, heads, heads / 4, d, causal, 0}, {tiles[0]}, false);
        report({4, 4096, 4096, heads, heads / 4, d, causal, 16}, {tiles[0]}, false);
      }
    }
  }
}

void decode(bool sweep) {
  struct Batch {
    int size, len;
    bool mixed = false;
  };
  for (const auto& [batch, len, mixed] : std::vector<Batch>{{1, 1024},
                                                            {1, 8192},
                                                            {8, 8192},
                                                            {1, 131072},
                                                            {4, 32768},
                                                            {32, 8192},
                                                            {128, 1024},
                                                            {128, 8192},
                                                            {256, 1024},
                                                            {8, 65536, true},
                                                            {64, 8192, true}}) {
    const Shape shape{batch, 1, len, 32, 8, 128, true, 16, DType::bf16, mixed};
    const TileConfig tile = decode_tile(head_of(shape), 1, device_properties(0));
    if (!sweep) {
      report(shape, {tile}, true);
      continue;
    }
    report(shape, {tile}, true, {{1, 0}, {2, 0}, {3, 0}, {4, 0}, {3, 2048}});
    report(shape,
           {{1, 1, 4, false, 64, 2, true, 3},
            {1, 1, 4, false, 64, 4, true, 1},
            {1, 1, 4, false, 128, 2, true, 1},
            {1, 1, 2, false, 32, 3, true, 4},
            {1, 1, 2, false, 64, 3, true, 2},
            {1, 1, 4, false, 64, 6, true, 1}},
           true);
  }
  for (const DType cache : {DType::f8e4m3, DType::f8e5m2}) {
    const Shape shape{128, 1, 8192, 32, 8, 128, true, 16, cache};
    std::vector<TileConfig> tiles{decode_tile(head_of(shape), 1, device_properties(0))};
    if (sweep) {
      tiles.push_back({1, 1, 4, false, 64, 3, true, 3});
      tiles.push_back({1, 1, 4, false, 64, 4, true, 3});
      tiles.push_back({1, 1, 4, false, 128, 2, true, 2});
      tiles.push_back({1, 1, 4, false, 128, 3, true, 2});
      tiles.push_back({1, 1, 2, false, 64, 3, true, 4});
      tiles.push_back({1, 1, 8, false, 128, 3, true, 1});
    }
    report(shape, tiles, true);
  }
  for (const int d : {64, 256}) {
    const Shape shape{64, 1, 8192, 2048 / d * 2, 512 / d * 2, d, true, 16};
    report(shape, {decode_tile(head_of(shape), 1, device_properties(0))}, true);
  }
}

/// Host time of build() and forward() for a batch of decodes.
void host() {
  const int batch = 256;
  AttentionSpec spec;
  spec.num_heads = 32;
  spec.num_kv_heads = 8;
  spec.head_size = 128;
  const AttentionBackendPtr backend = BackendRegistry::global().get("FLASH_ATTN");
  OwnedStream stream(0);
  const Device device{DeviceType::cuda, 0};
  const int blocks = batch * 4;
  BuilderConfig config{.spec = spec,
                       .block_size = 16,
                       .num_blocks = blocks,
                       .max_num_reqs = batch,
                       .max_num_tokens = batch,
                       .device = device,
                       .stream = stream.get()};
  const auto builder = backend->make_builder(config);
  const auto impl = backend->make_impl(spec);
  std::vector<int> starts, lens, table;
  for (int r = 0; r <= batch; ++r) starts.push_back(r);
  for (int r = 0; r < batch; ++r) lens.push_back(64);
  for (int i = 0; i < batch * 4; ++i) table.push_back(i);
  DeviceBuffer d_starts = upload(starts), d_lens = upload(lens), d_table = upload(table);
  DeviceBuffer q = random_buffer(std::size_t(batch) * 32 * 128 * 2, 1),
               o(0, std::size_t(batch) * 32 * 128 * 2);
  DeviceBuffer kv = random_buffer(std::size_t(blocks) * 2 * 16 * 8 * 128 * 2, 2);
  CommonAttentionMetadata common;
  common.num_reqs = common.num_actual_tokens = batch;
  common.max_query_len = 1;
  common.max_seq_len = 64;
  common.query_start_loc = {d_starts.data(), DType::i32, {batch + 1}, device};
  common.seq_lens = {d_lens.data(), DType::i32, {batch}, device};
  common.query_start_loc_host = {starts.data(), DType::i32, {batch + 1}};
  common.seq_lens_host = {lens.data(), DType::i32, {batch}};
  common.block_table = {d_table.data(), DType::i32, {batch, 4}, device};
  ForwardArgs args;
  args.query = {q.data(), DType::bf16, {batch, 32, 128}, device};
  args.output = {o.data(), DType::bf16, {batch, 32, 128}, device};
  args.kv_cache =
      KVCacheView::from_blocks_first({kv.data(), DType::bf16, {blocks, 2, 16, 8, 128}, device});
  ExecutionContext context{.stream = stream.get()};
  std::vector<double> build_us, forward_us, launch_us;
  const Kernel& sum = *Jit::global().prepare(sum_key(), 0);
  for (int i = 0; i < 200; ++i) {
    const auto t0 = std::chrono::steady_clock::now();
    const auto metadata = builder->build(0, common);
    const auto t1 = std::chrono::steady_clock::now();
    impl->forward(args, *metadata, context);
    const auto t2 = std::chrono::steady_clock::now();
    synchronize(stream.get());
    builder->build(0, common);
    const auto t3 = std::chrono::steady_clock::now();
    launch(sum, {.grid = {1, 1, 1}, .block = {512, 1, 1}, .stream = stream.get()}, kv.data(), 16LL,
           o.data());
    const auto t4 = std::chrono::steady_clock::now();
    synchronize(stream.get());
    launch_us.push_back(std::chrono::duration<double, std::micro>(t4 - t3).count());
    build_us.push_back(std::chrono::duration<double, std::micro>(t1 - t0).count());
    forward_us.push_back(std::chrono::duration<double, std::micro>(t2 - t1).count());
  }
  std::sort(build_us.begin(), build_us.end());
  std::sort(forward_us.begin(), forward_us.end());
  std::sort(launch_us.begin(), launch_us.end());
  fmt::print(
      "host: build {:.1f} us, forward {:.1f} us, of it a launch alone {:.1f} us (256 decodes, "
      "medians)\n",
      build_us[100], forward_us[100], launch_us[100]);
}

}  // namespace

int main(int argc, char** argv) {
  const std::string what = argc > 1 ? argv[1] : "prefill";
  if (!available()) {
    fmt::print("skipped: {}\n", unavailable_reason());
    return 0;
  }
  const ContextGuard guard(0);
  const bool sweep = argc > 2;
  if (what == "prefill") prefill(sweep);
  if (what == "decode") decode(sweep);
  if (what == "host") host();
  return 0;
}
