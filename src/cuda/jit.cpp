#include "cuda/jit.h"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <spdlog/spdlog.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <chrono>
#include <exception>
#include <future>
#include <mutex>
#include <optional>
#include <system_error>
#include <thread>
#include <unordered_map>
#include <utility>

#include "core/check.h"
#include "core/environment.h"
#include "cuda/cubin_cache.h"
#include "cuda/cubin_report.h"
#include "cuda/kernel_pack.h"
#include "cuda/kernel_program.h"
#include "cuda/nvrtc.h"

namespace foveal::cuda {
namespace {

namespace fs = std::filesystem;

double milliseconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double, std::milli>(std::chrono::steady_clock::now() - begin)
      .count();
}

}  // namespace

/// A map whose values are made once, by the first who asks; the others wait. A failure is passed to
/// those who waited and forgotten, so that a later call tries again.
template <typename Value>
class OnceMap {
 public:
  template <typename Make>
  Value get(const std::string& key, Make&& make) {
    std::promise<Value> promise;
    std::shared_future<Value> value;
    bool is_first = false;
    {
      const std::lock_guard lock(mutex_);
      const auto [entry, inserted] = map_.try_emplace(key);
      if (inserted) {
        entry->second = promise.get_future().share();
      }
      value = entry->second;
      is_first = inserted;
    }
    if (is_first) {
      try {
        promise.set_value(make());
      } catch (...) {
        {
          const std::lock_guard lock(mutex_);
          map_.erase(key);
        }
        promise.set_exception(std::current_exception());
      }
    }
    return value.get();
  }

 private:
  std::mutex mutex_;
  std::unordered_map<std::string, std::shared_future<Value>> map_;
};

struct LoadedKernel {
  Module module;
  Kernel kernel;
};

struct Jit::Impl {
  explicit Impl(JitOptions options)
      : cache(std::move(options.cache_folder), options.max_cache_bytes) {
    for (const fs::path& path : options.packs) {
      packs.push_back(KernelPack::read(path));
    }
  }

  std::optional<Cubin> from_packs(const std::string& id) {
    const std::lock_guard lock(packs_mutex);
    for (const KernelPack& pack : packs) {
      if (std::optional<Cubin> cubin = pack.find(id)) {
        return cubin;
      }
    }
    return std::nullopt;
  }

  Cubin make_cubin(const KernelKey& key, const std::string& text);

  CubinCache cache;
  std::mutex packs_mutex;
  std::vector<KernelPack> packs;
  OnceMap<std::shared_ptr<const Cubin>> cubins;
  OnceMap<std::shared_ptr<const LoadedKernel>> kernels;
};

Cubin Jit::Impl::make_cubin(const KernelKey& key, const std::string& text) {
  const auto begin = std::chrono::steady_clock::now();
  const KernelProgram program = assemble(key);
  if (std::optional<Cubin> cubin = from_packs(program.id)) {
    cubin->milliseconds = milliseconds_since(begin);
    return std::move(*cubin);
  }
  if (!nvrtc().available) {
    fail(ErrorCode::compile, "kernel {} is in none of the {} packs, and cannot be compiled: {}",
         text, packs.size(), nvrtc().reason);
  }
  const std::string id = program.id_with_compiler(nvrtc().signature);
  if (std::optional<Cubin> cubin = cache.load(id)) {
    cubin->milliseconds = milliseconds_since(begin);
    return std::move(*cubin);
  }
  CompiledProgram compiled = compile_program(program.program, key.arch);
  Cubin cubin{.key_text = text,
              .entry = key.entry,
              .arch = key.arch,
              .resources = resources_from_elf(compiled.cubin, key.entry),
              .log = std::move(compiled.log),
              .image = std::move(compiled.cubin),
              .origin = Cubin::Origin::compiled};
  add_spills_from_log(cubin.resources, cubin.log, key.entry);
  cubin.milliseconds = milliseconds_since(begin);
  spdlog::debug("compiled {} in {:.0f} ms: {} registers, {} bytes of stack", text,
                cubin.milliseconds, cubin.resources.registers, cubin.resources.stack_bytes);
  cache.store(id, cubin);
  return cubin;
}

Jit::Jit(JitOptions options) : impl_(std::make_unique<Impl>(std::move(options))) {}
Jit::~Jit() = default;

Jit& Jit::global() {
  // Never destroyed: kernels live as long as the process.
  static Jit& jit = []() -> Jit& {
    JitOptions options = JitOptions::from_environment();
    if (options.cache_folder.empty()) {
      spdlog::warn(
          "kernel cache: neither FOVEAL_CACHE_DIR, XDG_CACHE_HOME nor HOME is set; kernels are "
          "kept in memory only and compiled by each process");
    }
    return *new Jit(std::move(options));
  }();
  return jit;
}

std::shared_ptr<const Cubin> Jit::compile(const KernelKey& key) {
  const std::string text = key.text();
  return impl_->cubins.get(
      text, [&] { return std::make_shared<const Cubin>(impl_->make_cubin(key, text)); });
}

std::vector<std::shared_ptr<const Cubin>> Jit::compile_all(const std::vector<KernelKey>& keys,
                                                           int threads,
                                                           const std::function<void()>& on_done) {
  check(threads >= 0, "threads is {}, it must be 0 (as many as the machine has) or more", threads);
  std::size_t workers = threads == 0 ? std::max(1U, std::thread::hardware_concurrency())
                                     : static_cast<std::size_t>(threads);
  workers = std::min(workers, keys.size());
  std::vector<std::shared_ptr<const Cubin>> cubins(keys.size());
  std::vector<std::string> errors(keys.size());
  std::atomic<std::size_t> next{0};
  const auto work = [&] {
    for (std::size_t i = next++; i < keys.size(); i = next++) {
      try {
        cubins[i] = compile(keys[i]);
      } catch (const std::exception& error) {
        errors[i] = error.what();
      }
      if (on_done) {
        on_done();
      }
    }
  };
  {
    std::vector<std::jthread> helpers;
    for (std::size_t i = 1; i < workers; ++i) {
      helpers.emplace_back(work);
    }
    work();
  }
  std::string text;
  std::size_t failed = 0;
  for (const std::string& error : errors) {
    if (!error.empty()) {
      text += "\n" + error;
      ++failed;
    }
  }
  if (failed != 0) {
    fail(ErrorCode::compile, "{} of {} kernels could not be made:{}", failed, keys.size(), text);
  }
  return cubins;
}

const Kernel* Jit::prepare(const KernelKey& key, int device) {
  const std::string text = key.text();
  const auto loaded = impl_->kernels.get(fmt::format("{} {}", device, text), [&] {
    const std::shared_ptr<const Cubin> cubin = compile(key);
    auto made = std::make_shared<LoadedKernel>();
    made->module = Module(device, cubin->image);
    CUfunc_st* function = made->module.function(key.entry);
    const ContextGuard guard(device);
    made->kernel = {.function = function,
                    .device = device,
                    .attributes = attributes_of(function),
                    .resources = cubin->resources,
                    .name = text};
    return std::shared_ptr<const LoadedKernel>(std::move(made));
  });
  return &loaded->kernel;  // impl_->kernels holds it.
}

std::vector<const Kernel*> Jit::prepare_all(const std::vector<KernelKey>& keys, int device) {
  compile_all(keys);
  std::vector<const Kernel*> kernels;
  kernels.reserve(keys.size());
  for (const KernelKey& key : keys) {
    kernels.push_back(prepare(key, device));
  }
  return kernels;
}

void Jit::add_pack(const fs::path& path) {
  KernelPack pack = KernelPack::read(path);
  const std::lock_guard lock(impl_->packs_mutex);
  impl_->packs.push_back(std::move(pack));
}

JitOptions JitOptions::from_environment() {
  JitOptions options;
  if (const std::string folder = environment("FOVEAL_CACHE_DIR"); !folder.empty()) {
    options.cache_folder = fs::path(folder) / "cubins";
  } else if (const std::string caches = environment("XDG_CACHE_HOME"); !caches.empty()) {
    options.cache_folder = fs::path(caches) / "foveal" / "cubins";
  } else if (const std::string home = environment("HOME"); !home.empty()) {
    options.cache_folder = fs::path(home) / ".cache" / "foveal" / "cubins";
  }
  if (const std::string text = environment("FOVEAL_CACHE_MAX_MB"); !text.empty()) {
    std::int64_t megabytes = 0;
    const auto [end, error] = std::from_chars(text.data(), text.data() + text.size(), megabytes);
    check(error == std::errc() && end == text.data() + text.size() && megabytes >= 0 &&
              megabytes < (std::int64_t{1} << 40),
          "FOVEAL_CACHE_MAX_MB is '{}', it must be a number of MiB", text);
    options.max_cache_bytes = megabytes << 20;
  }
  std::string packs = environment("FOVEAL_KERNEL_PACK");
  while (!packs.empty()) {
    const std::size_t colon = packs.find(':');
    if (const std::string path = packs.substr(0, colon); !path.empty()) {
      options.packs.emplace_back(path);
    }
    packs.erase(0, colon == std::string::npos ? packs.size() : colon + 1);
  }
  return options;
}

void Kernel::set_max_dynamic_shared_bytes(int bytes) const {
  const ContextGuard guard(device);
  cuda::set_max_dynamic_shared_bytes(function, bytes);
}

void check_arguments(const Kernel& kernel, std::span<const int> bytes) {
  const std::vector<int>& compiled = kernel.resources.parameter_bytes;
  check(std::ranges::equal(bytes, compiled),
        "arguments of kernel {} are of {} bytes, it was compiled with parameters of {}",
        kernel.name, fmt::join(bytes, ", "), fmt::join(compiled, ", "));
}

}  // namespace foveal::cuda
