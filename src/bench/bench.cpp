#include "bench/bench.h"

#include <algorithm>
#include <chrono>

#include "bench/step.h"
#include "core/check.h"
#include "foveal/selector.h"

namespace foveal::bench {
namespace {

AttentionBackendPtr choose(const Machine& machine, const Shape& shape, const Options& options) {
  SelectorConfig config =
      SelectorConfig::from(shape.spec(), machine.device().type, machine.compute_capability());
  config.backend = options.backend;
  config.use_non_causal = !shape.causal;
  if (shape.block_size > 0) {
    config.block_size = shape.block_size;
  }
  if (machine.device().type != DeviceType::cpu) {
    // Times come from graphs.
    config.needs_graphs = shape.kind == Kind::decode ? GraphSupport::uniform_single_token_decode
                                                     : GraphSupport::always;
  }
  return select_backend(config);
}

/// How far an output row may be off, as |difference| / |expected|: inputs, probabilities and output
/// are rounded to the dtype, and so are scores on the naive way. A key tile left out, or a wrong
/// head, is off by far more.
double tolerance(DType dtype) {
  switch (dtype) {
    case DType::bf16:
    case DType::f8e4m3:  // Weights and output in 16 bits.
      return 0.03;
    case DType::f16:
      return 0.005;
    default:
      return 0.001;
  }
}

void require_right(const Shape& shape, std::string_view way, double error, double bound) {
  if (!(error <= bound)) {
    fail(ErrorCode::device,
         "{} computed {} wrongly: a sampled row is off by {:.3g} of its length, {:.3g} is allowed",
         way, shape.text(), error, bound);
  }
}

double median_us(const std::function<void()>& action, const std::function<void()>& settle) {
  using Clock = std::chrono::steady_clock;
  std::vector<double> times;
  for (int i = 0; i < 50; ++i) {
    const auto begin = Clock::now();
    action();
    times.push_back(std::chrono::duration<double, std::micro>(Clock::now() - begin).count());
    settle();
  }
  return summarize(std::move(times)).median_us;
}

/// That memory does not suffice is the measurement's own failure, as is what `also` names; anything
/// else ends the run.
template <typename Action>
Measurement measured(ErrorCode also, Action&& action) {
  Measurement result;
  try {
    action(result);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::out_of_memory && error.code() != also) {
      throw;
    }
    result.times = {};
    result.failure = error.what();
  }
  return result;
}

Row measure(Machine& machine, const Shape& shape, const AttentionBackend& backend,
            NumberStore& numbers) {
  Row row;
  row.shape = shape;
  row.backend = backend.name();
  std::unique_ptr<Step> step;
  row.attention = measured(ErrorCode::out_of_memory, [&](Measurement& result) {
    step = std::make_unique<Step>(machine, shape, backend, numbers);
    if (shape.kind == Kind::cache_write) {
      result.times = machine.time([&] { step->write_cache(); }, false);
      result.relative_error = step->write_error();
      require_right(shape, row.backend, result.relative_error, 0);
      return;
    }
    step->build();
    result.extra_bytes = step->workspace_bytes();
    result.times = machine.time([&] { step->forward(); }, shape.kind == Kind::decode);
    result.relative_error = step->forward_error();
    require_right(shape, row.backend, result.relative_error, tolerance(shape.dtype));
    if (shape.kind == Kind::decode) {
      const auto settle = [&] { machine.wait(); };
      row.build_us = median_us([&] { step->build(); }, settle);
      if (machine.device().type != DeviceType::cpu) {
        row.forward_us = median_us([&] { step->forward(); }, settle);
      }
    }
  });
  if (shape.kind == Kind::naive && row.attention.failure.empty()) {
    // The libraries of the naive way may not be there.
    row.naive = measured(ErrorCode::unsupported, [&](Measurement& result) {
      result.extra_bytes = machine.naive_score_bytes(step->naive_problem());
      const std::shared_ptr<void> scores = machine.allocate(result.extra_bytes);
      result.times = machine.time([&] { step->naive(scores.get()); }, false);
      result.relative_error = step->naive_error();
      require_right(shape, "the naive way", result.relative_error, tolerance(shape.dtype));
    });
  }
  return row;
}

}  // namespace

double Row::tflops() const {
  const bool attends = shape.kind != Kind::cache_write;
  return attends && attention.times.count > 0 ? shape.flops() / attention.times.median_us / 1e6 : 0;
}

double Row::gigabytes_per_second() const {
  const double bytes = shape.kind == Kind::decode        ? shape.kv_bytes()
                       : shape.kind == Kind::cache_write ? shape.write_bytes()
                                                         : 0;
  return attention.times.count > 0 ? bytes / attention.times.median_us / 1e3 : 0;
}

double Row::naive_ratio() const {
  const bool both = naive && naive->times.count > 0 && attention.times.count > 0;
  return both ? naive->times.median_us / attention.times.median_us : 0;
}

Report run(const Options& options, const Listener& listener) {
  const DeviceType device = options.shapes.device;
  check(device == DeviceType::cpu || device == DeviceType::cuda,
        "device is {}, accepted are cpu, cuda", to_string(device));
  check(options.num_threads >= 0, "num_threads is {}, it must be at least 0", options.num_threads);
  const std::vector<Shape> shapes = make_shapes(options.shapes);
  const std::unique_ptr<Machine> machine =
      device == DeviceType::cpu ? make_cpu_machine(options.num_threads) : make_cuda_machine();
  // All choices before any work, so that a shape nobody serves is told at once.
  std::vector<AttentionBackendPtr> backends;
  backends.reserve(shapes.size());
  for (const Shape& shape : shapes) {
    backends.push_back(choose(*machine, shape, options));
  }
  const auto start = [&](std::size_t done, const Shape* shape) {
    if (listener.on_start) {
      listener.on_start(done, shapes.size(), shape);
    }
  };
  Report report;
  report.device = machine->device();
  report.machine = machine->description();
  if (std::any_of(shapes.begin(), shapes.end(),
                  [](const Shape& shape) { return shape.kind == Kind::decode; })) {
    start(0, nullptr);
    report.read_bandwidth = machine->read_bandwidth();
  }
  NumberStore numbers;
  for (std::size_t i = 0; i < shapes.size(); ++i) {
    start(i, &shapes[i]);
    report.rows.push_back(measure(*machine, shapes[i], *backends[i], numbers));
    if (listener.on_row) {
      listener.on_row(report);
    }
  }
  return report;
}

}  // namespace foveal::bench
