/* Vectors of float32, and loads of codes from words.

   A vector is a register with `LANES` tokens of one channel (tokens lie last in memory). A field is masked without a shift, and the
   factor that it is multiplied by is divided by 2^(its first bit), which is exact: one operation fewer for every code.

   `ROWS`, the number of query rows of a KV head, is a constant (`compiled.library_of_rows`), so that sums of all rows stay in
   registers. */

#pragma once

#include <stdint.h>
#include <string.h>

#ifdef __AVX512F__
#define LANES 16
#else
#define LANES 8
#endif
#define VECTORS 4 /* most vectors of a tile: its sums must fit the registers, 32 of 16 numbers, or 16 of 8 */
#define MOST_CHANNELS 512

typedef float floats __attribute__((vector_size(4 * LANES)));
typedef int32_t ints __attribute__((vector_size(4 * LANES)));
typedef int16_t shorts __attribute__((vector_size(2 * LANES)));
typedef uint8_t bytes __attribute__((vector_size(LANES)));
typedef uint16_t halves __attribute__((vector_size(2 * LANES)));

#define INLINE __attribute__((always_inline)) static inline

/* Loads the first `left` numbers of a vector, then zeros; all numbers if `left` is `LANES` or more. */
INLINE floats load(const float *from, int left) {
    floats found = {0};
    if (left >= LANES)
        memcpy(&found, from, sizeof found);
    else
        memcpy(&found, from, 4 * (size_t)left);
    return found;
}

INLINE void store(float *to, floats what, int left) {
    if (left >= LANES)
        memcpy(to, &what, sizeof what);
    else
        memcpy(to, &what, 4 * (size_t)left);
}

/* Codes of a vector of tokens, times 2^(first bit of the field). */
INLINE floats codes_at(const int16_t *words, int32_t mask, int left) {
    shorts found = {0};
    if (left >= LANES)
        memcpy(&found, words, sizeof found);
    else
        memcpy(&found, words, 2 * (size_t)left);
    return __builtin_convertvector(__builtin_convertvector(found, ints) & mask, floats);
}

/* Converts float16 to float32: shifts the bits, then corrects the exponent's bias by a multiplication, which keeps subnormals. */
INLINE floats of_halves(const uint16_t *from, int left) {
    halves found = {0};
    if (left >= LANES)
        memcpy(&found, from, sizeof found);
    else
        memcpy(&found, from, 2 * (size_t)left);
    ints bits = __builtin_convertvector(found, ints);
    floats size = (floats)((bits & 0x7fff) << 13) * 0x1p112f;
    return (floats)((ints)size | (bits & 0x8000) << 16);
}

INLINE float of_half(uint16_t bits) {
    uint32_t moved = (uint32_t)(bits & 0x7fff) << 13;
    float size;
    memcpy(&size, &moved, 4);
    size *= 0x1p112f;
    return bits & 0x8000 ? -size : size;
}

/* e^x for x from -87 to 88, with an error below 2 ulp; smaller x give e^-87. */
INLINE floats exp_of(floats x) {
    ints low = x < -87.0f;
    x = (floats)(((ints)x & ~low) | ((ints)((floats){0} - 87.0f) & low));
    floats shifted = x * 1.44269504f + 12582912.0f; /* 1.5 * 2^23: the sum is whole */
    floats whole = shifted - 12582912.0f;
    floats rest = x - whole * 0.693359375f + whole * 2.12194440e-4f;
    floats sum = rest * 1.9875691500e-4f + 1.3981999507e-3f;
    sum = sum * rest + 8.3334519073e-3f;
    sum = sum * rest + 4.1665795894e-2f;
    sum = sum * rest + 1.6666665459e-1f;
    sum = sum * rest + 5.0000001201e-1f;
    sum = sum * rest * rest + rest + 1;
    return (floats)((ints)sum + (__builtin_convertvector(whole, ints) << 23));
}

INLINE float largest_of(floats x) {
    float most = x[0];
    for (int lane = 1; lane < LANES; lane++) most = x[lane] > most ? x[lane] : most;
    return most;
}

INLINE float sum_of(floats x) {
    float sum = 0;
    for (int lane = 0; lane < LANES; lane++) sum += x[lane];
    return sum;
}
