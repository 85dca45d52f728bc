#pragma once

#include <string>

#include "replay/replay.h"

// Sentences that the text and the page share.
namespace foveal::replay {

std::string arrivals_text(const Options& options);
/// Geometry, layers and dtypes.
std::string setting_text(const Report& report);

}  // namespace foveal::replay
