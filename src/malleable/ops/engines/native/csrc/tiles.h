// Register tiles: a few pixels times a few vectors of channels, the innermost loops of the dense kernels.
#pragma once

#include "common.h"

namespace {

constexpr int kDepth = 256;  // channels summed before a tile is scaled and put away
constexpr int kBlock = 384;  // pixels of one block, about

// One register tile: R pixels times V vectors, summed over `depth` channels.
template <int R, int V>
struct Tile {
  Vec acc[R][V];

  inline __attribute__((always_inline)) void multiply(const float* const* rows, const float* weights, int depth) {
    for (int r = 0; r < R; ++r)
      for (int v = 0; v < V; ++v) acc[r][v] = Vec{};
    const float* row[R];
    for (int r = 0; r < R; ++r) row[r] = rows[r];
    for (int c = 0; c < depth; ++c, weights += kPanel) {
      Vec b[V];
      MALLEABLE_UNROLL
      for (int v = 0; v < V; ++v) b[v] = load(weights + v * kLanes);
      MALLEABLE_UNROLL
      for (int r = 0; r < R; ++r) {
        const Vec a = broadcast(row[r][c]);
        MALLEABLE_UNROLL
        for (int v = 0; v < V; ++v) acc[r][v] += a * b[v];
      }
    }
  }
};

struct Entry {  // a pixel of a list: where it is read, where its result goes, what it is worth
  const float* from;
  float* to;
  float scale;
  int32_t index;
};

// to[o...] += scale * (from[c...] . weights) for R pixels.
template <int R, int V>
void accumulate(const Entry* list, int c, int o, const float* weights, int depth) {
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = list[r].from + c;
  Tile<R, V> tile;
  tile.multiply(rows, weights, depth);
  for (int r = 0; r < R; ++r) {
    const Vec s = broadcast(list[r].scale);
    for (int v = 0; v < V; ++v) {
      float* to = list[r].to + o + v * kLanes;
      store(to, load(to) + s * tile.acc[r][v]);
    }
  }
}

// The same, and the inner product of (from . weights) with `other` (a row per index, pitch apart) added to `dots`.
template <int R, int V>
void accumulate_and_dot(const Entry* list, int c, int o, const float* weights, int depth, const float* other, int pitch,
                        float* dots) {
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = list[r].from + c;
  Tile<R, V> tile;
  tile.multiply(rows, weights, depth);
  for (int r = 0; r < R; ++r) {
    const Vec s = broadcast(list[r].scale);
    const float* x = other + int64_t(list[r].index) * pitch + o;
    Vec dot{};
    for (int v = 0; v < V; ++v) {
      float* to = list[r].to + o + v * kLanes;
      store(to, load(to) + s * tile.acc[r][v]);
      dot += load(x + v * kLanes) * tile.acc[r][v];
    }
    dots[r] += sum(dot);
  }
}

using Accumulate = void (*)(const Entry*, int, int, const float*, int);
using AccumulateAndDot = void (*)(const Entry*, int, int, const float*, int, const float*, int, float*);

template <template <int, int> class F, typename Fn, int R, int V>
constexpr void fill(Fn (&table)[kRows + 1][kVectors + 1]) {
  table[R][V] = F<R, V>::run;
  if constexpr (V > 1) fill<F, Fn, R, V - 1>(table);
  else if constexpr (R > 1) fill<F, Fn, R - 1, kVectors>(table);
}
template <int R, int V> struct AccumulateOf { static constexpr Accumulate run = accumulate<R, V>; };
template <int R, int V> struct AccumulateAndDotOf { static constexpr AccumulateAndDot run = accumulate_and_dot<R, V>; };

template <template <int, int> class F, typename Fn>
struct Table {
  Fn of[kRows + 1][kVectors + 1] = {};
  constexpr Table() { fill<F, Fn, kRows, kVectors>(of); }
};
constexpr Table<AccumulateOf, Accumulate> kAccumulate;
constexpr Table<AccumulateAndDotOf, AccumulateAndDot> kAccumulateAndDot;

// Walks a list of pixels through one tap of one kernel: input channels `first` ... `first + depth` of all `inputs`, to
// which the list points, and all outputs. weights: panels of inputs x kPanel.
inline void walk(const std::vector<Entry>& list, const float* weights, int inputs, int first, int depth, int outputs,
                 const float* other, int pitch, float* dots) {
  const int count = int(list.size());
  for (int o = 0; o < outputs; o += kPanel) {
    const int vectors = (std::min(kPanel, outputs - o) + kLanes - 1) / kLanes;
    for (int c = 0; c < depth; c += kDepth) {
      const int some = std::min(kDepth, depth - c);
      const float* slice = weights + int64_t(o) * inputs + int64_t(first + c) * kPanel;
      for (int i = 0; i < count; i += kRows) {
        const int rows = std::min(kRows, count - i);
        if (dots) kAccumulateAndDot.of[rows][vectors](&list[i], c, o, slice, some, other, pitch, dots + i);
        else kAccumulate.of[rows][vectors](&list[i], c, o, slice, some);
      }
    }
  }
}

// sums[row][vector] += sum over pixels of scaled[pixel][row] * grad[pixel][vector].
template <int R, int V>
void outer(const float* scaled, int pitch, const float* const* grad, int offset, int count, float* sums, int sums_pitch) {
  Vec acc[R][V];
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) acc[r][v] = load(sums + int64_t(r) * sums_pitch + v * kLanes);
  for (int i = 0; i < count; ++i, scaled += pitch) {
    const float* g = grad[i] + offset;
    Vec b[V];
    MALLEABLE_UNROLL
    for (int v = 0; v < V; ++v) b[v] = load(g + v * kLanes);
    MALLEABLE_UNROLL
    for (int r = 0; r < R; ++r) {
      const Vec a = broadcast(scaled[r]);
      MALLEABLE_UNROLL
      for (int v = 0; v < V; ++v) acc[r][v] += a * b[v];
    }
  }
  for (int r = 0; r < R; ++r)
    for (int v = 0; v < V; ++v) store(sums + int64_t(r) * sums_pitch + v * kLanes, acc[r][v]);
}
using Outer = void (*)(const float*, int, const float* const*, int, int, float*, int);
template <int R, int V> struct OuterOf { static constexpr Outer run = outer<R, V>; };
constexpr Table<OuterOf, Outer> kOuter;

}  // namespace
