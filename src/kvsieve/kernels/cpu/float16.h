// Numbers in float16, read as float32 by the processor's own instructions where it has them. `_Float16` needs GCC 12 or
// clang 15 on x86.
#pragma once
#include <string.h>
#include "common.h"
#if defined(__F16C__)
#include <immintrin.h>
#endif

typedef struct { uint16_t bits; } Float16;

INLINE float of_float16(Float16 x) {
#if defined(__F16C__)
    return _cvtsh_ss(x.bits);
#elif defined(__ARM_FP16_FORMAT_IEEE)
    __fp16 number;
    memcpy(&number, &x, sizeof number);
    return number;
#else
    uint32_t rest = (uint32_t)(x.bits & 0x7fff) << 13, sign = (uint32_t)(x.bits & 0x8000) << 16;
    union { uint32_t i; float f; } u = {rest + (112u << 23)}, least = {113u << 23};
    if (rest < 1u << 23) {
        // A subnormal number has the least exponent, and no 1 before its digits.
        u.i = rest + least.i;
        u.f -= least.f;
    } else if (rest >= 31u << 23) {
        // Infinity and NaN keep the largest exponent.
        u.i = rest + (224u << 23);
    }
    u.i |= sign;
    return u.f;
#endif
}

static void halves(const Float16 *restrict from, int n, float *restrict x) {
    int j = 0;
#if defined(__AVX512F__)
    for (; j + 16 <= n; j += 16)
        _mm512_storeu_ps(x + j, _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)(from + j))));
#elif defined(__F16C__)
    for (; j + 8 <= n; j += 8)
        _mm256_storeu_ps(x + j, _mm256_cvtph_ps(_mm_loadu_si128((const __m128i *)(from + j))));
#endif
    for (; j < n; j++) x[j] = of_float16(from[j]);
}
