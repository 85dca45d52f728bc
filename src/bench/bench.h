#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <string>
#include <string_view>
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
  /// The same step another way. naive: the naive way; cascade: without a cascade.
  std::optional<Measurement> other{};
  // Of decodes: what the host spends on a step and on a layer, medians. On the CPU forward is the
  // row itself.
  std::optional<double> build_us{};
  std::optional<double> forward_us{};

  /// 0 where there are no times.
  double tflops() const;
  /// Decodes: keys and values over the time. Cache write: read and written.
  double gigabytes_per_second() const;
  /// The other way's time over attention's; 0 where either has none.
  double other_ratio() const;
};

/// What no step on this machine can beat, measured in the same run.
struct Ceilings {
  double read_gb_per_s = 0;
  /// Of products in the rows' dtype. Without, why not.
  std::optional<ProductRate> products{};
  std::string no_products{};
};

/// Where a row stands under the ceilings: its products at their rate, or the bytes it must move at
/// theirs, whichever takes longer.
struct Roofline {
  bool compute_bound = false;
  double bound_us = 0;
  double fraction = 0;  ///< Of the bound, that the median reaches.
};

struct Report {
  Device device{};
  std::string machine{};
  Ceilings ceilings{};
  std::vector<std::string> left_out{};  ///< Kinds that nobody serves here, and why.
  std::vector<Row> rows{};
};

/// Nothing for a row without times, and where the rate of products that it needs is not known.
std::optional<Roofline> roofline(const Ceilings& ceilings, const Row& row);

struct Listener {
  /// Before each row, and with `shape` null before the ceilings are measured.
  std::function<void(std::size_t done, std::size_t total, const Shape* shape)> on_start{};
  /// With the report so far, whose last row is new.
  std::function<void(const Report&)> on_row{};
};

/// Throws what make_shapes and select_backend throw, and device when a sampled row is wrong. A kind
/// that no backend serves is left out where no kinds were asked for.
Report run(const Options& options, const Listener& listener = {});

// For people. A table's header stands above the rows of one kind.
std::string header_text(const Report& report);
std::string table_header(Kind kind);
std::string table_line(const Report& report, const Row& row);

/// docs/bench.md lists the fields.
std::string to_json(const Report& report);

/// What to_json gave, with peers' times where a script added them, as a page for people. Throws
/// invalid_argument for other JSON, naming what is missing.
std::string to_html(std::string_view json);

}  // namespace foveal::bench
