#pragma once

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

namespace foveal::report {

/// What stands at each point.
enum class Mark : std::uint8_t { none, dot, ring };

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  ///< x, y; in order of x.
  Mark mark = Mark::none;
  bool line = true;                     ///< From point to point.
  std::vector<std::string> about = {};  ///< Of each mark, shown where one points at it; or empty.
};

/// Lines and marks over a plane. Points that are not finite, or not positive on a logarithmic axis,
/// are left out.
struct Plot {
  std::string title{};
  std::string x_name{};
  std::string y_name{};
  std::vector<Series> series{};
  bool x_log = false;
  bool y_log = false;  ///< Else the axis begins at 0.
  /// Where x has its ticks, from end to end, rather than at round numbers. In order, or empty.
  std::vector<double> x_ticks{};
};

/// One bar, and what stands behind its end; or, where `value` is not finite, that alone.
struct Bar {
  double value = 0;
  std::string text{};
};

/// What is compared in one place: a bar for each series.
struct BarGroup {
  std::string label{};
  std::vector<Bar> bars{};
};

/// Horizontal bars from 0 on, in groups with a label each.
struct BarChart {
  std::string title{};
  std::string x_name{};
  std::vector<std::string> series{};
  std::vector<BarGroup> groups{};
};

/// As an <svg> element with axes, ticks at round numbers and, for several lines, a legend; in the
/// colours of page() (html.h).
std::string svg(const Plot& plot);
std::string bars_svg(const BarChart& chart);

/// 1234567 as "1.23M": short, for ticks and figures.
std::string short_number(double number);

}  // namespace foveal::report
