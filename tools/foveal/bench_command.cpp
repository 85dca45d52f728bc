#include <fmt/format.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <fstream>
#include <iterator>
#include <limits>
#include <memory>

#include "bench/bench.h"
#include "foveal/commands.h"

namespace foveal::tools {
namespace {

struct BenchOptions {
  std::vector<std::string> kinds;
  std::string device = "cpu";
  std::string dtype;
  std::string kv_cache_dtype;
  std::string json;
  std::string html;
  std::string from;
  bench::Options bench;
};

bench::Kind parse_kind(const std::string& name) {
  const std::optional<bench::Kind> kind = bench::kind_from_string(name);
  if (!kind) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("'{}' is nothing to time, accepted are {}", name, bench::kind_names()));
  }
  return *kind;
}

/// The page of rows that were written before.
void render(const BenchOptions& options) {
  require_different_files("--html", options.html, "--from", options.from);
  std::ifstream file(options.from, std::ios::binary);
  std::string json{std::istreambuf_iterator<char>(file), {}};
  if (!file) {
    throw Error(ErrorCode::io, fmt::format("--from: '{}' cannot be read", options.from));
  }
  try {
    write_file("--html", options.html, bench::to_html(json));
  } catch (const Error& error) {
    throw error.code() == ErrorCode::invalid_argument
        ? Error(error.code(), fmt::format("--from: '{}' is {}", options.from, error.what()))
        : error;
  }
}

/// Whether any row has times.
bool run_bench(BenchOptions& options) {
  require_different_files("--html", options.html, "--json", options.json);
  if (!options.json.empty()) {
    require_writable("--json", options.json);
  }
  if (!options.html.empty()) {
    require_writable("--html", options.html);
  }
  bench::ShapeOptions& shapes = options.bench.shapes;
  for (const std::string& name : options.kinds) {
    shapes.kinds.push_back(parse_kind(name));
  }
  shapes.device = parse_device("--device", options.device);
  if (!options.dtype.empty()) {
    shapes.dtype = parse_dtype("--dtype", options.dtype);
  }
  if (!options.kv_cache_dtype.empty() && options.kv_cache_dtype != "auto") {
    shapes.kv_cache_dtype = parse_dtype("--kv-cache-dtype", options.kv_cache_dtype);
  }
  ProgressLine progress;
  bench::Listener listener;
  listener.on_start = [&](std::size_t done, std::size_t total, const bench::Shape* shape) {
    progress.show(shape == nullptr ? "what the machine reads and multiplies at most"
                                   : fmt::format("{} of {}: {}", done + 1, total, shape->text()));
  };
  listener.on_row = [&](const bench::Report& report) {
    progress.clear();
    const std::size_t count = report.rows.size();
    const bench::Row& row = report.rows.back();
    if (count == 1) {
      fmt::print("{}", bench::header_text(report));
    }
    if (count == 1 || report.rows[count - 2].shape.kind != row.shape.kind) {
      fmt::print("{}", bench::table_header(row.shape.kind));
    }
    fmt::print("{}", bench::table_line(report, row));
    std::fflush(stdout);
    // After each row, so that a run that is broken off leaves what it has.
    const std::string json = bench::to_json(report);
    if (!options.json.empty()) {
      write_file("--json", options.json, json);
    }
    if (!options.html.empty()) {
      write_file("--html", options.html, bench::to_html(json));
    }
  };
  try {
    const bench::Report report = bench::run(options.bench, listener);
    return std::any_of(report.rows.begin(), report.rows.end(),
                       [](const bench::Row& row) { return row.attention.failure.empty(); });
  } catch (...) {
    progress.clear();
    throw;
  }
}

CLI::Validator length() {
  return whole_number(static_cast<std::uint64_t>(std::numeric_limits<std::int64_t>::max()));
}

}  // namespace

CLI::App* add_bench_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<BenchOptions>();
  bench::ShapeOptions& shapes = options->bench.shapes;
  CLI::App* command = app.add_subcommand("bench", "Time a backend over shapes of steps");
  command->add_option("what", options->kinds, bench::kind_names() + "; by default all");
  command->add_option("--device", options->device, "cpu or cuda")->capture_default_str();
  command->add_option("--backend", options->bench.backend,
                      "Time this backend (see 'foveal info'); by default the automatic choice");
  command->add_option("--heads", shapes.num_heads, "Query heads")->transform(length());
  command
      ->add_option("--kv-heads", shapes.num_kv_heads, "KV heads; where --heads is given, as many")
      ->transform(length());
  command->add_option("--head-size", shapes.head_size, "Of queries, keys and values")
      ->transform(length());
  command->add_option("--dtype", options->dtype,
                      "f32, f16, bf16 or f8e4m3; by default f32 on the CPU, bf16 on a GPU");
  command->add_option("--kv-cache-dtype", options->kv_cache_dtype,
                      "auto (the dtype), f8e4m3, f8e5m2, …");
  command
      ->add_option("--block-size", shapes.block_size,
                   "Tokens a cache block; 0: plain keys and values, without a cache")
      ->transform(length());
  command->add_option("--batch", shapes.batch, "Requests a step, several allowed; see below")
      ->transform(length())
      ->delimiter(',');
  command->add_option("--seq-len", shapes.seq_len, "Keys a request, several allowed; see below")
      ->transform(length())
      ->delimiter(',');
  command->add_option("--threads", options->bench.num_threads, "CPU threads; 0 is all")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_option("--json", options->json,
                      "Write the results so far to this file after each row");
  CLI::Option* html = command->add_option("--html", options->html,
                                          "Write them as one page, with plots, after each row");
  CLI::Option* from = command->add_option(
      "--from", options->from,
      "Measure nothing: make the page from what --json wrote, or bench/peers added to");
  from->needs(html);
  command->footer(
      "Without options a table of usual shapes is run. --batch or --seq-len take the place of its "
      "sizes: each batch with\neach length. What is computed is checked in samples; "
      "docs/bench.md says what the columns mean.\n\nExamples:\n"
      "  foveal bench\n"
      "  foveal bench decode --batch 1,8,64 --seq-len 4096 --heads 32 --kv-heads 8 --json "
      "decode.json\n"
      "  foveal bench prefill naive --device cuda --html naive.html\n"
      "  foveal bench --from decode.json --html decode.html");
  command->callback([options, command, html, from, &exit_code] {
    if (from->count() == 0) {
      exit_code = run_bench(*options) ? 0 : 1;
      return;
    }
    for (const CLI::Option* other : command->get_options()) {
      if (other->count() > 0 && other != html && other != from) {
        throw Error(
            ErrorCode::invalid_argument,
            fmt::format("--from measures nothing, {} has no meaning beside it", other->get_name()));
      }
    }
    render(*options);
    exit_code = 0;
  });
  return command;
}

}  // namespace foveal::tools
