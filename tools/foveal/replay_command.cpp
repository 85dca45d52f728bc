#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <chrono>
#include <limits>
#include <memory>

#include "foveal/commands.h"
#include "replay/geometry.h"
#include "replay/replay.h"

namespace foveal::tools {
namespace {

struct ReplayOptions {
  std::string trace;
  std::string geometry = "llama-3-8b";
  std::string device = "cpu";
  std::string dtype;
  std::string kv_cache_dtype;
  std::string json;
  std::string html;
  replay::Options replay;
};

/// On a terminal, ten times a second.
class ReplayProgress {
 public:
  void show(const replay::Progress& progress) {
    const auto now = std::chrono::steady_clock::now();
    if (now - shown_ < std::chrono::milliseconds(100)) {
      return;
    }
    shown_ = now;
    constexpr std::int64_t kWidth = 20;
    const std::int64_t done = progress.requests_done * kWidth / progress.requests;
    line_.show(fmt::format("[{:#<{}}{:{}}] {} of {} requests, {} steps, {} tokens, {} blocks", "",
                           done, "", kWidth - done, progress.requests_done, progress.requests,
                           progress.steps, progress.computed_tokens, progress.blocks));
  }
  void clear() const { line_.clear(); }

 private:
  ProgressLine line_;
  std::chrono::steady_clock::time_point shown_{};
};

void run_replay(ReplayOptions& options) {
  replay::Options& settings = options.replay;
  settings.geometry = replay::find_geometry(options.geometry);
  settings.device = parse_device("--device", options.device);
  if (!options.dtype.empty()) {
    settings.dtype = parse_dtype("--dtype", options.dtype);
  }
  if (!options.kv_cache_dtype.empty() && options.kv_cache_dtype != "auto") {
    settings.kv_cache_dtype = parse_dtype("--kv-cache-dtype", options.kv_cache_dtype);
  }
  require_different_files("--json", options.json, "the trace", options.trace);
  require_different_files("--html", options.html, "the trace", options.trace);
  require_different_files("--html", options.html, "--json", options.json);
  if (!options.json.empty()) {
    require_writable("--json", options.json);
  }
  if (!options.html.empty()) {
    require_writable("--html", options.html);
  }
  const replay::Trace trace = replay::read_trace(options.trace);
  ReplayProgress progress;
  replay::Report report;
  try {
    report = replay::run(trace, settings, [&](const auto& now) { progress.show(now); });
  } catch (...) {
    progress.clear();
    throw;
  }
  progress.clear();
  fmt::print("{}", to_text(report));
  if (!options.json.empty()) {
    write_file("--json", options.json, to_json(report));
  }
  if (!options.html.empty()) {
    write_file("--html", options.html, to_html(report));
  }
}

CLI::Validator count() {
  return whole_number(static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
}

std::string geometries_text() {
  std::string text;
  for (const replay::Geometry& geometry : replay::geometries()) {
    text += fmt::format("  {:<12}  {}\n", geometry.name, geometry.about);
  }
  return text;
}

}  // namespace

CLI::App* add_replay_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<ReplayOptions>();
  replay::Options& settings = options->replay;
  CLI::App* command = app.add_subcommand(
      "replay", "Serve a trace of requests, attention alone, and check what is computed");
  command
      ->add_option("TRACE", options->trace,
                   "Azure LLM inference CSV or Mooncake JSON lines; told apart by their content")
      ->required();
  command->add_option("--geometry", options->geometry, "Whose attention; see below")
      ->capture_default_str();
  command
      ->add_option("--layers", settings.num_layers,
                   "Layers; by default one of each kind that the geometry has")
      ->transform(count());
  command->add_option("--requests", settings.max_requests, "Only the first of the trace; 0 is all")
      ->transform(count())
      ->capture_default_str();
  command
      ->add_option("--speed", settings.speed,
                   "Requests come when the trace says, so many times as fast; 0: all are there "
                   "from the beginning, and are served in order of arrival")
      ->check(CLI::Range(0.0, 1e9))
      ->capture_default_str();
  command
      ->add_option("--device", options->device,
                   "Where attention runs and the KV cache lies: cpu or cuda (the first GPU)")
      ->capture_default_str();
  command->add_option("--backend", settings.backend,
                      "Attention backend by its id (see 'foveal info'); by default the best");
  command->add_option("--dtype", options->dtype,
                      "f32, f16 or bf16; by default f32 on the CPU, bf16 on a GPU");
  command->add_option("--kv-cache-dtype", options->kv_cache_dtype,
                      "auto (the dtype), f8e4m3, f8e5m2, …");
  command
      ->add_option("--block-size", settings.block_size,
                   "Tokens a cache block; 0 is the backend's preferred size")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 16))
      ->capture_default_str();
  auto* blocks = command->add_option("--pool-blocks", settings.num_blocks,
                                     "Size of the KV cache over all layers, in blocks");
  blocks->transform(count());
  command
      ->add_option("--pool-gib", settings.pool_gib,
                   "The same in GiB; by default a quarter of the device's memory, or what all "
                   "requests would need together where that is less")
      ->check(CLI::Range(0.0, 1e6))
      ->excludes(blocks);
  command->add_option("--max-num-seqs", settings.max_num_seqs, "Requests a step")
      ->transform(count())
      ->capture_default_str();
  command->add_option("--max-num-batched-tokens", settings.max_num_batched_tokens, "Tokens a step")
      ->transform(count())
      ->capture_default_str();
  command
      ->add_option("--check-every", settings.check_every,
                   "Check a row of every so many steps against the oracle; 0: none")
      ->transform(count())
      ->capture_default_str();
  command->add_option("--threads", settings.num_threads, "CPU threads; 0 is all")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--json", options->json, "Write the results to this file as JSON");
  command->add_option("--html", options->html,
                      "Write them as one page, with plots of blocks in use and step latency");
  command->footer(fmt::format(
      "Prompts are made of tokens that the trace's hash ids stand for, keys and values of tokens, "
      "so "
      "that prompts that begin\nalike share blocks. The first row that is wrong ends the replay "
      "with an error. docs/replay.md says what is measured.\n\nGeometries:\n{}\nExamples:\n"
      "  foveal replay AzureLLMInferenceTrace_conv.csv --requests 500\n"
      "  foveal replay mooncake_trace.jsonl --geometry gpt-oss --pool-gib 2 --html replay.html\n"
      "  foveal replay mooncake_trace.jsonl --device cuda --max-num-seqs 256 "
      "--max-num-batched-tokens 8192",
      geometries_text()));
  command->callback([options, &exit_code] {
    run_replay(*options);
    exit_code = 0;
  });
  return command;
}

}  // namespace foveal::tools
