// What the kernels share: vectors, half precision, shapes, and channels-last copies of regions of a map.
#pragma once

#include <algorithm>
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <new>
#include <vector>

#include <omp.h>

namespace {

#if defined(__AVX512F__)
constexpr int kLanes = 16, kVectors = 4, kRows = 6;
#elif defined(__AVX__)
constexpr int kLanes = 8, kVectors = 2, kRows = 6;
#else
constexpr int kLanes = 4, kVectors = 4, kRows = 6;
#endif
constexpr int kPanel = kLanes * kVectors;  // channels of one register tile
constexpr int kDepth = 256;                // channels summed before a tile is scaled and put away
constexpr int kBlock = 384;                // pixels of one block, about

typedef float Vec __attribute__((vector_size(kLanes * sizeof(float)), aligned(4), may_alias));

inline Vec load(const float* p) { return *reinterpret_cast<const Vec*>(p); }
inline void store(float* p, Vec v) { *reinterpret_cast<Vec*>(p) = v; }
inline Vec broadcast(float s) { return s - Vec{}; }

template <int Half>
inline float fold(const float* v) {
  float s[Half];
  for (int i = 0; i < Half; ++i) s[i] = v[i] + v[i + Half];
  if constexpr (Half == 1) return s[0];
  else return fold<Half / 2>(s);
}
inline float sum(Vec v) { return fold<kLanes / 2>(reinterpret_cast<const float*>(&v)); }

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
struct Float16 {
  _Float16 value;
  operator float() const { return float(value); }
  Float16& operator=(float f) {
    value = _Float16(f);
    return *this;
  }
};
#endif

// Cache-aligned memory of one thread.
struct Buffer {
  std::unique_ptr<float, decltype(&std::free)> data{nullptr, &std::free};
  explicit Buffer(size_t floats) {
    data.reset(static_cast<float*>(std::aligned_alloc(64, (floats * sizeof(float) + 127) / 64 * 64)));
    if (!data) throw std::bad_alloc();
  }
  float* get() { return data.get(); }
};

int round_up(int n, int to) { return (n + to - 1) / to * to; }

}  // namespace

// Shapes and settings of one call. Strides are in elements: n, c, h, w.
struct Problem {
  int32_t batch, channels, out_channels, kernels, groups;
  int32_t height, width, out_height, out_width;
  int32_t kh, kw, sh, sw, dh, dw, top, left;
  int32_t threads;
  int64_t x_stride[4], y_stride[4], grad_x_stride[4];  // y also stands for its gradient
};

namespace {

#if defined(__FLT16_MAX__)
#define MALLEABLE_FOR_EVERY_TYPE(export) export(float32, float) export(bfloat16, BFloat16) export(float16, Float16)
#else
#define MALLEABLE_FOR_EVERY_TYPE(export) export(float32, float) export(bfloat16, BFloat16)
#endif

struct Region {  // of a map, rows and columns from first to last, possibly beyond its borders
  int row, column, rows, columns;
  int pixels() const { return rows * columns; }
};

// Copies a region of one group's channels to channels-last float, zeros outside of the map.
template <typename T>
void gather(const T* map, const int64_t* stride, int height, int width, int channels, Region r, float* out, int pitch) {
  for (int i = 0; i < r.rows; ++i) {
    float* line = out + int64_t(i) * r.columns * pitch;
    const int row = r.row + i;
    if (row < 0 || row >= height) {
      std::memset(line, 0, sizeof(float) * r.columns * pitch);
      continue;
    }
    const int first = std::max(0, -r.column), last = std::min(r.columns, width - r.column);
    if (first > 0) std::memset(line, 0, sizeof(float) * std::min(first, r.columns) * pitch);
    if (last < r.columns) {
      const int from = std::max(last, 0);
      std::memset(line + int64_t(from) * pitch, 0, sizeof(float) * (r.columns - from) * pitch);
    }
    if (first >= last) continue;
    const T* source = map + row * stride[2] + int64_t(r.column + first) * stride[3];
    if (stride[1] == 1) {
      for (int j = first; j < last; ++j, source += stride[3]) {
        float* to = line + int64_t(j) * pitch;
        for (int c = 0; c < channels; ++c) to[c] = source[c];
        for (int c = channels; c < pitch; ++c) to[c] = 0;
      }
      continue;
    }
    for (int c0 = 0; c0 < pitch; c0 += 16) {  // sixteen channels make one cache line of the destination
      const int c1 = std::min(c0 + 16, pitch);
      for (int j = first; j < last; ++j) {
        float* to = line + int64_t(j) * pitch;
        const T* from = source + (j - first) * stride[3];
        for (int c = c0; c < c1; ++c) to[c] = c < channels ? float(from[c * stride[1]]) : 0.0f;
      }
    }
  }
}

template <typename T>
void scatter(const float* in, int pitch, T* map, const int64_t* stride, int channels, Region r) {
  for (int i = 0; i < r.rows; ++i) {
    const float* line = in + int64_t(i) * r.columns * pitch;
    T* to = map + (r.row + i) * stride[2] + r.column * stride[3];
    if (stride[1] == 1) {
      for (int j = 0; j < r.columns; ++j)
        for (int c = 0; c < channels; ++c) to[j * stride[3] + c] = line[int64_t(j) * pitch + c];
      continue;
    }
    for (int c0 = 0; c0 < channels; c0 += 16)
      for (int j = 0; j < r.columns; ++j)
        for (int c = c0; c < std::min(c0 + 16, channels); ++c)
          to[c * stride[1] + j * stride[3]] = line[int64_t(j) * pitch + c];
  }
}

struct Blocks {  // a map cut into regions of about kBlock pixels
  int height, width, rows, columns;
  Blocks(int height, int width) : height(height), width(width) {
    const int across = (width + 63) / 64;
    columns = (width + across - 1) / across;
    rows = std::max(1, std::min(height, kBlock / columns));
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
Region input_of(const Problem& p, Region out) {
  return {out.row * p.sh - p.top, out.column * p.sw - p.left, (out.rows - 1) * p.sh + (p.kh - 1) * p.dh + 1,
          (out.columns - 1) * p.sw + (p.kw - 1) * p.dw + 1};
}

int floor_div(int a, int b) { return a >= 0 ? a / b : -((-a + b - 1) / b); }

// The region of the output that reads a region of the input.
Region output_of(const Problem& p, Region in) {
  const int row = -floor_div(-(in.row + p.top - (p.kh - 1) * p.dh), p.sh);
  const int column = -floor_div(-(in.column + p.left - (p.kw - 1) * p.dw), p.sw);
  const int last_row = floor_div(in.row + in.rows - 1 + p.top, p.sh);
  const int last_column = floor_div(in.column + in.columns - 1 + p.left, p.sw);
  return {row, column, std::max(0, last_row - row + 1), std::max(0, last_column - column + 1)};
}


}  // namespace
