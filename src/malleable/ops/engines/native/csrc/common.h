// What the kernels share: vectors, half precision, shapes, and channels-last copies of regions of a map.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <type_traits>
#include <utility>
#include <vector>

#include <omp.h>
#if defined(__AVX512F__)
#include <immintrin.h>
#endif

// For the small loops of a register tile, which must be unrolled for it to be one.
#if defined(__clang__)
#define MALLEABLE_UNROLL _Pragma("clang loop unroll(full)")
#else
#define MALLEABLE_UNROLL _Pragma("GCC unroll 16")
#endif

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4, kRows = 6;
#elif defined(__AVX__)
constexpr int kLanes = 8, kVectors = 2, kRows = 6;
#else
constexpr int kLanes = 4, kVectors = 4, kRows = 6;
#endif
constexpr int kPanel = kLanes * kVectors;  // channels of one register tile

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec broadcast(float s) { return s - Vec{}; }

// Keeps a vector in a register that the compiler would rather load again for every use.
inline Vec held(Vec v) {
#if defined(__AVX512F__)
  asm("" : "+v"(v));
#elif defined(__x86_64__)
  asm("" : "+x"(v));
#elif defined(__aarch64__)
  asm("" : "+w"(v));
#endif
  return v;
}

inline float sum(Vec v) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps(_mm512_loadu_ps(reinterpret_cast<const float*>(&v)));
#else
  float lanes[kLanes];
  store(lanes, v);
  for (int half = kLanes / 2; half > 0; half /= 2)
    for (int i = 0; i < half; ++i) lanes[i] += lanes[i + half];
  return lanes[0];
#endif
}

struct BFloat16 {
  uint16_t bits;
  operator float() const {
    uint32_t wide = uint32_t(bits) << 16;
    float f;
    std::memcpy(&f, &wide, 4);
    return f;
  }
  BFloat16& operator=(float f) {
    uint32_t wide;
    std::memcpy(&wide, &f, 4);
    bits = f == f ? uint16_t((wide + 0x7fff + ((wide >> 16) & 1)) >> 16) : uint16_t(0x7fc0);
    return *this;
  }
};

#if defined(__FLT16_MAX__)
#if defined(__aarch64__)
typedef __fp16 Half;  // GCC before 13 has no other name for it in C++
#else
typedef _Float16 Half;
#endif
struct Float16 {
  Half value;
  operator float() const { return float(value); }
  Float16& operator=(float f) {
    value = Half(f);
    return *this;
  }
};
#endif

// Cache-aligned memory, one piece per thread, made before the threads start: an exception must not leave them.
class Buffers {
 public:
  Buffers(int threads, int64_t floats) : pitch_((floats + 31) / 16 * 16) {
    data_.reset(static_cast<float*>(std::aligned_alloc(64, size_t(pitch_) * threads * sizeof(float))));
    if (!data_) throw std::bad_alloc();
  }
  float* mine() const { return of(omp_get_thread_num()); }
  float* of(int thread) const { return data_.get() + pitch_ * thread; }
  float* first() const { return data_.get(); }

 private:
  int64_t pitch_;
  std::unique_ptr<float, decltype(&std::free)> data_{nullptr, &std::free};
};

// Runs a kernel for a caller that knows no exceptions: 0 if it went well, 1 if there was not enough memory.
template <typename F>
int guarded(F run) {
  try {
    run();
    return 0;
  } catch (const std::bad_alloc&) {
    return 1;
  }
}

constexpr int64_t kMostSums = int64_t(1) << 23;  // floats a thread may spend on sums of its own

inline int round_up(int n, int to) { return (n + to - 1) / to * to; }
}  // namespace

// Shapes and settings of one call. Strides are in elements: n, c, h, w.
struct Problem {
  int32_t batch, channels, out_channels, kernels, groups;
  int32_t height, width, out_height, out_width;
  int32_t kh, kw, sh, sw, dh, dw, top, left;
  int32_t threads;
  int64_t x_stride[4], y_stride[4], grad_x_stride[4];  // y also stands for its gradient

  // Whether there is enough to do for waking the other threads up to pay.
  bool is_large() const {
    const int64_t products = int64_t(channels) / groups * out_channels * kernels * kh * kw;
    return products * batch * out_height * out_width > 1 << 18;
  }
};

namespace {

#if defined(__FLT16_MAX__)
#define MALLEABLE_FOR_EVERY_TYPE(path, export) \
  export(path, float32, float) export(path, bfloat16, BFloat16) export(path, float16, Float16)
#else
#define MALLEABLE_FOR_EVERY_TYPE(path, export) export(path, float32, float) export(path, bfloat16, BFloat16)
#endif

// Exports a path's forward and backward. Gradients may be null where not needed; they come in as zeros, that of the
// assignment in float.
#define MALLEABLE_EXPORT(path, suffix, T)                                                                              \
  extern "C" int path##_forward_##suffix(const Problem* p, const void* x, const void* w, const void* a, void* y) {     \
    return guarded([&] { forward(*p, (const T*)x, (const T*)w, (const T*)a, (T*)y); });                                \
  }                                                                                                                    \
  extern "C" int path##_backward_##suffix(const Problem* p, const void* g, const void* x, const void* w,               \
                                          const void* a, void* gx, void* gw, float* ga) {                              \
    return guarded([&] {                                                                                               \
      backward(*p, (const T*)g, (const T*)x, (const T*)w, (const T*)a, (T*)gx, (T*)gw, ga);                            \
    });                                                                                                                \
  }
#define MALLEABLE_EXPORT_PATH(path) MALLEABLE_FOR_EVERY_TYPE(path, MALLEABLE_EXPORT)

struct Region {  // of a map, possibly beyond its borders
  int row, column, rows, columns;
  int pixels() const { return rows * columns; }
  Region clipped(int height, int width) const {
    const int top = std::max(row, 0), left = std::max(column, 0);
    return {top, left, std::max(0, std::min(row + rows, height) - top),
            std::max(0, std::min(column + columns, width) - left)};
  }
};

inline Vec load_lanes(const float* p) { return load(p); }
template <typename T>
inline Vec load_lanes(const T* p) {
  float lanes[kLanes];
  for (int i = 0; i < kLanes; ++i) lanes[i] = p[i];
  return load(lanes);
}
inline void store_lanes(float* p, Vec v) { store(p, v); }
template <typename T>
inline void store_lanes(T* p, Vec v) {
  float lanes[kLanes];
  store(lanes, v);
  for (int i = 0; i < kLanes; ++i) p[i] = lanes[i];
}

// The last vector of a row, filled up with zeros.
inline Vec load_some(const float* from, int64_t count) {
  if (count >= kLanes) return load(from);
  float lanes[kLanes] = {};
  std::memcpy(lanes, from, sizeof(float) * count);
  return load(lanes);
}
inline void store_some(float* to, Vec v, int64_t count) {
  if (count >= kLanes) return store(to, v);
  float lanes[kLanes];
  store(lanes, v);
  std::memcpy(to, lanes, sizeof(float) * count);
}

typedef int32_t Mask __attribute__((vector_size(kLanes * sizeof(int32_t)), aligned(4), may_alias));

// Lanes of two rows, those of the second numbered on from kLanes.
template <size_t... From>
inline Vec shuffle(Vec a, Vec b, std::index_sequence<From...>) {
#if defined(__has_builtin) && __has_builtin(__builtin_shufflevector)
  return __builtin_shufflevector(a, b, int(From)...);
#else  // GCC before 12
  return __builtin_shuffle(a, b, Mask{int32_t(From)...});
#endif
}
template <int S, size_t... I>
inline void swap_blocks(Vec& a, Vec& b, std::index_sequence<I...>) {
  const Vec low = shuffle(a, b, std::index_sequence<(I & S ? I - S + kLanes : I)...>{});
  b = shuffle(a, b, std::index_sequence<(I & S ? I + kLanes : I + S)...>{});
  a = low;
}

// Swaps, in every pair of rows S apart, the blocks of S lanes off the diagonal; all S together transpose.
template <int S>
inline void transpose_step(Vec* rows) {
  MALLEABLE_UNROLL
  for (int i = 0; i < kLanes; ++i)
    if (!(i & S)) swap_blocks<S>(rows[i], rows[i + S], std::make_index_sequence<kLanes>{});
  if constexpr (S > 1) transpose_step<S / 2>(rows);
}

// Leaves in lane i of the first row the sum of row i: halves the number of rows as it goes.
template <int S>
inline void sum_step(Vec* rows) {
  MALLEABLE_UNROLL
  for (int i = 0; i < S; ++i) {
    swap_blocks<S>(rows[i], rows[i + S], std::make_index_sequence<kLanes>{});
    rows[i] += rows[i + S];
  }
  if constexpr (S > 1) sum_step<S / 2>(rows);
}

// The sums of N vectors, many at a time.
template <int N>
inline void sum_each(const Vec* v, float* out) {
  MALLEABLE_UNROLL
  for (int first = 0; first < N; first += kLanes) {
    Vec rows[kLanes];
    MALLEABLE_UNROLL
    for (int i = 0; i < kLanes; ++i) rows[i] = first + i < N ? v[first + i] : Vec{};
    sum_step<kLanes / 2>(rows);
    store_some(out + first, rows[0], N - first);
  }
}

// out[j][i] = in[i][j], rows in_pitch and out_pitch apart.
template <typename From, typename To>
void transpose(const From* in, int64_t in_pitch, int rows, int columns, To* out, int64_t out_pitch) {
  int i = 0;
  for (; i + kLanes <= rows; i += kLanes) {
    int j = 0;
    for (; j + kLanes <= columns; j += kLanes) {
      Vec tile[kLanes];
      MALLEABLE_UNROLL
      for (int l = 0; l < kLanes; ++l) {
        tile[l] = load_lanes(in + (i + l) * in_pitch + j);
        __builtin_prefetch(in + (i + l + kLanes) * in_pitch + j);
      }
      transpose_step<kLanes / 2>(tile);
      MALLEABLE_UNROLL
      for (int l = 0; l < kLanes; ++l) store_lanes(out + (j + l) * out_pitch + i, tile[l]);
    }
    for (; j < columns; ++j)
      for (int l = 0; l < kLanes; ++l) out[j * out_pitch + i + l] = float(in[(i + l) * in_pitch + j]);
  }
  for (; i < rows; ++i)
    for (int j = 0; j < columns; ++j) out[j * out_pitch + i] = float(in[i * in_pitch + j]);
}

// Copies a region of some channels to channels-last float, zeros outside of the map and beyond the channels.
template <typename T>
void gather(const T* map, const int64_t* stride, int height, int width, int channels, Region r, float* out, int pitch) {
  for (int i = 0; i < r.rows; ++i) {
    float* line = out + int64_t(i) * r.columns * pitch;
    const int row = r.row + i;
    const int first = std::max(0, -r.column), last = std::min(r.columns, width - r.column);
    const bool outside = row < 0 || row >= height || first >= last;
    if (outside || first > 0 || last < r.columns || channels < pitch)
      std::memset(line, 0, sizeof(float) * r.columns * pitch);
    if (outside) continue;
    const T* from = map + row * stride[2] + int64_t(r.column + first) * stride[3];
    float* to = line + int64_t(first) * pitch;
    if (stride[3] == 1) {
      transpose(from, stride[1], channels, last - first, to, pitch);
    } else {
      for (int j = first; j < last; ++j, from += stride[3], to += pitch)
        for (int c = 0; c < channels; ++c) to[c] = from[c * stride[1]];
    }
  }
}

// Copies channels-last floats to a region that lies within the map.
template <typename T>
void scatter(const float* in, int pitch, T* map, const int64_t* stride, int channels, Region r) {
  for (int i = 0; i < r.rows; ++i) {
    const float* from = in + int64_t(i) * r.columns * pitch;
    T* to = map + (r.row + i) * stride[2] + r.column * stride[3];
    if (stride[3] == 1) {
      transpose(from, pitch, r.columns, channels, to, stride[1]);
    } else {
      for (int j = 0; j < r.columns; ++j, to += stride[3], from += pitch)
        for (int c = 0; c < channels; ++c) to[c * stride[1]] = from[c];
    }
  }
}

// The tap that relative depth is measured from.
inline int center_of(const Problem& p) { return p.kh / 2 * p.kw + p.kw / 2; }

// How many of a map's channels fit a buffer of 8 MiB for so many pixels.
inline int channels_at_once(int channels, int64_t pixels) {
  const int64_t fit = std::max<int64_t>(32, (int64_t(1) << 21) / std::max<int64_t>(pixels, 1) / 16 * 16);
  return int(std::min<int64_t>(channels, fit));
}

// The assignment of the center tap, if it is the same everywhere: its kernels then act as one.
template <typename T>
bool constant_center(const Problem& p, const T* assign, std::vector<float>& value) {
  const int64_t pixels = int64_t(p.out_height) * p.out_width, taps = p.kh * p.kw, center = center_of(p);
  value.assign(p.kernels, 0.0f);
  for (int n = 0; n < p.batch; ++n)
    for (int k = 0; k < p.kernels; ++k) {
      const T* a = assign + ((int64_t(n) * p.kernels + k) * taps + center) * pixels;
      if (n == 0) value[k] = a[0];
      bool same = true;
      for (int64_t i = 0; i < pixels; ++i) same &= float(a[i]) == value[k];
      if (!same) return false;
    }
  return true;
}

struct Blocks {  // a map cut into regions of about so many pixels
  int height, width, rows, columns;
  Blocks(int height, int width, int pixels) : height(height), width(width) {
    const int across = (width + 63) / 64;
    columns = (width + across - 1) / across;
    rows = std::max(1, std::min(height, pixels / columns));
    rows = (height + (height + rows - 1) / rows - 1) / ((height + rows - 1) / rows);
  }
  int down() const { return (height + rows - 1) / rows; }
  int across() const { return (width + columns - 1) / columns; }
  int count() const { return down() * across(); }
  Region operator[](int i) const {
    const int row = i / across() * rows, column = i % across() * columns;
    return {row, column, std::min(rows, height - row), std::min(columns, width - column)};
  }
};

// What a convolution reads for a region of its output.
inline Region input_of(const Problem& p, Region out) {
  return {out.row * p.sh - p.top, out.column * p.sw - p.left, (out.rows - 1) * p.sh + (p.kh - 1) * p.dh + 1,
          (out.columns - 1) * p.sw + (p.kw - 1) * p.dw + 1};
}

// The first of `count` numbers `from`, `from + step`, ... that is not below 0, and the first that is not below `size`.
inline int first_inside(int from, int step) { return from >= 0 ? 0 : (-from + step - 1) / step; }
inline int first_beyond(int from, int step, int size, int count) {
  return from >= size ? 0 : int(std::min<int64_t>(count, (int64_t(size) - from + step - 1) / step));
}

inline int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// The region of the output that reads a region of the input.
inline Region output_of(const Problem& p, Region in) {
  const int row = -floor_div(-(in.row + p.top - (p.kh - 1) * p.dh), p.sh);
  const int column = -floor_div(-(in.column + p.left - (p.kw - 1) * p.dw), p.sw);
  const int last_row = floor_div(in.row + in.rows - 1 + p.top, p.sh);
  const int last_column = floor_div(in.column + in.columns - 1 + p.left, p.sw);
  return {row, column, std::max(0, last_row - row + 1), std::max(0, last_column - column + 1)};
}

}  // namespace
