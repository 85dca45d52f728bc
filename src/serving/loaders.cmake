# Model files and tokenizers.
find_package(PkgConfig REQUIRED)
pkg_check_modules(utf8proc REQUIRED IMPORTED_TARGET libutf8proc)
target_sources(foveal_serving PRIVATE
  bpe_tokenizer.cpp
  chat_template.cpp
  gguf.cpp
  gguf_model.cpp
  gguf_tokenizer.cpp
  hf_model.cpp
  hf_tokenizer.cpp
  llama2c.cpp
  llama2c_tokenizer.cpp
  mapped_file.cpp
  model.cpp
  pretokenizer.cpp
  safetensors.cpp
  tokenizer.cpp
  weights.cpp)
target_link_libraries(foveal_serving PRIVATE PkgConfig::utf8proc)
