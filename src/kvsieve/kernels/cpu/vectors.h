// Vectors of float32 that are as wide as the processor's.
#pragma once

// Bytes of a vector.
#if defined(__AVX512F__)
#include <immintrin.h>
#define BYTES 64
#elif defined(__AVX__)
#define BYTES 32
#else
#define BYTES 16
#endif
#define LANES (BYTES / 4)

typedef float Floats __attribute__((vector_size(BYTES)));
