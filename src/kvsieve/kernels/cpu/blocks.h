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

// scale * q + more of n low halves of bytes, then of the high halves.
INLINE void halves_of_bytes(const uint8_t *restrict q, int n, const float *scale, const float *more, float *restrict y) {
    for (int j = 0; j < n; j++) y[j] = scale[0] * (float)(q[j] & 15) + more[0];
    for (int j = 0; j < n; j++) y[n + j] = scale[1] * (float)(q[j] >> 4) + more[1];
}

// The same with a fifth bit: bits `first` and `first` + 1 of the bytes of `high`.
INLINE void fives_of_bytes(const uint8_t *restrict q, const uint8_t *restrict high, int first, int n, const float *scale,
                           const float *more, float *restrict y) {
    for (int j = 0; j < n; j++) y[j] = scale[0] * (float)((q[j] & 15) | (high[j] >> first & 1) << 4) + more[0];
    for (int j = 0; j < n; j++) y[n + j] = scale[1] * (float)(q[j] >> 4 | (high[j] >> (first + 1) & 1) << 4) + more[1];
}

INLINE void unpack_4(const uint8_t *restrict b, int kind, float *restrict y) {
    float d = scale_at(b), more = kind == Q4_1 ? scale_at(b + 2) : -8 * d;
    float scales[2] = {d, d}, offsets[2] = {more, more};
    halves_of_bytes(b + (kind == Q4_1 ? 4 : 2), 16, scales, offsets, y);
}

INLINE void unpack_5(const uint8_t *restrict b, int kind, float *restrict y) {
    float d = scale_at(b), more = kind == Q5_1 ? scale_at(b + 2) : -16 * d;
    b += kind == Q5_1 ? 4 : 2;
    uint32_t high = word_at(b);
    b += 4;
    for (uint32_t j = 0; j < 16; j++) y[j] = d * (float)(int32_t)((b[j] & 15u) | (high >> j & 1) << 4) + more;
    for (uint32_t j = 0; j < 16; j++) y[16 + j] = d * (float)(int32_t)(b[j] >> 4 | (high >> (16 + j) & 1) << 4) + more;
}

INLINE void unpack_8(const uint8_t *restrict b, float *restrict y) {
    float d = scale_at(b);
    const int8_t *q = (const int8_t *)b + 2;
    for (int j = 0; j < 32; j++) y[j] = d * (float)q[j];
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

INLINE void unpack_2k(const uint8_t *restrict b, float *restrict y) {
    float d = scale_at(b + 80), least = scale_at(b + 82);
    for (int part = 0; part < 16; part++) {
        float scale = d * (float)(b[part] & 15), more = -least * (float)(b[part] >> 4);
        const uint8_t *q = b + 16 + part / 8 * 32 + part % 2 * 16;
        int shift = part / 2 % 4 * 2;
        for (int j = 0; j < 16; j++) y[part * 16 + j] = scale * (float)(q[j] >> shift & 3) + more;
    }
}

INLINE void unpack_3k(const uint8_t *restrict b, float *restrict y) {
    uint8_t scales[16];
    scales_of_3(b + 96, scales);
    float d = scale_at(b + 108);
    for (int part = 0; part < 16; part++) {
        float scale = d * (float)(scales[part] - 32);
        const uint8_t *high = b + part % 2 * 16, *q = b + 32 + part / 8 * 32 + part % 2 * 16;
        int shift = part / 2 % 4 * 2, bit = part / 2;
        for (int j = 0; j < 16; j++)
            y[part * 16 + j] = scale * (float)((q[j] >> shift & 3) + (high[j] >> bit & 1) * 4 - 4);
    }
}

INLINE void unpack_45k(const uint8_t *restrict b, int kind, float *restrict y) {
    uint8_t sixth[16];
    sixes(b + 4, sixth);
    float d = scale_at(b), least = scale_at(b + 2), scales[8], offsets[8];
    for (int j = 0; j < 8; j++) scales[j] = d * (float)sixth[j], offsets[j] = -least * (float)sixth[8 + j];
    const uint8_t *high = b + 16, *q = kind == Q5_K ? b + 48 : b + 16;
    for (int j = 0; j < 4; j++, q += 32, y += 64)
        if (kind == Q5_K) fives_of_bytes(q, high, 2 * j, 32, scales + 2 * j, offsets + 2 * j, y);
        else halves_of_bytes(q, 32, scales + 2 * j, offsets + 2 * j, y);
}

INLINE void unpack_6k(const uint8_t *restrict b, float *restrict y) {
    const int8_t *scales = (const int8_t *)b + 192;
    float d = scale_at(b + 208);
    for (int part = 0; part < 16; part++) {
        // Of each half, 64 bytes have the low bits, the second 64 numbers in their high halves.
        int half = part / 8, quarter = part / 2 % 4, first = part % 2 * 16;
        const uint8_t *low = b + half * 64 + quarter % 2 * 32 + first, *high = b + 128 + half * 32 + first;
        float scale = d * (float)scales[part];
        int down = quarter / 2 * 4, shift = quarter * 2;
        for (int j = 0; j < 16; j++)
            y[part * 16 + j] = scale * (float)(((low[j] >> down & 15) | (high[j] >> shift & 3) << 4) - 32);
    }
}

// Whole blocks of a type become float32.
static void unpack(int64_t kind, const uint8_t *from, int64_t blocks, float *to) {
#define EACH(CALL, BYTES_OF_ONE, NUMBERS) \
    for (const uint8_t *b = from, *end = from + blocks * BYTES_OF_ONE; b < end; b += BYTES_OF_ONE, to += NUMBERS) CALL
    switch (kind) {
    case F32: memcpy(to, from, (size_t)blocks * 4); break;
    case F16: halves((const Float16 *)from, (int)blocks, to); break;
    case BF16:
        for (int64_t j = 0; j < blocks; j++) to[j] = of_half(((const uint16_t *)from)[j]);
        break;
    case Q4_0: EACH(unpack_4(b, Q4_0, to), 18, 32); break;
    case Q4_1: EACH(unpack_4(b, Q4_1, to), 20, 32); break;
    case Q5_0: EACH(unpack_5(b, Q5_0, to), 22, 32); break;
    case Q5_1: EACH(unpack_5(b, Q5_1, to), 24, 32); break;
    case Q8_0: EACH(unpack_8(b, to), 34, 32); break;
    case Q2_K: EACH(unpack_2k(b, to), 84, 256); break;
    case Q3_K: EACH(unpack_3k(b, to), 110, 256); break;
    case Q4_K: EACH(unpack_45k(b, Q4_K, to), 144, 256); break;
    case Q5_K: EACH(unpack_45k(b, Q5_K, to), 176, 256); break;
    default: EACH(unpack_6k(b, to), 210, 256);
    }
#undef EACH
}
