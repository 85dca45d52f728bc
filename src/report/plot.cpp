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
constexpr int kColours = 8;  ///< Of page()'s style.

// Of bars: room for the text behind the longest, and heights.
constexpr double kBarRight = 130.0;
constexpr double kBarTop = 30.0;  ///< Under the legend.
constexpr double kBarHeight = 14.0;
constexpr double kBarGap = 8.0;

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
  /// Instead of settle(): the range and the ticks are these.
  void set_ticks(std::vector<double> ticks) {
    low_ = ticks.front();
    high_ = ticks.back();
    ticks_ = std::move(ticks);
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
    if (!ticks_.empty()) {
      return ticks_;
    }
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
  std::vector<double> ticks_;
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

/// About: letters differ.
double text_width(std::string_view text) {
  // Bytes that begin a character.
  return 6.7 * static_cast<double>(std::count_if(text.begin(), text.end(), [](char c) {
           return (static_cast<unsigned char>(c) & 0xC0U) != 0x80U;
         }));
}

std::string axes(const Plot& plot, const Axis& x, const Axis& y) {
  std::string svg;
  for (const double tick : y.ticks()) {
    svg += line(kLeft, y.place(tick), kWidth - kRight, y.place(tick));
    svg += text(kLeft - 8.0, y.place(tick) + 4.0, "end", short_number(tick));
  }
  double free_from = 0.0;
  for (const double tick : x.ticks()) {
    svg += line(x.place(tick), kHeight - kBottom, x.place(tick), kHeight - kBottom + 4.0);
    const std::string number = plot.x_ticks.empty() ? short_number(tick) : fmt::format("{}", tick);
    const double half = text_width(number) / 2.0;
    const double middle = std::min(x.place(tick), kWidth - half - 4.0);
    if (middle - half >= free_from) {
      svg += text(middle, kHeight - kBottom + 18.0, "middle", number);
      free_from = middle + half + 4.0;
    }
  }
  svg += text(kLeft + (kWidth - kRight - kLeft) / 2.0, kHeight - 8.0, "middle", plot.x_name);
  return svg + text(8.0, 16.0, "start", plot.y_name);
}

std::string marks(const Series& series, const Axis& x, const Axis& y, std::size_t colour) {
  std::string svg;
  for (std::size_t i = 0; i < series.points.size(); ++i) {
    const auto& [px, py] = series.points[i];
    if (x.shows(px) && y.shows(py)) {
      svg += fmt::format(
          "<circle cx=\"{:.1f}\" cy=\"{:.1f}\" r=\"4\" stroke=\"var(--s{})\" fill=\"{}\" "
          "stroke-width=\"1.5\"><title>{}</title></circle>\n",
          x.place(px), y.place(py), colour % kColours,
          series.mark == Mark::ring ? "var(--paper)" : fmt::format("var(--s{})", colour % kColours),
          escaped(i < series.about.size() ? series.about[i] : series.name));
    }
  }
  return svg;
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

/// What stands above a plot of several series: in rows that end at the right.
struct Legend {
  std::string svg{};
  double more_height = 0;  ///< Of all rows but the first.
};

Legend legend(const std::vector<std::string>& names) {
  constexpr double kLineWidth = 14.0;
  constexpr double kRow = 16.0;
  const auto width = [](const std::string& name) { return kLineWidth + 8.0 + text_width(name); };
  Legend result;
  for (std::size_t first = 0; names.size() > 1 && first < names.size();) {
    // As many as there is room for beside the axis' name.
    std::size_t end = first;
    double x = kWidth - kRight;
    while (end < names.size() && (end == first || x - width(names[end]) > 2.0 * kLeft)) {
      x -= width(names[end++]) + kRow;
    }
    result.more_height = first == 0 ? 0.0 : result.more_height + kRow;
    for (x += kRow; first < end; ++first) {
      result.svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{}\" height=\"3\" fill=\"var(--s{})\"/>\n", x,
          10.0 + result.more_height, kLineWidth, first % kColours);
      result.svg += text(x + kLineWidth + 6.0, 16.0 + result.more_height, "start", names[first]);
      x += width(names[first]) + kRow;
    }
  }
  return result;
}

std::string begin_svg(double height, const std::string& title) {
  return fmt::format("<svg viewBox=\"0 0 {} {}\" role=\"img\" aria-label=\"{}\">\n", kWidth, height,
                     escaped(title));
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
  std::vector<std::string> names;
  for (const Series& series : plot.series) {
    names.push_back(series.name);
  }
  const Legend above = legend(names);
  Axis y(plot.y_log, kHeight - kBottom, kTop + above.more_height);
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
  if (plot.x_ticks.size() > 1) {
    x.set_ticks(plot.x_ticks);
  } else {
    x.settle();
  }
  y.settle();
  y.end_at_tick();
  std::string svg = begin_svg(kHeight, plot.title);
  svg += axes(plot, x, y) + above.svg;
  for (std::size_t i = 0; i < plot.series.size(); ++i) {
    svg += plot.series[i].line ? path(plot.series[i], x, y, i) : "";
    svg += plot.series[i].mark != Mark::none ? marks(plot.series[i], x, y, i) : "";
  }
  return svg + "</svg>\n";
}

std::string bars_svg(const BarChart& chart) {
  const Legend above = legend(chart.series);
  const double top = above.svg.empty() ? 0.0 : kBarTop + above.more_height;
  double left = kLeft;
  for (const BarGroup& group : chart.groups) {
    left = std::max(left, text_width(group.label) + 8.0);
  }
  Axis x(false, left, kWidth - kBarRight);
  x.cover(0.0);
  double height = top;
  for (const BarGroup& group : chart.groups) {
    for (const Bar& bar : group.bars) {
      x.cover(bar.value);
    }
    height += kBarHeight * static_cast<double>(group.bars.size()) + kBarGap;
  }
  x.settle();
  x.end_at_tick();
  std::string svg = begin_svg(height + kBottom, chart.title);
  svg += above.svg;
  for (const double tick : x.ticks()) {
    svg += line(x.place(tick), top, x.place(tick), height);
    svg += text(x.place(tick), height + 16.0, "middle", short_number(tick));
  }
  svg += text((left + kWidth - kBarRight) / 2.0, height + 36.0, "middle", chart.x_name);
  double y = top;
  for (const BarGroup& group : chart.groups) {
    const double bars = kBarHeight * static_cast<double>(group.bars.size());
    svg += text(left - 8.0, y + bars / 2.0 + 4.0, "end", group.label);
    for (std::size_t i = 0; i < group.bars.size(); ++i, y += kBarHeight) {
      const Bar& bar = group.bars[i];
      const double end = x.shows(bar.value) ? x.place(bar.value) : left;
      svg += fmt::format(
          "<rect x=\"{:.1f}\" y=\"{:.1f}\" width=\"{:.1f}\" height=\"{:.1f}\" "
          "fill=\"var(--s{})\"/>\n",
          left, y + 1.0, end - left, kBarHeight - 2.0, i % kColours);
      svg += text(end + 6.0, y + kBarHeight - 3.0, "start", bar.text);
    }
    y += kBarGap;
  }
  return svg + "</svg>\n";
}

}  // namespace foveal::report
