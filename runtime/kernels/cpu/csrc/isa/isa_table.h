// The kernel table of one instruction set, made from the templates. Included last, inside an anonymous namespace.

uint64_t sum_bytes(const uint8_t* data, size_t nbytes) {
  const size_t whole = nbytes / 256 * 256;
  uint64_t sum = sum_words(data, whole);
  for (size_t i = whole; i < nbytes; ++i) sum += data[i];
  return sum;
}

// Copies what no cache should hold: a plain store would first read the line that it replaces.
void stream(uint8_t* to, const uint8_t* from, size_t nbytes) {
  size_t at = (64 - reinterpret_cast<uintptr_t>(to) % 64) % 64;
  at = at < nbytes ? at : nbytes;
  std::memcpy(to, from, at);
  for (; at + 64 <= nbytes; at += 64) stream_line(to + at, from + at);
  std::memcpy(to + at, from + at, nbytes - at);
  finish_streams();
}

template <class D>
void set_quant(Kernels& k) {
  k.linear[D::kType] = linear_quant<D>;
  k.dequantize[D::kType] = dequantize_quant<D>;
}

template <int T>
void set_plain(Kernels& k) {
  k.linear[T] = linear_plain<T>;
  k.dequantize[T] = dequantize_plain<T>;
}

Kernels make_kernels(const char* isa) {
  Kernels k{};
  k.isa = isa;
  k.quantize = quantize;
  k.silu_mul = silu_mul;
  k.relu_mul = relu_mul;
  k.gelu_mul = gelu_mul;
  k.gelu16_mul = gelu16_mul;
  k.sigmoid_mul = sigmoid_mul;
  k.clamped_mul = clamped_mul;
  k.limited_mul = limited_mul;
  k.attention = attention;
  k.score_key = score_key;
  k.delta_mix = delta_mix, k.delta_scale = delta_scale, k.delta_gate = delta_gate;
  k.delta_read = delta_read, k.delta_write = delta_write, k.delta_multiply = delta_multiply;
  k.sum = sum_bytes;
  k.stream = stream;
  set_plain<F32>(k), set_plain<F16>(k), set_plain<BF16>(k), set_plain<FP8>(k);
  set_quant<Legacy<Q4_0, 0, false>>(k), set_quant<Legacy<Q4_1, 0, true>>(k);
  set_quant<Legacy<Q5_0, 1, false>>(k), set_quant<Legacy<Q5_1, 1, true>>(k);
  set_quant<DecodeQ8_0>(k), set_quant<DecodeMXFP4>(k);
  set_quant<DecodeQ2_K>(k), set_quant<DecodeQ3_K>(k), set_quant<DecodeQ6_K>(k);
  set_quant<DecodeK45<Q4_K, 0>>(k), set_quant<DecodeK45<Q5_K, 1>>(k);
  set_quant<DecodeIQ4_NL>(k), set_quant<DecodeIQ4_XS>(k);
  set_quant<Book4<IQ3_S, 1>>(k), set_quant<Book4<IQ3_XXS, 4>>(k);
  set_quant<Book8<IQ2_S, 2>>(k), set_quant<Book8<IQ2_XS, 2>>(k), set_quant<Book8<IQ2_XXS, 1>>(k);
  set_quant<Book1<IQ1_S, 1>>(k), set_quant<Book1<IQ1_M, 2>>(k);
  set_quant<DecodeNVFP4>(k), set_quant<FewBits<Q1_0>>(k), set_quant<FewBits<Q2_0>>(k);
  set_quant<DecodeTQ1_0>(k), set_quant<FewBits<TQ2_0>>(k);
  return k;
}
