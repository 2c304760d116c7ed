// The functions of the C interface that a list may hold (replay.cpp). native.py documents them.
#pragma once

#include <cstddef>
#include <cstdint>

#define PSHARD_API extern "C" __attribute__((visibility("default")))

PSHARD_API void pshard_linear(const float* x, int64_t x_stride, const void* w, int type, int64_t rows, int64_t cols,
                              float* out, int64_t out_stride, int64_t tokens, int accumulate);
PSHARD_API void pshard_linear_group(const float* x, int64_t x_stride, const void* const* weights, const int* types,
                                    const int64_t* rows, int count, int64_t cols, float* out, int64_t out_stride,
                                    int64_t tokens);
PSHARD_API void pshard_ffn(const float* x, int64_t x_stride, const void* gate, int gate_type, const void* up,
                           int up_type, const void* down, int down_type, int64_t hidden, int64_t inner, float* out,
                           int64_t out_stride, int64_t tokens, int accumulate, int gate_kind);
PSHARD_API void pshard_linear_tiled(const float* x, int64_t x_stride, const void* w, int type, int64_t rows,
                                    int64_t cols, float* out, int64_t out_stride, int64_t tokens, int accumulate);
PSHARD_API void pshard_gate_up_tiled(const float* x, int64_t x_stride, const void* gate, int gate_type, const void* up,
                                     int up_type, int64_t rows, int64_t cols, float* out, int64_t out_stride,
                                     int64_t tokens, int gate_kind);
PSHARD_API void pshard_attention(const float* q, int64_t q_stride, const void* k, const void* v, int64_t k_stride,
                                 int64_t v_stride, int k_type, int v_type, const int32_t* kv_blocks,
                                 int64_t block_cells, const int64_t* segments, int64_t n_segments, int heads,
                                 int kv_heads, int d, float scale, float* out, int64_t out_stride, int64_t window,
                                 const float* sinks, float cap, const float* slopes, int chunked,
                                 const int32_t* words, int64_t words_stride, int64_t each, int64_t most);
PSHARD_API void pshard_get_rows(const void* w, int type, int64_t rows, int64_t cols, const int64_t* ids, int64_t n,
                                float* out);
PSHARD_API void pshard_rms_norm(const float* x, int64_t x_stride, const float* weight, float eps, int64_t tokens,
                                int64_t width, float* out, int64_t out_stride, int accumulate,
                                const float* scale);
PSHARD_API void pshard_add_bias(float* x, int64_t stride, int64_t tokens, int64_t width, const float* bias);
PSHARD_API void pshard_warm_rows(float* x, int64_t stride, int64_t tokens, int64_t width, const float* table,
                                 const int32_t* position);
PSHARD_API void pshard_centre_rows(float* x, int64_t stride, int64_t tokens, int64_t width);
PSHARD_API void pshard_bend_rows(float* x, int64_t stride, int64_t tokens, int64_t width, int how,
                                 const float* numbers, int64_t count, float limit);
PSHARD_API void pshard_add_rows(float* x, int64_t stride, const float* rows, int64_t rows_stride, int64_t tokens,
                                int64_t width);
PSHARD_API void pshard_sum_squares(const float* x, int64_t stride, int64_t tokens, int64_t width, int64_t first,
                                   float* out);
PSHARD_API void pshard_norm_wide(float* x, int64_t stride, int64_t tokens, int64_t first, int64_t rest,
                                 const float* first_norm, const float* rest_norm, const float* sums, int64_t first_of,
                                 int64_t rest_of, float eps);
PSHARD_API void pshard_norm_heads(float* x, int64_t stride, int64_t tokens, int64_t width, const float* weight,
                                  int64_t head, float eps, int centred);
PSHARD_API void pshard_gate_rows(float* x, int64_t stride, const float* gate, int64_t gate_stride, int64_t tokens,
                                 int64_t width, int64_t each, int softplus);
PSHARD_API void pshard_gate_mul(const float* x, int64_t stride, const float* up, int64_t up_stride, int64_t tokens,
                                int64_t width, int gate_kind, float* out, int64_t out_stride);
PSHARD_API void pshard_resize_heads(const float* x, int64_t stride, int64_t tokens, int64_t heads, int64_t from,
                                    int64_t to, float by, float* out, int64_t out_stride);
PSHARD_API void pshard_times_rows(float* x, int64_t stride, const float* by, int64_t by_stride, int64_t tokens,
                                  int64_t width);
PSHARD_API void pshard_copy_rows(const float* x, int64_t stride, float* out, int64_t out_stride, int64_t tokens,
                                 int64_t width);
PSHARD_API void pshard_weigh_rows(float* x, int64_t stride, float* weights, int64_t weights_stride, int64_t tokens,
                                  int64_t width);
PSHARD_API void pshard_scale_rows(float* x, int64_t stride, int64_t tokens, int64_t width, const float* hidden,
                                  int64_t hidden_stride, const float* weight, int64_t depth);
PSHARD_API void pshard_rope_store(float* qkv, int64_t stride, int64_t tokens, int heads, int kv_heads, int d,
                                  const float* q_norm, const float* k_norm, float eps, const float* cos,
                                  const float* sin, int64_t half, int halves, const int32_t* begin,
                                  const int32_t* position, const int32_t* blocks, int64_t block_cells, char* k,
                                  char* v, int64_t k_stride, int64_t v_stride, int k_type, int v_type,
                                  int norm_values);
PSHARD_API void pshard_head_products(const float* x, int64_t x_stride, int64_t x_head, const void* w, int type,
                                     int64_t heads, int64_t rows, int64_t cols, float* out, int64_t out_stride,
                                     int64_t out_head, int64_t tokens);
PSHARD_API void pshard_store_latent(const float* kv, int64_t kv_stride, const float* q, int64_t q_stride,
                                    int64_t q_head, float* out, int64_t out_stride, int64_t out_head, int64_t tokens,
                                    int heads, int rank, const float* norm, float eps, const float* cos,
                                    const float* sin, int64_t half, int halves, const int32_t* begin,
                                    const int32_t* position, const int32_t* blocks, int64_t block_cells, char* cells,
                                    int64_t cell_stride, int type);
PSHARD_API void pshard_route(const float* x, int64_t x_stride, const void* router, int type, int count, int64_t cols,
                             const float* bias, const float* choice_bias, const float* factors, int64_t tokens,
                             int64_t rows, int used, int scores, int normed, int groups, int groups_used, float scale,
                             int32_t* ids, float* weights);
PSHARD_API void pshard_choose_chunks(const int32_t* scored, const float* scores, int64_t tokens, int64_t count,
                                     int used, int each, float scale, float least, int32_t* ids, float* weights);
PSHARD_API void pshard_experts(const float* x, int64_t x_stride, const int32_t* ids, const float* weights,
                               int64_t tokens, int used, const int64_t* addresses, int experts, int gate_type,
                               int up_type, int down_type, int64_t hidden, int64_t inner, const float* gate_bias,
                               const float* up_bias, const float* down_bias, int gate_kind, int tiles_from,
                               int down_tiles_from, float* gated, float* picked, int32_t* order, float* out,
                               int64_t out_stride, int accumulate, const int64_t* added);
PSHARD_API void pshard_experts_on_demand(const float* x, int64_t x_stride, const int32_t* ids, const float* weights,
                                         int64_t tokens, int used, const int64_t* addresses, int experts,
                                         int gate_type, int up_type, int down_type, int64_t hidden, int64_t inner,
                                         const float* gate_bias, const float* up_bias, const float* down_bias,
                                         int gate_kind, int tiles_from, int down_tiles_from, float* gated,
                                         float* picked, int32_t* order, float* out, int64_t out_stride,
                                         int accumulate, void* demand, int64_t row);
PSHARD_API void pshard_short_conv(const float* x, int64_t x_stride, const float* taps, int64_t channels, int64_t each,
                                  float* tails, const int32_t* slots, const int32_t* offsets, int64_t sequences,
                                  float* out, int64_t out_stride, float* opened, int64_t opened_stride);
PSHARD_API void pshard_delta_net(const float* qkv, int64_t qkv_stride, const float* z, int64_t z_stride,
                                 const float* beta, int64_t beta_stride, const float* alpha, int64_t alpha_stride,
                                 const float* conv, const float* dt_bias, const float* decay, const float* norm,
                                 float eps, int key_heads, int value_heads, int head, int tiled, int sigmoid,
                                 float* states, float* tails, const int32_t* slots, const int32_t* offsets, int64_t sequences,
                                 float* out, int64_t out_stride,
                                 float* opened, int64_t opened_stride);
PSHARD_API void pshard_enter_streams(const float* given, int64_t given_stride, int spreads, float* streams,
                                     int64_t stride, int64_t tokens, int64_t count, int64_t width,
                                     const float* weight, float eps, float* out, int64_t out_stride);
PSHARD_API void pshard_mix_streams(const float* x, int64_t x_stride, const float* gates, int64_t gates_stride,
                                   int64_t tokens, int64_t count, int64_t width, float* out, int64_t out_stride,
                                   float* cleared, int64_t cleared_stride);
PSHARD_API void pshard_gate_grams(const float* key, int64_t key_stride, const float* value, int64_t value_stride,
                                  const float* streams, int64_t stride, const float* key_norm,
                                  const float* stream_norm, int64_t tokens, int64_t count, int64_t width, float eps,
                                  float* out, int64_t out_stride);
PSHARD_API void pshard_add_grams(const float* x, int64_t x_stride, const float* norm, const float* taps, int64_t count,
                                 int64_t width, int64_t each, int64_t apart, float eps, float* streams, int64_t stride,
                                 float* tails, const int32_t* slots, const int32_t* offsets, int64_t sequences,
                                 float* opened, int64_t opened_stride);
PSHARD_API void pshard_store_index(float* q, int64_t q_stride, const float* key, int64_t key_stride, int64_t tokens,
                                   int64_t heads, int64_t head, const float* q_norm, const float* k_norm, int64_t each,
                                   float eps, const float* cos, const float* sin, int64_t half, int halves,
                                   const int32_t* begin, const int32_t* position, const int32_t* blocks, int64_t cells,
                                   float* data);
PSHARD_API void pshard_choose_cells(const float* q, int64_t q_stride, float* data, int64_t cells, int64_t heads,
                                    int64_t head, int64_t each, int64_t most, const int64_t* segments,
                                    int64_t n_segments, const int32_t* blocks, int32_t* seen, int64_t seen_stride,
                                    int64_t words);
PSHARD_API double pshard_read(const uint8_t* data, size_t nbytes, uint64_t* sum);
PSHARD_API void pshard_replay(const int64_t* words, int64_t n);
