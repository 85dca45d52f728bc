#pragma once

#include <cstdint>
#include <span>
#include <string>
#include <vector>

// What reads bytes that somebody else made. With any bytes a target returns, or throws Error; what
// else can happen (another exception, a signal, a sanitizer's report, seconds of work) is a bug.
namespace foveal::fuzz {

struct Target {
  std::string name;
  void (*run)(std::span<const std::uint8_t> bytes);
  std::vector<std::string> (*seeds)();  ///< Good ones, to begin with.
};

const std::vector<Target>& targets();

/// Runs the target; Error is caught.
void run(const Target& target, std::span<const std::uint8_t> bytes);

}  // namespace foveal::fuzz
