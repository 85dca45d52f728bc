#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "bench/machine.h"
#include "bench/shape.h"

// Times a backend over shapes of steps, and checks samples of what it computes: no time is reported
// for wrong numbers. docs/bench.md says how.
namespace foveal::bench {

struct Options {
  ShapeOptions shapes{};
  std::string backend{};  ///< Empty: the automatic choice.
  int num_threads = 0;    ///< CPU; 0: as many as the machine has.
};

/// One way through a shape.
struct Measurement {
  std::string failure{};  ///< Why there are no times (memory did not suffice), or empty.
  Times times{};
  /// Memory beside inputs and output: workspace, or the naive way's scores.
  std::int64_t extra_bytes = 0;
  double relative_error = 0;  ///< The largest of the sampled rows.
};

struct Row {
  Shape shape{};
  std::string backend{};
  Measurement attention{};
  std::optional<Measurement> naive{};
  // Of decode: what the host spends on a step and on a layer, medians. On the CPU forward is the
  // row itself.
  std::optional<double> build_us{};
  std::optional<double> forward_us{};

  /// 0 where there are no times.
  double tflops() const;
  /// Decode: keys and values over the time. Cache write: read and written.
  double gigabytes_per_second() const;
  /// Naive over attention; 0 where either has no times.
  double naive_ratio() const;
};

struct Report {
  Device device{};
  std::string machine{};
  std::optional<double> read_bandwidth{};  ///< GB/s, when there are decode rows.
  std::vector<Row> rows{};
};

struct Listener {
  /// Before each row, and with `shape` null before the bandwidth is measured.
  std::function<void(std::size_t done, std::size_t total, const Shape* shape)> on_start{};
  /// With the report so far, whose last row is new.
  std::function<void(const Report&)> on_row{};
};

/// Throws what make_shapes and select_backend throw, and device when a sampled row is wrong.
Report run(const Options& options, const Listener& listener = {});

// For people. A table's header stands above the rows of one kind.
std::string header_text(const Report& report);
std::string table_header(Kind kind);
std::string table_line(const Report& report, const Row& row);

/// docs/bench.md lists the fields.
std::string to_json(const Report& report);

}  // namespace foveal::bench
