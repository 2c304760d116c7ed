// The C interface but for layers: instruction set, threads, packing, dequantisation, copies. native.py documents each
// function and checks its arguments.
#include <atomic>
#include <chrono>
#include <cstring>
#include <numeric>
#include <vector>

#include "driver.h"
#include "packing/books.h"
#include "packing/pack.h"

namespace pshard {
namespace {

const Kernels* best_kernels() {
  if (const Kernels* k = kernels_avx512()) return k;
  if (const Kernels* k = kernels_avx2()) return k;
  return kernels_portable();
}
std::atomic<const Kernels*> active{nullptr};

constexpr size_t kCopyPiece = 1 << 20;
constexpr size_t kLeastPage = 4096;
constexpr size_t kStreamFrom = 8 << 20;  // copies of this size would only push other things out of the caches

}  // namespace

const Kernels& kernels() {
  if (!active.load()) active.store(best_kernels());
  return *active.load();
}

}  // namespace pshard

using namespace pshard;

// Raised with every change of a function's arguments or meaning; native.py's ABI says what it calls.
PSHARD_API int pshard_abi() { return 36; }

#ifndef PSHARD_SOURCES  // setup.py says
#define PSHARD_SOURCES 0
#endif
PSHARD_API uint32_t pshard_sources() { return PSHARD_SOURCES; }

PSHARD_API int pshard_type(const char* name) {
  for (int t = 0; t < kTypes; ++t)
    if (!std::strcmp(kFormats[t].name, name)) return t;
  return -1;
}

PSHARD_API int64_t pshard_record_nbytes(int type, int64_t cols) { return Matrix(nullptr, type, 16, cols).record; }

PSHARD_API const char* pshard_isa() { return kernels().isa; }

PSHARD_API int pshard_set_isa(const char* name) {
  for (const Kernels* k : {kernels_avx512(), kernels_avx2(), kernels_portable()})
    if (k && !std::strcmp(k->isa, name)) return active.store(k), 0;
  return -1;
}

PSHARD_API int pshard_threads() { return Pool::instance().size(); }

PSHARD_API void pshard_set_threads(int n, const int* cpus, int n_cpus) {
  Pool::instance().resize(n, std::vector<int>(cpus, cpus + n_cpus));
}

PSHARD_API void pshard_expect() { Pool::instance().expect(); }

PSHARD_API int pshard_sleeping() { return Pool::instance().sleeping(); }

PSHARD_API int64_t pshard_recalls() { return Pool::instance().recalls(); }

PSHARD_API int pshard_stop_helpers(int point) { return Pool::instance().stop_helpers_at(point); }

// A codebook: what the indices of a type stand for, `count` numbers, four columns a word.
PSHARD_API void pshard_set_book(int type, const int8_t* values, int64_t count) {
  set_book(type, values, count);
}

PSHARD_API void pshard_pack(const uint8_t* raw, int64_t row_bytes, int type, int64_t row_start, int64_t row_stop,
                            int64_t col_start, int64_t col_stop, uint8_t* out) {
  const Format& f = kFormats[type];
  const int64_t cols = col_stop - col_start, rows = row_stop - row_start;
  const uint8_t* from = raw + row_start * row_bytes + col_start / f.block * f.nbytes;
  const Matrix m(out, type, rows, cols);
  Pool::instance().run([&](Team& team) {
    for_records(team, m.records(), m.record, 8, [&](int64_t r, int64_t) {
      pack_record(type, from + r * 16 * row_bytes, row_bytes, m.rows_of(r), cols, out + r * m.record);
    });
  });
}

PSHARD_API void pshard_dequantize(const void* w, int type, int64_t rows, int64_t cols, int64_t row_start,
                                  int64_t row_stop, void* out, int64_t out_stride, int bf16) {
  const Matrix m(w, type, rows, cols);
  const int64_t first = row_start / 16, records = (row_stop + 15) / 16 - first;
  Pool::instance().run([&](Team& team) {
    for_records(team, records, m.record, 8, [&](int64_t i, int64_t) {
      const int64_t r = first + i, from = std::max(row_start, r * 16), to = std::min(row_stop, r * 16 + 16);
      void* at = static_cast<char*>(out) + (from - row_start) * out_stride * (bf16 ? 2 : 4);
      kernels().dequantize[type](m.at(r), m.planes, cols, static_cast<int>(from - r * 16),
                                 static_cast<int>(to - r * 16), at, out_stride, bf16);
    });
  });
}

PSHARD_API void pshard_get_rows(const void* w, int type, int64_t rows, int64_t cols, const int64_t* ids, int64_t n,
                                float* out) {
  const Matrix m(w, type, rows, cols);
  const auto look_up = [&](int64_t i) {
    const int row = static_cast<int>(ids[i] % 16);
    kernels().dequantize[type](m.at(ids[i] / 16), m.planes, cols, row, row + 1, out + i * cols, cols, false);
  };
  if (n * cols < 65536) {  // waking the pool takes longer
    for (int64_t i = 0; i < n; ++i) look_up(i);
    return;
  }
  Pool::instance().run([&](Team& team) { team.for_each(n, n * cols * 8, look_up); });
}

PSHARD_API void pshard_memcpy(void* to, const void* from, size_t nbytes) {
  Pool::instance().run([&](Team& team) {
    team.for_each((nbytes + kCopyPiece - 1) / kCopyPiece, nbytes, [&](int64_t i) {
      const size_t at = i * kCopyPiece;
      auto* piece = static_cast<uint8_t*>(to) + at;
      const auto* source = static_cast<const uint8_t*>(from) + at;
      const size_t n = std::min(kCopyPiece, nbytes - at);
      if (nbytes >= kStreamFrom) kernels().stream(piece, source, n);
      else std::memcpy(piece, source, n);
    });
  });
}

// Writes a zero to each page whose first byte is one, as one step: what another thread writes there stays. By the
// calling thread alone.
PSHARD_API void pshard_touch(uint8_t* memory, size_t nbytes) {
  for (size_t at = 0; at < nbytes; at += kLeastPage) {
    uint8_t zero = 0;
    std::atomic_ref<uint8_t>(memory[at]).compare_exchange_strong(zero, 0, std::memory_order_relaxed);
  }
}

static std::atomic<int64_t> read_nanoseconds{0};  // of all reads

// Reads nbytes once with all threads; returns the seconds, and a sum so that no read can be left out.
PSHARD_API double pshard_read(const uint8_t* data, size_t nbytes, uint64_t* sum) {
  const int64_t pieces = (nbytes + kTaskBytes - 1) / kTaskBytes;
  std::vector<uint64_t> sums(pieces);
  const auto start = std::chrono::steady_clock::now();
  Pool::instance().run([&](Team& team) {
    team.for_each(pieces, nbytes, [&](int64_t i) {
      const size_t at = i * kTaskBytes;
      sums[i] = kernels().sum(data + at, std::min<size_t>(kTaskBytes, nbytes - at));
    });
  });
  const double seconds = std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
  *sum = std::accumulate(sums.begin(), sums.end(), uint64_t{0});
  read_nanoseconds += static_cast<int64_t>(seconds * 1e9);
  return seconds;
}
PSHARD_API double pshard_read_seconds() { return 1e-9 * static_cast<double>(read_nanoseconds.load()); }
