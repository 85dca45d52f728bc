#include "serving/model.h"

#include <cstring>

#include "core/check.h"
#include "core/environment.h"
#include "serving/gguf.h"
#include "serving/hf_model.h"
#include "serving/llama2c.h"
#include "serving/mapped_file.h"
#include "serving/safetensors.h"

namespace foveal::serving {

Model load_model(const std::filesystem::path& path, ProgressFn progress, void* user) {
  if (is_folder(path)) {
    return load_hf_model(path, progress, user);
  }
  const MappedFile file(path);
  if (is_gguf(file.bytes())) {
    return load_gguf_model(path, progress, user);
  }
  if (is_safetensors(file.bytes())) {
    return load_hf_model(path, progress, user);
  }
  if (path.extension() == ".safetensors") {
    fail(ErrorCode::io, "{}: is no safetensors file, though it is named so", path.string());
  }
  // Files of llama2.c begin with nothing that would tell.
  try {
    return load_llama2c_model(path, progress, user);
  } catch (const Error& error) {
    fail(error.code(),
         "{} (read as a model of llama2.c, for it is no GGUF file, no safetensors file and no "
         "folder "
         "with config.json)",
         error.what());
  }
}

std::filesystem::path default_model_path() {
  std::filesystem::path cache = environment("FOVEAL_CACHE_DIR");
  if (cache.empty()) {
    const std::string xdg = environment("XDG_CACHE_HOME");
    cache = (xdg.empty() ? environment("HOME") + "/.cache" : xdg) + "/foveal";
  }
  return cache / "models" / "SmolLM2-135M-Instruct.Q4_1.gguf";
}

}  // namespace foveal::serving
