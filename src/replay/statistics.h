#pragma once

#include <cstdint>
#include <vector>

#include "replay/replay.h"

namespace foveal::replay {

/// What one step did.
struct StepRecord {
  double begin_s = 0.0;  ///< On the replay's clock.
  double seconds = 0.0;
  std::int64_t tokens = 0;
  std::int64_t requests = 0;
  std::int64_t blocks = 0;  ///< In use.
  double kv_bytes = 0.0;
  bool decode = false;
};

/// Collects steps, and says what they were like.
class Statistics {
 public:
  void add(const StepRecord& record) { records_.push_back(record); }
  std::int64_t num_steps() const { return std::ssize(records_); }
  /// Fills in latencies, bytes and the timeline.
  void summarize(Report& report) const;

 private:
  std::vector<StepRecord> records_;
};

}  // namespace foveal::replay
