#pragma once

#include <cstdint>
#include <filesystem>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "problem/problem.h"
#include "problem/run.h"

// Both formats are documented in docs/problem_format.md. Everything wrong with a file is an
// Error(io) that names the file, the case, the field, its value and what is accepted.

namespace foveal::problem {

/// A problem of a file, and how often to run it.
struct FileProblem {
  AttentionProblem problem;
  /// The result must be the same for each of these; 0 is the planner's choice.
  std::vector<std::int64_t> num_splits{0};
};

/// Reads closed-form cases (JSON) or one problem (.safetensors), by content. A case that lists no
/// dtypes gives a problem for each of f32, f16 and bf16. With a dtype: only the cases of it, and
/// the problem converted to it.
std::vector<FileProblem> read_problems(const std::filesystem::path& path,
                                       std::optional<DType> dtype = std::nullopt);

/// Closed-form cases: one, or an array of them. `file` is for messages.
std::vector<FileProblem> parse_cases(std::string_view text, const std::string& file);

AttentionProblem read_safetensors_problem(const std::filesystem::path& path);
/// Throws io when the file cannot be written, unsupported when the problem has a function that no
/// file can hold (a score_mod, or a mask_mod that is not a mask).
void write_safetensors_problem(const std::filesystem::path& path, const AttentionProblem& problem);
/// Writes the tensors `output` and `lse`, and the backend's name.
void write_safetensors_result(const std::filesystem::path& path, const AttentionProblem& problem,
                              const RunResult& result);

}  // namespace foveal::problem
