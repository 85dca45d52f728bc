#include "replay/statistics.h"

#include <algorithm>
#include <cmath>
#include <span>

namespace foveal::replay {
namespace {

/// As many as a plot has room for.
constexpr double kMaxIntervals = 400.0;

/// The smallest of the sorted numbers that at least `fraction` of them do not exceed.
double percentile(const std::vector<double>& sorted, double fraction) {
  const auto rank =
      static_cast<std::size_t>(std::ceil(fraction * static_cast<double>(sorted.size())));
  return sorted[std::max<std::size_t>(rank, 1) - 1];
}

Latencies latencies_of(std::vector<double> seconds) {
  Latencies latencies;
  if (seconds.empty()) {
    return latencies;
  }
  std::ranges::sort(seconds);
  latencies.steps = std::ssize(seconds);
  latencies.p50_ms = 1e3 * percentile(seconds, 0.5);
  latencies.p90_ms = 1e3 * percentile(seconds, 0.9);
  latencies.p99_ms = 1e3 * percentile(seconds, 0.99);
  latencies.max_ms = 1e3 * seconds.back();
  for (const double one : seconds) {
    latencies.seconds += one;
  }
  return latencies;
}

Interval interval_of(std::span<const StepRecord> records) {
  Interval interval;
  interval.begin_s = records.front().begin_s;
  interval.end_s = records.back().begin_s + records.back().seconds;
  interval.steps = std::ssize(records);
  std::vector<double> seconds;
  for (const StepRecord& record : records) {
    seconds.push_back(record.seconds);
    interval.blocks_mean +=
        static_cast<double>(record.blocks) / static_cast<double>(records.size());
    interval.blocks_max = std::max(interval.blocks_max, record.blocks);
    interval.tokens += record.tokens;
    interval.running_max = std::max(interval.running_max, record.requests);
  }
  const Latencies latencies = latencies_of(std::move(seconds));
  interval.latency_p50_ms = latencies.p50_ms;
  interval.latency_max_ms = latencies.max_ms;
  return interval;
}

}  // namespace

void Statistics::summarize(Report& report) const {
  std::vector<double> all;
  std::vector<double> decode;
  std::vector<double> prefill;
  for (const StepRecord& record : records_) {
    all.push_back(record.seconds);
    (record.decode ? decode : prefill).push_back(record.seconds);
    report.kv_bytes += record.kv_bytes;
    report.decode_kv_bytes += record.decode ? record.kv_bytes : 0.0;
  }
  report.all = latencies_of(std::move(all));
  report.decode = latencies_of(std::move(decode));
  report.prefill = latencies_of(std::move(prefill));

  // Steps belong to the stretch of time in which they begin; those without a step make no interval.
  const auto stretch = [&](const StepRecord& record) {
    return std::floor(record.begin_s / report.clock_seconds * kMaxIntervals);
  };
  for (std::size_t begin = 0; begin < records_.size();) {
    std::size_t end = begin + 1;
    while (end < records_.size() && stretch(records_[end]) == stretch(records_[begin])) {
      ++end;
    }
    report.timeline.push_back(interval_of(std::span(records_).subspan(begin, end - begin)));
    begin = end;
  }
}

}  // namespace foveal::replay
