// Register tiles: a few pixels times a few vectors of channels, the innermost loops of the dense kernels.
#pragma once

#include "common.h"

namespace {

constexpr int kDepth = 512;  // channels summed before a tile is scaled and put away
constexpr int kBlock = 384;  // pixels of one block, about

// One register tile: R pixels times V vectors, summed over `depth` channels.
template <int R, int V>
struct Tile {
  Vec acc[R][V];

  inline __attribute__((always_inline)) void multiply(const float* const* rows, const float* weights, int depth) {
    MALLEABLE_UNROLL
    for (int r = 0; r < R; ++r)
      MALLEABLE_UNROLL
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

struct Line {  // neighbours of a row of a block that one tap joins to neighbours of a row of the other map
  int count;
  int row, column, step;  // of the first one on the other map, and how far apart they are
  int own, own_step;      // the same in the block, which counts its pixels row by row
  int64_t assign;         // of the first one in the assignment of the tap, where they are neighbours
};

// Visits what the output's pixels of a region read through a tap.
template <typename Visit>
void for_each_line(const Problem& p, Region r, int tap, const Visit& visit) {
  const int column = r.column * p.sw - p.left + tap % p.kw * p.dw;
  const int first = first_inside(column, p.sw), count = first_beyond(column, p.sw, p.width, r.columns) - first;
  for (int i = 0; i < r.rows; ++i) {
    const int row = (r.row + i) * p.sh - p.top + tap / p.kw * p.dh;
    if (row >= 0 && row < p.height && count > 0)
      visit(Line{count, row, column + first * p.sw, p.sw, i * r.columns + first, 1,
                 int64_t(r.row + i) * p.out_width + r.column + first});
  }
}

// Visits what reads the input's pixels of a region through a tap.
template <typename Visit>
void for_each_line_back(const Problem& p, Region r, int tap, const Visit& visit) {
  const int column = r.column + p.left - tap % p.kw * p.dw;
  const int first = std::max(0, -floor_div(-column, p.sw));
  const int count = std::min(p.out_width, floor_div(column + r.columns - 1, p.sw) + 1) - first;
  for (int i = 0; i < r.rows; ++i) {
    const int row = r.row + i + p.top - tap / p.kw * p.dh;
    if (row >= 0 && row % p.sh == 0 && row / p.sh < p.out_height && count > 0)
      visit(Line{count, row / p.sh, first, 1, i * r.columns + first * p.sw - column, p.sw,
                 int64_t(row / p.sh) * p.out_width + first});
  }
}

struct List {  // pixels of a block that a kernel takes: where they are read, where they go, what they are worth
  std::vector<int32_t> from, to;
  std::vector<float> scale;
  int count = 0;
  explicit List(int most) : from(most), to(most), scale(most) {}
};

// The pixels of a block that a tap joins, of which a kernel takes all that are worth something to it.
class Joined {
 public:
  explicit Joined(int most) : all_(most), some_(most) {}

  void clear() {
    lines_.clear();
    all_.count = 0;
  }
  void add(const Line& l, const Region& source) {
    const int first = (l.row - source.row) * source.columns + l.column - source.column;
    int32_t *from = all_.from.data() + all_.count, *to = all_.to.data() + all_.count;
    for (int j = 0; j < l.count; ++j) from[j] = first + j * l.step, to[j] = l.own + j * l.own_step;
    all_.count += l.count;
    lines_.push_back(l);
  }
  // Without an assignment all are worth 1.
  template <typename T>
  const List& everyone(const T* assign) {
    weigh(assign);
    return all_;
  }
  template <typename T>
  const List& taken(const T* assign) {
    if (weigh(assign)) return all_;
    int count = 0;
    for (int i = 0; i < all_.count; ++i) {
      some_.from[count] = all_.from[i], some_.to[count] = all_.to[i], some_.scale[count] = all_.scale[i];
      count += all_.scale[i] != 0;
    }
    some_.count = count;
    return some_;
  }
  // Adds one value a pixel where its assignment lies.
  void put(const float* values, float* assign) const {
    for (const Line& l : lines_)
      for (int j = 0; j < l.count; ++j) assign[l.assign + j] += *values++;
  }

 private:
  // Tells whether all are worth something.
  template <typename T>
  bool weigh(const T* assign) {
    float* scale = all_.scale.data();
    bool every = true;
    for (const Line& l : lines_) {
      for (int j = 0; j < l.count; ++j) {
        scale[j] = assign ? float(assign[l.assign + j]) : 1.0f;
        every &= scale[j] != 0;
      }
      scale += l.count;
    }
    return every;
  }

  std::vector<Line> lines_;
  List all_, some_;
};

struct Rows {  // channels-last pixels, `pitch` apart
  const float* data;
  int pitch;
  const float* operator[](int64_t i) const { return data + i * pitch; }
};

// to[pixel][o...] += scale * (from[pixel][c...] . weights) for R pixels of a list from `first` on. With Dot also
// dots[pixel] += (from . weights) . other[pixel][o...].
template <int R, int V, bool Dot>
void accumulate(const List& list, int first, Rows from, int c, float* to, int pitch, int o, const float* weights,
                int depth, const float* other, float* dots) {
  const float* rows[R];
  for (int r = 0; r < R; ++r) rows[r] = from[list.from[first + r]] + c;
  Tile<R, V> tile;
  tile.multiply(rows, weights, depth);
  MALLEABLE_UNROLL
  for (int r = 0; r < R; ++r) {
    const Vec s = broadcast(list.scale[first + r]);
    const int64_t place = int64_t(list.to[first + r]) * pitch + o;
    Vec dot{};
    MALLEABLE_UNROLL
    for (int v = 0; v < V; ++v) {
      float* y = to + place + v * kLanes;
      store(y, load(y) + s * tile.acc[r][v]);
      if (Dot) dot += load(other + place + v * kLanes) * tile.acc[r][v];
    }
    if (Dot) dots[first + r] += sum(dot);
  }
}

// The functions that Of::run names, for every number of rows and vectors of a tile.
template <typename Of>
struct Table {
  typename Of::Function of[kRows + 1][kVectors + 1] = {};
  template <int R, int V>
  constexpr void fill() {
    of[R][V] = Of::template run<R, V>;
    if constexpr (V > 1) fill<R, V - 1>();
    else if constexpr (R > 1) fill<R - 1, kVectors>();
  }
  constexpr Table() { fill<kRows, kVectors>(); }
};

template <bool Dot>
struct Accumulate {
  using Function = void (*)(const List&, int, Rows, int, float*, int, int, const float*, int, const float*, float*);
  template <int R, int V>
  static constexpr Function run = accumulate<R, V, Dot>;
};
constexpr Table<Accumulate<false>> kAccumulate;
constexpr Table<Accumulate<true>> kAccumulateAndDot;

// Walks a list of pixels through one tap of one kernel: input channels `first` ... `first + from.pitch` of all `inputs`,
// and all outputs. weights: panels of inputs x kPanel. With `dots` also the inner products with `other`, laid out as `to`.
inline void walk(const List& list, Rows from, float* to, int pitch, const float* weights, int inputs, int first,
                 int outputs, const float* other, float* dots) {
  for (int o = 0; o < outputs; o += kPanel) {
    const int vectors = (std::min(kPanel, outputs - o) + kLanes - 1) / kLanes;
    for (int c = 0; c < from.pitch; c += kDepth) {
      const int some = std::min(kDepth, from.pitch - c);
      const float* slice = weights + int64_t(o) * inputs + int64_t(first + c) * kPanel;
      for (int i = 0; i < list.count; i += kRows) {
        const int rows = std::min(kRows, list.count - i);
        (dots ? kAccumulateAndDot.of : kAccumulate.of)[rows][vectors](list, i, from, c, to, pitch, o, slice, some,
                                                                      other, dots);
      }
    }
  }
}

// sums[row][vector] += sum over pixels of a list of scaled[number of the pixel][row] * grad[pixel][vector].
template <int R, int V>
void outer(const List& list, const float* scaled, int pitch, Rows grad, float* sums, int sums_pitch) {
  Vec acc[R][V];
  MALLEABLE_UNROLL
  for (int r = 0; r < R; ++r)
    MALLEABLE_UNROLL
    for (int v = 0; v < V; ++v) acc[r][v] = load(sums + int64_t(r) * sums_pitch + v * kLanes);
  for (int i = 0; i < list.count; ++i, scaled += pitch) {
    const float* g = grad[list.to[i]];
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
  MALLEABLE_UNROLL
  for (int r = 0; r < R; ++r)
    MALLEABLE_UNROLL
    for (int v = 0; v < V; ++v) store(sums + int64_t(r) * sums_pitch + v * kLanes, acc[r][v]);
}
struct Outer {
  using Function = void (*)(const List&, const float*, int, Rows, float*, int);
  template <int R, int V>
  static constexpr Function run = outer<R, V>;
};
constexpr Table<Outer> kOuter;

}  // namespace
