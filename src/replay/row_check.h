#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

#include "foveal/spec.h"
#include "replay/synthetic.h"

namespace foveal::replay {

/// Judges one row and head of a layer's output against REFERENCE in float64, which gets the keys
/// and values that `tokens`, the sequence up to and with the row's own, stand for: never what the
/// cache holds. The bounds are those of problem/judge.h. Empty when it is right, else what is
/// wrong.
std::string wrong_in_row(const AttentionSpec& spec, const SyntheticRows& rows,
                         std::span<const std::int32_t> tokens, std::int64_t head,
                         const std::vector<double>& output);

}  // namespace foveal::replay
