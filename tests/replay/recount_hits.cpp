#include <fmt/format.h>

#include <fstream>
#include <nlohmann/json.hpp>

#include "foveal/error.h"
#include "hash_id_cache.h"

// recount_hits TRACE REPORT.json: counts what a replay found in the prefix cache once more, over
// the trace's hash ids, with the sizes that its report names; for runs too long for a test. Exit
// status 1 where the counts differ.
namespace {

using namespace foveal::replay;

int recount(const char* trace_path, const char* report_path) {
  const nlohmann::json report = nlohmann::json::parse(std::ifstream(report_path));
  if (report.at("speed") != 0.0) {
    fmt::print("the replay honoured arrival times, which cannot be counted without its clock\n");
    return 1;
  }
  Trace trace = read_trace(trace_path);
  trace.requests.resize(report.at("requests"));
  const testing::CacheCount count =
      testing::count_hits(trace, {.block_size = report.at("block_size"),
                                  .num_blocks = report.at("num_blocks"),
                                  .max_num_seqs = report.at("max_num_seqs"),
                                  .max_num_batched_tokens = report.at("max_num_batched_tokens")});
  fmt::print("{} tokens found in a cache of {} blocks; the report says {}\n", count.cached_tokens,
             report.at("num_blocks").get<std::int64_t>(),
             report.at("cached_tokens").get<std::int64_t>());
  const bool equal = report.at("cached_tokens") == count.cached_tokens &&
                     report.at("preemptions") == count.preemptions &&
                     report.at("peak_blocks") == count.peak_blocks &&
                     report.at("step_latency").at("all").at("steps") == count.steps;
  fmt::print("{}\n", equal ? "steps, preemptions and blocks agree too" : "the counts differ");
  return equal ? 0 : 1;
}

}  // namespace

int main(int argc, char** argv) {
  if (argc != 3) {
    fmt::print("usage: recount_hits TRACE REPORT.json\n");
    return 2;
  }
  try {
    return recount(argv[1], argv[2]);
  } catch (const std::exception& error) {
    fmt::print("{}\n", error.what());
    return 2;
  }
}
