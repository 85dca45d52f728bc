#ifndef FOVEAL_FOVEAL_C_H_
#define FOVEAL_FOVEAL_C_H_

/*
 * Foveal for C, and for every language that can call it: libfoveal_c.so. It is the C++ interface
 * (foveal.h) function by function; docs/contracts.md says what is computed and docs/c_api.md shows
 * a first program.
 *
 * Errors. Every function that can fail returns a foveal_status. Other than FOVEAL_OK it means that
 * nothing was written, neither to output or cache nor to the function's out parameters, and that
 * foveal_last_error() has the message. No function throws, and every pointer is checked for NULL.
 *
 * Handles (foveal_backend, …) are opaque; each has a _destroy function, which accepts NULL. What a
 * handle was made from may be destroyed before it.
 *
 * Tensors are DLPack's DLTensor, which own nothing: strides in elements (NULL: row-major), memory
 * of the CPU (kDLCPU, kDLCUDAHost) or of a CUDA device (kDLCUDA, kDLCUDAManaged). dtypes are f64,
 * f32, f16, bf16, fp8 (DLPack's codes 10, e4m3fn, and 12, e5m2), i32, i64 and u8. A call copies
 * shape and strides, never data. NULL is an absent tensor where one may be absent.
 *
 * Structs that may grow begin with struct_size, which the caller sets to sizeof the struct. Those
 * with an _init function are set by it; the others begin as zeros: `foveal_forward_args args =
 * {.struct_size = sizeof args}`.
 *
 * Threads. Handles of backends and layers may be used from many threads; a builder from one at a
 * time. foveal_last_error() is the calling thread's.
 */
#include <dlpack/dlpack.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "foveal/export.h"
#include "foveal/version.h"

/* NOLINTBEGIN(readability-identifier-naming): names are C's. */
#ifdef __cplusplus
extern "C" {
#endif

/* ---- Errors ---------------------------------------------------------------------------------- */

typedef enum foveal_status {
  FOVEAL_OK = 0,
  FOVEAL_INVALID_ARGUMENT = 1, /* An argument contradicts its contract: shape, range, order, … */
  FOVEAL_UNSUPPORTED = 2,      /* Legal, but no (chosen) backend can serve it. */
  FOVEAL_OUT_OF_MEMORY = 3,
  FOVEAL_DEVICE_ERROR = 4,  /* The device or its driver failed. */
  FOVEAL_COMPILE_ERROR = 5, /* A kernel could not be compiled. */
  FOVEAL_IO_ERROR = 6,      /* A file could not be read, or its content is malformed. */
  FOVEAL_INTERNAL_ERROR = 7 /* A defect of the library; please report it. */
} foveal_status;

/* "ok", "invalid_argument", …; "unknown" for a number that is none of them. */
FOVEAL_API const char* foveal_status_name(foveal_status status);
/* The message of this thread's last call that failed: what the argument was and what it must be.
 * "" before the first. Valid until the next call of this thread that fails. */
FOVEAL_API const char* foveal_last_error(void);
/* Of the library at run time, "major.minor.patch"; FOVEAL_VERSION_MAJOR … are the headers'. */
FOVEAL_API const char* foveal_version(void);

/* ---- Numbers with names ------------------------------------------------------------------------
 * Structs hold them as int32_t: a number that is none of them is refused. */

typedef enum foveal_dtype {
  FOVEAL_DTYPE_DEFAULT = 0, /* Of kv_cache_dtype: the dtype. */
  FOVEAL_F32 = 1,
  FOVEAL_F16 = 2,
  FOVEAL_BF16 = 3,
  FOVEAL_F8E4M3 = 4, /* Finite only: no infinities, largest value 448. */
  FOVEAL_F8E5M2 = 5,
  FOVEAL_F64 = 6,
  FOVEAL_I32 = 7,
  FOVEAL_I64 = 8,
  FOVEAL_U8 = 9
} foveal_dtype;

typedef enum foveal_attn_type {
  FOVEAL_DECODER = 0,
  FOVEAL_ENCODER = 1,
  FOVEAL_ENCODER_ONLY = 2,
  FOVEAL_ENCODER_DECODER = 3
} foveal_attn_type;

/* Memory order of a paged cache: tokens of a block outside heads, or inside. */
typedef enum foveal_kv_cache_order { FOVEAL_NHD = 0, FOVEAL_HND = 1 } foveal_kv_cache_order;

typedef enum foveal_graph_support {
  FOVEAL_GRAPHS_NEVER = 0,
  FOVEAL_GRAPHS_UNIFORM_SINGLE_TOKEN_DECODE = 1,
  FOVEAL_GRAPHS_UNIFORM_BATCH = 2,
  FOVEAL_GRAPHS_ALWAYS = 3
} foveal_graph_support;

enum { FOVEAL_MAX_DIMS = 8 };

/* ---- Tensors ----------------------------------------------------------------------------------
 */

/* A DLTensor together with the arrays it points into, for callers that have none of their own. It
 * points into itself: pass it by address, do not copy it. */
typedef struct foveal_tensor {
  DLTensor tensor;
  int64_t shape[FOVEAL_MAX_DIMS];
  int64_t strides[FOVEAL_MAX_DIMS];
} foveal_tensor;

/* Describes memory; strides in elements, NULL for row-major. */
FOVEAL_API foveal_status foveal_tensor_init(foveal_tensor* out, void* data, int32_t dtype,
                                            DLDevice device, int32_t ndim, const int64_t* shape,
                                            const int64_t* strides);

/* ---- Devices ----------------------------------------------------------------------------------
 */

typedef struct foveal_device_info {
  size_t struct_size;
  DLDevice device;            /* kDLCPU or kDLCUDA, and its index. */
  const char* name;           /* Valid as long as the library is loaded. */
  int32_t compute_capability; /* CUDA: 10·major + minor; 0 elsewhere. */
  int64_t memory_bytes;
} foveal_device_info;

/* The CPU, then the CUDA devices that the driver shows; just the CPU where there is no driver. */
FOVEAL_API foveal_status foveal_num_devices(int32_t* out);
FOVEAL_API foveal_status foveal_get_device(int32_t index, foveal_device_info* out);

/* ---- Layers: what never changes ----------------------------------------------------------------
 */

/* Where one score stands; all numbers count from 0, positions are absolute in the request. */
typedef struct foveal_score_index {
  int64_t request;
  int64_t query_head;
  int64_t query_row;
  int64_t query_position;
  int64_t key_position;
} foveal_score_index;

/* A score of the caller's own, and a mask: whether the row sees the key. Called from many threads
 * at once, on CPU backends only. */
typedef float (*foveal_score_mod)(float score, const foveal_score_index* index, void* user_data);
typedef bool (*foveal_mask_mod)(const foveal_score_index* index, void* user_data);

/* Dimensions of multi-head latent attention (DeepSeek V2 and V3). A cache entry is the normalised
 * latent, kv_lora_rank, followed by the rotated key part that all heads share, qk_rope_head_dim. */
typedef struct foveal_mla_dims {
  int64_t kv_lora_rank;
  int64_t qk_nope_head_dim;
  int64_t qk_rope_head_dim;
  int64_t v_head_dim;
} foveal_mla_dims;

/* Pointers are read by the call the spec is passed to and not kept, but for mod_user_data. */
typedef struct foveal_spec {
  size_t struct_size;
  int64_t num_heads;    /* Query heads. */
  int64_t num_kv_heads; /* Divides num_heads. */
  int64_t head_size;    /* Of queries and keys. MLA: kv_lora_rank + qk_rope_head_dim. */
  int64_t head_size_v;  /* Of values and output; 0: head_size. MLA: kv_lora_rank. */
  float scale;          /* NaN, as _init leaves it: 1/√head_size. MLA layers must set it. */
  int32_t dtype;        /* Of query, key, value and output; bf16 after _init. */
  int32_t kv_cache_dtype;
  int32_t attn_type;
  int64_t window_left; /* Tokens to the left a row sees, itself not counted; −1 is unlimited. */
  int64_t window_right;
  float logits_soft_cap;     /* score ← cap·tanh(score/cap); 0 turns it off. */
  const float* alibi_slopes; /* [num_heads] or NULL. */
  int64_t num_alibi_slopes;
  const float* sinks; /* [num_heads] or NULL: one extra logit a head in the denominator. */
  int64_t num_sinks;
  float q_scale; /* What is stored in fp8 is value / scale; 1 elsewhere. */
  float k_scale;
  float v_scale;
  const foveal_mla_dims* mla;    /* NULL: not an MLA layer. */
  const char* kv_sharing_target; /* Name of an earlier layer whose cache is read, or NULL. */
  foveal_score_mod score_mod;    /* Instead of ALiBi; NULL: none. */
  foveal_mask_mod mask_mod;      /* On top of causality and window; NULL: none. */
  void* mod_user_data;           /* Passed to both; must live as long as layers made from this. */
} foveal_spec;

/* Sets struct_size and the defaults; heads and head_size are the caller's to set. */
FOVEAL_API foveal_status foveal_spec_init(foveal_spec* spec, size_t struct_size);

/* ---- Choosing a backend ------------------------------------------------------------------------
 */

typedef struct foveal_backend foveal_backend;

/* Everything the choice depends on. */
typedef struct foveal_selector_config {
  size_t struct_size;
  int32_t device_type; /* kDLCPU, kDLCUDA or kDLOpenCL. */
  int32_t compute_capability;
  int64_t head_size;
  int64_t head_size_v; /* 0: head_size. */
  int32_t dtype;
  int32_t kv_cache_dtype;
  int64_t block_size; /* 0: free. */
  int32_t attn_type;
  bool use_mla;
  bool has_sinks;
  bool has_sliding_window;
  bool has_soft_cap;
  bool has_alibi;
  bool has_custom_score;
  bool use_non_causal; /* A decoder whose attention over the cache is bidirectional. */
  bool needs_lse;
  int32_t needs_graphs; /* The least foveal_graph_support that is acceptable. */
  int64_t decode_context_parallel_size;
  int64_t prefill_context_parallel_size;
  bool batch_invariant;
  const char* backend; /* Choose this one or fail; NULL, "" or "auto": free. */
} foveal_selector_config;

/* Sets struct_size and what a layer of this spec asks for on such a device. With a NULL spec the
 * defaults: the CPU, bf16, and head_size for the caller to set. */
FOVEAL_API foveal_status foveal_selector_config_init(foveal_selector_config* config,
                                                     size_t struct_size, const foveal_spec* spec,
                                                     int32_t device_type,
                                                     int32_t compute_capability);

/* The first backend in order of preference that can serve the config, or the one asked for.
 * FOVEAL_UNSUPPORTED, with every reason of every candidate, when none can. */
FOVEAL_API foveal_status foveal_select_backend(const foveal_selector_config* config,
                                               foveal_backend** out);
/* The backend of an id, "CPU_ATTN". */
FOVEAL_API foveal_status foveal_get_backend(const char* id, foveal_backend** out);
FOVEAL_API void foveal_backend_destroy(foveal_backend* backend);
/* Its id, and what it runs on here, for people. Valid as long as the handle; NULL for a NULL
 * handle. */
FOVEAL_API const char* foveal_backend_name(const foveal_backend* backend);
FOVEAL_API const char* foveal_backend_runtime(const foveal_backend* backend);
/* Adds a backend out of a shared library (foveal/plugin.h), before the one of the id `before`, or
 * behind all when that is NULL. It is opened on first use. */
FOVEAL_API foveal_status foveal_add_backend_library(const char* id, const char* display_name,
                                                    const char* path, const char* before);

/* The same decision with all its reasons; not an error when no backend can serve. */
typedef struct foveal_selection foveal_selection;

/* Strings and arrays are valid as long as the selection. */
typedef struct foveal_candidate {
  size_t struct_size;
  const char* id;
  const char* display_name;
  int64_t priority; /* 0 is tried first. */
  bool chosen;
  const char* const* reasons; /* Why it was refused, every reason. */
  int64_t num_reasons;        /* 0: it can serve. */
} foveal_candidate;

FOVEAL_API foveal_status foveal_explain_selection(const foveal_selector_config* config,
                                                  foveal_selection** out);
FOVEAL_API void foveal_selection_destroy(foveal_selection* selection);
/* The chosen id, or "" when none can serve. These return NULL, or −1, for a NULL selection. */
FOVEAL_API const char* foveal_selection_chosen(const foveal_selection* selection);
FOVEAL_API const char* foveal_selection_summary(const foveal_selection* selection); /* One line. */
FOVEAL_API const char* foveal_selection_text(const foveal_selection* selection);    /* Several. */
/* {"config": {…}, "chosen", "passed_over", "candidates": [{"id", "display_name", "priority",
 * "chosen", "reasons"}…]} */
FOVEAL_API const char* foveal_selection_json(const foveal_selection* selection);
FOVEAL_API int64_t foveal_selection_num_candidates(const foveal_selection* selection);
FOVEAL_API foveal_status foveal_selection_candidate(const foveal_selection* selection,
                                                    int64_t index, foveal_candidate* out);

/* ---- KV caches ---------------------------------------------------------------------------------
 */

/* A backend's cache tensor: logical shape, and how it lies in memory. */
typedef struct foveal_kv_cache_layout {
  size_t struct_size;
  int32_t dtype;
  int32_t ndim;
  int64_t shape[FOVEAL_MAX_DIMS];
  int32_t stride_order[FOVEAL_MAX_DIMS]; /* Dimensions in memory, outermost first. */
  int64_t strides[FOVEAL_MAX_DIMS];      /* In elements; they follow from the two above. */
  int64_t size_bytes;
} foveal_kv_cache_layout;

/* For num_blocks blocks of block_size tokens. The flash family: [num_blocks, 2, block_size,
 * num_kv_heads, head_size], or [num_blocks, num_kv_heads, block_size, head_size + head_size_v]
 * where keys and values differ in size; MLA: [num_blocks, block_size, kv_lora_rank +
 * qk_rope_head_dim]. */
FOVEAL_API foveal_status foveal_backend_kv_cache_layout(const foveal_backend* backend,
                                                        const foveal_spec* spec, int64_t block_size,
                                                        int64_t num_blocks, int32_t order,
                                                        foveal_kv_cache_layout* out);
/* Keys and values, [num_blocks, block_size, num_kv_heads, head size], inside a cache tensor of that
 * layout: what update_kv_cache and forward take. FOVEAL_UNSUPPORTED for an MLA backend, whose
 * layers take the cache tensor itself. */
FOVEAL_API foveal_status foveal_backend_kv_cache_views(const foveal_backend* backend,
                                                       const foveal_spec* spec, int64_t block_size,
                                                       const DLTensor* cache,
                                                       foveal_tensor* key_cache,
                                                       foveal_tensor* value_cache);
/* Bytes of one block, and the most blocks one request can hold at a time. */
FOVEAL_API foveal_status foveal_kv_cache_page_size_bytes(const foveal_spec* spec,
                                                         int64_t block_size, int64_t* out);
FOVEAL_API foveal_status foveal_kv_cache_max_blocks_per_request(const foveal_spec* spec,
                                                                int64_t block_size,
                                                                int64_t max_seq_len,
                                                                int64_t max_tokens_per_step,
                                                                int64_t* out);
/* The cache manager's block size when the user gave none: `wanted` where the backend accepts it,
 * else its smallest. */
FOVEAL_API foveal_status foveal_backend_preferred_block_size(const foveal_backend* backend,
                                                             int64_t wanted, int64_t* out);
/* The kernel block size for a manager's block shared by layers of several backends. */
FOVEAL_API foveal_status foveal_select_kernel_block_size(int64_t manager_block_size,
                                                         const foveal_backend* const* backends,
                                                         int64_t num_backends, int64_t* out);

/* ---- Where calls run ---------------------------------------------------------------------------
 */

typedef struct foveal_thread_pool foveal_thread_pool;

/* Threads for CPU work, 0 for as many as the machine lets this process use. */
FOVEAL_API foveal_status foveal_thread_pool_create(int32_t num_threads, foveal_thread_pool** out);
/* The engine's own threads. parallel_for must call task(task_data, i, worker) once for every i in
 * [0, count) and return when all are done; no two calls that run at the same time may have the same
 * worker, which is in [0, num_threads). */
typedef void (*foveal_task)(void* task_data, int64_t index, int32_t worker);
typedef void (*foveal_parallel_for)(void* user_data, int64_t count, foveal_task task,
                                    void* task_data);
FOVEAL_API foveal_status foveal_thread_pool_wrap(int32_t num_threads,
                                                 foveal_parallel_for parallel_for, void* user_data,
                                                 foveal_thread_pool** out);
/* No call may be using it. */
FOVEAL_API void foveal_thread_pool_destroy(foveal_thread_pool* pool);

/* NULL wherever one is taken: the process-wide pool, the default stream, the builder's scratch. */
typedef struct foveal_context {
  size_t struct_size;
  foveal_thread_pool* threads;
  void* stream; /* CUDA: CUstream or cudaStream_t. */
  /* At least foveal_metadata_workspace_bytes() bytes, contiguous, aligned to 64; to run several
   * forwards at once on one plan on the CPU. */
  const DLTensor* workspace;
} foveal_context;

/* ---- Steps: once for all layers of a group ------------------------------------------------------
 */

typedef struct foveal_builder foveal_builder;
typedef struct foveal_metadata foveal_metadata;

typedef struct foveal_builder_config {
  size_t struct_size;
  const foveal_spec* spec;
  int64_t block_size;         /* The cache manager's. */
  int64_t kernel_block_size;  /* Divides it; 0: the same. */
  int64_t num_blocks;         /* Of the pool: block ids and slots are checked against it. */
  int64_t max_num_reqs;       /* For graph capture: the largest step; 0 where unused. */
  int64_t max_num_tokens;     /* Likewise. */
  int64_t num_splits;         /* Splits of the keys a task; 0: the planner decides. */
  bool batch_invariant;       /* A request's bits do not depend on the batch. */
  int32_t flash_attn_version; /* CUDA: 2 or 3; 0: the best there is. */
  int32_t num_threads;        /* CPU: the most threads forward will run on; 0: the default. */
  DLDevice device;            /* {0, 0}: the CPU. */
  void* stream;               /* CUDA: where build() plans; forward must come behind it. */
} foveal_builder_config;

/* One scheduling step. Request r has query rows query_start_loc[r] … query_start_loc[r+1] − 1 and
 * seq_lens[r] keys, those of this step included. Data is borrowed until the metadata built from it
 * is destroyed; the DLTensors themselves only for the call. */
typedef struct foveal_step {
  size_t struct_size;
  int64_t num_reqs;
  int64_t num_actual_tokens;            /* Rows of query that count. */
  int64_t max_query_len;                /* At least the longest query length. */
  int64_t max_seq_len;                  /* At least the longest of seq_lens. */
  bool non_causal;                      /* Encoder and cross attention need true. */
  const DLTensor* query_start_loc;      /* i32 [num_reqs + 1] */
  const DLTensor* seq_lens;             /* i32 [num_reqs] */
  const DLTensor* query_start_loc_host; /* Host copies, for tensors on a device; or NULL. */
  const DLTensor* seq_lens_host;
  const DLTensor* block_table;   /* i32 [num_reqs, max_blocks]; NULL: keys and values are plain. */
  const DLTensor* slot_mapping;  /* i64 [num_actual_tokens]; −1 is padding; or NULL. */
  const DLTensor* key_start_loc; /* i32 [num_reqs + 1], for plain keys; NULL: query_start_loc. */
  const DLTensor* cp_local_seq_lens; /* i32 [num_reqs], context parallelism; or NULL. */
} foveal_step;

typedef struct foveal_cascade_query {
  size_t struct_size;
  int64_t common_prefix_len;
  int64_t num_reqs;
  int64_t num_tokens;
  bool single_token_queries;
  int64_t context_parallel_size; /* 0 is 1. */
} foveal_cascade_query;

FOVEAL_API foveal_status foveal_backend_make_builder(const foveal_backend* backend,
                                                     const foveal_builder_config* config,
                                                     foveal_builder** out);
FOVEAL_API void foveal_builder_destroy(foveal_builder* builder);
/* Checks everything the host can see, then plans. common_prefix_len, a multiple of the block size,
 * is the number of leading keys all requests share in the same blocks; above 0 the step is a
 * cascade. fast_build favours a cheap plan over a fast forward. */
FOVEAL_API foveal_status foveal_builder_build(foveal_builder* builder, int64_t common_prefix_len,
                                              const foveal_step* step, bool fast_build,
                                              foveal_metadata** out);
/* As build, at the largest sizes, for capture into a device graph. */
FOVEAL_API foveal_status foveal_builder_build_for_graph_capture(foveal_builder* builder,
                                                                const foveal_step* step,
                                                                foveal_metadata** out);
/* The same plan over other blocks: for a second layer group with the same lengths. */
FOVEAL_API foveal_status foveal_builder_update_block_table(foveal_builder* builder,
                                                           const foveal_metadata* metadata,
                                                           const DLTensor* block_table,
                                                           const DLTensor* slot_mapping,
                                                           foveal_metadata** out);
/* A foveal_graph_support. */
FOVEAL_API foveal_status foveal_builder_graph_support(const foveal_builder* builder, int32_t* out);
/* Requests of at most so many queries should stand first in the batch; −1: order does not matter.
 */
FOVEAL_API foveal_status foveal_builder_reorder_threshold(const foveal_builder* builder,
                                                          int64_t* out);
/* Whether such a step is faster as a cascade. */
FOVEAL_API foveal_status foveal_builder_use_cascade(const foveal_builder* builder,
                                                    const foveal_cascade_query* query, bool* out);
FOVEAL_API void foveal_metadata_destroy(foveal_metadata* metadata);
FOVEAL_API foveal_status foveal_metadata_workspace_bytes(const foveal_metadata* metadata,
                                                         int64_t* out);

/* ---- Attention: once a layer --------------------------------------------------------------------
 */

typedef struct foveal_layer foveal_layer;

/* An MLA layer when spec->mla is set; it has calls of its own, below. */
FOVEAL_API foveal_status foveal_backend_make_layer(const foveal_backend* backend,
                                                   const foveal_spec* spec, foveal_layer** out);
FOVEAL_API void foveal_layer_destroy(foveal_layer* layer);
/* Whether it is an MLA layer; false for NULL. */
FOVEAL_API bool foveal_layer_is_mla(const foveal_layer* layer);

/* Writes new keys [T, num_kv_heads, head_size] and values [T, num_kv_heads, head_size_v] into the
 * cache (foveal_backend_kv_cache_views) at slot_mapping, i64 [≤ T]; −1 is skipped. */
FOVEAL_API foveal_status foveal_layer_update_kv_cache(const foveal_layer* layer,
                                                      const DLTensor* key, const DLTensor* value,
                                                      const DLTensor* key_cache,
                                                      const DLTensor* value_cache,
                                                      const DLTensor* slot_mapping,
                                                      const foveal_context* context);

/* T = rows of query, at least num_actual_tokens. The cache where the metadata has a block_table,
 * else plain keys and values. */
typedef struct foveal_forward_args {
  size_t struct_size;
  const DLTensor* query;       /* [T, num_heads, head_size] */
  const DLTensor* key;         /* [keys, num_kv_heads, head_size] */
  const DLTensor* value;       /* [keys, num_kv_heads, head_size_v] */
  const DLTensor* key_cache;   /* [num_blocks, block_size, num_kv_heads, head_size] */
  const DLTensor* value_cache; /* [num_blocks, block_size, num_kv_heads, head_size_v] */
  const DLTensor* output;      /* [T, num_heads, head_size_v], written. */
  const DLTensor* lse;         /* f32 [num_heads, T], natural log; NULL: not wanted. */
} foveal_forward_args;

FOVEAL_API foveal_status foveal_layer_forward(const foveal_layer* layer,
                                              const foveal_forward_args* args,
                                              const foveal_metadata* metadata,
                                              const foveal_context* context);

/* MLA. L = kv_lora_rank, R = qk_rope_head_dim, P = qk_nope_head_dim, V = v_head_dim. Writes latents
 * [T, L] and rotated keys [T, R] as entries of kv_cache [num_blocks, block_size, L + R]. */
FOVEAL_API foveal_status foveal_layer_update_mla_kv_cache(
    const foveal_layer* layer, const DLTensor* latent, const DLTensor* key_rope,
    const DLTensor* kv_cache, const DLTensor* slot_mapping, const foveal_context* context);

/* Multi-head attention on decompressed keys and values: prefill. */
typedef struct foveal_mla_prefill_args {
  size_t struct_size;
  const DLTensor* query;  /* [T, num_heads, P + R] */
  const DLTensor* key;    /* [keys, num_heads, P + R] */
  const DLTensor* value;  /* [keys, num_heads, V] */
  const DLTensor* output; /* [T, num_heads, V], written. */
  const DLTensor* lse;    /* f32 [num_heads, T]; NULL: not wanted. */
} foveal_mla_prefill_args;

/* Multi-query attention on the compressed latent: decode. */
typedef struct foveal_mla_decode_args {
  size_t struct_size;
  const DLTensor* query;    /* [T, num_heads, L + R]: the absorbed query, then its rotated part. */
  const DLTensor* kv_cache; /* [num_blocks, block_size, L + R] */
  const DLTensor* output;   /* [T, num_heads, L], written. */
  const DLTensor* lse;      /* f32 [num_heads, T]; NULL: not wanted. */
} foveal_mla_decode_args;

FOVEAL_API foveal_status foveal_layer_forward_mha(const foveal_layer* layer,
                                                  const foveal_mla_prefill_args* args,
                                                  const foveal_metadata* metadata,
                                                  const foveal_context* context);
FOVEAL_API foveal_status foveal_layer_forward_mqa(const foveal_layer* layer,
                                                  const foveal_mla_decode_args* args,
                                                  const foveal_metadata* metadata,
                                                  const foveal_context* context);

/* ---- Beside attention ---------------------------------------------------------------------------
 */

/* Merges two partial attentions of the same queries over disjoint keys: outputs [T, num_heads,
 * head_size_v], LSEs f32 [num_heads, T]. An LSE of ±inf marks an empty part. lse may be NULL,
 * output may be one of the inputs. */
FOVEAL_API foveal_status foveal_merge_attn_states(const DLTensor* output, const DLTensor* lse,
                                                  const DLTensor* a_output, const DLTensor* a_lse,
                                                  const DLTensor* b_output, const DLTensor* b_lse,
                                                  const foveal_context* context);
/* Writes keys and values into a paged cache without a layer; into an fp8 one, value / scale. */
FOVEAL_API foveal_status foveal_reshape_and_cache(const DLTensor* key, const DLTensor* value,
                                                  const DLTensor* key_cache,
                                                  const DLTensor* value_cache,
                                                  const DLTensor* slot_mapping, float k_scale,
                                                  float v_scale, const foveal_context* context);
/* Takes GPU kernels from a file of `foveal prebuild` from now on, ahead of cache and compiler. */
FOVEAL_API foveal_status foveal_load_kernel_pack(const char* path);

#ifdef __cplusplus
}
#endif
/* NOLINTEND(readability-identifier-naming) */

#endif /* FOVEAL_FOVEAL_C_H_ */
