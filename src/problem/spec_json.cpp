#include "problem/spec_json.h"

namespace foveal::problem {

void read_layer_members(const JsonValue& json, AttentionProblem& problem) {
  AttentionSpec& spec = problem.spec;
  if (const auto scale = json.find("scale")) {
    spec.scale = static_cast<float>(scale->number());
  }
  if (const auto type = json.find("attn_type")) {
    const auto known = attn_type_from_string(type->text());
    if (!known) {
      type->refuse("decoder, encoder, encoder_only or encoder_decoder");
    }
    spec.attn_type = *known;
  }
  problem.paged = spec.uses_cache();
  problem.causal = spec.attn_type == AttnType::decoder;
  if (const auto causal = json.find("causal")) {
    problem.causal = causal->boolean();
    if (problem.causal && spec.attn_type != AttnType::decoder) {
      causal->refuse("false, for only decoders are causal");
    }
  }
  if (const auto window = json.find("window")) {
    const auto sides = window->elements(2);
    spec.window = {sides[0].integer(-1, kMaxLength), sides[1].integer(-1, kMaxLength)};
  }
  if (const auto cap = json.find("logits_soft_cap")) {
    spec.logits_soft_cap = static_cast<float>(cap->number());
  }
}

}  // namespace foveal::problem
