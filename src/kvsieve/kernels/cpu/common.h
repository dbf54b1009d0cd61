// What the kernels share.
#pragma once
#include <math.h>
#include <stdint.h>

#define INLINE static inline __attribute__((always_inline))

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
