#pragma once

#include <string>
#include <string_view>
#include <vector>

#include "cuda/jit.h"
#include "cuda/nvrtc.h"

namespace foveal::cuda {

/// A key's source with everything it includes, ready to compile.
struct KernelProgram {
  Program program;
  /// SHA-256 of all that decides the machine code but the compiler: sources, generated config,
  /// entry, architecture and options. Names the kernel in a pack.
  std::string id;
  /// The same with the compiler in it: the file's name in the cache.
  std::string id_with_compiler(std::string_view compiler_signature) const;
};

/// Follows #include "…" from the key's source through the key's own headers, config.cuh and the
/// embedded files. Throws invalid_argument for a source, and compile for a header, that is not
/// there, and for #include <…>: device code takes nothing from a toolkit.
KernelProgram assemble(const KernelKey& key);

}  // namespace foveal::cuda
