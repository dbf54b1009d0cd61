// What the kernels share.
#pragma once
#include <math.h>
#include <stdint.h>
#include <stdlib.h>
#if defined(_WIN32)
#include <malloc.h>
#endif

#define INLINE static inline __attribute__((always_inline))

// Allocate memory that begins at a multiple of 64 bytes, for `free_lines`; null where there is none.
INLINE void *allocate_lines(size_t size) {
    size = (size + 63) / 64 * 64;
#if defined(_WIN32)
    return _aligned_malloc(size, 64);
#else
    return aligned_alloc(64, size);
#endif
}

INLINE void free_lines(void *memory) {
#if defined(_WIN32)
    _aligned_free(memory);
#else
    free(memory);
#endif
}

// 1 where loops are shared among threads.
int on_threads(void) {
#if defined(_OPENMP)
    return 1;
#else
    return 0;
#endif
}

// exp of x <= 0, to a few units in the last place.
static inline float exp_of(float x) {
    x = x < -87.0f ? -87.0f : x;
    float n = floorf(x * 1.44269504088896341f + 0.5f);
    float r = x - n * 0.693359375f;
    r = r + n * 2.12194440e-4f;
    float y = 1.9875691500e-4f;
    y = y * r + 1.3981999507e-3f;
    y = y * r + 8.3334519073e-3f;
    y = y * r + 4.1665795894e-2f;
    y = y * r + 1.6666665459e-1f;
    y = y * r + 5.0000001201e-1f;
    y = y * r * r + r + 1.0f;
    union { int32_t i; float f; } two = {((int32_t)n + 127) << 23};
    return y * two.f;
}

INLINE float of_half(uint16_t x) {
    union { uint32_t i; float f; } u = {(uint32_t)x << 16};
    return u.f;
}

INLINE uint16_t to_half(float x) {
    union { float f; uint32_t i; } u = {x};
    if (x != x) return 0x7fc0;
    return (uint16_t)((u.i + 0x7fff + ((u.i >> 16) & 1)) >> 16);
}

INLINE int is_finite(const float *x, int64_t n) {
    int is = 1;
    for (int64_t i = 0; i < n; i++) is &= isfinite(x[i]) != 0;
    return is;
}

// Add a value's numbers that are not finite to the sums of queries with a weight for it, and set them to 0, because a
// weight of 0 does not hide them. Query q: weights[q * apart], sums[q * step + j * along].
__attribute__((unused)) static void show(float *value, int64_t dim, const float *weights, int64_t apart, float *sums,
                                         int64_t step, int64_t along, int64_t queries) {
    for (int64_t j = 0; j < dim; j++) {
        if (isfinite(value[j])) continue;
        for (int64_t q = 0; q < queries; q++)
            if (weights[q * apart] != 0) sums[q * step + j * along] += weights[q * apart] * value[j];
        value[j] = 0;
    }
}

// Indices of the `count` largest of n numbers >= 0, of equal ones those that come first; in no order.
__attribute__((unused)) static void largest(const float *x, int64_t n, int64_t count, int32_t *found, int32_t *spare) {
    // Such numbers are ordered as their bits are: digit by digit, those with the digits that decide are looked at.
    static const int shifts[] = {20, 10, 0};
    int64_t among = n;
    for (int digit = 0; count && among; digit++) {
        if (digit == 3) {
            for (int64_t i = 0; i < count; i++) *found++ = spare[i];
            return;
        }
        int32_t held[2048] = {0};
        int shift = shifts[digit], mask = digit ? 1023 : 2047;
        for (int64_t i = 0; i < among; i++) {
            union { float f; uint32_t i; } u = {x[digit ? spare[i] : i]};
            held[(u.i >> shift) & mask]++;
        }
        int least = mask;
        int64_t above = 0;
        while (least && above + held[least] < count) above += held[least--];
        int64_t left = 0;
        for (int64_t i = 0; i < among; i++) {
            int32_t at = digit ? spare[i] : (int32_t)i;
            union { float f; uint32_t i; } u = {x[at]};
            int is = (int)((u.i >> shift) & mask);
            if (is > least) *found++ = at;
            else if (is == least) spare[left++] = at;
        }
        count -= above, among = left;
    }
}
