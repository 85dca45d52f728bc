/* A serving engine's loop in plain C: two requests are prefilled together, then decode one token a
 * step, over a paged KV cache, through two layers. Every output is checked against a naive loop. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>

#include "foveal/foveal_c.h"

enum {
  kLayers = 2,
  kHeads = 4,
  kKvHeads = 2,
  kHeadSize = 16,
  kBlockSize = 16,
  kBlocks = 8, /* Block 0 is the null block. */
  kMaxBlocks = 3,
  kRequests = 2,
  kDecodeSteps = 20,
  kMaxTokens = 32 /* Of one step. */
};

static const DLDevice kCpu = {kDLCPU, 0};

/* Ends the program when a call fails; an engine would refuse the request instead. */
static void must(foveal_status status, const char* what) {
  if (status != FOVEAL_OK) {
    fprintf(stderr, "%s: %s: %s\n", what, foveal_status_name(status), foveal_last_error());
    exit(1);
  }
}

/* Stands for the model: a number in [-1, 1) that depends on all of these. */
static float model(int kind, int layer, int request, int position, int element) {
  unsigned x = (unsigned)kind * 0x9E3779B9u + (unsigned)layer * 0x85EBCA6Bu +
               (unsigned)request * 0xC2B2AE35u + (unsigned)position * 0x27D4EB2Fu +
               (unsigned)element * 0x165667B1u;
  x ^= x >> 15;
  x *= 0x2C1B3C6Du;
  x ^= x >> 12;
  x *= 0x297A2D39u;
  x ^= x >> 15;
  return (float)(x >> 8) / 8388608.0f - 1.0f;
}

enum { kQuery, kKey, kValue };

/* One row of attention as it is defined: softmax(scale · query · keyᵀ) · value over keys
 * 0 … position. Returns the largest difference from what Foveal wrote. */
static double check_row(const float* output, int layer, int request, int position) {
  double worst = 0.0;
  for (int head = 0; head < kHeads; ++head) {
    const int kv_head = head / (kHeads / kKvHeads);
    double sum = 0.0;
    double expected[kHeadSize] = {0.0};
    for (int key = 0; key <= position; ++key) {
      double score = 0.0;
      for (int i = 0; i < kHeadSize; ++i) {
        score += (double)model(kQuery, layer, request, position, head * kHeadSize + i) *
                 (double)model(kKey, layer, request, key, kv_head * kHeadSize + i);
      }
      const double weight = exp(score / sqrt((double)kHeadSize));
      sum += weight;
      for (int i = 0; i < kHeadSize; ++i) {
        expected[i] += weight * (double)model(kValue, layer, request, key, kv_head * kHeadSize + i);
      }
    }
    for (int i = 0; i < kHeadSize; ++i) {
      const double difference = fabs(expected[i] / sum - (double)output[head * kHeadSize + i]);
      worst = difference > worst ? difference : worst;
    }
  }
  return worst;
}

int main(void) {
  foveal_spec spec;
  must(foveal_spec_init(&spec, sizeof spec), "spec");
  spec.num_heads = kHeads;
  spec.num_kv_heads = kKvHeads;
  spec.head_size = kHeadSize;
  spec.dtype = FOVEAL_F32;

  /* Choose a backend, and say why. */
  foveal_selector_config wanted;
  must(foveal_selector_config_init(&wanted, sizeof wanted, &spec, kDLCPU, 0), "selector config");
  foveal_selection* selection = NULL;
  must(foveal_explain_selection(&wanted, &selection), "explain");
  printf("foveal %s: %s\n", foveal_version(), foveal_selection_summary(selection));
  foveal_selection_destroy(selection);
  foveal_backend* backend = NULL;
  must(foveal_select_backend(&wanted, &backend), "select");

  /* The backend says how its cache lies in memory; the memory is ours. One cache a layer. */
  foveal_kv_cache_layout layout = {.struct_size = sizeof layout};
  must(foveal_backend_kv_cache_layout(backend, &spec, kBlockSize, kBlocks, FOVEAL_NHD, &layout),
       "layout");
  foveal_layer* layers[kLayers];
  void* memory[kLayers];
  foveal_tensor key_caches[kLayers];
  foveal_tensor value_caches[kLayers];
  for (int l = 0; l < kLayers; ++l) {
    foveal_tensor cache;
    memory[l] = calloc(1, (size_t)layout.size_bytes);
    must(foveal_tensor_init(&cache, memory[l], layout.dtype, kCpu, layout.ndim, layout.shape,
                            layout.strides),
         "cache");
    must(foveal_backend_kv_cache_views(backend, &spec, kBlockSize, &cache.tensor, &key_caches[l],
                                       &value_caches[l]),
         "cache views");
    must(foveal_backend_make_layer(backend, &spec, &layers[l]), "layer");
  }
  foveal_builder_config config = {
      .struct_size = sizeof config, .spec = &spec, .block_size = kBlockSize, .num_blocks = kBlocks};
  foveal_builder* builder = NULL;
  must(foveal_backend_make_builder(backend, &config, &builder), "builder");

  /* Request 0 has a prompt of 21 tokens, request 1 one of 6; each owns three blocks. */
  int32_t block_table[kRequests][kMaxBlocks] = {{5, 2, 7}, {1, 6, 3}};
  int new_tokens[kRequests] = {21, 6};
  int32_t seq_lens[kRequests] = {0, 0};
  static float query[kMaxTokens][kHeads * kHeadSize];
  static float key[kMaxTokens][kKvHeads * kHeadSize];
  static float value[kMaxTokens][kKvHeads * kHeadSize];
  static float output[kMaxTokens][kHeads * kHeadSize];
  double worst = 0.0;
  int rows = 0;

  for (int step = 0; step <= kDecodeSteps; ++step) {
    /* What the scheduler decides: which tokens, and where they go in the cache. */
    int32_t query_start_loc[kRequests + 1] = {0};
    int64_t slot_mapping[kMaxTokens];
    int positions[kMaxTokens];
    int requests[kMaxTokens];
    int tokens = 0;
    int max_query_len = 0;
    int max_seq_len = 0;
    for (int r = 0; r < kRequests; ++r) {
      for (int i = 0; i < new_tokens[r]; ++i, ++tokens) {
        const int position = seq_lens[r] + i;
        positions[tokens] = position;
        requests[tokens] = r;
        slot_mapping[tokens] =
            (int64_t)block_table[r][position / kBlockSize] * kBlockSize + position % kBlockSize;
      }
      seq_lens[r] += new_tokens[r];
      query_start_loc[r + 1] = tokens;
      max_query_len = new_tokens[r] > max_query_len ? new_tokens[r] : max_query_len;
      max_seq_len = seq_lens[r] > max_seq_len ? seq_lens[r] : max_seq_len;
    }

    foveal_tensor starts_tensor, lens_tensor, table_tensor, slots_tensor;
    must(foveal_tensor_init(&starts_tensor, query_start_loc, FOVEAL_I32, kCpu, 1,
                            (int64_t[]){kRequests + 1}, NULL),
         "query_start_loc");
    must(foveal_tensor_init(&lens_tensor, seq_lens, FOVEAL_I32, kCpu, 1, (int64_t[]){kRequests},
                            NULL),
         "seq_lens");
    must(foveal_tensor_init(&table_tensor, block_table, FOVEAL_I32, kCpu, 2,
                            (int64_t[]){kRequests, kMaxBlocks}, NULL),
         "block_table");
    must(foveal_tensor_init(&slots_tensor, slot_mapping, FOVEAL_I64, kCpu, 1, (int64_t[]){tokens},
                            NULL),
         "slot_mapping");
    foveal_step common = {.struct_size = sizeof common,
                          .num_reqs = kRequests,
                          .num_actual_tokens = tokens,
                          .max_query_len = max_query_len,
                          .max_seq_len = max_seq_len,
                          .query_start_loc = &starts_tensor.tensor,
                          .seq_lens = &lens_tensor.tensor,
                          .block_table = &table_tensor.tensor,
                          .slot_mapping = &slots_tensor.tensor};
    foveal_metadata* plan = NULL; /* Once a step, for all layers. */
    must(foveal_builder_build(builder, 0, &common, false, &plan), "build");

    foveal_tensor query_tensor, key_tensor, value_tensor, output_tensor;
    const int64_t q_shape[] = {tokens, kHeads, kHeadSize};
    const int64_t kv_shape[] = {tokens, kKvHeads, kHeadSize};
    must(foveal_tensor_init(&query_tensor, query, FOVEAL_F32, kCpu, 3, q_shape, NULL), "query");
    must(foveal_tensor_init(&key_tensor, key, FOVEAL_F32, kCpu, 3, kv_shape, NULL), "key");
    must(foveal_tensor_init(&value_tensor, value, FOVEAL_F32, kCpu, 3, kv_shape, NULL), "value");
    must(foveal_tensor_init(&output_tensor, output, FOVEAL_F32, kCpu, 3, q_shape, NULL), "output");
    for (int l = 0; l < kLayers; ++l) {
      for (int t = 0; t < tokens; ++t) {
        for (int i = 0; i < kHeads * kHeadSize; ++i) {
          query[t][i] = model(kQuery, l, requests[t], positions[t], i);
        }
        for (int i = 0; i < kKvHeads * kHeadSize; ++i) {
          key[t][i] = model(kKey, l, requests[t], positions[t], i);
          value[t][i] = model(kValue, l, requests[t], positions[t], i);
        }
      }
      must(foveal_layer_update_kv_cache(layers[l], &key_tensor.tensor, &value_tensor.tensor,
                                        &key_caches[l].tensor, &value_caches[l].tensor,
                                        &slots_tensor.tensor, NULL),
           "update_kv_cache");
      foveal_forward_args args = {.struct_size = sizeof args,
                                  .query = &query_tensor.tensor,
                                  .key_cache = &key_caches[l].tensor,
                                  .value_cache = &value_caches[l].tensor,
                                  .output = &output_tensor.tensor};
      must(foveal_layer_forward(layers[l], &args, plan, NULL), "forward");
      for (int t = 0; t < tokens; ++t, ++rows) {
        const double difference = check_row(output[t], l, requests[t], positions[t]);
        worst = difference > worst ? difference : worst;
      }
    }
    foveal_metadata_destroy(plan);
    for (int r = 0; r < kRequests; ++r) {
      new_tokens[r] = 1; /* Decode from here on. */
    }
  }

  printf("%d rows in %d layers, largest difference from the naive loop: %.1e\n", rows, kLayers,
         worst);
  foveal_builder_destroy(builder);
  for (int l = 0; l < kLayers; ++l) {
    foveal_layer_destroy(layers[l]);
    free(memory[l]);
  }
  foveal_backend_destroy(backend);
  return worst < 1e-5 ? 0 : 1;
}
