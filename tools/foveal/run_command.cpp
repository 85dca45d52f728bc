#include <fmt/format.h>
#include <fmt/ranges.h>

#include <CLI/CLI.hpp>
#include <cctype>
#include <filesystem>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "foveal/commands.h"
#include "problem/judge.h"
#include "problem/problem_file.h"
#include "problem/run.h"

namespace foveal::tools {
namespace {

using Json = nlohmann::ordered_json;

struct RunCommandOptions {
  std::vector<std::string> files;
  std::string backend = "auto";
  std::string dtype;
  std::int64_t num_splits = 0;
  std::string out;
  bool json = false;
};

/// What came of one problem and split count.
struct Verdict {
  std::string file;
  std::string name;
  std::string dtype;
  std::int64_t num_splits = 0;
  std::string backend;
  bool passed = false;
  double max_error = 0.0;
  double bound = 0.0;
  double max_lse_error = 0.0;
  std::string message;
};

/// "case.bf16.splits8.safetensors" in a folder, or the path itself when it names a file.
std::filesystem::path result_path(const std::string& out, const Verdict& verdict) {
  std::filesystem::path path(out);
  if (path.extension() == ".safetensors") {
    return path;
  }
  std::string name = verdict.name;
  for (char& c : name) {
    const bool plain = std::isalnum(static_cast<unsigned char>(c)) != 0 || c == '-' || c == '_';
    c = plain ? c : '_';
  }
  const std::string splits =
      verdict.num_splits == 0 ? "" : fmt::format(".splits{}", verdict.num_splits);
  return path /
         fmt::format("{}.{}{}.safetensors", name.empty() ? "problem" : name, verdict.dtype, splits);
}

/// The path, or one with a number where this run has written to it already; remembered in
/// `written`.
std::filesystem::path unused_path(const std::filesystem::path& path,
                                  std::set<std::filesystem::path>& written) {
  std::filesystem::path unused = path;
  for (int i = 2; !written.insert(unused).second; ++i) {
    unused.replace_filename(fmt::format("{}.{}.safetensors", path.stem().string(), i));
  }
  return unused;
}

/// Names come from files: control characters, of ASCII and of UTF-8's C2 80 to C2 9F, become '?'.
std::string printable(const std::string& text) {
  std::string result;
  for (std::size_t i = 0; i < text.size(); ++i) {
    const auto byte = static_cast<unsigned char>(text[i]);
    const auto next = static_cast<unsigned char>(i + 1 < text.size() ? text[i + 1] : '\0');
    const bool wide = byte == 0xC2 && next >= 0x80 && next < 0xA0;
    result += byte < 0x20 || byte == 0x7F || wide ? '?' : text[i];
    i += wide ? 1 : 0;
  }
  return result;
}

/// Judges by what the file expects and by the oracle; the first that fails speaks.
void judge(const problem::AttentionProblem& problem, const problem::RunResult& result,
           Verdict& verdict) {
  const problem::Solution exact = problem::solve(problem);
  problem::Comparison comparison = problem::compare(problem, result, exact);
  std::string by = "the oracle";
  if (problem.expected_output || problem.expected_lse) {
    const problem::Comparison expected =
        problem::compare(problem, result, problem::expected_by_file(problem, exact));
    if (!expected.passed || comparison.passed) {
      comparison = expected;
      by = "the file";
    }
  }
  verdict.passed = comparison.passed;
  verdict.max_error = comparison.max_error;
  verdict.bound = comparison.bound;
  verdict.max_lse_error = comparison.max_lse_error;
  if (!comparison.passed) {
    verdict.message = fmt::format("not what {} expects\n{}", by, comparison.message);
  }
}

Verdict run_one(const problem::AttentionProblem& problem, const RunCommandOptions& options,
                const std::string& file, std::int64_t num_splits,
                std::set<std::filesystem::path>& written) {
  Verdict verdict;
  verdict.file = file;
  verdict.name = problem.name;
  verdict.dtype = to_string(problem.spec.dtype);
  verdict.num_splits = num_splits;
  verdict.backend = options.backend;
  try {
    const AttentionBackendPtr backend = problem::choose_backend(problem, options.backend);
    verdict.backend = backend->name();
    problem::RunOptions run;
    run.num_splits = num_splits;
    const problem::RunResult result = problem::run_problem(problem, *backend, run);
    judge(problem, result, verdict);
    if (!options.out.empty()) {
      problem::write_safetensors_result(unused_path(result_path(options.out, verdict), written),
                                        problem, result);
    }
  } catch (const Error& error) {
    // A file that cannot be written is no verdict on the backend.
    if (error.code() == ErrorCode::io) {
      throw;
    }
    verdict.passed = false;
    verdict.message = fmt::format("{}: {}", to_string(error.code()), error.what());
  }
  return verdict;
}

void print(const Verdict& verdict) {
  const std::string splits =
      verdict.num_splits == 0 ? "" : fmt::format(" splits={}", verdict.num_splits);
  fmt::print("{} {} {}{} {} max error {:.3g}, bound {:.3g}, lse error {:.3g}\n",
             verdict.passed ? "PASS" : "FAIL", printable(verdict.name), verdict.dtype, splits,
             verdict.backend, verdict.max_error, verdict.bound, verdict.max_lse_error);
  std::size_t begin = 0;
  while (begin < verdict.message.size()) {
    const std::size_t end = std::min(verdict.message.find('\n', begin), verdict.message.size());
    fmt::print("    {}\n", printable(verdict.message.substr(begin, end - begin)));
    begin = end + 1;
  }
}

Json as_json(const Verdict& verdict) {
  return {{"file", verdict.file},
          {"name", verdict.name},
          {"dtype", verdict.dtype},
          {"num_splits", verdict.num_splits},
          {"backend", verdict.backend},
          {"passed", verdict.passed},
          {"max_error", verdict.max_error},
          {"bound", verdict.bound},
          {"max_lse_error", verdict.max_lse_error},
          {"message", verdict.message}};
}

int run(const RunCommandOptions& options) {
  std::string backend = options.backend;
  for (char& c : backend) {
    c = static_cast<char>(std::tolower(static_cast<unsigned char>(c)));
  }
  if (!backend.empty() && backend != "auto" &&
      !BackendRegistry::global().contains(options.backend)) {
    // Throws, and lists the ids there are.
    static_cast<void>(BackendRegistry::global().get(options.backend));
  }
  // Every file is read before anything runs, so that a bad one is told at once.
  std::vector<std::pair<std::string, problem::FileProblem>> problems;
  std::optional<DType> dtype;
  if (!options.dtype.empty()) {
    dtype = parse_dtype("--dtype", options.dtype);
  }
  for (const std::string& file : options.files) {
    for (problem::FileProblem& each : problem::read_problems(file, dtype)) {
      problems.emplace_back(file, std::move(each));
    }
  }
  if (problems.empty()) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("no problem to run in {}{}", fmt::join(options.files, ", "),
                            dtype ? fmt::format(" with --dtype {}", options.dtype) : ""));
  }
  const bool one_file = std::filesystem::path(options.out).extension() == ".safetensors";
  if (one_file && (problems.size() != 1 ||
                   (options.num_splits == 0 && problems.front().second.num_splits.size() != 1))) {
    throw Error(ErrorCode::invalid_argument,
                fmt::format("--out is {}, a file holds the result of one problem, there are more: "
                            "give a folder",
                            options.out));
  }
  if (!options.out.empty() && !one_file) {
    std::error_code error;
    std::filesystem::create_directories(options.out, error);
    if (error) {
      throw Error(ErrorCode::io, fmt::format("--out is {}, the folder cannot be made: {}",
                                             options.out, error.message()));
    }
  }
  Json verdicts = Json::array();
  std::set<std::filesystem::path> written;
  std::size_t passed = 0;
  std::size_t failed = 0;
  for (const auto& [file, each] : problems) {
    const std::vector<std::int64_t> counts =
        options.num_splits != 0 ? std::vector<std::int64_t>{options.num_splits} : each.num_splits;
    for (const std::int64_t num_splits : counts) {
      const Verdict verdict = run_one(each.problem, options, file, num_splits, written);
      ++(verdict.passed ? passed : failed);
      if (options.json) {
        verdicts.push_back(as_json(verdict));
      } else {
        print(verdict);
      }
    }
  }
  if (options.json) {
    const Json document{{"passed", passed}, {"failed", failed}, {"cases", verdicts}};
    // Names come from files and may hold any bytes; NaN and infinity become null.
    fmt::print("{}\n", document.dump(2, ' ', false, Json::error_handler_t::replace));
  } else {
    fmt::print("{} passed, {} failed\n", passed, failed);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace

CLI::App* add_run_command(CLI::App& app, int& exit_code) {
  auto options = std::make_shared<RunCommandOptions>();
  CLI::App* command = app.add_subcommand(
      "run", "Run attention problems from files and judge the results by the oracle");
  command
      ->add_option("files", options->files,
                   "Closed-form cases (.json) or problems with tensors (.safetensors); see "
                   "docs/problem_format.md")
      ->required();
  command
      ->add_option("--backend", options->backend,
                   "Run on this backend (see 'foveal info'); by default the automatic choice")
      ->capture_default_str();
  command->add_option("--dtype", options->dtype,
                      "Only cases of this dtype; problems with tensors are converted to it");
  command
      ->add_option("--num-splits", options->num_splits,
                   "Split the keys of each task so often; by default what the file says")
      ->transform(whole_number(std::numeric_limits<std::int64_t>::max()));
  command->add_option("--out", options->out,
                      "Write results: a folder, or a .safetensors file for a single problem");
  command->add_flag("--json", options->json, "Print one JSON document");
  command->footer(
      "Exits with 0 when every result is right, 1 otherwise.\n\nExamples:\n"
      "  foveal run cases.json\n"
      "  foveal run problem.safetensors --backend CPU_ATTN --num-splits 4 --out results");
  command->callback([options, &exit_code] { exit_code = run(*options); });
  return command;
}

}  // namespace foveal::tools
