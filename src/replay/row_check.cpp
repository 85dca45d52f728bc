#include "replay/row_check.h"

#include "problem/judge.h"

namespace foveal::replay {
namespace {

using Role = SyntheticRows::Role;

void append(std::vector<double>& to, std::span<const double> numbers) {
  to.insert(to.end(), numbers.begin(), numbers.end());
}

}  // namespace

std::string wrong_in_row(const AttentionSpec& spec, const SyntheticRows& rows,
                         std::span<const std::int32_t> tokens, std::int64_t head,
                         const std::vector<double>& output) {
  const std::int64_t size = spec.head_size;
  const std::int64_t size_v = spec.value_head_size();
  const std::int64_t kv_head = head / spec.group_size();

  // The same layer with this head alone.
  problem::AttentionProblem problem;
  problem.spec = spec;
  problem.spec.num_heads = 1;
  problem.spec.num_kv_heads = 1;
  problem.spec.mla.reset();
  if (!spec.sinks.empty()) {
    problem.spec.sinks = {spec.sinks[static_cast<std::size_t>(head)]};
  }
  problem.requests = {{.q_len = 1, .kv_len = std::ssize(tokens)}};
  append(problem.query, rows.numbers(Role::query, tokens.back(), head * size, size));
  problem.key.reserve(tokens.size() * static_cast<std::size_t>(size));
  problem.value.reserve(tokens.size() * static_cast<std::size_t>(size_v));
  for (const std::int32_t token : tokens) {
    append(problem.key, rows.numbers(Role::key, token, kv_head * size, size));
    // The value of MLA is the beginning of the key.
    append(problem.value, spec.mla ? rows.numbers(Role::key, token, 0, size_v)
                                   : rows.numbers(Role::value, token, kv_head * size_v, size_v));
  }
  problem.quantize();

  problem::RunResult result;
  result.output = output;
  return problem::compare(problem, result, problem::solve(problem)).message;
}

}  // namespace foveal::replay
