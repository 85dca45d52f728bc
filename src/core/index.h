#pragma once

#include <cstddef>
#include <cstdint>

namespace foveal {

/// A signed index that is known not to be negative, for containers that want an unsigned one.
inline std::size_t at(std::int64_t index) { return static_cast<std::size_t>(index); }

}  // namespace foveal
