// Blocks of GGUF's types: integers of a few bits, and the scales that they share. Each becomes float32 exactly, but for
// the last subtraction of types with offsets, which is rounded once.
#pragma once
#include "float16.h"

// GGUF's own numbers of the types.
enum {
    F32, F16, Q4_0, Q4_1, Q5_0 = 6, Q5_1, Q8_0, Q2_K = 10, Q3_K, Q4_K, Q5_K, Q6_K, BF16 = 30
};
// Numbers, and bytes, of a block of a type.
#define SIZE(kind) ((kind) == F32 || (kind) == F16 || (kind) == BF16 ? 1 : (kind) <= Q8_0 ? 32 : 256)

INLINE int64_t block_bytes(int64_t kind) {
    static const uint8_t bytes[] = {4, 2, 18, 20, 0, 0, 22, 24, 34, 0, 84, 110, 144, 176, 210};
    return kind == BF16 ? 2 : bytes[kind];
}

typedef struct {
    const uint8_t *data;
    const int64_t *order;              // [width], where rows of the weight are among those of the data; null: as they are
    int64_t width, inner, kind, bytes; // bytes: of a row
} Matrix;

INLINE const uint8_t *row_at(const Matrix *matrix, int64_t row) {
    return matrix->data + (matrix->order ? matrix->order[row] : row) * matrix->bytes;
}

INLINE float scale_at(const uint8_t *at) {
    Float16 x;
    memcpy(&x, at, sizeof x);
    return of_float16(x);
}

INLINE uint32_t word_at(const uint8_t *at) {
    uint32_t x;
    memcpy(&x, at, sizeof x);
    return x;
}

typedef uint8_t Bytes __attribute__((vector_size(16)));

INLINE Bytes bytes_at(const uint8_t *from) {
    Bytes x;
    memcpy(&x, from, sizeof x);
    return x;
}

// Vectors of numbers, where there are instructions that make them of bytes.
#if defined(__AVX512F__)
#define WITH_SUMS 1
typedef __m512 Numbers;
#elif defined(__AVX2__) && defined(__FMA__)
#define WITH_SUMS 1
typedef __m256 Numbers;
#else
typedef float Numbers;
#endif

// What becomes of numbers, 16 at a time: they are written, or their products with x are added to sums, in turns.
typedef struct {
    float *to;
    const float *x;
    Numbers a, b, c, d;
} Sink;

// scale * q + more of 16 integers with signs.
INLINE void put_scaled(Bytes q, float scale, float more, Sink *sink, int in_sum) {
    Numbers a = sink->a, b = sink->b;
#if defined(__AVX512F__)
    __m512 y = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32((__m128i)q));
    y = _mm512_fmadd_ps(y, _mm512_set1_ps(scale), _mm512_set1_ps(more));
    if (in_sum) a = _mm512_fmadd_ps(y, _mm512_loadu_ps(sink->x), a);
    else _mm512_storeu_ps(sink->to, y);
#elif defined(WITH_SUMS)
    __m256 factor = _mm256_set1_ps(scale), offset = _mm256_set1_ps(more);
    __m256 low = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32((__m128i)q));
    __m256 high = _mm256_cvtepi32_ps(_mm256_cvtepi8_epi32(_mm_unpackhi_epi64((__m128i)q, (__m128i)q)));
    low = _mm256_fmadd_ps(low, factor, offset), high = _mm256_fmadd_ps(high, factor, offset);
    if (in_sum) {
        a = _mm256_fmadd_ps(low, _mm256_loadu_ps(sink->x), a);
        b = _mm256_fmadd_ps(high, _mm256_loadu_ps(sink->x + 8), b);
    } else _mm256_storeu_ps(sink->to, low), _mm256_storeu_ps(sink->to + 8, high);
#else
    int8_t each[16];
    memcpy(each, &q, sizeof each);
    for (int j = 0; j < 16; j++) sink->to[j] = scale * (float)each[j] + more;
#endif
    if (in_sum) sink->a = sink->c, sink->b = sink->d, sink->c = a, sink->d = b, sink->x += 16;
    else sink->to += 16;
}

// Bits of a word as bytes, 16 where a bit is set.
INLINE Bytes sixteens(uint32_t bits) {
#if defined(__AVX512BW__) && defined(__AVX512VL__)
    return (Bytes)_mm_maskz_set1_epi8((__mmask16)bits, 16);
#else
    typedef uint64_t Two __attribute__((vector_size(16)));
    Bytes all = (Bytes)(Two){(bits & 255) * 0x0101010101010101u, (bits >> 8 & 255) * 0x0101010101010101u};
    return (Bytes)((all & (Bytes){1, 2, 4, 8, 16, 32, 64, 128, 1, 2, 4, 8, 16, 32, 64, 128}) != 0) & 16;
#endif
}

// Types of 32 numbers a block, of 4 or 5 bits.
INLINE void unpack_few(const uint8_t *b, int kind, Sink *sink, int in_sum) {
    int has_offset = kind == Q4_1 || kind == Q5_1, is_five = kind == Q5_0 || kind == Q5_1;
    float d = scale_at(b), more = has_offset ? scale_at(b + 2) : (is_five ? -16 : -8) * d;
    b += has_offset ? 4 : 2;
    Bytes q = bytes_at(is_five ? b + 4 : b), low = q & 15, high = q >> 4;
    if (is_five) low |= sixteens(word_at(b)), high |= sixteens(word_at(b) >> 16);
    put_scaled(low, d, more, sink, in_sum);
    put_scaled(high, d, more, sink, in_sum);
}

INLINE void unpack_8(const uint8_t *b, Sink *sink, int in_sum) {
    float d = scale_at(b);
    put_scaled(bytes_at(b + 2), d, 0, sink, in_sum);
    put_scaled(bytes_at(b + 18), d, 0, sink, in_sum);
}

// Scales, then offsets, of 6 bits, of the 8 parts of a block of Q4_K or Q5_K.
INLINE void sixes(const uint8_t *from, uint8_t *scales) {
    uint32_t a = word_at(from), b = word_at(from + 4), c = word_at(from + 8);
    uint32_t all[4] = {
        a & 0x3f3f3f3f,
        (c & 0x0f0f0f0f) | (a >> 2 & 0x30303030),
        b & 0x3f3f3f3f,
        (c >> 4 & 0x0f0f0f0f) | (b >> 2 & 0x30303030),
    };
    memcpy(scales, all, sizeof all);
}

// The 16 scales of a block of Q3_K, each 32 too large.
INLINE void scales_of_3(const uint8_t *from, uint8_t *scales) {
    uint32_t a = word_at(from), b = word_at(from + 4), high = word_at(from + 8);
    uint32_t all[4] = {
        (a & 0x0f0f0f0f) | (high << 4 & 0x30303030),
        (b & 0x0f0f0f0f) | (high << 2 & 0x30303030),
        (a >> 4 & 0x0f0f0f0f) | (high & 0x30303030),
        (b >> 4 & 0x0f0f0f0f) | (high >> 2 & 0x30303030),
    };
    memcpy(scales, all, sizeof all);
}

// Types of 256 numbers a block, in parts of 16 or 32 that have scales of their own.
INLINE void unpack_2k(const uint8_t *b, Sink *sink, int in_sum) {
    float d = scale_at(b + 80), least = scale_at(b + 82);
#pragma GCC unroll 16
    for (int part = 0; part < 16; part++) {
        Bytes q = bytes_at(b + 16 + part / 8 * 32 + part % 2 * 16) >> (part / 2 % 4 * 2) & 3;
        put_scaled(q, d * (float)(b[part] & 15), -least * (float)(b[part] >> 4), sink, in_sum);
    }
}

INLINE void unpack_3k(const uint8_t *b, Sink *sink, int in_sum) {
    uint8_t scales[16];
    float d = scale_at(b + 108);
    scales_of_3(b + 96, scales);
#pragma GCC unroll 16
    for (int part = 0; part < 16; part++) {
        Bytes low = bytes_at(b + 32 + part / 8 * 32 + part % 2 * 16) >> (part / 2 % 4 * 2) & 3;
        Bytes high = bytes_at(b + part % 2 * 16) >> (part / 2) & 1;
        put_scaled(low + high * 4 - 4, d * (float)(scales[part] - 32), 0, sink, in_sum);
    }
}

INLINE void unpack_45k(const uint8_t *b, int kind, Sink *sink, int in_sum) {
    uint8_t sixth[16];
    float d = scale_at(b), least = scale_at(b + 2);
    sixes(b + 4, sixth);
#pragma GCC unroll 16
    for (int part = 0; part < 16; part++) {
        Bytes q = bytes_at(b + (kind == Q5_K ? 48 : 16) + part / 4 * 32 + part % 2 * 16) >> (part / 2 % 2 * 4) & 15;
        if (kind == Q5_K) q |= (bytes_at(b + 16 + part % 2 * 16) >> (part / 2) & 1) << 4;
        put_scaled(q, d * (float)sixth[part / 2], -least * (float)sixth[8 + part / 2], sink, in_sum);
    }
}

INLINE void unpack_6k(const uint8_t *b, Sink *sink, int in_sum) {
    float d = scale_at(b + 208);
#pragma GCC unroll 16
    for (int part = 0; part < 16; part++) {
        // Of each half, 64 bytes have the low bits, the second 64 numbers in their high halves.
        int half = part / 8, quarter = part / 2 % 4, first = part % 2 * 16;
        Bytes low = bytes_at(b + half * 64 + quarter % 2 * 32 + first) >> (quarter / 2 * 4) & 15;
        Bytes high = bytes_at(b + 128 + half * 32 + first) >> (quarter * 2) & 3;
        put_scaled((low | high << 4) - 32, d * (float)(int8_t)b[192 + part], 0, sink, in_sum);
    }
}

// Whole blocks of a type of several numbers each.
INLINE void visit(int64_t kind, const uint8_t *from, int64_t blocks, Sink *sink, int in_sum) {
#define EACH(CALL, SIZE_OF_ONE) \
    for (const uint8_t *b = from, *end = from + blocks * SIZE_OF_ONE; b < end; b += SIZE_OF_ONE) CALL
    switch (kind) {
    case Q4_0: EACH(unpack_few(b, Q4_0, sink, in_sum), 18); break;
    case Q4_1: EACH(unpack_few(b, Q4_1, sink, in_sum), 20); break;
    case Q5_0: EACH(unpack_few(b, Q5_0, sink, in_sum), 22); break;
    case Q5_1: EACH(unpack_few(b, Q5_1, sink, in_sum), 24); break;
    case Q8_0: EACH(unpack_8(b, sink, in_sum), 34); break;
    case Q2_K: EACH(unpack_2k(b, sink, in_sum), 84); break;
    case Q3_K: EACH(unpack_3k(b, sink, in_sum), 110); break;
    case Q4_K: EACH(unpack_45k(b, Q4_K, sink, in_sum), 144); break;
    case Q5_K: EACH(unpack_45k(b, Q5_K, sink, in_sum), 176); break;
    default: EACH(unpack_6k(b, sink, in_sum), 210);
    }
#undef EACH
}

// Whole blocks of a type become float32.
static void unpack(int64_t kind, const uint8_t *from, int64_t blocks, float *to) {
    Sink sink = {.to = to};
    if (kind == F32) memcpy(to, from, (size_t)blocks * 4);
    else if (kind == F16) halves((const Float16 *)from, (int)blocks, to);
    else if (kind == BF16)
        for (int64_t j = 0; j < blocks; j++) to[j] = of_half(((const uint16_t *)from)[j]);
    else visit(kind, from, blocks, &sink, 0);
}

#if WITH_SUMS
// The sum of products of the numbers of blocks with x.
static float sum_of(int64_t kind, const uint8_t *from, int64_t blocks, const float *x) {
    Sink sink = {.x = x};
    visit(kind, from, blocks, &sink, 1);
    Numbers all = (sink.a + sink.c) + (sink.b + sink.d);
    float each[sizeof all / 4], sum = 0;
    memcpy(each, &all, sizeof all);
    for (unsigned j = 0; j < sizeof all / 4; j++) sum += each[j];
    return sum;
}
#endif
