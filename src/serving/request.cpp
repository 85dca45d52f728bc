#include "serving/request.h"

namespace foveal::serving {

std::string_view to_string(FinishReason reason) {
  switch (reason) {
    case FinishReason::none:
      return "none";
    case FinishReason::stop:
      return "stop";
    case FinishReason::max_tokens:
      return "max_tokens";
    case FinishReason::max_seq_len:
      return "max_seq_len";
  }
  return "unknown";
}

}  // namespace foveal::serving
