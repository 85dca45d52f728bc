#include "cpu/instruction_set.h"

#include <fmt/ranges.h>

#include <cstdint>
#include <string>
#include <utility>
#include <vector>

#include "core/check.h"
#include "core/environment.h"
#include "hwy/targets.h"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace foveal::cpu {
namespace {

#if defined(__x86_64__)

struct Cpuid {
  unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
  Cpuid(unsigned leaf, unsigned subleaf) {
    __get_cpuid_count(leaf, subleaf, &eax, &ebx, &ecx, &edx);
  }
};

bool has_avx512_bf16() { return (Cpuid(7, 1).eax >> 5 & 1) != 0; }

/// The processor has the instructions, and the kernel lets this process use the registers.
bool has_amx_bf16() {
  constexpr unsigned kBf16 = 1U << 22;
  constexpr unsigned kTile = 1U << 24;
  constexpr long kRequestPermission = 0x1023;  // ARCH_REQ_XCOMP_PERM
  constexpr long kTileData = 18;
  return (Cpuid(7, 0).edx & (kBf16 | kTile)) == (kBf16 | kTile) &&
         syscall(SYS_arch_prctl, kRequestPermission, kTileData) == 0;
}

/// vdpbf16ps does twice the work of an FMA. AMD starts as many of them; Intel's Sapphire Rapids
/// starts a quarter (measured: 74 GFLOP/s a core where FMA does 150).
bool pay(const Bf16Instructions& instructions) {
  constexpr unsigned kAuthenticAmd = 0x68747541;  // "Auth"
  return &instructions != &kAvx512Bf16 || Cpuid(0, 0).ebx == kAuthenticAmd;
}

#else

bool pay(const Bf16Instructions& /*instructions*/) { return true; }

#endif

/// What can be named, the best last.
struct Choice {
  InstructionSet set;
  std::int64_t highway_target;
  bool automatic = true;
};

std::vector<Choice> choices() {
  std::vector<Choice> found;
  const std::int64_t targets = hwy::SupportedTargets() & HWY_TARGETS;
  // Targets are bits, the best one lowest.
  for (std::int64_t rest = targets; rest != 0;) {
    const std::int64_t best = rest & -rest;
    found.insert(found.begin(), {{hwy::TargetName(best), nullptr}, best});
    rest ^= best;
  }
  for (const Bf16Instructions* instructions : bf16_instructions()) {
    found.push_back({{instructions->name, instructions}, targets & -targets, pay(*instructions)});
  }
  return found;
}

InstructionSet choose() {
  const std::vector<Choice> found = choices();
  const std::string wanted = environment("FOVEAL_CPU_TARGET");
  std::vector<std::string> names;
  const Choice* chosen = nullptr;
  for (const Choice& choice : found) {
    names.push_back(choice.set.name);
    if (wanted.empty() ? choice.automatic : choice.set.name == wanted) {
      chosen = &choice;
    }
  }
  check(chosen != nullptr, "FOVEAL_CPU_TARGET is {}, this machine has {}", wanted,
        fmt::join(names, ", "));
  if (!wanted.empty()) {  // Others in the process may use Highway too.
    // Better targets are the lower bits.
    hwy::DisableTargets(chosen->highway_target - 1);
  }
  return chosen->set;
}

}  // namespace

std::vector<const Bf16Instructions*> bf16_instructions() {
  std::vector<const Bf16Instructions*> found;
#if defined(__x86_64__)
  if ((hwy::SupportedTargets() & HWY_AVX3) != 0 && has_avx512_bf16()) {
    found.push_back(&kAvx512Bf16);
    if (has_amx_bf16()) {
      found.push_back(&kAmxBf16);
    }
  }
#endif
  return found;
}

const InstructionSet& instruction_set() {
  static const InstructionSet chosen = choose();
  return chosen;
}

}  // namespace foveal::cpu
