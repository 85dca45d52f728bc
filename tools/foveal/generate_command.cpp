#include "foveal/generate_command.h"

#include <fmt/format.h>
#include <unistd.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cstdio>
#include <filesystem>
#include <fstream>
#include <limits>
#include <memory>
#include <nlohmann/json.hpp>
#include <vector>

#include "core/check.h"
#include "foveal/commands.h"
#include "serving/engine.h"
#include "serving/model.h"
#include "serving/sampler.h"
#include "serving/tokenizer.h"

namespace foveal::tools {
namespace {

constexpr const char* kReplacement = "\xEF\xBF\xBD";

/// Length of the UTF-8 character that `text` begins with: 0 when it is cut short, −1 when no
/// character begins like this. By the table of well-formed byte sequences in the Unicode standard
/// (chapter 3.9).
int utf8_length(std::string_view text) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char lead = byte(0);
  if (lead < 0x80) {
    return 1;
  }
  if (lead < 0xC2 || lead > 0xF4) {
    return -1;
  }
  const int length = lead < 0xE0 ? 2 : lead < 0xF0 ? 3 : 4;
  // The second byte's range excludes overlong forms, surrogates and what is beyond U+10FFFF.
  unsigned char low = lead == 0xE0 ? 0xA0 : lead == 0xF0 ? 0x90 : 0x80;
  unsigned char high = lead == 0xED ? 0x9F : lead == 0xF4 ? 0x8F : 0xBF;
  for (std::size_t i = 1; i < static_cast<std::size_t>(length); ++i, low = 0x80, high = 0xBF) {
    if (i == text.size()) {
      return 0;
    }
    if (byte(i) < low || byte(i) > high) {
      return -1;
    }
  }
  return length;
}

struct Options {
  std::string model;
  std::string tokenizer;
  std::string prompt;
  std::string prompts_file;
  std::int64_t steps = 256;
  float temperature = 0.0F;
  std::uint64_t seed = 0;
  std::string device = "cpu";
  std::string backend;
  std::string dtype;
  std::string kv_cache_dtype;
  std::int64_t block_size = 0;
  int threads = 0;
  bool raw = false;
  bool json = false;
};

/// One prompt and what became of it.
struct Generation {
  std::string prompt;
  std::vector<std::int32_t> prompt_tokens;
  std::vector<std::int32_t> tokens;
  std::string text;
  Utf8Stream stream;
  serving::FinishReason finish = serving::FinishReason::none;
};

std::vector<std::string> read_prompts(const Options& options) {
  if (options.prompts_file.empty()) {
    return {options.prompt};
  }
  std::ifstream file(options.prompts_file);
  if (!file) {
    fail(ErrorCode::io, "--prompts {} could not be opened", options.prompts_file);
  }
  std::vector<std::string> prompts;
  constexpr std::string_view kByteOrderMark = "\xEF\xBB\xBF";  // Some editors begin files with it.
  for (std::string line; std::getline(file, line);) {
    if (line.ends_with('\r')) {
      line.pop_back();
    }
    if (prompts.empty() && line.starts_with(kByteOrderMark)) {
      line.erase(0, kByteOrderMark.size());
    }
    if (!line.empty()) {
      prompts.push_back(std::move(line));
    }
  }
  if (file.bad()) {
    fail(ErrorCode::io, "--prompts {} could not be read", options.prompts_file);
  }
  check(!prompts.empty(), "--prompts {} holds no prompt; it must have one a line",
        options.prompts_file);
  return prompts;
}

serving::Model load(const std::filesystem::path& path, bool is_default) {
  if (!std::filesystem::exists(path)) {
    fail(ErrorCode::io, "{} {} does not exist; {}", is_default ? "the default model" : "--model",
         path.string(),
         is_default ? "run scripts/fetch_model.sh to download it, or pass --model"
                    : "pass a GGUF, safetensors or llama2.c file");
  }
  const bool show = isatty(STDERR_FILENO) != 0;
  const auto progress = [](void*, std::int64_t done, std::int64_t total) {
    print_stderr(fmt::format("\rLoading the model: {:3d} %",
                             total > 0 ? std::min<std::int64_t>(100, done * 100 / total) : 100));
  };
  serving::Model model = serving::load_model(path, show ? +progress : nullptr, nullptr);
  if (show) {
    print_stderr(fmt::format("\r{:30}\r", ""));
  }
  return model;
}

std::vector<std::int32_t> encode_prompt(const serving::Tokenizer& tokenizer,
                                        const std::string& prompt, bool raw) {
  const bool chat = !raw && tokenizer.has_chat_template();
  check(!chat || !prompt.empty(),
        "--prompt is empty; a chat model needs one, unless --raw is given");
  std::vector<std::int32_t> tokens =
      chat ? tokenizer.encode(tokenizer.apply_chat_template({{"user", prompt}}), true)
           : tokenizer.encode(prompt);
  // Some chat templates spell the token that sequences start with.
  const std::optional<std::int32_t> bos = tokenizer.bos();
  if (bos && (tokens.empty() || tokens.front() != *bos)) {
    tokens.insert(tokens.begin(), *bos);
  }
  check(!tokens.empty(),
        "--prompt is empty; this model has no token to begin with, so it needs one");
  return tokens;
}

void write_stdout(std::string_view text) {
  if (std::fwrite(text.data(), 1, text.size(), stdout) != text.size() || std::fflush(stdout) != 0) {
    fail(ErrorCode::io, "stdout could not be written");
  }
}

void report(const serving::Engine& engine) {
  const serving::EngineStats stats = engine.stats();
  print_stderr(fmt::format(
      "prefill: {} tokens, {:.1f} tokens/s; decode: {} tokens, {:.1f} tokens/s\n",
      stats.prefill_tokens, stats.prefill_rate(), stats.decode_tokens, stats.decode_rate()));
  print_stderr(fmt::format(
      "KV cache: at most {} of {} blocks used; prefix-cache hits: {} blocks, {} tokens; "
      "preemptions: {}\n",
      stats.peak_blocks, engine.runner().num_blocks() - 1, stats.prefix_hit_blocks,
      stats.prefix_hit_tokens, stats.preemptions));
  const serving::ModelRunner& runner = engine.runner();
  const AttentionSpec& spec = runner.builder().config().spec;
  print_stderr(fmt::format("attention: on {}, in {}, KV cache in {} with blocks of {} tokens\n",
                           runner.device().describe(), to_string(spec.dtype),
                           to_string(spec.cache_dtype()), runner.block_size()));
  print_stderr(fmt::format("backend: {}\n", runner.selection().summary()));
}

nlohmann::json to_json(const serving::Engine& engine, const serving::Model& model,
                       const std::string& model_path, const std::vector<Generation>& generations) {
  nlohmann::json results = nlohmann::json::array();
  for (const Generation& generation : generations) {
    results.push_back({{"prompt", generation.prompt},
                       {"prompt_tokens", generation.prompt_tokens},
                       {"text", generation.text},
                       {"tokens", generation.tokens},
                       {"finish_reason", serving::to_string(generation.finish)}});
  }
  const serving::EngineStats stats = engine.stats();
  const serving::ModelRunner& runner = engine.runner();
  return {{"model", {{"path", model_path}, {"name", model.config.name}}},
          {"device", runner.device().describe()},
          {"selection", nlohmann::json::parse(runner.selection().json())},
          {"threads", runner.num_threads()},
          {"results", std::move(results)},
          {"stats",
           {{"steps", stats.steps},
            {"prompt_tokens", stats.prompt_tokens},
            {"generated_tokens", stats.generated_tokens},
            {"prefill_tokens", stats.prefill_tokens},
            {"prefill_seconds", stats.prefill_seconds},
            {"prefill_tokens_per_second", stats.prefill_rate()},
            {"decode_tokens", stats.decode_tokens},
            {"decode_seconds", stats.decode_seconds},
            {"decode_tokens_per_second", stats.decode_rate()},
            {"preemptions", stats.preemptions},
            {"block_size", runner.block_size()},
            {"peak_blocks", stats.peak_blocks},
            {"num_blocks", runner.num_blocks() - 1},
            {"prefix_hit_blocks", stats.prefix_hit_blocks},
            {"prefix_hit_tokens", stats.prefix_hit_tokens}}}};
}

void generate(const Options& options) {
  serving::EngineConfig config;
  config.device = parse_device("--device", options.device);
  // A device that is not there is told before the model is loaded, which takes a while.
  serving::open_attention_device(config.device);
  config.backend = options.backend;
  if (!options.dtype.empty()) {
    config.dtype = parse_dtype("--dtype", options.dtype);
  }
  if (!options.kv_cache_dtype.empty()) {
    config.kv_cache_dtype = parse_dtype("--kv-cache-dtype", options.kv_cache_dtype);
  }
  config.block_size = options.block_size;
  config.num_threads = options.threads;

  std::vector<Generation> generations;
  for (std::string& prompt : read_prompts(options)) {
    generations.emplace_back().prompt = std::move(prompt);
  }
  const bool is_default = options.model.empty();
  const std::filesystem::path path =
      is_default ? serving::default_model_path() : std::filesystem::path(options.model);
  const serving::Model model = load(path, is_default);
  const auto tokenizer = serving::load_tokenizer(path, options.tokenizer, model.config.vocab_size);

  std::size_t longest = 0;
  for (Generation& generation : generations) {
    generation.prompt_tokens = encode_prompt(*tokenizer, generation.prompt, options.raw);
    longest = std::max(longest, generation.prompt_tokens.size());
  }

  config.max_num_seqs = std::min<std::int64_t>(config.max_num_seqs, std::ssize(generations));
  // No sequence can grow longer, so the cache needs no room for it.
  config.max_seq_len =
      std::min(model.config.max_seq_len, static_cast<std::int64_t>(longest) + options.steps);
  config.stop_tokens = tokenizer->stop_tokens();
  serving::Engine engine(model, config);

  const bool stream = generations.size() == 1 && !options.json;
  for (std::size_t i = 0; i < generations.size(); ++i) {
    Generation& generation = generations[i];
    const serving::SamplingParams sampling{.temperature = options.temperature,
                                           .seed = serving::derive_seed(options.seed, i),
                                           .max_tokens = options.steps};
    const auto on_token = [&, stream](const serving::TokenEvent& event) {
      const std::int32_t previous =
          generation.tokens.empty() ? generation.prompt_tokens.back() : generation.tokens.back();
      std::string text = event.finish == serving::FinishReason::stop
                             ? ""
                             : generation.stream.push(tokenizer->decode(event.token, previous));
      generation.tokens.push_back(event.token);
      generation.finish = event.finish;
      if (event.finish != serving::FinishReason::none) {
        text += generation.stream.finish();
      }
      generation.text += text;
      if (stream) {
        write_stdout(text);
      }
    };
    engine.add_request(generation.prompt_tokens, sampling, on_token);
  }
  engine.run();

  if (options.json) {
    write_stdout(to_json(engine, model, path.string(), generations)
                     .dump(2, ' ', false, nlohmann::json::error_handler_t::replace) +
                 "\n");
  } else if (stream) {
    write_stdout("\n");
  } else {
    for (std::size_t i = 0; i < generations.size(); ++i) {
      print_stderr(
          fmt::format("--- {} of {}: {}\n", i + 1, generations.size(), generations[i].prompt));
      write_stdout(generations[i].text + "\n");
    }
  }
  report(engine);
}

constexpr const char* kFooter = R"(Examples:
  foveal generate --prompt "Why is the sky blue?"
  foveal generate --prompt "Write a haiku." --temperature 0.8 --seed 7 --steps 64
  foveal generate --prompts questions.txt --json > answers.json
  foveal generate --model stories260K.bin --tokenizer tok512.bin --steps 200
  foveal generate --prompt "Once upon a time" --raw --backend REFERENCE
  foveal generate --prompt "Why is the sky blue?" --device cuda --kv-cache-dtype fp8

Text goes to stdout, everything else to stderr. A prompt given alone is answered as the tokens come;
those of a file are served together and printed in order.

With --device cuda every attention call and the KV cache are on the GPU; the rest of the model, a few
matrix products a layer, stays on the CPU in float32. Attention is then in f16 unless --dtype says
otherwise: its 11 significant bits leave the greedy text of small models as it is in f32. A model with
activations beyond f16's 65504 needs bf16.)";

}  // namespace

std::string Utf8Stream::push(std::string_view bytes) {
  pending_ += bytes;
  std::string complete;
  std::string_view rest = pending_;
  while (!rest.empty()) {
    const int length = utf8_length(rest);
    if (length == 0) {
      break;
    }
    complete += length > 0 ? rest.substr(0, static_cast<std::size_t>(length)) : kReplacement;
    rest.remove_prefix(length > 0 ? static_cast<std::size_t>(length) : 1);
  }
  pending_.erase(0, pending_.size() - rest.size());
  return complete;
}

std::string Utf8Stream::finish() {
  const bool cut_short = !pending_.empty();
  pending_.clear();
  return cut_short ? kReplacement : "";
}

CLI::App* add_generate_command(CLI::App& app, int& exit_code) {
  CLI::App* command =
      app.add_subcommand("generate", "Generate text with a small model, served by the library");
  const auto options = std::make_shared<Options>();
  command->add_option("--model", options->model,
                      "Model: a GGUF, safetensors or llama2.c file, or a folder in Hugging Face's "
                      "form; by default the one of scripts/fetch_model.sh");
  command->add_option("--tokenizer", options->tokenizer,
                      "Tokenizer file, for models that do not bring their own");
  auto* prompt = command->add_option(
      "--prompt", options->prompt, "What to answer or, with a model that does not chat, continue");
  command
      ->add_option("--prompts", options->prompts_file,
                   "File with one prompt a line (empty lines are skipped), all served together")
      ->excludes(prompt);
  command->add_option("--steps", options->steps, "Most tokens to generate for a prompt")
      ->check(CLI::Range(std::int64_t{1}, std::int64_t{1} << 31))
      ->capture_default_str();
  command->add_option("--temperature", options->temperature, "0 always takes the likeliest token")
      ->check(CLI::Range(0.0F, 100.0F))
      ->capture_default_str();
  command->add_option("--seed", options->seed, "Seed of the draws when temperature is above 0")
      ->transform(whole_number(std::numeric_limits<std::uint64_t>::max()))
      ->capture_default_str();
  command
      ->add_option("--device", options->device,
                   "Where attention runs and the KV cache lies: cpu or cuda (the first GPU)")
      ->check(CLI::IsMember({"cpu", "cuda"}))
      ->capture_default_str();
  command->add_option("--backend", options->backend,
                      "Attention backend by its id (see `foveal info`); by default the best");
  command->add_option("--dtype", options->dtype,
                      "What attention computes in: f32, f16 or bf16; by default f32 on the CPU and "
                      "f16 on CUDA");
  command->add_option("--kv-cache-dtype", options->kv_cache_dtype,
                      "What the KV cache holds: f8e4m3 (fp8), f8e5m2, …; by default as --dtype");
  command
      ->add_option("--block-size", options->block_size,
                   "Tokens a block of the KV cache; 0 is the backend's preferred size")
      ->check(CLI::Range(std::int64_t{0}, std::int64_t{1} << 16))
      ->capture_default_str();
  command->add_option("--threads", options->threads, "CPU threads; 0 is all")
      ->check(CLI::Range(0, 4096))
      ->capture_default_str();
  command->add_flag("--raw", options->raw, "Continue the prompt as it is, without a chat template");
  command->add_flag("--json", options->json, "Print one JSON document instead of text");
  command->footer(kFooter);
  command->callback([options, &exit_code] {
    generate(*options);
    exit_code = 0;
  });
  return command;
}

}  // namespace foveal::tools
