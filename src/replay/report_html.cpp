#include <fmt/format.h>

#include <filesystem>

#include "foveal/version.h"
#include "replay/replay.h"
#include "replay/report_text.h"
#include "report/html.h"
#include "report/plot.h"

namespace foveal::replay {
namespace {

namespace page = foveal::report;
using page::short_number;

std::vector<std::string> latency_row(const std::string& name, const Latencies& latencies) {
  std::vector<std::string> row = {name, fmt::format("{}", latencies.steps)};
  for (const double ms : {latencies.p50_ms, latencies.p90_ms, latencies.p99_ms, latencies.max_ms}) {
    row.push_back(fmt::format("{:.3f}", ms));
  }
  return row;
}

/// One line over the intervals, a point in the middle of each.
template <typename Value>
page::Series over_time(const Report& report, std::string name, const Value& value) {
  page::Series series{std::move(name), {}};
  for (const Interval& interval : report.timeline) {
    series.points.emplace_back((interval.begin_s + interval.end_s) / 2.0, value(interval));
  }
  return series;
}

std::string plots(const Report& report) {
  const char* const clock = "seconds of the replay's clock";
  std::string html = fmt::format("<h2>Blocks in use</h2>\n<p>Of {}; {} at most.</p>\n",
                                 report.options.num_blocks, report.peak_blocks);
  html += page::svg(
      {.title = "Blocks in use over time",
       .x_name = clock,
       .y_name = "blocks",
       .series = {over_time(report, "most",
                            [](const Interval& i) { return static_cast<double>(i.blocks_max); }),
                  over_time(report, "mean", [](const Interval& i) { return i.blocks_mean; })}});
  html += "<h2>Step latency</h2>\n";
  html += page::svg(
      {.title = "Step latency over time",
       .x_name = clock,
       .y_name = "ms",
       .series = {over_time(report, "slowest", [](const Interval& i) { return i.latency_max_ms; }),
                  over_time(report, "median", [](const Interval& i) { return i.latency_p50_ms; })},
       .y_log = true});
  html += "<h2>Requests in a step</h2>\n";
  html += page::svg({.title = "Requests in a step over time",
                     .x_name = clock,
                     .y_name = "requests",
                     .series = {over_time(report, "most", [](const Interval& i) {
                       return static_cast<double>(i.running_max);
                     })}});
  return html;
}

}  // namespace

std::string to_html(const Report& report) {
  const Options& options = report.options;
  std::string body = fmt::format(
      "<p>{}<br>foveal {} on {}: {}<br>{}</p>\n", page::escaped(setting_text(report)), version(),
      to_string(options.device), page::escaped(report.machine), page::escaped(report.selection));
  body += page::figures(
      {{short_number(report.tokens_per_second()), "tokens/s computed"},
       {short_number(report.generated_per_second()), "tokens/s generated"},
       {fmt::format("{:.2f}", report.decode_kv_gb_per_s()), "GB/s of keys and values, decode"},
       {fmt::format("{:.1f} %", 100.0 * report.hit_rate()), "prefix-cache hit rate"},
       {fmt::format("{}", report.rows_checked), "rows checked, 0 wrong"}});
  body += page::table(
      {{"step latency", false}, {"steps"}, {"p50 ms"}, {"p90 ms"}, {"p99 ms"}, {"max ms"}},
      {latency_row("all", report.all), latency_row("decode only", report.decode),
       latency_row("with prompts", report.prefill)});
  body += plots(report);
  body += "<h2>All figures</h2>\n";
  body += page::table(
      {{"", false}, {""}},
      {{"trace", fmt::format("{} ({}), {} requests, {}", report.trace, to_string(report.format),
                             report.requests, arrivals_text(options))},
       {"prompt tokens", fmt::format("{}", report.prompt_tokens)},
       {"of them in the prefix cache", fmt::format("{}", report.cached_tokens)},
       {"tokens generated", fmt::format("{}", report.generated_tokens)},
       {"tokens computed", fmt::format("{}", report.computed_tokens)},
       {"preemptions", fmt::format("{}", report.preemptions)},
       {"KV cache", fmt::format("{} blocks of {} tokens, {:.2f} GiB", options.num_blocks,
                                options.block_size, options.pool_gib)},
       {"largest step", fmt::format("{} requests, {} tokens", options.max_num_seqs,
                                    options.max_num_batched_tokens)},
       {"KV read", fmt::format("{:.2f} GB/s, decode steps {:.2f}", report.kv_gb_per_s(),
                               report.decode_kv_gb_per_s())},
       {"seconds in steps", fmt::format("{:.1f}", report.all.seconds)},
       {"seconds on the clock", fmt::format("{:.1f}", report.clock_seconds)},
       {"seconds in all", fmt::format("{:.1f}", report.wall_seconds)}});
  return page::page(fmt::format("Replay of {} requests of {}", report.requests,
                                std::filesystem::path(report.trace).filename().string()),
                    body);
}

}  // namespace foveal::replay
