#include "bench/bench.h"

#include <fmt/format.h>

#include <algorithm>
#include <chrono>

#include "bench/step.h"
#include "core/check.h"
#include "foveal/selector.h"

namespace foveal::bench {
namespace {

SelectorConfig selector_config(const Machine& machine, const Shape& shape, const Options& options) {
  SelectorConfig config =
      SelectorConfig::from(shape.spec(), machine.device().type, machine.compute_capability());
  config.backend = options.backend;
  config.use_non_causal = !shape.causal;
  if (shape.block_size > 0) {
    config.block_size = shape.block_size;
  }
  if (machine.device().type != DeviceType::cpu) {
    // Times come from graphs.
    config.needs_graphs =
        shape.decodes_only() ? GraphSupport::uniform_single_token_decode : GraphSupport::always;
  }
  return config;
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

/// The shapes that are run and who serves each.
struct Work {
  std::vector<Shape> shapes{};
  std::vector<AttentionBackendPtr> backends{};
  std::vector<std::string> left_out{};
};

/// All choices before any work, so that a shape nobody serves is told at once.
Work choose_all(const Machine& machine, const Options& options, const std::vector<Shape>& shapes) {
  Work work;
  for (auto kind = shapes.begin(); kind != shapes.end();) {
    const auto end = std::find_if(kind, shapes.end(),
                                  [&](const Shape& shape) { return shape.kind != kind->kind; });
    const auto config = [&](const Shape& shape) {
      return selector_config(machine, shape, options);
    };
    const auto refused = std::find_if(kind, end, [&](const Shape& shape) {
      return explain_selection(config(shape)).chosen.empty();
    });
    // select_backend throws for what was asked for, and for the last kind that is left.
    if (refused != end && options.shapes.kinds.empty() &&
        !(work.shapes.empty() && end == shapes.end())) {
      work.left_out.push_back(
          fmt::format("{}: {}", to_string(kind->kind),
                      options.backend.empty()
                          ? fmt::format("no backend of {} serves it", to_string(machine.device()))
                          : fmt::format("{} does not serve it", options.backend)));
    } else {
      for (auto shape = kind; shape != end; ++shape) {
        work.backends.push_back(select_backend(config(*shape)));
        work.shapes.push_back(*shape);
      }
    }
    kind = end;
  }
  return work;
}

Ceilings measure_ceilings(Machine& machine, DType dtype) {
  Ceilings ceilings;
  ceilings.read_gb_per_s = machine.read_bandwidth();
  try {
    ceilings.products = machine.product_rate(dtype);
  } catch (const Error& error) {
    if (error.code() != ErrorCode::unsupported) {
      throw;
    }
    ceilings.no_products = error.what();
  }
  return ceilings;
}

Row measure(Machine& machine, const Shape& shape, const AttentionBackend& backend,
            NumberStore& numbers) {
  Row row;
  row.shape = shape;
  row.backend = backend.name();
  std::unique_ptr<Step> step;
  const auto attend = [&](Measurement& result, std::int64_t common_prefix_len) {
    step->build(common_prefix_len);
    result.extra_bytes = step->workspace_bytes();
    result.times =
        machine.time([&] { step->forward(); }, shape.decodes_only() || shape.kind == Kind::mixed);
    result.relative_error = step->forward_error();
    require_right(shape, row.backend, result.relative_error, tolerance(shape.dtype));
  };
  row.attention = measured(ErrorCode::out_of_memory, [&](Measurement& result) {
    step = std::make_unique<Step>(machine, shape, backend, numbers);
    if (shape.kind == Kind::cache_write) {
      result.times = machine.time([&] { step->write_cache(); }, false);
      result.relative_error = step->write_error();
      require_right(shape, row.backend, result.relative_error, 0);
      return;
    }
    attend(result, shape.prefix_len);
    if (shape.decodes_only()) {
      const auto settle = [&] { machine.wait(); };
      row.build_us = median_us([&] { step->build(shape.prefix_len); }, settle);
      if (machine.device().type != DeviceType::cpu) {
        row.forward_us = median_us([&] { step->forward(); }, settle);
      }
    }
  });
  if (shape.kind == Kind::cascade && row.attention.failure.empty()) {
    row.other = measured(ErrorCode::out_of_memory, [&](Measurement& result) {
      step->forget_output();
      attend(result, 0);
    });
  }
  if (shape.kind == Kind::naive && row.attention.failure.empty()) {
    // The libraries of the naive way may not be there.
    row.other = measured(ErrorCode::unsupported, [&](Measurement& result) {
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
  return attention.times.count > 0 ? shape.flops() / attention.times.median_us / 1e6 : 0;
}

double Row::gigabytes_per_second() const {
  const double bytes = shape.decodes_only()              ? shape.kv_bytes()
                       : shape.kind == Kind::cache_write ? shape.least_bytes()
                                                         : 0;
  return attention.times.count > 0 ? bytes / attention.times.median_us / 1e3 : 0;
}

double Row::other_ratio() const {
  const bool both = other && other->times.count > 0 && attention.times.count > 0;
  return both ? other->times.median_us / attention.times.median_us : 0;
}

std::optional<Roofline> roofline(const Ceilings& ceilings, const Row& row) {
  const double flops = row.shape.flops();
  if (row.attention.times.count == 0 || (flops > 0 && !ceilings.products)) {
    return std::nullopt;
  }
  const double compute_us = flops > 0 ? flops / ceilings.products->tflops / 1e6 : 0;
  const double memory_us = row.shape.least_bytes() / ceilings.read_gb_per_s / 1e3;
  const double bound_us = std::max(compute_us, memory_us);
  return Roofline{.compute_bound = compute_us > memory_us,
                  .bound_us = bound_us,
                  .fraction = bound_us / row.attention.times.median_us};
}

Report run(const Options& options, const Listener& listener) {
  const DeviceType device = options.shapes.device;
  check(device == DeviceType::cpu || device == DeviceType::cuda,
        "device is {}, accepted are cpu, cuda", to_string(device));
  check(options.num_threads >= 0, "num_threads is {}, it must be at least 0", options.num_threads);
  const std::vector<Shape> shapes = make_shapes(options.shapes);
  const std::unique_ptr<Machine> machine =
      device == DeviceType::cpu ? make_cpu_machine(options.num_threads) : make_cuda_machine();
  const Work work = choose_all(*machine, options, shapes);
  const auto start = [&](std::size_t done, const Shape* shape) {
    if (listener.on_start) {
      listener.on_start(done, work.shapes.size(), shape);
    }
  };
  Report report;
  report.device = machine->device();
  report.machine = machine->description();
  report.left_out = work.left_out;
  start(0, nullptr);
  report.ceilings = measure_ceilings(*machine, work.shapes.front().dtype);
  NumberStore numbers;
  for (std::size_t i = 0; i < work.shapes.size(); ++i) {
    start(i, &work.shapes[i]);
    report.rows.push_back(measure(*machine, work.shapes[i], *work.backends[i], numbers));
    if (listener.on_row) {
      listener.on_row(report);
    }
  }
  return report;
}

}  // namespace foveal::bench
