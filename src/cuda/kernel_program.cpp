#include "cuda/kernel_program.h"

#include <fmt/format.h>

#include <set>

#include "core/check.h"
#include "cuda/digest.h"
#include "cuda/kernel_sources.h"

namespace foveal::cuda {
namespace {

constexpr std::string_view kConfigName = "config.cuh";

std::string_view trimmed(std::string_view text) {
  const std::size_t begin = text.find_first_not_of(" \t\r");
  return begin == std::string_view::npos
             ? std::string_view()
             : text.substr(begin, text.find_last_not_of(" \t\r") - begin + 1);
}

/// What the #include lines of a text name. Conditional ones count as well: handing the compiler a
/// header it does not read costs nothing.
std::vector<std::string> includes_of(std::string_view file, std::string_view text) {
  std::vector<std::string> names;
  while (!text.empty()) {
    const std::size_t end = text.find('\n');
    std::string_view line = trimmed(text.substr(0, end));
    text.remove_prefix(end == std::string_view::npos ? text.size() : end + 1);
    if (!line.starts_with('#')) {
      continue;
    }
    line = trimmed(line.substr(1));
    if (!line.starts_with("include")) {
      continue;
    }
    line = trimmed(line.substr(7));
    const std::size_t close = line.find('"', 1);
    if (!line.starts_with('"') || close == std::string_view::npos) {
      fail(ErrorCode::compile,
           "{} has '#include {}': device code may only include files below src/cuda/kernels and "
           "headers of its key, in quotes",
           file, line);
    }
    names.emplace_back(line.substr(1, close - 1));
  }
  return names;
}

/// Follows the includes of one key.
class Assembler {
 public:
  explicit Assembler(const KernelKey& key) : key_(key), config_(key.config_header()) {}

  Program run() {
    const std::string_view source = find(key_.source);
    check(source.data() != nullptr, "source of a kernel is '{}', it must be a file below {}",
          key_.source, "src/cuda/kernels or one of the key's headers");
    program_.name = key_.source;
    program_.text = source;
    follow(key_.source, source);
    return std::move(program_);
  }

 private:
  std::string_view find(std::string_view name) const {
    if (const auto own = key_.headers.find(name); own != key_.headers.end()) {
      return own->second;
    }
    return name == kConfigName ? std::string_view(config_) : find_kernel_source(name);
  }

  void follow(std::string_view file, std::string_view text) {
    for (const std::string& name : includes_of(file, text)) {
      if (!seen_.insert(name).second) {
        continue;
      }
      const std::string_view header = find(name);
      if (header.data() == nullptr) {
        fail(ErrorCode::compile,
             "{} includes \"{}\", which is neither below src/cuda/kernels (names are relative to "
             "that folder) nor a header of the key",
             file, name);
      }
      program_.headers.emplace_back(name, header);
      follow(name, header);
    }
  }

  const KernelKey& key_;
  std::string config_;
  Program program_;
  std::set<std::string, std::less<>> seen_;
};

}  // namespace

KernelProgram assemble(const KernelKey& key) {
  KernelProgram result{.program = Assembler(key).run(), .id = {}};
  std::string parts;
  append_part(parts, "foveal kernel 1");  // Counts up when the meaning of a cubin file changes.
  for (const std::string& option : compile_options()) {
    append_part(parts, option);
  }
  append_part(parts, key.arch);
  append_part(parts, key.entry);
  append_part(parts, result.program.name);
  append_part(parts, result.program.text);
  for (const auto& [name, text] : result.program.headers) {
    append_part(parts, name);
    append_part(parts, text);
  }
  result.id = sha256_hex(parts);
  return result;
}

std::string KernelProgram::id_with_compiler(std::string_view compiler_signature) const {
  std::string parts;
  append_part(parts, id);
  append_part(parts, compiler_signature);
  return sha256_hex(parts);
}

}  // namespace foveal::cuda
