#include <fmt/format.h>

#include <nlohmann/json.hpp>

#include "foveal/version.h"
#include "replay/replay.h"
#include "replay/report_text.h"

namespace foveal::replay {
namespace {

using Json = nlohmann::ordered_json;

std::string dtypes(const Options& options) {
  std::string text(to_string(*options.dtype));
  if (options.kv_cache_dtype) {
    text += fmt::format(", KV cache {}", to_string(*options.kv_cache_dtype));
  }
  return text;
}

std::string latency_line(std::string_view name, const Latencies& latencies) {
  return fmt::format("{:<22} {:>9} {:>11.3f} {:>11.3f} {:>11.3f} {:>11.3f}\n", name,
                     latencies.steps, latencies.p50_ms, latencies.p90_ms, latencies.p99_ms,
                     latencies.max_ms);
}

Json json_of(const Latencies& latencies) {
  return {{"steps", latencies.steps},   {"p50_ms", latencies.p50_ms},
          {"p90_ms", latencies.p90_ms}, {"p99_ms", latencies.p99_ms},
          {"max_ms", latencies.max_ms}, {"seconds", latencies.seconds}};
}

Json json_of(const Interval& interval) {
  return {{"begin_s", interval.begin_s},
          {"end_s", interval.end_s},
          {"steps", interval.steps},
          {"latency_p50_ms", interval.latency_p50_ms},
          {"latency_max_ms", interval.latency_max_ms},
          {"blocks_mean", interval.blocks_mean},
          {"blocks_max", interval.blocks_max},
          {"tokens", interval.tokens},
          {"running_max", interval.running_max}};
}

}  // namespace

std::string arrivals_text(const Options& options) {
  return options.speed > 0.0 ? fmt::format("at {:g} times the trace's speed", options.speed)
                             : "in order of arrival, as fast as they can be served";
}

std::string setting_text(const Report& report) {
  const Options& options = report.options;
  return fmt::format("{}, {} {}: {}; {}", options.geometry.name, options.num_layers,
                     options.num_layers == 1 ? "layer" : "layers", options.geometry.about,
                     dtypes(options));
}

std::string to_text(const Report& report) {
  const Options& options = report.options;
  std::string text =
      fmt::format("foveal {} on {}: {}\n{}\n{}", version(), to_string(options.device),
                  report.machine, setting_text(report), report.selection);
  text += fmt::format(
      "KV cache: {} blocks of {} tokens, {:.2f} GiB; steps of up to {} requests "
      "and {} tokens\n\n",
      options.num_blocks, options.block_size, options.pool_gib, options.max_num_seqs,
      options.max_num_batched_tokens);
  text += fmt::format("{}: {} requests ({} trace), {}\n", report.trace, report.requests,
                      to_string(report.format), arrivals_text(options));
  text += fmt::format("{} prompt tokens, {} of them found in the prefix cache: hit rate {:.2f} %\n",
                      report.prompt_tokens, report.cached_tokens, 100.0 * report.hit_rate());
  text += fmt::format("{} tokens generated, {} computed in all; preemptions: {}\n",
                      report.generated_tokens, report.computed_tokens, report.preemptions);
  text +=
      fmt::format("blocks in use: at most {} of {}\n\n", report.peak_blocks, options.num_blocks);
  text += fmt::format("{:<22} {:>9} {:>11} {:>11} {:>11} {:>11}\n", "step latency", "steps",
                      "p50 ms", "p90", "p99", "max");
  text += latency_line("all", report.all);
  text += latency_line("decode only", report.decode);
  text += latency_line("with prompts", report.prefill);
  text += fmt::format(
      "\n{:.1f} s in steps: {:.0f} tokens/s computed, {:.0f} tokens/s generated\n"
      "KV read: {:.2f} GB/s; {:.2f} GB/s in decode steps\n",
      report.all.seconds, report.tokens_per_second(), report.generated_per_second(),
      report.kv_gb_per_s(), report.decode_kv_gb_per_s());
  if (options.speed > 0.0) {
    text +=
        fmt::format("{:.1f} s on the clock, waiting for requests included\n", report.clock_seconds);
  }
  text +=
      options.check_every > 0
          ? fmt::format("{} rows checked against the oracle, 0 mismatches\n", report.rows_checked)
          : "no row was checked\n";
  return text + fmt::format("{:.1f} s in all\n", report.wall_seconds);
}

std::string to_json(const Report& report) {
  const Options& options = report.options;
  Json json{{"version", version()},
            {"device", to_string(options.device)},
            {"machine", report.machine},
            {"trace", report.trace},
            {"trace_format", to_string(report.format)},
            {"geometry", options.geometry.name},
            {"num_layers", options.num_layers},
            {"dtype", to_string(*options.dtype)},
            {"kv_cache_dtype", to_string(options.kv_cache_dtype.value_or(*options.dtype))},
            {"backend", report.backends},
            {"selection", report.selection},
            {"block_size", options.block_size},
            {"num_blocks", options.num_blocks},
            {"block_bytes", report.block_bytes},
            {"max_num_seqs", options.max_num_seqs},
            {"max_num_batched_tokens", options.max_num_batched_tokens},
            {"speed", options.speed},
            {"requests", report.requests},
            {"prompt_tokens", report.prompt_tokens},
            {"cached_tokens", report.cached_tokens},
            {"hit_rate", report.hit_rate()},
            {"generated_tokens", report.generated_tokens},
            {"computed_tokens", report.computed_tokens},
            {"preemptions", report.preemptions},
            {"peak_blocks", report.peak_blocks},
            {"rows_checked", report.rows_checked},
            {"mismatches", 0},
            {"step_latency",
             {{"all", json_of(report.all)},
              {"decode", json_of(report.decode)},
              {"prefill", json_of(report.prefill)}}},
            {"tokens_per_s", report.tokens_per_second()},
            {"generated_tokens_per_s", report.generated_per_second()},
            {"kv_gb_per_s", report.kv_gb_per_s()},
            {"decode_kv_gb_per_s", report.decode_kv_gb_per_s()},
            {"clock_s", report.clock_seconds},
            {"wall_s", report.wall_seconds},
            {"timeline", Json::array()}};
  for (const Interval& interval : report.timeline) {
    json["timeline"].push_back(json_of(interval));
  }
  return json.dump(2);
}

}  // namespace foveal::replay
