// A prepared list of calls of this library, run one after the other: between two calls there is nothing of Python.
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "calls.h"

namespace pshard {
namespace {

// An argument as the list holds it: a float as its bits, an address as a number.
template <class T>
T argument(int64_t word) {
  if constexpr (std::is_pointer_v<T>) {
    return reinterpret_cast<T>(word);
  } else if constexpr (std::is_floating_point_v<T>) {
    T number;
    std::memcpy(&number, &word, sizeof number);
    return number;
  } else {
    return static_cast<T>(word);
  }
}

struct Callable {
  const char* name;
  int64_t arguments;
  void (*call)(const int64_t*);
};

template <auto F, class Result, class... Arguments, size_t... I>
constexpr Callable make(const char* name, Result (*)(Arguments...), std::index_sequence<I...>) {
  return {name, sizeof...(Arguments), [](const int64_t* words) { F(argument<Arguments>(words[I])...); }};
}
template <auto F, class Result, class... Arguments>
constexpr Callable make(const char* name, Result (*f)(Arguments...)) {
  return make<F>(name, f, std::index_sequence_for<Arguments...>{});
}

const Callable kCallables[] = {
    make<pshard_get_rows>("get_rows", pshard_get_rows),
    make<pshard_linear>("linear", pshard_linear),
    make<pshard_linear_group>("linear_group", pshard_linear_group),
    make<pshard_ffn>("ffn", pshard_ffn),
    make<pshard_linear_tiled>("linear_tiled", pshard_linear_tiled),
    make<pshard_gate_up_tiled>("gate_up_tiled", pshard_gate_up_tiled),
    make<pshard_attention>("attention", pshard_attention),
    make<pshard_rms_norm>("rms_norm", pshard_rms_norm),
    make<pshard_add_bias>("add_bias", pshard_add_bias),
    make<pshard_warm_rows>("warm_rows", pshard_warm_rows),
    make<pshard_centre_rows>("centre_rows", pshard_centre_rows),
    make<pshard_bend_rows>("bend_rows", pshard_bend_rows),
    make<pshard_norm_heads>("norm_heads", pshard_norm_heads),
    make<pshard_add_rows>("add_rows", pshard_add_rows),
    make<pshard_choose_chunks>("choose_chunks", pshard_choose_chunks),
    make<pshard_sum_squares>("sum_squares", pshard_sum_squares),
    make<pshard_norm_wide>("norm_wide", pshard_norm_wide),
    make<pshard_gate_rows>("gate_rows", pshard_gate_rows),
    make<pshard_gate_mul>("gate_mul", pshard_gate_mul),
    make<pshard_resize_heads>("resize_heads", pshard_resize_heads),
    make<pshard_times_rows>("times_rows", pshard_times_rows),
    make<pshard_copy_rows>("copy_rows", pshard_copy_rows),
    make<pshard_weigh_rows>("weigh_rows", pshard_weigh_rows),
    make<pshard_scale_rows>("scale_rows", pshard_scale_rows),
    make<pshard_rope_store>("rope_store", pshard_rope_store),
    make<pshard_head_products>("head_products", pshard_head_products),
    make<pshard_store_latent>("store_latent", pshard_store_latent),
    make<pshard_route>("route", pshard_route),
    make<pshard_experts>("experts", pshard_experts),
    make<pshard_experts_on_demand>("experts_on_demand", pshard_experts_on_demand),
    make<pshard_short_conv>("short_conv", pshard_short_conv),
    make<pshard_delta_net>("delta_net", pshard_delta_net),
    make<pshard_enter_streams>("enter_streams", pshard_enter_streams),
    make<pshard_mix_streams>("mix_streams", pshard_mix_streams),
    make<pshard_gate_grams>("gate_grams", pshard_gate_grams),
    make<pshard_add_grams>("add_grams", pshard_add_grams),
    make<pshard_store_index>("store_index", pshard_store_index),
    make<pshard_choose_cells>("choose_cells", pshard_choose_cells),
    make<pshard_read>("read", pshard_read),
};

}  // namespace
}  // namespace pshard

using namespace pshard;

// The number that stands for a function in a list; -1 for one that may not be in any.
PSHARD_API int pshard_callable(const char* name) {
  for (int i = 0; i < static_cast<int>(std::size(kCallables)); ++i)
    if (!std::strcmp(kCallables[i].name, name)) return i;
  return -1;
}

// Of each call the number of its function, then its arguments.
PSHARD_API void pshard_replay(const int64_t* words, int64_t n) {
  for (const int64_t* end = words + n; words < end;) {
    const Callable& c = kCallables[*words];
    c.call(words + 1);
    words += 1 + c.arguments;
  }
}
