// The targets for libFuzzer: foveal_fuzz TARGET [CORPUS…] [-max_total_time=60 …].

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <string>

#include "fuzz/targets.h"

namespace {
const foveal::fuzz::Target* chosen = nullptr;
}

// NOLINTNEXTLINE(readability-identifier-naming): the name is libFuzzer's.
extern "C" int LLVMFuzzerInitialize(int* argc, char*** argv) {
  const auto& all = foveal::fuzz::targets();
  const std::string wanted = *argc > 1 ? (*argv)[1] : "";
  for (const auto& target : all) {
    chosen = target.name == wanted ? &target : chosen;
  }
  if (chosen == nullptr) {
    std::fprintf(stderr, "foveal_fuzz: the target is '%s', accepted are", wanted.c_str());
    for (const auto& target : all) {
      std::fprintf(stderr, " %s", target.name.c_str());
    }
    std::fprintf(stderr, "\n");
    std::exit(2);
  }
  // A corpus of its own in the target's place among the arguments; what is found goes there too.
  static std::string folder =
      (std::filesystem::temp_directory_path() / ("foveal_fuzz_" + wanted)).string();
  std::filesystem::create_directories(folder);
  int number = 0;
  for (const std::string& seed : chosen->seeds()) {
    std::ofstream(folder + "/seed" + std::to_string(number++), std::ios::binary) << seed;
  }
  (*argv)[1] = folder.data();
  return 0;
}

// NOLINTNEXTLINE(readability-identifier-naming): the name is libFuzzer's.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  foveal::fuzz::run(*chosen, {data, size});
  return 0;
}
