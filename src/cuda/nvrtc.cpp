#include "cuda/nvrtc.h"

#include <dlfcn.h>
#include <fmt/format.h>
#include <link.h>

#include <algorithm>
#include <charconv>
#include <filesystem>
#include <system_error>

#include "core/check.h"
#include "core/environment.h"
#include "cuda/driver.h"

namespace foveal::cuda {
namespace {

namespace fs = std::filesystem;

constexpr int kMinMajor = 12;
constexpr int kNewestMajor = 13;

// The public ABI of NVRTC.
using ProgramHandle = void*;
struct Api {
  int (*version)(int*, int*) = nullptr;
  const char* (*error_string)(int) = nullptr;
  int (*num_architectures)(int*) = nullptr;
  int (*architectures)(int*) = nullptr;
  int (*create)(ProgramHandle*, const char*, const char*, int, const char* const*,
                const char* const*) = nullptr;
  int (*destroy)(ProgramHandle*) = nullptr;
  int (*compile)(ProgramHandle, int, const char* const*) = nullptr;
  int (*log_size)(ProgramHandle, std::size_t*) = nullptr;
  int (*log)(ProgramHandle, char*) = nullptr;
  int (*cubin_size)(ProgramHandle, std::size_t*) = nullptr;
  int (*cubin)(ProgramHandle, char*) = nullptr;
};

struct Nvrtc {
  NvrtcInfo info;
  Api api;
};

template <typename Function>
bool find(void* library, const char* name, Function& function) {
  function = reinterpret_cast<Function>(dlsym(library, name));
  return function != nullptr;
}

bool find_all(void* library, Api& api) {
  return find(library, "nvrtcVersion", api.version) &&
         find(library, "nvrtcGetErrorString", api.error_string) &&
         find(library, "nvrtcGetNumSupportedArchs", api.num_architectures) &&
         find(library, "nvrtcGetSupportedArchs", api.architectures) &&
         find(library, "nvrtcCreateProgram", api.create) &&
         find(library, "nvrtcDestroyProgram", api.destroy) &&
         find(library, "nvrtcCompileProgram", api.compile) &&
         find(library, "nvrtcGetProgramLogSize", api.log_size) &&
         find(library, "nvrtcGetProgramLog", api.log) &&
         find(library, "nvrtcGetCUBINSize", api.cubin_size) &&
         find(library, "nvrtcGetCUBIN", api.cubin);
}

/// The folders of packages in a Python environment: lib/python3.X/site-packages.
std::vector<fs::path> site_packages(const fs::path& prefix) {
  std::vector<fs::path> folders;
  std::error_code error;
  for (fs::directory_iterator it(prefix / "lib", error), end; !error && it != end;
       it.increment(error)) {
    if (it->path().filename().string().starts_with("python3")) {
      folders.push_back(it->path() / "site-packages");
    }
  }
  return folders;
}

/// Where to look, in order. A cubin of a newer CUDA generation than the driver's may be refused by
/// it, so an older driver turns the order of generations round.
std::vector<std::string> candidates() {
  if (const std::string file = environment("FOVEAL_NVRTC"); !file.empty()) {
    return {file};  // An explicit choice is never replaced by another.
  }
  std::vector<int> majors{kNewestMajor, kMinMajor};
  if (available() && driver_version() / 1000 < kNewestMajor) {
    std::reverse(majors.begin(), majors.end());
  }
  std::vector<fs::path> sites;
  if (const std::string site = environment("FOVEAL_PYTHON_SITE"); !site.empty()) {
    sites.emplace_back(site);
  }
  for (const char* variable : {"VIRTUAL_ENV", "CONDA_PREFIX"}) {
    if (const std::string prefix = environment(variable); !prefix.empty()) {
      const std::vector<fs::path> found = site_packages(prefix);
      sites.insert(sites.end(), found.begin(), found.end());
    }
  }
  std::vector<fs::path> folders;
  for (const fs::path& site : sites) {
    folders.push_back(site / "nvidia/cu13/lib");
    folders.push_back(site / "nvidia/cuda_nvrtc/lib");
  }
  if (const std::string home = environment("CUDA_HOME"); !home.empty()) {
    folders.push_back(fs::path(home) / "lib64");
  }
  folders.emplace_back("/usr/local/cuda/lib64");

  std::vector<std::string> paths;
  for (const int major : majors) {
    paths.push_back(fmt::format("libnvrtc.so.{}", major));
  }
  for (const int major : majors) {
    for (const fs::path& folder : folders) {
      const fs::path path = folder / fmt::format("libnvrtc.so.{}", major);
      std::error_code error;
      if (fs::exists(path, error)) {
        paths.push_back(path.string());
      }
    }
  }
  return paths;
}

std::string path_of(void* library, const std::string& name) {
  link_map* map = nullptr;
  return dlinfo(library, RTLD_DI_LINKMAP, &map) == 0 && map != nullptr ? map->l_name : name;
}

/// Fills `result` from one library; returns why it cannot be used, empty when it can.
std::string try_open(const std::string& name, Nvrtc& result) {
  // Lazily: binding all of this large library at once costs milliseconds.
  void* library = dlopen(name.c_str(), RTLD_LAZY | RTLD_LOCAL);
  if (library == nullptr) {
    const char* text = dlerror();
    return text != nullptr ? text : name + " cannot be opened";
  }
  NvrtcInfo& info = result.info;
  info.path = path_of(library, name);
  if (!find_all(library, result.api)) {
    return info.path + " lacks an entry point of NVRTC 12";
  }
  if (result.api.version(&info.major, &info.minor) != 0 || info.major < kMinMajor) {
    return fmt::format("{} is version {}.{}, 12.0 or later is needed", info.path, info.major,
                       info.minor);
  }
  int count = 0;
  if (result.api.num_architectures(&count) == 0) {
    info.architectures.resize(static_cast<std::size_t>(count));
    result.api.architectures(info.architectures.data());
  }
  std::error_code error;
  const std::uintmax_t size = fs::file_size(info.path, error);
  info.signature = fmt::format("nvrtc {}.{}, {} bytes", info.major, info.minor, error ? 0 : size);
  info.available = true;
  return {};
}

const Nvrtc& loaded() {
  static const Nvrtc& instance = []() -> const Nvrtc& {
    auto* result = new Nvrtc();  // never destroyed: threads may compile until the process ends
    std::string reasons;
    for (const std::string& path : candidates()) {
      const std::string reason = try_open(path, *result);
      if (reason.empty()) {
        return *result;
      }
      reasons += (reasons.empty() ? "" : "; ") + reason;
    }
    result->info = {};
    result->info.reason = fmt::format(
        "NVRTC could not be opened ({}); install the package nvidia-cuda-nvrtc, or set "
        "FOVEAL_NVRTC to libnvrtc.so of CUDA 12 or later, or FOVEAL_KERNEL_PACK to a file of "
        "'foveal prebuild'",
        reasons);
    return *result;
  }();
  return instance;
}

/// The number in "sm_90a"; 0 when there is none.
int number_of(std::string_view arch) {
  int number = 0;
  if (arch.starts_with("sm_")) {
    std::from_chars(arch.data() + 3, arch.data() + arch.size(), number);
  }
  return number;
}

struct ProgramOwner {
  const Api& api;
  ProgramHandle handle = nullptr;
  ~ProgramOwner() { api.destroy(&handle); }
};

}  // namespace

const NvrtcInfo& nvrtc() { return loaded().info; }

bool nvrtc_knows(std::string_view arch) {
  const std::vector<int>& known = nvrtc().architectures;
  return std::find(known.begin(), known.end(), number_of(arch)) != known.end();
}

const std::vector<std::string>& compile_options() {
  // Functions without an annotation are the device's, so that headers of plain constexpr code serve
  // both sides. No fast math: kernels that want an approximate instruction name it.
  static const std::vector<std::string> options{
      "--std=c++20", "--device-as-default-execution-space", "--ptxas-options=-v"};
  return options;
}

CompiledProgram compile_program(const Program& program, std::string_view arch) {
  const Nvrtc& nvrtc = loaded();
  if (!nvrtc.info.available) {
    fail(ErrorCode::compile, "{}: {}", program.name, nvrtc.info.reason);
  }
  if (!nvrtc_knows(arch)) {
    fail(ErrorCode::compile, "{}: NVRTC {}.{} ({}) does not compile for {}", program.name,
         nvrtc.info.major, nvrtc.info.minor, nvrtc.info.path, arch);
  }
  std::vector<const char*> names;
  std::vector<const char*> texts;
  for (const auto& [name, text] : program.headers) {
    names.push_back(name.c_str());
    texts.push_back(text.c_str());
  }
  std::vector<std::string> options = compile_options();
  options.push_back(fmt::format("--gpu-architecture={}", arch));
  if (nvrtc.info.major > 12 || nvrtc.info.minor >= 9) {
    // NVRTC's own cache (since 12.9) gives no assembler report on a hit, and we have a cache.
    options.emplace_back("--no-cache");
  }
  std::vector<const char*> option_pointers;
  for (const std::string& option : options) {
    option_pointers.push_back(option.c_str());
  }

  const Api& api = nvrtc.api;
  const auto require = [&](int status, const char* call) {
    if (status != 0) {
      fail(ErrorCode::compile, "{}: {} failed: {}", program.name, call, api.error_string(status));
    }
  };
  ProgramOwner owner{api};
  require(api.create(&owner.handle, program.text.c_str(), program.name.c_str(),
                     static_cast<int>(names.size()), texts.data(), names.data()),
          "nvrtcCreateProgram");
  const int status =
      api.compile(owner.handle, static_cast<int>(option_pointers.size()), option_pointers.data());
  CompiledProgram result;
  std::size_t size = 0;
  if (api.log_size(owner.handle, &size) == 0 && size > 1) {
    result.log.resize(size);
    api.log(owner.handle, result.log.data());
    result.log.resize(size - 1);  // without the terminating zero
  }
  if (status != 0) {
    fail(ErrorCode::compile, "{} does not compile for {}: {}\n{}", program.name, arch,
         api.error_string(status), result.log);
  }
  require(api.cubin_size(owner.handle, &size), "nvrtcGetCUBINSize");
  result.cubin.resize(size);
  require(api.cubin(owner.handle, reinterpret_cast<char*>(result.cubin.data())), "nvrtcGetCUBIN");
  return result;
}

}  // namespace foveal::cuda
