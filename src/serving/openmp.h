#pragma once

#include <dlfcn.h>

namespace foveal::serving {

/// oneDNN as Debian builds it runs on OpenMP's threads, which would come on top of the pool's: one
/// team for each worker. The limit is a value each thread has for itself. The function is looked
/// up, because linking it would bring Clang's own OpenMP runtime into the process beside the one of
/// oneDNN; a oneDNN without OpenMP does not have it and needs no limit.
inline void keep_openmp_to_one_thread() {
  using SetNumThreads = void (*)(int);
  static const auto set_num_threads =
      reinterpret_cast<SetNumThreads>(dlsym(RTLD_DEFAULT, "omp_set_num_threads"));
  thread_local bool limited = false;
  if (!limited && set_num_threads != nullptr) {
    set_num_threads(1);
    limited = true;
  }
}

}  // namespace foveal::serving
