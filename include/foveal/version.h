#pragma once

#include "foveal/export.h"

#define FOVEAL_VERSION_MAJOR 0
#define FOVEAL_VERSION_MINOR 1
#define FOVEAL_VERSION_PATCH 0

// foveal_c.h is included by C, and by C++ older than the rest of Foveal.
#if defined(__cplusplus) && __cplusplus >= 202002L
#include <string_view>

namespace foveal {

/// Version of the library at run time, "major.minor.patch"; the macros are those of the headers.
FOVEAL_API std::string_view version();

}  // namespace foveal
#endif
