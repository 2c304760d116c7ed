// The blocking of a panel's product, over any tile unit. Included by isa_amx.cpp inside its anonymous namespace.
//
// A unit has eight tiles: 0-3 sums (token tile * 2 + record), 4-5 activations, 6-7 weights; it can clear and store
// sums, load any tile and add a product.

// Sums of Tokens x Records tiles over `chunks` chunks. Two by two loads four tiles for four products.
template <class Unit, int Tokens, int Records>
inline void multiply_tiles(Unit& unit, const uint16_t* act, const uint16_t* weights, int64_t chunks, bool first,
                           float* sums, int64_t stride) {
  float *s00 = sums, *s01 = sums + kTileSums, *s10 = sums + stride, *s11 = sums + stride + kTileSums;
  if (first) {
    unit.template clear<0>();
    if constexpr (Records > 1) unit.template clear<1>();
    if constexpr (Tokens > 1) unit.template clear<2>();
    if constexpr (Tokens > 1 && Records > 1) unit.template clear<3>();
  } else {
    unit.template load<0>(s00);
    if constexpr (Records > 1) unit.template load<1>(s01);
    if constexpr (Tokens > 1) unit.template load<2>(s10);
    if constexpr (Tokens > 1 && Records > 1) unit.template load<3>(s11);
  }
  constexpr int64_t kNext = kBlockChunks * kTileWords;  // from a token tile, or a record, to the next
  for (int64_t c = 0; c < chunks; ++c, act += kTileWords, weights += kTileWords) {
    unit.template load<6>(weights);
    unit.template load<4>(act);
    unit.template multiply<0, 4, 6>();
    if constexpr (Records > 1) {
      unit.template load<7>(weights + kNext);
      unit.template multiply<1, 4, 7>();
    }
    if constexpr (Tokens > 1) {
      unit.template load<5>(act + kNext);
      unit.template multiply<2, 5, 6>();
      if constexpr (Records > 1) unit.template multiply<3, 5, 7>();
    }
  }
  unit.template store<0>(s00);
  if constexpr (Records > 1) unit.template store<1>(s01);
  if constexpr (Tokens > 1) unit.template store<2>(s10);
  if constexpr (Tokens > 1 && Records > 1) unit.template store<3>(s11);
}

// Block by block over the columns: decode the panel's weights once, then let pairs of records stay in L1 while all
// token tiles pass. Sums grow in the order of the columns, whatever the panel or the tokens beside.
template <class Unit>
void multiply_panel(const TilePanel& p) {
  Unit unit;
  const int64_t chunks = (p.cols + 31) / 32, stride = int64_t{p.count} * kTileSums;
  constexpr int64_t kTiles = kBlockChunks * kTileWords;
  const uint16_t* act = p.act;
  if (chunks == 0) std::memset(p.sums, 0, sizeof(float) * p.token_tiles * stride);  // a rank may hold no columns
  for (int64_t first = 0; first < chunks; first += kBlockChunks, act += p.token_tiles * kTiles) {
    const int64_t last = first + kBlockChunks < chunks ? first + kBlockChunks : chunks, n = last - first;
    for (int i = 0; i < p.count; ++i) tile_weights(p.records[i], p.cols, first, last, p.weights + i * kTiles);
    for (int i = 0; i < p.count; i += 2) {
      const uint16_t* w = p.weights + i * kTiles;
      for (int t = 0; t < p.token_tiles; t += 2) {
        const uint16_t* a = act + t * kTiles;
        float* sums = p.sums + t * stride + i * kTileSums;
        const bool two_tokens = t + 1 < p.token_tiles, two_records = i + 1 < p.count, start = first == 0;
        if (two_tokens && two_records) multiply_tiles<Unit, 2, 2>(unit, a, w, n, start, sums, stride);
        else if (two_records) multiply_tiles<Unit, 1, 2>(unit, a, w, n, start, sums, stride);
        else if (two_tokens) multiply_tiles<Unit, 2, 1>(unit, a, w, n, start, sums, stride);
        else multiply_tiles<Unit, 1, 1>(unit, a, w, n, start, sums, stride);
      }
    }
  }
}
