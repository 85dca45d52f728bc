#pragma once

#include <string>
#include <utility>
#include <vector>

namespace foveal::report {

struct Series {
  std::string name;
  std::vector<std::pair<double, double>> points;  ///< x, y; in order of x.
};

/// Lines over a plane. Points that are not finite, or not positive on a logarithmic axis, are left
/// out.
struct Plot {
  std::string title{};
  std::string x_name{};
  std::string y_name{};
  std::vector<Series> series{};
  bool x_log = false;
  bool y_log = false;  ///< Else the axis begins at 0.
};

/// As an <svg> element with axes, ticks at round numbers and, for several lines, a legend; in the
/// colours of page() (html.h).
std::string svg(const Plot& plot);

/// 1234567 as "1.23M": short, for ticks and figures.
std::string short_number(double number);

}  // namespace foveal::report
