#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "foveal/spec.h"

namespace foveal::cuda {

/// Names for `foveal prebuild`, sorted.
std::vector<std::string> model_names();

/// The distinct attention layers of a model, as far as kernels are specialised for them (head
/// counts and sizes, windows, caps, sinks). Throws invalid_argument listing the known names.
std::vector<AttentionSpec> layers_of_model(std::string_view name);

}  // namespace foveal::cuda
