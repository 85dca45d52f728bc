#include "test_models.h"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstdlib>
#include <random>

namespace foveal::serving::testing {
namespace {

using Row = std::vector<double>;

Row product(const Matrix& matrix, const Row& x) {
  Row y(static_cast<std::size_t>(matrix.rows));
  for (std::size_t r = 0; r < y.size(); ++r) {
    for (std::size_t c = 0; c < x.size(); ++c) {
      y[r] += double{matrix.data[r * x.size() + c]} * x[c];
    }
  }
  return y;
}

Row normalized(const Row& x, const std::vector<float>& weight, double eps) {
  double sum = 0.0;
  for (const double value : x) {
    sum += value * value;
  }
  Row y(x.size());
  for (std::size_t i = 0; i < x.size(); ++i) {
    y[i] = x[i] / std::sqrt(sum / static_cast<double>(x.size()) + eps) * double{weight[i]};
  }
  return y;
}

void rotate(double* head, std::size_t head_size, std::size_t position, const ModelConfig& config) {
  for (std::size_t i = 0; i < head_size / 2; ++i) {
    const double angle = static_cast<double>(position) *
                         std::pow(double{config.rope_theta},
                                  -2.0 * static_cast<double>(i) / static_cast<double>(head_size));
    double& a = head[config.rope_interleaved ? 2 * i : i];
    double& b = head[config.rope_interleaved ? 2 * i + 1 : i + head_size / 2];
    const double old_a = a;
    a = old_a * std::cos(angle) - b * std::sin(angle);
    b = old_a * std::sin(angle) + b * std::cos(angle);
  }
}

/// Causal attention over all rows of qkv.
std::vector<Row> attend(const std::vector<Row>& qkv, const ModelConfig& config) {
  const auto heads = static_cast<std::size_t>(config.num_heads);
  const auto kv_heads = static_cast<std::size_t>(config.num_kv_heads);
  const auto size = static_cast<std::size_t>(config.head_size);
  std::vector<Row> out(qkv.size(), Row(heads * size));
  for (std::size_t t = 0; t < qkv.size(); ++t) {
    for (std::size_t h = 0; h < heads; ++h) {
      const std::size_t kv = h / (heads / kv_heads);
      double total = 0.0;
      for (std::size_t s = 0; s <= t; ++s) {
        double score = 0.0;
        for (std::size_t i = 0; i < size; ++i) {
          score += qkv[t][h * size + i] * qkv[s][(heads + kv) * size + i];
        }
        const double weight = std::exp(score / std::sqrt(static_cast<double>(size)));
        total += weight;
        for (std::size_t i = 0; i < size; ++i) {
          out[t][h * size + i] += weight * qkv[s][(heads + kv_heads + kv) * size + i];
        }
      }
      for (std::size_t i = 0; i < size; ++i) {
        out[t][h * size + i] /= total;
      }
    }
  }
  return out;
}

void add(Row& x, const Row& y) {
  for (std::size_t i = 0; i < x.size(); ++i) {
    x[i] += y[i];
  }
}

Row dense_logits(const Model& model, const std::vector<std::int32_t>& tokens) {
  const ModelConfig& config = model.config;
  std::vector<Row> hidden;
  for (const std::int32_t token : tokens) {
    const auto begin = model.token_embedding.data.begin() + token * config.hidden_size;
    hidden.emplace_back(begin, begin + config.hidden_size);
  }
  for (const LayerWeights& layer : model.layers) {
    std::vector<Row> qkv;
    for (std::size_t t = 0; t < hidden.size(); ++t) {
      qkv.push_back(
          product(layer.qkv, normalized(hidden[t], layer.attn_norm, config.rms_norm_eps)));
      for (std::int64_t h = 0; h < config.num_heads + config.num_kv_heads; ++h) {
        rotate(qkv.back().data() + h * config.head_size, static_cast<std::size_t>(config.head_size),
               t, config);
      }
    }
    const std::vector<Row> attended = attend(qkv, config);
    for (std::size_t t = 0; t < hidden.size(); ++t) {
      add(hidden[t], product(layer.output, attended[t]));
      const Row gate_up =
          product(layer.gate_up, normalized(hidden[t], layer.ffn_norm, config.rms_norm_eps));
      const std::size_t inner = gate_up.size() / 2;
      Row activation(inner);
      for (std::size_t i = 0; i < inner; ++i) {
        activation[i] = gate_up[i] / (1.0 + std::exp(-gate_up[i])) * gate_up[inner + i];
      }
      add(hidden[t], product(layer.down, activation));
    }
  }
  return product(model.head(), normalized(hidden.back(), model.output_norm, config.rms_norm_eps));
}

}  // namespace

Model random_model(bool rope_interleaved, bool tied) {
  std::mt19937_64 generator(20240229);
  const auto matrix = [&](std::int64_t rows, std::int64_t cols) {
    std::normal_distribution<float> normal(0.0F, 1.0F / std::sqrt(static_cast<float>(cols)));
    Matrix result{rows, cols, std::vector<float>(static_cast<std::size_t>(rows * cols))};
    std::ranges::generate(result.data, [&] { return normal(generator); });
    return result;
  };
  const auto norm = [&](std::int64_t size) {
    std::uniform_real_distribution<float> uniform(0.5F, 1.5F);
    std::vector<float> result(static_cast<std::size_t>(size));
    std::ranges::generate(result, [&] { return uniform(generator); });
    return result;
  };
  Model model;
  ModelConfig& config = model.config;
  config.name = "random";
  config.num_layers = 2;
  config.hidden_size = 48;
  config.intermediate_size = 80;
  config.num_heads = 4;
  config.num_kv_heads = 2;
  config.head_size = 16;
  config.vocab_size = 97;
  config.max_seq_len = 256;
  config.rope_interleaved = rope_interleaved;
  model.token_embedding = matrix(config.vocab_size, config.hidden_size);
  for (std::int64_t l = 0; l < config.num_layers; ++l) {
    LayerWeights layer;
    layer.attn_norm = norm(config.hidden_size);
    layer.qkv =
        matrix((config.num_heads + 2 * config.num_kv_heads) * config.head_size, config.hidden_size);
    // Sharper attention than 1/√cols gives, so that the tokens depend on positions and on the
    // cache.
    std::ranges::for_each(layer.qkv.data, [](float& value) { value *= 2.0F; });
    layer.output = matrix(config.hidden_size, config.num_heads * config.head_size);
    layer.ffn_norm = norm(config.hidden_size);
    layer.gate_up = matrix(2 * config.intermediate_size, config.hidden_size);
    layer.down = matrix(config.hidden_size, config.intermediate_size);
    model.layers.push_back(std::move(layer));
  }
  model.output_norm = norm(config.hidden_size);
  if (!tied) {
    model.lm_head = matrix(config.vocab_size, config.hidden_size);
  }
  return model;
}

std::vector<std::int32_t> random_tokens(std::int64_t count, std::uint64_t seed) {
  std::mt19937_64 generator(seed);
  std::vector<std::int32_t> tokens(static_cast<std::size_t>(count));
  std::ranges::generate(tokens, [&] { return static_cast<std::int32_t>(generator() % 97); });
  return tokens;
}

std::vector<std::vector<std::int32_t>> prompts_with_prefix(std::size_t count) {
  std::vector<std::vector<std::int32_t>> prompts;
  for (std::size_t i = 0; i < count; ++i) {
    prompts.push_back(random_tokens(40, 1));
    const auto own = random_tokens(1 + static_cast<std::int64_t>(i) % 7, 100 + i);
    prompts.back().insert(prompts.back().end(), own.begin(), own.end());
  }
  return prompts;
}

std::vector<std::int32_t> dense_greedy(const Model& model, std::vector<std::int32_t> prompt,
                                       std::int64_t max_tokens) {
  std::vector<std::int32_t> generated;
  for (std::int64_t i = 0; i < max_tokens; ++i) {
    const Row logits = dense_logits(model, prompt);
    generated.push_back(
        static_cast<std::int32_t>(std::ranges::max_element(logits) - logits.begin()));
    prompt.push_back(generated.back());
  }
  return generated;
}

std::vector<std::vector<std::int32_t>> serve(Engine& engine,
                                             const std::vector<std::vector<std::int32_t>>& prompts,
                                             std::int64_t max_tokens) {
  std::vector<std::vector<std::int32_t>> outputs(prompts.size());
  for (std::size_t i = 0; i < prompts.size(); ++i) {
    engine.add_request(
        prompts[i], {.max_tokens = max_tokens},
        [&outputs, i](const TokenEvent& event) { outputs[i].push_back(event.token); });
  }
  engine.run();
  return outputs;
}

std::vector<std::vector<std::int32_t>> serve(const Model& model, const EngineConfig& config,
                                             const std::vector<std::vector<std::int32_t>>& prompts,
                                             std::int64_t max_tokens, EngineStats* stats) {
  Engine engine(model, config);
  auto outputs = serve(engine, prompts, max_tokens);
  if (stats != nullptr) {
    *stats = engine.stats();
  }
  return outputs;
}

std::vector<std::vector<std::int32_t>> serve_alone(
    const Model& model, const EngineConfig& config,
    const std::vector<std::vector<std::int32_t>>& prompts, std::int64_t max_tokens) {
  std::vector<std::vector<std::int32_t>> outputs;
  for (const auto& prompt : prompts) {
    outputs.push_back(serve(model, config, {prompt}, max_tokens)[0]);
  }
  return outputs;
}

void expect_greedy(const Model& model, const std::vector<std::vector<std::int32_t>>& prompts,
                   const std::vector<std::vector<std::int32_t>>& outputs,
                   const std::vector<std::vector<std::int32_t>>& expected, double tolerance) {
  ASSERT_EQ(outputs.size(), expected.size());
  for (std::size_t i = 0; i < outputs.size(); ++i) {
    const auto [got, wanted] = std::ranges::mismatch(outputs[i], expected[i]);
    if (wanted == expected[i].end()) {
      EXPECT_EQ(outputs[i].size(), expected[i].size()) << "prompt " << i;
      continue;
    }
    const auto at = got - outputs[i].begin();
    ASSERT_NE(got, outputs[i].end()) << "prompt " << i << " ends after " << at << " tokens";
    std::vector<std::int32_t> tokens = prompts[i];
    tokens.insert(tokens.end(), outputs[i].begin(), got);
    const Row logits = dense_logits(model, tokens);
    const double gap = std::ranges::max(logits) - logits[static_cast<std::size_t>(*got)];
    EXPECT_LT(gap, tolerance) << "prompt " << i << " differs at token " << at << ": " << *got
                              << " instead of " << *wanted;
  }
}

std::filesystem::path shared_dir() {
  const char* variable = std::getenv("FOVEAL_SHARED_DIR");
  return variable != nullptr ? std::filesystem::path(variable)
                             : std::filesystem::path(FOVEAL_SOURCE_DIR).parent_path() / "shared";
}

}  // namespace foveal::serving::testing
