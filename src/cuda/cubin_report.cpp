#include "cuda/cubin_report.h"

#include <elf.h>
#include <fmt/format.h>

#include <algorithm>
#include <cstdint>
#include <cstdio>
#include <cstring>
#include <string>

#include "core/check.h"

namespace foveal::cuda {
namespace {

// Sections .nv.info (of all functions) and .nv.info.<kernel> are lists of attributes: one byte of
// format, one of attribute, and two that are the value or, for the sized format, the count of bytes
// that follow. As observed in cubins of CUDA 12 and 13, compared with cuobjdump -elf.
constexpr std::uint8_t kSizedFormat = 4;
constexpr std::uint8_t kMinStackSize = 0x12;
constexpr std::uint8_t kParameterInfo = 0x17;
constexpr int kParameterSizeShift = 18;
constexpr std::uint8_t kRegisterCount = 0x2f;

[[noreturn]] void fail_malformed() {
  fail(ErrorCode::compile, "cubin is malformed: an ELF table points outside of the file");
}

template <typename T>
T read(std::span<const std::byte> bytes, std::size_t offset) {
  if (offset > bytes.size() || bytes.size() - offset < sizeof(T)) {
    fail_malformed();
  }
  T value;
  std::memcpy(&value, bytes.data() + offset, sizeof(T));
  return value;
}

std::string_view text_at(std::span<const std::byte> table, std::size_t offset) {
  if (offset >= table.size()) {
    fail_malformed();
  }
  const char* begin = reinterpret_cast<const char*>(table.data()) + offset;
  return {begin, strnlen(begin, table.size() - offset)};
}

class Elf {
 public:
  explicit Elf(std::span<const std::byte> file) : file_(file) {
    if (file.size() < sizeof(Elf64_Ehdr) || std::memcmp(file.data(), ELFMAG, SELFMAG) != 0) {
      fail(ErrorCode::compile, "cubin is malformed: it is no ELF file");
    }
    header_ = read<Elf64_Ehdr>(file, 0);
    names_ = content(section(header_.e_shstrndx));
  }

  Elf64_Shdr section(std::size_t index) const {
    return read<Elf64_Shdr>(file_, header_.e_shoff + index * sizeof(Elf64_Shdr));
  }

  std::span<const std::byte> content(const Elf64_Shdr& section) const {
    if (section.sh_type == SHT_NOBITS) {
      return {};
    }
    if (section.sh_offset > file_.size() || file_.size() - section.sh_offset < section.sh_size) {
      fail_malformed();
    }
    return file_.subspan(section.sh_offset, section.sh_size);
  }

  /// Null section when there is none of that name.
  Elf64_Shdr find(std::string_view name) const {
    for (std::size_t i = 1; i < header_.e_shnum; ++i) {
      const Elf64_Shdr candidate = section(i);
      if (text_at(names_, candidate.sh_name) == name) {
        return candidate;
      }
    }
    return {};
  }

  std::string_view symbol_name(std::uint32_t index) const {
    const Elf64_Shdr symbols = find(".symtab");
    const auto symbol = read<Elf64_Sym>(content(symbols), index * sizeof(Elf64_Sym));
    return text_at(content(section(symbols.sh_link)), symbol.st_name);
  }

 private:
  std::span<const std::byte> file_;
  std::span<const std::byte> names_;
  Elf64_Ehdr header_{};
};

/// Calls visit(attribute, value or size, payload) for each attribute of a list.
template <typename Visit>
void for_each_attribute(std::span<const std::byte> list, Visit&& visit) {
  for (std::size_t at = 0; at + 4 <= list.size();) {
    const auto format = read<std::uint8_t>(list, at);
    const auto attribute = read<std::uint8_t>(list, at + 1);
    const auto value = read<std::uint16_t>(list, at + 2);
    at += 4;
    const std::size_t size = format == kSizedFormat ? value : 0;
    if (size > list.size() - at) {
      fail_malformed();
    }
    visit(attribute, value, list.subspan(at, size));
    at += size;
  }
}

}  // namespace

KernelResources resources_from_elf(std::span<const std::byte> cubin, std::string_view entry) {
  const Elf elf(cubin);
  if (elf.find(fmt::format(".text.{}", entry)).sh_type == SHT_NULL) {
    fail(ErrorCode::compile,
         "entry of the kernel is '{}', but the compiled source has no such kernel (is it extern "
         "\"C\" __global__?)",
         entry);
  }
  KernelResources resources;
  resources.spill_store_bytes = resources.spill_load_bytes = KernelResources::kUnknown;
  for_each_attribute(elf.content(elf.find(".nv.info")), [&](std::uint8_t attribute, std::uint16_t,
                                                            std::span<const std::byte> payload) {
    // Payload: symbol of the function, value.
    if ((attribute == kRegisterCount || attribute == kMinStackSize) && payload.size() == 8 &&
        elf.symbol_name(read<std::uint32_t>(payload, 0)) == entry) {
      (attribute == kRegisterCount ? resources.registers : resources.stack_bytes) =
          read<std::int32_t>(payload, 4);
    }
  });
  for_each_attribute(
      elf.content(elf.find(fmt::format(".nv.info.{}", entry))),
      [&](std::uint8_t attribute, std::uint16_t, std::span<const std::byte> payload) {
        // Payload: an index, the parameter's ordinal and offset, and flags below its size.
        if (attribute == kParameterInfo && payload.size() == 12) {
          const std::size_t ordinal = read<std::uint16_t>(payload, 4);
          if (resources.parameter_bytes.size() <= ordinal) {
            resources.parameter_bytes.resize(ordinal + 1);
          }
          resources.parameter_bytes[ordinal] =
              static_cast<int>(read<std::uint32_t>(payload, 8) >> kParameterSizeShift);
        }
      });
  // From sm_90 on the section begins with the block's 1 KiB that belongs to the system.
  const bool has_reserved = elf.find(".nv.shared.reserved.0").sh_type != SHT_NULL;
  const std::uint64_t shared = elf.find(fmt::format(".nv.shared.{}", entry)).sh_size;
  const std::uint64_t reserved = has_reserved ? std::min<std::uint64_t>(shared, 1024) : 0;
  resources.static_shared_bytes = static_cast<int>(shared - reserved);
  return resources;
}

void add_spills_from_log(KernelResources& resources, std::string_view log, std::string_view entry) {
  // ptxas info : Function properties for NAME
  // ptxas .      0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
  const std::string heading = fmt::format("Function properties for {}\n", entry);
  const std::size_t at = log.find(heading);
  if (at == std::string_view::npos) {
    return;
  }
  const std::string line(log.substr(at + heading.size(), 300));
  const std::size_t stack = line.find_first_of("0123456789");
  int frame = 0;
  int stores = 0;
  int loads = 0;
  if (stack != std::string::npos &&
      std::sscanf(line.c_str() + stack,
                  "%d bytes stack frame, %d bytes spill stores, %d bytes spill loads", &frame,
                  &stores, &loads) == 3) {
    resources.spill_store_bytes = stores;
    resources.spill_load_bytes = loads;
  }
}

}  // namespace foveal::cuda
