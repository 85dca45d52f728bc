#include "report/plot.h"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <cstddef>

#include "report/html.h"

namespace foveal::report {
namespace {

constexpr double kWidth = 860.0;
constexpr double kHeight = 300.0;
constexpr double kLeft = 64.0;
constexpr double kRight = 16.0;
constexpr double kTop = 40.0;
constexpr double kBottom = 44.0;
constexpr int kColours = 6;  ///< Of page()'s style.

/// One axis: numbers to places, and where ticks stand.
class Axis {
 public:
  Axis(bool log, double from, double to) : log_(log), from_(from), to_(to) {}

  bool shows(double number) const { return std::isfinite(number) && (!log_ || number > 0.0); }
  void cover(double number) {
    if (shows(number)) {
      low_ = std::min(low_, number);
      high_ = std::max(high_, number);
    }
  }
  /// After all numbers: widens the range to round ends.
  void settle() {
    if (low_ > high_) {
      low_ = log_ ? 1.0 : 0.0;
      high_ = log_ ? 10.0 : 1.0;
    }
    if (log_) {
      low_ = std::pow(10.0, std::floor(std::log10(low_)));
      high_ = std::pow(10.0, std::ceil(std::log10(high_)));
      high_ = high_ > low_ ? high_ : 10.0 * low_;
      return;
    }
    high_ = high_ > low_ ? high_ : low_ + 1.0;
    // 1, 2 or 5 times a power of ten, for up to nine ticks.
    const double rough = (high_ - low_) / 8.0;
    const double power = std::pow(10.0, std::floor(std::log10(rough)));
    const double digit = rough / power;
    step_ = power * (digit > 5.0 ? 10.0 : digit > 2.0 ? 5.0 : digit > 1.0 ? 2.0 : 1.0);
  }
  void end_at_tick() {
    if (!log_) {
      high_ = step_ * std::ceil(high_ / step_ - 1e-9);
    }
  }
  double place(double number) const {
    const double share =
        log_ ? std::log(number / low_) / std::log(high_ / low_) : (number - low_) / (high_ - low_);
    return from_ + share * (to_ - from_);
  }
  std::vector<double> ticks() const {
    std::vector<double> ticks;
    if (log_) {
      const auto decades = std::lround(std::log10(high_ / low_));
      for (long i = 0; i <= decades; ++i) {
        ticks.push_back(low_ * std::pow(10.0, static_cast<double>(i)));
      }
      return ticks;
    }
    const auto last = std::lround(std::floor(high_ / step_ + 1e-9));
    for (long i = std::lround(std::ceil(low_ / step_ - 1e-9)); i <= last; ++i) {
      ticks.push_back(static_cast<double>(i) * step_);
    }
    return ticks;
  }

 private:
  bool log_;
  double from_;
  double to_;
  double low_ = HUGE_VAL;
  double high_ = -HUGE_VAL;
  double step_ = 1.0;
};

std::string line(double x1, double y1, double x2, double y2) {
  return fmt::format(
      "<line x1=\"{:.1f}\" y1=\"{:.1f}\" x2=\"{:.1f}\" y2=\"{:.1f}\" stroke=\"var(--line)\"/>\n",
      x1, y1, x2, y2);
}

std::string text(double x, double y, std::string_view anchor, std::string_view content) {
  return fmt::format("<text x=\"{:.1f}\" y=\"{:.1f}\" text-anchor=\"{}\">{}</text>\n", x, y, anchor,
                     escaped(content));
}

std::string axes(const Plot& plot, const Axis& x, const Axis& y) {
  std::string svg;
  for (const double tick : y.ticks()) {
    svg += line(kLeft, y.place(tick), kWidth - kRight, y.place(tick));
    svg += text(kLeft - 8.0, y.place(tick) + 4.0, "end", short_number(tick));
  }
  for (const double tick : x.ticks()) {
    svg += line(x.place(tick), kHeight - kBottom, x.place(tick), kHeight - kBottom + 4.0);
    svg += text(x.place(tick), kHeight - kBottom + 18.0, "middle", short_number(tick));
  }
  svg += text(kLeft + (kWidth - kRight - kLeft) / 2.0, kHeight - 8.0, "middle", plot.x_name);
  return svg + text(8.0, 16.0, "start", plot.y_name);
}

std::string path(const Series& series, const Axis& x, const Axis& y, std::size_t colour) {
  std::string points;
  for (const auto& [px, py] : series.points) {
    if (x.shows(px) && y.shows(py)) {
      points += fmt::format("{:.1f},{:.1f} ", x.place(px), y.place(py));
    }
  }
  return fmt::format(
      "<polyline points=\"{}\" fill=\"none\" stroke=\"var(--s{})\" stroke-width=\"1.5\" "
      "stroke-linejoin=\"round\"><title>{}</title></polyline>\n",
      points, colour % kColours, escaped(series.name));
}

/// From the right, above the lines.
std::string legend(const Plot& plot) {
  std::string svg;
  double x = kWidth - kRight;
  for (std::size_t i = plot.series.size(); i-- > 0;) {
    const std::string& name = plot.series[i].name;
    svg += text(x, 16.0, "end", name);
    x -= 7.5 * static_cast<double>(name.size()) + 8.0;
    svg +=
        fmt::format("<rect x=\"{:.1f}\" y=\"10\" width=\"14\" height=\"3\" fill=\"var(--s{})\"/>\n",
                    x - 14.0, i % kColours);
    x -= 32.0;
  }
  return svg;
}

}  // namespace

std::string short_number(double number) {
  constexpr std::pair<double, const char*> kUnits[] = {
      {1e12, "T"}, {1e9, "G"}, {1e6, "M"}, {1e3, "k"}};
  for (const auto& [size, unit] : kUnits) {
    if (std::abs(number) >= 0.9995 * size) {
      return fmt::format("{:.3g}{}", number / size, unit);
    }
  }
  return fmt::format("{:.3g}", std::abs(number) < 1e-12 ? 0.0 : number);
}

std::string svg(const Plot& plot) {
  Axis x(plot.x_log, kLeft, kWidth - kRight);
  Axis y(plot.y_log, kHeight - kBottom, kTop);
  if (!plot.y_log) {
    y.cover(0.0);
  }
  for (const Series& series : plot.series) {
    for (const auto& [px, py] : series.points) {
      if (x.shows(px) && y.shows(py)) {
        x.cover(px);
        y.cover(py);
      }
    }
  }
  x.settle();
  y.settle();
  y.end_at_tick();
  std::string svg = fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n",
                                kWidth, kHeight, escaped(plot.title));
  svg += axes(plot, x, y) + (plot.series.size() > 1 ? legend(plot) : "");
  for (std::size_t i = 0; i < plot.series.size(); ++i) {
    svg += path(plot.series[i], x, y, i);
  }
  return svg + "</svg>\n";
}

}  // namespace foveal::report
