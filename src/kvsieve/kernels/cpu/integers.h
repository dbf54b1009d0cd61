// Products with GGUF's blocks by the instructions for pairs of bfloat16 (AVX-512 BF16): integers of up to 8 bits are
// exact in bfloat16, and their products with bfloat16 in float32. Sums of each block are scaled. WITH_INTEGERS is
// defined where the compiler makes them.
//
// A group is a block of 256 numbers or four of 32. Its numbers come in units of four vectors of 32, whose lanes have one
// scale in all four; x is brought into their order once.
#pragma once
#include "tiles.h"
#include "blocks.h"
#if PAIRS && defined(__AVX512VBMI__) && defined(__AVX512DQ__)
#define WITH_INTEGERS 1

typedef struct {
    __m512i numbers[4]; // bfloat16
    __m512 scale;
} Unit;

#define GROUP(kind) ((kind) <= Q8_0 ? 128 : 256)
#define UNITS(kind) (GROUP(kind) / 128)
#define GROUP_BYTES(kind) (block_bytes(kind) * ((kind) <= Q8_0 ? 4 : 1))
#define HAS_LEAST(kind) \
    ((kind) == Q4_1 || (kind) == Q5_1 || (kind) == Q2_K || (kind) == Q4_K || (kind) == Q5_K)
// Bytes of a group of x: its numbers, and sums of those that have an offset together.
#define GROUP_OF_X(kind) (GROUP(kind) * 2 + (HAS_LEAST(kind) ? 64 : 0))

// Index of word w of a group in two vectors, of which the second begins `later` words after the first.
#define WORD(w, later) ((w) < 32 ? (w) : 32 + (w) - (later))
#define FOUR(w, later) WORD(w, later), WORD((w) + 1, later), WORD((w) + 2, later), WORD((w) + 3, later)
#define EIGHT(w, later) FOUR(w, later), FOUR((w) + 4, later)
#define SAME(w, later) WORD(w, later), WORD(w, later), WORD(w, later), WORD(w, later)
#define TWICE(w, later) WORD(w, later), WORD((w) + 1, later), WORD(w, later), WORD((w) + 1, later)
// The same parts of four blocks of `size` words, side by side.
#define PARTS(PART, first, size, later) \
    PART(first, later), PART((first) + (size), later), PART((first) + 2 * (size), later), PART((first) + 3 * (size), later)

INLINE __m512i vector_at(const void *from) { return _mm512_loadu_si512(from); }

// A vector that is read once: loads that cross lines of the cache cost more than copies of registers.
INLINE __m512i read_once(const void *from) {
    __m512i x = _mm512_loadu_si512(from);
    __asm__("" : "+v"(x));
    return x;
}

// Words of two vectors.
INLINE __m512i words_of(__m512i low, const int16_t *index, __m512i high) {
    return _mm512_permutex2var_epi16(low, vector_at(index), high);
}

INLINE __m512 of_halves(__m256i x) { return _mm512_cvtph_ps(x); }

// 32 integers from `first` on, in bfloat16; 16 of them twice.
INLINE __m512i integers(int first) {
    __m512i count = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 low = _mm512_cvtepi32_ps(_mm512_add_epi32(count, _mm512_set1_epi32(first)));
    __m512 high = _mm512_cvtepi32_ps(_mm512_add_epi32(count, _mm512_set1_epi32(first + 16)));
    return (__m512i)_mm512_cvtne2ps_pbh(high, low);
}

INLINE __m512i sixteen(int first) {
    __m512i all = integers(first);
    return _mm512_shuffle_i64x2(all, all, 0x44);
}

// The lowest bits, as `mask` has them, of `low`; others of `high`.
INLINE __m512i joined(__m512i low, __m512i high, int mask) {
    return _mm512_ternarylogic_epi64(_mm512_set1_epi16((short)mask), low, high, 0xca);
}

// Half byte k of each word, and what lies beyond it.
INLINE __m512i half_bytes(__m512i words, int k) { return k ? _mm512_srli_epi16(words, (unsigned)(4 * k)) : words; }

// Places, for `_mm512_multishift_epi64_epi8`, of bits that become the lowest of words: those of word i of quadword s
// begin at bit `step` * i + at[s].
#define ALL(x) ((((long long)(x)) & 63) * 0x0001000100010001LL)
#define PLACES(step, a, b, c, d, e, f, g, h)                                                                       \
    _mm512_add_epi8(_mm512_set1_epi64((long long)(step) * 0x0003000200010000LL),                                   \
                    _mm512_set_epi64(ALL(h), ALL(g), ALL(f), ALL(e), ALL(d), ALL(c), ALL(b), ALL(a)))
INLINE __m512i bits_at(__m512i places, __m512i from) { return _mm512_multishift_epi64_epi8(places, from); }

// Integers of five bits from `first` on, of which four are the lowest of words; `bits` has the fifth as bit 4 for `x`, and
// as bit 5 for `y`.
INLINE void of_fives(__m512i x, __m512i y, __m512i bits, int first, __m512i *to_x, __m512i *to_y) {
    *to_x = _mm512_permutexvar_epi16(joined(x, bits, 15), integers(first));
    *to_y = _mm512_permutex2var_epi16(sixteen(first), joined(y, bits, 15), sixteen(first + 16));
}

// Four blocks of Q4_0, Q4_1, Q5_0 or Q5_1. Vector v has numbers 2 * i + 16 * (v & 1) + (v >> 1) of each block.
INLINE void unpack_four(const uint8_t *at, int kind, Unit *unit, __m512 *least) {
    static const int16_t numbers[4][32] = {{PARTS(EIGHT, 1, 9, 4)},
                                           {PARTS(EIGHT, 2, 10, 8)},
                                           {PARTS(EIGHT, 3, 11, 12)},
                                           {PARTS(EIGHT, 4, 12, 16)}};
    static const int16_t scales[4][32] = {{PARTS(SAME, 0, 9, 4), PARTS(SAME, 0, 9, 4)},
                                          {PARTS(SAME, 0, 10, 8), PARTS(SAME, 1, 10, 8)},
                                          {PARTS(SAME, 0, 11, 12), PARTS(SAME, 0, 11, 12)},
                                          {PARTS(SAME, 0, 12, 16), PARTS(SAME, 1, 12, 16)}};
    // Twice in each quadword, so that bits can be taken from any place on.
    static const int16_t fifths[2][32] = {
        {TWICE(1, 12), TWICE(1, 12), TWICE(12, 12), TWICE(12, 12), TWICE(23, 12), TWICE(23, 12), TWICE(34, 12), TWICE(34, 12)},
        {TWICE(2, 16), TWICE(2, 16), TWICE(14, 16), TWICE(14, 16), TWICE(26, 16), TWICE(26, 16), TWICE(38, 16), TWICE(38, 16)}};
    int is_five = kind == Q5_0 || kind == Q5_1, has_least = HAS_LEAST(kind), form = 2 * is_five + has_least;
    __m512i low = read_once(at), high = read_once(at + GROUP_BYTES(kind) - 64);
    __m512i words = words_of(low, numbers[form], high), both = words_of(low, scales[form], high);
    unit->scale = of_halves(_mm512_castsi512_si256(both));
    if (has_least) *least = of_halves(_mm512_extracti64x4_epi64(both, 1));
    if (!is_five) {
        __m512i table = sixteen(kind == Q4_0 ? -8 : 0);
        for (int v = 0; v < 4; v++) unit->numbers[v] = _mm512_permutexvar_epi16(half_bytes(words, v), table);
        return;
    }
    __m512i fifth = words_of(low, fifths[form - 2], high);
    for (int v = 0; v < 2; v++) {
        int bit = 16 * v - 4;
        __m512i more = bits_at(PLACES(2, bit, bit + 8, bit, bit + 8, bit, bit + 8, bit, bit + 8), fifth);
        of_fives(half_bytes(words, v), half_bytes(words, v + 2), more, kind == Q5_0 ? -16 : 0, unit->numbers + v,
                 unit->numbers + v + 2);
    }
}

// Four blocks of Q8_0. Vector v has numbers 16 * (v >> 1) + 4 * i + 2 * (v & 1) and the next of each block.
INLINE void unpack_bytes(const uint8_t *at, Unit *unit) {
    static const int16_t numbers[32] = {PARTS(EIGHT, 1, 17, 32)};
    // Words 9 to 67, counted from the fourth on.
    static const int16_t others[32] = {PARTS(EIGHT, 5, 17, 32)};
    static const int16_t scales[32] = {PARTS(SAME, 0, 17, 32), PARTS(SAME, 0, 17, 32)};
    __m512i low = read_once(at), high = read_once(at + 64);
    __m512i parts[2] = {words_of(low, numbers, high), words_of(vector_at(at + 8), others, vector_at(at + 72))};
    __m512 scale = of_halves(_mm512_castsi512_si256(words_of(low, scales, high)));
    // A byte that is the highest of four is an integer 2 ** 24 times as large, whose float32 ends in 16 zeros.
    unit->scale = _mm512_mul_ps(scale, _mm512_set1_ps(0x1p-24f));
    __m512i highest = _mm512_set1_epi32((int)0xff000000u);
    for (int p = 0; p < 2; p++) {
        __m512i bytes[4] = {
            _mm512_slli_epi32(parts[p], 24),
            _mm512_and_si512(_mm512_slli_epi32(parts[p], 16), highest),
            _mm512_and_si512(_mm512_slli_epi32(parts[p], 8), highest),
            _mm512_and_si512(parts[p], highest),
        };
        for (int v = 0; v < 2; v++) {
            __m512i even = (__m512i)_mm512_cvtepi32_ps(bytes[2 * v]), odd = (__m512i)_mm512_cvtepi32_ps(bytes[2 * v + 1]);
            unit->numbers[2 * p + v] = _mm512_or_si512(_mm512_srli_epi32(even, 16), odd);
        }
    }
}

// Lanes of a vector, `times` of each of those that are named.
#define TIMES4(a, b, c, d) _mm512_set_epi32(d, d, d, d, c, c, c, c, b, b, b, b, a, a, a, a)
#define TIMES2(a, b, c, d, e, f, g, h) _mm512_set_epi32(h, h, g, g, f, f, e, e, d, d, c, c, b, b, a, a)

// A block of Q4_K or Q5_K. Unit u has parts 2 * p + u; vector v numbers 16 * (v >> 1) + 2 * i + (v & 1) of each.
INLINE void unpack_super(const uint8_t *at, int kind, Unit *units, __m512 *least) {
    uint8_t sixth[16];
    sixes(at + 4, sixth);
    __m512 factors = _mm512_cvtepi32_ps(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)sixth)));
    // The block's scale times its parts', and offsets beside them.
    __m512 two = of_halves(_mm256_castsi128_si256(_mm_cvtsi32_si128((int)word_at(at))));
    __m512 both = _mm512_permutexvar_ps(_mm512_set_epi32(1, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0, 0, 0, 0, 0, 0), two);
    *least = _mm512_mul_ps(factors, both);
    units[0].scale = _mm512_permutexvar_ps(TIMES4(0, 2, 4, 6), *least);
    units[1].scale = _mm512_permutexvar_ps(TIMES4(1, 3, 5, 7), *least);
    const uint8_t *q = at + (kind == Q5_K ? 48 : 16);
    __m512i low = read_once(q), high = read_once(q + 64);
    for (int half = 0; half < 2; half++) {
        __m512i words = half ? _mm512_shuffle_i32x4(low, high, 0xdd) : _mm512_shuffle_i32x4(low, high, 0x88);
        __m512i fifth = _mm512_broadcast_i32x4(_mm_loadu_si128((const __m128i *)(at + 16 + 16 * half)));
        for (int k = 0; k < 2; k++) {
            __m512i x = half_bytes(words, 2 * k), y = half_bytes(words, 2 * k + 1);
            __m512i *to_x = units[0].numbers + 2 * half + k, *to_y = units[1].numbers + 2 * half + k;
            if (kind == Q4_K) {
                *to_x = _mm512_permutexvar_epi16(x, sixteen(0)), *to_y = _mm512_permutexvar_epi16(y, sixteen(0));
                continue;
            }
            int bit = 8 * k - 4;
            __m512i places = PLACES(16, bit, bit, bit + 2, bit + 2, bit + 4, bit + 4, bit + 6, bit + 6);
            of_fives(x, y, bits_at(places, fifth), 0, to_x, to_y);
        }
    }
}

// A block of Q6_K. Lanes come in eights of numbers, by turns of the block's halves; unit u has quarters 2 * u and
// 2 * u + 1 of each half.
INLINE void unpack_sixes(const uint8_t *at, Unit *units) {
    __m512 scales = _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)(at + 192))));
    scales = _mm512_mul_ps(scales, _mm512_set1_ps(scale_at(at + 208)));
    units[0].scale = _mm512_permutexvar_ps(TIMES2(0, 8, 1, 9, 2, 10, 3, 11), scales);
    units[1].scale = _mm512_permutexvar_ps(TIMES2(4, 12, 5, 13, 6, 14, 7, 15), scales);
    __m512i low = read_once(at), high = read_once(at + 64), two = read_once(at + 128);
    __m512i table = integers(-32), more = integers(0);
    for (int half = 0; half < 2; half++) {
        __m512i words = half ? _mm512_unpackhi_epi64(low, high) : _mm512_unpacklo_epi64(low, high);
        __m512i first = _mm512_set_epi64(6, 2, 4, 0, 6, 2, 4, 0);
        __m512i bits = _mm512_permutexvar_epi64(_mm512_add_epi64(first, _mm512_set1_epi64(half)), two);
        for (int k = 0; k < 4; k++) {
            int bit = 8 * (k >> 1) + 4 * (k & 1) - 4;
            __m512i places = PLACES(16, bit, bit, bit, bit, bit + 2, bit + 2, bit + 2, bit + 2);
            __m512i index = joined(half_bytes(words, k), bits_at(places, bits), 15);
            units[k & 1].numbers[2 * half + (k >> 1)] = _mm512_permutex2var_epi16(table, index, more);
        }
    }
}

// A block of Q2_K or Q3_K. Lanes come in eights of numbers; unit u has quarters 2 * u and then 2 * u + 1 of each half.
INLINE void unpack_twos(const uint8_t *at, int kind, Unit *units, __m512 *least) {
    uint8_t sixth[16];
    __m512i factors;
    if (kind == Q2_K) factors = _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)at));
    else {
        scales_of_3(at + 96, sixth);
        factors = _mm512_sub_epi32(_mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)sixth)), _mm512_set1_epi32(32));
    }
    if (kind == Q2_K) {
        __m512 more = _mm512_cvtepi32_ps(_mm512_srli_epi32(factors, 4));
        *least = _mm512_mul_ps(more, _mm512_set1_ps(scale_at(at + 82)));
        factors = _mm512_and_si512(factors, _mm512_set1_epi32(15));
    }
    __m512 d = _mm512_set1_ps(scale_at(at + (kind == Q2_K ? 80 : 108)));
    __m512 scales = _mm512_mul_ps(_mm512_cvtepi32_ps(factors), d);
    units[0].scale = _mm512_permutexvar_ps(TIMES2(0, 1, 8, 9, 2, 3, 10, 11), scales);
    units[1].scale = _mm512_permutexvar_ps(TIMES2(4, 5, 12, 13, 6, 7, 14, 15), scales);
    __m512i all = read_once(at + (kind == Q2_K ? 16 : 32)), third = _mm512_setzero_si512();
    if (kind == Q3_K) third = _mm512_broadcast_i64x4(_mm256_loadu_si256((const __m256i *)at));
    // Indices beyond the bits that count find the same numbers again: 0 to 3, or -4 to 3.
    __m512i table = _mm512_set1_epi64(0x404040003f800000);
    if (kind == Q3_K) table = _mm512_broadcast_i32x4(_mm_set_epi64x(0x404040003f800000, (long long)0xbf80c000c040c080));
    for (int half = 0; half < 2; half++) {
        __m512i first = _mm512_set1_epi64(half);
        __m512i words = _mm512_permutexvar_epi64(_mm512_add_epi64(first, _mm512_set_epi64(6, 4, 2, 0, 6, 4, 2, 0)), all);
        __m512i bits = _mm512_permutexvar_epi64(_mm512_add_epi64(first, _mm512_set_epi64(2, 0, 2, 0, 2, 0, 2, 0)), third);
        for (int k = 0; k < 4; k++) {
            int at_byte = 8 * (k >> 1), unit = k & 1, two = at_byte + 4 * unit, one = at_byte + 2 * unit - 2;
            __m512i index = bits_at(PLACES(16, two, two, two, two, two + 2, two + 2, two + 2, two + 2), words);
            if (kind == Q3_K) {
                __m512i places = PLACES(16, one, one, one + 4, one + 4, one + 1, one + 1, one + 5, one + 5);
                index = joined(index, bits_at(places, bits), 3);
            }
            units[unit].numbers[2 * half + (k >> 1)] = _mm512_permutexvar_epi16(index, table);
        }
    }
}

// Number of its group that number i of x becomes.
INLINE int place_of(int kind, int i) {
    int unit = i / 128, v = i / 32 % 4, word = i % 32, block = word / 8, w = word % 8;
    if (kind == Q8_0) return 32 * block + 16 * (v >> 1) + 4 * (w / 2) + 2 * (v & 1) + w % 2;
    if (kind <= Q5_1) return 32 * block + 16 * (v & 1) + 2 * w + (v >> 1);
    if (kind == Q4_K || kind == Q5_K) return 64 * block + 32 * unit + 16 * (v >> 1) + 2 * w + (v & 1);
    int eight = word / 4, part = eight / 2, of_part = 8 * (v >> 1) + 2 * (word % 4) + (v & 1);
    if (kind != Q6_K) return 64 * unit + 128 * (eight / 2 % 2) + 32 * (eight / 4) + 16 * (eight % 2) + of_part;
    return 128 * (eight % 2) + 64 * unit + 16 * part + of_part;
}

INLINE void unpack_group(const uint8_t *at, int kind, Unit *units, __m512 *least) {
    if (kind == Q8_0) unpack_bytes(at, units);
    else if (kind <= Q5_1) unpack_four(at, kind, units, least);
    else if (kind == Q6_K) unpack_sixes(at, units);
    else if (kind <= Q3_K) unpack_twos(at, kind, units, least);
    else unpack_super(at, kind, units, least);
}

typedef struct {
    const char *x;       // [rows, groups], each group as vectors of a weight meet it
    int64_t next, rows;  // next: bytes from row to row
    int64_t whole, rest; // groups of a row of the weight that are whole; bytes of one that is not
} Pairs;

// Add products of a group of `outputs` rows of a weight with that of a row of x.
INLINE void add_group(int kind, const char *x, Unit units[][2], const __m512 *least, int outputs, __m512 *a) {
    for (int u = 0; u < UNITS(kind); u++) {
        __m512 sum[2] = {_mm512_setzero_ps(), _mm512_setzero_ps()};
#pragma GCC unroll 4
        for (int v = 0; v < 4; v++) {
            __m512bh y = (__m512bh)vector_at(x + (4 * u + v) * 64);
#pragma GCC unroll 2
            for (int o = 0; o < outputs; o++) sum[o] = _mm512_dpbf16_ps(sum[o], y, (__m512bh)units[o][u].numbers[v]);
        }
#pragma GCC unroll 2
        for (int o = 0; o < outputs; o++) a[o] = _mm512_fmadd_ps(sum[o], units[o][u].scale, a[o]);
    }
    if (!HAS_LEAST(kind)) return;
    __m512 sums_of_x = _mm512_loadu_ps(x + GROUP(kind) * 2);
#pragma GCC unroll 2
    for (int o = 0; o < outputs; o++) a[o] = _mm512_fmadd_ps(least[o], sums_of_x, a[o]);
}

// Sums [rows, TURN], each in the lanes of a vector, of products of `outputs` rows of a weight with rows of x. Memory brings
// one row by itself in time; of two, those that follow are read ahead, which `w` has after them.
INLINE void integer_sums(const uint8_t *const *w, int kind, const Pairs *pairs, const char *x, int outputs, int rows,
                         Floats *sums) {
    uint8_t last[2][256];
    __m512 a[2 * TOGETHER];
#pragma GCC unroll 16
    for (int i = 0; i < outputs * rows; i++) a[i] = _mm512_setzero_ps();
    // Whole groups; then, from a copy that ends in zeros, what is left of the rows.
    for (int64_t begin = 0, end = pairs->whole;; begin = end, end++) {
        const uint8_t *at[2] = {w[0], w[1]};
        for (int o = 0; o < outputs && end > pairs->whole; o++) {
            memset(last[o], 0, sizeof last[o]);
            memcpy(last[o], w[o] + begin * GROUP_BYTES(kind), (size_t)pairs->rest);
            at[o] = last[o];
        }
        for (int64_t g = begin; g < end; g++) {
            Unit units[2][2];
            __m512 least[2];
#pragma GCC unroll 2
            for (int o = 0; o < outputs; o++, at[o - 1] += GROUP_BYTES(kind)) {
#pragma GCC unroll 4
                for (int64_t i = 0; i < GROUP_BYTES(kind) && outputs > 1; i += 64)
                    _mm_prefetch((const char *)w[outputs + o] + g * GROUP_BYTES(kind) + i, _MM_HINT_T0);
                unpack_group(at[o], kind, units[o], least + o);
            }
#pragma GCC unroll 8
            for (int r = 0; r < rows; r++)
                add_group(kind, x + r * pairs->next + g * GROUP_OF_X(kind), units, least, outputs, a + r * outputs);
        }
        if (!pairs->rest || end > pairs->whole) break;
    }
#pragma GCC unroll 16
    for (int i = 0; i < outputs * rows; i++) sums[i / outputs * TURN + i % outputs] = (Floats)a[i];
}

// Lanes of sums [rows, TURN] are added; `count` of TURN are written, from `at` on.
static void write_sums(const Weight *target, uint16_t *out, int64_t at, int64_t first, int rows, int count,
                       const Floats *sums) {
    __mmask16 some = (__mmask16)((1 << count) - 1);
    __m512 more = _mm512_setzero_ps();
    if (target->bias) {
        __m256i bias = _mm256_maskz_loadu_epi16(some, (const uint16_t *)target->bias + at);
        more = (__m512)_mm512_slli_epi32(_mm512_cvtepu16_epi32(bias), 16);
    }
    for (int r = 0; r < rows; r++) {
        __m512 sum = _mm512_add_ps(totals(sums + r * TURN), more);
        uint16_t *to = out + (first + r) * target->width + at;
        _mm256_mask_storeu_epi16(to, some, (__m256i)_mm512_cvtneps_pbh(sum));
    }
}

// Products of `count` rows of a weight, from row `at` on, with `rows` rows of x from `first` on.
INLINE void integers_with(const Matrix *matrix, int kind, const Pairs *pairs, int64_t at, int count, int64_t first,
                          int rows, Floats *sums) {
    int outputs = rows > 1 ? 2 : 1;
    const char *x = pairs->x + first * pairs->next;
    for (int o = 0; o < count; o += outputs) {
        const uint8_t *w[4];
        for (int i = 0; i < 2 * outputs; i++) {
            // The last row of an odd number is multiplied twice.
            int64_t row = at + (i < outputs && o + i >= count ? o : o + i);
            w[i] = row_at(matrix, row < matrix->width ? row : at);
        }
        integer_sums(w, kind, pairs, x, outputs, rows, sums + o);
    }
}

// The same of rows [from, to) with all rows of x, in groups that differ by one row at most.
INLINE void integers_with_all(const Matrix *matrix, int kind, const Weight *target, const Pairs *pairs, uint16_t *out,
                              int64_t from, int64_t to) {
    int64_t groups = (pairs->rows + TOGETHER - 1) / TOGETHER;
    Floats sums[TOGETHER * TURN] = {{0}};
    for (int64_t at = from; at < to; at += TURN) {
        int count = to - at < TURN ? (int)(to - at) : TURN;
        for (int64_t left = groups, row = 0, rows; left; left--, row += rows) {
            rows = (pairs->rows - row + left - 1) / left;
#define ROWS(N) integers_with(matrix, kind, pairs, at, count, row, N, sums)
            switch (rows) {
            case 1: ROWS(1); break;
            case 2: ROWS(2); break;
            case 3: ROWS(3); break;
            case 4: ROWS(4); break;
            case 5: ROWS(5); break;
            default: ROWS(6);
            }
#undef ROWS
            write_sums(target, out, at, row, (int)rows, count, sums);
        }
    }
}

// One function for each type: compilers take long over one for all.
#define OF_KIND(NAME)                                                                                                 \
    static __attribute__((noinline)) void rows_of_##NAME(const Matrix *matrix, const Weight *target, const Pairs *pairs, \
                                                         uint16_t *out, int64_t from, int64_t to) {                   \
        integers_with_all(matrix, NAME, target, pairs, out, from, to);                                                \
    }
OF_KIND(Q4_0)
OF_KIND(Q4_1)
OF_KIND(Q5_0)
OF_KIND(Q5_1)
OF_KIND(Q8_0)
OF_KIND(Q2_K)
OF_KIND(Q3_K)
OF_KIND(Q4_K)
OF_KIND(Q5_K)
OF_KIND(Q6_K)
#undef OF_KIND

static void integer_rows(const Matrix *matrix, const Weight *target, const Pairs *pairs, uint16_t *out, int64_t from,
                         int64_t to) {
#define CASE(NAME) \
    case NAME: rows_of_##NAME(matrix, target, pairs, out, from, to); break
    switch (matrix->kind) {
        CASE(Q4_0);
        CASE(Q4_1);
        CASE(Q5_0);
        CASE(Q5_1);
        CASE(Q8_0);
        CASE(Q2_K);
        CASE(Q3_K);
        CASE(Q4_K);
        CASE(Q5_K);
        CASE(Q6_K);
    }
#undef CASE
}

// Whether there are such products of a type.
INLINE int in_integers(int64_t kind) { return kind >= Q4_0 && kind <= Q6_K; }

static int16_t places[Q6_K + 1][256];

__attribute__((constructor)) static void set_places(void) {
    for (int kind = 0; kind <= Q6_K; kind++)
        for (int i = 0; in_integers(kind) && i < GROUP(kind); i++) places[kind][i] = (int16_t)place_of(kind, i);
}

// A group of x, of which `left` numbers are there, in the order of the weight's.
INLINE void place_group(int kind, const uint16_t *from, int64_t left, char *to) {
    uint16_t *numbers = (uint16_t *)to;
    for (int i = 0; i < GROUP(kind); i++) {
        int place = places[kind][i];
        numbers[i] = place < left ? from[place] : 0;
    }
    if (!HAS_LEAST(kind)) return;
    // Sums of what has an offset, where `unpack_group` has it.
    float sums[16] = {0};
    int size = kind == Q2_K ? 16 : 32;
    for (int b = 0; b < GROUP(kind) / size; b++) {
        float sum = 0;
        for (int i = size * b; i < size * (b + 1); i++) sum += i < left ? of_half(from[i]) : 0;
        if (kind <= Q5_1) sums[4 * b] = sum;
        else sums[kind == Q2_K ? b : 8 + b] = -sum;
    }
    memcpy(to + GROUP(kind) * 2, sums, sizeof sums);
}

// Rows of x as weights meet them; null where there is no memory.
static void *pairs_of(const Matrix *matrix, const uint16_t *x, int64_t rows, Pairs *pairs) {
    int64_t inner = matrix->inner, kind = matrix->kind, group = GROUP(kind);
    pairs->rows = rows;
    pairs->whole = inner / group, pairs->rest = inner % group / SIZE(kind) * block_bytes(kind);
    pairs->next = (inner + group - 1) / group * GROUP_OF_X(kind);
    char *made = allocate_lines((size_t)(rows * pairs->next));
    for (int64_t row = 0; made && row < rows; row++)
        for (int64_t at = 0; at < inner; at += group) {
            char *to = made + row * pairs->next + at / group * GROUP_OF_X(kind);
            place_group((int)kind, x + row * inner + at, inner - at, to);
        }
    pairs->x = made;
    return made;
}
#endif
